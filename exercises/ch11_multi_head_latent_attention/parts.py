"""Absorbed attention to a cache of latents: the truth, its inputs, and a kernel's program with its slips.

Layouts: query [batch, heads, width], absorbed; cache [batch, capacity, width], a row being value_dim numbers of latent
and a rotary key; lengths [batch] of int32. What 11.3 and 11.4 share is here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from course_lib.checker import Case, Mistake, edits
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from course_lib.checker.specification.requirements import Requirement
from exercises.topics import pointers
from exercises.topics.attention import close_to, in_a_kernel, normalised_in_a_kernel, rounded_in_a_kernel
from exercises.topics.attention_sentences import (
    ACCUMULATOR_NOT_RESCALED,
    FIRST_TILE_ONLY,
    LOG2E_MISSING,
    MAXIMUM_NOT_UPDATED,
    NATURAL_EXP,
    NO_RUNNING_MAX,
    NOTHING_RESCALED,
    PER_TILE,
    STARTS_AT_ZERO,
    SUM_NOT_RESCALED,
)
from exercises.topics.decode import AS_GOOD
from exercises.topics.decode_inputs import SCORES, UNUSED, tokens_first
from exercises.topics.decode_inputs import lengths as length_levels
from exercises.topics.evidence import (
    COMPUTED_IN_16_BITS,
    FAR_END,
    ROUNDED_TO_16_BITS,
    right_to_three_digits,
    stored_in_16_bits,
)

INF, LOG2_E = math.inf, math.log2(math.e)
BLOCK = 32  # tokens of a tile, in the launchers that are given


def attended(attend: Callable, query, cache, lengths, scale, value_dim):
    """`attend(query [heads, 1, width], keys, values [heads, length, …])` of each sequence; zeros without a token."""
    output = torch.zeros(*query.shape[:2], value_dim, dtype=query.dtype)
    for sequence, length in enumerate(lengths.tolist()):
        if length:
            keys = cache[sequence, :length].expand(query.shape[1], -1, -1)
            output[sequence] = attend(query[sequence][:, None], keys, keys[..., :value_dim], scale)[:, 0]
    return output


def latent_attention(query, cache, lengths, scale, value_dim):
    """softmax(scale · query · rowᵀ) times the latents, [batch, heads, value_dim]; the truth in float64."""
    return attended(in_a_kernel_with_scale, query, cache, lengths, scale, value_dim)


def in_a_kernel_with_scale(query, keys, values, scale):
    return in_a_kernel(query, keys, values, scale=scale)


def _scaled_first(function: Callable, of_kernels: bool) -> Callable:
    """A function that scales by 1/√width itself, of queries in float32 that make up for it.

    of_kernels: whether it knows that a kernel rounds the weights to the values' dtype; others get all in float32.
    """

    def attend(query, keys, values, scale):
        accurate = torch.promote_types(query.dtype, torch.float32)
        keys, values = (keys, values) if of_kernels else (keys.to(accurate), values.to(accurate))
        made = function(query.to(accurate) * (scale * math.sqrt(query.shape[-1])), keys, values)
        return (made[0] if isinstance(made, tuple) else made).to(query.dtype)

    return lambda *args: attended(attend, *args)


PLAIN = (
    *(_scaled_first(function, True) for function in (normalised_in_a_kernel, rounded_in_a_kernel)),
    *(_scaled_first(function, False) for function in AS_GOOD),
)


def drawn(draw, heads, value_dim, rope_dim, lengths, capacity, *, dtype=torch.float32, score=1.0, unused=None):
    """Query, cache, lengths, scale and value_dim. The scale is that of heads a quarter of the latent long.

    score: standard deviation of the scaled scores. unused: what slots without a token hold.
    """
    width, batch = value_dim + rope_dim, len(lengths)
    scale = (value_dim / 4 + rope_dim) ** -0.5
    query = draw.normal(batch, heads, width, dtype=dtype, scale=score / (scale * math.sqrt(width)))
    cache = draw.normal(batch, capacity, width, dtype=dtype)
    if unused is not None:
        for sequence, length in enumerate(lengths):
            cache[sequence, length:] = unused
    return query, cache, torch.tensor(lengths, dtype=torch.int32), scale, value_dim


def made(
    draw, *, heads, value_dim, rope_dim, lengths, room, dtype, scores, unused, query_layout, cache_layout, **options
):
    """The same for a contract, with the options behind."""
    width, capacity = value_dim + rope_dim, max(1, max(lengths) + room)
    scale = (value_dim / 4 + rope_dim) ** -0.5
    query, cache, _ = scores(draw, len(lengths), heads, capacity, width)
    query, cache = (query / (scale * math.sqrt(width))).to(dtype), cache.to(dtype)
    if unused is not None:
        for sequence, length in enumerate(lengths):
            cache[sequence, length:] = unused
    counts = torch.tensor(lengths, dtype=torch.int32)
    return query_layout(draw, query), cache_layout(draw, cache), counts, scale, value_dim, *options.values()


def fits(*, heads, value_dim, lengths, dtype, unused, cache_layout, query_layout, splits=1, **others) -> bool:
    """Whether the interpreter is done with it soon, and NaN stands in no slot that another sequence uses."""
    shared = cache_layout is CACHE_LAYOUTS[-1].value
    roomy = value_dim <= 128 or dtype == torch.float16
    return (
        roomy
        and heads * sum(lengths) * splits <= 4000
        and (value_dim < 128 or max(lengths) < 70)
        and not (unused and shared)
    )


CACHE_LAYOUTS = unit_last("cache")
CHOICES = {
    "heads": (1, 3, 16, 17, 65),
    "value_dim": (16, 32, 64, 128, 256),
    "rope_dim": (16, 32, 64),
    "lengths": length_levels((1,), (0,), (31, 33), (3, 0, 67), (64, 1), (130,)),
    "room": (0, 1, 29),
    "dtype": (torch.float32, torch.float16),
    "scores": tuple(level for level in SCORES if "values" not in level.words),
    "unused": UNUSED,
    "query_layout": unit_last("query"),
    "cache_layout": CACHE_LAYOUTS,
}
SAYS = {
    "heads": "rom 1 head on, any number",
    "rope_dim": "rope_dim 16, 32",
    "lengths": "0",
    "unused": "lots behind them hold",
    "dtype": "128 in float32",
    "cache_layout": "but the last, which is 1",
}


def far_cases(draw, *options):
    """Caches that reach beyond 2³¹ elements, from sequence to sequence and from token to token."""
    query, cache, lengths, *rest = drawn(draw, 2, 16, 16, [5, 9, 3], 12)
    cases = beyond_32_bits(draw, "sequences", [cache], lengths, *rest, *options, before=(query,))
    query, cache, lengths, *rest = drawn(draw, 2, 16, 16, [5], 6)
    return cases + beyond_32_bits(draw, "tokens", [cache], lengths, *rest, *options, before=(query,), dimension=1)


def far_ends(draw, *options):
    """Hundreds of sequences, of which the last two alone have tokens, and hundreds of heads."""
    sequences = drawn(draw, 1, 16, 16, [0] * 298 + [5, 2], 8)
    heads = drawn(draw, 300, 16, 16, [5], 8)
    return [
        Case(f"300 sequences, {FAR_END}", (*sequences, *options)),
        Case(f"300 heads, {FAR_END}", (*heads, *options)),
    ]


def deep(draw):
    """Products that float16 cannot hold, and by a negative scale scores of -16,384, for every third token -32,768."""
    query, cache, lengths, _, value_dim = drawn(draw, 4, 16, 16, [40], 64, dtype=torch.float16)
    query.zero_()[..., -1] = 512.0
    cache[..., -1] = 512.0 * (1.0 + (torch.arange(64) % 3 == 2))
    return query, cache, lengths, -1 / 16, value_dim


def apart(draw, query, cache, *rest):
    """The same arguments with strides of their own."""
    return tokens_first(draw, query[:, None])[:, 0], CACHE_LAYOUTS[1].value(draw, cache), *rest


def noting_tiles(functions, query, cache, lengths, scale, value_dim, splits=None):
    """The call. In the interpreter it notes the tiles that reach `tl.dot`, and the largest load of a second kernel.

    A driver is sent to the worker by its source alone, so it stands by itself.
    """
    decode = functions["latent_decode" if splits is None else "split_latent_decode"]
    arguments = (query, cache, lengths, scale, value_dim, *([] if splits is None else [splits]))
    if functions.listen is None:
        return decode(*arguments)
    rows, widened, loads = [], [], []

    class Listener:
        launches = 0

        def begun(self, kernel, arguments):
            self.launches += 1

        def launched(self, kernel, grid):
            pass

        def accessed(self, kind, program, item_bytes, reached, file, line):
            if kind == "load" and self.launches == 2:
                loads.append(sum(len(elements) for _, elements, _ in reached))

        def multiplied(self, left, right, bits):
            rows.append(min(left[-2], right[-1]))
            widened.append(bits[0] > 8 * cache.element_size())

    functions.listen(Listener())
    try:
        return decode(*arguments)
    finally:
        functions.listen(None)
        functions.noted |= {"widened": sum(widened), "loaded by the merge": max(loads, default=0)}
        functions.noted |= {"rows": min(rows)} if rows else {}


@dataclass(frozen=True)
class TilesAsLoaded(Requirement):
    """Tiles of 16 bits are multiplied as they are, in cases that `noting_tiles` runs."""

    id: str = "product_in_float32"

    def complaint(self, case, seen):
        if not seen.noted.get("widened"):
            return None
        return (
            "Tiles of float16 were converted to float32 before `tl.dot`. Tensor cores multiply them as they are, and "
            "add up in float32 anyway. In float32 an H100 takes thousands of single multiply-adds for a product, and "
            "tiles of 64 rows and 512 + 64 columns may not even fit into its shared memory. Convert none, and scale "
            "the scores, not the queries."
        )


@dataclass(frozen=True)
class RowsFrom16(Requirement):
    """No tile of query heads has fewer than 16 rows, in cases that `noting_tiles` runs."""

    id: str = "fewer_than_16_rows"

    def complaint(self, case, seen):
        rows = seen.noted.get("rows", 16)
        if rows >= 16:
            return None
        return (
            f"A tile that `tl.dot` multiplied has a side of only {rows}. Tensor cores multiply 16 rows at a time, and "
            "`rows` is a power of two from 16 on: max(16, ...). Mask the heads that do not exist."
        )


def row_bytes(query, cache, lengths):
    """Bytes of the rows in use, loaded once for up to 64 heads."""
    return int(lengths.sum()) * cache.shape[2] * cache.element_size() * -(-query.shape[1] // 64)


def read(tensor, offsets, mask=None):
    """What `tl.load(pointer + offsets, mask, other=0.0)` gives, in float32."""
    return pointers.load(tensor, offsets, mask).float()


def over_rows(query, cache, sequence, first, last, scale, value_dim):
    """(maximum, sum, accumulator) of all heads of a sequence over its rows first to last - 1, tile by tile."""
    _, heads, width = query.shape
    latent_columns = torch.arange(value_dim)
    rope_columns = value_dim + torch.arange(width - value_dim)
    query_rows = sequence * query.stride(0) + torch.arange(heads)[:, None] * query.stride(1)  # [heads, 1]
    latent_query = read(query, query_rows + latent_columns)  # [heads, value_dim]
    rope_query = read(query, query_rows + rope_columns)  # [heads, rope_dim]
    running_max = torch.full((heads, 1), -INF)
    running_sum = torch.zeros(heads, 1)
    accumulator = torch.zeros(heads, value_dim)
    for start in range(first, last, BLOCK):
        tokens = start + torch.arange(BLOCK)
        present = tokens < last
        rows = sequence * cache.stride(0) + tokens[:, None] * cache.stride(1)  # [BLOCK, 1]
        loaded = present[:, None]
        latents = read(cache, rows + latent_columns, loaded)  # [BLOCK, value_dim]
        rope_keys = read(cache, rows + rope_columns, loaded)  # [BLOCK, rope_dim]
        scores = (latent_query @ latents.T + rope_query @ rope_keys.T) * scale
        scores = torch.where(present, scores, -INF)  # [heads, BLOCK]
        new_max = torch.maximum(running_max, scores.amax(1, keepdim=True))
        weights = torch.exp(scores - new_max)
        rescale = torch.exp(running_max - new_max)
        running_sum = running_sum * rescale + weights.sum(1, keepdim=True)
        accumulator = accumulator * rescale + weights.to(cache.dtype).float() @ latents
        running_max = new_max
    return running_max, running_sum, accumulator


OF_CACHE = "sequence * cache.stride(0)"
BOTH_SCORES = "(latent_query @ latents.T + rope_query @ rope_keys.T) * scale"
PRODUCT = "weights.to(cache.dtype).float() @ latents"
SHIFTED = "weights.to(cache.dtype).float() @ read(cache, rows + (width - value_dim) + latent_columns, loaded)"
TOO_FEW = "The last token is left out. Tokens 0 to length - 1 count: the condition is tokens < length."
TOO_MANY = "The slot after the last token counts too. Tokens are numbered from 0, so the condition is tokens < length."
FORGOTTEN = (
    "The rotary part is missing from the scores. Add the product of the queries' last columns with the rotary keys."
)
APART = (
    "Only one of the two parts of the scores is scaled. Add the product of the latent parts and that of the rotary "
    "parts first, and scale their sum."
)
MADE_OF_WIDTH = "The scale is computed from the width of a row or of the latent. Use the argument `scale` as it is."
ROPE_PLACE = "The rotary part is read from the beginning of a row. It comes after the latent, from column value_dim on."
VALUE_PLACE = "The values are taken from the last columns of a row. Use its first value_dim numbers, the latent."
PAD = "Rows are assumed to be `width` numbers apart. Use the tensor's own stride from one row to the next."
OF_SEQUENCE = "Every sequence reads the first sequence's cache. Add sequence · the cache's batch stride to the pointer."
OF_QUERY = "Every sequence uses the first sequence's queries. Add sequence · the query's batch stride to the pointer."
SLOTS = "Slots without a token reached the result: 0 · NaN is NaN. Mask the loads with tokens < length, other=0.0."
UNMASKED = "Slots without a token keep a score (0 if the load was masked). Set it to minus infinity."
ONE_SKIPPED = "The last tile is skipped, at least when it is not full. Loop up to the length, and mask."
RESCALED_LATE = (
    "The accumulator is rescaled after the tile's product was added, which is measured from the new maximum already. "
    "Rescale first, then add."
)
ONE_MAXIMUM = "One maximum is used for all heads of a tile. Each row has its own: tl.max(scores, axis=1)."
ROWS = (
    *edits(FORGOTTEN, rope_forgotten=(" + rope_query @ rope_keys.T", "")),
    *edits("The scores are those of the rotary parts alone. Add the product of the queries' first columns with the "
        "latents.", latent_part_forgotten=("latent_query @ latents.T + rope_query", "rope_query")),
    *edits("All heads use the first head's query, or its latent or rotary part. Each row of the tile is a head: add "
        "members[:, None] · the query's head stride.", alone=True,
        first_head_for_all=("torch.arange(heads)[:, None] * query.stride(1)", "torch.zeros(heads, 1).long()"),
        first_head_for_all__latent=("query_rows + latent_columns", "sequence * query.stride(0) + latent_columns"),
        first_head_for_all__rope=("query_rows + rope_columns", "sequence * query.stride(0) + rope_columns")),
    *edits("The heads of later blocks use the first block's queries. The heads of a program begin at program_id(0) · "
        "ROWS.", alone=True,
        first_block_for_all=("torch.arange(heads)[:, None] * query", "torch.arange(heads)[:, None] % 64 * query"),
        first_block_for_all__rope=("query_rows + rope_columns",
        "query_rows - torch.arange(heads)[:, None] // 64 * 64 * query.stride(1) + rope_columns")),
    *edits(APART,
        rope_scaled_apart=(BOTH_SCORES, "latent_query @ latents.T * scale + rope_query @ rope_keys.T / LOG2_E"),
        rope_scaled_apart__natural=(BOTH_SCORES, "latent_query @ latents.T * scale + rope_query @ rope_keys.T"),
        rope_scaled_apart__latent=(BOTH_SCORES,
        "latent_query @ latents.T / LOG2_E + rope_query @ rope_keys.T * scale")),
    *edits(LOG2E_MISSING, log2e_missing=(BOTH_SCORES, f"{BOTH_SCORES} / LOG2_E")),
    *edits("The scores are not scaled. Multiply them by the scale.",
        scale_missing=(BOTH_SCORES, BOTH_SCORES[:-5] + "1"),
        scale_missing__in_base_2=(BOTH_SCORES, BOTH_SCORES[:-5] + "(1 / LOG2_E)")),
    *edits("The scale is applied twice. Multiply the sum of both parts by it, once.",
        scale_twice=(BOTH_SCORES, f"{BOTH_SCORES} * scale"),
        scale_twice__in_base_2=(BOTH_SCORES, f"{BOTH_SCORES} * scale * LOG2_E")),
    *edits(MADE_OF_WIDTH, scale_by_the_width=(BOTH_SCORES, BOTH_SCORES[:-5] + "width**-0.5"),
        scale_by_the_width__latent=(BOTH_SCORES, BOTH_SCORES[:-5] + "value_dim**-0.5")),
    *edits(NATURAL_EXP, natural_exp=(BOTH_SCORES, f"{BOTH_SCORES} * LOG2_E")),
    *edits(ROPE_PLACE, rope_from_the_first_columns=("value_dim + torch.arange(width - value_dim)",
        "torch.arange(width - value_dim)"),
        rope_from_the_first_columns__keys=("rows + rope_columns", "rows + rope_columns - value_dim"),
        rope_from_the_first_columns__query=("query_rows + rope_columns", "query_rows + rope_columns - value_dim")),
    *edits(VALUE_PLACE, value_from_the_last_columns=(PRODUCT, SHIFTED)),
    *edits(PAD, row_stride_ignored=("* cache.stride(1)", "* width"),
        row_stride_ignored__query=("* query.stride(1)", "* width")),
    *edits(OF_SEQUENCE, first_cache_for_all=("sequence * cache.stride(0) + ", "")),
    *edits(OF_SEQUENCE, alone=True,
        first_cache_for_all__latents=("rows + latent_columns, loaded", f"rows - {OF_CACHE} + latent_columns, loaded"),
        first_cache_for_all__rotary_keys=("rows + rope_columns, loaded", f"rows - {OF_CACHE} + rope_columns, loaded")),
    *edits(OF_QUERY, first_queries_for_all=("sequence * query.stride(0) + ", "")),
    *edits(OF_QUERY, alone=True,
        first_queries_for_all__latent=("query_rows + latent_columns",
        "query_rows - sequence * query.stride(0) + latent_columns"),
        first_queries_for_all__rope=("query_rows + rope_columns",
        "query_rows - sequence * query.stride(0) + rope_columns")),
    *edits(SLOTS, slots_count=("loaded = present[:, None]", "loaded = tokens[:, None] < cache.shape[1]")),
    *edits(UNMASKED, tail_not_masked=("torch.where(present, scores, -INF)", "scores")),
    *edits("Absent tokens have a finite score, which is no mask for scores that are lower still. Use minus infinity.",
        finite_mask=("torch.where(present, scores, -INF)", "torch.where(present, scores, -1e3)"),
        finite_mask__small=("torch.where(present, scores, -INF)", "torch.where(present, scores, -1e4)")),
    *edits(FIRST_TILE_ONLY, first_tile_only=("(first, last, BLOCK)", "(first, min(last, first + BLOCK), BLOCK)")),
    *edits(ONE_SKIPPED, partial_tile_skipped=("range(first, last, BLOCK)", "range(first, last - BLOCK + 1, BLOCK)"),
        partial_tile_skipped__also_a_full_one=("range(first, last, BLOCK)", "range(first, last - BLOCK, BLOCK)")),
    *edits(RESCALED_LATE,
        accumulator_rescaled_late=(f"accumulator * rescale + {PRODUCT}", f"(accumulator + {PRODUCT}) * rescale")),
    *edits(ONE_MAXIMUM, one_maximum_for_all=("scores.amax(1, keepdim=True)", "scores.amax()"),
        one_maximum_for_all__of_a_tile=("scores.amax(1, keepdim=True)", "torch.cat([part.amax().clamp(min=-INF "
        "if len(part) in (16, 32, 64) else 0.0).expand(len(part), 1) for part in scores.split(64)])")),
    *edits(NOTHING_RESCALED, nothing_rescaled=("torch.exp(running_max - new_max)", "1.0")),
    *edits(SUM_NOT_RESCALED, sum_not_rescaled=("running_sum * rescale", "running_sum")),
    *edits(ACCUMULATOR_NOT_RESCALED, accumulator_not_rescaled=("accumulator * rescale", "accumulator")),
    *edits(MAXIMUM_NOT_UPDATED, maximum_not_updated=("running_max = new_max", "")),
    *edits(PER_TILE, maximum_of_the_tile=("torch.maximum(running_max, scores.amax(1, keepdim=True))",
        "scores.amax(1, keepdim=True)", "torch.exp(running_max - new_max)", "1.0")),
    *edits(NO_RUNNING_MAX,
        no_maximum=("torch.exp(scores - new_max)", "torch.exp(scores)", "torch.exp(running_max - new_max)", "1.0")),
    *edits(STARTS_AT_ZERO, maximum_starts_at_zero=("torch.full((heads, 1), -INF)", "torch.zeros(heads, 1)")),
)  # fmt: skip


def whole_row_as_value(case, seen, got) -> bool:
    """A product was refused, and its operands are as wide as a value and as a row filled up to a power of two."""
    if len(case.args) < 5:  # of 11.4's function that merges, and multiplies nothing
        return False
    text = seen.error.text if seen.error and "index 0" not in seen.error.text else ""  # the columns differ
    value_dim, width = case.args[4], case.args[0].shape[2]
    sizes = {int(size) for size in re.findall(r"\d+", text)}
    return value_dim in sizes and not sizes.isdisjoint((width, 1 << (width - 1).bit_length(), 2 * value_dim))


V_IS_TRANS_K = Mistake(
    "value_tile_is_the_whole_row",
    "The shapes of two tiles do not fit. Do you use the whole tile of keys as values? It also holds the rotary key, "
    "which is not part of a value: keys have value_dim + rope_dim numbers, values only value_dim. Load a row in two "
    "tiles.",
    when=whole_row_as_value,
)


def in_16_bits(oracle: Callable) -> tuple[Mistake, ...]:
    """Numbers rounded to 16 bits at the end or on the way, where an answer should be as good as `oracle`."""
    return (
        Mistake("rounded_to_16_bits", ROUNDED_TO_16_BITS, when=stored_in_16_bits(oracle), every=True),
        Mistake("computed_in_16_bits", COMPUTED_IN_16_BITS, when=right_to_three_digits(oracle), every=True),
    )


def right_in_float64(case, got, oracle=latent_attention) -> bool:
    """Whether the numbers are right, to what sixteen bits round off."""
    exact = [arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in case.args]
    return close_to(got, oracle(*exact))
