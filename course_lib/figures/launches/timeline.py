"""Launches on the host and kernels on the GPU, one above the other, against time."""

from collections.abc import Sequence
from typing import NamedTuple

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, RED, new_figure, styled

Step = tuple[str, Sequence[float], Sequence[float], Sequence[int]]


class Work(NamedTuple):
    """A kernel, or a copy, in a stream.

    Attributes:
        name: written on its bar.
        stream: the stream's name.
        launch: how long the host takes to launch it.
        length: how long it runs, in the same unit.
        after: numbers of earlier works whose end it waits for, by an event, whichever stream they are in.
    """

    name: str
    stream: str
    launch: float
    length: float
    after: tuple[int, ...] = ()


def stream_spans(works: Sequence[Work]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """When each launch and each work begins, and how long it takes: two lists of (begin, length).

    The host launches in order. A work begins when its launch, the work before it in its stream and those that it waits
    for have ended; streams run at the same time, and none slows another one down.
    """
    host = 0.0
    ends: list[float] = []
    last: dict[str, float] = {}  # when the last work of each stream ends
    launches, kernels = [], []
    for work in works:
        launches.append((host, work.launch))
        host += work.launch
        begin = max([host, last.get(work.stream, 0.0), *(ends[number] for number in work.after)])
        kernels.append((begin, work.length))
        ends.append(begin + work.length)
        last[work.stream] = ends[-1]
    return launches, kernels


@styled
def draw_streams(pictures: Sequence[tuple[str, Sequence[Work]]], unit: str = "µs"):
    """For each picture a row for the host and one for each stream; an arrow where a work waits for another stream's.

    Args:
        pictures: (name, works as `stream_spans` takes them).
        unit: of the axis.

    Returns:
        A figure.
    """
    rows = [1 + len({work.stream for work in works}) for _, works in pictures]
    figure, axes = new_figure(9.5, 0.62 * sum(rows) + 0.4 * len(rows) + 1.2)
    everywhere = list(dict.fromkeys(work.stream for _, works in pictures for work in works))
    ticks, labels, end, top = [], [], 0.0, 0.0
    for (name, works), height in zip(pictures, rows):
        streams = list(dict.fromkeys(work.stream for work in works))
        launches, kernels = stream_spans(works)
        axes.text(0.0, top - 0.75, name, fontsize=11, fontweight="bold", color=INK, va="center")
        axes.broken_barh(launches, (top - 0.35, 0.7), color=ORANGE, edgecolor="white", linewidth=0.8)
        for work, (begin, length) in zip(works, kernels):
            row = top + 1 + streams.index(work.stream)
            color = (BLUE, GREEN, PURPLE)[everywhere.index(work.stream) % 3]  # a stream's own in all pictures
            axes.broken_barh([(begin, length)], (row - 0.35, 0.7), color=color, edgecolor="white", linewidth=0.8)
            axes.text(begin + length / 2, row, work.name, ha="center", va="center", fontsize=9, color="white")
            for number in work.after:
                other = works[number]
                if other.stream != work.stream:
                    axes.annotate(
                        "", xy=(begin, row), xytext=(sum(kernels[number]), top + 1 + streams.index(other.stream)),
                        arrowprops={"arrowstyle": "->", "color": RED, "linewidth": 1.6},
                    )  # fmt: skip
        end = max(end, *(begin + length for begin, length in kernels))
        ticks += [top + row for row in range(height)]
        labels += ["host", *streams]
        top += height + 0.8
    axes.set_yticks(ticks, labels)
    axes.set_ylim(top - 1.1, -1.2)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.05 * end)
    axes.set_xlabel(unit)
    return figure


def spans(launches: Sequence[float], kernels: Sequence[float], waits: Sequence[int] = ()) -> tuple[list, list, list]:
    """When each launch, each kernel and each wait of the host begins and how long it takes.

    Args:
        launches: the host's time for each launch; a launch of 0 is a part of the one before (a graph).
        kernels: each kernel's time, in the same unit.
        waits: numbers of the kernels after whose launch the host waits until they have ended.

    Returns:
        Three lists of (begin, length).
    """
    host, end = 0.0, 0.0
    of_launches, of_kernels, of_waits = [], [], []
    for number, (launch, kernel) in enumerate(zip(launches, kernels, strict=True)):
        of_launches.append((host, launch))
        host += launch
        begin = max(host, end)
        of_kernels.append((begin, kernel))
        end = begin + kernel
        if number in waits:
            of_waits.append((host, end - host))
            host = end
    return of_launches, of_kernels, of_waits


@styled
def draw_timelines(steps: Sequence[Step], unit: str = "µs"):
    """Two rows for each step: what the host does, and what the GPU does.

    Args:
        steps: (name, launches, kernels, waits) as `spans` takes them, times in `unit`.
        unit: of the axis.

    Returns:
        A figure.
    """
    figure, axes = new_figure(9.5, 1.25 * len(steps) + 1.5)
    ticks, labels, last = [], [], 0.0
    for place, (name, launches, kernels, waits) in enumerate(steps):
        found = spans(launches, kernels, waits)
        for row, parts, color, label in (
            (0, found[0], ORANGE, "the host launches"),
            (1, found[1], BLUE, "a kernel runs"),
            (0, found[2], RED, "the host waits"),
        ):
            shown = [part for part in parts if part[1] > 0]
            axes.broken_barh(shown, (3 * place + row - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.8,
                             label=label if place == 0 else None)  # fmt: skip
        end = max(begin + length for begin, length in found[1])
        busy = sum(kernels) / end
        axes.text(end, 3 * place + 1, f"  {end:.0f} {unit}, busy {busy:.0%}", va="center", fontsize=10, color=INK)
        ticks += [3 * place, 3 * place + 1]
        labels += [f"{name}: host", "GPU"]
        last = max(last, end)
    for place in range(1, len(steps)):
        axes.axhline(3 * place - 1, color=MUTED, linewidth=0.6)
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.3 * last)
    axes.set_xlabel(unit)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


@styled
def draw_layer(forms: Sequence[tuple[str, float, Sequence[tuple[str, float, float]]]], unit: str = "µs"):
    """The kernels of one layer, each in a row of its own, for some ways to start them.

    Args:
        forms: (name, when the next layer begins, kernels), a kernel as (name, when it begins, how long it runs). The
            layer begins at 0.
        unit: of the times.

    Returns:
        A figure.
    """
    figure, axes = new_figure(9.5, 0.42 * sum(len(kernels) for _, _, kernels in forms) + 0.6 * len(forms) + 0.9)
    ticks, labels, top, last = [], [], 0.0, 0.0
    for (name, following, kernels), color in zip(forms, (BLUE, GREEN, PURPLE, ORANGE)):
        axes.text(0.0, top - 0.8, name, fontsize=11, fontweight="bold", color=INK, va="center")
        for row, (kernel, begin, length) in enumerate(kernels):
            axes.broken_barh([(begin, length)], (top + row - 0.36, 0.72), color=color, edgecolor="white", linewidth=0.8)
            ticks.append(top + row)
            labels.append(kernel)
        axes.plot([following] * 2, [top - 0.45, top + len(kernels) - 0.55], color=RED, linewidth=1.4, linestyle="--")
        axes.text(following, top - 0.8, f"next layer at {following:.0f} {unit}", fontsize=10, color=RED, va="center",
                  ha="center")  # fmt: skip
        last = max(last, following, *(begin + length for _, begin, length in kernels))
        top += len(kernels) + 1.2
    axes.set_yticks(ticks, labels)
    axes.set_ylim(top - 1.6, -1.4)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.08 * last)
    axes.set_xlabel(unit)
    return figure
