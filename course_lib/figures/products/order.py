"""Which tiles of a product are at work together, row by row and in strips, and what they load."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, PAPER, RED, new_figure, styled

TileAt = Callable[[int, int, int, int], Sequence[int]]


def tiles_at_work(tile_at: TileAt, programs: int, row_tiles: int, column_tiles: int, strip: int) -> np.ndarray:
    """bool [row_tiles, column_tiles]: the tiles of the first programs."""
    at_work = np.zeros((row_tiles, column_tiles), dtype=bool)
    for number in range(min(programs, row_tiles * column_tiles)):
        at_work[tuple(tile_at(number, row_tiles, column_tiles, strip))] = True
    return at_work


@styled
def draw_order(tile_at: TileAt, programs: int, row_tiles: int, column_tiles: int, strips: Sequence[int]):
    """A panel for each strip: tiles at work in blue; in orange and red the tiles of x and of weight that they load.

    Args:
        tile_at: `tile_at(number, row_tiles, column_tiles, strip)` gives a program's row tile and column tile.
        programs: so many of them are at work.
    """
    figure, all_axes = new_figure(11, 6.4, columns=len(strips), squeeze=False)
    for axes, strip in zip(all_axes[0], strips):
        at_work = tiles_at_work(tile_at, programs, row_tiles, column_tiles, strip)
        axes.imshow(at_work, cmap=ListedColormap([PAPER, BLUE]), vmin=0, vmax=1, aspect="auto",
                    extent=(0, column_tiles, row_tiles, 0))  # fmt: skip
        rows, columns = at_work.any(axis=1), at_work.any(axis=0)
        for row in np.flatnonzero(rows).tolist():
            axes.add_patch(Rectangle((-1.6, row), 1.1, 1, facecolor=ORANGE, edgecolor=PAPER, linewidth=0.4))
        for column in np.flatnonzero(columns).tolist():
            axes.add_patch(Rectangle((column, -3.2), 1, 2.2, facecolor=RED, edgecolor=PAPER, linewidth=0.4))
        axes.add_patch(Rectangle((0, 0), column_tiles, row_tiles, fill=False, edgecolor=MUTED, linewidth=1))
        how = "row by row" if strip == 1 else f"in strips of {strip}"
        loaded = int(rows.sum()), int(columns.sum())
        axes.set_title(f"{how}: {loaded[0]} + {loaded[1]} = {sum(loaded)} tiles loaded", fontsize=12)
        axes.set(xlim=(-2, column_tiles + 0.3), ylim=(row_tiles + 0.3, -3.6), xlabel="column tile")
        axes.grid(visible=False)
    all_axes[0][0].set_ylabel("row tile")
    figure.supxlabel("orange: tiles of x, red: tiles of weight, for one block of inner", color=INK, fontsize=11)
    return figure
