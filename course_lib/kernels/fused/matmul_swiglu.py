"""Two matrix products with SwiGLU as their epilogue, in one kernel.

    out = silu(x · gate_weightᵀ) · (x · up_weightᵀ)        x [rows, width], both weights [hidden, width]

One program holds the tiles of both products in registers, side by side: each tile of x that it loads is multiplied
twice. Their results meet where they were summed, in float32, and only `out` is written.

    as                              elements moved for each element of out, beside the products' own reads
    two products, then SwiGLU       5        gate and up are written and read again, out written
    one kernel                      1        out is written

FLOPs: 4 · width for each element of out. With width 4096 that is 16,384 FLOPs, as long as 80 bytes take on an H200 (206
FLOP/byte), and the epilogue saves 8 bytes in 16 bits: at most a tenth of the time, if the products are as fast as the
library's. Portable Triton's may not be: left to be measured. Two tensors of [rows, hidden] are saved in any case.

The backward pass multiplies again: gate and up are not kept. It is six products by the library, two of them
recomputed, and one pass of `swiglu_backward`.

Source: Shazeer, GLU variants improve transformer, arXiv 2002.05202.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import interpreting, machine
from course_lib.kernels.common.checks import FLOAT_DTYPES, as_rows, check_alike, check_tensor
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.fused.swiglu import swiglu_reference
from course_lib.kernels.fused.swiglu_operators import swiglu_backward_operator

# BLOCK_ROWS, BLOCK_HIDDEN, BLOCK_K, stages. Two accumulators take 64 of a thread's registers on tensor cores, and 16
# where there are none: in float32, and before sm_80, for which Triton knows none.
TENSOR_CORE_TILE, PLAIN_TILE = (128, 64, 64, 3), (64, 32, 32, 2)
NUM_WARPS = 8
ROWS_OF_BAND = 8  # row tiles whose programs run together, so that they share weights in the cache
TENSOR_CORES = dict.fromkeys((80, 86, 89, 120), "mma.sync") | {90: "wgmma"}


def matmul_swiglu_reference(x, gate_weight, up_weight):
    """The plain PyTorch meaning of `matmul_swiglu_forward`, in float32 at least: nothing is rounded on the way."""
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = (x.to(wide) @ weight.to(wide).t() for weight in (gate_weight, up_weight))
    return swiglu_reference(gate, up).to(x.dtype)


@triton.jit
def matmul_swiglu_kernel(
    x_pointer,
    gate_weight_pointer,
    up_weight_pointer,
    out_pointer,
    rows,
    hidden,
    width,
    x_stride,
    gate_weight_stride,
    up_weight_stride,
    ROWS_OF_BAND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: one tile of out, [rows, hidden], which is contiguous.

    Programs go down a band of ROWS_OF_BAND row tiles before they go on to the next columns.
    """
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    programs_of_band = ROWS_OF_BAND * tl.cdiv(hidden, BLOCK_HIDDEN)
    first = tl.program_id(0) // programs_of_band * ROWS_OF_BAND
    tiles_of_band = tl.minimum(row_tiles - first, ROWS_OF_BAND)
    within = tl.program_id(0) % programs_of_band
    row = ((first + within % tiles_of_band) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)  # [BLOCK_ROWS]
    column = (within // tiles_of_band * BLOCK_HIDDEN + tl.arange(0, BLOCK_HIDDEN)).to(tl.int64)  # [BLOCK_HIDDEN]
    row_exists = (row < rows)[:, None]
    column_exists = (column < hidden)[None, :]
    gate = tl.zeros([BLOCK_ROWS, BLOCK_HIDDEN], tl.float32)
    up = tl.zeros([BLOCK_ROWS, BLOCK_HIDDEN], tl.float32)
    for start in tl.range(0, width, BLOCK_K):
        term = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        x_tile = x_pointer + row[:, None] * x_stride + term[None, :]
        x = tl.load(x_tile, mask=row_exists & (term < width)[None, :], other=0.0)  # [BLOCK_ROWS, BLOCK_K]
        inside = column_exists & (term < width)[:, None]
        gate_tile = gate_weight_pointer + column[None, :] * gate_weight_stride + term[:, None]
        gate = tl.dot(x, tl.load(gate_tile, mask=inside, other=0.0), gate, input_precision=FLOAT32_PRECISION)
        up_tile = up_weight_pointer + column[None, :] * up_weight_stride + term[:, None]
        up = tl.dot(x, tl.load(up_tile, mask=inside, other=0.0), up, input_precision=FLOAT32_PRECISION)
    out = gate * tl.sigmoid(gate) * up  # [BLOCK_ROWS, BLOCK_HIDDEN]
    out_tile = out_pointer + row[:, None] * hidden + column[None, :]
    tl.store(out_tile, out.to(out_pointer.dtype.element_ty), mask=row_exists & column_exists)


def matmul_swiglu_forward(x, gate_weight, up_weight):
    """silu(x · gate_weightᵀ) · (x · up_weightᵀ) by a kernel, without a gradient; `matmul_swiglu` has one.

    Args:
        x: [..., width], float32, float16 or bfloat16, with a contiguous last dimension and leading dimensions that
            flatten without a copy; they may be 0.
        gate_weight, up_weight: [hidden, width], of x's dtype, as torch.nn.Linear keeps them: each with a contiguous
            last dimension. They may be the halves of one tensor.

    Returns a contiguous tensor [..., hidden] of x's dtype.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_tensor("x", x, FLOAT_DTYPES)
    rows = as_rows("x", x)
    for name, weight in (("gate_weight", gate_weight), ("up_weight", up_weight)):
        check_tensor(name, weight, (x.dtype,))
        if weight.dim() != 2 or weight.shape[1] != rows.shape[1] or weight.shape[0] == 0:
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)}; it must be [hidden, {rows.shape[1]}]: rows as wide as x."
            )
        if weight.device != x.device:
            raise ValueError(f"{name} is on device {weight.device}; it must be on that of x, {x.device}.")
        as_rows(name, weight)
    check_alike("up_weight", up_weight, "gate_weight", gate_weight)
    hidden = gate_weight.shape[0]
    out = torch.empty(*x.shape[:-1], hidden, dtype=x.dtype, device=x.device)
    if rows.shape[0] > 0:
        tensor_cores = x.element_size() < 4 and (interpreting() or machine().computes_like((8, 0)))
        block_rows, block_hidden, block_k, stages = TENSOR_CORE_TILE if tensor_cores else PLAIN_TILE
        matmul_swiglu_kernel[(triton.cdiv(rows.shape[0], block_rows) * triton.cdiv(hidden, block_hidden),)](
            rows, gate_weight, up_weight, out, rows.shape[0], hidden, rows.shape[1], rows.stride(0),
            gate_weight.stride(0), up_weight.stride(0), ROWS_OF_BAND=ROWS_OF_BAND, BLOCK_ROWS=block_rows,
            BLOCK_HIDDEN=block_hidden, BLOCK_K=block_k, num_warps=NUM_WARPS, num_stages=stages,
        )  # fmt: skip
    return out


@torch.library.custom_op(
    "course_lib::matmul_swiglu", mutates_args=(), schema="(Tensor x, Tensor gate_weight, Tensor up_weight) -> Tensor"
)
def matmul_swiglu_operator(x, gate_weight, up_weight):
    """As an operator: why, and what is registered for one, is told in `course_lib.kernels.attention.operator`."""
    return matmul_swiglu_forward(x, gate_weight, up_weight)


@matmul_swiglu_operator.register_fake
def _(x, gate_weight, up_weight):
    return x.new_empty((*x.shape[:-1], gate_weight.shape[0]))


def keep_all(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def gradients(ctx, out_gradient):
    """Of x and both weights. Made of operators that have no second derivative, so it has none either."""
    x, gate_weight, up_weight = ctx.saved_tensors
    gate, up = F.linear(x, gate_weight), F.linear(x, up_weight)
    gate_gradient, up_gradient = swiglu_backward_operator(gate, up, out_gradient)
    x_gradient = gate_gradient @ gate_weight + up_gradient @ up_weight
    rows = x.reshape(-1, x.shape[-1])
    weight_gradients = [
        gradient.reshape(-1, gradient.shape[-1]).t() @ rows for gradient in (gate_gradient, up_gradient)
    ]
    return x_gradient, *weight_gradients


matmul_swiglu_operator.register_autograd(gradients, setup_context=keep_all)


def matmul_swiglu(x, gate_weight, up_weight):
    """silu(x · gate_weightᵀ) · (x · up_weightᵀ) with a gradient, for autograd and `torch.compile`.

    Shapes, dtypes and errors are those of `matmul_swiglu_forward`. A second derivative raises a RuntimeError.
    """
    return matmul_swiglu_operator(x, gate_weight, up_weight)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: 16 bits with tensor cores and without, and 32 bits."""
    cases = []
    for kind, (block_rows, block_hidden, block_k, stages), archs, instruction in (
        ("fp16", TENSOR_CORE_TILE, tuple(arch for arch in ARCHITECTURES if arch >= 80), TENSOR_CORES),
        ("fp16", PLAIN_TILE, (75,), None),
        ("fp32", PLAIN_TILE, tuple(ARCHITECTURES), None),
    ):
        constants = {"ROWS_OF_BAND": ROWS_OF_BAND, "BLOCK_ROWS": block_rows, "BLOCK_HIDDEN": block_hidden,
                     "BLOCK_K": block_k}  # fmt: skip
        signature = signature_of(matmul_swiglu_kernel, kind)
        cases.append(CompileCase(matmul_swiglu_kernel, signature, constants, num_warps=NUM_WARPS, num_stages=stages,
                                 archs=archs, instruction=instruction, label=f"{kind} {block_rows}"))  # fmt: skip
    return cases
