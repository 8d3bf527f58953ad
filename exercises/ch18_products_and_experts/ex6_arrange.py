"""Exercise 18.6: slots in the order of their experts, and each token's weighted sum of what the experts made."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, Mistake, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch18_products_and_experts.arranging import (
    ARRANGED,
    IN_SUM,
    ORDERS,
    SERVED,
    arrangement,
    choices_of,
    missing_rows,
    ordered,
    to_arrange,
)

INF, NAN = math.inf, math.nan


def counting_lines(functions, experts, count, block, rows, slots, weights):
    """Both calls, in which 60 lines of the cell run or so. Its source alone is sent to the worker."""
    import inspect
    import sys

    lines, cell = [0], inspect.unwrap(functions["arrange"]).__code__.co_filename

    def in_the_cell(frame, event, argument):
        lines[0] += event == "line"
        if lines[0] > 700:
            raise TimeoutError("after 700 lines of the cell, for 2,000 tokens and 3 experts")
        return in_the_cell

    sys.settrace(lambda frame, event, argument: in_the_cell if frame.f_code.co_filename == cell else None)
    try:
        functions["arrange"](experts, count, block)
        functions["combine"](rows, slots, weights)
    finally:
        sys.settrace(None)
    return True


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


def to_combine(
    draw, *, tokens, k, count=5, block=4, width=8, which="any", dtype=torch.float32, rubbish=NAN, numbers=""
):
    slots, _ = arrangement(choices_of(draw, which, tokens, k, count), count, block)
    rows, weights = draw.normal(len(slots), width), draw.normal(tokens, k)
    if numbers == "large rows that cancel":
        choice = (slots % k).float()[:, None]
        rows, weights = 3e4 * (1 - 2 * (choice % 2)) + 4e3 * rows.clamp(-2, 2), 1 + 0.03 * weights.clamp(-2, 2)
    if numbers == "large weights":
        weights = 300 * weights
    rows[slots == tokens * k] = rubbish
    return rows.to(dtype), slots, weights


def arrange_cases(draw):
    def order(name, experts, count, block):
        return Case(name, (torch.tensor(experts), count, block), "arrange")

    def drawn(name, **choices):
        return Case(name, to_arrange(draw, **choices), "arrange")

    def back(name, **choices):
        return Case(name, to_combine(draw, **choices), "combine")

    experts = draw.integers(2000, 2, low=-1, high=3)
    slots, _ = arrangement(experts, 3, 256)
    many = (experts, 3, 256, draw.normal(len(slots), 2), slots, draw.normal(2000, 2))
    return [
        order("3 tokens, k = 2, 4 experts, blocks of 4", [[2, 0], [2, 3], [0, 2]], 4, 4),
        order("an expert with exactly one block", [[0], [1], [0], [1], [1]], 2, 2),
        order("experts 0 and 3 have no token", [[1, 2], [2, 1]], 4, 2),
        order("a choice that is not served", [[1, -1], [-1, 0], [1, 0]], 3, 2),
        order("no choice is served", [[-1, -1]], 3, 4),
        drawn("one expert, three full blocks of 7", tokens=21, k=1, count=1, block=7),
        drawn("50 tokens, k = 4, 8 experts, blocks of 16", tokens=50, k=4, count=8, block=16),
        drawn("3 experts, long lists", tokens=300, k=2, count=3, block=16, which="some not served"),
        drawn("300 experts", tokens=200, k=6, count=300, block=4),
        back("combine: k = 1", tokens=5, k=1, rubbish=0.0),
        back("combine: k = 2, all served", tokens=6, k=2, rubbish=0.0),
        back("combine: NaN at the sentinels", tokens=6, k=3),
        back("combine: some choices have no place", tokens=8, k=3, which="some not served"),
        back("combine: nothing is served", tokens=3, k=2, which="none served"),
        back("combine: float16", tokens=20, k=8, width=16, dtype=torch.float16, rubbish=INF),
        back("combine: float16, large rows that cancel", tokens=20, k=8, dtype=torch.float16,
             numbers="large rows that cancel"),
        back("combine: 1,100 tokens, k = 30", tokens=1100, k=30, count=3, block=256, width=1),
        Case("both, 2,000 tokens, lines counted", many, driver=counting_lines),
    ]  # fmt: skip


SUMS = Contract(
    to_combine,
    choices={
        "tokens": (1, 2, 33), "k": (1, 2, 3, 8), "count": (1, 5, 16), "block": (1, 4, 16), "width": (1, 2, 7, 33),
        "which": tuple(Level(one, one) for one in SERVED[:4]),
        "dtype": (torch.float32, torch.float16, torch.bfloat16),
        "rubbish": (Level(NAN, "NaN at the sentinels"), Level(INF, "inf at the sentinels"), Level(7.0, "")),
        "numbers": (Level("", ""), *(Level(one, one) for one in ("large rows that cancel", "large weights"))),
    },
    says={"tokens": "float32 [tokens, k]", "which": "There may be no place at all", "rubbish": "may hold anything, NaN",
          "dtype": "float32, float16 or bfloat16", "width": "[places, width]", "numbers": "any finite numbers"},
    valid=lambda numbers, which, **others: numbers != "large rows that cancel" or which in SERVED[:2],
    entry="combine", most=20,
)  # fmt: skip


def told(words):
    return lambda case, seen, got: seen.error is not None and words in seen.error.text


def not_ascending(case, seen, got):
    """The right slots for each expert, in another order."""
    right = arrangement(*case.args) if case.entry == "arrange" else ()
    if not isinstance(got, (tuple, list)) or [getattr(one, "shape", 0) for one in got] != [one.shape for one in right]:
        return False
    slots, found, sentinel = right[0].long(), got[0].long(), case.args[0].numel()
    expert = right[1].long().repeat_interleave(case.args[2]) * (sentinel + 1)
    same = torch.equal((found + expert).sort().values, (slots + expert).sort().values)
    ascending = torch.equal(found, slots) or not torch.equal(found == sentinel, slots == sentinel)
    return same and not ascending and torch.equal(got[1].long(), right[1].long())


def fails_where_nothing_is_served(case, seen, got):
    """An error where there are no places at all, and none of dtypes or of a number below 0."""
    if seen.error is None or "dtype" in seen.error.text or "non-negative" in seen.error.text:
        return False
    return len(case.args[1]) == 0 if case.entry == "combine" else bool((case.args[0] < 0).all())


def fails_without_a_place(case, seen, got):
    """An error of sizes, where some choice has no place."""
    if case.entry != "combine" or seen.error is None or " size" not in seen.error.text:
        return False
    placed = int((case.args[1] < case.args[2].numel()).sum())
    return "out of bounds" not in seen.error.text and 0 < placed < case.args[2].numel()


def summed_in_16_bits(case, seen, got):
    """Rows of 16 bits, and errors as roundings of the sums and products make them."""
    if case.entry != "combine" or case.args[0].dtype == torch.float32 or not isinstance(got, torch.Tensor):
        return False
    rows, slots, weights = case.args
    right, size = combination(rows.double(), slots, weights), combination(rows.double().abs(), slots, weights.abs())
    if got.shape != right.shape or got.dtype != rows.dtype:
        return False
    return bool(((got.double() - right).abs() <= 6 * torch.finfo(rows.dtype).eps * size).all())


EXERCISE = Exercise(
    id="18.6", title="From tokens to experts and back", entries=("arrange", "combine"), cases=arrange_cases,
    oracle={"arrange": ordered, "combine": combination}, contracts=(ORDERS, SUMS),
    models=(ARRANGED, model_of(combination, IN_SUM, uses=(missing_rows,), entry="combine", most_pairs=100)),
    mistakes=(
        Mistake("not_ascending", "An expert's slots are not in ascending order. Use argsort(stable=True): without it "
            "equal experts come in any order.", when=not_ascending, every=True, first=True),
        Mistake("loop_over_tokens", "A loop of Python goes over tokens, choices or places. Work on whole tensors.",
            when=told("700 lines of the cell")),
        Mistake("minus_one_counted", "A choice of -1 was counted among the experts. It is not served: leave such "
            "choices out first.", when=told("non-negative")),
        Mistake("fails_without_a_place", "It fails where a choice has no place. Such a choice adds nothing, so the "
            "rows cannot be viewed as [tokens, k].", when=fails_without_a_place, every=True),
        Mistake("nothing_served", "It fails where no choice is served. There are no places then, and no tiles.",
            when=fails_where_nothing_is_served, every=True),
        Mistake("summed_in_16_bits", "The sums, the products or the weights were rounded to rows' 16 bits on the way. "
            "Multiply and add in float32, and round once.", when=summed_in_16_bits, every=True),
    ),
    hints=(
        "Write the example of the text on paper: 3 tokens, k = 2, blocks of 4. Number the slots, and write each under "
        "its expert. A stable sort of the slots by their expert gives the same order.",
        "arrange: experts.flatten() is in the order of the slots. Keep those with an expert of at least 0. Where a "
        "loop over experts is allowed, (flat == expert).nonzero() are an expert's slots, ascending.",
        "An expert with n slots has tiles = (n + block - 1) // block tiles, so none if n is 0. Make a tensor of "
        "tiles · block sentinels and write the slots into its first n places. torch.cat joins them.",
        "combine: first leave out the places with the sentinel. The slot of a place gives its weight, "
        "weights.flatten()[slot], and its token, slot // k. out.index_add_(0, token, rows.float() * weight[:, None]) "
        "adds up what belongs to one token.",
    ),
)  # fmt: skip
