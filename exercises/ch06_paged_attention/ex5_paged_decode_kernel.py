"""Exercise 6.5: a kernel that reads pages for a step of decode."""

from __future__ import annotations

from functools import partial

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.edits import edits, model_of, without
from course_lib.checker.specification.layouts import beyond_32_bits, contiguous, unit_last
from exercises.topics.attention import (
    in_a_kernel,
    normalised_in_a_kernel,
    prescaled_in_a_kernel,
    rounded_in_a_kernel,
)
from exercises.topics.attention_inputs import beyond_16_bits
from exercises.topics.decode import (
    AS_GOOD,
    attend_prescaled,
    attend_rounded,
    decode_with,
    each_sequence,
    gather_pages,
)
from exercises.topics.decode_inputs import SCORES, UNUSED, far_below_finite, fits, layouts, lengths, pages
from exercises.topics.decode_slips import (
    ADDS,
    EMPTY_SEQUENCE,
    HIDDEN,
    LAST_PAGE_READ_WHOLE,
    ONE_HEAD,
    OUTPUT_STRIDES,
    PAGES,
    PLACE,
    SOFTMAX,
    STEPS,
    TOTAL,
    UNGUARDED,
    keys_that_count,
    output_laid_out_like_query,
    strides,
)
from exercises.topics.decode_steps import heads_of, pages_of, queries, rows_at, stored, tiles, walk
from exercises.topics.evidence import NAN_FROM_THE_START, all_nan
from exercises.topics.paging import paged
from exercises.topics.rising import MAXIMUM_OF_THE_FIRST_TILE, decode_scores, rising, stays_behind
from exercises.topics.running import start, step

BIG = 55.0  # standard deviation of scores whose exponentials overflow in float32


def far_below_zero(query, key_pages, *others):
    """Keys moved so that every score of the one head lies 160 lower, where exp gives 0."""
    query = query / query.norm() * query.shape[2] ** 0.5
    return query, key_pages - 160 / query.shape[2] ** 0.5 * query[0, 0], *others


def head_by_head(query, *others):
    """The queries stored [heads, batch, head_dim]."""
    return query.transpose(0, 1).contiguous().transpose(0, 1), *others


def _one_sequence(draw, scores, length=300, head_dim=16, dtype=torch.float32):
    """One sequence and one head in pages of 16."""
    plain = dict.fromkeys(("query_layout", "key_layout", "value_layout"), contiguous)
    sizes = {"heads": 1, "head_dim": head_dim, "lengths": (length,), "page_size": 16, "spare": 1, "dtype": dtype}
    return _made(draw, **sizes, scores=scores, unused=None, **plain)


def _near_300(draw, page_size):
    """300 equal scores in float16, and values whose sum over 219 of them passes what float16 holds."""
    query, key_pages, value_pages, *rest = paged(draw, 1, 16, [300], page_size, dtype=torch.float16)
    return torch.zeros_like(query), key_pages, value_pages * 10 + 300, *rest


def decode_cases(draw):
    def case(name, heads, head_dim, lengths, page_size, metered=False, **options):
        return Case(name, paged(draw, heads, head_dim, lengths, page_size, **options), metered=metered)

    cases = [
        case("1 sequence, 2 whole pages of 16", 1, 16, [32], 16),
        case("1 sequence, 2 pages and 5 tokens", 1, 16, [37], 16),
        case("2 sequences, 2 heads, pages of 8", 2, 32, [17, 23], 8),
        case("a sequence of no tokens between two others", 1, 16, [9, 0, 4], 8),
        case("the last table is full to its last entry", 1, 16, [16, 0, 32], 16, spare=0),
        case("scores of ±150: exp overflows", 1, 32, [50], 16, score=BIG),
        Case("scores near -1e20, one page full and one not", far_below_finite(*paged(draw, 1, 16, [11, 8], 8))),
        Case("every score near -160", far_below_zero(*paged(draw, 1, 16, [11], 8))),
        Case("300 tokens, the last scores 160 above the first", _one_sequence(draw, rising)),
        Case("queries stored head by head", head_by_head(*paged(draw, 2, 16, [5, 9, 8], 8))),
        case("the pages and lengths of a step before, in tensors of the same shapes", 2, 32, [23, 17], 8),
        case("head dimension 256", 1, 256, [9], 8),
        case("page numbers of 2¹⁵ and more", 1, 16, [7, 5], 1, dtype=torch.float16, pages=2**16),
        case("float16, head dimension 64", 2, 64, [40, 11], 16, dtype=torch.float16),
        case("2 sequences of 64 tokens, 2 heads, bytes counted", 2, 64, [64, 64], 16, metered=True),
    ]
    cases.append(Case("float16, values near 300, 300 equal scores", _near_300(Draw(65), 16)))
    cases.append(Case("float16, the same in pages of 256", _near_300(Draw(65), 256)))
    low = _one_sequence(Draw(650), beyond_16_bits, 40, 64, torch.float16)
    cases.append(Case("float16, scores near -6,000", low))
    query, *pools, tables, counts = paged(draw, 2, 16, [9, 20], 8)
    cases += beyond_32_bits(draw, "pages", pools, tables, counts, before=(query,))
    if draw.on_gpu:
        cases.append(
            case("4 sequences up to 3000 tokens, 8 heads, float16", 8, 128, [3000, 1, 2049, 0], 16, dtype=torch.float16)
        )
    return cases


def _scores(query, key_pages, value_pages, block_tables, lengths):
    return decode_scores(query, gather_pages(key_pages, block_tables), lengths)


def _made(draw, *, heads, **choices):
    return pages(draw, key_heads=heads, group=1, **choices)


CONTRACT = Contract(
    _made,
    choices={
        "heads": (1, 2, 3),
        "head_dim": (16, 32, 64, 128),
        "lengths": lengths((1,), (0,), (7, 3), (16, 33), (5, 0, 29), (48, 1)),
        "page_size": (1, 2, 8, 16, 64),
        "spare": (0, 1, 3),
        "dtype": (torch.float32, torch.float16),
        "scores": SCORES,
        "unused": UNUSED,
        "query_layout": unit_last("query"),
        "key_layout": layouts("keys"),
        "value_layout": layouts("values"),
    },
    says={
        "head_dim": "head_dim a power of two from 16 on",
        "lengths": "0 is possible",
        "page_size": "page_size a power of two",
        "spare": "Entries behind a sequence's last page are -1",
        "dtype": "float32 or float16",
        "unused": "Slots behind a sequence's last token hold anything, NaN too",
        "query_layout": "Any strides but the last, which is 1",
        "key_layout": "strides likewise",
    },
    valid=lambda lengths, page_size, **others: fits(lengths=lengths, **others) and sum(lengths) <= 24 * page_size,
    most=10,
)


def _plainly(plain):
    def result(query, key_pages, value_pages, block_tables, lengths):
        return plain(query, *(gather_pages(part, block_tables) for part in (key_pages, value_pages)), lengths)

    return result


def _of_each(attend):
    return _plainly(partial(each_sequence, attend))


PLAIN = (
    *map(_of_each, (prescaled_in_a_kernel, rounded_in_a_kernel, normalised_in_a_kernel)),
    *(_plainly(decode_with(attend)) for attend in AS_GOOD if attend not in (attend_prescaled, attend_rounded)),
)


def decode_bytes(query, key_pages, value_pages, block_tables, lengths):
    """Keys and values of all tokens and the queries read once, the output written; table entries and a length for each
    program."""
    heads, page_size, head_dim = key_pages.shape[1:]
    rows = 2 * int(lengths.sum()) * heads * head_dim + 2 * query.numel()
    entries = sum(-(-length // page_size) for length in lengths.tolist()) + len(lengths)
    return rows * query.element_size() + entries * heads * 4


def large_scores_in_float16(case, seen, got) -> bool:
    """A `when` for every failing case: float16, scores beyond 16, and still an average of values."""
    query, values = case.args[0], gather_pages(case.args[2], case.args[3])
    if query.dtype != torch.float16 or not isinstance(got, torch.Tensor) or got.shape != query.shape:
        return False
    scores = _scores(*case.args)
    large = scores[scores.isfinite()].abs().amax() > 16 if scores.isfinite().any() else False
    return bool(large) and bool((got.abs() <= values.abs().nan_to_num(nan=0.0).amax(2) * 1.01).all())


def _read_outside(case, seen, got):
    return any("reads" in access and "reads tables_pointer" not in access for access in seen.out_of_bounds)


LARGE_SCORES = (
    "Only float16 cases with large scores are wrong. float16 keeps three digits of a number: scores near -160 become "
    "multiples of 1/8, and those near -6,000 multiples of 4. Make queries and keys float32 before you multiply them, "
    "and leave products, sums and scores in float32."
)
OUTSIDE_THE_POOL = (
    "Memory outside the pool was read. Three things say where a read goes: the length (is it this sequence's own?), "
    "the "
    "entry of the table (behind a sequence's last page it is -1, which is no page), and the strides of the tensor that "
    "you read."
)
PAST_THE_TABLE = (
    "The table is read past its last entry. A sequence has tl.cdiv(length, PAGE_SIZE) pages, and none where it has no "
    "tokens. Where the last page is full, length // PAGE_SIZE + 1 is one too many, and so is an entry that is loaded a "
    "step ahead without a mask."
)
ONE_PAGE_SHORT = (
    "A page is missing at the end of a sequence{}: the loop is one page short there. A sequence has tl.cdiv(length, "
    "PAGE_SIZE) pages."
)


def paged_decode(query, key_pages, value_pages, block_tables, lengths):
    keys, values, tables = key_pages, value_pages, block_tables
    heads, key_head = heads_of(query.shape[1], keys.shape[1])
    length, page_size = lengths.long()[None], keys.shape[2]  # [1, batch]
    blocks = -(-length // page_size)
    first, last, tile = torch.zeros_like(length), blocks * page_size, page_size  # a whole page in every step
    positions = tiles(first, last, tile)  # [1, batch, keys]
    present = positions < length[..., None]
    pages = pages_of(tables, positions, positions < last[..., None], last, page_size, tile)
    slots = positions % page_size
    key_rows = rows_at(keys, present, keys.stride(0), keys.stride(1), keys.stride(2), pages, key_head, slots)
    value_rows = rows_at(values, present, values.stride(0), values.stride(1), values.stride(2), pages, key_head, slots)
    running_max, running_sum, accumulator = walk(
        queries(query, heads), key_rows, value_rows, present, first, last, tile, torch.float32
    )
    total = torch.where(running_sum == 0, 1.0, running_sum)
    return stored((accumulator / total[..., None])[0].to(query.dtype), heads, query)


BLOCKS = "-(-length // page_size)"
CHANGES = (
    *PAGES,
    *edits(
        ONE_PAGE_SHORT.format(""), last_page_left_out__always=(BLOCKS, "(-(-length // page_size) - 1).clamp(min=0)")
    ),
    *edits(
        ONE_PAGE_SHORT.format(" that fills its last page"),
        last_page_left_out__where_full=(
            BLOCKS,
            "(length - 1).clamp(min=0) // page_size + (length % page_size > 0).long()",
        ),
    ),
    *edits(
        ONE_PAGE_SHORT.format(" whose last page holds one token"),
        last_page_left_out__of_one_token=(BLOCKS, "-(-(length - 1).clamp(min=0) // page_size)"),
    ),
    *edits(
        LAST_PAGE_READ_WHOLE,
        last_page_read_whole__offset_compared=("positions < length[..., None]", f"{PLACE} < length[..., None]"),
    ),
    *edits("Every head reads the keys and values of head 0. Add head * head stride.", first_head_for_all=ONE_HEAD),
    *edits("Every head reads the keys of head 0. Add head * key_head_stride.", first_head_for_all__key=ONE_HEAD[:2]),
    *edits(
        "Every head reads the values of head 0. Add head * value_head_stride.", first_head_for_all__value=ONE_HEAD[2:]
    ),
    *without(keys_that_count("length", "tables.shape[1] * keys.shape[2]"), "last_tile_skipped"),  # that is a page
    *SOFTMAX,
    *edits(
        "The first page of a sequence is never looked at. The loop begins with entry 0 of the table.",
        first_tile_skipped=(STEPS, "range(tile, scores.shape[-1], tile)"),
    ),
    *edits(
        "Only the first pages of a sequence are read, however many it has: the loop ends at a fixed number. A sequence "
        "has tl.cdiv(length, PAGE_SIZE) pages.",
        **{f"only_first_pages__{count}": (BLOCKS, f"({BLOCKS}).clamp(max={count})") for count in (8, 16)},
    ),
    *edits(
        "Positions behind the last token were given a finite score. Where all true scores are lower still, those "
        "decide: a hidden score is minus infinity.",
        alone=True,
        **{
            f"hidden_scored_minus_1e9{way}": (HIDDEN, HIDDEN.replace("-INF", number))
            for way, number in (("", "-1e9"), ("__1e3", "-1e3"), ("__1e4", "-1e4"))
        },
    ),
    *edits(
        "The values of a page are added in float16, which ends at 65,504. The product of weights and values is summed "
        "in float32: make one of the two float32 before you multiply.",
        page_summed_in_float16=(ADDS, ADDS.replace("product", "product.to(values.dtype).float()")),
    ),
    *edits(PAST_THE_TABLE, table_read_past_its_end=(BLOCKS, "length // page_size + 1")),
    *edits(EMPTY_SEQUENCE, empty_sequence_nan=(TOTAL, "running_sum")),
    *strides("page", paged=True),
    *edits(
        "Where a sequence's row of the table begins was computed from the longest length. The table may be wider: use "
        "block_tables.stride(0).",
        table_stride_from_lengths=("tables.stride(0)", "int(last.max()) // page_size"),
    ),
    *OUTPUT_STRIDES,
    *output_laid_out_like_query("stored((accumulator / total[..., None])[0].to(query.dtype), heads, query)"),
    *UNGUARDED,
    *edits("", divided_where_tokens=(TOTAL, f"torch.where(lengths[:, None, None] > 0, running_sum, {TOTAL})")),
)
MODEL = model_of(
    paged_decode,
    CHANGES,
    (heads_of, queries, tiles, pages_of, rows_at, start, step, walk, stored),
    styles=(("unguarded",), ("unguarded", "divided_where_tokens"), ()),
)

EXERCISE = Exercise(
    id="6.5",
    title="Paged decode",
    entries=("paged_decode",),
    cases=decode_cases,
    oracle=_of_each(in_a_kernel),
    contracts=(CONTRACT,),
    plain=PLAIN,
    models=(MODEL,),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda query, key_pages, *others: query.numel()),
        Forbids(
            (
                "scaled_dot_product_attention",
                "_scaled_dot_product",
                "bmm",
                "mm",
                "matmul",
                "softmax",
                "_softmax",
                "index_select",
                "gather",
            )
        ),
        Moves(decode_bytes, slack=1.15),
    ),
    hints=(
        "Loop over the entries of the table: there are tl.cdiv(length, PAGE_SIZE) of them. In each step load the "
        "page's number from the table, then that page's keys [PAGE_SIZE, HEAD_DIM].",
        "Keys of a page: key_pointer + page * key_page_stride + head * key_head_stride + offsets[:, None] * "
        "key_slot_stride + columns[None, :]. The offsets are 0 ... PAGE_SIZE-1 in every page.",
        "One query against PAGE_SIZE keys is a sum over columns: scores = tl.sum(query[None, :] * key_tile, axis=1). "
        "The query is scaled already. Where block * PAGE_SIZE + offsets >= length set the score to minus infinity, and "
        "load no keys and values from there: a mask, and other=0.0.",
        "Then the update of chapter 03: new_max = tl.maximum(running_max, tl.max(scores, axis=0)); weights = "
        "tl.exp(scores - new_max); rescale = tl.exp(running_max - new_max); accumulator = accumulator * rescale + "
        "tl.sum(weights[:, None] * value_tile, axis=0).",
        "A sequence of length 0 never enters the loop, so its sum is 0. Divide by tl.where(running_sum == 0, 1, "
        "running_sum), and its output is 0.",
    ),
    mistakes=(
        Mistake("maximum_of_the_first_tile", MAXIMUM_OF_THE_FIRST_TILE, when=stays_behind(_scores), every=True),
        Mistake("large_scores_in_float16", LARGE_SCORES, when=large_scores_in_float16, every=True),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        Mistake(
            "page_in_16_bits",
            "From page 32,768 on memory before the pool is read: the page's number was kept in 16 bits. It is int32: "
            "leave it so wide, or wider.",
            when=lambda case, seen, got: _read_outside(case, seen, got) and int(case.args[3].max()) >= 2**15,
            every=True,
        ),
        Mistake("read_outside_the_pool", OUTSIDE_THE_POOL, when=_read_outside),
        Mistake(
            "table_read_past_its_end",
            PAST_THE_TABLE,
            when=lambda case, seen, got: any("reads tables_pointer" in access for access in seen.out_of_bounds),
        ),
    ),
)
