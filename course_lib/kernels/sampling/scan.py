"""Three passes over all logits, spread over the GPU: each group's largest, each group's winner, what leads the winner.

    maxima    reads the logits                       the largest key of each group, and of each chunk of groups
    draws     reads them again, from the L2 cache    the winner of each group and of each chunk; each chunk's weight
    weights   reads them again, from the L2 cache    for two candidates, how much of each chunk stands before them

A row is cut into chunks of groups, a program each, so that a batch of 1 fills the GPU too. `choose.py` makes a row's
token of what they leave. A row with temperature 0 needs the first pass only, and so does one with top-k, which is cut
before it is drawn from; `weights` is for top-p.

The two candidates of `weights` are the row's winner, and the best of the chunks' winners that stands before it. If
top-p does not keep the first, it mostly keeps the second: of 1,000 rows with top-p 0.9 only 5 to 9 need another pass.

For 128,256 logits in 16 bits: 256 KB a row and pass; 16 KB are left behind. The second pass takes about 55 instructions
a logit, most of them for its noise.
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
    reaches,
    whole,
)

CHUNK_TOKENS, NUM_WARPS = 4096, 8
OPTIONS = {"temperature_pointer": "*fp32", "top_k_pointer": "*i64", "top_p_pointer": "*fp32", "min_p_pointer": "*fp32",
           "seeds_pointer": "*i64", "positions_pointer": "*i64"}  # fmt: skip
LEFT = {"maxima_pointer": "*i32", "chunk_maxima_pointer": "*i32", "best_chances_pointer": "*fp32",
        "best_tokens_pointer": "*i32", "chunk_chances_pointer": "*fp32", "chunk_tokens_pointer": "*i32",
        "totals_pointer": "*i64", "before_winner_pointer": "*i64", "before_second_pointer": "*i64"}  # fmt: skip


@triton.jit
def load_chunks(pointer, row, chunks, other, CHUNKS: tl.constexpr):
    """What the chunks of a row have left, [CHUNKS]."""
    chunk = tl.arange(0, CHUNKS)
    return tl.load(pointer + row * chunks + chunk, mask=chunk < chunks, other=other)


@triton.jit
def candidates(row_pointer, chunk_chances_pointer, chunk_tokens_pointer, row, chunks, CHUNKS: tl.constexpr):
    """(logit, token) of a row's winner, and of the best winner of a chunk that stands before it, or the same again."""
    chance = load_chunks(chunk_chances_pointer, row, chunks, float("-inf"), CHUNKS)  # [CHUNKS]
    tokens = load_chunks(chunk_tokens_pointer, row, chunks, 0, CHUNKS)  # [CHUNKS]
    logits = tl.load(row_pointer + tokens).to(tl.float32)  # [CHUNKS]
    _chance, winner = tl.max(chance, axis=0, return_indices=True)
    place = tl.arange(0, CHUNKS)
    token = tl.sum(tl.where(place == winner, tokens, 0), axis=0)
    logit = tl.load(row_pointer + token).to(tl.float32)
    before = reaches(logits, tokens, logit, token - 1)
    _chance, second = tl.max(tl.where(before, chance, float("-inf")), axis=0, return_indices=True)
    second_token = tl.sum(tl.where(place == second, tokens, 0), axis=0)
    second_token = tl.where(tl.max(before.to(tl.int32), axis=0) > 0, second_token, token)
    return logit, token, tl.load(row_pointer + second_token).to(tl.float32), second_token


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


@triton.jit
def largest_of(chunk_maxima_pointer, row, chunks, element: tl.constexpr, CHUNKS: tl.constexpr):
    """The largest logit of a row, float32."""
    return number_of(tl.max(load_chunks(chunk_maxima_pointer, row, chunks, LOWEST_KEY, CHUNKS), axis=0), element)


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
    chunk_chances_pointer,
    chunk_tokens_pointer,
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

    Results: best_chances float32 and best_tokens int32 [rows, groups]; of chunks the same, and totals int64.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _allowed, temperature, top_k, _top_p, min_p = load_options(
        row, temperature_pointer, top_k_pointer, top_p_pointer, min_p_pointer, vocabulary
    )
    if (temperature >= LEAST) & (top_k == 0):
        largest = largest_of(chunk_maxima_pointer, row, chunks, logits_pointer.dtype.element_ty, CHUNKS)
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
        best_token = group * GROUP + place
        tl.store(best_tokens_pointer + row * groups + group, best_token, mask=group < groups)
        chunk_best, winner = tl.max(best, axis=0, return_indices=True)
        winner_token = tl.sum(tl.where(tl.arange(0, CHUNK_GROUPS) == winner, best_token, 0), axis=0)
        tl.store(chunk_chances_pointer + row * chunks + chunk, chunk_best)
        tl.store(chunk_tokens_pointer + row * chunks + chunk, winner_token)
        tl.store(totals_pointer + row * chunks + chunk, tl.sum(whole(weights)))


@triton.jit(do_not_specialize=["chunks"])
def weights_kernel(
    logits_pointer,
    temperature_pointer,
    top_k_pointer,
    top_p_pointer,
    min_p_pointer,
    chunk_maxima_pointer,
    chunk_chances_pointer,
    chunk_tokens_pointer,
    before_winner_pointer,
    before_second_pointer,
    vocabulary,
    chunks,
    logits_stride,
    GROUP: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One program: the weight in one chunk of all that stands before each candidate. Results: int64 [rows, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _allowed, temperature, top_k, top_p, _min_p = load_options(
        row, temperature_pointer, top_k_pointer, top_p_pointer, min_p_pointer, vocabulary
    )
    if (temperature >= LEAST) & (top_k == 0) & (top_p < 1.0):
        row_pointer = logits_pointer + row * logits_stride
        largest = largest_of(chunk_maxima_pointer, row, chunks, logits_pointer.dtype.element_ty, CHUNKS)
        logit, token, second_logit, second_token = candidates(
            row_pointer, chunk_chances_pointer, chunk_tokens_pointer, row, chunks, CHUNKS
        )
        group = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)  # [CHUNK_GROUPS]
        logits, _keys, tokens = load_groups(row_pointer, group, vocabulary, GROUP)  # [CHUNK_GROUPS, GROUP]
        weights = whole(tl.exp2(exponents_of(logits, largest, temperature)))
        before = tl.where(reaches(logits, tokens, logit, token - 1), weights, 0)
        before_second = tl.where(reaches(logits, tokens, second_logit, second_token - 1), weights, 0)
        tl.store(before_winner_pointer + row * chunks + chunk, tl.sum(before))
        tl.store(before_second_pointer + row * chunks + chunk, tl.sum(before_second))


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: Llama 3's vocabulary in 16 and in 32 bits."""
    cases = []
    for kernel in (maxima_kernel, draws_kernel, weights_kernel):
        for kind in ("fp16", "bf16", "fp32"):
            named = {name: type for name, type in (OPTIONS | LEFT).items() if name in kernel.arg_names}
            constants = {"GROUP": 64, "CHUNK_GROUPS": CHUNK_TOKENS // 64, "CHUNKS": 32, "ASSEMBLY": True}
            cases.append(CompileCase(kernel, signature_of(kernel, kind, **named),
                                     {name: value for name, value in constants.items() if name in kernel.arg_names},
                                     num_warps=NUM_WARPS, label=kind,
                                     divisible=["logits_pointer", "vocabulary", "logits_stride"]))  # fmt: skip
    return cases
