"""CUDA C++ without nvcc: compiled by NVRTC for any architecture, read as machine code, launched by the driver.

    kernel = compile_cuda(source, "add", arch=90)       # needs NVRTC, and no GPU
    kernel.registers, kernel.stack_bytes, kernel.load_widths, kernel.sass
    run_cuda(CudaLaunch(source, "add", 128, 256, (x, y, out, x.numel(), 0.5)), x.device)     # needs the GPU

What is inspected is what runs: both take the same cubin. torch.cuda._compile_kernel would do for a launch; it is
private, hands a Python float over as a double in some versions and as a float in others, and asks for CUDA's headers.

Source: NVIDIA, NVRTC, "User interface"; CUDA Driver API, "Module management", "Execution control".
"""

import ctypes
import functools
import re
from dataclasses import dataclass, field

import torch

from course_lib.hardware.compiler.architectures import architecture_number
from course_lib.hardware.compiler.compiled import CompileError
from course_lib.hardware.compiler.nvrtc import (
    Refused,
    accesses_to_local_memory,
    cubin_of,
    read_machine_code,
    widths_of,
)

LARGEST_INT = 2**31 - 1
Argument = torch.Tensor | int | float | None


@dataclass(frozen=True)
class CudaKernel:
    """One CUDA C++ kernel compiled for one architecture. Counts are static: a loop's body counts once."""

    name: str
    arch: int
    registers: int  # per thread; the hardware's limit is 255
    stack_bytes: int  # of local memory per thread: what found no register, and arrays that are indexed at run time
    shared_bytes: int  # per block
    load_widths: dict[int, int]  # bytes that one thread loads at once -> how many such loads from global memory
    store_widths: dict[int, int]
    local_accesses: int  # loads from and stores to local memory
    shuffles: int
    sass: str = field(repr=False)
    cubin: bytes = field(repr=False)


def compile_cuda(source: str, name: str, *, arch: int | str = 90) -> CudaKernel:
    """Compiles CUDA C++ for one architecture and says what became of its kernel.

    Args:
        source: a translation unit without #include. The kernel is declared `extern "C" __global__`.
        name: of the kernel.
        arch: a key of ARCHITECTURES, or "sm_90".

    Raises:
        ValueError: an unknown architecture, or a name that the source does not declare.
        CompileError: NVRTC refused the source; the message is its own and `line` the first line that it names.
        RuntimeError: there is no NVRTC here, or it does not know the architecture; the message says what to do.
    """
    return _compiled(source, name, architecture_number(arch))


@functools.lru_cache(maxsize=256)
def _compiled(source: str, name: str, arch: int) -> CudaKernel:
    try:
        cubin = cubin_of(source, arch)
    except Refused as refused:
        raise CompileError(f"CUDA C++ for sm_{arch}: {refused}", kind="CUDA C++", line=refused.line) from None
    usage, sass = read_machine_code(cubin)
    found = re.search(rf"Function {re.escape(name)}:\s*(.*)", usage)
    if found is None:
        declared = ", ".join(re.findall(r"Function (\w+):", usage)) or "none"
        raise ValueError(f'name is {name!r}; the kernels that the source declares extern "C" are: {declared}.')
    counts = {key: int(count) for key, count in re.findall(r"\b([A-Z]+):(\d+)", found[1])}
    return CudaKernel(
        name=name,
        arch=arch,
        registers=counts["REG"],
        stack_bytes=counts["STACK"],
        shared_bytes=counts["SHARED"],
        load_widths=widths_of(sass, "LDG"),
        store_widths=widths_of(sass, "STG"),
        local_accesses=accesses_to_local_memory(sass),
        shuffles=len(re.findall(r"\bSHFL\b", sass)),
        sass=sass,
        cubin=cubin,
    )


# -------------------------------------------------------------------------------------------------------- the driver


@dataclass(frozen=True)
class CudaLaunch:
    """A kernel and everything that it is launched with.

    Attributes:
        source, name: as `compile_cuda` takes them.
        grid: blocks, along x. With 0 nothing runs.
        threads: of a block, along x.
        arguments: in the kernel's order. A tensor is passed as a pointer and None as a null pointer, an int as `int`,
            a float as `float`.
    """

    source: str = field(repr=False)
    name: str
    grid: int
    threads: int
    arguments: tuple[Argument, ...] = field(repr=False)


def run_cuda(launch: CudaLaunch, device: torch.device) -> None:
    """Compiles a kernel for a GPU, unless it has been, and runs it on PyTorch's current stream of that GPU.

    The first call compiles and loads, which waits for the GPU; later ones may be recorded in a graph.

    Raises:
        ValueError: a tensor that is on another device, or an int beyond 32 bits.
        CompileError: NVRTC refused the source.
        RuntimeError: there is no NVRTC here, or the driver refused; the message says which.
    """
    if launch.grid == 0:
        return
    if device.index is None:  # "cuda" is the current one
        device = torch.device(device.type, torch.cuda.current_device())
    values = [_value(number, argument, device) for number, argument in enumerate(launch.arguments)]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability()
        kernel = compile_cuda(launch.source, launch.name, arch=10 * major + minor)
        context = ctypes.c_void_p()
        _driver("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:  # a new thread, whose first call of CUDA's this is: PyTorch's next one makes it current
            torch.cuda.synchronize()
        function = _loaded(kernel.cubin, kernel.name, torch.cuda.current_device())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _driver("cuLaunchKernel", function, launch.grid, 1, 1, launch.threads, 1, 1, 0, stream, pointers, None)


def _value(number: int, argument: Argument, device: torch.device):
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, torch.Tensor):
        if argument.device != device:
            raise ValueError(f"argument {number} is on device {argument.device}; it must be on {device}.")
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    if not -LARGEST_INT - 1 <= argument <= LARGEST_INT:
        raise ValueError(f"argument {number} is {argument}; an int of a kernel has 32 bits, at most {LARGEST_INT}.")
    return ctypes.c_int(argument)


@functools.lru_cache(maxsize=256)
def _loaded(cubin: bytes, name: str, device: int) -> ctypes.c_void_p:
    """The kernel as the driver holds it, on one device. It stays for as long as the process runs."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _driver("cuModuleLoadData", ctypes.byref(module), cubin)
    _driver("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    return function


def _driver(name: str, *arguments) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    status = getattr(driver, name)(*arguments)
    if status:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(words))
        reason = words.value.decode() if words.value else f"error {status}"
        raise RuntimeError(f"{name} failed: {reason}")
