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
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    key_cache[rows, :, place] = key.to(key_cache.dtype)
    value_cache[rows, :, place] = value.to(value_cache.dtype)
    scores = (key_cache @ query[..., None])[..., 0] * head_dim**-0.5
    seen = torch.arange(capacity) <= place[:, None]
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    weights = scores.softmax(-1)
    return (weights[..., None] * value_cache).sum(-2), key_cache, value_cache


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


STORED = "key_cache[rows, :, place] = key.to(key_cache.dtype)"
SEEN = "seen = torch.arange(capacity) <= place[:, None]"
CHANGES = (
    *edits("Every replay used the position from the recording. It became a Python number, or was computed before the "
        "recording, and a graph keeps such numbers for ever. Use the tensor `positions` itself.",
        position_baked=("place = positions", "place = torch.zeros_like(positions)")),
    *edits("Every replay used the mask from the recording. Compute the mask from the tensor `positions` in the step, "
        "so that it is computed again in every replay.",
        mask_baked=(SEEN, "seen = torch.arange(capacity) <= 0 * place[:, None]")),
    *edits("Every replay used the query of the warm-up, because a copy was made before the recording. Only the tensors "
        "that the step is given get new contents, so read `query` itself.",
        stale_source=("= stepped(query,", "= stepped(warm[0],")),
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
        "sequence stores at its own position.", stored_with_the_first=(STORED, STORED.replace("place", "place[:1]"),
        STORED.replace("key", "value"), STORED.replace("key", "value").replace("place", "place[:1]"))),
    *edits("The new key was stored one place too far. `positions` counts the tokens before it, so it is the new "
        "token's own place.",
        stored_behind=(STORED, "key_cache[rows, :, (place + 1).clamp(max=capacity - 1)] = key.to(key_cache.dtype)")),
    *edits("The scores were not multiplied by 1/√head_dim.", scale_missing=(" * head_dim**-0.5", "")),
    *edits("The new key and value are not in the caches afterwards, or not in the caches that were given: write into "
        "them in place.",
not_stored=("key_cache, value_cache = keys, values", "pass")),
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
