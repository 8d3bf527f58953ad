"""What the programs of the kernels of 4.3 to 4.6 do, and the slips of grids, pointers, loops and masks in it.

4.3 and 4.4 are the same kernel as 4.5 where no length leaves anything over. All programs compute at once, in the order
in which the grid numbers them: of two that store in one place the later stays.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.edits import DoesNotRun, edits, only, without
from exercises.topics import attention_sentences as told
from exercises.topics.attention_steps import (
    ADDED,
    BASE_2,
    CARRIED,
    DOT,
    EMPTY_ROWS,
    FINISHED,
    FINITE_STARTS,
    HIDDEN,
    MAXIMA,
    MIXED_BASES,
    NARROW,
    SCALE,
    STYLES,
    accumulated,
    divided,
    padded,
    scored,
)
from exercises.topics.pointers import load, put
from exercises.topics.running import START_MAX, start

BLOCK_M = BLOCK_N = 64  # queries and keys of a tile, as the launchers set them


def attended(query, key, value, causal, block_n=BLOCK_N):
    """The output [heads, query_length, head_dim], and the log-sum-exps [heads, query_length] in float32."""
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    tiles = -(-query_length // BLOCK_M)
    head = torch.arange(heads)[:, None, None]
    first_query = torch.arange(tiles)[:, None, None] * BLOCK_M  # [tiles, 1, 1]
    rows = first_query + torch.arange(BLOCK_M)  # [tiles, 1, BLOCK_M]
    positions = rows[..., None] + key_length - query_length
    columns = torch.arange(head_dim)
    inside = rows[..., None] < query_length
    query_rows = head * query.stride(0) + rows[..., None] * query.stride(1)
    query_tile = load(query, query_rows + columns, inside)  # [tiles, heads, BLOCK_M, head_dim]
    running_max, running_sum = start((tiles, heads, BLOCK_M))
    accumulator = torch.zeros(query_tile.shape)
    end = torch.full_like(first_query, key_length)
    if causal:
        end = torch.minimum(end, first_query + BLOCK_M + key_length - query_length)
    for first_key in range(0, max(end.flatten().tolist(), default=0), block_n):
        keys = first_key + torch.arange(block_n)
        present = (keys < key_length)[:, None]
        key_tile = load(key, head * key.stride(0) + keys[:, None] * key.stride(1) + columns, present)
        value_tile = load(value, head * value.stride(0) + keys[:, None] * value.stride(1) + columns, present)
        visible = keys < key_length
        if causal:
            visible = visible & (keys <= positions)
        scores = scored(query_tile, key_tile, head_dim**-0.5)  # [tiles, heads, BLOCK_M, block_n]
        running_max, running_sum, accumulator = accumulated(
            scores, visible, value_tile, running_max, running_sum, accumulator, first_key < end
        )
    output = torch.full((heads, query_length, head_dim), math.nan, dtype=query.dtype)
    written = divided(accumulator, running_sum)
    output_rows = head * output.stride(0) + rows[..., None] * output.stride(1)
    put(output, output_rows + columns, written, inside)
    lses = torch.full((heads, query_length), math.nan)
    log_sum_exp = running_max + torch.log(torch.where(running_sum == 0, 1.0, running_sum))
    put(lses, head[..., 0] * query_length + rows, log_sum_exp, rows < query_length)
    return output, lses


def squared(tile):
    """The same scores or weights, whose columns can be taken for rows only where there are as many."""
    if tile.shape[-1] != tile.shape[-2]:
        raise DoesNotRun
    return tile


def unturned(keys):
    """The keys as they were loaded, in the place of [head_dim, keys]: there is such a product of square tiles alone."""
    width = padded(keys.shape[-1])
    return squared(torch.nn.functional.pad(keys, (0, width - keys.shape[-1])))[..., : keys.shape[-1], :]


TENSORS = ("query", "key", "value")
PARTS, USES = (start, scored, accumulated, divided, attended), (padded, squared, unturned)
BY_ROWS, BY_ALL = "tile.amax(-1)", "torch.full_like(first_query, key_length)"
GRID, OFFSET = "-(-query_length // BLOCK_M)", "+ key_length - query_length"
END = f"first_query + BLOCK_M {OFFSET}"
CAUSAL_END, POSITIONS = f"torch.minimum(end, {END})", f"rows[..., None] {OFFSET}"
STORE, OF_THE_TILE = "output_rows = head * output.stride(0) + rows[..., None]", "first_key + torch.arange(block_n)"


def head_of(name):
    return (f"head * {name}.stride(0) + ", "")


def unmasked_where(tile):
    """The causal mask of all tiles of keys but those of which this is true."""
    return ("visible & (keys <= positions)", f"visible & ((keys <= positions) | ({tile}))")


def contiguous(name):
    return (f"{name}.stride(0)", f"{name}.shape[1] * head_dim", *rows_touch(name))


def rows_touch(name):
    return (f"{name}.stride(1)", "head_dim")


def by_another(name, other, axes):
    return tuple(piece for axis in axes for piece in (f"{name}.stride({axis})", f"{other}.stride({axis})"))


STORED = (
    *edits(told.ONLY_FIRST_HEAD, only_first_head=("torch.arange(heads)", "torch.arange(1)")),
    *edits(told.ONLY_FIRST_ROWS, only_first_rows=(GRID, "1")),
    *edits(told.STORED_IN_ONE_HEAD, stored_in_one_head=head_of("output")),
    *edits(
        told.STORED_IN_FIRST_ROWS,
        stored_in_first_rows=(STORE, STORE.replace("rows[..., None]", "torch.arange(BLOCK_M)[:, None]")),
    ),
)
PRODUCTS = (
    *edits(told.KEYS_AS_VALUES, keys_used_as_values=("visible, value_tile", "visible, key_tile")),
    *edits(
        told.VALUES_AS_KEYS,
        values_used_as_keys=("scored(query_tile, key_tile", "scored(query_tile, value_tile"),
    ),
    *edits(
        told.TRANSPOSED_KEY,
        transposed_key=("keys[:, None] * key.stride(1) + columns", "keys[:, None] + columns * key.stride(1)"),
    ),
    *edits(told.KEY_NOT_TRANSPOSED, key_not_transposed=(DOT, "query.float() @ unturned(keys.float())")),
    *SCALE,
    *edits(
        told.SCALE_BY_LENGTH,
        scale_by_length=("head_dim**-0.5", "key_length**-0.5"),
    ),
)
OVER_QUERIES = (
    *edits(
        "Maximum and sum are taken over axis 0, the queries of the tile. The softmax of a query runs over its keys: "
        "axis=1 of a [BLOCK_M, BLOCK_N] tile.",
        softmax_over_queries=(BY_ROWS, "squared(tile).amax(-2)", ADDED, "squared(weights).sum(-2)"),
    ),
    *edits(
        "The maximum is taken over axis 0, the queries of the tile. Each query has a maximum over its keys: axis=1 of "
        "a [BLOCK_M, BLOCK_N] tile.",
        maximum_over_queries=(BY_ROWS, "squared(tile).amax(-2)"),
    ),
    *edits(
        "The sum is taken over axis 0, the queries of the tile. Each query has a sum over its keys: axis=1 of a "
        "[BLOCK_M, BLOCK_N] tile.",
        sum_over_queries=(ADDED, "squared(weights).sum(-2)"),
    ),
)
LOOP = (
    *edits(told.FIRST_TILE_ONLY, only_first_tile=(OF_THE_TILE, "torch.arange(block_n)")),
    *edits(told.LAST_TILE_SKIPPED, last_tile_skipped=(BY_ALL, "torch.full_like(first_query, key_length - block_n)")),
    *(
        row
        for name in TENSORS[1:]
        for row in edits(
            f"Every step loads the first tile of {name}s: `first_key` is missing from the rows that the load takes.",
            alone=True,
            **{f"{name}_not_moved": (f"keys[:, None] * {name}", f"(keys - keys[0])[:, None] * {name}")},
        )
    ),
    *edits(
        told.EVERY_SECOND_TILE,
        every_second_tile=("default=0), block_n", "default=0), 2 * block_n"),
    ),
    *edits(
        told.FIRST_TILE_SKIPPED,
        first_tile_of_keys_skipped=("range(0, max(", "range(block_n, max("),
    ),
    *edits(
        "The loop begins before key 0, and its first tile is memory in front of the head's keys. It begins at key 0.",
        alone=True,
        loop_begun_before_key_0=("range(0, max(", "range(-block_n, max("),
    ),
    *edits(told.AS_MANY, as_many_keys_as_queries=(BY_ALL, "torch.full_like(first_query, query_length)")),
)
POINTERS = (
    *edits(told.HEAD_FORGOTTEN, head_forgotten=tuple(piece for name in TENSORS for piece in head_of(name))),
    *(
        row
        for name in TENSORS
        for row in edits(
            f"Head 0 of `{name}` is used for every head: head · {name}_head_stride is missing.",
            **{f"head_forgotten__{name}": head_of(name)},
        )
    ),
    *(
        row
        for one, other in (("query", "key"), ("query", "value"), ("key", "value"))
        for row in edits(
            f"Head 0 of `{one}` and `{other}` is used for every head: add head · {one}_head_stride and "
            f"head · {other}_head_stride to the pointers.",
            alone=True,
            **{f"head_forgotten__{one}_and_{other}": (*head_of(one), *head_of(other))},
        )
    ),
    *edits(
        "The tensors are read as if they were contiguous. Rows lie `stride(-2)` elements apart and heads "
        "`stride(-3)`; the launcher passes both.",
        strides_ignored=tuple(piece for name in TENSORS for piece in contiguous(name)),
    ),
    *(
        row
        for name in TENSORS
        for row in edits(
            f"`{name}` is read as if it were contiguous. Its rows lie {name}_stride elements apart and its heads "
            f"{name}_head_stride.",
            **{f"strides_ignored__{name}": contiguous(name)},
        )
    ),
    *(
        row
        for name in TENSORS
        for row in edits(
            f"The rows of `{name}` are taken to touch. They lie {name}_stride elements apart.",
            **{f"strides_ignored__{name}_rows": rows_touch(name)},
        )
    ),
    *(
        row
        for name in TENSORS
        for other in TENSORS
        if name != other
        for which, axes, said, own in (
            ("", (0, 1), "the strides", "strides"),
            ("_rows", (1,), "the row stride", "one"),
            ("_heads", (0,), "the head stride", "one"),
        )
        for row in edits(
            f"`{name}` is read by {said} of `{other}`. It has {own} of its own.",
            alone=which == "",
            **{f"strides_ignored__{name}{which}_by_{other}": by_another(name, other, axes)},
        )
    ),
    *(
        row
        for which, axes, said in (
            ("", (0, 1), "the strides"),
            ("heads_of_", (0,), "the head stride"),
            ("rows_of_", (1,), "the row stride"),
        )
        for name in TENSORS
        for row in edits(
            f"The output is stored by {said} of `{name}`. It is contiguous, and has strides of its own: "
            "output_head_stride and output_stride.",
            **{f"output_strides__{which}{name}": by_another("output", name, axes)},
        )
    ),
)
TILED = (
    *(STORED + PRODUCTS + BASE_2),
    *only(FINISHED, "not_divided"),
    *edits(
        told.DIVIDED_BY_MAXIMUM,
        divided_by_the_maximum=("= divided(accumulator, running_sum)", "= accumulator / running_max[..., None]"),
    ),
    *without(FINISHED, "not_divided"),
    *(OVER_QUERIES + MAXIMA + CARRIED + LOOP + POINTERS + NARROW + STYLES),
)

# Where nothing is masked, the whole kernel may take one length for the other; under a causal mask that misaligns it.
WHOLE_TILES = (
    *without(TILED, "as_many_keys_as_queries"),
    *edits(told.AS_MANY, as_many_keys_as_queries=("key_length = key.shape[1]", "key_length = query.shape[1]")),
)
CAUSAL = (
    *edits(told.NO_CAUSAL_MASK, no_causal_mask=("if causal:", "if False:")),
    *edits(
        "Tiles are skipped, but inside the tile on the diagonal nothing is masked: a query sees the later keys of its "
        "own tile. Put minus infinity there before the maximum is taken.",
        diagonal_not_masked=("visible & (keys <= positions)", "visible"),
    ),
    *edits(
        "The mask is the wrong way round: each query sees the keys after it and not those before.",
        mask_turned_round=("keys <= positions", "keys >= positions"),
    ),
    *edits(told.MISALIGNED, causal_misaligned=(OFFSET, ""), causal_misaligned__mask=(POSITIONS, "rows[..., None]")),
    *edits(
        told.OFFSET_REVERSED,
        alone=True,
        causal_offset_reversed=(OFFSET, "+ query_length - key_length"),
        causal_offset_reversed__mask=(POSITIONS, "rows[..., None] + query_length - key_length"),
    ),
    *edits(told.SKIPS_TOO_MUCH, loop_end_ignores_offset=(END, "first_query + BLOCK_M")),
    *edits(told.OFF_BY_ONE, causal_off_by_one=("keys <= positions", "keys < positions")),
    *edits(told.NEXT_KEY, sees_the_next_key=("keys <= positions", "keys <= positions + 1")),
    *edits(
        "The tile on the diagonal is skipped. Its keys before each query's position are seen.",
        diagonal_tile_skipped=(END, f"first_query {OFFSET}"),
    ),
    *edits(
        "The mask takes every tile of queries for the first one: `tl.program_id(0) * BLOCK_M` is missing from the "
        "positions of the queries.",
        alone=True,
        positions_of_the_first_tile=(POSITIONS, f"torch.arange(BLOCK_M)[:, None] {OFFSET}"),
    ),
    *edits(
        "With fewer keys than queries the tile on the diagonal is not masked: it lies before key number `first_query`, "
        "and only tiles from some place behind it are masked. Compare `first_key` with the position of the tile's "
        "first query, first_query + key_length - query_length, or mask every tile.",
        masked_from_the_top_aligned_diagonal=unmasked_where("first_key < first_query[..., None]"),
        masked_from_the_top_aligned_diagonal__reversed=unmasked_where(
            "first_key < first_query[..., None] + query_length - key_length"
        ),
    ),
    *edits(
        "The mask is applied only to the tile of keys with the queries' own number, where the diagonal lies if there "
        "are as many keys as queries. It lies key_length - query_length further: mask the tiles that reach past the "
        "position of the tile's first query, or all.",
        alone=True,
        masked_on_the_top_aligned_diagonal=unmasked_where("first_key != first_query[..., None]"),
    ),
    *(HIDDEN + EMPTY_ROWS),
)
# Where no load is masked, a loop that follows the queries past the last key reads what lies there.
UNMASKED = ("keys < key_length", "keys >= 0", CAUSAL_END, "first_query + BLOCK_M")
PAST_THE_KEYS = (
    *edits(told.MISALIGNED, alone=True, causal_misaligned__past_the_keys=(*UNMASKED, POSITIONS, "rows[..., None]")),
    *edits(told.SKIPS_TOO_MUCH, alone=True, loop_end_ignores_offset__past_the_keys=UNMASKED),
)
RAGGED = (
    *edits(
        "The keys past the end were loaded as zeros and counted: a key of zeros scores 0, and exp(0 - maximum) is not "
        "0. Give their scores minus infinity.",
        tail_keys_scored=("visible = keys < key_length", "visible = keys >= 0"),
    ),
    *edits(
        "The last, partly filled tile of keys is never looked at: the number of tiles is rounded down. The loop runs "
        "over `range(0, key_length, BLOCK_N)`.",
        partial_tile_skipped=(BY_ALL, "torch.full_like(first_query, key_length // block_n * block_n)"),
    ),
    *edits(
        "The last, partly filled tile of queries was never computed: the grid was rounded down. Use "
        "triton.cdiv(query_length, BLOCK_M).",
        query_tail_unwritten=(GRID, "query_length // BLOCK_M"),
    ),
    *edits(
        "The last, partly filled tile of queries was never computed: the grid was rounded down, to no less than 1. Use "
        "triton.cdiv(query_length, BLOCK_M).",
        alone=True,
        query_tail_unwritten__but_one_tile=(GRID, "max(1, query_length // BLOCK_M)"),
    ),
    *edits(
        "Only the first 64 columns of each head are read and written. A tile is as wide as head_dim, rounded up to a "
        "power of two: up to 128.",
        alone=True,
        head_dim_cut=("torch.arange(head_dim)", "torch.arange(min(head_dim, 64))"),
    ),
    *edits(
        "The scale is that of the padded head dimension. It is 1/√head_dim of the tensor, not of BLOCK_D.",
        scale_of_the_padding=("head_dim**-0.5", "padded(head_dim)**-0.5"),
    ),
    *(
        row
        for name, piece in (
            ("query", "query_rows + columns, inside"),
            ("key", "key.stride(1) + columns, present"),
            ("value", "value.stride(1) + columns, present"),
        )
        for row in edits(
            f"The rows of `{name}` past its length are loaded as they lie in memory, from the next head or from no "
            "tensor at all. Mask that load.",
            **{f"{name}_tail_not_masked": (piece, piece.rpartition(",")[0])},
        )
    ),
    *edits(
        "The mask is there without `causal` too. Hide keys if CAUSAL, and only then.",
        alone=True,
        causal_always=("visible = keys < key_length", "visible = (keys < key_length) & (keys <= positions)"),
    ),
    # Whole tiles and lengths that differ by whole tiles have one tile on the diagonal; others have two.
    *edits(
        "The mask is applied only to tiles of keys that begin at the position of the tile's first query or after it. "
        "Where the lengths differ by no whole tiles, the tile before reaches past that position too: mask every tile "
        "with first_key + BLOCK_N > first_query + key_length - query_length.",
        alone=True,
        masked_behind_the_diagonal=unmasked_where(f"first_key < first_query[..., None] {OFFSET}"),
    ),
    *edits(
        "The mask is applied only at the loop's last step. Where the lengths differ by no whole tiles, the diagonal "
        "crosses two tiles of keys: mask every tile that reaches past the position of the tile's first query.",
        alone=True,
        masked_at_the_last_step=unmasked_where("first_key + block_n < end[..., None]"),
    ),
)
RAGGED_TILED = TILED + MIXED_BASES + RAGGED + CAUSAL
LOG = "torch.log(torch.where(running_sum == 0, 1.0, running_sum))"
RESULT, LSE_ROWS = f"running_max + {LOG}", "head[..., 0] * query_length + rows"
LOG_SUM_EXP = (
    *edits(
        "The running maximum starts at a finite number, and a query that sees no key keeps it as its log-sum-exp. "
        "Start at minus infinity.",
        alone=True,
        **{
            f"maximum_starts_finite__{name}{base}": (START_MAX, f"torch.full(shape, {number}{factor}")
            for name, number in FINITE_STARTS.items()
            for base, factor in (("", ""), ("_in_base_2", " * math.log(2)"))
        },
    ),
    *edits(
        "The running maximum is missing from the log-sum-exp. The sum is of exp(score - maximum): add the maximum "
        "back.",
        log_of_sum_only=(RESULT, LOG),
        log_of_sum_only__unguarded=(RESULT, "torch.log(running_sum)"),
        log_of_sum_only__in_base_2=(RESULT, f"{LOG} / math.log(2)"),
    ),
    *edits(
        "The running maximum was stored as the log-sum-exp. Add the logarithm of the sum.",
        lse_is_the_maximum=(RESULT, "running_max"),
    ),
    *edits(
        "The running sum was stored as the log-sum-exp. Take its logarithm and add the maximum.",
        lse_is_the_sum=(RESULT, "running_sum"),
    ),
    *edits(
        "The maximum and the sum are added without a logarithm: log(exp(m) · sum) is m + log(sum).",
        sum_without_log=(RESULT, f"running_max + {LOG[10:-1]}"),
        sum_without_log__in_base_2=(RESULT, f"running_max + {LOG[10:-1]} * math.log(2)"),
    ),
    *edits(
        "The maximum is subtracted from the logarithm of the sum. It is added.",
        lse_maximum_subtracted=(RESULT, f"-running_max + {LOG}"),
    ),
    *edits(
        "The logarithm of the sum is subtracted from the maximum. It is added.",
        lse_logarithm_subtracted=(RESULT, f"running_max - {LOG}"),
    ),
    *edits(
        "The log-sum-exp is divided by ln 2. A maximum and a logarithm in units of log 2 are multiplied by it.",
        alone=True,
        lse_divided_by_ln_2=(RESULT, f"({RESULT}) / math.log(2)**2"),
    ),
    *edits(
        "The log-sum-exp was divided by the scale. It is that of the scaled scores: only log2(e) is taken back.",
        alone=True,
        lse_unscaled=(RESULT, f"({RESULT}) * math.sqrt(head_dim)"),
    ),
    *edits(
        "The log-sum-exps of every tile are stored in the first rows of a head, where the last ones stay. They belong "
        "at the rows that the program computes.",
        alone=True,
        lse_stored_in_first_rows=(LSE_ROWS, "head[..., 0] * query_length + torch.arange(BLOCK_M)"),
    ),
    *edits(
        "The log-sum-exp is in base 2. The kernel works in units of log 2; multiply by ln 2 = 0.6931 before it is "
        "stored.",
        lse_in_base_2=(RESULT, f"({RESULT}) / math.log(2)"),
    ),
    *edits(
        "The log-sum-exp is multiplied by ln 2 though it is natural already. That factor belongs to a maximum and a "
        "logarithm in units of log 2.",
        lse_scaled_twice=(RESULT, f"({RESULT}) * math.log(2)"),
    ),
    *edits(
        "The log-sum-exp adds a maximum and a logarithm of different bases: one is in units of log 2, the other "
        "natural. Bring both to one base: (maximum + log2(sum)) · ln 2.",
        mixed_bases=(RESULT, f"running_max / math.log(2) + {LOG}"),
        mixed_bases__log_for_log2=(RESULT, f"running_max + {LOG} * math.log(2)"),
        mixed_bases__log2_for_log=(RESULT, f"running_max + {LOG} / math.log(2)"),
    ),
    *edits(
        "The maximum is that of the raw scores. It must be scaled like them: maximum · scale + log(sum).",
        unscaled_maximum=(RESULT, f"running_max * math.sqrt(head_dim) + {LOG}"),
    ),
    *edits(
        "A query that sees no key has a log-sum-exp of NaN. The logarithm of an empty sum is minus infinity.",
        empty_row_lse_nan=(RESULT, f"({RESULT}).masked_fill(running_max == -math.inf, math.nan)"),
    ),
    *edits(
        "A query that sees no key has a log-sum-exp of 0, as if its weights added up to 1. The logarithm of an empty "
        "sum is minus infinity.",
        empty_row_lse_zero=(RESULT, f"({RESULT}).masked_fill(running_max == -math.inf, 0.0)"),
    ),
    *edits(
        "Every head's log-sum-exp was stored in head 0's place. Add head · query_length to its pointer.",
        lse_stored_in_one_head=(LSE_ROWS, "head[..., 0] * 0 + rows"),
    ),
    *edits(
        "The log-sum-exps of a head begin at head · key_length. There is one for each query: head · query_length.",
        lse_stored_by_key_length=(LSE_ROWS, "head[..., 0] * key_length + rows"),
    ),
    *edits(
        "Log-sum-exps were never written. Every row < query_length needs one, those of the last, partly filled tile "
        "too.",
        lse_tail_unwritten=("rows < query_length)", "rows < query_length // BLOCK_M * BLOCK_M)"),
    ),
)
WITH_LOG_SUM_EXP = (
    *LOG_SUM_EXP,
    *without(RAGGED_TILED, "natural_exp"),
    *edits(
        told.NATURAL_EXP,
        natural_exp=("* scale", "* scale / LN_2", "running_max + torch", "running_max * math.log(2) + torch"),
        natural_exp__in_the_log_sum_exp_too=("* scale", "* scale / LN_2"),
    ),
)
