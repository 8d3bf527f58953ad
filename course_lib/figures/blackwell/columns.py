"""The 512 columns of tensor memory: which of them S, P and O of each tile take, from a plan of exercise 19.5."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle

from course_lib.figures.style import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PAPER, SKY, YELLOW, new_figure, styled

COLUMNS = 512
COLORS = {"S": (BLUE, SKY), "P": (ORANGE, YELLOW), "O": (GREEN, "#7FCFB9")}
WORDS = {"S": "scores, float32", "P": "weights, 16 bits", "O": "output, float32"}
TIMES = ("scores are there", "weights are there")
WIDE = 110  # columns from which on a region has room for its words


@styled
def draw_columns(plan: Mapping[str, Sequence[int]], title: str = "The columns of tensor memory, all 128 lanes"):
    """Two strips of 512 columns: while a tile's scores are there, and once the softmax has written its weights.

    Args:
        plan: {"S0": (first column, columns), "P0": …, "O0": …, "S1": …}; a name is S, P or O and its tile.
    """
    if not plan:
        raise ValueError(f"plan was {plan!r}; it must hold at least one region")
    figure, axes = new_figure(11, 3.0)
    for row, kinds in enumerate(("SO", "PO")):
        whole = Rectangle((0, row - 0.4), COLUMNS, 0.8, facecolor="none", edgecolor=MUTED, linewidth=1.2)
        whole.set_linestyle((0, (4, 3)))
        axes.add_patch(whole)
        for name, region in plan.items():
            first, columns = (int(number) for number in region)
            if name[0] == "S" and row == 1:  # read, and free for P
                _block(axes, row, first, columns, GRID, layer=1.5)
            if name[0] in kinds:
                color = COLORS[name[0]][int(name[1:]) % 2]
                _block(axes, row, first, columns, color, layer=2)
                words = f"{name}  {WORDS[name[0]]}" if columns >= WIDE else name
                ink = PAPER if color in (BLUE, GREEN) else INK
                axes.text(first + columns / 2, row, words, ha="center", va="center", fontsize=10, color=ink, zorder=3)
    edges = {0, COLUMNS} | {int(edge) for first, columns in plan.values() for edge in (first, first + columns)}
    within = sorted(edge for edge in edges if 0 <= edge <= COLUMNS)
    axes.set(xlim=(-4, COLUMNS + 4), ylim=(1.45, -0.45), xlabel="column; grey: scores that were read")
    axes.set_xticks([edge for edge, after in zip(within, [*within[1:], 2 * COLUMNS]) if after - edge >= 14])
    axes.set_yticks([0, 1], TIMES)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_title(title)
    return figure


def _block(axes, row: int, first: int, columns: int, color: str, layer: float) -> None:
    box = Rectangle((first, row - 0.4), columns, 0.8, facecolor=color, edgecolor=PAPER, linewidth=1.6, zorder=layer)
    axes.add_patch(box)
