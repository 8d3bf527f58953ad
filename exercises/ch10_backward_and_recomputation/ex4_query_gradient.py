"""Exercise 10.4: dQ in a loop of its own, and dQ as a sum of contributions that arrive in any order."""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch

from course_lib.checker import Allocates, Case, Exercise, Forbids, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from exercises.ch10_backward_and_recomputation.parts import (
    SCORES,
    leaving,
    lower_than_bounds,
    one_head,
    rows_visible,
    tiles_otherwise,
)
from exercises.topics.attention_backward import gradients
from exercises.topics.attention_backward_slips import (
    ALL_KEYS,
    BOUNDED_BELOW,
    GUARDED,
    OF_QUERIES,
    OF_QUERIES_SKIPPED,
    POSITIONS,
    PUT_FOR_NUMBERS,
    ends,
    of_a_loop,
)
from exercises.topics.attention_backward_steps import QUERY_PARTS, USES, query_gradients, where_foreseen
from exercises.topics.attention_inputs import equal_and_far_below, far_below, large, ordered, ordinary


def query_tile(stray=0.0):
    def oracle(query, key, value, gradient, log_sum, delta, first_query, query_length, causal, key_rows):
        rows = slice(first_query, first_query + query.shape[0])
        visible = rows_visible(query_length, key.shape[0], causal, rows=rows)
        return gradients(query, key, value, gradient, log_sum, delta, visible, stray=stray)[0]

    return oracle


def gradient_of_the_tile(query, key, value, gradient, log_sum, delta, first_query, query_length, causal, key_rows):
    """dQ [rows, head_dim], tile after tile."""
    inputs = (query, key, value, gradient, log_sum, delta, first_query, query_length)
    return query_gradients(*inputs, key.shape[0], causal, key_rows)


CUT = ("first + step", "min(first + step, stop)")
CHANGES = (
    *of_a_loop(*OF_QUERIES_SKIPPED),
    *OF_QUERIES,
    *edits(
        "The tile's queries are numbered from 0. They have the numbers first_query, first_query + 1, ...",
        first_query_forgotten=("first_query + torch.arange(", "torch.arange("),
    ),
    *edits(
        "The tile's rows stand where query_length belongs: query i is at position i + key_length - query_length, "
        "whatever tile it is in.",
        rows_for_query_length=(POSITIONS, "rows + key_length - len(rows)"),
    ),
    *edits(
        "The keys are numbered from 0 in every tile. A tile's first key has the number at which the tile begins.",
        tiles_numbered_alike=("first + torch.arange(", "torch.arange("),
    ),
    *BOUNDED_BELOW,
    *tiles_otherwise("keys", "key"),
    *edits(
        "The loop is left at a tile of keys that some of the queries do not see, and the others do. Leave it only "
        "where the last query of the tile does not see the first key.",
        left_at_the_first_partly_hidden_tile=leaving("break", "not visible[0, 0]", *ALL_KEYS),
        left_at_the_first_partly_hidden_tile__by_its_last_key=leaving("break", "not visible[-1, -1]", *ALL_KEYS),
        left_at_the_first_partly_hidden_tile__by_both=leaving("break", "not visible[0, -1]", *ALL_KEYS),
        left_at_the_first_partly_hidden_tile__cut=(*ends("min(key_length, reach - query.shape[-2] + 1)"), *CUT),
    ),
    *edits(
        "The last, partly filled tile is never looked at: the number of tiles is rounded down.",
        partial_tile_skipped__of_those_seen=ends("min(key_length, reach // step * step)"),
    ),
    *edits(
        "The last key that the tile's last query sees is left out: the one at its own position. A slice leaves its "
        "end out, so the end is one more than that position.",
        last_key_missing__of_those_seen=(*ends("min(key_length, reach - 1)"), *CUT),
    ),
    *edits("", all_tiles=ALL_KEYS, guarded=GUARDED),
)
TILE_MODEL = where_foreseen(
    model_of(
        gradient_of_the_tile,
        CHANGES,
        QUERY_PARTS,
        USES,
        entry="query_tile_gradient",
        styles=(("all_tiles", "guarded"), ("all_tiles",), ("guarded",)),
        may_be_silent=True,
    ),
    key_length_of=lambda query, key, *rest: key.shape[0],
    sure=PUT_FOR_NUMBERS,
)


def in_orders(functions, contributions, orders):
    """What the first order of arrival gives, and in how many of the others the bits differ from it."""
    results = []
    for order in orders:
        buffer = torch.empty_like(contributions[0])

        def arrivals(order=order, buffer=buffer):
            for block in order:
                buffer.copy_(contributions[block])
                yield block, buffer

        results.append(functions["sum_of_arrivals"](arrivals(), len(contributions)))
    if not all(isinstance(result, torch.Tensor) and result.shape == contributions[0].shape for result in results):
        return results[0], 0
    return results[0].clone(), sum(not torch.equal(result, results[0]) for result in results[1:])


def arrivals_oracle(contributions, orders):
    return contributions.sum(0), 0


def one_by_one(contributions, orders, from_the_last=False):
    """The sum, rounded after each addition: torch.sum adds up in another way, and errs less."""
    total = torch.zeros_like(contributions[0])
    for contribution in contributions.flip(0) if from_the_last else contributions:
        total = total + contribution
    return total, 0


def _summed_otherwise(contributions, orders):
    """Off by what another order of additions may change, where large terms cancel too."""
    return contributions.sum(0) + 2 * torch.finfo(torch.float32).eps * contributions.abs().sum(0), 0


def shuffled(draw, blocks):
    """Orders in which blocks may finish: two that are drawn, as they are numbered, the last first, and one late."""
    late = [*range(1, blocks), 0]
    drawn = [draw.permutation(blocks).tolist() for _ in range(3)]
    return [drawn[0], drawn[1], list(range(blocks)), list(range(blocks))[::-1], late, drawn[2]]


def contributions_of(draw, blocks, rows, head_dim, size):
    """[blocks, rows, head_dim] float32, of which every sum is rounded, and differently in every order."""
    made = draw.normal(blocks, rows, head_dim)
    if size == "far apart":
        made = made * torch.pow(10.0, draw.uniform(blocks, rows, head_dim, low=-4.0, high=4.0))
    if size == "tiny":
        made = made * 1e-9
    if size == "huge":
        made = made * 1e12
    if size == "cancelling":  # pairs of 1e17 that cancel, around ordinary ones: float64 keeps 16 digits
        big = 1e17 * (1 + draw.uniform(blocks // 2, rows, head_dim))
        made[: blocks // 2] = big
        made[blocks - blocks // 2 :] = -big
        if blocks % 2 == 0 and blocks > 2:
            made[blocks // 2] = draw.normal(rows, head_dim)
            made[0] = draw.normal(rows, head_dim)
    return made


ENDS = [[0, 1, 2], [0, 2, 1], [2, 1, 0], [1, 0, 2], [1, 2, 0], [2, 0, 1]]  # each block arrives last, twice


def far_apart():
    """[3, 1, 6] float32: 1e30, 1 and -1e30 in all orders. In float64 the 1 stays only where it arrives last."""
    return torch.tensor(list(itertools.permutations((1e30, 1.0, -1e30)))).T[:, None].contiguous()


def query_gradient_cases(draw):
    def tile(name, *args, scores=ordinary):
        return Case(name, tile_of(draw, scores, *args), "query_tile_gradient")

    def arrive(name, blocks, rows, head_dim, size):
        contributions = contributions_of(draw, blocks, rows, head_dim, size)
        return Case(name, (contributions, shuffled(draw, blocks)), "sum_of_arrivals", driver=in_orders)

    low = tile_of(Draw(104), lower_than_bounds(2.0**18, -4.0), 20, 24, 16, 4, 12, True, 8)
    prime = draw.choice((53, 61, 67))
    return [
        tile("32 queries, 64 keys in tiles of 32", 32, 64, 16, 0, 32, False, 32),
        tile("queries 32 to 63 of 96, 40 keys in tiles of 16", 96, 40, 16, 32, 32, False, 16),
        tile(f"queries 20 to 39 of 60, {prime} keys, causal", 60, prime, 16, 20, 20, True, 16),
        tile("60 queries, 20 keys, causal: the tile's first queries see nothing", 60, 20, 16, 30, 19, True, 8),
        tile("scores of ±150, causal", 50, 50, 32, 16, 20, True, 16, scores=large),
        tile("scores that rise by 4 from key to key, causal", 50, 50, 16, 16, 20, True, 16, scores=ordered(4.0)),
        tile("scores near -3,000, causal", 50, 50, 16, 16, 20, True, 16, scores=far_below(-3000.0)),
        Case("scores near -2¹⁸, causal", low, "query_tile_gradient"),
        tile("scores of -2³², causal", 20, 24, 16, 4, 12, True, 8, scores=equal_and_far_below),
        tile("one query, one key", 1, 1, 8, 0, 1, True, 16),
        arrive("4 blocks, 8 × 16", 4, 8, 16, ""),
        arrive("33 blocks, 16 × 32", 33, 16, 32, ""),
        arrive("one block", 1, 4, 8, ""),
        arrive("12 blocks whose sizes lie far apart", 12, 16, 32, "far apart"),
        arrive("9 blocks, contributions near 1e17 that cancel: float64 is not enough", 9, 16, 32, "cancelling"),
        Case("1e30, 1 and -1e30", (far_apart(), ENDS), "sum_of_arrivals", driver=in_orders),
    ]


def tile_of(draw, scores, query_length, key_length, head_dim, first_query, rows, causal, key_rows):
    query, key, value, gradient, log_sum, delta = one_head(draw, query_length, key_length, head_dim, scores, causal)
    there = slice(first_query, first_query + rows)
    query, gradient, log_sum, delta = (tensor[there].clone() for tensor in (query, gradient, log_sum, delta))
    return query, key, value, gradient, log_sum, delta, first_query, query_length, causal, key_rows


def drawn(draw, *, query_length, key_length, head_dim, scores, place, rows, causal, key_rows):
    rows = min(rows, query_length)
    first_query = {"first": 0, "middle": (query_length - rows) // 2, "last": query_length - rows}[place]
    return tile_of(draw, scores, query_length, key_length, head_dim, first_query, rows, causal, key_rows)


CONTRACT = Contract(
    drawn,
    most=12,
    choices={
        "query_length": (1, 17, 64, 97),
        "key_length": (1, 2, 31, 70, 96),
        "head_dim": (1, 16, 33),
        "scores": SCORES,
        "place": ("first", "middle", "last"),
        "rows": (1, 16, 33),
        "causal": (False, True),
        "key_rows": (1, 16, 33, 200),
    },
    says={
        "key_length": "or more, in any combination",
        "scores": "Numbers of any size",
        "key_rows": "The last tile may be smaller",
        "causal": "causal: as in 10.3",
    },
    entry="query_tile_gradient",
)

ARRIVALS = Contract(
    lambda draw, *, blocks, rows, head_dim, size: (
        contributions_of(draw, blocks, rows, head_dim, size),
        shuffled(draw, blocks),
    ),
    choices={
        "blocks": (1, 2, 3, 16, 40),
        "rows": (1, 16),
        "head_dim": (1, 64),
        "size": (
            Level("", ""),
            Level("far apart", "sizes far apart"),
            Level("cancelling", "1e17 that cancels"),
            Level("tiny", "numbers near 1e-9"),
            Level("huge", "numbers near 1e12"),
        ),
    },
    says={"blocks": "how many there are, 1 or more", "size": "of any size"},
    entry="sum_of_arrivals",
    driver=in_orders,
    most=8,
)


def of_arrivals(contributions, orders):
    """The driver's answer for `sum_in_turn`."""
    results = [sum_in_turn(contributions, order) for order in orders]
    return results[0], sum(not torch.equal(result, results[0]) for result in results[1:])


def sum_in_turn(contributions, order):
    """The contributions, which arrive in this order and overwrite each other, added by their numbers."""
    arrived = torch.empty_like(contributions[0])
    waiting, turn, total = {}, 0, None
    for block in order:
        arrived.copy_(contributions[block])
        waiting[block] = arrived.clone()
        while turn in waiting:
            one = waiting.pop(turn)
            total = one if total is None else total + one
            turn += 1
    return total.clone()


def added_up(contributions, order, dtype=torch.float32):
    """The sum of these blocks, one after the other."""
    total = torch.zeros(contributions.shape[1:], dtype=dtype)
    for block in order:
        total += contributions[block].to(dtype)
    return total.float()


CLONE, SUM, RESULT = "arrived.clone()", "one if total is None else total + one", "return total.clone()"
LEFT_OUT = "One block's contribution is missing from the sum: all of them count, 0 to blocks - 1."
ARRIVAL_CHANGES = (
    *edits(
        "The contributions are added in the order in which they arrive. Every addition rounds, so another order gives "
        "other bits. Keep those that come early (as clones), and add block 0, block 1, block 2, ... each when its turn "
        "has come.",
        order_of_arrival=(RESULT, "return added_up(contributions, order)"),
    ),
    *edits(
        "The contributions are added in the order of arrival, in float64. That rounds too, only later: with terms that "
        "cancel, other bits come out. Fix the order instead.",
        order_of_arrival__in_float64=(RESULT, "return added_up(contributions, order, torch.float64)"),
    ),
    *edits(
        "A contribution that was kept shows a later one: each arrival overwrites the same tensor. Keep a clone().",
        views_kept=(CLONE, "arrived"),
        views_kept__until_the_end=(RESULT, "return added_up(contributions, order[-1:] * len(order))"),
    ),
    *edits(
        "Block 0's contribution is kept without a clone(), so the next arrival overwrites it. Clone whatever stays "
        "after its turn in the loop, the beginning of the sum too.",
        first_not_cloned=(CLONE, "arrived.clone() if block else arrived"),
        first_not_cloned__in_place=(
            *(CLONE, "arrived.clone() if block else arrived"),
            *(SUM, "one if total is None else total.add_(one)"),
        ),
    ),
    *edits(
        "At most one block is added for each arrival, and the others that wait stay behind. When a block's turn has "
        "come, the next ones may be waiting already: while, not if.",
        one_added_for_each_arrival=("while turn in waiting", "if turn in waiting"),
    ),
    *edits(
        "Only block 0 counts. An iterator can be walked once: when its end is reached, a second loop over it finds "
        "nothing. Keep what comes early.",
        walked_twice=(RESULT, "return contributions[0].clone()"),
    ),
    *edits(
        "Only the contribution that arrives last counts. Add them all up.",
        last_arrival_alone=(RESULT, "return contributions[order[-1]].clone()"),
    ),
    *edits(
        "Only the contribution that arrives first counts. Add them all up.",
        first_arrival_alone=(RESULT, "return contributions[order[0]].clone()"),
    ),
    *edits(
        LEFT_OUT,
        block_left_out=(RESULT, "return added_up(contributions, range(max(1, len(order) - 1)))"),
        block_left_out__the_first=(RESULT, "return added_up(contributions, range(len(order))[1:] or [0])"),
    ),
    *edits(
        "The sum is divided by the number of blocks. dQ is the sum of their contributions.",
        averaged=(RESULT, "return total / len(contributions)"),
    ),
)
ARRIVAL_MODEL = model_of(
    of_arrivals, ARRIVAL_CHANGES, (sum_in_turn,), (added_up,), entry="sum_of_arrivals", first_of_equals=True
)


def _rows_and_keys(query, key, value, *rest):
    if query is None or not rest:
        return math.inf
    key_rows = rest[-1]
    tile = query.shape[0] * key_rows
    return max(query.numel(), key.numel(), tile, min(key_rows, key.shape[0]) * key.shape[1])


def _allowed(*args):
    """Elements of the largest tensor in either function: the second may hold all that has arrived."""
    return _rows_and_keys(*args) if len(args) > 2 else math.inf


def order_shows(case, seen, got) -> bool:
    """A `when` for every failing case: a sum that is right but for rounding has other bits in another order."""
    if case.entry != "sum_of_arrivals" or not (isinstance(got, tuple) and len(got) == 2 and got[1] > 0):
        return False
    contributions, _ = case.args
    rounding = len(contributions) * torch.finfo(torch.float32).eps * contributions.double().abs().sum(0)
    return bool(((got[0].double() - contributions.double().sum(0)).abs() <= rounding).all())


def all_keys_at_once(case, seen, got) -> bool:
    if case.entry != "query_tile_gradient":
        return False
    query, key = case.args[:2]
    return seen.largest_results.get("mm", 0) == query.shape[0] * key.shape[0] > _rows_and_keys(*case.args)


EXERCISE = Exercise(
    id="10.4",
    title="dQ twice: in a loop of its own, and in the order of arrival",
    entries=("query_tile_gradient", "sum_of_arrivals"),
    cases=query_gradient_cases,
    oracle={"query_tile_gradient": query_tile(), "sum_of_arrivals": arrivals_oracle},
    inputs_belong_together=True,
    contracts=(CONTRACT, ARRIVALS),
    plain={
        "query_tile_gradient": (query_tile(stray=1.0), query_tile(stray=-1.0)),
        "sum_of_arrivals": (one_by_one, partial(one_by_one, from_the_last=True), _summed_otherwise),
    },
    models=(TILE_MODEL, ARRIVAL_MODEL),
    requirements=(
        Allocates(_allowed),
        Forbids(("_softmax", "softmax", "logsumexp", "scaled_dot_product_attention")),
    ),
    hints=(
        "query_tile_gradient is 10.3 with the loops exchanged. The tile's queries stay, and the keys pass by. P and dS "
        "are computed as before, and dQ += scale * (dS @ key[tile]).",
        "query_tile_gradient: the tile's query r has the number first_query + r, so it stands at first_query + r + "
        "key_length - query_length. Start with zeros_like(query) and loop over range(0, key_length, key_rows).",
        "sum_of_arrivals: 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in the last bit. So the order of the additions "
        "has to be the same each time, whatever the order of arrival is.",
        "Keep what arrives early in a dictionary from block to contribution, as a clone(), because the next arrival "
        "overwrites the tensor. Remember whose turn it is.",
        "waiting[block] = contribution.clone(); then while turn in waiting: add waiting.pop(turn) to the total, and "
        "turn += 1.",
    ),
    mistakes=(
        Mistake(
            "bits_depend_on_the_order",
            "The same contributions gave other bits when they arrived in another order. Somewhere they are added, or "
            "lined up, in the order of arrival. Every addition rounds, so the order of all additions must come from "
            "the blocks' numbers alone: block 0, block 1, block 2, ...",
            when=order_shows,
            every=True,
        ),
        Mistake(
            "all_keys_at_once",
            "The tile of queries is multiplied with all keys at once, so a tensor grows with rows · key_length. Walk "
            "over the keys, key_rows at a time.",
            when=all_keys_at_once,
            cost=True,
        ),
    ),
)
