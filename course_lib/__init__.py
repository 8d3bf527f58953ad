"""Attention, from the memory hierarchy to Flash-Decoding: the library behind the course's notebooks.

Importing it decides, before Triton is imported, whether kernels run on the GPU or in Triton's interpreter, and in a
notebook begins to warm up the worker that checks run in.
"""
import os as _os

from course_lib.hardware.device import prepare_triton as _prepare_triton

_prepare_triton()

from course_lib.checker import check, hint, progress, solution  # noqa: E402
from course_lib.hardware.device import default_device, interpreting, machine  # noqa: E402

__all__ = ["check", "default_device", "hint", "interpreting", "machine", "progress", "solution"]


def _warm_up_in_a_notebook() -> None:
    from course_lib.checker.verdict import _shell
    from course_lib.checker.worker import start_in_background

    if _shell() is not None and not _os.environ.get("COURSE_NO_WARM_UP"):
        start_in_background(interpreted=interpreting())


_warm_up_in_a_notebook()
