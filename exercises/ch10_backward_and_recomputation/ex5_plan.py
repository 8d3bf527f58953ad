"""Exercise 10.5: which layers keep their inner tensors under a memory limit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.model import Model


def weigh(functions, layers, limit):
    """Whether the plan stays within the limit, and the microseconds that it computes again; None for no plan."""
    given = list(layers)
    kept = functions["plan"](given, limit)
    if given != layers:
        return "the list of layers was changed"
    if kept is None:
        return None
    if not isinstance(kept, (list, tuple)) or len(kept) != len(layers):
        return f"a list with one choice for each layer is asked for; this is {kept!r}"[:200]
    inputs = before = most = 0
    for (input_bytes, inner_bytes, _), keeps in zip(layers, kept):
        inputs += input_bytes
        most = max(most, inputs + before + inner_bytes)
        before += inner_bytes if keeps else 0
    again = sum(time for (_, _, time), keeps in zip(layers, kept) if not keeps)
    return {"stays_within_the_limit": most <= limit, "microseconds_computed_again": again}


def best_plan(layers, limit):
    """(True, the least microseconds), or None."""
    return weigh({"plan": by_layers}, layers, limit)


def by_layers(layers, limit):
    """The fastest choices, or None: layer by layer those of each number of bytes that are kept."""
    states, inputs = {0: (0, ())}, 0  # bytes kept -> (microseconds, choices)
    for input_bytes, inner, time in layers:
        inputs += input_bytes
        reached = {}
        for before, (again, choices) in states.items():
            for keeps in (True, False):
                if inputs + before + at_work(inner, keeps) <= limit:
                    made = (again + time * (not keeps), (*choices, keeps))
                    there = before + inner * keeps
                    reached[there] = min(reached.get(there, made), made, key=lambda state: state[0])
        states = unbeaten(reached)
    return list(min(states.values())[1]) if states else None


def at_work(inner, keeps):
    """Bytes of a layer's inner tensors while it works."""
    return inner


def unbeaten(states):
    """Those that are faster than all that keep fewer bytes."""
    found, fastest = {}, None
    for kept in sorted(states):
        if fastest is None or states[kept][0] < fastest:
            found[kept], fastest = states[kept], states[kept][0]
    return found


def by_search(layers, limit):
    """The same, by trying all of them: what the tests compare with."""
    lists = itertools.product((True, False), repeat=len(layers))
    tried = [weigh({"plan": lambda *_, kept=kept: kept}, layers, limit) for kept in lists]
    found = [told["microseconds_computed_again"] for told in tried if told["stays_within_the_limit"]]
    return _right(min(found)) if found else None


def _right(microseconds):
    return {"stays_within_the_limit": True, "microseconds_computed_again": microseconds}


def network(draw, count, kind):
    """Layers of a kind: a transformer's attention and feed-forward blocks in turn, or of any size."""
    layers = []
    for number in range(count):
        if kind == "alike":
            layers.append((100, 1000, 50))
        elif kind == "attention and feed-forward":
            layers.append((64, 2400, 40) if number % 2 == 0 else (64, 1100, 90))
        else:
            layers.append((draw.integer(0, 60), draw.integer(0, 900), draw.integer(0, 100)))
    return layers


def limit_of(draw, layers, share):
    """A limit between what the thriftiest plan needs and what keeping all needs."""
    least, inputs = 0, 0
    for input_bytes, inner_bytes, _ in layers:
        inputs += input_bytes
        least = max(least, inputs + inner_bytes)
    everything = sum(input_bytes + inner_bytes for input_bytes, inner_bytes, _ in layers)
    return max(0, int(least + share * (everything - least)) - (share < 0))


def plan_cases(draw):
    def case(name, layers, limit):
        return Case(name, (layers, limit), driver=weigh)

    mixed = network(draw, 12, "attention and feed-forward")
    drawn = network(draw, 10, "any")
    large = network(draw, 40, "any")
    return [
        case("three equal layers, room for two", [(10, 100, 5), (10, 100, 5), (10, 100, 5)], 230),
        case("room for all, to the last byte", [(10, 100, 5), (10, 50, 3)], 170),
        case("the same, less one byte", [(10, 100, 5), (10, 50, 3)], 169),
        case("the last layer never computes anything again", [(0, 100, 1), (0, 100, 9)], 100),
        case("not even one layer fits", [(10, 100, 5), (10, 400, 5)], 419),
        case("the cheapest for its bytes is the wrong one", [(0, 60, 60), (0, 50, 45), (0, 50, 45), (0, 1, 1)], 101),
        case("five layers: whatever is kept in a fixed order of preference loses",
             [(0, 100, 90), (10, 60, 80), (10, 40, 90), (0, 10, 40), (10, 80, 40)], 210),
        case("five layers, of which the largest saves the most",
             [(0, 30, 60), (0, 100, 70), (0, 30, 20), (10, 80, 50), (10, 60, 50)], 210),
        case("five layers, of which the smallest saves the most for its bytes",
             [(0, 10, 70), (0, 70, 90), (10, 20, 40), (0, 50, 70), (10, 60, 80)], 150),
        case("one large layer in the middle", [(0, 40, 8), (0, 100, 3), (0, 40, 7), (0, 10, 1)], 140),
        case("one large layer saves more than five small ones", [(0, 100, 50), *[(0, 10, 1)] * 5, (0, 30, 1)], 135),
        case("12 layers, attention and feed-forward in turn", mixed, limit_of(draw, mixed, 0.5)),
        case("10 drawn layers", drawn, limit_of(draw, drawn, 0.4)),
        case("no layers", [], 10),
        case("2⁵³ bytes, and one more", [(0, 2**53, 5), (0, 1, 3), (0, 0, 1)], 2**53),
        case("40 drawn layers: too many to try all", large, limit_of(draw, large, 0.35)),
    ]  # fmt: skip


CONTRACT = Contract(
    lambda draw, *, count, kind, share: (made := network(draw, count, kind), limit_of(draw, made, share)),
    choices={
        "count": (1, 2, 5, 11, 40),
        "kind": (
            Level("alike", "layers that are all alike"),
            Level("attention and feed-forward", "attention and feed-forward"),
            Level("any", "drawn layers"),
        ),
        "share": (
            Level(-0.01, "just too little room"),
            Level(0.0, "room for the thriftiest plan"),
            Level(0.3, "a little room"),
            Level(0.7, "much room"),
            Level(1.0, "room for all"),
        ),
    },
    says={"count": "at most 40", "share": "None if no list stays within the limit"},
    driver=weigh,
    most=14,
)


LONGEST = 11  # layers of which all lists are tried


def told(layers, limit):
    """What the driver says of the best plan."""
    kept = planned(list(layers), limit)
    return weigh({"plan": lambda *_: kept}, layers, limit)


def planned(layers, limit):
    """The choices of the fastest plan, or None."""
    allowed = partial(fits, layers, limit)
    found = fastest(layers, allowed) if len(layers) <= LONGEST else by_layers(layers, limit)
    return found


def fastest(layers, allowed):
    """By trying all lists."""
    plans = filter(allowed, itertools.product((True, False), repeat=len(layers)))
    return min(plans, key=partial(price, layers), default=None)


def fits(layers, limit, kept):
    """Whether such a plan stays within the limit."""
    return peak(layers, kept) <= limit


def peak(layers, kept):
    """The most bytes at once."""
    inputs = before = most = 0
    for (input_bytes, inner, _), keeps in zip(layers, kept):
        inputs += input_bytes
        most = max(most, inputs + before + at_work(inner, keeps))
        before += inner if keeps else 0
    return most


def price(layers, kept):
    """By what plans are compared: microseconds, then bytes."""
    again = sum(time for (_, _, time), keeps in zip(layers, kept) if not keeps)
    held = sum(inner for (_, inner, _), keeps in zip(layers, kept) if keeps)
    return again, held


def greedy(layers, allowed, preference):
    """What is kept one after the other, as long as it fits."""
    kept = [False] * len(layers)
    for index in sorted(range(len(layers)), key=preference):
        kept[index] = True
        kept[index] = allowed(kept)
    return kept if allowed(kept) else None


def first_of(plans, allowed):
    return next(filter(allowed, plans), None)


def best_of_each_count(layers, limit):
    """Layer by layer, with the fastest partial plan alone of each number of layers that are kept."""
    states, inputs = {0: (0, 0, ())}, 0  # kept layers -> (microseconds, bytes kept, choices)
    for input_bytes, inner, time in layers:
        inputs += input_bytes
        reached = {}
        for count, (again, kept, choices) in states.items():
            if inputs + kept + inner > limit:
                continue
            for number, state in (
                (count + 1, (again, kept + inner, (*choices, True))),
                (count, (again + time, kept, (*choices, False))),
            ):
                reached[number] = min(state, reached.get(number, state), key=lambda state: state[:2])
        states = reached
    return min(states.values())[2] if states else None


def with_all_inputs(layers):
    """The same layers, where the first one has the inputs of all."""
    inputs = [sum(layer[0] for layer in layers), *[0] * len(layers)]
    return [(size, *rest) for size, (_, *rest) in zip(inputs, layers)]


FOUND = "fastest(layers, allowed) if len(layers) <= LONGEST else by_layers(layers, limit)"
ALL_KEPT, NONE_KEPT = "[True] * len(layers)", "[False] * len(layers)"
CHANGES = (
    *edits(
        "The plan keeps as many layers as possible. What counts is the time that the others take to compute again.",
        most_layers_kept=("return again, held", "return -sum(kept), held"),
    ),
    *edits(
        "Layers are kept one after the other in a fixed order of preference, as long as they fit. That is not always "
        "the best: one layer may take the room of two that would save more together. Compare combinations.",
        greedy=(FOUND, "greedy(layers, allowed, lambda i: -layers[i][2] / max(layers[i][1], 1e-9))"),
        greedy__by_time=(FOUND, "greedy(layers, allowed, lambda i: -layers[i][2])"),
        greedy__in_order=(FOUND, "greedy(layers, allowed, lambda i: i)"),
        greedy__from_the_last=(FOUND, "greedy(layers, allowed, lambda i: -i)"),
    ),
    *edits(
        "Either all layers are kept or none. Some of them often fit: choose for each layer.",
        all_or_nothing=(FOUND, f"first_of([{ALL_KEPT}, {NONE_KEPT}], allowed)"),
    ),
    *edits(
        "No layer is kept although there is room. What is kept need not be computed again.",
        nothing_kept=(FOUND, f"first_of([{NONE_KEPT}], allowed)"),
    ),
    *edits(
        "The layer at work is forgotten. Its inner tensors are there while it works, whether it keeps them or computes "
        "them again.",
        working_memory_forgotten=("return inner", "return inner if keeps else 0"),
        working_memory_forgotten__until_the_next_layer=("return inner", "return 0"),
    ),
    *edits(
        "The largest layer that computes again is counted beside everything that is kept. While layer i works, only "
        "layers before it hold what they keep: the backward pass has freed the later ones.",
        largest_beside_all_that_is_kept=(
            "return most",
            "most = max((layer[1] for layer, keeps in zip(layers, kept) if not keeps), default=0)\n"
            "return inputs + before + most",
        ),
    ),
    *edits(
        "The inner tensors of all layers are counted at once. Layers that compute them again hold them one at a time.",
        all_recomputed_at_once=("return most", "return inputs + sum(layer[1] for layer in layers)"),
    ),
    *edits(
        "The largest layer is counted beside everything that is kept. While layer i works, only layers before it hold "
        "what they keep, and its own inner tensors are there once: the backward pass has freed the later ones.",
        largest_of_all_beside_what_is_kept=(
            "return most",
            "return inputs + before + max((layer[1] for layer in layers), default=0)",
        ),
    ),
    *edits(
        "A layer's own inner tensors count twice where it keeps them. While it works they are there once.",
        own_inner_twice=("return inner", "return 2 * inner if keeps else inner"),
    ),
    *edits(
        "The inputs of all layers are counted from the beginning. While layer i works, those of layers 0 to i are "
        "there.",
        all_inputs_from_the_beginning=("list(layers)", "with_all_inputs(layers)"),
    ),
    *edits(
        "The choices are the wrong way round: True stands for a layer that keeps.",
        choices_turned_round=("return found", "return [not keeps for keeps in found] if found else found"),
    ),
    *edits(
        "Of all partial plans that keep equally many layers only one goes on. Another that is slower, but keeps fewer "
        "bytes, may end better: drop a plan only if another one keeps no more bytes and takes no more time.",
        partial_plans_dropped=(FOUND, "best_of_each_count(layers, limit)"),
    ),
    *edits(
        "The layers' inputs are forgotten. They are kept in any case, of layers 0 to i.",
        inputs_forgotten=("inputs += input_bytes", "inputs += 0"),
    ),
    *edits(
        "The input of the layer at work is forgotten. While layer i works, the inputs of layers 0 to i are there, and "
        "its own is one of them.",
        own_input_forgotten=("inputs + before + at_work", "inputs - input_bytes + before + at_work"),
    ),
    *edits(
        "A plan that fills the limit to the last byte was refused. It fits: compare with <=.",
        fits_strictly=("<= limit", "< limit"),
    ),
    *edits(
        "Without layers there is one list, the empty one, and it stays within the limit: return []. An empty list "
        "counts as false, so ask `is None`.",
        none_without_layers=("planned(list(layers), limit)", "planned(list(layers), limit) if layers else None"),
    ),
    *edits(
        "There is a plan although none stays within the limit. Return None there.",
        never_none=(f"found = {FOUND}", f"found = {FOUND}\nfound = {NONE_KEPT} if found is None else found"),
    ),
    *edits(
        "The plan keeps as many bytes as possible. What counts is the time that the others take to compute again.",
        most_bytes_kept=("return again, held", "return -held, 0"),
    ),
    *edits(  # how right answers compute, and which of several equals they take
        "", layer_by_layer=("len(layers) <= LONGEST", "False"), last_layers_first=("(True, False)", "(False, True)")
    ),
)
AT_ANY_LENGTH = {"greedy", "all_or_nothing", "nothing_kept", "partial_plans_dropped", "layer_by_layer"}


def where_tried(model: Model) -> Model:
    """The same model, silent where there are too many lists to try and a slip decides between them."""

    def compute(names: frozenset[str], layers, limit):
        made = {name.partition("__")[0] for name in names}
        decides = made - {"all_inputs_from_the_beginning", "last_layers_first"}
        too_many = len(layers) > LONGEST and decides and not made & AT_ANY_LENGTH
        return NotImplemented if too_many else model.compute(names, layers, limit)

    return replace(model, compute=compute)


MODEL = where_tried(
    model_of(
        told,
        CHANGES,
        (planned, fastest, fits, peak, price, by_layers, at_work),
        (greedy, first_of, best_of_each_count, with_all_inputs),
        styles=((), ("last_layers_first",)),
        none_is_a_result=True,
        may_be_silent=True,
        first_of_equals=True,
    )
)

LAYER_BY_LAYER = replace(
    MODEL.with_only(
        *("working_memory_forgotten", "working_memory_forgotten__until_the_next_layer", "own_inner_twice"),
        *("all_inputs_from_the_beginning", "choices_turned_round", "inputs_forgotten", "own_input_forgotten"),
        *("fits_strictly", "none_without_layers", "never_none"),
    ),
    styles=(("layer_by_layer",), ("layer_by_layer", "last_layers_first")),
)

EXERCISE = Exercise(
    id="10.5",
    title="What to keep and what to compute again",
    entries=("plan",),
    cases=plan_cases,
    oracle=best_plan,
    contracts=(CONTRACT,),
    models=(MODEL, LAYER_BY_LAYER),
    hints=(
        "First write a function that gives the most bytes of a given list of choices: walk over the layers, add up the "
        "inputs, and remember what the layers before have kept. Then try all lists for three layers.",
        "40 layers have 2^40 lists. But what comes later only depends on how many bytes are kept so far. Of all ways "
        "to keep the same number of bytes, you need the fastest one alone.",
        "Walk over the layers with a dictionary from bytes kept so far to (microseconds, choices). For each entry "
        "check whether the layer can work beside it: inputs + kept + inner_bytes <= limit. Then it makes two new "
        "entries.",
        "An entry that keeps more bytes and takes no less time than another is never needed. Go through the entries by "
        "rising bytes, and keep those that are faster than all before. At the end take the fastest, or None.",
    ),
    mistakes=(
        Mistake(
            "layers_changed",
            "The function takes from the caller's list of layers, or adds to it. Work on a copy: list(layers).",
            when=lambda case, seen, got: got == "the list of layers was changed",
        ),
        Mistake(
            "summed_in_float",
            "Bytes are added as floats, which round sums above 2²⁴ in float32 and above 2⁵³ in Python's: a plan that "
            "is a byte too large then seems to fit. Add whole numbers.",
            when=lambda case, seen, got: (
                case.args[1] >= 2**24 and isinstance(got, dict) and not got["stays_within_the_limit"]
            ),
            every=True,
        ),
    ),
)
