"""Exercise 19.5: who lies where in tensor memory, and a product warp that is played on a model of it."""

from __future__ import annotations

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
        "2 tiles, 128 keys, values of 129: two columns too many": (2, 128, 129),
        "1 tile, 256 keys, values of 256: all 512": (1, 256, 256),
        "4 tiles, 64 keys, values of 64: all 512": (4, 64, 64),
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


def sizes(draw, *, tiles, keys, value_dim):
    return tiles, keys, value_dim


def durations(draw, *, blocks, products, softmax, correction):
    return PLAN, blocks, products, softmax, correction


CONTRACTS = (
    Contract(sizes, {"tiles": (1, 2, 3, 16), "keys": (2, 30, 64, 128, 256, 510), "value_dim": (1, 2, 40, 64, 128, 512)},
        {"tiles": "1 … 16", "keys": "even", "value_dim": "1 … 512"}, entry="plan", driver=laid_out, most=30),
    Contract(durations, {
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
        p_beside_s=(NEEDED, "tiles * (scores + weights + output)"),
        p_beside_s__as_wide_as_s=(SIZES, "keys, keys, value_dim", NEEDED, "tiles * (scores + weights + output)")),
    *edits("P has as many columns as S. Its numbers have 16 bits, so two of them share a column's 4 bytes: keys / 2 "
        "columns.",
        p_in_32_bits=(SIZES, "keys, keys, value_dim"),
        p_in_32_bits__in_the_right_half=(IN_S, "first + keys // 2, keys")),
    *edits("S or O was counted in 16 bits. Both are float32, one number a column.",
        s_in_16_bits=(SIZES, "keys // 2, keys // 2, value_dim"),
        output_in_16_bits=(SIZES, "keys, keys // 2, value_dim // 2")),
    *edits("A row of S has a column for each key, a row of O one for each element of a value. You took one for the "
        "other.",
        exchanged=(SIZES, "value_dim, keys // 2, keys"), output_as_wide_as_s=(SIZES, "keys, keys // 2, keys")),
    *edits("Bytes were counted. A column has 4 bytes in each lane, one float32.",
        bytes_counted=(SIZES, "4 * keys, 2 * keys, 4 * value_dim"),
        bytes_counted__limit=(SIZES, "4 * keys, 2 * keys, 4 * value_dim", "512", "2048")),
    *edits("A plan that fills all 512 columns was refused. It fits.", full_refused=("> 512", ">= 512")),
    *edits("A region is (first column, columns). You gave its end in place of how many it has.",
        end_for_columns=("first, scores", "first, first + scores", IN_S, "first, first + weights",
                         BEHIND_S, "first + scores, first + scores + output"),
        end_for_columns__right_half=("first, scores", "first, first + scores", IN_S, "first + keys - weights, "
                         "first + keys", BEHIND_S, "first + scores, first + scores + output")),
)  # fmt: skip

WEIGHTS, CORRECTED = 'yield ("wait", "weights", tile, block)', 'yield ("wait", "corrected", tile, block)'
OUTPUT, NEXT = 'yield ("output", tile, block)', 'yield ("scores", tile, block + 1)'
FIRST, MORE, LOOP = 'yield ("scores", tile, 0)', "if block + 1 < blocks:", "for block in range(blocks):"
EARLY, NOT_LATE = f"if block + 1 < blocks:\n    {NEXT}\n", (MORE, "if False:")
WARP_CHANGES = (
    *edits("", corrected_first=(WEIGHTS, f"{CORRECTED}\n{WEIGHTS}"),
        tile_1_first=("for tile in (0, 1)", "for tile in (1, 0)")),
    *edits("An output product starts before the softmax has written the weights, so it reads what is left of the "
        "scores. Wait for the weights of the same tile and block before it.",
        weights_not_waited_for=(WEIGHTS, "pass"), weights_not_waited_for__after=(WEIGHTS, OUTPUT, OUTPUT, WEIGHTS)),
    *edits("An output product starts before the correction has rescaled O for its block, or while it does. From block "
        '1 on, wait for ("wait", "corrected", tile, block) before each output.',
        corrected_not_waited_for=(CORRECTED, "pass"),
        corrected_not_waited_for__after=(CORRECTED, OUTPUT, OUTPUT, CORRECTED),
        corrected_not_waited_for__tile_1=(CORRECTED, f"if tile == 0:\n    {CORRECTED}")),
    *edits("The next scores are started before the output product. P lies in the columns of S, so they overwrite "
        "weights that were not read yet. Start them behind the output product: the tensor cores keep the order.",
        scores_too_early=(OUTPUT, EARLY + OUTPUT, *NOT_LATE),
        scores_too_early__before_the_waits=(WEIGHTS, EARLY + WEIGHTS, *NOT_LATE),
        scores_too_early__all_first=(FIRST, LOOP + '\n    yield ("scores", tile, block)', *NOT_LATE)),
    *edits("The warp waits for weights before it has started any scores, so it waits forever. Start the scores of "
        "block 0 for both tiles before the loop.",
        waits_before_any_scores=(FIRST, "pass")),
    *edits("Only one tile has scores of block 0. Start those of both tiles before the loop.",
        tile_1_never_begun=(FIRST, f"if tile == 0:\n    {FIRST}")),
    *edits("Behind an output product the scores of the same block are started again. Start those of block + 1.",
        same_scores_again=(NEXT, 'yield ("scores", tile, block)')),
    *edits("The output product of the last block is never started. After the last scores both tiles still need one.",
        last_output_missing=(LOOP, "for block in range(blocks - 1):")),
    *edits("Behind the last block scores of one more block are started, and there is none.",
        scores_beyond_the_last=(MORE, "if True:")),
    *edits("The warp waits for the weights or the correction of the other tile. Wait for those of the tile whose "
        "output product you start.",
        weights_of_the_other_tile=(WEIGHTS, 'yield ("wait", "weights", 1 - tile, block)'),
        correction_of_the_other_tile=(CORRECTED, 'yield ("wait", "corrected", 1 - tile, block)')),
    *edits("The warp waits for the weights of the next block, whose scores it has not started. The output product of "
        "a block reads the weights of this block.",
        weights_of_the_next_block=(WEIGHTS, 'yield ("wait", "weights", tile, block + 1)')),
    *edits("Only one tile is computed.", tile_1_missing=("for tile in (0, 1)", "for tile in (0,)")),
)  # fmt: skip


def said(key, *words):
    """A `when`: what was returned of a case has one of these words under a key."""
    return lambda case, seen, got: isinstance(got, dict) and any(word in str(got.get(key, "")) for word in words)


EXERCISE = Exercise(
    id="19.5", title="The plan of the tensor memory", entries=("plan", "product_warp"), cases=memory_cases,
    oracle={"plan": planned, "product_warp": played}, contracts=CONTRACTS,
    models=(
        model_of(planned, PLAN_CHANGES, (plan,), entry="plan"),
        model_of(played, WARP_CHANGES, (product_warp,), entry="product_warp", most_pairs=120),
    ),
    mistakes=(
        Mistake("not_whole_numbers", "A region is a pair of whole numbers, (first column, columns). `/` gives a float: "
            "use //.", first=True,
            when=lambda case, seen, got: seen.error is not None and "two whole numbers" in seen.error.text),
        Mistake("tiles_share_columns", "Regions of two tiles share columns, and both tiles are at work at once. Only P "
            "may share columns, with the S of its own tile.",
            when=lambda case, seen, got: said("plan", "a plan")(case, seen, got)
            and any(pair[1:pair.index(" ")] != pair[pair.rindex(" ") + 2 :]
                    for pair in got["shared"].split(", ") if pair != "nothing")),
        Mistake("output_shares_columns", "O shares columns with S or P. O is there from the first block to the last, "
            "and S and P are written anew for each block.", when=said("shared", "and")),
        Mistake("beyond_the_last_column", "A region reaches beyond the columns 0 to 511. Add up the columns of all "
            "tiles, and return None where they are more than 512.", when=said("outside", "S", "P", "O")),
        Mistake("refused", "You return None where a plan fits. A tile needs keys columns for S and value_dim for O. P "
            "needs none of its own, because it may lie in its S.", when=said("plan", "None")),
        Mistake("waits_forever", "The product warp waits for something that never comes. Weights of a block come only "
            "after its scores were started, and a correction only after the output of the block before.",
            when=said("ending", "deadlock")),
        Mistake("names_what_does_not_exist", "A step names a tile or a block that does not exist. There are tiles 0 "
            "and 1, and blocks 0 to blocks - 1.", when=said("ending", "impossible")),
        Mistake("columns_disturbed", "A part reads columns that hold something else than it needs, or touches columns "
            "that another part is not done with. The report names both.", when=said("ending", "fault")),
        Mistake("other_products", "A product is missing or was started twice. Each tile needs both of every block.",
            when=lambda case, seen, got: said("ending", "finished")(case, seen, got)
            and got["products"] != played(*case.args)["products"]),
        Mistake("tensor_cores_idle", "The outputs are right, but the tensor cores have nothing to do for too long. "
            "While you wait for the weights of one tile, products of the other should be under way. Start a tile's "
            "next scores right behind its output, before you wait for the other tile.", when=said("time", "too long")),
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
