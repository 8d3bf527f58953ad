"""CUDA C++ without nvcc: compiled by NVRTC for any architecture, read as machine code, launched by the driver.

    kernel = compile_cuda(source, "add", arch=90)       # needs NVRTC, and no GPU
    kernel.registers, kernel.stack_bytes, kernel.load_widths, kernel.sass
    run_cuda(CudaLaunch(source, "add", 128, 256, (x, y, out, x.numel(), 0.5)), x.device)     # needs the GPU

NVRTC is a library of CUDA's. A CUDA build of PyTorch brings it along; beside a CPU build the wheel `nvidia-cuda-nvrtc`
does. The disassembler comes with Triton. This module alone knows where the three are.

What is inspected is what runs: both take the same cubin. torch.cuda._compile_kernel would do for a launch; it is
private, hands a Python float over as a double in some versions and as a float in others, and asks for CUDA's headers.

Source: NVIDIA, NVRTC, "User interface"; CUDA Driver API, "Module management", "Execution control".
"""

import contextlib
import ctypes
import functools
import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from course_lib.hardware.compiler.architectures import architecture_number
from course_lib.hardware.compiler.compiled import CompileError

FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")  # below the package `nvidia`, where the wheels of CUDA 13 and 12 put it
NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
MISSING = (
    "NVRTC, CUDA's compiler as a library, was not found. A CUDA build of PyTorch brings it along; beside a CPU build "
    "install it with: pip install nvidia-cuda-nvrtc"
)
LARGEST_INT = 2**31 - 1
NVRTC_COMPILATION = 6  # the error that stands for a mistake in the source
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


def missing_nvrtc() -> str | None:
    """Why no CUDA C++ can be compiled here, as a sentence; None where it can."""
    return None if _nvrtc() is not None else MISSING


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
    cubin = _cubin(source, arch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, sass = _tool("cuobjdump", "-res-usage", str(path)), _tool("nvdisasm", "-c", str(path))
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
        load_widths=_widths(sass, "LDG"),
        store_widths=_widths(sass, "STG"),
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shuffles=len(re.findall(r"\bSHFL\b", sass)),
        sass=sass,
        cubin=cubin,
    )


def _widths(sass: str, operation: str) -> dict[int, int]:
    """Bytes per thread and instruction -> count. The width is a suffix, as in LDG.E.128; without one it is 4 bytes."""
    widths: dict[int, int] = {}
    for suffixes in re.findall(rf"\b{operation}((?:\.\w+)*)", sass):
        bits = re.search(r"\.[US]?(8|16|64|128|256)\b", suffixes)
        width = int(bits[1]) // 8 if bits else 4
        widths[width] = widths.get(width, 0) + 1
    return widths


def _tool(name: str, *arguments: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}, which came with Triton, failed: {done.stderr.strip()}")
    return done.stdout


# ------------------------------------------------------------------------------------------------------ the compiler


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """The library: the one that is loaded with PyTorch or installed on the system, or else that of a wheel."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    wheels = [str(Path(place) / folder / name) for name in NAMES for folder in FOLDERS for place in places]
    for path in (*wheels, *NAMES):
        with contextlib.suppress(OSError):  # it is not there: the next one
            return ctypes.CDLL(path)
    return None


def _cubin(source: str, arch: int) -> bytes:
    nvrtc = _nvrtc()
    if nvrtc is None:
        raise RuntimeError(MISSING)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(status).decode()}")

    def read(what: str) -> bytes:
        size = ctypes.c_size_t()
        check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        check(getattr(nvrtc, f"nvrtcGet{what}")(program, text))
        return text.raw

    program = ctypes.c_void_p()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        options = (ctypes.c_char_p * 2)(f"--gpu-architecture=sm_{arch}".encode(), b"--std=c++17")
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status == NVRTC_COMPILATION:
            log = read("ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            line = re.search(r"kernel\.cu\((\d+)\): error", log)
            raise CompileError(f"CUDA C++ for sm_{arch}: {log}", kind="CUDA C++", line=int(line[1]) if line else None)
        if status:
            raise RuntimeError(
                f"NVRTC did not compile for sm_{arch}: {nvrtc.nvrtcGetErrorString(status).decode()}. It may be older "
                "or newer than the architecture; install another with: pip install nvidia-cuda-nvrtc"
            )
        return read("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


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
