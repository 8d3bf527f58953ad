"""A model of the programs of a product that share its tiles: their sums, a workspace with a slot each, and flags.

A program adds steps of one tile to sums in its registers. What another program is to finish it leaves in its slot of
the workspace: its four warps store a quarter each, at their own pace, and a barrier waits for all of them. A flag that
is up says that the slot can be read; nothing but the program's order makes that true. A slot that nobody has stored
holds poison. Programs begin in the order of their numbers as there is room, and one that waits keeps its room.

What the model leaves out: flags that are taken down again, and memory that shows stores in another order than they
were made; on a GPU a flag is raised with release and read with acquire.
"""


def play_stream_k(functions, programs, tiles, steps, room, step_ticks, store_ticks, events=None):
    """Plays all programs of a product; says how it ended and what became of each program's steps and of each tile.

    Args:
        functions: {"program": f}; f(number, programs, tiles, steps) gives the actions of a program in order:
            ("multiply", tile, begin, end)   adds the steps begin … end - 1 of a tile to the sums
            ("leave",)                       the four warps begin to store the sums to the program's slot
            ("barrier",)                     until all four have stored
            ("raise",)                       the program's flag is up
            ("wait", other)                  until the flag of another program is up
            ("add", other)                   adds that program's slot to the sums
            ("store", tile)                  the sums are the result of this tile
            After "leave" and "store" the next "multiply" or "add" begins new sums.
        programs, tiles, steps: what the function is given; a tile has so many steps.
        room: how many programs run at once.
        step_ticks: what a step takes; program p takes step_ticks[p % their number]. Every other action takes 1 tick.
        store_ticks: what each of the four warps takes to store its quarter.
        events: a list to which (program, action, begin, end) is appended for every action, with its ticks.

    Returns:
        A dict: ending, "finished" or who waits for what for ever or asks for what does not exist; steps, for each
        program the numbers tile · steps + step that it has done, as text; tiles, for each "whole" or what is wrong with
        its result; parts, who left more than one.

    Raises:
        ValueError: an action that does not exist, or actions that are no list.
    """
    # One function without helpers outside, since the checker sends its source alone to another process.
    slots = [[None] * 4 for _ in range(programs)]  # four quarters; None is poison
    flags, left = [False] * programs, [0] * programs
    sums, kept = [None] * programs, [False] * programs  # sums: {number of a step: how often}; kept: stored or left
    done = [[] for _ in range(programs)]
    results = {tile: [] for tile in range(tiles)}
    landing = []  # [tick, program, warp, content]
    actions, current, busy, active = {}, {}, {}, []
    begun, tick, played = 0, 0, 0

    def known(action, who):
        shapes = {"multiply": 4, "leave": 1, "barrier": 1, "raise": 1, "wait": 2, "add": 2, "store": 2}
        good = isinstance(action, (tuple, list)) and len(action) > 0 and isinstance(action[0], str)
        if not (good and shapes.get(action[0]) == len(action) and all(hasattr(n, "__index__") for n in action[1:])):
            raise ValueError(
                f"the action {action!r} of program {who} does not exist; allowed are ('multiply', tile, begin, end), "
                "('leave',), ('barrier',), ('raise',), ('wait', other), ('add', other) and ('store', tile), with whole "
                "numbers"
            )
        return action

    def impossible(who, action):
        """Why an action names what does not exist; None where all of it does."""
        if action[0] in ("wait", "add") and not 0 <= action[1] < programs:
            return f"program {who} asks for program {action[1]}, and there are 0 … {programs - 1}"
        if action[0] in ("multiply", "store") and not 0 <= action[1] < tiles:
            return f"program {who} works on tile {action[1]}, and there are 0 … {tiles - 1}"
        if action[0] == "multiply" and not 0 <= action[2] <= action[3] <= steps:
            return f"program {who} multiplies steps {action[2]} … {action[3] - 1} of a tile that has 0 … {steps - 1}"
        return None

    def following(who):
        action = next(actions[who], None)
        return None if action is None else known(action, who)

    def added(who, content):
        """Adds to the sums, or begins new ones; poison stays poison."""
        if sums[who] is None or kept[who]:
            sums[who], kept[who] = {}, False
        for number, times in content.items():
            sums[who][number] = sums[who].get(number, 0) + times

    def read(slot):
        if any(quarter is None for quarter in slot) or any(quarter != slot[0] for quarter in slot):
            return {"poison": 1}
        return slot[0]

    def perform(who, action):
        kind = action[0]
        if kind == "multiply":
            numbers = range(action[1] * steps + action[2], action[1] * steps + action[3])
            added(who, dict.fromkeys(numbers, 1))
            done[who].extend(numbers)
            return max(1, len(numbers) * step_ticks[who % len(step_ticks)])
        if kind == "leave":
            content = {"poison": 1} if sums[who] is None else dict(sums[who])
            landing.extend([tick + ticks, who, warp, content] for warp, ticks in enumerate(store_ticks))
            kept[who], left[who] = True, left[who] + 1
        elif kind == "raise":
            flags[who] = True
        elif kind == "add":
            added(who, read(slots[action[1]]))
        elif kind == "store":
            results[action[1]].append({"poison": 1} if sums[who] is None else dict(sums[who]))
            kept[who] = True
        return 1

    def listed(numbers):
        return ", ".join(map(str, sorted(numbers)[:8])) + (" …" if len(numbers) > 8 else "")

    def told(tile):
        if len(results[tile]) != 1:
            return "never stored" if not results[tile] else f"stored {len(results[tile])} times"
        got, own = results[tile][0], set(range(tile * steps, (tile + 1) * steps))
        if "poison" in got:
            return "a part was read that was not stored yet"
        foreign, missing = got.keys() - own, own - got.keys()
        twice = [number for number in own if got.get(number, 0) > 1]
        if foreign:
            return "steps of other tiles are in it"
        if missing:
            return f"lacks the steps {listed([number - tile * steps for number in missing])}"
        return (
            f"has the steps {listed([number - tile * steps for number in twice])} more than once" if twice else "whole"
        )

    def share(numbers):
        numbers = sorted(numbers)
        if not numbers:
            return "none"
        whole = len(set(numbers)) == len(numbers) and numbers[-1] - numbers[0] + 1 == len(numbers)
        return f"{numbers[0]} to {numbers[-1]}" if whole else listed(numbers)

    def result(ending):
        many = [f"program {who} left {count}" for who, count in enumerate(left) if count > 1]
        return {
            "ending": ending,
            "steps": {f"program {who}": share(numbers) for who, numbers in enumerate(done)},
            "tiles": {f"tile {tile}": told(tile) for tile in range(tiles)},
            "parts": ", ".join(many) or "at most one of each program",
        }

    while active or begun < programs:
        moved = False
        for landed in [one for one in landing if one[0] <= tick]:
            landing.remove(landed)
            slots[landed[1]][landed[2]] = landed[3]
        while begun < programs and len(active) < room:
            given = functions["program"](begun, programs, tiles, steps)
            if given is None or not hasattr(given, "__iter__"):
                raise ValueError(
                    f"program({begun}, …) returned {given!r}; it yields actions, or returns a list of them"
                )
            actions[begun], busy[begun] = iter(given), tick
            current[begun] = following(begun)
            active.append(begun)
            begun, moved = begun + 1, True
        for who in list(active):
            action = current[who]
            storing = any(one[1] == who for one in landing)
            if busy[who] > tick:
                continue
            if action is None:
                if not storing:  # a program ends when all its warps do
                    active.remove(who)
                    moved = True
                continue
            if impossible(who, action):
                return result(f"impossible: {impossible(who, action)}")
            if (action[0] == "wait" and not flags[action[1]]) or (action[0] == "barrier" and storing):
                continue
            busy[who] = tick + perform(who, action)
            if events is not None:
                events.append((who, tuple(action), tick, busy[who]))
            current[who], moved, played = following(who), True, played + 1
        if played > 4_000:
            return result("endless")
        later = [until for who, until in busy.items() if who in active and until > tick]
        later += [landed[0] for landed in landing]
        if later:
            tick = min(later) if min(later) > tick else tick
        elif not moved:
            waiting = [f"program {who} waits for program {current[who][1]}" for who in active if current[who]]
            unbegun = [current[who][1] for who in active if current[who] and current[who][1] >= begun]
            why = f"; there is no room for program {unbegun[0]}" if unbegun else ""
            return result("deadlock: " + ", ".join(waiting[:4]) + why)
    return result("finished")
