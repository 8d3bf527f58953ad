"""Exercise 17.1: what the argument called window means in three libraries."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level

LIBRARIES = ("course_lib", "flash_attn", "transformers")

# The driver is sent to the worker by its source alone, so it stands by itself.


def by_library(functions, keys):
    """The four numbers by name, with a pair of either kind."""
    returned = functions["arguments"](keys)
    if not isinstance(returned, dict) or set(returned) != {"course_lib", "flash_attn", "transformers"}:
        raise TypeError(f"arguments returned {returned!r}; it must return a dict with the three libraries' names")
    pair = returned["flash_attn"]
    numbers = (*pair, returned["course_lib"], returned["transformers"]) if type(pair) in (tuple, list) else ()
    if len(numbers) != 4 or any(type(number) is not int for number in numbers):
        raise TypeError(f"arguments returned {returned!r}; it must give whole numbers, and a pair for flash_attn")
    left, right = pair
    names = {"course_lib": returned["course_lib"], "transformers": returned["transformers"]}
    return names | {"flash_attn, left": left, "flash_attn, right": right}


def visible_keys(library, window, query_length, key_length):
    position = torch.arange(query_length)[:, None] + (key_length - query_length)
    key = torch.arange(key_length)
    if library == "course_lib":
        before, after = window, 0
    if library == "transformers":
        before, after = window - 1, 0
    if library == "flash_attn":
        left, right = window
        before = left if left >= 0 else query_length + key_length
        after = right if right >= 0 else query_length + key_length
    return (key >= position - before) & (key <= position + after)


def arguments_of(keys):
    course_lib, transformers = keys - 1, keys
    left, right = keys - 1, 0
    return {
        "course_lib": course_lib,
        "transformers": transformers,
        "flash_attn, left": left,
        "flash_attn, right": right,
    }


def window_cases(draw):
    odd = draw.integer(9, 30)
    masks = {
        "course_lib, a window of 2": ("course_lib", 2, 5, 5),
        "transformers, a window of 2": ("transformers", 2, 5, 5),
        "flash_attn, (2, 0)": ("flash_attn", (2, 0), 5, 5),
        "course_lib, a window of 0: the query's own key alone": ("course_lib", 0, 4, 4),
        "transformers, a window of 1: the query's own key alone": ("transformers", 1, 4, 4),
        "flash_attn, (0, 0): the query's own key alone": ("flash_attn", (0, 0), 4, 4),
        "flash_attn, (1, 2): keys after the query too": ("flash_attn", (1, 2), 6, 6),
        "flash_attn, (3, 3), as hf#39408 had it": ("flash_attn", (3, 3), 9, 9),
        "flash_attn, (-1, 0): causal": ("flash_attn", (-1, 0), 5, 5),
        "flash_attn, (-1, 2)": ("flash_attn", (-1, 2), 3, 9),
        "flash_attn, (2, -1): no bound after": ("flash_attn", (2, -1), 5, 5),
        "flash_attn, (-1, -1): no bound at all": ("flash_attn", (-1, -1), 3, 5),
        "course_lib, 2 queries, 7 keys": ("course_lib", 3, 2, 7),
        "transformers, 2 queries, 7 keys": ("transformers", 3, 2, 7),
        "flash_attn, 2 queries, 7 keys": ("flash_attn", (3, 1), 2, 7),
        f"transformers, one query, {odd} keys": ("transformers", 8, 1, odd),
        "course_lib, 6 queries, 3 keys": ("course_lib", 1, 6, 3),
        "transformers, 6 queries, 3 keys": ("transformers", 2, 6, 3),
        "flash_attn, 6 queries, 3 keys": ("flash_attn", (1, 2), 6, 3),
        "flash_attn, (-1, 0), 6 queries, 3 keys": ("flash_attn", (-1, 0), 6, 3),
        "a window wider than the keys": ("transformers", 100, 4, 4),
    }
    wanted = (128, 1, 2, 4096, odd)
    return [Case(name, args, "visible") for name, args in masks.items()] + [
        Case(f"arguments for {keys:,} key{'s' * (keys > 1)}", (keys,), "arguments", by_library) for keys in wanted
    ]


def made(draw, *, library, left, right, queries, keys):
    window = {"course_lib": max(left, 0), "transformers": max(left, 0) + 1, "flash_attn": (left, right)}[library]
    return library, window, queries, keys


CONTRACT = Contract(
    made,
    choices={
        "library": LIBRARIES, "left": tuple(Level(n, f"left {n}") for n in (-1, 0, 1, 6, 40)),
        "right": tuple(Level(n, f"right {n}") for n in (-1, 0, 1, 30)),
        "queries": (1, 2, 9, 33), "keys": (1, 2, 9, 33),
    },
    says={"library": '"course_lib", "flash_attn" or "transformers"', "left": "each 0 or more, or -1",
          "queries": "any lengths of at least 1"},
    entry="visible", most=20,
)  # fmt: skip

OFFSET, PAIR, NUMBERS = (
    "(key_length - query_length)",
    "left, right = keys - 1, 0",
    "course_lib, transformers = keys - 1, keys",
)
LEFT, RIGHT = "left if left >= 0 else query_length + key_length", "right if right >= 0 else query_length + key_length"
COURSE, TRANSFORMERS = "before, after = window, 0", "before, after = window - 1, 0"
FROM, UPTO = "(key >= position - before)", "(key <= position + after)"
OF_VISIBLE = (
    *edits("Queries are not aligned to the end: query i stands at position i + key_length - query_length.",
        aligned_to_the_start=(OFFSET, "0")),
    *edits("FlashAttention's -1 was taken for a number of keys, which hides the query's own key. It means that there "
        "is no bound: the query sees all keys on that side.",
        minus_one_taken_for_a_number=(LEFT, "left", RIGHT, "right"),
        minus_one_taken_for_a_number__left=(LEFT, "left"), minus_one_taken_for_a_number__right=(RIGHT, "right")),
    *edits("-1 was taken for 0, so the query sees no key on that side besides its own. It means that there is no "
        "bound.",
        minus_one_taken_for_0=(LEFT, "max(left, 0)", RIGHT, "max(right, 0)"),
        minus_one_taken_for_0__left=(LEFT, "max(left, 0)"), minus_one_taken_for_0__right=(RIGHT, "max(right, 0)")),
    *edits("0 was taken for no bound. In FlashAttention only -1 means that; with 0 the query sees no key on that side "
        "besides its own.",
        zero_taken_for_no_bound=(LEFT, LEFT.replace(">=", ">"), RIGHT, RIGHT.replace(">=", ">")),
        zero_taken_for_no_bound__left=(LEFT, LEFT.replace(">=", ">")),
        zero_taken_for_no_bound__right=(RIGHT, RIGHT.replace(">=", ">"))),
    *edits("With a -1 on one side of FlashAttention's pair, both bounds were dropped. A -1 drops the bound of its own "
        "side alone.",
        one_minus_one_for_both=("if left >= 0 else", "if min(left, right) >= 0 else", "if right >= 0 else",
        "if min(left, right) >= 0 else")),
    *edits("FlashAttention was made causal. With causal=False only its right bound says how many keys after its own "
        "a query sees.",
        always_causal=(RIGHT, "0")),
    *edits("FlashAttention's left was taken to count the query's own key. It counts only the keys before it: the query "
        "sees p - left … p + right.", left_with_itself=(LEFT, LEFT.replace("left if", "left - 1 if"))),
    *edits("FlashAttention's right was taken to count the query's own key. It counts only the keys after it.",
        right_with_itself=(RIGHT, RIGHT.replace("right if", "right - 1 if")),
        right_with_itself__or_none=(RIGHT, RIGHT.replace("right if", "max(right - 1, 0) if"))),
    *edits("FlashAttention's left and right were exchanged. The pair is (left, right), and left counts the keys before "
        "the query.",
        sides_exchanged=("left, right = window", "right, left = window")),
    *edits("transformers' window was taken for the keys before the query. It counts the query's own key too: p - "
        "window + 1 … p.",
        transformers_without_itself=(TRANSFORMERS, COURSE)),
    *edits("The course's window was taken to count the query's own key. It counts only the keys before it: p - window "
        "… p.",
        course_with_itself=(COURSE, TRANSFORMERS)),
    *edits("The windows of `transformers` and of the course were exchanged. Only that of `transformers` counts the "
        "query's own key.",
        libraries_exchanged=(COURSE, TRANSFORMERS, TRANSFORMERS, COURSE)),
    *edits("A window of `transformers` or of the course shows keys after the query's own. Both are causal.",
        looks_ahead=(COURSE, "before, after = window, window", TRANSFORMERS, "before, after = window - 1, window - 1"),
        looks_ahead__course=(COURSE, "before, after = window, window"),
        looks_ahead__transformers=(TRANSFORMERS, "before, after = window - 1, window - 1")),
    *edits("The first key of every window is missing: compare with >=.",
        first_key_missing=(FROM, FROM.replace(">=", ">"))),
    *edits("The last key of every window is missing: compare with <=.",
        last_key_missing=(UPTO, UPTO.replace("<=", "<"))),
    *edits("The mask is inverted: True means that the query sees the key.",
        turned_round=(f"return {FROM} & {UPTO}", f"return ~({FROM} & {UPTO})")),
)  # fmt: skip
OF_ARGUMENTS = (
    *edits("FlashAttention gets one key too many: its left bound does not count the query's own key. For `keys` keys "
        "it is keys - 1 (hf#39408, zml#763).", one_key_too_many=(PAIR, "left, right = keys, 0")),
    *edits("The course gets one key too many: its window does not count the query's own key.",
        one_key_too_many__course=(NUMBERS, "course_lib, transformers = keys, keys")),
    *edits("All three libraries got the number of keys. Only transformers counts the query's own key.",
        same_for_all=(PAIR, "left, right = keys, 0",
        NUMBERS, "course_lib, transformers = keys, keys")),
    *edits("transformers gets one key too few: its window counts the query's own key.",
        one_key_too_few=(NUMBERS, "course_lib, transformers = keys - 1, keys - 1")),
    *edits("The right bound lets queries see keys after their own. Causal attention has (keys - 1, 0) (LightLLM#1311).",
        right_not_0=(PAIR, "left, right = keys - 1, keys - 1"),
        right_not_0__and_too_many=(PAIR, "left, right = keys, keys")),
    *edits("The right bound is -1, which means no bound, so queries see all keys after their own. Causal attention has "
        "0.",
        right_without_a_bound=(PAIR, "left, right = keys - 1, -1")),
    *edits("The left bound is negative, which means no bound. It is a number of keys, not an offset.",
        left_negative=(PAIR, "left, right = 1 - keys, 0"),
        left_negative__and_too_many=(PAIR, "left, right = -keys, 0")),
)  # fmt: skip

EXERCISE = Exercise(
    id="17.1", title="One window, three conventions", entries=("visible", "arguments"), cases=window_cases,
    oracle={"visible": visible_keys, "arguments": arguments_of}, contracts=(CONTRACT,),
    models=(
        model_of(visible_keys, OF_VISIBLE, entry="visible"), model_of(arguments_of, OF_ARGUMENTS, entry="arguments")),
    hints=(
        "Turn each convention into two numbers: how many keys a query sees before its own position, and how many after "
        "it. FlashAttention gives both. The other two give only the first, and the second is 0.",
        "Query i stands at position p = i + key_length - query_length. Compare an arange of keys, as a row, with the "
        "positions, as a column: (key >= p - before) & (key <= p + after).",
        "course_lib: before = window. transformers: before = window - 1. flash_attn: before = left and after = right; "
        "where one of them is -1, use a number that is larger than all lengths.",
        "For `keys` keys, the query's own included: keys - 1 for course_lib, (keys - 1, 0) for flash_attn, and keys "
        "for transformers.",
    ),
)  # fmt: skip
