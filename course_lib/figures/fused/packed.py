"""A row of a packed QKV, head by head, and one of its heads with the two numbers of a pair."""

from matplotlib.patches import Arc, Rectangle

from course_lib.figures.style import BLUE, GREEN, GRID, INK, MUTED, PAPER, new_figure, styled

PAIRS_SHOWN = 3


@styled
def draw_packed_row(query_heads: int, key_heads: int, head_dim: int = 16):
    """Above, the heads of one token side by side: those to turn in colour, the values grey. Below, one head of
    `head_dim` numbers: arcs join the numbers of its first pairs, i and i + head_dim / 2.

    Returns a figure. Raises a ValueError for no head, or a head_dim that is odd.
    """
    if query_heads < 1 or key_heads < 1 or head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"query_heads is {query_heads}, key_heads {key_heads} and head_dim {head_dim}; there must be a head of "
            "each kind, and an even head_dim of at least 2."
        )
    figure, (row, head) = new_figure(10.5, 3.3, rows=2, height_ratios=(1, 1.5))
    parts = [("Q", query_heads, BLUE), ("K", key_heads, GREEN), ("V, not touched", key_heads, GRID)]
    left = 0
    for name, count, color in parts:
        for place in range(count):
            row.add_patch(Rectangle((left + place, 0), 1, 1, facecolor=color, edgecolor=PAPER, linewidth=1))
        row.text(left + count / 2, 1.25, name, ha="center", va="bottom", color=INK, fontsize=11.5)
        left += count
    row.set(xlim=(0, left), ylim=(-0.1, 2))
    half = head_dim // 2
    for place in range(head_dim):
        head.add_patch(Rectangle((place, 0), 1, 1, facecolor="white", edgecolor=MUTED))
        head.text(place + 0.5, 0.5, str(place), ha="center", va="center", fontsize=10.5, color=INK)
    for place in range(min(PAIRS_SHOWN, half)):
        arc = Arc((place + 0.5 + half / 2, 1), half, 1.5 + 0.7 * place, theta1=0, theta2=180, color=BLUE, linewidth=1.8)
        head.add_patch(arc)
    head.set(xlim=(0, head_dim), ylim=(-0.1, 2.8))
    head.set_title(f"one head of {head_dim} numbers: i is turned with i + {half}", fontsize=11.5, weight="normal")
    for axes in (row, head):
        axes.axis("off")
    return figure
