"""What stands between the products of an expert's backward pass: the gate, and the router's weight, in one pass.

With g and u the gate and up of a place, d the gradient of the token's output times `down`, [hidden], w its weight:

    gradient of w      Σ d · silu(g) · u        what the choice gave, times what was asked of it: no output is kept
    weighted hidden    w · silu(g) · u          for the gradient of `down`
    gradient of g      w · d · u · σ(g) · (1 + g · (1 - σ(g)))
    gradient of u      w · d · silu(g)

FLOPs: about 18 a hidden number. Bytes in 16 bits: 6 read and 6 written a hidden number of each slot. Arithmetic is in
float32, rounded once. Each program has one place; those without a slot are neither read nor written.

Source: Shazeer, GLU variants improve transformer, arXiv 2002.05202.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.experts.arrange import Arrangement
from course_lib.kernels.fused.swiglu import swiglu_backward_reference, swiglu_reference

MOST_COLUMNS, NUM_WARPS = 1024, 4


@triton.jit
def gate_gradients_kernel(
    gate_up_pointer, hidden_gradient_pointer, slots_pointer, weights_pointer,
    gate_up_gradient_pointer, weighted_pointer, weights_gradient_pointer, hidden, sentinel, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one place. All tensors are contiguous."""
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_pointer + place)
    if slot < sentinel:
        weight = tl.load(weights_pointer + slot)
        element = weighted_pointer.dtype.element_ty
        total = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, hidden, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < hidden
            gates = place * 2 * hidden + column  # [BLOCK], and `hidden` behind them the numbers of up
            gate = tl.load(gate_up_pointer + gates, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
            up = tl.load(gate_up_pointer + gates + hidden, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
            gradient_place = hidden_gradient_pointer + place * hidden + column
            gradient = tl.load(gradient_place, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            total += gradient * silu * up
            slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
            gradient *= weight
            tl.store(weighted_pointer + place * hidden + column, (weight * silu * up).to(element), mask=inside)
            tl.store(gate_up_gradient_pointer + gates, (gradient * up * slope).to(element), mask=inside)
            tl.store(gate_up_gradient_pointer + gates + hidden, (gradient * silu).to(element), mask=inside)
        tl.store(weights_gradient_pointer + slot, tl.sum(total))


def gate_gradients(gate_up, hidden_gradient, arrangement: Arrangement, weights):
    """(gradient of gate and up, weighted hidden numbers, gradient of the weights) of what `expert_mlp` has checked.

    Args:
        gate_up: [places, 2 · hidden], a place's gate first and up behind it, contiguous.
        hidden_gradient: [places, hidden], the gradient of the token's output times `down`, contiguous.
        arrangement: of `arrange`.
        weights: float32 [tokens, k], contiguous.

    Returns [places, 2 · hidden] and [places, hidden], which hold anything where there is no slot, and float32
    [tokens, k] with 0 for choices that are not served.
    """
    gate_up_gradient, weighted = torch.empty_like(gate_up), torch.empty_like(hidden_gradient)
    weights_gradient = torch.zeros_like(weights)
    places, hidden = hidden_gradient.shape
    if places:
        gate_gradients_kernel[(places,)](
            gate_up, hidden_gradient, arrangement.slots, weights, gate_up_gradient, weighted, weights_gradient,
            hidden, arrangement.sentinel, min(MOST_COLUMNS, triton.next_power_of_2(hidden)), num_warps=NUM_WARPS,
        )  # fmt: skip
    return gate_up_gradient, weighted, weights_gradient


def gate_gradients_reference(gate_up, hidden_gradient, arrangement, weights):
    """The plain PyTorch meaning, with zeros where there is no slot."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    served = arrangement.slots < arrangement.sentinel
    slots = arrangement.slots[served].long()
    (gate, up), asked = gate_up[served].to(wide).chunk(2, dim=1), hidden_gradient[served].to(wide)
    weight = weights.flatten()[slots, None]
    found = weight * torch.cat(swiglu_backward_reference(gate, up, asked), dim=1), weight * swiglu_reference(gate, up)
    results = torch.zeros_like(gate_up), torch.zeros_like(hidden_gradient), torch.zeros_like(weights)
    for result, rows in zip(results, found):
        result[served] = rows.to(result.dtype)
    results[2].view(-1)[slots] = (asked * swiglu_reference(gate, up)).sum(dim=1).to(weights.dtype)
    return results


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    types = {"slots_pointer": "*i32", "weights_pointer": "*fp32", "weights_gradient_pointer": "*fp32"}
    cases = []
    for kind in ("fp16", "fp32"):
        signature = signature_of(gate_gradients_kernel, kind, **types)
        cases.append(CompileCase(gate_gradients_kernel, signature, {"BLOCK": MOST_COLUMNS}, num_warps=NUM_WARPS,
                                 divisible=[name for name in signature if name != "sentinel"], label=kind))  # fmt: skip
    return cases
