"""Exercise 17.2: which tiles of keys a tile of queries visits, and which of them need no mask."""

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level

FAR = 2**40
NOT_IN_ORDER = (
    "The four numbers are not in order: begin ≤ whole_begin ≤ whole_end ≤ end. If no tile is whole or visited, the "
    "ends computed from the keys may cross. Limit whole_begin to begin … end, and whole_end to whole_begin … end. If "
    "no query sees a key, end = begin."
)


def ranges(functions, first, last, key_length, before, after, block):
    """What an answer says, with all right answers alike: an empty range may lie anywhere. Its source alone is sent."""
    import sys

    lines = iter(range(3000))

    def count(frame, event, argument):
        if event == "line" and next(lines, None) is None:
            raise TimeoutError("after 3,000 lines: it goes through tiles, keys or queries one by one")
        return count

    traced = sys.gettrace()
    sys.settrace(count)
    try:
        returned = functions["key_tiles"](first, last, key_length, before, after, block)
    finally:
        sys.settrace(traced)
    if not isinstance(returned, (tuple, list)) or len(returned) != 4 or any(type(n) is not int for n in returned):
        raise TypeError(f"key_tiles returned {returned!r}; it must return four whole numbers")
    begin, whole_begin, whole_end, end = returned
    if not begin <= whole_begin <= whole_end <= end:
        return {"visited": "not in order", "whole": f"{begin}, {whole_begin}, {whole_end}, {end}"}
    visited = f"tiles {begin} up to {end}, without the last" if begin < end else "no tile"
    whole = f"tiles {whole_begin} up to {whole_end}, without the last" if whole_begin < whole_end else "no tile"
    return {"visited": visited, "whole": whole}


def tiles_of(first, last, key_length, before, after, block):
    left = 0 if before is None else max(0, first - before)
    right = key_length if after is None else min(key_length, last + after + 1)
    all_left = 0 if before is None else max(0, last - before)
    all_right = key_length if after is None else min(key_length, first + after + 1)
    begin, end = left // block, -(-right // block)
    if left >= right:
        end = begin
    whole_begin, whole_end = -(-all_left // block), all_right // block
    whole_begin = min(max(whole_begin, begin), end)
    whole_end = min(max(whole_end, whole_begin), end)
    return begin, whole_begin, whole_end, end


def told(*arguments):
    return ranges({"key_tiles": tiles_of}, *arguments)


def bound_cases(draw):
    at = 1024 + draw.integer(1, 128)
    cases = {
        "queries 8 to 11, a window of 6 keys, causal, tiles of 4": (8, 11, 20, 5, 0, 4),
        "the same queries, causal without a window": (8, 11, 20, None, 0, 4),
        "the same queries, no bound": (8, 11, 20, None, None, 4),
        "before 0 and after 0: a query sees only its own key": (6, 6, 20, 0, 0, 4),
        "a window of 128 keys": (128, 255, 1000, 127, 0, 128),
        "a window of 129 keys": (128, 255, 1000, 128, 0, 128),
        "a window of 1,024 keys": (at, at + 127, 65_536, 1023, 0, 64),
        "keys after the query too": (at, at + 63, 4096, 200, 300, 64),
        "no bound before, some after": (at, at + 63, 4096, None, 300, 64),
        "some before, no bound after": (at, at + 63, 4096, 300, None, 64),
        "the last tile is cut, no bound": (0, 9, 1000, None, None, 64),
        "the last tile is cut, the window reaches beyond": (900, 963, 950, 500, 100, 64),
        "positions before the first key": (-20, 11, 100, 40, 0, 16),
        "all positions before the first key": (-50, -20, 100, 8, 8, 16),
        "all positions before the first key, no bound before": (-50, -20, 100, None, 8, 16),
        "positions beyond the last key": (90, 121, 100, 40, 8, 16),
        "positions beyond the last key, a small window": (90, 121, 100, 8, 0, 1),
        "all positions beyond the last key, which is in a cut tile": (103, 110, 100, 3, 0, 64),
        "all positions far beyond the last key": (300, 331, 100, 20, 0, 16),
        "2⁴⁰ keys, no bound before": (FAR - 128 - at, FAR - 1 - at, FAR, None, 0, 64),
        "2⁴⁰ keys, a window of 1,024 keys": (FAR - 128 - at, FAR - 1 - at, FAR, 1023, 0, 1),
        "2⁴⁰ queries": (0, FAR - 1, FAR, 1023, 0, 64),
    }
    return [Case(name, arguments, driver=ranges) for name, arguments in cases.items()]


def made(draw, *, queries, place, keys, before, after, block):
    first = {"first": 0, "early": -queries, "middle": keys // 2, "last": keys - queries, "late": keys + 3}[place]
    first += draw.integer(-2, 3)
    return first, first + queries - 1, keys, before, after, block


CONTRACT = Contract(
    made,
    choices={
        "queries": (1, 2, 7, 64), "keys": (0, 1, 2, 33, 64, 200), "block": (1, 2, 3, 16, 64),
        "place": tuple(Level(one, f"{one} positions") for one in ("first", "early", "middle", "last", "late")),
        "before": (Level(None, "no bound before"), 0, 1, 7, 16, 63, 200),
        "after": (Level(None, "no bound after"), 0, 1, 8, 31, 200),
    },
    says={"queries": "first at most last", "place": "Positions may be negative", "keys": "0 to 2⁴⁰",
          "before": "None: no bound", "after": "0 or more", "block": "at least 1"},
    driver=ranges, most=36,
)  # fmt: skip

LEFT, RIGHT = "max(0, first - before)", "min(key_length, last + after + 1)"
ALL_LEFT, ALL_RIGHT = "max(0, last - before)", "min(key_length, first + after + 1)"
START, END, WHOLE_END, RETURN = "left = 0 if", "-(-right // block)", "all_right // block", "return begin, whole_begin, "
LAST_KEY, ALL_LAST_KEY, NO_AFTER = "last + after + 1", "first + after + 1", "key_length if after is None else"
FALSE_BEFORE, FALSE_AFTER = ("before is None", "not before"), ("after is None", "not after")
ORDERED_BEGIN, ORDERED_END = "min(max(whole_begin, begin), end)", "min(max(whole_end, whole_begin), end)"
BEGIN_LEFT, BEGIN_AT_LEAST = (ORDERED_BEGIN, "whole_begin"), (ORDERED_BEGIN, "max(begin, min(whole_begin, end))")
END_LEFT, END_AT_LEAST = (ORDERED_END, "whole_end"), (ORDERED_END, "max(whole_begin, min(whole_end, end))")
NOTHING_SEEN, WHOLES = ("if left >= right", "if False"), "-(-all_left // block), all_right // block"
CHANGES = (
    *edits("", as_short_as_it_can_be=("max(whole_begin, begin)", "whole_begin",
        ORDERED_END, "max(whole_end, whole_begin)")),
    *edits("The window has one key too few before the queries. The first key that a query at p sees is p - before.",
        window_too_short=("first - before)", "first - before + 1)", "last - before)", "last - before + 1)")),
    *edits("The window has one key too many before the queries. The first key that a query at p sees is p - before.",
        window_too_long=("first - before)", "first - before - 1)", "last - before)", "last - before - 1)")),
    *edits("The key at p + after is missing; with after=0 it is the query's own. Keys up to it end at p + after + 1.",
        own_key_missing=(LAST_KEY, "last + after", ALL_LAST_KEY, "first + after"),
        own_key_missing__in_end=(LAST_KEY, "last + after"),
        own_key_missing__in_whole_end=(ALL_LAST_KEY, "first + after")),
    *edits("The key at p + after + 1 was taken for visible. The last key that a query at p sees is p + after.",
        one_key_later=(LAST_KEY, "last + after + 2", ALL_LAST_KEY, "first + after + 2")),
    *edits("`end` was rounded down, so the last keys are lost. A tile that holds one visible key is visited: round up.",
        end_rounded_down=(END, "right // block")),
    *edits("`end` is one tile too far where the visible keys fill their last tile. Round up: -(-keys // block).",
        end_too_far=(END, "right // block + 1"), end_too_far__by_one=(END, f"{END} + 1")),
    *edits("`begin` was rounded up, so the first keys are lost. A tile with one visible key is visited: round down.",
        begin_rounded_up=("left // block, -(-right", "-(-left // block), -(-right")),
    *edits("`whole_begin` was rounded down: the tile in which the last query's window begins needs the mask. Round up.",
        whole_begin_rounded_down=("-(-all_left // block)", "all_left // block")),
    *edits("`whole_begin` is one tile too late where a window begins with a tile. Round up: -(-keys // block).",
        whole_begin_too_late=("-(-all_left // block)", "all_left // block + 1")),
    *edits("`whole_end` was rounded up: the tile in which the keys of the first query end needs the mask. Round down.",
        whole_end_rounded_up=(WHOLE_END, "-(-all_right // block)")),
    *edits("`whole_end` was rounded up where the keys end. A cut tile is not whole: it has fewer than `block` keys.",
        cut_tile_whole=(WHOLE_END, f"(-(-all_right // block) if all_right == key_length else {WHOLE_END})")),
    *edits("`whole_begin` was computed from the first query. The last query's window begins latest, at last - before.",
        whole_from_the_first=(ALL_LEFT, LEFT)),
    *edits("`whole_end` was computed from the last query. The first query's keys end earliest, with first + after.",
        whole_to_the_last=(ALL_RIGHT, RIGHT)),
    *edits("`begin` is the last query's. The first query's window begins earliest.",
        begin_of_the_last=(LEFT, ALL_LEFT)),
    *edits("`end` is the first query's. The last query's keys end latest.", end_of_the_first=(RIGHT, ALL_RIGHT)),
    *edits("`begin` is not cut at key 0: there are no tiles before it.", not_cut_at_0=(LEFT, "first - before"),
        not_cut_at_0__nowhere=(LEFT, "first - before", ALL_LEFT, "last - before")),
    *edits("`end` is not cut at key_length: there are no keys after it.", not_cut_at_the_end=(RIGHT, LAST_KEY),
        not_cut_at_the_end__alone=(END, f"-(-({NO_AFTER} last + after + 1) // block)"),
        not_cut_at_the_end__nowhere=(RIGHT, LAST_KEY, ALL_RIGHT, ALL_LAST_KEY)),
    *edits("`whole_end` is not cut at key_length: a cut tile is not whole.", whole_not_cut=(ALL_RIGHT, ALL_LAST_KEY)),
    *edits("`before=0` was taken for no bound: Python takes 0 for false. Test `is None`.", zero_before=FALSE_BEFORE),
    *edits("`after=0` was taken for no bound: Python takes 0 for false. Test `is None`.", zero_after=FALSE_AFTER),
    *edits("0 was taken for no bound, before and after, because Python takes 0 for false. Test `is None` instead.",
        zeros_taken_for_none=(*FALSE_BEFORE, *FALSE_AFTER)),
    *edits("`before=None` was taken for 0 keys. It means that there is no bound on this side.",
        none_before_is_0=(START, f"before = before or 0\n{START}")),
    *edits("`after=None` was taken for 0 keys, as if all attention were causal. It means that there is no bound.",
        none_after_is_0=(START, f"after = after or 0\n{START}")),
    *edits("`after` was ignored, so each query sees keys only up to its own. It should see p - before … p + after.",
        always_causal=(START, f"after = 0\n{START}")),
    *edits("Tiles are visited although no query sees a key. Compare the ends of the range of visible keys.",
        nothing_seen=("if left >= right", "if end < begin")),
    *edits("Positions beyond the keys were moved onto them, where a query sees more. Cut the range of keys instead.",
        positions_moved=(START, f"first, last = max(first, 0), min(last, key_length - 1)\n{START}"),
        positions_moved__first=(START, f"first = max(first, 0)\n{START}"),
        positions_moved__last=(START, f"last = min(last, key_length - 1)\n{START}")),
    *edits("No tile was called whole, so all get a mask. Find the tiles of which every query sees every key.",
        never_whole=(f"{RETURN}whole_end, end", "return begin, begin, begin, end")),
    *edits("All visited tiles were called whole. A tile needs a mask if some query does not see one of its keys.",
        all_whole=(f"{RETURN}whole_end, end", "return begin, begin, end, end")),
    *edits("The first and the last visited tile, and no others, were taken for partial. A window may cut several tiles "
        "on either side, or none. Work out which keys every query sees.", ends_alone=(WHOLES, "begin + 1, end - 1"),
        ends_alone__where_bounded=(WHOLES, "begin + (before is not None), end - (after is not None)")),
    *edits("`whole_end` and `end` are the last tiles' numbers. They must be one more: the last visited is end - 1.",
        last_tile_included=(f"{RETURN}whole_end, end", f"{RETURN}max(whole_begin, whole_end - 1), max(begin, end - 1)"),
        last_tile_included__everywhere=(f"{RETURN}whole_end, end", f"{RETURN}whole_end - 1, end - 1")),
    *edits(NOT_IN_ORDER,  # the last, so that beside another error it is told as the second
        out_of_order=(*BEGIN_LEFT, *END_LEFT), out_of_order__begin=BEGIN_LEFT, out_of_order__end=END_LEFT,
        out_of_order__begin_alone=(*BEGIN_LEFT, *END_AT_LEAST), out_of_order__nothing_seen=NOTHING_SEEN,
        out_of_order__nothing_seen_at_least=(*BEGIN_AT_LEAST, *END_AT_LEAST, *NOTHING_SEEN),
        out_of_order__nowhere=(*BEGIN_LEFT, *END_LEFT, *NOTHING_SEEN)),
)  # fmt: skip

EXERCISE = Exercise(
    id="17.2", title="The tiles that a tile visits", entries=("key_tiles",), cases=bound_cases, oracle=told,
    contracts=(CONTRACT,), models=(model_of(told, CHANGES, (tiles_of,)),),
    mistakes=(
        Mistake("tile_by_tile", "A loop goes through tiles, keys or queries one by one, and there may be 2⁴⁰ of them. "
            "Find the ends of the two ranges of keys, and divide them by `block`.", first=True,
            when=lambda case, seen, got: seen.error is not None and "one by one" in seen.error.text),
        Mistake("out_of_order", NOT_IN_ORDER,
            when=lambda case, seen, got: isinstance(got, dict) and got.get("visited") == "not in order"),
    ),
    hints=(
        "Draw the keys that the first query sees, and below them those that the last one sees. Which keys does at "
        "least one query see, and which does every query see? Both are ranges: each has a first key and an end.",
        "The first range, of some query, goes from first - before to last + after. The second, of all queries, goes "
        "from last - before to first + after. Cut both at 0 and key_length. For a bound of None only the cut remains.",
        "Tiles that hold a key of the first range: round its beginning down and its end up. Tiles that lie within the "
        "second range: round its beginning up and its end down, which leaves out a cut tile.",
        "Finally, end = begin if the first range is empty. Then bring the ends of the second range into order: "
        "whole_begin = min(whole_begin, end), and then whole_end = max(whole_begin, whole_end).",
    ),
)  # fmt: skip
