"""A kernel's launch, kept as the CUDA driver takes it: to be made again for a few µs, with pointers that have changed.

    launch = DriverLaunch(lambda: kernel[grid](x, output, length, BLOCK=256))
    launch.follow({x.data_ptr(): (0, 0), output.data_ptr(): (1, 0)}, descriptors=[])
    launch.start([other.data_ptr(), result.data_ptr()], stream.cuda_stream)

A launch of Triton's goes through some hundred lines of Python, which find the compiled kernel, build its parameters,
and hand them to the driver. What the driver gets is little: a function, a grid, and the bytes of each parameter. To get
them back, record the launch in a CUDA graph and query the graph's only node. So the launch is recorded, not made; its
bytes are kept; and later launches go to the driver with these bytes, but for addresses.

A parameter of 8 bytes whose number is the address of a tensor is a pointer to it. One of 128 bytes is what the copy
engine knows of a tensor (a tensor map), in which the driver itself replaces the address. Everything here is the
driver's documented interface (CUDA 12.4 and later), and none of it Triton's.
Source: CUDA Driver API, sections Stream Management, Graph Management, Tensor Map Object Management, Execution Control.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from course_lib.hardware.gpu_probe import DriverError, call, load_driver

RELAXED_CAPTURE = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: what other threads do meanwhile is theirs
KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
NO_SUCH_PARAMETER = 1  # CUDA_ERROR_INVALID_VALUE: there are no more
COOPERATIVE, PROGRAMMATIC = 2, 6  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION
POINTER_BYTES, TENSOR_MAP_BYTES = 8, 128
GRID_AND_BLOCK = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *[(name, ctypes.c_uint) for name in GRID_AND_BLOCK],
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        *[(name, ctypes.c_void_p) for name in ("extra", "kernel", "context")],
    ]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, of those whose value is a number."""

    _fields_ = [("id", ctypes.c_uint), ("_gap", ctypes.c_uint), ("value", ctypes.c_int), ("_rest", ctypes.c_byte * 60)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *[(name, ctypes.c_uint) for name in GRID_AND_BLOCK],
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@functools.cache
def driver():
    """The CUDA driver's library, with the types of what is called at every launch."""
    library = load_driver()
    if library is None:
        raise DriverError("this machine has no CUDA driver")
    for name in ("cuFuncGetParamInfo", "cuLaunchKernelEx", "cuTensorMapReplaceAddress"):
        if not hasattr(library, name):
            raise DriverError(f"this CUDA driver has no {name}; it came with CUDA 12.4")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    library.cuTensorMapReplaceAddress.argtypes = [ctypes.c_void_p] * 2
    return library


class DriverLaunch:
    """One kernel's launch, recorded from a function that makes it and does nothing else on the GPU.

    Args:
        make: makes the launch. It is called once, while a stream of its own is being recorded: nothing runs.
        dependent, cooperative: whether it is launched so that it may begin before the kernel before it ends
            (`launch_pdl`), or all of its programs at once (`launch_cooperative_grid`).

    Raises a DriverError where the launch is no single kernel, or the driver cannot be asked for it.
    """

    def __init__(self, make: Callable[[], object], *, dependent: bool = False, cooperative: bool = False):
        self._driver = driver()
        graph = recorded(make)
        try:
            self._take(only_node(graph), dependent, cooperative)
        finally:
            call(self._driver, "cuGraphDestroy", graph)
        self._pointers: list[tuple] = []  # (the parameter, which source, bytes behind its beginning)
        self._maps: list[list] = []  # [address of the map, the tensor's, which source, bytes behind its beginning]

    def _take(self, node: ctypes.c_void_p, dependent: bool, cooperative: bool) -> None:
        given = KernelNode()
        call(self._driver, "cuGraphKernelNodeGetParams_v2", node, ctypes.byref(given))
        if not given.function:
            raise DriverError("the kernel was launched by another handle than a function")
        sizes = parameter_sizes(given.function)
        self.values = [ctypes.create_string_buffer(size + 64) for size in sizes]  # and room to begin at 64 bytes
        places = [(address := ctypes.addressof(value)) + -address % 64 for value in self.values]
        for place, size, source in zip(places, sizes, given.parameters[: len(sizes)]):
            ctypes.memmove(place, source, size)
        self.places = list(zip(places, sizes))
        self._parameters = (ctypes.c_void_p * max(1, len(places)))(*places)
        wanted = {PROGRAMMATIC: dependent, COOPERATIVE: cooperative}
        asked = [Attribute(id=number, value=1) for number, is_wanted in wanted.items() if is_wanted]
        self._attributes = (Attribute * max(1, len(asked)))(*asked)
        shape = [getattr(given, name) for name in (*GRID_AND_BLOCK, "shared_bytes")]
        self._config = LaunchConfig(*shape, None, self._attributes, len(asked))
        self._call = (ctypes.addressof(self._config), given.function, ctypes.addressof(self._parameters), None)

    def follow(self, tensors: Mapping[int, tuple[int, int]], descriptors: Sequence[tuple[int, int] | None]) -> None:
        """Say which tensors may move.

        tensors: {address: (which source, bytes behind its beginning)}. descriptors: the same for each of the kernel's
            tensor maps, in the order of its parameters; None for one whose tensor stays. Where the source lay when the
            launch was recorded is told by the addresses.

        Raises a DriverError where what is told does not fit the parameters.
        """
        for place, size in self.places:
            if size == POINTER_BYTES:
                parameter = ctypes.c_uint64.from_address(place)
                if parameter.value in tensors:
                    self._pointers.append((parameter, *tensors[parameter.value]))
        found = [place for place, size in self.places if size == TENSOR_MAP_BYTES]
        if len(found) != len(descriptors):
            raise DriverError(f"the kernel has {len(found)} tensor maps, and {len(descriptors)} were told of")
        addresses = {place: address for address, place in tensors.items()}
        for place, source in zip(found, descriptors):
            if source is not None:
                before = ctypes.string_at(place, TENSOR_MAP_BYTES)
                address = addresses[source]
                call(self._driver, "cuTensorMapReplaceAddress", place, address)
                if ctypes.string_at(place, TENSOR_MAP_BYTES) != before:
                    raise DriverError("a tensor map holds another address than its tensor's")
                self._maps.append([place, address, *source])

    def start(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on the stream of that handle, with each source at its address. For one thread at a time."""
        for parameter, source, offset in self._pointers:
            parameter.value = addresses[source] + offset
        for known in self._maps:
            place, last, source, offset = known
            address = addresses[source] + offset
            if address != last:
                if self._driver.cuTensorMapReplaceAddress(place, address):
                    raise DriverError(f"the copy engine takes no tensor at {address:#x}")
                known[1] = address
        self._config.stream = stream
        status = self._driver.cuLaunchKernelEx(*self._call)
        if status:
            raise DriverError(f"cuLaunchKernelEx: CUDA error {status}")


def recorded(make: Callable[[], object]) -> ctypes.c_void_p:
    """What `make` launches, as a graph of the driver's."""
    library, graph = driver(), ctypes.c_void_p()
    stream = recording_stream(torch.cuda.current_device())
    handle = ctypes.c_void_p(stream.cuda_stream)
    with torch.cuda.stream(stream):
        call(library, "cuStreamBeginCapture_v2", handle, RELAXED_CAPTURE)
        try:
            make()
        finally:
            call(library, "cuStreamEndCapture", handle, ctypes.byref(graph))
    return graph


@functools.cache
def recording_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def only_node(graph: ctypes.c_void_p) -> ctypes.c_void_p:
    """The graph's kernel; a DriverError where it holds anything else, or more."""
    count = ctypes.c_size_t(2)
    nodes = (ctypes.c_void_p * 2)()
    call(driver(), "cuGraphGetNodes", graph, None, ctypes.byref(count))
    if count.value != 1:
        raise DriverError(f"the launch does {count.value} things on the GPU, and not one")
    call(driver(), "cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    node, kind = ctypes.c_void_p(nodes[0]), ctypes.c_int()
    call(driver(), "cuGraphNodeGetType", node, ctypes.byref(kind))
    if kind.value != KERNEL_NODE:
        raise DriverError("the launch is no kernel's")
    return node


def parameter_sizes(function: int) -> list[int]:
    """The bytes of each of a kernel's parameters."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    handle = ctypes.c_void_p(function)
    while True:
        places = ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)
        status = driver().cuFuncGetParamInfo(handle, *places)
        if status == NO_SUCH_PARAMETER:
            return sizes
        if status:
            raise DriverError(f"cuFuncGetParamInfo: CUDA error {status}")
        sizes.append(size.value)
