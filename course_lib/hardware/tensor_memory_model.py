"""A model of who reads and writes tensor memory while attention's forward runs on Blackwell, and of what joins them.

Tensor memory has 512 columns of 128 lanes, 4 bytes each. Two tiles of 128 queries use it, and four roles do. The
product warp alone is not given here:

    product warp        starts products, scores S = Q Kᵀ and output O += P V, and goes on at once
    tensor cores        run what it starts in that order, one after the other
    softmax group       one for each tile; for each block it reads S, then writes the weights P
    correction group    one for both tiles; before a tile's next output it rescales O, from block 1 on. It begins when
                        the softmax has read the scores of that block (then it knows the maximum) and the output of the
                        block before is there, and serves whoever is ready first

The product warp waits by counting, and not by the parity of a phase; chapter 9's ring has those. What the model leaves
out: the loads of keys and values, the reading of O at the end, and that each thread has its own lane.
"""


def play_tensor_memory(
    functions, plan, blocks, product_ticks, softmax_ticks, correction_ticks, most_ticks=None, events=None, order=None
):
    """Plays a product warp against the other roles; says how it ended and which products ran.

    Args:
        functions: {"product_warp": f}; f(blocks) gives the steps of the warp in order:
            ("scores", tile, block)             start the product that writes S of a tile
            ("output", tile, block)             start the product that reads P and adds to O; block 0 overwrites O
            ("wait", "weights", tile, block)    until the softmax has written P
            ("wait", "corrected", tile, block)  until O is rescaled; of block 0 it passes at once
        plan: {"S0": (first column, columns), "P0": …, "O0": …, "S1": …, "P1": …, "O1": …}.
        blocks: blocks of keys, the same for both tiles.
        product_ticks, softmax_ticks: lists of pairs: what the scores and the output take, and what the softmax takes to
            read and to write. Entry (2 · block + tile) % their number is a tile's block's.
        correction_ticks: a list of numbers, chosen likewise.
        most_ticks: what the whole may take; None where that is not judged.
        events: a list to which (who, what, tile, block, begin, end) is appended: "tensor cores" "scores" or "output",
            "softmax 0" or "softmax 1" "read" or "write", "correction" "rescale".
        order: in place of ticks, a list of numbers: of all that is under way, the one of that number ends next. Where
            the list ends first, the result has "open", how many are under way, and "state", as text.

    Returns:
        A dict. ending: "finished", "deadlock at …", "impossible: …", "endless", or the first access that meets another
        one, as "output 0, block 2 writes columns 256-383 while correction 0, block 2 writes", or that finds something
        else than it needs, as "output 0, block 2 finds S0 of block 2 in columns 64-127, not P0 of block 2". products:
        for each tile the last eight that began, as "S0 O0 S1 O1". time: "in time" or "too long", or "not judged" where
        the play did not finish.

    Raises:
        ValueError: a step that does not exist, or a function that gives none.
    """
    # One function without helpers outside, since the checker sends its source alone to another process.
    holds = ["nothing"] * 512  # what each column holds
    done, queue, running = set(), [], []  # done: (what, tile, block); running: dicts
    turn, corrected = [0, 0], [0, 0]  # the block at which each softmax group is, and the last that was corrected
    reading, writing = [True, True], [False, False]  # what each softmax group does next, and whether it is at work
    choices = None if order is None else list(order)
    tick, taken = 0, 0
    given = functions["product_warp"](blocks)
    if given is None or not hasattr(given, "__iter__"):
        raise ValueError(f"product_warp({blocks}) returned {given!r}; it yields steps, or returns a list of them")
    steps = iter(given)

    def known(step):
        good = isinstance(step, (tuple, list)) and len(step) in (3, 4) and (step[0] == "wait") == (len(step) == 4)
        good = good and isinstance(step[-3], str) and step[-3] in (("weights", "corrected") if len(step) == 4 else
                                                                   ("scores", "output"))  # fmt: skip
        if not good or not all(hasattr(number, "__index__") for number in step[-2:]):
            raise ValueError(
                f"the step {step!r} does not exist; allowed are ('scores', tile, block), ('output', tile, block), "
                "('wait', 'weights', tile, block) and ('wait', 'corrected', tile, block), with whole numbers"
            )
        return step

    def following():
        step = next(steps, None)
        return None if step is None else known(step)

    def columns(name):
        return set(range(plan[name][0], plan[name][0] + plan[name][1]))

    def span(numbers):
        return f"columns {min(numbers)}-{max(numbers)}"

    def start(who, what, tile, block, name, ticks, needs=None, makes=None):
        """Begins an access; what is wrong with it, or None. `needs` and `makes`: (region, content)."""
        reads = columns(needs[0]) if needs else set()
        writes = columns(makes[0]) if makes else set()
        for other in running:
            if writes & (other["reads"] | other["writes"]):
                met = writes & (other["reads"] | other["writes"])
                verb = "writes" if met & other["writes"] else "reads"
                return f"{name} writes {span(met)} while {other['name']} {verb}"
            if reads & other["writes"]:
                return f"{name} reads {span(reads & other['writes'])} while {other['name']} writes"
        if needs:
            wrong = {column for column in reads if holds[column] != needs[1]}
            if wrong:
                return f"{name} finds {holds[min(wrong)]} in {span(wrong)}, not {needs[1]}"
        if what == "output" and block > 0:
            wrong = {column for column in writes if holds[column] != f"O{tile} rescaled for block {block}"}
            if wrong:
                return f"{name} finds {holds[min(wrong)]} in {span(wrong)}, not rescaled"
        running.append({"who": who, "what": what, "tile": tile, "block": block, "name": name, "end": tick + ticks,
                        "begin": tick, "reads": reads, "writes": writes, "makes": makes})  # fmt: skip
        return None

    def begin_what_can():
        """Starts one access, if one can start: whether, and what is wrong with it."""
        if queue and not any(other["who"] == "tensor cores" for other in running):
            what, tile, block = queue.pop(0)
            began[tile].append(f"{what[0].upper()}{block}")
            ticks = product_ticks[(2 * block + tile) % len(product_ticks)][what == "output"]
            name = f"{what} {tile}, block {block}"
            if what == "scores":
                makes = f"S{tile}", f"S{tile} of block {block}"
                return True, start("tensor cores", what, tile, block, name, ticks, None, makes)
            needs = f"P{tile}", f"P{tile} of block {block}"
            makes = f"O{tile}", f"O{tile} up to block {block}"
            return True, start("tensor cores", what, tile, block, name, ticks, needs, makes)
        for tile in (0, 1):
            block = turn[tile]
            if writing[tile] or block == blocks or ("scores", tile, block) not in done:
                continue
            ticks = softmax_ticks[(2 * block + tile) % len(softmax_ticks)]
            name, writing[tile] = f"softmax {tile}, block {block}", True
            if reading[tile]:
                needs = f"S{tile}", f"S{tile} of block {block}"
                return True, start(f"softmax {tile}", "read", tile, block, name, ticks[0], needs)
            makes = f"P{tile}", f"P{tile} of block {block}"
            return True, start(f"softmax {tile}", "write", tile, block, name, ticks[1], None, makes)
        if not any(other["who"] == "correction" for other in running):
            ready = [(ready_at[tile, corrected[tile] + 1], tile) for tile in (0, 1)
                     if (tile, corrected[tile] + 1) in ready_at]  # fmt: skip
            if ready:
                tile = min(ready)[1]
                block = corrected[tile] = corrected[tile] + 1
                name = f"correction {tile}, block {block}"
                needs = f"O{tile}", f"O{tile} up to block {block - 1}"
                makes = f"O{tile}", f"O{tile} rescaled for block {block}"
                ticks = correction_ticks[(2 * block + tile) % len(correction_ticks)]
                return True, start("correction", "rescale", tile, block, name, ticks, needs, makes)
        return False, None

    def finish(one):
        running.remove(one)
        tile, block, what = one["tile"], one["block"], one["what"]
        if one["makes"]:
            for column in one["writes"]:
                holds[column] = one["makes"][1]
        if what in ("read", "write"):
            writing[tile], reading[tile] = False, what == "write"
            turn[tile] += what == "write"
        done.add(({"read": "maximum", "write": "weights", "rescale": "corrected"}.get(what, what), tile, block))
        for reached in (block, block + 1):  # what a correction of this tile waits for
            if reached > 0 and {("maximum", tile, reached), ("output", tile, reached - 1)} <= done:
                ready_at.setdefault((tile, reached), tick)
        if events is not None:
            events.append((one["who"], what, tile, block, one["begin"], tick))

    def result(ending):
        time = "not judged"
        if ending == "finished" and most_ticks is not None:
            time = "in time" if tick <= most_ticks else "too long"
        ran = {f"tile {tile}": " ".join(names[-8:]) or "none" for tile, names in enumerate(began)}
        return {"ending": ending, "products": ran, "time": time}

    ready_at = {}  # (tile, block): since when a correction can begin
    began = [], []  # the products of each tile
    step = following()
    while True:
        moved = False
        while step is not None:
            what, tile, block = step[-3:]
            if tile not in (0, 1) or not 0 <= block < blocks:
                return result(f"impossible: {tuple(step)!r}; blocks are 0 to {blocks - 1}")
            free = what == "corrected" and block == 0
            if step[0] == "wait" and not free and (what, tile, block) not in done:
                break
            if step[0] != "wait":
                queue.append((what, int(tile), int(block)))
            step, taken, moved = following(), taken + 1, True
            if taken > 60 * blocks + 400:
                return result("endless")
        one_began, fault = begin_what_can()
        if fault:
            return result(fault)
        if one_began or moved:
            continue
        if not running:
            break
        if choices is None:
            tick = min(one["end"] for one in running)
            for one in [one for one in running if one["end"] <= tick]:
                finish(one)
        elif choices:
            tick += 1
            finish(running[choices.pop(0)])
        else:
            names = sorted(one["name"] + one["what"] for one in running)
            waiting = [tile for _, (tile, block) in sorted((at, who) for who, at in ready_at.items())
                       if block > corrected[tile]]  # fmt: skip
            state = f"{taken} {queue} {names} {waiting} {sorted(done)}"
            return result("open") | {"open": len(running), "state": state}
    if step is None:
        return result("finished")
    return result(f"deadlock at ('wait', '{step[1]}', {int(step[2])}, {int(step[3])})")
