"""Exercise 5.5: one step of attention over a cache."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Draw, Exercise, InOut, Mistake, NewTensors
from course_lib.checker.specification.contract import Contract, Level
from exercises.topics.attention import attention, prescaled, rounded, scores_of
from exercises.topics.attention_inputs import MAGNITUDES, ordinary
from exercises.topics.cache_inputs import cache_layouts
from exercises.topics.cached_step_model import STEP
from exercises.topics.decode import attend_by_log_sum_exp, each_sequence, tokens_first
from exercises.topics.rising import FINITE_FOR_MINUS_INFINITY, below_a_stand_in, decode_scores


def step(query, key, value, key_cache, value_cache, past, *, function=attention):
    """Append, then attend over the past and the new token."""
    for sequence, slot in enumerate(past.tolist()):
        key_cache[sequence, :, slot] = key[sequence]
        value_cache[sequence, :, slot] = value[sequence]
    return each_sequence(function, query, key_cache, value_cache, past + 1)


def step_prescaled(*args):
    return step(*args, function=prescaled)


def step_rounded(*args):
    return step(*args, function=rounded)


def step_by_log_sum_exp(*args):
    return step(*args, function=lambda query, key, value: attend_by_log_sum_exp(query, key, value)[0].to(query.dtype))


MOST_AWRY_IN_HALF = 5e-3  # by how much half a rounding moves a log-sum-exp of 10, the largest that float16 meets here


def step_in_its_dtype(*args):
    """Scores, weights and a log-sum-exp in the dtype given, that half a rounding too large: all weights err alike."""

    def attend(query, key, value):
        scores = scores_of(query, key)
        log_sum = torch.logsumexp(scores, dim=-1, keepdim=True)
        awry = torch.finfo(query.dtype).eps / 2 * log_sum.abs()
        return torch.exp(scores - log_sum) * torch.exp(-awry.clamp(max=MOST_AWRY_IN_HALF)) @ value

    return step(*args, function=attend)


def far_apart(query, key, key_cache, past):
    """Keys moved along the query, so that the scores of tokens lie 160 lower and those of leftovers 160 higher."""
    along = 160 * query.shape[2] ** 0.5 * query / query.square().sum(dim=2, keepdim=True)  # [batch, heads, head_dim]
    used = (torch.arange(key_cache.shape[2]) < past[:, None])[:, None, :, None]
    return key - along, torch.where(used, key_cache - along[:, :, None], key_cache + along[:, :, None])


def far_below_finite(draw):
    """A step whose scores are -1e20 for the first token and -2e20 for the others: below all that might hide a slot."""
    caches = [draw.normal(1, 2, 12, 16) for _ in "kv"]
    caches[0][:, :, :5] = -2e10 / 4.0
    caches[0][:, :, 0] /= 2
    key, value = torch.full((1, 2, 16), -2e10 / 4.0), draw.normal(1, 2, 16)
    return torch.full((1, 2, 16), 1e10), key, value, *map(InOut, caches), torch.tensor([5], dtype=torch.int32)


def first_of_one_slot():
    """The first token of a cache with a single slot, a head for each query: its value is the output."""
    apart = Draw(55)
    query, key, value = (apart.normal(1, 2, 16) for _ in range(3))
    caches = [apart.normal(1, 2, 1, 16) for _ in "kv"]
    return query, key, value, *map(InOut, caches), torch.tensor([0], dtype=torch.int32)


def _scores_after_the_write(query, key, value, key_cache, value_cache, past):
    """[batch, query_heads, capacity + 1] scaled scores, the new token's last; -inf for slots that hold nothing."""
    keys = torch.cat([key_cache.tensor, key[:, :, None]], dim=2)
    scores = decode_scores(query, keys, torch.full_like(past, keys.shape[2]))
    unused = torch.arange(keys.shape[2] - 1) >= past[:, None, None]
    return torch.cat([scores[..., :-1].masked_fill(unused, -math.inf), scores[..., -1:]], dim=-1)


def _values_after_the_write(query, key, value, key_cache, value_cache, past):
    """[batch, query_heads, capacity + 1, head_dim]: what each query head weighs by these scores."""
    values = torch.cat([value_cache.tensor, value[:, :, None]], dim=2)
    return values.repeat_interleave(query.shape[1] // values.shape[1], dim=1)


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
        change=lambda query, key, key_cache, past: (key, key_cache),
    ):
        batch, size = len(past), math.sqrt(score)
        query = draw.normal(batch, query_heads, head_dim, dtype=dtype, scale=size)
        key = draw.normal(batch, key_heads, head_dim, dtype=dtype, scale=size)
        value = draw.normal(batch, key_heads, head_dim, dtype=dtype)
        key_cache = draw.normal(batch, key_heads, capacity, head_dim, dtype=dtype, scale=size)
        value_cache = arrange(draw.normal(batch, key_heads, capacity, head_dim, dtype=dtype))
        past = torch.tensor(past, dtype=torch.int32)
        key, key_cache = change(query, key, key_cache, past)
        key_cache = arrange(key_cache)
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
        case("scores near -160, those of leftovers near 160", 2, 2, 16, 12, [5], change=far_apart),
        Case("scores near -1e20", far_below_finite(draw)),
        Case("the first token of a cache with one slot", first_of_one_slot()),
        case("float16", 4, 2, 64, 130, [128, 57], dtype=half),
    ]
    if draw.on_gpu:
        cases.append(
            case("float16, 32 query heads on 8 KV heads, 4000 tokens", 32, 8, 128, 4096, [4000, 77, 2048], dtype=half)
        )
    return cases


def drawn(draw, *, past, key_heads, group, head_dim, dtype, scores, leftovers, key_cache_layout, value_cache_layout):
    """What the contract's choices make: arguments of `cached_attention_step`."""
    before, capacity = past(draw)
    batch = len(before)
    query, keys, values = scores(draw, batch * key_heads, group, capacity + 1, head_dim)
    query = query.reshape(batch, key_heads * group, head_dim).to(dtype)
    keys, values = (rows.to(dtype).unflatten(0, (batch, key_heads)) for rows in (keys, values))
    key, value = keys[:, :, -1].contiguous(), values[:, :, -1].contiguous()
    unused = (torch.arange(capacity) >= torch.tensor(before)[:, None])[:, None, :, None]
    caches = [torch.where(unused, leftovers * rows[:, :, :-1], rows[:, :, :-1]) for rows in (keys, values)]
    layouts = key_cache_layout, value_cache_layout
    key_cache, value_cache = (InOut(layout(draw, cache)) for layout, cache in zip(layouts, caches))
    return query, key, value, key_cache, value_cache, torch.tensor(before, dtype=torch.int32)


def _anywhere(batch):
    def make(draw):
        capacity = draw.integer(18, 41)
        return [draw.integer(1, capacity - 1) for _ in range(batch)], capacity

    return make


def _first_and_last(draw):
    capacity = draw.integer(5, 20)
    return [0, capacity - 1, 1], capacity


CONTRACT = Contract(
    drawn,
    choices={
        "past": (
            Level(_anywhere(1), "1 sequence"),
            Level(_anywhere(2), "2 sequences"),
            Level(_anywhere(3), "3 sequences"),
            Level(_first_and_last, "an empty cache, a full one and one of a single token"),
            Level(lambda draw: ([0], 1), "one sequence without a past, and room for one token"),
        ),
        "key_heads": (1, 2, 3),
        "group": (1, 2, 3),
        "head_dim": (16, 32, 64, 128),
        "dtype": (torch.float32, torch.float16),
        "scores": MAGNITUDES,
        "leftovers": (1, Level(10, "large leftovers"), Level(0, "leftovers of 0")),
        "key_cache_layout": cache_layouts("key_cache"),
        "value_cache_layout": cache_layouts("value_cache"),
    },
    says={
        "past": "there is room for one more",
        "group": "query_heads is a multiple of key_heads",
        "head_dim": "head_dim is 16, 32, 64 or 128",
        "dtype": "float32 or float16",
        "leftovers": "finite numbers without meaning",
        "key_cache_layout": "any strides, save that the last dimension is contiguous",
    },
    # 16 bits round large scores away.
    valid=lambda key_heads, group, dtype, scores, **_: (
        key_heads * group <= 6 and (dtype == torch.float32 or scores is ordinary)
    ),
    most=10,
)


EXERCISE = Exercise(
    id="5.5",
    title="One step of attention over a cache",
    entries=("cached_attention_step",),
    cases=step_cases,
    oracle=step,
    contracts=(CONTRACT,),
    models=(STEP,),
    plain=(step_prescaled, step_rounded, step_by_log_sum_exp, step_in_its_dtype),
    needs=TRITON,
    uses_dot=True,
    requirements=(NewTensors(),),
    hints=(
        "Do two things in this order: write the new key and value into the cache, then compare the query with all "
        "slots in use. How many are in use after the write?",
        "The new token goes into slot `past[b]`, the first free one. Then slots 0 to past[b] are in use, which is "
        "past[b] + 1 slots.",
        "Each sequence has a different number of slots in use. Either loop over the batch and slice, or compute scores "
        "for the whole buffer and set those of slots > past[b] to minus infinity before the softmax.",
        "Query head h reads KV head h // (query_heads // key_heads): `repeat_interleave` lets neighbours share a head; "
        "or view the query as [batch, key_heads, group, head_dim].",
        "With `scaled_dot_product_attention` leave `is_causal` off: with one query it shows the first slot alone.",
    ),
    mistakes=(
        Mistake(
            "finite_for_minus_infinity",
            FINITE_FOR_MINUS_INFINITY,
            when=below_a_stand_in(_scores_after_the_write, _values_after_the_write),
            every=True,
        ),
    ),
)
