"""Exercise 17.1: what the argument called window means in three libraries."""

import torch

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract


def by_library(functions, keys):
    """The four numbers by name, with a pair of either kind. It is sent to the worker by its source alone."""
    returned = functions["arguments"](keys)
    if not isinstance(returned, dict) or set(returned) != {"course_lib", "flash_attn", "transformers"}:
        raise TypeError(f"arguments returned {returned!r}; it must return a dict with the three libraries' names")
    pair = returned["flash_attn"]
    numbers = (returned["course_lib"], returned["transformers"], *pair) if type(pair) in (tuple, list) else ()
    if len(numbers) != 4 or any(type(number) is not int for number in numbers):
        raise TypeError(f"arguments returned {returned!r}; it must give whole numbers, and a pair for flash_attn")
    return dict(zip(("course_lib", "transformers", "flash_attn, left", "flash_attn, right"), numbers))


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
    return {"course_lib": keys - 1, "transformers": keys, "flash_attn, left": keys - 1, "flash_attn, right": 0}


def window_cases(draw):
    odd = draw.integer(9, 30)
    masks = {
        "flash_attn, (1, 2): keys after the query too": ("flash_attn", (1, 2), 6, 6),
        "flash_attn, (3, 3), as hf#39408 had it": ("flash_attn", (3, 3), 9, 9),
        "flash_attn, (-1, 0): causal": ("flash_attn", (-1, 0), 5, 5),
        "flash_attn, (-1, 2)": ("flash_attn", (-1, 2), 3, 9),
        "flash_attn, (2, -1): no bound after": ("flash_attn", (2, -1), 5, 5),
        "flash_attn, (-1, -1): no bound at all": ("flash_attn", (-1, -1), 3, 5),
        f"transformers, one query, {odd} keys": ("transformers", 8, 1, odd),
    }
    windows = {  # for queries and keys the window of each library
        "three keys": (5, 5, 2, 3, (2, 0)),
        "the query's own key alone": (4, 4, 0, 1, (0, 0)),
        "2 queries, 7 keys": (2, 7, 3, 3, (3, 1)),
        "6 queries, 3 keys": (6, 3, 1, 2, (1, 2)),
    }
    return [
        Case(f"{library}, a window of {window}: {words}", (library, window, queries, keys), "visible")
        for words, (queries, keys, *each) in windows.items()
        for library, window in zip(("course_lib", "transformers", "flash_attn"), each)
    ] + [Case(name, args, "visible") for name, args in masks.items()] + [
        Case(f"arguments for {keys:,} key{'s' * (keys > 1)}", (keys,), "arguments", by_library)
        for keys in (128, 1, 2, 4096, odd)
    ]  # fmt: skip


def made(draw, *, library, left, right, queries, keys):
    window = {"course_lib": max(left, 0), "transformers": max(left, 0) + 1, "flash_attn": (left, right)}[library]
    return library, window, queries, keys


CONTRACT = Contract(
    made,
    choices={
        "library": ("course_lib", "flash_attn", "transformers"),
        "left": (-1, 0, 1, 6, 40), "right": (-1, 0, 1, 30), "queries": (1, 2, 9, 33), "keys": (1, 2, 9, 33),
    },
    says={"library": '"course_lib", "flash_attn" or "transformers"', "left": "each 0 or more, or -1",
          "queries": "any lengths of at least 1"},
    entry="visible", most=20,
)  # fmt: skip

LEFT, RIGHT = "left if left >= 0 else query_length + key_length", "right if right >= 0 else query_length + key_length"
COURSE, TRANSFORMERS, SEEN = "window, 0", "window - 1, 0", "(key >= position - before) & (key <= position + after)"
OF_VISIBLE = (
    *edits("Queries are not aligned to the end: query i stands at position i + key_length - query_length.",
        aligned_to_the_start=("(key_length - query_length)", "0")),
    *edits("-1 was taken for a number of keys, which hides the query's own key. It means no bound on that side.",
        minus_one_taken_for_a_number=(LEFT, "left", RIGHT, "right"),
        minus_one_taken_for_a_number__left=(LEFT, "left"), minus_one_taken_for_a_number__right=(RIGHT, "right")),
    *edits("-1 was taken for 0, so the query sees no key on that side besides its own. It means no bound there.",
        minus_one_taken_for_0=(LEFT, "max(left, 0)", RIGHT, "max(right, 0)"),
        minus_one_taken_for_0__left=(LEFT, "max(left, 0)"), minus_one_taken_for_0__right=(RIGHT, "max(right, 0)")),
    *edits("0 was taken for no bound, which only -1 means. With 0 a query sees no key on that side besides its own.",
        zero_taken_for_no_bound=("left >= 0", "left > 0", "right >= 0", "right > 0"),
        zero_taken_for_no_bound__left=("left >= 0", "left > 0"),
        zero_taken_for_no_bound__right=("right >= 0", "right > 0")),
    *edits("A -1 on one side of FlashAttention's pair dropped both bounds. It drops that of its own side alone.",
        one_minus_one_for_both=("left >= 0", "min(left, right) >= 0", "right >= 0", "min(left, right) >= 0")),
    *edits("FlashAttention was made causal. With causal=False, `right` decides that.", always_causal=(RIGHT, "0")),
    *edits("FlashAttention's left was taken to count the query's own key. It counts only the keys before it: the query "
        "sees p - left … p + right.", left_with_itself=("left if", "left - 1 if")),
    *edits("FlashAttention's right was taken to count the query's own key. It counts only the keys after it.",
        right_with_itself=("right if", "right - 1 if"), right_with_itself__or_0=("right if", "max(right - 1, 0) if")),
    *edits("FlashAttention's left and right were exchanged. Left, the first, counts the keys before the query.",
        sides_exchanged=("left, right = window", "right, left = window")),
    *edits("transformers' window was taken for the keys before the query. It counts its own too: p - window + 1 … p.",
        transformers_without_itself=(TRANSFORMERS, COURSE)),
    *edits("The course's window was taken to count the query's own key. It counts those before it: p - window … p.",
        course_with_itself=(COURSE, TRANSFORMERS)),
    *edits("The windows of transformers and the course were exchanged. Only transformers counts the query's own key.",
        libraries_exchanged=(COURSE, TRANSFORMERS, TRANSFORMERS, COURSE)),
    *edits("A window of transformers or of the course shows keys after the query's own. Both are causal.",
        looks_ahead=(COURSE, "window, window", TRANSFORMERS, "window - 1, window - 1"),
        looks_ahead__course=(COURSE, "window, window"),
        looks_ahead__transformers=(TRANSFORMERS, "window - 1, window - 1")),
    *edits("The first key of every window is missing: compare with >=.", first_key_missing=("key >=", "key >")),
    *edits("The last key of every window is missing: compare with <=.", last_key_missing=("key <=", "key <")),
    *edits("The mask is inverted: True means that the query sees the key.", turned_round=(SEEN, f"~({SEEN})")),
)  # fmt: skip
TO_COURSE, TO_TRANSFORMERS = '"course_lib": keys - 1', '"transformers": keys'
TO_LEFT, TO_RIGHT = '"flash_attn, left": keys - 1', '"flash_attn, right": 0'
ONE_MORE, COURSE_ONE_MORE = (TO_LEFT, '"flash_attn, left": keys'), (TO_COURSE, '"course_lib": keys')
OF_ARGUMENTS = (
    *edits("FlashAttention gets one key too many: its left bound does not count the query's own key. For `keys` keys "
        "it is keys - 1 (hf#39408, zml#763).", one_key_too_many=ONE_MORE),
    *edits("The course gets one key too many: the query's own.", one_key_too_many__course=COURSE_ONE_MORE),
    *edits("All three libraries got `keys`. Only transformers should.", same_for_all=(*ONE_MORE, *COURSE_ONE_MORE)),
    *edits("transformers gets one key too few: its window counts the query's own key.",
        one_key_too_few=(TO_TRANSFORMERS, '"transformers": keys - 1')),
    *edits("The right bound lets queries see keys after their own. Causal attention has (keys - 1, 0) (LightLLM#1311).",
        right_not_0=(TO_RIGHT, '"flash_attn, right": keys - 1'),
        right_not_0__and_too_many=(*ONE_MORE, TO_RIGHT, '"flash_attn, right": keys')),
    *edits("The right bound is -1, which is no bound, so queries see all keys after their own. Causal attention has 0.",
        right_without_a_bound=(TO_RIGHT, '"flash_attn, right": -1')),
    *edits("The left bound is negative, which means no bound. It is a number of keys, not an offset.",
        left_negative=(TO_LEFT, '"flash_attn, left": 1 - keys'),
        left_negative__and_too_many=(TO_LEFT, '"flash_attn, left": -keys')),
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
        "arguments: keys - 1 for course_lib, (keys - 1, 0) for flash_attn, and keys for transformers.",
    ),
)  # fmt: skip
