"""What a plain PyTorch function makes of a case: an oracle, a plain implementation.

Large cases are computed on the GPU where there is one: in float64 on one CPU core they took up to half a minute. Their
results stay there, and are compared there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from course_lib.checker.specification.case import Case, InOut, arguments
from course_lib.checker.specification.nested import leaves, tensors
from course_lib.hardware.device import machine

LARGE = 1 << 18  # elements of a case's tensors, together
GPU = torch.device("cuda")
_on_the_gpu = True
_elements: WeakKeyDictionary[Case, int] = WeakKeyDictionary()
_early: dict[tuple[Case, tuple], Any] = {}
_settings = threading.RLock()
_worked_out: WeakKeyDictionary[Case, dict[tuple, Any]] = WeakKeyDictionary()


def elements(case: Case) -> int:
    """Elements of a case's tensors, those that may be written among them."""
    if case not in _elements:
        written = [leaf.tensor for _, leaf in leaves(case.args) if isinstance(leaf, InOut)]
        _elements[case] = sum(tensor.numel() for tensor in [*tensors(case.args), *written])
    return _elements[case]


def is_large(case: Case) -> bool:
    """Whether a case's tensors hold more than `LARGE` elements, together."""
    return elements(case) > LARGE


def once(case: Case, key: tuple, work: Callable[[], Any]) -> Any:
    """What `work` gives for a case, worked out once for as long as the case lives; a large case's is never kept."""
    if is_large(case):
        return _early.pop((case, key), None) or work()
    known = _worked_out.setdefault(case, {})
    if key not in known:
        known[key] = work()
    return known[key]


def early(case: Case, key: tuple, work: Callable[[], Any], too_late: Callable[[], bool]) -> None:
    """Work something out before `once` asks for it. What is large is kept for one that asks, or until `release`; it is
    thrown away where it comes too late, since nobody may ask or release any more."""
    if is_large(case):
        found = work()
        if not too_late():
            _early[case, key] = found
    else:
        once(case, key, work)


def call(function: Callable, case: Case, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """What a plain function makes of a case: its result, and the arguments it wrote, if the case has such.

    The result of a large case lies on the GPU, where this machine has one with room for it.
    """
    if _on_the_gpu and is_large(case) and machine().tier != "none":
        # No memory left there, or a device that a kernel in this notebook broke: the CPU is slower, not worse.
        with contextlib.suppress(RuntimeError), GPU, _full_float32():
            return _called(function, case, lambda tensor: convert(tensor.to(GPU)))
    return _called(function, case, convert)


def _called(function: Callable, case: Case, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    args, written = arguments(case, convert)
    result = function(*args)
    return (result, {"written": written}) if written else result


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """float32 products in float32, whatever a notebook has set: its tf32 would widen the tolerance."""
    matmul = torch.backends.cuda.matmul
    with _settings:  # of the process, which another thread restores as it found them
        before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Within this, large cases are computed on the CPU like all others."""
    global _on_the_gpu
    before, _on_the_gpu = _on_the_gpu, False
    try:
        yield
    finally:
        _on_the_gpu = before


def release() -> None:
    """Give the GPU's memory back that large cases have used: the answer that is judged next needs it."""
    _early.clear()
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a notebook's broken device has nothing to give
            torch.cuda.empty_cache()


def float64(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float64; integers stay what they are."""
    return tensor.double() if tensor.is_floating_point() else tensor.clone()
