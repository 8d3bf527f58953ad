"""The parts of a row, each with its maximum and sum, merged in pairs."""

import math

from matplotlib.patches import FancyBboxPatch

from course_lib.figures.style import INK, MUTED, PALETTE, PAPER, new_figure, styled


def merged(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """(maximum, sum) of two parts together."""
    maximum = max(first[0], second[0])
    return maximum, first[1] * math.exp(first[0] - maximum) + second[1] * math.exp(second[0] - maximum)


def merge_levels(scores, parts: int) -> list[list[tuple[float, float]]]:
    """States (maximum, sum) of each level of the tree: the parts first, the whole row last."""
    length = len(scores) // parts
    level = []
    for start in range(0, len(scores), length):
        part = scores[start : start + length]
        level.append((max(part), sum(math.exp(score - max(part)) for score in part)))
    levels = [level]
    while len(level) > 1:
        level = [merged(first, second) for first, second in zip(level[::2], level[1::2])]
        levels.append(level)
    return levels


@styled
def draw_merge_tree(scores, parts: int):
    """A row cut into parts, whose states are merged in pairs.

    Args:
        scores: numbers; as many as `parts` divides.
        parts: 2, 4 or 8.

    Raises:
        ValueError: a number of parts that makes no such tree.
    """
    if parts not in (2, 4, 8) or not scores or len(scores) % parts:
        raise ValueError(f"parts is {parts} for {len(scores)} scores; it must be 2, 4 or 8 and divide their number.")
    levels, length = merge_levels(scores, parts), len(scores) // parts
    figure, axes = new_figure(10.0, 1.6 + 1.25 * len(levels))
    span = max(scores) - min(*scores, 0)
    for position, score in enumerate(scores):
        color = PALETTE[position // length % len(PALETTE)]
        axes.bar(position, score / span, bottom=-min(*scores, 0) / span, width=0.82, color=color, alpha=0.85)
    axes.text(-0.8, 0.5, "scores", ha="right", va="center", color=MUTED)
    for depth, level in enumerate(levels):
        y = 1.75 + 1.25 * depth
        wide = length * 2**depth
        for index, (maximum, total) in enumerate(level):
            x = (index + 0.5) * wide - 0.5
            if depth:
                for child in (2 * index, 2 * index + 1):
                    below = (child + 0.5) * wide / 2 - 0.5
                    shrink = math.exp(levels[depth - 1][child][0] - maximum)
                    axes.plot([below, x], [y - 0.9, y - 0.34], color=MUTED, linewidth=1.4, zorder=1)
                    axes.text(
                        (below + x) / 2,
                        y - 0.62,
                        f"ℓ × {shrink:.2f}",
                        fontsize=10.5,
                        ha="center",
                        va="center",
                        color=INK,
                        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5},
                    )
            color = PALETTE[index % len(PALETTE)] if not depth else INK
            axes.add_patch(
                FancyBboxPatch(
                    (x - 1.55, y - 0.34),
                    3.1,
                    0.68,
                    boxstyle="round,pad=0.02,rounding_size=0.12",
                    facecolor=PAPER,
                    edgecolor=color,
                    linewidth=1.8,
                    zorder=2,
                )
            )
            axes.text(x, y, f"m = {maximum:.1f}   ℓ = {total:.2f}", ha="center", va="center", fontsize=10.5, zorder=3)
        name = "each part" if not depth else "the whole row" if len(level) == 1 else "merged"
        axes.text(-0.8, y, name, ha="right", va="center", color=MUTED)
    axes.set(xlim=(-3.1, len(scores) - 0.2), ylim=(-0.05, 2.2 + 1.25 * (len(levels) - 1)))
    axes.axis("off")
    return figure
