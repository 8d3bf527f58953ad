"""Exercise 3.4: attention of one query, in one pass over its keys."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, Forbids, Mistake
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.edits import edits, model_of, only, without
from exercises.ch03_online_softmax.plain import (
    KEPT_COPIES,
    LOG2_E,
    SHORTCUTS,
    at_least_float32,
    copies_kept,
    left_in_buffer,
    pass_refused,
    read_in_tiles,
    rounded_to_half,
    running_log_sum_exp,
    softmax_of,
)
from exercises.topics.rising import (
    FINITE_FOR_MINUS_INFINITY,
    MAXIMUM_OF_THE_FIRST_TILE,
    RISE,
    below_a_stand_in,
    stays_behind,
)
from exercises.topics.running import (
    ADDED,
    FROM,
    GUARDED_OWN,
    MAXIMUM,
    NARROW,
    RESCALE,
    RUNNING,
    START_MAX,
    SUM,
    only_from_the_second,
    start,
    step,
)
from exercises.topics.softmax_slips import HALF_PRECISION, KEPT_THE_TILES, LAST_TILE_ONLY, TILE_NOT_RESCALED


def _scores(query, keys, scale):
    return (at_least_float32(keys) @ at_least_float32(query)) * scale


def attention_oracle(query, keys, values, scale, tile):
    return softmax_of(_scores(query, keys, scale)) @ at_least_float32(values)


def _streamed(query, keys, values, scale, tile):
    """Attention in one pass, the products added up element by element."""
    keys, values, query = map(at_least_float32, (keys, values, query))
    maximum, total = torch.tensor(-math.inf, dtype=keys.dtype), torch.zeros((), dtype=keys.dtype)
    accumulator = torch.zeros(values.shape[1], dtype=values.dtype)
    for part, value in zip(keys.split(tile), values.split(tile)):
        scores = (part * (query * scale)).sum(dim=1)
        grown = torch.maximum(maximum, scores.max())
        rescale, weights = torch.exp(maximum - grown), torch.exp(scores - grown)
        total, accumulator = total * rescale + weights.sum(), accumulator * rescale + weights @ value
        maximum = grown
    return accumulator / total


def _by_log_sum_exp(base_2):
    """The state as the average and one log-sum-exp, as the chapter merges parts."""

    def attend(query, keys, values, scale, tile):
        scores = _scores(query, keys, scale)
        log_sum, unit = running_log_sum_exp(scores[None], tile, base_2=base_2)
        weights = torch.exp2(scores * unit - log_sum) if base_2 else torch.exp(scores - log_sum)
        return weights @ at_least_float32(values)

    return attend


def _averages_merged(query, keys, values, scale, tile):
    """The tiles' averages, each weighted by its share: average + share · (next - average), tile after tile.

    A share hangs on the difference of two log-sum-exps, each off by a rounding, here up and down in turn. And one tile
    may take all the weight: what the averages before it were is then gone but for a rounding of the values' size.
    """
    values = at_least_float32(values)
    rounding = torch.finfo(values.dtype).eps
    parts = _scores(query, keys, scale).split(tile)
    averages = torch.stack([softmax_of(part) @ value for part, value in zip(parts, values.split(tile))])
    log_sums = torch.stack([torch.logsumexp(part, dim=0) for part in parts])
    up_and_down = 1 - 2 * (torch.arange(len(parts)) % 2)
    return softmax_of(log_sums * (1 + rounding * up_and_down)) @ averages + rounding * values.abs().amax(dim=0)


def _keys_for(draw, query, count, scale, spread, order=None, level=0.0, dtype=torch.float32):
    """Keys whose scores with the query, already scaled, are spread normally around `level`, in the order asked for."""
    keys = draw.normal(count, len(query))
    wanted = draw.normal(count, scale=spread, shift=level)
    if order:
        wanted = wanted.sort(descending=order == "descending")[0]
    have = (keys @ query) * scale
    keys += ((wanted - have) / (scale * query.square().sum()))[:, None] * query
    return keys.to(dtype)


def attention_cases(draw):
    def case(name, count, tile, dim=8, value_dim=8, spread=1.0, order=None, dtype=torch.float32, scale=None):
        query, scale = draw.normal(dim), dim**-0.5 if scale is None else scale
        keys = _keys_for(draw, query, count, scale, spread, order, 0.0, dtype)
        values = draw.normal(count, value_dim, dtype=dtype)
        return Case(name, (query.to(dtype), keys, values, scale, tile), driver=read_in_tiles)

    half = torch.float16
    query = draw.normal(8)
    below = (query, _keys_for(draw, query, 40, 8**-0.5, 3.0, level=-200.0), draw.normal(40, 8), 8**-0.5, 16)
    one_above = below[1].clone()
    one_above[20] += 200.0 * 8**0.5 / query.square().sum() * query
    alike = Draw(40)  # the same at every check
    climbing = _keys_for(alike, query, 40, 8**-0.5, 1.0)
    climbing[16:] += RISE * 8**0.5 / query.square().sum() * query
    lowest = torch.full((20, 8), -2e10)  # all scores below -8e20, further down than people put for minus infinity
    lowest[3] /= 2
    scaled = (
        draw.normal(8, scale=100.0, shift=300.0, dtype=half),
        draw.normal(20, 8, scale=2e-5, dtype=half),
        draw.normal(20, 8, dtype=half),
        300.0,
        8,
    )
    return [
        case("16 keys in tiles of 4", 16, 4),
        case("40 keys of dimension 16, scale 0.7", 40, 16, dim=16, scale=0.7),
        case("67 keys, a prime, in tiles of 16; 5 value columns", 67, 16, dim=16, value_dim=5),
        case("1024 keys in 32 tiles, none of which is kept", 1024, 32),
        case("ascending scores: the maximum grows at every tile", 96, 16, spread=3.0, order="ascending"),
        # A maximum that is not carried on drops by more than exp can hold.
        case("descending scores, from about 150 to -150", 96, 16, spread=60.0, order="descending"),
        Case(
            "40 keys, scores 160 higher from the second tile on",
            (query, climbing, alike.normal(40, 8), 8**-0.5, 16),
            driver=read_in_tiles,
        ),
        Case(
            "20 keys, one score of -8e20 and the others of -1.6e21",
            (torch.full((8,), 1e10), lowest, alike.normal(20, 8), 1.0, 8),
            driver=read_in_tiles,
        ),
        Case("40 keys, scores near -200", below, driver=read_in_tiles),
        # A maximum that starts at 0 is right here, and one of magnitudes is not.
        Case(
            "40 keys, one score near 0 and the others near -200",
            (query, one_above, *below[2:]),
            driver=read_in_tiles,
        ),
        # exp of a difference that a negative scale has turned round.
        case("40 keys, scale -0.5, scores of ±200", 40, 16, spread=80.0, scale=-0.5),
        Case(
            "float16, query and scale near 300: their product is more than float16 holds",
            scaled,
            driver=read_in_tiles,
        ),
        case("float16, 200 keys of dimension 64", 200, 64, dim=64, value_dim=64, spread=2.0, dtype=torch.float16),
    ]


def drawn(draw, *, keys, dim, value_dim, tile, dtype, scale, scores):
    query = draw.normal(dim) + 2.0 * (torch.arange(dim) == 0)
    if scale:
        key = _keys_for(draw, query, keys, scale, **scores)
    else:
        key = draw.normal(keys, dim, scale=10.0)
    return query.to(dtype), key.to(dtype), draw.normal(keys, value_dim, dtype=dtype), scale, tile


CONTRACT = Contract(
    drawn,
    choices={
        "keys": (1, 15, 16, 17, 101),
        "dim": (1, 5, 16, 64),
        "value_dim": (1, 7, 16),
        "tile": (1, 8, 16, 128),
        "dtype": (torch.float32, torch.float16),
        "scale": tuple(Level(scale, f"scale {scale}") for scale in (0.125, 1.0, 3.0, 0.0, -0.5, -2.0)),
        "scores": (
            Level({"spread": 1.0}, ""),
            Level({"spread": 80.0}, "scores of ±200"),
            Level({"spread": 1.0, "level": 200.0}, "scores near 200"),
            Level({"spread": 1.0, "level": -200.0}, "scores near -200"),
            Level({"spread": 3.0, "order": "ascending"}, "scores that rise"),
            Level({"spread": 60.0, "order": "descending"}, "scores that fall from 150 to -150"),
            Level({"spread": 0.0}, "equal scores"),
        ),
    },
    says={"dim": "[dim], float32 or float16", "value_dim": "[width, value_dim]", "scale": "any number, negative or 0"},
    valid=lambda keys, tile, dtype, scores, **_: (
        keys // tile <= 20 and (dtype == torch.float32 or scores["spread"] <= 3.0)
    ),
    driver=read_in_tiles,
    most=10,
)


def streaming_attention(query, keys, values, scale, tile):
    running_max, running_sum = start(())
    accumulator = torch.zeros(values.shape[1])
    for key_tile, value_tile in zip(keys.split(tile), values.split(tile)):
        products = key_tile.float() @ query.float()
        scores = products * scale
        running_max, running_sum, weights, rescale = step(scores, running_max, running_sum, keys.dtype)
        added = weights.float() @ value_tile.float()
        accumulator = accumulator * rescale + added
    return accumulator / running_sum


BEFORE_THE_SCALE = (
    "The maximum is that of the products before the scale. A negative scale reverses their order, and the largest "
    "score is then the smallest product: exp overflows. Scale first, then take the maximum."
)
DIVIDED_EACH_TIME = (
    "The accumulator was divided by the running sum at every tile, so the next tile's part was added to an "
    "average. Divide once, after the loop."
)
NARROW_PRODUCTS = (
    "The products of keys and query are computed in float16, and the scores have its precision. Convert both to "
    "float32 first."
)
RESULT_IN_16_BITS = (
    "The result is float16, and float32 is asked for: it is cast at the end, or was kept in the query's dtype from the "
    "start. Keep maximum, sum and accumulator in float32, and return the quotient as it is."
)
STEP = "running_max, running_sum, weights, rescale = step(scores, running_max, running_sum, keys.dtype)"
ACCUMULATED, RESULT = "accumulator * rescale + added", "accumulator / running_sum"


def _by_products(rescale, weights):
    """The step written out, with the maximum of the products."""
    return (
        "old_max, running_max = running_max, torch.maximum(running_max, products.max())\n"
        f"rescale, weights = {rescale}, {weights}\n"
        "running_sum = running_sum * rescale + weights.sum()"
    )


OF_PRODUCTS = ("torch.exp(scale * (old_max - running_max))", "torch.exp(scale * (products - running_max))")
NEITHER_RESCALED = (SUM, "running_sum + weights.sum(-1)", ACCUMULATED, "accumulator + added")
CHANGES = (
    *edits(
        "The weights are multiplied with the keys. The second product takes `value_tile`.",
        keys_used_as_values=(
            "value_tile.float()",
            "(key_tile if keys.shape == values.shape else value_tile).float()",
        ),
    ),
    *edits(
        "The query is multiplied with the values. The first product takes `key_tile`.",
        values_used_as_keys=("key_tile.float()", "(value_tile if keys.shape == values.shape else key_tile).float()"),
    ),
    *edits("The scores were not multiplied by `scale`.", scale_missing=("products * scale", "products")),
    *edits(
        "The scale was applied twice: once to the query (or the keys) and once to the scores.",
        scale_twice=("products * scale", "products * (scale * scale)"),
    ),
    *edits(
        "The scores were multiplied by 1/√dim, whatever `scale` is. Use the argument: it may be any number.",
        scale_ignored=("products * scale", "products * len(query) ** -0.5"),
    ),
    *edits(
        "The scores were multiplied by `scale` and by 1/√dim. `scale` alone is asked for.",
        scale_and_root=("products * scale", "products * (scale * len(query) ** -0.5)"),
    ),
    *edits(
        "The scores were multiplied by log2(e), and the exponentials are powers of e. That factor belongs to powers of "
        "2: take exp2 in weights and rescaling, or leave it out.",
        natural_exp=("products * scale", "products * (scale / math.log(2))"),
    ),
    *edits(
        "The scores were divided by `scale`. Multiply them by it.",
        scale_inverted=("products * scale", "products * (1 / scale if scale else torch.inf)"),
    ),
    *edits(
        "The scale was used without its sign. It may be negative.",
        scale_without_its_sign=("products * scale", "products * abs(scale)"),
    ),
    *without(RUNNING, "sum_not_rescaled", "last_tile_only", "tile_not_rescaled__nor_the_sum"),
    *edits(FINITE_FOR_MINUS_INFINITY, finite_for_minus_infinity=(START_MAX, "torch.full(shape, -1e6")),
    *edits(LAST_TILE_ONLY, last_tile_only=(MAXIMUM, "tile.amax(-1)", SUM, ADDED, ACCUMULATED, "added")),
    *edits(
        TILE_NOT_RESCALED,
        tile_not_rescaled__nor_the_sum=(*NEITHER_RESCALED, FROM, f"tile - {GUARDED_OWN}[..., None]"),
    ),
    *edits(
        BEFORE_THE_SCALE,
        maximum_before_the_scale=(STEP, _by_products(*OF_PRODUCTS)),
        maximum_before_the_scale__from_the_second=(
            STEP,
            _by_products(f"torch.where(old_max == -torch.inf, 1.0, {OF_PRODUCTS[0]})", OF_PRODUCTS[1]),
        ),
        maximum_before_the_scale__in_the_weights_alone=(
            STEP,
            _by_products("torch.exp(old_max - running_max)", "torch.exp(scores - running_max)"),
        ),
        # In the step itself, so that its other slips go with it; its last argument brings the tile's maximum along.
        maximum_before_the_scale__then_scaled=(
            *("running_sum, keys.dtype", "running_sum, products.max() * scale"),
            *(MAXIMUM, "torch.maximum(running_max, narrow)"),
        ),
    ),
    *edits(
        "Neither the sum nor the accumulator was rescaled as the maximum grew. Multiply both by exp(old - new) at "
        "each tile. If you do, look at the order: once running_max has been overwritten, that factor is 1.",
        nothing_rescaled=NEITHER_RESCALED,
    ),
    *edits(
        "This is what you get when the accumulator is not rescaled as the running maximum grows: its terms are "
        "still relative to older maxima. Multiply it by the same exp(old - new) as the running sum.",
        accumulator_not_rescaled=(ACCUMULATED, "accumulator + added"),
    ),
    *only(RUNNING, "sum_not_rescaled"),
    *edits(
        "The accumulator is rescaled after the tile's part was added. That part is measured from the new maximum "
        "already: rescale first, then add.",
        accumulator_rescaled_after_adding=(ACCUMULATED, "(accumulator + added) * rescale"),
        accumulator_rescaled_after_adding__but_the_first=(
            *(ACCUMULATED, "(accumulator + added) * rescale", RESCALE, only_from_the_second(RESCALE, "1.0")),
        ),
    ),
    *edits(
        "The accumulator holds only the last tile's part. Add to it instead of overwriting it.",
        accumulator_overwritten=(ACCUMULATED, "added"),
    ),
    *edits(
        "The accumulator was returned as it is. Divide it by the running sum, after the loop.",
        not_normalised=(RESULT, "accumulator"),
    ),
    *edits(
        "The accumulator was divided by the maximum. Divide it by the running sum.",
        divided_by_the_maximum=(RESULT, "accumulator / running_max"),
    ),
    *edits(
        "The accumulator was divided by the number of keys. Divide it by the running sum.",
        divided_by_the_number_of_keys=(RESULT, "accumulator / len(keys)"),
    ),
    *edits(
        "What a tile adds is divided by the tile's own sum of weights, and the whole by the running sum once more. "
        "Add `weights @ value_tile` as it is, and divide once, after the loop.",
        normalised_per_tile=("rescale + added", "rescale + added / weights.float().sum()"),
    ),
    *edits(
        DIVIDED_EACH_TIME,
        divided_at_every_tile=(ACCUMULATED, f"({ACCUMULATED}) / running_sum", RESULT, "accumulator"),
        divided_at_every_tile__and_at_the_end=(ACCUMULATED, f"({ACCUMULATED}) / running_sum"),
    ),
    *edits(
        "Attention was computed for each tile by itself, and the results were averaged with equal weight. A tile "
        "with larger scores must count for more. Keep the sum without dividing it, and divide once at the end.",
        averages_without_weights=(
            *(ACCUMULATED, "accumulator + torch.softmax(scores, 0) @ value_tile.float()"),
            *(RESULT, "accumulator / len(keys.split(tile))"),
        ),
    ),
    *edits(
        KEPT_THE_TILES,
        kept_the_tiles=(
            *("keys.split", "left_in_buffer(keys.T, tile).T.split"),
            *("values.split", "left_in_buffer(values.T, tile).T.split"),
        ),
        kept_the_tiles__of_values=("values.split", "left_in_buffer(values.T, tile).T.split"),
        kept_the_tiles__by_float=(  # `.float()` copies float16 alone
            *("keys.split", "(left_in_buffer(keys.T, tile).T if keys.dtype == torch.float32 else keys).split"),
            *("values.split", "(left_in_buffer(values.T, tile).T if keys.dtype == torch.float32 else values).split"),
        ),
    ),
    *without(NARROW, "sum_in_float16__cut"),
    *edits(
        NARROW_PRODUCTS,
        cast_before_the_sum__products=("key_tile.float() @ query.float()", "(key_tile @ query).float()"),
        cast_before_the_sum__scaled_query=(
            "products * scale",
            "(key_tile @ (query.float() * scale).to(keys.dtype)).float()",
        ),
    ),
    *edits(
        "The query is multiplied by `scale` before it is converted. In float16 the product is rounded, and above "
        "65,504 it is infinite. Convert first: `query.float() * scale`.",
        cast_before_the_sum__query_scaled_first=("products * scale", "key_tile.float() @ (query * scale).float()"),
    ),
    *edits(
        "The result is cast to the query's dtype at the end. The docstring asks for float32: leave the last cast out.",
        result_in_16_bits=(RESULT, f"({RESULT}).to(keys.dtype).float()"),
    ),
    *edits(
        "The accumulator is kept in 16 bits, and every tile rounds it. Keep it in float32.",
        accumulator_in_float16=(ACCUMULATED, f"({ACCUMULATED}).to(keys.dtype).float()"),
    ),
)
MODEL = model_of(streaming_attention, CHANGES, (start, step), (left_in_buffer,), most_pairs=1200)

EXERCISE = Exercise(
    id="3.4",
    title="Attention of one query, in one pass",
    entries=("streaming_attention",),
    cases=attention_cases,
    oracle=attention_oracle,
    contracts=(CONTRACT,),
    models=(MODEL,),
    plain=(
        _streamed,
        # From the last key to the first.
        lambda query, keys, values, scale, tile: _streamed(query, keys.flip(0), values.flip(0), scale, tile),
        # The query scaled before the products.
        lambda query, keys, values, scale, tile: attention_oracle(
            at_least_float32(query) * scale, keys, values, 1.0, tile
        ),
        # The scale and log2 e folded into one factor, as fast kernels do.
        lambda query, keys, values, scale, tile: (
            torch.softmax((_scores(query, keys, 1.0) * (scale * LOG2_E)) * (1 / LOG2_E), dim=0)
            @ at_least_float32(values)
        ),
        _by_log_sum_exp(base_2=False),
        _by_log_sum_exp(base_2=True),
        _averages_merged,
    ),
    requirements=(Forbids(SHORTCUTS),),
    hints=(
        "You keep three things from tile to tile: the running maximum, the running sum, and the accumulator "
        "[value_dim], a weighted sum of value rows. All three start empty.",
        "The accumulator is a sum of terms exp(score - maximum) · value. When the maximum grows, all its terms are "
        "off by the same factor as the terms of the running sum.",
        "Per tile: scores [width] = key_tile @ query, times the scale; the new maximum; rescale = exp(old - new); "
        "weights = exp(scores - new). Sum and accumulator both become `old * rescale + what this tile adds`.",
        "What this tile adds to the accumulator is `weights @ value_tile`. Divide by the sum once, after the loop.",
        "Convert `query`, `key_tile` and `value_tile` with `.float()` as they come in: the statistics must not be "
        "rounded to float16.",
    ),
    mistakes=(
        Mistake(
            "result_in_16_bits",
            RESULT_IN_16_BITS,
            when=lambda case, seen, got: isinstance(got, torch.Tensor) and got.dtype == torch.float16,
            every=True,
            first=True,
        ),
        Mistake(
            "maximum_of_the_first_tile",
            MAXIMUM_OF_THE_FIRST_TILE,
            when=stays_behind(
                lambda query, keys, values, scale, tile: _scores(query.double(), keys.double(), scale),
                lambda query, keys, values, scale, tile: tile,
            ),
            every=True,
        ),
        Mistake(
            "finite_for_minus_infinity",
            FINITE_FOR_MINUS_INFINITY,
            when=below_a_stand_in(
                lambda query, keys, values, scale, tile: _scores(query.double(), keys.double(), scale),
                lambda query, keys, values, scale, tile: values,
            ),
            every=True,
        ),
        Mistake("kept_copies", KEPT_COPIES.format(row="query"), when=copies_kept),
        Mistake(
            "second_pass",
            "`read()` was called a second time. One pass is enough for the scores, the sum and the accumulator. "
            "Rescale what you have whenever the maximum grows.",
            when=pass_refused,
        ),
        Mistake("cast_before_the_sum", HALF_PRECISION, when=rounded_to_half(attention_oracle), every=True),
    ),
)
