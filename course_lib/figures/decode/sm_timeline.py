"""Which slots of the chip a decode kernel fills, and for how long, by a model: programs in waves, each bound by bytes.

One bar is one program: its slot is its height, its length the time in which it reads its keys and values. The still
version compares a few numbers of splits; in a live notebook a slider walks through all of them.
"""

import dataclasses
import math
from collections.abc import Mapping

from matplotlib.patches import Patch, Rectangle

from course_lib.figures.stepping import Stepper
from course_lib.figures.style import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PURPLE, SKY, new_figure, styled
from course_lib.hardware.units import format_seconds

# An H200's multiprocessors, and the bandwidth at which it was measured to read; the others are round assumptions.
H200 = {"slots": 132, "bandwidth": 4.37e12, "program_bandwidth": 40e9, "start_seconds": 2e-6, "launch_seconds": 3e-6}
MOST_SPLITS = 256
PARTIAL_BYTES = 4  # partial outputs and log-sum-exps are float32
IDLE = "#ECEFF1"
HEAD_COLORS = (BLUE, SKY, GREEN, PURPLE)  # in turn: neighbouring KV heads are told apart


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One step of decode attention on a chip, its keys in `splits` parts.

    Programs run in waves of at most `slots`. A wave takes start_seconds, and then its bytes at the chip's bandwidth, or
    at what its programs can draw if that is less. With more than one split a combine follows: launch_seconds, and the
    partial results written once and read once.
    """

    splits: int
    batch: int
    query_heads: int
    key_heads: int
    context: int
    head_dim: int
    item_bytes: int
    slots: int
    bandwidth: float
    program_bandwidth: float
    start_seconds: float
    launch_seconds: float

    @property
    def programs(self) -> int:
        return self.batch * self.key_heads * self.splits

    @property
    def program_bytes(self) -> int:
        """Of the longest split: its keys and its values."""
        return 2 * math.ceil(self.context / self.splits) * self.head_dim * self.item_bytes

    @property
    def waves(self) -> list[int]:
        """Programs of each wave."""
        full, rest = divmod(self.programs, self.slots)
        return [self.slots] * full + [rest] * bool(rest)

    @property
    def wave_seconds(self) -> list[float]:
        rates = [min(self.bandwidth, programs * self.program_bandwidth) for programs in self.waves]
        return [self.start_seconds + n * self.program_bytes / rate for n, rate in zip(self.waves, rates)]

    @property
    def combine_seconds(self) -> float:
        if self.splits == 1:
            return 0.0
        partials = self.splits * self.batch * self.query_heads * (self.head_dim + 1) * PARTIAL_BYTES
        return self.launch_seconds + 2 * partials / self.bandwidth

    @property
    def seconds(self) -> float:
        return sum(self.wave_seconds) + self.combine_seconds

    @property
    def busy(self) -> float:
        """Share of the waves' slots that hold a program."""
        return self.programs / (len(self.waves) * self.slots)

    def bars(self) -> list[tuple[int, float, float, int]]:
        """(slot, start, seconds, KV head) of each program."""
        bars, start = [], 0.0
        for wave, (programs, seconds) in enumerate(zip(self.waves, self.wave_seconds)):
            for slot in range(programs):
                program = wave * self.slots + slot
                bars.append((slot, start, seconds, program // self.splits % self.key_heads))
            start += seconds
        return bars


def draw_schedule(axes, schedule: Schedule, longest: float) -> None:
    """The bars of one schedule; the axis ends at `longest` seconds."""
    unit, factor = ("ms", 1e3) if longest >= 1e-3 else ("µs", 1e6)
    gap = 0.004 * longest * factor
    end = sum(schedule.wave_seconds) * factor
    axes.add_patch(Rectangle((0, 0), end, schedule.slots, facecolor=IDLE, edgecolor="none"))
    for slot, start, seconds, head in schedule.bars():
        width = max(seconds * factor - gap, 0.4 * seconds * factor)
        axes.add_patch(
            Rectangle(
                (start * factor, slot),
                width,
                1,
                facecolor=HEAD_COLORS[head % len(HEAD_COLORS)],
                edgecolor="white",
                linewidth=0.25,
            )
        )
    if schedule.combine_seconds:
        rows = min(schedule.slots, schedule.batch * schedule.query_heads)
        axes.add_patch(Rectangle((end, 0), schedule.combine_seconds * factor, rows, facecolor=INK, edgecolor="none"))
    axes.set(xlim=(0, 1.02 * longest * factor), ylim=(0, schedule.slots), xlabel=unit)
    axes.grid(False)
    axes.grid(True, axis="x", color=GRID)


def caption(schedule: Schedule) -> str:
    """What a panel shows, in numbers."""
    waves = f"{len(schedule.waves)} wave{'s' if len(schedule.waves) > 1 else ''}"
    busy = f"{schedule.busy:.0%} of the slots busy"
    return f"{schedule.programs} programs, {waves}, {busy}\n{format_seconds(schedule.seconds)}"


def _head(axes, schedule: Schedule) -> None:
    """Title and caption above a panel."""
    axes.set_title(f"{schedule.splits} split{'s' if schedule.splits > 1 else ''}", pad=38)
    text = {"fontsize": 10, "color": MUTED, "va": "bottom", "linespacing": 1.35}
    axes.text(0, 1.03, caption(schedule), transform=axes.transAxes, **text)


def _legend(figure) -> None:
    handles = [
        Patch(color=HEAD_COLORS[0], label="a program (colours tell neighbouring KV heads apart)"),
        Patch(color=IDLE, label="idle"),
        Patch(color=INK, label="combine"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


@styled
def draw_schedules(schedules):
    """A panel for each schedule, each with a time axis of its own: how full the chip is shows in its height."""
    figure, axes = new_figure(11.5, 4.6, columns=len(schedules), sharey=True, squeeze=False)
    figure.get_layout_engine().set(wspace=0.06)  # a number at the end of an axis, and the 0 of the next
    for panel, schedule in zip(axes[0], schedules):
        draw_schedule(panel, schedule, schedule.seconds)
        _head(panel, schedule)
    axes[0][0].set_ylabel("slots of the chip")
    _legend(figure)
    return figure


@styled
def draw_one(schedule: Schedule, times: list[float]):
    """One schedule, and the times of all numbers of splits with this one marked."""
    figure, (left, right) = new_figure(11.5, 4.6, columns=2, width_ratios=(1.2, 1))
    draw_schedule(left, schedule, schedule.seconds)
    left.set(ylabel="slots of the chip")
    _head(left, schedule)
    unit, factor = ("ms", 1e3) if max(times) >= 1e-2 else ("µs", 1e6)
    right.plot(range(1, len(times) + 1), [factor * seconds for seconds in times], linewidth=1.8)
    right.plot([schedule.splits], [factor * schedule.seconds], "o", color=ORANGE, markersize=9)
    right.set(xscale="log", yscale="log", xlabel="splits", ylabel=f"{unit} of one step")
    ticks = [splits for splits in (1, 2, 4, 8, 16, 33, 64, 128, 256) if splits <= len(times)]
    right.set_xticks(ticks, [str(tick) for tick in ticks])
    low, high = factor * min(times), factor * max(times)
    marks = [mark * 10**power for power in range(-1, 7) for mark in (1, 2, 5)]
    marks = [mark for mark in marks if 0.8 * low < mark < 1.25 * high]
    right.set_yticks(marks, [f"{mark:g}" for mark in marks])
    right.set_ylim(0.8 * low, 1.25 * high)
    right.minorticks_off()
    right.set_title("every number of splits", pad=38)
    _legend(figure)
    return figure


class SmTimeline(Stepper):
    """Shows itself in a notebook: a few numbers of splits, which stay, and below them a slider while a kernel runs."""

    def __init__(self, schedules: list[Schedule], chosen: list[int]):
        times = [schedule.seconds for schedule in schedules]
        super().__init__(
            still=draw_schedules([schedules[splits - 1] for splits in chosen]),
            draw=lambda splits: draw_one(schedules[splits - 1], times),
            steps=len(schedules),
        )

    def widget(self):
        """An ipywidgets box: a slider that shows its number of splits, and the picture."""
        import ipywidgets

        slider = ipywidgets.IntSlider(value=1, min=1, max=self.steps, description="splits", continuous_update=False)
        image = ipywidgets.Image(value=self.picture(1), format="png", width=960)
        slider.observe(lambda change: setattr(image, "value", self.picture(change["new"])), names="value")
        return ipywidgets.VBox([slider, image])


def sm_timeline(batch, query_heads, key_heads, context, head_dim, item_bytes=2, chip: Mapping = H200, show=(1, 16, 17)):
    """The chip's slots over time, for one step of decode attention and several numbers of splits.

    Args:
        batch, query_heads, key_heads, context, head_dim: the shape; every sequence has `context` keys.
        item_bytes: bytes of an element of the cache.
        chip: "slots", "bandwidth", "program_bandwidth" (bytes/s), "start_seconds", "launch_seconds", as in `Schedule`.
        show: the numbers of splits in the still picture; the slider has all up to context // 64, at most 256.

    Raises:
        ValueError: sizes that make no schedule; the message names them and what is allowed.
    """
    sizes = {
        "batch": batch,
        "query_heads": query_heads,
        "key_heads": key_heads,
        "context": context,
        "head_dim": head_dim,
        "item_bytes": item_bytes,
    }
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; it must be a whole number of at least 1.")
    if query_heads % key_heads:
        raise ValueError(f"query_heads is {query_heads}; it must be a multiple of key_heads, {key_heads}.")
    most = max(1, min(MOST_SPLITS, context // 64))
    if not show or any(not 1 <= splits <= most for splits in show):
        raise ValueError(f"show is {tuple(show)}; with a context of {context} the splits go from 1 to {most}.")
    return SmTimeline([Schedule(splits, **sizes, **chip) for splits in range(1, most + 1)], list(show))
