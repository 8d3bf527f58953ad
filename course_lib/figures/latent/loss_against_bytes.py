"""What each kind of attention leaves of a token in the cache, against the loss of a model trained with it."""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import FixedLocator, FuncFormatter

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, PALETTE, PURPLE, new_figure, spread_labels, styled

# As in the other figures of caches: what a kind is called, its colour and its marker.
LOOKS = {"full heads": (PURPLE, "s"), "GQA": (BLUE, "o"), "MLA": (ORANGE, "D")}
OTHER_MARKERS = "vPXhp<>"


@styled
def draw_loss_against_bytes(points: Mapping[str, tuple[float, float | Sequence[float]]], title: str | None = None):
    """One point for each kind of attention: down is a better model, and left a smaller cache.

    Args:
        points: {name: (bytes that a token leaves in all layers, loss in nats a byte)}, or several losses, one for each
            training: a small point for each then, and the large one at their mean.
        title: above the picture.

    Raises a ValueError when there is nothing to draw, or bytes that are not above 0.
    """
    if not points or any(size <= 0 for size, _ in points.values()):
        raise ValueError(f"points is {dict(points)!r}; give at least one, each with bytes above 0.")
    figure, axes = new_figure(9, 4.8)
    found = {}  # name -> (bytes, mean loss, all losses)
    for name, (size, losses) in points.items():
        every = list(losses) if isinstance(losses, Sequence) else [losses]
        found[name] = (size, sum(every) / len(every), every)
    lowest, highest = (pick(loss for *_, every in found.values() for loss in every) for pick in (min, max))
    room = max(highest - lowest, 0.01)
    axes.set(xscale="log", ylim=(lowest - 0.25 * room, highest + 0.25 * room))
    sizes = sorted({size for size, *_ in found.values()})
    axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 2.1)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.minorticks_off()
    heights = spread_labels([mean for _, mean, _ in found.values()], 0.11 * room)
    for index, ((name, (size, mean, every)), height) in enumerate(zip(found.items(), heights)):
        color, marker = LOOKS.get(name, (PALETTE[index % len(PALETTE)], OTHER_MARKERS[index % len(OTHER_MARKERS)]))
        if len(every) > 1:
            axes.plot([size] * len(every), every, linestyle="none", marker=marker, markersize=5, color=color, alpha=0.5)
        axes.plot([size], [mean], linestyle="none", marker=marker, markersize=12, color=color, markeredgecolor=INK)
        axes.annotate(
            f"{name}: {mean:.2f}",
            (size, height),
            xytext=(13, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=12,
            annotation_clip=False,
        )
    axes.text(0.02, 0.05, "better: down and to the left", transform=axes.transAxes, color=MUTED, va="bottom")
    axes.set(xlabel="bytes of a token in the cache, all layers", ylabel="loss on unseen text [nats for each byte]")
    axes.set_title("What a token leaves in the cache, and how well the model predicts" if title is None else title)
    return figure
