"""Exercise 14.2: a decode step that a graph can record, judged by a recorder of PyTorch's operations on the CPU."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch14_launches_and_cuda_graphs.recorder import NOT_RECORDED, recorded_and_replayed


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
        return Case(name, _inputs(draw, **sizes), driver=recorded_and_replayed)

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
    *edits("The position of the recording was used in every replay. It became a Python number, or was worked out "
        "before the recording, and a graph keeps such numbers for ever. Use the tensor `positions` itself.",
        position_baked=("place = positions", "place = torch.zeros_like(positions)")),
    *edits("What may be seen was worked out for the position of the recording. It must follow from `positions` in "
        "every replay.", mask_baked=(SEEN, "seen = torch.arange(capacity) <= 0 * place[:, None]")),
    *edits("The query of the warm-up was used in every replay: a copy of it was made before the recording. Only the "
        "memory that the step is given gets new contents: read `query` itself.",
        stale_source=("= stepped(query,", "= stepped(warm[0],")),
    *edits("The whole cache was attended to. Tokens behind a sequence's position are leftovers: hide them.",
        all_seen=(SEEN, "seen = torch.arange(capacity) >= 0 * place[:, None]")),
    *edits("The new token does not see itself. Positions up to and including `positions` are seen.",
        itself_unseen=(SEEN, "seen = torch.arange(capacity) < place[:, None].clamp(min=1)")),
    *edits("One token too many is seen: the one behind the new token.",
        one_too_many_seen=(SEEN, "seen = torch.arange(capacity) <= place[:, None] + 1")),
    *edits("All sequences were stored at the position of the first. Each has a position of its own.",
        position_of_the_first=("place = positions", "place = positions[:1].expand(batch)")),
    *edits("The new key was stored one place too far. The token goes to `positions`, which counts those before it.",
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
            driver=recorded_and_replayed,
            most=4,
        ),
    ),
    models=(model_of(told, CHANGES, (stepped,)),),
    hints=(
        "Everything that changes from token to token must be read from a tensor by a tensor operation: no .item(), no "
        "int(...), no `if` on a tensor, no slice that ends at a position.",
        "Store with an index that is a tensor: key_cache[rows, :, positions] = key, where rows = torch.arange(batch).",
        "Take scores over all `capacity` places, and hide those behind the position: torch.arange(capacity) <= "
        "positions[:, None], masked_fill with -inf.",
        "Write the result with output.copy_(...), and return nothing: a graph cannot hand out another tensor.",
    ),
    mistakes=NOT_RECORDED,
)
