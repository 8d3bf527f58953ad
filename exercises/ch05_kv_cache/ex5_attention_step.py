"""Exercise 5.5: one step of attention over a cache."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Exercise, InOut, Mistake
from exercises.topics.attention import attention, prescaled, rounded
from exercises.topics.decode import by_modulo, each_sequence, first_head, tokens_first


def store(key, value, key_cache, value_cache, past, shift=0):
    """Write each sequence's new key and value at slot past + shift; -1 is the last slot, as in PyTorch."""
    for sequence, slot in enumerate((past + shift).tolist()):
        if slot < key_cache.shape[2]:
            key_cache[sequence, :, slot] = key[sequence]
            value_cache[sequence, :, slot] = value[sequence]


def step(query, key, value, key_cache, value_cache, past, *, function=attention, **slips):
    """Append, then attend over the past and the new token."""
    store(key, value, key_cache, value_cache, past)
    return each_sequence(function, query, key_cache, value_cache, past + 1, **slips)


def step_prescaled(*args):
    return step(*args, function=prescaled)


def step_rounded(*args):
    return step(*args, function=rounded)


def step_cases(draw):
    half = torch.float16

    def case(
        name,
        query_heads,
        key_heads,
        head_dim,
        capacity,
        past,
        dtype=torch.float32,
        score=1.0,
        arrange=lambda cache: cache,
    ):
        batch, size = len(past), math.sqrt(score)
        query = draw.normal(batch, query_heads, head_dim, dtype=dtype, scale=size)
        key = draw.normal(batch, key_heads, head_dim, dtype=dtype, scale=size)
        value = draw.normal(batch, key_heads, head_dim, dtype=dtype)
        key_cache = arrange(draw.normal(batch, key_heads, capacity, head_dim, dtype=dtype, scale=size))
        value_cache = arrange(draw.normal(batch, key_heads, capacity, head_dim, dtype=dtype))
        past = torch.tensor(past, dtype=torch.int32)
        return Case(name, (query, key, value, InOut(key_cache), InOut(value_cache), past))

    prime = draw.choice((67, 71, 73))
    cases = [
        case("one sequence, 2 heads, behind 5 tokens", 2, 2, 16, 12, [5]),
        case("3 sequences behind 4, 9 and 1 tokens", 2, 2, 32, 16, [4, 9, 1]),
        case("the first token of an empty cache, beside one of 7", 2, 2, 16, 8, [0, 6]),
        case("8 query heads on 2 KV heads", 8, 2, 16, 20, [11, 3]),
        case("6 query heads on 1 KV head", 6, 1, 32, 20, [14]),
        case("the last slot is the new token's", 2, 1, 16, 10, [9]),
        case(f"{prime} tokens, large scores", 4, 4, 64, 90, [prime], score=40.0),
        case("a cache stored [batch, capacity, heads, head_dim]", 4, 2, 16, 24, [17, 8], arrange=tokens_first),
        case("float16", 4, 2, 64, 130, [128, 57], dtype=half),
    ]
    if draw.on_gpu:
        cases.append(
            case("float16, 32 query heads on 8 KV heads, 4000 tokens", 32, 8, 128, 4096, [4000, 77, 2048], dtype=half)
        )
    return cases


def _step(shift=0, stored=0, **slips):
    """The new token stored `stored` slots off, then attention over `shift` slots more than there should be."""

    def result(query, key, value, key_cache, value_cache, past):
        store(key, value, key_cache, value_cache, past, stored)
        return each_sequence(attention, query, key_cache, value_cache, past + 1 + shift, **slips)

    return result


def _scaled(scale):
    def result(query, *rest):
        return step(query, *rest, function=lambda q, k, v: attention(q, k, v, scale=scale(q.shape[-1])))

    return result


def _lengths(change):
    """Attention over `change(past, capacity)` slots, with the new token stored rightly."""

    def result(query, key, value, key_cache, value_cache, past):
        store(key, value, key_cache, value_cache, past)
        return each_sequence(attention, query, key_cache, value_cache, change(past, key_cache.shape[2]))

    return result


def _not_stored(query, key, value, key_cache, value_cache, past):
    return step(query, key, value, key_cache.clone(), value_cache.clone(), past)


def _value_not_stored(query, key, value, key_cache, value_cache, past):
    store(key, value, key_cache, value_cache.clone(), past)
    return each_sequence(attention, query, key_cache, value_cache, past + 1)


def _every_past(query, key, value, key_cache, value_cache, past):
    """`cache[:, :, past] = ...`: each sequence written at its own past and at those of all others."""
    for other in past.tolist():
        store(key, value, key_cache, value_cache, torch.full_like(past, other))
    return each_sequence(attention, query, key_cache, value_cache, past + 1)


def _past_of_first(query, key, value, key_cache, value_cache, past):
    return step(query, key, value, key_cache, value_cache, past[:1].expand(len(past)))


def _nothing_stored(empty):
    """The new token left out altogether: neither stored nor asked."""

    def result(query, key, value, key_cache, value_cache, past):
        return each_sequence(attention, query, key_cache, value_cache, past, empty=empty)

    return result


def _behind_the_buffer(query, key, value, key_cache, value_cache, past):
    """`torch.cat([cache, new])`: the new token behind the whole buffer, all of which is asked; the caches stay."""
    longer = [torch.cat([cache, new[:, :, None]], dim=2) for cache, new in ((key_cache, key), (value_cache, value))]
    return each_sequence(attention, query, *longer, torch.full_like(past, longer[0].shape[2]))


def _asked_before_stored(query, key, value, key_cache, value_cache, past):
    output = each_sequence(attention, query, key_cache, value_cache, past + 1)
    store(key, value, key_cache, value_cache, past)
    return output


def _over_the_buffer(weigh):
    """Attention over the whole buffer: `weigh(scores, hidden)` gives the weights, both [batch, heads, 1, capacity]."""

    def result(query, key, value, key_cache, value_cache, past):
        store(key, value, key_cache, value_cache, past)
        keys, values = (
            cache.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for cache in (key_cache, value_cache)
        )
        scores = query[:, :, None] @ keys.transpose(2, 3) / math.sqrt(query.shape[2])
        hidden = (torch.arange(key_cache.shape[2]) > past[:, None])[:, None, None]
        return (weigh(scores, hidden) @ values)[:, :, 0]

    return result


def _too_few_tokens(case, seen, got):
    """Whether the caches are right, and each sequence with a past was attended without its new token.

    What an empty sequence then gives, zeros or NaN, depends on how the attention is written.
    """
    query, key, value, *caches, past = case.args
    stored = [cache.tensor.clone() for cache in caches]
    store(key, value, *stored, past)
    output, written = got if isinstance(got, tuple) else (None, {"written": []})
    if not isinstance(output, torch.Tensor) or output.shape != query.shape or not (past > 0).any():
        return False
    if len(written["written"]) != 2 or not all(map(torch.equal, written["written"], stored)):
        return False
    expected = each_sequence(attention, query.double(), *(cache.double() for cache in stored), past)
    return torch.allclose(output.double()[past > 0], expected[past > 0], rtol=1e-2, atol=1e-3)


EXERCISE = Exercise(
    id="5.5",
    title="One step of attention over a cache",
    entries=("cached_attention_step",),
    cases=step_cases,
    oracle=step,
    plain=(step_prescaled, step_rounded),
    needs=TRITON,
    uses_dot=True,
    hints=(
        "Two things in this order: the new key and value go into the cache, then the query asks all slots in use. How "
        "many are in use after the first?",
        "The new token's slot is `past[b]`, the first free one. Slots 0 to past[b] are in use then: past[b] + 1.",
        "The slots in use differ between sequences. Either walk over the batch and slice, or score the whole buffer "
        "and set the scores of slots > past[b] to minus infinity before the softmax.",
        "Query head h reads KV head h // (query_heads // key_heads): `repeat_interleave` lets neighbours share a head; "
        "or view the query as [batch, key_heads, group, head_dim].",
        "With `scaled_dot_product_attention` leave `is_causal` off: with one query it shows the first slot alone.",
    ),
    mistakes=(
        Mistake(
            "slot_too_early",
            "The new token was written over the newest one in the cache. With `past` tokens in slots 0 to past - 1 the "
            "first free slot is `past`.",
            result=_step(stored=-1),
        ),
        Mistake(
            "slot_too_early_and_short",
            "The new token was written over the newest one in the cache, and the query saw `past` slots. The first "
            "free slot is `past`, and after it past + 1 are in use.",
            result=(_step(stored=-1, shift=-1), _step(stored=-1, shift=-1, empty=math.nan)),
        ),
        Mistake(
            "slot_too_late",
            "The new token was written one slot too far and the slot before it left as it was. With `past` tokens in "
            "slots 0 to past - 1, the first free slot is `past`.",
            result=_step(stored=1),
        ),
        Mistake(
            "slot_too_late_and_long",
            "The new token was written one slot too far, behind a slot that holds no token and that the query saw as "
            "well. The first free slot is `past`.",
            result=_step(stored=1, shift=1),
        ),
        Mistake(
            "one_token_too_many",
            "The query saw one slot too many, which no token of the sequence was written to. After the new token past "
            "+ 1 slots are in use.",
            result=_step(shift=1),
        ),
        Mistake(
            "whole_buffer",
            "The query saw the whole buffer. Slots behind the new token hold what happened to lie there: hide them, "
            "before the softmax.",
            result=_lengths(lambda past, capacity: torch.full_like(past, capacity)),
        ),
        Mistake(
            "only_first_slot",
            "The query saw the first slot alone. That is what `is_causal=True` does with one query: PyTorch aligns the "
            "mask to the first key. The newest token sees everything, so no mask is needed but the length's.",
            result=_lengths(lambda past, capacity: torch.ones_like(past)),
        ),
        Mistake(
            "longest_for_all",
            "Every sequence was attended as if it had as many tokens as the longest of the batch. Each has a past of "
            "its own.",
            result=_lengths(lambda past, capacity: past.max().expand(len(past)) + 1),
        ),
        Mistake(
            "past_of_first_sequence",
            "Every sequence was treated with the past of the first one. Each has its own.",
            result=_past_of_first,
        ),
        Mistake(
            "every_past",
            "Each sequence's new token was also written at the slots of the other sequences. `cache[:, :, past]` takes "
            "every sequence with every past; `cache[torch.arange(batch), :, past]` pairs them.",
            result=_every_past,
        ),
        Mistake(
            "not_stored",
            "The output is right, and the cache does not hold the new key and value: the next step would miss them. "
            "Write them into the tensors given, at slot past.",
            result=_not_stored,
        ),
        Mistake(
            "nothing_stored",
            "The new key and value were neither stored nor asked for: the query saw the tokens from before alone. "
            "Write them at slot past first; then past + 1 slots are in use.",
            result=(_nothing_stored(0.0), _nothing_stored(math.nan)),
        ),
        Mistake(
            "behind_the_buffer",
            "The new token was put behind the whole buffer, and the query saw all of it. The buffer has room: write "
            "at slot past, and show slots 0 to past.",
            result=_behind_the_buffer,
        ),
        Mistake(
            "asked_before_stored",
            "The query asked before the new key and value were stored, and met what happened to lie in their slot. "
            "Store first.",
            result=_asked_before_stored,
        ),
        Mistake(
            "masked_after_softmax",
            "The hidden slots were set to 0 after the softmax. Their scores are in its sum, so the weights that are "
            "left add up to less than 1: set the scores to minus infinity before it.",
            result=_over_the_buffer(lambda scores, hidden: torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0)),
        ),
        Mistake(
            "hidden_scores_zero",
            "The hidden slots were given a score of 0, and e⁰ = 1 is a weight. A hidden score is minus infinity.",
            result=_over_the_buffer(lambda scores, hidden: torch.softmax(scores.masked_fill(hidden, 0.0), dim=-1)),
        ),
        Mistake(
            "value_not_stored",
            "The new value was not written: its slot in the value cache still holds what was there.",
            result=_value_not_stored,
        ),
        Mistake(
            "heads_by_modulo",
            "Query head h read KV head h % key_heads. Neighbours share a head: h // (query_heads // key_heads), which "
            "is what `repeat_interleave` does and `repeat` does not.",
            result=lambda *args: step(*args, heads=by_modulo),
        ),
        Mistake(
            "first_head_only",
            "Every query head read KV head 0.",
            result=lambda *args: step(*args, heads=first_head),
        ),
        Mistake(
            "not_scaled",
            "The scores are not scaled. Multiply them by 1/√head_dim.",
            result=_scaled(lambda head_dim: 1.0),
        ),
        Mistake(
            "scaled_by_head_dim",
            "The scores are divided by head_dim, or twice by its square root. Divide once by √head_dim.",
            result=_scaled(lambda head_dim: 1.0 / head_dim),
        ),
        Mistake(
            "one_token_too_few",
            "The query did not see the new token itself: only the tokens from before. The length was read before the "
            "new token was appended; after it past + 1 slots are in use.",
            when=_too_few_tokens,
            every=True,
        ),
    ),
)
