"""Exercise 3.3: merging two partial results of a softmax."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Forbids, NewTensors
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.edits import edits, model_of
from exercises.ch03_online_softmax.plain import INF, SHORTCUTS, lower_than_floors, reference_of, statistics_of
from exercises.topics.running import FLOORS
from exercises.topics.softmax_inputs import SCORES, ordered, ordinary
from exercises.topics.softmax_slips import BOUNDED_BELOW


def merge_in_pairs(functions, *states):
    states = [tuple(state) for state in states]
    while len(states) > 1:
        merged = [functions["merge"](states[i], states[i + 1]) for i in range(0, len(states) - 1, 2)]
        states = merged + states[len(states) - len(states) % 2 :]
    return states[0]


def _in_pairs(merge):
    """The driver's tree, with a merge of the judge's own."""
    return lambda *states: merge_in_pairs({"merge": merge}, *states)


def _in_a_row(merge):
    def fold(*states):
        merged = states[0]
        for state in states[1:]:
            merged = merge(merged, state)
        return merged

    return fold


def merge(first, second):
    """Two states into one."""
    (first_max, first_sum, first_average), (second_max, second_sum, second_average) = first, second
    maximum = torch.maximum(first_max, second_max)
    reference = torch.where(maximum == -INF, 0.0, maximum)
    first_factor = torch.exp(first_max - reference)
    second_factor = torch.exp(second_max - reference)
    first_weight = first_sum * first_factor
    second_weight = second_sum * second_factor
    total = first_weight + second_weight
    divisor = torch.where(total == 0, 1.0, total)
    average = (first_weight[:, None] * first_average + second_weight[:, None] * second_average) / divisor[:, None]
    return maximum, total, average


def merge_all(*states):
    return merge_in_pairs({"merge": merge}, *states)


def _merge_by_shares(first, second):
    """The same by way of log-sum-exps and shares of the whole: right as well, and rounded in other places."""
    (first_max, first_sum, first_average), (second_max, second_sum, second_average) = first, second
    maximum = torch.maximum(first_max, second_max)
    weights = [
        torch.exp(part_max + torch.log(part_sum) - reference_of(maximum))
        for part_max, part_sum in ((first_max, first_sum), (second_max, second_sum))
    ]
    total = weights[0] + weights[1]
    share = (weights[1] / torch.where(total == 0, 1.0, total))[:, None]
    return maximum, total, first_average * (1 - share) + second_average * share


def _merge_by_log_sum_exps(first, second):
    """The same with the second part's share from the difference of the log-sum-exps, as the chapter's end has it."""
    (first_max, first_sum, first_average), (second_max, second_sum, second_average) = first, second
    maximum, total, _ = merge(first, second)
    step = torch.log(second_sum) + second_max - (torch.log(first_sum) + first_max)
    share = torch.sigmoid(torch.where(step.isnan(), 0.0, step))[:, None]
    return maximum, total, first_average + share * (second_average - first_average)


def _state(scores, values):
    """(maximum, sum, average) of one part: scores [rows, keys], values [keys, dim]."""
    maximum, total = statistics_of(scores)
    weights = torch.exp(scores - reference_of(maximum)[:, None])
    return maximum, total, (weights @ values) / torch.where(total == 0, 1.0, total)[:, None]


def _states(draw, lengths, rows=3, dim=4, scores=ordinary):
    scores = scores(draw, rows, sum(lengths))
    values = draw.normal(sum(lengths), dim)
    return tuple(_state(part, value) for part, value in zip(scores.split(lengths, dim=1), values.split(lengths, dim=0)))


def merge_cases(draw):
    same = draw.normal(3)
    equal = tuple((same.clone(), draw.uniform(3, low=1.0, high=9.0), draw.normal(3, 4)) for _ in "ab")
    rising = _states(draw, [16, 16], scores=ordered(0.3))
    states = _states(draw, [8, 8])
    low = _states(Draw(33), [8, 8], rows=2, scores=lambda draw, rows, columns: lower_than_floors(columns))
    return [
        Case("two parts of 8 keys", _states(draw, [8, 8]), driver=merge_in_pairs),
        Case("1 key and 200 keys", _states(draw, [1, 200]), driver=merge_in_pairs),
        Case("scores rise: the second maximum is larger", rising, driver=merge_in_pairs),
        Case("scores fall: the first maximum is larger", rising[::-1], driver=merge_in_pairs),
        Case("equal maxima", equal, driver=merge_in_pairs),
        Case("the second of three rows empty in both parts", _one_row_empty(states), driver=merge_in_pairs),
        Case("scores near -20,000", low, driver=merge_in_pairs),
    ]


def _nothing(states):
    return states


def _empty(*emptied):
    """Makes the parts of these numbers empty."""

    def make(states):
        return tuple(
            (torch.full_like(m, -INF), torch.zeros_like(t), torch.zeros_like(a)) if number in emptied else (m, t, a)
            for number, (m, t, a) in enumerate(states)
        )

    return make


def _some_rows_empty(states):
    """Row 0 is empty in the first part and row 1 in the second, as far as there are such rows."""
    for row, (m, t, a) in enumerate(states[:2]):
        m[row : row + 1], t[row : row + 1], a[row : row + 1] = -INF, 0.0, 0.0
    return states


def _one_row_empty(states):
    """The second row is empty in all parts, as far as there is one; the others are not."""
    for m, t, a in states:
        m[1:2], t[1:2], a[1:2] = -INF, 0.0, 0.0
    return states


def drawn(draw, *, rows, dim, parts, scores, empty):
    return empty(_states(draw, parts, rows, dim, scores))


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 2, 3, 8),
        "dim": (1, 3, 4, 8),
        "parts": (
            Level([8, 8], "parts of 8 keys"),
            Level([1, 200], "1 key and 200"),
            Level([200, 1], "200 keys and 1"),
            Level([3, 1, 16, 5, 8, 2, 13], "seven parts, merged in pairs"),
        ),
        "scores": SCORES,
        "empty": (
            Level(_nothing, ""),
            Level(_empty(0), "the first part empty"),
            Level(_empty(1), "the second part empty"),
            Level(_empty(0, 1), "the first two parts empty"),
            Level(_some_rows_empty, "some rows empty in one part"),
            Level(_one_row_empty, "the second row empty in all parts"),
        ),
    },
    says={"rows": "[rows], [rows] and [rows, dim], float32", "empty": "A row without keys has maximum -inf, total 0"},
    driver=merge_in_pairs,
    most=12,
)


STALE_SUMS = (
    "The averages were weighed by the sums as they came in, each relative to its own maximum. Use the rescaled sums."
)
SUM = (
    "The two sums were added as they are, though they are relative to different maxima. Multiply each by "
    "exp(its maximum - merged maximum) first."
)
TAKEN_FOR_SUMS = (
    "The averages were merged as if they were sums that nobody has divided yet: each was multiplied by its exponential "
    "alone. An average is such a sum divided by its part's sum, so multiply by that too, and divide by the merged sum."
)
OLDER_MAXIMUM = (
    "The maximum of one part was subtracted everywhere, even where the other part's is larger. If that is far "
    "above, its factor overflows. Take `torch.maximum` of the two."
)
EMPTY_STATE = (
    "Empty parts gave NaN. Two things do that: -inf - (-inf) in an exponent, and 0/0 in the average. Where the merged "
    "maximum is -inf, subtract 0; where the merged sum is 0, divide by 1."
)
AVERAGE = "(first_weight[:, None] * first_average + second_weight[:, None] * second_average) / divisor[:, None]"
FIRST_SHARE, SECOND_SHARE, DIVISION = "first_weight[:, None]", "second_weight[:, None]", " / divisor[:, None]"
FIRST_WEIGHT, SECOND_WEIGHT = "first_sum * first_factor", "second_sum * second_factor"
LARGER, GUARD, DIVISOR = (
    "torch.maximum(first_max, second_max)",
    "torch.where(maximum == -INF, 0.0, maximum)",
    "torch.where(total == 0, 1.0, total)",
)
RESULT = "return maximum, total, average"
FACTORS_FOR_SHARES = (FIRST_SHARE, "first_factor[:, None]", SECOND_SHARE, "second_factor[:, None]")
SUMS_FOR_SHARES = (FIRST_SHARE, "first_sum[:, None]", SECOND_SHARE, "second_sum[:, None]")


ONE_PART = (
    "{which} state is returned as it came, and nothing of {other} is in it. The result stands for the keys of both: "
    "their larger maximum, and sums and averages brought to it."
)


def _with_one_of(part, what):
    """The result with one part's number in one place."""
    kept = {"maximum": "maximum", "sum": "total", "average": "average"}
    kept[what] = f"{part}_{'max' if what == 'maximum' else what}"
    return f"return {', '.join(kept.values())}"


def _divided_by(total):
    return DIVISOR, DIVISOR.replace("total", total)


CHANGES = (
    *edits(
        ONE_PART.format(which="The first part's", other="the second part"),
        one_part_returned=(RESULT, "return first_max, first_sum, first_average"),
    ),
    *edits(
        ONE_PART.format(which="The second part's", other="the first part"),
        one_part_returned__second=(RESULT, "return second_max, second_sum, second_average"),
    ),
    *edits(
        "Row by row, the state of the part with the larger maximum is returned, and the other part is dropped. Its "
        "keys count too: their weights are smaller, and not 0.",
        one_part_returned__with_the_larger_maximum=(
            RESULT,
            "is_first = first_max >= second_max\n"
            "return (\n"
            "    maximum,\n"
            "    torch.where(is_first, first_sum, second_sum),\n"
            "    torch.where(is_first[:, None], first_average, second_average),\n"
            ")",
        ),
    ),
    *(
        row
        for part in ("first", "second")
        for what, asked in (
            ("maximum", "the larger of the two maxima"),
            ("sum", "the sum over both, each relative to the merged maximum"),
            ("average", "the average over both, each weighed by its rescaled sum"),
        )
        for row in edits(
            f"The {what} in the result is that of the {part} part alone. It is {asked}.",
            **{f"not_merged__{what}_of_the_{part}": (RESULT, _with_one_of(part, what))},
        )
    ),
    *edits(
        "The two averages were averaged with equal weight. A part with a larger sum must count for more. Weigh "
        "each by its rescaled sum.",
        averages_without_weights=(AVERAGE, "(first_average + second_average) / 2"),
    ),
    *edits(
        "The two averages were added. Weigh each by its part's share of the merged sum.",
        averages_added=(AVERAGE, "first_average + second_average"),
    ),
    *edits(
        "The two averages were added as they are, and divided by the merged sum. Multiply each by its rescaled sum "
        "first.",
        averages_added__over_the_sum=(AVERAGE, f"(first_average + second_average){DIVISION}"),
    ),
    *edits(
        TAKEN_FOR_SUMS,
        averages_taken_for_sums=FACTORS_FOR_SHARES,
        averages_taken_for_sums__undivided=(*FACTORS_FOR_SHARES, DIVISION, ""),
    ),
    *edits(
        "The averages were weighed and added but not divided by the merged sum, so the result is no average.",
        not_normalised=(DIVISION, ""),
    ),
    *edits(OLDER_MAXIMUM, older_maximum=(LARGER, "first_max"), older_maximum__second=(LARGER, "second_max")),
    *edits(
        "The smaller of the two maxima was taken, so the other part's factor can overflow.",
        smaller_maximum=(LARGER, "torch.minimum(first_max, second_max)"),
    ),
    *edits(
        SUM,
        sum_not_rescaled=(FIRST_WEIGHT, "first_sum", SECOND_WEIGHT, "second_sum"),
        sum_not_rescaled__beside_the_average=(RESULT, "return maximum, first_sum + second_sum, average"),
        sum_not_rescaled__and_divided_by=(
            *(RESULT, "return maximum, first_sum + second_sum, average"),
            *_divided_by("(first_sum + second_sum)"),
        ),
    ),
    *edits(
        "The first result is a log-sum-exp. The merged maximum is asked for: the sum says the rest.",
        log_sum_exp_for_maximum=(RESULT, "return maximum + torch.log(divisor), total, average"),
    ),
    *edits(
        "Only the second part was rescaled. That is right when the first holds the larger maximum; when the second "
        "does, the first must shrink. Rescale both: one factor is 1.",
        first_not_rescaled=(FIRST_WEIGHT, "first_sum"),
    ),
    *edits(
        "Only the first part was rescaled. That is right when the second holds the larger maximum; when the first "
        "does, the second must shrink. Rescale both: one factor is 1.",
        second_not_rescaled=(SECOND_WEIGHT, "second_sum"),
    ),
    *edits(
        "The factor is upside down: exp(merged maximum - its maximum) makes a part grow that should shrink. "
        "Multiply each sum by exp(its maximum - merged maximum), which is never above 1.",
        rescaled_the_wrong_way=(
            *("first_max - reference", "reference - first_max"),
            *("second_max - reference", "reference - second_max"),
        ),
    ),
    *edits(
        "Each sum was multiplied by the other part's factor. The first sum goes with the first part's maximum.",
        factors_exchanged=(FIRST_WEIGHT, "first_sum * second_factor", SECOND_WEIGHT, "second_sum * first_factor"),
    ),
    *edits(
        STALE_SUMS,
        average_weighed_by_stale_sums=(*SUMS_FOR_SHARES, *_divided_by("(first_sum + second_sum)")),
        average_weighed_by_stale_sums__over_the_new_sum=SUMS_FOR_SHARES,
    ),
    *edits(
        "The averages were weighed by exp(maximum - merged maximum) alone. A part of a thousand keys then counts "
        "no more than a part of one key. Multiply by the part's sum as well.",
        average_weighed_by_maxima=(*FACTORS_FOR_SHARES, *_divided_by("(first_factor + second_factor)")),
    ),
    *edits(
        "Each average was weighed by the other part's sum. The first part's rescaled sum goes with the first "
        "part's average.",
        weights_exchanged=(FIRST_SHARE, SECOND_SHARE, SECOND_SHARE, FIRST_SHARE),
    ),
    *edits(EMPTY_STATE, empty_state_nan=(GUARD, "maximum", DIVISOR, "total")),
    *edits(
        BOUNDED_BELOW,
        alone=True,
        **{f"reference_bounded_below__{name}": (GUARD, f"maximum.clamp(min=-{name})") for name in FLOORS},
    ),
    *edits(
        "A row without keys has maximum 0 in the result. For such a row you subtract 0, but its maximum is still "
        "-inf. Return the maximum, not the reference.",
        reference_for_maximum=(RESULT, "return reference, total, average"),
    ),
    *edits(
        "A row that is empty in both parts gives NaN as soon as another row is not. Guard each row by itself, with "
        "`torch.where`.",
        alone=True,
        empty_state_nan__unless_all_rows_are_empty=(
            *(GUARD, "0 * first_sum if (maximum == -INF).all() else maximum"),
            *(DIVISOR, "1 + total if (total == 0).all() else total"),
        ),
    ),
    *edits(
        EMPTY_STATE,
        empty_state_nan__in_the_exponent=(GUARD, "maximum"),
        empty_state_nan__in_the_division=(DIVISOR, "total"),
    ),
)
MODEL = model_of(merge_all, CHANGES, (merge,))

EXERCISE = Exercise(
    id="3.3",
    title="Merge two partial results",
    entries=("merge",),
    cases=merge_cases,
    oracle=_in_pairs(merge),
    contracts=(CONTRACT,),
    models=(MODEL,),
    plain=(
        _in_a_row(merge),
        _in_pairs(_merge_by_shares),
        _in_pairs(lambda first, second: _merge_by_shares(second, first)),
        _in_pairs(_merge_by_log_sum_exps),
        _in_pairs(lambda first, second: _merge_by_log_sum_exps(second, first)),
    ),
    requirements=(Forbids(SHORTCUTS), NewTensors()),
    hints=(
        "Both sums are right, but each is relative to its own maximum. Which common maximum can you bring them to "
        "before you add them?",
        "The merged maximum is the larger of the two. To move a sum from its maximum to the merged one, multiply it by "
        "exp(its maximum - merged maximum). One of the two factors is 1.",
        "An average does not say how much weight it stands for. Its share of the merged average is its rescaled sum "
        "divided by the merged sum. The two shares add up to 1.",
        "An empty part has maximum -inf and sum 0. Take 0 as the reference where the merged maximum is -inf, and 1 as "
        "the divisor where the merged sum is 0.",
        "`first_weight = first_sum * torch.exp(first_max - reference)`, `second_weight` likewise, `merged_sum = "
        "first_weight + second_weight`, `average = (first_weight[:, None] * first_average + second_weight[:, None] * "
        "second_average) / divisor[:, None]`.",
    ),
)
