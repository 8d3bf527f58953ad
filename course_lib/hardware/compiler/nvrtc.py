"""NVRTC, CUDA's compiler as a library, and what the machine code that it makes looks like.

A CUDA build of PyTorch brings NVRTC along; beside a CPU build the wheel `nvidia-cuda-nvrtc` does. The disassembler
comes with Triton. This module alone knows where they are. A check sends its text to the process that runs answers, so
it imports nothing of the course. `compile_cuda` of cuda_cpp.py is made of these parts.

Source: NVIDIA, NVRTC, "User interface"; CUDA Binary Utilities, "nvdisasm".
"""

import contextlib
import ctypes
import functools
import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")  # below the package `nvidia`, where the wheels of CUDA 13 and 12 put it
NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
MISSING = (
    "NVRTC, CUDA's compiler as a library, was not found. A CUDA build of PyTorch brings it along; beside a CPU build "
    "install it with: pip install nvidia-cuda-nvrtc"
)
NVRTC_COMPILATION = 6  # the error that stands for a mistake in the source


class Refused(Exception):
    """NVRTC refused a source; the message is its own. `line` is the first line that it names, None for none."""

    def __init__(self, log: str, line: int | None):
        super().__init__(log)
        self.line = line


def missing_nvrtc() -> str | None:
    """Why no CUDA C++ can be compiled here, as a sentence; None where it can."""
    return None if library() is not None else MISSING


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library: the one that is loaded with PyTorch or installed on the system, or else that of a wheel."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    wheels = [str(Path(place) / folder / name) for name in NAMES for folder in FOLDERS for place in places]
    for path in (*wheels, *NAMES):
        with contextlib.suppress(OSError):  # it is not there: the next one
            return ctypes.CDLL(path)
    return None


def cubin_of(source: str, arch: int) -> bytes:
    """The machine code of a source for an architecture, such as 90.

    Raises:
        Refused: there is a mistake in the source.
        RuntimeError: there is no NVRTC here, or it does not know the architecture; the message says what to do.
    """
    nvrtc = library()
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
            raise Refused(log, int(line[1]) if line else None)
        if status:
            raise RuntimeError(
                f"NVRTC did not compile for sm_{arch}: {nvrtc.nvrtcGetErrorString(status).decode()}. It may be older "
                "or newer than the architecture; install another with: pip install nvidia-cuda-nvrtc"
            )
        return read("CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def read_machine_code(cubin: bytes) -> tuple[str, str]:
    """What each kernel of a cubin uses, and the instructions of all, as NVIDIA's tools print them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _tool("cuobjdump", "-res-usage", str(path)), _tool("nvdisasm", "-c", str(path))


def widths_of(sass: str, operation: str) -> dict[int, int]:
    """Bytes per thread and instruction -> count. The width is a suffix, as in LDG.E.128; without one it is 4 bytes."""
    widths: dict[int, int] = {}
    for suffixes in re.findall(rf"\b{operation}((?:\.\w+)*)", sass):
        bits = re.search(r"\.[US]?(8|16|64|128|256)\b", suffixes)
        width = int(bits[1]) // 8 if bits else 4
        widths[width] = widths.get(width, 0) + 1
    return widths


def accesses_to_local_memory(sass: str) -> int:
    """Loads from and stores to local memory: what found no register, and arrays that are indexed at run time."""
    return len(re.findall(r"\b(?:LDL|STL)\b", sass))


def _tool(name: str, *arguments: str) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}, which came with Triton, failed: {done.stderr.strip()}")
    return done.stdout
