"""Launches on the host and kernels on the GPU, one above the other, against time."""

from collections.abc import Sequence

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, RED, new_figure, styled

Step = tuple[str, Sequence[float], Sequence[float], Sequence[int]]


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
