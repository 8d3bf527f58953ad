"""Two passes over all logits, spread over the GPU: the largest of each group, and the token that would win in it.

    maxima   reads the logits once                    the largest key of each group, and of each chunk of groups
    draws    reads them again, from the L2 cache      each group's best chance and its token; each chunk's weight

A row is cut into chunks of groups, a program each, so that a batch of 1 fills the GPU too. `choose.py` makes a row's
token of what they leave; without a filter the first draw is the answer. A row with top-k, which is cut before it is
drawn from, or with temperature 0, is left out by the second.

For 128,256 logits in 16 bits: 256 KB a row and pass; 16 KB are left behind. FLOPs: about 40 integer and float
operations a logit for its noise, which is why only what can win by it is drawn.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.sampling.noise import row_key
from course_lib.kernels.sampling.parts import (
    LEAST,
    LOWEST_KEY,
    chances,
    exponents_of,
    load_groups,
    load_options,
    number_of,
    whole,
)

CHUNK_TOKENS, NUM_WARPS = 4096, 8
OPTIONS = {"temperature_pointer": "*fp32", "top_k_pointer": "*i64", "top_p_pointer": "*fp32", "min_p_pointer": "*fp32",
           "seeds_pointer": "*i64", "positions_pointer": "*i64"}  # fmt: skip
LEFT = {"maxima_pointer": "*i32", "chunk_maxima_pointer": "*i32", "best_chances_pointer": "*fp32",
        "best_tokens_pointer": "*i32", "totals_pointer": "*i64"}  # fmt: skip


@triton.jit(do_not_specialize=["groups", "chunks"])
def maxima_kernel(
    logits_pointer,
    maxima_pointer,
    chunk_maxima_pointer,
    vocabulary,
    groups,
    chunks,
    logits_stride,
    GROUP: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
):
    """One program: the largest keys of one chunk. Results: maxima int32 [rows, groups], of chunks [rows, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)  # [CHUNK_GROUPS]
    _logits, keys, _token = load_groups(logits_pointer + row * logits_stride, group, vocabulary, GROUP)
    maxima = tl.max(keys, axis=1)  # [CHUNK_GROUPS]
    tl.store(maxima_pointer + row * groups + group, maxima, mask=group < groups)
    tl.store(chunk_maxima_pointer + row * chunks + chunk, tl.max(keys))


@triton.jit(do_not_specialize=["groups", "chunks"])
def draws_kernel(
    logits_pointer,
    temperature_pointer,
    top_k_pointer,
    top_p_pointer,
    min_p_pointer,
    seeds_pointer,
    positions_pointer,
    chunk_maxima_pointer,
    best_chances_pointer,
    best_tokens_pointer,
    totals_pointer,
    vocabulary,
    groups,
    chunks,
    logits_stride,
    GROUP: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """One program: the draws of one chunk, if its row is drawn from whole.

    Results: best_chances float32 and best_tokens int32 [rows, groups], totals int64 [rows, chunks].
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _allowed, temperature, top_k, _top_p, min_p = load_options(
        row, temperature_pointer, top_k_pointer, top_p_pointer, min_p_pointer, vocabulary
    )
    if (temperature >= LEAST) & (top_k == 0):
        every_chunk = tl.arange(0, CHUNKS)  # [CHUNKS]
        chunk_maxima = tl.load(chunk_maxima_pointer + row * chunks + every_chunk, mask=every_chunk < chunks,
                               other=LOWEST_KEY)  # [CHUNKS]  # fmt: skip
        largest = number_of(tl.max(chunk_maxima, axis=0), logits_pointer.dtype.element_ty)
        group = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)  # [CHUNK_GROUPS]
        logits, _keys, token = load_groups(
            logits_pointer + row * logits_stride, group, vocabulary, GROUP
        )  # [CHUNK_GROUPS, GROUP]
        exponents = exponents_of(logits, largest, temperature)
        weights = tl.exp2(exponents)  # [CHUNK_GROUPS, GROUP]
        key = row_key(tl.load(seeds_pointer + row), tl.load(positions_pointer + row))
        best, place = tl.max(
            chances(exponents, token, weights >= min_p, key, ASSEMBLY), axis=1, return_indices=True
        )  # [CHUNK_GROUPS]
        tl.store(best_chances_pointer + row * groups + group, best, mask=group < groups)
        tl.store(best_tokens_pointer + row * groups + group, group * GROUP + place, mask=group < groups)
        tl.store(totals_pointer + row * chunks + chunk, tl.sum(whole(weights)))


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: Llama 3's vocabulary in 16 and in 32 bits."""
    cases = []
    for kernel in (maxima_kernel, draws_kernel):
        for kind in ("fp16", "bf16", "fp32"):
            named = {name: type for name, type in (OPTIONS | LEFT).items() if name in kernel.arg_names}
            constants = {"GROUP": 64, "CHUNK_GROUPS": CHUNK_TOKENS // 64, "CHUNKS": 32, "ASSEMBLY": True}
            cases.append(CompileCase(kernel, signature_of(kernel, kind, **named),
                                     {name: value for name, value in constants.items() if name in kernel.arg_names},
                                     num_warps=NUM_WARPS, label=kind,
                                     divisible=["logits_pointer", "vocabulary", "logits_stride"]))  # fmt: skip
    return cases
