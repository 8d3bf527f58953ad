"""Exercise 15.2: a timer in turns: enough copies of the input, a schedule in drawn orders, and the pairs it gives."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract


def copies(input_bytes, cache_bytes):
    return 1 + -(-cache_bytes // input_bytes)


def planned(orders, count, warm):
    steps = []
    calls = [(number, kernel) for number, order in enumerate(orders) for kernel in order]
    for number, kernel in calls:
        steps.append((kernel, len(steps) % count, number >= warm))
    return steps


def paired(steps, times, first, second):
    counted = [(kernel, time) for (kernel, _, kept), time in zip(steps, times) if kept]
    return [time for kernel, time in counted if kernel == first], [time for kernel, time in counted if kernel == second]


def orders_of(draw, rounds, kernels):
    return [draw.permutation(kernels).tolist() for _ in range(rounds)]


def timed(draw, rounds, kernels, count, warm):
    steps = planned(orders_of(draw, rounds, kernels), count, warm)
    return steps, [round(float(draw.uniform(1)[0]) * 50 + 20, 3) for _ in steps]


def timer_cases(draw):
    return [
        Case("25 MB and a cache of 50 MB", (25_000_000, 50_000_000), "copies_needed"),
        Case("an input as large as the cache", (50_000_000, 50_000_000), "copies_needed"),
        Case("an input larger than the cache", (256_000_000, 50_000_000), "copies_needed"),
        Case("a byte more than half the cache", (25_000_001, 50_000_000), "copies_needed"),
        Case("a small input", (draw.integer(3000, 4000), 41_943_040), "copies_needed"),
        Case("two kernels, two rounds", ([[0, 1], [1, 0]], 3, 1), "schedule"),
        Case("three kernels, five copies", (orders_of(draw, 6, 3), 5, 2), "schedule"),
        Case("as many copies as kernels", (orders_of(draw, 5, 2), 2, 1), "schedule"),
        Case("no warm-up, one copy", (orders_of(draw, 4, 2), 1, 0), "schedule"),
        Case("all rounds warm up", (orders_of(draw, 3, 2), 4, 3), "schedule"),
        Case("two kernels of two", (*timed(draw, 6, 2, 3, 1), 0, 1), "pairs_of"),
        Case("the second against the first", (*timed(draw, 6, 2, 3, 2), 1, 0), "pairs_of"),
        Case("two of four", (*timed(draw, 7, 4, 5, 2), 3, 1), "pairs_of"),
        Case("nothing is counted", (*timed(draw, 2, 2, 3, 2), 0, 1), "pairs_of"),
    ]


CONTRACTS = (
    Contract(
        lambda draw, *, whole, rest: (1000, 1000 * whole + rest),
        choices={"whole": (1, 2, 40), "rest": (0, 1, 999)},
        says={"whole": "above 0"},
        entry="copies_needed",
        most=6,
    ),
    Contract(
        lambda draw, *, rounds, kernels, count, warm: (orders_of(draw, rounds, kernels), count, min(warm, rounds)),
        choices={"rounds": (1, 4), "kernels": (1, 2, 5), "count": (1, 2, 7), "warm": (0, 1, 3)},
        says={"count": "at least 1", "warm": "0 to the number of rounds"},
        entry="schedule",
        most=8,
    ),
)

NEEDED = "1 + -(-cache_bytes // input_bytes)"
COPIES = (
    *edits("One copy is missing: the one that is used again does not count among those read in between.",
        one_missing=(NEEDED, "-(-cache_bytes // input_bytes)")),
    *edits("The quotient was rounded down, so that a part of the cache still holds the copy. Round up.",
        rounded_down=(NEEDED, "1 + cache_bytes // input_bytes"),
        rounded_down__and_missing=(NEEDED, "max(1, cache_bytes // input_bytes)")),
    *edits("One copy is enough only if nothing else is needed to fill the cache: an input that is larger than the "
        "cache "
        "still leaves its own end there.", one_for_large=(NEEDED, "1 if input_bytes >= cache_bytes else " + NEEDED)),
)  # fmt: skip
PLACE, KEPT = "len(steps) % count", "number >= warm"
BY_ROUND = "for number, order in enumerate(orders) for kernel in order"
PLAN = (
    *edits("The kernels ran in one order in every round. Take the order that was drawn for the round: what runs second "
        "finds a warmer GPU.", one_order=("for kernel in order]", "for kernel in sorted(order)]"),
        one_order__first=("for kernel in order]", "for kernel in orders[0]]")),
    *edits("Each kernel ran all its rounds before the next. In turns means one call of each in every round.",
        one_after_another=(BY_ROUND, "for kernel in sorted(orders[0]) for number, order in enumerate(orders)"),
        one_after_another__first_order=(BY_ROUND, "for kernel in orders[0] for number, order in enumerate(orders)")),
    *edits("All kernels of a round got one copy, so the second found it in the cache. Go on to the next with each "
        "call.",
        copy_of_the_round=(PLACE, "number % count")),
    *edits("Each kernel has a copy of its own and finds it in the cache again. Go on to the next copy with each call.",
        copy_of_the_kernel=(PLACE, "kernel % count")),
    *edits("Each round begins at the first copy again. Go on where the last round ended.",
        begins_again=(PLACE, "orders[number].index(kernel) % count")),
    *edits("Always the first copy was used.", one_copy=(PLACE, "0")),
    *edits("The rounds that warm up were counted, and the others not.", warm_counted=(KEPT, "number < warm")),
    *edits("One round too many warms up. The first `warm` rounds do.", one_round_more=(KEPT, "number > warm")),
    *edits("Every round was counted.", all_counted=(KEPT, "True")),
    *edits("Calls were skipped, not rounds.", calls_skipped=(KEPT, "len(steps) >= warm")),
)  # fmt: skip
PAIRED = (
    *edits("The rounds that warm up are among the pairs.", warm_among=("if kept", "if True")),
    *edits("The rounds that warm up were kept, and the others not.", warm_alone=("if kept", "if not kept")),
    *edits("The second list holds every other kernel. A comparison may have more than two: take those of `second`.",
        all_others=("if kernel == second", "if kernel != first")),
    *edits("The two are exchanged: the first list is that of `first`.",
        exchanged=("kernel == first", "kernel == second", "kernel == second", "kernel == first")),
    *edits("The times were sorted. Those with one index must be of one round.",
        times_sorted=("return [time for kernel, time in counted if kernel == first], [time for kernel, time in counted "
        "if kernel == second]", "return sorted([time for kernel, time in counted if kernel == first]), sorted([time "
        "for "
        "kernel, time in counted if kernel == second])")),
    *edits("The lists are of the kernels that ran first and second in a round. Look for the kernels' numbers.",
        by_place=(
        "[time for kernel, time in counted if kernel == first], [time for kernel, time in counted if kernel == "
        "second]", "[time for _, time in counted[0::2]], [time for _, time in counted[1::2]]")),
)  # fmt: skip

EXERCISE = Exercise(
    id="15.2",
    title="A timer in turns",
    entries=("copies_needed", "schedule", "pairs_of"),
    cases=timer_cases,
    oracle={"copies_needed": copies, "schedule": planned, "pairs_of": paired},
    contracts=CONTRACTS,
    models=(
        model_of(copies, COPIES, entry="copies_needed"),
        model_of(planned, PLAN, entry="schedule"),
        model_of(paired, PAIRED, entry="pairs_of"),
    ),
    hints=(
        "copies_needed: with n copies in turns, n - 1 others are read before one is used again. Together they must be "
        "at "
        "least as large as the cache: round cache_bytes / input_bytes up, and add 1.",
        "schedule: a loop over the rounds, and in it a loop over that round's order. The copy is the number of calls "
        "so "
        "far, modulo the number of copies: it goes on from round to round.",
        "A round counts if its number is at least `warm`; all calls of a round count or none.",
        "pairs_of: go through steps and times together, skip what is not counted, and append the time to the list of "
        "its "
        "kernel. The order of the rounds stays.",
    ),
)  # fmt: skip
