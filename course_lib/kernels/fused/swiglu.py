"""SwiGLU's product and its gradients, each in one pass.

    out = silu(gate) · up,    silu(x) = x · σ(x),    σ(x) = 1 / (1 + exp(-x))
    up_gradient   = out_gradient · silu(gate)
    gate_gradient = out_gradient · up · σ(gate) · (1 + gate · (1 - σ(gate)))

                reads  writes   elements moved for each element
    forward       2      1            3        as two operations 5: silu(gate) is written and read again
    backward      3      2            5        σ(gate) is computed again: nothing but gate and up is kept

FLOPs: about 6 and 14 per element. Arithmetic is in float32, rounded once at the end. gate and up are often the two
halves of one matrix product's result: rows may lie apart.

Source: Shazeer, GLU variants improve transformer, arXiv 2002.05202.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import FLOAT_DTYPES, as_rows, check_alike, check_tensor
from course_lib.kernels.common.numbers import LARGEST_GROUP
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.fused.gradients import rows_of_gradient

TILE_BYTES = 4096  # one 16-byte load a thread and a tensor
NUM_WARPS = 8
STRIDES = ("gate_stride_groups", "up_stride_groups", "out_gradient_stride_groups")


def swiglu_reference(gate, up):
    """The plain PyTorch meaning of `swiglu_forward`, in float32 at least."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (F.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def swiglu_backward_reference(gate, up, out_gradient):
    """The plain PyTorch meaning of `swiglu_backward`: (gate gradient, up gradient), in float32 at least."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    wide_gate, wide_up, gradient = (tensor.to(wide) for tensor in (gate, up, out_gradient))
    sigmoid = torch.sigmoid(wide_gate)
    gate_gradient = gradient * wide_up * sigmoid * (1 + wide_gate * (1 - sigmoid))
    return gate_gradient.to(gate.dtype), (gradient * wide_gate * sigmoid).to(up.dtype)


@triton.jit
def tile_of_matrix(rows, column_groups, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """This program's rows [BLOCK_ROWS, 1], columns [1, BLOCK_COLUMNS], and which elements exist.

    The number of columns comes as groups of GROUP, so that the compiler knows what divides it, and counts in 64 bits:
    a contiguous tensor is one row.
    """
    column_tiles = tl.cdiv(column_groups, BLOCK_COLUMNS // GROUP)
    program = tl.program_id(0).to(tl.int64)
    row = program // column_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = program % column_tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < column_groups.to(tl.int64) * GROUP)[None, :]
    return row[:, None], column[None, :], inside


@triton.jit(do_not_specialize=("column_groups",))
def swiglu_kernel(
    gate_pointer,
    up_pointer,
    out_pointer,
    rows,
    column_groups,
    gate_stride_groups,
    up_stride_groups,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program: one tile. out is contiguous."""
    row, column, inside = tile_of_matrix(rows, column_groups, GROUP, BLOCK_ROWS, BLOCK_COLUMNS)
    gate_tile = gate_pointer + row * (gate_stride_groups * GROUP) + column
    up_tile = up_pointer + row * (up_stride_groups * GROUP) + column
    gate = tl.load(gate_tile, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
    up = tl.load(up_tile, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
    out_tile = out_pointer + row * column_groups * GROUP + column
    tl.store(out_tile, (gate * tl.sigmoid(gate) * up).to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("column_groups",))
def swiglu_backward_kernel(
    gate_pointer,
    up_pointer,
    out_gradient_pointer,
    gate_gradient_pointer,
    up_gradient_pointer,
    rows,
    column_groups,
    gate_stride_groups,
    up_stride_groups,
    out_gradient_stride_groups,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One program: one tile. Both results are contiguous."""
    row, column, inside = tile_of_matrix(rows, column_groups, GROUP, BLOCK_ROWS, BLOCK_COLUMNS)
    gate_tile = gate_pointer + row * (gate_stride_groups * GROUP) + column
    up_tile = up_pointer + row * (up_stride_groups * GROUP) + column
    gradient_tile = out_gradient_pointer + row * (out_gradient_stride_groups * GROUP) + column
    gate = tl.load(gate_tile, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
    up = tl.load(up_tile, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
    gradient = tl.load(gradient_tile, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_ROWS, BLOCK_COLUMNS]
    sigmoid = tl.sigmoid(gate)
    gate_gradient = gradient * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    result = row * column_groups * GROUP + column
    element = gate_gradient_pointer.dtype.element_ty
    tl.store(gate_gradient_pointer + result, gate_gradient.to(element), mask=inside)
    tl.store(up_gradient_pointer + result, (gradient * gate * sigmoid).to(element), mask=inside)


def swiglu_forward(gate, up):
    """silu(gate) · up by a kernel, without a gradient; `swiglu_operators.swiglu` has one.

    Args:
        gate, up: [..., hidden], float32, float16 or bfloat16, of one shape, dtype and device, each with a contiguous
            last dimension and leading dimensions that flatten without a copy. Any sizes; the leading ones may be 0.

    Returns a contiguous tensor of their shape and dtype.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    gate_rows, up_rows = check_pair(gate, up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    launch(swiglu_kernel, [gate_rows, up_rows], [out])
    return out


def swiglu_backward(gate, up, out_gradient):
    """(gate gradient, up gradient) of `swiglu_forward`, contiguous.

    Args:
        gate, up: as given to the forward pass.
        out_gradient: of their shape and dtype, of any strides; one that the kernel can't follow is copied.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    gate_rows, up_rows = check_pair(gate, up)
    check_tensor("out_gradient", out_gradient, FLOAT_DTYPES)
    check_alike("out_gradient", out_gradient, "gate", gate)
    results = [torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2)]
    launch(swiglu_backward_kernel, [gate_rows, up_rows, rows_of_gradient(out_gradient)], results)
    return tuple(results)


def check_pair(gate, up) -> list[torch.Tensor]:
    """Both as matrices."""
    for name, tensor in (("gate", gate), ("up", up)):
        check_tensor(name, tensor, FLOAT_DTYPES)
    check_alike("up", up, "gate", gate)
    return [as_rows("gate", gate), as_rows("up", up)]


def launch(kernel, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    if inputs[0].numel() == 0:
        return
    if all(tensor.is_contiguous() for tensor in inputs):
        inputs = [tensor.view(1, -1) for tensor in inputs]
    rows, columns = inputs[0].shape
    strides = [tensor.stride(0) for tensor in inputs]
    group = math.gcd(columns, *strides, LARGEST_GROUP)
    tile = TILE_BYTES // inputs[0].element_size()
    block_columns = min(triton.next_power_of_2(columns), tile)
    block_rows = min(triton.next_power_of_2(rows), tile // block_columns)
    programs = triton.cdiv(rows, block_rows) * triton.cdiv(columns, block_columns)
    kernel[(programs,)](
        *inputs, *outputs, rows, columns // group, *(stride // group for stride in strides), GROUP=group,
        BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, num_warps=NUM_WARPS,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: rows of 16 and of 32 bits."""
    cases = []
    for kernel in (swiglu_kernel, swiglu_backward_kernel):
        for kind, itemsize in (("fp16", 2), ("fp32", 4)):
            constants = {"GROUP": 8, "BLOCK_ROWS": 1, "BLOCK_COLUMNS": TILE_BYTES // itemsize}
            cases.append(CompileCase(kernel, signature_of(kernel, kind), constants, num_warps=NUM_WARPS,
                                     label=kind))  # fmt: skip
    return cases
