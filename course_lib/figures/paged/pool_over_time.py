"""Who holds which page of a pool, step by step: the same memory under two ways of handing it out."""

from collections.abc import Hashable

from matplotlib.colors import to_rgb

from course_lib.figures.style import INK, MUTED, PALETTE, PAPER, new_figure, styled

COLORS = PALETTE[:6]
PALE = 0.82  # how far an empty page of a sequence is mixed with the paper


@styled
def draw_pool_over_time(histories: dict[str, list[dict[int, tuple[Hashable, int]]]], pages: int, page_size: int):
    """A panel for each layout: a row for each page, a column for each step, in the colour of who holds the page.

    A full colour is a full page; the paler, the fewer tokens are in it.

    Args:
        histories: {layout: for each step {page: (sequence, tokens in the page)}}.
        pages, page_size: of the pool.

    Raises:
        ValueError: no layout, or one without a step.
    """
    if not histories or not all(histories.values()):
        raise ValueError("There is nothing to draw: give at least one layout, each with at least one step.")
    names = sorted({holder for steps in histories.values() for held in steps for holder, _ in held.values()}, key=str)
    color_of = {name: to_rgb(COLORS[number % len(COLORS)]) for number, name in enumerate(names)}
    longest = max(map(len, histories.values()))
    figure, axes = new_figure(11, 4.4, columns=len(histories), sharey=True, squeeze=False)
    for panel, (layout, steps) in zip(axes[0], histories.items()):
        image: list[list[tuple[float, ...]]] = [[to_rgb(PAPER)] * len(steps) for _ in range(pages)]
        for step, held in enumerate(steps):
            for page, (holder, tokens) in held.items():
                image[page][step] = mixed(color_of[holder], tokens / page_size)
        panel.imshow(image, aspect="auto", interpolation="nearest", extent=(0, len(steps), pages, 0))
        panel.set(xlim=(0, longest), ylim=(pages, 0), xlabel="step of the model")
        used = sum(tokens for held in steps for _, tokens in held.values()) / (len(steps) * pages * page_size)
        panel.set_title(f"{layout}: {len(steps)} steps, {used:.0%} full", fontsize=13)
        panel.grid(visible=False)
        if len(steps) < longest:
            panel.axvline(len(steps), color=MUTED, linewidth=1.2)
            panel.text(
                len(steps) + 0.02 * longest, pages / 2, "all are done", color=INK, va="center", ha="left", fontsize=11
            )
    axes[0][0].set_ylabel("page of the pool")
    return figure


def mixed(color, share: float) -> tuple[float, ...]:
    """A colour as pale as its page is empty: at a share of 0 nearly the paper's, at 1 the colour itself."""
    weight = (1 - PALE) + PALE * share
    return tuple(weight * own + (1 - weight) * paper for own, paper in zip(color, to_rgb(PAPER)))
