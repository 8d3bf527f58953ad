"""Exercise 8.5: Flash-Decoding over a paged cache with grouped heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from course_lib.checker import (
    TRITON,
    Allocates,
    Case,
    Exercise,
    LaunchesTriton,
    Mistake,
    Moves,
    ReadByKernels,
    Requirement,
)
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.edits import edits, model_of, without
from course_lib.checker.specification.layouts import beyond_32_bits, contiguous, gaps, unit_last
from exercises.ch08_flash_decoding.parts import (
    BIG,
    COMBINE_PLAIN,
    FINITE_FOR_EMPTY,
    GRID_TURNED_ROUND,
    SKIPS_THE_WORK,
    combine,
    partials,
)
from exercises.topics.attention_inputs import one_above_many, products_beyond_16_bits
from exercises.topics.decode import AS_GOOD, attend, decode, decode_lse, gather_pages
from exercises.topics.decode_inputs import SCORES, UNUSED, far_below_finite, fits, laid_apart, layouts, lengths, pages
from exercises.topics.decode_merge import (
    MERGE,
    a_sequence_apart,
    first_of,
    merge,
    taken_for_neighbours,
    with_missing,
)
from exercises.topics.decode_slips import (
    AHEAD,
    BLOCKS,
    EMPTY_SPLITS,
    HEADS,
    IN_16_BITS,
    LAGGING,
    LOG_SUM_EXP,
    OF_A_GROUP,
    ONE_OF_THE_NEXT_SPLIT,
    ONE_OF_THE_SPLIT_MISSING,
    PAGES,
    PLACE,
    SOFTMAX,
    SPLITS,
    TILES,
    UNGUARDED,
    keys_that_count,
    output_laid_out_like_query,
    strides,
)
from exercises.topics.decode_steps import heads_of, of_all_rows, pages_of, queries, rows_at, stored_parts, tiles, walk
from exercises.topics.evidence import (
    COMPUTED_IN_16_BITS,
    NAN_FROM_THE_START,
    ROUNDED_TO_16_BITS,
    all_nan,
    right_to_three_digits,
    stored_in_16_bits,
)
from exercises.topics.paging import page_tables
from exercises.topics.rising import MAXIMUM_OF_THE_FIRST_TILE, lagging, rising, split_scores, stays_behind
from exercises.topics.running import start, step


def paged_oracle(query, key_pages, value_pages, block_tables, lengths, splits):
    caches = [gather_pages(part, block_tables) for part in (key_pages, value_pages)]
    return decode(query, *caches, lengths), decode_lse(query, *caches, lengths)


def _split_and_merged(attend, merge):
    def result(query, key_pages, value_pages, block_tables, lengths, splits):
        caches = [gather_pages(part, block_tables) for part in (key_pages, value_pages)]
        output, lse = merge(*partials(query, *caches, lengths, splits, attend=attend))
        return output.to(query.dtype), lse

    return result


def paged(
    draw,
    query_heads,
    key_heads,
    head_dim,
    lengths,
    page_size,
    *,
    pages=None,
    unused=None,
    dtype=torch.float32,
    score=1.0,
    spare=1,
):
    """Query, key pages, value pages, tables and lengths, ready as a case's arguments, without the splits.

    pages: how many there are; three more than are needed by default.
    unused: what the free pages and the ends of last pages hold; None: numbers like those of the tokens.
    spare: entries of -1 behind the longest table.
    """
    pages = pages or sum(-(-length // page_size) for length in lengths) + 3
    size = math.sqrt(score)
    query = draw.normal(len(lengths), query_heads, head_dim, dtype=dtype, scale=size)
    key_pages = draw.normal(pages, key_heads, page_size, head_dim, dtype=dtype, scale=size)
    value_pages = draw.normal(pages, key_heads, page_size, head_dim, dtype=dtype)
    tables = page_tables(draw, lengths, page_size, pages, spare)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    if unused is not None:
        used = torch.zeros(pages, page_size, dtype=torch.bool)
        for table, length in zip(tables.long(), lengths.tolist()):
            positions = torch.arange(length)
            used[table[positions // page_size], positions % page_size] = True
        for matrix in (key_pages, value_pages):
            matrix.transpose(1, 2)[~used] = unused
    return query, key_pages, value_pages, tables, lengths


def _scores_of_splits(query, key_pages, value_pages, block_tables, lengths, splits):
    return split_scores(query, gather_pages(key_pages, block_tables), lengths, splits)


def _risen(draw, length=300, scores=rising, dtype=torch.float32):
    """One sequence in pages of 16, one split."""
    plain = dict.fromkeys(("query_layout", "key_layout", "value_layout", "table_layout"), contiguous)
    sizes = {"key_heads": 1, "group": 4, "head_dim": 16, "lengths": (length,), "page_size": 16, "spare": 1}
    return pages(draw, **sizes, dtype=dtype, scores=scores, unused=None, **plain, splits=1)


def paged_cases(draw):
    def case(name, *sizes, splits, metered=False, **options):
        return Case(name, (*paged(draw, *sizes, **options), splits), metered=metered)

    cases = [
        case("1 sequence of 96 tokens, pages of 16, 2 splits", 4, 1, 16, [96], 16, splits=2, spare=0),
        case("the same shapes, one token less", 4, 1, 16, [95], 16, splits=2, spare=0),
        case("one split: nothing to merge; a group of 20", 20, 1, 16, [50], 16, splits=1),
        case("pages of 20 tokens, 7 splits", 6, 1, 32, [135], 20, splits=7),
        case("lengths 0 and 20, 3 splits", 4, 1, 16, [0, 20], 16, splits=3),
        case("5 tokens in 8 splits", 2, 1, 16, [5], 4, splits=8),
        case("140 tokens in 70 splits", 1, 1, 16, [140], 16, splits=70),
        case("scores of ±150: exp overflows", 4, 1, 32, [100], 16, splits=2, score=BIG),
        case("float16, 8 query heads on 1 KV head", 8, 1, 64, [150], 16, splits=3, dtype=torch.float16),
        case("NaN wherever no token is", 4, 1, 16, [70, 9], 32, splits=2, unused=math.nan),
        case("20 query heads on 1 KV head, 2 splits, bytes counted", 20, 1, 32, [200], 16, splits=2, metered=True),
        case("2 KV heads, 200 tokens in 3 splits, bytes counted", 8, 2, 32, [200], 16, splits=3, metered=True),
    ]
    query, key_pages, value_pages, tables, counts = paged(draw, 4, 2, 16, [5, 3], 4)
    below = far_below_finite(*paged(draw, 4, 1, 16, [20], 16))
    cases.insert(-1, Case("scores near -1e20", (*below, 2)))
    cases.insert(-1, Case("one split of 300 tokens, the last scores 160 above the first", _risen(draw)))
    if not draw.on_gpu:  # whose matrix units cut small products off at the last digit of a large sum
        lagging_scores = _risen(Draw(85), 160, lagging, torch.float16)
        cases.insert(-1, Case("one split, float16, the last scores 11.5 above the first", lagging_scores))
    products = _risen(Draw(86), 100, products_beyond_16_bits, torch.float16)
    cases.insert(-1, Case("one split, float16, products of 81,920 before the scale", products))
    long = _risen(Draw(88), 1500, one_above_many, torch.float16)
    cases.insert(-1, Case("one split, float16, 1,500 tokens, the first with nearly all the weight", long))
    equal, keys, values, *rest = paged(Draw(87), 4, 1, 16, [320], 16, dtype=torch.float16)
    near_300 = torch.zeros_like(equal), keys, values * 10 + 300, *rest, 1
    cases.insert(-1, Case("one split, float16, values near 300, 320 equal scores", near_300))
    cases.insert(-1, Case("70 query heads on 1 KV head", (*paged(Draw(70), 70, 1, 16, [40], 16), 2)))
    apart = laid_apart(draw, query, key_pages, value_pages, gaps(draw, tables), counts)
    cases.insert(-1, Case("all strides apart, lengths 5 and 3", (*apart, 2)))
    query, *pools, tables, counts = paged(draw, 4, 2, 16, [9, 20], 8)
    cases += beyond_32_bits(draw, "pages", pools, tables, counts, 2, before=(query,))
    query, *pools, tables, counts = paged(draw, 3, 3, 16, [5], 4)
    cases += beyond_32_bits(draw, "heads", pools, tables, counts, 2, before=(query,), dimension=1)
    if draw.on_gpu:
        lengths = [5000, 1, 4097, 0]
        cases.append(
            case(
                "4 sequences to 5000 tokens, 32/8 heads, float16, 16 splits",
                32,
                8,
                128,
                lengths,
                16,
                splits=16,
                dtype=torch.float16,
            )
        )
    return cases


CONTRACT = Contract(
    pages,
    choices={
        "key_heads": (1, 2, 3),
        "group": (1, 3, 4, 17),
        "head_dim": (16, 32, 64, 128),
        "lengths": lengths((1,), (0,), (63, 5), (3, 0, 47), (64, 1), (130,)),
        "page_size": (1, 3, 16, 20, 128),
        "spare": (0, 1, 3),
        "dtype": (torch.float32, torch.float16),
        "scores": SCORES,
        "unused": UNUSED,
        "query_layout": unit_last("query"),
        "key_layout": layouts("key pages"),
        "value_layout": layouts("value pages"),
        "table_layout": (Level(contiguous, ""), Level(gaps, "tables with gaps")),
        "splits": (1, 2, 3, 7),
    },
    says={
        "head_dim": "head_dim 16, 32, 64 or 128",
        "lengths": "the tokens of each sequence, from 0",
        "page_size": "page_size at least 1",
        "spare": "What a length doesn't reach is undefined",
        "dtype": "float32 or float16",
        "unused": "What a length doesn't reach is undefined: entries, and rows of pages too",
        "query_layout": "the last stride 1",
        "key_layout": "Any strides but the last, which is 1",
        "table_layout": "any row stride",
        "splits": "splits: 1 to 256",
    },
    valid=lambda key_heads, group, lengths, splits, **others: (
        fits(lengths=lengths, **others)
        and key_heads * len(lengths) * splits <= 8
        and key_heads * group * len(lengths) <= 18
        and group * max(lengths) <= 400
    ),
    most=10,
)


def _partial_numbers(query, splits):
    return splits * query.numel() // query.shape[-1] * (query.shape[-1] + 1)


def paged_bytes(query, key_pages, value_pages, block_tables, lengths, splits):
    """Keys, values, tables and lengths once, queries for each split, partial results out and back, the output."""
    key_heads, head_dim = key_pages.shape[1], key_pages.shape[3]
    tokens = int(lengths.sum())
    elements = 2 * tokens * key_heads * head_dim + (splits + 1) * query.numel()
    crossing = 2 * 4 * _partial_numbers(query, splits) if splits > 1 else 0
    return elements * query.element_size() + crossing + 4 * tokens * key_heads


@dataclass(frozen=True)
class Splits(Requirement):
    """In metered cases the kernels store a partial result for every split, in half precision at least."""

    id: str = "keys_not_split"

    def complaint(self, case, seen):
        query, splits = case.args[0], case.args[-1]
        if not (case.metered and seen.traffic) or splits == 1:
            return None
        stored = sum(counts["stored"] + counts["atomic"] for counts in seen.traffic.values())
        if stored >= (2 * splits + query.element_size()) * query.numel():
            return None
        return (
            f"Your kernels stored {stored:,} bytes in all, where {splits} splits leave "
            f"{4 * _partial_numbers(query, splits):,} bytes of partial results: the keys are not split. A program for "
            "each split is what fills the chip."
        )


def _largest(query, key_pages, value_pages, block_tables, lengths, splits):
    return max(_partial_numbers(query, splits), key_pages.numel(), 4 * query.numel())


def _reads(word):
    return lambda case, seen, got: any("reads" in access and word in access for access in seen.out_of_bounds)


NO_HEAD = (
    "Queries that aren't there were read. The heads of KV head h begin at h · GROUP, and only GROUP of the tile's "
    "BLOCK_G rows are heads: mask the load, and the stores too."
)


def flash_decode(query, key_pages, value_pages, block_tables, lengths, splits):
    tile = 64
    keys, values, tables = key_pages, value_pages, block_tables
    heads, key_head = heads_of(query.shape[1], keys.shape[1])
    length, split, page_size = lengths.long(), torch.arange(splits)[:, None], keys.shape[2]
    size = -(-length // splits)
    first = split * size  # [splits, batch]
    last = torch.minimum(first + size, length)
    positions = tiles(first, last, tile)  # [splits, batch, keys]
    present = positions < last[..., None]
    pages, slots = pages_of(tables, positions, present, last, page_size, tile), positions % page_size
    key_rows = rows_at(keys, present, keys.stride(0), keys.stride(1), keys.stride(2), pages, key_head, slots)
    value_rows = rows_at(values, present, values.stride(0), values.stride(1), values.stride(2), pages, key_head, slots)
    running_max, running_sum, accumulator = walk(
        queries(query, heads), key_rows, value_rows, present, first, last, tile, values.dtype
    )
    total = torch.where(running_sum == 0, 1.0, running_sum)
    parts = stored_parts(accumulator / total[..., None], running_max + torch.log(total), heads, query)
    output, lse = merge(*parts)
    return output.to(query.dtype), lse


CHANGES = (
    *HEADS,
    *PAGES,
    *AHEAD,
    *SPLITS,
    *keys_that_count(
        capacity="tables.shape[1] * keys.shape[2]", too_few=ONE_OF_THE_SPLIT_MISSING, too_many=ONE_OF_THE_NEXT_SPLIT
    ),
    *without(SOFTMAX, "no_running_max"),
    *IN_16_BITS,
    *LAGGING,
    *OF_A_GROUP,
    *edits(
        "You look up one page for a whole tile, that of its first key. A tile may reach over several pages, so look up "
        "a page for each key: keys // PAGE_SIZE.",
        page_of_the_first_key=(
            BLOCKS,
            f"({BLOCKS}).unflatten(-1, (-1, tile))[..., :1].repeat(1, 1, 1, tile).flatten(2)",
        ),
    ),
    *edits(
        "A page's size was rounded up to the next power of two. Only a tile needs a power of two; a page may have any "
        "size, so divide by page_size itself.",
        page_size_rounded_up=(*("[:, None], keys.shape[2]", "[:, None], 1 << (keys.shape[2] - 1).bit_length()"),),
    ),
    *edits(
        "The place in a page is taken by a bit mask, keys & (PAGE_SIZE - 1), which holds for powers of two alone. It "
        "is keys % PAGE_SIZE.",
        slot_by_bit_mask=(PLACE, "positions & (page_size - 1)"),
        slot_by_bit_mask__and_the_page_by_shift=(
            *(PLACE, "positions & (page_size - 1)", BLOCKS, "looked_up >> (page_size.bit_length() - 1)"),
        ),
    ),
    *LOG_SUM_EXP,
    *EMPTY_SPLITS,
    *without(MERGE, "empty_sequence_nan__first_split"),  # here that is a sequence without keys
    *strides("page", paged=True),
    *output_laid_out_like_query("output.to(query.dtype)"),
    *edits(
        "The tables are read as if each row began max_blocks entries after the last. Rows lie table_stride entries "
        "apart.",
        strides_ignored__table=("tables.stride(0)", "tables.shape[1]"),
    ),
    *UNGUARDED,
    *TILES,
    *edits("", splits_of_pages=("-(-length // splits)", "-(-(-(-length // page_size)) // splits) * page_size")),
)
MODEL = model_of(
    flash_decode,
    CHANGES,
    (heads_of, queries, tiles, pages_of, rows_at, start, step, walk, stored_parts, merge),
    uses=(of_all_rows, taken_for_neighbours, a_sequence_apart, first_of, with_missing),
    styles=(
        *(("unguarded",), ("unguarded", "splits_of_pages"), ()),
        *(("unguarded", f"tile_{rows}") for rows in (16, 32, 128)),
    ),
)

EXERCISE = Exercise(
    id="8.5",
    title="Flash-Decoding on a paged cache",
    entries=("flash_decode",),
    cases=paged_cases,
    oracle=paged_oracle,
    contracts=(CONTRACT,),
    plain=(
        _split_and_merged(attend, combine),
        *(_split_and_merged(attend, merge) for attend, merge in zip(AS_GOOD, COMBINE_PLAIN * len(AS_GOOD))),
    ),
    models=(MODEL,),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=2),
        Allocates(_largest),
        SKIPS_THE_WORK,
        Splits(),
        Moves(paged_bytes, slack=1.2),
        ReadByKernels((1, 2)),
    ),
    hints=(
        "The loop of 8.2 and the merge of 8.3 are given. Only the addresses of keys and values change: what used to be "
        "key · key_stride now goes through the table.",
        "Each key has its own page, because a tile may reach over several: pages = tl.load(table_pointer + keys // "
        "PAGE_SIZE, mask=present, other=0). Make the page numbers 64-bit before you multiply them.",
        "A key's offset is pages · key_page_stride + keys % PAGE_SIZE · key_stride, as a column [:, None], plus the "
        "columns [None, :]. Values have strides of their own.",
        "One step ahead: load the first tile's pages before the loop. In the loop use what you carried, then load the "
        "pages of keys + BLOCK_N with mask=keys + BLOCK_N < last.",
        "The launch is that of 8.2 with block_tables as the fourth argument, its stride(0) before the scale, and "
        "PAGE_SIZE=page_size. The merge stores the output as (...).to(output_pointer.dtype.element_ty).",
    ),
    mistakes=(
        Mistake(
            "maximum_of_the_first_tile",
            MAXIMUM_OF_THE_FIRST_TILE,
            when=stays_behind(_scores_of_splits, parts=True),
            every=True,
        ),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        FINITE_FOR_EMPTY,
        GRID_TURNED_ROUND,
        Mistake("rounded_to_16_bits", ROUNDED_TO_16_BITS, when=stored_in_16_bits(paged_oracle), every=True),
        Mistake("computed_in_16_bits", COMPUTED_IN_16_BITS, when=right_to_three_digits(paged_oracle), every=True),
        Mistake(
            "rows_of_no_head_read",
            NO_HEAD,
            when=lambda case, seen, got: case.args[0].is_contiguous() and _reads("query")(case, seen, got),
        ),
        Mistake(
            "read_out_of_bounds",
            "Memory outside a tensor was read. Entries of the table beyond a sequence's length are not pages: are the "
            "loads masked? If they are, check the addresses: the strides and the page's own size.",
            when=_reads(""),
        ),
        Mistake(
            "written_out_of_bounds",
            "A result was written past its end. The tile has more rows than the group has heads: mask the stores.",
            when=lambda case, seen, got: (
                case.args[0].is_contiguous() and any("writes" in access for access in seen.out_of_bounds)
            ),
        ),
    ),
)
