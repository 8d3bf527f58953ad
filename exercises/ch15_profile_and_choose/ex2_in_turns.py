"""Exercise 15.2: a timer in turns: enough copies of the input, a schedule in drawn orders, and the pairs it gives."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
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


def orders_of(draw, rounds, kernels, apart=1):
    """Orders of kernels whose numbers are 0, 1, 2, or with gaps: 2, 5, 8 where they are 3 apart."""
    return [[apart * kernel + apart - 1 for kernel in draw.permutation(kernels).tolist()] for _ in range(rounds)]


def timed(draw, rounds, kernels, count, warm, apart=1, scale=50.0):
    steps = planned(orders_of(draw, rounds, kernels, apart), count, warm)
    return steps, [round((float(draw.uniform(1)[0]) + 0.4) * scale, 3) for _ in steps]


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
        Case("three kernels, numbers 3 apart", (orders_of(draw, 4, 3, 3), 4, 1), "schedule"),
        Case("no warm-up, one copy", (orders_of(draw, 4, 2), 1, 0), "schedule"),
        Case("all rounds warm up", (orders_of(draw, 3, 2), 4, 3), "schedule"),
        Case("two kernels of two", (*timed(draw, 6, 2, 3, 1), 0, 1), "pairs_of"),
        Case("the second against the first", (*timed(draw, 6, 2, 3, 2), 1, 0), "pairs_of"),
        Case("two of four", (*timed(draw, 7, 4, 5, 2), 3, 1), "pairs_of"),
        Case("kernels 2 and 8 of 2, 5 and 8", (*timed(draw, 6, 3, 2, 1, 3), 2, 8), "pairs_of"),
        Case("kernels 9 and 4 of 4 and 9", (*timed(draw, 5, 2, 3, 1, 5), 9, 4), "pairs_of"),
        Case("equal steps, one copy", (*timed(draw, 8, 3, 1, 2), 2, 0), "pairs_of"),
        Case("kernels of less than a microsecond", (*timed(draw, 6, 2, 3, 0, scale=0.3), 0, 1), "pairs_of"),
        Case("one round", (*timed(draw, 1, 3, 2, 0), 0, 2), "pairs_of"),
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
        lambda draw, *, rounds, kernels, apart, count, warm: (
            orders_of(draw, rounds, kernels, apart), count, min(warm, rounds),
        ),
        choices={"rounds": (1, 4), "kernels": (1, 2, 5), "apart": (1, 4), "count": (1, 2, 7), "warm": (0, 1, 3)},
        says={"count": "at least 1", "warm": "0 to the number of rounds"},
        entry="schedule",
        most=9,
    ),
)  # fmt: skip

NEEDED = "1 + -(-cache_bytes // input_bytes)"
COPIES = (
    *edits("One copy is missing. Between two uses of a copy only the other copies are read, and they alone have to "
        "fill the cache.", one_missing=(NEEDED, "-(-cache_bytes // input_bytes)")),
    *edits("The quotient was rounded down. Then the other copies do not fill the whole cache, and part of the first "
        "copy may still be there. Round up.", rounded_down=(NEEDED, "1 + cache_bytes // input_bytes"),
        rounded_down__and_missing=(NEEDED, "max(1, cache_bytes // input_bytes)")),
    *edits("The quotient was rounded down, and 2 was added. That is one copy too many if the quotient is a whole "
        "number. Round it up, and add 1.", plus_two=(NEEDED, "2 + cache_bytes // input_bytes")),
    *edits("An input that is as large as the cache, or larger, got a single copy. When that copy is read again, its "
        "own end is still in the cache. You need a second copy.",
        one_for_large=(NEEDED, "1 if input_bytes >= cache_bytes else " + NEEDED)),
)  # fmt: skip
PLACE, KEPT = "len(steps) % count", "number >= warm"
BY_ROUND = "for number, order in enumerate(orders) for kernel in order"
PLAN = (
    *edits("The kernels ran in the same order in every round. Use the order that was drawn for each round, because the "
        "kernel that runs second finds a warmer GPU.", one_order=("for kernel in order]", "for kernel in "
        "sorted(order)]"), one_order__first=("for kernel in order]", "for kernel in orders[0]]")),
    *edits("A kernel's place in its round was taken for its number. The orders hold the numbers.",
        place_for_number=("for kernel in order]", "for kernel in range(len(order))]")),
    *edits("Each kernel ran all its rounds before the next kernel began. In turns means that every round calls each "
        "kernel once.",
        one_after_another=(BY_ROUND, "for kernel in sorted(orders[0]) for number, order in enumerate(orders)"),
        one_after_another__first_order=(BY_ROUND, "for kernel in orders[0] for number, order in enumerate(orders)")),
    *edits("All kernels of a round used the same copy, so the second one found it in the cache. Take the next copy for "
        "each call.", copy_of_the_round=(PLACE, "number % count")),
    *edits("Each kernel has a copy of its own, so it finds that copy in the cache again. Take the next copy for each "
        "call.", copy_of_the_kernel=(PLACE, "kernel % count")),
    *edits("Each round began at the first copy again. Go on with the copy after the last one of the previous round.",
        begins_again=(PLACE, "orders[number].index(kernel) % count")),
    *edits("Behind the rounds that warm up, the copies began again at copy 0. Go on with the copy after the last one.",
        begins_again_behind_warm=(PLACE, "(len(steps) - (number >= warm) * warm * len(orders[0])) % count")),
    *edits("The copies do not begin with copy 0. The first call uses copy 0, and the last copy has the number "
        "copies - 1.", copies_from_one=(PLACE, "len(steps) % count + 1"),
        copies_from_one__in_turns=(PLACE, "(len(steps) + 1) % count")),
    *edits("The rounds that warm up are not in the list. They run as well, and only do not count.",
        warm_not_run=(BY_ROUND, BY_ROUND + " if number >= warm")),
    *edits("The first round was left out, although `warm` is 0. Then every round counts.",
        one_round_at_least=(KEPT, "number >= max(warm, 1)")),
    *edits("Every call used the first copy. Take the next copy for each call.", one_copy=(PLACE, "0")),
    *edits("The rounds that warm up were counted, and the other rounds were not. It should be the other way round.",
        warm_counted=(KEPT, "number < warm")),
    *edits("One round too many was left out. The rounds have numbers from 0 on, so the first `warm` rounds have the "
        "numbers below `warm`.", one_round_more=(KEPT, "number > warm")),
    *edits("Every round was counted. The first `warm` rounds do not count.", all_counted=(KEPT, "True")),
    *edits("The first `warm` calls were left out. Leave out whole rounds: each of them has a call for every kernel.",
        calls_skipped=(KEPT, "len(steps) >= warm")),
)  # fmt: skip


def in_order(counted, before, after):
    """Of the steps that count those of the rounds in which one kernel runs before another."""
    places = [[n for n, (kernel, _) in enumerate(counted) if kernel == wanted] for wanted in (before, after)]
    return [counted[n] for pair in zip(*places) if pair[0] < pair[1] for n in pair]


def in_a_row(counted, before, after):
    """Two steps for each time that one kernel comes next after another, also where that is a round later."""
    own = [step for step in counted if step[0] in (before, after)]
    return [step for pair in zip(own, own[1:]) if (pair[0][0], pair[1][0]) == (before, after) for step in pair]


BOTH = ("[time for kernel, time in counted if kernel == first], "
        "[time for kernel, time in counted if kernel == second]")  # fmt: skip
PAIRED = (
    *edits("The rounds that warm up are among the pairs. Leave out every step that does not count.",
        warm_among=("if kept", "if True")),
    *edits("Only the rounds that warm up were kept. Keep the steps that count, and leave these out.",
        warm_alone=("if kept", "if not kept")),
    *edits("The second list holds every kernel except `first`. A comparison may have more than two kernels: take only "
        "the times of `second`.", all_others=("if kernel == second", "if kernel != first")),
    *edits("The two lists are exchanged. The first list has the times of `first`.",
        exchanged=("kernel == first", "kernel == second", "kernel == second", "kernel == first")),
    *edits("The times of the smaller number came first. The first list has the times of `first`, even if its number is "
        "the larger one.", by_size=("kernel == first", "kernel == min(first, second)", "kernel == second",
        "kernel == max(first, second)")),
    *edits("The times were sorted, so they no longer form pairs. Two times at the same index must be from the same "
        "round.", times_sorted=("for (kernel, _, kept), time in zip(steps, times) if kept]", "for (kernel, _, kept), "
        "time in sorted(zip(steps, times), key=lambda one: one[1]) if kept]")),
    *edits("Pairs were kept only from the rounds in which one of the two kernels ran first. The order is drawn, so "
        "keep the pair of every round that counts, whichever of the two ran first.",
        some_rounds=("counted = [", "counted = in_order([", "if kept]", "if kept], first, second)"),
        some_rounds__second_first=("counted = [", "counted = in_order([", "if kept]", "if kept], second, first)")),
    *edits("A time was paired with one of the next round. Take both times of a pair from one round, whichever of the "
        "two kernels ran first.",
        next_round=("counted = [", "counted = in_a_row([", "if kept]", "if kept], first, second)"),
        next_round__second_first=("counted = [", "counted = in_a_row([", "if kept]", "if kept], second, first)")),
    *edits("The pairs were returned as one list. Return two lists: the times of first, and the times of second.",
        pairs_in_a_list=(BOTH, f"list(zip({BOTH}))")),
    *edits("Short times were left out. Keep the time of every step that counts, also if it is below a microsecond.",
        short_left_out=("if kept", "if kept and round(time)"),
        short_left_out__below_1=("if kept", "if kept and int(time)")),
    *edits("The times were looked up by their steps. Several steps may be equal, and all of them got the time of the "
        "first one. Go through both lists together.", by_equal_step=("zip(steps, times)",
        "[(step, times[steps.index(step)]) for step in steps]")),
    *edits("The lists hold what ran first and what ran second in a round. That order changes from round to round, so "
        "look at the numbers of the kernels.", by_place=(BOTH, "[time for _, time in counted[0::2]], [time for _, time "
        "in counted[1::2]]"), by_place__of_its_number=(BOTH, "[time for _, time in counted[first :: len({step[0] for "
        "step in steps})]], [time for _, time in counted[second :: len({step[0] for step in steps})]]")),
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
        model_of(paired, PAIRED, uses=(in_order, in_a_row), entry="pairs_of"),
    ),
    mistakes=(
        Mistake(
            "number_as_index",
            "A kernel's number was used as an index, but the numbers may have gaps, such as 2, 5 and 8. Use a "
            "dictionary, or compare the numbers.",
            when=lambda case, seen, got: (
                bool(seen.error) and seen.error.type == "IndexError" and case.entry == "pairs_of"
            ),
        ),
    ),
    hints=(
        "copies_needed: if you use n copies in turns, the n - 1 others are read before a copy is used again. Together "
        "they must be at least as large as the cache. So round cache_bytes / input_bytes up, and add 1.",
        "schedule: write a loop over the rounds, and in it a loop over the order of that round. The copy is the "
        "number of calls so far, modulo the number of copies. It goes on from round to round.",
        "A round counts if its number, from 0 on, is at least `warm`. Either all calls of a round count, or none.",
        "pairs_of: go through steps and times together, skip the steps that do not count, and append each time to the "
        "list of its kernel. Keep the order of the rounds.",
    ),
)  # fmt: skip
