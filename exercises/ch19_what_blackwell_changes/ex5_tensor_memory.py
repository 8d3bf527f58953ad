"""Exercise 19.5: who lies where in tensor memory, and a product warp that is played on a model of it."""

from __future__ import annotations

import re

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.hardware.tensor_memory_model import play_tensor_memory

PLAN = {"S0": (0, 128), "P0": (64, 64), "O0": (256, 128), "S1": (128, 128), "P1": (192, 64), "O1": (384, 128)}


def laid_out(functions, tiles, keys, value_dim):
    """What a plan says, but for where its regions lie. It is sent to the worker by its source alone."""
    given = functions["plan"](tiles, keys, value_dim)
    if given is None:
        return {"plan": "None", "columns": "none", "outside": "nothing", "shared": "nothing"}
    names = [f"{name}{tile}" for tile in range(tiles) for name in "SPO"]
    if not isinstance(given, dict) or set(given) != set(names):
        raise TypeError(f"plan returned {given!r}; it must return None or a dict with the keys {', '.join(names)}")
    for pair in given.values():
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(hasattr(n, "__index__") for n in pair)):
            raise TypeError(f"plan returned {given!r}; each region is (first column, columns), two whole numbers")
    regions = {name: range(given[name][0], given[name][0] + max(0, given[name][1])) for name in names}
    pairs = [
        f"{one} and {other}"
        for number, one in enumerate(names)
        for other in names[number + 1 :]
        if max(regions[one].start, regions[other].start) < min(regions[one].stop, regions[other].stop)
        and not (one[1:] == other[1:] and {one[0], other[0]} == {"S", "P"})
    ]
    outside = [name for name in names if given[name][0] < 0 or regions[name].stop > 512]
    return {
        "plan": "a plan",
        "columns": ", ".join(f"{name} {int(given[name][1])}" for name in names),
        "outside": ", ".join(outside) or "nothing",
        "shared": ", ".join(pairs[:8]) or "nothing",
    }


def plan(tiles, keys, value_dim):
    scores, weights, output = keys, keys // 2, value_dim
    if tiles * (scores + output) > 512:
        return None
    regions = {}
    for tile in range(tiles):
        first = tile * (scores + output)
        regions[f"S{tile}"] = (first, scores)
        regions[f"P{tile}"] = (first, weights)
        regions[f"O{tile}"] = (first + scores, output)
    return regions


def product_warp(blocks):
    for tile in (0, 1):
        yield ("scores", tile, 0)
    for block in range(blocks):
        for tile in (0, 1):
            yield ("wait", "weights", tile, block)
            yield ("wait", "corrected", tile, block)
            yield ("output", tile, block)
            if block + 1 < blocks:
                yield ("scores", tile, block + 1)


def planned(*arguments):
    return laid_out({"plan": plan}, *arguments)


def played(*arguments):
    return play_tensor_memory({"product_warp": product_warp}, *arguments)


def memory_cases(draw):
    def warp(name, blocks, softmax=((5, 15),), products=((10, 10),), corrections=(5,), most=None):
        given = ([list(pair) for pair in products], [list(pair) for pair in softmax], list(corrections))
        return Case(name, (PLAN, blocks, *given, most), entry="product_warp", driver=play_tensor_memory)

    def some():
        return draw.choice((1, 2, 9, 30, 200, 900))

    plans = {
        "1 tile, 128 keys, values of 128": (1, 128, 128),
        "2 tiles, 128 keys, values of 128: all 512 columns": (2, 128, 128),
        "2 tiles, 128 keys, values of 64": (2, 128, 64),
        "2 tiles, 128 keys, values of 256: too much": (2, 128, 256),
        "3 tiles, 128 keys, values of 43: one column too many": (3, 128, 43),
        "3 tiles, 128 keys, values of 40": (3, 128, 40),
        "4 tiles, 64 keys, values of 64: all 512": (4, 64, 64),
        "1 tile, 384 keys, values of 128: all 512": (1, 384, 128),
        "1 tile, 2 keys, values of 510: all 512": (1, 2, 510),
    }
    many, mixed = draw.integer(14, 26), [[some(), some()] for _ in range(draw.choice((5, 7, 9)))]
    return [
        *(Case(name, sizes, entry="plan", driver=laid_out) for name, sizes in plans.items()),
        warp("1 block", 1),
        warp("4 blocks, slow products", 4, products=((300, 200),)),
        warp("4 blocks, the softmax reads slowly", 4, ((500, 5),)),
        warp("4 blocks, the softmax writes slowly", 4, ((5, 500),)),
        warp("4 blocks, slow corrections", 4, ((3, 4),), corrections=(700,)),
        warp("5 blocks, the softmax of tile 0 is slow", 5, ((300, 300), (1, 1)), corrections=(1, 90)),
        warp("5 blocks, tile 0 is read slowly, slow corrections", 5, ((300, 1), (1, 1)), corrections=(700,)),
        warp("5 blocks, the softmax of tile 1 is slow", 5, ((1, 1), (300, 300)), corrections=(90, 1)),
        warp(f"{many} blocks, all durations differ", many, mixed, corrections=[some() for _ in range(7)]),
        warp("24 blocks: a product takes 10 ticks, a softmax 20", 24, most=25 * 40),
        warp("24 blocks: a product takes 10 ticks, a softmax 40", 24, ((10, 30),), most=25 * 60),
        warp("40 blocks: a product takes 10 ticks, a softmax 10", 40, ((5, 5),), most=41 * 40),
    ]


CONTRACTS = (
    Contract(lambda draw, *, tiles, keys, value_dim: (tiles, keys, value_dim),
        {"tiles": (1, 2, 3, 16), "keys": (2, 30, 64, 128, 256, 510), "value_dim": (1, 2, 40, 64, 128, 512)},
        {"tiles": "1 … 16", "keys": "even", "value_dim": "1 … 512"}, entry="plan", driver=laid_out, most=30),
    Contract(lambda draw, *, blocks, products, softmax, correction: (PLAN, blocks, products, softmax, correction), {
            "blocks": (1, 2, 3, 7),
            "products": (Level([[10, 10]], ""), Level([[300, 4]], "slow scores"), Level([[4, 300]], "slow outputs")),
            "softmax": (Level([[1, 1]], "a fast softmax"), Level([[400, 1], [1, 1], [1, 600]], "an uneven softmax")),
            "correction": (Level([1], "fast corrections"), Level([1, 800, 30], "uneven corrections")),
        },
        {"blocks": "at least 1", **dict.fromkeys(("products", "softmax", "correction"), "may take any time")},
        entry="product_warp", driver=play_tensor_memory, most=14),
)  # fmt: skip

SIZES, NEEDED = "keys, keys // 2, value_dim", "tiles * (scores + output)"
IN_S, BEHIND_S = "first, weights", "first + scores, output"
PLAN_CHANGES = (
    *edits("", p_in_the_right_half=(IN_S, "first + scores - weights, weights")),
    *edits("P was given columns that no S has, and then the plan does not fit. The softmax has read all of S when it "
        "writes P, so P may lie in the columns of its own S: a tile needs keys + value_dim columns.",
        p_beside_s=(NEEDED, "tiles * (scores + weights + output)")),
    *edits("P does not have keys / 2 columns. Its numbers have 16 bits, so two of them share a column's 4 bytes.",
        p_in_32_bits=(SIZES, "keys, keys, value_dim"), p_in_32_bits__right=(IN_S, "first + keys // 2, keys"),
        p_in_8_bits=(IN_S, "first, keys // 4"), p_in_8_bits__up=(IN_S, "first, max(1, keys // 4)")),
    *edits("S or O was counted in 16 bits. Both are float32, one number a column.",
        s_in_16_bits=(SIZES, "keys // 2, keys // 2, value_dim"),
        output_in_16_bits=(SIZES, "keys, keys // 2, value_dim // 2"),
        output_in_16_bits__alone=(BEHIND_S, "first + scores, value_dim // 2"),
        output_in_16_bits__up=(BEHIND_S, "first + scores, (value_dim + 1) // 2")),
    *edits("A plan that fills all 512 columns was refused. It fits.", full_refused=("> 512", ">= 512")),
)  # fmt: skip

NO_WEIGHTS, NOT_CORRECTED, TOO_EARLY, IDLE = (
    "An output product starts before the softmax has written its weights. Wait for those of its tile and block.",
    "An output product starts before the correction has rescaled O for its block. From block 1 on, wait for "
    '("wait", "corrected", tile, block) before each output.',
    "Scores are started before the output product of the block before. P lies in the columns of S, so they overwrite "
    "what is still needed. Start them behind the output product: the tensor cores keep the order.",
    "Nothing is overwritten, but the tensor cores have nothing to do for too long. Start a tile's next scores right "
    "behind its output, before you wait for the weights of the other tile.",
)  # fmt: skip
WEIGHTS, CORRECTED = 'yield ("wait", "weights", tile, block)', 'yield ("wait", "corrected", tile, block)'
OUTPUT, NEXT = 'yield ("output", tile, block)', 'yield ("scores", tile, block + 1)'
EARLIER = f"if block + 1 < blocks:\n    {NEXT}\n"
WARP_CHANGES = (
    *edits(NO_WEIGHTS, weights_not_waited_for=(WEIGHTS, "pass")),
    *edits(TOO_EARLY, scores_too_early=(NEXT, "pass", WEIGHTS, EARLIER + WEIGHTS),
        scores_too_early__behind_the_waits=(NEXT, "pass", OUTPUT, EARLIER + OUTPUT)),
    *edits(NOT_CORRECTED, corrected_not_waited_for=(CORRECTED, "pass")),
    *edits(IDLE, tensor_cores_idle=('yield ("scores", tile, 0)', "pass", NEXT, "pass",
        WEIGHTS, f'yield ("scores", tile, block)\n{WEIGHTS}')),
)  # fmt: skip


def reported(condition):
    """A `when`: condition(the case's arguments, what was returned of it)."""
    nothing = {"ending": "", "products": {}, "time": "", "plan": "", "columns": "", "outside": "", "shared": ""}
    return lambda case, seen, got: isinstance(got, dict) and bool(condition(case.args, nothing | got))


def misplaced(args, got, key):
    """Whether regions of the right sizes lie where they may not."""
    sizes = f"S0 {args[1]}, P0 {args[1] // 2}, O0 {args[2]}"
    return got[key] not in ("", "nothing") and got["columns"].startswith(sizes)


def ends_given(args, got):
    """Whether the largest number of columns is where the last region ends, wherever that lies."""
    numbers = [int(number) for number in re.findall(r" (\d+)", got["columns"])]
    return numbers and args[0] * (args[1] + args[2]) - max(numbers) in (0, 1)


def named_blocks(got):
    return [int(block) for block in re.findall(r"block (\d+)", got["ending"])]


def weights_missing(args, got):
    told, blocks = got["ending"], named_blocks(got)
    return "output" in told and ("softmax" in told or "not P" in told and blocks[0] >= blocks[1])


def early(args, got):
    """Whether scores of a later block meet what the softmax does with an earlier one, or stand where its P should."""
    told, blocks = got["ending"], named_blocks(got)
    if told.startswith("output"):
        return "finds S" in told and blocks[1] > blocks[0]
    return "softmax" in told and "scores" in told and (blocks[0] > blocks[1]) == told.startswith("scores")


EXERCISE = Exercise(
    id="19.5", title="The plan of the tensor memory", entries=("plan", "product_warp"), cases=memory_cases,
    oracle={"plan": planned, "product_warp": played}, contracts=CONTRACTS,
    models=(
        model_of(planned, PLAN_CHANGES, (plan,), entry="plan"),
        model_of(played, WARP_CHANGES, (product_warp,), entry="product_warp"),
    ),
    mistakes=(
        Mistake("not_whole_numbers", "A region is a pair of whole numbers, (first column, columns). `/` gives a float: "
            "use //.", first=True,
            when=lambda case, seen, got: seen.error is not None and "two whole numbers" in seen.error.text),
        Mistake("end_for_columns", "A region is (first column, columns). You gave its end in place of how many it has.",
            when=reported(ends_given), every=True),
        Mistake("columns_shared", "Regions share columns that may not. Only P may share columns, and only with the S "
            "of its own tile: all tiles are at work at once, and O is there from the first block to the last.",
            when=reported(lambda args, got: misplaced(args, got, "shared"))),
        Mistake("beyond_the_last_column", "A region reaches beyond the columns 0 to 511. Add up the columns of all "
            "tiles, and return None where they are more than 512.",
            when=reported(lambda args, got: misplaced(args, got, "outside"))),
        Mistake("refused", "You return None where a plan fits. A tile needs keys columns for S and value_dim for O. P "
            "needs none of its own, because it may lie in its S.",
            when=reported(lambda args, got: got["plan"] == "None")),
        Mistake("product_not_once", "A product is missing or started twice. Each tile needs the scores and the "
            "output of every block once, so after the last scores both tiles still need an output.",
            when=reported(lambda args, got: got["ending"] == "finished"
                and got["products"] != played(*args)["products"]
                or any(len({*one.split()}) < len(one.split()) for one in got["products"].values()))),
        Mistake("waits_forever", "The warp waits for something that never comes. Weights come only if the scores of "
            "their block were started. A correction begins when the scores of its block were read and the output of "
            "the block before has ended.", when=reported(lambda args, got: "deadlock" in got["ending"])),
        Mistake("names_what_does_not_exist", "A step names a tile or a block that does not exist. There are tiles 0 "
            "and 1, and blocks 0 to blocks - 1. The last block has no next one.",
            when=reported(lambda args, got: "impossible" in got["ending"])),
        Mistake("weights_not_waited_for", NO_WEIGHTS, when=reported(weights_missing)),
        Mistake("scores_too_early", TOO_EARLY, when=reported(early)),
        Mistake("corrected_not_waited_for", NOT_CORRECTED,
            when=reported(lambda args, got: "not rescaled" in got["ending"]
                or "output" in got["ending"] and "correction" in got["ending"])),
        Mistake("tensor_cores_idle", IDLE, when=reported(lambda args, got: got["time"] == "too long"), every=True),
    ),
    hints=(
        "Which of S, P and O of one tile must exist at the same time? When the softmax writes P, who still needs S?",
        "A tile needs keys + value_dim columns: P lies in its S. If all tiles need more than 512, return None. "
        "Otherwise give tile t the columns from t · (keys + value_dim) on.",
        "For the warp write down what the columns of S0 hold in turn: scores of block 0, weights of block 0, scores of "
        "block 1, … Who must have ended before each of them is written?",
        "Begin with the scores of block 0 for both tiles. Then, for each block and in it for each tile: wait for its "
        "weights, wait for its correction, start its output, and start its scores of the next block if there is one.",
    ),
)  # fmt: skip
