"""Wrong answers to exercise 10.5, and unusual right ones."""

from tests.submissions.edits import changed

START = """# Exercise 10.5 · What to keep and what to compute again
def peak(layers, kept):
    inputs = before = most = 0
    for (input_bytes, inner_bytes, _), keeps in zip(layers, kept):
        inputs += input_bytes
        most = max(most, inputs + before + inner_bytes)
        before += inner_bytes * keeps
    return most

"""

GREEDY = (
    START
    + """def plan(layers, limit):
    kept = [False] * len(layers)
    if peak(layers, kept) > limit:
        return None
    for index in sorted(range(len(layers)), key=lambda i: -layers[i][2] / max(layers[i][1], 1e-9)):
        kept[index] = True
        if peak(layers, kept) > limit:
            kept[index] = False
    return kept
"""
)

TRIED = (
    START
    + """def plan(layers, limit):
    import itertools
    if len(layers) > 11:
        return course_plan(layers, limit)
    lists = [kept for kept in itertools.product((True, False), repeat=len(layers)) if FITS]
    return list(min(lists, key=lambda kept: PRICE)) if lists else NONE
"""
)


FITS = "peak(layers, kept) <= limit"
PRICE = "sum(layer[2] for layer, k in zip(layers, kept) if not k)"
TITLE = "# Exercise 10.5 · What to keep and what to compute again\n"


def tried(fits=FITS, price=PRICE, none="None"):
    """A search through all lists for short networks, and the course's answer for long ones."""
    course = changed("10.5", ("def plan(", "def course_plan("), (TITLE, ""))
    return TRIED.replace("FITS", fits).replace("PRICE", price).replace("NONE", none) + "\n\n" + course


PER_COUNT = """# Exercise 10.5 · What to keep and what to compute again
def plan(layers, limit):
    states, inputs = {0: (0, 0, ())}, 0
    for size, inner, time in layers:
        inputs += size
        after = {}
        for count, (again, kept, choices) in states.items():
            if inputs + kept + inner <= limit:
                for keeps in (True, False):
                    state = (again + time * (not keeps), kept + inner * keeps, (*choices, keeps))
                    after[count + keeps] = min(after.get(count + keeps, state), state)
        states = after
    return list(min(states.values())[2]) if states else None
"""


WRONG = {
    "most_layers_kept": changed("10.5", ("(0, microseconds, False)", "(0, 1, False)")),
    "greedy": GREEDY,
    "greedy__by_time": GREEDY.replace("-layers[i][2] / max(layers[i][1], 1e-9)", "-layers[i][2]"),
    "most_layers_kept__smallest_first": GREEDY.replace("-layers[i][2] / max(layers[i][1], 1e-9)", "layers[i][1]"),
    "greedy__in_order": GREEDY.replace("-layers[i][2] / max(layers[i][1], 1e-9)", "i"),
    "all_or_nothing": START
    + """def plan(layers, limit):
    for choice in (True, False):
        if peak(layers, [choice] * len(layers)) <= limit:
            return [choice] * len(layers)
    return None
""",
    "nothing_kept": START
    + """def plan(layers, limit):
    nothing = [False] * len(layers)
    return nothing if peak(layers, nothing) <= limit else None
""",
    "fits_strictly": tried(fits="peak(layers, kept) < limit"),
    "working_memory_forgotten": tried(
        fits="sum(layer[0] + layer[1] * k for layer, k in zip(layers, kept)) <= limit"
    ),
    "largest_beside_all_that_is_kept": tried(
        fits="sum(layer[0] + layer[1] * k for layer, k in zip(layers, kept))"
        " + max((layer[1] for layer, k in zip(layers, kept) if not k), default=0) <= limit"
    ),
    "inputs_forgotten": START.replace("inputs += input_bytes", "inputs += 0") + tried().replace(START, ""),
    "never_none": tried(none="[False] * len(layers)"),
    "most_bytes_kept": tried(price="-sum(layer[1] for layer, k in zip(layers, kept) if k)"),
    "choices_turned_round": changed("10.5", ("list(best[1])", "[not keeps for keeps in best[1]]")),
    "own_inner_twice": tried(fits="peak(layers, kept) <= limit").replace(
        "before + inner_bytes)", "before + inner_bytes * (1 + keeps))"
    ),
    "largest_of_all_beside_what_is_kept": tried(
        fits="sum(layer[0] + layer[1] * k for layer, k in zip(layers, kept))"
        " + max((layer[1] for layer in layers), default=0) <= limit"
    ),
    "all_inputs_from_the_beginning": changed(
        "10.5",
        ("inputs = 0\n", "inputs = sum(layer[0] for layer in layers)\n"),
        ("        inputs += input_bytes\n", ""),
    ),
    "partial_plans_dropped": PER_COUNT,
    "layers_changed": changed(
        "10.5", ("    states = {0: (0, ())}", "    layers.append((0, 0, 0))\n    states = {0: (0, ())}")
    ),
}

BACKWARDS = """# Exercise 10.5 · What to keep and what to compute again
import functools

def plan(layers, limit):
    inputs = [sum(layer[0] for layer in layers[: i + 1]) for i in range(len(layers))]

    @functools.lru_cache(None)
    def best(i, kept):
        if i == len(layers):
            return 0, ()
        if inputs[i] + kept + layers[i][1] > limit:
            return math.inf, ()
        options = []
        for keeps in (False, True):
            time, rest = best(i + 1, kept + layers[i][1] * keeps)
            options.append((time + layers[i][2] * (not keeps), (keeps, *rest)))
        return min(options)

    if len(layers) > 24:
        return long_plan(layers, limit)
    time, choices = best(0, 0)
    return None if time == math.inf else list(choices)

def long_plan(layers, limit):
    states, inputs = {0: (0, [])}, 0
    for size, inner, time in layers:
        inputs += size
        after = {}
        for kept, (spent, choices) in states.items():
            if inputs + kept + inner <= limit:
                for keeps in (False, True):
                    key, value = kept + inner * keeps, (spent + time * (not keeps), [*choices, keeps])
                    after[key] = min(after.get(key, (math.inf, [])), value)
        states, least = {}, math.inf
        for key, value in sorted(after.items()):
            if value[0] < least:
                states[key], least = value, value[0]
    return min(states.values())[1] if states else None
"""

BY_TIME = """# Exercise 10.5 · What to keep and what to compute again
def plan(layers, limit):
    # The fewest bytes kept for each number of microseconds: the same table, turned round.
    fewest, inputs = {0: (0, [])}, 0
    for size, inner, time in layers:
        inputs += size
        after = {}
        for spent, (kept, choices) in fewest.items():
            if inputs + kept + inner > limit:
                continue
            for key, value in ((spent + time, (kept, [*choices, False])), (spent, (kept + inner, [*choices, True]))):
                if key not in after or value[0] < after[key][0]:
                    after[key] = value
        fewest = after
    return fewest[min(fewest)][1] if fewest else None
"""

UNUSUAL = {
    "memoised, from the last layer": BACKWARDS,
    "the fewest bytes for each time": BY_TIME,
    "all lists of short networks": tried(),
}


WRONG |= {
    "summed_in_float": changed(
        "10.5", ("states = {0: (0, ())}", "states = {0.0: (0, ())}"), ("inputs = 0", "inputs = 0.0")
    ),
}


WRONG |= {
    "none_without_layers": changed(
        "10.5", ("None if best is None else list(best[1])", "list(best[1]) if best and best[1] else None")
    ),
}


ROOM = "inputs + kept_bytes + inner_bytes > limit"
NO_INPUTS = ("        inputs += input_bytes\n", "")
STRICTLY = ("> limit", ">= limit")
TURNED_ROUND = ("list(best[1])", "[not keeps for keeps in best[1]]")
KNAPSACK = (
    TITLE
    + """def plan(layers, limit):
    best = {0: (0, ())}
    for _, inner, time in layers:
        after = {}
        for kept, (spent, choices) in best.items():
            for keeps in (True, False):
                key, value = kept + inner * keeps, (spent + time * (not keeps), (*choices, keeps))
                if key <= limit and (key not in after or value[0] < after[key][0]):
                    after[key] = value
        best, least = {}, math.inf
        for key, value in sorted(after.items()):
            if value[0] < least:
                best[key], least = value, value[0]
    return list(min(best.values())[1]) if best else None
"""
)
WRONG |= {
    # What a layer by layer plan counts, and two of it forgotten at once.
    "working_memory_forgotten__and_inputs": KNAPSACK,
    "working_memory_forgotten__and_inputs_of_whole_lists": tried(
        fits="sum(layer[1] * k for layer, k in zip(layers, kept)) <= limit"
    ),
    "working_memory_forgotten__until_the_next_layer": changed("10.5", (ROOM, "inputs + kept_bytes > limit")),
    "working_memory_forgotten__until_the_next_layer_and_inputs": changed(
        "10.5", NO_INPUTS, (ROOM, "kept_bytes > limit")
    ),
    "own_input_forgotten": changed(
        "10.5", NO_INPUTS, ("        states, fastest =", "        inputs += input_bytes\n        states, fastest =")
    ),
    "inputs_forgotten__and_fits_strictly": changed("10.5", NO_INPUTS, STRICTLY),
    "choices_turned_round__and_fits_strictly": changed("10.5", STRICTLY, TURNED_ROUND),
    "greedy__and_turned_round": GREEDY.replace("return kept\n", "return [not keeps for keeps in kept]\n"),
    "greedy__and_never_none": GREEDY.replace("        return None\n", "        return [False] * len(layers)\n"),
}
