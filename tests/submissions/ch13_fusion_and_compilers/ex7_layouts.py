"""Wrong answers to exercise 13.7, and unusual right ones."""

from tests.submissions.edits import changed

TURN = "total += index % size * stride"
COMPOSED = "offset(outer, offset(inner, index))"
OWNED = "offset(tile, first + offset(values, value))"

WRONG = {
    "last_first": changed("13.7", ("zip(*layout)", "list(zip(*layout))[::-1]")),
    "not_taken_apart": changed("13.7", (TURN, "total += index * stride")),
    "strides_ignored": changed("13.7", (TURN, "total += index % size")),
    "exchanged": changed("13.7", (COMPOSED, "offset(inner, offset(outer, index))")),
    "outer_left_out": changed("13.7", (COMPOSED, "offset(inner, index)")),
    "added": changed("13.7", (COMPOSED, "offset(outer, index) + offset(inner, index)")),
    "tile_left_out": changed("13.7", (OWNED, "first + offset(values, value)")),
    "added_late": changed("13.7", (OWNED, "offset(tile, first) + offset(tile, offset(values, value))")),
    "thread_missing": changed("13.7", ("first = offset(threads, thread)", "first = 0")),
    "number_for_place": changed("13.7", ("first = offset(threads, thread)", "first = thread")),
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
""",
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
