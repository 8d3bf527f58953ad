"""Exercise 8.2: the kernel that attends over one split of the keys."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Allocates, Case, Exercise, LaunchesTriton, Mistake, Moves
from exercises.ch08_flash_decoding.slips import (
    SKIPS_THE_WORK,
    STRAYED,
    attend,
    attend_prescaled,
    attend_rounded,
    by_the_longest,
    close,
    exact,
    into_the_next,
    is_pair,
    looks_like,
    partials,
    past_the_end,
    rounded_down,
)
from exercises.topics.attention import UNDERFLOW, attention, log_sum_exp, streamed
from exercises.topics.decode import by_modulo, cached, tokens_first

KEY_ROWS = 64  # BLOCK_N, as the launcher of 8.2 sets it


BIG = 55.0  # standard deviation of scores whose exponentials overflow in float32


ACCUMULATOR_NOT_RESCALED = (
    "Within a split the accumulator is not rescaled when the running maximum grows: what earlier tiles added is still "
    "measured from the old maximum. Multiply it by exp2(old maximum - new maximum) before a tile's product is added."
)


NATURAL_EXP = "scale_log2 already holds log2(e), and the exponential is the natural one. Take tl.exp2 throughout."


LAST_KEYS_LOST = (
    "The last keys of a sequence belong to no split: length / splits was rounded down. A split has ⌈length / splits⌉ "
    "keys, tl.cdiv(length, splits), and the last ones have fewer."
)


PAST_THE_END = (
    "The last split that has keys goes on behind the last token of the sequence, and empty ones are no longer empty. A "
    "split ends where the sequence does, if that is earlier: tl.minimum(first + split_length, length)."
)


INTO_THE_NEXT = (
    "A split's last tile goes on into the keys of the next split, which counts them again. The mask must end at the "
    "split's own end, not at the sequence's."
)


TAIL_SCORED = (
    "Keys past the end were loaded as zeros and counted: a key of zeros scores 0, and exp(0 - maximum) is not 0. Give "
    "their scores minus infinity."
)


HEADS_BY_MODULO = (
    "The query heads are spread over the KV heads by modulo. Neighbours share one: the heads of KV head h are those "
    "from h · GROUP to h · GROUP + GROUP - 1."
)


def _only_empty_ones(case, seen, got):
    """NaN exactly where a split has no keys, in one result or in both."""
    if not is_pair(got) or seen.out_of_bounds:
        return False
    empty = partial_oracle(*exact(case.args))[1] == -math.inf
    if got[0].shape[:3] != empty.shape or got[1].shape != empty.shape or not bool(empty.any()):
        return False
    nan = got[0].isnan().any(dim=-1) | got[1].isnan()
    return bool(nan[empty].all()) and not bool(nan[~empty].any())


def partial_oracle(query, key_cache, value_cache, lengths, splits):
    return partials(query, key_cache, value_cache, lengths, splits)


def partial_prescaled(*args):
    return partials(*args, attend=attend_prescaled)


def partial_rounded(*args):
    return partials(*args, attend=attend_rounded)


def partial_with(attend):
    return lambda *args: partials(*args, attend=attend)


def far_below(draw, query_heads, key_heads, head_dim, lengths, capacity):
    """Arguments of decode whose scores all lie near -200, where exp(score - 0) is 0 in float32."""
    batch = len(lengths)
    query = draw.normal(batch, query_heads, head_dim, scale=0.3, shift=5.0)
    key_cache = draw.normal(batch, key_heads, capacity, head_dim, scale=0.2, shift=-200 / 5 / math.sqrt(head_dim))
    return query, key_cache, draw.normal(*key_cache.shape), torch.tensor(lengths, dtype=torch.int32)


def ascending(draw, query_heads, head_dim, length):
    """One sequence and one KV head whose scores grow from about -15 to 15 along the keys."""
    direction = draw.normal(head_dim)
    direction = direction / direction.norm()
    query = math.sqrt(head_dim) * direction + 0.02 * draw.normal(1, query_heads, head_dim)
    ramp = torch.linspace(-15, 15, length)
    key_cache = ramp[:, None] * direction + 0.02 * draw.normal(1, 1, length, head_dim)
    return query, key_cache, draw.normal(1, 1, length, head_dim), torch.tensor([length], dtype=torch.int32)


def strided_arguments(draw, query, key_cache, value_cache, lengths):
    """The same values: keys stored token by token, values and queries with a gap of NaN after each row."""
    return (
        draw.spread_out(query, 8),
        tokens_first(key_cache),
        draw.spread_out(value_cache, 24),
        lengths,
    )


def partial_cases(draw):
    prime = draw.choice((67, 71, 73, 79, 83))
    cases = [
        Case("1 sequence, 128 keys in 2 splits, 4 query heads on 1 KV head", (*cached(draw, 4, 1, 32, [128], 128), 2)),
        Case("one split: nothing is split at all", (*cached(draw, 4, 2, 16, [100], 120), 1)),
        Case(f"6 query heads on 2 KV heads, {prime} keys in 3 splits", (*cached(draw, 6, 2, 16, [prime], 96), 3)),
        Case("lengths 1, 64 and 130 in 3 splits", (*cached(draw, 2, 1, 16, [1, 64, 130], 160), 3)),
        Case("lengths 0 and 40 in 2 splits", (*cached(draw, 4, 1, 16, [0, 40], 64), 2)),
        Case("5 keys in 7 splits: the last two have none", (*cached(draw, 2, 1, 16, [5], 32), 7)),
        Case("scores of ±150: exp overflows", (*cached(draw, 4, 1, 32, [150], 160, score=BIG), 2)),
        Case("all scores near -200", (*far_below(draw, 4, 1, 32, [90], 96), 2)),
        Case("scores grow along the keys, 300 of them", (*ascending(draw, 4, 32, 300), 2)),
        Case(
            "float16, 8 query heads on 1 KV head, head dimension 64",
            (*cached(draw, 8, 1, 64, [200], 256, dtype=torch.float16), 2),
        ),
        Case("20 query heads on 1 KV head", (*cached(draw, 20, 1, 16, [50], 64), 2)),
        Case("NaN in the slots behind each sequence", (*cached(draw, 4, 1, 16, [70, 33], 96, unused=math.nan), 2)),
        Case(
            "keys stored token by token, values with gaps",
            (*strided_arguments(draw, *cached(draw, 4, 2, 16, [40, 90], 128)), 2),
        ),
        Case("300 keys, 2 KV heads, 3 splits, bytes counted", (*cached(draw, 8, 2, 32, [300], 320), 3), metered=True),
    ]
    if draw.on_gpu:
        arguments = cached(draw, 32, 8, 128, [5000, 1, 4097], 8192, dtype=torch.float16)
        cases.append(Case("3 sequences to 5000 keys, 32/8 heads, float16, 16 splits", (*arguments, 16)))
    return cases


def partial_bytes(query, key_cache, value_cache, lengths, splits):
    """Keys and values once, a query for each split, and the partial results."""
    key_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    read = (2 * int(lengths.sum()) * key_heads * head_dim + splits * query.numel()) * query.element_size()
    programs = splits * key_heads * len(lengths)
    return read + 4 * programs + 4 * splits * query.numel() // head_dim * (head_dim + 1)


def _partially(**slips):
    """A fingerprint; None where scores are huge, as a wrong result then rounds otherwise than the right one."""

    def result(query, key_cache, value_cache, lengths, splits):
        if float(query.square().mean() * key_cache[key_cache == key_cache].square().mean()) > 100:
            return None
        return partials(query, key_cache, value_cache, lengths, splits, **slips)

    return result


def _attending(change):
    """An `attend` whose log-sum-exp or output is changed: `change(query, key, value, output, lse)`."""

    def attend_wrongly(query, key, value):
        return change(query, key, value, *attend(query, key, value))

    return attend_wrongly


def _maximum(query, key):
    return (query @ key.transpose(-1, -2)).amax(dim=-1) / math.sqrt(query.shape[-1])


def _undivided(query, key, value, output, lse):
    return output * torch.exp(lse - _maximum(query, key))[..., None], lse


def _padded(query, key, value):
    missing = (0, 0, 0, -key.shape[-2] % KEY_ROWS)
    key, value = (torch.nn.functional.pad(matrix, missing) for matrix in (key, value))
    return attention(query, key, value), log_sum_exp(query, key)


def _without_maximum(query, key, value):
    """exp of the scores as they are, in float32: NaN and infinity where it overflows, zeros where all underflow."""
    scores = ((query @ key.transpose(-1, -2)) / math.sqrt(query.shape[-1])).float()
    weights = torch.exp(scores)
    total = weights.sum(dim=-1)
    output = (weights @ value.float()) / total.masked_fill(total == 0, 1.0)[..., None]
    return output.double(), total.masked_fill(total == 0, 1.0).log().double()


def _from_zero(query, key, value):
    """A running maximum that starts at 0: where all weights underflow, zeros and a log-sum-exp of 0."""
    output, lse = attend(query, key, value)
    lost = lse < UNDERFLOW
    return output.masked_fill(lost[..., None], 0.0), lse.masked_fill(lost, 0.0)


def _stale_sum(query, key, value):
    """Tiles' sums added as they are, each relative to the maximum when it was added."""
    scores = (query @ key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    total, largest = torch.zeros_like(scores[..., 0]), torch.full_like(scores[..., 0], -math.inf)
    for tile in scores.split(KEY_ROWS, dim=-1):
        largest = torch.maximum(largest, tile.amax(dim=-1))
        total = total + torch.exp(tile - largest[..., None]).sum(dim=-1)
    return torch.exp(scores - largest[..., None]) @ value / total[..., None], largest + total.log()


def _unscaled(scale):
    def attend_wrongly(query, key, value):
        factor = scale(query.shape[-1])
        lse = torch.logsumexp(factor * (query @ key.transpose(-1, -2)), dim=-1)
        return attention(query, key, value, scale=factor), lse

    return attend_wrongly


def _reads_for_every_head(case, seen, got):
    """Right numbers, and keys and values loaded as often as there are query heads in a group."""
    query, key_cache = case.args[:2]
    group = query.shape[1] // key_cache.shape[1]
    distinct = partial_bytes(*case.args)
    right = partial_oracle(*exact(case.args))
    if seen.out_of_bounds or group == 1 or seen.bytes_moved < 0.7 * group * distinct:
        return False
    return is_pair(got) and all(map(close, got, right))


def _stored_elsewhere(*args):
    """Rows counted as [batch, splits] instead of [splits, batch]; the same for one sequence or one split."""
    return tuple(part.transpose(0, 1).reshape(part.shape) for part in partial_oracle(*args))


def _reaches_nan(query, key_cache, value_cache, lengths, splits):
    """NaN wherever a tile of values reaches past the sequence into slots that hold NaN; None where there are none."""
    if not bool(value_cache.isnan().any()):
        return partial_oracle(query, key_cache, value_cache, lengths, splits)
    outputs, lses = partial_oracle(query, key_cache, value_cache, lengths, splits)
    for sequence, length in enumerate(lengths.tolist()):
        for split in range(splits):
            size = -(-length // splits)
            first, end = split * size, min((split + 1) * size, length)
            if first < end and first + -(-(end - first) // KEY_ROWS) * KEY_ROWS > length:
                outputs[split, sequence] = math.nan
    return outputs, lses


def _past_the_end(query, key_cache, value_cache, lengths, splits):
    """Says nothing where NaN stands behind the sequences: what a maximum makes of it is not agreed on."""
    if bool(value_cache.isnan().any()):
        return None
    return _partially(span=past_the_end)(query, key_cache, value_cache, lengths, splits)


EXERCISE = Exercise(
    id="8.2",
    title="One split of the keys",
    entries=("split_attention",),
    cases=partial_cases,
    oracle=partial_oracle,
    plain=(partial_prescaled, partial_rounded, *map(partial_with, STRAYED)),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda q, k, v, lengths, splits: max(q.numel() * splits, k.numel())),
        SKIPS_THE_WORK,
        Moves(partial_bytes, slack=1.1),
    ),
    hints=(
        "Which keys are mine? split_length = tl.cdiv(length, splits); from split · split_length up to the end of the "
        "split or of the sequence, whichever comes first. For a split without keys the loop then makes no step.",
        "The loop is that of chapter 04, with the group's query heads as rows: for start in range(first, last, "
        "BLOCK_N). Mask keys by `last`, not by `length`: what follows belongs to the next split.",
        "Load keys and values with mask=(keys < last)[:, None], other=0.0, and set the scores of missing keys to "
        'minus infinity: tl.where((keys < last)[None, :], scores, float("-inf")).',
        "After the loop: total = tl.where(running_sum == 0.0, 1.0, running_sum). The output is accumulator / total[:, "
        "None], and the natural log-sum-exp (running_max + tl.log2(total)) · 0.6931471805599453; without a key that is "
        "zeros and minus infinity.",
        "Both results are contiguous. Row number (split · batch + sequence) · query_heads + head of the outputs is "
        "HEAD_DIM numbers long, and its log-sum-exp has that same row number. mask=members < GROUP keeps the padded "
        "rows out.",
    ),
    mistakes=(
        Mistake("last_keys_lost", LAST_KEYS_LOST, result=_partially(span=rounded_down)),
        Mistake(
            "reaches_into_the_next_split",
            INTO_THE_NEXT,
            result=_partially(span=into_the_next(KEY_ROWS)),
        ),
        Mistake("past_the_sequences_end", PAST_THE_END, result=_past_the_end),
        Mistake(
            "split_of_the_longest",
            "The size of a split was taken from the longest sequence. Every sequence is split by its own length: "
            "tl.cdiv(length, splits) in the kernel.",
            result=_partially(span=by_the_longest),
        ),
        Mistake(
            "split_of_the_capacity",
            "The size of a split was taken from the cache's capacity. Split the tokens that are there: tl.cdiv(length, "
            "splits).",
            result=lambda *args: _partially(span=by_the_longest, longest=args[1].shape[2])(*args),
        ),
        Mistake(
            "length_of_the_first",
            "Every sequence was taken to be as long as the first one. Its own length is at lengths_pointer + sequence.",
            result=lambda q, k, v, lengths, splits: _partially()(q, k, v, lengths[:1].expand_as(lengths), splits),
        ),
        Mistake(
            "keys_used_as_values",
            "The weights are multiplied with the keys. The second product takes the values: look at the pointer and "
            "the stride it loads with.",
            result=lambda q, k, v, lengths, splits: _partially()(q, k, k, lengths, splits),
        ),
        Mistake(
            "scale_missing",
            "The scores are not scaled. Multiply the products of query and keys by scale_log2.",
            result=_partially(attend=_unscaled(lambda d: math.log(2))),
        ),
        Mistake(
            "sum_not_rescaled",
            "The running sum is not rescaled when the running maximum grows. Multiply it by exp2(old maximum - new "
            "maximum), the same factor that the accumulator gets.",
            result=_partially(attend=_stale_sum),
        ),
        Mistake(
            "not_normalised",
            "The output is not divided by the split's sum. Each partial output is an average by itself; the "
            "log-sum-exp then says how much it weighs.",
            result=_partially(attend=_attending(_undivided)),
        ),
        Mistake(
            "lse_in_base_2",
            "The log-sum-exp is in base 2: the kernel works in units of log 2. Multiply by ln 2 = 0.6931 before it is "
            "stored.",
            result=_partially(attend=_attending(lambda q, k, v, output, lse: (output, lse / math.log(2)))),
        ),
        Mistake(
            "log_of_sum_only",
            "The running maximum is missing from the log-sum-exp. The sum is of exp(score - maximum): add the maximum.",
            result=_partially(
                attend=_attending(lambda q, k, v, output, lse: (output, lse - _maximum(q, k))), empty=(0.0, 0.0)
            ),
            when=looks_like(
                partial_oracle,
                _partially(attend=_attending(lambda q, k, v, output, lse: (output, lse - _maximum(q, k)))),
            ),
        ),
        Mistake(
            "mixed_bases",
            "The maximum is in units of log 2 and the logarithm of the sum is natural. Bring both to one base: "
            "(maximum + log2(sum)) · ln 2.",
            result=_partially(
                attend=_attending(lambda q, k, v, output, lse: (output, lse + _maximum(q, k) * (1 / math.log(2) - 1)))
            ),
        ),
        Mistake(
            "empty_split_nan",
            "A split without keys gives NaN: its sum is 0 and its maximum minus infinity. Divide by 1 where the sum is "
            "0, and its log-sum-exp is minus infinity.",
            result=lambda *args: partials(*args, empty=(math.nan, math.nan)),
            when=_only_empty_ones,
        ),
        Mistake(
            "empty_split_counts",
            "A split without keys has a log-sum-exp of 0, as if its weights added up to 1. The logarithm of an empty "
            "sum is minus infinity.",
            result=lambda *args: partials(*args, empty=(0.0, 0.0)),
        ),
        Mistake(
            "natural_exp",
            NATURAL_EXP,
            when=looks_like(
                partial_oracle, _partially(attend=_unscaled(lambda d: math.log2(math.e) / math.sqrt(d))), parts=1
            ),
        ),
        Mistake(
            "no_running_max",
            "exp is taken of the scores as they are. It overflows float32 above 88, and infinity divided by infinity "
            "is NaN; far below 0 every weight is 0. Subtract the running maximum first.",
            result=lambda *args: partials(*args, attend=_without_maximum, empty=(0.0, 0.0)),
        ),
        Mistake(
            "maximum_starts_at_zero",
            "The running maximum starts at 0. Scores that all lie far below are measured from 0 and underflow, and a "
            "split without keys gets a log-sum-exp of 0. Start it at minus infinity.",
            result=lambda *args: partials(*args, attend=_from_zero, empty=(0.0, 0.0)),
        ),
        Mistake(
            "accumulator_not_rescaled",
            ACCUMULATOR_NOT_RESCALED,
            result=_partially(
                attend=lambda q, k, v: (streamed(q, k, v, KEY_ROWS, rescale_accumulator=False), log_sum_exp(q, k))
            ),
        ),
        Mistake("tail_keys_scored", TAIL_SCORED, result=_partially(attend=_padded)),
        Mistake("heads_by_modulo", HEADS_BY_MODULO, result=_partially(heads=by_modulo)),
        Mistake(
            "splits_and_sequences_exchanged",
            "The results are stored as [batch, splits, ...] where [splits, batch, ...] is asked for: the row number is "
            "(split · batch + sequence) · query_heads + head.",
            result=_stored_elsewhere,
        ),
        Mistake(
            "unused_slots_reach_the_result",
            "Slots behind the end of a sequence were read, and hold NaN here. A weight of 0 does not help: 0 · NaN is "
            "NaN. Mask the loads of keys and values.",
            result=_reaches_nan,
        ),
        Mistake(
            "keys_read_for_every_head",
            "Each query head reads the keys and values for itself. The heads of a group share them: load a tile once, "
            "and take the group's queries as the rows of one tile.",
            when=_reads_for_every_head,
        ),
        Mistake(
            "read_out_of_bounds",
            "Memory outside the cache was read. The last tile of a split may reach past the end: mask the loads with "
            "keys < last, and the query's rows with members < GROUP.",
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
