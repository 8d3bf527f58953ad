"""A call of the course's launchers made cheap for the host: what it decides is decided once, and kept.

    step = prepared(decode_attention, query, keys, values, lengths, output=output, workspace=workspace, validate=False)
    step(query, keys, values, lengths)        # the same kernel, with as many checks as other memory needs

A call from Python takes the host 60 to 125 µs: the launcher checks shapes, dtypes and strides, chooses tiles and
splits, and allocates its result; Triton's own launcher then looks at each argument again, to find out which compiled
version of the kernel it needs. None of that changes while shapes, strides and dtypes stay the same. So the call is made
once under observation. What is kept of each launch is the compiled kernel, the grid and the arguments, and which of
them are pointers into the inputs. A later call compares the inputs with the first ones and launches.

A CUDA graph (`course_lib.hardware.graphs`) is cheaper still for many kernels, but its inputs may not move. Here they
may.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from course_lib.hardware.device import interpreting
from course_lib.hardware.graphs import NoLists
from course_lib.hardware.meter.traffic import launches_through

ALONE = "validate=False, and its buffers (output, workspace), where it takes them"  # so that a call launches alone
ALIGNMENT = 16  # bytes: Triton compiles another version for pointers that are no multiple of it


class Place(NamedTuple):
    """Where an argument of a kernel lies: so many bytes behind the beginning of an input."""

    argument: int | str  # its position, or its name
    source: int  # which input
    offset: int  # bytes
    like: Any  # the tensor, or the descriptor of one, that it was


class Launch:
    """A launch of one kernel, with pointers that may change."""

    def __init__(self, kernel, grid, args: tuple, settings: dict, compiled: Any, inputs: Sequence[torch.Tensor]):
        self.kernel, self.grid, self.args, self.settings = kernel, grid, args, settings
        # As a compiled kernel takes them: all by position, constants among them, in the order of its signature.
        signature = inspect.signature(kernel.fn)
        bound = signature.bind(
            *args, **{name: value for name, value in settings.items() if name in signature.parameters}
        )
        bound.apply_defaults()
        self.flat = list(bound.arguments.values())
        self.places = [place for number, value in enumerate(args) if (place := place_of(number, value, inputs))]
        self.places += [place for name, value in settings.items() if (place := place_of(name, value, inputs))]
        found = [
            (number, place) for number, value in enumerate(self.flat) if (place := place_of(number, value, inputs))
        ]
        self.pointers = [(number, place.source, place.offset) for number, place in found
                         if isinstance(place.like, torch.Tensor)]  # fmt: skip
        # A descriptor of the copy engine is one object, whose tensor changes: (number, object, place, whether the
        # tensor is an input as it is).
        self.descriptors = [
            (number, copy.copy(place.like), place, whole(place, inputs)) for number, place in found
            if not isinstance(place.like, torch.Tensor)
        ]  # fmt: skip
        # Others are the call's own, which `args` and `settings` keep alive. An address is cheaper for Triton to take.
        self.flat = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in self.flat]
        if callable(grid):
            grid = grid(dict(bound.arguments))
        self.start: Any = compiled[(*grid, 1, 1)[:3]] if compiled is not None else None

    def slowly(self, inputs: Sequence[torch.Tensor]) -> None:
        """Through Triton's own launcher, with tensors."""
        args, settings = list(self.args), dict(self.settings)
        for place in self.places:
            argument, tensor = place.argument, moved(place, inputs[place.source])
            if isinstance(argument, int):
                args[argument] = tensor
            else:
                settings[argument] = tensor
        self.kernel[self.grid](*args, **settings)

    def quickly(self, inputs: Sequence[torch.Tensor], addresses: list[int], stream: int | None) -> None:
        """Straight to the compiled kernel, with addresses."""
        flat = self.flat
        for number, source, offset in self.pointers:
            flat[number] = addresses[source] + offset
        for number, descriptor, place, is_input in self.descriptors:
            tensor = inputs[place.source]
            descriptor.base = tensor if is_input else moved(place._replace(like=place.like.base), tensor)
            flat[number] = descriptor
        self.start(*flat, stream=stream)


def place_of(argument: int | str, value, inputs: Sequence[torch.Tensor]) -> Place | None:
    """Where a kernel's argument lies in the inputs; None when it is no tensor, or memory of the call's own."""
    tensor = getattr(value, "base", None) if hasattr(value, "block_shape") else value  # of the copy engine's descriptor
    if isinstance(value, (tuple, list)):
        for part in value:
            if place_of(argument, part, inputs) is not None:
                raise RuntimeError(
                    "This call cannot be prepared: a kernel takes an input within a tuple, which is not kept track of."
                )
    if not isinstance(tensor, torch.Tensor):
        return None
    sources = [source for source, given in enumerate(inputs) if tensor is given]
    if not sources:  # a view, if of anything
        begin, end = span(tensor)
        spans = [span(given) for given in inputs]
        sources = [source for source, (first, last) in enumerate(spans) if first <= begin and end <= last]
    if len(sources) > 1:
        raise RuntimeError(
            f"This call cannot be prepared: inputs {sources[0]} and {sources[1]} lie in the same memory, so it cannot "
            "be told which of them a kernel reads. Give it tensors that do not overlap."
        )
    return Place(argument, sources[0], tensor.data_ptr() - inputs[sources[0]].data_ptr(), value) if sources else None


def whole(place: Place, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a descriptor's tensor is an input, and no view of one."""
    return place.offset == 0 and layout(place.like.base) == layout(inputs[place.source])


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one behind its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def moved(place: Place, given: torch.Tensor):
    """What stood at the place, over the memory of another input of the same layout."""
    like = place.like
    if isinstance(like, torch.Tensor):
        if place.offset == 0 and layout(like) == layout(given):
            return given
        view = given.view(like.dtype) if given.element_size() == like.element_size() else given
        first = view.storage_offset() + place.offset // view.element_size()
        return view.as_strided(like.size(), like.stride(), first)
    changed = copy.copy(like)
    changed.base = moved(place._replace(like=like.base), given)
    return changed


class LaunchesAlone(TorchDispatchMode):
    """Lets a call launch kernels, allocate and make views; whatever else it does to tensors would be lost."""

    def __init__(self):
        super().__init__()
        self.launching = False  # the interpreter copies tensors to run a kernel

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        if not (self.launching or allocates(operation) or views(operation, args, made)):
            raise RuntimeError(
                f"This call cannot be prepared: besides launching kernels it does {operation}, which would not be "
                f"repeated. Pass {ALONE}."
            )
        return made


def allocates(operation) -> bool:
    return operation.overloadpacket.__name__.split(".")[-1] in ("empty", "empty_like", "empty_strided", "new_empty")


def views(operation, args: tuple, made) -> bool:
    if operation._schema.is_mutable or not isinstance(made, torch.Tensor):
        return False
    memory = {part.untyped_storage().data_ptr() for part in tree_flatten(args)[0] if isinstance(part, torch.Tensor)}
    return made.untyped_storage().data_ptr() in memory


class Prepared:
    """A call that was made once, to be made again with other tensors of the same layout. Made by `prepared`.

    Attributes:
        reason: why it goes through Triton's own launcher, in a sentence; None when it goes straight to the kernel.
    """

    def __init__(self, function: Callable, inputs: tuple, fixed: dict):
        self.name = getattr(function, "__name__", "the function")
        self.reason: str | None = None
        function(*inputs, **fixed)  # compiles, tunes, and allocates what is kept between calls
        self._launches: list[Launch] = []
        watch, no_lists = LaunchesAlone(), NoLists(f"This call cannot be prepared (pass {ALONE})")

        def around(kernel, grid, args, settings, start):
            watch.launching = no_lists.asleep = True
            try:
                compiled = start()
            finally:
                watch.launching = no_lists.asleep = False
            self._launches.append(Launch(kernel, grid, args, settings, compiled, inputs))
            return compiled

        with torch.no_grad(), launches_through(around), no_lists, watch:
            self.result = function(*inputs, **fixed)
        if not self._launches:
            raise RuntimeError(f"{self.name} launched no Triton kernel, so there is nothing to prepare.")
        self._layouts = [layout(tensor) for tensor in inputs]
        self._aligned = [tensor.data_ptr() % ALIGNMENT == 0 for tensor in inputs]
        self._stream = None if interpreting() else torch.cuda.current_stream(inputs[0].device)
        self._handle = None if self._stream is None else self._stream.cuda_stream
        self._index = 0 if self._stream is None else self._stream.device_index
        if interpreting():
            self.reason = "Kernels run in Triton's interpreter here, which compiles nothing that could be kept."
        else:
            self._prove(inputs)

    def __call__(self, *inputs: torch.Tensor):
        """Launch with these inputs.

        inputs: as many as were prepared, each of the shape, strides, dtype and device that it had, and beginning at a
            multiple of 16 bytes if it did. They may lie anywhere.

        Returns the very result of the call that was prepared, with new contents. Raises a ValueError that names the
        input, or the stream, when it is another one; nothing is launched then.
        """
        if len(inputs) != len(self._layouts):
            raise ValueError(f"{len(inputs)} tensors were given; {self.name} was prepared for {len(self._layouts)}.")
        addresses = []
        for number, tensor in enumerate(inputs):
            shape, strides, dtype, device = self._layouts[number]
            address = tensor.data_ptr()
            if (
                tensor.shape != shape
                or tensor.stride() != strides
                or tensor.dtype != dtype
                or tensor.device != device
                or address % ALIGNMENT
                and self._aligned[number]
            ):
                self._refuse(number, tensor)
            addresses.append(address)
        # The handle alone: a stream as an object takes the host some µs to make.
        if self._stream is not None and torch._C._cuda_getCurrentRawStream(self._index) != self._handle:
            raise ValueError(
                f"the current stream is {torch.cuda.current_stream()}; {self.name} was prepared in {self._stream}, "
                "and its buffers serve one stream. Prepare another one there."
            )
        if self.reason is None:
            for launch in self._launches:
                launch.quickly(inputs, addresses, self._handle)
        else:
            for launch in self._launches:
                launch.slowly(inputs)
        return self.result

    def _refuse(self, number: int, tensor: torch.Tensor) -> None:
        for what, given, wanted in zip(("shape", "strides", "dtype", "device"), layout(tensor), self._layouts[number]):
            if given != wanted:
                given, wanted = (tuple(one) if isinstance(one, torch.Size) else one for one in (given, wanted))
                raise ValueError(
                    f"input {number} has {what} {given}; {self.name} was prepared for {wanted}. Prepare another one."
                )
        raise ValueError(
            f"input {number} begins {tensor.data_ptr() % ALIGNMENT} bytes after a multiple of {ALIGNMENT}; {self.name} "
            "was prepared for one that does not. Prepare another one, or clone the tensor."
        )

    def _prove(self, inputs: tuple) -> None:
        """Whether the short way gives the very bits of the usual one; where it does not, the usual one is taken."""
        results = [part for part in tree_flatten(self.result)[0] if isinstance(part, torch.Tensor)]
        wanted = [result.clone() for result in results]
        for result in results:
            result.fill_(-7.0)
        try:
            self(*inputs)
            right = all(map(same_bits, results, wanted))
            self.reason = None if right else "The kernel gave another result when it was called directly."
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            self.reason = f"This Triton's compiled kernels are called in another way: {type(error).__name__}: {error}"
        if self.reason is not None:
            self(*inputs)


def layout(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def prepared(function: Callable, *inputs: torch.Tensor, **fixed) -> Prepared:
    """The call `function(*inputs, **fixed)`, with all that it decides decided now.

    Args:
        function: a launcher of Triton kernels, such as `decode_attention`, `append_to_pages` or `attention`. It may
            launch several kernels, allocate and make views, and nothing else. No gradients are kept.
        inputs: tensors on one device. Later calls may give others of the same layout.
        fixed: its other arguments, the same at all calls: `output` and `workspace`, for instance.

    Returns an object to be called with as many tensors; it keeps the first ones alive. Results always lie in the same
    memory, as do buffers of the call's own, so calls belong to one stream, one after another. The function is called
    twice, and on a GPU what was prepared once, to see that it gives the same bits. Raises a RuntimeError, which says
    why, for a function that does more than launch kernels, and the function's own errors.
    """
    for number, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"input {number} is a {type(tensor).__name__}; pass what is no tensor by its name.")
    return Prepared(function, inputs, fixed)
