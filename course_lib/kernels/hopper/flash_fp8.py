"""FlashAttention in 8 bits on Hopper: the kernel of `flash_attention_hopper`, all its operands in e4m3.

    out = softmax(scale · Q Kᵀ) V,    Q = codes · scale of the block,  K likewise,  V = codes · scale of the channel

Products go twice as fast as in 16 bits, exponentials do not: per 128 × 128 block at head dimension 128 the matrix units
need 1024 cycles of a multiprocessor, and so do the exponentials. At head dimension 256 the products need twice that.
`operands` has what 8 bits change in the kernel; `quantised.fp8` makes the codes.

Where the time went at head dimension 128 before consumers used named barriers (an H200, 16,384 tokens, no mask). A step
of the two consumers, 64 queries each and 128 keys, took 2,185 cycles, and no unit was busy for more than half of them:
products 1,024, exponentials 1,056, instructions 882. The rest was waiting: a consumer had its scores after about 550
cycles and their weights 1,170 cycles later, and two consumers did not fill each other's gaps. TFLOP/s, in turns, where
bf16 reached 719 and this kernel 812; what leaves parts out computed nonsense, and waited for the output as the second
line says:

    scores asked for a block ahead                          906    under a mask it has too few registers
    output waited for before the exponentials               837    causal it is 2 % slower than this kernel
    without exponentials                                  1,071
    without exponentials, rounding and factors            1,186

So even exponentials that cost nothing would have made 8 bits 1.5 times as fast as 16, not twice. Blocks of 64 keys left
registers to ask a block ahead under a mask as well, but that took 1.09 times as long (causal 1.12), and three consumers
with blocks of 64 keys 1.05 times. Turns at the matrix units, or queries in registers, gained nothing. Named barriers
made bf16 5 % faster; after that this kernel was 1.10 times as fast as bf16, causal 1.13 times.

FLOPs: as for `flash_attention_hopper`. Bytes: half as many for queries, keys and values; the output stays in 16 bits.

Source: Shah et al., FlashAttention-3, arXiv 2407.08608, section 3.3.
"""

import torch

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.attention_checks import check_window_and_scale
from course_lib.kernels.gluon.limits import machine_refusal
from course_lib.kernels.hopper import flash as sixteen_bits
from course_lib.kernels.hopper.launch import Arrangement, descriptor
from course_lib.kernels.quantised.fp8 import HEAD_DIMS, Fp8Inputs

ARRANGEMENTS = {  # by head dimension
    64: Arrangement(128, stages=4, query_buffers=2, consumers=3, turns=False),
    128: Arrangement(128, stages=4, query_buffers=2, consumers=2, turns=False),
    256: Arrangement(128, stages=2, query_buffers=1, consumers=2, turns=False),
}


def flash_attention_fp8(
    inputs: Fp8Inputs, *, causal=False, window=None, scale=None, return_lse=False, arrangement=None
):
    """Softmax attention of 8-bit inputs, on Hopper.

    Args:
        inputs: of `quantise_for_attention`; head_dim 64, 128 or 256.
        causal, window, scale, return_lse: see `flash_attention`.
        arrangement: an `Arrangement` to use, with key_rows of 64 or 128; by head dimension when None.

    Returns the output [batch, query_heads, query_length, head_dim] in the dtype that was quantised, or (output,
    log-sum-exp [batch, query_heads, query_length] float32); the same bits at every run. Weights are rounded to e4m3 as
    well, which alone puts the output off by 2.5 % of its size (root mean square, normal inputs).

    Raises a ValueError for a window or scale that `flash_attention` refuses, and for other inputs than those above; a
    RuntimeError where this machine cannot run the kernel.
    """
    if not isinstance(inputs, Fp8Inputs):
        raise ValueError(
            f"inputs is a {type(inputs).__name__}; give what quantise_for_attention(query, key, value) "
            "returns. flash_attention takes tensors of 16 and 32 bits."
        )
    query, key, value, dtype = inputs
    head_dim = query.codes.shape[3]
    check_window_and_scale(window, scale)
    if arrangement is not None and arrangement.key_rows not in (64, 128):
        raise ValueError(
            f"arrangement has key_rows {arrangement.key_rows}; keys have a scale for each 128, so a block "
            "of 64 or 128 is allowed."
        )
    refusal = machine_refusal(query.codes.device)
    if refusal is not None:
        raise refusal.error(f"flash_attention_fp8: {refusal.reason}")
    arrangement = arrangement or ARRANGEMENTS[head_dim]
    output = torch.empty(query.codes.shape, dtype=dtype, device=query.codes.device)
    lse = torch.empty(output.shape[:3], dtype=torch.float32, device=output.device) if return_lse else None
    values = descriptor(value.codes, head_dim, arrangement.key_rows)
    scales = query.scales, key.scales, value.scales
    sixteen_bits.launch(query.codes, key.codes, values, output, lse, scales, causal, window, scale, arrangement)
    return (output, lse) if return_lse else output


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    masks = {"keys_after": "i32"}, {"keys_before": "i32", "keys_after": "i32"}
    return [sixteen_bits.compile_case(head_dim, ARRANGEMENTS[head_dim], "fp8e4nv", **given)
            for head_dim in HEAD_DIMS for given in masks]  # fmt: skip
