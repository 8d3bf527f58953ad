"""Wrong answers to exercise 13.7, and unusual right ones."""

from tests.submissions.edits import changed

TURN = "total += index % size * stride"
COMPOSED = "offset(outer, offset(inner, index))"
OWNED = "offset(tile, first + offset(values, value))"
STARTS = "[block + place for block in range(0, math.prod(layout[0]), size * step) for place in range(step)]"
PLACE = "offset(layout, start + step * number)"
TILE = f"[[{PLACE} for number in range(size)] for start in starts]"

WRONG = {
    "cut_to_the_outer": changed(
        "13.7", ("range(math.prod(inner[0]))", "range(min(math.prod(s[0]) for s in (inner, outer)))")
    ),
    "last_first": changed("13.7", ("zip(*layout)", "list(zip(*layout))[::-1]")),
    "not_taken_apart": changed("13.7", (TURN, "total += index * stride")),
    "strides_ignored": changed("13.7", (TURN, "total += index % size")),
    "paired_backwards": changed("13.7", ("zip(*layout)", "zip(layout[0], layout[1][::-1])")),
    "two_dimensions_only": changed("13.7", ("    total = 0\n", "    (m, *n), (s, *t) = layout\n    return index % m * s"
                                            " + (index // m * t[0] if n else 0)\n    total = 0\n")),
    "stride_of_0": changed("13.7", (TURN, TURN.replace("stride", "(stride or 1)"))),
    "stride_of_0__skipped": changed("13.7", (TURN, f"if stride == 0:\n            continue\n        {TURN}")),
    "divmod_exchanged": changed(
        "13.7", (TURN, TURN.replace("%", "//")), ("index = index // size", "index = index % size")),
    "offsets_for_indices": changed(
        "13.7", ("range(math.prod(inner[0]))", "range(offset(inner, math.prod(inner[0]) - 1) + 1)")),
    "first_dimension_only__of_the_inner": changed("13.7", ("math.prod(inner[0])", "inner[0][0]")),
    "repeated_left_out": changed("13.7", (f"return [{COMPOSED} for index in range(math.prod(inner[0]))]",
        f"return list(dict.fromkeys({COMPOSED} for index in range(math.prod(inner[0]))))")),
    "modes_exchanged": changed("13.7", (COMPOSED, "offset([part[::-1] for part in outer], offset(inner, index))")),
    "modes_exchanged__of_the_values": changed(
        "13.7", (OWNED, "offset(tile, first + offset([part[::-1] for part in values], value))")),
    "modes_exchanged__of_the_layout": changed(
        "13.7", (PLACE, "offset([part[::-1] for part in layout], start + step * number)")),
    "number_for_step": changed("13.7", (OWNED, "offset(tile, first + value)")),
    "threads_side_by_side": changed(
        "13.7", ("first = offset(threads, thread)", "first = thread * math.prod(values[0])")),
    "cut_to_the_tile": changed(
        "13.7", ("range(math.prod(values[0]))", "range(min(math.prod(values[0]), math.prod(tile[0])))")),
    "first_dimension_only__of_the_values": changed("13.7", ("range(math.prod(values[0]))", "range(values[0][0])")),
    "one_list": changed("13.7", (f"return {TILE}", f"return sum({TILE}, [])")),
    "one_tile_only": changed("13.7", (f"return {TILE}", f"return {TILE}[:1]")),
    "sorted": changed("13.7", (f"return {TILE}", f"return sorted({TILE})")),
    "size_for_number": changed("13.7", (STARTS, "range(size)"),
                               (f"{PLACE} for number in range(size)",
                                f"{PLACE} for number in range(math.prod(layout[0]) // size)")),
    "exchanged": changed("13.7", (COMPOSED, "offset(inner, offset(outer, index))")),
    "outer_left_out": changed("13.7", (COMPOSED, "offset(inner, index)")),
    "added": changed("13.7", (COMPOSED, "offset(outer, index) + offset(inner, index)")),
    "tile_left_out": changed("13.7", (OWNED, "first + offset(values, value)")),
    "added_late": changed("13.7", (OWNED, "offset(tile, first) + offset(tile, offset(values, value))")),
    "values_in_memory": changed("13.7", (OWNED, "offset(tile, first) + offset(values, value)")),
    "step_between_offsets": changed("13.7", (PLACE, "offset(layout, start) + step * number")),
    "spread_over_all": changed("13.7", (STARTS, "range(math.prod(layout[0]) // size)"),
                               (PLACE, "offset(layout, start + math.prod(layout[0]) // size * number)")),
    "memory_divided": changed("13.7", ("range(0, math.prod(layout[0]), size", "range(0, 1 + sum((size - 1) * stride "
                                       "for size, stride in zip(*layout)), size")),
    "first_dimension_only": changed("13.7", ("range(0, math.prod(layout[0]), size", "range(0, layout[0][0], size")),
    "thread_missing": changed("13.7", ("first = offset(threads, thread)", "first = 0")),
    "number_for_place": changed("13.7", ("first = offset(threads, thread)", "first = thread")),
    "layout_left_out": changed("13.7", (TILE, TILE.replace(PLACE, "start + step * number"))),
    "step_ignored": changed(
        "13.7", (STARTS, "range(0, math.prod(layout[0]), size)"), (PLACE, "offset(layout, start + number)")),
    "gaps_left": changed("13.7", (STARTS, STARTS.replace("block + place", "block + size * place"))),
    "gaps_left__blocks_alone": changed("13.7", (STARTS, "range(0, math.prod(layout[0]), size * step)")),
    "first_tiles_only": changed("13.7", (STARTS, "range(step)")),
    "order_of_blocks": changed("13.7", (STARTS, "[block + place for place in range(step)"
                                        " for block in range(0, math.prod(layout[0]), size * step)]")),
    "size_and_step_exchanged": changed("13.7", ("def divided(layout, size: int, step: int)",
                                                "def divided(layout, step: int, size: int)")),
    "across_the_tiles": changed("13.7", (TILE, f"[[{PLACE} for start in starts] for number in range(size)]")),
}

UNUSUAL = {
    "by recursion": """# Exercise 13.7 · A layout by hand
def offset(layout, index):
    (size, *sizes), (stride, *strides) = layout
    rest = offset((sizes, strides), index // size) if sizes else 0
    return index % size * stride + rest

def composed(outer, inner):
    return [offset(outer, offset(inner, i)) for i in range(math.prod(inner[0]))]

def owned(tile, threads, values, thread):
    return [offset(tile, offset(threads, thread) + offset(values, v)) for v in range(math.prod(values[0]))]

def divided(layout, size, step):
    left, tiles = set(range(math.prod(layout[0]))), []
    while left:
        tile = [min(left) + step * number for number in range(size)]
        left -= set(tile)
        tiles.append([offset(layout, index) for index in tile])
    return tiles
""",
    "divided by composed": changed("13.7", (f"return {TILE}",
        "count = math.prod(layout[0]) // (size * step)\n"
        "    flat = composed(layout, ((size, step, count), (step, 1, size * step)))\n"
        "    return [flat[at : at + size] for at in range(0, len(flat), size)]")),
    "by numpy": changed(
        "13.7",
        ("total = 0\n", "coordinates = np.unravel_index(index, layout[0], order='F')\n"),
        (
            "    for size, stride in zip(*layout):\n        total += index % size * stride\n"
            "        index = index // size\n",
            "",
        ),
        ("return total", "return int(np.dot(coordinates, layout[1]))"),
    ),
    "owned by composed": changed(
        "13.7",
        (
            f"return [{OWNED} for value in range(math.prod(values[0]))]",
            "joined = (tuple(threads[0]) + tuple(values[0]), tuple(threads[1]) + tuple(values[1]))\n"
            "    return composed(tile, joined)[thread :: math.prod(threads[0])]",
        ),
    ),
}
