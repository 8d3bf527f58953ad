"""Wrong answers to exercise 3.3, and unusual right ones."""

from tests.submissions.edits import changed

WRONG = {
        "reference_for_maximum": changed("3.3", ("return maximum, total", "return reference, total")),
        "empty_state_nan__unless_all_rows_are_empty": """
def merge(first, second):
    (m1, l1, o1), (m2, l2, o2) = first, second
    if torch.isinf(m1).all() and torch.isinf(m2).all():
        return m1.clone(), l1.clone(), o1.clone()
    m = torch.maximum(m1, m2)
    w1, w2 = l1 * torch.exp(m1 - m), l2 * torch.exp(m2 - m)
    total = w1 + w2
    return m, total, (w1[:, None] * o1 + w2[:, None] * o2) / total[:, None]
""",
        "sum_not_rescaled": changed(
            "3.3",
            ("first_sum * torch.exp(first_max - reference)", "first_sum"),
            ("second_sum * torch.exp(second_max - reference)", "second_sum"),
        ),
        "averages_without_weights": changed(
            "3.3",
            (
                "average = (first_weight[:, None] * first_average + second_weight[:, None] * second_average) / "
                "divisor[:, None]",
                "average = (first_average + second_average) / 2",
            ),
        ),
        "average_weighed_by_stale_sums": changed(
            "3.3",
            (
                "average = (first_weight[:, None] * first_average + second_weight[:, None] * second_average) / "
                "divisor[:, None]",
                "stale = first_sum + second_sum\n    average = (first_sum[:, None] * first_average + second_sum[:, "
                "None] * second_average) / torch.where(stale == 0, 1.0, stale)[:, None]",
            ),
        ),
        "average_weighed_by_maxima": changed(
            "3.3",
            (
                "average = (first_weight[:, None] * first_average + second_weight[:, None] * second_average) / "
                "divisor[:, None]",
                "a, b = torch.exp(first_max - reference)[:, None], torch.exp(second_max - reference)[:, None]\n"
                "    average = (a * first_average + b * second_average) / torch.where(a + b == 0, 1.0, a + b)",
            ),
        ),
        "average_weighed_by_stale_sums__over_the_new_sum": changed(
            "3.3",
            (
                "(first_weight[:, None] * first_average + second_weight[:, None] * second_average)",
                "(first_sum[:, None] * first_average + second_sum[:, None] * second_average)",
            ),
        ),
        "weights_exchanged": changed(
            "3.3",
            (
                "(first_weight[:, None] * first_average + second_weight[:, None] * second_average)",
                "(second_weight[:, None] * first_average + first_weight[:, None] * second_average)",
            ),
        ),
        "rescaled_the_wrong_way": changed(
            "3.3",
            ("first_max - reference", "reference - first_max"),
            ("second_max - reference", "reference - second_max"),
        ),
        "first_not_rescaled": changed("3.3", ("first_sum * torch.exp(first_max - reference)", "first_sum")),
        "second_not_rescaled": changed("3.3", ("second_sum * torch.exp(second_max - reference)", "second_sum")),
        "older_maximum": changed("3.3", ("maximum = torch.maximum(first_max, second_max)", "maximum = first_max")),
        "older_maximum__the_second": changed(
            "3.3", ("maximum = torch.maximum(first_max, second_max)", "maximum = second_max")
        ),
        "not_normalised": changed("3.3", (" / divisor[:, None]", "")),
        "empty_state_nan": changed(
            "3.3",
            ("torch.where(maximum == -math.inf, 0.0, maximum)", "maximum"),
            ("torch.where(total == 0, 1.0, total)", "total"),
        ),
        "empty_state_nan__in_the_exponent": changed(
            "3.3", ("torch.where(maximum == -math.inf, 0.0, maximum)", "maximum")
        ),
        "empty_state_nan__in_the_division": changed("3.3", ("torch.where(total == 0, 1.0, total)", "total")),
    }


UNUSUAL = {
        "by the log-sum-exp": """
def merge(first, second):
    (m1, s1, o1), (m2, s2, o2) = first, second
    l1, l2 = m1 + torch.log(s1), m2 + torch.log(s2)
    m = torch.maximum(m1, m2)
    r = torch.where(m == -math.inf, torch.zeros_like(m), m)
    w1, w2 = torch.exp(l1 - r), torch.exp(l2 - r)
    s = w1 + w2
    d = s + (s == 0)
    return m, s, o1 * (w1 / d)[:, None] + o2 * (w2 / d)[:, None]
""",
        "a step from the first average to the second": """
def merge(first, second):
    (m1, s1, o1), (m2, s2, o2) = first, second
    m = torch.maximum(m1, m2)
    s1 = torch.where(m1 == -math.inf, 0.0, s1 * torch.exp(torch.where(m1 == -math.inf, 0.0, m1 - m)))
    s2 = torch.where(m2 == -math.inf, 0.0, s2 * torch.exp(torch.where(m2 == -math.inf, 0.0, m2 - m)))
    share = s2 / (s1 + s2).clamp(min=1e-30)
    return m, s1 + s2, o1 * (1 - share)[:, None] + o2 * share[:, None]
""",
        "case by case, in a list": """
def merge(first, second):
    out = [[], [], []]
    for r in range(first[0].shape[0]):
        m1, s1, o1 = (part[r] for part in first)
        m2, s2, o2 = (part[r] for part in second)
        if s1 == 0 and s2 == 0:
            m, s, o = m1, s1, o1
        elif m1 >= m2:
            k = torch.exp(m2 - m1) * s2
            m, s = m1, s1 + k
            o = (s1 * o1 + k * o2) / s
        else:
            k = torch.exp(m1 - m2) * s1
            m, s = m2, s2 + k
            o = (k * o1 + s2 * o2) / s
        for column, value in zip(out, (m, s, o)):
            column.append(value)
    return [torch.stack(column) for column in out]
""",
    }


WRONG |= {
    "averages_taken_for_sums": changed(
        "3.3",
        (
            "(first_weight[:, None] * first_average + second_weight[:, None] * second_average)",
            "(torch.exp(first_max - reference)[:, None] * first_average"
            " + torch.exp(second_max - reference)[:, None] * second_average)",
        ),
    ),
    "averages_taken_for_sums__undivided": changed(
        "3.3",
        (
            "(first_weight[:, None] * first_average + second_weight[:, None] * second_average) / divisor[:, None]",
            "torch.exp(first_max - reference)[:, None] * first_average"
            " + torch.exp(second_max - reference)[:, None] * second_average",
        ),
    ),
    "averages_added__over_the_sum": changed(
        "3.3",
        ("(first_weight[:, None] * first_average + second_weight[:, None] * second_average)",
         "(first_average + second_average)"),
    ),
    "sum_not_rescaled__and_divided_by": changed(
        "3.3", ("total = first_weight + second_weight", "total = first_sum + second_sum")
    ),
}


def _handing_back(first, second):
    """The course's answer, with this handed back where the other part holds no key in any row."""
    start = "    maximum = torch.maximum("
    return changed(
        "3.3",
        (start, f"    if (second_sum == 0).all():\n        return {first}\n"
                f"    if (first_sum == 0).all():\n        return {second}\n{start}"),
    )


WRONG |= {
    "argument_returned": _handing_back("first", "second"),
    "argument_returned__as_views": _handing_back(
        "[part[:] for part in first]", "[part.view(part.shape) for part in second]"
    ),
}
UNUSUAL |= {
    "copies where one part is empty": _handing_back(
        "[part.clone() for part in first]", "[part + 0 for part in second]"
    ),
}


WRONG |= {
    "reference_bounded_below": changed(
        "3.3", ("torch.where(maximum == -math.inf, 0.0, maximum)", "maximum.clamp(min=-1e4)")
    ),
}


RESULT = "return maximum, total, average"


def returned(result):
    """The course's answer, with another result."""
    return changed("3.3", (RESULT, f"return {result}"))


WRONG |= {
    "one_part_returned": """
def merge(first, second):
    return tuple(part.clone() for part in first)
""",
    "one_part_returned__as_it_came": """
def merge(first, second):
    return first
""",
    "one_part_returned__second": returned("second_max.clone(), second_sum.clone(), second_average.clone()"),
    "one_part_returned__with_the_larger_maximum": """
def merge(first, second):
    larger = first[0] >= second[0]
    maximum, total = (torch.where(larger, a, b) for a, b in zip(first[:2], second[:2]))
    return maximum, total, torch.where(larger[:, None], first[2], second[2])
""",
    "not_merged__maximum": returned("first_max.clone(), total, average"),
    "not_merged__sum": returned("maximum, first_sum.clone(), average"),
    "not_merged__average": returned("maximum, total, first_average.clone()"),
}
