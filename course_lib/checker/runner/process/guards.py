"""A case's arguments as the answer gets them: on the device, between poisoned margins, and remembered."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import nested
import sparse
import torch
import wire
from torch.utils._python_dispatch import _disable_current_modes

GUARD_BYTES = 16 << 10


@dataclass(frozen=True)
class Pattern:
    """A NaN payload that arithmetic does not make by itself, for each floating-point type."""

    float16: int
    bfloat16: int
    float32: int
    float64: int

    def bits(self, tensor):
        """The payload for a tensor's dtype and the integer dtype to see it in; (None, None) for other dtypes."""
        name = str(tensor.dtype).removeprefix("torch.")
        integers = {"float16": torch.int16, "bfloat16": torch.int16, "float32": torch.int32, "float64": torch.int64}
        return (getattr(self, name), integers[name]) if name in integers else (None, None)


POISON = Pattern(0x7E5D, 0x7FDD, 0x7FC5_DEAD, 0x7FF8_DEAD_DEAD_DEAD)  # memory that was never written
# What a load leaves undefined. Arithmetic hands a NaN's payload on; the upper bits of float32's are float16's, so that
# a result that was rounded still shows it.
UNDEFINED = Pattern(0x7E3A, 0x7FE8, 0x7FC7_4AFE, 0x7FF8_FEED_FEED_FEED)
GUARD = Pattern(0x7E6B, 0x7FEB, 0x7FC6_BEEF, 0x7FF8_BEEF_BEEF_BEEF)  # the bands around every input


def fill(tensor, pattern: Pattern) -> None:
    """Fill a contiguous tensor with the pattern; integers get 0x5A bytes, booleans True."""
    payload, integer = pattern.bits(tensor)
    if payload is not None:
        tensor.view(integer).fill_(payload)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif not tensor.is_complex():
        tensor.view(torch.uint8).fill_(0x5A)


def count_pattern(tensor, pattern: Pattern) -> int:
    """Elements of the tensor that hold the pattern."""
    payload, integer = pattern.bits(tensor)
    if payload is None or not tensor.numel():
        return 0
    return int((tensor.contiguous().view(integer) == payload).sum())


def _layout(tensor):
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class GuardedTensor:
    """An input in the middle of a larger buffer whose margins are poisoned."""

    def __init__(self, name: str, source, device):
        self.name = name
        extent = 1 + sum((n - 1) * s for n, s in zip(source.shape, source.stride())) if source.numel() else 0
        margin = GUARD_BYTES // source.element_size()
        self.margin, self.extent = margin, extent
        self.buffer = torch.empty(margin + extent + margin, dtype=source.dtype, device=device)
        self.tensor = torch.as_strided(self.buffer, source.shape, source.stride(), margin)
        self.renew(source)

    def renew(self, source) -> None:
        """The values of another tensor of this shape and these strides, in the same memory."""
        fill(self.buffer, GUARD)
        if self.extent:
            inner = torch.as_strided(source, (self.extent,), (1,), source.storage_offset())
            self.buffer[self.margin : self.margin + self.extent].copy_(inner)
        self.original = self.buffer.clone()
        seen = torch.as_strided(self.buffer, source.shape, source.stride(), self.margin)
        if _layout(self.tensor) != _layout(seen):  # an answer may have turned it round
            self.tensor = seen
        self.layout = _layout(self.tensor)

    @property
    def first(self):
        """The tensor as it came, whatever was written since."""
        _, shape, strides = self.layout
        return torch.as_strided(self.original, shape, strides, self.margin)

    def _changed(self, part) -> bool:
        if not self.buffer[part].numel():
            return False
        return not torch.equal(self.buffer[part].view(torch.uint8), self.original[part].view(torch.uint8))

    def margin_written(self) -> str | None:
        before, after = slice(0, self.margin), slice(self.margin + self.extent, None)
        for part, where in ((before, "before the start"), (after, "past the end")):
            if self._changed(part):
                return f"the memory {where} of `{self.name}` was written"
        return None

    def modified(self) -> bool:
        """Whether an element was, or the tensor itself: turned round, resized, made one of other memory."""
        return _layout(self.tensor) != self.layout or self._changed(slice(self.margin, self.margin + self.extent))

    def restore(self) -> None:
        self.buffer.copy_(self.original)


class FarTensor:
    """An input whose elements lie gigabytes apart: without margins, and what is in the gaps is not looked at."""

    def __init__(self, name: str, source, device):
        self.name, self.tensor = name, source
        self.original, self.layout = source.clone(), _layout(source)

    def renew(self, source) -> None:
        """The values of another tensor of this shape, in the same memory."""
        self._laid_out.copy_(source)
        self.original = source.clone()

    @property
    def _laid_out(self):
        _, shape, strides = self.layout
        return self.tensor.as_strided(shape, strides)

    @property
    def first(self):
        """The tensor as it came, whatever was written since."""
        return self.original

    def margin_written(self) -> str | None:
        return None

    def modified(self) -> bool:
        """Whether an element was, or the tensor itself."""
        if _layout(self.tensor) != self.layout:
            return True
        # Flat and copied: a last dimension of length 1 may have any stride, and cannot be seen as bytes.
        now, before = (
            tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)
            for tensor in (self._laid_out, self.original)
        )
        return not torch.equal(now, before)

    def restore(self) -> None:
        self._laid_out.copy_(self.original)


class Arguments:
    """A case's arguments, moved to the device, guarded, and remembered.

    Args:
        packed: the arguments as they were sent.
        names: of the parameters.
        device: where tensors go.
        memory: earlier arguments of the same shapes and strides, whose tensors are taken for these.
    """

    def __init__(self, packed, names, device, memory=None):
        self.device, self.guards, self.writable = device, [], {}
        self._memory = iter(memory.guards if memory is not None else ())
        self._names = [_name(names, place) for place in range(len(packed))]
        self.values = [self._place(value, name) for value, name in zip(packed, self._names)]
        self._contents = [repr(_contents(value)) for value in self.values]

    def changed_containers(self):
        """The names of lists and dicts that hold something else than they did."""
        now = [repr(_contents(value)) for value in self.values]
        return [name for name, before, after in zip(self._names, self._contents, now) if before != after]

    def _place(self, value, name):
        in_out = isinstance(value, dict) and set(value) == {"in_out"}
        if not in_out and not isinstance(value, torch.Tensor):
            return nested.rebuilt(value, self._place, name)
        source, guard = value["in_out"] if in_out else value, next(self._memory, None)
        if guard is None:
            kind = FarTensor if sparse.is_far(source) else GuardedTensor
            guard = kind(name, source, self.device)
        else:
            guard.renew(source)
        self.guards.append(guard)
        if in_out:
            self.writable[name] = guard
        return guard.tensor


def parameter_names(function) -> list[str]:
    """The names of a function's positional parameters, where it is written in Python."""
    code = getattr(function, "__code__", None)
    return list(code.co_varnames[: code.co_argcount]) if code is not None else []


def memories(value) -> set[int]:
    """Where the memory begins in which a value's tensors lie; views share it."""
    found = (leaf for leaf in nested.leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)
    return {tensor.untyped_storage().data_ptr() for tensor in found if tensor.numel()}


def watched(function, changed: list[str], handed_back: list[str]):
    """A function for a driver to call; the names of arguments that it changes are added to `changed`, and those of
    arguments in whose memory its result lies to `handed_back`.

    A driver may make the arguments itself, or hand out copies, which no guard remembers. A class is handed out as it
    is.
    """
    if isinstance(function, type):
        return function
    names = parameter_names(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        values = [(_name(names, place), value) for place, value in enumerate(args)] + list(kwargs.items())
        before = [_snapshot(value) for _, value in values]
        result = function(*args, **kwargs)
        changed.extend(name for (name, value), was in zip(values, before) if _snapshot(value) != was)
        with _disable_current_modes():
            returned = memories(result)
            handed_back.extend(name for name, value in values if memories(value) & returned)
        return result

    return call


def _name(names, place):
    return names[place] if place < len(names) else f"argument {place + 1}"


def _snapshot(value):
    """A value's containers and the bytes of its tensors, to compare with later ones; no tensor is made that stays."""
    with _disable_current_modes():  # what is observed are the answer's operations
        found = [leaf for leaf in nested.leaves(value) if isinstance(leaf, torch.Tensor)]
        return repr(_contents(value)), [bytes(wire.as_bytes(tensor).cpu().numpy()) for tensor in found]


def _contents(value):
    """A value with numbers for its tensors, whose contents are guarded by themselves."""
    if isinstance(value, torch.Tensor):
        return id(value)
    return nested.rebuilt(value, lambda item, name: _contents(item))
