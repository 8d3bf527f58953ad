"""Wrong answers to exercise 14.1, and unusual right ones."""

from tests.submissions.edits import changed

HOST = "host += launch"
END = "end = max(host, end) + kernel"
WAIT = "if number in waits:\n            host = end"
GRAPH = "return launch + sum(kernels) + gap * (len(kernels) - 1)"
IDLE = "return step_seconds(launches, kernels, waits) - sum(kernels)"

LOOP = """host = end = 0.0
    for number, (launch, kernel) in enumerate(zip(launches, kernels)):
        host += launch
        end = max(host, end) + kernel
        if number in waits:
            host = end
    return end"""
PAIRWISE = """if not kernels:
        return 0.0
    total = launches[0]
    for i in range(len(kernels) - 1):
        total += kernels[i] + launches[i + 1] if i in waits else max(kernels[i], launches[i + 1])
    return total + kernels[-1]"""

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
    # A model of the bandwidth kind: of two times that overlap the longer counts.
    "longer_of_each": changed(
        "14.1", (HOST, "pass"), (END, "end += launch + kernel if number in waits else max(launch, kernel)")
    ),
    "longer_of_each__and_no_waits": changed("14.1", (HOST, "pass"), (END, "end += max(launch, kernel)")),
    "one_launch_ahead": changed("14.1", (LOOP, PAIRWISE)),
    "one_launch_ahead__and_no_waits": changed(
        "14.1", (LOOP, PAIRWISE.replace("kernels[i] + launches[i + 1] if i in waits else ", ""))
    ),
    "begins_with_its_launch": changed("14.1", (f"        {HOST}\n        {END}", f"        {END}\n        {HOST}")),
    "larger_sum__with_its_ends": changed(
        "14.1",
        ("    return end\n", "    if not kernels:\n        return 0.0\n"
                             "    return max(sum(launches) + kernels[-1], launches[0] + sum(kernels))\n"),
    ),
    "waits_too_early": changed(
        "14.1",
        (f"        {WAIT}\n", ""),
        (HOST, f"if number in waits:\n            host = max(host, end)\n        {HOST}"),
    ),
    "only_one_wait": changed("14.1", ("number in waits", "number in waits[:1]")),
    "only_one_wait__and_the_first": changed("14.1", ("number in waits", "waits and number == min(waits)")),
    "waits_too_early__counted_from_1": changed("14.1", ("(zip(launches, kernels))", "(zip(launches, kernels), 1)")),
    "waits_too_early__behind_the_launch": changed(
        "14.1",
        (f"        {WAIT}\n", ""),
        (END, f"if number in waits:\n            host = max(host, end)\n        {END}"),
    ),
    "waits_too_early__and_back_in_time": changed("14.1", (f"        {WAIT}\n", ""), (END, f"{WAIT}\n        {END}")),
    "wait_adds_a_launch": changed("14.1", (WAIT, f"{WAIT} + launch")),
    "wait_adds_the_end": changed("14.1", (WAIT, WAIT.replace("host = end", "host += end"))),
    # The step is right in these.
    "idle_from_sums": changed("14.1", (IDLE, "return max(0.0, sum(launches) - sum(kernels))")),
    "idle_from_sums__by_the_larger": changed(
        "14.1", (IDLE, "return max(sum(launches), sum(kernels)) - sum(kernels)")
    ),
    "idle_of_each": changed(
        "14.1", (IDLE, "return sum(max(0.0, launch - kernel) for launch, kernel in zip(launches, kernels))")
    ),
    "larger_sum__and_idle_of_each": changed(
        "14.1",
        ("    return end\n", "    return max(sum(launches), sum(kernels))\n"),
        (IDLE, "return sum(max(0.0, launch - kernel) for launch, kernel in zip(launches, kernels))"),
    ),
    "gap_or_kernel": changed("14.1", (GRAPH, "return launch + kernels[0] + sum(max(k, gap) for k in kernels[1:])")),
    "gap_too_many": changed("14.1", ("(len(kernels) - 1)", "len(kernels)")),
    "gaps_forgotten": changed("14.1", (" + gap * (len(kernels) - 1)", "")),
    "launch_for_each": changed("14.1", ("return launch + sum", "return launch * len(kernels) + sum")),
    "graph_launch_forgotten": changed("14.1", ("return launch + sum", "return sum")),
    "launches_wait__all_launches_first": changed("14.1", ("host = end = 0.0", "return sum(launches) + sum(kernels)")),
    "end_of_the_host": changed("14.1", ("    return end\n", "    return host\n")),
    "one_gap": changed("14.1", (" * (len(kernels) - 1)", "")),
    "launch_beside_the_kernels": changed("14.1", ("launch + sum(kernels)", "max(launch, sum(kernels))")),
}

IN_TWO_LISTS = """launched, total = [], 0.0
    ended = []
    for launch, kernel, number in zip(launches, kernels, range(len(kernels))):
        before = max(ended[number - 1], launched[number - 1]) if number and number - 1 in waits else (
            launched[number - 1] if number else 0.0)
        launched.append(before + launch)
        ended.append(max([launched[number], *ended[-1:]]) + kernel)
    return ended[-1] if ended else 0.0"""

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
