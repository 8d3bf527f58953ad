"""What is observed of an answer while it runs: PyTorch's operations, and memory that nobody wrote."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator

import torch
from guards import POISON, fill
from torch.utils._python_dispatch import TorchDispatchMode

CHOOSE = ("index", "index_select", "gather", "take", "embedding")  # operations that read no more than they return


class Observer(TorchDispatchMode):
    """Records PyTorch operations and poisons memory that is handed out uninitialised.

    While it is on, `torch.compile` compiles nothing: every operation of the answer is seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: collections.Counter[str] = collections.Counter()
        self.largest = 0
        self.largest_results: dict[str, int] = {}  # by operation, in elements
        self._read: collections.Counter[int] = collections.Counter()  # elements, by the memory that they lie in

    def read_of(self, tensor: torch.Tensor) -> int:
        """Elements that operations read of a tensor's memory, to copy them or to compute; views read nothing."""
        return self._read[_memory(tensor)]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # True would import torch._dynamo on first use, a second of start-up
        return False

    def __torch_dispatch__(self, function, types_, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.operations[name] += 1
        if isinstance(result, torch.Tensor) and result.layout == torch.strided:
            if "empty" in name and result.numel():
                length = result.untyped_storage().nbytes() // result.element_size()
                fill(torch.as_strided(result, (length,), (1,), 0), POISON)
            if function.is_view is False and not name.endswith("_"):
                self.largest = max(self.largest, result.numel())
            self.largest_results[name] = max(self.largest_results.get(name, 0), result.numel())
        if not name.endswith("_like") and not name.startswith("new_"):  # these look at a shape alone
            self._note_what_was_read(name, result, (*args, *(kwargs or {}).values()))
        return result

    def _note_what_was_read(self, name: str, result, given) -> None:
        """Count the elements of what was given, but for what shares its memory with the result: a view, or a target."""
        lists = [value if isinstance(value, (list, tuple)) else (value,) for value in given]
        made = {_memory(tensor) for tensor in _strided(result if isinstance(result, (list, tuple)) else (result,))}
        for tensor in _strided(value for values in lists for value in values):
            if _memory(tensor) not in made:
                chosen = name in CHOOSE and isinstance(result, torch.Tensor)
                self._read[_memory(tensor)] += min(tensor.numel(), result.numel()) if chosen else tensor.numel()


def _strided(values) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.layout == torch.strided]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class ObserverOutsideGraphs(Observer):
    """Off while `torch.compile` compiles. Of compiled code it sees the operations that call PyTorch, such as "mm"."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, function, types_, args=(), kwargs=None):  # again, for `_should_skip_dynamo` to find it
        return super().__torch_dispatch__(function, types_, args, kwargs)


@contextlib.contextmanager
def in_threads_too(observing: Observer) -> Iterator[None]:
    """A dispatch mode holds for the thread that enters it alone; here every thread that is started enters it."""
    run = threading.Thread.run

    def observed(thread):
        with observing:
            run(thread)

    threading.Thread.run = observed  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
