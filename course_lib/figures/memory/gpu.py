"""The GPU in one picture: a launch, one of its programs, the multiprocessor that runs it, the chip, and its memories.

Drawn for an H100; an H200 is the same chip with other memory chips. Sizes come from the datasheets. The speeds are of
all multiprocessors together: of the HBM as the datasheet states it, of the L2 cache and of L1 as `ceilings()` measured
them on an H100 SXM at 1980 MHz (8.75 and 32.7 TB/s), of the registers computed: each float32 multiply-add reads three
of them, and the datasheet's 67 TFLOP/s are 33.5 · 10¹² multiply-adds a second.
"""

from dataclasses import dataclass

from matplotlib.patches import ConnectionPatch, FancyBboxPatch, Rectangle

from course_lib.figures.style import BLUE, GREEN, MUTED, ORANGE, PURPLE, RED, new_figure, styled
from course_lib.hardware.datasheets import DATASHEETS, KIB
from course_lib.hardware.units import format_bandwidth, format_capacity

LANES, WARPS, BLOCK = 32, 4, 1024  # of the program that is drawn: Triton's default of four warps
PARTITIONS = 4  # of a multiprocessor: each has a scheduler, registers and units of its own
WARPS_PER_SM, REGISTER_BYTES_PER_SM = 64, 256 * KIB
MEASURED_L1, MEASURED_L2 = 32.7e12, 8.75e12  # [bytes/s]
FOLLOWED = 7  # the program that is followed from panel to panel
ROWS_OF_CHIP = 12


@dataclass(frozen=True)
class Memory:
    """One memory of the whole chip: its size [bytes], its speed [bytes/s], and what to add about it."""

    name: str
    color: str
    size: float
    speed: float
    note: str


def memories() -> list[Memory]:
    """The four memories of an H100, the nearest to the arithmetic first."""
    sheet, faster = DATASHEETS["H100"], DATASHEETS["H200"]
    count, on_chip = sheet.sm_count or 0, sheet.on_chip_bytes_per_sm or 0
    other = f"H200: {_round(format_capacity(faster.memory_bytes))}, {_round(format_bandwidth(faster.bandwidth))}"
    return [
        Memory("registers", PURPLE, count * REGISTER_BYTES_PER_SM, sheet.fma_rate / 2 * 3 * 4, "each lane has its own"),
        Memory("shared memory and L1", GREEN, count * on_chip, MEASURED_L1, "one program's warps share it"),
        Memory("L2 cache", ORANGE, sheet.l2_bytes or 0, MEASURED_L2, "all multiprocessors share it"),
        Memory("HBM, global memory", BLUE, sheet.memory_bytes, sheet.bandwidth, other),
    ]


@styled
def draw_gpu():
    """Four panels from left to right: a launch, one of its programs, a multiprocessor, the chip; the memories below.

    One program is followed in red: one of many in the launch, four warps of 32 lanes, on one multiprocessor of 132.
    """
    figure, axes = new_figure(11, 6.7)
    axes.set(xlim=(-0.3, 110.4), ylim=(3.4, 69.5))
    axes.axis("off")
    _draw_launch(axes, 0)
    _draw_program(axes, 23)
    _draw_multiprocessor(axes, 53)
    _draw_chip(axes, 86)
    _draw_memories(axes)
    return figure


def _round(text: str) -> str:
    """Without zeros that say nothing: 80.0 GiB is 80 GiB, 4.80 TB/s is 4.8 TB/s."""
    number, unit = text.split(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def _title(axes, left: float, number: int, text: str) -> None:
    axes.text(left, 67.5, f"{number}  {text}", fontsize=12, fontweight="bold", va="center")


def _says(axes, left: float, top: float, text: str) -> None:
    axes.text(left, top, text, fontsize=10, va="top", linespacing=1.35)


def _box(axes, left, bottom, width, height, color, fill=0.28, line=1.2) -> None:
    axes.add_patch(Rectangle((left, bottom), width, height, facecolor=color, alpha=fill, linewidth=0))
    axes.add_patch(Rectangle((left, bottom), width, height, facecolor="none", edgecolor=color, linewidth=line))


def _frame(axes, left, bottom, width, height, color=MUTED) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (left, bottom),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=1",
            facecolor="none",
            edgecolor=color,
            linewidth=1.6,
        )
    )


def _zoom(axes, start, ends) -> None:
    """Two thin lines from a small thing to the panel that shows it larger."""
    for end in ends:
        axes.add_patch(ConnectionPatch(start, end, "data", "data", color=RED, linewidth=0.9, linestyle=":"))


def _draw_launch(axes, left: float) -> None:
    _title(axes, left, 1, "A launch")
    size = 4.3
    for number in range(20):
        x, y = left + number % 4 * size, 60.2 - number // 4 * size
        if number == FOLLOWED:
            _box(axes, x + 0.2, y + 0.2, size - 0.4, size - 0.4, RED, fill=0.3, line=1.8)
            _zoom(axes, (x + size - 0.2, y + size / 2), ((23, 64.5), (23, 43)))
        else:
            _box(axes, x + 0.2, y + 0.2, size - 0.4, size - 0.4, MUTED, fill=0.1, line=0.8)
        text = str(number) if number < 19 else "…"
        axes.text(x + size / 2, y + size / 2, text, ha="center", va="center", fontsize=9.5)
    _says(
        axes,
        left,
        41,
        "A grid of programs,\nall with the same code.\n\n16 Mi elements in\nblocks of 1024:\n16,384 programs.",
    )


def _draw_program(axes, left: float) -> None:
    width = 25.5
    _title(axes, left, 2, "One program")
    _frame(axes, left, 43, width, 21.5, RED)
    cell = 18.4 / LANES
    for lane, edge in ((0, "left"), (LANES - 1, "right")):
        axes.text(left + 6.4 + lane * cell + (lane > 0) * cell, 63.2, f"lane {lane}", ha=edge, va="center", fontsize=9)
    for warp in range(WARPS):
        bottom = 58.7 - warp * 4.8
        axes.text(left + 0.8, bottom + 1.6, f"warp {warp}", va="center", fontsize=9.5)
        for lane in range(LANES):
            _box(axes, left + 6.4 + lane * cell, bottom, cell, 3.2, PURPLE, line=0.5)
    _says(
        axes,
        left,
        41,
        "4 warps (Triton's default). The\n32 lanes of a warp execute each\ninstruction together.\n\n"
        "Of a block of 1024 values each\nlane holds 8, in its registers.",
    )
    _zoom(axes, (left + width, 60), ((53, 64.5),))
    _zoom(axes, (left + width, 46), ((53, 37.5),))


def _draw_multiprocessor(axes, left: float) -> None:
    width = 28.5
    _title(axes, left, 3, "One multiprocessor")
    _frame(axes, left, 33.5, width, 31)
    part = (width - 1.2) / PARTITIONS
    for partition in range(PARTITIONS):
        x = left + 0.6 + partition * part
        inner = part - 0.8
        for slot in range(WARPS_PER_SM // PARTITIONS):  # places for warps; the followed program has one in each part
            across, down = slot % 4, slot // 4
            color, fill = (RED, 0.5) if slot == 0 else (MUTED, 0.12)
            cell = inner / 4
            _box(axes, x + 0.4 + across * cell, 61.6 - down * 1.6, cell, 1.6, color, fill=fill, line=0.6)
        _box(axes, x + 0.4, 50.6, inner, 5.2, PURPLE)
        axes.text(x + part / 2, 53.2, "registers\n64 KiB", ha="center", va="center", fontsize=8.6)
        _box(axes, x + 0.4, 45.6, inner, 4.2, MUTED, fill=0.12, line=0.8)
        axes.text(x + part / 2, 47.7, "32 float\nunits", ha="center", va="center", fontsize=8.6)
        _box(axes, x + 0.4, 40.6, inner, 4.2, MUTED, fill=0.12, line=0.8)
        axes.text(x + part / 2, 42.7, "tensor\ncore", ha="center", va="center", fontsize=8.6)
    _box(axes, left + 1.0, 34.6, width - 2.0, 4.8, GREEN)
    axes.text(left + width / 2, 37, "shared memory and L1: 256 KiB", ha="center", va="center", fontsize=10)
    _says(
        axes,
        left,
        31.5,
        "Room for 64 warps (the small cells)\nof one or several programs. While\n"
        "some wait for memory, others run.\nAt most 228 KiB are shared memory.",
    )
    _zoom(axes, (left + width, 64), ((87.2, 62),))
    _zoom(axes, (left + width, 40), ((87.2, 60.45),))


def _draw_chip(axes, left: float) -> None:
    width = 24.0
    _title(axes, left, 4, "The chip")
    _frame(axes, left, 38, width, 26.5)
    columns = (DATASHEETS["H100"].sm_count or 0) // ROWS_OF_CHIP
    across, down = (width - 2) / columns, 1.55
    for number in range(columns * ROWS_OF_CHIP):
        x, y = left + 1 + number % columns * across, 62 - number // columns * down
        followed = number == columns
        color, fill = (RED, 0.5) if followed else (GREEN, 0.25)
        _box(axes, x + 0.15, y + 0.12, across - 0.3, down - 0.24, color, fill=fill, line=0.6)
    _box(axes, left + 1, 39.2, width - 2, 4.4, ORANGE)
    axes.text(left + width / 2, 41.4, "L2 cache: 50 MiB", ha="center", va="center", fontsize=10)
    _box(axes, left, 31.6, width, 4.4, BLUE)
    axes.text(left + width / 2, 33.8, "HBM, beside the chip: 80 GiB", ha="center", va="center", fontsize=10)
    axes.plot([left + width / 2] * 2, [36, 38], color=BLUE, linewidth=3)
    _says(
        axes, left, 29.7, "132 multiprocessors, one L2.\nYour tensors lie in HBM.\nPCIe leads to the host:\n0.06 TB/s."
    )


def _draw_memories(axes) -> None:
    """The strip below: each memory with its size and its speed, the fastest first."""
    axes.text(
        0,
        17.6,
        "The memories of an H100, all its multiprocessors together",
        fontsize=12,
        fontweight="bold",
        va="center",
    )
    width = 27.0
    for place, memory in enumerate(memories()):
        left = place * (width + 0.66)
        _box(axes, left, 4, width, 11.4, memory.color, fill=0.2)
        axes.text(left + 1.2, 13.3, memory.name, fontsize=11, fontweight="bold", va="center")
        figures = f"{_round(format_capacity(memory.size))} at {_speed(memory)}"
        axes.text(left + 1.2, 9.7, figures, fontsize=11.5, va="center")
        axes.text(left + 1.2, 6.2, memory.note, fontsize=10, va="center")


def _speed(memory: Memory) -> str:
    """Two digits are enough, except for the HBM, whose datasheet states three."""
    if memory.speed < 5e12:
        return _round(format_bandwidth(memory.speed))
    return _round(format_bandwidth(float(f"{memory.speed:.1e}")))
