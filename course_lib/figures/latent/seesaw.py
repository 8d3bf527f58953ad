"""FlashMLA's seesaw, drawn: two workers that own half of the output's columns each, and one block of scores each."""

from matplotlib.patches import FancyArrowPatch, Rectangle

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, new_figure, styled

# (worker, start, length, words, colour): the left worker is in the upper lane.
STEPS = (
    (0, 0.0, 2.0, "scores of the even block", ORANGE),
    (0, 2.0, 1.5, "m₀, even weights", MUTED),
    (0, 3.5, 2.2, "left += even weights · V", BLUE),
    (0, 6.0, 2.2, "left += odd weights · V", GREEN),
    (1, 0.8, 2.0, "scores of the odd block", ORANGE),
    (1, 3.6, 1.5, "m₁, odd weights", MUTED),
    (1, 5.1, 2.2, "right += odd weights · V", GREEN),
    (1, 7.3, 2.2, "right += even weights · V", BLUE),
)


@styled
def draw_seesaw():
    """One pair of blocks: what each worker does, in order, and what passes between the two."""
    figure, axes = new_figure(11.5, 3.5)
    lanes = {0: 1.5, 1: 0.0}
    for worker, start, length, words, color in STEPS:
        axes.add_patch(Rectangle((start, lanes[worker]), length - 0.06, 0.7, facecolor=color, edgecolor="none"))
        axes.text(
            start + length / 2 - 0.03,
            lanes[worker] + 0.35,
            words.replace(" += ", " +=\n").replace(" of the ", " of\nthe ").replace(", ", ",\n"),
            ha="center",
            va="center",
            fontsize=9.5,
            color="white" if color != ORANGE else INK,
            fontweight="bold",
        )
    for worker, words in ((0, "left worker\ncolumns 0–255"), (1, "right worker\ncolumns 256–511")):
        axes.text(-0.15, lanes[worker] + 0.35, words, ha="right", va="center")
    for (x, y), (to_x, to_y), words in (
        ((3.45, 1.5), (3.75, 0.7), "m₀, even weights"),
        ((5.05, 0.7), (6.1, 1.5), "m₁, odd weights"),
    ):
        arrow = FancyArrowPatch((x, y), (to_x, to_y), arrowstyle="-|>", mutation_scale=13, color=INK, linewidth=1.5)
        axes.add_patch(arrow)
        axes.text(max(x, to_x) + 0.12, 1.1, words, va="center", fontsize=9.5)
    axes.annotate("", (9.6, -0.35), (0.0, -0.35), arrowprops={"arrowstyle": "-|>", "color": MUTED})
    axes.text(9.7, -0.35, "time", va="center", color=MUTED)
    axes.set(xlim=(-1.9, 10.2), ylim=(-0.6, 2.4))
    axes.axis("off")
    return figure
