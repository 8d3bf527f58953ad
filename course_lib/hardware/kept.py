"""Launchers that decide once: what a call found out about tensors of a layout is kept for the next such call.

    @kept
    def decode_attention(query, key_cache, value_cache, lengths, *, window=None, ...): ...

The third call with tensors of the same shapes, strides, dtypes and alignment to 16 bytes, and with the same other
arguments, is observed as by `prepared`; from then on such calls allocate a new result and launch. That takes the host
19 µs and not 128 (on one where PyTorch's addition to 16 numbers takes 7), and a caller notices nothing else. What
differs from `prepared`: results are new tensors, any layout may come at any time, and so nothing is refused; a call
that is not known goes the long way.

That is every call in Triton's interpreter, in a CUDA graph, under `torch.compile` or another mode of PyTorch, with
tensors of a class of their own, and one that does more than launch kernels: one that reads lengths to check them, for
instance. While launches are counted, those that are kept are made through Triton's launcher, where they are seen.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from course_lib.hardware.device import interpreting
from course_lib.hardware.prepared import ALIGNMENT, Launch, go_straight, layout, observed, repeat

CALLS_BEFORE = 2  # with tensors of a layout, before one is observed: shapes that come once cost nothing
MOST_PROGRAMS = 256  # of a function; the oldest goes
PLAIN = (torch.Tensor, torch.nn.Parameter)
CONSTANTS = (type(None), bool, int, float, str, torch.dtype)

P = ParamSpec("P")
R = TypeVar("R")
ANEW: list[None] = []  # not empty while calls are to decide anew


@contextlib.contextmanager
def deciding_anew() -> Iterator[None]:
    """Every call in the block goes the long way: to time it, or to test what it decides."""
    ANEW.append(None)
    try:
        yield
    finally:
        ANEW.pop()


class Program:
    """The launches of one call, which is made once to see them.

    Args:
        sources: the tensors among its arguments, each once.

    Attributes:
        why_not: what about the call forbids that its launches are repeated, in words; None if nothing.
        first_result: what it returned.
    """

    def __init__(self, function: Callable, args: tuple, options: dict, sources: list[torch.Tensor]):
        self.first_result, launches, self.why_not = observed(function, args, options)
        parts, self._structure = tree_flatten(self.first_result)
        given = {id(source) for source in sources}
        made = [part for part in parts if isinstance(part, torch.Tensor) and id(part) not in given]
        if self.why_not is None:
            self.why_not = why_not_kept(parts, made, launches)
        if self.why_not is not None:
            return
        self._results = [(part.shape, part.stride(), part.dtype, part.device) for part in made]
        everything = [*sources, *made]
        numbers = {id(one): number for number, one in enumerate(everything)}
        self._parts = [numbers.get(id(part)) for part in parts]  # None for None
        self._one = len(made) == 1 and self.first_result is made[0]
        try:
            self._launches = [Launch(launch, everything) for launch in launches]
        except RuntimeError as error:  # inputs that overlap
            self.why_not = str(error)
            return
        self.why_not = go_straight(self._launches, everything) if not interpreting() else None
        for launch in self._launches:
            launch.let_go()
        self._lock = threading.Lock()  # buffers of the call's own serve one call at a time

    def __call__(self, tensors: list[torch.Tensor], addresses: list[int], stream: int | None):
        for shape, strides, dtype, device in self._results:
            made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            tensors.append(made)
            addresses.append(made.data_ptr())
        with self._lock:
            repeat(self._launches, tensors, addresses, stream)
        if self._one:
            return made
        parts = [None if number is None else tensors[number] for number in self._parts]
        return tree_unflatten(parts, self._structure)


def why_not_kept(parts: list, made: list[torch.Tensor], launches: list) -> str | None:
    """What about a call's result or launches forbids that these are repeated; None if nothing."""
    if not launches:
        return "it launched no kernel"
    if not all(part is None or isinstance(part, torch.Tensor) for part in parts):
        return "it returned something else than tensors"
    whole = [part.numel() * part.element_size() == part.untyped_storage().nbytes() for part in made]
    if not all(whole) or len({part.data_ptr() for part in made}) < len(made):
        return "it returned a view"
    return None


class Kept:
    """The programs of one function, by the layouts of its arguments."""

    def __init__(self, function: Callable):
        self.function = function
        self.programs: dict[tuple, Program | None] = {}
        self._calls: dict[tuple, int] = {}

    def __call__(self, *args, **options):
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return self.function(*args, **options)
        tensors: list[torch.Tensor] = []
        key: list[Any] = [*options]
        if not (describe(args, key, tensors) and describe(options.values(), key, tensors) and tensors):
            return self.function(*args, **options)
        addresses = [tensor.data_ptr() for tensor in tensors]
        key += [address % ALIGNMENT == 0 for address in addresses]
        stream = None
        if not interpreting():
            device = tensors[0].get_device()
            if device != torch.cuda.current_device() or torch.cuda.is_current_stream_capturing():
                return self.function(*args, **options)
            stream = torch._C._cuda_getCurrentRawStream(device)
            key.append(stream)
        found = tuple(key)
        program = self.programs.get(found)
        if program is not None:
            return program(tensors, addresses, stream)
        if found in self.programs:
            return self.function(*args, **options)
        return self._first_calls(found, args, options, tensors)

    def _first_calls(self, key: tuple, args: tuple, options: dict, tensors: list[torch.Tensor]):
        before = self._calls.get(key, 0)
        if before < CALLS_BEFORE:
            if len(self._calls) >= 16 * MOST_PROGRAMS:
                self._calls.clear()
            self._calls[key] = before + 1
            return self.function(*args, **options)
        program = Program(self.function, args, options, tensors)
        if len(self.programs) >= MOST_PROGRAMS:
            self.programs.pop(next(iter(self.programs)))
        self.programs[key] = program if program.why_not is None else None
        result, program.first_result = program.first_result, None
        return result


def describe(values, key: list, tensors: list[torch.Tensor]) -> bool:
    """Add to the key what a launcher can know of these arguments, and the tensors; False where it could know more."""
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            for number, other in enumerate(tensors):
                if other is value:  # given twice
                    key.append(number)
                    break
            else:
                key += layout(value)
                tensors.append(value)
        elif kind in CONSTANTS:
            key += (kind, value)
        elif isinstance(value, tuple):
            key += (kind, len(value))
            if not describe(value, key, tensors):
                return False
        else:
            return False
    return True


def kept(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which launches kernels and does nothing else on the GPU, with what it decides kept by layout.

    What it decides may depend on its tensors' shapes, strides, dtypes, devices and whether they begin at multiples of
    16 bytes, and on its other arguments; not on what tensors hold. No gradient passes through it.
    """
    remembered = Kept(function)

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if interpreting() or ANEW:
            return function(*args, **options)
        return remembered(*args, **options)

    call.kept = remembered  # type: ignore[attr-defined]
    return call
