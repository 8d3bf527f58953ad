"""Exercise 7.1: which KV head a query head reads, and which query heads read a KV head."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake
from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.decode_slips import BY_COUNT, BY_MODULO


def key_head_driver(functions, query_head, query_heads, key_heads):
    import re

    try:
        head = functions["key_head_of"](query_head, query_heads, key_heads)
    except ValueError as error:
        said = {query_heads, key_heads} <= set(map(int, re.findall(r"\d+", str(error))))
        return "ValueError" if said else "ValueError without both numbers"
    if not hasattr(type(head), "__index__"):
        raise TypeError(f"key_head_of returned {head!r}; a KV head is an index into a tensor, so it is a whole number")
    return head.__index__()


def groups_driver(functions, query_heads, key_heads):
    import re

    try:
        return functions["groups"](query_heads, key_heads)
    except ValueError as error:
        said = {query_heads, key_heads} <= set(map(int, re.findall(r"\d+", str(error))))
        return "ValueError" if said else "ValueError without both numbers"


def key_head_oracle(query_head, query_heads, key_heads):
    if query_heads % key_heads:
        return "ValueError"
    return [head for head in range(key_heads) for _ in range(query_heads // key_heads)][query_head]


def groups_oracle(query_heads, key_heads):
    if query_heads % key_heads:
        return "ValueError"
    members = [
        [head for head in range(query_heads) if key_head_oracle(head, query_heads, key_heads) == key_head]
        for key_head in range(key_heads)
    ]
    return torch.tensor(members)


def head_map_cases(draw):
    head = draw.integer(9, 31)

    def of_head(name, *args):
        return Case(name, args, "key_head_of", key_head_driver)

    def of_all(name, *args):
        return Case(name, args, "groups", groups_driver)

    return [
        of_head("query head 5 of 8, 2 KV heads", 5, 8, 2),
        of_head("query head 2 of 8, 4 KV heads", 2, 8, 4),
        of_head("query head 11 of 12, 3 KV heads", 11, 12, 3),
        of_head(f"query head {head} of 32, 8 KV heads", head, 32, 8),
        of_head("as many KV heads as query heads", 6, 7, 7),
        of_head("one KV head for all 71", 30, 71, 1),
        of_head("10 query heads, 4 KV heads: refused", 9, 10, 4),
        of_head("2 query heads, 4 KV heads: refused", 1, 2, 4),
        of_all("8 query heads, 2 KV heads", 8, 2),
        of_all("15 query heads, 5 KV heads", 15, 5),
        of_all("7 of each", 7, 7),
        of_all("5 query heads, one KV head", 5, 1),
        of_all("9 query heads, 2 KV heads: refused", 9, 2),
    ]


def key_head(s: Slips, query_head, query_heads, key_heads):
    """What `key_head_of` gives with these slips."""
    if refused := _refused(s, query_heads, key_heads):
        return refused
    if s("by_modulo"):
        return query_head % key_heads
    if s("by_count"):
        return query_head // key_heads
    if s("head_rounded_up"):
        return -(-query_head * key_heads // query_heads)
    head = query_head * key_heads // query_heads
    return key_heads - 1 - head if s("heads_turned_round") else head


def members(s: Slips, query_heads, key_heads):
    """What `groups` gives with these slips."""
    if refused := _refused(s, query_heads, key_heads):
        return refused
    heads = torch.arange(query_heads)
    if s("groups_by_modulo"):
        return heads.view(-1, key_heads).T
    if s("groups_of_key_heads"):
        return heads.view(-1, key_heads)
    if s("groups_turned"):
        return heads.view(key_heads, -1).T
    rows = heads.view(key_heads, -1)
    if s("members_descending"):
        rows = rows.flip(1)
    return rows.flip(0) if s("groups_from_the_last") else rows


def _refused(s: Slips, query_heads, key_heads):
    if (key_heads % query_heads if s("divided_the_wrong_way") else query_heads % key_heads) == 0:
        return None if query_heads % key_heads == 0 or key_heads > query_heads else NotImplemented
    return "ValueError without both numbers" if s("numbers_not_said") else "ValueError"


NUMBERS_NOT_SAID = (
    "Your ValueError does not say both numbers. Whoever reads it wants to know which head counts were given: put "
    "query_heads and key_heads into its text."
)
REFUSALS = (
    Slip(
        "divided_the_wrong_way",
        "The test for head counts that don't divide is the wrong way round, and refuses those that do: it is "
        "query_heads % key_heads.",
    ),
    Slip("numbers_not_said", NUMBERS_NOT_SAID),
)
HEADS = (
    Slip("by_modulo", BY_MODULO),
    Slip("by_count", BY_COUNT),
    Slip(
        "heads_turned_round",
        "The KV heads are counted from the last. Query head 0 and its neighbours read KV head 0: "
        "query_head // (query_heads // key_heads).",
    ),
    Slip(
        "head_rounded_up",
        "The division by the group's size was rounded up, as if heads were counted from 1. They are counted from 0: "
        "round down, with //.",
    ),
    *REFUSALS,
)
GROUPS = (
    Slip("groups_by_modulo", BY_MODULO),
    Slip(
        "groups_of_key_heads",
        "You made groups of key_heads members each. It is the other way round: a row for each KV head, with "
        "query_heads // key_heads members.",
    ),
    Slip(
        "groups_turned",
        "The groups stand in columns. Row k must hold the query heads of KV head k.",
    ),
    Slip(
        "members_descending",
        "Each row holds its query heads in descending order. They are asked for in the order of their numbers.",
    ),
    Slip(
        "groups_from_the_last",
        "The rows are in the wrong order: the last group stands first. Row k must hold the query heads of KV head k.",
    ),
    *REFUSALS,
)


def _no_group_left(case, seen, got):
    """More KV heads than query heads, whose group has no member."""
    raised = seen.error is not None and seen.error.type == "ZeroDivisionError"
    return raised and case.args[-2] < case.args[-1]


def _not_refused(case, seen, got):
    """Head counts that do not divide, and a result; or an error of PyTorch's, which was given them."""
    accepted = got is not None and not isinstance(got, str) if seen.error is None else seen.error.type == "RuntimeError"
    return case.args[-2] % case.args[-1] != 0 and accepted


def _refused_by_another(case, seen, got):
    others = ("AssertionError", "Exception", "TypeError", "ArithmeticError", "KeyError")
    return seen.error is not None and seen.error.type in others and case.args[-2] % case.args[-1] != 0


EXERCISE = Exercise(
    id="7.1",
    title="The head map",
    entries=("key_head_of", "groups"),
    cases=head_map_cases,
    models=(Model(key_head, HEADS), Model(members, GROUPS, entry="groups")),
    oracle={"key_head_of": key_head_oracle, "groups": groups_oracle},
    hints=(
        "How many query heads share one KV head? That is the group's size, and it is the same for all of them.",
        "Groups are neighbours. With 8 query heads and 2 KV heads, 0 1 2 3 read KV head 0 and 4 5 6 7 read KV head 1: "
        "a whole-number division by the group's size.",
        "`groups` goes the other way: KV head k is read by query heads k * group to (k + 1) * group - 1. As a tensor, "
        "that is torch.arange(query_heads) in rows of `group`.",
        "Before anything else: if query_heads % key_heads != 0: raise ValueError(...), with both numbers in its text.",
    ),
    mistakes=(
        Mistake(
            "no_group_left",
            "More KV heads than query heads were not refused, so the group's size is 0 and was divided by. Test "
            "`query_heads % key_heads` before you divide. (`key_heads % query_heads` would refuse counts that "
            "divide.)",
            when=_no_group_left,
        ),
        Mistake(
            "head_is_no_index",
            "A KV head is used as an index into the cache, and a float can't be one. Divide with //, in both places "
            "where you divide: with / a number stays a float even where it is whole.",
            when=lambda case, seen, got: seen.error is not None and "key_head_of returned" in seen.error.text,
        ),
        Mistake(
            "not_refused",
            "Head counts that don't divide were accepted. Some query heads would then share a KV head with fewer "
            "others, or read one that isn't there; no kernel is written for that. Raise a ValueError.",
            when=_not_refused,
        ),
        Mistake(
            "refused_by_another_error",
            "Head counts that don't divide are refused, but not by a ValueError, which is asked for here.",
            when=_refused_by_another,
        ),
    ),
)
