"""A step in time where the rows of a tile are full: FlashMLA with 16 heads and 1 to 5 query tokens, as reported."""

from course_lib.figures.style import BLUE, INK, MUTED, RED, new_figure, styled

# github.com/deepseek-ai/FlashMLA/issues/30: milliseconds by query tokens; H20, 16 heads, a context of 4096.
REPORTED = {1: 0.601, 2: 0.606, 3: 0.609, 4: 0.614, 5: 1.168}


@styled
def draw_tile_steps(heads: int = 16, tile_rows: int = 64, times: dict[int, float] = REPORTED):
    """Bars of the reported times, with the rows and tiles that each number of query tokens makes.

    Args:
        heads: query heads.
        tile_rows: rows that one tile multiplies.
        times: milliseconds by query tokens.
    """
    figure, axes = new_figure(9, 4.2)
    one = times[min(times)]
    for tokens, milliseconds in times.items():
        rows = heads * tokens
        tiles = -(-rows // tile_rows)
        axes.bar([tokens], [milliseconds], width=0.62, color=BLUE if tiles == 1 else RED)
        words = f"{milliseconds:.3f} ms\n{rows} rows: {tiles} tile" + ("s" if tiles > 1 else "")
        axes.annotate(words, (tokens, milliseconds), xytext=(0, 5), textcoords="offset points", ha="center", color=INK)
    for tiles in (1, 2):
        axes.axhline(tiles * one, color=MUTED, linewidth=1, linestyle=(0, (2, 3)), zorder=0)
    axes.set(
        xticks=list(times),
        ylim=(0, 1.35 * max(times.values())),
        xlabel="query tokens",
        ylabel="time of a step [ms]",
        title=f"{heads} heads in tiles of {tile_rows} rows (reported for FlashMLA on an H20)",
    )
    axes.grid(axis="x", visible=False)
    return figure
