"""Exercise 15.3: are two per cent real? Ratios of pairs, an interval by blocks, and a chance by signs."""

from __future__ import annotations

import math

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract
from exercises.topics.evidence import raised


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

    def apart(resamples, drawn):
        """Ratios far apart, each in a resample of its own, so that the ends tell which medians were dropped."""
        first, second = pairs(draw, 2 * resamples, 0.0, noise=0.0, drift=0.1)
        second = [time * (1 + place / resamples) for place, time in enumerate(second)]
        places = draw.permutation(resamples).tolist()
        return first, second, [[place] * (drawn // 2) + [place + 1] * (drawn - drawn // 2) for place in places], 1

    return [
        Case("three pairs", ([10.0, 20.0, 40.0], [11.0, 21.0, 50.0]), "ratio_of"),
        Case("clocks that ramp down, 41 pairs", pairs(draw, 41, 2.0), "ratio_of"),
        Case("40 pairs: two in the middle", pairs(draw, 40, -3.0, noise=0.05), "ratio_of"),
        Case("one pair", pairs(draw, 1, 5.0), "ratio_of"),
        Case("12 pairs, blocks of 1", interval(12, 1, 40), "interval"),
        Case("24 pairs, blocks of 4", interval(24, 4, 80), "interval"),
        Case("30 pairs, blocks of 5, 200 resamples", interval(30, 5, 200, 0.0), "interval"),
        Case("few resamples: the smallest and the largest", interval(12, 3, 39), "interval"),
        Case("one block of all pairs", interval(7, 7, 45), "interval"),
        Case("70 resamples of an even number of pairs", apart(70, 6), "interval"),
        Case("45 resamples", apart(45, 5), "interval"),
        Case("80 resamples", apart(80, 3), "interval"),
        Case("one resample, of more pairs than there are",
             ([10.0] * 3, [11.0, 12.0, 13.0], [[0, 0, 0, 2, 2, 2, 2]], 1), "interval"),
        Case("one resample, of one pair", ([10.0] * 3, [11.0, 13.0, 12.0], [[1]], 1), "interval"),
        Case("one resample, and some pairs twice",
             ([10.0] * 5, [15.0, 12.0, 11.0, 14.0, 13.0], [[3, 3, 0]], 2), "interval"),
        Case("equal rows of signs", (*pairs(draw, 5, 2.0, noise=0.05), 3 * signs_of(draw, 9, 5)), "chance_of"),
        Case("8 pairs, 2 %", (*pairs(draw, 8, 2.0, noise=0.02), signs_of(draw, 60, 8)), "chance_of"),
        Case("20 pairs that are alike", (*pairs(draw, 20, 0.0, noise=0.03), signs_of(draw, 99, 20)), "chance_of"),
        Case("faster by 8 %", (*pairs(draw, 16, -8.0), signs_of(draw, 99, 16)), "chance_of"),
        Case("1 % with much noise", (*pairs(draw, 12, 1.0, noise=0.08), signs_of(draw, 150, 12)), "chance_of"),
        # One pair differs, so every row of signs is exactly as far off.
        Case("one pair of four differs", ([1.0] * 4, [2.0, 1.0, 1.0, 1.0], signs_of(draw, 20, 4)), "chance_of"),
        Case("more is drawn than there is",
             (*pairs(draw, 15, 2.0), [[draw.integer(0, 15) for _ in range(15)] for _ in range(40)], 3), "interval"),
        Case("signs that nothing reaches", (*pairs(draw, 24, 30.0, noise=0.001), signs_of(draw, 50, 24)), "chance_of"),
    ]  # fmt: skip


CONTRACT = Contract(
    lambda draw, *, blocks, block, resamples: (
        *pairs(draw, blocks * block, 1.0), starts_of(draw, resamples, blocks * block, block), block,
    ),
    choices={"blocks": (1, 2, 7), "block": (1, 2, 6), "resamples": (1, 39, 40, 119)},
    says={"block": "at least 1", "resamples": "at least one"},
    entry="interval",
    most=8,
)  # fmt: skip

PAIRS = "[b / a for a, b in zip(first, second)]"
TWO = "ordered[(len(ordered) - 1) // 2]", "ordered[len(ordered) // 2]"
WHOLE = f"middle({PAIRS})"
EVEN = "(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2"
MIDDLE = (
    *edits("The mean was taken. A few late calls can move a mean by several per cent, so take the median.",
        mean_taken=(EVEN, "sum(ordered) / len(ordered)")),
    *edits("Only one of the two values in the middle was taken. For an even number of values the median is the mean of "
        "these two.", upper_middle=(EVEN, "ordered[len(ordered) // 2]"), upper_middle__lower=(EVEN,
        "ordered[(len(ordered) - 1) // 2]")),
    *edits("The two values in the middle were averaged as logarithms or as inverses. Take the mean of the two ratios.",
        middle_of_logarithms=(EVEN, f"math.sqrt({TWO[0]} * {TWO[1]})"),
        middle_of_logarithms__inverses=(EVEN, f"2 / (1 / {TWO[0]} + 1 / {TWO[1]})")),
)  # fmt: skip
UPSIDE_DOWN = "The ratio is upside down. Divide the second kernel's time by the first's, so that 1.02 means 2 % slower."
RATIO = (
    *MIDDLE,
    *edits("The two medians were divided. If the clock drifts, it moves the times of both kernels. Divide within each "
        "pair first, where the drift cancels.", medians_divided=(WHOLE, "middle(second) / middle(first)")),
    *edits("The two best times were divided. They come from different moments, when the clock may have been different. "
        "Divide within each pair first.", best_divided=(WHOLE, "min(second) / min(first)")),
    *edits("The sums were divided, so slow pairs count for more. Divide within each pair, and take the median of the "
        "ratios.", sums_divided=(WHOLE, "sum(second) / sum(first)")),
    *edits(UPSIDE_DOWN, upside_down=("b / a", "a / b")),
    *edits("A difference was returned. Divide the two times instead.", difference=("b / a", "b - a")),
    *edits("The geometric mean was taken. A few late calls move that as well, so take the median.",
        geometric_mean=(WHOLE, f"math.prod({PAIRS}) ** (1 / len(first))")),
)  # fmt: skip
APART = " / ".join(
    f"middle([{which}[(start + step) % len(ratios)] for start in row for step in range(block)])"
    for which in ("second", "first")
)
LOWER, UPPER = "found[outer]", "found[len(found) - 1 - outer]"
ENDS = f"{LOWER}, {UPPER}"
PICKED = "[ratios[(start + step) % len(ratios)] for start in row for step in range(block)]"


def between_two(found, share):
    """The quantile that interpolates, as NumPy's does."""
    place = share * (len(found) - 1)
    low = found[int(place)]
    return low + (place - int(place)) * (found[min(int(place) + 1, len(found) - 1)] - low)


INTERVAL = (
    *MIDDLE,
    *edits("The medians of the two kernels' times were divided. What slows both calls cancels only within a pair, so "
        "take the median of the ratios.", medians_divided=("middle(picked)", APART)),
    *edits("A resample was cut to as many pairs as were measured. It has all pairs of its blocks, even if these are "
        "more.", resample_cut=("middle(picked)", "middle(picked[: len(ratios)])")),
    *edits(UPSIDE_DOWN, upside_down=("b / a", "a / b"), upside_down__at_the_end=(ENDS, f"1 / {UPPER}, 1 / {LOWER}")),
    *edits("A resample had each of its pairs once. A pair that is drawn twice counts twice.", each_once=(PICKED,
        "[ratios[place] for place in {(start + step) % len(ratios) for start in row for step in range(block)}]")),
    *edits("A start was taken for the number of a block. It is the index of the block's first pair.",
        starts_of_blocks=("(start + step)", "(start * block + step)")),
    *edits("The blocks ran backwards from their starts. A block begins at its start, and goes on with the pairs behind "
        "it.", backwards=("(start + step)", "(start - step)")),
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
        "each end.", ninety_per_cent=("len(found) // 40", "len(found) // 20")),
    *edits("The smallest and the largest of all medians were returned. Drop a fortieth of the medians at each end "
        "first.", all_of_them=("len(found) // 40", "0")),
    *edits("Medians were dropped at one end only. Drop R // 40 at the bottom and as many at the top.",
        dropped_at_one_end=(UPPER, "found[-1]"), dropped_at_one_end__the_top=(LOWER, "found[0]")),
    *edits("The number of medians to drop was rounded up, or to the nearest whole number. R // 40 rounds down.",
        drop_rounded=("len(found) // 40", "min(-(-len(found) // 40), len(found) - 1)"),
        drop_rounded__nearest=("len(found) // 40", "round(len(found) / 40)")),
    *edits("At least one median was dropped at each end. Of fewer than 40 medians, R // 40 is 0: drop none.",
        one_at_least=("len(found) // 40", "(max(1, len(found) // 40) if len(found) > 2 else 0)")),
    *edits("The upper end is one median too low. Drop as many medians at the top as at the bottom.",
        upper_end=(UPPER, "found[len(found) - 2 - outer]")),
    *edits("The upper end is one median too high. Drop R // 40 medians at the top as well, as at the bottom.",
        upper_too_high=(UPPER, "found[len(found) - max(outer, 1)]"), upper_too_high__by_share=(UPPER,
        "found[min(len(found) - 1, int(0.975 * len(found)))]"), upper_too_high__by_both_shares=(ENDS,
        "found[int(0.025 * len(found))], found[min(len(found) - 1, int(0.975 * len(found)))]")),
    *edits("The ends lie between two of the medians, as a quantile does that interpolates. Return two of the medians: "
        "the smallest and the largest that are left.",
        quantile=(ENDS, "between_two(found, 0.025), between_two(found, 0.975)")),
    *edits("The two ends are exchanged. Return the lower one first.", ends_exchanged=(ENDS, f"{UPPER}, {LOWER}")),
    *edits("The medians of the resamples were not sorted. Sort them before you drop any.",
        not_sorted=("found = sorted(found)", "found = list(found)")),
)  # fmt: skip
CHANCE = (
    *edits("Your own measurement was not counted. Add 1 to the rows that are as far off, and 1 to all rows, so that "
        "the chance is never 0.", never_zero=("(as_far + 1) / (len(signs) + 1)", "as_far / len(signs)"),
        never_zero__above=("(as_far + 1) / (len(signs) + 1)", "as_far / (len(signs) + 1)"),
        never_zero__at_least_one=("(as_far + 1) / (len(signs) + 1)", "max(as_far, 1) / len(signs)")),
    *edits("Your own measurement was counted among the rows that are as far off, but not among all rows. Divide by "
        "rows + 1.", not_below=("(as_far + 1) / (len(signs) + 1)", "(as_far + 1) / len(signs)")),
    *edits("A sign of -1 left the pair out. It turns the sign of the pair's logarithm.",
        signs_as_0_and_1=("sign * log", "(sign > 0) * log")),
    *edits("The medians of the logarithms were compared. Compare their sums.",
        median_of_logs=("abs(sum(logs))", "abs(middle(logs))",
        "sum(sign * log for sign, log in zip(row, logs))", "middle([sign * log for sign, log in zip(row, logs)])")),
    *edits("Rows of equal signs were counted once. Count every row.", rows_once=("for row in signs", "for row in "
        "{tuple(row) for row in signs}"), rows_once__in_all=("for row in signs", "for row in {tuple(row) for row in "
        "signs}", "len(signs)", "len({tuple(row) for row in signs})")),
    *edits("Rows that are exactly as far off as your measurement were not counted. A row counts if it is at least as "
        "far off.", strictly=(">= observed", "> observed")),
    *edits("Only one side was counted. The second kernel can be slower or faster, so compare absolute values.",
        one_side=("abs(flipped) >= observed", "flipped >= observed"),
        one_side__as_observed=("abs(sum(logs))", "sum(logs)", "abs(flipped) >= observed", "flipped >= observed")),
    *edits("The signs were put on the ratios. Put them on the logarithms of the ratios, which are 0 where both times "
        "are the same.", ratios_flipped=("math.log(b / a)", "b / a")),
    *edits("The signs were put on the ratios less 1. If you swap two times, the ratio 2 becomes 1/2. Less 1, that is "
        "1 and -0.5, but two equal kernels need 1 and -1. Only the logarithm keeps its size.",
        less_one=("math.log(b / a)", "b / a - 1")),
    *edits("The signs were put on the differences in microseconds, where slow pairs count for more. Take the logarithm "
        "of the ratio.", differences_flipped=("math.log(b / a)", "b - a")),
    *edits("The rows nearer to 0 were counted. Count the rows that are at least as far from 0 as your measurement.",
        nearer_counted=("abs(flipped) >= observed", "abs(flipped) < observed")),
)  # fmt: skip


def fewer_than_40(case, seen, got):
    """Nothing was left after the cut, and only where nothing is to be cut."""
    return case.entry == "interval" and len(case.args[2]) < 40 and raised("IndexError", "ValueError")(case, seen, got)


EXERCISE = Exercise(
    id="15.3",
    title="Two per cent",
    entries=("ratio_of", "interval", "chance_of"),
    cases=sample_cases,
    oracle={"ratio_of": ratio, "interval": between, "chance_of": chance},
    contracts=(CONTRACT,),
    models=(
        model_of(ratio, RATIO, parts=(middle,), entry="ratio_of"),
        model_of(between, INTERVAL, parts=(middle,), uses=(between_two,), entry="interval"),
        model_of(chance, CHANCE, uses=(middle,), entry="chance_of"),
    ),
    mistakes=(
        Mistake(
            "minus_zero",
            "Of fewer than 40 medians none is dropped, but nothing was left of them. Was a slice [d:-d] taken? With "
            "d = 0 it is [0:0], which is empty. End it at len(found) - d, or return found[d] and found[-1 - d].",
            when=fewer_than_40,
            every=True,
        ),
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
