"""How much of what a cache holds is kept by fewer numbers a token."""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import PercentFormatter

from course_lib.figures.style import INK, MUTED, PALETTE, new_figure, styled

DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1, 2)))


@styled
def draw_energy(
    curves: Mapping[str, Sequence[float]], *, share: float = 0.99, mark: int | None = None, title: str | None = None
):
    """A line for each name: the share of the sum of squares that the best approximation of rank r keeps.

    Args:
        curves: {name: shares kept by rank 1, 2, ...}, as `course_lib.models.low_rank.energy_kept` gives them; one to
            seven lines, which may be of different length.
        share: a level to compare them at, from 0 to 1: the least rank that reaches it is marked on each line.
        mark: numbers a token of a cache that stands beside them, a vertical line.
        title: above the picture.

    Raises a ValueError when there is nothing to draw, or more lines than there are colours.
    """
    if not 1 <= len(curves) <= len(PALETTE) or not all(len(kept) for kept in curves.values()):
        raise ValueError(f"curves has {len(curves)} lines; it must have 1 to {len(PALETTE)}, each with a point.")
    figure, axes = new_figure(9.5, 4.8)
    longest = max(len(kept) for kept in curves.values())
    axes.axhline(share, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for index, (name, kept) in enumerate(curves.items()):
        kept = [float(value) for value in kept]
        rank = next((r for r, value in enumerate(kept, 1) if value >= share - 1e-12), len(kept))
        axes.plot(
            range(1, len(kept) + 1),
            kept,
            color=PALETTE[index],
            linestyle=DASHES[index % len(DASHES)],
            label=f"{name}: {share:.4g} from rank {rank} on".replace(f"{share:.4g}", f"{100 * share:.4g} %"),
        )
        axes.plot([rank], [kept[rank - 1]], marker="o", markersize=8, color=PALETTE[index], markeredgecolor=INK)
    if mark is not None:
        axes.axvline(mark, color=INK, linewidth=1.2, zorder=1)
        axes.annotate(
            f"{mark} numbers a token", (mark, 0), xytext=(6, 8), textcoords="offset points", color=INK, va="bottom"
        )
    axes.set(xlim=(0, longest + 1), ylim=(0, 1.03))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xlabel="rank: numbers kept of a token in a layer", ylabel="share of the sum of squares kept")
    axes.set_title("How few numbers can stand for a token's keys and values" if title is None else title)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.12))
    return figure
