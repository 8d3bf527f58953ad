"""Wrong answers to exercise 18.3, and unusual right ones."""

from tests.submissions.edits import changed

HEAD = "# Exercise 18.3 · Stream-K: the plan and the repair\n"
LEAVE, BARRIER = '            yield ("leave",)\n', '            yield ("barrier",)\n'
RAISE = '            yield ("raise",)\n'
WAIT, ADD = '                yield "wait", other\n', '                yield "add", other\n'
SHARE = "return of * each + min(of, more)"
OWNER, BEFORE = "if end == (tile + 1) * steps", "while start > tile * steps"
MULTIPLY = "start - tile * steps, end - tile * steps"
PART = LEAVE + BARRIER + RAISE
FROM_THE_FIRST = """def program(number, programs, tiles, steps):
    first = [p * (tiles * steps // programs) + min(p, tiles * steps % programs) for p in range(programs + 1)]
    actions, begin = [], first[number]
    while begin < first[number + 1]:
        tile, step = divmod(begin, steps)
        end = min(first[number + 1], (tile + 1) * steps)
        actions.append(("multiply", tile, step, end - tile * steps))
        if end % steps:
            actions += [("leave",), ("barrier",), ("raise",)]
        else:
            for other in range(number):
                if first[other + 1] > tile * steps and first[other] < end and first[other] != first[other + 1]:
                    actions += [("wait", other), ("add", other)]
            actions.append(("store", tile))
        begin = end
    return actions
"""


def wrong(*replacements):
    return changed("18.3", *replacements)


WRONG = {
    # ROCm/triton#745
    "raised_before_the_barrier": wrong((BARRIER + RAISE, RAISE + BARRIER)),
    "raised_before_the_barrier__none": wrong((BARRIER, "")),
    "raised_before_leaving": wrong((PART, RAISE + LEAVE + BARRIER)),
    "raised_before_the_barrier__in_front": wrong((LEAVE + BARRIER, BARRIER + LEAVE)),
    "never_raised": wrong((RAISE, "")),
    "never_left": wrong((LEAVE, "")),
    "not_waited": wrong((WAIT, "")),
    "not_waited__added_first": wrong((WAIT + ADD, ADD + WAIT)),
    "not_added": wrong((ADD, "")),
    "added_twice": wrong((ADD, ADD + ADD)),
    "middle_parts_forgotten": wrong((BEFORE, "if start > tile * steps")),
    "middle_parts_forgotten__the_first_alone": wrong((BEFORE, "if start > tile * steps"),
        ("other -= 1\n", "other = next(p for p in range(number) if first_step(p + 1) > tile * steps)\n")),
    "too_many_parts": wrong((
        BEFORE, "if start == tile * steps:\n                other = 0\n            while other > 0")),
    "own_slot_added": wrong(("other = number\n", "other = number + 1\n")),
    "owner_of_the_first_step": wrong((OWNER, "if start == tile * steps"), (BEFORE, "while end < (tile + 1) * steps"),
        ("other -= 1", "other += 1"), ("start = first_step(other)", "end = first_step(other + 1)")),
    "owner_of_the_first_step__from_the_first_tile": HEAD + """def program(number, programs, tiles, steps):
    each, more = divmod(tiles * steps, programs)

    def first(p):
        return p * each + min(p, more)

    begin, end = first(number), first(number + 1)
    while begin < end:
        tile = begin // steps
        stop = min(end, (tile + 1) * steps)
        yield "multiply", tile, begin - tile * steps, stop - tile * steps
        if begin > tile * steps:
            yield ("leave",)
            yield ("barrier",)
            yield ("raise",)
        else:
            other, reached = number, stop
            while reached < (tile + 1) * steps:
                other += 1
                yield "wait", other
                yield "add", other
                reached = first(other + 1)
            yield "store", tile
        begin = stop
""",
    "shared_never_stored": wrong((OWNER, "if start == tile * steps and end == (tile + 1) * steps")),
    "parts_stored": wrong((BEFORE, "while False"), (OWNER, "if True")),
    "not_added__nor_waited": wrong((BEFORE, "while False")),
    "whole_tile_left": wrong((OWNER, "if end == (tile + 1) * steps and (start > tile * steps)")),
    "remainder_dropped": wrong((SHARE, "return of * each")),
    "uneven": wrong((SHARE, "return min(tiles * steps, of * -(-tiles * steps // programs))")),
    "uneven__last": wrong((SHARE, "return of * each if of < programs else tiles * steps")),
    "others_have_one_more": wrong((SHARE, "return of * each + max(0, of - (programs - more))")),
    "others_have_one_more__spread": wrong((SHARE, "return of * tiles * steps // programs")),
    "tiles_shared_out": wrong((SHARE, "return steps * (of * (tiles // programs) + min(of, tiles % programs))")),
    "one_step_off": wrong(("first_step(number + 1)\n", "first_step(number + 1) - 1\n")),
    "steps_of_all_tiles": wrong((MULTIPLY, "start, end")),
    "names_what_does_not_exist": wrong((MULTIPLY, "start - tile * steps, end - tile * steps + steps")),
    "end_included": wrong((MULTIPLY, "start - tile * steps, end - tile * steps - 1")),
    "whole_tile_each": wrong((MULTIPLY, "0, steps")),
    "one_tile_alone": wrong(("while begin < end", "if begin < end")),
    "wrong_owner": wrong((OWNER, "if end != (tile + 1) * steps")),
    "wrong_program": wrong(("other -= 1", "other += 1")),
    "waits_for_a_later_program": wrong((OWNER, "if end < (tile + 1) * steps and number + 1 < programs:\n"
        '            yield "wait", number + 1\n        if end == (tile + 1) * steps')),
    "waits_forever": wrong((WAIT, '                yield "wait", number\n')),
    "other_shares": wrong(("def first_step(of)", "programs = min(programs, tiles)\n    if number >= programs:\n        "
                           "return\n\n    def first_step(of)")),
    "not_stored_once": wrong(('            yield "store", tile\n', '            if other < number:\n'
                              '                yield "store", tile\n')),
    "slot_read_too_early__far_away": wrong((WAIT, f"                if number - other < 4:\n    {WAIT}")),
    "several_parts": wrong(('            yield "store", tile\n', f'            yield "store", tile\n{PART}')),
    "steps_not_consecutive": HEAD + """def program(number, programs, tiles, steps):
    for tile in range(tiles):
        mine = range(number, steps, programs)
        for step in mine:
            yield "multiply", tile, step, step + 1
        if mine:
            yield "store", tile
""",
    "slot_read_too_early": wrong((LEAVE, f'            if tile % 2:\n    {RAISE}{LEAVE}')),
    "raised_before_the_barrier__and_middle_parts_forgotten": wrong((BARRIER + RAISE, RAISE + BARRIER),
        (BEFORE, "if start > tile * steps")),
}  # fmt: skip

UNUSUAL = {
    "shares cut by NumPy": HEAD + """def program(number, programs, tiles, steps):
    shares = np.array_split(np.arange(tiles * steps), programs)
    for tile in np.unique(shares[number] // steps)[::-1]:
        mine = shares[number][shares[number] // steps == tile] % steps
        yield "multiply", tile, mine[0], mine[-1] + 1
        if mine[-1] < steps - 1:
            yield from (("leave",), ("barrier",), ("raise",))
            continue
        for other in range(number - 1, -1, -1):
            if (shares[other] // steps == tile).any():
                yield "wait", other
                yield "add", other
        yield "store", tile
""",
    "from the first tile to the last, as a list": HEAD + FROM_THE_FIRST,
    "the others' parts first, own steps behind": HEAD + FROM_THE_FIRST.replace(
        '''        actions.append(("multiply", tile, step, end - tile * steps))
''', '''        own = [("multiply", tile, step, end - tile * steps)]
''').replace("            actions += [(\"leave\",)", "            actions += [*own, (\"leave\",)").replace(
        "            actions.append((\"store\", tile))", "            actions += [*own, (\"store\", tile)]"),
    "step by step, and a part that goes from program to program": HEAD + """def program(number, programs, tiles, steps):
    total = tiles * steps
    share = [total // programs + (p < total % programs) for p in range(programs)]
    at = sum(share[:number])
    last = at + share[number]
    while at < last:
        tile, step = at // steps, at % steps
        until = min(last, tile * steps + steps)
        for one in range(at, until):
            yield ["multiply", tile, one - tile * steps, one - tile * steps + 1]
        if step and share[number]:
            yield ["wait", number - 1]
            yield ["add", number - 1]
        if until == tile * steps + steps:
            yield ["store", tile]
        else:
            yield ["leave"]
            yield ["barrier"]
            yield ["raise"]
        at = until
""",
    "flags raised by everybody, and barriers more than needed": wrong(
        ("    begin, end = first_step(number)", "    yield (\"barrier\",)\n    begin, end = first_step(number)"),
        ('            yield "store", tile\n', '            yield "store", tile\n            yield ("barrier",)\n')),
}  # fmt: skip
