"""Exercise 17.7: what attention to chosen keys costs, and from which length on it pays."""

from fractions import Fraction

from course_lib.checker import Case, Exercise, Mistake, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch17_not_every_key.cost_slips import OF_CROSSOVER, OF_FLOPS, SHARED


def counted(functions, name, *arguments):
    """A call whose lines are counted: a loop over queries is told, and does not run for years. Its source is sent."""
    import sys

    lines = iter(range(20_000))

    def count(frame, event, argument):
        if event == "line" and next(lines, None) is None:
            raise TimeoutError(f"more than 20,000 lines ran in {name}")
        return count

    traced = sys.gettrace()
    sys.settrace(count)
    try:
        returned = functions[name](*arguments)
    finally:
        sys.settrace(traced)
    if type(returned) is float and returned == returned // 1:
        return f"{returned}, a float"
    if type(returned) is not int and not (name == "crossover" and returned is None):
        raise TypeError(f"{name} returned {returned!r}; it must return a Python int")
    if returned is None:
        return "never"
    return f"{returned:,}" if abs(returned) >= 2**62 else returned


def pairs_of(length, most):
    full = min(length, most)
    return full * (full + 1) // 2 + (length - full) * full


def parts_of(length, shape):
    attended = 4 * shape["query_heads"] * shape["head_dim"]
    scored = 2 * shape["index_heads"] * shape["index_dim"]
    dense, window = attended * pairs_of(length, length), attended * pairs_of(length, shape["window"])
    index, chosen = scored * pairs_of(length, length), attended * pairs_of(length, shape["k"])
    return dense, window, index, chosen


def flops_of(kind, length, shape):
    dense, window, index, chosen = parts_of(length, shape)
    return {"dense": dense, "window": window, "chosen": index + chosen}[kind]


def gained(length, shape, rates):
    dense, _, index, chosen = parts_of(length, shape)
    dense_time = Fraction(dense) / Fraction(rates["dense"])
    return dense_time - Fraction(index) / Fraction(rates["index"]) - Fraction(chosen) / Fraction(rates["chosen"])


def crossover_of(shape, rates):
    low, high = 0, 2**50
    if gained(high, shape, rates) < 0:
        return "never"
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gained(middle, shape, rates) >= 0 else (middle, high)
    return high


def told(name, *arguments):
    found = {"flops": flops_of, "crossover": crossover_of}[name](*arguments)
    return f"{found:,}" if type(found) is int and abs(found) >= 2**62 else found


V3 = {"query_heads": 128, "head_dim": 160, "index_heads": 64, "index_dim": 128, "window": 1024, "k": 2048}
SMALL = {"query_heads": 2, "head_dim": 4, "index_heads": 1, "index_dim": 4, "window": 3, "k": 4}
H200 = {"dense": 600e12, "index": 900e12, "chosen": 300e12}
TIE = {"dense": 1, "index": 2, "chosen": 1}


def cost_cases(draw):
    length = draw.integer(3000, 60_000)
    flops = [
        Case(f"{kind}, {name}", ("flops", kind, length, shape), "flops", counted)
        for name, length, shape in (
            ("6 tokens", 6, SMALL), ("1 token", 1, SMALL), ("3 tokens, a window of 3", 3, SMALL), ("no token", 0, V3),
            ("4 tokens, k = 4", 4, SMALL), (f"{length:,} tokens of DeepSeek-V3.2", length, V3),
            ("2⁴⁰ - 3 tokens", 2**40 - 3, V3), ("a window of 1, k = 1", 77, {**V3, "window": 1, "k": 1}),
        )
        for kind in ("dense", "window", "chosen")
    ]  # fmt: skip
    few, slow, halved = {**V3, "index_heads": 1}, H200 | {"index": 9e13}, {"dense": 8, "index": 8, "chosen": 4}
    close = {**SMALL, "index_heads": 15, "query_heads": 8}
    crossovers = {
        "DeepSeek-V3.2, assumed rates": (V3, H200),
        "the same, 4 heads in the indexer": ({**V3, "index_heads": 4}, H200),
        "the indexer takes longer than dense attention: never": ({**V3, "head_dim": 32}, slow),
        "the indexer alone takes as long as dense attention: never": ({**SMALL, "index_heads": 4}, TIE | {"index": 1}),
        "an indexer that takes just less than dense": (close, halved),
        "a length between 2³² and 2⁴⁰": ({**close, "k": 2**30}, halved),
        "chosen keys are faster at once": (few, {"dense": 1e14, "index": 9e14, "chosen": 3e14}),
        "just as long up to k": ({**SMALL, "index_heads": 4}, {"dense": 1, "index": 2, "chosen": 2}),
        "both take just as long at one length": ({**SMALL, "index_heads": 2, "k": 6}, TIE | {"index": 1}),
    }  # fmt: skip
    return flops + [Case(name, ("crossover", *args), "crossover", counted) for name, args in crossovers.items()]


def rough_parts(length, shape):
    """Without the triangle at the beginning and the diagonal."""
    dense, _, index, _ = parts_of(length, shape)
    share = Fraction(length, length + 1)
    return dense * share, 0, index * share, 4 * shape["query_heads"] * shape["head_dim"] * length * shape["k"]


def made_flops(draw, *, kind, length, window, k, heads):
    sizes = {"query_heads": heads, "head_dim": draw.choice((1, 24, 192)), "index_dim": draw.choice((1, 32, 128))}
    return "flops", kind, length, {**sizes, "index_heads": draw.integer(1, 9), "window": window, "k": k}


def made_crossover(draw, *, index_heads, k, index, chosen):
    shape = {"query_heads": 16, "head_dim": 96, "index_heads": index_heads, "index_dim": 64, "window": 50, "k": k}
    dense = float(draw.integer(10**14, 10**15))  # and so no two times are almost equal
    return "crossover", shape, {"dense": dense, "index": dense * index + 1001.0, "chosen": dense / chosen + 11.0}


CONTRACTS = (
    Contract(
        made_flops,
        choices={"kind": ("dense", "window", "chosen"), "length": (1, 2, 63, 64, 65, 300, 2**40 - 3),
                 "window": (1, 64, 299), "k": (1, 64, 301), "heads": (1, 12)},
        says={"kind": '"dense", "window" or "chosen"', "length": "0 to 2⁴⁰", "k": "at least 1"},
        entry="flops", driver=counted, most=9,
    ),
    Contract(
        made_crossover,
        choices={"index_heads": (1, 8, 60), "k": (1, 7, 2048),
                 "index": (Level(0.5, "an indexer at half the rate"), Level(1.6, "an indexer at 1.6 times the rate")),
                 "chosen": (Level(1.0, "chosen at the same rate"), Level(6.0, "chosen at a sixth of the rate"))},
        says={"k": "at least 1"}, entry="crossover", driver=counted, most=6,
    ),
)  # fmt: skip
PARTS = (pairs_of, parts_of, flops_of, gained, crossover_of)

EXERCISE = Exercise(
    id="17.7", title="From which length choosing pays", entries=("flops", "crossover"), cases=cost_cases,
    oracle=told, contracts=CONTRACTS,
    models=(
        model_of(told, SHARED + OF_FLOPS, PARTS, entry="flops"),
        model_of(told, SHARED + OF_CROSSOVER, PARTS, (rough_parts,), entry="crossover"),
    ),
    mistakes=(
        Mistake("query_by_query", "A loop runs through queries or lengths one by one, and there may be 2⁴⁰ of them. A "
            "sum of min(t + 1, most) is a triangle and a rectangle, and a length is found by halving.", first=True,
            when=lambda case, seen, got: seen.error is not None and "20,000 lines ran" in seen.error.text),
        Mistake("a_float", "A number is a float, which is exact only to 53 bits. Use whole numbers, and // to divide.",
            first=True, when=lambda case, seen, got: isinstance(got, str) and got.endswith("a float")),
        Mistake("rounded", "A number is exact only to 53 bits, as a float is. Use whole numbers, and // to divide.",
            when=lambda case, seen, got: isinstance(got, str) and "," in got
            and abs(int(got.replace(",", "")) / flops_of(*case.args[1:]) - 1) < 1e-14),
        Mistake("no_token", "A prompt without tokens costs 0 FLOPs.",
            when=lambda case, seen, got: case.args[0] == "flops" and case.args[2] == 0 and got != 0),
        Mistake("told_never", "None was returned although there is a length, at most 2⁴⁰, from which on choosing pays.",
            when=lambda case, seen, got: got == "never"),
        Mistake("never_not_told", "A length was returned though choosing never pays: a pair takes the indexer at least "
            "as long as dense attention.", when=lambda case, seen, got: "never" in case.name and type(got) is int),
    ),
    hints=(
        "Write a function for the sum of min(t + 1, most) over t = 0 … length - 1 first. With full = min(length, most) "
        "it is full · (full + 1) / 2 + (length - full) · full.",
        "dense: 4 · query_heads · head_dim times the sum with most = length. window and the chosen keys: the same, "
        "with most = window or k. The indexer: 2 · index_heads · index_dim times the sum with most = length.",
        "As the length grows, chosen keys can only go from slower to faster, never back. So double a length until they "
        "are no slower, then halve the interval between that length and the one before.",
        "Chosen keys never catch up if, for a pair, the indexer alone takes as long as dense attention or longer: 2 · "
        "index_heads · index_dim / rates[\"index\"] ≥ 4 · query_heads · head_dim / rates[\"dense\"].",
    ),
)  # fmt: skip
