"""The query heads of one KV head in the rows of a tile: a group packed for the matrix units, with its padding."""

from typing import Any

from matplotlib.patches import FancyArrowPatch, Rectangle

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, new_figure, styled

CELL = 0.34  # height of a row of the tile
WIDTH = 2.9  # of a head's vector


@styled
def draw_packed_tile(query_heads: int = 16, key_heads: int = 2, tile_rows: int = 16, key_rows: int = 32):
    """Three steps from left to right: all query heads, the tile of KV head 0's group, and its scores with a key tile.

    Args:
        query_heads, key_heads: the second divides the first; at most 32 query heads can be drawn.
        tile_rows: rows of the tile, at least the group's size.
        key_rows: keys of a tile, named in the drawing.

    Raises:
        ValueError: heads that don't divide, a group that does not fit, or too many heads to draw.
    """
    if not 1 <= query_heads <= 32 or query_heads % key_heads:
        raise ValueError(f"{query_heads} query heads on {key_heads} KV heads: at most 32, and divisible, can be drawn.")
    group = query_heads // key_heads
    if tile_rows < group or tile_rows > 32:
        raise ValueError(f"tile_rows is {tile_rows}; it must be at least the group's {group}, and at most 32.")
    height = CELL * max(query_heads, tile_rows)
    figure, axes = new_figure(11, 1.9 + 0.62 * height)
    top = height
    _draw_heads(axes, top, query_heads, group)
    tile_left = 4.6
    _draw_tile(axes, tile_left, top, group, tile_rows)
    arrow: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 14, "color": BLUE, "linewidth": 1.8}
    middle = top - CELL * group / 2
    axes.add_patch(FancyArrowPatch((WIDTH + 0.15, middle), (tile_left - 0.15, middle), **arrow))
    axes.text((WIDTH + tile_left) / 2, middle + 0.16, "one load", ha="center", color=BLUE)
    _draw_scores(axes, tile_left + WIDTH, top, group, tile_rows, key_rows)
    waste = 1 - group / tile_rows
    heads = f"{key_heads} KV head" + ("s" if key_heads > 1 else "")
    caption = (
        f"{query_heads} query heads on {heads}: groups of {group} in tiles of {tile_rows} rows. "
        + (f"{100 * waste:.0f} % of the arithmetic is padding; " if waste else "No row is padding; ")
        + "each key is read once."
    )
    axes.text(0, -0.75, caption, va="center", fontsize=11.5)
    axes.set(xlim=(-0.7, 14.6), ylim=(-1.05, top + 0.6))
    axes.axis("off")
    return figure


def _row(axes, left: float, top: float, index: int, width: float, color: str, padding: bool = False) -> None:
    axes.add_patch(
        Rectangle(
            (left, top - CELL * (index + 1) + 0.03),
            width,
            CELL - 0.06,
            facecolor="none" if padding else color,
            edgecolor=MUTED if padding else color,
            linewidth=0.9,
            hatch="///" if padding else None,
            linestyle="-",
            alpha=0.55 if padding else 0.85,
        )
    )


def _draw_heads(axes, top: float, query_heads: int, group: int) -> None:
    for head in range(query_heads):
        _row(axes, 0, top, head, WIDTH, BLUE if head < group else "#C9D2DA")
        axes.text(-0.12, top - CELL * (head + 0.5), str(head), ha="right", va="center", fontsize=9, color=MUTED)
    axes.text(0, top + 0.2, f"query [{query_heads}, head_dim]", fontsize=11, fontweight="bold")


def _draw_tile(axes, left: float, top: float, group: int, tile_rows: int) -> None:
    for row in range(tile_rows):
        _row(axes, left, top, row, WIDTH, BLUE, padding=row >= group)
    axes.text(left, top + 0.2, f"tile [{tile_rows}, head_dim]", fontsize=11, fontweight="bold")
    if tile_rows > group:
        axes.text(
            left + WIDTH / 2,
            top - CELL * (group + tile_rows) / 2,
            "masked off",
            ha="center",
            va="center",
            color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 2, "alpha": 0.9},
        )


def _draw_scores(axes, left: float, top: float, group: int, tile_rows: int, key_rows: int) -> None:
    """The key tile stands between the tile of queries and their scores."""
    key_left, score_left = left + 0.65, left + 4.25
    height = CELL * min(tile_rows, 12)
    axes.text(left + 0.32, top - height / 2, "·", ha="center", va="center", fontsize=22)
    axes.add_patch(Rectangle((key_left, top - height), 2.6, height, facecolor=GREEN, alpha=0.8, edgecolor="none"))
    axes.text(
        key_left + 1.3,
        top - height / 2,
        f"{key_rows} keys of\nKV head 0,\nread once",
        ha="center",
        va="center",
        color="white",
        fontweight="bold",
    )
    axes.text(key_left, top + 0.2, f"Kᵀ [head_dim, {key_rows}]", fontsize=11, fontweight="bold")
    axes.text(left + 3.72, top - height / 2, "=", ha="center", va="center", fontsize=18)
    for row in range(tile_rows):
        _row(axes, score_left, top, row, 2.6, ORANGE, padding=row >= group)
    axes.text(score_left, top + 0.2, f"scores [{tile_rows}, {key_rows}]", fontsize=11, fontweight="bold")
