"""One step of a latent decode kernel: the tiles that it holds, and the two uses of the one tile that it loads."""

from matplotlib.patches import FancyArrowPatch, Rectangle

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, new_figure, styled


@styled
def draw_one_load(rows: int = 64, latent_dim: int = 512, rope_dim: int = 64, tokens: int = 32):
    """The tiles of queries, of cached rows, of scores and of the output, to scale.

    Args:
        rows: query heads of a program.
        latent_dim, rope_dim: the numbers of a cached row, which are loaded as two tiles.
        tokens: cached rows of one step.
    """
    figure, axes = new_figure(11.5, 3.3)
    width, gap = latent_dim + rope_dim, 16

    def tile(left, bottom, columns, height, color):
        axes.add_patch(
            Rectangle((left, bottom), columns, height, facecolor=color, edgecolor=color, alpha=0.35, linewidth=1.5)
        )

    def arrow(start, end, color=MUTED):
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=color, linewidth=1.6))

    def words(x, y, text, across="center", color=INK):
        axes.text(x, y, text, ha=across, va="center", fontsize=9.5, color=color)

    queries, cached, right = 250, 70, width + 330  # the bottoms of both tiles on the left; the left side of the results
    for bottom, height, color in ((queries, rows, MUTED), (cached, tokens, ORANGE)):
        tile(0, bottom, latent_dim, height, color)
        tile(latent_dim + gap, bottom, rope_dim, height, color)
    words(0, queries + rows + 22, f"queries of {rows} heads: {rows} × {latent_dim} and {rows} × {rope_dim}", "left")
    loaded = f"{tokens} × {latent_dim} and {tokens} × {rope_dim}"
    words(0, cached - 24, f"{tokens} rows of the cache, loaded once: {loaded}", "left")
    tile(right, queries, tokens, rows, BLUE)
    tile(right, cached - rows / 2 + tokens / 2, latent_dim, rows, GREEN)
    words(right + tokens + 14, queries + rows / 2, f"scores: {rows} × {tokens}", "left")
    words(right, cached - 46, f"output: {rows} × {latent_dim}, in registers to the end", "left")
    edge, middle = width + gap + 8, cached + tokens / 2
    arrow((edge, queries + rows / 2), (right - 8, queries + rows / 2))
    arrow((edge, middle + 6), (right - 8, queries + 8), BLUE)
    arrow((edge, middle), (right - 8, middle), GREEN)
    arrow((right + tokens / 2, queries - 8), (right + tokens / 2, cached + rows / 2 + tokens / 2 + 8))
    words(edge + 115, 225, "first use, as keys:\nboth tiles", "right", BLUE)
    words((edge + right) / 2, middle - 34, "second use, as values:\nthe latents alone", color=GREEN)
    words(right + tokens / 2 + 14, (queries + cached + rows) / 2 + 6, "softmax: weights", "left")
    axes.set(xlim=(-10, right + latent_dim + 10), ylim=(0, queries + rows + 40), aspect="equal")
    axes.axis("off")
    return figure
