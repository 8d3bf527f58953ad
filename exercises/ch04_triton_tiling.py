"""Chapter 04: how tiled attention is judged, from PyTorch to a kernel that is timed against FlashAttention-2."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Allocates, Case, Exercise, FasterThan, Forbids, LaunchesTriton, Mistake, Moves
from course_lib.hardware.device import machine
from exercises.attention_slips import (
    UNDERFLOW,
    attention,
    first_keys,
    from_zero,
    heads_forgotten,
    hidden_scored,
    keys_not_turned,
    last_keys,
    length_first,
    log_sum_exp,
    merged,
    normalised_per_tile,
    not_divided,
    only_first,
    ordered_rows,
    prescaled,
    reduced_over_queries,
    rounded,
    rounded_log_sum_exp,
    scores_of,
    stored_in_one_head,
    streamed,
    transposed_by_shape,
    visible_pairs,
    without_running_max,
    zeros_scored,
)
from exercises.seen_slips import (
    GRID_AXES_EXCHANGED,
    NAN_FROM_THE_START,
    all_nan,
    first_access,
    program_beyond_the_heads,
)

TILE = 64  # BLOCK_M and BLOCK_N of the kernels in 4.3 to 4.6, as their launchers set them
BIG = 55.0  # standard deviation of scores whose exponentials overflow in float32


def matrices(draw, heads, query_length, key_length, head_dim, dtype=torch.float32, score=1.0):
    """Query, key and value [heads, length, head_dim] whose scaled scores have the standard deviation `score`."""
    size = math.sqrt(score)
    query = draw.normal(heads, query_length, head_dim, dtype=dtype, scale=size)
    key = draw.normal(heads, key_length, head_dim, dtype=dtype, scale=size)
    return query, key, draw.normal(heads, key_length, head_dim, dtype=dtype)


def far_below(draw, heads, query_length, key_length, head_dim=32):
    """Query, key and value whose scores all lie near -200, where exp(score - 0) is 0 in float32."""
    query = draw.normal(heads, query_length, head_dim, scale=0.3, shift=5.0)
    key = draw.normal(heads, key_length, head_dim, scale=0.2, shift=-7.0)
    return query, key, draw.normal(heads, key_length, head_dim)


NO_RUNNING_MAX = (
    "This is what comes out when the exponential is taken of the scores as they are. exp overflows float32 above 88, "
    "and infinity divided by infinity is NaN. Subtract the row's running maximum first."
)
STARTS_AT_ZERO = (
    "The running maximum starts at 0, so a row whose scores all lie far below 0 is measured from 0: every exponential "
    "underflows and the sum is 0. Start it at minus infinity."
)
MAXIMUM_NOT_UPDATED = (
    "The running maximum is never updated, so it stays at minus infinity, every rescaling is by 0, and only the last "
    "tile of keys counts. End the step with running_max = new_max."
)
NOT_DIVIDED = "The accumulator is not divided by the running sum. Divide once, after the last tile."
NATURAL_EXP = "scale_log2 already holds log2(e), and the exponential is the natural one. Take tl.exp2 throughout."
LOG2E_MISSING = "The exponential is tl.exp2 and the scale lacks log2(e): 2^x is not e^x. Multiply by math.log2(math.e)."
ACCUMULATOR_NOT_RESCALED = (
    "The accumulator is not rescaled when the running maximum grows: what earlier tiles added is still measured from "
    "the old maximum. Multiply it by exp(old maximum - new maximum) before the tile's product is added."
)
SUM_NOT_RESCALED = (
    "The running sum is not rescaled when the running maximum grows. Multiply it by exp(old maximum - new maximum), "
    "the same factor that the accumulator gets."
)
NOTHING_RESCALED = (
    "Neither the sum nor the accumulator is rescaled when the running maximum grows. Each tile is then weighed from "
    "another maximum. Multiply both by exp(old maximum - new maximum)."
)
SCALE_MISSING = "The scores are not scaled. Multiply the product of queries and keys by 1/√head_dim."
SCALE_TWICE = (
    "The scale is applied twice, so that the scores are divided by head_dim instead of its square root. Look for it "
    "both where the queries are loaded and where the scores are made."
)
PER_TILE = (
    "Every tile is divided by its own sum and the results are added: a softmax for each tile instead of one for the "
    "row. Keep one running sum and divide once, after the last tile."
)
LAST_TILE_SKIPPED = (
    "The last tile of keys is never looked at. A loop over `range(0, key_length, tile)` covers them all; one that ends "
    "at `key_length - tile` does not."
)
FIRST_TILE_ONLY = (
    "Only the first tile of keys is used. Does the loop move on? The keys of step j begin at j times the tile's rows, "
    "and the pointers must move with it."
)
KEYS_AS_VALUES = (
    "The weights are multiplied with the keys. The second product takes the values: look at the pointer it loads from."
)
TRANSPOSED_KEY = (
    "The keys were turned by their shape and not by their strides: [keys, head_dim] was read as if memory held "
    "[head_dim, keys]. A transpose exchanges the strides (`.T`, `tl.trans`); reshape keeps the memory's order."
)
WHOLE_MATRIX = (
    "A matrix of query_length × key_length scores was allocated: that is naive attention. Hold one tile of scores at a "
    "time."
)
EMPTY_ROW = (
    "A query that sees no key at all (there are more queries than keys) gives NaN: its maximum is minus infinity and "
    "its sum 0. Its output is 0 by definition: measure such a row from 0, and divide by 1 where the sum is 0."
)
STRIDES = (
    "A tensor was read as if it were contiguous, or by another tensor's strides. Its rows lie `stride(-2)` elements "
    "apart and its heads `stride(-3)`; the launcher passes both, and the pointer arithmetic must use them."
)
MISALIGNED = (
    "The causal mask is aligned to the first key. With unequal lengths the last query stands at the last key: query i "
    "is at position i + key_length - query_length."
)
SKIPS_TOO_MUCH = (
    "The mask is right, but the loop over keys ends too early (or too late) when the lengths differ: its end ignores "
    "key_length - query_length. The last query of the tile decides how far to read."
)
NO_CAUSAL_MASK = "Nothing is masked: every query sees the keys after it too."
OFF_BY_ONE = (
    "A query does not see the key at its own position. Causal attention hides the keys after it: the condition is <=, "
    "not <."
)
NEXT_KEY = (
    "A query sees one key too many, the one right after its own position. Compare positions with <=, and count both "
    "from 0."
)
HIDDEN_SCORED_ZERO = (
    "Hidden scores were set to 0. A score of 0 weighs exp(0 - maximum), which is not 0; the score that weighs nothing "
    "is minus infinity."
)
DIVIDED_AT_EVERY_TILE = (
    "The accumulator is divided by the running sum at every tile, and the next tile's product is added to what is an "
    "average already. Divide once, after the last tile."
)
HEAD_FORGOTTEN = (
    "Head 0 of a tensor was used for every head. Each program adds head · head stride to the pointers of query, key "
    "and value, with each tensor's own stride."
)
STORED_IN_ONE_HEAD = (
    "Every head's output was stored in head 0's place, where the last one stays. Add head · output_head_stride to the "
    "output's pointer."
)
ONLY_FIRST_HEAD = (
    "Only the first head was computed. The grid needs a second axis for the heads: (tiles of queries, heads), with the "
    "head read from tl.program_id(1)."
)
ONLY_FIRST_ROWS = (
    "Only the first tile of queries was computed. Either the grid has one program for each head, or "
    "`tl.program_id(0) * BLOCK_M` is missing from the rows."
)
READS_OUTSIDE = (
    "A load reaches memory that is not the tensor's, although all lengths are whole tiles. Where does the loop over "
    "keys end, are two strides or lengths exchanged, and does the grid have as many programs as there are tiles?"
)
WRITES_OUTSIDE = (
    "The store reaches memory that is not the output's, although all lengths are whole tiles. Does it use the output's "
    "own strides, and does the grid have as many programs as there are tiles?"
)
HALF_ACCUMULATOR = (
    "The accumulator (or the sum) is kept in float16, which ends at 65,504. Keep it in float32 over the whole loop and "
    "cast once, when the output is stored."
)
WRITES_PAST_THE_END = (
    "The output was written past its end, or into another head's rows. Is the store masked (rows < query_length and "
    "columns < head_dim), or does the store use another tensor's strides?"
)
READS_PAST_THE_END = (
    "Memory past the end of a matrix was read. Where the length is no multiple of the tile, the last tile's extra rows "
    "belong to the next head or to no tensor: mask the loads. If they are masked, are two lengths or strides exchanged?"
)
KEY_NOT_TRANSPOSED = (
    "The queries [BLOCK_M, HEAD_DIM] are multiplied with the keys as they were loaded, [BLOCK_N, HEAD_DIM]. Such a "
    "product exists only where HEAD_DIM is BLOCK_N, and is wrong there too: turn the keys over with `tl.trans`, or "
    "load them as [HEAD_DIM, BLOCK_N]."
)


def _close(got, right) -> bool:
    return (
        isinstance(got, torch.Tensor)
        and got.shape == right.shape
        and torch.allclose(got.double(), right.double(), rtol=2e-2, atol=2e-2)
    )


# ---------------------------------------------------------------------------------- 4.1 tiled attention, PyTorch


def tiled_oracle(query, key, value, query_rows, key_rows):
    return attention(query, key, value)


def tiled_prescaled(query, key, value, query_rows, key_rows):
    return prescaled(query, key, value)


def tiled_merged(query, key, value, query_rows, key_rows):
    return merged(query, key, value, key_rows)


def tiled_rounded(query, key, value, query_rows, key_rows):
    return rounded(query, key, value)


def tiled_cases(draw):
    def case(name, query_length, key_length, head_dim, query_rows, key_rows, score=1.0):
        query, key, value = (matrix[0] for matrix in matrices(draw, 1, query_length, key_length, head_dim, score=score))
        return Case(name, (query, key, value, query_rows, key_rows))

    prime = draw.choice((131, 197, 211))
    ascending, descending = (tuple(m[0] for m in ordered_rows(draw, 1, 60, 230, 16, flag)) for flag in (False, True))
    return [
        case("256 × 256 in tiles of 64 × 32: nothing left over", 256, 256, 16, 64, 32),
        case("one query, one key", 1, 1, 8, 16, 16),
        case(f"{prime} queries, 301 keys, tiles of 32 × 64", prime, 301, 16, 32, 64),
        case("90 queries, 33 keys: one more than a tile of 32", 90, 33, 8, 16, 32),
        case("scores of ±150: exp overflows", 100, 200, 32, 32, 32, score=BIG),
        Case("all scores near -200", (*(m[0] for m in far_below(draw, 1, 40, 70)), 32, 32)),
        Case("scores grow along every row", (*ascending, 32, 32)),
        Case("scores fall along every row", (*descending, 32, 32)),
        case("the whole of K and V in one tile", 64, 100, 16, 16, 128),
    ]


TILED = Exercise(
    id="4.1",
    title="Tiled attention in PyTorch",
    entries=("tiled_attention",),
    cases=tiled_cases,
    oracle=tiled_oracle,
    plain=(tiled_prescaled, tiled_merged, tiled_rounded),
    requirements=(
        Allocates(lambda q, k, v, rows, keys: max(q.numel(), k.numel(), rows * max(keys, q.shape[-1]))),
        Forbids(("scaled_dot_product", "scaled_dot_product_attention")),
    ),
    hints=(
        "Two loops: the outer one takes `query_rows` queries, the inner one walks over all keys, `key_rows` at a "
        "time. Python slices end at the tensor's end by themselves, so a smaller last tile needs no special care.",
        "For each tile of queries start with running_max = -inf and running_sum = 0, both [rows, 1], and an "
        "accumulator of zeros [rows, head_dim]. The inner step is the update of exercise 3.4, with a row for every "
        "query.",
        "new_max = torch.maximum(running_max, scores.amax(dim=1, keepdim=True)); weights = torch.exp(scores - "
        "new_max); rescale = torch.exp(running_max - new_max).",
        "running_sum = running_sum * rescale + weights.sum(dim=1, keepdim=True) and accumulator = accumulator * "
        "rescale + weights @ value_tile. After the inner loop: output[first : first + query_rows] = accumulator / "
        "running_sum.",
    ),
    mistakes=(
        Mistake("no_running_max", NO_RUNNING_MAX, result=lambda q, k, v, rows, keys: without_running_max(q, k, v)),
        Mistake(
            "maximum_starts_at_zero",
            STARTS_AT_ZERO,
            result=lambda q, k, v, rows, keys: from_zero(q, k, v, lost=math.nan),
        ),
        Mistake(
            "maximum_not_updated",
            MAXIMUM_NOT_UPDATED,
            result=lambda q, k, v, rows, keys: last_keys(q, k, v, keys),
        ),
        Mistake("not_divided", NOT_DIVIDED, result=lambda q, k, v, rows, keys: not_divided(q, k, v)),
        Mistake(
            "divided_at_every_tile",
            DIVIDED_AT_EVERY_TILE,
            result=lambda q, k, v, rows, keys: streamed(q, k, v, keys, divided_before=k.shape[0]),
        ),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        Mistake(
            "accumulator_not_rescaled",
            ACCUMULATOR_NOT_RESCALED,
            result=lambda q, k, v, rows, keys: streamed(q, k, v, keys, rescale_accumulator=False),
        ),
        Mistake(
            "sum_not_rescaled",
            SUM_NOT_RESCALED,
            result=lambda q, k, v, rows, keys: streamed(q, k, v, keys, rescale_sum=False),
        ),
        Mistake(
            "nothing_rescaled",
            NOTHING_RESCALED,
            result=lambda q, k, v, rows, keys: streamed(q, k, v, keys, rescale_sum=False, rescale_accumulator=False),
        ),
        Mistake("scale_missing", SCALE_MISSING, result=lambda q, k, v, rows, keys: attention(q, k, v, scale=1.0)),
        Mistake(
            "scale_twice", SCALE_TWICE, result=lambda q, k, v, rows, keys: attention(q, k, v, scale=1 / q.shape[-1])
        ),
        Mistake("normalised_per_tile", PER_TILE, result=lambda q, k, v, rows, keys: normalised_per_tile(q, k, v, keys)),
        Mistake(
            "last_tile_skipped",
            LAST_TILE_SKIPPED,
            result=lambda q, k, v, rows, keys: first_keys(q, k, v, (-(-k.shape[-2] // keys) - 1) * keys),
        ),
        Mistake(
            "tail_keys_dropped",
            "The keys of the last, smaller tile are missing: the number of tiles was rounded down. Use "
            "`range(0, key_length, key_rows)`, or round up with `-(-key_length // key_rows)`.",
            result=lambda q, k, v, rows, keys: first_keys(q, k, v, k.shape[-2] // keys * keys),
        ),
        Mistake("transposed_key", TRANSPOSED_KEY, result=lambda q, k, v, rows, keys: _reshaped_tiles(q, k, v, keys)),
        Mistake(
            "writes_the_score_matrix",
            WHOLE_MATRIX,
            when=lambda case, seen, got: (
                seen.largest_allocation
                >= case.args[0].shape[0] * case.args[1].shape[0]
                > max(case.args[3] * case.args[4], case.args[0].numel(), case.args[1].numel())
            ),
        ),
        Mistake(
            "a_row_of_scores",
            "A tile of queries meets all keys at once, so the scores grow with key_length. Cut the keys into "
            "tiles too.",
            when=lambda case, seen, got: (
                seen.largest_allocation
                == case.args[3] * case.args[1].shape[0]
                > max(case.args[3] * case.args[4], case.args[0].numel(), case.args[1].numel())
            ),
        ),
    ),
)


def _reshaped_tiles(query, key, value, key_rows):
    tiles = [key[start : start + key_rows] for start in range(0, key.shape[0], key_rows)]
    return attention(query, torch.cat([tile.reshape(tile.shape[1], tile.shape[0]).T for tile in tiles]), value)


# ---------------------------------------------------------------------------------- 4.2 block sizes and a budget

TILE_CHOICES = (16, 32, 64, 128, 256)
REGISTERS_FOR_TILES = 128


def shared_memory_oracle(query_rows, key_rows, head_dim, item_bytes, stages):
    return (query_rows + 2 * stages * key_rows) * head_dim * item_bytes


def traffic_oracle(heads, query_length, key_length, head_dim, item_bytes, query_rows):
    query_tiles = -(-query_length // query_rows)
    return heads * (2 * query_length + 2 * query_tiles * key_length) * head_dim * item_bytes


def _tiles(
    head_dim,
    item_bytes,
    budget,
    threads,
    *,
    fits=lambda need, budget: need <= budget,
    registers=REGISTERS_FOR_TILES,
    order=lambda pair: pair,
    stages=2,
):
    pairs = [
        (m, n)
        for m in TILE_CHOICES
        for n in TILE_CHOICES
        if fits((m + 2 * stages * n) * head_dim * item_bytes, budget) and m * (head_dim + n) <= registers * threads
    ]
    return max(pairs, key=order, default=None)


def choose_tiles_oracle(head_dim, item_bytes, shared_memory_bytes, threads):
    return _tiles(head_dim, item_bytes, shared_memory_bytes, threads)


def budget_cases(draw):
    lengths = [draw.integer(2, 5000) for _ in "qk"]
    exact = shared_memory_oracle(64, 64, 128, 2, 2)
    return [
        Case("128 × 64 tiles, head dimension 64, float16, 3 stages", (128, 64, 64, 2, 3), "shared_memory"),
        Case("64 × 64 tiles, head dimension 128, float32, one stage", (64, 64, 128, 4, 1), "shared_memory"),
        Case("128 × 128 tiles, head dimension 128, float16, 2 stages", (128, 128, 128, 2, 2), "shared_memory"),
        Case(
            "32 heads, 8192 × 8192, head dimension 128, float16, 128 queries a tile",
            (32, 8192, 8192, 128, 2, 128),
            "traffic",
        ),
        Case("one query, 1000 keys", (8, 1, 1000, 64, 2, 64), "traffic"),
        Case(f"{lengths[0]} queries, {lengths[1]} keys: a tile that is not full", (3, *lengths, 80, 4, 64), "traffic"),
        Case("H100: 227 KiB, head dimension 128, float16, 256 threads", (128, 2, 227 << 10, 256), "choose_tiles"),
        Case("H100, head dimension 64, 128 threads", (64, 2, 227 << 10, 128), "choose_tiles"),
        Case("T4: 64 KiB, head dimension 128, float16, 128 threads", (128, 2, 64 << 10, 128), "choose_tiles"),
        Case("RTX 4090: 99 KiB, head dimension 256, float16, 256 threads", (256, 2, 99 << 10, 256), "choose_tiles"),
        Case("a budget that 64 × 64 tiles fill to the last byte", (128, 2, exact, 128), "choose_tiles"),
        Case("the same, less one byte", (128, 2, exact - 1, 128), "choose_tiles"),
        Case(
            "48 KiB, head dimension 16, 64 threads: the largest beside the smallest",
            (16, 2, 48 << 10, 64),
            "choose_tiles",
        ),
        Case("16 KiB, head dimension 16, 256 threads: shared memory decides", (16, 2, 16 << 10, 256), "choose_tiles"),
        Case("head dimension 65, one column more than registers for 128 × 64", (65, 2, 227 << 10, 128), "choose_tiles"),
        Case("16 KiB and float32 rows of 256: nothing fits", (256, 4, 16 << 10, 128), "choose_tiles"),
    ]


def _for_arguments(count, function):
    """A fingerprint for one of the exercise's functions, told apart by how many arguments it takes."""
    return lambda *args: function(*args) if len(args) == count else None


BUDGET = Exercise(
    id="4.2",
    title="Tiles within a budget",
    entries=("shared_memory", "traffic", "choose_tiles"),
    cases=budget_cases,
    oracle={"shared_memory": shared_memory_oracle, "traffic": traffic_oracle, "choose_tiles": choose_tiles_oracle},
    hints=(
        "A tile of r rows takes r · head_dim · item_bytes. Which tiles lie in shared memory, and how many copies of "
        "each? The queries are loaded once; keys and values come in a stream, `stages` tiles of each on their way or "
        "in use.",
        "Traffic: count the programs of a head first, rounding up. Each reads its own queries, writes its own output, "
        "and reads all keys and all values.",
        "`choose_tiles` can try all 25 pairs. Keep those with shared_memory(...) <= budget and query_rows · (head_dim "
        "+ key_rows) <= 128 · threads.",
        "Python compares tuples from the left: max(pairs) prefers the largest query_rows, then the largest key_rows. "
        "max(pairs, default=None) covers the case that none is left.",
    ),
    mistakes=(
        Mistake(
            "value_tile_forgotten",
            "Only one tile is counted for each stage. Keys and values both stream through: two tiles for each stage.",
            result=_for_arguments(5, lambda m, n, d, size, stages: (m + stages * n) * d * size),
        ),
        Mistake(
            "stages_forgotten",
            "The stages are missing: with s stages, s tiles of keys and s of values are held at once.",
            result=_for_arguments(5, lambda m, n, d, size, stages: (m + 2 * n) * d * size),
        ),
        Mistake(
            "stages_on_queries",
            "The tile of queries is multiplied by the stages too. It is loaded once and stays.",
            result=_for_arguments(5, lambda m, n, d, size, stages: stages * (m + 2 * n) * d * size),
        ),
        Mistake(
            "keys_read_once",
            "Keys and values are counted once. Every program of a head reads them all: multiply by the "
            "number of query tiles.",
            result=_for_arguments(6, lambda h, q, k, d, size, m: h * (2 * q + 2 * k) * d * size),
        ),
        Mistake(
            "output_forgotten",
            "The output is missing: it is written once, as many bytes as the queries.",
            result=_for_arguments(6, lambda h, q, k, d, size, m: h * (q + 2 * -(-q // m) * k) * d * size),
        ),
        Mistake(
            "tiles_rounded_down",
            "The number of query tiles was rounded down. A last tile that is not full reads all keys too: round up.",
            result=_for_arguments(6, lambda h, q, k, d, size, m: h * (2 * q + 2 * (q // m) * k) * d * size),
        ),
        Mistake(
            "heads_forgotten",
            "The heads are missing: each has queries, keys, values and an output of its own.",
            result=_for_arguments(6, lambda h, q, k, d, size, m: traffic_oracle(1, q, k, d, size, m)),
        ),
        Mistake(
            "registers_ignored",
            "The registers are not looked at. query_rows · (head_dim + key_rows) float32 values must "
            "find room in 128 registers of each thread.",
            result=_for_arguments(
                4, lambda d, size, budget, threads: _tiles(d, size, budget, threads, registers=1 << 30)
            ),
        ),
        Mistake(
            "key_rows_first",
            "The largest key_rows is preferred. Bytes depend on query_rows alone: take the largest of those, "
            "and the largest key_rows that goes with it.",
            result=_for_arguments(4, lambda *args: _tiles(*args, order=lambda pair: pair[::-1])),
        ),
        Mistake(
            "fits_strictly",
            "Tiles that fill the budget to the last byte were refused. They fit: compare with <=.",
            result=_for_arguments(4, lambda *args: _tiles(*args, fits=lambda need, budget: need < budget)),
        ),
    ),
)


# ------------------------------------------------------------------------------------------ kernels: vocabulary

SKIPS_THE_WORK = Forbids(
    ("scaled_dot_product_attention", "_scaled_dot_product", "bmm", "mm", "matmul", "_softmax", "softmax")
)


def outputs_only(query, key, value, *rest):
    """The largest tensor that a kernel's launcher has any use for."""
    return max(query.numel(), key.numel(), value.numel())


def keys_read(query_length, key_length, causal, query_rows=TILE, key_rows=TILE) -> int:
    """Rows of K (or V) of one head that all its programs load, tiles above the diagonal skipped."""
    total = 0
    for first in range(0, query_length, query_rows):
        end = min(query_length, first + query_rows) + key_length - query_length if causal else key_length
        total += min(key_length, -(-max(0, end) // key_rows) * key_rows)
    return total


def tiled_bytes(query, key, value, causal=False, *, lse=False) -> int:
    """Bytes that programs of 64 queries move, keys in tiles of 64."""
    heads, query_length, head_dim = query.shape
    rows = 2 * query_length + 2 * keys_read(query_length, key.shape[1], causal)
    return heads * (rows * head_dim * query.element_size() + 4 * query_length * lse)


def causal_bytes(query, key, value) -> int:
    return tiled_bytes(query, key, value, True)


def _whole_matrix(case, seen, got):
    query, key = case.args[:2]
    pairs = query.shape[-3] * query.shape[-2] * key.shape[-2]
    return seen.largest_allocation >= pairs > outputs_only(*case.args)


def _rereads_queries(case, seen, got):
    """The queries were loaded more than once, and the numbers are right."""
    query, key, value = case.args[:3]
    times = [
        counts["loaded"] / max(counts["distinct_loaded"], 1)
        for name, counts in seen.traffic.items()
        if name.startswith("q") and counts["loaded"]
    ]
    return bool(times) and max(times) > 1.5 and _close(got, attention(query.double(), key.double(), value.double()))


def _layout_case(draw, name, *sizes, rest=()):
    """Two heads: q as [length, heads, head_dim], k and v with gaps of their own, the output contiguous."""
    query, key, value = matrices(draw, *sizes)
    gap = query.shape[-1] // 4
    return Case(name, (length_first(query), draw.spread_out(key, gap), draw.spread_out(value, 3 * gap), *rest))


def _read_as_contiguous(query, key, value, visible=None):
    """In the case of three layouts the NaN in the gaps of K or V reaches every output; elsewhere nothing changes."""
    output = attention(query, key, value, visible)
    return output if query.is_contiguous() else torch.full_like(output, math.nan)


def overflowing(draw, dtype=torch.float16):
    """Equal scores, and values near 100 in float16: the weighted sum of 1024 of them is more than float16 holds."""
    query, key, value = matrices(draw, 1, 64, 1024, 16, dtype=dtype)
    return torch.zeros_like(query), key, value * 0.25 + 100.0


def _half_accumulator(case, seen, got):
    """float16: infinities or NaN where a sum over 1024 keys passed 65,504."""
    output = got[0] if isinstance(got, tuple) else got
    long = case.args[0].dtype == torch.float16 and case.args[1].shape[-2] >= 1024
    return long and isinstance(output, torch.Tensor) and not bool(torch.isfinite(output).any())


def of_every_kernel(attend, mask=lambda q, k, *rest: None):
    """The slips of grids and heads, for kernels with a grid of (tiles of 64 queries, heads)."""

    def unturned(query, key, value, *rest):
        return keys_not_turned(query, key, value, TILE, mask(query, key, *rest))

    return (
        Mistake("head_forgotten", HEAD_FORGOTTEN, result=heads_forgotten(attend)),
        Mistake("stored_in_one_head", STORED_IN_ONE_HEAD, result=stored_in_one_head(attend)),
        Mistake("only_first_head", ONLY_FIRST_HEAD, result=only_first(attend, heads=True)),
        Mistake("only_first_rows", ONLY_FIRST_ROWS, result=only_first(attend, rows=TILE)),
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        Mistake("accumulator_in_float16", HALF_ACCUMULATOR, when=_half_accumulator, every=True),
        Mistake("key_not_transposed", KEY_NOT_TRANSPOSED, result=unturned),
        Mistake("grid_axes_exchanged", GRID_AXES_EXCHANGED, when=program_beyond_the_heads),
    )


OUTSIDE = (
    Mistake("reads_outside", READS_OUTSIDE, when=first_access("reads")),
    Mistake("writes_outside", WRITES_OUTSIDE, when=first_access("writes")),
)


# --------------------------------------------------------------------------------- 4.3 the kernel without a mask


def kernel_oracle(query, key, value):
    return attention(query, key, value)


def kernel_prescaled(query, key, value):
    return prescaled(query, key, value)


def kernel_cases(draw):
    equal = matrices(draw, 1, 64, 128, 16)
    cases = [
        Case("one tile of queries, one of keys", matrices(draw, 1, 64, 64, 32)),
        Case("two heads, 192 × 192", matrices(draw, 2, 192, 192, 32)),
        Case("128 queries, 320 keys", matrices(draw, 1, 128, 320, 16)),
        Case("scores of ±150: exp overflows", matrices(draw, 1, 64, 192, 32, score=BIG)),
        Case("all scores near -200", far_below(draw, 1, 64, 128)),
        Case("scores grow along every row", ordered_rows(draw, 1, 64, 192, 32)),
        Case("scores fall along every row", ordered_rows(draw, 1, 64, 192, 32, descending=True)),
        Case("all scores equal", (torch.zeros_like(equal[0]), *equal[1:])),
        Case("float16, head dimension 64", matrices(draw, 2, 64, 128, 64, dtype=torch.float16)),
        Case("float16, 1024 equal scores, values near 100", overflowing(draw)),
        _layout_case(draw, "two heads; q, k and v each stored in another way", 2, 128, 128, 32),
        Case("256 × 256, bytes counted", matrices(draw, 1, 256, 256, 64), metered=True),
    ]
    if draw.on_gpu:
        cases.append(Case("2 heads, 1024 × 2048, float16", matrices(draw, 2, 1024, 2048, 64, dtype=torch.float16)))
    return cases


def _scale(power):
    return lambda q, k, v: attention(q, k, v, scale=q.shape[-1] ** (-0.5 * power))


KERNEL = Exercise(
    id="4.3",
    title="The forward kernel, without a mask",
    entries=("flash_attention_full",),
    cases=kernel_cases,
    oracle=kernel_oracle,
    plain=(kernel_prescaled, rounded),
    needs="triton",
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(tiled_bytes),
    ),
    hints=(
        "The loop is that of exercise 4.1: `for first_key in range(0, key_length, BLOCK_N)`. Inside it, load a tile "
        "of keys [BLOCK_N, HEAD_DIM] as the queries were loaded, with the keys' pointer and strides.",
        'scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale is [BLOCK_M, BLOCK_N]. A row\'s '
        "maximum is tl.max(scores, axis=1), a [BLOCK_M] vector; write new_max[:, None] to subtract it from every "
        "column.",
        "weights = tl.exp(scores - new_max[:, None]); rescale = tl.exp(running_max - new_max). Bring running_sum and "
        "accumulator (as rescale[:, None]) to the new maximum, then add the tile's part, and set running_max = "
        "new_max.",
        "accumulator = accumulator * rescale[:, None] + tl.dot(weights.to(value_tile.dtype), value_tile, "
        'input_precision="ieee"). After the loop: store (accumulator / running_sum[:, '
        "None]).to(output_pointer.dtype.element_ty) at the output's pointers, rows[:, None] * output_stride + "
        "columns[None, :] from output_pointer + head * output_head_stride.",
    ),
    mistakes=(
        Mistake("no_running_max", NO_RUNNING_MAX, result=without_running_max),
        Mistake("maximum_starts_at_zero", STARTS_AT_ZERO, result=lambda q, k, v: from_zero(q, k, v, lost=math.nan)),
        Mistake(
            "accumulator_not_rescaled",
            ACCUMULATOR_NOT_RESCALED,
            result=lambda q, k, v: streamed(q, k, v, TILE, rescale_accumulator=False),
        ),
        Mistake(
            "sum_not_rescaled", SUM_NOT_RESCALED, result=lambda q, k, v: streamed(q, k, v, TILE, rescale_sum=False)
        ),
        Mistake(
            "nothing_rescaled",
            NOTHING_RESCALED,
            result=lambda q, k, v: streamed(q, k, v, TILE, rescale_sum=False, rescale_accumulator=False),
        ),
        Mistake("maximum_not_updated", MAXIMUM_NOT_UPDATED, result=lambda q, k, v: last_keys(q, k, v, TILE)),
        Mistake("not_divided", NOT_DIVIDED, result=not_divided),
        Mistake(
            "divided_at_every_tile",
            DIVIDED_AT_EVERY_TILE,
            result=lambda q, k, v: streamed(q, k, v, TILE, divided_before=k.shape[1]),
        ),
        Mistake(
            "natural_exp",
            NATURAL_EXP,
            result=lambda q, k, v: attention(q, k, v, scale=math.log2(math.e) / math.sqrt(q.shape[-1])),
        ),
        Mistake(
            "log2e_missing",
            LOG2E_MISSING,
            result=lambda q, k, v: attention(q, k, v, scale=math.log(2) / math.sqrt(q.shape[-1])),
        ),
        Mistake("scale_missing", SCALE_MISSING, result=_scale(0)),
        Mistake("scale_twice", SCALE_TWICE, result=_scale(2)),
        Mistake(
            "softmax_over_queries",
            "Maximum and sum are taken over axis 0, the queries of the tile. The softmax of a query runs over its "
            "keys: "
            "axis=1 of a [BLOCK_M, BLOCK_N] tile.",
            result=lambda q, k, v: reduced_over_queries(q, k, v, TILE, TILE),
        ),
        Mistake("only_first_tile", FIRST_TILE_ONLY, result=lambda q, k, v: normalised_repeats(q, k, v)),
        Mistake("last_tile_skipped", LAST_TILE_SKIPPED, result=lambda q, k, v: first_keys(q, k, v, k.shape[1] - TILE)),
        Mistake(
            "as_many_keys_as_queries",
            "Only as many keys were used as there are queries. The loop runs to `key_length`: is that `key.shape[1]` "
            "in the launcher?",
            result=lambda q, k, v: first_keys(q, k, v, q.shape[1]),
        ),
        Mistake("keys_used_as_values", KEYS_AS_VALUES, result=lambda q, k, v: attention(q, k, k)),
        Mistake("transposed_key", TRANSPOSED_KEY, result=transposed_by_shape),
        Mistake("strides_ignored", STRIDES, result=_read_as_contiguous),
        Mistake("writes_the_score_matrix", WHOLE_MATRIX, when=_whole_matrix),
        Mistake(
            "queries_reread",
            "The tile of queries is loaded again for every tile of keys. It does not change: load it once, before "
            "the loop.",
            when=_rereads_queries,
        ),
        *of_every_kernel(kernel_oracle),
        *OUTSIDE,
    ),
)


def normalised_repeats(query, key, value):
    """The first tile of keys taken again at every step: the softmax over it alone."""
    return first_keys(query, key, value, TILE)


# ----------------------------------------------------------------------------------------- 4.4 causal, skipping


def causal_oracle(query, key, value):
    return attention(query, key, value, visible_pairs(query.shape[1], key.shape[1]))


def causal_prescaled(query, key, value):
    return prescaled(query, key, value, visible_pairs(query.shape[1], key.shape[1]))


def causal_rounded(query, key, value):
    return rounded(query, key, value, visible_pairs(query.shape[1], key.shape[1]))


def causal_cases(draw):
    cases = [
        Case("one tile, on the diagonal", matrices(draw, 1, 64, 64, 32)),
        Case("two heads, 192 × 192", matrices(draw, 2, 192, 192, 32)),
        Case("64 queries at the end of 256 keys", matrices(draw, 1, 64, 256, 32)),
        Case("128 queries, 64 keys: the first 64 queries see nothing", matrices(draw, 1, 128, 64, 32)),
        Case("scores of ±150: exp overflows", matrices(draw, 1, 128, 128, 32, score=BIG)),
        Case("all scores near -200", far_below(draw, 1, 64, 128)),
        Case("scores grow along every row", ordered_rows(draw, 1, 128, 128, 16)),
        Case("float16, head dimension 64", matrices(draw, 1, 128, 128, 64, dtype=torch.float16)),
        Case("float16, 64 queries at the end of 1024 equal scores, values near 100", overflowing(draw)),
        _layout_case(draw, "two heads; q, k and v each stored in another way", 2, 64, 128, 32),
        Case("320 × 320, bytes counted", matrices(draw, 1, 320, 320, 32), metered=True),
    ]
    if draw.on_gpu:
        cases.append(Case("2 heads, 1024 × 2048, float16", matrices(draw, 2, 1024, 2048, 64, dtype=torch.float16)))
    return cases


def _visible(query, key, distance=0):
    return visible_pairs(query.shape[1], key.shape[1], distance)


def _until_tile_end(query, key, shift=0, offset=True):
    """bool [query_length, key_length]: keys before the end of the query tile's last key tile, moved `shift` tiles."""
    query_length, key_length = query.shape[1], key.shape[1]
    end = (torch.arange(query_length) // TILE + 1) * TILE
    end = end.clamp(max=query_length) + (key_length - query_length if offset else 0) + shift * TILE
    end = -(-end // TILE) * TILE
    return torch.arange(key_length)[None, :] < end[:, None]


def _read_by_program(query, key, causal=True):
    """int [query_length]: the keys that each query's program goes through, in whole tiles."""
    query_length, key_length = query.shape[1], key.shape[1]
    end = torch.full((query_length,), key_length)
    if causal:
        end = (torch.arange(query_length) // TILE + 1) * TILE + key_length - query_length
    return -(-end.clamp(0, key_length) // TILE) * TILE


def _nan_where_all_is_hidden(query, key, visible, read):
    """bool [query_length]: rows whose program goes through keys that they may not see, all of them."""
    return ~visible.any(dim=-1) & (read > 0)


def _unguarded(shown):
    """A fingerprint without a guard for -inf - -inf: NaN for a row whose keys are all hidden and yet looked at.

    `shown(query, key)` gives the pairs that the mask keeps, and the keys that each query's program goes through.
    """

    def result(query, key, value, *rest):
        if rest and not rest[0]:
            return attention(query, key, value)
        visible, read = shown(query, key)
        visible = visible & (torch.arange(key.shape[1])[None, :] < read[:, None])
        nan = _nan_where_all_is_hidden(query, key, visible, read)
        return attention(query, key, value, visible).masked_fill(nan[:, None], math.nan)

    return result


def _read_without_offset(query, key):
    end = (torch.arange(query.shape[1]) // TILE + 1) * TILE
    return -(-end.clamp(max=key.shape[1]) // TILE) * TILE


def _last_tile_of_program(query, key, value, causal=True):
    visible, read = _mask(query, key, causal), _read_by_program(query, key, causal)
    last = torch.arange(key.shape[1])[None, :] >= (read - TILE)[:, None]
    return attention(query, key, value, last if visible is None else last & visible)


def _masked_after_softmax(query, key, value):
    """Maximum and sum over whole tiles; the weights above the diagonal are set to 0 afterwards."""
    read = _until_tile_end(query, key)
    scores = scores_of(query, key, read)
    nothing = ~read.any(dim=-1)[:, None]
    probabilities = torch.softmax(scores.masked_fill(nothing, 0.0), dim=-1) * (_visible(query, key) & ~nothing)
    return probabilities @ value


def _of_causal_kernels(mask):
    """The slips of the online softmax for kernels whose `mask(query, key, ...)` gives the visible pairs, or None."""

    def slip(function, **more):
        return lambda q, k, v, *causal: function(q, k, v, visible=mask(q, k, *causal), **more)

    return (
        Mistake("sum_not_rescaled", SUM_NOT_RESCALED, result=slip(streamed, key_rows=TILE, rescale_sum=False)),
        Mistake(
            "nothing_rescaled",
            NOTHING_RESCALED,
            result=slip(streamed, key_rows=TILE, rescale_sum=False, rescale_accumulator=False),
        ),
        Mistake(
            "divided_at_every_tile",
            DIVIDED_AT_EVERY_TILE,
            result=lambda q, k, v, *causal: streamed(
                q, k, v, TILE, visible=mask(q, k, *causal), divided_before=_read_by_program(q, k, *causal)
            ),
        ),
        Mistake("maximum_not_updated", MAXIMUM_NOT_UPDATED, result=_last_tile_of_program),
        Mistake("not_divided", NOT_DIVIDED, result=slip(not_divided)),
        Mistake(
            "no_running_max",
            NO_RUNNING_MAX,
            result=(slip(without_running_max), slip(without_running_max, guarded=True)),
        ),
        Mistake("scale_missing", SCALE_MISSING, result=slip(attention, scale=1.0)),
        Mistake(
            "scale_twice",
            SCALE_TWICE,
            result=lambda q, k, v, *causal: attention(q, k, v, mask(q, k, *causal), scale=1 / q.shape[-1]),
        ),
        Mistake(
            "keys_used_as_values",
            KEYS_AS_VALUES,
            result=lambda q, k, v, *causal: attention(q, k, k, mask(q, k, *causal)),
        ),
    )


def _reads_everything(case, seen, got):
    """Right numbers, and all keys loaded by every program."""
    if not seen.traffic:
        return False
    query, key, value = case.args[:3]
    right = attention(query.double(), key.double(), value.double(), _visible(query, key))
    return seen.bytes_moved >= 0.99 * tiled_bytes(query, key, value) and _close(got, right)


CAUSAL = Exercise(
    id="4.4",
    title="A causal kernel that skips tiles",
    entries=("flash_attention_causal",),
    cases=causal_cases,
    oracle=causal_oracle,
    plain=(causal_prescaled, causal_rounded),
    needs="triton",
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(causal_bytes),
    ),
    hints=(
        "The last query stands at the last key. So query row i is at position i + key_length - query_length, and it "
        "sees the keys up to and including its own position.",
        "Which is the last key that any query of this program sees? That of its last row. One past it is where the "
        "loop over keys ends: the tiles beyond are neither loaded nor computed.",
        "end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length), where first_query is the "
        "program's first row. It can be negative; a loop up to it then makes no step.",
        "Inside the loop: visible = keys[None, :] <= positions[:, None], then scores = tl.where(visible, scores, "
        'float("-inf")), before the maximum is taken.',
        "A program whose queries see nothing ends with running_sum = 0. Divide by tl.where(running_sum == 0.0, 1.0, "
        "running_sum) and its rows are 0 / 1 = 0.",
    ),
    mistakes=(
        Mistake("no_causal_mask", NO_CAUSAL_MASK, result=lambda q, k, v: attention(q, k, v)),
        Mistake(
            "diagonal_not_masked",
            "Tiles are skipped, but inside the tile on the diagonal nothing is masked: a query sees the later "
            "keys of its own tile. Put minus infinity there before the maximum is taken.",
            result=lambda q, k, v: attention(q, k, v, _until_tile_end(q, k)),
        ),
        Mistake(
            "causal_off_by_one",
            OFF_BY_ONE,
            result=(
                lambda q, k, v: attention(q, k, v, _visible(q, k, -1)),
                _unguarded(lambda q, k: (_visible(q, k, -1), _read_by_program(q, k))),
            ),
        ),
        Mistake(
            "sees_the_next_key",
            NEXT_KEY,
            result=lambda q, k, v: attention(q, k, v, _visible(q, k, 1) & _until_tile_end(q, k)),
        ),
        Mistake(
            "hidden_scored_zero",
            HIDDEN_SCORED_ZERO,
            result=lambda q, k, v: hidden_scored(q, k, v, _visible(q, k), _read_by_program(q, k), 0.0),
        ),
        Mistake(
            "causal_misaligned",
            MISALIGNED,
            result=lambda q, k, v: attention(q, k, v, torch.arange(k.shape[1]) <= torch.arange(q.shape[1])[:, None]),
        ),
        Mistake(
            "loop_end_ignores_offset",
            SKIPS_TOO_MUCH,
            result=(
                lambda q, k, v: attention(q, k, v, _visible(q, k) & _until_tile_end(q, k, offset=False)),
                _unguarded(lambda q, k: (_visible(q, k), _read_without_offset(q, k))),
            ),
        ),
        Mistake(
            "diagonal_tile_skipped",
            "The tile on the diagonal is skipped along with those above it. The loop must end after the key of "
            "the program's last query: first_query + BLOCK_M, not first_query (plus key_length - query_length).",
            result=lambda q, k, v: attention(q, k, v, _visible(q, k) & _until_tile_end(q, k, shift=-1)),
        ),
        Mistake(
            "mask_after_softmax",
            "The mask sets weights to 0 after maximum and sum were taken, so hidden keys still count in the sum "
            "and the weights of a row add up to less than 1. Mask the scores, with minus infinity.",
            result=_masked_after_softmax,
        ),
        Mistake("empty_row_nan", EMPTY_ROW, result=lambda q, k, v: attention(q, k, v, _visible(q, k), empty=math.nan)),
        Mistake("maximum_starts_at_zero", STARTS_AT_ZERO, result=lambda q, k, v: from_zero(q, k, v, _visible(q, k))),
        Mistake(
            "natural_exp",
            NATURAL_EXP,
            result=lambda q, k, v: attention(q, k, v, _visible(q, k), scale=math.log2(math.e) / math.sqrt(q.shape[-1])),
        ),
        Mistake(
            "log2e_missing",
            LOG2E_MISSING,
            result=lambda q, k, v: attention(q, k, v, _visible(q, k), scale=math.log(2) / math.sqrt(q.shape[-1])),
        ),
        Mistake(
            "accumulator_not_rescaled",
            ACCUMULATOR_NOT_RESCALED,
            result=lambda q, k, v: streamed(q, k, v, TILE, visible=_visible(q, k), rescale_accumulator=False),
        ),
        *_of_causal_kernels(lambda q, k: _visible(q, k)),
        *of_every_kernel(causal_oracle, lambda q, k: _visible(q, k)),
        *OUTSIDE,
        Mistake(
            "does_not_skip",
            "Every program reads all the keys, also those after its last query, and masks them away. End its loop "
            "after the "
            "last key that its last query sees: half the bytes and half the time.",
            when=_reads_everything,
        ),
    ),
)


# -------------------------------------------------------------------------------- 4.5 any lengths, any dimension


def _mask(query, key, causal):
    return _visible(query, key) if causal else None


def ragged_oracle(query, key, value, causal):
    return attention(query, key, value, _mask(query, key, causal))


def ragged_prescaled(query, key, value, causal):
    return prescaled(query, key, value, _mask(query, key, causal))


def ragged_rounded(query, key, value, causal):
    return rounded(query, key, value, _mask(query, key, causal))


def ragged_cases(draw):
    prime = draw.choice((67, 71, 73, 79, 83))
    cases = [
        Case("whole tiles, head dimension 40", (*matrices(draw, 1, 64, 64, 40), False)),
        Case("one query, one key", (*matrices(draw, 1, 1, 1, 16), False)),
        Case("two heads, 130 × 129, head dimension 32", (*matrices(draw, 2, 130, 129, 32), False)),
        Case(f"{prime} × {prime}, head dimension 24, causal", (*matrices(draw, 1, prime, prime, 24), True)),
        Case(
            "one query at the end of 200 keys, causal, float16",
            (*matrices(draw, 2, 1, 200, 80, dtype=torch.float16), True),
        ),
        Case("150 queries, 70 keys, causal: 80 queries see nothing", (*matrices(draw, 1, 150, 70, 32), True)),
        Case("70 queries, 100 keys, causal", (*matrices(draw, 1, 70, 100, 32), True)),
        Case("scores of ±150, 63 × 127", (*matrices(draw, 1, 63, 127, 32, score=BIG), False)),
        Case("all scores near -200, 65 × 70", (*far_below(draw, 1, 65, 70), False)),
        Case("float16, 1024 equal scores, values near 100", (*overflowing(draw), False)),
        _layout_case(draw, "q, k and v each stored in another way, 30 × 90", 2, 30, 90, 48, rest=(False,)),
        Case(
            "NaN between the rows of each matrix",
            (*(draw.spread_out(matrix, 24) for matrix in matrices(draw, 1, 50, 64, 40)), True),
        ),
        Case("257 × 257, causal, bytes counted", (*matrices(draw, 1, 257, 257, 32), True), metered=True),
    ]
    if draw.on_gpu:
        cases.append(
            Case(
                "one head, 1000 × 3001, head dimension 72, float16, causal",
                (*matrices(draw, 1, 1000, 3001, 72, dtype=torch.float16), True),
            )
        )
    return cases


def _head_dim_access(case, seen, got):
    """Wild accesses although all lengths are whole tiles: they can only come from the head dimension."""
    query, key = case.args[:2]
    return bool(seen.out_of_bounds) and query.shape[1] % TILE == 0 and key.shape[1] % TILE == 0


def _ragged(mask):
    """A fingerprint that changes the mask of causal cases."""
    return lambda q, k, v, causal: attention(q, k, v, mask(q, k) if causal else None)


def _unwritten_tail(query, key, value, causal):
    output = ragged_oracle(query, key, value, causal)
    output[:, query.shape[1] // TILE * TILE :] = math.nan
    return output


def _scale_of_padding(query, key, value, causal):
    padded = max(16, 1 << (query.shape[-1] - 1).bit_length())
    return attention(query, key, value, _mask(query, key, causal), scale=1 / math.sqrt(padded))


RAGGED = Exercise(
    id="4.5",
    title="Any length, any head dimension",
    entries=("flash_attention_ragged",),
    cases=ragged_cases,
    oracle=ragged_oracle,
    plain=(ragged_prescaled, ragged_rounded),
    needs="triton",
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(tiled_bytes, slack=1.3),
    ),
    hints=(
        "Three edges need a mask: query rows >= query_length, keys >= key_length, and columns >= head_dim. The first "
        "two are run-time numbers; for the columns take BLOCK_D = max(16, triton.next_power_of_2(head_dim)) as a "
        "constexpr.",
        "Load with mask=(rows < query_length)[:, None] & (columns < head_dim)[None, :] and other=0.0. Zero columns "
        "add nothing to a dot product, so head_dim is done with that, in loads and in the store.",
        "Zero keys are another matter: a key of zeros scores 0, and exp(0) is not 0. Their scores must become minus "
        "infinity: visible = (keys < key_length)[None, :], and the causal condition on top of it.",
        "A row that has seen no key yet has running_max = new_max = -inf, and -inf - -inf is NaN. Measure it from 0: "
        'reference = tl.where(new_max == float("-inf"), 0.0, new_max), then exp(scores - reference) is exp(-inf) = '
        "0.",
        "The scale is 1/√head_dim, of the true one. The grid rounds up: (triton.cdiv(query_length, BLOCK_M), heads).",
    ),
    mistakes=(
        Mistake(
            "tail_keys_scored",
            "The keys past the end were loaded as zeros and counted: a key of zeros scores 0, and exp(0 - "
            "maximum) is not 0. Give their scores minus infinity.",
            result=lambda q, k, v, causal: zeros_scored(q, k, v, TILE, _mask(q, k, causal)),
        ),
        Mistake(
            "hidden_scored_zero",
            HIDDEN_SCORED_ZERO,
            result=lambda q, k, v, causal: hidden_scored(
                q, k, v, _visible(q, k, 0 if causal else 1 << 30), _read_by_program(q, k, causal), 0.0
            ),
        ),
        Mistake(
            "empty_row_uniform",
            "A query that sees no key shares its weight evenly among hidden ones: a large negative number stands where "
            "minus infinity belongs, and such a row cannot tell it from a score. Its output is zeros.",
            result=lambda q, k, v, causal: hidden_scored(
                q, k, v, _visible(q, k, 0 if causal else 1 << 30), _read_by_program(q, k, causal), -1e30
            ),
        ),
        Mistake("no_causal_mask", NO_CAUSAL_MASK, result=lambda q, k, v, causal: attention(q, k, v)),
        Mistake(
            "causal_off_by_one",
            OFF_BY_ONE,
            result=(
                _ragged(lambda q, k: _visible(q, k, -1)),
                _unguarded(lambda q, k: (_visible(q, k, -1), _read_by_program(q, k))),
            ),
        ),
        Mistake(
            "sees_the_next_key",
            NEXT_KEY,
            result=_ragged(lambda q, k: _visible(q, k, 1) & _until_tile_end(q, k)),
        ),
        Mistake(
            "accumulator_not_rescaled",
            ACCUMULATOR_NOT_RESCALED,
            result=lambda q, k, v, causal: streamed(
                q, k, v, TILE, visible=_mask(q, k, causal), rescale_accumulator=False
            ),
        ),
        *_of_causal_kernels(lambda q, k, causal: _mask(q, k, causal)),
        *of_every_kernel(ragged_oracle, lambda q, k, causal: _mask(q, k, causal)),
        Mistake(
            "query_tail_unwritten",
            "The last, partly filled tile of queries was never computed: the grid was rounded down. Use "
            "triton.cdiv(query_length, BLOCK_M).",
            result=_unwritten_tail,
        ),
        Mistake(
            "scale_of_the_padding",
            "The scale is that of the padded head dimension. It is 1/√head_dim of the tensor, not of BLOCK_D.",
            result=_scale_of_padding,
        ),
        Mistake(
            "causal_misaligned",
            MISALIGNED,
            result=_ragged(lambda q, k: torch.arange(k.shape[1]) <= torch.arange(q.shape[1])[:, None]),
        ),
        Mistake(
            "loop_end_ignores_offset",
            SKIPS_TOO_MUCH,
            result=_ragged(lambda q, k: _visible(q, k) & _until_tile_end(q, k, offset=False)),
        ),
        Mistake(
            "empty_row_nan",
            EMPTY_ROW,
            result=lambda q, k, v, causal: attention(q, k, v, _mask(q, k, causal), empty=math.nan),
        ),
        Mistake(
            "maximum_starts_at_zero",
            STARTS_AT_ZERO,
            result=lambda q, k, v, causal: from_zero(q, k, v, _mask(q, k, causal)),
        ),
        Mistake(
            "natural_exp",
            NATURAL_EXP,
            result=lambda q, k, v, causal: attention(
                q, k, v, _mask(q, k, causal), scale=math.log2(math.e) / math.sqrt(q.shape[-1])
            ),
        ),
        Mistake(
            "log2e_missing",
            LOG2E_MISSING,
            result=lambda q, k, v, causal: attention(
                q, k, v, _mask(q, k, causal), scale=math.log(2) / math.sqrt(q.shape[-1])
            ),
        ),
        Mistake(
            "strides_ignored",
            STRIDES,
            result=lambda q, k, v, causal: (
                None if _has_gaps(q, k) else _read_as_contiguous(q, k, v, _mask(q, k, causal))
            ),
        ),
        Mistake(
            "head_dim_not_masked",
            "Columns past head_dim were read or written: BLOCK_D is the next power of two, and its extra columns "
            "belong to the "
            "next row. Mask the columns in every load and in the store.",
            when=_head_dim_access,
        ),
        Mistake(
            "output_written_out_of_bounds",
            WRITES_PAST_THE_END,
            when=first_access("writes"),
        ),
        Mistake("tail_rows_read_out_of_bounds", READS_PAST_THE_END, when=first_access("reads")),
    ),
)


def _has_gaps(query, key) -> bool:
    """The case with NaN between its rows: a float64 copy has lost the gaps, so nothing can be said of it."""
    return query.shape[-1] == 40 and query.shape[-2] == 50 and key.shape[-2] == 64


# ---------------------------------------------------------------------------------------------- 4.6 log-sum-exp


def lse_oracle(query, key, value, causal):
    visible = _mask(query, key, causal)
    return attention(query, key, value, visible), log_sum_exp(query, key, visible)


def lse_from_maximum(query, key, value, causal):
    """As a kernel makes it: maximum plus logarithm of the sum, in float32 at least."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    _, row_max, row_sum = _statistics(query.to(accurate), key.to(accurate), causal)
    lse = row_max + row_sum.masked_fill(row_max == -math.inf, 1.0).log()
    return ragged_prescaled(query, key, value, causal), lse


def lse_rounded(query, key, value, causal):
    return ragged_rounded(query, key, value, causal), rounded_log_sum_exp(query, key, _mask(query, key, causal))


def lse_cases(draw):
    return [
        Case("two heads, 65 × 129", (*matrices(draw, 2, 65, 129, 32), False)),
        Case("65 × 63, head dimension 24, causal", (*matrices(draw, 1, 65, 63, 24), True)),
        _layout_case(draw, "q, k and v each stored in another way, 30 × 100, causal", 2, 30, 100, 48, rest=(True,)),
        Case("one query, one key", (*matrices(draw, 1, 1, 1, 16), True)),
        Case("scores of ±150, 64 × 130", (*matrices(draw, 1, 64, 130, 32, score=BIG), False)),
        Case("all scores near -200, 64 × 70", (*far_below(draw, 1, 64, 70), False)),
        Case("150 queries, 70 keys, causal: 80 queries see nothing", (*matrices(draw, 1, 150, 70, 32), True)),
        Case("float16, 96 × 200", (*matrices(draw, 1, 96, 200, 64, dtype=torch.float16), False)),
        Case("scores grow along every row", (*ordered_rows(draw, 1, 50, 150, 16), False)),
        Case("192 × 192, causal, bytes counted", (*matrices(draw, 1, 192, 192, 32), True), metered=True),
    ]


def _statistics(query, key, causal):
    """Scaled scores, row maximum and row sum of weights, [heads, query_length, ...]."""
    scores = scores_of(query, key, _mask(query, key, causal))
    row_max = scores.amax(dim=-1)
    reference = row_max.masked_fill(row_max == -math.inf, 0.0)
    return scores, row_max, torch.exp(scores - reference[..., None]).sum(dim=-1)


def _wrong_lse(change):
    """A fingerprint with a right output and another second result: `change(row_max, row_sum)`."""

    def result(query, key, value, causal):
        scores, row_max, row_sum = _statistics(query, key, causal)
        nothing = row_max == -math.inf
        return ragged_oracle(query, key, value, causal), change(row_max, row_sum.masked_fill(nothing, 1.0))

    return result


def _empty_row_lse(value_for_empty):
    def result(query, key, value, causal):
        output, lse = lse_oracle(query, key, value, causal)
        return output, lse.masked_fill(lse == -math.inf, value_for_empty)

    return result


def _lse_from_zero(query, key, value, causal):
    """The maximum starts at 0: a row without a key, or with scores that underflow, ends with it and a sum of 0."""
    output, lse = lse_oracle(query, key, value, causal)
    lost = lse < UNDERFLOW
    return output.masked_fill(lost[..., None], 0.0), lse.masked_fill(lost, 0.0)


def _sum_of_rounded_weights(case, seen, got):
    """float16: the log-sum-exp errs as it does when the weights are rounded before they are added."""
    query, key, value, causal = case.args
    if (
        query.dtype != torch.float16
        or not isinstance(got, tuple)
        or len(got) != 2
        or not isinstance(got[1], torch.Tensor)
    ):
        return False
    scores = scores_of(query.double(), key.double(), _mask(query, key, causal))
    right = torch.logsumexp(scores, dim=-1)
    running_max = torch.full_like(right, -math.inf)
    running_sum = torch.zeros_like(right)
    for start in range(0, scores.shape[-1], TILE):
        tile = scores[..., start : start + TILE]
        new_max = torch.maximum(running_max, tile.amax(dim=-1))
        weights = torch.exp(tile - new_max[..., None]).half().double()
        running_sum = running_sum * torch.exp(running_max - new_max) + weights.sum(dim=-1)
        running_max = new_max
    rounded = running_max + running_sum.log()
    if got[1].shape != right.shape:
        return False
    unexplained = (got[1].double() - rounded).abs().mean()
    return bool(unexplained < 0.3 * (rounded - right).abs().mean())


def _lse_unwritten(case, seen, got):
    """The output is right, and of the second result a part was never written."""
    if not seen.unwritten or not isinstance(got, tuple) or len(got) != 2 or not isinstance(got[1], torch.Tensor):
        return False
    return int(got[1].isnan().sum()) == seen.unwritten and _close(got[0], ragged_oracle(*case.args))


def lse_bytes(query, key, value, causal):
    return tiled_bytes(query, key, value, causal, lse=True)


LSE = Exercise(
    id="4.6",
    title="The log-sum-exp as a second output",
    entries=("flash_attention_lse",),
    cases=lse_cases,
    oracle=lse_oracle,
    plain=(lse_from_maximum, lse_rounded),
    needs="triton",
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(outputs_only),
        SKIPS_THE_WORK,
        Moves(lse_bytes, slack=1.3),
    ),
    hints=(
        "Start from your kernel of 4.5: everything you need is there when its loop ends. Which two of the three "
        "running values does log Σ exp(s) take?",
        "Σ exp(s) = exp(m) · Σ exp(s - m) = exp(m) · running_sum, so its logarithm is running_max + log(running_sum).",
        "If your scores are in units of log 2 (exp2), so is running_max: (running_max + tl.log2(running_sum)) * ln 2 "
        "brings both back, with ln 2 = 0.6931471805599453.",
        "Store one float32 for each query: lse_pointer + head * query_length + rows, with mask=rows < query_length. A "
        "row that saw no key has running_max = -inf; take the log of the sum that you divide by (1 there), and -inf + "
        "0 is -inf.",
    ),
    mistakes=(
        Mistake(
            "log_of_sum_only",
            "The running maximum is missing from the log-sum-exp. The sum is of exp(score - maximum): add the "
            "maximum back.",
            result=_wrong_lse(lambda row_max, row_sum: row_sum.log()),
        ),
        Mistake(
            "lse_in_base_2",
            "The log-sum-exp is in base 2. The kernel works in units of log 2; multiply by ln 2 = 0.6931 before "
            "it is stored.",
            result=_wrong_lse(lambda row_max, row_sum: (row_max + row_sum.log()) / math.log(2)),
        ),
        Mistake(
            "mixed_bases",
            "The maximum is in units of log 2 and the logarithm of the sum is natural. Bring both to one base: "
            "(maximum + log2(sum)) · ln 2.",
            result=(
                _wrong_lse(lambda row_max, row_sum: row_max / math.log(2) + row_sum.log()),
                _wrong_lse(lambda row_max, row_sum: row_max + row_sum.log() * math.log(2)),
                _wrong_lse(lambda row_max, row_sum: row_max / math.log(2) + row_sum.log() / math.log(2) ** 2),
            ),
        ),
        Mistake(
            "sum_without_log",
            "The maximum and the sum are added without a logarithm: log(exp(m) · sum) is m + log(sum).",
            result=_wrong_lse(lambda row_max, row_sum: row_max + row_sum),
        ),
        Mistake(
            "unscaled_maximum",
            "The maximum is that of the raw scores. It must be scaled like them: maximum · scale + log(sum).",
            result=lambda q, k, v, causal: (
                ragged_oracle(q, k, v, causal),
                _statistics(q, k, causal)[1] * math.sqrt(q.shape[-1])
                + _statistics(q, k, causal)[2].masked_fill(_statistics(q, k, causal)[1] == -math.inf, 1.0).log(),
            ),
        ),
        Mistake(
            "empty_row_lse_nan",
            "A query that sees no key has a log-sum-exp of NaN. The logarithm of an empty sum is minus infinity.",
            result=_empty_row_lse(math.nan),
        ),
        Mistake(
            "empty_row_lse_zero",
            "A query that sees no key has a log-sum-exp of 0, as if its weights added up to 1. The logarithm of an "
            "empty sum is "
            "minus infinity.",
            result=_empty_row_lse(0.0),
        ),
        Mistake("maximum_starts_at_zero", STARTS_AT_ZERO, result=_lse_from_zero),
        Mistake(
            "probabilities_cast_before_sum",
            "The weights were rounded to float16 before they were added up. Sum them in float32 first; the cast is "
            "only for "
            "the matrix product with the values.",
            when=_sum_of_rounded_weights,
            every=True,
        ),
        Mistake(
            "lse_stored_in_one_head",
            "Every head's log-sum-exp was stored in head 0's place. Add head · query_length to its pointer.",
            result=lambda q, k, v, causal: (
                ragged_oracle(q, k, v, causal),
                stored_in_one_head(lambda *args: lse_oracle(*args)[1])(q, k, v, causal),
            ),
        ),
        Mistake(
            "lse_written_out_of_bounds",
            "The log-sum-exps were written past their end, or into another head's place. One number for each query, at "
            "head · query_length + row, with mask=rows < query_length.",
            when=lambda case, seen, got: any(": writes " in o and " lse" in o for o in seen.out_of_bounds[:1]),
        ),
        Mistake(
            "lse_tail_unwritten",
            "Log-sum-exps were never written. Every row < query_length needs one, those of the last, partly filled "
            "tile too.",
            when=_lse_unwritten,
        ),
        Mistake("output_written_out_of_bounds", WRITES_PAST_THE_END, when=first_access("writes")),
        Mistake("tail_rows_read_out_of_bounds", READS_PAST_THE_END, when=first_access("reads")),
    ),
)


# ------------------------------------------------------------------------------------------ 4.7 against the best


def _head_by_head(function, query, key, value, causal):
    """`function` on one [length, head_dim] at a time: the score matrix of 16 heads would not fit."""
    visible = visible_pairs(query.shape[2], key.shape[2]) if causal else None
    rows = [
        torch.stack([function(query[b, h], key[b, h], value[b, h], visible) for h in range(query.shape[1])])
        for b in range(query.shape[0])
    ]
    return torch.stack(rows)


def fast_oracle(query, key, value, causal):
    return _head_by_head(attention, query, key, value, causal)


def _wide(tensors):
    """The same with rows of 64, the shortest that 4.7 takes, three quarters of them zeros."""
    return tuple(torch.nn.functional.pad(tensor, (0, 64 - tensor.shape[-1])) for tensor in tensors)


def _as_projected(draw, batch, heads, query_length, key_length, head_dim):
    """Query, key and value [batch, heads, length, head_dim], as projections leave them, each with another gap."""
    stored = []
    for length, gap in ((query_length, 16), (key_length, 32), (key_length, 48)):
        flat = draw.normal(batch, length, heads, head_dim + gap, dtype=torch.float16)
        stored.append(flat[..., :head_dim].transpose(1, 2))
    return stored


def fast_cases(draw):
    def case(name, batch, heads, query_length, key_length, head_dim, dtype, causal):
        flat = matrices(draw, batch * heads, query_length, key_length, head_dim, dtype=dtype)
        return Case(name, (*(m.view(batch, heads, *m.shape[1:]) for m in flat), causal))

    cases = [
        case("1 × 2 heads, 128 × 128, float16", 1, 2, 128, 128, 64, torch.float16, False),
        case("2 × 3 heads, 200 × 333, causal, float16", 2, 3, 200, 333, 128, torch.float16, True),
        case("300 queries, 1 key, float16", 1, 1, 300, 1, 64, torch.float16, False),
        case(
            "300 queries, 100 keys, causal, float16: 200 queries see nothing", 1, 1, 300, 100, 64, torch.float16, True
        ),
        Case(
            "scores of ±150, float16",
            (*(m[None] for m in matrices(draw, 2, 130, 260, 64, torch.float16, score=BIG)), False),
        ),
        Case("all scores near -200, float16", (*(m[None].half() for m in far_below(draw, 2, 70, 200, 64)), False)),
        Case("1024 equal scores, values near 100, float16", (*(m[None] for m in _wide(overflowing(draw))), False)),
        Case(
            # The first query sees all keys but one of four tiles of 64, the last query some of the sixth.
            "2 × 3 heads, 100 × 354, stored [batch, length, heads, head_dim] with a gap for each, causal, float16",
            (*_as_projected(draw, 2, 3, 100, 354, 64), True),
        ),
    ]
    if draw.on_gpu and draw.bfloat16:  # before that Triton has no tensor-core instruction to race with
        cases += [
            case("bfloat16, 1000 × 1000, causal", 1, 4, 1000, 1000, 128, torch.bfloat16, True),
            case(
                "16 heads, 4096 × 4096, head dimension 128, bfloat16, timed",
                1,
                16,
                4096,
                4096,
                128,
                torch.bfloat16,
                False,
            ),
        ]
    return cases


def sdpa_flash(query, key, value, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


def _required_speed() -> float:
    """FlashAttention-2 was written for Ampere and leaves Hopper's wgmma unused, which Triton does not."""
    return 1.1 if machine().tier == "hopper" else 0.8


FAST = Exercise(
    id="4.7",
    title="Beat FlashAttention-2",
    entries=("fast_attention",),
    cases=fast_cases,
    oracle=fast_oracle,
    needs="nvidia",
    interpretable=False,  # an autotuned kernel asks for a GPU
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda q, k, v, causal: max(q.numel(), k.numel())),
        SKIPS_THE_WORK,
        FasterThan(
            sdpa_flash,
            _required_speed(),
            lambda q, k, v, causal: 4 * q.numel() * q.element_size(),
            lambda q, k, v, causal: 4 * q.numel() * k.shape[2],
        ),
    ),
    hints=(
        "Look at the compiled kernel before the clock: compile_views tells whether the accumulator spills and which "
        "matrix instruction is used. On sm_90 you want wgmma, which takes 64 rows of queries for every four warps.",
        "Head dimension 128 on Hopper: BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2. Head dimension 64: 128, "
        "64, 4 warps, 3 stages. On Ampere smaller key tiles: 128 × 64 with 8 warps.",
        "Take the masks out of the main loop. Tiles that all queries see in full, and that are whole, need neither "
        "tl.where nor a mask on the load: run them in a loop of their own, and the last ones in a second loop with "
        "masks.",
        "Fold scale · log2 e into one factor and use tl.exp2(scores * factor - maximum): one multiply-add and one "
        "exp2 for each score. Keep weights in the inputs' dtype for the second tl.dot, and hand it the accumulator: "
        "tl.dot(weights, value, accumulator).",
        "If head_dim equals BLOCK_D, don't mask the columns. Let the compiler see that strides are contiguous: pass "
        'the last dimension as tl.arange without a stride. The course\'s own answer (`solution("4.7")`) does no more '
        "than this.",
    ),
    mistakes=(
        Mistake(
            "accumulator_not_rescaled",
            ACCUMULATOR_NOT_RESCALED,
            result=lambda q, k, v, causal: (
                None
                if max(q.shape[2], k.shape[2]) > 1000
                else _head_by_head(
                    lambda a, b, c, m: streamed(a, b, c, 128, visible=m, rescale_accumulator=False), q, k, v, causal
                )
            ),
        ),
        Mistake(
            "scale_missing",
            SCALE_MISSING,
            result=lambda q, k, v, causal: (
                None
                if k.shape[2] > 1000
                else _head_by_head(lambda a, b, c, m: attention(a, b, c, m, scale=1.0), q, k, v, causal)
            ),
        ),
        Mistake(
            "causal_misaligned",
            MISALIGNED,
            result=lambda q, k, v, causal: (
                None
                if k.shape[2] > 1000
                else _head_by_head(lambda a, b, c, m: attention(a, b, c, m), q, k, v, False)
                if not causal
                else _head_by_head(
                    lambda a, b, c, m: attention(
                        a, b, c, torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
                    ),
                    q,
                    k,
                    v,
                    True,
                )
            ),
        ),
        Mistake(
            "tail_keys_scored",
            "The keys past the end were loaded as zeros and counted. Give their scores minus infinity.",
            result=lambda q, k, v, causal: (
                None
                if k.shape[2] > 1000
                else _head_by_head(lambda a, b, c, m: zeros_scored(a, b, c, 128, m), q, k, v, causal)
            ),
        ),
        Mistake("writes_the_score_matrix", WHOLE_MATRIX, when=_whole_matrix),
    ),
)

EXERCISES = (TILED, BUDGET, KERNEL, CAUSAL, RAGGED, LSE, FAST)
