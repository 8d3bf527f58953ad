"""The FLOPs of attention as blocks of one product each: two forward, five backward, seven in two kernels."""

from matplotlib.patches import Rectangle

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, PAPER, new_figure, styled

AGAIN = 0.35  # how much colour a product has that the second kernel computes once more
ONCE = (("S", ORANGE, 0.85), ("dP", BLUE, 0.85), ("dV", BLUE, 0.85), ("dK", BLUE, 0.85))
ROWS = (
    ("forward", (("S", ORANGE, 0.85), ("O", ORANGE, 0.85)), "2 products"),
    ("backward, one kernel", (*ONCE, ("dQ", BLUE, 0.85)), "5 products, 2.5 times"),
    (
        "backward, two kernels",
        (*ONCE, ("S", ORANGE, AGAIN), ("dP", BLUE, AGAIN), ("dQ", BLUE, 0.85)),
        "7 products, 3.5 times",
    ),
)


@styled
def draw_work():
    """Products of 2 · M · N · D FLOPs each, row by row; pale ones are computed once more."""
    figure, axes = new_figure(9.5, 2.9)
    for row, (name, products, total) in enumerate(ROWS):
        y = -row
        axes.text(-0.15, y + 0.35, name, ha="right", va="center", fontsize=12, color=INK)
        for column, (product, color, alpha) in enumerate(products):
            axes.add_patch(Rectangle((column, y), 0.94, 0.7, facecolor=color, alpha=alpha, edgecolor="none"))
            axes.text(
                column + 0.47,
                y + 0.35,
                product,
                ha="center",
                va="center",
                fontsize=12,
                color=PAPER if color == BLUE and alpha > AGAIN else INK,
            )
        axes.text(len(products) + 0.1, y + 0.35, total, va="center", fontsize=11.5, color=MUTED)
    caption = (
        "One block is 2 · M · N · D FLOPs. Orange: products of the forward pass; the backward pass computes S again.\n"
        "Blue: products of the backward pass alone. Pale: computed once more, by the second kernel."
    )
    axes.text(-2.6, -2.75, caption, fontsize=11, va="center", color=INK)
    axes.set(xlim=(-2.7, 9.6), ylim=(-3.15, 0.9))
    axes.axis("off")
    return figure
