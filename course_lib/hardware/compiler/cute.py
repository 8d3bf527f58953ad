"""Kernels in CuTe's Python DSL, compiled for any architecture from sm_80 on, and read as machine code.

    kernel = compile_cute(swiglu, *arguments, arch=90)       # needs nvidia-cutlass-dsl, and no GPU
    kernel.load_widths, kernel.sass

Source: NVIDIA, CUTLASS 4, "CuTe DSL", section on JIT compilation options.
"""

import functools
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.hardware.compiler.architectures import architecture_number
from course_lib.hardware.compiler.nvrtc import accesses_to_local_memory, read_machine_code, widths_of

PACKAGE = "nvidia-cutlass-dsl"


@dataclass(frozen=True)
class CuteKernel:
    """One kernel compiled for one architecture. Counts are static: a loop's body counts once."""

    arch: int
    load_widths: dict[int, int]  # bytes that one thread loads at once -> how many such loads from global memory
    store_widths: dict[int, int]
    local_accesses: int  # loads from and stores to local memory
    sass: str = field(repr=False)


@functools.cache
def missing_cute() -> str | None:
    """Why CuTe's DSL cannot be used here, and what would do; None where it can."""
    if importlib.util.find_spec("cutlass") is not None and importlib.util.find_spec("cutlass.cute") is not None:
        return None
    return f"CuTe's DSL is not installed: `pip install {PACKAGE}` (about 300 MB)."


def compile_cute(function: Callable, *arguments, arch: int | str = 90) -> CuteKernel:
    """Compiles a function of CuTe's `jit` that launches one kernel, and says what became of the kernel.

    Args:
        function: decorated by CuTe's `jit`.
        arguments: what it is called with; their memory is not touched.
        arch: a key of ARCHITECTURES from 80 on, or "sm_90".

    Raises:
        RuntimeError: the package is missing; the text says how to get it.
        ValueError: an unknown architecture, or one before sm_80; a function that launches several kernels.
    """
    if (missing := missing_cute()) is not None:
        raise RuntimeError(missing)
    number = architecture_number(arch)
    if number < 80:
        raise ValueError(f"arch is {arch!r}; CuTe's DSL compiles for sm_80 and newer.")
    from cutlass import cute  # type: ignore[import-not-found]

    chip = f"sm_{number}a" if number >= 90 else f"sm_{number}"
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-cubin --gpu-arch={chip} --dump-dir={folder}"
        cute.compile(function, *arguments, options=options)
        found = sorted(Path(folder).rglob("*.cubin"))
        if len(found) != 1:
            raise ValueError(f"{len(found)} modules were compiled; give a function that launches one kernel.")
        _, sass = read_machine_code(found[0].read_bytes())
    return CuteKernel(number, widths_of(sass, "LDG"), widths_of(sass, "STG"), accesses_to_local_memory(sass), sass)
