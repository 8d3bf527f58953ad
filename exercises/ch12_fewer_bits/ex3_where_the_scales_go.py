"""Exercise 12.3: decode attention over e4m3 codes, with the scales on the query and on the result."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from course_lib.checker import Allocates, Case, Draw, Exercise, Forbids, Mistake, Requirement, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import any_strides
from exercises.topics.attention_sentences import (
    ACCUMULATOR_NOT_RESCALED,
    FIRST_TILE_ONLY,
    NOT_DIVIDED,
    PER_TILE,
    SUM_NOT_RESCALED,
)


def scaled_decode(query, keys, values, k_scale, v_scale):
    heads, length, head_dim = len(query), keys.shape[1], keys.shape[2]
    owner = torch.arange(heads) // (heads // len(keys))
    k_of, v_of = k_scale[owner][:, None], v_scale[owner][:, None]
    keys_of, values_of = keys.to(query.dtype)[owner], values.to(query.dtype)[owner]  # [heads, length, head_dim]
    folded = query * k_of * head_dim**-0.5
    running_max = torch.full((heads, 1), -math.inf, dtype=query.dtype)
    running_sum = torch.zeros(heads, 1, dtype=query.dtype)
    accumulator = torch.zeros(heads, head_dim, dtype=query.dtype)
    for start in range(0, length, 64):
        tile = slice(start, start + 64)
        scores = (keys_of[:, tile] @ folded[:, :, None])[:, :, 0]
        new_max = torch.maximum(running_max, scores.amax(1, keepdim=True))
        weights = torch.exp(scores - new_max)
        rescale = torch.exp(running_max - new_max)
        running_sum = running_sum * rescale + weights.sum(1, keepdim=True)
        product = (weights[:, None] @ values_of[:, tile])[:, 0]
        accumulator = accumulator * rescale + product
        running_max = new_max
    return accumulator / running_sum * v_of


def strayed(sign):
    """Scores off by as much as sums in another order may be, and weights by as much as a log-sum-exp of that size."""

    def decode(query, keys, values, k_scale, v_scale):
        owner = torch.arange(len(query)) // (len(query) // len(keys))
        keys, values = keys.to(query.dtype)[owner], values.to(query.dtype)[owner]
        folded = (query * k_scale[owner][:, None] / math.sqrt(query.shape[1]))[:, :, None]
        turns = sign * (1.0 - 2.0 * (torch.arange(keys.shape[1]) % 2))
        eps = torch.finfo(torch.float32).eps
        scores = (keys @ folded + 2 * eps * turns[:, None] * (keys.abs() @ folded.abs()))[:, :, 0]
        common = 1 + sign * eps * torch.logsumexp(scores, 1, keepdim=True).abs()
        return ((common * torch.softmax(scores, 1))[:, None] @ values)[:, 0] * v_scale[owner][:, None]

    return decode


def made(draw, *, key_heads, group, head_dim, length, score, cache_layout, small_layout):
    """Codes with a standard deviation of 100, and scores of about `score`; each head's scales are its own."""
    codes = [
        draw.normal(key_heads, length, head_dim, scale=100.0).clamp(-448, 448).to(torch.float8_e4m3fn) for _ in range(2)
    ]
    k_scale, v_scale = (torch.exp2(draw.uniform(key_heads, low=-9.0, high=-3.0)) for _ in range(2))
    query = draw.normal(key_heads * group, head_dim, scale=score / 100) / k_scale.repeat_interleave(group)[:, None]
    keys, values = (cache_layout(draw, part) for part in codes)
    return small_layout(draw, query), keys, values, k_scale, v_scale


def _plainly(draw, tensor):
    return tensor


def large_scales(draw):
    """A code of 448 times its scale overflows; a query times it, the weighted sums of codes and the result do not."""
    query, codes = 2.0**-124 * draw.normal(4, 16), [draw.normal(2, 6, 16, scale=10.0).abs() for _ in range(2)]
    query[:, 0], query[:, 1] = 2.0**-123, 0.0  # scores are 4 higher at token 0, where no value is large
    codes[0][:, 0, 0], codes[0][:, 1:, 1], codes[1][:, 1:, ::3] = 128.0, 448.0, -448.0
    return query, *(part.to(torch.float8_e4m3fn) for part in codes), *torch.full((2, 2), 2.0**120)


def scale_cases(draw):
    def case(name, key_heads, group, head_dim, length, score=1.0):
        sizes = {"key_heads": key_heads, "group": group, "head_dim": head_dim, "length": length}
        return Case(name, made(draw, **sizes, score=score, cache_layout=_plainly, small_layout=_plainly))

    ones = case("all scales are 1", 2, 2, 16, 40)
    ones.args[0].mul_(0.02)
    for scale in ones.args[3:]:
        scale.fill_(1.0)
    return [
        ones,
        case("1 head, 32 tokens", 1, 1, 16, 32),
        case("one token", 2, 2, 16, 1),
        case("3 KV heads, 6 query heads, 64 tokens", 3, 2, 16, 64),
        case("300 tokens: the cache does not fit", 2, 4, 64, 300),
        case("65 tokens", 2, 1, 32, 65),
        case("scores of ±150: exp overflows", 2, 2, 32, 200, 55.0),
        Case("scales of 2¹²⁰: keys and values themselves overflow", large_scales(Draw(4))),
    ]


FOLDED = "query * k_of * head_dim**-0.5"
RESULT = "accumulator / running_sum * v_of"
UPDATE = "accumulator = accumulator * rescale + product"
KEYS_OF, VALUES_OF = "keys.to(query.dtype)[owner]", "values.to(query.dtype)[owner]"
IN_TURNS = "{}.to(query.dtype)[torch.arange(heads) % len(keys)]"
ONE_BY_ONE = (
    "Keys or values were multiplied by their scale one by one. That is a multiplication for each code, and the product "
    "may overflow. A head's scale is the same for all, so multiply the query by k_scale, and the result by v_scale."
)
OF_A_TILE = (
    "torch.maximum(running_max, scores.amax(1, keepdim=True))", "scores.amax(1, keepdim=True)",
    UPDATE, "accumulator = accumulator + product / weights.sum(1, keepdim=True)",
)  # fmt: skip
PRODUCT = "(weights[:, None] @ values_of[:, tile])[:, 0]"


def over_heads(shape, dimension):
    """The result where the softmax of scores in this shape runs over this dimension."""
    scores = f"(keys_of @ folded[:, :, None]).view({shape})"
    return f"(torch.softmax({scores}, {dimension}).view(heads, 1, length) @ values_of)[:, 0] * v_of"


EVERY_TILE = (
    "v_scale multiplies the accumulator in every tile, so what the first tile added is multiplied by it once for each "
    "tile. Multiply the result by it, once, after the loop."
)
CHANGES = (
    *edits("", tiles_of_32=("0, length, 64", "0, length, 32", "start + 64", "start + 32"),
        tiles_of_16=("0, length, 64", "0, length, 16", "start + 64", "start + 16")),
    *edits("Neither scale reaches the result: both are left at 1. Multiply the query (or the scores) by k_scale and "
        "the result by v_scale.",
        scales_left_at_1=(FOLDED, "query * head_dim**-0.5", RESULT, "accumulator / running_sum")),
    *edits("k_scale is missing, as if it were 1: the scores are too large or too small. Multiply the query or the "
        "scores by it, before the exponential. A factor on all weights cancels when you divide by their sum.",
        key_scale_missing=("query * k_of", "query")),
    *edits("v_scale is missing, as if it were 1. Multiply the result by it. If it multiplies the weights before they "
        "are added up, it cancels when the result is divided by their sum.",
        value_scale_missing=(" * v_of", "")),
    *edits("k_scale is applied twice. Multiply either the query or the scores by it.",
        key_scale_twice=("query * k_of", "query * k_of * k_of")),
    *edits("v_scale is applied twice. Multiply the result by it, once.",
        value_scale_twice=(" * v_of", " * v_of * v_of")),
    *edits("k_scale is used for the values, too. They have v_scale.",
        alone=True, key_scale_for_both=("v_scale[owner]", "k_scale[owner]")),
    *edits("v_scale is used for the keys, too. They have k_scale.",
        alone=True, value_scale_for_both=("k_scale[owner]", "v_scale[owner]")),
    *edits("Both scales multiply the query (or the scores), and none the result. v_scale there makes the softmax "
        "sharper or flatter: multiply the result by it.",
        both_scales_on_the_query=(FOLDED, "query * k_of * v_of * head_dim**-0.5", RESULT, "accumulator / running_sum"),
        both_scales_on_the_query__and_the_result=(FOLDED, "query * k_of * v_of * head_dim**-0.5")),
    *edits("k_scale multiplies the result, or the weights after the softmax. It belongs to the scores: multiply the "
        "query or the scores by it, before the softmax.",
        key_scale_after_the_softmax=(FOLDED, "query * head_dim**-0.5", RESULT, f"{RESULT} * k_of"),
        key_scale_after_the_softmax__too=(RESULT, f"{RESULT} * k_of"),
        key_scale_after_the_softmax__alone=(FOLDED, "query * head_dim**-0.5", RESULT,
        "accumulator / running_sum * k_of")),
    *edits("The query is rounded to fewer bits. Only the cache is in e4m3: leave the query in float32, and convert the "
        "codes to it.", alone=True,
        query_rounded=(FOLDED, f"query.to(torch.float8_e4m3fn).to(query.dtype) * {FOLDED[8:]}"),
        query_rounded__to_half=(FOLDED, f"query.half().to(query.dtype) * {FOLDED[8:]}"),
        query_rounded__to_bfloat16=(FOLDED, f"query.bfloat16().to(query.dtype) * {FOLDED[8:]}"),
        query_rounded__scaled=(FOLDED, f"({FOLDED}).to(torch.float8_e4m3fn).to(query.dtype)"),
        query_rounded__scaled_to_half=(FOLDED, f"({FOLDED}).half().to(query.dtype)"),
        query_rounded__scaled_to_bfloat16=(FOLDED, f"({FOLDED}).bfloat16().to(query.dtype)")),
    *edits(ONE_BY_ONE, is_nan=True,
        scaled_element_by_element=(KEYS_OF, f"{KEYS_OF} * k_of[..., None]", FOLDED, "query * head_dim**-0.5",
        VALUES_OF, f"{VALUES_OF} * v_of[..., None]", RESULT, "accumulator / running_sum"),
        scaled_element_by_element__keys=(KEYS_OF, f"{KEYS_OF} * k_of[..., None]", FOLDED, "query * head_dim**-0.5"),
        scaled_element_by_element__values=(VALUES_OF, f"{VALUES_OF} * v_of[..., None]", RESULT,
        "accumulator / running_sum")),
    *edits(EVERY_TILE,
        value_scale_in_every_tile=(UPDATE, "accumulator = (accumulator * rescale + product) * v_of", RESULT,
        "accumulator / running_sum"),
        value_scale_in_every_tile__before=(UPDATE, "accumulator = accumulator * rescale * v_of + product", RESULT,
        "accumulator / running_sum")),
    *edits("The two scales are exchanged: k_scale belongs to the scores, and v_scale to the result.",
        scales_exchanged=("k_scale[owner]", "v_scale[owner]", "v_scale[owner]", "k_scale[owner]")),
    *edits("You divided by k_scale. A key is k_scale times its code, so multiply by it.",
        key_scale_divides=("query * k_of", "query / k_of")),
    *edits("You divided by v_scale. A value is v_scale times its code, so multiply by it.",
        value_scale_divides=(RESULT, "accumulator / running_sum / v_of")),
    *edits("All heads use the first head's scale. Each KV head has a k_scale and a v_scale of its own.",
        first_scale_for_all=("k_scale[owner][:, None], v_scale[owner][:, None]", "k_scale[0], v_scale[0]"),
        first_scale_for_all__keys=("k_scale[owner][:, None]", "k_scale[0]"),
        first_scale_for_all__values=("v_scale[owner][:, None]", "v_scale[0]")),
    *edits("The scales go to the query heads in turns: head h has that of KV head h % key_heads. Neighbours share a KV "
        "head, so use repeat_interleave, or h // group.",
        scales_by_modulo=("k_scale[owner][:, None], v_scale[owner][:, None]",
        "k_scale.repeat(heads // len(keys))[:, None], v_scale.repeat(heads // len(keys))[:, None]"),
        scales_by_modulo__keys=("k_scale[owner][:, None]", "k_scale.repeat(heads // len(keys))[:, None]"),
        scales_by_modulo__values=("v_scale[owner][:, None]", "v_scale.repeat(heads // len(keys))[:, None]")),
    *edits("The keys and values go to the query heads in turns, by h % key_heads. Neighbours share a KV head: "
        "query head h reads h // group.",
        heads_by_modulo=("// (heads // len(keys))", "% len(keys)"),
        heads_by_modulo__but_the_scales=(f"{KEYS_OF}, {VALUES_OF}",
        f"{IN_TURNS.format('keys')}, {IN_TURNS.format('values')}"),
        heads_by_modulo__keys=(KEYS_OF, IN_TURNS.format("keys")),
        heads_by_modulo__values=(VALUES_OF, IN_TURNS.format("values"))),
    *edits("The codes are read as whole numbers from 0 to 255. They are floats of 8 bits: codes.float().",
        codes_as_bytes=("keys.to(", "keys.view(torch.uint8).to(", "values.to(", "values.view(torch.uint8).to("),
        codes_as_bytes__keys=("keys.to(", "keys.view(torch.uint8).to("),
        codes_as_bytes__values=("values.to(", "values.view(torch.uint8).to(")),
    *edits("The scores are not divided by √head_dim.", root_missing=(" * head_dim**-0.5", "")),
    *edits("The scores are divided by head_dim, not by its root.",
        root_missing__of_it=("head_dim**-0.5", "head_dim**-1.0")),
    *edits("exp overflows float32 above 88. Subtract each head's largest score first, or use torch.softmax.",
        no_maximum=("torch.exp(scores - new_max)", "torch.exp(scores)", "torch.exp(running_max - new_max)", "1.0")),
    *edits("The maximum was taken before k_scale multiplied the scores, and subtracted after it, so exp overflows or "
        "underflows. Multiply the query by k_scale, before the maximum.",
        maximum_without_the_scale=("torch.exp(scores - new_max)", "torch.exp(scores - new_max / k_of)",
        "torch.exp(running_max - new_max)", "torch.exp((running_max - new_max) / k_of)")),
    *edits(FIRST_TILE_ONLY, first_tile_only=("range(0, length, 64)", "range(0, 64, 64)")),
    *edits("The last tile is left out where it is not full. A slice beyond the end is shorter: loop up to the length.",
        is_nan=True, last_tile_left_out=("0, length, 64", "0, length - 63, 64"),
        last_tile_left_out__but_the_first=("0, length, 64", "0, max(length - 63, 1), 64"),
        last_tile_left_out__of_32=("0, length, 64", "0, length - 31, 32", "start + 64", "start + 32"),
        last_tile_left_out__of_values=(PRODUCT, f"{PRODUCT} * (start + 64 <= length)")),
    *edits("The softmax runs over heads. A row of scores has one for each token: take it over the last dimension.",
        softmax_over_heads=(RESULT, over_heads("len(keys), -1, length", 1)),
        softmax_over_heads__of_a_group=(RESULT, over_heads("len(keys), -1, length", 0)),
        softmax_over_heads__all=(RESULT, over_heads("1, heads, length", 1))),
    *edits(PER_TILE, one_softmax_a_tile=(*OF_A_TILE, " / running_sum", "")),
    *edits("The softmax of each tile is taken by itself, and the tiles' results are averaged. Tiles have different "
        "shares of the weight: take one softmax over all tokens.",
        mean_of_the_tiles=(*OF_A_TILE, "running_sum * rescale + weights.sum(1, keepdim=True)", "running_sum + 1")),
    *edits(SUM_NOT_RESCALED, sum_not_rescaled=("running_sum * rescale", "running_sum")),
    *edits(ACCUMULATOR_NOT_RESCALED, accumulator_not_rescaled=("accumulator * rescale", "accumulator")),
    *edits(NOT_DIVIDED, not_divided=(" / running_sum", "")),
)  # fmt: skip


def most_elements(query, keys, *rest):
    """The larger of all scores and the query."""
    return query.shape[0] * max(keys.shape[1:])


def most_allocated(query, keys, *rest):
    """64 tokens of all keys, or more if scores or query have."""
    return max(64 * keys[:, 0].numel(), most_elements(query, keys))


@dataclass(frozen=True)
class ScalesOutside(Requirement):
    """No multiplication by elements is as large as a tile of codes: scales multiply queries, scores or results."""

    id: str = "scaled_element_by_element"

    def complaint(self, case, seen):
        allowed = most_elements(*case.args)
        largest = max((seen.largest_results.get(name, 0) for name in ("mul", "mul_", "div", "div_")), default=0)
        if largest <= allowed:
            return None
        return f"A multiplication or division of {largest:,} elements ran, where {allowed:,} are enough. {ONE_BY_ONE}"


EXERCISE = Exercise(
    id="12.3",
    title="Where the scales go",
    entries=("fp8_decode",),
    cases=scale_cases,
    oracle=scaled_decode,
    plain=(strayed(1.0), strayed(-1.0)),
    contracts=(
        Contract(
            made,
            choices={
                "key_heads": (1, 2, 5),
                "group": (1, 3, 8),
                "head_dim": (8, 12, 64),
                "length": (1, 2, 63, 65, 129, 250),
                "score": (Level(1.0, ""), Level(60.0, "scores of ±150")),
                "cache_layout": any_strides("the cache"),
                "small_layout": any_strides("the query", expandable=False),
            },
            says={"length": "length is at least 1", "cache_layout": "any strides", "group": "is a multiple of"},
            most=12,
        ),
    ),
    # Codes that lack their scale make scores of some hundred, and of six sums none may round as far as the answer did.
    models=(model_of(scaled_decode, CHANGES, draws=16),),
    requirements=(
        Forbids(("scaled_dot_product", "scaled_dot_product_attention", "_scaled_dot_product")),
        Allocates(most_allocated),
        ScalesOutside(),
    ),
    hints=(
        "(k_scale · code) · q = code · (k_scale · q). Multiply each head's query by its k_scale, and by 1/√head_dim.",
        "Convert 64 tokens at a time: keys[:, n : n + 64].float(). All scores fit: torch.cat joins those of the tiles, "
        "and torch.softmax makes weights of them.",
        "In a second loop, add weights[:, :, n : n + 64] @ values[:, n : n + 64].float(). Multiply the sum by v_scale "
        "after the loop.",
        "query.reshape(key_heads, -1, head_dim) puts the query heads of a KV head side by side, so that "
        "k_scale[:, None, None] and v_scale[:, None, None] fit.",
    ),
    mistakes=(
        Mistake(
            "whole_cache_dequantised",
            "The whole cache was converted to float32 in one step: a tensor as large as all keys. That is four times "
            "as many bytes as the codes have, written and read again in every step. Convert 64 tokens at a time.",
            when=lambda case, seen, got: seen.largest_allocation >= case.args[1].numel() > most_allocated(*case.args),
            cost=True,
        ),
    ),
)
