"""Wrong answers to exercise 14.1, and unusual right ones."""

from tests.submissions.edits import changed

HOST = "host += launch"
END = "end = max(host, end) + kernel"
WAIT = "if number in waits:\n            host = end"
GRAPH = "return launch + sum(kernels) + gap * (len(kernels) - 1)"
IDLE = "return step_seconds(launches, kernels, waits) - sum(kernels)"

WRONG = {
    "launches_wait": changed("14.1", (HOST, "host = max(host, end) + launch")),
    "launches_side_by_side": changed("14.1", (HOST, "host = launch")),
    "kernels_side_by_side": changed("14.1", (END, "end = host + kernel")),
    "launch_forgotten": changed("14.1", (END, "end = (end if number else host) + kernel")),
    "larger_sum": changed("14.1", ("    return end\n", "    return max(sum(launches), sum(kernels))\n")),
    "waits_ignored": changed("14.1", (WAIT, "pass")),
    "waits_taken_in_order": changed(
        "14.1",
        ("host = end = 0.0", "host = end = 0.0\n    done = 0"),
        (WAIT, "if done < len(waits) and waits[done] == number:\n            host, done = end, done + 1"),
    ),
    "waits_for_its_length": changed("14.1", (WAIT, WAIT.replace("host = end", "host += kernel"))),
    "first_launch_is_free": changed("14.1", ("host = end = 0.0", "host, end = -sum(launches[:1]), 0.0")),
    "launches_subtracted": changed("14.1", (IDLE, IDLE.replace("sum(kernels)", "sum(launches)"))),
    "first_launch_not_idle": changed("14.1", (IDLE, f"{IDLE} - sum(launches[:1])")),
    "gap_too_many": changed("14.1", ("(len(kernels) - 1)", "len(kernels)")),
    "gaps_forgotten": changed("14.1", (" + gap * (len(kernels) - 1)", "")),
    "launch_for_each": changed("14.1", ("return launch + sum", "return launch * len(kernels) + sum")),
    "graph_launch_forgotten": changed("14.1", ("return launch + sum", "return sum")),
}

IN_TWO_LISTS = """launched, total = [], 0.0
    ended = []
    for launch, kernel, number in zip(launches, kernels, range(len(kernels))):
        before = max(ended[number - 1], launched[number - 1]) if number and number - 1 in waits else (
            launched[number - 1] if number else 0.0)
        launched.append(before + launch)
        ended.append(max([launched[number], *ended[-1:]]) + kernel)
    return ended[-1] if ended else 0.0"""
LOOP = """host = end = 0.0
    for number, (launch, kernel) in enumerate(zip(launches, kernels)):
        host += launch
        end = max(host, end) + kernel
        if number in waits:
            host = end
    return end"""

UNUSUAL = {
    "two lists of times": changed("14.1", (LOOP, IN_TWO_LISTS)),
    "idle time added up": changed(
        "14.1",
        (
            IDLE,
            "host = end = idle = 0.0\n    for number, (launch, kernel) in enumerate(zip(launches, kernels)):\n"
            "        host += launch\n        idle += max(0.0, host - end)\n        end = max(host, end) + kernel\n"
            "        host = end if number in waits else host\n    return idle",
        ),
    ),
    "a graph as a step with launches of 0": changed(
        "14.1",
        (
            GRAPH,
            "none = (0.0,) * (len(kernels) - 1)\n"
            "    return step_seconds((launch, *none), kernels, ()) + gap * len(none)",
        ),
    ),
}
