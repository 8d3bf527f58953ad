"""Exercise 8.5: Flash-Decoding over a paged cache with grouped heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from course_lib.checker import (
    TRITON,
    Allocates,
    Case,
    Exercise,
    LaunchesTriton,
    Mistake,
    Moves,
    Requirement,
)
from exercises.ch08_flash_decoding.ex2_one_split_kernel import (
    BIG,
    HEADS_BY_MODULO,
    INTO_THE_NEXT,
    LAST_KEYS_LOST,
    PAST_THE_END,
)
from exercises.ch08_flash_decoding.ex3_combine_kernel import MISSING_SPLITS_COUNTED
from exercises.ch08_flash_decoding.slips import (
    SKIPS_THE_WORK,
    STRAYED,
    attend,
    attend_prescaled,
    combine,
    combine_equally,
    combine_in_turn,
    combine_padded,
    combine_wrongly,
    into_the_next,
    is_pair,
    partials,
    rounded_down,
    rounded_up,
    wrong_lses,
)
from exercises.topics.decode import by_modulo, decode, decode_lse, decode_lse_rounded, decode_rounded
from exercises.topics.paging import (
    consecutive,
    first_in_page,
    full_pages,
    not_multiplied,
    page_tables,
    row_of,
    tokens_first,
    whole_pages,
    without_table,
)


def contiguous(pages, block_tables, lengths, rows=row_of, tables=lambda tables, sequence: tables[sequence]):
    """The tokens of a paged cache, [batch, key_heads, max_blocks · page_size, head_dim], zeros behind each length.

    `rows` says where tokens lie, as in exercises/topics/paging.py. None where that is outside the pool.
    """
    shape = pages.shape
    flat = pages.reshape(-1, shape[3])
    cache = torch.zeros(len(lengths), shape[1], block_tables.shape[1] * shape[2], shape[3], dtype=pages.dtype)
    for sequence, length in enumerate(lengths.tolist()):
        if not length:
            continue
        table, positions = tables(block_tables, sequence).long(), torch.arange(length)
        for head in range(shape[1]):
            index = rows(table, positions, head, shape)
            if bool((index < 0).any()) or bool((index >= len(flat)).any()):
                return None
            cache[sequence, head, :length] = flat[index]
    return cache


def _caches(key_pages, value_pages, block_tables, lengths, **slips):
    return [contiguous(pages, block_tables, lengths, **slips) for pages in (key_pages, value_pages)]


def paged_oracle(query, key_pages, value_pages, block_tables, lengths, splits):
    caches = _caches(key_pages, value_pages, block_tables, lengths)
    return decode(query, *caches, lengths), decode_lse(query, *caches, lengths)


def paged_rounded(query, key_pages, value_pages, block_tables, lengths, splits):
    caches = _caches(key_pages, value_pages, block_tables, lengths)
    return decode_rounded(query, *caches, lengths), decode_lse_rounded(query, *caches, lengths)


def _split_and_merged(attend, merge):
    def result(query, key_pages, value_pages, block_tables, lengths, splits):
        caches = _caches(key_pages, value_pages, block_tables, lengths)
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


def apart(draw, query_heads, head_dim, length, page_size, splits, first=-6.0, last=6.0, steepness=1.0):
    """A sequence whose splits have very different log-sum-exps: scores go from about `first` to `last` along the keys.

    steepness: a factor on the scores, one number or one for each query head.
    """
    query, key_pages, value_pages, tables, lengths = paged(draw, query_heads, 1, head_dim, [length], page_size)
    direction = draw.normal(head_dim)
    direction = direction / direction.norm()
    query = math.sqrt(head_dim) * direction + 0.1 * draw.normal(1, query_heads, head_dim)
    query = query * torch.as_tensor(steepness).view(-1, 1)
    ramp = torch.linspace(first, last, length)
    positions = torch.arange(length)
    key_pages[tables[0].long()[positions // page_size], 0, positions % page_size] = ramp[:, None] * direction
    return query, key_pages, value_pages, tables, lengths, splits


def paged_cases(draw):
    def case(name, *sizes, splits, metered=False, **options):
        return Case(name, (*paged(draw, *sizes, **options), splits), metered=metered)

    prime = draw.choice((37, 41, 43, 47))
    query, keys, values, tables, lengths = paged(draw, 4, 2, 16, [30, 75], 16)
    far = paged(draw, 4, 1, 32, [70], 16)
    falling = apart(draw, 4, 32, 200, 16, 1, first=1.0, last=-1.0, steepness=(200.0, 1.0, 1.0, 1.0))
    cases = [
        case("1 sequence of 96 tokens, pages of 16, 2 splits", 4, 1, 16, [96], 16, splits=2, spare=0),
        case("160 tokens that fill their table to its end, 2 splits", 4, 1, 16, [160], 16, splits=2, spare=0),
        case("one split: nothing to merge; a group of 20", 20, 1, 16, [50], 16, splits=1),
        case(f"lengths {prime}, 1 and 64, 3 KV heads, 2 splits", 6, 3, 16, [prime, 1, 64], 16, splits=2),
        Case("scores rise along the keys: the last split weighs most", apart(draw, 4, 32, 90, 16, 3)),
        Case("scores fall along the keys, steeply for one head of the group", falling),
        Case("all scores near -200", (far[0] * 0.3 + 5.0, far[1] * 0.2 - 7.0, *far[2:], 2)),
        case("pages of 1 token, out of 4,000", 4, 1, 16, [150], 1, splits=2, pages=4000),
        case("pages of 20 tokens, 7 splits", 6, 1, 32, [135], 20, splits=7),
        case("pages of 128 tokens", 2, 1, 16, [130, 90], 128, splits=2),
        case("lengths 0 and 20, 3 splits", 4, 1, 16, [0, 20], 16, splits=3),
        case("5 tokens in 8 splits", 2, 1, 16, [5], 4, splits=8),
        case("scores of ±150: exp overflows", 4, 1, 32, [100], 16, splits=2, score=BIG),
        case("float16, 8 query heads on 1 KV head", 8, 1, 64, [150], 16, splits=3, dtype=torch.float16),
        case("NaN wherever no token is", 4, 1, 16, [70, 9], 32, splits=2, unused=math.nan),
        Case(
            "key pages stored token by token, values and tables with gaps",
            (query, tokens_first(keys), draw.spread_out(values, 24), draw.spread_out(tables, 3), lengths, 2),
        ),
        case("2 KV heads, 200 tokens in 3 splits, bytes counted", 8, 2, 32, [200], 16, splits=3, metered=True),
    ]
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


def _merged(merge, span=rounded_up):
    """A fingerprint: splits merged wrongly, `merge(outputs, lses) -> (output, lse)`; None where there is only one."""

    def result(query, key_pages, value_pages, block_tables, lengths, splits):
        if splits == 1:
            return None
        caches = _caches(key_pages, value_pages, block_tables, lengths)
        return merge(*partials(query, *caches, lengths, splits, span=span))

    return result


def _by_pages(page_size):
    """Whole pages dealt out to the splits, rounded up."""

    def span(length, splits, split, longest=0):
        blocks = -(-length // page_size)
        each = -(-blocks // splits) * page_size
        return min(split * each, length), min((split + 1) * each, length)

    return span


def _by_pages_down(page_size):
    """Whole pages dealt out, rounded down: the last ones belong to no split."""

    def span(length, splits, split, longest=0):
        each = -(-length // page_size) // splits * page_size
        return min(split * each, length), min((split + 1) * each, length)

    return span


def _either_span(merge):
    """The same slip for splits of equal keys, and for splits of whole pages."""

    def by_pages(*args):
        return _merged(merge, span=_by_pages(args[1].shape[2]))(*args)

    return _merged(merge), by_pages


def _weighed(how):
    return _either_span(lambda outputs, lses: combine_wrongly(outputs, lses, how))


def _base_2(outputs, lses):
    """2 raised to natural log-sum-exps."""
    output, lse = combine(outputs, lses * math.log(2))
    return output, lse / math.log(2)


def _base_2_and_natural(outputs, lses):
    """2 raised to natural log-sum-exps, and the natural logarithm of their sum."""
    largest = lses.amax(dim=0)
    total = torch.exp2(lses - largest.masked_fill(largest == -math.inf, 0.0)).sum(dim=0)
    return combine(outputs, lses * math.log(2))[0], largest + total.masked_fill(total == 0, 1.0).log()


_EQUALLY = (
    *_either_span(combine_equally),
    *_either_span(partial(combine_equally, guarded=True)),
    *_either_span(partial(combine_equally, present=True)),
)


_OTHER_BASES = (
    _base_2,
    _base_2_and_natural,
    lambda outputs, lses: (_base_2(outputs, lses)[0], combine(outputs, lses)[1]),
    lambda outputs, lses: combine(outputs, lses / math.log(2)),
    lambda outputs, lses: (combine(outputs, lses / math.log(2))[0], combine(outputs, lses)[1]),
)


def _lse_instead(name):
    return _either_span(lambda outputs, lses: (combine(outputs, lses)[0], wrong_lses(lses)[name]))


def _lost_keys(span_of):
    """Splits too short by rounding; merged rightly."""

    def result(*args):
        return _merged(combine, span=span_of(args[1].shape[2]))(*args)

    return result


def _placed(rows=row_of, **slips):
    """A fingerprint: tokens looked for in other rows of the pool. Says nothing where the pool is not contiguous."""

    def result(query, key_pages, value_pages, block_tables, lengths, splits):
        if not key_pages.is_contiguous():
            return None
        caches = _caches(key_pages, value_pages, block_tables, lengths, rows=rows, **slips)
        if any(cache is None for cache in caches):
            return None
        return decode(query, *caches, lengths), decode_lse(query, *caches, lengths)

    return result


def _read(read):
    """A fingerprint: another number of tokens read than there are; None where the pages do not have them."""

    def result(query, key_pages, value_pages, block_tables, lengths, splits):
        page_size, width = key_pages.shape[2], block_tables.shape[1]
        counts = [read(length, page_size, width) for length in lengths.tolist()]
        needed = [-(-count // page_size) for count in counts]
        if any(bool((table[:blocks] < 0).any()) for table, blocks in zip(block_tables, needed)) or min(counts) < 0:
            return None
        return paged_oracle(
            query, key_pages, value_pages, block_tables, torch.tensor(counts, dtype=lengths.dtype), splits
        )

    return result


def _past_the_end(query, key_pages, value_pages, block_tables, lengths, splits):
    """Every split as long as the first. Says nothing where NaN stands behind the sequences."""
    if bool(value_pages.isnan().any()):
        return None
    read = _read(lambda length, page_size, blocks: -(-length // splits) * splits)
    return read(query, key_pages, value_pages, block_tables, lengths, splits)


def _length_of_the_first(query, key_pages, value_pages, block_tables, lengths, splits):
    """None where that looks for pages that a sequence does not have."""
    needed = -(-int(lengths[0]) // key_pages.shape[2])
    if bool((block_tables[:, :needed] < 0).any()):
        return None
    return paged_oracle(query, key_pages, value_pages, block_tables, lengths[:1].expand_as(lengths), splits)


def _grouped(heads):
    def result(query, key_pages, value_pages, block_tables, lengths, splits):
        caches = _caches(key_pages, value_pages, block_tables, lengths)
        return decode(query, *caches, lengths, heads=heads), decode_lse(query, *caches, lengths, heads=heads)

    return result


def _scaled(power):
    def result(query, key_pages, value_pages, block_tables, lengths, splits):
        head_dim = query.shape[-1]
        if float(query.square().mean()) > 10:
            return None
        caches = _caches(key_pages, value_pages, block_tables, lengths)
        scaled = query * head_dim ** (0.5 - 0.5 * power)
        return decode(scaled, *caches, lengths), decode_lse(scaled, *caches, lengths)

    return result


def _empty_sequence(output, lse):
    """What a sequence of length 0 gives; everything else right."""

    def result(*args):
        right, right_lse = paged_oracle(*args)
        nothing = args[4] == 0
        return right.masked_fill(nothing[:, None, None], output), right_lse.masked_fill(nothing[:, None], lse)

    return result


def _nan_of_empty_splits(case, seen, got):
    """NaN exactly in the sequences of which some split, or every one, has no keys."""
    if not is_pair(got) or seen.out_of_bounds or got[0].dim() != 3:
        return False
    *_, lengths, splits = case.args
    if bool(case.args[2].isnan().any()):
        return False  # NaN may come from the slots that hold no token
    page_size = case.args[1].shape[2]
    nan = got[0].isnan().flatten(1).any(dim=1)
    for span in (rounded_up, _by_pages(page_size)):
        empty = [
            any(first >= end for first, end in (span(n, splits, s) for s in range(splits))) for n in lengths.tolist()
        ]
        if any(empty) and nan.tolist() == empty and bool((lengths[nan] > 0).any()):
            return True
    return False


def _nan_of_unused_slots(case, seen, got):
    """NaN in the case whose free slots hold NaN."""
    if not is_pair(got) or seen.out_of_bounds or not bool(case.args[2].isnan().any()):
        return False
    return bool(got[0].isnan().any())


EXERCISE = Exercise(
    id="8.5",
    title="Flash-Decoding on a paged cache",
    entries=("flash_decode",),
    cases=paged_cases,
    oracle=paged_oracle,
    plain=(
        paged_rounded,
        _split_and_merged(attend, combine),
        _split_and_merged(attend_prescaled, combine_in_turn),
        *(_split_and_merged(strayed, combine) for strayed in STRAYED),
    ),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=2),
        Allocates(lambda q, k, v, tables, lengths, splits: max(_partial_numbers(q, splits), k.numel())),
        SKIPS_THE_WORK,
        Splits(),
        Moves(paged_bytes, slack=1.2),
    ),
    hints=(
        "Start from your kernels of 8.2 and 8.3, both in this one cell. Only the addresses of keys and values change: "
        "what used to be sequence · batch_stride + key · key_stride now goes through the table.",
        "Token `key` lies in block key // PAGE_SIZE. pages = tl.load(table_pointer + sequence · table_stride + keys // "
        "PAGE_SIZE, mask=present, other=0), and then the row is pages · page_stride + keys % PAGE_SIZE · key_stride.",
        "Nothing says that a split begins with a page: each key finds its own page, so any split bounds do. Take the "
        "page numbers to 64 bits before you multiply them.",
        "The combine kernel writes the output in the query's dtype: (...).to(output_pointer.dtype.element_ty). With "
        "one split there is nothing to merge, but merging one part is right as well.",
    ),
    mistakes=(
        Mistake(
            "averaged_without_weights",
            "The splits were averaged as equals. Each counts by its share of the softmax: weigh it by exp(its "
            "log-sum-exp - the whole's).",
            result=(*_weighed("mean"), *_weighed("mean of those with keys"), *_EQUALLY),
        ),
        Mistake(
            "missing_splits_counted",
            MISSING_SPLITS_COUNTED,
            result=(*_either_span(combine_padded), *_either_span(partial(combine_padded, least=16))),
        ),
        Mistake(
            "added_without_weights",
            "The splits' outputs were added. Each is an average of its own: weigh it by exp(its log-sum-exp - the "
            "whole's).",
            result=_weighed("sum"),
        ),
        Mistake(
            "not_divided",
            "The weighted sum is not divided by the sum of the weights. Relative to the largest log-sum-exp these do "
            "not add up to 1.",
            result=_weighed("undivided"),
        ),
        Mistake(
            "merged_in_the_wrong_base",
            "One kernel's log-sum-exps are in another base than the other takes them for: natural ones go with tl.exp, "
            "those in units of log 2 with tl.exp2.",
            result=tuple(form for merge in _OTHER_BASES for form in _either_span(merge)),
        ),
        Mistake(
            "lse_not_merged",
            "The output is right, but the log-sum-exp is that of one split, or their sum or average. The whole's is "
            "largest + log Σ exp(lse - largest).",
            result=tuple(
                form
                for name in ("the largest", "the last", "the first", "the sum", "the mean")
                for form in _lse_instead(name)
            ),
        ),
        Mistake(
            "empty_split_nan",
            "A sequence of which some split has no keys gives NaN. Such a split has a sum of 0 and a maximum of -inf: "
            "divide by 1, store zeros and -inf, and in the merge never subtract -inf from -inf.",
            when=_nan_of_empty_splits,
        ),
        Mistake(
            "last_keys_lost",
            LAST_KEYS_LOST,
            result=(_lost_keys(lambda page_size: rounded_down), _lost_keys(_by_pages_down)),
        ),
        Mistake(
            "reaches_into_the_next_split",
            INTO_THE_NEXT,
            result=tuple(_merged(combine, span=into_the_next(key_rows)) for key_rows in (16, 32, 64, 128)),
        ),
        Mistake("past_the_sequences_end", PAST_THE_END, result=_past_the_end),
        Mistake(
            "last_page_read_whole",
            "The last page was read to its end, and what stands behind the last token was counted. Mask the keys from "
            "`length` on, in the loads and in the scores.",
            result=_read(whole_pages),
        ),
        Mistake(
            "last_page_left_out",
            "Only full pages were read. The last one holds length % page_size tokens more: round the number of pages "
            "up, and mask.",
            result=_read(full_pages),
        ),
        Mistake(
            "one_token_too_few",
            "The last token is missing. `lengths` counts the current token already.",
            result=_read(lambda length, page_size, blocks: max(0, length - 1)),
        ),
        Mistake(
            "length_of_the_first",
            "Every sequence was taken to be as long as the first one. Its own length is at lengths_pointer + sequence.",
            result=_length_of_the_first,
        ),
        Mistake(
            "keys_used_as_values",
            "The weights are multiplied with the keys. The second product takes the values: look at the pointer and "
            "the strides it loads with.",
            result=lambda q, k, v, *rest: None if float(q.square().mean()) > 10 else paged_oracle(q, k, k, *rest),
        ),
        Mistake(
            "page_not_multiplied",
            "A page's number was taken as the number of its first row. Page p begins at p · page_stride.",
            result=_placed(rows=not_multiplied),
        ),
        Mistake(
            "offset_left_out",
            "The first token of a page was read for all of its tokens. Add the place in it: key % PAGE_SIZE rows.",
            result=_placed(rows=first_in_page),
        ),
        Mistake(
            "pages_taken_in_order",
            "The pages were taken to lie one behind the other. Every block has its own entry in the table: look each "
            "one up.",
            result=(_placed(rows=consecutive), _placed(rows=without_table)),
        ),
        Mistake(
            "table_of_the_first_sequence",
            "Every sequence used the first one's table. Its row begins at sequence · table_stride.",
            result=_placed(tables=lambda tables, sequence: tables[0]),
        ),
        Mistake("heads_by_modulo", HEADS_BY_MODULO, result=_grouped(by_modulo)),
        Mistake(
            "scale_missing",
            "The scores are not scaled. Multiply the products of query and keys by 1/√head_dim (and log2(e) for exp2).",
            result=_scaled(0),
        ),
        Mistake(
            "empty_sequence_not_written",
            "A sequence of length 0 has no result of its own: zeros, and a log-sum-exp of -inf, must be written for it "
            "too.",
            result=(
                _empty_sequence(math.nan, math.nan),
                _empty_sequence(0.0, math.nan),
                _empty_sequence(math.nan, -math.inf),
            ),
        ),
        Mistake(
            "empty_sequence_counts",
            "A sequence of length 0 has a log-sum-exp of 0, as if its weights added up to 1. The logarithm of an empty "
            "sum is minus infinity.",
            result=_empty_sequence(0.0, 0.0),
        ),
        Mistake(
            "unused_slots_reach_the_result",
            "Slots that hold no token were read, and here they hold NaN. A weight of 0 does not help: 0 · NaN is NaN. "
            "Mask the loads of keys and values with keys < last.",
            when=_nan_of_unused_slots,
        ),
        Mistake(
            "rows_of_no_head_read",
            "Queries that aren't there were read. The heads of KV head h begin at h · GROUP, and only GROUP of the "
            "tile's BLOCK_G rows are heads: mask the load, and the stores too.",
            when=lambda case, seen, got: any("reads query_pointer" in access for access in seen.out_of_bounds),
        ),
        Mistake(
            "read_out_of_bounds",
            "Memory outside a tensor was read. Entries of the table that a length doesn't reach are no pages (they are "
            "-1 here), and a tile may reach past the last key: mask the loads of table, keys and values. A sequence's "
            "row of the table begins at sequence · table_stride.",
            when=lambda case, seen, got: any("reads" in access for access in seen.out_of_bounds),
        ),
        Mistake(
            "written_out_of_bounds",
            "A result was written past its end. The tile has more rows than the group has heads: mask the stores.",
            when=lambda case, seen, got: any("writes" in access for access in seen.out_of_bounds),
        ),
    ),
)
