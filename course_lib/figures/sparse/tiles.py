"""The tiles of a mask: hidden, cut by its edge, or whole; and what three ways of skipping pay for the hidden ones."""

import torch
from matplotlib.patches import Patch, Rectangle

from course_lib.figures.style import BLUE, GRID, INK, ORANGE, PAPER, RED, SKY, new_figure, styled

HIDDEN, CUT, WHOLE = range(3)
COLORS = {HIDDEN: GRID, CUT: SKY, WHOLE: BLUE}
PAYS = {"loaded for nothing": RED, "tested, then skipped": ORANGE, "loaded, masked": SKY, "loaded, whole": BLUE}


def tile_kinds(visible: torch.Tensor, block: int) -> torch.Tensor:
    """HIDDEN, CUT or WHOLE of each tile of a mask, [query_tiles, key_tiles]: whole if complete, and seen all over."""
    rows, columns = (-(-length // block) for length in visible.shape)
    padded = visible.new_zeros(rows * block, columns * block)
    padded[: visible.shape[0], : visible.shape[1]] = visible
    seen = padded.view(rows, block, columns, block).sum(dim=(1, 3))  # [rows, columns]
    return torch.where(seen == block * block, WHOLE, torch.where(seen > 0, CUT, HIDDEN))


def level_costs(kinds: torch.Tensor) -> dict[str, dict[str, int]]:
    """How many tiles each level pays for, and how: {level: {a key of PAYS: tiles}}. All of them end at the diagonal."""
    cut, whole = int((kinds == CUT).sum()), int((kinds == WHOLE).sum())
    last_seen = torch.where(kinds != HIDDEN, torch.arange(kinds.shape[1]), -1).amax(dim=1)  # [query_tiles]
    hidden = int((last_seen + 1).sum()) - cut - whole  # before the window: causal kernels stop at the diagonal anyway
    needed = {"loaded, masked": cut, "loaded, whole": whole}
    return {
        "mask": {"loaded for nothing": hidden, "loaded, masked": cut + whole},
        "skip": {"tested, then skipped": hidden, "loaded, masked": cut + whole},
        "bound": needed,
    }


@styled
def draw_window_tiles(length: int = 2048, window: int = 512, block: int = 128):
    """Left, the tiles of a causal window of `window` keys, the query's own among them. Right, what each level pays.

    Raises a ValueError for a window below 1 or more than 40 tiles in a row.
    """
    if window < 1 or block < 1 or not block <= length <= 40 * block:
        raise ValueError(f"length {length}, window {window} and block {block}; draw 1 to 40 tiles, and 1 key or more.")
    positions = torch.arange(length)
    distance = positions[:, None] - positions  # from a key to its query, [length, length]
    kinds = tile_kinds((distance >= 0) & (distance < window), block)
    figure, (tiles, bars) = new_figure(11, 4.6, columns=2, width_ratios=(1, 1.25))
    for row, line in enumerate(kinds.tolist()):
        for column, kind in enumerate(line):
            corner = (column + 0.06, row + 0.06)
            tiles.add_patch(Rectangle(corner, 0.88, 0.88, facecolor=COLORS[kind], edgecolor="none"))
    tiles.set(xlim=(0, kinds.shape[1]), ylim=(kinds.shape[0], 0), aspect="equal", xticks=[], yticks=[])
    tiles.set(xlabel=f"tiles of {block} keys", ylabel=f"tiles of {block} queries")
    tiles.set_title(f"{length:,} tokens, a window of {window:,}", fontsize=12.5)
    tiles.spines[:].set_visible(False)
    names = {HIDDEN: "no pair is seen", CUT: "some are: needs the mask", WHOLE: "all are: needs none"}
    handles = [Patch(facecolor=COLORS[kind], label=name) for kind, name in names.items()]
    tiles.legend(handles=handles, loc="upper right", frameon=True, facecolor=PAPER, edgecolor="none", framealpha=0.92)

    costs = level_costs(kinds)
    for place, paid in enumerate(costs.values()):
        left = 0
        for name, count in paid.items():
            bars.barh(place, count, left=left, height=0.6, color=PAYS[name])
            left += count
        bars.text(left + 1, place, f"{left} steps", va="center", color=INK)
    bars.set_yticks(range(3), ["1 mask", "2 skip", "3 bound"])
    bars.set(ylim=(2.6, -0.6), xlim=(0, 1.22 * max(sum(paid.values()) for paid in costs.values())))
    bars.set(xlabel="steps of the loop, of all tiles of queries")
    bars.set_title("what each level pays for", fontsize=12.5)
    bars.grid(axis="y", visible=False)
    bars.legend(handles=[Patch(facecolor=color, label=name) for name, color in PAYS.items()], loc="lower right")
    return figure
