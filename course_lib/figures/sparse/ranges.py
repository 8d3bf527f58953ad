"""The keys that some query of a tile sees and those that every one sees, and the four numbers that follow from them."""

from dataclasses import dataclass

from matplotlib.patches import Patch, Rectangle

from course_lib.figures.sparse.tiles import COLORS, CUT, HIDDEN, WHOLE
from course_lib.figures.style import INK, MUTED, new_figure, styled


@dataclass(frozen=True)
class Ranges:
    """Of causal attention: ranges of keys, and the tiles that they make, each from its first up to its end."""

    some: range
    every: range
    visited: range
    whole: range


def ranges_of(first: int, last: int, before: int, block: int) -> Ranges:
    """Of the queries first … last, each of which sees `before` keys before its own: all keys up to theirs exist."""
    some = range(max(0, first - before), last + 1)
    every = range(max(0, last - before), first + 1)
    visited = range(some.start // block, -(-some.stop // block))
    whole = range(-(-every.start // block), every.stop // block)
    return Ranges(some, every, visited, whole if len(whole) else range(visited.start, visited.start))


@styled
def draw_ranges(first: int = 10, last: int = 13, before: int = 9, block: int = 4):
    """Above, which key each query sees, in tiles. Below, both ranges of keys and what rounding makes of them.

    Raises a ValueError for no query, more than 12 of them, or more than 40 keys.
    """
    if not 0 <= first <= last < first + 12 or before < 0 or not 1 <= block <= last + 1 <= 40:
        raise ValueError(f"queries {first} to {last}, {before} keys before, tiles of {block}: too many, or none.")
    found = ranges_of(first, last, before, block)
    tiles = found.visited.stop + 1  # one that is not visited
    queries = last - first + 1
    figure, axes = new_figure(10.5, 1.9 + 0.42 * (queries + 3))
    kinds = [WHOLE if tile in found.whole else CUT if tile in found.visited else HIDDEN for tile in range(tiles)]
    for row, query in enumerate(range(first, last + 1)):
        axes.text(-0.3, row + 0.5, f"query {query}", ha="right", va="center")
        for key in range(tiles * block):
            seen = max(0, query - before) <= key <= query
            color = COLORS[kinds[key // block] if seen else HIDDEN]
            axes.add_patch(Rectangle((key + 0.05, row + 0.08), 0.9, 0.84, facecolor=color, edgecolor="none"))
    for key in range(tiles * block):
        axes.text(key + 0.5, -0.15, str(key), ha="center", va="bottom", color=MUTED, fontsize=9.5)
    for tile in range(tiles):
        axes.text((tile + 0.5) * block, -0.85, f"tile {tile}", ha="center", va="bottom")
    for border in range(tiles + 1):
        axes.plot([border * block] * 2, [-0.8, queries + 3.4], color=MUTED, linewidth=0.9)
    rows = (
        ("some query sees", found.some, found.visited, CUT, "begin", "end", "rounded out"),
        ("every query sees", found.every, found.whole, WHOLE, "whole_begin", "whole_end", "rounded in"),
    )
    for place, (name, keys, made, kind, start, stop, how) in zip((queries + 0.5, queries + 2.1), rows):
        axes.text(-0.3, place + 0.25, name, ha="right", va="center")
        axes.add_patch(Rectangle((keys.start, place), len(keys), 0.5, facecolor=COLORS[kind], edgecolor="none"))
        if len(made):
            low, high = made.start * block, made.stop * block
            axes.plot(
                [low, low, high, high],
                [place + 0.65, place + 0.85, place + 0.85, place + 0.65],
                color=INK,
                linewidth=1.6,
            )
        words = f"{how}: {start} = {made.start}, {stop} = {made.stop}" if len(made) else "no tile is whole"
        axes.text(tiles * block + 0.4, place + 0.5, words, va="center")
    handles = [
        Patch(facecolor=COLORS[WHOLE], label="in a whole tile: no mask"),
        Patch(facecolor=COLORS[CUT], label="seen, in a tile that needs the mask"),
        Patch(facecolor=COLORS[HIDDEN], label="not seen"),
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=3)
    axes.set(xlim=(-4.6, tiles * block + 9.6), ylim=(queries + 3.4, -1.6))
    axes.axis("off")
    return figure
