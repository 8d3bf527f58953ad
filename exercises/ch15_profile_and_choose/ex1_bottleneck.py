"""Exercise 15.1: from a profiler's figures, what limits a kernel, and the figure that shows it."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract


def limit(seen):
    if seen["local_requests"] > seen["global_requests"]:
        return "spills", seen["local_requests"] / seen["global_requests"]
    if seen["tensor_busy"] >= 60:
        return "tensor pipe", seen["tensor_busy"]
    if seen["special_busy"] >= 60:
        return "special functions", seen["special_busy"]
    if seen["memory_busy"] >= 60 and seen["moved_bytes"] >= 1.5 * seen["least_bytes"]:
        return "wasted bytes", seen["moved_bytes"] / seen["least_bytes"]
    if seen["memory_busy"] >= 60:
        return "memory", seen["memory_busy"]
    if seen["atomic_requests"] > seen["global_requests"]:
        return "atomics", seen["atomic_requests"] / seen["global_requests"]
    if seen["programs"] < seen["multiprocessors"]:
        return "too few programs", seen["programs"] / seen["multiprocessors"]
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


def metric_cases(draw):
    cases = [Case(name, (figures(values),)) for name, values in RECORDED.items()]
    busy = float(draw.integer(61, 95))
    others = {
        "a product that spills a little": (30.0, busy, 0.0, 20.0, 900, 1000, 0, 132, 132, 500, 400),
        "a product that spills much": (70.0, busy, 0.0, 20.0, 5000, 1000, 0, 132, 132, 900, 400),
        "exponentials near the memory's limit": (busy, 5.0, busy, 80.0, 0, 1000, 0, 999, 132, 500, 400),
        "half again the least": (busy, 0.0, 0.0, 80.0, 0, 1000, 0, 999, 132, 600, 400),
        "a little below that": (busy, 0.0, 0.0, 80.0, 0, 1000, 0, 999, 132, 599, 400),
        "wasted bytes and an idle memory": (busy - 50, 0.0, 0.0, 80.0, 0, 1000, 0, 999, 132, 900, 400),
        "some atomics": (30.0, 0.0, 0.0, 80.0, 0, 1000, 900, 999, 132, 500, 400),
        "some atomics of few programs": (30.0, 0.0, 0.0, 3.0, 0, 1000, 1100, 8, 132, 500, 400),
        "131 programs, and few warps": (30.0, 0.0, 0.0, 3.0, 0, 1000, 0, 131, 132, 500, 400),
        "a quarter of the warps": (30.0, 0.0, 0.0, 25.0, 0, 1000, 0, 132, 132, 500, 400),
        "a little less": (30.0, 0.0, 0.0, 24.5, 0, 1000, 0, 132, 132, 500, 400),
        "one atomic more than the others": (30.0, 0.0, 0.0, 80.0, 0, 1000, 1001, 999, 132, 500, 400),
        "many warps and nothing busy": (30.0, 9.0, 4.0, 70.0, 0, 1000, 0, 4000, 132, 500, 400),
    }
    return cases + [Case(name, (figures(values),)) for name, values in others.items()]


CONTRACT = Contract(
    lambda draw, *, memory, tensor, special, warps, local, atomic, programs, moved: (
        figures((memory, tensor, special, warps, local, 1000, atomic, programs, 108, moved, 1000)),
    ),
    choices={
        "memory": (59.0, 60.0, 90.0), "tensor": (0.0, 59.0, 60.0), "special": (0.0, 59.0, 60.0),
        "warps": (5.0, 24.0, 25.0), "local": (0, 1000, 1001), "atomic": (0, 1000, 1001),
        "programs": (1, 107, 108), "moved": (900, 1499, 1500),
    },
    says={"memory": "60 or more", "tensor": "60 or more", "special": "60 or more", "warps": "below 25",
          "moved": "1.5 times the least, or more"},
    most=24,
)  # fmt: skip

LOCAL = 'seen["local_requests"] > seen["global_requests"]'
TENSOR, SPECIAL, MEMORY = 'seen["tensor_busy"] >= 60', 'seen["special_busy"] >= 60', 'seen["memory_busy"] >= 60'
WASTED = 'seen["memory_busy"] >= 60 and seen["moved_bytes"] >= 1.5 * seen["least_bytes"]'
ATOMIC, FEW = 'seen["atomic_requests"] > seen["global_requests"]', 'seen["programs"] < seen["multiprocessors"]'
WARPS = 'seen["warps_active"] < 25'
CHANGES = (
    *edits("Spills were not checked first. A kernel that spills also keeps other units busy, such as the memory, so a "
        "lower row was returned. Put the row of spills at the top.",
        spills_unseen=(LOCAL, "False"), spills_late=(LOCAL, f'{LOCAL} and seen["memory_busy"] < 60'),
        spills_late__behind_the_units=(LOCAL, f"{LOCAL} and not {TENSOR} and not {SPECIAL}")),
    *edits("The memory was checked too early. It is also busy in a kernel that spills, and beside a tensor pipe that "
        "is at its limit. Its two rows come after the other units.",
        memory_first=(LOCAL, f"{LOCAL} and not {MEMORY}", TENSOR, f"{TENSOR} and not {MEMORY}", SPECIAL,
        f"{SPECIAL} and not {MEMORY}"),
        memory_first__behind_spills=(TENSOR, f"{TENSOR} and not {MEMORY}", SPECIAL, f"{SPECIAL} and not {MEMORY}")),
    *edits("A few spills were taken for the limit. Spills are the limit only if there are more local requests than "
        "global ones.",
        any_spill=(LOCAL, 'seen["local_requests"] > 0')),
    *edits("The tensor pipe was not checked, so a matrix product at its limit got another answer. Look at tensor_busy.",
        tensor_unseen=(TENSOR, "False")),
    *edits("The special-function units were not checked, so a kernel full of exponentials got another answer. Look at "
        "special_busy.",
        special_unseen=(SPECIAL, "False")),
    *edits("A kernel with wasted bytes got \"memory\". Bytes that the task does not need keep the memory busy as "
        "well, so compare moved_bytes with least_bytes.", waste_unseen=(WASTED, "False")),
    *edits("\"wasted bytes\" was returned for a kernel whose memory is not busy. They limit a kernel only if "
        "memory_busy is 60 or more.",
        waste_of_an_idle_memory=(WASTED, 'seen["moved_bytes"] >= 1.5 * seen["least_bytes"]')),
    *edits("A kernel with a busy memory and no wasted bytes got another answer than \"memory\". Look at memory_busy.",
        memory_unseen=(f"if {MEMORY}:", "if False:")),
    *edits("Atomics were not checked. Compare atomic_requests with global_requests.", atomics_unseen=(ATOMIC, "False")),
    *edits("A few atomics were taken for the limit. They are the limit only if there are more atomic requests than "
        "global ones.",
        any_atomic=(ATOMIC, 'seen["atomic_requests"] > 0')),
    *edits("A grid smaller than the GPU was not noticed. Compare programs with multiprocessors.",
        grid_unseen=(FEW, "False")),
    *edits("\"too few warps\" was returned for a kernel with too few programs. Check programs first: multiprocessors "
        "without a program are the reason why so few warps are active.",
        warps_before_programs=(FEW, f"{FEW} and not {WARPS}")),
    *edits("A grid of exactly one program for each multiprocessor was called too small. It is too small only if there "
        "are fewer programs than multiprocessors.",
        grid_of_equals=(FEW, 'seen["programs"] <= seen["multiprocessors"]')),
    *edits("Few active warps were not noticed. Look at warps_active.", warps_unseen=(WARPS, "False")),
    *edits("The limit is right, but its figure is upside down. Divide as in the table: local by global requests, "
        "moved by least bytes.",
        spills_upside_down=('seen["local_requests"] / seen["global_requests"]',
        'seen["global_requests"] / max(1, seen["local_requests"])'),
        spills_upside_down__bytes=('seen["moved_bytes"] / seen["least_bytes"]',
        'seen["least_bytes"] / seen["moved_bytes"]')),
    *edits("The limit is right, but its figure is a count. The table divides one count by another, such as local by "
        "global requests.",
        figure_is_a_count=('seen["local_requests"] / seen["global_requests"]', 'seen["local_requests"]'),
        figure_is_a_count__all=('seen["local_requests"] / seen["global_requests"]', 'seen["local_requests"]',
        'seen["atomic_requests"] / seen["global_requests"]', 'seen["atomic_requests"]',
        'seen["moved_bytes"] / seen["least_bytes"]', 'seen["moved_bytes"]')),
    *edits("The percentages are numbers from 0 to 100. A unit is busy from 60 on, not from 0.6.",
        percent_as_a_share=(TENSOR, 'seen["tensor_busy"] >= 0.6', SPECIAL, 'seen["special_busy"] >= 0.6', MEMORY,
        'seen["memory_busy"] >= 0.6'),
        percent_as_a_share__and_warps=(TENSOR, 'seen["tensor_busy"] >= 0.6', SPECIAL, 'seen["special_busy"] >= 0.6',
        MEMORY, 'seen["memory_busy"] >= 0.6', WARPS, 'seen["warps_active"] < 0.25')),
    *edits("A unit that was busy exactly 60 % was passed over. It counts as busy, too: 60 or more.",
        strictly=(TENSOR, 'seen["tensor_busy"] > 60', SPECIAL, 'seen["special_busy"] > 60', MEMORY,
        'seen["memory_busy"] > 60'), strictly__tensor=(TENSOR, 'seen["tensor_busy"] > 60'),
        strictly__special=(SPECIAL, 'seen["special_busy"] > 60'),
        strictly__memory=(MEMORY, 'seen["memory_busy"] > 60')),
)  # fmt: skip

EXERCISE = Exercise(
    id="15.1",
    title="Find the bottleneck",
    entries=("limit_of",),
    cases=metric_cases,
    oracle=limit,
    contracts=(CONTRACT,),
    models=(model_of(limit, CHANGES),),
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
