"""Losses of the same model trained with different attentions, over the steps."""

from course_lib.figures.style import PALETTE, new_figure, styled


@styled
def draw_losses(curves: dict[str, list[float]], title: str = "The same model, trained with each attention"):
    """One line for each name; later ones are dashed and thinner, so that lines which lie on each other all show.

    curves: {name: losses in nats a byte, one for each step}.
    """
    figure, axes = new_figure(9, 4.2)
    styles = (("-", 5.0, 0.45), ((0, (4, 3)), 2.0, 1.0), ((0, (1, 2)), 2.0, 1.0))
    for index, (name, losses) in enumerate(curves.items()):
        line, width, alpha = styles[min(index, len(styles) - 1)]
        axes.plot(
            range(1, len(losses) + 1), losses, label=name, color=PALETTE[index % len(PALETTE)], linestyle=line,
            linewidth=width, alpha=alpha,
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="loss, nats a byte", title=title)
    axes.legend(loc="upper right")
    return figure
