"""Exercise 14.5: time a kernel of a few microseconds, on a simulated GPU with the traps of a real one."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake
from course_lib.checker.specification.contract import Contract, Level
from course_lib.hardware.simulated_gpu import on_a_simulated_gpu


def true_time(machine):
    return machine["kernel"]


QUIET = {"compile": 0.0, "warm": 1.0, "slower": 0.0, "between": 0.0}
TRAPS = {"compile": 80_000.0, "warm": 0.6, "slower": 0.5, "between": 1000.0}


def gpu(draw, kernel, launch, *traps, copies=4):
    machine = {"kernel": kernel, "launch": launch, "copies": copies, "seed": draw.integer(0, 10**6), "rises": 10_000.0}
    return ({**machine, **QUIET, **{trap: TRAPS[trap] for trap in traps}},)


def gpu_cases(draw):
    def case(name, *args, **options):
        return Case(name, gpu(draw, *args, **options), driver=on_a_simulated_gpu)

    return [
        case("a kernel of 9 µs, launched in 4 µs", 9.0, 4.0),
        case("a kernel of 4 µs, launched in 12 µs", 4.0, 12.0),
        case("a kernel that must be compiled", 6.0, 8.0, "compile"),
        case("a clock that rises at first", 5.0, 8.0, "slower"),
        case("an L2 cache that helps", 5.0, 8.0, "warm", copies=5),
        case("another process now and then", 5.0, 8.0, "between"),
        case("another process now and then, a kernel of 8 µs", 8.0, 6.0, "between", copies=2),
        case("all of it: a kernel of 5 µs", 5.0, 8.0, *TRAPS),
    ]


CONTRACT = Contract(
    lambda draw, *, kernel, launch, copies: gpu(draw, kernel, launch, *TRAPS, copies=copies),
    choices={
        "kernel": tuple(Level(time, f"all of it: a kernel of {time:g} µs") for time in (3.0, 5.5, 10.0)),
        "launch": tuple(Level(time, f"launched in {time:g} µs") for time in (4.0, 8.0, 12.0)),
        "copies": (2, 4, 5),
    },
    says={"kernel": "takes 3 to 10 µs", "launch": "Takes the host 4 to 12 µs", "copies": "2, 4 or 5"},
    driver=on_a_simulated_gpu,
    most=3,
)


def _near(got, expected):
    return abs(got - expected) <= 0.04 * abs(expected)


def _quiet(when):
    """A `when` for the cases without compiling, caches, clocks and interruptions: `when(machine, got)`."""

    def found(case, seen, got):
        machine = case.args[0]
        calm = all(machine[trap] == value for trap, value in QUIET.items())
        return calm and type(got) in (int, float) and when(machine, float(got))

    return found


def _trap(name):
    """A `when` for the cases with this trap alone."""

    return lambda case, seen, got: [trap for trap, value in TRAPS.items() if case.args[0][trap] == value] == [name]


def _several(machine, got):
    """Whether got is a whole number of kernels, or the kernel in a unit other than µs."""
    ratio = got / machine["kernel"]
    return ratio > 1.9 and _near(ratio, round(ratio))


EXERCISE = Exercise(
    id="14.5",
    title="Time a kernel of a few microseconds",
    entries=("time_kernel",),
    cases=gpu_cases,
    oracle=true_time,
    contracts=(CONTRACT,),
    relative_tolerance=0.05,
    hints=(
        "If you launch kernels one by one, the GPU waits for the host. The host sends a graph of some twenty kernels "
        "in 10 µs, and the GPU runs them without gaps.",
        "Let the graph go through the copies in turn: capture(list(range(device.copies)) * n).",
        "Replay until the GPU has worked for 10 ms, and synchronize. Then replay, event, replay, event and so on, "
        "without a synchronize in between. The first replay keeps the GPU busy while the host sends the rest.",
        "Between two events in a row there is one replay. Its time divided by the number of its kernels is one "
        "estimate. Take the median of some fifty estimates, because a few interrupted replays hardly move it.",
    ),
    mistakes=(
        Mistake(
            "not_waited_for",
            "That is how long the host takes to launch the kernel. A launch returns before the kernel has run, so "
            "without a synchronize the clock stops too early.",
            when=_quiet(lambda m, got: m["launch"] < m["kernel"] and _near(got, m["launch"])),
        ),
        Mistake(
            "synchronised_each_time",
            "That is the time of a launch, the kernel and a synchronize. The host waited after every launch, and the "
            "GPU before every kernel. Send many kernels, and synchronize once.",
            when=_quiet(lambda m, got: _near(got, m["kernel"] + m["launch"] + 10)),
        ),
        Mistake(
            "gap_counted",
            "That is the time of a launch and the kernel. The first event happens at once, because the GPU has nothing "
            "to do, and then it waits until the launch arrives. Give it work before the first event.",
            when=_quiet(lambda m, got: got - m["kernel"] - m["launch"] in (-1.5, -1.0, -0.5, 0.0, 0.5)),
        ),
        Mistake(
            "launch_bound",
            "That is how long a launch takes. The host launches more slowly than the GPU computes, so the GPU waits "
            "before each kernel. Send the kernels as a graph.",
            when=_quiet(lambda m, got: m["launch"] > m["kernel"] and _near(got, m["launch"])),
        ),
        Mistake(
            "not_divided",
            "That is the time of several kernels. Divide by the number of kernels between your two times.",
            when=_quiet(_several),
        ),
        Mistake(
            "other_unit",
            "The time is right, but in another unit. Return µs.",
            when=_quiet(lambda m, got: any(_near(got, m["kernel"] / unit) for unit in (1e3, 1e6))),
        ),
        Mistake(
            "event_counted",
            "About a microsecond too much was counted for each kernel. An event takes the GPU 1 µs, and its clock has "
            "steps of 0.5 µs. And if the GPU has nothing to do at the first event, the wait for your launch or replay "
            "is counted too. Let many kernels run between two events, and keep the GPU busy before the first.",
            when=_quiet(lambda m, got: got in (m["kernel"] + 0.5, m["kernel"] + 1, m["kernel"] + 1.5)),
        ),
        Mistake(
            "too_short",
            "The kernel takes longer. Either you stopped the clock before the GPU was done, or you divided by more "
            "kernels than there are between your two times.",
            when=_quiet(lambda m, got: got < 0.95 * m["kernel"]),
        ),
        Mistake(
            "too_long",
            "The kernel takes less. Between your two times the GPU also did something else or waited for the host, or "
            "you divided by too few kernels.",
            when=_quiet(lambda m, got: got > 1.05 * m["kernel"]),
        ),
        Mistake(
            "compiling_counted",
            "On the GPU where the first launch compiles, the result is too long. Launch once, and capture, before you "
            "start the clock.",
            when=_trap("compile"),
        ),
        Mistake(
            "clock_still_rising",
            "On the GPU whose clock rate rises at first, the result is wrong. Let it work for 10 ms before you "
            "measure.",
            when=_trap("slower"),
        ),
        Mistake(
            "input_in_l2",
            "With an L2 cache the result is too short, because the kernels found their input there. Go through all "
            "copies in turn, also from one replay to the next.",
            when=_trap("warm"),
        ),
        Mistake(
            "interruptions_counted",
            "If another process takes the GPU now and then, the result is wrong. A mean counts these interruptions. So "
            "does a median, if nearly every span has one. Measure many short spans, and take their median.",
            when=_trap("between"),
        ),
    ),
)
