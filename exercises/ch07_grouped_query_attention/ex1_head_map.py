"""Exercise 7.1: which KV head a query head reads, and which query heads read a KV head."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
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


def key_head(query_head, query_heads, key_heads):
    if query_heads % key_heads:
        return "ValueError"
    head = query_head * key_heads // query_heads
    return head


def members(query_heads, key_heads):
    if query_heads % key_heads:
        return "ValueError"
    rows = torch.arange(query_heads).view(key_heads, -1)
    return rows


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


REFUSALS = (
    *edits(
        "The test for head counts that don't divide is the wrong way round, and refuses those that do: it is "
        "query_heads % key_heads.",
        divided_the_wrong_way=("query_heads % key_heads", "key_heads % query_heads"),
    ),
    *edits(
        "Your ValueError does not say both numbers. Whoever reads it wants to know which head counts were given: put "
        "query_heads and key_heads into its text.",
        numbers_not_said=('"ValueError"', '"ValueError without both numbers"'),
    ),
)
HEAD = "query_head * key_heads // query_heads"
HEADS = (
    *edits(BY_MODULO, by_modulo=(HEAD, "query_head % key_heads")),
    *edits(BY_COUNT, by_count=(HEAD, "query_head // key_heads")),
    *edits(
        "The KV heads are counted from the last. Query head 0 and its neighbours read KV head 0: "
        "query_head // (query_heads // key_heads).",
        heads_turned_round=("return head", "return key_heads - 1 - head"),
    ),
    *edits(
        "The division by the group's size was rounded up, as if heads were counted from 1. They are counted from 0: "
        "round down, with //.",
        head_rounded_up=(HEAD, f"-(-{HEAD})"),
    ),
    *REFUSALS,
)
GROUPS = (
    *edits(BY_MODULO, groups_by_modulo=("view(key_heads, -1)", "view(-1, key_heads).T")),
    *edits(
        "You made groups of key_heads members each. It is the other way round: a row for each KV head, with "
        "query_heads // key_heads members.",
        groups_of_key_heads=("view(key_heads, -1)", "view(-1, key_heads)"),
    ),
    *edits(
        "The groups stand in columns. Row k must hold the query heads of KV head k.",
        groups_turned=("view(key_heads, -1)", "view(key_heads, -1).T"),
    ),
    *edits(
        "Each row holds its query heads in descending order. They are asked for in the order of their numbers.",
        members_descending=("return rows", "return rows.flip(1)"),
    ),
    *edits(
        "The rows are in the wrong order: the last group stands first. Row k must hold the query heads of KV head k.",
        groups_from_the_last=("view(key_heads, -1)", "view(key_heads, -1).flip(0)"),
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
    models=(model_of(key_head, HEADS), model_of(members, GROUPS, entry="groups")),
    oracle={"key_head_of": key_head, "groups": members},
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
