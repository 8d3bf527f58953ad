"""Exercise 18.6: slots in the order of their experts, and each token's weighted sum of what the experts made."""

import torch

from course_lib.checker import Case, Exercise, Mistake, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch18_products_and_experts import arranging_slips as slips
from exercises.ch18_products_and_experts.product_steps import rounded_on_the_way, told


def arrangement(experts, count, block):
    flat = experts.flatten().long()
    sentinel = len(flat)
    served = flat >= 0
    slot = torch.arange(sentinel)
    slots, tile_experts = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for expert in range(count):
        own = slot[(flat == expert) & served]
        number = len(own)
        tiles = -(-number // block)
        filled = torch.full((tiles * block,), sentinel)
        filled[:number] = own[: len(filled)]
        slots.append(filled)
        tile_experts.append(torch.full((tiles,), expert))
    return torch.cat(slots).int(), torch.cat(tile_experts).int()


def ordered(experts, count, block, *rest):
    """As `arrange`; the case in which lines are counted has further arguments, and its result is True."""
    return True if rest else arrangement(experts, count, block)


def combination(rows, slots, weights):
    tokens, k = weights.shape
    taken = slots < tokens * k
    places, of_place = taken.nonzero()[:, 0], slots[taken].long()
    token = of_place // k
    wide = torch.promote_types(rows.dtype, torch.float32)
    weight = weights.flatten()[of_place, None]
    weighted = rows[places].to(wide) * weight
    out = torch.zeros(tokens, rows.shape[1], dtype=wide)
    out = out.index_add(0, token, weighted)
    return out.to(rows.dtype)


def counting_lines(functions, experts, count, block, rows, slots, weights):
    """Both calls, in which 60 lines of the cell run or so. Its source alone is sent to the worker."""
    import inspect
    import sys

    lines, cell = 0, inspect.unwrap(functions["arrange"]).__code__.co_filename

    def counted(frame, event, argument):
        nonlocal lines
        lines += event == "line" and frame.f_code.co_filename == cell
        if lines > 700:
            raise TimeoutError("after 700 lines of the cell, for 2,000 tokens and 3 experts")
        return counted

    sys.settrace(counted)
    try:
        functions["arrange"](experts, count, block)
        functions["combine"](rows, slots, weights)
    finally:
        sys.settrace(None)
    return True


SERVED = ("any", "one full expert", "some not served", "none served", "few experts", "the last expert alone")


def choices_of(draw, which, tokens, k, count):
    experts = draw.integers(tokens, k, low=0, high=count)
    return {
        "any": experts, "one full expert": torch.full_like(experts, draw.integer(0, count)),
        "some not served": experts.masked_fill(draw.uniform(tokens, k) < 0.4, -1),
        "none served": torch.full_like(experts, -1), "few experts": (experts // 3 * 3 + 1) % count,
        "the last expert alone": torch.full_like(experts, count - 1),
    }[which]  # fmt: skip


def to_arrange(draw, tokens, k, count, block, which="any", dtype=torch.int64):
    return choices_of(draw, which, tokens, k, count).to(dtype), count, block


CANCEL, NAN, INF = "large rows that cancel", torch.nan, torch.inf


def to_combine(draw, tokens, k, which="any", count=5, block=4, width=8, dtype=torch.float32, rubbish=NAN, numbers=""):
    slots, _ = arrangement(choices_of(draw, which, tokens, k, count), count, block)
    large = 300.0 if numbers == "large weights" else 1.0
    rows, weights = draw.normal(len(slots), width), draw.normal(tokens, k, scale=large)
    if numbers == CANCEL:
        sign = 1.0 - 2 * (slots % k % 2)[:, None]
        rows, weights = 3e4 * sign + 4e3 * rows.clamp(-2, 2), 1 + 0.03 * weights.clamp(-2, 2)
    rows[slots == tokens * k] = rubbish
    return rows.to(dtype), slots, weights


def arrange_cases(draw):
    rows, slots, weights = to_combine(draw, 2000, 2, "any", 3, 256, 2)
    many = (draw.integers(2000, 2, low=-1, high=3), 3, 256, rows, slots, weights)
    worked = {
        "3 tokens, k = 2, 4 experts, blocks of 4": ([[2, 0], [2, 3], [0, 2]], 4, 4),
        "an expert with exactly one block": ([[0], [1], [0], [1], [1]], 2, 2),
        "experts 0 and 3 have no token": ([[1, 2], [2, 1]], 4, 2),
        "a choice that is not served": ([[1, -1], [-1, 0], [1, 0]], 3, 2),
        "no choice is served": ([[-1, -1]], 3, 4),
    }
    drawn = {
        "one expert, three full blocks of 7": (21, 1, 1, 7), "300 experts": (200, 6, 300, 4),
        "50 tokens, k = 4, 8 experts, blocks of 16": (50, 4, 8, 16),
        "3 experts, long lists": (300, 2, 3, 16, "some not served"),
    }  # fmt: skip
    back = {
        "k = 1": (5, 1, "any", 5, 4, 8, torch.float32, 0.0), "NaN at the sentinels": (6, 3),
        "k = 2, all served": (6, 2, "any", 5, 4, 8, torch.float32, 0.0), "nothing is served": (3, 2, "none served"),
        "some choices have no place": (8, 3, "some not served"), "1,100 tokens, k = 30": (1100, 30, "any", 3, 256, 1),
        "float16": (20, 8, "any", 5, 4, 16, torch.float16, INF),
        f"float16, {CANCEL}": (20, 8, "any", 5, 4, 8, torch.float16, NAN, CANCEL),
    }  # fmt: skip
    return [
        *(Case(name, (torch.tensor(experts), *sizes), "arrange") for name, (experts, *sizes) in worked.items()),
        *(Case(name, to_arrange(draw, *choices), "arrange") for name, choices in drawn.items()),
        *(Case(f"combine: {name}", to_combine(draw, *choices), "combine") for name, choices in back.items()),
        Case("both, 2,000 tokens, lines counted", many, driver=counting_lines),
    ]


ORDERS = Contract(
    to_arrange,
    {"tokens": (1, 2, 17, 64), "k": (1, 2, 3, 20), "count": (1, 2, 7, 64), "block": (1, 2, 3, 16, 300),
     "which": SERVED, "dtype": (torch.int64, torch.int32)},
    {"tokens": "at least 1 of each", "count": "how many experts there are, at least 1", "block": "block: at least 1",
     "which": "or -1 for a choice that is not served here", "dtype": "int64 or int32"},
    entry="arrange", most=20,
)  # fmt: skip
SUMS = Contract(
    to_combine,
    {"tokens": (1, 2, 33), "k": (1, 2, 3, 8), "count": (1, 5, 16), "block": (1, 4, 16), "width": (1, 2, 7, 33),
     "which": SERVED[:4], "dtype": (torch.float32, torch.float16, torch.bfloat16),
     "rubbish": (Level(NAN, "NaN at the sentinels"), Level(INF, "inf at the sentinels"), Level(7.0, "")),
     "numbers": ("", CANCEL, "large weights")},
    {"tokens": "float32 [tokens, k]", "which": "There may be no place at all", "rubbish": "may hold anything, NaN",
     "dtype": "float32, float16 or bfloat16", "width": "[places, width]", "numbers": "any finite numbers"},
    lambda numbers, which, **others: numbers != CANCEL or which in SERVED[:2], entry="combine", most=20,
)  # fmt: skip


def not_ascending(case, seen, got):
    """The right slots for each expert, in another order."""
    right = arrangement(*case.args) if case.entry == "arrange" else ()
    if not isinstance(got, (tuple, list)) or [getattr(one, "shape", 0) for one in got] != [one.shape for one in right]:
        return False
    (found, owners), (slots, experts) = ([one.tolist() for one in pair] for pair in (got, right))
    of_place, sentinel = [expert for expert in experts for _ in range(case.args[2])], case.args[0].numel()
    same = owners == experts and sorted(zip(of_place, found)) == sorted(zip(of_place, slots))
    return same and found != slots and all((a == sentinel) == (b == sentinel) for a, b in zip(found, slots))


def fails_where_nothing_is_served(case, seen, got):
    """An error where there are no places at all, and none of dtypes or of a number below 0."""
    if seen.error is None or "dtype" in seen.error.text or "non-negative" in seen.error.text:
        return False
    return len(case.args[1]) == 0 if case.entry == "combine" else bool((case.args[0] < 0).all())


EXERCISE = Exercise(
    id="18.6", title="From tokens to experts and back", entries=("arrange", "combine"), cases=arrange_cases,
    oracle={"arrange": ordered, "combine": combination}, contracts=(ORDERS, SUMS),
    models=(
        model_of(ordered, slips.IN_ORDER, (arrangement,), entry="arrange", most_pairs=60),
        model_of(combination, slips.IN_SUM, uses=(slips.missing_rows,), entry="combine", most_pairs=100),
    ),
    mistakes=(
        Mistake("not_ascending", "An expert's slots are not in ascending order. Use argsort(stable=True): without it "
            "equal experts come in any order.", when=not_ascending, every=True, first=True),
        Mistake("loop_over_tokens", "A loop goes over tokens or places, in Python.",
            when=told("700 lines of the cell")),
        Mistake("minus_one_counted", "A choice of -1 was counted. Leave such choices out.", when=told("non-negative")),
        Mistake("fails_without_a_place", "It fails where a choice has no place. Such a choice adds nothing, so the "
            "rows cannot be viewed as [tokens, k].", every=True, when=lambda case, seen, got: case.entry == "combine"
            and told(" size")(case, seen, got) and "out of bounds" not in seen.error.text
            and 0 < int((case.args[1] < case.args[2].numel()).sum()) < case.args[2].numel()),
        Mistake("nothing_served", "It fails where no choice is served. There are no places then, and no tiles.",
            when=fails_where_nothing_is_served, every=True),
        rounded_on_the_way(combination, "summed_in_16_bits"),
    ),
    hints=(
        "Write the example of the text on paper: 3 tokens, k = 2, blocks of 4. Number the slots, and write each under "
        "its expert. A stable sort of the slots by their expert gives the same order.",
        "arrange: experts.flatten() is in the order of the slots. Keep those with an expert of at least 0. Where a "
        "loop over experts is allowed, (flat == expert).nonzero() are an expert's slots, ascending.",
        "An expert with n slots has tiles = (n + block - 1) // block tiles, so none if n is 0. Make a tensor of "
        "tiles · block sentinels and write the slots into its first n places. torch.cat joins them.",
        "combine: leave out places with the sentinel. A place's slot gives its weight, weights.flatten()[slot], and "
        "its token, slot // k. out.index_add_(0, token, rows.float() * weight[:, None]) adds up a token's rows.",
    ),
)  # fmt: skip
