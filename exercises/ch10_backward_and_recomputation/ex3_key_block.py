"""Exercise 10.3: dK and dV of one block of keys, in PyTorch."""

from __future__ import annotations

from course_lib.checker import Allocates, Case, Exercise, Forbids, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract
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
    ALIGNED,
    ALL_QUERIES,
    BOUNDED_BELOW,
    GUARDED,
    OF_KEYS,
    OF_KEYS_SKIPPED,
    POSITIONS,
    PUT_FOR_NUMBERS,
    SCALE,
    begins,
    of_a_loop,
)
from exercises.topics.attention_backward_steps import KEY_PARTS, USES, key_gradients, where_foreseen
from exercises.topics.attention_inputs import equal_and_far_below, far_below, large, ordered, ordinary


def key_block(stray=0.0):
    def oracle(query, keys, values, gradient, log_sum, delta, first_key, key_length, causal, query_rows):
        block = slice(first_key, first_key + keys.shape[0])
        visible = rows_visible(query.shape[0], key_length, causal, keys=block)
        return gradients(query, keys, values, gradient, log_sum, delta, visible, stray=stray)[1:]

    return oracle


def gradients_of_the_block(query, keys, values, gradient, log_sum, delta, first_key, key_length, causal, query_rows):
    """dK and dV [block, head_dim], tile after tile."""
    inputs = (query, keys, values, gradient, log_sum, delta, query.shape[0])
    key_gradient, value_gradient = key_gradients(*inputs, first_key, key_length, causal, query_rows)
    return key_gradient, value_gradient


OF_ROWS = "are taken from the first rows in every tile. Each tile has rows of its own: slice them like the queries."
SUMS, DELTAS = "log_sum[..., first : first + step]", "delta[..., first : first + step]"
FIRST_SUMS, FIRST_DELTAS = "log_sum[..., : queries.shape[-2]]", "delta[..., : queries.shape[-2]]"
PARTLY_HIDDEN = (
    "A tile is left out whose first queries do not see the block, and whose last ones do. Leave a tile out only where "
    "its last query does not see the block's first key, and round the loop's beginning down: the mask does the rest."
)
CHANGES = (
    *of_a_loop(*OF_KEYS_SKIPPED),
    *OF_KEYS,
    *edits(f"L and Δ {OF_ROWS}", rows_of_the_first_tile=(SUMS, FIRST_SUMS, DELTAS, FIRST_DELTAS)),
    *edits(f"The numbers of L {OF_ROWS}", rows_of_the_first_tile__in_log_sum=(SUMS, FIRST_SUMS)),
    *edits(f"The numbers of Δ {OF_ROWS}", rows_of_the_first_tile__in_delta=(DELTAS, FIRST_DELTAS)),
    *edits(
        "The scale is 1/√(keys of the block). It is 1/√head_dim.",
        scale_by_length__of_the_block=(SCALE, "keys.shape[-2] ** -0.5"),
    ),
    *edits(
        "The block's keys are numbered from 0. They stand at first_key, first_key + 1, ...",
        first_key_forgotten=("first_key + torch.arange(", "torch.arange("),
    ),
    *edits(
        "The block's length stands where key_length belongs: query i is at position i + key_length - query_length, "
        "whatever block it meets.",
        block_for_key_length=(POSITIONS, "rows + len(keys) - query_length"),
    ),
    *edits(
        "dK and dV are returned in each other's place.",
        results_exchanged=("return key_gradient, value_gradient", "return value_gradient, key_gradient"),
    ),
    *BOUNDED_BELOW,
    *tiles_otherwise("queries", "query"),
    *edits(
        "The loop is left at the first tile of queries that does not see the block. Those stand in front, and later "
        "queries see it: go on with the next tile (continue), or begin at the first query that sees the block.",
        left_at_the_first_hidden_tile=leaving("break", "not visible.any()", *ALL_QUERIES),
    ),
    *edits(
        PARTLY_HIDDEN,
        partly_hidden_tile_left_out=leaving("continue", "not visible[0].any()", *ALL_QUERIES),
        partly_hidden_tile_left_out__with_all_behind_it=leaving("break", "not visible[0].any()", *ALL_QUERIES),
        partly_hidden_tile_left_out__of_one_query=leaving(
            "continue", "causal and rows[-1] <= first_key - offset", *ALL_QUERIES
        ),
    ),
    *edits(
        "The loop over queries begins too late. The block's first key is seen from query first_key + query_length - "
        "key_length on, or from query 0: begin there, or at the tile that holds that query, rounded down.",
        loop_begins_late__by_a_query=begins("max(0, first_key - offset + 1)"),
        loop_begins_late__by_a_tile=begins("(max(0, first_key - offset) // step + 1) * step"),
    ),
    *edits("", all_tiles=ALL_QUERIES, guarded=GUARDED, aligned=ALIGNED),
)
STYLES = (("all_tiles", "guarded"), ("all_tiles",), ("guarded",), ("aligned", "guarded"))
MODEL = where_foreseen(
    model_of(gradients_of_the_block, CHANGES, KEY_PARTS, USES, styles=STYLES, may_be_silent=True),
    key_length_of=lambda *args: args[7],
    sure=PUT_FOR_NUMBERS,
)


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
    models=(MODEL,),
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
