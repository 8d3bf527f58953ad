"""What a warp's load fetches: 32 lanes, the elements that they ask for, and the sectors that have to come."""

from matplotlib.patches import Rectangle

from course_lib.figures.style import BLUE, GRID, INK, ORANGE, new_figure, styled

LANES = 32
SECTOR_BYTES = 32


@styled
def draw_sectors(strides=(1, 2, 8), item_bytes: int = 4):
    """The memory under one warp's load, for lanes `stride` elements apart.

    Each small cell is an element: blue where a lane asks for it, orange where it is fetched all the same, because
    memory comes in sectors of 32 bytes.

    Args:
        strides: distances between neighbouring lanes, in elements; at most 8 are drawn to the end.
        item_bytes: bytes of an element.
    """
    per_sector = SECTOR_BYTES // item_bytes
    elements = (LANES - 1) * max(strides) + 1
    width = -(-elements // per_sector) * per_sector
    figure, axes = new_figure(10, 0.9 + 0.85 * len(strides))
    for row, stride in enumerate(strides):
        bottom = len(strides) - 1 - row
        asked = {lane * stride for lane in range(LANES)}
        fetched = {position // per_sector for position in asked}
        for position in range(width):
            color = BLUE if position in asked else ORANGE if position // per_sector in fetched else GRID
            axes.add_patch(Rectangle((position, bottom), 1, 0.42, facecolor=color, linewidth=0))
        for sector in range(width // per_sector + 1):
            axes.plot([sector * per_sector] * 2, [bottom, bottom + 0.42], color="white", linewidth=1.2)
        count = len(fetched)
        used = 100 * LANES * item_bytes / (count * SECTOR_BYTES)
        text = (
            f"stride {stride}: {LANES} lanes ask for {LANES * item_bytes} bytes, and {count} sectors of "
            f"{SECTOR_BYTES} bytes come: {used:g} % used"
        )
        axes.text(0, bottom + 0.5, text, color=INK, fontsize=10.5, va="bottom")
    for color, name in ((BLUE, "asked for"), (ORANGE, "fetched with it"), (GRID, "left alone")):
        axes.plot([], [], marker="s", linestyle="none", markersize=9, color=color, label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3, borderaxespad=0)
    axes.set(xlim=(-1, width + 1), ylim=(-0.05, len(strides) - 0.15))
    axes.axis("off")
    return figure
