"""Exercise 7.1: which KV head a query head reads, and which query heads read a KV head."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, Slip
from exercises.topics.decode_slips import BY_COUNT, BY_MODULO
from exercises.topics.formulas import for_arguments


def key_head_driver(functions, query_head, query_heads, key_heads):
    try:
        head = functions["key_head_of"](query_head, query_heads, key_heads)
    except ValueError:
        return "ValueError"
    if not hasattr(type(head), "__index__"):
        raise TypeError(f"key_head_of returned {head!r}; a KV head is an index into a tensor, so it is a whole number")
    return head.__index__()


def groups_driver(functions, query_heads, key_heads):
    try:
        return functions["groups"](query_heads, key_heads)
    except ValueError:
        return "ValueError"


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


def _where_it_divides(count, slip):
    """A formula for so many arguments that refuses head counts that don't divide."""
    return for_arguments(count, lambda *args: slip(*args) if args[-2] % args[-1] == 0 else "ValueError")


def _no_group_left(case, seen, got):
    """More KV heads than query heads, whose group has no member."""
    raised = seen.error is not None and seen.error.type == "ZeroDivisionError"
    return raised and case.args[-2] < case.args[-1]


EXERCISE = Exercise(
    id="7.1",
    title="The head map",
    entries=("key_head_of", "groups"),
    cases=head_map_cases,
    oracle={"key_head_of": key_head_oracle, "groups": groups_oracle},
    hints=(
        "How many query heads share one KV head? That is the group's size, and it is the same for all of them.",
        "Groups are neighbours. With 8 query heads and 2 KV heads, 0 1 2 3 read KV head 0 and 4 5 6 7 read KV head 1: "
        "a whole-number division by the group's size.",
        "`groups` goes the other way: KV head k is read by query heads k * group to (k + 1) * group - 1. As a tensor, "
        "that is torch.arange(query_heads) in rows of `group`.",
        "Before anything else: if query_heads % key_heads != 0: raise ValueError(...), with both numbers in its text.",
    ),
    slips=(
        Slip("by_modulo", BY_MODULO, formula=_where_it_divides(3, lambda h, q, k: h % k)),
        Slip(
            "groups_by_modulo",
            BY_MODULO,
            formula=_where_it_divides(2, lambda q, k: torch.arange(q).view(-1, k).T),
        ),
        Slip("by_count", BY_COUNT, formula=_where_it_divides(3, lambda h, q, k: h // k)),
        Slip(
            "groups_of_key_heads",
            "You made groups of key_heads members each. It is the other way round: a row for each KV head, with "
            "query_heads // key_heads members.",
            formula=_where_it_divides(2, lambda q, k: torch.arange(q).view(-1, k)),
        ),
        Slip(
            "groups_turned",
            "The groups are right, but they stand in columns. Row k must hold the query heads of KV head k.",
            formula=_where_it_divides(2, lambda q, k: torch.arange(q).view(k, -1).T),
        ),
        Slip(
            "divided_the_wrong_way",
            "The test for head counts that don't divide is the wrong way round, and refuses those that do: it is "
            "query_heads % key_heads.",
            formula=(
                for_arguments(3, lambda h, q, k: "ValueError" if k % q else h * k // q),
                for_arguments(2, lambda q, k: "ValueError" if k % q else torch.arange(q).view(k, -1)),
            ),
        ),
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
            when=lambda case, seen, got: case.args[-2] % case.args[-1] != 0 and not isinstance(got, str),
        ),
    ),
)
