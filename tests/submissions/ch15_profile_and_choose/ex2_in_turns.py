"""Wrong answers to exercise 15.2, and unusual right ones."""

from tests.submissions.edits import changed

NEEDED = "math.ceil(cache_bytes / input_bytes) + 1"
LOOPS = "for number, order in enumerate(orders):\n        for kernel in order:"
PLACE, KEPT = "len(steps) % copies", "number >= warm"



def waiting(early, late, new_round):
    """An answer that keeps a time of `early` until it meets one of `late`."""
    return changed("15.2", ("found = {", "waiting, each = None, len({step[0] for step in steps})\n    found = {"),
                   ("for (kernel, _, counted), time in zip(steps, times):",
                    f"for place, ((kernel, _, counted), time) in enumerate(zip(steps, times)):\n        {new_round}"),
                   ("found.setdefault(kernel, []).append(time)",
                    f"if kernel == {early}:\n                waiting = time\n"
                    f"            elif kernel == {late} and waiting:\n                found[{early}].append(waiting)\n"
                    f"                found[{late}].append(time)\n                waiting = None"))  # fmt: skip


FORGET = "waiting = None if place % each == 0 else waiting"
WRONG = {
    "one_missing": changed("15.2", (NEEDED, "math.ceil(cache_bytes / input_bytes)")),
    "rounded_down": changed("15.2", (NEEDED, "cache_bytes // input_bytes + 1")),
    "one_for_large": changed("15.2", (NEEDED, f"1 if input_bytes >= cache_bytes else {NEEDED}")),
    "one_order": changed("15.2", ("for kernel in order:", "for kernel in sorted(order):")),
    "place_for_number": changed("15.2", ("for kernel in order:", "for kernel in range(len(order)):")),
    "one_after_another": changed("15.2", (
        LOOPS, "for kernel in sorted(orders[0]):\n        for number, order in enumerate(orders):")),
    "copy_of_the_round": changed("15.2", (PLACE, "number % copies")),
    "copy_of_the_kernel": changed("15.2", (PLACE, "kernel % copies")),
    "begins_again": changed("15.2", ("for kernel in order:", "for place, kernel in enumerate(order):"),
                            (PLACE, "place % copies")),
    "one_copy": changed("15.2", (PLACE, "0")),
    "warm_counted": changed("15.2", (KEPT, "number < warm")),
    "one_round_more": changed("15.2", (KEPT, "number > warm")),
    "all_counted": changed("15.2", (KEPT, "True")),
    "calls_skipped": changed("15.2", (KEPT, "len(steps) >= warm")),
    "warm_among": changed("15.2", ("if counted:", "if True:")),
    "warm_alone": changed("15.2", ("if counted:", "if not counted:")),
    "exchanged": changed("15.2", ("return found[first], found[second]", "return found[second], found[first]")),
    "times_sorted": changed("15.2", (
        "return found[first], found[second]", "return sorted(found[first]), sorted(found[second])")),
    "by_place": changed("15.2", (
        "return found[first], found[second]",
        "kept = [time for (_, _, counted), time in zip(steps, times) if counted]\n    return kept[::2], kept[1::2]")),
    "all_others": changed("15.2", ("found[first], found[second]",
                                   "found[first], [time for (kernel, _, counted), time in zip(steps, times)\n"
                                   "                          if counted and kernel != first]")),
    "begins_again_behind_warm": changed(
        "15.2", ("steps = []", "steps, begin = [], 0"),
        ("        for kernel in", "        if number == warm:\n            begin = len(steps)\n        for kernel in"),
        (PLACE, "(len(steps) - begin) % copies")),
    "copies_from_one": changed("15.2", (PLACE, "len(steps) % copies + 1")),
    "warm_not_run": changed("15.2", ("enumerate(orders)", "enumerate(orders[warm:])"), (KEPT, "True")),
    "one_round_at_least": changed("15.2", (KEPT, "number >= max(warm, 1)")),
    "plus_two": changed("15.2", (NEEDED, "cache_bytes // input_bytes + 2")),
    "by_size": changed("15.2", ("return found[first], found[second]",
                                "return found[min(first, second)], found[max(first, second)]")),
    "pairs_in_a_list": changed("15.2", ("return found[first], found[second]",
                                        "return list(zip(found[first], found[second]))")),
    "by_equal_step": changed("15.2", ("for (kernel, _, counted), time in zip(steps, times):\n",
                                      "for step in steps:\n        kernel, _, counted = step\n"
                                      "        time = times[steps.index(step)]\n")),
    "by_place__of_its_number": changed("15.2", (
        "return found[first], found[second]",
        "kept = [time for (_, _, counted), time in zip(steps, times) if counted]\n"
        "    count = len({step[0] for step in steps})\n    return kept[first::count], kept[second::count]")),
    "number_as_index": changed("15.2", (
        "found = {first: [], second: []}", "found = [[] for _ in {step[0] for step in steps}]"),
        ("found.setdefault(kernel, []).append", "found[kernel].append")),
    "some_rounds": waiting("first", "second", FORGET),
    "some_rounds__second_first": waiting("second", "first", FORGET),
    "next_round": waiting("first", "second", "pass"),
    "next_round__second_first": waiting("second", "first", "pass"),
    "short_left_out": changed("15.2", ("if counted:", "if counted and round(time):")),
}

UNUSUAL = {
    "by itertools": """# Exercise 15.2 · A timer in turns
def copies_needed(input_bytes, cache_bytes):
    return (cache_bytes + input_bytes - 1) // input_bytes + 1

def schedule(orders, copies, warm):
    import itertools
    turns = itertools.cycle(range(copies))
    return [(kernel, next(turns), not number < warm) for number, order in enumerate(orders) for kernel in order]

def pairs_of(steps, times, first, second):
    kept = [(step[0], time) for step, time in zip(steps, times) if step[2]]
    return tuple([time for kernel, time in kept if kernel == wanted] for wanted in (first, second))
""",
    "copies by a loop": changed("15.2", (
        f"return {NEEDED}",
        "count = 1\n    while (count - 1) * input_bytes < cache_bytes:\n        count += 1\n    return count")),
    "lists for tuples": changed("15.2", (
        f"steps.append((kernel, {PLACE}, {KEPT}))", f"steps.append([kernel, {PLACE}, {KEPT}])")),
}
