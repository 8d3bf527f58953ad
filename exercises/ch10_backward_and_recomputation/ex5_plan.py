"""Exercise 10.5: which layers keep their inner tensors under a memory limit."""

from __future__ import annotations

import itertools
from dataclasses import replace

from course_lib.checker import Case, Exercise, Mistake
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.model import Model, Slip


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
    """(True, the least microseconds), or None: every set of kept bytes that no other one beats, layer by layer."""
    states, inputs = [(0, 0)], 0  # (bytes kept, microseconds)
    for input_bytes, inner_bytes, time in layers:
        inputs += input_bytes
        possible = [state for state in states if inputs + state[0] + inner_bytes <= limit]
        reached = sorted(
            itertools.chain.from_iterable(((kept + inner_bytes, t), (kept, t + time)) for kept, t in possible)
        )
        states, fastest = [], None
        for kept, t in reached:
            if fastest is None or t < fastest:
                states.append((kept, t))
                fastest = t
    return _right(min(time for _, time in states)) if states else None


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


def compute(s, layers, limit):
    """What the driver says of a plan that is made in some way."""
    kept = _planned(s, layers, limit)
    return weigh({"plan": lambda *_: kept}, layers, limit)


def _peak(s, layers, kept):
    """The most bytes, as somebody with these slips counts them."""
    inputs = before = most = 0
    everything = sum(inner for (_, inner, _), keeps in zip(layers, kept) if keeps)
    largest = max((inner for (_, inner, _), keeps in zip(layers, kept) if not keeps), default=0)
    all_inputs = 0 if s("inputs_forgotten") else sum(input_bytes for input_bytes, _, _ in layers)
    if s("working_memory_forgotten"):
        return all_inputs + everything
    if s("largest_beside_all_that_is_kept"):
        return all_inputs + everything + largest
    if s("largest_of_all_beside_what_is_kept"):
        return all_inputs + everything + max((inner for _, inner, _ in layers), default=0)
    if s("all_recomputed_at_once"):
        return all_inputs + sum(inner for _, inner, _ in layers)
    for (input_bytes, inner, _), keeps in zip(layers, kept):
        inputs += 0 if s("inputs_forgotten") else input_bytes
        there = inputs - (input_bytes if s("own_input_forgotten") else 0)
        most = max(most, there + before + _at_work(s, inner, keeps))
        before += inner if keeps else 0
    return most


def _at_work(s, inner, keeps):
    """Bytes that are counted for the inner tensors of the layer at work, in a walk over the layers."""
    if s("working_memory_forgotten__until_the_next_layer"):
        return 0
    if s("working_memory_forgotten"):
        return inner if keeps else 0
    return 2 * inner if s("own_inner_twice") and keeps else inner


def _planned(s, layers, limit):
    if s("none_without_layers") and not layers:
        return None
    layers = _as_taken(s, layers)
    found = _chosen(s, layers, limit)
    if found is None and s("never_none"):
        return [False] * len(layers)
    return [not keeps for keeps in found] if found and s("choices_turned_round") else found


def _chosen(s, layers, limit):
    count = len(layers)
    fits = (lambda kept: _peak(s, layers, kept) < limit) if s("fits_strictly") else (
        lambda kept: _peak(s, layers, kept) <= limit
    )  # fmt: skip
    if s("greedy", "greedy__by_time", "greedy__in_order", "greedy__from_the_last"):
        order = {
            "greedy": lambda i: -layers[i][2] / max(layers[i][1], 1e-9),
            "greedy__by_time": lambda i: -layers[i][2],
            "greedy__in_order": lambda i: i,
            "greedy__from_the_last": lambda i: -i,
        }
        rule = next(name for name in order if s(name))
        kept = [False] * count
        if not fits(kept):
            return None
        for index in sorted(range(count), key=order[rule]):
            kept[index] = True
            if not fits(kept):
                kept[index] = False
        return kept
    if s("all_or_nothing"):
        return next((kept for kept in ([True] * count, [False] * count) if fits(kept)), None)
    if s("nothing_kept"):
        return [False] * count if fits([False] * count) else None
    if s("partial_plans_dropped"):
        return _best_of_each_count(layers, limit)
    if s("most_layers_kept"):
        return _best_of(s, layers, limit, fits, price=lambda kept: (-sum(kept), _kept_bytes(layers, kept)))
    if s("most_bytes_kept"):
        return _best_of(s, layers, limit, fits, price=lambda kept: -_kept_bytes(layers, kept))
    return _best_of(s, layers, limit, fits)


def _time_again(layers, kept):
    return sum(time for (_, _, time), keeps in zip(layers, kept) if not keeps)


def _kept_bytes(layers, kept):
    return sum(inner for (_, inner, _), keeps in zip(layers, kept) if keeps)


def _best_of(s, layers, limit, fits, price=None):
    """By trying all; of longer networks nothing can be said. Styles: which of several equals is taken."""
    if price is None and s("layer_by_layer") and not s(*OF_WHOLE_LISTS):
        return _layer_by_layer(s, layers, limit)
    price = price or (lambda kept: (_time_again(layers, kept), _kept_bytes(layers, kept)))
    if len(layers) > 11:
        raise _TooLong
    order = (False, True) if s("last_layers_first") else (True, False)
    plans = [kept for kept in itertools.product(order, repeat=len(layers)) if fits(kept)]
    return min(plans, key=price, default=None)


def _layer_by_layer(s, layers, limit):
    """As the chapter does it: the fastest partial plan for each number of bytes that are kept."""
    states, inputs = {0: (0, ())}, 0  # bytes kept -> (microseconds, choices)
    for input_bytes, inner, time in layers:
        there = inputs
        inputs += 0 if s("inputs_forgotten") else input_bytes
        there = there if s("own_input_forgotten") else inputs
        reached = {}
        for kept, (again, choices) in states.items():
            for keeps in (False, True) if s("last_layers_first") else (True, False):
                room = limit - there - kept - _at_work(s, inner, keeps)
                if room > 0 or room == 0 and not s("fits_strictly"):
                    key, state = kept + inner * keeps, (again + time * (not keeps), (*choices, keeps))
                    reached[key] = min(reached.get(key, state), state, key=lambda state: state[0])
        states, fastest = {}, None
        for kept in sorted(reached):
            if fastest is None or reached[kept][0] < fastest:
                states[kept], fastest = reached[kept], reached[kept][0]
    return list(min(states.values())[1]) if states else None


def _best_of_each_count(layers, limit):
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


class _TooLong(Exception):
    """More layers than can be tried."""


def _as_taken(s, layers):
    """The layers with their inputs where somebody with these slips takes them to be."""
    if not s("all_inputs_from_the_beginning") or not layers:
        return layers
    inputs = [sum(layer[0] for layer in layers), *[0] * (len(layers) - 1)]
    return [(size, *rest) for size, (_, *rest) in zip(inputs, layers)]


def model(s, layers, limit):
    try:
        return compute(s, layers, limit)
    except _TooLong:
        if not any(s(slip.id) for slip in SLIPS if slip.id != "all_inputs_from_the_beginning"):
            return best_plan(_as_taken(s, layers), limit)
        return NotImplemented


OF_WHOLE_LISTS = ("largest_beside_all_that_is_kept", "largest_of_all_beside_what_is_kept", "all_recomputed_at_once")
GREEDY = (
    "Layers are kept one after the other in a fixed order of preference, as long as they fit. That is not always the "
    "best: one layer may take the room of two that would save more together. Compare combinations."
)
SLIPS = (
    Slip(
        "most_layers_kept",
        "The plan keeps as many layers as possible. What counts is the time that the others take to compute again.",
    ),
    *(Slip(f"greedy{way}", GREEDY) for way in ("", "__by_time", "__in_order", "__from_the_last")),
    Slip("all_or_nothing", "Either all layers are kept or none. Some of them often fit: choose for each layer."),
    Slip("nothing_kept", "No layer is kept although there is room. What is kept need not be computed again."),
    Slip(
        "working_memory_forgotten",
        "The layer at work is forgotten. Its inner tensors are there while it works, whether it keeps them or computes "
        "them again.",
    ),
    Slip(
        "working_memory_forgotten__until_the_next_layer",
        "The layer at work is forgotten. Its inner tensors are there while it works, whether it keeps them or computes "
        "them again.",
    ),
    Slip(
        "largest_beside_all_that_is_kept",
        "The largest layer that computes again is counted beside everything that is kept. While layer i works, only "
        "layers before it hold what they keep: the backward pass has freed the later ones.",
    ),
    Slip(
        "all_recomputed_at_once",
        "The inner tensors of all layers are counted at once. Layers that compute them again hold them one at a time.",
    ),
    Slip(
        "largest_of_all_beside_what_is_kept",
        "The largest layer is counted beside everything that is kept. While layer i works, only layers before it hold "
        "what they keep, and its own inner tensors are there once: the backward pass has freed the later ones.",
    ),
    Slip(
        "own_inner_twice",
        "A layer's own inner tensors count twice where it keeps them. While it works they are there once.",
    ),
    Slip(
        "all_inputs_from_the_beginning",
        "The inputs of all layers are counted from the beginning. While layer i works, those of layers 0 to i are "
        "there.",
    ),
    Slip("choices_turned_round", "The choices are the wrong way round: True stands for a layer that keeps."),
    Slip(
        "partial_plans_dropped",
        "Of all partial plans that keep equally many layers only one goes on. Another that is slower, but keeps fewer "
        "bytes, may end better: drop a plan only if another one keeps no more bytes and takes no more time.",
    ),
    Slip("inputs_forgotten", "The layers' inputs are forgotten. They are kept in any case, of layers 0 to i."),
    Slip(
        "own_input_forgotten",
        "The input of the layer at work is forgotten. While layer i works, the inputs of layers 0 to i are there, and "
        "its own is one of them.",
    ),
    Slip("fits_strictly", "A plan that fills the limit to the last byte was refused. It fits: compare with <=."),
    Slip(
        "none_without_layers",
        "Without layers there is one list, the empty one, and it stays within the limit: return []. An empty list "
        "counts as false, so ask `is None`.",
    ),
    Slip("never_none", "There is a plan although none stays within the limit. Return None there."),
    Slip(
        "most_bytes_kept",
        "The plan keeps as many bytes as possible. What counts is the time that the others take to compute again.",
    ),
)

MODEL = Model(
    model,
    SLIPS,
    styles=((), ("last_layers_first",)),
    none_is_a_result=True,
    may_be_silent=True,
    first_of_equals=True,
)

EXERCISE = Exercise(
    id="10.5",
    title="What to keep and what to compute again",
    entries=("plan",),
    cases=plan_cases,
    oracle=best_plan,
    contracts=(CONTRACT,),
    models=(MODEL, replace(MODEL, styles=(("layer_by_layer",), ("layer_by_layer", "last_layers_first")))),
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
