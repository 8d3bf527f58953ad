"""Exercise 10.4: dQ in a loop of its own, and dQ as a sum of contributions that arrive in any order."""

from __future__ import annotations

import itertools
import math
from functools import partial

import torch

from course_lib.checker import Allocates, Case, Exercise, Forbids, Mistake
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.model import Model, Slip
from exercises.ch10_backward_and_recomputation.parts import (
    BOUNDED_BELOW,
    SCORES,
    as_it_is_read,
    lower_than_bounds,
    one_head,
    rows_visible,
    without_bounds,
)
from exercises.topics.attention_backward import gradients
from exercises.topics.attention_backward_model import Given, Inside
from exercises.topics.attention_backward_slips import QUERIES_IN_PYTORCH, foreseen
from exercises.topics.attention_inputs import equal_and_far_below, far_below, large, ordered, ordinary


def query_tile(stray=0.0):
    def oracle(query, key, value, gradient, log_sum, delta, first_query, query_length, causal, key_rows):
        rows = slice(first_query, first_query + query.shape[0])
        visible = rows_visible(query_length, key.shape[0], causal, rows=rows)
        return gradients(query, key, value, gradient, log_sum, delta, visible, stray=stray)[0]

    return oracle


def keys_walked_over(s, key_length, key_rows, last_position, first_position):
    """Stretches (first, end) of keys that count in the sum; two that overlap count twice where they do.

    The positions are those of the tile's queries, whose last key may be the last of a tile, or beyond all.
    """
    whole = key_length // key_rows * key_rows
    seen_by_all = max(0, min(key_length, first_position + 1))  # keys in tiles that begin where every query sees
    seen = max(0, min(key_length, last_position + 1))
    if s("last_tile_counted_twice") and key_rows < key_length > whole:
        return [(0, key_length), (key_length - key_rows, whole)]
    if s("left_at_the_first_partly_hidden_tile"):  # by its first key, which a query does not see
        return [(0, min(key_length, -(-seen_by_all // key_rows) * key_rows))]
    if s("left_at_the_first_partly_hidden_tile__by_its_last_key"):
        return [(0, key_length if seen == key_length else seen // key_rows * key_rows)]
    if s("left_at_the_first_partly_hidden_tile__by_both"):  # by its last key, which the first query does not see
        return [(0, key_length if seen_by_all == key_length else seen_by_all // key_rows * key_rows)]
    if s("left_at_the_first_partly_hidden_tile__cut"):
        return [(0, seen_by_all)]
    if s("partial_tile_skipped__but_the_first") and whole:
        return [(0, whole)]
    if s("partial_tile_skipped__of_those_seen"):
        return [(0, key_length if last_position >= key_length else seen // key_rows * key_rows)]
    starts = range(0, key_length, key_rows)
    if s("last_tile_left_out"):
        return [(0, len(range(0, key_length - key_rows, key_rows)) * key_rows)]
    if s("only_first_tile__in_every_step"):
        return [(0, min(key_rows, key_length))] * len(starts)
    for size in SIZES:
        if s(f"steps_of_one_size__{size}"):
            return [(at, min(at + key_rows, key_length)) for at in range(0, key_length, size)]
        if s(f"tiles_of_one_size__{size}"):
            return [(at, min(at + size, key_length)) for at in starts]
    if s("last_key_missing"):
        return [(0, key_length - 1)]
    if s("last_key_missing__of_the_range"):
        return [(0, key_length - 1 if (key_length - 1) % key_rows == 0 else key_length)]
    if s("last_key_missing__of_each_tile"):
        return [(begin, min(begin + key_rows - 1, key_length)) for begin in range(0, key_length, key_rows)]
    if s("last_key_missing__of_those_seen"):
        return [(0, max(0, min(key_length, last_position)))]
    return [(0, key_length)]


SIZES = (16, 32, 64)
ONE_SIZE = (
    "{} a fixed number, and not key_rows. Loop over range(0, key_length, key_rows), and let a tile reach over "
    "first_key : first_key + key_rows."
)
LAST_KEY = (
    "The last key {}. range and slices leave their end out: the loop runs over range(0, key_length, key_rows), and a "
    "tile over first_key : first_key + key_rows."
)
LEFT = (
    "The loop is left at a tile of keys that some of the queries do not see, and the others do. Leave it only where "
    "the last query of the tile does not see the first key."
)
SLIPS = (
    *QUERIES_IN_PYTORCH,
    *BOUNDED_BELOW,
    Slip(
        "last_tile_counted_twice",
        "The last tile was moved back so that it is full, and the keys that it shares with the tile before count "
        "twice. Let it be smaller: a slice ends where the tensor ends.",
    ),
    Slip("left_at_the_first_partly_hidden_tile", LEFT),
    Slip("left_at_the_first_partly_hidden_tile__by_its_last_key", LEFT),
    *(Slip(f"left_at_the_first_partly_hidden_tile__{way}", LEFT) for way in ("by_both", "cut")),
    *(
        Slip(
            f"partial_tile_skipped__{way}",
            "The last, partly filled tile is never looked at: the number of tiles is rounded down.",
        )
        for way in ("but_the_first", "of_those_seen")
    ),
    Slip(
        "last_tile_left_out",
        "The last tile is left out, full or not: range leaves its end out already. It is range(0, key_length, "
        "key_rows).",
    ),
    Slip(
        "only_first_tile__in_every_step",
        "Every step of the loop takes the first tile. A tile begins where the loop variable says.",
    ),
    *(Slip(f"steps_of_one_size__{size}", ONE_SIZE.format("The loop's step is"), alone=True) for size in SIZES),
    *(Slip(f"tiles_of_one_size__{size}", ONE_SIZE.format("A tile's size is"), alone=True) for size in SIZES),
    Slip("last_key_missing", LAST_KEY.format("is left out")),
    Slip("last_key_missing__of_the_range", LAST_KEY.format("is left out where it is a tile by itself")),
    Slip("last_key_missing__of_each_tile", LAST_KEY.format("of each tile is left out")),
    Slip(
        "last_key_missing__of_those_seen",
        "The last key that the tile's last query sees is left out: the one at its own position. A slice leaves its end "
        "out, so the end is one more than that position.",
    ),
)


def of_query_tile(s, query, key, value, gradient, log_sum, delta, first_query, query_length, causal, key_rows):
    last = first_query + query.shape[0] - 1 + key.shape[0] - query_length if causal else key.shape[0]
    first = first_query + key.shape[0] - query_length if causal else key.shape[0]
    total = torch.zeros_like(query)
    for begin, end in keys_walked_over(s, key.shape[0], key_rows, last, first):
        given = Given(
            query[None],
            key[None, begin:end],
            value[None, begin:end],
            gradient[None],
            as_it_is_read(s, log_sum)[None],
            delta[None],
            query_length=query_length,
            key_length=key.shape[0],
            causal=causal,
            query_rows=query.shape[0],
            key_rows=key_rows,
            first_query=first_query,
            first_key=begin,
        )
        if begin < end:
            found = foreseen(s, key.shape[0], SLIPS, Inside(without_bounds(s), "queries", given).gradients())
            if found is None:
                return None
            total = total + found[0][0]
    return total


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


def of_arrivals(s, contributions, orders):
    """The driver's answer for a function that adds up in some way."""
    results = [_added(s, contributions, order) for order in orders]
    return results[0], sum(not torch.equal(result, results[0]) for result in results[1:])


def _of_views(contributions, order):
    """Each added when its turn has come, out of a buffer that holds the latest arrival."""
    buffer, waiting, turn, total = torch.empty_like(contributions[0]), set(), 0, None
    for block in order:
        buffer.copy_(contributions[block])
        waiting.add(block)
        while turn in waiting:
            total = buffer if total is None else total + buffer
            turn += 1
    return total.clone()


def _walked(s, contributions, order):
    """What a function does that keeps what comes early, with a slip in that."""
    buffer, waiting, turn, total = torch.empty_like(contributions[0]), {}, 0, None
    for block in order:
        buffer.copy_(contributions[block])
        waiting[block] = (
            buffer if block == 0 and s("first_not_cloned", "first_not_cloned__in_place") else buffer.clone()
        )
        while turn in waiting:
            one = waiting.pop(turn)
            if total is None:
                total = one
            elif s("first_not_cloned__in_place"):
                total.add_(one)
            else:
                total = total + one
            turn += 1
            if s("one_added_for_each_arrival"):
                break
    return total.clone()


def _added(s, contributions, order):
    blocks = len(contributions)
    if s("first_not_cloned", "first_not_cloned__in_place", "one_added_for_each_arrival"):
        return _walked(s, contributions, order)
    if s("walked_twice"):
        return contributions[0].clone()
    if s("views_kept"):
        return _of_views(contributions, order)
    if s("views_kept__until_the_end"):
        contributions = contributions[order[-1:]].expand_as(contributions)
    if s("last_arrival_alone"):
        return contributions[order[-1]].clone()
    if s("first_arrival_alone"):
        return contributions[order[0]].clone()
    in_turn = list(order) if s("order_of_arrival", "order_of_arrival__in_float64") else list(range(blocks))
    if s("block_left_out"):
        in_turn = in_turn[:-1] or in_turn
    if s("block_left_out__the_first"):
        in_turn = in_turn[1:] or in_turn
    dtype = torch.float64 if s("order_of_arrival__in_float64") else torch.float32
    total = torch.zeros(contributions.shape[1:], dtype=dtype)
    for block in in_turn:
        total += contributions[block].to(dtype)
    return (total / blocks if s("averaged") else total).float()


BY_ARRIVAL = (
    "The contributions are added in the order in which they arrive. Every addition rounds, so another order gives "
    "other bits. Keep those that come early (as clones), and add block 0, block 1, block 2, ... each when its turn has "
    "come."
)
VIEWS = "A contribution that was kept shows a later one: each arrival overwrites the same tensor. Keep a clone()."
NOT_CLONED = (
    "Block 0's contribution is kept without a clone(), so the next arrival overwrites it. Clone whatever stays after "
    "its turn in the loop, the beginning of the sum too."
)
LEFT_OUT = "One block's contribution is missing from the sum: all of them count, 0 to blocks - 1."
ARRIVAL_SLIPS = (
    Slip("order_of_arrival", BY_ARRIVAL),
    Slip(
        "order_of_arrival__in_float64",
        "The contributions are added in the order of arrival, in float64. That rounds too, only later: with terms that "
        "cancel, other bits come out. Fix the order instead.",
    ),
    Slip("views_kept", VIEWS),
    Slip("views_kept__until_the_end", VIEWS),
    Slip("first_not_cloned", NOT_CLONED),
    Slip("first_not_cloned__in_place", NOT_CLONED),
    Slip(
        "one_added_for_each_arrival",
        "At most one block is added for each arrival, and the others that wait stay behind. When a block's turn has "
        "come, the next ones may be waiting already: while, not if.",
    ),
    Slip(
        "walked_twice",
        "Only block 0 counts. An iterator can be walked once: when its end is reached, a second loop over it finds "
        "nothing. Keep what comes early.",
    ),
    Slip("last_arrival_alone", "Only the contribution that arrives last counts. Add them all up."),
    Slip("first_arrival_alone", "Only the contribution that arrives first counts. Add them all up."),
    Slip("block_left_out", LEFT_OUT),
    Slip("block_left_out__the_first", LEFT_OUT),
    Slip("averaged", "The sum is divided by the number of blocks. dQ is the sum of their contributions."),
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
    models=(
        Model(
            of_query_tile,
            SLIPS,
            styles=(("all_tiles", "guarded"), ("all_tiles",), ("guarded",)),
            entry="query_tile_gradient",
            may_be_silent=True,
        ),
        Model(of_arrivals, ARRIVAL_SLIPS, entry="sum_of_arrivals", first_of_equals=True),
    ),
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
