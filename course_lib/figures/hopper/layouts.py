"""Which thread and register holds which element of a tile, and where swizzled shared memory keeps each row's pieces.

Three layouts of 16-bit tiles, as chapter 09's Gluon kernels name them for four warps:

    BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])            64 columns: how 9.7 holds a tile in registers
    NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])    where wgmma leaves a result, float32
    NVMMASharedLayout, 128-byte swizzle                      a tile in shared memory, rows of 128 bytes

The functions below are these layouts as arithmetic; a test compares them with Triton's own.
"""

from matplotlib.patches import Rectangle

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, PAPER, PURPLE, SKY, new_figure, styled

LANES = 32  # threads of a warp
SHOWN_ROWS = 16
PIECES = 8  # of 16 bytes in a row of 128
WIDTH, HEIGHT, LOW = 1.0, 0.62, 0.46  # of a cell; LOW is a row's height where two panels stand below each other
LEFT = (0.0, 10.1, 20.2)  # of the three panels
WARP_COLORS = (BLUE, GREEN, PURPLE, SKY)


def blocked_holder(row: int, column: int) -> tuple[int, int, int]:
    """(warp, lane, register) that holds an element of a tile of 64 columns in the blocked layout."""
    return row // 4 % 4, row % 4 * 8 + column // 8, row // 16 * 8 + column % 8


def wgmma_holder(row: int, column: int) -> tuple[int, int, int]:
    """(warp, lane, register) that holds an element of a result [64, columns] of wgmma."""
    return row // 16, row % 8 * 4 + column % 8 // 2, column // 8 * 4 + row // 8 % 2 * 2 + column % 2


def swizzled_place(row: int, piece: int) -> int:
    """Where in its row of 128 bytes a piece of 16 bytes lies under the 128-byte swizzle, from 0 to 7."""
    return piece ^ row % 8


@styled
def draw_layouts():
    """Three panels: a blocked tile, a corner of wgmma's result, and a column of pieces without and with the swizzle."""
    figure, axes = new_figure(12.4, 6.5)
    top = HEIGHT * SHOWN_ROWS
    _registers(axes, LEFT[0], top, blocked_holder, 8)
    _head(axes, LEFT[0], top, "In registers, blocked", "tile of 64 × 64; a cell is 1 row × 8 columns")
    _registers(axes, LEFT[1], top, wgmma_holder, 2)
    _head(axes, LEFT[1], top, "In registers, as wgmma leaves it", "tile of 64 × 128; a cell is 1 row × 2 columns")
    _pieces(axes, LEFT[2], top, lambda row, piece: piece)
    _head(axes, LEFT[2], top, "In shared memory, plain", "a cell is 16 bytes, 8 columns; a row is all 32 banks")
    below = LOW * PIECES
    _pieces(axes, LEFT[2], below, swizzled_place)
    _head(axes, LEFT[2], below, "128-byte swizzle", "piece p of row r lies at p xor (r mod 8)")
    foot = {"fontsize": 9.5, "color": INK, "va": "top", "linespacing": 1.5}
    axes.text(
        LEFT[0],
        -0.35,
        "Cells: lane 0 to 31 of the warp in that colour.\n"
        "Orange: lane 0 of warp 0, values numbered.\n"
        "Rows 16 to 31 repeat this with r8 to r15, and so\n"
        "on: 32 values, two to a register.",
        **foot,
    )
    axes.text(
        LEFT[1],
        -0.35,
        "Warp 0 holds rows 0 to 15, warp 1 rows 16 to 31,\n"
        "and so on. Columns 16 to 127 go on the same way:\n"
        "lane 0 holds two of every 8 columns, in two rows:\n"
        "64 float32 in 64 registers.",
        **foot,
    )
    axes.text(
        LEFT[2],
        -0.35,
        "Orange: piece 0 of each row, read together.\n"
        "Plain: 8 pieces in the same 4 banks, 8 turns.\n"
        "Swizzled: in 32 different banks, one turn.",
        **foot,
    )
    axes.set(xlim=(-1.0, LEFT[2] + 8.9), ylim=(-3.1, top + 2.1))
    axes.axis("off")
    return figure


def _head(axes, left: float, top: float, title: str, subtitle: str) -> None:
    axes.text(left, top + 1.15, title, fontsize=12.5, fontweight="bold")
    axes.text(left, top + 0.62, subtitle, fontsize=9.5, color=MUTED)


def _cell(axes, left: float, top: float, text: str, color: str, strong: bool = False, height: float = HEIGHT) -> None:
    """A cell by its upper left corner."""
    corner = left, top - height
    axes.add_patch(Rectangle(corner, WIDTH, height, facecolor=color, alpha=1.0 if strong else 0.22, edgecolor="none"))
    axes.add_patch(Rectangle(corner, WIDTH, height, facecolor="none", edgecolor=PAPER, linewidth=1.2))
    axes.text(
        left + WIDTH / 2,
        top - height / 2,
        text,
        ha="center",
        va="center",
        fontsize=7.5 if strong else 8.5,
        fontweight="bold" if strong else "normal",
        color=INK,
    )


def _row_numbers(axes, left: float, top: float, rows: int, height: float) -> None:
    for row in range(rows):
        middle = top - (row + 0.5) * height
        axes.text(left - 0.15, middle, str(row), ha="right", va="center", fontsize=8.5, color=MUTED)


def _registers(axes, left: float, top: float, holder, columns: int) -> None:
    """The first 16 rows and 8 cells of `columns` columns, which one lane holds in neighbouring registers."""
    for row in range(SHOWN_ROWS):
        for place in range(8):
            warp, lane, first = holder(row, place * columns)
            last = holder(row, place * columns + columns - 1)[2]
            ours = (warp, lane) == (0, 0)
            text = f"r{first}–{last}" if ours else str(lane)
            color = ORANGE if ours else WARP_COLORS[warp]
            _cell(axes, left + place * WIDTH, top - row * HEIGHT, text, color, strong=ours)
    _row_numbers(axes, left, top, SHOWN_ROWS, HEIGHT)
    for row in range(SHOWN_ROWS):
        warp = holder(row, 0)[0]
        if row == 0 or holder(row - 1, 0)[0] != warp:
            end = max(r for r in range(SHOWN_ROWS) if holder(r, 0)[0] == warp) + 1
            axes.text(
                left + 8 * WIDTH + 0.12,
                top - (row + end) / 2 * HEIGHT,
                f"warp {warp}",
                rotation=270,
                va="center",
                fontsize=8.5,
                color=INK,
            )


def _pieces(axes, left: float, top: float, place_of) -> None:
    """Eight rows of eight pieces, each where it lies; piece 0 of each row stands out."""
    for row in range(8):
        for piece in range(PIECES):
            color = ORANGE if piece == 0 else BLUE
            corner = left + place_of(row, piece) * WIDTH, top - row * LOW
            _cell(axes, *corner, f"p{piece}", color, strong=piece == 0, height=LOW)
    _row_numbers(axes, left, top, 8, LOW)
