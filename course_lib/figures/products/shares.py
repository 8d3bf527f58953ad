"""What each program of stream-K does, over time: its steps tile by tile, and what it does at the borders."""

from collections.abc import Sequence

from matplotlib.patches import Patch, Rectangle

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, PAPER, RED, SKY, new_figure, styled

Event = tuple[int, tuple, float, float]  # program, action, begin, end
COLORS = {"leave": ORANGE, "barrier": ORANGE, "raise": ORANGE, "wait": RED, "add": GREEN, "store": MUTED}
MEANING = {"leaves a part": ORANGE, "waits": RED, "adds a part": GREEN, "stores a tile": MUTED}


@styled
def draw_shares(events: Sequence[Event], whole_rounds: float):
    """A row for each program: bars of two blues for its steps, named by their tile, and narrow ones for the rest.

    Args:
        events: of `play_stream_k`.
        whole_rounds: when the last program would end if each took whole tiles; a dashed line.
    """
    programs = 1 + max(program for program, *_ in events)
    figure, axes = new_figure(11, 0.62 * programs + 1.7)
    for program, (kind, *more), begin, end in events:
        color = COLORS.get(kind) or (BLUE, SKY)[more[0] % 2]
        axes.add_patch(Rectangle((begin, program - 0.38), end - begin, 0.76, facecolor=color, edgecolor=PAPER, lw=0.8))
        if kind == "multiply":
            tile, first, last = more
            words = f"tile {tile}\n{first} … {last - 1}" if last - first > 1 else f"{tile}"
            axes.text((begin + end) / 2, program, words, ha="center", va="center", fontsize=9,
                      color=PAPER if color == BLUE else INK)  # fmt: skip
    last_end = max(end for *_, end in events)
    axes.axvline(whole_rounds, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.3)
    axes.text(whole_rounds, -0.62, f"whole tiles: {whole_rounds:g}", ha="right", va="bottom", color=INK, fontsize=10)
    axes.set(xlim=(0, 1.02 * max(last_end, whole_rounds)), ylim=(programs - 0.4, -0.65), xlabel="ticks")
    axes.set_yticks(range(programs), [f"program {program}" for program in range(programs)])
    axes.grid(axis="y", visible=False)
    handles = [Patch(color=color, label=name) for name, color in MEANING.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure
