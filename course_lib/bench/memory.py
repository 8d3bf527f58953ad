"""`python -m course_lib bench memory`: this machine's ceilings, and chapter 01's kernels beside PyTorch's own copy.

On a GPU every kernel runs on tensors of about a gigabyte. On a CPU the interpreter's times would say nothing, so there
the multiply-add chain alone is measured, in its blocked form.
"""

import torch

from course_lib.hardware.ceilings.measured import ceilings
from course_lib.hardware.device import machine
from course_lib.hardware.timing import measure
from course_lib.hardware.units import format_bandwidth, format_flop_rate, format_seconds
from course_lib.kernels.memory.fma_chain import fma_chain_work, run_fma_chain

GPU_ELEMENTS = 2**28  # float32: 1 GiB
CPU_ELEMENTS = 2**24
CHAIN_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; returns the exit status, 0."""
    found = ceilings(refresh=True)
    print_ceilings(found)
    if found.kind == "cuda":
        print_kernels()
    print_chain(found)
    return 0


def print_ceilings(found) -> None:
    print(f"{found.device}, measured {found.measured_at}")
    rows = [
        ("copy", "copy_bandwidth", format_bandwidth),
        ("read", "read_bandwidth", format_bandwidth),
        ("L2", "l2_bandwidth", format_bandwidth),
        ("on chip", "on_chip_bandwidth", format_bandwidth),
        ("multiply-add", "fma_rate", format_flop_rate),
        ("launch", "launch_overhead", format_seconds),
    ]
    for name, figure, write in rows:
        value = getattr(found, figure)
        if value is not None:
            spread = f"   ± {100 * found.spread[figure] / 2:.1f} %" if figure in found.spread else ""
            print(f"  {name:<24}{write(value):>16}{spread}")
    for name, rate in found.matmul_rate.items():
        print(
            f"  {f'{name} matmul':<24}{format_flop_rate(rate):>16}"
            f"   ± {100 * found.spread[f'matmul_rate.{name}'] / 2:.1f} %"
        )
    for note in found.notes:
        print(f"  {note}")


def memory_cases(elements: int):
    """(name, function, bytes) of PyTorch's copy and then of each memory-bound kernel, on `elements` float32 values."""
    from course_lib.kernels.memory.copy import copy
    from course_lib.kernels.memory.row_sum import row_sum
    from course_lib.kernels.memory.scale_add_relu import scale_add_relu, scale_add_relu_reference
    from course_lib.kernels.memory.strided_copy import strided_copy
    from course_lib.kernels.memory.vector_add import vector_add

    x, y, out = (torch.randn(elements, device=machine_device()) for _ in range(3))
    ragged = elements - 3
    size = 4 * elements
    yield "PyTorch copy", lambda: out.copy_(x), 2 * size
    yield "copy", lambda: copy(x, out=out), 2 * size
    yield "copy, ragged length", lambda: copy(x[:ragged], out=out[:ragged]), 2 * size
    yield "PyTorch add", lambda: torch.add(x, y, out=out), 3 * size
    yield "vector add", lambda: vector_add(x, y, out=out), 3 * size
    yield "vector add, ragged length", lambda: vector_add(x[:ragged], y[:ragged], out=out[:ragged]), 3 * size
    yield "scale, add, ReLU: PyTorch", lambda: scale_add_relu_reference(x, y, 1.5), 7 * size
    yield "scale, add, ReLU: fused", lambda: scale_add_relu(x, y, 1.5, out=out), 3 * size
    for columns in (64, 1000, 4096, 65536, elements // 4, elements):
        rows = elements // columns
        matrix = x[: rows * columns].view(rows, columns)
        moved = 4 * rows * (columns + 1)
        yield f"row sum [{rows}, {columns}]", lambda matrix=matrix: row_sum(matrix), moved
        yield "   PyTorch's", lambda matrix=matrix: matrix.sum(dim=-1), moved
    tall = x.view(4096, -1).t()
    yield f"row sum {list(tall.shape)}, transposed", lambda: row_sum(tall), 4 * (elements + tall.shape[0])
    half = x.half()
    yield "row sum [65536, 4096], float16", lambda: row_sum(half.view(-1, 4096)), 2 * elements + elements // 1024
    for stride in (2, 8, 32):
        view = x[::stride]
        target = out[: view.numel()]
        yield (
            f"strided copy, stride {stride}",
            lambda view=view, target=target: strided_copy(view, out=target),
            (2 * 4 * view.numel()),
        )


def machine_device() -> str:
    return "cpu" if machine().tier == "none" else "cuda"


def print_kernels() -> None:
    """Bandwidth of each kernel, and its share of that of PyTorch's copy in this very run."""
    reference = None
    print(f"\n{'kernel, about 1 GiB a tensor':<44}{'time':>10}{'useful bytes':>16}{'of copy':>9}")
    for name, function, moved in memory_cases(GPU_ELEMENTS):
        timing = measure(function)
        rate = moved / timing.median
        reference = reference or rate
        print(f"{name:<44}{format_seconds(timing.median):>10}{format_bandwidth(rate):>16}{rate / reference:>9.3f}")


def print_chain(found) -> None:
    """The walk along the roofline: where the time leaves the memory floor."""
    elements = GPU_ELEMENTS if found.kind == "cuda" else CPU_ELEMENTS
    x = torch.rand(elements, device=machine_device())
    out = torch.empty_like(x)
    balance = found.fma_rate / found.memory_bandwidth
    print(f"\nmultiply-add chain: balance point {balance:.3g} FLOP/byte, compute-bound from {4 * balance:.3g} steps on")
    for steps in CHAIN_STEPS:
        work = fma_chain_work(elements, steps)
        timing = measure(lambda steps=steps: run_fma_chain(x, steps, out=out))
        print(
            f"  {steps:>4} steps, {work.intensity:>6.3g} FLOP/byte {format_seconds(timing.median):>12}"
            f"{format_bandwidth(work.bytes / timing.median):>14}"
            f"{format_flop_rate(work.flops / timing.median):>18}"
        )
