"""Exercise 14.2: a decode step that a graph can record, judged by a recorder of PyTorch's operations on the CPU."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.hardware.captured_step import captured_and_replayed
from exercises.ch14_launches_and_cuda_graphs.not_captured import NOT_CAPTURED


def stepped(query, key, value, positions, key_cache, value_cache):
    batch, heads, capacity, head_dim = key_cache.shape
    rows = torch.arange(batch)
    place = positions
    keys, values = key_cache.clone(), value_cache.clone()
    keys[rows, :, place] = key.to(keys.dtype)
    values[rows, :, place] = value.to(values.dtype)
    scores = (keys @ query[..., None])[..., 0] * head_dim**-0.5
    seen = torch.arange(capacity) <= place[:, None]
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return (weights[..., None] * values).sum(-2), keys, values


def told(key_cache, value_cache, steps, warm):
    story = {}
    for number, (query, key, value, positions) in enumerate(steps, 1):
        output, keys, values = stepped(query, key, value, positions, key_cache, value_cache)
        key_cache, value_cache = keys, values
        story[f"output of replay {number}"] = output
    story["keys afterwards"], story["values afterwards"] = key_cache, value_cache
    return story


def _inputs(draw, *, batch, heads, head_dim, capacity, first, replays=3, far=False):
    caches = tuple(draw.normal(batch, heads, capacity, head_dim) for _ in "kv")
    begin = draw.integers(batch, low=0, high=max(1, capacity - replays - 1)) if first is None else None
    positions = torch.full((batch,), first) if begin is None else begin
    steps = []
    for number in range(replays):
        rows = [draw.normal(batch, heads, head_dim) for _ in "qkv"]
        ahead = number * max(1, (capacity - 1 - int(positions.max())) // max(1, replays - 1)) if far else number
        steps.append((*rows, positions + ahead))
    warm = (*(draw.normal(batch, heads, head_dim) for _ in "qkv"), torch.zeros(batch, dtype=torch.int64))
    return *caches, steps, warm


def step_cases(draw):
    def case(name, **sizes):
        return Case(name, _inputs(draw, **sizes), driver=captured_and_replayed)

    return [
        case("one sequence, from nothing", batch=1, heads=1, head_dim=4, capacity=4, first=0),
        case("three replays, a token further each", batch=2, heads=2, head_dim=8, capacity=12, first=3),
        case("sequences of different lengths", batch=4, heads=2, head_dim=8, capacity=20, first=None),
        case("replays far apart", batch=2, heads=3, head_dim=16, capacity=40, first=1, far=True),
        case("up to the last place", batch=2, heads=1, head_dim=8, capacity=6, first=3),
    ]


KEY, VALUE = "keys[rows, :, place] = key.to(keys.dtype)", "values[rows, :, place] = value.to(values.dtype)"
WEIGHTS = "scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)"


def each_side(name, old, new):
    """The ways of a slip that is made where keys and values are stored: in both, and in one of them alone."""
    keys, values = ((stored, stored.replace(old, new)) for stored in (KEY, VALUE))
    return {name: (*keys, *values), f"{name}__of_the_key": keys, f"{name}__of_the_value": values}


SEEN = "seen = torch.arange(capacity) <= place[:, None]"
CHANGES = (
    *edits("Every replay used the position from the recording. It became a Python number, or was computed before the "
        "recording, and a graph keeps such numbers for ever. Use the tensor `positions` itself.",
        position_baked=("place = positions", "place = torch.zeros_like(positions)")),
    *edits("Every replay used the mask from the recording. Compute the mask from the tensor `positions` in the step, "
        "so that it is computed again in every replay.",
        mask_baked=(SEEN, "seen = torch.arange(capacity) <= 0 * place[:, None]")),
    *edits("Every replay stored at the position from the recording. Store with the tensor `positions` itself as the "
        "index.", **each_side("place_baked", "place", "torch.zeros_like(place)")),
    *edits("Every replay used the query, key or value of the warm-up, because a copy was made before the recording. "
        "Only the tensors that the step is given get new contents, so read these themselves.",
        stale_source=("= stepped(query,", "= stepped(warm[0],"),
        stale_source__of_the_key=("= stepped(query, key,", "= stepped(query, warm[1],"),
        stale_source__of_the_value=("= stepped(query, key, value,", "= stepped(query, key, warm[2],"),
        stale_source__of_all=("= stepped(query, key, value,", "= stepped(warm[0], warm[1], warm[2],")),
    *edits("The query attended to the whole cache. What is behind a sequence's position is left over: mask it.",
        all_seen=(SEEN, "seen = torch.arange(capacity) >= 0 * place[:, None]")),
    *edits("The new token does not attend to itself. It attends to all positions up to and including `positions`.",
        itself_unseen=(SEEN, "seen = torch.arange(capacity) < place[:, None].clamp(min=1)"),
        itself_unseen__nor_anything=(SEEN, "seen = torch.arange(capacity) < place[:, None]"),
        itself_unseen__finite=(SEEN, "seen = torch.arange(capacity) < place[:, None]", "-math.inf", "-1e9")),
    *edits("The query attends to one token too many, the one behind the new token.",
        one_too_many_seen=(SEEN, "seen = torch.arange(capacity) <= place[:, None] + 1")),
    *edits("All sequences were stored at the position of the first one. Each sequence has a position of its own.",
        position_of_the_first=("place = positions", "place = positions[:1].expand(batch)")),
    *edits("All sequences' tokens were stored at the position of the first one, and masked by their own. Each "
        "sequence stores at its own position.", **each_side("stored_with_the_first", "place", "place[:1]")),
    *edits("A new key or value was stored at the positions of all sequences: with a colon in front, "
        "key_cache[:, :, positions] means each of these places in every sequence. Pair them: "
        "key_cache[rows, :, positions], where rows = torch.arange(batch).",
        stored_everywhere=(KEY, "keys[:, :, place] = key[:, :, None].to(keys.dtype)",
        VALUE, "values[:, :, place] = value[:, :, None].to(values.dtype)"),
        stored_everywhere__of_the_key=(KEY, "keys[:, :, place] = key[:, :, None].to(keys.dtype)"),
        stored_everywhere__of_the_value=(VALUE, "values[:, :, place] = value[:, :, None].to(values.dtype)")),
    *edits("A new key or value was stored one place too far. `positions` counts the tokens before it, so it is the new "
        "token's own place.", **each_side("stored_behind", "place", "(place + 1).clamp(max=capacity - 1)")),
    *edits("A new key or value was stored one place too early. `positions` counts the tokens before it, so it is the "
        "new token's own place, and the last token before it is at positions - 1.",
        **each_side("stored_before", "place", "place - 1"),
        stored_before__and_itself_unseen=("place = positions", "place = positions - 1")),
    *edits("The new key is in `value_cache`, and the new value in `key_cache`: they are exchanged.",
        stored_exchanged=("= key.to", "= value.to", "= value.to", "= key.to")),
    *edits("The query attended to a cache as it was before the new token. Store the new key and the new value first.",
        stored_late=("(keys @", "(key_cache @", "None] * values", "None] * value_cache"),
        stored_late__of_the_key=("(keys @", "(key_cache @"),
        stored_late__of_the_value=("None] * values", "None] * value_cache")),
    *edits("The scores were not multiplied by 1/√head_dim.", scale_missing=(" * head_dim**-0.5", "")),
    *edits("The scale is 1/√head_dim. Yours takes another size, or forgets the root.",
        scale_of_another_size=("head_dim**-0.5", "heads**-0.5"),
        scale_of_another_size__capacity=("head_dim**-0.5", "capacity**-0.5"),
        scale_of_another_size__no_root=("head_dim**-0.5", "head_dim**-1")),
    *edits("The softmax runs over the heads. Each head weighs the places of the cache, so it runs over the last "
        "dimension.", softmax_over_heads=(WEIGHTS, WEIGHTS.replace("-1", "1"))),
    *edits("One cache was taken for keys and values. Scores come from `key_cache`, and what is averaged comes from "
        "`value_cache`.",
        one_cache_alone=("None] * values", "None] * keys"), one_cache_alone__of_values=("(keys @", "(values @")),
    *edits("Scores behind a sequence's position were set to 0. In the softmax a score of 0 has the weight e⁰ = 1. Set "
        "them to -math.inf, whose weight is 0.", masked_with_0=(WEIGHTS, WEIGHTS.replace("-math.inf", "0.0"))),
    *edits("The weights behind a sequence's position were set to 0 after the softmax. Their share is then missing from "
        "the sum of weights. Mask the scores, before the softmax.",
        masked_late=(WEIGHTS, "scores.softmax(-1) * seen[:, None]")),
    *edits("The new key and value are not in the caches afterwards, or not in the caches that were given: write into "
        "them in place.",
        not_stored=("key_cache, value_cache = keys, values", "pass"),
        not_stored__nor_seen=(KEY, "pass", VALUE, "pass")),
    *edits("The new key is not in `key_cache` afterwards, or not in the one that was given. Store it in place, as the "
        "value.", key_not_stored=("key_cache, value_cache = keys, values", "value_cache = values"),
        key_not_stored__nor_seen=(KEY, "pass")),
    *edits("The new value is not in `value_cache` afterwards, or not in the one that was given. Store it in place, as "
        "the key.", value_not_stored=("key_cache, value_cache = keys, values", "key_cache = keys"),
        value_not_stored__nor_seen=(VALUE, "pass")),
)  # fmt: skip


EXERCISE = Exercise(
    id="14.2",
    title="A step that a graph can record",
    entries=("decode_step",),
    cases=step_cases,
    oracle=told,
    contracts=(
        Contract(
            lambda draw, *, batch, heads, head_dim, capacity: _inputs(
                draw, batch=batch, heads=heads, head_dim=head_dim, capacity=capacity, first=None
            ),
            choices={"batch": (1, 3), "heads": (1, 4), "head_dim": (4, 15), "capacity": (Level(5, "5 places"), 33)},
            driver=captured_and_replayed,
            most=4,
        ),
    ),
    models=(model_of(told, CHANGES, (stepped,)),),
    hints=(
        "Read everything that changes from token to token from a tensor, with tensor operations. So no .item(), no "
        "int(...), no `if` on a tensor, and no slice that ends at a position.",
        "Use a tensor as the index to store with: key_cache[rows, :, positions] = key, where rows = "
        "torch.arange(batch).",
        "Compute the scores of all `capacity` places, and mask those behind the position. The mask of what counts is "
        "torch.arange(capacity) <= positions[:, None]; use masked_fill with -inf for the rest.",
        "Write the result with output.copy_(...), and return nothing: a graph cannot hand out another tensor.",
    ),
    mistakes=NOT_CAPTURED,
)
