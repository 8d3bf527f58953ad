"""Wrong answers to exercise 10.2, and unusual right ones."""

from tests.submissions.edits import changed

GUARD = "reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp)  # -inf - -inf would be NaN"
NATURAL = "return torch.exp(scores - reference[..., None])"
GUARD_2 = "reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp * log2_e)  # in units of log 2"
BASE_2 = "return torch.exp2(products * (scale * log2_e) - reference[..., None])"

WRONG = {
    "normalised_over_these_columns__after_the_difference": changed(
        "10.2",
        (
            "return torch.exp(scores - reference[..., None])",
            "weights = torch.exp(scores - reference[..., None])\n"
            "    return (weights / weights.sum(-1, keepdim=True)).nan_to_num(0)",
        ),
    ),
    "blind_rows_nan": changed("10.2", (GUARD, "reference = log_sum_exp")),
    "blind_rows_nan__in_base_2": changed("10.2", (GUARD_2, "reference = log_sum_exp * log2_e")),
    "blind_rows_of_ones": changed(
        "10.2",
        (GUARD, "reference = log_sum_exp"),
        (NATURAL, "return (scores - reference[..., None]).nan_to_num(nan=0.0).exp()"),
    ),
    "normalised_over_these_columns": changed(
        "10.2", (NATURAL, "return torch.softmax(scores, dim=-1).nan_to_num(nan=0.0)")
    ),
    "normalised_over_these_columns__by_hand": changed(
        "10.2", (NATURAL, "weights = torch.exp(scores)\n    return torch.softmax(scores, dim=-1)")
    ),
    "maximum_for_log_sum": changed(
        "10.2",
        (
            NATURAL,
            "top = scores.amax(dim=-1, keepdim=True)\n"
            "    return torch.exp(scores - torch.where(top == -math.inf, 0.0, top))",
        ),
    ),
    "log_sum_missing": changed("10.2", (NATURAL, "return torch.exp(scores)")),
    "log_sum_added": changed("10.2", (NATURAL, NATURAL.replace(" - ", " + "))),
    "exponentials_divided": changed("10.2", (NATURAL, "return torch.exp(scores) / torch.exp(log_sum_exp)[..., None]")),
    "divided_by_the_log_sum": changed("10.2", (NATURAL, "return torch.exp(scores) / reference[..., None]")),
    "difference_turned_round": changed("10.2", (NATURAL, "return torch.exp(reference[..., None] - scores)")),
    "base_2_of_natural_numbers": changed("10.2", (NATURAL, NATURAL.replace("exp(", "exp2("))),
    "scale_missing": changed("10.2", ("products * (scale * log2_e)", "products * log2_e")),
    "log2e_missing": changed("10.2", ("log2_e = math.log2(math.e)", "log2_e = 1.0")),
    "log_sum_natural": changed("10.2", (GUARD_2, GUARD_2.replace("log_sum_exp * log2_e", "log_sum_exp"))),
    "scores_natural": changed("10.2", ("products * (scale * log2_e)", "products * scale")),
    "log_sum_scaled": changed("10.2", (GUARD_2, GUARD_2.replace("* log2_e", "* log2_e * scale"))),
    "ln2_for_log2e": changed("10.2", ("math.log2(math.e)", "math.log(2)")),
    "natural_exponential": changed(
        "10.2", (BASE_2, "return torch.exp((products * (scale * log2_e) - reference[..., None]) / log2_e)")
    ),
    "hidden_scores_finite": changed(
        "10.2", (NATURAL, NATURAL.replace("scores", "torch.where(scores == -math.inf, -1e9, scores)"))
    ),
    "hidden_scores_finite__in_base_2": changed(
        "10.2", (BASE_2, BASE_2.replace("(products", "(products.masked_fill(products == -math.inf, -1e9)"))
    ),
    "negative_log_sum_as_zero": changed("10.2", (GUARD, "reference = log_sum_exp.clamp(min=0.0)")),
    "negative_log_sum_as_zero__in_base_2": changed(
        "10.2", (GUARD_2, "reference = torch.where(log_sum_exp > 0, log_sum_exp, 0.0) * log2_e")
    ),
    "log2e_rounded": changed("10.2", ("math.log2(math.e)", "1.4427")),
}

UNUSUAL = {
    "an exponent that is at most 0, as the docstring's L makes it": changed(
        "10.2",
        (
            "return torch.exp(scores - reference[..., None])",
            "return torch.exp((scores - reference[..., None]).clamp(max=0))",
        ),
    ),
    "zeros written where a score is -inf": changed(
        "10.2",
        (GUARD, "reference = log_sum_exp"),
        (NATURAL, "return torch.exp(scores - reference[..., None]).masked_fill(scores == -math.inf, 0.0)"),
    ),
    "a reference of +inf for blind rows": changed(
        "10.2", (GUARD, "reference = torch.where(log_sum_exp == -math.inf, math.inf, log_sum_exp)")
    ),
    "NaN repaired, row by row": changed(
        "10.2", (BASE_2, "return torch.exp2((products * scale - log_sum_exp[..., None]) * log2_e).nan_to_num(nan=0.0)")
    ),
    "the least float32 for hidden scores": changed(
        "10.2", (NATURAL, NATURAL.replace("scores", "scores.clamp(min=torch.finfo(torch.float32).min)"))
    ),
}


DIFFERENCE = "    return torch.exp(scores - reference[..., None])"
WRONG |= {
    "exponentials_divided__times_the_inverse": changed(
        "10.2", (DIFFERENCE, "    return torch.exp(scores) * torch.exp(-reference)[..., None]")
    ),
    "hidden_scores_zero": changed(
        "10.2", (DIFFERENCE, "    return torch.exp(torch.nan_to_num(scores, neginf=0.0) - reference[..., None])")
    ),
    "one_blind_row_empties_all": changed(
        "10.2",
        (
            DIFFERENCE,
            f"    if (log_sum_exp == -math.inf).any():\n        return torch.zeros_like(scores)\n{DIFFERENCE}",
        ),
    ),
}


NEVER_HIDDEN = "torch.where({0} == -math.inf, -1e30, {0})"
WRONG |= {
    "hidden_scores_finite__farther": changed(
        "10.2", (DIFFERENCE, DIFFERENCE.replace("scores", NEVER_HIDDEN.format("scores")))
    ),
    "hidden_scores_finite__products": changed(
        "10.2", ("exp2(products", f"exp2({NEVER_HIDDEN.format('products')}")
    ),
}
UNUSUAL |= {
    "L brought to the products": changed(
        "10.2",
        ("log_sum_exp * log2_e)", "log_sum_exp / scale)"),
        ("products * (scale * log2_e) - reference[..., None]", "(products - reference[..., None]) * (scale * log2_e)"),
    ),
    "products times log2(e) first": changed("10.2", ("products * (scale * log2_e)", "products * log2_e * scale")),
}


BOUNDED = "reference = log_sum_exp.clamp(min=-1e5)"
WRONG |= {
    "log_sum_bounded_below": changed("10.2", (GUARD, BOUNDED)),
    "log_sum_bounded_below__in_base_2": changed("10.2", (GUARD_2, f"{BOUNDED} * log2_e")),
    "log_sum_bounded_below__as_blind": changed(
        "10.2", (GUARD, "reference = torch.where(log_sum_exp < -1e4, 0.0, log_sum_exp)")
    ),
}
WRONG |= {
    f"blind_rows_of_ones__both_{bound}": changed(
        "10.2", (NATURAL, f"return torch.exp(scores.clamp(min=-{bound}) - log_sum_exp.clamp(min=-{bound})[..., None])")
    )
    for bound in ("1e4", "1e30")
}
WRONG |= {
    "one_blind_row_empties_all__of_its_log_sum": changed(
        "10.2",
        (GUARD, "reference = torch.zeros_like(log_sum_exp) if (log_sum_exp == -math.inf).any() else log_sum_exp"),
    ),
}
