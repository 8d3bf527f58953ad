"""Exercise 1.6: where the multiply-add chain turns, on paper and on a measured curve."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, Mistake, Slip
from exercises.topics.formulas import rounded_result


def turning_oracle(arithmetic_rate, bandwidth, item_bytes):
    return arithmetic_rate * item_bytes / bandwidth


def chain_seconds_oracle(elements, steps, arithmetic_rate, bandwidth, item_bytes):
    return max(2 * steps * elements / arithmetic_rate, 2 * elements * item_bytes / bandwidth)


def _slope(steps, seconds):
    return (seconds[-1] - seconds[-2]) / (steps[-1] - steps[-2])


def measured_oracle(steps, seconds):
    return seconds[0] / _slope(steps, seconds)


def own_ceilings() -> tuple[float, float] | None:
    """This machine's (multiply-add rate [FLOP/s], copy bandwidth [bytes/s]); None before they were measured."""
    from course_lib.hardware.ceilings.measured import cache_path, read_cache

    known = read_cache(cache_path())
    return None if known is None else (known.fma_rate, known.copy_bandwidth)


def turning_cases(draw):
    rate, bandwidth = draw.integer(1, 10**5) * 1e9, draw.integer(10, 9000) * 1e9
    length = draw.integer(10**6, 10**8)
    steps = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    floor, slope, overhead = draw.integer(10, 300) * 1e-5, draw.integer(10, 1000) * 1e-7, draw.integer(1, 50) * 1e-6
    # Floor and slope do not meet at the origin: a launch costs something too.
    measured = [max(floor, overhead + step * slope) + 0.0 for step in (*steps, 4096, 8192)]
    cases = [
        Case("float32 on an A100: 19.5 TFLOP/s, 2.039 TB/s", (19.5e12, 2.039e12, 4), "turning_steps"),
        Case("float16 values, the same rates", (19.5e12, 2.039e12, 2), "turning_steps"),
        Case("a device made up for this check", (rate, bandwidth, 4), "turning_steps"),
        Case("8 steps on an A100", (2**26, 8, 19.5e12, 2.039e12, 4), "chain_seconds"),
        Case("512 steps on an A100", (2**26, 512, 19.5e12, 2.039e12, 4), "chain_seconds"),
        Case("made up for this check, one step", (length, 1, rate, bandwidth, 4), "chain_seconds"),
        Case("made up for this check, 100,000 steps", (length, 100_000, rate, bandwidth, 2), "chain_seconds"),
        Case(
            "a measured curve that turns at 40 steps",
            ([1, 2, 8, 64, 128], [1e-3, 1.01e-3, 1.02e-3, 1.6e-3, 3.2e-3]),
            "measured_turning_steps",
        ),
        Case(
            "a measured curve; each launch costs something too",
            ([*steps, 4096, 8192], measured),
            "measured_turning_steps",
        ),
    ]
    own = own_ceilings()
    if own is not None:
        cases.append(Case("float32 at this machine's own ceilings", (*own, 4), "turning_steps"))
        cases.append(Case("64 steps at this machine's own ceilings", (2**24, 64, *own, 4), "chain_seconds"))
    return cases


def _chain_with(function):
    """A slip's formula for `chain_seconds` alone (five numbers)."""
    return lambda *args: function(*args) if len(args) == 5 else None


def _near(got, want) -> bool:
    return isinstance(got, (int, float)) and not isinstance(got, bool) and math.isclose(got, want, rel_tol=1e-6)


def _slope_over_all_points(case, seen, got) -> bool:
    """Whether the slope ran from the first point to the last, or is a straight line's fitted to all of them."""
    if case.entry != "measured_turning_steps":
        return False
    steps, seconds = (torch.tensor(values, dtype=torch.float64) for values in case.args)
    ends = (seconds[-1] - seconds[0]) / (steps[-1] - steps[0])
    away = steps - steps.mean()
    fitted = (away * (seconds - seconds.mean())).sum() / (away * away).sum()
    return any(_near(got, float(seconds[0] / slope)) for slope in (ends, fitted))


def _off_by(factor):
    """A `when`: `turning_steps` is off by this factor."""
    return lambda case, seen, got: (
        case.entry == "turning_steps" and case.args[2] == 4 and _near(got, factor * turning_oracle(*case.args))
    )


EXERCISE = Exercise(
    id="1.6",
    title="Where the multiply-add chain turns",
    entries=("turning_steps", "chain_seconds", "measured_turning_steps"),
    cases=turning_cases,
    oracle={
        "turning_steps": turning_oracle,
        "chain_seconds": chain_seconds_oracle,
        "measured_turning_steps": measured_oracle,
    },
    hints=(
        "Write the FLOPs and the bytes of the chain for one element. Only one of the two depends on the number of "
        "steps.",
        "One element: 2 * steps FLOPs; one read and one write, 2 * item_bytes bytes. So the intensity is steps / "
        "item_bytes.",
        "The chain turns where its intensity equals the balance point, arithmetic_rate / bandwidth. Solve for the "
        "steps; the answer need not be whole.",
        "`turning_steps` is `arithmetic_rate / bandwidth * item_bytes`, and `chain_seconds` the larger of "
        "`2 * steps * elements / arithmetic_rate` and `2 * elements * item_bytes / bandwidth`.",
        "For the measured curve: the slope of its last two points is `(seconds[-1] - seconds[-2]) / (steps[-1] - "
        "steps[-2])`, in seconds per step. How many such steps take as long as the floor? "
        "`seconds[0] / slope`.",
    ),
    slips=(
        rounded_result(turning_oracle, chain_seconds_oracle, measured_oracle),
        Slip(
            "times_added",
            "The two times were added. Arithmetic and memory work at the same time: the larger one decides.",
            formula=_chain_with(lambda n, s, rate, width, item: 2 * s * n / rate + 2 * n * item / width),
        ),
        Slip(
            "seconds_without_write",
            "The memory's time counts one transfer per element. The chain reads and writes: `2 * elements * "
            "item_bytes`.",
            formula=_chain_with(lambda n, s, rate, width, item: max(2 * s * n / rate, n * item / width)),
        ),
        Slip(
            "seconds_of_one_flop",
            "The arithmetic's time counts one FLOP a step. A multiply-add is two: `2 * steps * elements`.",
            formula=_chain_with(lambda n, s, rate, width, item: max(s * n / rate, 2 * n * item / width)),
        ),
    ),
    mistakes=(
        Mistake(
            "item_bytes_forgotten",
            "That is the balance point, in FLOP/byte. The chain's intensity is steps / item_bytes, so the steps are "
            "the balance point times `item_bytes`.",
            when=lambda case, seen, got: (
                case.entry == "turning_steps" and case.args[2] == 4 and _near(got, turning_oracle(*case.args) / 4)
            ),
        ),
        Mistake(
            "balance_inverted",
            "The two ceilings were divided the wrong way round: bandwidth / rate is in byte/FLOP.",
            when=lambda case, seen, got: (
                case.entry == "turning_steps"
                and any(
                    _near(got, power * case.args[1] / case.args[0]) for power in (1, case.args[2], 1 / case.args[2])
                )
            ),
        ),
        Mistake(
            "write_not_counted",
            "The steps are half of what they should be. The chain reads each element and writes it, so it moves "
            "2 * item_bytes bytes.",
            when=_off_by(0.5),
        ),
        Mistake(
            "multiply_add_counted_once",
            "The steps are twice what they should be. One step is a multiply-add, which is 2 FLOPs.",
            when=_off_by(2.0),
        ),
        Mistake(
            "line_through_the_origin",
            "The slope was taken from the origin to the last point. Part of that time does not grow with the steps, so "
            "take the slope between the last two points.",
            when=lambda case, seen, got: (
                case.entry == "measured_turning_steps"
                and _near(got, case.args[1][0] / (case.args[1][-1] / case.args[0][-1]))
            ),
        ),
        Mistake(
            "slope_over_all_points",
            "The slope was taken over all points. The first ones lie on the floor, where a step costs nothing; take it "
            "between the last two, `(seconds[-1] - seconds[-2]) / (steps[-1] - steps[-2])`.",
            when=_slope_over_all_points,
        ),
        Mistake(
            "slope_inverted",
            "A quotient is upside down. The slope is in seconds per step, `(seconds[-1] - seconds[-2]) / (steps[-1] - "
            "steps[-2])`, and the answer is the floor divided by it, a number of steps.",
            when=lambda case, seen, got: (
                case.entry == "measured_turning_steps"
                and any(
                    _near(got, wrong)
                    for wrong in (case.args[1][0] * _slope(*case.args), _slope(*case.args) / case.args[1][0])
                )
            ),
        ),
        Mistake(
            "first_slow_point",
            "That is one of the measured numbers of steps. The turn lies between two of them: divide the floor by the "
            "slope of the last two points.",
            when=lambda case, seen, got: case.entry == "measured_turning_steps" and got in case.args[0],
        ),
        Mistake(
            "line_met_the_floor",
            "You extended the line through the last two points down to the floor. That line includes every constant "
            "cost. Use only its slope: the steps whose arithmetic alone takes as long as the floor are floor / slope.",
            when=lambda case, seen, got: (
                case.entry == "measured_turning_steps"
                and _near(got, case.args[0][-1] - (case.args[1][-1] - case.args[1][0]) / _slope(*case.args))
            ),
        ),
    ),
)
