"""Exercise 3.4: attention of one query, in one pass over its keys."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, Forbids, Mistake
from exercises.ch03_online_softmax.slips import (
    CAST_BEFORE_THE_SUM,
    INF,
    KEPT_THE_TILES,
    LAST_TILE_ONLY,
    LOG2_E,
    NO_MAXIMUM,
    SHORTCUTS,
    SUM_NOT_RESCALED,
    TILE_NOT_RESCALED,
    at_least_float32,
    in_float32,
    left_in_buffer,
    pass_refused,
    rounded_to_half,
    softmax_of,
)
from exercises.topics.evidence import NAN_FROM_THE_START


def read_pairs_once(functions, query, keys, values, scale, tile):
    key_buffer = torch.full((min(tile, len(keys)), keys.shape[1]), math.nan, dtype=keys.dtype, device=keys.device)
    value_buffer = torch.full((min(tile, len(keys)), values.shape[1]), math.nan, dtype=values.dtype, device=keys.device)
    passes = [0]

    def read():
        passes[0] += 1
        if passes[0] > 1:
            raise RuntimeError("pass 2 was started, one pass more than the single one allowed")
        for start in range(0, len(keys), tile):
            width = min(tile, len(keys) - start)
            key_buffer[:width], value_buffer[:width] = keys[start : start + width], values[start : start + width]
            yield key_buffer[:width], value_buffer[:width]

    return functions["streaming_attention"](query, read, scale)


def _scores(query, keys, scale):
    return (at_least_float32(keys) @ at_least_float32(query)) * scale


def attention_oracle(query, keys, values, scale, tile):
    return softmax_of(_scores(query, keys, scale)) @ at_least_float32(values)


def _streamed(
    query,
    keys,
    values,
    scale,
    tile,
    *,
    rescale_sum=True,
    rescale_accumulator=True,
    divide=True,
    backwards=False,
    own_maximum=False,
    carry=True,
    divide_each=False,
):
    """Attention in one pass, with the classic steps left out on demand."""
    keys, values, query = map(at_least_float32, (keys, values, query))
    if backwards:
        keys, values = keys.flip(0), values.flip(0)
    maximum, total = torch.tensor(-INF, dtype=keys.dtype), torch.zeros((), dtype=keys.dtype)
    accumulator = torch.zeros(values.shape[1], dtype=values.dtype)
    for part, value in zip(keys.split(tile), values.split(tile)):
        scores = (part * (query * scale)).sum(dim=1)
        grown = torch.maximum(maximum, scores.max())
        rescale = torch.exp(maximum - grown)
        weights = torch.exp(scores - (scores.max() if own_maximum else grown))
        total = total * (rescale if rescale_sum else 1.0) * carry + weights.sum()
        accumulator = accumulator * (rescale if rescale_accumulator else 1.0) * carry + weights @ value
        if divide_each:
            accumulator = accumulator / total
        maximum = grown
    return accumulator / total if divide else accumulator


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
    def case(name, count, tile, dim=8, value_dim=8, spread=1.0, order=None, level=0.0, dtype=torch.float32, scale=None):
        query, scale = draw.normal(dim), dim**-0.5 if scale is None else scale
        keys = _keys_for(draw, query, count, scale, spread, order, level, dtype)
        values = draw.normal(count, value_dim, dtype=dtype)
        return Case(name, (query.to(dtype), keys, values, scale, tile), driver=read_pairs_once)

    return [
        case("16 keys in tiles of 4", 16, 4),
        case("one key", 1, 16),
        case("40 keys of dimension 16, scale 0.7", 40, 16, dim=16, scale=0.7),
        case("67 keys, a prime, in tiles of 16; 5 value columns", 67, 16, dim=16, value_dim=5),
        case("129 keys in tiles of 128", 129, 128, dim=32, value_dim=16),
        case("ascending scores: the maximum grows at every tile", 96, 16, spread=3.0, order="ascending"),
        # A maximum that is not carried on drops by more than exp can hold.
        case("descending scores, from about 150 to -150", 96, 16, spread=60.0, order="descending"),
        case("logits to ±200", 80, 16, dim=16, spread=80.0),
        case("logits near +200", 50, 16, dim=16, level=200.0),
        case("logits near -200", 50, 16, dim=16, level=-200.0),
        case("all scores equal", 70, 32, spread=0.0),
        case("float16, 200 keys of dimension 64", 200, 64, dim=64, value_dim=64, spread=2.0, dtype=torch.float16),
    ]


def _attention_of(scores, values):
    return softmax_of(scores) @ at_least_float32(values)


def _no_maximum_attention(query, keys, values, scale, tile):
    weights = torch.exp(_scores(query, keys, scale).float())
    return (weights @ values.float()) / weights.sum()


def _tile_averages(query, keys, values, scale, tile):
    parts = [
        _attention_of(_scores(query, part, scale), value) for part, value in zip(keys.split(tile), values.split(tile))
    ]
    return torch.stack(parts).mean(dim=0)


def _last_pair_only(query, keys, values, scale, tile):
    return _attention_of(_scores(query, keys.split(tile)[-1], scale), values.split(tile)[-1])


EXERCISE = Exercise(
    id="3.4",
    title="Attention of one query, in one pass",
    entries=("streaming_attention",),
    cases=attention_cases,
    oracle=attention_oracle,
    plain=(
        _streamed,
        lambda *args: _streamed(*args, backwards=True),
        lambda query, keys, values, scale, tile: (
            attention_oracle(query * scale, keys, values, 1.0, tile)
            if query.dtype != torch.float16
            else _streamed(query, keys, values, scale, 1)
        ),
        lambda query, keys, values, scale, tile: _attention_of(
            (at_least_float32(keys) * at_least_float32(query)).sum(dim=1) * scale, values
        ),
        # The scale and log2 e folded into one factor, as fast kernels do.
        lambda query, keys, values, scale, tile: (
            torch.softmax((_scores(query, keys, 1.0) * (scale * LOG2_E)) * (1 / LOG2_E), dim=0)
            @ at_least_float32(values)
        ),
    ),
    requirements=(Forbids(SHORTCUTS),),
    hints=(
        "Three things travel from tile to tile: the running maximum, the running sum, and the accumulator, a weighted "
        "sum of value rows of [value_dim]. All three start empty.",
        "The accumulator is a sum of terms exp(score - maximum) · value. When the maximum grows, every one of its "
        "terms is off by the same factor as the terms of the running sum.",
        "Per tile: scores [width] = key_tile @ query, times the scale; the new maximum; rescale = exp(old - new); "
        "weights = exp(scores - new). Sum and accumulator both become `old * rescale + what this tile adds`.",
        "What this tile adds to the accumulator is `weights @ value_tile`. Divide by the sum once, after the loop.",
        "Convert `query`, `key_tile` and `value_tile` with `.float()` as they come in: the statistics must not be "
        "rounded to float16.",
    ),
    mistakes=(
        Mistake("no_running_max", NO_MAXIMUM, result=_no_maximum_attention),
        Mistake(
            "accumulator_not_rescaled",
            "This is what you get when the accumulator is not rescaled as the running maximum grows: its terms are "
            "still relative to older maxima. Multiply it by the same exp(old - new) as the running sum.",
            result=lambda *args: _streamed(*args, rescale_accumulator=False),
        ),
        Mistake("sum_not_rescaled", SUM_NOT_RESCALED, result=lambda *args: _streamed(*args, rescale_sum=False)),
        Mistake(
            "nothing_rescaled",
            "Neither the sum nor the accumulator was rescaled as the maximum grew. Multiply both by exp(old - new) at "
            "each tile. If you do, look at the order: once running_max has been overwritten, that factor is 1.",
            result=lambda *args: _streamed(*args, rescale_sum=False, rescale_accumulator=False),
        ),
        Mistake("tile_not_rescaled", TILE_NOT_RESCALED, result=lambda *args: _streamed(*args, own_maximum=True)),
        Mistake(
            "not_normalised",
            "The accumulator was returned as it is. Divide it by the running sum, after the loop.",
            result=lambda *args: _streamed(*args, divide=False),
        ),
        Mistake(
            "averages_without_weights",
            "Each tile was made an attention of its own, and these were averaged as equals. A tile with larger scores "
            "counts for more: keep the unnormalised sum, and divide once at the end.",
            result=_tile_averages,
        ),
        Mistake(
            "last_tile_only",
            LAST_TILE_ONLY,
            result=(_last_pair_only, lambda *args: _streamed(*in_float32(args[:3]), *args[3:], carry=False)),
        ),
        Mistake(
            "divided_at_every_tile",
            "The accumulator was divided by the running sum at every tile, and the next tile's part was added to what "
            "was an average already. Divide once, after the loop.",
            result=(
                lambda *args: _streamed(*args, divide_each=True, divide=False),
                lambda *args: _streamed(*args, divide_each=True),
            ),
        ),
        Mistake(
            "nan_from_the_start",
            NAN_FROM_THE_START,
            result=lambda query, keys, values, scale, tile: torch.full_like(at_least_float32(values[0]), math.nan),
        ),
        Mistake(
            "scale_missing",
            "The scores were not multiplied by `scale`.",
            result=lambda query, keys, values, scale, tile: _attention_of(_scores(query, keys, 1.0), values),
        ),
        Mistake(
            "scale_twice",
            "The scale was applied twice: once to the query (or the keys) and once to the scores.",
            result=lambda query, keys, values, scale, tile: _attention_of(_scores(query, keys, scale * scale), values),
        ),
        Mistake(
            "scale_ignored",
            "The scores were multiplied by 1/√dim, whatever `scale` is. Use the argument: it may be any number.",
            result=lambda query, keys, values, scale, tile: _attention_of(
                _scores(query, keys, len(query) ** -0.5), values
            ),
        ),
        Mistake(
            "kept_the_tiles",
            KEPT_THE_TILES,
            result=(
                lambda query, keys, values, scale, tile: _attention_of(
                    _scores(query, left_in_buffer(keys.T, tile).T, scale), left_in_buffer(values.T, tile).T
                ),
                lambda query, keys, values, scale, tile: _attention_of(
                    _scores(query, keys, scale), left_in_buffer(values.T, tile).T
                ),
            ),
        ),
        Mistake(
            "second_pass",
            "`read()` was called a second time. Scores, sum and accumulator can all be had in one pass: "
            "rescale what you have whenever the maximum grows.",
            when=pass_refused,
        ),
        Mistake("cast_before_the_sum", CAST_BEFORE_THE_SUM, when=rounded_to_half(attention_oracle), every=True),
    ),
)
