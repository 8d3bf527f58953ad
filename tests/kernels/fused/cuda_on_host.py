"""Runs a CUDA C++ kernel of the course on the processor, from the launch that a GPU would get.

Conversions to 16 bits and fast arithmetic are the processor's. So what is tested is the kernel's text with its
launcher's arguments: indices, strides, masks, sums, barriers; not the compiler for GPUs.
"""

from course_lib.hardware.compiler.cuda_cpp import CudaLaunch
from course_lib.hardware.compiler.cuda_numbers import CONVERSIONS, FAST_ARITHMETIC
from course_lib.hardware.compiler.cuda_on_host import run_on_host as run

ARITHMETIC = """
__device__ inline float fast_power_of_2(float x) { return exp2f(x); }
__device__ inline float fast_reciprocal(float x) { return 1.0f / x; }
"""


def run_on_host(launch: CudaLaunch, written: tuple[int, ...], order: str = "ascending") -> None:
    """Runs all blocks, one after another; `written` are the places of the arguments that may be written."""
    if CONVERSIONS not in launch.source:
        raise ValueError("the source does not contain CONVERSIONS, which the processor's own take the place of")
    head, tail = launch.source.replace(FAST_ARITHMETIC, ARITHMETIC).split(CONVERSIONS)
    arguments = {f"argument {place}": argument for place, argument in enumerate(launch.arguments)}
    names = [f"argument {place}" for place in written]
    run(tail, launch.name, launch.grid, launch.threads, arguments, names, order=order, given=head, seconds=60.0)
