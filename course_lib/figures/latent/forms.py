"""The two ways from a cached row to an output, side by side: keys and values of all heads, or an absorbed query."""

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, RED, new_figure, styled


def _box(axes, x, y, words, color, width=2.5, height=0.86):
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0.02,rounding_size=0.08",
            facecolor="white",
            edgecolor=color,
            linewidth=2,
        )
    )
    axes.text(x, y, words, ha="center", va="center", fontsize=10, color=INK)


def _arrow(axes, start, end, words="", color=MUTED):
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=13, color=color, linewidth=1.6, shrinkA=0, shrinkB=0
        )
    )
    if words:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        axes.text(middle[0] + 0.1, middle[1], words, va="center", fontsize=9.5, color=INK)


@styled
def draw_two_forms(heads: int = 128, head_dim: int = 128, latent_dim: int = 512, rope_dim: int = 64):
    """Two columns of boxes, from the cache to a head's output, with what each holds for a token or for a query."""
    figure, axes = new_figure(11.5, 5.6)
    full = 2 * heads * head_dim
    for left, title, color in ((0.0, "expanded", BLUE), (7.0, "absorbed", ORANGE)):
        axes.text(left + 1.6, 5.15, title, fontsize=13, fontweight="bold", color=color, ha="center")
        _box(axes, left, 4.3, f"cache, of a token:\nlatent {latent_dim}, rotary key {rope_dim}", MUTED, 2.9)
        _box(axes, left + 3.6, 4.3, f"query of a head:\n{head_dim}, rotary {rope_dim}", MUTED, 2.5)
        _box(axes, left + 3.6, 0.2, f"output of a head:\n{head_dim}", MUTED, 2.5)
    _box(axes, 0.0, 2.6, f"keys and values of a token,\nall {heads} heads: {full:,}", RED, 2.9)
    _arrow(axes, (0, 3.87), (0, 3.03), "W_UK, W_UV\nfor every token", RED)
    _box(axes, 3.6, 1.6, f"scores: {head_dim + rope_dim} terms\nsum: {head_dim} numbers", BLUE, 2.5)
    _arrow(axes, (1.45, 2.4), (2.35, 1.75))
    axes.text(1.0, 1.85, "of this head", ha="center", va="center", fontsize=9.5)
    _arrow(axes, (1.45, 3.95), (2.6, 2.06))
    axes.text(2.15, 3.3, "rotary key", ha="left", va="center", fontsize=9.5)
    _arrow(axes, (3.6, 3.87), (3.6, 2.03))
    _arrow(axes, (3.6, 1.17), (3.6, 0.63))
    _box(axes, 10.6, 2.85, f"absorbed query:\n{latent_dim}, rotary {rope_dim}", ORANGE, 2.5)
    _arrow(axes, (10.6, 3.87), (10.6, 3.28), "W_UK, once")
    _box(axes, 10.6, 1.6, f"scores: {latent_dim + rope_dim} terms\nsum: {latent_dim} numbers", ORANGE, 2.5)
    _arrow(axes, (10.6, 2.42), (10.6, 2.03))
    _arrow(axes, (7.0, 3.87), (9.3, 1.75), color=ORANGE)
    axes.text(7.5, 2.5, "as it is,\nkey and value", ha="right", va="center", fontsize=9.5)
    _arrow(axes, (10.6, 1.17), (10.6, 0.63), "W_UV, once")
    axes.set(xlim=(-1.6, 12.9), ylim=(-0.4, 5.5))
    axes.axis("off")
    return figure
