"""A call of the course's launchers made cheap for the host: what it decides is decided once, and kept.

    step = prepared(decode_attention, query, keys, values, lengths, output=output, workspace=workspace, validate=False)
    step(query, keys, values, lengths)        # the same kernel, with the checks alone that new addresses need

A call that decides everything anew takes the host 60 to 130 µs: the launcher checks shapes, dtypes and strides, chooses
tiles and splits, and allocates its result; Triton's own launcher then looks at each argument again, to find out which
compiled version of the kernel it needs. None of that changes while shapes, strides and dtypes stay the same. So the
call is made once under observation. What is kept of each launch is what the CUDA driver was given (`driver_launch`),
and which of its pointers lie in the inputs. A later call compares the inputs with the first ones and launches: 9 µs,
on a host that needs 7 for PyTorch's smallest addition.

The course's attention and its appends do this by themselves (`kept`), with a new result at each call. Here a step's
buffers stay, too.

A CUDA graph (`course_lib.hardware.graphs`) is cheaper still for many kernels, but its inputs may not move. Here they
may.
"""

import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from course_lib.hardware.device import interpreting
from course_lib.hardware.driver_launch import DriverLaunch
from course_lib.hardware.gpu_probe import DriverError
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
    """A launch of one kernel, with pointers that may change.

    sources: the tensors that may be others at a later call.
    """

    def __init__(self, seen: "Seen", sources: Sequence[torch.Tensor]):
        self.kernel, self.grid, args, settings, self._compiled, self._ways = seen
        self.args, self.settings = args, settings
        named = [*enumerate(args), *settings.items()]
        self.places = [place for name, value in named if (place := place_of(name, value, sources))]
        self.straight: DriverLaunch | None = None  # when the driver was told of it

    def go_straight(self, sources: Sequence[torch.Tensor]) -> None:
        """From now on straight to the driver; a DriverError where that is not possible."""
        if getattr(getattr(self._compiled, "metadata", None), "global_scratch_size", 0):
            raise DriverError("the kernel takes memory of its own at each launch")
        straight = DriverLaunch(
            lambda: self.slowly(sources),
            dependent=bool(self.settings.get("launch_pdl")),
            cooperative=bool(self.settings.get("launch_cooperative_grid")),
        )
        told = {moved_address(place, sources): (place.source, place.offset) for place in self.places}
        signature = inspect.signature(self.kernel.fn)
        given = {name: value for name, value in self.settings.items() if name in signature.parameters}
        arguments = signature.bind(*self.args, **given).arguments
        found = {id(place.like): (place.source, place.offset) for place in self.places}
        maps = [found.get(id(value)) for value in arguments.values() if hasattr(value, "block_shape")]
        straight.follow(told, maps)
        self.straight = straight

    def let_go(self) -> None:
        """Keep the sources' tensors no longer, only how each lay."""
        args, settings = list(self.args), dict(self.settings)
        for place in self.places:
            if isinstance(place.argument, int):
                args[place.argument] = None
            else:
                settings[place.argument] = None
        self.args, self.settings = tuple(args), settings
        self.places = [place._replace(like=without_memory(place.like)) for place in self.places]

    def watched(self) -> bool:
        """Whether somebody counts launches, who would not see one that goes straight to the driver."""
        return ways(self.kernel, self._compiled) != self._ways

    def slowly(self, sources: Sequence[torch.Tensor]) -> None:
        """Through Triton's own launcher, with tensors."""
        args, settings = list(self.args), dict(self.settings)
        for place in self.places:
            argument, tensor = place.argument, moved(place, sources[place.source])
            if isinstance(argument, int):
                args[argument] = tensor
            else:
                settings[argument] = tensor
        self.kernel[self.grid](*args, **settings)


def without_memory(like):
    """A tensor, or the descriptor of one, that lies as this does and holds nothing."""
    if isinstance(like, torch.Tensor):
        return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
    changed = copy.copy(like)
    changed.base = without_memory(like.base)
    return changed


def moved_address(place: Place, sources: Sequence[torch.Tensor]) -> int:
    return sources[place.source].data_ptr() + place.offset


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
        # By the bytes of its memory, whatever the given tensor takes them for: four codes may be a word.
        begin = given.storage_offset() * given.element_size() + place.offset
        found = torch.empty(0, dtype=like.dtype, device=given.device)
        return found.set_(given.untyped_storage(), begin // like.element_size(), like.size(), like.stride())
    changed = copy.copy(like)
    changed.base = moved(place._replace(like=like.base), given)
    return changed


class LaunchesAlone(TorchDispatchMode):
    """Sees whether a call does more to tensors than to launch kernels, allocate, and make views: that would be lost."""

    def __init__(self):
        super().__init__()
        self.launching = False  # the interpreter copies tensors to run a kernel
        self.other: str | None = None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        if not (self.launching or self.other or allocates(operation) or views(operation, args, made)):
            self.other = f"besides launching kernels it does {operation}, which would not be repeated"
        return made


class Lists(NoLists):
    """Sees whether a call turns a tensor into a list or an array, and lets it."""

    def __init__(self):
        super().__init__("")
        self.other: str | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        try:
            return super().__torch_function__(function, types, args, kwargs)
        except RuntimeError as error:
            if self.other or self.asleep:
                raise
            self.other = str(error).removeprefix(": ").removesuffix(".")
            return function(*args, **(kwargs or {}))


def allocates(operation) -> bool:
    return operation.overloadpacket.__name__.split(".")[-1] in ("empty", "empty_like", "empty_strided", "new_empty")


def views(operation, args: tuple, made) -> bool:
    if operation._schema.is_mutable or not isinstance(made, torch.Tensor):
        return False
    memory = {part.untyped_storage().data_ptr() for part in tree_flatten(args)[0] if isinstance(part, torch.Tensor)}
    return made.untyped_storage().data_ptr() in memory


OBSERVING = threading.Lock()  # one at a time: what sees launches is everybody's


class Seen(NamedTuple):
    """A launch as it was made: the compiled kernel is None in the interpreter; ways: see the function."""

    kernel: Any
    grid: Any
    args: tuple
    settings: dict
    compiled: Any
    ways: tuple


class Observed(NamedTuple):
    """What a call did, while it was watched."""

    result: Any
    launches: list["Seen"]
    other: str | None  # what it did besides, which a repetition of the launches would not do


def observed(function: Callable, args: Sequence, options: Mapping) -> Observed:
    """Make the call, and tell what it did."""
    launches: list[Seen] = []
    alone, lists, thread = LaunchesAlone(), Lists(), threading.get_ident()

    def around(kernel, grid, args, settings, start):
        if threading.get_ident() != thread:
            return start()
        alone.launching = lists.asleep = True
        try:
            compiled = start()
        finally:
            alone.launching = lists.asleep = False
        launches.append(Seen(kernel, grid, args, settings, compiled, ()))
        return compiled

    with OBSERVING:
        with torch.no_grad(), launches_through(around), lists, alone:
            result = function(*args, **options)
        seen = [launch._replace(ways=ways(launch.kernel, launch.compiled)) for launch in launches]
    return Observed(result, seen, lists.other or alone.other)


def ways(kernel, compiled) -> tuple:
    """What a kernel and its compiled form are launched through; others stand there while somebody counts launches."""
    return type(kernel).run, getattr(type(compiled), "launch_metadata", None)


class Prepared:
    """A call that was made once, to be made again with other tensors of the same layout. Made by `prepared`.

    Attributes:
        reason: why it goes through Triton's own launcher, in a sentence; None when it goes straight to the driver.
    """

    def __init__(self, function: Callable, inputs: tuple, fixed: dict):
        self.name = getattr(function, "__name__", "the function")
        function(*inputs, **fixed)  # compiles, tunes, and allocates what is kept between calls
        self.result, launches, other = observed(function, inputs, fixed)
        if other:
            raise RuntimeError(f"This call cannot be prepared: {other}. Pass {ALONE}.")
        if not launches:
            raise RuntimeError(f"{self.name} launched no Triton kernel, so there is nothing to prepare.")
        self._launches = [Launch(launch, inputs) for launch in launches]
        self._layouts = [layout(tensor) for tensor in inputs]
        self._aligned = [tensor.data_ptr() % ALIGNMENT == 0 for tensor in inputs]
        self._stream = None if interpreting() else torch.cuda.current_stream(inputs[0].device)
        self._handle = None if self._stream is None else self._stream.cuda_stream
        self._index = 0 if self._stream is None else self._stream.device_index
        self.reason = go_straight(self._launches, inputs)

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
        repeat(self._launches, inputs, addresses, self._handle)
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


def go_straight(launches: Sequence[Launch], sources: Sequence[torch.Tensor]) -> str | None:
    """Have all launches go to the driver from now on; where one cannot, none does, and the reason is returned."""
    if interpreting():
        return "Kernels run in Triton's interpreter here, which compiles nothing that could be kept."
    try:
        for launch in launches:
            launch.go_straight(sources)
    except (DriverError, RuntimeError) as error:  # of the driver, or of Triton and PyTorch while it is recorded
        for launch in launches:
            launch.straight = None
        return f"The launch could not be recorded: {error}."
    return None


def repeat(launches: Sequence[Launch], sources: Sequence[torch.Tensor], addresses: list[int], stream: int | None):
    """Make the launches again, with these tensors at these addresses."""
    watched = launches[0].watched()
    for launch in launches:
        if stream is None or launch.straight is None or watched:
            launch.slowly(sources)
        else:
            launch.straight.start(addresses, stream)


def layout(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def prepared(function: Callable, *inputs: torch.Tensor, **fixed) -> Prepared:
    """The call `function(*inputs, **fixed)`, with all that it decides decided now.

    Args:
        function: a launcher of Triton kernels, such as `decode_attention`, `append_to_pages` or `attention`. It may
            launch several kernels, allocate and make views, and nothing else. No gradients are kept.
        inputs: tensors on one device. Later calls may give others of the same layout.
        fixed: its other arguments, the same at all calls: `output` and `workspace`, for instance.

    Returns an object to be called with as many tensors; it keeps the first ones alive. Results always lie in the same
    memory, as do buffers of the call's own, so calls belong to one stream, one after another. The function is called
    twice. Raises a RuntimeError, which says why, for a function that does more than launch kernels, and the function's
    own errors.
    """
    for number, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"input {number} is a {type(tensor).__name__}; pass what is no tensor by its name.")
    return Prepared(function, inputs, fixed)
