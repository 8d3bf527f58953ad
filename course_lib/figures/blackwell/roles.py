"""What the roles on tensor memory do over time, from `play_tensor_memory`'s events."""

from collections.abc import Sequence

from matplotlib.patches import Patch, Rectangle

from course_lib.figures.style import BLUE, GREEN, INK, ORANGE, PAPER, SKY, YELLOW, new_figure, styled

Event = tuple[str, str, int, int, float, float]  # who, what, tile, block, begin, end
ROWS = ("tensor cores", "softmax 0", "softmax 1", "correction")
COLORS = {"scores": (BLUE, SKY), "output": (GREEN, "#7FCFB9"), "read": (ORANGE, YELLOW), "write": (ORANGE, YELLOW)}
LIGHT = 0.45  # how strong the reading of S is drawn, beside the writing of P


@styled
def draw_roles(events: Sequence[Event], until: float | None = None):
    """A row for each role. A bar names its block; the two tiles have a dark and a light colour each.

    Args:
        events: what `play_tensor_memory(..., events=events)` recorded.
        until: the last tick that is drawn; all by default.
    """
    if not events:
        raise ValueError("events is empty; pass a list to play_tensor_memory as `events` first.")
    last = max(end for *_, end in events)
    shown = last if until is None else until
    figure, axes = new_figure(11, 3.7)
    for who, what, tile, block, begin, end in events:
        if begin >= shown:
            continue
        row, color = ROWS.index(who), COLORS.get(what, ("#8C8C8C", "#C4C4C4"))[tile]
        end = min(end, shown)
        alpha = LIGHT if what == "read" else 1.0
        axes.add_patch(
            Rectangle((begin, row - 0.36), end - begin, 0.72, facecolor=color, alpha=alpha, edgecolor="none")
        )
        axes.add_patch(
            Rectangle((begin, row - 0.36), end - begin, 0.72, facecolor="none", edgecolor=PAPER, linewidth=1)
        )
        letter = {"scores": "S", "output": "O", "write": "P", "read": "", "rescale": ""}[what]
        if letter and end - begin > 0.022 * shown:
            ink = PAPER if color in (BLUE, GREEN) else INK
            axes.text(
                (begin + end) / 2, row, f"{letter}{tile}\n{block}", ha="center", va="center", fontsize=9, color=ink
            )
    work = sum(end - begin for who, *_, begin, end in events if who == "tensor cores")
    axes.set(xlim=(0, shown), ylim=(len(ROWS) - 0.5, -0.5), xlabel="ticks; a bar names its tile and, below, its block")
    axes.set_yticks(range(len(ROWS)), ["tensor cores", "softmax group 0", "softmax group 1", "correction group"])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"The tensor cores work {100 * work / last:.0f} % of the time")
    handles = [
        Patch(color=BLUE, label="scores S"),
        Patch(color=GREEN, label="output O"),
        Patch(color=ORANGE, alpha=LIGHT, label="softmax reads S"),
        Patch(color=ORANGE, label="writes P"),
        Patch(color="#8C8C8C", label="rescales O"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure
