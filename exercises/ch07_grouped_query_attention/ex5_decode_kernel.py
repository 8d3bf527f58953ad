"""Exercise 7.5: a decode kernel that reads each key once for its whole group of query heads."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves
from exercises.ch07_grouped_query_attention.kernel_slips import (
    GAP,
    LAYOUTS,
    TILE,
    clear,
    each,
    exponentials,
    first_rows_only,
    group_offset_missing,
    keys_as_contiguous,
    off_by,
    output_strays,
    program_beyond_the_key_heads,
    queries_as_contiguous,
    reaches,
    rereads_keys,
    scaled,
    unused_slots_count,
    values_misread,
    with_lengths,
)
from exercises.ch07_grouped_query_attention.slips import (
    BIG,
    BY_COUNT,
    BY_MODULO,
    FIRST_HEAD,
    KEYS_REPEATED,
    SCALE_MISSING,
    repeats_keys,
)
from exercises.topics.attention import from_zero, not_divided, streamed, without_running_max
from exercises.topics.decode import (
    by_count,
    by_modulo,
    cached,
    decode,
    decode_bytes,
    decode_prescaled,
    decode_rounded,
    first_head,
    tail_scored,
    tokens_first,
    whole_cache,
    whole_tiles,
)

LARGE_VALUES = "float16, values near 300, 300 equal scores"


def kernel_cases(draw):
    def case(name, query_heads, key_heads, head_dim, lengths, capacity, metered=False, **options):
        return Case(name, cached(draw, query_heads, key_heads, head_dim, lengths, capacity, **options), metered=metered)

    prime = draw.choice((67, 71, 73, 79))
    query, key, value, lengths = cached(draw, 8, 2, 32, [60, 100], 104)
    layouts = (draw.spread_out(query, GAP), tokens_first(key), draw.spread_out(value, GAP), lengths)
    equal = cached(draw, 4, 1, 16, [300], 304, dtype=torch.float16)
    equal = (torch.zeros_like(equal[0]), equal[1], (equal[2] * 10 + 300), equal[3])
    far = cached(draw, 4, 2, 32, [70], 90)
    cases = [
        case("8 query heads on 2 KV heads, two sequences of 64 and 128", 8, 2, 32, [64, 128], 128),
        case("one token in the cache", 4, 2, 16, [1], 40),
        case(f"lengths 63, 65 and {prime}", 4, 1, 32, [63, 65, prime], 96),
        case("a sequence without a token between two others", 6, 2, 16, [20, 0, 33], 64),
        case("a KV head for each query head", 3, 3, 32, [70], 80),
        case("groups of 5, three KV heads", 15, 3, 16, [90], 100),
        case("groups of 20: more rows than 16", 40, 2, 16, [66], 70),
        case("one KV head for 16 query heads", 16, 1, 32, [130], 160),
        case("2,051 tokens", 2, 1, 16, [2051], 2060),
        case("scores of ±150: exp overflows", 8, 2, 32, [150], 192, score=BIG),
        Case("all scores near -200", (far[0] * 0.3 + 5.0, far[1] * 0.2 - 7.0, *far[2:])),
        Case(LAYOUTS, layouts),
        case("NaN in the slots that hold no token", 4, 2, 32, [40, 70], 128, unused=math.nan),
        case("float16, head dimension 64", 16, 4, 64, [100], 128, dtype=torch.float16),
        Case(LARGE_VALUES, equal),
        case("16 query heads on 2, lengths 200 and 130, bytes counted", 16, 2, 64, [200, 130], 256, metered=True),
    ]
    if draw.on_gpu:
        cases.append(case("32 on 4, lengths 1000 and 2049", 32, 4, 128, [1000, 2049], 2100, dtype=torch.float16))
    return cases


EXERCISE = Exercise(
    id="7.5",
    title="A decode kernel that reads each key once",
    entries=("grouped_decode",),
    cases=kernel_cases,
    oracle=decode,
    plain=(decode_prescaled, decode_rounded),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda q, k, v, lengths: max(q.numel(), k.numel())),
        Forbids(("scaled_dot_product_attention", "_scaled_dot_product", "bmm", "mm", "matmul", "_softmax", "softmax")),
        Moves(lambda q, k, v, lengths: decode_bytes(q, k, lengths)),
    ),
    hints=(
        "A program owns a KV head of a sequence: sequence = tl.program_id(0), key_head = tl.program_id(1), and the "
        "grid is (batch, key_heads). Its query heads are key_head * GROUP + rows, with rows = tl.arange(0, ROWS).",
        "A tile has a power of two of rows. The tensor cores multiply 16 rows at a time, so with fewer they are partly "
        "idle: take ROWS = max(16, triton.next_power_of_2(group)). "
        "Rows from GROUP on are padding: mask=(rows < GROUP)[:, None] in the load of the queries and in the store.",
        "The loop is that of chapter 04, with one tile of queries: for first_key in range(0, length, BLOCK_N), where "
        "length = tl.load(lengths_pointer + sequence). Load keys and values with mask=(keys < length)[:, None], other="
        "0.0, and give scores behind the length minus infinity.",
        'scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2 is [ROWS, BLOCK_N]; the '
        "online softmax with tl.exp2 goes along axis 1. Every key counts for all rows of the tile.",
        "Without a token the loop makes no step, and accumulator / running_sum is 0 / 0. Divide by tl.where(running_sum"
        " == 0.0, 1.0, running_sum).",
    ),
    mistakes=(
        Mistake("by_modulo", BY_MODULO, result=each(heads=by_modulo)),
        Mistake("by_count", BY_COUNT, result=each(heads=by_count)),
        Mistake("first_head_for_all", FIRST_HEAD, result=each(heads=first_head)),
        Mistake(
            "group_offset_missing",
            "Every program takes the query heads of the first group and writes its result there. Those of KV head k "
            "begin at k * GROUP.",
            result=group_offset_missing,
        ),
        Mistake(
            "group_larger_than_the_tile",
            "A group of more than 16 query heads doesn't fit into 16 rows, and the others were never computed. Let "
            "ROWS be the next power of two, and at least 16.",
            result=first_rows_only,
        ),
        Mistake("scale_missing", SCALE_MISSING, result=(scaled(lambda dim: math.log(2)), scaled(lambda dim: 1.0))),
        Mistake(
            "scale_twice",
            "The scale is applied twice. Look for scale_log2 both where the queries are loaded and where the scores "
            "are made.",
            result=scaled(lambda dim: math.log2(math.e) / dim),
        ),
        Mistake(
            "natural_exp",
            "scale_log2 already holds log2(e), and the exponential is the natural one. Take tl.exp2 throughout.",
            result=scaled(lambda dim: math.log2(math.e) / math.sqrt(dim)),
        ),
        Mistake(
            "log2e_missing",
            "The exponential is tl.exp2 and the scale lacks log2(e): 2^x is not e^x. Multiply by math.log2(math.e).",
            result=scaled(lambda dim: math.log(2) / math.sqrt(dim)),
        ),
        Mistake(
            "length_ignored",
            "Every sequence was read as long as the cache has room. Slots behind its length hold no token: the loop "
            "ends at the sequence's own length.",
            result=with_lengths(lambda lengths, key: whole_cache(key, lengths)),
        ),
        Mistake(
            "first_length_for_all",
            "All sequences were given the length of the first one. A program's own is at lengths_pointer + sequence.",
            result=with_lengths(lambda lengths, key: lengths[:1].expand_as(lengths)),
        ),
        Mistake(
            "longest_length_for_all",
            "All sequences were given the length of the longest one. A program's own is at lengths_pointer + sequence.",
            result=with_lengths(lambda lengths, key: lengths.max().expand_as(lengths)),
        ),
        Mistake(
            "one_token_too_few",
            "The newest token is left out: the lengths count the current token, so keys 0 to length - 1 are all seen.",
            result=off_by(-1),
        ),
        Mistake(
            "one_token_too_many",
            "One slot too many counts, the one right behind the last token. Keys are counted from 0: the condition is "
            "keys < length.",
            result=(off_by(1), off_by(1, inside_tiles=True)),
        ),
        Mistake(
            "last_tile_dropped",
            "The last tile is dropped when it isn't full. Round the number of tiles up: range(0, length, BLOCK_N).",
            result=with_lengths(lambda lengths, key: whole_tiles(lengths, TILE)),
        ),
        Mistake(
            "tail_keys_scored",
            "Keys past the length were loaded as zeros and counted: a key of zeros scores 0, and exp(0 - maximum) is "
            "not 0. Give their scores minus infinity.",
            result=clear(lambda q, k, v, lengths: tail_scored(q, k, v, lengths, TILE)),
        ),
        Mistake(
            "unused_slots_count",
            "A slot without a token reached the result: its weight is 0, and 0 · NaN is NaN. Mask the loads of keys "
            "and values with keys < length, not only the scores.",
            result=unused_slots_count,
        ),
        Mistake(
            "no_running_max",
            "The exponential is taken of the scores as they are, and overflows. Subtract the row's running maximum.",
            result=(exponentials(without_running_max), exponentials(without_running_max, guarded=True)),
        ),
        Mistake(
            "maximum_starts_at_zero",
            "The running maximum starts at 0, so a row whose scores all lie far below 0 underflows: its sum is 0. "
            "Start it at minus infinity.",
            result=(exponentials(from_zero), exponentials(from_zero, lost=math.nan)),
        ),
        Mistake(
            "accumulator_not_rescaled",
            "The accumulator is not rescaled when the running maximum grows. Multiply it by exp2(old maximum - new "
            "maximum) before the tile's product is added.",
            result=each(lambda q, k, v: streamed(q, k, v, TILE, rescale_accumulator=False)),
        ),
        Mistake(
            "sum_not_rescaled",
            "The running sum is not rescaled when the running maximum grows. Multiply it by exp2(old maximum - new "
            "maximum).",
            result=each(lambda q, k, v: streamed(q, k, v, TILE, rescale_sum=False)),
        ),
        Mistake("not_divided", "The accumulator is not divided by the running sum.", result=each(not_divided)),
        Mistake(
            "keys_used_as_values",
            "The weights are multiplied with the keys. The second product takes the values: look at its pointer.",
            result=clear(lambda q, k, v, lengths: decode(q, k, k, lengths)),
        ),
        Mistake(
            "empty_sequence_nan",
            "A sequence without a token gives 0 / 0 = NaN. Its output is 0: divide by 1 where the sum is 0.",
            result=lambda q, k, v, lengths: decode(q, k, v, lengths, empty=math.nan),
        ),
        Mistake(
            "strides_ignored",
            "A tensor was read as if it were contiguous, or by another tensor's strides. Queries, keys and values may "
            "be laid out in three ways: each has strides of its own among the kernel's arguments.",
            result=(queries_as_contiguous, keys_as_contiguous, values_misread),
        ),
        Mistake(
            "accumulator_in_float16",
            "A sum has passed 65,504, the largest float16. The accumulator and the running sum are float32, whatever "
            "the inputs are; only the finished output is cast.",
            when=lambda case, seen, got: (
                case.name == LARGE_VALUES and isinstance(got, torch.Tensor) and bool(got.isinf().all())
            ),
        ),
        Mistake(
            "grid_axes_exchanged",
            "A length was read that isn't there. The grid is (batch, key_heads): does each program take its sequence "
            "from program_id(0) and its KV head from program_id(1)?",
            when=reaches("lengths"),
        ),
        Mistake(
            "program_for_each_query_head",
            "There are more programs than KV heads, and those beyond the last one reached outside. A program takes a "
            "whole group: the grid is (batch, key_heads), not (batch, query_heads).",
            when=program_beyond_the_key_heads,
        ),
        Mistake(
            "output_by_other_strides",
            "The output was written by another tensor's strides. It has strides of its own among the kernel's "
            "arguments: output_batch_stride and output_head_stride.",
            when=output_strays,
        ),
        Mistake(
            "group_rows_not_masked",
            "Rows beyond the group were read or written. A tile has ROWS rows and the group only GROUP of them: the "
            "others are the next group's query heads, or no one's. Mask the load of the queries and the store, and "
            "begin at key_head * GROUP.",
            when=reaches("query", "output"),
        ),
        Mistake(
            "tail_read_out_of_bounds",
            "Keys or values behind the end of the cache were read. Where the length is no multiple of the tile, mask "
            "the loads with keys < length.",
            when=reaches("key", "value"),
        ),
        Mistake("keys_repeated", KEYS_REPEATED, when=repeats_keys),
        Mistake(
            "keys_reread",
            "Right numbers, but the keys were loaded once for every query head of a group. Let one program take the "
            "whole group: a tile of ROWS query heads against each tile of keys.",
            when=rereads_keys,
        ),
    ),
)
