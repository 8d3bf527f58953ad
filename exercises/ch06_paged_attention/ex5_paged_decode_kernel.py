"""Exercise 6.5: a kernel that reads pages for a step of decode."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves
from exercises.topics.attention import (
    attention,
    from_zero,
    last_keys,
    not_divided,
    prescaled,
    rounded,
    streamed,
    without_running_max,
)
from exercises.topics.paging import (
    consecutive,
    first_head,
    first_in_page,
    full_pages,
    heads_forgotten,
    not_multiplied,
    one_more,
    paged,
    paged_decode,
    tokens_first,
    whole_pages,
    whole_pages_after_the_first,
    without_table,
)

BIG = 55.0  # standard deviation of scores whose exponentials overflow in float32


def decode_prescaled(*args):
    return paged_decode(*args, attend=prescaled)


def decode_rounded(*args):
    return paged_decode(*args, attend=rounded)


def decode_cases(draw):
    def case(name, heads, head_dim, lengths, page_size, metered=False, **options):
        return Case(name, paged(draw, heads, head_dim, lengths, page_size, **options), metered=metered)

    def stored_token_by_token(query, key_pages, value_pages, tables, lengths):
        return draw.spread_out(query, 8), tokens_first(key_pages), draw.spread_out(value_pages, 16), tables, lengths

    def far_below(lengths, page_size, heads=1, head_dim=32):
        query, key_pages, value_pages, tables, lengths = paged(draw, heads, head_dim, lengths, page_size)
        shift = -200 / 5 / math.sqrt(head_dim)
        return 0.3 * query + 5.0, 0.2 * key_pages + shift, value_pages, tables, lengths

    def behind_the_end(lengths, page_size, heads=2, head_dim=16):
        """Memory that no token was written to yet holds anything."""
        query, key_pages, value_pages, tables, lengths = paged(draw, heads, head_dim, lengths, page_size)
        for row, length in enumerate(lengths.tolist()):
            for pages in (key_pages, value_pages):
                pages[int(tables[row, length // page_size]), :, length % page_size :] = math.nan
        return query, key_pages, value_pages, tables, lengths

    def growing(length, page_size, top=15, head_dim=32):
        """Scores that rise along the sequence, from about -top to top."""
        query, key_pages, value_pages, tables, lengths = paged(draw, 1, head_dim, [length], page_size)
        direction = torch.ones(head_dim) / math.sqrt(head_dim)
        query, key_pages = math.sqrt(head_dim) * direction + 0.02 * query, 0.02 * key_pages
        for position, height in enumerate(torch.linspace(-top, top, length).tolist()):
            key_pages[int(tables[0, position // page_size]), :, position % page_size] += height * direction
        return query, key_pages, value_pages, tables, lengths

    prime = draw.choice((29, 31, 37, 41))
    cases = [
        case("1 sequence, 2 whole pages of 16", 1, 16, [32], 16),
        case("1 sequence, 2 pages and 5 tokens", 1, 16, [37], 16),
        case("2 sequences, 2 heads, pages of 8", 2, 32, [17, 23], 8),
        case(f"3 sequences of 1, 16 and {prime} tokens", 2, 16, [1, 16, prime], 16, spare=2),
        case("a sequence of no tokens between two others", 1, 16, [9, 0, 4], 8),
        case("pages of one token", 1, 16, [7, 3], 1),
        case("one page is enough for all", 2, 16, [20, 30], 32, spare=0),
        case("the last table is full to its last entry", 1, 16, [16, 0, 32], 16, spare=0),
        Case("NaN in the slots behind the last tokens", behind_the_end([21, 8], 16)),
        case("scores of ±150: exp overflows", 1, 32, [50], 16, score=BIG),
        Case("all scores near -200", far_below([20, 33], 16)),
        Case("scores grow along the sequence", growing(45, 8)),
        Case("scores fall along the sequence, from 120 to -120", growing(45, 8, -120)),
        case("float16, head dimension 64", 2, 64, [40, 11], 16, dtype=torch.float16),
        Case(
            "key pages stored token by token, gaps elsewhere", stored_token_by_token(*paged(draw, 2, 16, [13, 22], 8))
        ),
        case("2 sequences of 64 tokens, 2 heads, bytes counted", 2, 64, [64, 64], 16, metered=True),
    ]
    if draw.on_gpu:
        cases.append(
            case("4 sequences up to 3000 tokens, 8 heads, float16", 8, 128, [3000, 1, 2049, 0], 16, dtype=torch.float16)
        )
    return cases


def decode_bytes(query, key_pages, value_pages, block_tables, lengths):
    """Keys and values of all tokens and the queries read once, the output written; table entries and a length for each
    program."""
    heads, page_size, head_dim = key_pages.shape[1:]
    rows = 2 * int(lengths.sum()) * heads * head_dim + 2 * query.numel()
    entries = sum(-(-length // page_size) for length in lengths.tolist()) + len(lengths)
    return rows * query.element_size() + entries * heads * 4


def _everywhere(**slips):
    return lambda *args: paged_decode(*args, **slips)


def _paged(**slips):
    """A fingerprint; silent where scores are huge, as a wrong result then rounds otherwise than the right one."""

    def result(query, key_pages, *others):
        if float(query.square().mean() * key_pages[key_pages == key_pages].square().mean()) > 100:
            return None
        return paged_decode(query, key_pages, *others, **slips)

    return result


def _by_page(function):
    """A slip of the online softmax, which works page by page; silent likewise."""

    def result(query, key_pages, *others):
        size = key_pages.shape[2]
        return _paged(attend=lambda q, k, v: function(q, k, v, size))(query, key_pages, *others)

    return result


def _zeros_scored(query, key, value, page_size):
    """The empty places of the last page loaded as zeros and counted, each with a score of 0."""
    missing = (0, 0, 0, -key.shape[-2] % page_size)
    return attention(query, torch.nn.functional.pad(key, missing), torch.nn.functional.pad(value, missing))


def _first_page_only(query, key, value, page_size):
    return attention(query, key[..., :page_size, :], value[..., :page_size, :])


def _maximum_of_the_page(query, key, value, page_size):
    """Each page measured from its own maximum: in float32 what came before overflows where that lies 88 lower."""
    scores = (query @ key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    page_maxima = torch.stack([page.amax(dim=-1) for page in scores.split(page_size, dim=-1)])
    falls = (page_maxima.cummax(dim=0).values - page_maxima).amax(dim=0) > 88.7
    return attention(query, key, value).masked_fill(falls[..., None], math.nan)


def _scaled_twice(query, key, value):
    return attention(query, key, value, scale=1 / query.shape[-1])


def _log2e_missing(query, key, value):
    return attention(query, key, value, scale=math.log(2) / math.sqrt(query.shape[-1]))


def _overflowed(query, key) -> float:
    """What is left where the exponentials of the scores as they are add up to no number: 0 when they all underflow."""
    return 0.0 if float((query @ key.transpose(-1, -2)).amax()) / math.sqrt(query.shape[-1]) < 0 else math.nan


def _empty_ones_are_nan(case, seen, got):
    """NaN where a sequence has no token and nowhere else, and not from memory outside a tensor."""
    if not isinstance(got, torch.Tensor) or seen.out_of_bounds or got.shape != case.args[0].shape:
        return False
    empty = case.args[4] == 0
    return bool(empty.any()) and torch.equal(got.isnan(), empty[:, None, None].expand(got.shape).to(got.device))


def _read_outside(case, seen, got):
    return any("reads" in access and "reads tables_pointer" not in access for access in seen.out_of_bounds)


EXERCISE = Exercise(
    id="6.5",
    title="Paged decode",
    entries=("paged_decode",),
    cases=decode_cases,
    oracle=paged_decode,
    plain=(decode_prescaled, decode_rounded),
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
        "The loop goes over blocks of the table: tl.cdiv(length, PAGE_SIZE) of them. In each step load the page's "
        "number from the table, then the page's keys [PAGE_SIZE, HEAD_DIM] from where that page lies.",
        "Keys of a page: key_pointer + page * key_page_stride + head * key_head_stride + offsets[:, None] * "
        "key_slot_stride + columns[None, :]. The offsets are 0 ... PAGE_SIZE-1 in every page.",
        "One query against PAGE_SIZE keys is a sum over columns: scores = tl.sum(query[None, :] * key_tile, axis=1). "
        "The query is scaled already. Where block * PAGE_SIZE + offsets >= length set the score to minus infinity, and "
        "load no keys and values from there: a mask, and other=0.0.",
        "Then the update of chapter 03: new_max = tl.maximum(running_max, tl.max(scores, axis=0)); weights = "
        "tl.exp(scores - new_max); rescale = tl.exp(running_max - new_max); accumulator = accumulator * rescale + "
        "tl.sum(weights[:, None] * value_tile, axis=0).",
        "A sequence of length 0 never enters the loop: its sum is 0. Divide by tl.where(running_sum == 0, 1, "
        "running_sum), and its output is 0.",
    ),
    mistakes=(
        Mistake(
            "last_page_read_whole",
            "The last page is read to its end, whatever it holds there: another sequence's old tokens, most likely. "
            "Positions from `length` on get a score of minus infinity.",
            result=(_paged(read=whole_pages), _paged(read=whole_pages_after_the_first)),
        ),
        Mistake(
            "empty_slots_scored",
            "The slots behind the last token are loaded as zeros and counted: a key of zeros scores 0, and exp(0 - "
            "maximum) is not 0. Set their scores to minus infinity.",
            result=_by_page(_zeros_scored),
        ),
        Mistake(
            "last_page_dropped",
            "The tokens of the last, partly filled page are missing: the number of pages was rounded down. Use "
            "tl.cdiv(length, PAGE_SIZE).",
            result=tuple(
                _paged(read=full_pages, none_read=nothing, empty=empty)
                for nothing, empty in ((0.0, 0.0), (math.nan, 0.0), (math.nan, math.nan))
            ),
        ),
        Mistake(
            "table_not_multiplied",
            "The number from the table is used as if it counted tokens. A page's number times the page stride is where "
            "it begins.",
            result=_paged(rows=not_multiplied),
        ),
        Mistake(
            "heads_of_a_page_forgotten",
            "A page is taken to hold one head. It holds all of them: multiply its number by the page stride, which the "
            "launcher passes.",
            result=_paged(rows=heads_forgotten),
        ),
        Mistake(
            "pages_consecutive",
            "Only the first entry of the table is used, and the pages behind it are taken to follow in memory. Load an "
            "entry in every step.",
            result=_paged(rows=consecutive),
        ),
        Mistake(
            "table_ignored",
            "Block i of the sequence is read from page i of the pool. Which page it is stands in the table.",
            result=_paged(rows=without_table),
        ),
        Mistake(
            "first_table_for_all",
            "Every sequence reads the table of the first one. Row b begins b * table_stride entries in.",
            result=_paged(tables=lambda tables, sequence: tables[0]),
        ),
        Mistake(
            "stale_length",
            "One token too few is read: the newest, which was just written to the cache, is in `lengths` already.",
            result=tuple(
                _paged(read=lambda length, page_size, blocks: length - 1, none_read=nothing)
                for nothing in (0.0, math.nan)
            ),
        ),
        Mistake(
            "one_token_too_many",
            "One token too many is read, from a slot that holds none of this sequence. Positions below `length` count, "
            "without it: compare with <.",
            result=(_paged(read=one_more), _paged(read=lambda length, page_size, blocks: length + 1)),
        ),
        Mistake(
            "offset_forgotten",
            "Only the first token of each page is read, once for every slot. Add offsets * slot stride.",
            result=_paged(rows=first_in_page),
        ),
        Mistake(
            "first_head_for_all",
            "Every head reads the keys and values of head 0. Add head * head stride.",
            result=_paged(rows=first_head),
        ),
        Mistake(
            "only_first_page",
            "Only the first page is used. Does the loop go over all blocks, and does the page change in it?",
            result=_by_page(_first_page_only),
        ),
        Mistake(
            "keys_used_as_values",
            "The weights are multiplied with the keys. The sum takes the values.",
            result=_paged(attend=lambda q, k, v: attention(q, k, k)),
        ),
        Mistake(
            "empty_sequence_nan",
            "A sequence without a token gives NaN: its sum is 0, and 0 / 0 is no number. Divide by 1 there.",
            when=_empty_ones_are_nan,
            every=True,
        ),
        Mistake(
            "scale_missing",
            "The scores are not scaled. Multiply them by 1/√head_dim.",
            result=_paged(attend=lambda q, k, v: attention(q, k, v, scale=1.0)),
        ),
        Mistake(
            "scaled_twice",
            "The scores are scaled twice: the query that the head of the kernel loads is multiplied by the scale "
            "already.",
            result=_paged(attend=_scaled_twice),
        ),
        Mistake(
            "log2e_missing",
            "The exponential is tl.exp2 and the scale lacks log2(e): 2^x is not e^x. Take tl.exp, or multiply the "
            "scale by 1.4427.",
            result=_paged(attend=_log2e_missing),
        ),
        Mistake(
            "no_running_max",
            "exp is taken of the scores as they are: above 88 it overflows, and infinity by infinity is NaN. Subtract "
            "the running maximum first.",
            result=(
                _everywhere(attend=without_running_max),
                _everywhere(attend=lambda q, k, v: without_running_max(q, k, v).nan_to_num(nan=_overflowed(q, k))),
            ),
        ),
        Mistake(
            "maximum_starts_at_zero",
            "The running maximum starts at 0, so that scores far below 0 all underflow. Start it at minus infinity.",
            result=_everywhere(attend=from_zero),
        ),
        Mistake(
            "maximum_of_the_page",
            "Each page is measured from its own maximum. Where that is far below the one before, exp(old maximum - new "
            "maximum) overflows. The new maximum is the larger one of the old and the page's.",
            result=lambda query, key_pages, *others: paged_decode(
                query,
                key_pages,
                *others,
                attend=lambda q, k, v: _maximum_of_the_page(q, k, v, key_pages.shape[2]),
            ),
        ),
        Mistake(
            "maximum_not_updated",
            "The running maximum is never updated, so that only the last page counts. End the step with running_max = "
            "new_max.",
            result=_by_page(last_keys),
        ),
        Mistake(
            "not_divided",
            "The accumulator is not divided by the running sum. Divide once, after the last page.",
            result=_paged(attend=not_divided),
        ),
        Mistake(
            "accumulator_not_rescaled",
            "The accumulator is not rescaled when the maximum grows. Multiply it by exp(old maximum - new maximum) "
            "before a page's values are added.",
            result=_by_page(lambda q, k, v, size: streamed(q, k, v, size, rescale_accumulator=False)),
        ),
        Mistake(
            "sum_not_rescaled",
            "The running sum is not rescaled when the maximum grows. It gets the same factor as the accumulator.",
            result=_by_page(lambda q, k, v, size: streamed(q, k, v, size, rescale_sum=False)),
        ),
        Mistake(
            "nothing_rescaled",
            "Neither the sum nor the accumulator is rescaled when the maximum grows. Multiply both by exp(old maximum "
            "- new maximum).",
            result=_by_page(
                lambda q, k, v, size: streamed(q, k, v, size, rescale_sum=False, rescale_accumulator=False)
            ),
        ),
        Mistake(
            "strides_ignored",
            "It fails only where the tensors are not contiguous. Pages, heads and slots lie as far apart as their "
            "strides say, and those of the values are not those of the keys.",
            when=lambda case, seen, got: "token by token" in case.name,
            every=True,
        ),
        Mistake(
            "memory_behind_the_end_used",
            "The slots behind the last token reach the result. Their weight is 0, and 0 · NaN is NaN: memory that no "
            "token was written to holds anything. Load keys and values with the mask and other=0.0.",
            when=lambda case, seen, got: "NaN" in case.name and not seen.out_of_bounds,
            every=True,
        ),
        Mistake(
            "read_outside_the_pool",
            "Memory outside the pool was read. Behind a sequence's last page its table holds -1, which is no page: "
            "stop after tl.cdiv(length, PAGE_SIZE) entries, and use the strides of the tensor that you read.",
            when=_read_outside,
        ),
        Mistake(
            "table_read_past_its_end",
            "The table is read behind its last entry: a sequence that fills its last page has length / PAGE_SIZE "
            "pages, and length // PAGE_SIZE + 1 is one too many. Use tl.cdiv(length, PAGE_SIZE).",
            when=lambda case, seen, got: any("reads tables_pointer" in access for access in seen.out_of_bounds),
        ),
    ),
)
