"""Exercise 10.3: dK and dV of one block of keys, in PyTorch."""

from __future__ import annotations

import torch

from course_lib.checker import Allocates, Case, Exercise, Forbids, Mistake
from course_lib.checker.specification.contract import Contract
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
from exercises.topics.attention_backward_slips import KEYS_IN_PYTORCH, foreseen
from exercises.topics.attention_inputs import equal_and_far_below, far_below, large, ordered, ordinary


def key_block(stray=0.0):
    def oracle(query, keys, values, gradient, log_sum, delta, first_key, key_length, causal, query_rows):
        block = slice(first_key, first_key + keys.shape[0])
        visible = rows_visible(query.shape[0], key_length, causal, keys=block)
        return gradients(query, keys, values, gradient, log_sum, delta, visible, stray=stray)[1:]

    return oracle


def how_often(s, query_length, first_key, key_length, causal, query_rows):
    """[query_length]: in how many steps of the loop each query counts."""
    queries, once = torch.arange(query_length), torch.ones(query_length)

    def counted(starts, rows):
        return sum(once * (queries >= start) * (queries < start + rows) for start in starts)

    whole = query_length // query_rows * query_rows
    if s("last_tile_counted_twice") and query_rows < query_length > whole:
        return once + ((queries >= query_length - query_rows) & (queries < whole))
    if s("left_at_the_first_hidden_tile") and causal:
        last = (queries // query_rows + 1) * query_rows - 1  # of each query's tile
        hidden = last.clamp(max=query_length - 1) + key_length - query_length < first_key
        return once * (hidden.cumsum(0) == 0)
    first = queries // query_rows * query_rows  # the first query of each one's tile
    end = (first + query_rows).clamp(max=query_length)
    seen = first_key + query_length - key_length  # the first query that sees the block
    if s("partial_tile_skipped__but_the_first") and whole:
        return once * (queries < whole)
    if s("last_tile_left_out"):
        return once * (first < query_length - query_rows)
    if s("only_first_tile__in_every_step"):
        return once * (queries < query_rows) * -(-query_length // query_rows)
    for size in SIZES:
        if s(f"steps_of_one_size__{size}"):
            return counted(range(0, query_length, size), query_rows)
        if s(f"tiles_of_one_size__{size}"):
            return counted(range(0, query_length, query_rows), size)
    if causal and s("partly_hidden_tile_left_out"):
        return once * (first >= seen)
    if causal and s("partly_hidden_tile_left_out__with_all_behind_it"):
        return once * ((first < seen).cumsum(0) == 0)
    if causal and s("partly_hidden_tile_left_out__of_one_query"):
        return once * (end - 1 > seen)
    if causal and s("loop_begins_late__by_a_query"):
        return once * (queries >= max(0, seen + 1))
    if causal and s("loop_begins_late__by_a_tile"):
        return once * (queries >= (max(0, seen) // query_rows + 1) * query_rows)
    if s("last_query_missing"):
        return once * (queries < query_length - 1)
    if s("last_query_missing__of_the_range"):
        return once * (queries // query_rows * query_rows < query_length - 1)
    if s("last_query_missing__of_each_tile"):
        return once * (queries % query_rows < query_rows - 1)
    return once


SIZES = (16, 32, 64)
PARTLY_HIDDEN = (
    "A tile is left out whose first queries do not see the block, and whose last ones do. Leave a tile out only where "
    "its last query does not see the block's first key, and round the loop's beginning down: the mask does the rest."
)
BEGINS_LATE = (
    "The loop over queries begins too late. The block's first key is seen from query first_key + query_length - "
    "key_length on, or from query 0: begin there, or at the tile that holds that query, rounded down."
)
ONE_SIZE = (
    "{} a fixed number, and not query_rows. Loop over range(0, query_length, query_rows), and let a tile reach over "
    "first_query : first_query + query_rows."
)
LAST_QUERY = (
    "The last query {}. range and slices leave their end out: the loop runs over range(0, query_length, query_rows), "
    "and a tile over first_query : first_query + query_rows."
)
SLIPS = (
    *KEYS_IN_PYTORCH,
    *BOUNDED_BELOW,
    Slip(
        "last_tile_counted_twice",
        "The last tile was moved back so that it is full, and the queries that it shares with the tile before count "
        "twice. Let it be smaller: a slice ends where the tensor ends.",
    ),
    Slip(
        "left_at_the_first_hidden_tile",
        "The loop is left at the first tile of queries that does not see the block. Those stand in front, and later "
        "queries see it: go on with the next tile (continue), or begin at the first query that sees the block.",
    ),
    Slip(
        "partial_tile_skipped__but_the_first",
        "The last, partly filled tile is never looked at: the number of tiles is rounded down.",
    ),
    Slip(
        "last_tile_left_out",
        "The last tile is left out, full or not: range leaves its end out already. It is range(0, query_length, "
        "query_rows).",
    ),
    Slip(
        "only_first_tile__in_every_step",
        "Every step of the loop takes the first tile. A tile begins where the loop variable says.",
    ),
    *(Slip(f"steps_of_one_size__{size}", ONE_SIZE.format("The loop's step is"), alone=True) for size in SIZES),
    *(Slip(f"tiles_of_one_size__{size}", ONE_SIZE.format("A tile's size is"), alone=True) for size in SIZES),
    *(
        Slip(f"partly_hidden_tile_left_out{way}", PARTLY_HIDDEN)
        for way in ("", "__with_all_behind_it", "__of_one_query")
    ),
    *(Slip(f"loop_begins_late__{way}", BEGINS_LATE) for way in ("by_a_query", "by_a_tile")),
    Slip("last_query_missing", LAST_QUERY.format("is left out")),
    Slip("last_query_missing__of_the_range", LAST_QUERY.format("is left out where it is a tile by itself")),
    Slip("last_query_missing__of_each_tile", LAST_QUERY.format("of each tile is left out")),
)


def compute(s, query, keys, values, gradient, log_sum, delta, first_key, key_length, causal, query_rows):
    times = how_often(s, query.shape[0], first_key, key_length, causal, query_rows)
    given = Given(
        query[None],
        keys[None],
        values[None],
        (times[:, None] * gradient)[None],  # dK and dV are sums over queries, linear in each one's dO and Δ
        as_it_is_read(s, log_sum)[None],
        (times * delta)[None],
        query_length=query.shape[0],
        key_length=key_length,
        causal=causal,
        query_rows=query_rows,
        key_rows=keys.shape[0],
        first_key=first_key,
    )
    found = foreseen(s, key_length, SLIPS, Inside(without_bounds(s), "keys", given).gradients())
    if found is None:
        return None
    result = tuple(gradient[0] for gradient in found)
    return result[::-1] if s("results_exchanged") else result


def block_of(draw, query_length, key_length, head_dim, scores, first_key, block, causal, query_rows):
    query, key, value, *rest = one_head(draw, query_length, key_length, head_dim, scores, causal)
    there = slice(first_key, first_key + block)
    return query, key[there].clone(), value[there].clone(), *rest, first_key, key_length, causal, query_rows


def key_block_cases(draw):
    def case(name, *args, scores=ordinary):
        query_length, key_length, head_dim, first_key, block, causal, query_rows = args
        return Case(
            name,
            block_of(draw, query_length, key_length, head_dim, scores, first_key, block, causal, query_rows),
        )

    low = block_of(Draw(103), 20, 24, 16, lower_than_bounds(), 8, 16, True, 8)
    prime = draw.choice((53, 61, 67))
    return [
        case("64 queries, all 32 keys in one block, tiles of 32", 64, 32, 16, 0, 32, False, 32),
        case("keys 32 to 63 of 96, 40 queries in tiles of 16", 40, 96, 16, 32, 32, False, 16),
        case(f"{prime} queries, 90 keys, causal", prime, 90, 16, 30, 30, True, 16),
        case("60 queries, 20 keys, causal: 40 queries see nothing", 60, 20, 16, 0, 20, True, 32),
        case("scores of ±150, causal", 50, 50, 32, 16, 20, True, 16, scores=large),
        case("scores that rise by 4 from key to key, causal", 50, 50, 16, 16, 20, True, 16, scores=ordered(4.0)),
        case("scores near -3,000, causal", 50, 50, 16, 16, 20, True, 16, scores=far_below(-3000.0)),
        Case("scores near -2¹⁸, causal", low),
        case("scores of -2³², causal", 20, 24, 16, 8, 16, True, 8, scores=equal_and_far_below),
        case("one query, one key", 1, 1, 8, 0, 1, True, 16),
    ]


def drawn(draw, *, query_length, key_length, head_dim, scores, place, block, causal, query_rows):
    block = min(block, key_length)
    first_key = {"first": 0, "middle": (key_length - block) // 2, "last": key_length - block}[place]
    return block_of(draw, query_length, key_length, head_dim, scores, first_key, block, causal, query_rows)


CONTRACT = Contract(
    lambda draw, scores, **choices: drawn(draw, scores=scores, **choices),
    most=14,
    choices={
        "query_length": (1, 2, 31, 70, 96),
        "key_length": (1, 17, 64, 97),
        "head_dim": (1, 16, 33),
        "scores": SCORES,
        "place": ("first", "middle", "last"),
        "block": (1, 16, 33),
        "causal": (False, True),
        "query_rows": (1, 16, 33, 200),
    },
    says={
        "query_length": "1 or more, in any combination",
        "scores": "Numbers of any size",
        "query_rows": "The last tile may be smaller",
        "causal": "True or False",
    },
)


def _rows_and_block(query, keys, values, gradient, log_sum, delta, first_key, key_length, causal, query_rows):
    return max(query.numel(), keys.numel(), query_rows * keys.shape[0])


ALL_PAIRS = (
    "The block of keys is multiplied with all queries at once, so a tensor grows with query_length · block. Walk over "
    "the queries, query_rows at a time."
)


def all_queries_at_once(case, seen, got) -> bool:
    query, keys = case.args[:2]
    return seen.largest_results.get("mm", 0) == query.shape[0] * keys.shape[0] > _rows_and_block(*case.args)


def mask_of_all_queries(case, seen, got) -> bool:
    """Whether a mask is the largest tensor, of all queries times the block or times all keys, and no product is."""
    query, keys, key_length, query_rows = case.args[0], case.args[1], case.args[7], case.args[9]
    sizes = (query.shape[0] * keys.shape[0], query.shape[0] * key_length) if query.shape[0] > query_rows else ()
    small = _rows_and_block(*case.args)
    return seen.largest_allocation > small >= seen.largest_results.get("mm", 0) and seen.largest_allocation in sizes


EXERCISE = Exercise(
    id="10.3",
    title="dK and dV of one block of keys",
    entries=("key_block_gradients",),
    cases=key_block_cases,
    oracle=key_block(),
    inputs_belong_together=True,
    contracts=(CONTRACT,),
    plain=(key_block(stray=1.0),),
    models=(
        Model(
            compute,
            SLIPS,
            styles=(("all_tiles", "guarded"), ("all_tiles",), ("guarded",), ("aligned", "guarded")),
            may_be_silent=True,
        ),
    ),
    requirements=(
        Allocates(_rows_and_block),
        Forbids(("_softmax", "softmax", "logsumexp", "scaled_dot_product_attention")),
    ),
    hints=(
        "The block's keys stay where they are, and the queries pass by, a tile at a time. For each tile you compute "
        "its scores against the block again: scale · query[tile] @ keys.T.",
        "Positions: query i stands at i + key_length - query_length, and the block's keys at first_key, first_key + 1, "
        "... Give hidden scores -inf, then P = exp(S - L) as in 10.2, with the guard for L = -inf.",
        "Per tile: dV += P.T @ dO[tile]; dP = dO[tile] @ values.T; dS = P * (dP - Δ[tile, None]); "
        "dK += scale * (dS.T @ query[tile]). Slices end where a tensor ends, so a smaller last tile needs no care.",
        "Start with torch.zeros_like(keys) and torch.zeros_like(values), loop over range(0, query_length, query_rows), "
        "and slice query, output_gradient, log_sum_exp and delta alike.",
    ),
    mistakes=(
        Mistake("all_queries_at_once", ALL_PAIRS, when=all_queries_at_once, cost=True),
        Mistake(
            "mask_of_all_queries",
            "The causal mask is made for all queries at once, so it grows with query_length. Make it for each tile, "
            "from the positions of its rows and of the block's keys.",
            when=mask_of_all_queries,
            cost=True,
        ),
    ),
)
