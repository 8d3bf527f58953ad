"""The two loops of the backward pass over one score matrix: by columns for dK and dV, by rows for dQ."""

from matplotlib.patches import FancyArrowPatch, Rectangle

from course_lib.figures.style import BLUE, GRID, INK, MUTED, ORANGE, new_figure, styled

LOOPS = (
    ("dK and dV: one program holds a block of keys", "keys", "Q, dO, L, Δ\npass by", "K, V, dK, dV\nstay"),
    ("dQ: one program holds a tile of queries", "queries", "K, V\npass by", "Q, dO, L, Δ, dQ\nstay"),
)


def visible_tiles(query_tiles: int, key_tiles: int, causal: bool) -> set[tuple[int, int]]:
    """(tile of queries, tile of keys) pairs in which some pair is visible; the last tiles stand at the same end."""
    offset = key_tiles - query_tiles
    return {
        (row, column)
        for row in range(query_tiles)
        for column in range(key_tiles)
        if not causal or column <= row + offset
    }


@styled
def draw_loops(query_tiles=6, key_tiles=6, causal=True, shown=2):
    """Both loops side by side, over the same tiles of P and dS.

    Args:
        query_tiles, key_tiles: tiles of the score matrix, down and across.
        causal: whether tiles above the diagonal are left out.
        shown: the block of keys, and the tile of queries, whose program is drawn.
    """
    figure, axes = new_figure(11, 5.4)
    seen = visible_tiles(query_tiles, key_tiles, causal)
    right = key_tiles + 4.2
    for left, (title, loop, passing, staying) in zip((0.0, right), LOOPS):
        held = [(r, c) for r, c in sorted(seen) if (c if loop == "keys" else r) == shown]
        for row in range(query_tiles):
            for column in range(key_tiles):
                here = (row, column)
                color = ORANGE if here in held else BLUE if here in seen else GRID
                alpha = 0.9 if here in held else 0.18 if here in seen else 0.35
                axes.add_patch(
                    Rectangle((left + column, -row - 1), 0.94, 0.94, facecolor=color, alpha=alpha, edgecolor="none")
                )
        for step, (row, column) in enumerate(held):
            axes.text(
                left + column + 0.47, -row - 0.53, str(step + 1), ha="center", va="center", fontsize=11, color=INK
            )
        axes.text(left + key_tiles / 2, 1.45, title, ha="center", fontsize=12.5, fontweight="bold", color=INK)
        axes.text(left + key_tiles / 2, 0.95, "keys →", ha="center", fontsize=10.5, color=MUTED)
        axes.text(left - 0.25, -query_tiles / 2, "queries →", ha="center", va="center", rotation=-90, fontsize=10.5,
                  color=MUTED)  # fmt: skip
        if held:
            _walk(axes, left, loop, held, query_tiles, key_tiles, passing, staying)
    axes.text(
        -0.3,
        -query_tiles - 1.75,
        "Orange: the tiles that one program computes, in this order. Pale blue: those of other programs. "
        "Grey: nothing is visible there.\nEvery blue or orange tile of P and dS is computed twice, once in each loop.",
        fontsize=11,
        va="center",
        color=INK,
    )
    axes.set(xlim=(-0.6, right + key_tiles + 2.4), ylim=(-query_tiles - 2.5, 2.0), aspect="equal")
    axes.axis("off")
    return figure


def _walk(axes, left, loop, held, query_tiles, key_tiles, passing, staying):
    """The arrow along the tiles that the loop walks over, and what passes and what stays."""
    (first_row, first_column), (last_row, last_column) = held[0], held[-1]
    if loop == "keys":
        x = left + key_tiles + 0.3
        begin, end = (x, -first_row - 0.05), (x, -last_row - 0.95)
        axes.text(x + 0.2, (begin[1] + end[1]) / 2, passing, fontsize=10.5, va="center", color=INK)
        axes.text(
            left + first_column + 0.47,
            0.12,
            staying,
            fontsize=10.5,
            ha="center",
            va="bottom",
            color=INK,
            linespacing=1.0,
        )
    else:
        y = -query_tiles - 0.35
        begin, end = (left + first_column + 0.05, y), (left + last_column + 0.95, y)
        axes.text((begin[0] + end[0]) / 2, y - 0.15, passing.replace("\n", " "), fontsize=10.5, ha="center", va="top",
                  color=INK)  # fmt: skip
        axes.text(left + key_tiles + 0.2, -first_row - 0.53, staying, fontsize=10.5, va="center", color=INK)
    axes.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=14, color=ORANGE, linewidth=2))
