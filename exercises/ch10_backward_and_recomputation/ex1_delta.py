"""Exercise 10.1: the softmax's gradient, and its correction from O and dO alone."""

from __future__ import annotations

from functools import partial

import torch

from course_lib.checker import Case, Exercise, Forbids, Mistake, NewTensors, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import any_strides
from exercises.topics.attention_backward import at_least_float32, delta_of


def softmax_gradient(probabilities, gradients):
    """dS [heads, queries, keys] of P and dP; zeros for a row of zeros."""
    delta = (probabilities * gradients).sum(-1, keepdim=True)
    return probabilities * (gradients - delta)


def _summed_otherwise(product, sign):
    """Sums over the last dimension, off by what another order of addition may change: 2 ε Σ |products|."""
    return product.sum(-1) + sign * 2 * torch.finfo(torch.float32).eps * product.abs().sum(-1)


def by_two_products(probabilities, probability_gradients, sign=1):
    """The same, multiplied out: rounded differently. Where dP lies far from 0, only rounding is left of dP - Δ."""
    product = probabilities * probability_gradients
    return product - probabilities * _summed_otherwise(product, sign)[..., None]


def delta_summed_otherwise(output, output_gradient, sign=1):
    output, output_gradient = at_least_float32(output, output_gradient)
    return _summed_otherwise(output * output_gradient, sign)


def probabilities_of_rows(draw, *shape, score=1.0):
    return torch.softmax(draw.normal(*shape, scale=score), dim=-1)


def delta_cases(draw):
    def gradient(name, probabilities, gradients):
        return Case(name, (probabilities, gradients), "softmax_gradient")

    def delta(name, output, output_gradient):
        return Case(name, (output, output_gradient), "row_delta")

    blind = probabilities_of_rows(draw, 2, 4, 6)
    blind[:, 1] = 0.0
    sure = torch.zeros(1, 3, 5)
    sure[:, :, 2] = 1.0
    prime = draw.choice((31, 37, 61))
    wide = draw.normal(2, 17, 128, dtype=torch.float16, scale=4.0, shift=3.0)
    return [
        gradient("2 heads, 4 × 4", probabilities_of_rows(draw, 2, 4, 4), draw.normal(2, 4, 4)),
        gradient(f"3 × {prime}, gradients near 10", probabilities_of_rows(draw, 1, 3, prime),
                 draw.normal(1, 3, prime, shift=10.0)),
        gradient("rows that put all weight on one key: dS is 0", sure, draw.normal(1, 3, 5)),
        gradient("the second query sees no key", blind, draw.normal(2, 4, 6, shift=1.0)),
        delta("2 heads, 5 queries, dimension 5", draw.normal(2, 5, 5), draw.normal(2, 5, 5)),
        delta(f"{prime} queries, dimension 64", draw.normal(1, prime, 64, shift=1.0), draw.normal(1, prime, 64)),
        delta("float16, dimension 128", wide, draw.normal(2, 17, 128, dtype=torch.float16)),
        delta(
            "bfloat16, dO of a sum: all ones, every stride 0",
            draw.normal(3, 7, 64).bfloat16(),
            torch.ones((), dtype=torch.bfloat16).expand(3, 7, 64),
        ),
    ]  # fmt: skip


SCORES = (Level(1.0, ""), Level(6.0, "peaked rows"), Level(0.0, "equal probabilities"))

GRADIENT_CONTRACT = Contract(
    lambda draw, *, heads, query_length, key_length, score, shift, layout: (
        probabilities_of_rows(draw, heads, query_length, key_length, score=score),
        layout(draw, draw.normal(heads, query_length, key_length, shift=shift)),
    ),
    choices={
        "heads": (1, 3),
        "query_length": (1, 2, 17),
        "key_length": (1, 2, 17, 65),
        "score": SCORES,
        "shift": (Level(0.0, ""), Level(10.0, "gradients near 10"), Level(-3.0, "gradients near -3")),
        "layout": any_strides("dP"),
    },
    says={"layout": "float32, any strides", "query_length": "[heads, query_length, key_length], float32"},
    entry="softmax_gradient",
    most=10,
)

DELTA_CONTRACT = Contract(
    lambda draw, *, heads, query_length, head_dim, dtype, shift, output_layout, gradient_layout: (
        output_layout(draw, draw.normal(heads, query_length, head_dim, shift=shift, scale=2.0).to(dtype)),
        gradient_layout(draw, draw.normal(heads, query_length, head_dim, shift=1.0).to(dtype)),
    ),
    choices={
        "heads": (1, 3),
        "query_length": (1, 2, 17),
        "head_dim": (1, 8, 17, 128),
        "dtype": (torch.float32, torch.float16, torch.bfloat16),
        "shift": (Level(0.0, ""), Level(5.0, "outputs near 5")),
        "output_layout": any_strides("O"),
        "gradient_layout": any_strides("dO"),
    },
    says={
        "dtype": "float32, float16 or bfloat16",
        "output_layout": "float32, float16 or bfloat16; any strides",
        "gradient_layout": "same shape and dtype; any strides",
    },
    entry="row_delta",
    most=10,
)


LETTERS = (
    "Each row of {0} is multiplied with the sum of many rows of {1}, or the other way round: so einsum does where a "
    "letter stands in one of the two alone. A query belongs to itself: {2!r}."
)
OF_A_ROW, DP, DS = (
    "(probabilities * gradients).sum(-1, keepdim=True)",
    "gradients - delta",
    "probabilities * (gradients - delta)",
)
GRADIENT_SLIPS = (
    *edits(
        "dS is P ∘ dP, and Δ is missing. A larger score for one key takes probability from all others of its row: "
        "subtract Δ = rowsum(P ∘ dP) from dP.",
        delta_missing=(DP, "gradients"),
    ),
    *edits(
        "Only the effect of each score on its own probability is counted: P (1 - P) dP. The sum in the denominator "
        "holds every score of the row, so each score changes all probabilities of the row: dS = P ∘ (dP - Δ).",
        diagonal_alone=(DS, "probabilities * (1 - probabilities) * gradients"),
    ),
    *edits(
        "Δ is the plain sum of dP over the row. It is a sum weighted with the probabilities: Δ = rowsum(P ∘ dP).",
        delta_without_probabilities=(OF_A_ROW, "gradients.sum(-1, keepdim=True)"),
    ),
    *edits(
        "Δ is a mean over the row. It is a sum of P ∘ dP: the probabilities are the weights, and they add up to 1 "
        "already.",
        delta_averaged=(OF_A_ROW, "(probabilities * gradients).mean(-1, keepdim=True)"),
        delta_averaged__of_the_gradients=(OF_A_ROW, "gradients.mean(-1, keepdim=True)"),
    ),
    *edits(
        LETTERS.format("P", "dP", "hqk,hqk->hq"),
        letters_differ=(  # "hqk,hjk->hq"
            OF_A_ROW,
            "(probabilities * gradients.sum(-2, keepdim=True)).sum(-1, keepdim=True)",
        ),
        letters_differ__in_the_probabilities=(  # "hjk,hqk->hq"
            OF_A_ROW,
            "(probabilities.sum(-2, keepdim=True) * gradients).sum(-1, keepdim=True)",
        ),
        letters_differ__of_the_heads=(  # "hqk,gqk->hq"
            OF_A_ROW,
            "(probabilities * gradients.sum(0)).sum(-1, keepdim=True)",
        ),
    ),
    *edits(
        "Δ is summed over the queries, so there is one for each key. Each query has its own: sum over the last "
        "dimension, the keys.",
        delta_of_columns=(OF_A_ROW, "(probabilities * gradients).sum(-2, keepdim=True)"),
    ),
    *edits(
        "One Δ serves all queries of a head. Each query has its own: sum over the last dimension alone.",
        delta_of_the_whole_head=(OF_A_ROW, "(probabilities * gradients).sum((-2, -1), keepdim=True)"),
    ),
    *edits(
        "One Δ serves all heads and queries. Each query has its own: sum over the last dimension alone, with "
        "keepdim=True.",
        delta_of_all_heads=(OF_A_ROW, "(probabilities * gradients).sum()"),
    ),
    *edits(
        "Δ is summed over the heads too. einsum adds over every letter that the result does not have: keep h and "
        "q, 'hqk,hqk->hq'.",
        heads_summed=(OF_A_ROW, "(probabilities * gradients).sum((0, -1))[:, None]"),  # "hqk,hqk->q"
        heads_summed__for_each_key=(OF_A_ROW, "(probabilities * gradients).sum((0, 1))"),  # "hqk,hqk->k"
    ),
    *edits("Δ is added to dP. It is subtracted: dS = P ∘ (dP - Δ).", delta_added=(DP, "gradients + delta")),
    *edits(
        "Δ is subtracted after the multiplication with P. It stands inside: dS = P ∘ (dP - Δ), so that the row adds "
        "up to 0.",
        delta_not_weighted=(DS, "probabilities * gradients - delta"),
    ),
    *edits("dS is dP - Δ. Each element is also multiplied with its probability.", probabilities_left_out=(DS, DP)),
    *edits(
        "dP is multiplied with P twice: once in Δ's product and once outside. Keep dP itself.",
        probabilities_twice=(DP, "probabilities * gradients - delta"),
    ),
    *edits(
        "The sign is the wrong way round: dS = P ∘ (dP - Δ), not P ∘ (Δ - dP).",
        sign_turned_round=(DP, "delta - gradients"),
    ),
    *edits(
        "A query that sees no key has a row of zeros in P: divided by its sum it is NaN, and so is a softmax of its "
        "logarithms. dS = P ∘ (dP - Δ) needs neither, and is 0 there.",
        is_nan=True,
        blind_rows_nan=(DS, f"torch.where((probabilities == 0).all(-1, keepdim=True), torch.nan, {DS})"),
    ),
)


ROUNDED = (
    "The product of O and dO is rounded to 16 bits before it is summed. Convert both to float32 first: what is left "
    "of dP - Δ is often much smaller than Δ."
)


def rounded_before_the_sum(case, seen, got) -> bool:
    """A `when` for every failing case: 16 bits went in, and the result is off by no more than they round off."""
    output, gradient = case.args
    if output.element_size() != 2 or not isinstance(got, torch.Tensor) or got.shape != output.shape[:-1]:
        return False
    product = output.double() * gradient.double()
    error, epsilon = (got.double() - product.sum(-1)).abs(), torch.finfo(output.dtype).eps
    if got.element_size() == 2 and bool((error <= epsilon * product.sum(-1).abs()).all()):
        return False  # the result alone is rounded, as its dtype says
    return bool((error <= 4 * epsilon * product.abs().sum(-1)).all())


SUMMED = "(output * output_gradient).sum(-1)"
DELTA_SLIPS = (
    *edits(
        "Δ is a mean over head_dim. It is a sum: rowsum(O ∘ dO).",
        delta_averaged=(SUMMED, "(output * output_gradient).mean(-1)"),
    ),
    *edits(
        "The sum runs over the queries. There is one Δ for each query: sum over the last dimension.",
        delta_over_the_queries=(SUMMED, "(output * output_gradient).sum(-2)"),
    ),
    *edits(
        "The sum runs over the heads. There is one Δ for each query of each head: sum over the last dimension.",
        delta_over_the_heads=(SUMMED, "(output * output_gradient).sum(0)"),
    ),
    *edits(
        "O is missing: Δ is the sum of O ∘ dO, element by element.",
        delta_of_the_gradient_alone=(SUMMED, "output_gradient.sum(-1)"),
    ),
    *edits(
        "dO is missing: Δ is the sum of O ∘ dO, element by element.",
        delta_of_the_output_alone=(SUMMED, "output.sum(-1)"),
    ),
    *edits(
        "Δ has a factor 1/√head_dim. The scale belongs to the scores alone, and O has none of it.",
        delta_scaled=(SUMMED, f"{SUMMED} * output.shape[-1] ** -0.5"),
    ),
    *edits(
        LETTERS.format("O", "dO", "hqd,hqd->hq"),
        letters_differ=(SUMMED, "(output * output_gradient.sum(-2, keepdim=True)).sum(-1)"),  # "hqd,hkd->hq"
        letters_differ__in_the_output=(  # "hkd,hqd->hq"
            SUMMED,
            "(output.sum(-2, keepdim=True) * output_gradient).sum(-1)",
        ),
        letters_differ__of_the_heads=(SUMMED, "(output * output_gradient.sum(0)).sum(-1)"),  # "hqd,gqd->hq"
        letters_differ__of_both=(SUMMED, "(output * output_gradient.sum((0, 1))).sum(-1)"),  # "hqd,gkd->hq"
    ),
    *edits(
        "Heads or queries are summed as well. Δ has one number for each query of each head: sum over the last "
        "dimension alone, in einsum 'hqd,hqd->hq'.",
        heads_or_queries_summed=(SUMMED, "(output * output_gradient).sum((0, -1))"),  # "hqd,hqd->q"
        heads_or_queries_summed__for_all_heads=(
            SUMMED,
            "(output * output_gradient).sum((0, -1)).expand(output.shape[:2])",
        ),
        heads_or_queries_summed__of_the_queries=(SUMMED, "(output * output_gradient).sum((1, 2))"),  # "hqd,hqd->h"
        heads_or_queries_summed__for_all_queries=(
            SUMMED,
            "(output * output_gradient).sum((1, 2))[:, None].expand(output.shape[:2])",
        ),
        heads_or_queries_summed__for_all=(SUMMED, "(output * output_gradient).sum().expand(output.shape[:2])"),
        heads_or_queries_summed__of_both=(SUMMED, "(output * output_gradient).sum()"),
    ),
    *edits(
        "Heads and queries are exchanged. Δ is [heads, query_length]: in einsum 'hqd,hqd->hq'.",
        heads_last=(SUMMED, f"{SUMMED}.transpose(0, 1)"),  # "hqd,hqd->qh"
    ),
    *edits("The sign is turned round: Δ is subtracted later, in dP - Δ.", delta_negative=(SUMMED, f"-{SUMMED}")),
    *edits(
        "The sums of O and of dO are multiplied. Multiply element by element first, then sum.",
        sums_multiplied=(SUMMED, "output.sum(-1) * output_gradient.sum(-1)"),
    ),
    *edits(
        "The result has a last dimension of 1. Δ is [heads, query_length]: no keepdim.",
        dimension_kept=(SUMMED, f"{SUMMED}[..., None]"),
    ),
)


EXERCISE = Exercise(
    id="10.1",
    title="One number for each query",
    entries=("softmax_gradient", "row_delta"),
    cases=delta_cases,
    oracle={"softmax_gradient": softmax_gradient, "row_delta": delta_of},
    plain={
        "softmax_gradient": (by_two_products, partial(by_two_products, sign=-1)),
        "row_delta": (delta_summed_otherwise, partial(delta_summed_otherwise, sign=-1)),
    },
    contracts=(GRADIENT_CONTRACT, DELTA_CONTRACT),
    models=(
        model_of(softmax_gradient, GRADIENT_SLIPS, entry="softmax_gradient"),
        model_of(delta_of, DELTA_SLIPS, entry="row_delta"),
    ),
    requirements=(Forbids(("_softmax_backward_data", "_softmax")), NewTensors()),
    hints=(
        "Begin with one row of three probabilities. If score 0 grows a little, its probability grows, and the two "
        "others shrink, since they add up to 1. dS must take all three changes into account.",
        "The derivative of probability j by score k is P_j (1 if j = k else 0) - P_j P_k. Multiply with dP_j and sum "
        "over j: dS_k = P_k dP_k - P_k Σ_j P_j dP_j.",
        "So softmax_gradient is probabilities * (probability_gradients - delta), where delta sums P ∘ dP over the last "
        "dimension, with keepdim=True.",
        "For row_delta put dP = dO Vᵀ into Σ_j P_ij dP_ij and change the order of the two sums. Σ_j P_ij V_jd is O_id. "
        "Convert both tensors to float32 before you multiply: (output.float() * output_gradient.float()).sum(dim=-1).",
    ),
    mistakes=(Mistake("products_in_16_bits", ROUNDED, when=rounded_before_the_sum, every=True),),
)
