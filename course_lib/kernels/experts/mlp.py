"""The feed-forward block of a mixture of experts, and PyTorch's operator behind it: `torch.ops.course_lib.expert_mlp`.

    hidden[slot] = silu(x[token] · gateᵀ) · (x[token] · upᵀ)         gate, up, down: of the slot's expert
    out[token]   = Σ over its choices of weight · (hidden[slot] · downᵀ)

Three launches once the choices are arranged: a gated grouped product that reads tokens where they lie, a grouped
product from place to place, and the sum back to tokens. FLOPs: 6 · slots · width · hidden, where a dense block as large
as all experts together would do 6 · tokens · width · hidden · experts. Stored between the launches, in 16 bits:
2 · hidden and 2 · width bytes a slot. Rounded there, and at the end: hidden numbers, each choice's row, and the sum.

Backward, with dO the gradient of out, and nothing kept of the forward but its arguments:

    gate, up   again, 4 · slots · width · hidden FLOPs in place of 4 · hidden bytes a slot
    D          dO[token] · down, the gradient of a hidden number before the weight
    gradients  of weight, gate and up from D, in one pass over hidden numbers: `gate_gradients`
    of down    Σ over the expert's slots of dO[token]ᵀ · (weight · hidden)
    of gate_up Σ over the expert's slots of (its gradient)ᵀ · x[token]
    of x       each slot's (gradient of gate and up) · gate_up, summed back to tokens

16 · slots · width · hidden FLOPs, 2.7 times the forward's. Nothing is added by atomics: the same bits at every call.
Why an operator, and what is registered for one, is told in `course_lib.kernels.attention.operator`.

Source: Shazeer et al., Outrageously Large Neural Networks, arXiv 1701.06538; Gale et al., MegaBlocks, arXiv 2211.15841.
"""

import torch

from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.experts.arrange import Arrangement, arrange
from course_lib.kernels.experts.checks import check_expert_mlp
from course_lib.kernels.experts.combine import combine
from course_lib.kernels.experts.gate_gradients import gate_gradients
from course_lib.kernels.experts.grouped import grouped_product
from course_lib.kernels.experts.tiles import expert_tiles
from course_lib.kernels.experts.weight_gradients import weight_gradient
from course_lib.kernels.fused.gradients import no_second_derivative, rows_of_gradient
from course_lib.kernels.products.epilogue import product_reference

FORWARD = "(Tensor x, Tensor gate_up, Tensor down, Tensor experts, Tensor weights) -> Tensor"
BACKWARD = (
    "(Tensor x, Tensor gate_up, Tensor down, Tensor experts, Tensor weights, Tensor out_gradient)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def expert_mlp(x, gate_up, down, experts, weights):
    """Each token through its experts, [tokens, width], of x's dtype.

    Args:
        x: [tokens, width], float32, float16 or bfloat16, with contiguous rows that may lie apart; tokens may be 0.
        gate_up: [experts, 2 · hidden, width], the rows of each expert's gate and then as many of up; x's dtype, each
            expert's rows contiguous.
        down: [experts, width, hidden], the same.
        experts: integers [tokens, k], as `route` gives them; a choice of -1 is not served and adds nothing.
        weights: float32 [tokens, k], contiguous, how much each choice counts.

    Gradients reach x, gate_up, down and weights, once: a second derivative raises a RuntimeError. An expert without a
    token gets zeros, and so does the weight of a choice that is not served. The host never waits, so it can be captured
    in a CUDA graph; `torch.compile(fullgraph=True)` takes it as one operator.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    if not torch.compiler.is_compiling():
        check_expert_mlp(x, gate_up, down, experts, weights)
    return expert_mlp_operator(x, gate_up, down, experts, weights)


def expert_mlp_reference(x, gate_up, down, experts, weights):
    """The plain PyTorch meaning, expert by expert, with gradients; it rounds where the kernels do."""
    out = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in range(len(gate_up)):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        hidden = product_reference(x[token], gate_up[expert], gated=True)
        rows = product_reference(hidden, down[expert])
        out = out.index_add(0, token, rows * weights[token, choice, None])
    return out.to(x.dtype)


def arranged(x, gate_up, experts) -> Arrangement:
    """The choices in tiles as tall as the experts have tokens."""
    count = len(gate_up)
    tiles = expert_tiles(architecture_of(x.device), x.dtype, experts.numel() / count)
    return arrange(experts, count, tiles.rows)


@torch.library.custom_op("course_lib::expert_mlp", mutates_args=(), schema=FORWARD)
def expert_mlp_operator(x, gate_up, down, experts, weights):
    """Arguments and result as for `expert_mlp`."""
    arrangement = arranged(x, gate_up, experts)
    hidden = grouped_product(x, gate_up, arrangement, gated=True)  # [places, hidden]
    return combine(grouped_product(hidden, down, arrangement, gathered=False), arrangement, weights)


@expert_mlp_operator.register_fake
def _(x, gate_up, down, experts, weights):
    return x.new_empty(x.shape)


@torch.library.custom_op("course_lib::expert_mlp_backward", mutates_args=(), schema=BACKWARD)
def expert_mlp_backward_operator(x, gate_up, down, experts, weights, out_gradient):
    """The gradients of x, gate_up, down and weights."""
    arrangement = arranged(x, gate_up, experts)
    asked = rows_of_gradient(out_gradient)  # [tokens, width]
    before_gate = grouped_product(x, gate_up, arrangement)  # [places, 2 · hidden]
    before_weight = grouped_product(asked, down, arrangement, transposed=True)  # [places, hidden]
    gate_up_rows, weighted, weights_gradient = gate_gradients(before_gate, before_weight, arrangement, weights)
    x_rows = grouped_product(gate_up_rows, gate_up, arrangement, gathered=False, transposed=True)  # [places, width]
    return (
        combine(x_rows, arrangement),
        weight_gradient(gate_up_rows, x, arrangement),
        weight_gradient(weighted, asked, arrangement, transposed=True),
        weights_gradient,
    )


@expert_mlp_backward_operator.register_fake
def _(x, gate_up, down, experts, weights, out_gradient):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (x, gate_up, down, weights))


def keep_arguments(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def gradients(ctx, out_gradient):
    x, gate_up, down, weights = expert_mlp_backward_operator(*ctx.saved_tensors, out_gradient)
    return x, gate_up, down, None, weights


expert_mlp_operator.register_autograd(gradients, setup_context=keep_arguments)
expert_mlp_backward_operator.register_autograd(no_second_derivative("the experts' block"))
