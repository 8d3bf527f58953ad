"""Exercise 15.1: from a profiler's figures, what limits a kernel, and the figure that shows it."""

from __future__ import annotations

import itertools

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from exercises.topics.evidence import raised


def per(count, other):
    """The quotient; 0 instead of an error for a slip that takes a row which divides by 0."""
    return count / other if other else 0.0


def limit(seen):
    if seen["local_requests"] > seen["global_requests"]:
        return "spills", per(seen["local_requests"], seen["global_requests"])
    if seen["tensor_busy"] >= 60:
        return "tensor pipe", seen["tensor_busy"]
    if seen["special_busy"] >= 60:
        return "special functions", seen["special_busy"]
    if seen["memory_busy"] >= 60 and seen["moved_bytes"] >= 1.5 * seen["least_bytes"]:
        return "wasted bytes", per(seen["moved_bytes"], seen["least_bytes"])
    if seen["memory_busy"] >= 60:
        return "memory", seen["memory_busy"]
    if seen["atomic_requests"] > seen["global_requests"]:
        return "atomics", per(seen["atomic_requests"], seen["global_requests"])
    if seen["programs"] < seen["multiprocessors"]:
        return "too few programs", per(seen["programs"], seen["multiprocessors"])
    if seen["warps_active"] < 25:
        return "too few warps", seen["warps_active"]
    return "latency", seen["warps_active"]


NAMES = ("memory_busy", "tensor_busy", "special_busy", "warps_active", "local_requests", "global_requests",
         "atomic_requests", "programs", "multiprocessors", "moved_bytes", "least_bytes")  # fmt: skip
# What ncu counted on an H100, 26 November 2026; the least bytes are those of the workloads.
RECORDED = {
    "a copy": (88.27, 0.0, 0.0, 79.07, 0, 1048576, 0, 65536, 132, 516843008, 536870912),
    "every eighth number": (77.19, 0.0, 0.0, 83.87, 0, 327680, 0, 8192, 132, 301258496, 67108864),
    "a row in one warp": (79.17, 0.0, 1.73, 46.65, 15888384, 1048576, 0, 4096, 132, 2519890944, 536870912),
    "decode without splits": (11.64, 0.89, 5.9, 6.25, 0, 262208, 0, 8, 132, 136700928, 134217728),
    "a product of 8192³": (29.73, 93.43, 0.0, 14.78, 0, 0, 766, 132, 132, 1380294912, 402653184),
    "a histogram": (0.67, 0.0, 0.0, 99.35, 0, 131072, 524288, 16384, 132, 69689344, 67108992),
    "128 exponentials": (6.57, 0.0, 98.88, 93.8, 0, 262144, 0, 16384, 132, 114729472, 134217728),
    "one load in flight": (15.36, 0.0, 0.0, 1.56, 0, 135300, 0, 132, 132, 71650816, 69206016),
}


def figures(values):
    return dict(zip(NAMES, values))


def derived_cases(draw):
    """From the table: each row alone at its edge, each row just missed, and every two rows that fit together."""
    many, grid = draw.integer(900, 1100), draw.choice((16, 58, 108, 148))
    least, busy = 2 * draw.integer(500, 800), float(draw.integer(66, 95))
    idle = figures((30.0, 9.0, 4.0, 71.5, 0, many, 0, 40 * grid, grid, least + 9, least))
    half = {"moved_bytes": 3 * least // 2}
    rows = {  # what fits barely, what just misses, and what fits for certain
        "spills": ({"local_requests": many + 1}, {"local_requests": many}, {"local_requests": 4 * many + 3}),
        "tensor pipe": ({"tensor_busy": 60.0}, {"tensor_busy": 59.96}, {"tensor_busy": busy + 4.25}),
        "special functions": ({"special_busy": 60.0}, {"special_busy": 59.96}, {"special_busy": busy}),
        "wasted bytes": ({"memory_busy": busy, **half}, {"memory_busy": busy, "moved_bytes": 3 * least // 2 - 1},
                         {"memory_busy": busy + 2.125, "moved_bytes": 3 * least + 1}),
        "memory": ({"memory_busy": 60.0}, {"memory_busy": 59.96, **half}, {"memory_busy": busy + 2.125}),
        "atomics": ({"atomic_requests": many + 1}, {"atomic_requests": many}, {"atomic_requests": 3 * many + 2}),
        "too few programs": ({"programs": grid - 1}, {"programs": grid}, {"programs": grid // 3}),
        "too few warps": ({"warps_active": 24.96}, {"warps_active": 25.0}, {"warps_active": 6.25}),
    }  # fmt: skip
    for name, (barely, missed, _) in rows.items():
        yield Case(f"{name}: barely", ({**idle, **barely},))
        yield Case(f"{name}: just not", ({**idle, **missed},))
    for (one, (*_, first)), (other, (*_, second)) in itertools.combinations(rows.items(), 2):
        yield Case(f"{one}, and {other}", ({**idle, **second, **first},))
    yield Case("no row but the last", (idle,))
    yield Case("wasted bytes at 60 %", ({**idle, "memory_busy": 60.0, "moved_bytes": 2 * least},))
    yield Case("one program more than multiprocessors", ({**idle, "programs": grid + 1},))
    yield Case("special functions busier than the tensor pipe", ({**idle, "tensor_busy": busy, "special_busy": 99.5},))
    yield Case("a task that needs no bytes", ({**idle, "moved_bytes": 640, "least_bytes": 0},))
    some = {"local_requests": many // 2 + 9, "atomic_requests": many - 1}
    yield Case("some local requests, some atomic ones", ({**idle, **some},))
    others = {"local_requests": 1, "global_requests": 5, "atomic_requests": 6}
    yield Case("as many atomic requests as others", ({**idle, **others},))


def metric_cases(draw):
    return [*(Case(name, (figures(values),)) for name, values in RECORDED.items()), *derived_cases(draw)]


LOCAL = 'seen["local_requests"] > seen["global_requests"]'
TENSOR, SPECIAL, MEMORY = 'seen["tensor_busy"] >= 60', 'seen["special_busy"] >= 60', 'seen["memory_busy"] >= 60'
WASTED = 'seen["memory_busy"] >= 60 and seen["moved_bytes"] >= 1.5 * seen["least_bytes"]'
ATOMIC, FEW = 'seen["atomic_requests"] > seen["global_requests"]', 'seen["programs"] < seen["multiprocessors"]'
BYTES, LATENCY = 'seen["moved_bytes"] >= 1.5 * seen["least_bytes"]', '"latency", seen["warps_active"]'
WARPS = 'seen["warps_active"] < 25'
ROWS = tuple(f"if {row}:" for row in (LOCAL, TENSOR, SPECIAL, WASTED, MEMORY, ATOMIC, FEW, WARPS))


def below(row, last):
    """The edit that moves a row below another one."""
    others = " and ".join(f"not ({other[3:-1]})" for other in ROWS[row + 1 : last + 1])
    return ROWS[row], f"if {ROWS[row][3:-1]} and {others}:"


QUOTIENTS = (
    'per(seen["local_requests"], seen["global_requests"])', 'per(seen["moved_bytes"], seen["least_bytes"])',
    'per(seen["atomic_requests"], seen["global_requests"])', 'per(seen["programs"], seen["multiprocessors"])',
)  # fmt: skip


def ways(name, new):
    """The ways of one slip of a quotient: all four, and each alone."""
    each = [(old, new(old)) for old in QUOTIENTS]
    return {name: sum(each, ()), **{f"{name}__of_{number}": edit for number, edit in enumerate(each)}}


CHANGES = (
    *edits("Spills were not checked first. A kernel that spills also keeps other units busy, such as the memory, so a "
        "lower row was returned. Put the row of spills at the top.",
        spills_unseen=(LOCAL, "False"), spills_late=(LOCAL, f'{LOCAL} and seen["memory_busy"] < 60'),
        **{f"spills_late__below_{last}": below(0, last) for last in range(1, len(ROWS))}),
    *edits("The memory was checked too early. It is also busy in a kernel that spills, and beside a tensor pipe that "
        "is at its limit. Its two rows come after the other units.", memory_first=(LOCAL, f"{LOCAL} and not {MEMORY}",
        TENSOR, f"{TENSOR} and not {MEMORY}", SPECIAL, f"{SPECIAL} and not {MEMORY}"),
        memory_first__behind_spills=(TENSOR, f"{TENSOR} and not {MEMORY}", SPECIAL, f"{SPECIAL} and not {MEMORY}")),
    *edits("Two rows of the table fit this kernel, and the lower one was returned. The limit is the first row that "
        "fits, so check the rows in the order of the table.", **{f"out_of_order__{row}_below_{last}": below(row,
        last) for row in (1, 2, 4, 5, 6) for last in range(row + 1, len(ROWS)) if (row, last) != (6, 7)},
        out_of_order__waste_above=(SPECIAL, f"{SPECIAL} and not ({WASTED})"), out_of_order__waste_first=(TENSOR,
        f"{TENSOR} and not ({WASTED})", SPECIAL, f"{SPECIAL} and not ({WASTED})"),
        out_of_order__atomics=(f"if {MEMORY}", f"if not {ATOMIC} and {MEMORY}"), out_of_order__programs=(f"if {MEMORY}",
        f"if not {FEW} and {MEMORY}")),
    *edits("The busiest unit was returned. The limit is the first row that fits, even if a unit of a lower row is "
        "busier.",
        busiest=(TENSOR, f'{TENSOR} and seen["tensor_busy"] >= max(seen["special_busy"], seen["memory_busy"])',
        SPECIAL, f'{SPECIAL} and seen["special_busy"] >= seen["memory_busy"]')),
    *edits("A few spills were taken for the limit. Spills are the limit only if there are more local requests than "
        "global ones.", any_spill=(LOCAL, 'seen["local_requests"] > 0')),
    *edits("The tensor pipe was not checked, so a matrix product at its limit got another answer. Look at tensor_busy.",
        tensor_unseen=(TENSOR, "False")),
    *edits("The special-function units were not checked, so a kernel full of exponentials got another answer. Look at "
        "special_busy.", special_unseen=(SPECIAL, "False")),
    *edits("A kernel with wasted bytes got \"memory\". Bytes that the task does not need keep the memory busy as "
        "well, so compare moved_bytes with least_bytes.", waste_unseen=(WASTED, "False")),
    *edits("\"wasted bytes\" was returned for a kernel whose memory is not busy. They limit a kernel only if "
        "memory_busy is 60 or more.",
        waste_of_an_idle_memory=(WASTED, 'seen["moved_bytes"] >= 1.5 * seen["least_bytes"]')),
    *edits("A kernel with a busy memory and no wasted bytes got another answer than \"memory\". Look at memory_busy.",
        memory_unseen=(f"if {MEMORY}:", "if False:")),
    *edits("Atomics were not checked. Compare atomic_requests with global_requests.", atomics_unseen=(ATOMIC, "False")),
    *edits("A few atomics were taken for the limit. They are the limit only if there are more atomic requests than "
        "global ones.", any_atomic=(ATOMIC, 'seen["atomic_requests"] > 0')),
    *edits("A grid smaller than the GPU was not noticed. Compare programs with multiprocessors.",
        grid_unseen=(FEW, "False")),
    *edits("\"too few warps\" was returned for a kernel with too few programs. Check programs first: multiprocessors "
        "without a program are the reason why so few warps are active.",
        warps_before_programs=(FEW, f"{FEW} and not {WARPS}")),
    *edits("A grid of exactly one program for each multiprocessor was called too small. It is too small only if there "
        "are fewer programs than multiprocessors.",
        grid_of_equals=(FEW, 'seen["programs"] <= seen["multiprocessors"]')),
    *edits("Few active warps were not noticed. Look at warps_active.", warps_unseen=(WARPS, "False")),
    *edits("The limit's figure is upside down. Divide as in the table, such as local by global "
        "requests.", **ways("upside_down", lambda old: f"per({old[4:-1].split(', ')[1]}, {old[4:-1].split(', ')[0]})")),
    *edits("The limit's figure is a count. The table divides one count by another, such as local by "
        "global requests.", **ways("figure_is_a_count", lambda old: old[4:].split(", ")[0])),
    *edits("The limit's figure was multiplied by 100. Return the quotient itself: where the table "
        "divides one count by another, the figure is no percentage.",
        **ways("figure_in_percent", lambda old: f"100 * {old}")),
    *edits("The limit's figure was rounded. Return the quotient with all its digits.",
        **ways("figure_rounded", lambda old: f"int({old})"), **ways("figure_rounded__to_1",
        lambda old: f"round({old}, 1)"), **ways("figure_rounded__to_2", lambda old: f"round({old}, 2)"),
        **ways("figure_rounded__to_3", lambda old: f"round({old}, 3)")),
    *edits("The limit's figure is only the excess over 1. Divide as in the table.",
        **ways("figure_less_one", lambda old: f"{old} - 1")),
    *edits("\"latency\" was returned with the figure of a unit. Its figure is warps_active.",
        latency_of_a_unit=(LATENCY, LATENCY.replace('seen["warps_active"]',
        'max(seen["memory_busy"], seen["tensor_busy"], seen["special_busy"])')),
        latency_of_a_unit__memory=(LATENCY, LATENCY.replace("warps_active", "memory_busy"))),
    *edits("\"memory\" was returned with a quotient. Its figure is memory_busy.",
        memory_as_a_quotient=(
        '"memory", seen["memory_busy"]', '"memory", per(seen["moved_bytes"], seen["least_bytes"])')),
    *edits("A percentage was rounded before it was compared with the limit, so a value just below the limit counted as "
        "having reached it. Compare the number itself.", rounded_first=(TENSOR, TENSOR.replace('seen["tensor_busy"]',
        'round(seen["tensor_busy"])'), SPECIAL, SPECIAL.replace('seen["special_busy"]', 'round(seen["special_busy"])'),
        MEMORY, MEMORY.replace('seen["memory_busy"]', 'round(seen["memory_busy"])')), rounded_first__warps=(WARPS,
        'round(seen["warps_active"]) < 25')),
    *edits("The quotient of moved and least bytes was rounded before it was compared with 1.5. Compare the number "
        "itself.", waste_rounded=(BYTES, 'round(per(seen["moved_bytes"], seen["least_bytes"]), 1) >= 1.5'),
        waste_rounded__to_2=(BYTES, 'round(per(seen["moved_bytes"], seen["least_bytes"]), 2) >= 1.5')),
    *edits("Bytes of exactly 1.5 times the least were not called wasted. The row begins at 1.5: 1.5 times or more.",
        waste_strictly=(BYTES, BYTES.replace(">=", ">"))),
    *edits("As many atomic requests as global ones were called too many. The row needs more.",
        atomics_of_equals=(ATOMIC, ATOMIC.replace(">", ">="))),
    *edits("As many local requests as global ones were called spills. The row needs more.",
        spills_of_equals=(LOCAL, LOCAL.replace(">", ">="))),
    *edits("Atomic requests were compared with local and global ones together. Compare them with the global ones "
        "alone.", atomics_against_all=(ATOMIC, f'{ATOMIC} + seen["local_requests"]')),
    *edits("Programs were compared with 132, which is how many multiprocessors an H100 has. Compare them with "
        "seen[\"multiprocessors\"].", programs_against_132=(FEW, 'seen["programs"] < 132')),
    *edits("A grid was called too small because it does not fill its last round. The row is only for fewer programs "
        "than multiprocessors.", last_round=(FEW, 'seen["programs"] % seen["multiprocessors"] != 0')),
    *edits("Exactly 25 % of active warps were called too few. The row is for less than 25.",
        warps_of_25=(WARPS, WARPS.replace("<", "<="))),
    *edits("The percentages are numbers from 0 to 100. A unit is busy from 60 on, not from 0.6.",
        percent_as_a_share=(TENSOR, 'seen["tensor_busy"] >= 0.6', SPECIAL, 'seen["special_busy"] >= 0.6', MEMORY,
        'seen["memory_busy"] >= 0.6'), percent_as_a_share__and_warps=(TENSOR, 'seen["tensor_busy"] >= 0.6', SPECIAL,
        'seen["special_busy"] >= 0.6', MEMORY, 'seen["memory_busy"] >= 0.6', WARPS, 'seen["warps_active"] < 0.25')),
    *edits("A unit that was busy exactly 60 % was passed over. It counts as busy, too: 60 or more.",
        strictly=(TENSOR, 'seen["tensor_busy"] > 60', SPECIAL, 'seen["special_busy"] > 60', MEMORY,
        'seen["memory_busy"] > 60'), strictly__waste=(WASTED, WASTED.replace(">= 60", "> 60")),
        **{f"strictly__{n}": (row, row.replace(">=", ">")) for n, row in enumerate((TENSOR, SPECIAL, MEMORY))}),
)  # fmt: skip

EXERCISE = Exercise(
    id="15.1",
    title="Find the bottleneck",
    entries=("limit_of",),
    cases=metric_cases,
    oracle=limit,
    models=(model_of(limit, CHANGES, parts=(per,), most_pairs=1500),),
    mistakes=(
        Mistake(
            "divided_too_early",
            "You divided by a count that is 0, for a row that does not decide. Find the first row that fits, and then "
            "divide for its figure.",
            when=raised("ZeroDivisionError"),
        ),
    ),
    hints=(
        "Write a chain of `if`s in the order of the table. The order matters because one cause shows up in several "
        "figures: a kernel that spills also keeps the memory busy, and a kernel with 8 programs also has few warps.",
        "The first rows: return \"spills\" if local_requests > global_requests, \"tensor pipe\" if tensor_busy is 60 "
        "or more, and \"special functions\" if special_busy is 60 or more.",
        "Two rows are for a memory that is busy 60 % or more. If moved_bytes is 1.5 times least_bytes or more, return "
        "\"wasted bytes\" with moved_bytes / least_bytes. Otherwise return \"memory\" with memory_busy.",
        "If no unit is busy, the warps wait: for atomics, because there are too few programs or too few warps, or for "
        "the latency of what they do. Check for these in the order of the table.",
    ),
)  # fmt: skip
