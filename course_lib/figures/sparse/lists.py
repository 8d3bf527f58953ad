"""A mask beside its block lists: the tiles that each row of tiles visits, and, transposed, those of each column."""

import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle

from course_lib.figures.sparse.tiles import COLORS, CUT, WHOLE, tile_kinds
from course_lib.figures.style import INK, MUTED, PAPER, new_figure, styled

NAMES = {WHOLE: "full", CUT: "partial"}


def listed(kinds: torch.Tensor, kind: int) -> list[list[int]]:
    """The tiles of one kind in each row, ascending."""
    return [row.eq(kind).nonzero().flatten().tolist() for row in kinds]


@styled
def draw_block_lists(visible: torch.Tensor, block: int):
    """Three panels: the mask in its tiles, the lists of its rows, and those of its columns.

    Args:
        visible: bool [query_length, key_length], at most 64 long and 12 tiles.
        block: rows and columns of a tile.
    """
    kinds = tile_kinds(visible, block)
    if max(visible.shape) > 64 or max(kinds.shape) > 12:
        raise ValueError(f"A mask of {tuple(visible.shape)} in tiles of {block} is too large to be read.")
    figure, (mask, rows, columns) = new_figure(11.5, 4.3, columns=3, width_ratios=(1, 1.05, 1.05))
    _draw_mask(mask, visible, kinds, block)
    _draw_lists(rows, kinds, "row", "visits the key tiles")
    _draw_lists(columns, kinds.T, "column", "is visited by the query tiles")
    return figure


def _draw_mask(axes, visible, kinds, block: int) -> None:
    image = [
        [to_rgb(COLORS[int(kinds[i // block, j // block])] if seen else PAPER) for j, seen in enumerate(line)]
        for i, line in enumerate(visible.tolist())
    ]
    height, width = visible.shape
    axes.imshow(image, interpolation="nearest", aspect="auto", extent=(0, width, height, 0))
    for place in range(0, height + 1, block):
        axes.axhline(place, color=MUTED, linewidth=0.8)
    for place in range(0, width + 1, block):
        axes.axvline(place, color=MUTED, linewidth=0.8)
    axes.set_xticks([(tile + 0.5) * block for tile in range(kinds.shape[1])], range(kinds.shape[1]))
    axes.set_yticks([(tile + 0.5) * block for tile in range(kinds.shape[0])], range(kinds.shape[0]))
    axes.set(xlim=(0, width), ylim=(height, 0), xlabel="key tile", ylabel="query tile")
    axes.grid(visible=False)
    axes.set_title("the mask", fontsize=12.5)


def _draw_lists(axes, kinds, name: str, does: str) -> None:
    """A line for each row of `kinds`: boxes with the numbers of its full tiles, then of its partial ones."""
    widest = 0
    for place, (full, partial) in enumerate(zip(listed(kinds, WHOLE), listed(kinds, CUT))):
        axes.text(-0.4, place + 0.5, str(place), ha="right", va="center", color=MUTED)
        for step, (number, kind) in enumerate([(one, WHOLE) for one in full] + [(one, CUT) for one in partial]):
            axes.add_patch(Rectangle((step, place + 0.1), 0.86, 0.8, facecolor=COLORS[kind], edgecolor="none"))
            ink = "white" if kind == WHOLE else INK
            axes.text(step + 0.43, place + 0.5, str(number), ha="center", va="center", color=ink, fontsize=10.5)
        widest = max(widest, len(full) + len(partial))
    axes.set(xlim=(-1, max(4, widest) + 0.2), ylim=(len(kinds) + 1.1, -0.1))
    axes.axis("off")
    handles = [Patch(facecolor=COLORS[kind], label=label) for kind, label in NAMES.items()]
    axes.legend(handles=handles, loc="lower left", ncols=2)
    axes.set_title(f"a {name} {does}", fontsize=12.5)
