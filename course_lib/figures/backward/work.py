"""The FLOPs of attention as blocks of one product each: two forward, five backward, seven in two kernels."""

from matplotlib.patches import Rectangle

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, PAPER, SKY, new_figure, styled

ROWS = (
    ("forward", (("S", ORANGE), ("O", ORANGE)), "2 products"),
    (
        "backward, counted",
        (("S", SKY), ("dP", BLUE), ("dV", BLUE), ("dK", BLUE), ("dQ", BLUE)),
        "5 products, 2.5 times",
    ),
    (
        "backward, two kernels",
        (("S", SKY), ("dP", BLUE), ("dV", BLUE), ("dK", BLUE), ("S", SKY), ("dP", SKY), ("dQ", BLUE)),
        "7 products, 3.5 times",
    ),
)


@styled
def draw_work():
    """Products of 2 · M · N · D FLOPs each, row by row; pale ones compute something again."""
    figure, axes = new_figure(9.5, 2.9)
    for row, (name, products, total) in enumerate(ROWS):
        y = -row
        axes.text(-0.15, y + 0.35, name, ha="right", va="center", fontsize=12, color=INK)
        for column, (product, color) in enumerate(products):
            axes.add_patch(Rectangle((column, y), 0.94, 0.7, facecolor=color, alpha=0.85, edgecolor="none"))
            axes.text(
                column + 0.47,
                y + 0.35,
                product,
                ha="center",
                va="center",
                fontsize=12,
                color=PAPER if color == BLUE else INK,
            )
        axes.text(len(products) + 0.1, y + 0.35, total, va="center", fontsize=11.5, color=MUTED)
    axes.text(-2.6, -2.75, "One block is 2 · M · N · D FLOPs. Pale blue: computed again.", fontsize=11, color=INK)
    axes.set(xlim=(-2.7, 9.6), ylim=(-3.0, 0.9))
    axes.axis("off")
    return figure
