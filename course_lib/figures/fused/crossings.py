"""Operations in a row below the memory, and an arrow with its bytes for everything that one reads or writes there."""

from collections.abc import Sequence

from matplotlib.patches import FancyBboxPatch, Rectangle

from course_lib.figures.style import BLUE, GRID, INK, MUTED, ORANGE, new_figure, styled

# Llama's addition and norm in 16 bits: each operation, with what it reads and writes for one number, in bytes.
ADD_AND_NORM = (
    ("x + residual", 4, 2),
    ("to float32", 2, 4),
    ("square", 4, 4),
    ("mean", 4, 0),
    ("× 1 / root", 4, 4),
    ("to 16 bits", 4, 2),
    ("× weight", 2, 2),
)
Step = tuple[str, int, int]


@styled
def draw_crossings(rows: Sequence[tuple[str, Sequence[Step]]]):
    """A strip of memory and a chain of boxes below it, for each of several ways to do the same.

    Args:
        rows: (title, steps) of each way; a step is its name, the bytes that it reads and those that it writes. The way
            that has fewer steps gets wider boxes.

    Returns a figure. Raises a ValueError when a row has no step.
    """
    if not rows or not all(steps for _, steps in rows):
        raise ValueError(f"rows is {rows!r}; give at least one, each with a step.")
    figure, all_axes = new_figure(10.5, 2.35 * len(rows), rows=len(rows), squeeze=False)
    for axes, (title, steps) in zip(all_axes[:, 0], rows):
        moved = sum(read + written for _, read, written in steps)
        axes.set_title(f"{title}: {moved} bytes", fontsize=12.5)
        axes.set(xlim=(0, 10), ylim=(-0.05, 3.1))
        axes.axis("off")
        axes.add_patch(Rectangle((0.05, 2.45), 9.9, 0.55, facecolor=GRID, edgecolor="none"))
        axes.text(5, 2.72, "memory", ha="center", va="center", color=INK, fontsize=11.5)
        room = 9.9 / len(steps)
        for place, step in enumerate(steps):
            _draw_step(axes, 0.05 + place * room, room, step)
    return figure


def _draw_step(axes, left: float, room: float, step: Step) -> None:
    name, read, written = step
    width = 0.86 * room
    box = FancyBboxPatch((left + 0.07 * room, 0.1), width, 0.85, boxstyle="round,pad=0,rounding_size=0.08")
    box.set(facecolor="white", edgecolor=MUTED)
    axes.add_patch(box)
    axes.text(left + room / 2, 0.52, name, ha="center", va="center", fontsize=10.5, color=INK)
    for count, share, color, start, end in ((read, 0.3, BLUE, 2.42, 0.98), (written, 0.7, ORANGE, 0.98, 2.42)):
        if count:
            x = left + share * room
            style = {"arrowstyle": "-|>", "color": color, "linewidth": 0.9 * count, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", xy=(x, end), xytext=(x, start), arrowprops=style)
            label = {"textcoords": "offset points", "xytext": (8, 0), "va": "center", "fontsize": 11, "color": INK}
            axes.annotate(str(count), (x, 1.7), **label)
