"""Exercises 6.4 and 6.5: a kernel that writes new tokens into pages, and one that reads them for a step of decode."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Allocates, Case, Exercise, Forbids, InOut, LaunchesTriton, Mistake, Moves
from exercises.attention_slips import (
    attention,
    from_zero,
    last_keys,
    not_divided,
    prescaled,
    rounded,
    streamed,
    without_running_max,
)
from exercises.paged_slips import (
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

# ------------------------------------------------------------------------------------------ 6.4 append into pages


def start_of(slot, head, token, pool):
    """Where a head's row of a slot begins in the pool's memory, in elements."""
    page_stride, head_stride, slot_stride, _ = pool.stride()
    size = pool.shape[2]
    return slot // size * page_stride + head * head_stride + slot % size * slot_stride


def appended(
    key,
    value,
    key_pages,
    value_pages,
    slots,
    *,
    start=start_of,
    head_read=lambda head: head,
    whole=False,
    padding=False,
):
    """Write each token's key and value into its slot, in the pool's memory, by its strides.

    Args:
        start: as `start_of`; a slip begins elsewhere. What falls outside the pool is lost.
        head_read: the head whose key and value a head gets.
        whole: the slip: rows as wide as the next power of two, from the memory behind a row and into it.
        padding: the slip: tokens whose slot is -1 are written too.
    """
    for source, pool in ((key, key_pages), (value, value_pages)):
        width = source.shape[2]
        wide = 1 << (width - 1).bit_length() if whole else width
        if wide > width:  # the memory behind the last row is no one's
            behind = torch.full((wide - width,), math.nan, dtype=source.dtype)
            source = torch.cat([source.flatten(), behind]).as_strided((*source.shape[:2], wide), source.stride())
        memory = pool.as_strided((pool.numel(),), (1,))
        for token, slot in enumerate(slots.tolist()):
            for head in range(pool.shape[1]) if padding or slot >= 0 else ():
                begin = start(slot, head, token, pool)
                inside = min(wide, len(memory) - begin)
                if begin >= 0 and inside > 0:
                    memory[begin : begin + inside] = source[token, head_read(head), :inside]


def _start_of_padding(slot, head, token, pool):
    """Compiled code divides towards zero: slot -1 is offset -1 of page 0, the last slot of the head before."""
    return start_of(slot, head, token, pool) if slot >= 0 else head * pool.stride(1) - pool.stride(2)


def _start_clamped(slot, head, token, pool):
    return start_of(max(slot, 0), head, token, pool)


def _begins(change):
    """A slip that begins a row elsewhere: `change(page, head, offset, page stride, head stride, slot stride)`."""

    def start(slot, head, token, pool):
        size = pool.shape[2]
        return change(slot // size, head, slot % size, *pool.stride()[:3])

    return lambda *args: appended(*args, start=start)


def _begins_by_sizes(change):
    """A slip that computes where a row begins from sizes: `change(page, head, offset, heads, page_size)` rows in."""

    def start(slot, head, token, pool):
        _, heads, size, width = pool.shape
        return change(slot // size, head, slot % size, heads, size) * width

    return lambda *args: appended(*args, start=start)


def _start_of_short_pages(numbers):
    """The slip: a page is taken to be `numbers(pool)` elements long, and the strides of heads and slots are kept."""

    def start(slot, head, token, pool):
        size = pool.shape[2]
        return slot // size * numbers(pool) + head * pool.stride(1) + slot % size * pool.stride(2)

    return start


def by_the_keys_strides(key, value, key_pages, value_pages, slots):
    appended(key, value, key_pages, value_pages.clone(), slots)
    appended(value, value, value_pages, value_pages.clone(), slots,
             start=lambda slot, head, token, pool: start_of(slot, head, token, key_pages))  # fmt: skip


def exchanged(key, value, key_pages, value_pages, slots):
    appended(value, key, key_pages, value_pages, slots)


def keys_twice(key, value, key_pages, value_pages, slots):
    appended(key, key, key_pages, value_pages, slots)


def nothing_of_the_values(key, value, key_pages, value_pages, slots):
    kept = value_pages.clone()
    appended(key, value, key_pages, value_pages, slots)
    value_pages.copy_(kept)


def append_cases(draw):
    def case(name, slots, pages, heads, page_size, head_dim, dtype=torch.float32, change=None, metered=False):
        tokens = (draw.normal(len(slots), heads, head_dim, dtype=dtype) for _ in "kv")
        pools = (draw.normal(pages, heads, page_size, head_dim, dtype=dtype) for _ in "kv")
        key, value, key_pages, value_pages = (change or (lambda *tensors: tensors))(*tokens, *pools)
        slots = torch.tensor(slots, dtype=torch.int64)
        return Case(name, (key, value, InOut(key_pages), InOut(value_pages), slots), metered=metered)

    def packed(key, value, key_pages, value_pages):
        """Keys as a third of one tensor, as a fused projection of q, k and v leaves them; values head by head."""
        together = torch.cat([key * 0, key, value], dim=1)
        heads, by_head = key.shape[1], value.transpose(0, 1).contiguous().transpose(0, 1)
        return together[:, heads : 2 * heads], by_head, key_pages, value_pages

    def token_by_token(key, value, key_pages, value_pages):
        return key, value, tokens_first(key_pages), value_pages

    page = draw.permutation(6).tolist()
    anywhere = (draw.permutation(40)[:9]).tolist()
    return [
        case("4 tokens into one page of one head", [8, 9, 10, 11], 4, 1, 4, 16),
        case("3 sequences, a token each, 2 heads", [5, 14, 3], 5, 2, 4, 16),
        case("a prompt of 11 tokens over 3 pages in any order", [4 * page[i // 4] + i % 4 for i in range(11)], 6, 2, 4,
             32),
        case("slot -1: padding that must not be written", [9, -1, 2, -1], 4, 2, 4, 16),
        case("9 tokens anywhere, 3 heads", anywhere, 10, 3, 4, 16),
        case("pages of one token", [3, 0, 5], 6, 2, 1, 16),
        case("head dimension 80", [7, 2, 12], 8, 2, 8, 80),
        case("float16, head dimension 128", [1, 30, 17], 16, 2, 16, 128, torch.float16),
        case("keys cut out of a fused q, k, v; values stored head by head", [6, 1, 11], 4, 2, 4, 16, change=packed),
        case("key pages stored token by token", [6, 1, 11], 4, 2, 4, 16, change=token_by_token),
        case("12 tokens, 2 heads, bytes counted", list(range(3, 15)), 4, 2, 4, 64, metered=True),
    ]  # fmt: skip


def append_bytes(key, value, key_pages, value_pages, slots):
    """Each key and value read once and written once, and a slot read for each row."""
    return 4 * key.numel() * key.element_size() + slots.numel() * key.shape[1] * slots.element_size()


def _outside(case, seen, got):
    return any("writes" in access for access in seen.out_of_bounds)


def _wide_rows(case, seen, got):
    """The pools hold what rows as wide as the next power of two leave in them, memory behind the last row included."""
    key, value, key_pages, value_pages, slots = case.args
    if key.shape[2] & (key.shape[2] - 1) == 0 or not isinstance(got, tuple) or not key.is_contiguous():
        return False
    told = [pool.tensor.clone() for pool in (key_pages, value_pages)]
    appended(key, value, *told, slots, whole=True)
    return all(torch.equal(mine.nan_to_num(7e4), pool.nan_to_num(7e4)) for mine, pool in zip(got[1]["written"], told))


APPEND = Exercise(
    id="6.4",
    title="Append into pages",
    entries=("append_to_pages",),
    cases=append_cases,
    oracle=appended,
    needs="triton",
    requirements=(LaunchesTriton(at_most=1), Forbids(("index_put", "index_put_", "index_copy_", "scatter_")),
                  Moves(append_bytes, slack=1.05)),
    hints=(
        "A program copies one row of head_dim numbers for the keys and one for the values: those of one token and one "
        "head. program_id(0) is the token, program_id(1) the head.",
        "slot = tl.load(slots_pointer + token); page = slot // PAGE_SIZE; offset = slot % PAGE_SIZE. A slot below 0 "
        "must write nothing: make that a part of the mask, next to columns < HEAD_DIM.",
        "The row in the pool begins at page * key_page_stride + head * key_page_head_stride + offset * "
        "key_slot_stride; a page holds all heads, so its stride is heads · page_size · head_dim and not page_size · "
        "head_dim.",
        "The row to read begins at token * key_stride + head * key_head_stride. tl.load it with the mask, tl.store it "
        "with the same mask, and once more for the values with their own strides.",
    ),
    mistakes=(
        Mistake(
            "slot_used_as_row",
            "The slot was used as it is: the pool is not one long list of tokens. Between two pages lie those of the "
            "other heads: split it into page = slot // PAGE_SIZE and offset = slot % PAGE_SIZE, each with its stride.",
            result=lambda *args: appended(
                *args,
                start=lambda slot, head, token, pool: slot * pool.stride(2) + head * pool.stride(1),
            ),
        ),
        Mistake(
            "page_and_offset_exchanged",
            "The quotient was used as the offset and the remainder as the page. The page is slot // PAGE_SIZE.",
            result=_begins(lambda page, head, offset, *strides: (
                offset * strides[0] + head * strides[1] + page * strides[2]
            )),
        ),
        Mistake(
            "offset_forgotten",
            "Every token is written to the first slot of its page, over the one before. Add offset * slot stride.",
            result=_begins(lambda page, head, offset, *strides: page * strides[0] + head * strides[1]),
        ),
        Mistake(
            "page_not_multiplied",
            "The page's number is multiplied by the wrong stride, as if a page were one row. A page begins page * "
            "page stride elements into the pool.",
            result=(
                _begins(lambda page, head, offset, *strides: (page + offset) * strides[2] + head * strides[1]),
                lambda *args: appended(*args, start=_start_of_short_pages(lambda pool: pool.shape[2])),
            ),
        ),
        Mistake(
            "heads_of_a_page_forgotten",
            "A page is taken to hold one head. It holds all of them: its stride is heads · page_size · head_dim, which "
            "the launcher passes.",
            result=(
                _begins(lambda page, head, offset, *strides: (page + head) * strides[1] + offset * strides[2]),
                _begins_by_sizes(lambda page, head, offset, heads, size: (page + head) * size + offset),
                lambda *args: appended(
                    *args, start=_start_of_short_pages(lambda pool: pool.shape[2] * pool.shape[3])
                ),
            ),
        ),
        Mistake(
            "strides_ignored",
            "Where a row begins was computed from sizes, as if the pool were contiguous. One of the pools is stored "
            "token by token: use the strides that the launcher passes.",
            result=_begins_by_sizes(lambda page, head, offset, heads, size: (page * heads + head) * size + offset),
        ),
        Mistake(
            "other_strides",
            "The values are written by the strides of the key pages. The two pools may lie in memory differently: each "
            "has three strides of its own.",
            result=by_the_keys_strides,
        ),
        Mistake(
            "head_and_slot_exchanged",
            "Heads and slots have changed places: in a page all slots of head 0 come first, then those of head 1. The "
            "head goes with the head stride, the offset with the slot stride.",
            result=(
                _begins(lambda page, head, offset, *steps: page * steps[0] + head * steps[2] + offset * steps[1]),
                _begins_by_sizes(lambda page, head, offset, heads, size: (page * size + offset) * heads + head),
            ),
        ),
        Mistake(
            "slot_zero_skipped",
            "A token whose slot is 0 is not written. 0 is the first slot of page 0; only -1 means no place.",
            result=lambda *args: appended(
                *args, start=lambda slot, head, token, pool: start_of(slot, head, token, pool) if slot else -1
            ),
        ),
        Mistake(
            "slots_ignored",
            "The tokens are written one behind another from the start of the pool. Where token i goes stands in "
            "slots[i].",
            result=lambda *args: appended(
                *args, start=lambda slot, head, token, pool: start_of(token, head, token, pool)
            ),
        ),
        Mistake(
            "one_slot_late",
            "Every token lies one slot behind its own, where the next one belongs. The mapping names the slot itself: "
            "add nothing to it.",
            result=lambda *args: appended(
                *args, start=lambda slot, head, token, pool: start_of(slot + 1, head, token, pool)
            ),
        ),
        Mistake(
            "first_head_for_all",
            "Every head got the key and value of head 0. Add head * head stride to where they are read.",
            result=lambda *args: appended(*args, head_read=lambda head: 0),
        ),
        Mistake(
            "heads_on_top_of_each_other",
            "All heads are written to the rows of head 0. Add head * head stride to where they are written.",
            result=_begins(lambda page, head, offset, *strides: page * strides[0] + offset * strides[2]),
        ),
        Mistake("keys_and_values_exchanged", "Keys went into value_pages and values into key_pages.", result=exchanged),
        Mistake("keys_written_twice", "The keys were written into both pools. Load the values for the second.",
                result=keys_twice),
        Mistake("values_not_written", "Only the keys are written. The values go to the same slot of value_pages.",
                result=nothing_of_the_values),
        Mistake(
            "padding_written",
            "A token whose slot is -1 was written: before the pool, over the last slot of the head before, or into "
            "slot 0. It has no place: let nothing be stored where slot < 0.",
            result=(
                lambda *args: appended(*args, start=_start_of_padding, padding=True),
                lambda *args: appended(*args, start=_start_clamped, padding=True),
            ),
            when=lambda case, seen, got: -1 in case.args[4].tolist() and _outside(case, seen, got),
            every=True,
        ),
        Mistake(
            "tokens_read_contiguously",
            "It fails only where the new keys are a part of a larger tensor, as a fused projection leaves them. Their "
            "rows lie key_stride and key_head_stride apart, and those of the values as their own strides say.",
            when=lambda case, seen, got: (
                "fused" in case.name and all("key_pointer" in a or "value_pointer" in a for a in seen.out_of_bounds)
            ),
            every=True,
        ),
        Mistake(
            "columns_not_masked",
            "More than head_dim columns are written, over the row behind. BLOCK_D is a power of two: mask the columns "
            "from HEAD_DIM on.",
            when=_wide_rows,
        ),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ 6.5 paged decode


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
    return cases  # fmt: skip


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


DECODE = Exercise(
    id="6.5",
    title="Paged decode",
    entries=("paged_decode",),
    cases=decode_cases,
    oracle=paged_decode,
    plain=(decode_prescaled, decode_rounded),
    needs="triton",
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda query, key_pages, *others: query.numel()),
        Forbids(("scaled_dot_product_attention", "_scaled_dot_product", "bmm", "mm", "matmul", "softmax", "_softmax",
                 "index_select", "gather")),
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
                query, key_pages, *others,
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
)  # fmt: skip
