"""Exercise 11.2: one step of latent attention in PyTorch, with the matrices absorbed."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Allocates, Case, Exercise, Forbids, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import any_strides
from exercises.topics.evidence import COMPUTED_IN_16_BITS, right_to_three_digits


def absorbed_step(query, query_rope, cache, key_up, value_up):
    latent_dim = key_up.shape[2]
    latents, rope_keys = cache[:, :latent_dim], cache[:, latent_dim:]
    absorbed = torch.einsum("hd,hdc->hc", query, key_up)  # [heads, latent_dim]
    head_dim = query.shape[1] + query_rope.shape[1]
    scores = (absorbed @ latents.T + query_rope @ rope_keys.T) * head_dim**-0.5
    weights = torch.softmax(scores, dim=1)
    mixed = weights @ latents  # [heads, latent_dim]
    return torch.einsum("hc,hvc->hv", mixed, value_up)


def expanded_step(query, query_rope, cache, key_up, value_up):
    """The same with keys and values of every head: what else is as good, rounded otherwise."""
    latents, rope_keys = cache[:, : key_up.shape[2]], cache[:, key_up.shape[2] :]
    keys, values = (latents @ matrix.transpose(1, 2) for matrix in (key_up, value_up))
    scores = (keys @ query[:, :, None])[:, :, 0] + query_rope @ rope_keys.T
    weights = torch.softmax(scores / math.sqrt(query.shape[1] + query_rope.shape[1]), dim=1)
    return (weights[:, None, :] @ values)[:, 0]


def strayed(sign):
    """Scores off by as much as sums in another order may be, and weights by as much as a log-sum-exp of that size."""

    def step(query, query_rope, cache, key_up, value_up):
        latent_dim = key_up.shape[2]
        absorbed = torch.einsum("hd,hdc->hc", query.abs(), key_up.abs())
        sizes = torch.cat([absorbed, query_rope.abs()], dim=1) @ cache.abs().T
        exact = torch.cat([torch.einsum("hd,hdc->hc", query, key_up), query_rope], dim=1) @ cache.T
        turns = sign * (1.0 - 2.0 * (torch.arange(cache.shape[0]) % 2))
        scores = (exact + 2 * torch.finfo(torch.float32).eps * turns * sizes) / math.sqrt(
            query.shape[1] + query_rope.shape[1]
        )
        common = 1 + sign * torch.finfo(torch.float32).eps * torch.logsumexp(scores, 1, keepdim=True).abs()
        mixed = common * torch.softmax(scores, dim=1) @ cache[:, :latent_dim]
        return torch.einsum("hc,hvc->hv", mixed, value_up)

    return step


def made(draw, *, heads, head_dim, rope_dim, latent_dim, value_dim, length, score, cache_layout, weight_layout):
    """Scores of about this standard deviation."""
    size = math.sqrt(score)
    key_up = draw.normal(heads, head_dim, latent_dim, scale=latent_dim**-0.5)
    value_up = draw.normal(heads, value_dim, latent_dim, scale=latent_dim**-0.5)
    query, query_rope = draw.normal(heads, head_dim, scale=size), draw.normal(heads, rope_dim, scale=size)
    cache = cache_layout(draw, draw.normal(length, latent_dim + rope_dim, scale=size))
    return query, query_rope, cache, weight_layout(draw, key_up), weight_layout(draw, value_up)


def _plainly(draw, tensor):
    return tensor


def absorb_cases(draw):
    def case(name, heads, head_dim, rope_dim, latent_dim, value_dim, length, score=1.0):
        sizes = {"heads": heads, "head_dim": head_dim, "rope_dim": rope_dim, "latent_dim": latent_dim}
        layouts = {"cache_layout": _plainly, "weight_layout": _plainly}
        return Case(name, made(draw, **sizes, value_dim=value_dim, length=length, score=score, **layouts))

    far_below = case("all scores below -100", 4, 16, 8, 24, 16, 30)
    far_below.args[1].fill_(10.0)
    far_below.args[2][:, 24:] = -9.0  # the rotary parts alone make -147
    return [
        case("4 heads of 16, a latent of 24, 30 tokens", 4, 16, 8, 24, 16, 30),
        case("one token", 3, 8, 4, 12, 10, 1),
        case("values that are narrower than keys", 4, 16, 8, 24, 6, 30),
        case("scores of ±150: exp overflows", 4, 16, 8, 24, 16, 40, 55.0),
        far_below,
        case("2 heads of 32, a latent of 16, 300 tokens: no key or value of a head fits", 2, 32, 8, 16, 32, 300),
        case("16 heads, a latent of 64, 500 tokens", 16, 32, 16, 64, 32, 500),
    ]


CONTRACT = Contract(
    made,
    choices={
        "heads": (1, 2, 5),
        "head_dim": (1, 12, 32),
        "rope_dim": (1, 8, 20),
        "latent_dim": (1, 7, 40),
        "value_dim": (1, 12, 32),
        "length": (1, 2, 37, 200),
        "score": (Level(1.0, ""), Level(60.0, "scores of ±150")),
        "cache_layout": any_strides("cache"),
        "weight_layout": any_strides("the weights", expandable=False),
    },
    says={"length": "length at least 1", "cache_layout": "with any strides", "weight_layout": "with any strides"},
    most=10,
)

BOTH = "(absorbed @ latents.T + query_rope @ rope_keys.T) * head_dim**-0.5"
SCALE = "The scale is 1/√(head_dim + rope_dim). In the expanded form, queries and keys have that length, such as 192. "
SOFTMAX = "torch.softmax(scores, dim=1)"
OF_QUERY, OF_VALUES = "torch.einsum('hd,hdc->hc', query, key_up)", "torch.einsum('hc,hvc->hv', mixed, value_up)"
EACH_PART = (
    "torch.softmax(absorbed @ latents.T * head_dim**-0.5, dim=1) {} "
    "torch.softmax(query_rope @ rope_keys.T * head_dim**-0.5, dim=1)"
)
FROM = "(scores - {0}).exp() / (scores - {0}).exp().sum(1, keepdim=True)"
CHANGES = (
    *edits("The rotary part is missing from the scores: add query_rope @ rope_keys.T.",
        rope_forgotten=(" + query_rope @ rope_keys.T", "")),
    *edits("The scores are those of the rotary parts alone. Add the product of the absorbed queries with the latents.",
        latent_part_forgotten=("absorbed @ latents.T + query_rope", "query_rope")),
    *edits("The two parts of the scores do not have the same scale. Add them first, and then scale the sum.",
        rope_scaled_apart=(BOTH, "absorbed @ latents.T * head_dim**-0.5 + query_rope @ rope_keys.T"),
        rope_scaled_apart__latent=(BOTH, "absorbed @ latents.T + query_rope @ rope_keys.T * head_dim**-0.5"),
        rope_scaled_apart__each_by_its_own=(BOTH,
        "absorbed @ latents.T * query.shape[1] ** -0.5 + query_rope @ rope_keys.T * query_rope.shape[1] ** -0.5"),
        rope_scaled_apart__each_as_long_as_it_is=(BOTH,
        "absorbed @ latents.T * latent_dim**-0.5 + query_rope @ rope_keys.T * query_rope.shape[1] ** -0.5"),
        rope_scaled_apart__latent_by_its_own=(BOTH,
        "absorbed @ latents.T * query.shape[1] ** -0.5 + query_rope @ rope_keys.T * head_dim ** -0.5")),
    *edits(SCALE + "Absorbing changes no score, so the length of the latent is not part of the scale.",
        scale_by_the_latent=("head_dim**-0.5", "latent_dim**-0.5"),
        scale_by_the_latent__and_rope=("head_dim**-0.5", "cache.shape[1] ** -0.5")),
    *edits(SCALE + "You left out rope_dim.",
        scale_without_rope=("query.shape[1] + query_rope.shape[1]", "query.shape[1]")),
    *edits(SCALE + "The values' length is not part of it.",
        scale_of_the_values=("query.shape[1] + query_rope.shape[1]", "value_up.shape[1] + query_rope.shape[1]")),
    *edits("The scores are not scaled by 1/√(head_dim + rope_dim).", scale_missing=(" * head_dim**-0.5", "")),
    *edits("The scores are divided by head_dim + rope_dim. Divide by its square root.", root_missing=("-0.5", "-1.0")),
    *edits("The weights are scaled, after the softmax. Scale the scores, before it.",
        scaled_after_the_softmax=(BOTH, BOTH[1:BOTH.index(")")], SOFTMAX, f"{SOFTMAX} * head_dim**-0.5")),
    *edits("Each part of the scores got a softmax of its own. A score is the sum of both parts: add them first.",
        alone=True,
        softmax_of_each_part=(SOFTMAX, EACH_PART.format("+")),
        softmax_of_each_part__mean=(SOFTMAX, f"({EACH_PART.format('+')}) / 2"),
        softmax_of_each_part__product=(SOFTMAX, EACH_PART.format("*"))),
    *edits("The softmax runs over the heads. It must run over the tokens, the last dimension of [heads, length].",
        softmax_over_heads=("dim=1", "dim=0")),
    *edits("One softmax runs over all heads and tokens. Each head needs a softmax of its own, over its tokens.",
        softmax_over_everything=("torch.softmax(scores, dim=1)",
        "torch.softmax(scores.flatten(), dim=0).view_as(scores)")),
    *edits("exp overflows float32 above 88. Subtract each head's largest score first, or use torch.softmax.",
        no_maximum=("torch.softmax(scores, dim=1)", "scores.exp() / scores.exp().sum(1, keepdim=True)")),
    *edits("The scores are measured from a number that may lie far above a head's scores: 0, the largest size, or "
        "another head's maximum. Then every exponential underflows. Subtract each head's largest score itself.",
        measured_from_too_high=(SOFTMAX, FROM.format("scores.amax(1, keepdim=True).clamp(min=0)")),
        measured_from_too_high__size=(SOFTMAX, FROM.format("scores.abs().amax(1, keepdim=True)")),
        measured_from_too_high__all_heads=(SOFTMAX, FROM.format("scores.amax()"))),
    *edits("The weights are not divided by their sum. Divide each head's weights by the sum over its tokens.",
        not_divided=("torch.softmax(scores, dim=1)", "(scores - scores.amax(1, keepdim=True)).exp()")),
    *edits("A row was split in the wrong order: the latent comes first, and the rotary key after it.",
        rotary_key_first=("cache[:, :latent_dim], cache[:, latent_dim:]",
        "cache[:, query_rope.shape[1] :], cache[:, : query_rope.shape[1]]")),
    *edits("All heads use the first head's matrix. Each head has a W_UK and a W_UV of its own.",
        first_matrix_for_all=("query, key_up)", "query, key_up[:1].expand_as(key_up))"),
        first_matrix_for_all__values=("mixed, value_up)", "mixed, value_up[:1].expand_as(value_up))")),
    *edits("The products of all heads' matrices were added up: one operand lacks the index of the head. It stands in "
        'both operands and in the result, as in "hd,hdc->hc".',
        summed_over_all_heads=(OF_QUERY, OF_QUERY.replace(",hd", ",gd")),
        summed_over_all_heads__values=(OF_VALUES, OF_VALUES.replace(",hv", ",gv"))),
    *edits("Something was reshaped where it must be transposed: the latents, the rotary keys or a matrix. `reshape` "
        "keeps the numbers in their order and only begins rows elsewhere. Take .T or .transpose(1, 2).",
        reshaped_for_transposed=("latents.T", "latents.reshape(latents.T.shape)"),
        reshaped_for_transposed__rope=("rope_keys.T", "rope_keys.reshape(rope_keys.T.shape)"),
        reshaped_for_transposed__rows=(BOTH,
        "torch.cat([absorbed, query_rope], dim=1) @ cache.reshape(cache.T.shape) * head_dim**-0.5"),
        reshaped_for_transposed__key_matrices=("query, key_up)",
        "query, key_up.reshape(-1, latent_dim, query.shape[1]).transpose(1, 2))"),
        reshaped_for_transposed__value_matrices=("mixed, value_up)",
        "mixed, value_up.reshape(-1, latent_dim, value_up.shape[1]).transpose(1, 2))")),
    *edits("All heads use the first head's rotary query. Each has its own.",
        first_rotary_query_for_all=("query_rope @ rope_keys.T", "query_rope[:1] @ rope_keys.T")),
    *edits("The weighted latents were multiplied by W_UK, the keys' matrix. Multiply them by value_up.",
        key_matrix_for_values=("mixed, value_up)", "mixed, key_up if key_up.shape == value_up.shape else value_up)")),
    *edits("The query was multiplied by W_UV, the values' matrix. Multiply it by key_up.",
        value_matrix_for_keys=("query, key_up)", "query, value_up if key_up.shape == value_up.shape else key_up)")),
)  # fmt: skip

PER_HEAD = (
    "You computed a head's keys or values for all tokens, a tensor of length · head_dim numbers. "
    "Multiply the query by W_UK first, and the weighted sum of latents by W_UV last."
)


def _made_per_head(case, seen, got):
    """A tensor as large as one head's keys or values, by a product."""
    query, _, cache, _, value_up = case.args
    least = cache.shape[0] * min(query.shape[1], value_up.shape[1])
    whole = any("scaled_dot" in name for name in seen.operations)
    products = any(name in seen.operations for name in ("mm", "bmm", "matmul"))
    return not whole and products and seen.largest_allocation >= least


EXERCISE = Exercise(
    id="11.2",
    title="Absorb the matrices",
    entries=("absorbed_step",),
    cases=absorb_cases,
    oracle=absorbed_step,
    plain=(expanded_step, strayed(1.0), strayed(-1.0)),
    contracts=(CONTRACT,),
    models=(model_of(absorbed_step, CHANGES),),
    requirements=(
        Forbids(("scaled_dot_product", "scaled_dot_product_attention", "_scaled_dot_product")),
        Allocates(
            lambda query, rope, cache, key_up, value_up: max(
                key_up.numel(), value_up.numel(), query.shape[0] * max(cache.shape)
            )
        ),
    ),
    hints=(
        "Slices of the cache are views, so they copy nothing: cache[:, :latent_dim] and cache[:, latent_dim:].",
        "Each head's query [head_dim] is multiplied by its own matrix [head_dim, latent_dim]. One call is enough: "
        'torch.einsum("hd,hdc->hc", query, key_up).',
        "The scores are the sum of two products, [heads, latent_dim] with [latent_dim, length] and [heads, rope_dim] "
        "with [rope_dim, length]. Divide that sum by √(head_dim + rope_dim).",
        'weights @ latents is [heads, latent_dim]. Apply W_UV after that: torch.einsum("hc,hvc->hv", mixed, value_up).',
    ),
    mistakes=(
        Mistake("keys_made_for_a_head", PER_HEAD, when=_made_per_head, cost=True),
        Mistake("computed_in_16_bits", COMPUTED_IN_16_BITS, when=right_to_three_digits(absorbed_step), every=True),
    ),
)
