"""Exercise 15.3: are two per cent real? Ratios of pairs, an interval by blocks, and a chance by signs."""

from __future__ import annotations

import math

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract


def middle(values):
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def ratio(first, second):
    return middle([b / a for a, b in zip(first, second)])


def between(first, second, starts, block):
    ratios = [b / a for a, b in zip(first, second)]
    found = []
    for row in starts:
        picked = [ratios[(start + step) % len(ratios)] for start in row for step in range(block)]
        found.append(middle(picked))
    found = sorted(found)
    outer = len(found) // 40
    return found[outer], found[len(found) - 1 - outer]


def chance(first, second, signs):
    logs = [math.log(b / a) for a, b in zip(first, second)]
    observed = abs(sum(logs))
    as_far = 0
    for row in signs:
        flipped = sum(sign * log for sign, log in zip(row, logs))
        as_far += abs(flipped) >= observed
    return (as_far + 1) / (len(signs) + 1)


def pairs(draw, count, percent, *, noise=0.01, drift=0.3):
    """Microseconds of two kernels in turns: clocks that ramp down for both, and now and then a pair that is late."""
    first, second = [], []
    wander = 0.0
    for place in range(count):
        wander = 0.7 * wander + noise * float(draw.normal(1))
        clock = 100.0 * (1 + drift * place / count)
        a, b = clock * (1 + noise * abs(float(draw.normal(1)))), clock * (1 + percent / 100 + wander)
        late = draw.integer(0, 8)
        first.append(a * (1.6 if late == 0 else 1.0))
        second.append(b * (1.5 if late == 1 else 1.0))
    return first, second


def starts_of(draw, resamples, count, block):
    return [[draw.integer(0, count) for _ in range(count // block)] for _ in range(resamples)]


def signs_of(draw, draws, count):
    """Rows in which not all signs are equal: those would tie with what was observed, up to a rounding."""
    return [[1, -1, *(draw.choice((-1, 1)) for _ in range(count - 2))] for _ in range(draws)]


def sample_cases(draw):
    def interval(count, block, resamples, percent=2.0):
        return *pairs(draw, count, percent), starts_of(draw, resamples, count, block), block

    return [
        Case("three pairs", ([10.0, 20.0, 40.0], [11.0, 21.0, 50.0]), "ratio_of"),
        Case("clocks that ramp down, 41 pairs", pairs(draw, 41, 2.0), "ratio_of"),
        Case("40 pairs: two in the middle", pairs(draw, 40, -3.0, noise=0.05), "ratio_of"),
        Case("one pair", pairs(draw, 1, 5.0), "ratio_of"),
        Case("12 pairs, blocks of 1", interval(12, 1, 40), "interval"),
        Case("24 pairs, blocks of 4", interval(24, 4, 80), "interval"),
        Case("30 pairs, blocks of 5, 200 resamples", interval(30, 5, 200, 0.0), "interval"),
        Case("few resamples: the smallest and the largest", interval(12, 3, 39), "interval"),
        Case("8 pairs, 2 %", (*pairs(draw, 8, 2.0, noise=0.02), signs_of(draw, 60, 8)), "chance_of"),
        Case("20 pairs that are alike", (*pairs(draw, 20, 0.0, noise=0.03), signs_of(draw, 99, 20)), "chance_of"),
        Case("faster by 8 %", (*pairs(draw, 16, -8.0), signs_of(draw, 99, 16)), "chance_of"),
        Case(
            "slower by 1 % with much noise", (*pairs(draw, 12, 1.0, noise=0.08), signs_of(draw, 150, 12)), "chance_of"
        ),
        # One pair differs, so every row of signs is exactly as far off.
        Case("one pair of four differs", ([1.0] * 4, [2.0, 1.0, 1.0, 1.0], signs_of(draw, 20, 4)), "chance_of"),
        Case(
            "more is drawn than there is",
            (*pairs(draw, 15, 2.0), [[draw.integer(0, 15) for _ in range(15)] for _ in range(40)], 3),
            "interval",
        ),
        Case("signs that nothing reaches", (*pairs(draw, 24, 30.0, noise=0.001), signs_of(draw, 50, 24)), "chance_of"),
    ]


CONTRACT = Contract(
    lambda draw, *, blocks, block, resamples: (
        *pairs(draw, blocks * block, 1.0), starts_of(draw, resamples, blocks * block, block), block,
    ),
    choices={"blocks": (2, 7), "block": (1, 2, 6), "resamples": (1, 40, 119)},
    says={"block": "at least 1", "resamples": "at least one"},
    entry="interval",
    most=8,
)  # fmt: skip

PAIRS = "[b / a for a, b in zip(first, second)]"
WHOLE = f"middle({PAIRS})"
EVEN = "(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2"
MIDDLE = (
    *edits("The mean was taken. A few late calls can move a mean by several per cent, so take the median.",
        mean_taken=(EVEN, "sum(ordered) / len(ordered)")),
    *edits("Only one of the two values in the middle was taken. For an even number of values the median is the mean "
        "of these two.",
        upper_middle=(EVEN, "ordered[len(ordered) // 2]"),
        upper_middle__lower=(EVEN, "ordered[(len(ordered) - 1) // 2]")),
)  # fmt: skip
UPSIDE_DOWN = "The ratio is upside down. Divide the second kernel's time by the first's, so that 1.02 means 2 % slower."
RATIO = (
    *MIDDLE,
    *edits("The two medians were divided. If the clock drifts, it moves the times of both kernels. Divide within each "
        "pair first, where the drift cancels.", medians_divided=(WHOLE, "middle(second) / middle(first)")),
    *edits("The two best times were divided. They come from different moments, when the clock may have been "
        "different. Divide within each pair first.",
        best_divided=(WHOLE, "min(second) / min(first)")),
    *edits("The sums were divided, so slow pairs count for more. Divide within each pair, and take the median of the "
        "ratios.",
        sums_divided=(WHOLE, "sum(second) / sum(first)")),
    *edits(UPSIDE_DOWN, upside_down=("b / a", "a / b")),
    *edits("A difference was returned. Divide the two times instead.", difference=("b / a", "b - a")),
    *edits("The geometric mean was taken. A few late calls move that as well, so take the median.",
        geometric_mean=(WHOLE, f"math.prod({PAIRS}) ** (1 / len(first))")),
)  # fmt: skip
APART = " / ".join(
    f"middle([{which}[(start + step) % len(ratios)] for start in row for step in range(block)])"
    for which in ("second", "first")
)
INTERVAL = (
    *MIDDLE,
    *edits("The medians of the two kernels' times were divided. What slows both calls cancels only within a pair, so "
        "take the median of the ratios.", medians_divided=("middle(picked)", APART)),
    *edits("A resample was cut to as many pairs as were measured. It has all pairs of its blocks, even if these are "
        "more.",
        resample_cut=("middle(picked)", "middle(picked[: len(ratios)])")),
    *edits(UPSIDE_DOWN, upside_down=("b / a", "a / b")),
    *edits("The resamples do not have whole blocks. From each start, take `block` pairs in a row. Neighbours are "
        "alike, and the interval gets too narrow if you draw them one by one.",
        blocks_ignored=("for step in range(block)", "for step in range(1)"),
        blocks_ignored__repeated=("(start + step)", "(start)")),
    *edits("A block that runs past the last pair was cut. Go on at the first pair.",
        block_cut=("for start in row for step in range(block)",
        "for start in row for step in range(block) if start + step < len(ratios)")),
    *edits("A block that runs past the last pair repeated that pair. Go on at the first pair.",
        block_held=("(start + step) % len(ratios)", "min(start + step, len(ratios) - 1)")),
    *edits("A twentieth of the medians was dropped at each end, which leaves an interval of 90 %. Drop a fortieth at "
        "each end.",
        ninety_per_cent=("len(found) // 40", "len(found) // 20")),
    *edits("The smallest and the largest of all medians were returned. Drop a fortieth of the medians at each end "
        "first.",
        all_of_them=("len(found) // 40", "0")),
    *edits("The upper end is one median too low. Drop as many medians at the top as at the bottom.",
        upper_end=("len(found) - 1 - outer", "len(found) - 2 - outer")),
    *edits("The two ends are exchanged. Return the lower one first.", ends_exchanged=(
        "return found[outer], found[len(found) - 1 - outer]", "return found[len(found) - 1 - outer], found[outer]")),
    *edits("The medians of the resamples were not sorted. Sort them before you drop any.",
        not_sorted=("found = sorted(found)", "found = list(found)")),
)  # fmt: skip
CHANCE = (
    *edits("Your own measurement was not counted. Add 1 to the rows that are as far off, and 1 to all rows, so that "
        "the chance is never 0.",
        never_zero=("(as_far + 1) / (len(signs) + 1)", "as_far / len(signs)"),
        never_zero__above=("(as_far + 1) / (len(signs) + 1)", "as_far / (len(signs) + 1)"),
        never_zero__below=("(as_far + 1) / (len(signs) + 1)", "(as_far + 1) / len(signs)")),
    *edits("Rows that are exactly as far off as your measurement were not counted. A row counts if it is at least as "
        "far off.",
        strictly=(">= observed", "> observed")),
    *edits("Only one side was counted. The second kernel can be slower or faster, so compare absolute values.",
        one_side=("abs(flipped) >= observed", "flipped >= observed"),
        one_side__as_observed=("abs(sum(logs))", "sum(logs)", "abs(flipped) >= observed", "flipped >= observed")),
    *edits("The signs were put on the ratios. Put them on the logarithms of the ratios, which are 0 where both times "
        "are the same.", ratios_flipped=("math.log(b / a)", "b / a")),
    *edits("The signs were put on the ratios less 1. If you swap two times, the ratio 2 becomes 1/2. Less 1, that is "
        "1 and -0.5, but two equal kernels need 1 and -1. Only the logarithm keeps its size.",
        less_one=("math.log(b / a)", "b / a - 1")),
    *edits("The signs were put on the differences in microseconds, where slow pairs count for more. Take the "
        "logarithm of the ratio.",
        differences_flipped=("math.log(b / a)", "b - a")),
    *edits("The rows nearer to 0 were counted. Count the rows that are at least as far from 0 as your measurement.",
        nearer_counted=("abs(flipped) >= observed", "abs(flipped) < observed")),
)  # fmt: skip

EXERCISE = Exercise(
    id="15.3",
    title="Two per cent",
    entries=("ratio_of", "interval", "chance_of"),
    cases=sample_cases,
    oracle={"ratio_of": ratio, "interval": between, "chance_of": chance},
    contracts=(CONTRACT,),
    models=(
        model_of(ratio, RATIO, parts=(middle,), entry="ratio_of"),
        model_of(between, INTERVAL, parts=(middle,), entry="interval"),
        model_of(chance, CHANCE, entry="chance_of"),
    ),
    hints=(
        "ratio_of: first make the list of b / a for all pairs. What slowed both calls of a pair cancels there. Then "
        "take the statistics.median of the list.",
        "interval: for each row, pick ratios[(start + step) % n] for each start and for each step in range(block). "
        "The median of what you picked is one resampled median.",
        "Sort the resampled medians, and drop len // 40 of them at each end. The middle 95 % are left: return the "
        "smallest and the largest of these.",
        "chance_of: take log(b / a) of each pair. If both kernels were alike, each logarithm could just as well have "
        "the other sign. Count the rows whose sum with the signs is at least as far from 0 as the sum without them. "
        "Add 1 to this count and 1 to the number of rows, and divide.",
    ),
)  # fmt: skip
