"""Exercise 8.2: the kernel that attends over one split of the keys."""

from __future__ import annotations

import math

import torch

from course_lib.checker import (
    TRITON,
    Allocates,
    Case,
    Contiguous,
    Exercise,
    LaunchesTriton,
    Mistake,
    Moves,
    ReadByKernels,
)
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.edits import edits, model_of, without
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from exercises.ch08_flash_decoding.parts import BIG, FINITE_FOR_EMPTY, GRID_TURNED_ROUND, SKIPS_THE_WORK, partials
from exercises.topics.attention import close_to
from exercises.topics.attention_inputs import one_above_many, products_beyond_16_bits
from exercises.topics.decode import AS_GOOD, cached
from exercises.topics.decode_inputs import (
    SCORES,
    UNUSED,
    cache,
    caches_beyond_32_bits,
    far_below_finite,
    fits,
    laid_apart,
    layouts,
    lengths,
)
from exercises.topics.decode_slips import (
    CACHE,
    EMPTY_SPLITS,
    HEADS,
    IN_16_BITS,
    LAGGING,
    LOG_SUM_EXP,
    OF_A_GROUP,
    ONE_OF_THE_NEXT_SPLIT,
    ONE_OF_THE_SPLIT_MISSING,
    OUT_OF_BOUNDS,
    OUTPUT,
    SOFTMAX,
    SPLIT_SIZES,
    SPLITS,
    TILES,
    UNGUARDED,
    keys_that_count,
    strides,
)
from exercises.topics.decode_steps import heads_of, of_all_rows, queries, rows_at, stored_parts, tiles, walk
from exercises.topics.evidence import (
    COMPUTED_IN_16_BITS,
    NAN_FROM_THE_START,
    ROUNDED_TO_16_BITS,
    all_nan,
    right_to_three_digits,
    stored_in_16_bits,
)
from exercises.topics.rising import (
    MAXIMUM_OF_THE_FIRST_TILE,
    cache_in_float16,
    lagging,
    risen_cache,
    split_scores,
    stays_behind,
)
from exercises.topics.running import start, step


def lagging_case():
    """Not on a GPU: its matrix units cut small products off at the last digit of a large sum, and may in float32."""
    arguments = (*cache_in_float16(Draw(82), lagging, 160), 1)
    return [Case("one split, float16, the last scores 11.5 above the first", arguments)]


def partial_cases(draw):
    cases = [
        Case("1 sequence, 128 keys in 2 splits, 4 query heads on 1 KV head", (*cached(draw, 4, 1, 32, [128], 128), 2)),
        Case("one split: nothing is split at all", (*cached(draw, 4, 2, 16, [100], 120), 1)),
        Case("lengths 1, 64 and 130 in 3 splits", (*cached(draw, 2, 1, 16, [1, 64, 130], 160), 3)),
        Case("the same shapes, other lengths", (*cached(draw, 2, 1, 16, [2, 63, 100], 160), 3)),
        Case("lengths 0 and 40 in 2 splits", (*cached(draw, 4, 1, 16, [0, 40], 64), 2)),
        Case("5 keys in 7 splits: the last two have none", (*cached(draw, 2, 1, 16, [5], 32), 7)),
        Case("scores near -1e20", (*far_below_finite(*cached(draw, 4, 1, 32, [20], 32)), 2)),
        Case("scores of ±150: exp overflows", (*cached(draw, 4, 1, 32, [150], 160, score=BIG), 2)),
        Case("one split of 300 keys, the last scores 160 above the first", (*risen_cache(draw), 1)),
        *([] if draw.on_gpu else lagging_case()),
        Case(
            "one split, float16, products of 81,920 before the scale",
            (*cache_in_float16(Draw(83), products_beyond_16_bits, 100), 1),
        ),
        Case(
            "one split, float16, 1,500 tokens, the first with nearly all the weight",
            (*cache_in_float16(Draw(84), one_above_many, 1500), 1),
        ),
        Case("70 query heads on 1 KV head", (*cached(Draw(70), 70, 1, 16, [40], 48), 2)),
        Case("20 query heads on 1 KV head", (*cached(draw, 20, 1, 16, [50], 64), 2), metered=True),
        Case("all strides apart, lengths 5 and 3", (*laid_apart(draw, *cached(draw, 4, 2, 16, [5, 3], 8)), 2)),
        Case("NaN in the slots behind each sequence", (*cached(draw, 4, 1, 16, [70, 33], 96, unused=math.nan), 2)),
        Case("300 keys, 2 KV heads, 3 splits, bytes counted", (*cached(draw, 8, 2, 32, [300], 320), 3), metered=True),
    ]
    query, *caches, lengths = cached(draw, 4, 2, 16, [5, 9, 3], 12)
    cases += beyond_32_bits(draw, "sequences", caches, lengths, 2, before=(query,))
    cases += caches_beyond_32_bits(draw, 2)
    if draw.on_gpu:
        arguments = cached(draw, 32, 8, 128, [5000, 1, 4097], 8192, dtype=torch.float16)
        cases.append(Case("3 sequences to 5000 keys, 32/8 heads, float16, 16 splits", (*arguments, 16)))
    return cases


CONTRACT = Contract(
    cache,
    choices={
        "key_heads": (1, 2, 3),
        "group": (1, 3, 4, 17),
        "head_dim": (16, 32, 64, 128),
        "lengths": lengths((1,), (0,), (63, 65), (3, 0, 67), (64, 1), (130,)),
        "room": (0, 1, 29, 64),
        "dtype": (torch.float32, torch.float16),
        "scores": SCORES,
        "unused": UNUSED,
        "query_layout": unit_last("query"),
        "key_layout": layouts("keys"),
        "value_layout": layouts("values"),
        "splits": (1, 2, 3, 7),
    },
    says={
        "head_dim": "head_dim 16, 32, 64 or 128",
        "lengths": "0 to capacity",
        "dtype": "float32 or float16",
        "unused": "What stands behind a sequence's tokens is undefined",
        "query_layout": "the last stride 1",
        "key_layout": "Any strides but the last, which is 1",
        "splits": "at least 1, and perhaps more than there are tokens",
    },
    valid=lambda key_heads, group, lengths, splits, **others: (
        fits(lengths=lengths, **others) and key_heads * len(lengths) * splits <= 12 and group * max(lengths) <= 600
    ),
    most=10,
)


def partial_with(attend):
    return lambda *args: partials(*args, attend=attend)


def partial_bytes(query, key_cache, value_cache, lengths, splits):
    """Keys and values once, a query for each split, and the partial results."""
    key_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    read = (2 * int(lengths.sum()) * key_heads * head_dim + splits * query.numel()) * query.element_size()
    programs = splits * key_heads * len(lengths)
    return read + 4 * programs + 4 * splits * query.numel() // head_dim * (head_dim + 1)


def _reads_for_every_head(case, seen, got):
    """Right numbers, and keys and values loaded as often as there are query heads in a group."""
    query, key_cache = case.args[:2]
    group = query.shape[1] // key_cache.shape[1]
    once = 2 * int(case.args[3].sum()) * key_cache.shape[1] * key_cache.shape[3] * query.element_size()
    # Each of the group's heads reads what one would have read, be it with tiles that reach a little less far.
    if seen.out_of_bounds or group == 1 or seen.bytes_moved < partial_bytes(*case.args) + (group - 1) * 0.9 * once:
        return False
    return all(map(close_to, got, partials(*case.args)))


def split_attention(query, key_cache, value_cache, lengths, splits):
    tile = 64
    keys, values = key_cache, value_cache
    heads, key_head = heads_of(query.shape[1], keys.shape[1])
    length, split = lengths.long(), torch.arange(splits)[:, None]
    size = -(-length // splits)
    first = split * size  # [splits, batch]
    last = torch.minimum(first + size, length)
    sequence, positions = torch.arange(len(length))[:, None], tiles(first, last, tile)  # [splits, batch, keys]
    present = positions < last[..., None]
    key_rows = rows_at(keys, present, keys.stride(0), keys.stride(1), keys.stride(2), sequence, key_head, positions)
    value_rows = rows_at(
        values, present, values.stride(0), values.stride(1), values.stride(2), sequence, key_head, positions
    )
    running_max, running_sum, accumulator = walk(
        queries(query, heads), key_rows, value_rows, present, first, last, tile, values.dtype
    )
    total = torch.where(running_sum == 0, 1.0, running_sum)
    return stored_parts(accumulator / total[..., None], running_max + torch.log(total), heads, query)


CHANGES = (
    *HEADS,
    *CACHE,
    *SPLITS,
    *SPLIT_SIZES,
    *keys_that_count(too_few=ONE_OF_THE_SPLIT_MISSING, too_many=ONE_OF_THE_NEXT_SPLIT),
    *without(SOFTMAX, "no_running_max"),
    *IN_16_BITS,
    *LAGGING,
    *OF_A_GROUP,
    *LOG_SUM_EXP,
    *EMPTY_SPLITS,
    *edits(
        "The results are stored as [batch, splits, ...] where [splits, batch, ...] is asked for: the row number is "
        "(split · batch + sequence) · query_heads + head.",
        splits_and_sequences_exchanged=(
            *(
                "torch.arange(splits)[:, None] * batch + torch.arange(batch)",
                "torch.arange(splits)[:, None] + torch.arange(batch) * splits",
            ),
        ),
    ),
    *edits(
        "From one sequence or split to the next the rows lie GROUP apart, as if a sequence had one KV head. It has all "
        "query heads: the row is (split · batch + sequence) · query_heads + head.",
        rows_a_group_apart=("heads.numel()", "heads.shape[1]"),
    ),
    *edits(
        "A split's output is stored as the sum of exp(score) · value. Its own average is asked for: divide the "
        "accumulator by the running sum. The log-sum-exp says how much it weighs.",
        weighed_already=(OUTPUT, "accumulator * torch.exp(running_max)[..., None]"),
    ),
    *strides("sequence"),
    *OUT_OF_BOUNDS,
    *UNGUARDED,
    *TILES,
)
MODEL = model_of(
    split_attention,
    CHANGES,
    (heads_of, queries, tiles, rows_at, start, step, walk, stored_parts),
    uses=(of_all_rows,),
    styles=(("unguarded",), (), *(("unguarded", f"tile_{rows}") for rows in (16, 32, 128))),
)

EXERCISE = Exercise(
    id="8.2",
    title="One split of the keys",
    entries=("split_attention",),
    cases=partial_cases,
    oracle=partials,
    contracts=(CONTRACT,),
    plain=tuple(map(partial_with, AS_GOOD)),
    models=(MODEL,),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda q, k, v, lengths, splits: max(2 * splits * q.numel(), k.numel())),
        SKIPS_THE_WORK,
        Contiguous(),
        Moves(partial_bytes, slack=1.1),
        ReadByKernels((1, 2)),
    ),
    hints=(
        "The loop is given: it is the one of 7.5. Start with `first` and `last`. A split has tl.cdiv(length, splits) "
        "keys, and the last splits may have fewer or none.",
        "first = split · split_length. last = tl.minimum(first + split_length, length). Without keys, `last` is not "
        "above `first`, so the loop makes no step.",
        "`present` must end at `last`, not at `length`, because the keys behind `last` belong to the next split: "
        "present = keys < last.",
        "After the loop: total = tl.where(running_sum == 0.0, 1.0, running_sum). The output is accumulator / total[:, "
        "None]. The natural log-sum-exp is (running_max + tl.log2(total)) · 0.6931471805599453. Without keys these are "
        "zeros and minus infinity.",
        "Both results are contiguous. Head `head` of a sequence has row (split · batch + sequence) · query_heads + "
        "head: HEAD_DIM numbers of output, and one log-sum-exp at the same row number. Store with mask=members < "
        "GROUP, so that padded rows are not written.",
    ),
    mistakes=(
        Mistake(
            "maximum_of_the_first_tile",
            MAXIMUM_OF_THE_FIRST_TILE,
            when=stays_behind(lambda q, k, v, lengths, splits: split_scores(q, k, lengths, splits)),
            every=True,
        ),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        FINITE_FOR_EMPTY,
        GRID_TURNED_ROUND,
        Mistake("rounded_to_16_bits", ROUNDED_TO_16_BITS, when=stored_in_16_bits(partials), every=True),
        Mistake("computed_in_16_bits", COMPUTED_IN_16_BITS, when=right_to_three_digits(partials), every=True),
        Mistake(
            "keys_read_for_every_head",
            "Each query head reads the keys and values for itself. The heads of a group share them: load a tile once, "
            "and take the group's queries as the rows of one tile.",
            when=_reads_for_every_head,
            cost=True,
        ),
        Mistake(
            "read_out_of_bounds",
            "Memory outside the cache was read. The last tile of a split may reach past the end: mask the loads with "
            "keys < last, and the query's rows with members < GROUP. If they are masked, check the strides.",
            when=lambda case, seen, got: any("reads" in access for access in seen.out_of_bounds),
        ),
        Mistake(
            "written_out_of_bounds",
            "Results were written past their end. The tile has BLOCK_G rows and the group only GROUP: mask both stores "
            "with members < GROUP.",
            when=lambda case, seen, got: any("writes" in access for access in seen.out_of_bounds),
        ),
    ),
)
