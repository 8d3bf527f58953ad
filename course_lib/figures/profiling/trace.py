"""One window of a trace: what the CPU does in it, and when the GPU runs the kernels that it launched."""

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, new_figure, styled

LAUNCHES = ("cuda_runtime", "cuda_driver")


def parts_of(events: list[dict], layer: str) -> tuple[dict, list[dict], list[dict], list[dict]]:
    """The window of this name, the operations and launches that begin in it, and the kernels that these started.

    Args:
        events: as torch.profiler writes them, with cat, name, ts and dur in microseconds, and args["correlation"].
        layer: the name of a `user_annotation`.

    Raises a ValueError for a name that no window has.
    """
    windows = {event["name"]: event for event in events if event["cat"] == "user_annotation"}
    if layer not in windows:
        raise ValueError(f"layer is {layer!r}; the trace has the windows {', '.join(map(repr, windows)) or 'none'}.")
    window = windows[layer]
    inside = [event for event in events if window["ts"] <= event["ts"] <= window["ts"] + window["dur"]]
    operations = [event for event in inside if event["cat"] == "cpu_op"]
    launches = [event for event in inside if event["cat"] in LAUNCHES]
    numbers = {event["args"]["correlation"] for event in launches}
    kernels = [event for event in events if event["cat"] == "kernel" and event["args"]["correlation"] in numbers]
    return window, operations, launches, kernels


@styled
def draw_trace(events: list[dict], layer: str):
    """Four rows against time: the layer's window, its operations, its launches, and below them its kernels.

    A line leads from each launch to its kernel. Times count from the beginning of the window.

    Args:
        events, layer: as for `parts_of`.

    Returns:
        A figure.
    """
    window, operations, launches, kernels = parts_of(events, layer)
    figure, axes = new_figure(9.5, 3.6)
    begin = window["ts"]
    starts = {event["args"]["correlation"]: event["ts"] + event["dur"] - begin for event in launches}
    rows = ("the window", "operations", "launches", "kernels (GPU)")
    for row, (found, color) in enumerate((([window], MUTED), (operations, ORANGE), (launches, GREEN), (kernels, BLUE))):
        for depth, event in enumerate(sorted(found, key=lambda event: event["ts"])):
            height = 0.7 if row != 1 else 0.7 / (1 + depth)  # one within another is lower
            axes.broken_barh([(event["ts"] - begin, event["dur"])], (row - height / 2, height),
                             color=PURPLE if row == 1 and depth else color, edgecolor="white", lw=0.5)  # fmt: skip
    for kernel in kernels:
        axes.plot([starts[kernel["args"]["correlation"]], kernel["ts"] - begin], [2.35, 2.65], color=INK, linewidth=0.6)
    end = max(event["ts"] + event["dur"] for event in [window, *kernels]) - begin
    axes.axvline(window["dur"], color=MUTED, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(4), rows)
    axes.set_ylim(3.6, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.02 * end)
    axes.set(xlabel="µs from the beginning of the window", title=layer)
    return figure
