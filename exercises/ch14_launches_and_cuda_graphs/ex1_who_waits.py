"""Exercise 14.1: a step's time from its launches and kernels, how long the GPU idles, and the same step as a graph."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import without


def step_time(launches, kernels, waits):
    host, end = 0.0, 0.0
    for number, (launch, kernel) in enumerate(zip(launches, kernels)):
        host = host + launch
        begin = max(host, end)
        end = begin + kernel
        if number in waits:
            host = end
    return end


def idle_time(launches, kernels, waits):
    return step_time(launches, kernels, waits) - sum(kernels)


def graph_time(launch, kernels, gap):
    return launch + sum(kernels) + gap * (len(kernels) - 1)


STEPS = {
    "one kernel": ((8.0,), (5.0,), ()),
    "launches longer than kernels": ((8.0, 9.0, 8.5), (2.0, 3.0, 4.0), ()),
    "kernels longer than launches": ((8.0, 6.0, 7.0), (50.0, 40.0, 3.0), ()),
    "a long kernel hides the launches behind it": ((8.0, 8.0, 8.0, 8.0), (30.0, 2.0, 2.0, 2.0), ()),
    "a short one, then a long one": ((4.0, 9.0, 5.0), (1.0, 80.0, 6.0), ()),
    "the host waits after the second kernel": ((8.0, 7.0, 6.0), (30.0, 40.0, 5.0), (1,)),
    "the host waits after each": ((8.0, 7.0, 6.0), (30.0, 4.0, 5.0), (0, 1, 2)),
    "waits in another order than the kernels": ((8.0, 7.0, 6.0, 5.0), (30.0, 40.0, 5.0, 2.0), (2, 0)),
    "the host waits after the last": ((8.0, 7.0), (3.0, 4.0), (1,)),
    "no kernel": ((), (), ()),
}


def waiting_cases(draw):
    steps = [Case(name, step, entry) for name, step in STEPS.items() for entry in ("step_seconds", "idle_seconds")]
    graphs = [
        Case("one kernel", (10.0, (4.0,), 1.5), "graph_seconds"),
        Case("a hundred kernels of 3 µs", (10e-6, (3e-6,) * 100, 1e-6), "graph_seconds"),
        Case("kernels shorter than the gap", (9.0, (4.0, 0.5, 0.25, 3.0), 0.75), "graph_seconds"),
        Case("kernels of several lengths", (9.0, (4.0, 50.0, 1.0), 0.75), "graph_seconds"),
    ]
    return steps + graphs


def _drawn(draw, *, kernels, longest, waits):
    def times(most):
        return tuple(draw.integer(1, most + 1) / 2 for _ in range(kernels))

    return times(20), times(longest), tuple(n for n in range(kernels) if waits and n % waits == waits - 1)


def _steps(entry):
    return Contract(
        _drawn,
        choices={
            "kernels": (1, 2, 9, 40),
            "longest": (Level(8, "short kernels"), Level(30, "kernels about as long as launches"), Level(300, "long")),
            "waits": (Level(0, "no waiting"), Level(1, "waiting after each kernel"), Level(3, "waiting now and then")),
        },
        entry=entry,
        most=6,
    )


BEGIN, HOST = "begin = max(host, end)", "host = host + launch"
STEP = (
    *edits("Launches and kernels were added up, as if each launch waited for the kernel before it, or the first kernel "
        "for the last launch. But the host goes on while the GPU works. Only the kernel has to wait for the kernel "
        "before it, and for its own launch.",
        launches_wait=(HOST, "host = max(host, end) + launch")),
    *edits("The launches were not added up. The host launches one kernel after another, so launch i ends after all "
        "launches up to it.", launches_side_by_side=(HOST, "host = launch")),
    *edits("A kernel began while the one before it was still running. Kernels of one step run one after another.",
        kernels_side_by_side=(BEGIN, "begin = host")),
    *edits("A kernel began before its launch had ended. It begins at the later of two times: the end of its launch, "
        "and the end of the kernel before it.", launch_forgotten=(BEGIN, "begin = end if number else host")),
    *edits("The result is the larger of two sums, all launches or all kernels. The step takes longer, because the GPU "
        "cannot start a kernel that the host has not launched yet. Go through the kernels in order.",
        larger_sum=("return end", "return max(sum(launches), sum(kernels))"),
        larger_sum__with_its_ends=("return end",
        "return max(sum(launches) + sum(kernels[-1:]), sum(launches[:1]) + sum(kernels))")),
    *edits("For each kernel the longer of two times was counted, its launch or its run. But a kernel does not run "
        "during its own launch, and the host may be several launches ahead. Keep two times, one for the host and one "
        "for the GPU.",
        longer_of_each=(BEGIN, "begin = end + (launch if number in waits else max(launch, kernel) - kernel)"),
        longer_of_each__and_no_waits=(BEGIN, "begin = end + max(launch, kernel) - kernel")),
    *edits("Each launch was made to begin when the kernel before it begins. But the host goes on by itself: during a "
        "long kernel it launches several. Keep a time `host` that grows with each launch.",
        one_launch_ahead=(HOST, "host = (begin if number and number - 1 not in waits else host) + launch"),
        one_launch_ahead__and_no_waits=(HOST, "host = (begin if number else host) + launch")),
    *edits("A kernel began when its launch began. It can begin only when its launch has ended: add the launch to the "
        "host's time first.", begins_with_its_launch=(BEGIN, "begin = max(host - launch, end)")),
    *edits("`waits` had no effect. After such a kernel, the host begins its next launch only when the kernel has "
        "ended.",
        waits_ignored=("number in waits", "number in ()")),
    *edits("The host waited one kernel too early: before it launched the kernel that is in `waits`, or with `waits` "
        "counted from 1. They count from 0, and the host waits after that launch, until the kernel itself has ended.",
        waits_too_early=("number in waits", "number + 1 in waits"),
        waits_too_early__behind_the_launch=(BEGIN, "host = max(host, end) if number in waits else host; " + BEGIN,
        "host = end", "pass"),
        waits_too_early__and_back_in_time=(BEGIN, "host = end if number in waits else host; " + BEGIN,
        "host = end", "pass")),
    *edits("Behind a wait a launch was counted twice. The host goes on when the kernel has ended, so host = end; the "
        "next launch is added in its own turn.", wait_adds_a_launch=("host = end", "host = end + launch")),
    *edits("Only one entry of `waits` had an effect. There can be several, and the host waits after each of these "
        "kernels.",
        only_one_wait=("number in waits", "number in waits[:1]"),
        only_one_wait__the_last=("number in waits", "number in waits[-1:]"),
        only_one_wait__of_the_smallest_number=("number in waits", "waits and number == min(waits)")),
    *edits("At a wait, the time at which the kernel ends was added to the host's time. Both count from the start of "
        "the step, so the host's time becomes the kernel's end: host = end.",
        wait_adds_the_end=("host = end", "host = host + end")),
    *edits("The entries of `waits` were taken in order. A later one may be smaller than the one before it.",
        waits_taken_in_order=("if number in waits", "if number == next((n for n in waits if n >= number), None)")),
    *edits("The host was made to wait as long as the kernel runs. It waits until the kernel has ended. That can be "
        "longer, because the kernel may have to wait before it begins.",
        waits_for_its_length=("host = end", "host = host + kernel")),
    *edits("That is when the host is done, and not when the last kernel has ended. Return the end of that kernel.",
        end_of_the_host=("return end", "return host")),
    *edits("The first launch was not counted. No kernel can begin until it has ended.",
        first_launch_is_free=("host, end = 0.0, 0.0", "host, end = -sum(launches[:1]), 0.0")),
)  # fmt: skip
SUBTRACTED = "step_time(launches, kernels, waits) - sum(kernels)"
IDLE = (
    # A free first launch makes the same number as one that is not counted as idle, and these sums the same as idle
    # times that are computed from sums.
    *without(STEP, "larger_sum", "larger_sum__with_its_ends", "longer_of_each__and_no_waits",
        "one_launch_ahead__and_no_waits", "first_launch_is_free"),
    *edits("The idle time was computed from two sums alone, all launches and all kernels. But the GPU also waits for "
        "the first launch, and behind a wait for the next one, and a long kernel elsewhere does not make up for that. "
        "Subtract the kernels' time from the step's.",
        idle_from_sums=(SUBTRACTED, "max(0.0, sum(launches) - sum(kernels))"),
        idle_from_sums__below_0_too=(SUBTRACTED, "sum(launches) - sum(kernels)")),
    *edits("Each launch was compared with one kernel. But the host may be several launches ahead, and then a launch "
        "that is longer than a kernel makes nobody wait. Subtract the kernels' time from the step's.",
        idle_of_each=(SUBTRACTED, "sum(max(0.0, launch - kernel) for launch, kernel in zip(launches, kernels))"),
        idle_of_each__of_the_kernel_before=(SUBTRACTED, "sum(launches[:1]) + sum(max(0.0, launch - kernel) for launch, "
        "kernel in zip(launches[1:], kernels))")),
    *edits("The launches' time was subtracted from the step's. The GPU idles when no kernel runs, so subtract the "
        "kernels' time.", launches_subtracted=("sum(kernels)", "sum(launches)")),
    *edits("The first launch was not counted as idle. The step begins with it, and no kernel runs yet.",
        first_launch_not_idle=("sum(kernels)", "(sum(kernels) + sum(launches[:1]))")),
)  # fmt: skip
GRAPH = (
    *edits("A gap was counted for every kernel. Gaps are between kernels, so there is one gap less than kernels.",
        gap_too_many=("(len(kernels) - 1)", "len(kernels)")),
    *edits("One gap was counted in all. There is one between each kernel and the next.",
        one_gap=(" * (len(kernels) - 1)", "")),
    *edits("The launch and the kernels were taken to run at the same time. The first kernel starts when the launch has "
        "ended: add them.", launch_beside_the_kernels=("launch + sum(kernels)", "max(launch, sum(kernels))")),
    *edits("The gaps are missing: add `gap` between each kernel and the next.",
        gaps_forgotten=(" + gap * (len(kernels) - 1)", "")),
    *edits("Of a gap and the kernel behind it only the longer was counted. A gap begins when the kernel before it has "
        "ended, and the next kernel begins when the gap is over: add both.",
        gap_or_kernel=("sum(kernels) + gap * (len(kernels) - 1)",
        "kernels[0] + sum(max(kernel, gap) for kernel in kernels[1:])")),
    *edits("The launch was counted for every kernel. A graph is launched once.",
        launch_for_each=("launch + sum", "launch * len(kernels) + sum")),
    *edits("The launch is missing: the graph is launched once.", graph_launch_forgotten=("launch + ", "")),
)  # fmt: skip

EXERCISE = Exercise(
    id="14.1",
    title="Who waits for whom",
    entries=("step_seconds", "idle_seconds", "graph_seconds"),
    cases=waiting_cases,
    oracle={"step_seconds": step_time, "idle_seconds": idle_time, "graph_seconds": graph_time},
    contracts=(_steps("step_seconds"), _steps("idle_seconds")),
    models=(
        model_of(step_time, STEP, entry="step_seconds"),
        model_of(idle_time, IDLE, (step_time,), entry="idle_seconds"),
        model_of(graph_time, GRAPH, entry="graph_seconds"),
    ),
    hints=(
        "Keep two times: `host`, when the host has finished its last launch, and `end`, when the last kernel ends.",
        "For each kernel in order: host += launch, and end = max(host, end) + kernel.",
        "If the host waits after a kernel, it goes on when that kernel has ended: host = end.",
        "The GPU idles for step_seconds minus the sum of the kernels' times. A graph of n kernels has n - 1 gaps.",
    ),
)
