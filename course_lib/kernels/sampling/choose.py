"""A token for each row of logits: temperature, top-k, top-p and min-p, without sorting (see `reference.py`).

Sorting 128,256 numbers to use 50 of them moves each of them many times. Four launches do without:

    `scan.py`, maxima    the largest key of each group of 64 tokens
    `scan.py`, draws     rows without top-k: each group's winner by weight / noise, and the row's weight
    `scan.py`, weights   rows with top-p and without top-k: what stands before the two likeliest answers
    choose               a program a row: top-k (see `top_k.py`), and the winner among what the filters keep

**Top-p by draws.** The winner among all that is left is *the* answer if top-p keeps it: a winner among more tokens also
wins among fewer. It is kept if all that stands before it weighs less than top_p of the whole, which takes a pass of
sums. If not, neither is whatever stands after it: it is the pivot, and the next winner is sought before it. A draw
meets a token that is kept with a chance of top_p, so that there are few rounds: 1.1 on average at 0.9, and
ln(1 / top_p) + 1 where top_p is small. A group whose winner is now behind the edge is drawn from again when it comes
first, and not before.

**Min-p** is a comparison with the largest weight, which is 1.

Captured in a CUDA graph as it is: nothing waits, and shapes alone say what is allocated.

Sources: FlashInfer, Sorting-free GPU kernels for LLM sampling, flashinfer.ai, March 2025 (draws as pivots); Holtzman et
al., The curious case of neural text degeneration, arXiv 1904.09751 (top-p); Nguyen et al., arXiv 2407.01082 (min-p).
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import interpreting
from course_lib.kernels.common.cache_checks import check_indices
from course_lib.kernels.common.checks import check_dimensions, check_rows, check_runnable, check_tensor
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.sampling.listed import draw_listed, weight_before
from course_lib.kernels.sampling.noise import row_key
from course_lib.kernels.sampling.parts import (
    LAST_TOKEN,
    LEAST,
    LOWEST_KEY,
    NAN_KEY,
    chances,
    exponents_of,
    key_of,
    load_groups,
    load_options,
    number_of,
    reaches,
)
from course_lib.kernels.sampling.scan import (
    CHUNK_TOKENS,
    LEFT,
    OPTIONS,
    candidates,
    draws_kernel,
    load_chunks,
    maxima_kernel,
    weights_kernel,
)
from course_lib.kernels.sampling.scan import NUM_WARPS as SCAN_WARPS
from course_lib.kernels.sampling.top_k import last_of_top_k, list_groups

GROUP = 64
MOST_GROUPS = 8192  # of which the maxima are kept in registers; larger vocabularies have larger groups
TILE_TOKENS, NUM_WARPS = 8192, 16
LARGEST_VOCABULARY = MOST_GROUPS * CHUNK_TOKENS


@triton.jit(do_not_specialize=["groups", "chunks"])
def choose_kernel(
    logits_pointer,
    temperature_pointer,
    top_k_pointer,
    top_p_pointer,
    min_p_pointer,
    seeds_pointer,
    positions_pointer,
    maxima_pointer,
    list_pointer,
    best_chances_pointer,
    best_tokens_pointer,
    chunk_chances_pointer,
    chunk_tokens_pointer,
    totals_pointer,
    before_winner_pointer,
    before_second_pointer,
    chosen_pointer,
    vocabulary,
    groups,
    chunks,
    logits_stride,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """One program: the token of one row. Result: chosen int64 [rows]."""
    row = tl.program_id(0).to(tl.int64)
    row_pointer = logits_pointer + row * logits_stride
    list_row = list_pointer + row * groups
    allowed, temperature, top_k, top_p, min_p = load_options(
        row, temperature_pointer, top_k_pointer, top_p_pointer, min_p_pointer, vocabulary
    )
    place = tl.arange(0, GROUPS)  # [GROUPS]
    maxima = tl.load(maxima_pointer + row * groups + place, mask=place < groups, other=LOWEST_KEY)  # [GROUPS]
    largest_key = tl.max(maxima, axis=0)
    largest = number_of(largest_key, logits_pointer.dtype.element_ty)
    chosen = tl.full([], -1, tl.int32)
    if allowed & (largest > float("-inf")) & (largest < float("inf")):
        if temperature < LEAST:
            group = tl.min(tl.where(maxima == largest_key, place, GROUPS), axis=0)
            _logits, keys, token = load_groups(
                row_pointer, tl.full([1], 0, tl.int32) + group, vocabulary, GROUP
            )  # [1, GROUP]
            chosen = tl.min(tl.where(keys == largest_key, token, LAST_TOKEN))
        else:
            key = row_key(tl.load(seeds_pointer + row), tl.load(positions_pointer + row))
            best_chances_row = best_chances_pointer + row * groups
            best_tokens_row = best_tokens_pointer + row * groups
            is_listed = top_k > 0
            count = tl.full([], 0, tl.int32) + groups
            edge_key, edge_token = tl.full([], LOWEST_KEY, tl.int32), tl.full([], LAST_TOKEN, tl.int32)
            if is_listed:
                count = tl.minimum(top_k, count)
                lowest = tl.min(tl.where(place < groups, maxima, largest_key), axis=0)
                lowest = list_groups(maxima, lowest, largest_key, list_row, count, GROUPS)
                tl.debug_barrier()  # every thread sees the list
                if count < top_k:
                    lowest = tl.full([], LOWEST_KEY, tl.int32) + 1  # all groups: any token may be the last
                edge_key, edge_token = last_of_top_k(
                    row_pointer, list_row, count, vocabulary, lowest, largest_key, top_k, GROUP, TILE_GROUPS
                )
                total = draw_listed(
                    row_pointer, list_row, count, vocabulary, edge_key, edge_token, largest, temperature, min_p, key,
                    best_chances_row, best_tokens_row, GROUP, TILE_GROUPS, ASSEMBLY,
                )  # fmt: skip
                tl.debug_barrier()  # every thread sees the draws
            else:
                total = tl.sum(load_chunks(totals_pointer, row, chunks, 0, CHUNKS), axis=0)
            best = tl.load(best_chances_row + place, mask=place < count, other=float("-inf"))  # [GROUPS]
            tokens = tl.load(best_tokens_row + place, mask=place < count, other=0)  # [GROUPS]
            limit = tl.maximum(total.to(tl.float64) * top_p.to(tl.float64), 1.0)  # before the first token there is 0
            # Whatever reaches `sure` is known to be kept; nothing yet.
            sure_key, sure_token = tl.full([], NAN_KEY, tl.int32), tl.full([], -1, tl.int32)
            if top_p == 1.0:
                sure_key, sure_token = edge_key, edge_token
            elif top_k == 0:
                _logit, token, _logit, second_token = candidates(
                    row_pointer, chunk_chances_pointer, chunk_tokens_pointer, row, chunks, CHUNKS
                )
                before = tl.sum(load_chunks(before_winner_pointer, row, chunks, 0, CHUNKS), axis=0)
                before_second = tl.sum(load_chunks(before_second_pointer, row, chunks, 0, CHUNKS), axis=0)
                if before.to(tl.float64) < limit:
                    sure_key, sure_token = key_of(tl.load(row_pointer + token)), token
                elif before_second.to(tl.float64) < limit:
                    sure_key, sure_token = key_of(tl.load(row_pointer + second_token)), second_token
                    edge_key, edge_token = key_of(tl.load(row_pointer + token)), token - 1
                else:
                    edge_key, edge_token = key_of(tl.load(row_pointer + second_token)), second_token - 1
            while chosen < 0:
                _chance, winner = tl.max(best, axis=0, return_indices=True)
                drawn = tl.sum(tl.where(place == winner, tokens, 0), axis=0)
                drawn_logit = tl.load(row_pointer + drawn)
                drawn_key = key_of(drawn_logit)
                if reaches(drawn_key, drawn, sure_key, sure_token):
                    chosen = drawn
                elif reaches(drawn_key, drawn, edge_key, edge_token):
                    before = weight_before(
                        row_pointer, list_row, is_listed, count, vocabulary, drawn_logit.to(tl.float32), drawn,
                        largest, temperature, GROUP, TILE_GROUPS,
                    )  # fmt: skip
                    if before.to(tl.float64) < limit:
                        chosen = drawn
                    else:
                        edge_key, edge_token = drawn_key, drawn - 1
                else:
                    # Drawn before the edge was where it is: this group's winner is another one now.
                    logits, keys, token = load_groups(
                        row_pointer, tl.full([1], 0, tl.int32) + drawn // GROUP, vocabulary, GROUP
                    )  # [1, GROUP]
                    exponents = exponents_of(logits, largest, temperature)
                    kept = reaches(keys, token, edge_key, edge_token) & (tl.exp2(exponents) >= min_p)
                    again = chances(exponents, token, kept, key, ASSEMBLY)
                    best_again = tl.max(again)
                    token_again = tl.min(tl.where(again == best_again, token, LAST_TOKEN))
                    best = tl.where(place == winner, best_again, best)
                    tokens = tl.where(place == winner, token_again, tokens)
    tl.store(chosen_pointer + row, chosen.to(tl.int64))


def sample(logits, temperature, top_k, top_p, min_p, seeds, positions) -> torch.Tensor:
    """One token for each row, drawn by its own options: int64 [rows].

    A row's token depends on its own logits, options, seed and position, and on nothing else: not on the rows beside it,
    its place among them, or how the work is cut.

    Args:
        logits: [rows, vocabulary], float32, float16 or bfloat16, with contiguous rows that may lie apart.
        temperature: float32 [rows], 0 for the largest logit, the first of equals (and so below 1e-5).
        top_k: int32 or int64 [rows]; 0, or the vocabulary and more, keeps all.
        top_p: float32 [rows], 0 to 1; 1 keeps all, 0 the first alone.
        min_p: float32 [rows], 0 to 1; 0 keeps all.
        seeds, positions: int32 or int64 [rows]: a request's seed, and how many tokens stand before the new one.

    Returns the tokens. A row gets -1 if its logits hold NaN or +inf or are all -inf, or if an option is outside of its
    range: values on the GPU raise nothing, since to look at them is to wait.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check(logits, {"temperature": temperature, "top_p": top_p, "min_p": min_p},
          {"top_k": top_k, "seeds": seeds, "positions": positions})  # fmt: skip
    rows, vocabulary = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return chosen
    group = max(GROUP, triton.next_power_of_2(triton.cdiv(vocabulary, MOST_GROUPS)))
    groups, chunks = triton.cdiv(vocabulary, group), triton.cdiv(vocabulary, CHUNK_TOKENS)
    maxima, listed, best_tokens, best_chances = workspace(4, rows, groups, torch.int32, logits.device)
    chunk_maxima, chunk_tokens, chunk_chances = workspace(3, rows, chunks, torch.int32, logits.device)
    best_chances, chunk_chances = best_chances.view(torch.float32), chunk_chances.view(torch.float32)
    totals, before_winner, before_second = workspace(3, rows, chunks, torch.int64, logits.device)
    sizes = (vocabulary, groups, chunks, logits.stride(0))
    options = (temperature, top_k, top_p, min_p, seeds, positions)
    cut = {"GROUP": group, "CHUNK_GROUPS": CHUNK_TOKENS // group}
    every_chunk = triton.next_power_of_2(chunks)
    maxima_kernel[(rows, chunks)](logits, maxima, chunk_maxima, *sizes, **cut, num_warps=SCAN_WARPS)
    draws_kernel[(rows, chunks)](
        logits, *options, chunk_maxima, best_chances, best_tokens, chunk_chances, chunk_tokens, totals, *sizes, **cut,
        CHUNKS=every_chunk, ASSEMBLY=not interpreting(), num_warps=SCAN_WARPS,
    )  # fmt: skip
    weights_kernel[(rows, chunks)](
        logits, temperature, top_k, top_p, min_p, chunk_maxima, chunk_chances, chunk_tokens, before_winner,
        before_second, vocabulary, chunks, logits.stride(0), **cut, CHUNKS=every_chunk, num_warps=SCAN_WARPS,
    )  # fmt: skip
    choose_kernel[(rows,)](
        logits, *options, maxima, listed, best_chances, best_tokens, chunk_chances, chunk_tokens, totals,
        before_winner, before_second, chosen, *sizes, GROUP=group,
        TILE_GROUPS=TILE_TOKENS // group, GROUPS=triton.next_power_of_2(groups), CHUNKS=every_chunk,
        ASSEMBLY=not interpreting(), num_warps=NUM_WARPS,
    )  # fmt: skip
    return chosen


def workspace(count: int, rows: int, columns: int, dtype: torch.dtype, device) -> tuple[torch.Tensor, ...]:
    """Matrices in one allocation."""
    return torch.empty(count, rows, columns, dtype=dtype, device=device).unbind()


def check(logits, numbers: dict, integers: dict) -> None:
    """Raise a ValueError unless there are logits, and one number and one integer of each name for each row."""
    check_runnable("logits", logits)
    check_rows("logits", logits, "[rows, vocabulary]", empty_allowed=True)
    rows, vocabulary = logits.shape
    if not 1 <= vocabulary <= LARGEST_VOCABULARY:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; its vocabulary must be 1 to {LARGEST_VOCABULARY:,}.")
    for name, tensor in numbers.items():
        check_tensor(name, tensor, (torch.float32,))
        check_dimensions(name, tensor, "[rows]", empty_allowed=True)
    for name, tensor in integers.items():
        check_tensor(name, tensor)
        check_indices(name, tensor, "[rows]", (rows,), logits.device)
    for name, tensor in numbers.items():
        if tensor.shape != (rows,) or tensor.device != logits.device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}; it must be "
                f"contiguous ({rows},), one for each row of logits, on {logits.device}."
            )


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: Llama 3's vocabulary in 16 and in 32 bits."""
    named = {name: type for name, type in (OPTIONS | LEFT).items() if name in choose_kernel.arg_names}
    named |= {"list_pointer": "*i32", "chosen_pointer": "*i64"}
    constants = {"GROUP": GROUP, "TILE_GROUPS": TILE_TOKENS // GROUP, "GROUPS": 2048, "CHUNKS": 32,
                 "ASSEMBLY": True}  # fmt: skip
    return [
        CompileCase(choose_kernel, signature_of(choose_kernel, kind, **named), constants, num_warps=NUM_WARPS,
                    divisible=["logits_pointer", "vocabulary", "logits_stride"], label=kind)
        for kind in ("fp16", "bf16", "fp32")
    ]  # fmt: skip
