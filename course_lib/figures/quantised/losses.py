"""What a token leaves in each cache, and beside it the loss of the model that reads from it: a row for each cache."""

from collections.abc import Mapping

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, new_figure, styled


@styled
def draw_cache_losses(points: Mapping[str, tuple[float, float]], title: str = "The model with its cache in fewer bits"):
    """Bars of bytes, and points of loss with a line at the first cache's; names at the left.

    Args:
        points: {name: (bytes that a token leaves in all layers, loss in nats a byte)}; the first is what the others
            are compared with.
        title: above the picture.

    Returns a figure. Raises a ValueError when there is nothing to draw, or bytes that are not above 0.
    """
    if not points or any(size <= 0 for size, _ in points.values()):
        raise ValueError(f"points is {dict(points)!r}; give at least one, each with bytes above 0.")
    sizes, losses = zip(*points.values())
    rows = range(len(points))
    figure, (left, right) = new_figure(10.5, 0.48 * len(points) + 1.7, columns=2, sharey=True, width_ratios=(1, 1.7))
    left.barh(rows, sizes, height=0.62, color=BLUE)
    for row, size in zip(rows, sizes):
        left.annotate(f"{size:,.0f}", (size, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=11)
    left.set(xlim=(0, 1.25 * max(sizes)), xlabel="bytes of a token, all layers")
    left.set_yticks(rows, list(points), color=INK, fontsize=11.5)
    left.set_ylim(len(points) - 0.45, -0.55)
    left.grid(axis="y", visible=False)
    right.axvline(losses[0], color=MUTED, linewidth=1.2, linestyle=(0, (3, 3)))
    right.plot(losses, rows, linestyle="none", marker="o", markersize=10, color=ORANGE, markeredgecolor=INK)
    for row, loss in zip(rows, losses):
        right.annotate(f"{loss:.4f}", (loss, row), xytext=(10, 0), textcoords="offset points", va="center", fontsize=11)
    room = max(max(losses) - min(losses), 0.002)
    right.set(xlim=(min(losses) - 0.1 * room, max(losses) + 0.25 * room), xlabel="loss on unseen text [nats a byte]")
    right.ticklabel_format(axis="x", useOffset=False)
    right.locator_params(axis="x", nbins=5)
    figure.suptitle(title, x=0.02, ha="left", color=INK, weight="bold", size=14)
    return figure
