"""Which query head reads which KV head: multi-head, grouped and multi-query attention side by side."""

from matplotlib.patches import FancyBboxPatch

from course_lib.figures.style import INK, MUTED, PALETTE, new_figure, styled

COLORS = (*PALETTE, MUTED)  # one more, so that eight heads have eight
GAP = 1.6  # between two panels, in widths of a head
QUERY_ROW, KEY_ROW = 1.75, 0.0


def key_head_of(query_head: int, query_heads: int, key_heads: int) -> int:
    """Neighbours share a KV head."""
    return query_head // (query_heads // key_heads)


def kind_of(query_heads: int, key_heads: int) -> str:
    """What attention with these heads is called."""
    if key_heads == query_heads:
        return "multi-head (MHA)"
    return "multi-query (MQA)" if key_heads == 1 else "grouped-query (GQA)"


@styled
def draw_head_maps(query_heads: int = 8, key_heads: tuple[int, ...] = (8, 2, 1)):
    """One panel for each number of KV heads: query heads above, KV heads below, a line from each to the one it reads.

    Args:
        query_heads: 1 to 16, the same in every panel.
        key_heads: for each panel a number that divides query_heads; up to 4 panels.

    Raises:
        ValueError: heads that don't divide, or more than can be read.
    """
    if not 1 <= query_heads <= 16 or not 1 <= len(key_heads) <= 4:
        raise ValueError(f"{query_heads} query heads in {len(key_heads)} panels; at most 16 in 4 can be drawn.")
    for number in key_heads:
        if number < 1 or query_heads % number:
            raise ValueError(f"key_heads has {number}, which does not divide query_heads = {query_heads}.")
    width = len(key_heads) * (query_heads + GAP) - GAP
    figure, axes = new_figure(min(11, 1.5 + 0.37 * width), 3.1)
    for panel, number in enumerate(key_heads):
        _draw_panel(axes, panel * (query_heads + GAP), query_heads, number)
    axes.text(-0.5, QUERY_ROW, "query\nheads", ha="right", va="center", color=MUTED)
    axes.text(-0.5, KEY_ROW, "KV\nheads", ha="right", va="center", color=MUTED)
    axes.set(xlim=(-2.2, width + 0.3), ylim=(-1.5, 3.05))
    axes.axis("off")
    return figure


def _draw_panel(axes, left: float, query_heads: int, key_heads: int) -> None:
    group = query_heads // key_heads
    for head in range(query_heads):
        key_head = key_head_of(head, query_heads, key_heads)
        color = COLORS[key_head % len(COLORS)]
        center = left + (key_head + 0.5) * group
        axes.plot([left + head + 0.5, center], [QUERY_ROW - 0.4, KEY_ROW + 0.4], color=color, linewidth=1.5, zorder=1)
        _draw_head(axes, left + head + 0.5, QUERY_ROW, str(head), color, filled=False)
    for key_head in range(key_heads):
        color = COLORS[key_head % len(COLORS)]
        _draw_head(axes, left + (key_head + 0.5) * group, KEY_ROW, str(key_head), color, filled=True)
    middle = left + query_heads / 2
    axes.text(middle, 2.62, kind_of(query_heads, key_heads), ha="center", fontsize=12.5, fontweight="bold", color=INK)
    caches = "the whole cache" if group == 1 else f"1/{group} of the cache"
    axes.text(middle, -1.05, f"groups of {group}: {caches}", ha="center", va="center", color=INK)


def _draw_head(axes, x: float, y: float, name: str, color: str, filled: bool) -> None:
    box = FancyBboxPatch(
        (x - 0.36, y - 0.32),
        0.72,
        0.64,
        boxstyle="round,pad=0.03",
        edgecolor=color,
        linewidth=1.6,
        facecolor=color if filled else "white",
        zorder=2,
    )
    axes.add_patch(box)
    axes.text(
        x,
        y,
        name,
        ha="center",
        va="center",
        fontsize=10.5,
        zorder=3,
        color="white" if filled else INK,
        fontweight="bold" if filled else "normal",
    )
