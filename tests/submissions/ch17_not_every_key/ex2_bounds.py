"""Wrong answers to exercise 17.2, and unusual right ones."""

from tests.submissions.edits import changed, edited

START, STOP = "max(0, left_query - before)", "min(key_length, right_query + after + 1)"
BEGIN, END, EMPTY = "begin = start // block", "-(-stop // block)", " if start < stop else begin"
WHOLE_BEGIN, WHOLE_END = "min(-(-start // block), end)", "max(stop // block, whole_begin)"
WHOLE, RETURN = "keys_between(last, first)", "return begin, whole_begin, whole_end, end"


def wrong(*replacements):
    return changed("17.2", *replacements)


def end_from(keys):
    """`end` by another rule than `whole_end`, which stays."""
    return wrong((END, keys))


# Another's cell, which computes all four numbers from the keys and brings them into order at the end.
ANOTHER = """# Exercise 17.2 · The tiles that a tile visits
def key_tiles(first, last, key_length, before, after, block):
    lo = 0 if before is None else max(0, first - before)
    hi = key_length if after is None else min(key_length, last + after + 1)
    all_lo = 0 if before is None else max(0, last - before)
    all_hi = key_length if after is None else min(key_length, first + after + 1)
    begin, end = lo // block, (hi + block - 1) // block
    whole_begin, whole_end = (all_lo + block - 1) // block, all_hi // block
    if lo >= hi:
        end = begin
    whole_begin = max(begin, min(whole_begin, end))
    whole_end = max(whole_begin, min(whole_end, end))
    return begin, whole_begin, whole_end, end
"""
ORDERED = """    whole_begin = max(begin, min(whole_begin, end))
    whole_end = max(whole_begin, min(whole_end, end))
"""

WRONG = {
    # Two errors: the numbers are not in order either, which is told as the second.
    "own_key_missing__and_out_of_order": edited(ANOTHER, ("after + 1", "after"), (ORDERED, "")),
    "whole_from_the_first__and_out_of_order": edited(ANOTHER, ("last - before", "first - before"),
        (ORDERED, ORDERED.splitlines(True)[1])),
    "end_rounded_down__and_out_of_order": edited(ANOTHER, ("(hi + block - 1) // block", "hi // block"),
        ("    if lo >= hi:\n        end = begin\n", "")),
    # hf#39408, zml#763, mlx-lm#390: the window's number of keys, or one less.
    "window_too_long": wrong((START, "max(0, left_query - before - 1)")),
    "window_too_short": wrong((START, "max(0, left_query - before + 1)")),
    "own_key_missing": wrong((STOP, "min(key_length, right_query + after)")),
    "own_key_missing__in_end": wrong((BEGIN, "stop = stop if after is None else min(key_length, last + after)\n    "
                                             + BEGIN)),
    "one_key_later": wrong((STOP, "min(key_length, right_query + after + 2)")),
    "end_rounded_down": end_from("stop // block"),
    "end_too_far": end_from("(stop // block + 1)"),
    "end_too_far__always": end_from("(-(-stop // block) + 1)"),
    "begin_rounded_up": wrong((BEGIN, "begin = -(-start // block)"), (END, "max(begin, -(-stop // block))")),
    "whole_begin_rounded_down": wrong((WHOLE_BEGIN, "min(max(start // block, begin), end)")),
    "whole_begin_too_late": wrong((WHOLE_BEGIN, "min(start // block + 1, end)")),
    "whole_end_rounded_up": wrong((WHOLE_END, "min(max(-(-stop // block), whole_begin), end)")),
    # pytorch#159247, #160861: the key length is no multiple of the block, and the last tile gets no mask.
    "cut_tile_whole": wrong((WHOLE_END, "min(max(-(-stop // block) if stop == key_length else stop // block, "
                                         "whole_begin), end)")),
    "whole_from_the_first": wrong((WHOLE_BEGIN, "min(-(-(0 if before is None else max(0, first - before)) // block), "
                                                "end)")),
    "whole_to_the_last": wrong((WHOLE, "keys_between(last, last)")),
    "begin_of_the_last": wrong(("keys_between(first, last)", "keys_between(last, last)")),
    "end_of_the_first": wrong(("keys_between(first, last)", "keys_between(first, first)")),
    "not_cut_at_0": wrong((START, "left_query - before")),
    "not_cut_at_the_end": wrong((END, "-(-(key_length if after is None else last + after + 1) // block)")),
    "not_cut_at_the_end__nowhere": wrong((STOP, "right_query + after + 1")),
    "whole_not_cut": wrong((WHOLE_END, "max((stop if after is None else first + after + 1) // block, whole_begin)")),
    "zero_before": wrong(("0 if before is None else", "0 if not before else")),
    "zero_after": wrong(("if after is None else", "if not after else")),
    "zeros_taken_for_none": wrong(("0 if before is None else", "0 if not before else"),
                                  ("if after is None else", "if not after else")),
    "none_before_is_0": wrong(("    def keys", "    before = before or 0\n\n    def keys")),
    "none_after_is_0": wrong(("    def keys", "    after = after or 0\n\n    def keys")),
    "always_causal": wrong(("    def keys", "    after = 0\n\n    def keys")),
    "nothing_seen": wrong((EMPTY, " if -(-stop // block) > begin else begin")),
    "out_of_order": wrong((EMPTY, "")),
    "out_of_order__whole": wrong((WHOLE_BEGIN, "-(-start // block)"),
                                 (WHOLE_END, "stop // block")),
    "out_of_order__whole_end": wrong((WHOLE_END, "stop // block")),
    "positions_moved": wrong((
        "    def keys", "    first, last = max(first, 0), min(last, key_length - 1)\n\n    def keys")),
    "positions_moved__first": wrong(("    def keys", "    first = max(first, 0)\n\n    def keys")),
    "positions_moved__last": wrong(("    def keys", "    last = min(last, key_length - 1)\n\n    def keys")),
    "never_whole": wrong((RETURN, "return begin, end, end, end")),
    "all_whole": wrong((RETURN, "return begin, begin, end, end")),
    "ends_alone": wrong((RETURN, "whole_begin = min(begin + 1, end)\n"
                                 "    return begin, whole_begin, max(whole_begin, end - 1), end")),
    "ends_alone__where_bounded": wrong((
        RETURN, "whole_begin = min(begin + (before is not None), end)\n"
                "    return begin, whole_begin, max(whole_begin, end - (after is not None)), end")),
    "last_tile_included": wrong((RETURN, "return begin, whole_begin, max(whole_begin, whole_end - 1), "
                                         "max(begin, end - 1)")),
    # vllm#50776, sglang#34462: a test for every tile instead of a bound.
    "tile_by_tile": wrong((BEGIN, "begin = 0\n    while (begin + 1) * block <= start:\n        begin += 1")),
    "tile_by_tile__queries": """# Exercise 17.2 · The tiles that a tile visits
def key_tiles(first, last, key_length, before, after, block):
    starts, stops = [], []
    for p in range(first, last + 1):
        starts.append(0 if before is None else max(0, p - before))
        stops.append(key_length if after is None else min(key_length, p + after + 1))
    seen = [(a, b) for a, b in zip(starts, stops) if a < b]
    if not seen:
        return 0, 0, 0, 0
    begin, end = min(a for a, b in seen) // block, -(-max(b for a, b in seen) // block)
    whole_begin = min(max(begin, -(-max(starts) // block)), end)
    return begin, whole_begin, min(end, max(whole_begin, min(stops) // block)), end
""",
}

UNUSUAL = {
    "in order at the end": ANOTHER,
    "infinities for no bound": """# Exercise 17.2 · The tiles that a tile visits
def key_tiles(first, last, key_length, before, after, block):
    before = math.inf if before is None else before
    after = math.inf if after is None else after
    some = max(0, first - before), min(key_length, last + after + 1)
    each = max(0, last - before), min(key_length, first + after + 1)
    if some[0] >= some[1]:
        return [0, 0, 0, 0]
    begin, end = int(some[0] // block), int(math.ceil(some[1] / block))
    a, b = int(math.ceil(each[0] / block)), int(each[1] // block)
    return [begin, a, b, end] if a < b else [begin, begin, begin, end]
""",
    "tiles by their first and last key": """# Exercise 17.2 · The tiles that a tile visits
def key_tiles(first, last, key_length, before, after, block):
    far = 1 << 60
    low, high = (far if side is None else side for side in (before, after))
    newest = min(last + high, key_length - 1)
    oldest = max(first - low, 0)
    if newest < oldest:
        return 7, 7, 7, 7
    begin, end = oldest // block, newest // block + 1
    tiles = key_length // block
    first_whole = (max(last - low, 0) + block - 1) // block
    past_whole = min((first + high + 1) // block, tiles)
    if past_whole <= first_whole:
        return begin, end, end, end
    return begin, first_whole, past_whole, end
""",
    "divmod, and the cut tile taken away": changed(
        "17.2", (END, "sum(map(bool, divmod(stop, block)[1:])) + stop // block"),
        (WHOLE_END, "max(min(stop, key_length - key_length % block) // block, whole_begin)")),
    "a loop over three numbers": changed(
        "17.2", (RETURN, "numbers = [begin, whole_begin, whole_end, end]\n"
                         "    for i in range(1, 4):\n        numbers[i] = max(numbers[i - 1], numbers[i])\n"
                         "    return tuple(numbers)")),
}
