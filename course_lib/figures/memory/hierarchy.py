"""The memory hierarchy of this machine: how much each level holds, and how fast it is, beside the datasheet."""

import dataclasses

from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, PAPER, PURPLE, new_figure, styled
from course_lib.hardware.ceilings.cache_sweep import speed_within
from course_lib.hardware.datasheets import datasheet_for
from course_lib.hardware.units import format_bandwidth, format_capacity, format_tick

COLORS = (PURPLE, GREEN, ORANGE, BLUE)


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of memory, of the whole device: bytes and bytes/s; None where not known."""

    name: str
    capacity: float | None
    measured: float | None
    promised_capacity: float | None = None
    promised: float | None = None
    detail: str = ""


def levels(machine, ceilings) -> list[Level]:
    """The levels of this machine, nearest to the arithmetic first."""
    return gpu_levels(machine, ceilings) if ceilings.kind == "cuda" else cpu_levels(machine, ceilings)


def gpu_levels(machine, ceilings) -> list[Level]:
    sheet = datasheet_for(machine.gpu_name)
    count = machine.sm_count
    return [
        Level(
            "registers",
            4 * machine.registers_per_sm * count,
            None,
            detail=f"{format_capacity(4 * machine.registers_per_sm)} × {count} multiprocessors",
        ),
        Level(
            "L1 and shared memory",
            machine.shared_memory_per_sm_bytes * count,
            ceilings.on_chip_bandwidth,
            sheet.on_chip_bytes_per_sm * count if sheet and sheet.on_chip_bytes_per_sm else None,
            detail=f"shared: {format_capacity(machine.shared_memory_per_sm_bytes)} × {count} multiprocessors",
        ),
        Level(
            "L2 cache", machine.l2_bytes, ceilings.l2_bandwidth, sheet.l2_bytes if sheet else None, detail="one for all"
        ),
        Level(
            "device memory",
            machine.memory_bytes,
            ceilings.memory_bandwidth,
            sheet.memory_bytes if sheet else None,
            sheet.bandwidth if sheet else None,
            detail="HBM or GDDR",
        ),
    ]


def cpu_levels(machine, ceilings) -> list[Level]:
    """The caches as one core sees them, at one core's speed; the memory at the speed of all cores."""
    found, previous = [], 0
    for position, (name, size) in enumerate(machine.cpu_caches):
        shared = position > 0 and position == len(machine.cpu_caches) - 1
        speed = speed_within(ceilings.sweep, previous, size)
        detail = "shared, one core reading" if shared else "of each core, one core reading"
        found.append(Level(f"{name} cache", size, speed, detail=detail))
        previous = size
    found.append(Level("memory", machine.memory_bytes, ceilings.memory_bandwidth, detail="DRAM, all cores reading"))
    return found


@styled
def hierarchy_plot(machine, ceilings):
    """Two panels on one list of levels: what each holds, and how many bytes a second it gives.

    Bars are what the device reports (sizes) and what was measured here (speeds); a hollow diamond is the datasheet.
    """
    found = levels(machine, ceilings)
    figure, (holds, gives) = new_figure(11, 1.6 + 0.9 * len(found), columns=2, sharey=True)
    capacities = [(level.capacity, level.promised_capacity) for level in found]
    speeds = [(level.measured, level.promised) for level in found]
    draw_bars(holds, capacities, format_capacity)
    draw_bars(gives, speeds, format_bandwidth)
    holds.set_yticks(range(len(found)), [f"{level.name}\n{level.detail}" for level in found])
    holds.set_xlabel("capacity [bytes]")
    holds.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value, "B", binary=True)))
    holds.xaxis.set_major_locator(LogLocator(base=1024))
    gives.set_xlabel("speed [bytes/s]")
    gives.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    gives.tick_params(axis="y", length=0)
    figure.suptitle(f"Memory hierarchy of {ceilings.device}", x=0.01, ha="left", fontsize=14, fontweight="bold")
    return figure


def draw_bars(axes, pairs, write) -> None:
    """One bar a level for what is here, a hollow diamond for what the datasheet promises, both in words beside."""
    known = [value for pair in pairs for value in pair if value]
    low = min(known) / 4
    span = max(known) / low
    axes.set(xscale="log", xlim=(low, max(known) * span**0.7), ylim=(len(pairs) - 0.4, -0.6))
    for row, (value, promise) in enumerate(pairs):
        axes.barh(row, (value or low) - low, left=low, height=0.52, color=COLORS[row % len(COLORS)])
        text = write(value) if value else "not measured"
        if promise:
            axes.plot([promise], [row], marker="D", markersize=9, color=PAPER, markeredgecolor=INK, markeredgewidth=1.4)
            text += f"\ndatasheet {write(promise)}"
        axes.annotate(
            text,
            (max(value or low, promise or low), row),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            fontsize=10.5,
            color=INK if value else MUTED,
        )
    axes.yaxis.grid(False)
    axes.xaxis.set_minor_locator(NullLocator())
