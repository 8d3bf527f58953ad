"""Attention, from the memory hierarchy to Flash-Decoding: the library behind the course's notebooks.

Importing it decides, before Triton is imported, whether kernels run on the GPU or in Triton's interpreter, and in a
notebook begins to warm up the worker that checks run in. The names below are looked up when first used, so that
`python -m course_lib --help` need not wait for PyTorch.
"""

import os as _os
import sys as _sys
import warnings as _warnings
from importlib import import_module as _import_module

if _sys.version_info < (3, 10, 10):  # older ones must be able to read as far as this sentence
    _sentence = f"This is Python {'.'.join(map(str, _sys.version_info[:3]))} ({_sys.executable}), and the course needs "
    _sentence += "Python 3.10.10 to 3.13: `make lab` looks for one of them."
    if _sys.argv[:1] == ["-m"]:  # of a command the sentence is all that is printed
        _sys.exit(_sentence)
    raise ImportError(_sentence)

from course_lib.hardware.device import prepare_triton as _prepare_triton

_prepare_triton()

_HOMES = {
    "attempts": "course_lib.checker",
    "check": "course_lib.checker",
    "default_device": "course_lib.hardware.device",
    "hint": "course_lib.checker",
    "interpreting": "course_lib.hardware.device",
    "machine": "course_lib.hardware.device",
    "measured": "course_lib.checker",
    "predict": "course_lib.checker",
    "profile": "course_lib.hardware.profile",
    "progress": "course_lib.checker",
    "self_check": "course_lib.checker",
    "solution": "course_lib.checker",
    "submit": "course_lib.grading",
    "watch": "course_lib.figures.watch",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(_import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _prepare_a_notebook() -> None:
    if "IPython" not in _sys.modules:
        return
    from course_lib.hardware.doctor.report import kernel_refusal, launcher_warning

    if refusal := kernel_refusal():
        raise ImportError(refusal)
    if warning := launcher_warning():
        _warnings.warn(warning, RuntimeWarning, stacklevel=2)
    if _os.environ.get("COURSE_NO_WARM_UP"):
        return
    from course_lib.checker.judge.verdict import _shell
    from course_lib.checker.runner.worker import start_in_background
    from course_lib.hardware.device import interpreting

    if _shell() is not None:
        start_in_background(interpreted=interpreting())


_prepare_a_notebook()
