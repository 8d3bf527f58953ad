"""What 10.3, 10.4 and 10.6 share: tensors as the forward pass left them, and loops over tiles that go another way."""

from __future__ import annotations

import torch

from course_lib.checker.specification.contract import Level
from course_lib.checker.specification.edits import Edit, edits
from exercises.topics.attention_backward import delta_of, left_by_the_forward, positions_seen
from exercises.topics.attention_backward_slips import MASK, WALK
from exercises.topics.attention_inputs import MAGNITUDES, far_below, ordinary

# Without equal scores and values near 80, whose dP - Δ is rounding for the most part; 10.6 has them.
SCORES = (*MAGNITUDES[:-1], Level(far_below(-3000.0), "scores near -3,000"))


def one_head(draw, query_length, key_length, head_dim, scores, causal):
    """query, key, value, dO [length, head_dim], L and Δ [query_length]."""
    query, key, value = (tensor.float() for tensor in scores(draw, 1, query_length, key_length, head_dim))
    visible = positions_seen(query_length, key_length, causal)
    output, log_sum = left_by_the_forward(query, key, value, visible)
    gradient = draw.normal(1, query_length, head_dim)
    delta = delta_of(output, gradient)
    return tuple(tensor[0] for tensor in (query, key, value, gradient, log_sum, delta))


def rows_visible(query_length, key_length, causal, rows=slice(None), keys=slice(None)) -> torch.Tensor | None:
    """The causal mask of some queries against some keys, or None."""
    visible = positions_seen(query_length, key_length, causal)
    return None if visible is None else visible[rows, keys]


def lower_than_bounds(query_is=4.0, key_is=-(2.0**18)):
    """Scores that spread by 1 around -2¹⁸ where head_dim is 16, by the first column: a power of two in Q, one in K.

    Low enough for the numbers that L is bounded by, and high enough for float32: its rounding moves P by some 10 %.
    The smaller of the two stands in the tensor that dS is multiplied with, since that scales dS's rounding.
    """

    def make(draw, heads, query_length, key_length, head_dim):
        query, key, value = ordinary(draw, heads, query_length, key_length, head_dim)
        query[..., 0], key[..., 0] = query_is, key_is
        return query, key, value

    return make


def leaving(how: str, where: str, *all_tiles: str) -> tuple[str, ...]:
    """The pieces of a loop over all tiles, hidden ones too, that leaves one out where something is true, or stops."""
    return (MASK, f"{MASK}\nif {where}:\n    {how}", *all_tiles)


def tiles_otherwise(many: str, one: str) -> tuple[Edit, ...]:
    """The rows of a loop over tiles in PyTorch, of queries or of keys, whose tiles are other ones."""
    step, length = f"{one}_rows", f"{one}_length"
    one_size = (
        f"{{}} a fixed number, and not {step}. Loop over range(0, {length}, {step}), and let a tile reach over "
        f"first_{one} : first_{one} + {step}."
    )
    last = (
        f"The last {one} {{}}. range and slices leave their end out: the loop runs over range(0, {length}, {step}), "
        f"and a tile over first_{one} : first_{one} + {step}."
    )
    sizes = (16, 32, 64)
    return (
        *edits(
            f"The last tile was moved back so that it is full, and the {many} that it shares with the tile before "
            "count twice. Let it be smaller: a slice ends where the tensor ends.",
            last_tile_counted_twice=(WALK, f"[max(0, min(first, stop - step)) for first in {WALK}]"),
        ),
        *edits(
            "The last, partly filled tile is never looked at: the number of tiles is rounded down.",
            partial_tile_skipped__but_the_first=(WALK, "range(start, max(stop - step, 0) + 1, step)"),
        ),
        *edits(
            "The last tile is left out, full or not: range leaves its end out already. It is "
            f"range(0, {length}, {step}).",
            last_tile_left_out=(WALK, "range(start, stop - step, step)"),
        ),
        *edits(
            "Every step of the loop takes the first tile. A tile begins where the loop variable says.",
            only_first_tile__in_every_step=(WALK, f"[0] * len({WALK})"),
        ),
        *edits(
            one_size.format("The loop's step is"),
            alone=True,
            **{f"steps_of_one_size__{size}": (WALK, f"range(start, stop, {size})") for size in sizes},
        ),
        *edits(
            one_size.format("A tile's size is"),
            alone=True,
            **{f"tiles_of_one_size__{size}": ("first + step", f"first + {size}") for size in sizes},
        ),
        *edits(last.format("is left out"), **{f"last_{one}_missing": ("first + step", "min(first + step, stop - 1)")}),
        *edits(
            last.format("is left out where it is a tile by itself"),
            **{f"last_{one}_missing__of_the_range": (WALK, "range(start, stop - 1, step)")},
        ),
        *edits(
            last.format("of each tile is left out"),
            **{f"last_{one}_missing__of_each_tile": ("first + step", "first + step - 1")},
        ),
    )
