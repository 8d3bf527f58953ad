"""Two products and the activation between them in one kernel, whose tensor in the middle is never stored.

    out = activation(x · firstᵀ + first_bias) · secondᵀ + second_bias

    x [rows, inner], first [hidden, inner], second [columns, hidden], out [rows, columns]

A program keeps BLOCK_M whole rows of x on the chip. For each block of hidden it computes activation(x · firstᵀ), rounds
it, and adds its product with the same block of second to the sums of whole rows of out. So inner and columns have to
fit into a tile: up to 256 numbers each. A transformer's MLP, with 4,096, does not. Cut into tiles of columns, each
program would have to compute all of the middle for itself: 16 times the FLOPs at 4,096.

FLOPs: 2 · rows · hidden · (inner + columns). Bytes: x and out once; both weights for each BLOCK_M rows, mostly from the
L2. As two kernels, the middle is written and read again: 4 · rows · hidden bytes more in 16 bits. `saved` says when
that is worth a kernel of its own: for 2²⁰ rows of 128 with a hidden 512, two kernels move 2.7 GB and one 0.5 GB.

Source: CUTLASS, example 13, "Back-to-back GEMM".
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import check_same
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.fused.checks import check_weight
from course_lib.kernels.products.candidates import EVEN, MATRIX_INSTRUCTION
from course_lib.kernels.products.checks import check_matrix
from course_lib.kernels.products.epilogue import ACTIVATIONS, activate, product_reference
from course_lib.kernels.products.parts import numbers_of_tile, starts_of_rows, store_tile

MOST_NUMBERS = 256  # of inner, and of columns
FEWEST_NUMBERS = 16  # that a matrix instruction takes


def fused_mlp_reference(x, first, second, *, first_bias=None, second_bias=None, activation="gelu"):
    """The plain PyTorch meaning; the tensor in the middle is rounded to x's dtype, as in the kernel."""
    between = product_reference(x, first, bias=first_bias, activation=activation)
    return product_reference(between, second, bias=second_bias)


@triton.jit
def fused_mlp_kernel(
    x_pointer, first_pointer, second_pointer, out_pointer, first_bias_pointer, second_bias_pointer, rows, inner, hidden,
    columns, x_stride, first_stride, second_stride, out_stride, ACTIVATION: tl.constexpr, INNER: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of out."""
    row, element, column = numbers_of_tile(tl.program_id(0), BLOCK_M), tl.arange(0, INNER), tl.arange(0, COLUMNS)
    x_tile = starts_of_rows(x_pointer, row, rows, x_stride) + element[None, :]
    x = tl.load(x_tile, mask=(element < inner)[None, :], other=0.0)  # [BLOCK_M, INNER]
    second_rows = starts_of_rows(second_pointer, column, columns, second_stride)  # [COLUMNS, 1]
    sums = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    for start in tl.range(0, hidden, BLOCK_H):
        number = start + tl.arange(0, BLOCK_H)
        first_tile = starts_of_rows(first_pointer, number, hidden, first_stride) + element[None, :]
        first = tl.load(first_tile, mask=(element < inner)[None, :], other=0.0)  # [BLOCK_H, INNER]
        between = tl.dot(x, first.T, input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_H]
        if first_bias_pointer is not None:
            bias = tl.load(first_bias_pointer + number, mask=number < hidden, other=0.0)
            between += bias.to(tl.float32)[None, :]
        between = activate(between, ACTIVATION).to(x.dtype)
        exists = (number < hidden)[None, :]  # beyond them second is 0, so what stands in the middle does not count
        second = tl.load(second_rows + number[None, :], mask=exists, other=0.0)  # [COLUMNS, BLOCK_H]
        sums = tl.dot(between, second.T, sums, input_precision=FLOAT32_PRECISION)
    if second_bias_pointer is not None:
        sums += tl.load(second_bias_pointer + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    store_tile(out_pointer, sums, row, column, rows, columns, out_stride)


def fused_mlp(x, first, second, *, first_bias=None, second_bias=None, activation="gelu") -> torch.Tensor:
    """activation(x · firstᵀ + first_bias) · secondᵀ + second_bias, [rows, columns] of x's dtype.

    Args:
        x: [rows, inner], float32, float16 or bfloat16, inner up to 256; rows may be 0.
        first: [hidden, inner], second: [columns, hidden], as nn.Linear keeps them, of x's dtype; columns up to 256.
            The rows of all three are contiguous and may lie apart.
        first_bias: [hidden], second_bias: [columns], of x's dtype, contiguous; or None.
        activation: None, "gelu", "gelu_tanh" or "silu".

    The middle is rounded to x's dtype before the second product; sums are float32.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_matrix("x", x, "[rows, inner]", empty_allowed=True)
    check_matrix("first", first, "[hidden, inner]")
    check_matrix("second", second, "[columns, hidden]")
    check_same("first", first, "x", x, inner_dimension=(first.shape[1], x.shape[1]))
    check_same("second", second, "first", first, hidden=(second.shape[1], first.shape[0]))
    for name, size in (("inner", x.shape[1]), ("columns", second.shape[0])):
        if size > MOST_NUMBERS:
            raise ValueError(
                f"{name} is {size}; a program keeps whole rows, of up to {MOST_NUMBERS} numbers. Use two products."
            )
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(f"activation is {activation!r}; it must be None or one of {', '.join(ACTIVATIONS)}.")
    for name, bias, weight in (("first_bias", first_bias, first), ("second_bias", second_bias, second)):
        if bias is not None:
            check_weight(bias, x, name, weight.shape[0], "row of its weight")
    rows, columns = x.shape[0], second.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if rows:
        settings = settings_for(architecture_of(x.device), x.dtype, x.shape[1], columns)
        fused_mlp_kernel[(triton.cdiv(rows, settings["BLOCK_M"]),)](
            x, first, second, out, first_bias, second_bias, rows, x.shape[1], first.shape[0], columns, x.stride(0),
            first.stride(0), second.stride(0), out.stride(0), activation, **settings,
        )  # fmt: skip
    return out


def saved(rows: int, inner: int, hidden: int, columns: int, bandwidth: float, flops: float, itemsize: int = 2) -> float:
    """Seconds that one kernel saves over two, if each takes the longer of its bytes' and its products' time.

    bandwidth: bytes a second; flops: FLOP/s that products reach. More than 0 only where the two kernels wait for memory
    longer than they multiply: the narrower the MLP, the more.
    """
    ends, middle = itemsize * rows * (inner + columns), itemsize * rows * hidden
    products = [2 * rows * hidden * width / flops for width in (inner, columns)]
    first = max((itemsize * rows * inner + middle) / bandwidth, products[0])
    second = max((middle + itemsize * rows * columns) / bandwidth, products[1])
    return first + second - max(ends / bandwidth, sum(products))


def settings_for(arch: int | None, dtype: torch.dtype, inner: int, columns: int) -> dict:
    """How a kernel is launched; arch: 80, 90, ...; None: interpreted."""
    wide = {"INNER": max(FEWEST_NUMBERS, triton.next_power_of_2(inner)),
            "COLUMNS": max(FEWEST_NUMBERS, triton.next_power_of_2(columns))}  # fmt: skip
    if arch is None:
        return {**wide, "BLOCK_M": 32, "BLOCK_H": 32}
    if dtype == torch.float32 or arch < 80:  # without matrix instructions, operands stay in registers
        return {**wide, "BLOCK_M": 16, "BLOCK_H": 16, "num_warps": 8, "num_stages": 1}
    large = arch in (90, 100, 103)
    return {**wide, "BLOCK_M": 128 if large else 64, "BLOCK_H": 64, "num_warps": 8, "num_stages": 2}


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: the widest rows, and narrow ones."""
    cases = []
    for arch, width in ((75, 256), (80, 256), (90, 256), (90, 128), (100, 256)):
        dtype = torch.bfloat16 if arch >= 80 else torch.float16
        settings = settings_for(arch, dtype, width, width)
        warps, stages = settings.pop("num_warps"), settings.pop("num_stages")
        signature = signature_of(fused_mlp_kernel, KINDS[dtype])
        even = [name for name, kind in signature.items() if kind[0] == "*" or name in (*EVEN, "hidden") or
                name.endswith("_stride")]  # fmt: skip
        cases.append(CompileCase(
            fused_mlp_kernel, signature, {"ACTIVATION": "gelu", **settings}, warps, stages, archs=(arch,),
            max_spill_bytes=0 if arch >= 80 else None, instruction=MATRIX_INSTRUCTION.get(arch), divisible=even,
            label=f"{KINDS[dtype]} {width}",
        ))  # fmt: skip
    return cases
