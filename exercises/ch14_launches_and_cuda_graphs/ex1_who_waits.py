"""Exercise 14.1: a step's time from its launches and kernels, how long the GPU idles, and the same step as a graph."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level


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
    *edits("Each launch was made to wait for the kernel before it. But the host goes on while the GPU works. Only the "
        "kernel has to wait for the kernel before it.",
        launches_wait=(HOST, "host = max(host, end) + launch")),
    *edits("The launches were not added up. The host launches one kernel after another, so launch i ends after all "
        "launches up to it.", launches_side_by_side=(HOST, "host = launch")),
    *edits("A kernel began while the one before it was still running. Kernels of one step run one after another.",
        kernels_side_by_side=(BEGIN, "begin = host")),
    *edits("A kernel began before its launch had ended. It begins at the later of two times: the end of its launch, "
        "and the end of the kernel before it.", launch_forgotten=(BEGIN, "begin = end if number else host")),
    *edits("The result is the larger of two sums, all launches or all kernels. The step takes longer, because the GPU "
        "cannot start a kernel that the host has not launched yet. Go through the kernels in order.",
        larger_sum=("return end", "return max(sum(launches), sum(kernels))")),
    *edits("`waits` had no effect. After such a kernel, the host begins its next launch only when the kernel has "
        "ended.",
        waits_ignored=("if number in waits", "if False")),
    *edits("The entries of `waits` were taken in order. A later one may be smaller than the one before it.",
        waits_taken_in_order=("if number in waits", "if number == next((n for n in waits if n >= number), None)")),
    *edits("The host was made to wait as long as the kernel runs. It waits until the kernel has ended. That can be "
        "longer, because the kernel may have to wait before it begins.",
        waits_for_its_length=("host = end", "host = host + kernel")),
    *edits("The first launch was not counted. No kernel can begin until it has ended.",
        first_launch_is_free=("host, end = 0.0, 0.0", "host, end = -sum(launches[:1]), 0.0")),
)  # fmt: skip
IDLE = (
    *STEP[:-1],  # a free first launch makes the same number as one that is not counted as idle
    *edits("The launches' time was subtracted from the step's. The GPU idles when no kernel runs, so subtract the "
        "kernels' time.", launches_subtracted=("sum(kernels)", "sum(launches)")),
    *edits("The first launch was not counted as idle. The step begins with it, and no kernel runs yet.",
        first_launch_not_idle=("sum(kernels)", "(sum(kernels) + sum(launches[:1]))")),
)  # fmt: skip
GRAPH = (
    *edits("A gap was counted for every kernel. Gaps are between kernels, so there is one gap less than kernels.",
        gap_too_many=("(len(kernels) - 1)", "len(kernels)")),
    *edits("The gaps are missing: add `gap` between each kernel and the next.",
        gaps_forgotten=(" + gap * (len(kernels) - 1)", "")),
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
