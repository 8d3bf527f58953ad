"""Exercise 4.1: tiled attention in PyTorch."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Allocates, Case, Exercise, Forbids, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract
from exercises.ch04_triton_tiling.parts import BIG, far_below_finite, matrices
from exercises.topics import attention_sentences as told
from exercises.topics.attention import attention, merged, normalised_in_a_kernel, prescaled, rounded
from exercises.topics.attention_inputs import MAGNITUDES
from exercises.topics.attention_steps import (
    ACCUMULATOR,
    ALL,
    CARRIED,
    FINISHED,
    MAXIMA,
    PRODUCT,
    SCALE,
    STYLES,
    accumulated,
    divided,
    scored,
)
from exercises.topics.evidence import NAN_FROM_THE_START, all_nan
from exercises.topics.rising import (
    FINITE_FOR_MINUS_INFINITY,
    MAXIMUM_OF_THE_FIRST_TILE,
    attention_scores,
    below_a_stand_in,
    rising,
    stays_behind,
)
from exercises.topics.running import START_MAX, start


def tiled(computed):
    """This computation of attention, whatever the tiles."""
    return lambda query, key, value, query_rows, key_rows: computed(query, key, value)


def tiled_merged(query, key, value, query_rows, key_rows):
    return merged(query, key, value, key_rows)


def tiled_cases(draw):
    def case(name, query_length, key_length, head_dim, query_rows, key_rows, score=1.0):
        query, key, value = (matrix[0] for matrix in matrices(draw, 1, query_length, key_length, head_dim, score=score))
        return Case(name, (query, key, value, query_rows, key_rows))

    prime = draw.choice((131, 197, 211))
    return [
        case("128 × 128 in tiles of 64 × 32: nothing left over", 128, 128, 16, 64, 32),
        case("one query, one key", 1, 1, 8, 16, 16),
        case(f"{prime} queries, 301 keys, tiles of 32 × 64", prime, 301, 16, 32, 64),
        case("90 queries, 33 keys: one more than a tile of 32", 90, 33, 8, 16, 32),
        case("scores of ±150: exp overflows", 100, 200, 32, 32, 32, score=BIG),
        Case("scores near -1e20", (*(matrix[0] for matrix in far_below_finite(1, 20, 50)), 16, 16)),
        Case(
            "20 queries, 90 keys in tiles of 32, the last scores 160 above the first",
            (*(matrix[0] for matrix in rising(draw, 1, 20, 90, 16)), 16, 32),
        ),
        case("the whole of K and V in one tile", 64, 100, 16, 16, 128),
    ]


def drawn_tiles(draw, query_length, key_length, head_dim, scores, query_rows, key_rows):
    query, key, value = (matrix[0] for matrix in scores(draw, 1, query_length, key_length, head_dim))
    return query, key, value, query_rows, key_rows


CONTRACT = Contract(
    drawn_tiles,
    choices={
        "query_length": (1, 2, 31, 100, 128),
        "key_length": (1, 16, 33, 97, 130, 256),
        "head_dim": (1, 8, 17, 64),
        "scores": MAGNITUDES,
        "query_rows": (1, 16, 32, 200),
        "key_rows": (1, 16, 33, 64, 300),
    },
    says={
        "query_length": "lengths, head_dim and tiles are 1 or more, in any combination",
        "head_dim": "lengths, head_dim and tiles are 1 or more, in any combination",
        "query_rows": "The last tile of either may be smaller",
        "scores": "Numbers of any size",
    },
    valid=lambda query_length, key_length, query_rows, key_rows, **_: (
        -(-query_length // query_rows) * -(-key_length // key_rows) <= 80
    ),
    most=12,
)


def tiled_attention(query, key, value, query_rows, key_rows):
    query_length, head_dim = query.shape
    key_length = len(key)
    output = torch.full_like(query, math.nan)
    for first_query in range(0, query_length, query_rows):
        query_tile = query[first_query : first_query + query_rows]
        running_max, running_sum = start(query_tile.shape[:1])
        accumulator = torch.zeros(query_tile.shape)
        for first_key in range(0, key_length, key_rows):
            key_tile, value_tile = (tensor[first_key : first_key + key_rows] for tensor in (key, value))
            scores = scored(query_tile, key_tile, head_dim**-0.5)  # [query_rows, key_rows]
            running_max, running_sum, accumulator = accumulated(
                scores, ALL, value_tile, running_max, running_sum, accumulator
            )
        finished = divided(accumulator, running_sum)
        output[first_query : first_query + query_rows] = finished
    return output


STATE, ZEROS = "start(query_tile.shape[:1])", "torch.zeros(query_tile.shape)"
AT_FIRST, ROWS = (
    "if first_query == 0 else",
    "[: len(query_tile)]",
)  # a smaller last tile goes on with the rows that it has
OF_QUERIES, OF_KEYS = "range(0, query_length", "range(0, key_length"
FINISH, PER_TILE = (
    "= divided(accumulator, running_sum)",
    (PRODUCT, f"(weights / weights.sum(-1, keepdim=True)).{PRODUCT[8:]}"),
)
CHANGES = (
    *edits(told.ONLY_FIRST_ROWS, only_first_rows=(OF_QUERIES, "range(0, 1")),
    *edits(told.KEYS_AS_VALUES, keys_used_as_values=("ALL, value_tile", "ALL, key_tile")),
    *edits(told.VALUES_AS_KEYS, values_used_as_keys=("scored(query_tile, key_tile", "scored(query_tile, value_tile")),
    *edits(told.TRANSPOSED_KEY, transposed_key=("keys.float().mT", "keys.float().reshape(keys.shape[::-1])")),
    *SCALE,
    *edits(told.SCALE_BY_LENGTH, scale_by_length=("head_dim**-0.5", "key_length**-0.5")),
    *FINISHED,
    *edits(told.DIVIDED_BY_MAXIMUM, divided_by_the_maximum=(FINISH, "= accumulator / running_max[..., None]")),
    *(MAXIMA + CARRIED),
    *edits(FINITE_FOR_MINUS_INFINITY, finite_for_minus_infinity=(START_MAX, "torch.full(shape, -1e6")),
    *edits(told.FIRST_TILE_ONLY, only_first_tile=("tensor[first_key : first_key + key_rows]", "tensor[:key_rows]")),
    *edits(told.LAST_TILE_SKIPPED, last_tile_skipped=(OF_KEYS, "range(0, key_length - key_rows")),
    *edits(told.EVERY_SECOND_TILE, every_second_tile=("key_length, key_rows", "key_length, 2 * key_rows")),
    *edits(told.FIRST_TILE_SKIPPED, first_tile_of_keys_skipped=(OF_KEYS, "range(key_rows, key_length")),
    *edits(told.AS_MANY, as_many_keys_as_queries=(OF_KEYS, "range(0, min(query_length, key_length)")),
    *edits(
        told.PER_TILE, normalised_per_tile=(*PER_TILE, ACCUMULATOR, "accumulator + product", FINISH, "= accumulator")
    ),
    *edits(
        told.PER_TILE.replace("added", "averaged"),
        normalised_per_tile__averaged=(
            *(*PER_TILE, ACCUMULATOR, "accumulator + product"),
            *(FINISH, "= accumulator / -(-key_length // key_rows)"),
        ),
    ),
    *edits(
        "The keys of the last, smaller tile are missing: the number of tiles was rounded down. Use "
        "`range(0, key_length, key_rows)`, or round up with `-(-key_length // key_rows)`.",
        tail_keys_dropped=(OF_KEYS, "range(0, key_length // key_rows * key_rows"),
    ),
    *edits(
        "The keys of the last, smaller tile are missing: the loop ends at the last whole tile. Use "
        "`range(0, key_length, key_rows)`.",
        tail_keys_dropped__all_but_one_tile=(OF_KEYS, "range(0, max(key_length // key_rows, 1) * key_rows"),
    ),
    *edits(
        "The tiles of queries are counted by the keys' length, so that with fewer keys than queries the last rows are "
        "never written. The outer loop runs over `query.shape[0]`.",
        rows_counted_by_keys=(OF_QUERIES, "range(0, key_length"),
    ),
    *edits(
        "The queries of the last, smaller tile are never computed: the number of tiles was rounded down. Use "
        "`range(0, query_length, query_rows)`.",
        query_tail_unwritten=(OF_QUERIES, "range(0, query_length // query_rows * query_rows"),
        query_tail_unwritten__of_zeros=(
            *(OF_QUERIES, "range(0, query_length // query_rows * query_rows", "math.nan", "0.0"),
        ),
    ),
    *edits(
        "Maximum, sum and accumulator are started once, and every tile of queries goes on with those of the tile "
        "before. Start all three anew inside the outer loop.",
        state_not_started_anew=(
            *(STATE, f"{STATE} {AT_FIRST} (running_max{ROWS}, running_sum{ROWS})"),
            *(ZEROS, f"{ZEROS} {AT_FIRST} accumulator{ROWS}"),
        ),
    ),
    *STYLES,
)

EXERCISE = Exercise(
    id="4.1",
    title="Tiled attention in PyTorch",
    entries=("tiled_attention",),
    cases=tiled_cases,
    oracle=tiled(attention),
    contracts=(CONTRACT,),
    plain=(tiled(prescaled), tiled_merged, tiled(rounded), tiled(normalised_in_a_kernel)),
    models=(model_of(tiled_attention, CHANGES, (start, scored, accumulated, divided), styles=(("unguarded",), ())),),
    requirements=(
        Allocates(lambda q, k, v, rows, keys: max(q.numel(), k.numel(), rows * keys)),
        Forbids(("scaled_dot_product", "scaled_dot_product_attention")),
    ),
    hints=(
        "You need two loops. The outer one takes `query_rows` queries, and the inner one walks over all keys, "
        "`key_rows` at a time. A Python slice ends at the end of the tensor, so a smaller last tile needs no "
        "special care.",
        "For each tile of queries, start with running_max = -inf and running_sum = 0, both [rows, 1], and with "
        "an accumulator of zeros, [rows, head_dim]. The inner step is the update of exercise 3.4, with one row "
        "for each query.",
        "new_max = torch.maximum(running_max, scores.amax(dim=1, keepdim=True)); weights = torch.exp(scores - "
        "new_max); rescale = torch.exp(running_max - new_max).",
        "running_sum = running_sum * rescale + weights.sum(dim=1, keepdim=True) and accumulator = accumulator "
        "* rescale + weights @ value_tile. After the inner loop: output[first : first + query_rows] = "
        "accumulator / running_sum.",
    ),
    mistakes=(
        Mistake(
            "finite_for_minus_infinity",
            FINITE_FOR_MINUS_INFINITY,
            when=below_a_stand_in(
                lambda query, key, value, query_rows, key_rows: attention_scores(query, key),
                lambda query, key, value, query_rows, key_rows: value,
            ),
            every=True,
        ),
        Mistake(
            "maximum_of_the_first_tile",
            MAXIMUM_OF_THE_FIRST_TILE,
            when=stays_behind(
                lambda query, key, value, query_rows, key_rows: attention_scores(query, key),
                lambda query, key, value, query_rows, key_rows: key_rows,
            ),
            every=True,
        ),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        Mistake(
            "modified_input",
            "An input was written over, and whatever reads it afterwards gets the new numbers. A slice such as "
            "`query[a:b]` is a view, so `*=`, `+=`, `mul_` and an `output` that is the input itself change the tensor "
            "that you were given. Make a new one: `query_tile * scale`, `torch.empty_like(query)`.",
            when=lambda case, seen, got: bool(seen.modified_inputs),
            every=True,
        ),
        Mistake(
            "writes_the_score_matrix",
            told.WHOLE_MATRIX,
            when=lambda case, seen, got: (
                seen.largest_allocation
                >= case.args[0].shape[0] * case.args[1].shape[0]
                > max(case.args[3] * case.args[4], case.args[0].numel(), case.args[1].numel())
            ),
            cost=True,
        ),
        Mistake(
            "a_row_of_scores",
            "A tile of queries is multiplied with all keys at once, so the scores grow with key_length. Cut the keys "
            "into tiles too.",
            when=lambda case, seen, got: (
                seen.largest_allocation
                == case.args[3] * case.args[1].shape[0]
                > max(case.args[3] * case.args[4], case.args[0].numel(), case.args[1].numel())
            ),
            cost=True,
        ),
    ),
)
