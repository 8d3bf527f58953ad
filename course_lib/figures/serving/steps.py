"""What a scheduler gives each request in each step: a row for each request, a column for each step."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Patch

from course_lib.figures.style import BLUE, GRID, ORANGE, RED, new_figure, styled

KINDS = {"prompt": BLUE, "token": ORANGE, "waits": GRID}
NAMES = {"prompt": "a piece of the text so far, in tokens", "token": "one new token", "waits": "waits"}


@styled
def draw_steps(schedules: Mapping[str, Sequence[Mapping[int, tuple[str, int]]]]):
    """A panel for each schedule, one below the other.

    Args:
        schedules: {name: for each step {request: (kind, tokens)}}, a kind of KINDS; "waits" has no tokens. A "prompt"
            may be a text that is computed again, with tokens that were written. A request that waits after it has run
            was preempted, and a red line marks where.
    """
    rows = [1 + max(request for step in steps for request in step) for steps in schedules.values()]
    figure, all_axes = new_figure(
        11, 0.36 * sum(rows) + 1.15 * len(rows) + 0.5, rows=len(rows), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": rows},
    )  # fmt: skip
    longest = max(map(len, schedules.values()))
    for axes, (name, steps), requests in zip(all_axes[:, 0], schedules.items(), rows):
        ran = set()
        for column, step in enumerate(steps):
            for request, (kind, tokens) in step.items():
                axes.broken_barh([(column, 1)], (request - 0.4, 0.8), color=KINDS[kind], edgecolor="white",
                                 linewidth=0.8)  # fmt: skip
                if kind == "prompt":
                    axes.text(column + 0.5, request, str(tokens), ha="center", va="center", fontsize=9, color="white")
                if kind == "waits" and request in ran:
                    axes.plot([column, column], [request - 0.45, request + 0.45], color=RED, linewidth=2.4)
                    ran.discard(request)
                elif kind != "waits":
                    ran.add(request)
        axes.set_title(f"{name}: {len(steps)} steps", fontsize=12)
        axes.set_yticks(range(requests), [f"request {number}" for number in range(requests)])
        axes.set(xlim=(0, longest), ylim=(requests - 0.4, -0.6))
        axes.grid(axis="y", visible=False)
    all_axes[-1, 0].set_xlabel("step of the engine")
    handles = [Patch(color=color, label=NAMES[kind]) for kind, color in KINDS.items()]
    handles.append(Patch(color=RED, label="preempted"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure
