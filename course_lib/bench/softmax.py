"""`python -m course_lib bench softmax`: the course's softmax beside a copy, torch.softmax and torch.compile's.

Bandwidth counts one read and one write of each element, what softmax must move; a method that reads a row again shows
as slower. Tensors of a gigabyte; medians with the L2 cache flushed before each run.
"""

import functools
from collections.abc import Callable

import torch

from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.timing import measure
from course_lib.hardware.units import format_bandwidth
from course_lib.kernels.softmax.rows import ONE_PASS_COLUMNS, softmax_rows

BYTES = 2**30
COLUMNS = (1024, 4096, 5000, 16384, 32768, 65536, 1048576)
METHODS = ("auto", "one_pass", "online", "three_pass")
SECONDS_PER_FIGURE = 0.1


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; returns the exit status."""
    if machine().tier == "none":
        print("bench softmax needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    dtypes = [torch.bfloat16 if supports_bfloat16() else torch.float16, torch.float32]
    copy = copy_bandwidth()
    versions = f"PyTorch {torch.__version__}, Triton {machine().triton}"
    print(f"{machine().gpu_name}, {versions}: copy {format_bandwidth(copy)}")
    print(f"\n{'share of copy':<24}" + "".join(f"{name:>15}" for name in ("torch.softmax", "torch.compile", *METHODS)))
    for dtype in dtypes:
        for columns in COLUMNS:
            print_row(dtype, columns, copy)
            torch.cuda.empty_cache()
    return 0


def copy_bandwidth() -> float:
    """Bytes read and written per second by PyTorch's copy of as large a tensor."""
    source = torch.randn(BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source)).bandwidth(2 * BYTES)


def print_row(dtype: torch.dtype, columns: int, copy: float) -> None:
    x = torch.randn(BYTES // dtype.itemsize // columns, columns, device="cuda").to(dtype)
    out = torch.empty_like(x)
    torch.compiler.reset()
    compiled = torch.compile(lambda tensor: torch.softmax(tensor, -1), dynamic=False)
    runs: list[Callable[[], object]] = [functools.partial(torch.softmax, x, -1), functools.partial(compiled, x)]
    runs += [functools.partial(softmax_rows, x, out, method) for method in METHODS]
    fits = [name != "one_pass" or columns <= ONE_PASS_COLUMNS for name in ("torch", "compile", *METHODS)]
    cells = [
        f"{measure(run, seconds=SECONDS_PER_FIGURE).bandwidth(2 * x.nbytes) / copy:.3f}" if fit else "–"
        for run, fit in zip(runs, fits)
    ]
    name = f"{str(dtype).removeprefix('torch.')} [{x.shape[0]}, {columns}]"
    print(f"{name:<24}" + "".join(f"{cell:>15}" for cell in cells), flush=True)
