"""Wrong answers to exercise 19.5, and unusual right ones."""

from tests.submissions.edits import changed

HEAD = "# Exercise 19.5 · The plan of the tensor memory\n"
EACH, REFUSED = "each = keys + value_dim", "if tiles * each > 512:\n        return None\n"
IN_S, BEHIND_S = "first + keys // 2, keys // 2", "first + keys, value_dim"
FIRST = '    yield "scores", 0, 0\n    yield "scores", 1, 0\n'
WEIGHTS = '            yield "wait", "weights", tile, block\n'
CORRECTED = '            yield "wait", "corrected", tile, block\n'
OUTPUT = '            yield "output", tile, block\n'
MORE = "            if block + 1 < blocks:\n"
SCORES = 'yield "scores", tile, block + 1  # runs behind the output, so P has been read by then\n'
NEXT = f"{MORE}                {SCORES}"
RIGHT_PLAN = """def plan(tiles, keys, value_dim):
    if tiles * (keys + value_dim) > 512:
        return None
    regions = {}
    for t in range(tiles):
        regions[f"S{t}"] = [t * keys, keys]
        regions[f"P{t}"] = [t * keys, keys // 2]
        regions[f"O{t}"] = [512 - (t + 1) * value_dim, value_dim]
    return regions


"""


def wrong(*replacements):
    return changed("19.5", *replacements)


def warp(body):
    """An answer with another product warp."""
    return HEAD + RIGHT_PLAN + "def product_warp(blocks):\n" + body


WRONG = {
    "p_beside_s": wrong((EACH, "each = keys + keys // 2 + value_dim"), (IN_S, "first + keys, keys // 2"),
                        (BEHIND_S, "first + keys + keys // 2, value_dim")),
    "p_in_32_bits": wrong((IN_S, "first, keys")),
    "p_in_32_bits__in_the_right_half": wrong((IN_S, "first + keys // 2, keys")),
    "s_in_16_bits": wrong((EACH, "each = keys // 2 + value_dim"), ("first, keys\n", "first, keys // 2\n"),
                          (IN_S, "first, keys // 2"), (BEHIND_S, "first + keys // 2, value_dim")),
    "output_in_16_bits": wrong((EACH, "each = keys + value_dim // 2"), (BEHIND_S, "first + keys, value_dim // 2")),
    "output_in_16_bits__and_tensor_cores_idle": wrong((BEHIND_S, "first + keys, value_dim // 2"), (FIRST, ""),
        (NEXT, ""), (WEIGHTS, f'            yield "scores", tile, block\n{WEIGHTS}')),
    "refused__in_powers_of_two": wrong((EACH, "each = max(32, 1 << (keys + value_dim - 1).bit_length())")),
    "full_refused": wrong(("> 512", ">= 512")),
    "end_for_columns": wrong(("first, keys\n", "first, first + keys\n"), (IN_S, "first + keys // 2, first + keys"),
                             (BEHIND_S, "first + keys, first + each")),
    "end_for_columns__from_the_left": wrong(("first, keys\n", "first, first + keys\n"),
        (IN_S, "first, first + keys // 2"), (BEHIND_S, "first + keys, first + each")),
    "end_for_columns__all_s_first": HEAD + RIGHT_PLAN.replace("t * keys, keys]", "t * keys, t * keys + keys]")
        .replace("t * keys, keys // 2", "t * keys, t * keys + keys // 2")
        .replace("512 - (t + 1) * value_dim, value_dim", "tiles * keys + t * value_dim, "
                 "tiles * keys + (t + 1) * value_dim") + changed("19.5").partition("\n\n\n")[2],
    "end_for_columns__the_last_column": wrong(("first, keys\n", "first, first + keys - 1\n"),
        (IN_S, "first, first + keys // 2 - 1"), (BEHIND_S, "first + keys, first + each - 1")),
    "refused__beyond_256": wrong(("> 512", "> 512 or keys > 256 or value_dim > 256")),
    "not_whole_numbers": wrong((IN_S, "first + keys / 2, keys / 2")),
    "columns_shared": wrong(("first = tile * each", "first = 0")),
    "columns_shared__p_in_the_other_s": wrong((IN_S, "(tile + 1) % tiles * each, keys // 2")),
    "columns_shared__by_o": wrong((EACH, "each = max(keys, value_dim)"), (BEHIND_S, "first, value_dim")),
    "beyond_the_last_column": wrong((REFUSED, "pass\n")),
    "beyond_the_last_column__each_tile_by_itself": wrong(("if tiles * each", "if each")),
    "refused": wrong(("> 512", "> 256")),
    "weights_not_waited_for": wrong((WEIGHTS, "")),
    "weights_not_waited_for__but_of_tile_0": wrong((WEIGHTS, f"            if tile == 0:\n    {WEIGHTS}")),
    "weights_not_waited_for__other_output": wrong((OUTPUT, OUTPUT.replace("tile,", "1 - tile,"))),
    "weights_not_waited_for__after": wrong((WEIGHTS + CORRECTED + OUTPUT, CORRECTED + OUTPUT + WEIGHTS)),
    # vllm-project/flash-attention#182: the correction still reads O when the next product begins.
    "corrected_not_waited_for": wrong((CORRECTED, "")),
    "corrected_not_waited_for__after": wrong((CORRECTED + OUTPUT, OUTPUT + CORRECTED)),
    "corrected_not_waited_for__after_the_loop": warp("""    yield "scores", 0, 0
    yield "scores", 1, 0
    for block in range(1, blocks):
        for tile in (0, 1):
            yield "wait", "weights", tile, block - 1
            yield "wait", "corrected", tile, block - 1
            yield "output", tile, block - 1
            yield "scores", tile, block
    for tile in (0, 1):
        yield "wait", "weights", tile, blocks - 1
        yield "output", tile, blocks - 1
"""),
    # Dao-AILab/flash-attention#2196 asks whether this happens.
    "scores_too_early": wrong((OUTPUT + NEXT, NEXT + OUTPUT)),
    "scores_too_early__before_the_waits": wrong((WEIGHTS + CORRECTED + OUTPUT + NEXT,
                                                 NEXT + WEIGHTS + CORRECTED + OUTPUT)),
    "scores_too_early__all_first": wrong((FIRST, '    for tile in (0, 1):\n        for block in range(blocks):\n'
                                          '            yield "scores", tile, block\n'), (NEXT, "")),
    "waits_forever__no_first_scores": wrong((FIRST, "")),
    "waits_forever__this_block": wrong((FIRST, ""), (NEXT, '            yield "scores", tile, block\n')),
    "waits_forever__of_tile_1": wrong((FIRST, '    yield "scores", 0, 0\n')),
    "product_not_once__the_same_scores_again": wrong((NEXT, NEXT.replace("block + 1  #", "block  #"))),
    "product_not_once__first_scores": warp("""    yield "scores", 0, 0
    yield "scores", 1, 0
    for block in range(blocks):
        for tile in (0, 1):
            yield "scores", tile, block
        for tile in (0, 1):
            yield "wait", "weights", tile, block
            yield "wait", "corrected", tile, block
            yield "output", tile, block
"""),
    "product_not_once__last_output": wrong(("for block in range(blocks):", "for block in range(blocks - 1):")),
    "product_not_once__one_block_behind": warp("""    for block in range(blocks):
        for tile in (0, 1):
            if block > 0:
                yield "wait", "weights", tile, block - 1
                yield "wait", "corrected", tile, block - 1
                yield "output", tile, block - 1
            yield "scores", tile, block
"""),
    "names_what_does_not_exist__block": wrong((MORE, "            if True:\n")),
    "weights_not_waited_for__the_other_tiles": wrong((WEIGHTS, WEIGHTS.replace("tile, ", "1 - tile, "))),
    "corrected_not_waited_for__the_other_tiles": wrong((CORRECTED, CORRECTED.replace("tile, ", "1 - tile, "))),
    "waits_forever__of_the_next_block": wrong((WEIGHTS, WEIGHTS.replace("tile, block", "tile, block + 1"))),
    "corrected_not_waited_for__of_the_block_before": wrong((
        CORRECTED, "            if block:\n    " + CORRECTED.replace("block\n", "block - 1\n"))),
    "product_not_once__tile_1": wrong(('    yield "scores", 1, 0\n', ""), ("for tile in (0, 1):\n            yield",
                                                              "for tile in (0,):\n            yield")),
    "tensor_cores_idle": warp("""    for tile in (0, 1):
        for block in range(blocks):
            yield "scores", tile, block
            yield "wait", "weights", tile, block
            yield "wait", "corrected", tile, block
            yield "output", tile, block
"""),
    "tensor_cores_idle__in_turn": warp("""    for block in range(blocks):
        for tile in (0, 1):
            yield "scores", tile, block
            yield "wait", "weights", tile, block
            if block:
                yield "wait", "corrected", tile, block
            yield "output", tile, block
"""),
    "tensor_cores_idle__waits_between": wrong((NEXT, f"            if tile == 0:\n                yield 'wait', "
                                                     f"'weights', 1, block\n{NEXT}")),
    "tensor_cores_idle__both_scores_then_both_outputs": warp("""    for block in range(blocks):
        yield "scores", 0, block
        yield "scores", 1, block
        for tile in (0, 1):
            yield "wait", "weights", tile, block
            yield "wait", "corrected", tile, block
            yield "output", tile, block
"""),
    "waits_forever": wrong((CORRECTED, ""), (NEXT, f"{MORE}                yield 'wait', 'corrected', tile, block + 1\n"
                                             f"                {SCORES}")),
    "names_what_does_not_exist": wrong((OUTPUT, OUTPUT.replace("tile,", "tile + 1,"))),
    "corrected_not_waited_for__of_block_2": wrong((CORRECTED, f"            if block != 2:\n    {CORRECTED}")),
    "product_not_once__output": wrong((OUTPUT, f"            if tile == 0 or block + 1 < blocks:\n    {OUTPUT}")),
    "product_not_once": wrong((OUTPUT, f"{OUTPUT}            if block == 0:\n    {OUTPUT}")),
    "p_in_32_bits__and_weights_not_waited_for": wrong((IN_S, "first, keys"), (WEIGHTS, "")),
    "weights_not_waited_for__nor_the_correction": wrong((WEIGHTS + CORRECTED, "")),
}  # fmt: skip

UNUSUAL = {
    "all S first, all O from the end, as lists; the output of the block before": warp("""    steps = []
    for block in range(blocks + 1):
        for tile in (0, 1):
            if block > 0:
                steps += [["wait", "corrected", tile, block - 1], ["wait", "weights", tile, block - 1],
                          ["output", tile, block - 1]]
            if block < blocks:
                steps.append(["scores", tile, block])
    return steps
"""),
    "tile 1 first, P in the middle of its S, NumPy's numbers": HEAD + """def plan(tiles, keys, value_dim):
    widths = np.array([keys, value_dim] * tiles)
    if widths.sum() > 512:
        return None
    first = np.cumsum(widths) - widths
    regions = {}
    for t in range(tiles)[::-1]:
        regions[f"O{t}"] = (first[2 * t + 1], widths[1])
        regions[f"S{t}"] = (first[2 * t], widths[0])
        regions[f"P{t}"] = (first[2 * t] + keys // 4, keys // 2)
    return regions


def product_warp(blocks):
    yield from [("scores", 1, 0), ("scores", 0, 0)]
    for number in range(2 * blocks):
        block, tile = number // 2, 1 - number % 2
        if block:
            yield "wait", "corrected", tile, block
        yield "wait", "weights", tile, block
        yield "output", tile, block
        if block < blocks - 1:
            yield "scores", tile, block + 1
""",
    "P reaches beyond its S where there is room": HEAD
    + """def plan(tiles, keys, value_dim):
    free = 512 - tiles * (keys + value_dim)
    if free < 0:
        return None
    regions = {}
    for t in range(tiles):
        regions[f"O{t}"] = (t * value_dim, value_dim)
        regions[f"S{t}"] = (tiles * value_dim + t * keys, keys)
        regions[f"P{t}"] = (tiles * value_dim + t * keys + keys // 2, keys // 2)
    if free >= keys // 2:
        regions[f"P{tiles - 1}"] = (512 - free - min(free, 1), keys // 2)
    return regions


def product_warp(blocks):
    for tile in (0, 1):
        yield "scores", tile, 0
    for block in range(blocks):
        yield "wait", "weights", 0, block
        yield "wait", "corrected", 0, block
        yield "output", 0, block
        if block + 1 < blocks:
            yield "scores", 0, block + 1
        yield "wait", "weights", 1, block
        yield "wait", "corrected", 1, block
        yield "output", 1, block
        if block + 1 < blocks:
            yield "scores", 1, block + 1
""",
}
