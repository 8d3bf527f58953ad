"""Exercise 11.5: two workers share the columns of one output, and exchange the weights of a pair of key blocks."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Allocates, Case, Exercise, Forbids, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.layouts import any_strides
from course_lib.checker.specification.requirements import MATRIX_PRODUCTS, FewProducts
from exercises.ch11_multi_head_latent_attention.parts import INF, PLAIN, latent_attention
from exercises.topics.attention_sentences import NO_RUNNING_MAX, NOT_DIVIDED, STARTS_AT_ZERO
from exercises.topics.decode_inputs import SCORES
from exercises.topics.evidence import NAN_FROM_THE_START, all_nan


def in_halves(attention):
    """Attention of all heads of a sequence to all its rows, cut into the two halves of its columns."""

    def halves(query, cache, scale, value_dim, block):
        output = attention(query[None], cache[None], torch.tensor([cache.shape[0]]), scale, value_dim)[0]
        return output[:, : value_dim // 2], output[:, value_dim // 2 :]

    return halves


HALVES = in_halves(latent_attention)


def seesaw_cases(draw):
    def case(name, heads, value_dim, rope_dim, length, block, score=1.0):
        scale = (value_dim / 4 + rope_dim) ** -0.5
        width = value_dim + rope_dim
        query = draw.normal(heads, width, scale=score / (scale * math.sqrt(width)))
        return Case(name, (query, draw.normal(length, width), scale, value_dim, block))

    jump = case("scores of +80, -80, -80, and then -80 and 250; a negative scale", 3, 16, 8, 16, 4)
    query, cache, *_ = jump.args
    query.zero_()[:, -1] = -1.0
    cache[:, -1] = torch.tensor([80.0] * 4 + [-80.0] * 9 + [250.0] * 3)
    jump = Case(jump.name, (query, cache, -1.0, 16, 4))
    return [
        case("4 heads, 16 + 8 numbers in a row, one pair of blocks of 4", 4, 16, 8, 8, 4),
        case("three pairs", 4, 16, 8, 24, 4),
        case("blocks of one key", 3, 16, 8, 6, 1),
        case("scores of ±150: exp overflows", 4, 32, 8, 64, 8, score=55.0),
        jump,
        case("no rotary part", 2, 16, 0, 32, 4),
        case("16 heads, 64 + 16, five pairs of blocks of 16", 16, 64, 16, 160, 16),
    ]


def made(draw, *, heads, value_dim, rope_dim, block, pairs, scores, query_layout, cache_layout):
    width, scale = value_dim + rope_dim, (value_dim / 4 + rope_dim) ** -0.5
    query, cache, _ = scores(draw, 1, heads, 2 * block * pairs, width)
    query = query[0] / (scale * math.sqrt(width))
    return query_layout(draw, query), cache_layout(draw, cache[0]), scale, value_dim, block


CONTRACT = Contract(
    made,
    choices={
        "heads": (1, 3, 17),
        "value_dim": (10, 16, 34),
        "rope_dim": (0, 1, 8),
        "block": (1, 2, 5),
        "pairs": (1, 2, 7),
        "scores": tuple(level for level in SCORES if "values" not in level.words),
        "query_layout": any_strides("query", expandable=False),
        "cache_layout": any_strides("cache", expandable=False),
    },
    says={
        "rope_dim": "width at least value_dim",
        "value_dim": "even, and at least 2 · block",
        "pairs": "length is a multiple of\n            2 · block, and at least that",
        "query_layout": "any strides",
        "cache_layout": "any strides",
    },
    most=12,
)


def seesaw(query, cache, scale, value_dim, block):
    heads, half = query.shape[0], value_dim // 2
    left, right = torch.zeros(heads, half), torch.zeros(heads, half)
    largest, total = torch.full((heads, 1), -INF), torch.zeros(heads, 1)
    for start in range(0, cache.shape[0], 2 * block):
        even, odd = cache[start : start + block], cache[start + block : start + 2 * block]
        even_scores = query @ even.T * scale
        odd_scores = query @ odd.T * scale
        even_largest = torch.maximum(largest, even_scores.amax(1, keepdim=True))
        odd_largest = torch.maximum(even_largest, odd_scores.amax(1, keepdim=True))
        even_weights = torch.exp(even_scores - even_largest)
        odd_weights = torch.exp(odd_scores - odd_largest)
        first, second = torch.exp(largest - even_largest), torch.exp(even_largest - odd_largest)
        left = (left * first + even_weights @ even[:, :half]) * second + odd_weights @ odd[:, :half]
        right = (
            right * first * second
            + even_weights * second @ even[:, half:value_dim]
            + odd_weights @ odd[:, half:value_dim]
        )
        total = (total * first + even_weights.sum(1, keepdim=True)) * second + odd_weights.sum(1, keepdim=True)
        largest = odd_largest
    return left / total, right / total


LEFT = "(left * first + even_weights @ even[:, :half]) * second"
RIGHT = "right * first * second"
RIGHT_EVEN = "even_weights * second @ even[:, half:value_dim]"
TOTAL = "(total * first + even_weights.sum(1, keepdim=True)) * second"
LATENT_SCORES = "query[:, :value_dim] @ {}[:, :value_dim].T"
ODD_MAX = "torch.maximum(even_largest, odd_scores.amax(1, keepdim=True))"
CHANGES = (
    *edits("In the left half, the even block's contribution is still measured from m0 when the odd block is added. "
        "Multiply the whole half by exp(m0 - m1) first.",
        left_not_rescaled_again=(LEFT, "(left * first + even_weights @ even[:, :half])"),
        left_not_rescaled_again__new_alone=(LEFT, "(left * first * second + even_weights @ even[:, :half])")),
    *edits("In the right half the even block's weights are measured from m0. Multiply them by exp(m0 - m1) before "
        "you add their product, because the half is measured from m1.",
        even_weights_not_corrected=(RIGHT_EVEN, "even_weights @ even[:, half:value_dim]")),
    *edits("The old output of a half, from before the pair, is not rescaled by exp(m - m0).",
        old_output_not_rescaled=("left * first", "left"), old_output_not_rescaled__right=(RIGHT, "right * second"),
        old_output_not_rescaled__right_at_all=(RIGHT, "right"),
        old_output_not_rescaled__both=("left * first", "left", RIGHT, "right * second")),
    *edits("The right half is rescaled by exp(m - m0) alone. The odd block's weights are measured from m1: multiply by "
        "exp(m0 - m1) too.", right_not_rescaled_again=(RIGHT, "right * first")),
    *edits("The even block's weights were multiplied by exp(m0 - m1), and their product is rescaled as well, so it "
        "shrinks twice.", corrected_twice=(RIGHT_EVEN, "even_weights * second * second @ even[:, half:value_dim]"),
        corrected_twice__left=("left * first + even_weights @", "left * first + even_weights * second @")),
    *edits("The odd block's product is multiplied by exp(m0 - m1). Its weights are measured from m1 already.",
        odd_rescaled=("odd_weights @ odd[:, half", "odd_weights * second @ odd[:, half"),
        odd_rescaled__left=("odd_weights @ odd[:, :half]", "odd_weights * second @ odd[:, :half]")),
    *edits("The sum of the weights is not rescaled like the output. Multiply it by the same two factors.",
        sum_not_rescaled=(TOTAL, "total + even_weights.sum(1, keepdim=True)"),
        sum_not_rescaled__first=("total * first", "total"),
        sum_not_rescaled__second=(TOTAL, "(total * first + even_weights.sum(1, keepdim=True))"),
        sum_not_rescaled__old_once=(TOTAL, "total * first + even_weights.sum(1, keepdim=True) * second"),
        sum_not_rescaled__new_alone=(TOTAL, "total * first * second + even_weights.sum(1, keepdim=True)")),
    *edits("The sum of the weights has only one block's. Add those of both.",
        one_block_in_the_sum=(f"{TOTAL} + odd_weights.sum(1, keepdim=True)", TOTAL),
        one_block_in_the_sum__odd=(TOTAL, "total * first * second")),
    *edits("A worker adds only its own block. Both halves of the output need both blocks, so exchange the weights.",
        own_block_alone=(f"{LEFT} + odd_weights @ odd[:, :half]", LEFT, f" + {RIGHT_EVEN}", ""),
        own_block_alone__left=(f"{LEFT} + odd_weights @ odd[:, :half]", LEFT),
        own_block_alone__right=(f" + {RIGHT_EVEN}", "")),
    *edits("The even block's weights are multiplied by exp(m - m0), the old output's factor. What they lack is "
        "exp(m0 - m1).", even_by_the_first_factor=(RIGHT_EVEN, "even_weights * first @ even[:, half:value_dim]")),
    *edits("The factor exp(m0 - m1) is turned round. It is at most 1, because m1 is never below m0.",
        factor_turned_round=("torch.exp(even_largest - odd_largest)", "torch.exp(odd_largest - even_largest)")),
    *edits("The even block's weights are measured from m1 at once, and multiplied by exp(m0 - m1) as well. One of "
        "the two is enough.", even_from_m1_and_corrected=("even_scores - even_largest)", "even_scores - odd_largest)")),
    *edits("The odd block's weights are measured from m0, and the halves from m1. Take exp(score - m1).",
        odd_weights_from_m0=("odd_scores - odd_largest)", "odd_scores - even_largest)")),
    *edits("The halves are exchanged: the first result has columns 0 to value_dim / 2 - 1.",
        halves_exchanged=("left / total, right / total", "right / total, left / total")),
    *edits("One block's weights were multiplied with the other block's values. Even weights go with even values.",
        weights_exchanged=("even_weights @ even[:, :half]", "even_weights @ odd[:, :half]"),
        weights_exchanged__right=("odd_weights @ odd[:, half:value_dim]", "odd_weights @ even[:, half:value_dim]")),
    *edits("The odd block's weights are measured from m0. A higher score in this block then gets a weight above 1, "
        "which may overflow. Measure them from m1, the larger of m0 and the block's maximum.",
        odd_measured_from_m0=(ODD_MAX, "even_largest"),
        odd_measured_from_m0__its_minimum=(ODD_MAX, ODD_MAX.replace("amax", "amin"))),
    *edits("One maximum is used for all heads. Each has its own: amax(dim=1, keepdim=True).",
        one_maximum_for_all=("even_scores.amax(1, keepdim=True)", "even_scores.amax()",
        "odd_scores.amax(1, keepdim=True)", "odd_scores.amax()")),
    *edits("m1 leaves out m0: it is the larger of m and the odd block's maximum. Then exp(m0 - m1) may be above 1 and "
        "overflow. Take the larger of m0 and the block's maximum.",
        even_maximum_left_out=(ODD_MAX, "torch.maximum(largest, odd_scores.amax(1, keepdim=True))")),
    *edits("m1 is the odd block's own maximum, which may be below m0. Then exp(m0 - m1) is above 1 and may overflow. "
        "Take the larger of m0 and the block's maximum.",
        odd_maximum_alone=(ODD_MAX, "odd_scores.amax(1, keepdim=True)")),
    *edits("The next pair starts from a maximum that is not m1. Set the running maximum to m1 at the end of a pair.",
        maximum_not_carried=("largest = odd_largest", "largest = even_largest"),
        maximum_not_carried__at_all=("largest = odd_largest", "")),
    *edits("The scores leave out the rotary part, of both blocks or of one. Multiply whole rows: query @ even.T.",
        rope_forgotten=("query @ even.T", LATENT_SCORES.format("even"), "query @ odd.T", LATENT_SCORES.format("odd")),
        rope_forgotten__even=("query @ even.T", LATENT_SCORES.format("even")),
        rope_forgotten__odd=("query @ odd.T", LATENT_SCORES.format("odd"))),
    *edits("The scale is computed from the width of a row or of the latent. Use the argument `scale` as it is.",
        scale_by_the_width=(".T * scale", ".T * query.shape[1] ** -0.5"),
        scale_by_the_width__latent=(".T * scale", ".T * value_dim**-0.5")),
    *edits("Both halves have the same columns. The right one starts at column value_dim / 2.",
        right_columns_of_the_left=("half:value_dim", ":half")),
    *edits("The right half takes the last columns of a row, and the rotary key is among them. End it at value_dim.",
        right_columns_at_the_end=("half:value_dim", "-half:")),
    *edits("The scores are not scaled. Multiply them by `scale`.", scale_missing=(".T * scale", ".T"),
        scale_missing__odd=("odd.T * scale", "odd.T"), scale_missing__even=("even.T * scale", "even.T")),
    *edits(NO_RUNNING_MAX,
        no_maximum=("even_scores.amax(1, keepdim=True)", "0 * largest", "odd_scores.amax(1, keepdim=True)",
        "0 * largest", "torch.full((heads, 1), -INF)", "torch.zeros(heads, 1)")),
    *edits(STARTS_AT_ZERO, maximum_starts_at_zero=("torch.full((heads, 1), -INF)", "torch.zeros(heads, 1)")),
    *edits(NOT_DIVIDED, not_divided=("left / total, right / total", "left, right"),
        not_divided__right=("right / total", "right"), not_divided__left=("left / total", "left")),
)  # fmt: skip


def _allowed(query, cache, scale, value_dim, block):
    return query.shape[0] * value_dim // 2


def _largest(seen, names):
    return max((seen.largest_results.get(name, 0) for name in names), default=0)


def _scaled(case, seen):
    """Whether what is too large is a query or a block of the cache, times or divided by a number."""
    query, *_, block = case.args
    made = {seen.largest_results.get(name) for name in ("mul", "div")}
    return seen.largest_allocation in made & {query.numel(), block * query.shape[1], 2 * block * query.shape[1]}


EXERCISE = Exercise(
    id="11.5",
    title="The seesaw",
    entries=("seesaw_attention",),
    cases=seesaw_cases,
    oracle=HALVES,
    plain=tuple(map(in_halves, PLAIN)),
    contracts=(CONTRACT,),
    models=(model_of(seesaw, CHANGES),),
    requirements=(
        Allocates(_allowed),
        FewProducts(
            lambda query, cache, scale, value_dim, block: 6 * (cache.shape[0] // (2 * block)),
            "A pair of blocks takes six: the scores of both blocks, and the weights of both with each half of the "
            "values. Compute a block's scores once, and exchange the weights.",
        ),
        Forbids(("scaled_dot_product", "scaled_dot_product_attention")),
    ),
    hints=(
        "For each quantity, write down the maximum from which it is measured: left and right from m, the even weights "
        "from m0, the odd weights from m1. At the end of the pair all must be measured from m1.",
        "first = exp(m - m0) and second = exp(m0 - m1), [heads, 1] each. Multiply the old output by both, the even "
        "block's contribution by second, and the odd block's by neither.",
        "The left worker: left = left * first + even_weights @ even[:, :half], and then left = left * second + "
        "odd_weights @ odd[:, :half].",
        "The right worker: right = right * first * second + odd_weights @ odd[:, half:value_dim], and then the even "
        "block with even_weights * second. Update the sum of the weights as the left worker updates its half.",
    ),
    mistakes=(
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        Mistake(
            "both_halves_at_once",
            "A product is too large: it covers both halves of the columns, or the scores of several blocks. A worker "
            "has value_dim / 2 columns, so multiply a block's weights with its half of the values.",
            when=lambda case, seen, got: _largest(seen, MATRIX_PRODUCTS) > _allowed(*case.args),
            cost=True,
        ),
        Mistake(
            "scaled_before_the_product",
            "The query or a block of the cache was multiplied by the scale, which makes a tensor of heads · width or "
            "block · width numbers. A block's scores are fewer: scale those.",
            when=lambda case, seen, got: _scaled(case, seen),
            cost=True,
        ),
    ),
)
