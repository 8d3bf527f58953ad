"""Exercise 1.2: a device's balance point, which side bounds an operation, and its least time."""

from __future__ import annotations

import math

from course_lib.checker import Case, Exercise, Mistake, Slip
from exercises.ch01_memory_hierarchy_and_roofline.ex1_bytes_and_flops import (
    matmul_oracle,
    scores_oracle,
    softmax_oracle,
)
from exercises.topics.formulas import rounded_result


def balance_oracle(teraflops, gigabytes_per_second):
    return teraflops * 1e12 / (gigabytes_per_second * 1e9)


def least_time_oracle(flops, bytes_moved, teraflops, gigabytes_per_second):
    compute, memory = flops / (teraflops * 1e12), bytes_moved / (gigabytes_per_second * 1e9)
    return ("compute" if compute >= memory else "memory"), max(compute, memory)


def _a(name):
    """The name with its article: an A100, an H100, a T4."""
    return f"{'an' if name[0] in 'AH' else 'a'} {name}"


def bound_cases(draw):
    devices = {"A100": (312.0, 2039.0), "H100": (989.0, 3350.0), "H200": (989.0, 4800.0), "T4": (65.0, 320.0)}
    cases = [Case(f"balance point of {_a(name)}", sheet, "balance_point") for name, sheet in devices.items()]
    side = draw.integer(700, 900)
    operations = [
        ("a softmax of 4.3 GB", "H100", softmax_oracle(32 * 8192, 8192, 2)),
        ("a matmul of 8192", "H200", matmul_oracle(8192, 8192, 8192, 2)),
        ("a matmul of 256", "H100", matmul_oracle(256, 256, 256, 2)),
        ("one query against 131072 keys", "H200", scores_oracle(32, 1, 131072, 128, 2)),
        ("attention scores, head dimension 128", "T4", scores_oracle(16, 4096, 4096, 128, 2)),
        (
            f"a matmul of {side}, on either side of the balance point",
            draw.choice(("A100", "H100")),
            matmul_oracle(side, side, side, 2),
        ),
    ]
    cases += [Case(f"{what}, on {_a(name)}", (*work, *devices[name]), "least_time") for what, name, work in operations]
    for name, intensity in (("A100", 200.0), ("T4", 250.0), ("H200", 260.0), ("H100", 280.0)):
        moved = float(draw.integer(10**6, 10**9))
        work = f"{intensity:.0f} FLOPs for each byte"
        cases.append(Case(f"{work}, on {_a(name)}", (intensity * moved, moved, *devices[name]), "least_time"))
    copied = float(draw.integer(10**6, 10**9))
    cases.append(Case("a copy, which computes nothing, on an H100", (0, copied, *devices["H100"]), "least_time"))
    teraflops, bandwidth = 10.0 ** draw.integer(0, 4), float(draw.integer(50, 9000))
    flops, moved = float(draw.integer(1, 10**9)) * 1e3, float(draw.integer(1, 10**9))
    cases.append(Case("a device and an operation made up here", (flops, moved, teraflops, bandwidth), "least_time"))
    return cases


def _other(bound: str) -> str:
    return "memory" if bound == "compute" else "compute"


def _least_time_with(combine):
    """A slip's formula for `least_time` alone: `combine(flops, bytes, rate, bandwidth)`, in plain units."""

    def result(*args):
        if len(args) != 4:
            return None
        flops, moved, teraflops, gigabytes = args
        return combine(flops, moved, teraflops * 1e12, gigabytes * 1e9)

    return result


def _unit_slip(case, seen, got):
    want = (balance_oracle if case.entry == "balance_point" else least_time_oracle)(*case.args)
    got, want = (got[1], want[1]) if isinstance(want, tuple) and _is_verdict(got) else (got, want)
    if isinstance(got, bool) or not isinstance(got, (int, float)) or not isinstance(want, (int, float)) or not got > 0:
        return False
    power = math.log10(got / want)
    return round(power) != 0 and abs(power - round(power)) < 1e-4


def _is_verdict(got) -> bool:
    return isinstance(got, (tuple, list)) and len(got) == 2 and isinstance(got[1], (int, float))


def _side(flops, moved, rate, bandwidth) -> str:
    return "compute" if flops / rate >= moved / bandwidth else "memory"


EXERCISE = Exercise(
    id="1.2",
    title="Balance point, bound and least time",
    entries=("balance_point", "least_time"),
    cases=bound_cases,
    oracle={"balance_point": balance_oracle, "least_time": least_time_oracle},
    hints=(
        "Write the units down first. TFLOP/s is 10¹² FLOP/s, GB/s is 10⁹ bytes/s; the balance point is in FLOP/byte, "
        "the time in seconds.",
        "The balance point divides what the device can compute in a second by what it can move in a second. An H100's "
        "is 989e12 / 3350e9 = 295 FLOP/byte.",
        "Compute two times: the one that the arithmetic alone takes, `flops / rate`, and the one that the memory "
        "alone takes, `bytes_moved / bandwidth`.",
        "Memory and arithmetic work at the same time, so the larger of the two is the least time, and its side is the "
        "bound.",
        "`compute = flops / (teraflops * 1e12)`, `memory = bytes_moved / (gigabytes_per_second * 1e9)`; return "
        '`("compute" if compute >= memory else "memory", max(compute, memory))`.',
    ),
    slips=(
        Slip(
            "one_bound_for_all",
            "The same word is returned for every operation. Compare the two times: the larger one names the bound.",
            formula=(
                _least_time_with(lambda f, b, rate, width: ("memory", max(f / rate, b / width))),
                _least_time_with(lambda f, b, rate, width: ("memory", b / width)),
                _least_time_with(lambda f, b, rate, width: ("compute", max(f / rate, b / width))),
                _least_time_with(lambda f, b, rate, width: ("compute", f / rate)),
            ),
        ),
        Slip(
            "times_added",
            "The two times were added. A GPU fetches the next bytes while it computes on the last ones, so the least "
            "time is the larger of the two, not their sum.",
            formula=_least_time_with(lambda f, b, rate, width: (_side(f, b, rate, width), f / rate + b / width)),
        ),
        Slip(
            "smaller_time",
            "That is the smaller of the two times. Both the arithmetic and the transfer must be finished, so the "
            "larger one decides.",
            formula=_least_time_with(lambda f, b, rate, width: (_side(f, b, rate, width), min(f / rate, b / width))),
        ),
        Slip(
            "comparison_reversed",
            "The comparison is the wrong way round: you return the shorter of the two times, with its side. Both the "
            "arithmetic and the transfer must be finished, so the longer one decides.",
            formula=_least_time_with(
                lambda f, b, rate, width: (_other(_side(f, b, rate, width)), min(f / rate, b / width))
            ),
        ),
        Slip(
            "sides_swapped",
            'The times are right but the two sides are exchanged. When the memory takes longer, the side is "memory".',
            formula=_least_time_with(
                lambda f, b, rate, width: (_other(_side(f, b, rate, width)), max(f / rate, b / width))
            ),
        ),
        Slip(
            "intensity_against_one",
            "You compared the FLOPs with the bytes, that is, the intensity with 1. Compare the two times instead, or "
            "the intensity with the device's balance point, which is in the hundreds.",
            formula=_least_time_with(
                lambda f, b, rate, width: ("compute" if f >= b else "memory", max(f / rate, b / width))
            ),
        ),
        Slip(
            "always_the_arithmetic",
            "The time is that of the arithmetic alone. Compare it with the time that the bytes take, and return the "
            "larger.",
            formula=_least_time_with(lambda f, b, rate, width: (_side(f, b, rate, width), f / rate)),
        ),
        rounded_result(balance_oracle, least_time_oracle),
    ),
    mistakes=(
        Mistake(
            "seconds_before_side",
            'The two are returned in the wrong order: first the side, "memory" or "compute", then the seconds.',
            when=lambda case, seen, got: (
                case.entry == "least_time"
                and isinstance(got, (tuple, list))
                and len(got) == 2
                and isinstance(got[1], str)
                and isinstance(got[0], (int, float))
            ),
            every=True,
        ),
        Mistake(
            "balance_inverted",
            "That is bytes per FLOP. The balance point is in FLOP per byte: arithmetic rate divided by bandwidth.",
            when=lambda case, seen, got: (
                case.entry == "balance_point"
                and isinstance(got, float)
                and got > 0
                and math.isclose(got * balance_oracle(*case.args), 1.0, rel_tol=1e-6)
            ),
            every=True,
        ),
        Mistake(
            "unit_slip",
            "The number is off by a power of ten. TFLOP/s is 1e12 FLOP/s, GB/s is 1e9 bytes/s, and the time is in "
            "seconds.",
            when=_unit_slip,
            every=True,
        ),
    ),
)
