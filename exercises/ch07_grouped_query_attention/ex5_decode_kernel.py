"""Exercise 7.5: a decode kernel that reads each key once for its whole group of query heads."""

from __future__ import annotations

import math
import re

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves, ReadByKernels
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.edits import edits, model_of
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from exercises.ch07_grouped_query_attention.slips import BIG, KEYS_REPEATED, repeats_keys
from exercises.topics.attention import close_to
from exercises.topics.attention_inputs import one_above_many, products_beyond_16_bits
from exercises.topics.decode import PLAIN, cached, decode, decode_bytes
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
    EMPTY_SEQUENCE,
    HEADS,
    IN_16_BITS,
    LAGGING,
    NATURAL,
    OF_A_GROUP,
    OUT_OF_BOUNDS,
    OUTPUT_STRIDES,
    SOFTMAX,
    TOTAL,
    UNGUARDED,
    WALKS,
    keys_that_count,
    strides,
)
from exercises.topics.decode_steps import heads_of, of_all_rows, queries, rows_at, stored, tiles, walk
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
    decode_scores,
    lagging,
    risen_cache,
    stays_behind,
)
from exercises.topics.running import start, step


def lagging_case():
    """Not on a GPU: its matrix units cut small products off at the last digit of a large sum, and may in float32."""
    arguments = cache_in_float16(Draw(75), lagging, 160)
    return [Case("float16, 160 tokens, the last scores 11.5 above the first", arguments)]


def kernel_cases(draw):
    def case(name, query_heads, key_heads, head_dim, lengths, capacity, metered=False, **options):
        return Case(name, cached(draw, query_heads, key_heads, head_dim, lengths, capacity, **options), metered=metered)

    equal = cached(draw, 4, 1, 16, [300], 304, dtype=torch.float16)
    equal = (torch.zeros_like(equal[0]), equal[1], (equal[2] * 10 + 300), equal[3])
    cases = [
        case("8 query heads on 2 KV heads, two sequences of 64 and 128", 8, 2, 32, [64, 128], 128),
        case("the same sequences, one token later", 8, 2, 32, [65, 127], 128),
        case("one token in the cache", 4, 2, 16, [1], 40),
        case("a sequence without a token between two others", 6, 2, 16, [20, 0, 33], 64),
        case("groups of 20: more rows than 16", 40, 2, 16, [66], 70, metered=True),
        case("scores of ±150: exp overflows", 8, 2, 32, [150], 192, score=BIG),
        Case("300 tokens, the last scores 160 above the first", risen_cache(draw)),
        *([] if draw.on_gpu else lagging_case()),
        Case(
            "float16, products of 81,920 before the scale",
            cache_in_float16(Draw(76), products_beyond_16_bits, 100),
        ),
        Case(
            "float16, 1,500 tokens, the first with nearly all the weight",
            cache_in_float16(Draw(77), one_above_many, 1500),
        ),
        Case("a group of 70: more rows than 64", cached(Draw(70), 70, 1, 16, [40], 48)),
        case("NaN in the slots that hold no token", 4, 2, 32, [40, 70], 128, unused=math.nan),
        Case("scores near -1e20", far_below_finite(*cached(draw, 4, 1, 32, [20], 32))),
        Case("all strides apart, lengths 5 and 3", laid_apart(draw, *cached(draw, 4, 2, 16, [5, 3], 8))),
        case("float16, head dimension 64", 16, 4, 64, [100], 128, dtype=torch.float16),
        Case("float16, values near 300, 300 equal scores", equal),
        case("16 query heads on 2, lengths 200 and 130, bytes counted", 16, 2, 64, [200, 130], 256, metered=True),
    ]
    query, *caches, lengths = cached(draw, 4, 2, 16, [5, 9, 3], 12)
    cases += beyond_32_bits(draw, "sequences", caches, lengths, before=(query,))
    cases += caches_beyond_32_bits(draw)
    if draw.on_gpu:
        cases.append(case("32 on 4, lengths 1000 and 2049", 32, 4, 128, [1000, 2049], 2100, dtype=torch.float16))
    return cases


CONTRACT = Contract(
    cache,
    choices={
        "key_heads": (1, 2, 3),
        "group": (1, 2, 3, 5, 16, 17),
        "head_dim": (16, 32, 64, 128),
        "lengths": lengths((1,), (0,), (63, 65), (3, 0, 67), (64, 1), (130,)),
        "room": (0, 1, 29, 64),
        "dtype": (torch.float32, torch.float16),
        "scores": SCORES,
        "unused": UNUSED,
        "query_layout": unit_last("query"),
        "key_layout": layouts("keys"),
        "value_layout": layouts("values"),
    },
    says={
        "group": "key_heads divides query_heads",
        "head_dim": "float16 with head_dim 16, 32, 64 or 128, or float32 with head_dim up to\n            64",
        "lengths": "0 is allowed",
        "unused": "Slots behind them hold\n            anything, NaN too",
        "query_layout": "the last stride is 1",
        "key_layout": "any strides but\n            the last, which is 1",
        "value_layout": "The two may differ in theirs",
    },
    valid=lambda key_heads, group, head_dim, lengths, dtype, **others: (
        fits(lengths=lengths, **others)
        and (head_dim < 128 or dtype == torch.float16)
        and key_heads * group * sum(lengths) <= 2500
    ),
    most=10,
)


def _largest(query, key_cache, value_cache, lengths):
    """The cache, or a tile of query heads for each KV head."""
    rows = max(16, 2 * query.shape[1] // key_cache.shape[1])
    return max(key_cache.numel(), query.shape[0] * key_cache.shape[1] * rows * query.shape[2])


def _times_loaded(case, seen, got):
    """How often keys or values were loaded, whichever more; 0 where the numbers are wrong."""
    times = [
        counts["loaded"] / max(counts["distinct_loaded"], 1)
        for name, counts in seen.traffic.items()
        if name.startswith(("key", "value"))
    ]
    exact = [arg.double() if arg.is_floating_point() else arg for arg in case.args]
    return max(times, default=0) if close_to(got, decode(*exact)) else 0


def _rereads_keys(case, seen, got):
    """Right numbers, and keys or values loaded as often as a group has query heads."""
    group = case.args[0].shape[1] // case.args[1].shape[1]
    return group > 1 and _times_loaded(case, seen, got) > max(1.5, 0.9 * group)


def _reaches(*words):
    return lambda case, seen, got: any(word in access for access in seen.out_of_bounds for word in words)


def _program_beyond_the_key_heads(case, seen, got):
    """A program whose place on the grid's second axis is no KV head reached outside a tensor."""
    key_heads = case.args[1].shape[1]
    programs = [re.search(r"program \(\d+, (\d+)", access) for access in seen.out_of_bounds]
    return any(program and int(program[1]) >= key_heads for program in programs)


def grouped_decode(query, key_cache, value_cache, lengths):
    tile = 64
    keys, values = key_cache, value_cache
    heads, key_head = heads_of(query.shape[1], keys.shape[1])
    length = lengths.long()
    first, last = torch.zeros_like(length)[None], length[None]  # [1, batch]
    sequence, positions = torch.arange(len(length))[:, None], tiles(first, last, tile)  # [1, batch, keys]
    present = positions < last[..., None]
    key_rows = rows_at(keys, present, keys.stride(0), keys.stride(1), keys.stride(2), sequence, key_head, positions)
    value_rows = rows_at(
        values, present, values.stride(0), values.stride(1), values.stride(2), sequence, key_head, positions
    )
    running_max, running_sum, accumulator = walk(
        queries(query, heads), key_rows, value_rows, present, first, last, tile, values.dtype
    )
    total = torch.where(running_sum == 0, 1.0, running_sum)
    return stored((accumulator / total[..., None])[0].to(query.dtype), heads, query)


CHANGES = (
    *HEADS,
    *CACHE,
    *keys_that_count(),
    *SOFTMAX,
    *IN_16_BITS,
    *NATURAL,
    *LAGGING,
    *OF_A_GROUP,
    *edits(
        EMPTY_SEQUENCE,
        empty_sequence_nan=(TOTAL, "running_sum"),
        empty_sequence_nan__in_the_loop=(WALKS, "first + begin < last.max().expand_as(last)"),
    ),
    *strides("sequence"),
    *OUTPUT_STRIDES,
    *OUT_OF_BOUNDS,
    *UNGUARDED,
    *edits("", divided_where_tokens=(TOTAL, f"torch.where(lengths[:, None, None] > 0, running_sum, {TOTAL})")),
)
MODEL = model_of(
    grouped_decode,
    CHANGES,
    (heads_of, queries, tiles, rows_at, start, step, walk, stored),
    uses=(of_all_rows,),
    styles=(("unguarded",), (), ("unguarded", "divided_where_tokens")),
    draws=16,  # a score next to the middle of two float16 numbers falls to the other side in one sum of ten
)

EXERCISE = Exercise(
    id="7.5",
    title="A decode kernel that reads each key once",
    entries=("grouped_decode",),
    cases=kernel_cases,
    oracle=decode,
    contracts=(CONTRACT,),
    plain=PLAIN,
    models=(MODEL,),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(_largest),
        Forbids(("scaled_dot_product_attention", "_scaled_dot_product", "bmm", "mm", "matmul", "_softmax", "softmax")),
        Moves(lambda q, k, v, lengths: decode_bytes(q, k, lengths)),
        ReadByKernels((1, 2)),
    ),
    hints=(
        "Each program takes one KV head of one sequence: sequence = tl.program_id(0), key_head = tl.program_id(1), "
        "and the grid is (batch, key_heads). Its query heads are key_head * GROUP + rows, with rows = tl.arange(0, "
        "ROWS).",
        "The number of rows must be a power of two. Triton also compiles tiles with fewer than 16 rows, but the "
        "tensor cores multiply 16 at a time, so 8 rows take as many instructions as 16. Take ROWS = max(16, "
        "triton.next_power_of_2(group)). Rows from GROUP on are padding: mask=(rows < GROUP)[:, None] in the load of "
        "the queries and in the store.",
        "Use the loop of chapter 04 with one tile of queries: for first_key in range(0, length, BLOCK_N), where "
        "length = tl.load(lengths_pointer + sequence). Load keys and values with mask=(keys < length)[:, None], "
        "other=0.0, and set scores past the length to minus infinity.",
        'scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2 is [ROWS, BLOCK_N]. The '
        "online softmax with tl.exp2 goes along axis 1, with one running maximum and sum for each row.",
        "For a sequence of length 0 the loop does not run, and accumulator / running_sum is 0 / 0. Divide by "
        "tl.where(running_sum == 0.0, 1.0, running_sum).",
    ),
    mistakes=(
        Mistake(
            "maximum_of_the_first_tile",
            MAXIMUM_OF_THE_FIRST_TILE,
            when=stays_behind(lambda q, k, v, lengths: decode_scores(q, k, lengths)),
            every=True,
        ),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        Mistake(
            "grid_axes_exchanged",
            "A length was read past the end of `lengths`. That of a sequence stands at lengths_pointer + sequence. If "
            "you have that, are the grid's axes exchanged? It is (batch, key_heads): the sequence is program_id(0), "
            "the KV head program_id(1).",
            when=_reaches("lengths"),
        ),
        Mistake(
            "program_for_each_query_head",
            "There are more programs than KV heads, and those beyond the last one reached outside. A program takes a "
            "whole group: the grid is (batch, key_heads), not (batch, query_heads).",
            when=_program_beyond_the_key_heads,
        ),
        Mistake(
            "group_rows_not_masked",
            "Memory outside the queries or the output was reached. Rows from GROUP on belong to the next group or to "
            "none: mask them, and begin at key_head * GROUP. If both are right, is GROUP the number of query heads "
            "that share a KV head, and are the strides that tensor's own?",
            when=_reaches("query", "output"),
        ),
        Mistake(
            "tail_read_out_of_bounds",
            "Keys or values outside the cache were read. Where the length is no multiple of the tile, mask the loads "
            "with keys < length; if they are masked, are two strides exchanged?",
            when=_reaches("key", "value"),
        ),
        Mistake(
            "rounded_to_16_bits",
            ROUNDED_TO_16_BITS,
            when=stored_in_16_bits(decode),
            every=True,
        ),
        Mistake("computed_in_16_bits", COMPUTED_IN_16_BITS, when=right_to_three_digits(decode), every=True),
        Mistake("keys_repeated", KEYS_REPEATED, when=repeats_keys, cost=True),
        Mistake(
            "keys_reread",
            "Right numbers, but the keys were loaded once for every query head of a group. Let one program take the "
            "whole group: a tile of ROWS query heads against each tile of keys.",
            when=_rereads_keys,
            cost=True,
        ),
        Mistake(
            "keys_loaded_again",
            "Right numbers, but a key or value was loaded more than once. Is there a second pass over the keys, or a "
            "load of what the program holds already?",
            when=lambda case, seen, got: _times_loaded(case, seen, got) > 1.5,
            cost=True,
        ),
    ),
)
