"""Exercise 10.2: the probabilities from the log-sum-exp, in base e and in base 2."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from course_lib.checker import Case, Exercise, Forbids, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.requirements import Requirement
from exercises.topics.attention_backward import probabilities_of
from exercises.topics.attention_backward_slips import BOUNDED_BELOW
from exercises.topics.attention_backward_steps import along_keys

INF, LN_2, LOG2_E = math.inf, math.log(2), math.log2(math.e)


def by_powers_of_2(products, log_sum, scale):
    """The same, with the factor folded into the scale."""
    reference = torch.where(log_sum == -math.inf, 0.0, log_sum * LOG2_E)
    return torch.exp2(products * (scale * LOG2_E) - reference[..., None])


@dataclass(frozen=True)
class ExponentialsOfBase2(Requirement):
    """In cases of `probabilities_in_base_2` no exponential of another base is computed."""

    id: str = "natural_exponential"

    def complaint(self, case, seen):
        used = [name for name in ("exp", "exp_", "expm1", "pow", "softmax") if seen.operations.get(name)]
        if case.entry != "probabilities_in_base_2" or not used:
            return None
        return (
            f"`probabilities_in_base_2` calls `{used[0]}`, and is to use torch.exp2 alone: it is the exponential that "
            "a GPU has an instruction for. e^x is 2^(x · log2(e)); multiply both the products and L by log2(e)."
        )


def rows_of(draw, heads, rows, columns, spread, shift, hidden):
    """(scores of some columns, log-sum-exp of the whole rows): a third of each row's columns lies elsewhere."""
    whole = draw.normal(heads, rows, columns + max(1, columns // 2), scale=spread, shift=shift)
    whole = hidden(draw, whole)
    log_sum = torch.logsumexp(whole.double(), -1).float()
    return whole[..., :columns].contiguous(), log_sum


def all_seen(draw, scores):
    return scores


def causal(draw, scores):
    """Row i sees the columns up to i + 1."""
    rows, columns = scores.shape[-2:]
    later = torch.arange(columns)[None, :] > torch.arange(rows)[:, None] + 1
    return scores.masked_fill(later, -math.inf)


def blind_rows(draw, scores):
    """Every other row sees nothing."""
    scores = causal(draw, scores)
    scores[:, ::2] = -math.inf
    return scores


def hidden_here(draw, scores):
    """The first row sees only columns that lie elsewhere: its log-sum-exp is finite."""
    scores = scores.clone()
    scores[:, 0, : -max(1, scores.shape[-1] // 3)] = -math.inf
    return scores


MASKS = (
    Level(all_seen, ""),
    Level(causal, "causal"),
    Level(blind_rows, "every other row sees nothing"),
    Level(hidden_here, "a row whose visible keys all lie elsewhere"),
)
SPREADS = (Level((1.0, 0.0), ""), Level((50.0, 0.0), "scores of ±150"), Level((2.0, -160.0), "scores near -160"),
           Level((2.0, 120.0), "scores near 120"), Level((2.0, -3e4), "scores near -30,000"),
           Level((500.0, 0.0), "scores of ±1,500"))  # fmt: skip


def scores_drawn(draw, *, heads, rows, columns, spread, mask):
    return rows_of(draw, heads, rows, columns, *spread, mask)


def products_drawn(draw, *, heads, rows, columns, spread, mask, head_dim):
    scores, log_sum = scores_drawn(draw, heads=heads, rows=rows, columns=columns, spread=spread, mask=mask)
    scale = 1 / math.sqrt(head_dim)
    return scores / scale, log_sum, scale


CHOICES = {"heads": (1, 3), "rows": (1, 2, 9), "columns": (1, 2, 9, 40), "spread": SPREADS, "mask": MASKS}
SAYS = {"spread": "of any size", "mask": "-inf for a query that sees no", "columns": "S for these columns"}


CONTRACTS = (
    Contract(scores_drawn, CHOICES, SAYS, entry="probabilities_from_lse", most=12),
    Contract(
        products_drawn,
        {**CHOICES, "head_dim": (16, 64, 100)},
        {"head_dim": "a number from 1e-6 to 1000"},
        entry="probabilities_in_base_2",
        most=12,
    ),
)


def probability_cases(draw):
    def at_the_end(name, scale=None):
        """Scores of ±2¹²⁷, or products from which they come: the largest first, hidden ones and a blind row behind."""
        end = 2.0**127
        scores = torch.tensor([[[end, -end, -math.inf], [-end, -end, -math.inf], [-math.inf] * 3]])
        log_sum = torch.tensor([[end, -end, -math.inf]])
        if scale is None:
            return Case(name, (scores, log_sum), "probabilities_from_lse")
        return Case(name, (scores, log_sum * scale, scale), "probabilities_in_base_2")

    def natural(name, *args):
        return Case(name, rows_of(draw, *args), "probabilities_from_lse")

    def base_2(name, head_dim, *args):
        scores, log_sum = rows_of(draw, *args)
        return Case(name, (scores * math.sqrt(head_dim), log_sum, 1 / math.sqrt(head_dim)), "probabilities_in_base_2")

    low = rows_of(Draw(102), 1, 5, 7, 1.0, -(2.0**20), causal)
    return [
        natural("2 heads, 4 queries, 4 of 6 keys", 2, 4, 4, 1.0, 0.0, all_seen),
        natural("scores of ±150: exp overflows", 1, 8, 16, 50.0, 0.0, all_seen),
        natural("causal, scores near -160", 1, 7, 7, 2.0, -160.0, causal),
        Case("causal, scores near -2²⁰", low, "probabilities_from_lse"),
        natural("causal, all scores -2³²", 1, 4, 6, 0.0, -(2.0**32), causal),
        natural("every other query sees no key", 2, 6, 8, 1.0, 0.0, blind_rows),
        at_the_end("scores of ±2¹²⁷, hidden ones behind"),
        base_2("base 2: 2 heads, 4 queries, 4 of 6 keys, head dimension 64", 64, 2, 4, 4, 1.0, 0.0, all_seen),
        base_2("base 2: scores of ±150, head dimension 100", 100, 1, 8, 16, 50.0, 0.0, all_seen),
        Case("base 2: causal, scores near -2²⁰", (low[0] * 4.0, low[1], 0.25), "probabilities_in_base_2"),
        base_2("base 2: causal, all scores -2³²", 16, 1, 4, 6, 0.0, -(2.0**32), causal),
        base_2("base 2: every other query sees no key", 32, 2, 6, 8, 1.0, 0.0, blind_rows),
        at_the_end("base 2: products of ±2¹²⁷, scale 1/16", 1 / 16),
        at_the_end("base 2: scores of ±2¹²⁷, scale 1", 1.0),
        base_2("base 2: a scale of 4", 1 / 16, 1, 3, 5, 1.0, 0.0, all_seen),
        base_2("base 2: a scale of 1e-6", 1e12, 2, 3, 40, 1.0, 0.0, all_seen),
        base_2("base 2: a scale of 1000", 1e-6, 1, 3, 5, 50.0, 0.0, all_seen),
    ]


def probabilities(scores, log_sum):
    """P of scores [..., rows, columns] and L [..., rows]; zeros in a row that sees nothing."""
    blind = log_sum == -INF
    reference = torch.where(blind, 0.0, log_sum)[..., None]
    exponent = scores - reference
    return torch.exp(exponent)


def in_base_2(products, log_sum, scale):
    """The same of scores that are still to be scaled; 2^(x · log2 e) is e^x."""
    return probabilities(products * scale, log_sum)


P, DIFFERENCE, REFERENCE = "torch.exp(exponent)", "scores - reference", "torch.where(blind, 0.0, log_sum)"
MIXED = "Both terms of the exponent must be in units of log 2: "
OF_ONES = (
    "In a row that sees no key the difference is 0, and exp(0) is 1: NaN was replaced by 0, or -inf by one and the "
    "same finite number in the scores and in L. Such a query has no probabilities: its row is 0."
)
BOTH_REPLACED = (1e4, 1e5, 1e6, 1e30)  # what stands for -inf in scores and L alike
SHARED = (
    *edits(
        "L is missing: exp(S) is not divided by the row's sum. P = exp(S - L).", log_sum_missing=(DIFFERENCE, "scores")
    ),
    *edits(
        "L is added. It is subtracted: dividing by the sum exp(L) is subtracting L in the exponent.",
        log_sum_added=(DIFFERENCE, "scores + reference"),
    ),
    *edits(
        "exp(S) is divided by L. L is the logarithm of the sum: subtract it before exp.",
        divided_by_the_log_sum=(P, "torch.exp(scores) / reference"),
    ),
    *edits(
        "exp(S) is divided by exp(L). Both overflow where scores are large, and both are 0 where they are far below "
        "zero. Subtract first: exp(S - L).",
        exponentials_divided=(
            P,
            "torch.where(blind[..., None], 0.0, torch.exp(scores) / torch.exp(log_sum)[..., None])",
        ),
        exponentials_divided__unguarded=(P, "torch.exp(scores) / torch.exp(log_sum)[..., None]"),
        exponentials_divided__times_the_inverse=(P, "torch.exp(scores) * torch.exp(-reference)"),
    ),
    *edits(
        "The row's maximum is subtracted, and not L. Then the row adds up to anything from 1 up, and the sum is still "
        "missing: L holds both.",
        maximum_for_log_sum=("blind = log_sum == -INF", "log_sum = scores.amax(-1)\nblind = log_sum == -INF"),
    ),
    *edits(
        "The rows were normalised over the columns at hand. They are a part of each row, and the sum over the whole "
        "row is in L already: P = exp(S - L), element by element.",
        normalised_over_these_columns=(P, "torch.softmax(scores, -1).nan_to_num(nan=0.0)"),
        normalised_over_these_columns__unguarded=(P, "torch.softmax(scores, -1)"),
        normalised_over_these_columns__after_the_difference=(
            P,
            f"({P} / {P}.sum(-1, keepdim=True)).nan_to_num(nan=0.0)",
        ),
    ),
    *edits(
        "L is subtracted by columns. There is one for each query, a row: log_sum_exp[..., None].",
        log_sum_by_keys=(DIFFERENCE, "scores - along_keys(reference, scores)"),
    ),
    *edits(
        "The difference is the wrong way round: P = exp(S - L), not exp(L - S).",
        difference_turned_round=(DIFFERENCE, "reference - scores"),
    ),
    *edits(
        "L is replaced by 0 where it is negative. A negative L is a number like any other: only -inf is replaced.",
        negative_log_sum_as_zero=(DIFFERENCE, "scores - reference.clamp(min=0.0)"),
    ),
    *BOUNDED_BELOW,
    *edits(
        "A query that sees no key has L = -inf, and -inf - (-inf) is NaN. Subtract 0 in such rows: exp(-inf - 0) is 0.",
        is_nan=True,
        blind_rows_nan=(REFERENCE, "log_sum"),
    ),
    *edits(
        "A finite number stands for -inf where a key is hidden. All scores of a row, and L, may lie below it, and then "
        "exp(S - L) is infinite there. Leave -inf as it is: exp(-inf) is 0.",
        hidden_scores_finite=(DIFFERENCE, "torch.where(scores == -INF, -1e9, scores) - reference"),
        hidden_scores_finite__farther=(DIFFERENCE, "torch.where(scores == -INF, -1e30, scores) - reference"),
    ),
    *edits(
        "Hidden scores were replaced by 0, as L is where it is -inf, and exp(0 - L) is not 0. Replace L alone: a score "
        "of -inf has P = 0 by itself.",
        hidden_scores_zero=(DIFFERENCE, "torch.where(scores == -INF, 0.0, scores) - reference"),
    ),
    *edits(
        "Where one query sees no key, others lose their probabilities or their L too. Each query has an L of its own: "
        "choose row by row, with torch.where.",
        one_blind_row_empties_all=(P, f"torch.where(blind.any(), 0.0, {P})"),
        one_blind_row_empties_all__of_its_head=(P, f"torch.where(blind.any(-1)[:, None, None], 0.0, {P})"),
        one_blind_row_empties_all__of_its_log_sum=(REFERENCE, "torch.where(blind.any(), 0.0, log_sum)"),
    ),
    *edits(OF_ONES, blind_rows_of_ones=(DIFFERENCE, "(scores - log_sum[..., None]).nan_to_num(nan=0.0)")),
    *edits(
        OF_ONES,
        alone=True,
        **{
            f"blind_rows_of_ones__both_{bound:.0e}": (
                DIFFERENCE,
                f"scores.clamp(min=-{bound}) - log_sum.clamp(min=-{bound})[..., None]",
            )
            for bound in BOTH_REPLACED
        },
    ),
)
NATURAL = (
    *SHARED,
    *edits(
        "This is 2^(S - L). P is e^(S - L): use torch.exp here.", base_2_of_natural_numbers=(P, "torch.exp2(exponent)")
    ),
)
BASE_2 = (
    *edits(
        "The products are not multiplied by the scale. L belongs to scale · Q Kᵀ.",
        scale_missing=("products * scale", "products"),
    ),
    *edits(
        "The products are multiplied by the scale twice.", scale_twice=("products * scale", "products * scale * scale")
    ),
    *edits(
        "exp2 gets natural numbers, so 2^(S - L) comes out. e^x is 2^(x · log2(e)): multiply by log2(e) = 1.4427.",
        log2e_missing=(DIFFERENCE, "(scores - reference) * LN_2"),
    ),
    *edits(
        f"{MIXED}the scores are, and L is still a natural logarithm. Multiply it by log2(e) too.",
        log_sum_natural=(DIFFERENCE, "scores - reference * LN_2"),
    ),
    *edits(
        f"{MIXED}L is, and the scores are not. Multiply them by log2(e) too.",
        scores_natural=(DIFFERENCE, "scores * LN_2 - reference"),
    ),
    *edits(
        "L is multiplied by the scale, along with the products. It is the log-sum-exp of scores that were scaled "
        "already: it gets the factor log2(e) alone.",
        log_sum_scaled=("products * scale, log_sum", "products * scale, log_sum * scale"),
    ),
    *edits(
        "The factor is ln 2 = 0.6931 where log2(e) = 1.4427 belongs: e^x = 2^(x · log2 e).",
        ln2_for_log2e=(DIFFERENCE, "(scores - reference) * (LN_2 * LN_2)"),
        ln2_for_log2e__in_the_log_sum=(DIFFERENCE, "scores - reference * (LN_2 * LN_2)"),
    ),
    *SHARED,
    *edits("", by_powers_of_2=(DIFFERENCE, "scores * LOG2_E - reference * LOG2_E", P, "torch.exp2(exponent)")),
)


def rounded_log2_e(case, seen, got) -> bool:
    """A `when` for every failing case: right but for a log2(e) of a few digits."""
    if case.entry != "probabilities_in_base_2" or not isinstance(got, torch.Tensor) or not got.isfinite().all():
        return False
    products, log_sum, scale = case.args
    right = probabilities_of(products.double() * scale, log_sum.double())
    off = (got.double() - right).abs()
    rounded = [torch.exp2(torch.log(right) * digits) for digits in (1.4, 1.44, 1.443, 1.4427, 1.44269)]
    return any(bool(((got.double() - made).abs() <= 0.2 * off + 1e-6).all()) for made in rounded)


EXERCISE = Exercise(
    id="10.2",
    title="Probabilities from the log-sum-exp",
    entries=("probabilities_from_lse", "probabilities_in_base_2"),
    cases=probability_cases,
    oracle={"probabilities_from_lse": probabilities, "probabilities_in_base_2": in_base_2},
    inputs_belong_together=True,
    contracts=CONTRACTS,
    plain=(
        lambda scores, log_sum, scale=1.0: by_powers_of_2(scores, log_sum, scale),
        lambda scores, log_sum, scale=1.0: probabilities_of(scores * (scale * LOG2_E) / LOG2_E, log_sum),
    ),
    models=(
        model_of(probabilities, NATURAL, uses=(along_keys,), entry="probabilities_from_lse"),
        model_of(in_base_2, BASE_2, (probabilities,), (along_keys,), entry="probabilities_in_base_2"),
    ),
    requirements=(
        Forbids(("_softmax", "softmax", "logsumexp", "sum", "amax", "max", "cumsum")),
        ExponentialsOfBase2(),
    ),
    hints=(
        "A probability is exp(S) divided by the row's sum of such exponentials. The sum is exp(L). What does a "
        "division become in the exponent?",
        "P = exp(S - L), with L as a column: log_sum_exp[..., None]. A hidden key has the score -inf and gets "
        "exp(-inf) = 0 by itself, unless L is -inf too.",
        "reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp), then "
        "torch.exp(scores - reference[..., None]).",
        "e^x = 2^(x · log2(e)). So the exponent is (scale · products - L) · log2(e): multiply the products by "
        "scale · log2(e), and L by log2(e) alone.",
    ),
    mistakes=(
        Mistake(
            "log2e_rounded",
            "log2(e) has too few digits. Its error is multiplied by S - L, and is then a factor of P: write "
            "math.log2(math.e), which has all digits.",
            when=rounded_log2_e,
            every=True,
        ),
    ),
)
