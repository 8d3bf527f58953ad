"""Which tensors PyTorch gives new memory while the meter runs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .results import Allocation

MAX_ALLOCATIONS = 256


class Allocations(TorchDispatchMode):
    """Notes each tensor that PyTorch gives new memory, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = False
        self.noted: list[Allocation] = []
        self._tensors: dict[int, weakref.ref] = {}  # by address of the storage

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # True would import torch._dynamo on first use, a second of start-up
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:  # or `torch.compile` would compile nothing while the meter is on
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not self._paused:
            given = {tensor.untyped_storage().data_ptr() for tensor in _tensors_in((args, kwargs))}
            for tensor in _tensors_in(result):
                self._note(tensor, given)
        return result

    def _note(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        address, count = storage.data_ptr(), storage.nbytes()
        if count == 0 or address in given:  # empty, or a view or an update of an operand
            return
        self._tensors[address] = weakref.ref(tensor)
        if len(self.noted) < MAX_ALLOCATIONS:
            self.noted.append(Allocation(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), count))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Notes nothing for a while: the interpreter makes tensors of its own, which nobody asked for."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def alive(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(number, tensor) of those that still exist."""
        for index, reference in enumerate(list(self._tensors.values())):
            tensor = reference()
            if tensor is not None:
                yield index, tensor


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.device.type != "meta":
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
