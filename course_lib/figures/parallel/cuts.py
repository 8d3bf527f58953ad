"""Which rows of gate and up and which columns of down each rank has, and what output they make."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from matplotlib.patches import Rectangle

from course_lib.figures.parallel.palette import RANKS
from course_lib.figures.style import INK, MUTED, PAPER, RED, new_figure, styled

ROW_WIDTH, GAP, COLUMN_WIDTH = 3.2, 2.1, 0.75
Rows = Sequence[Sequence[int]]  # of each rank


def uses(rows: Rows) -> dict[int, tuple[int, str]]:
    """Of each row its rank, and what the rank takes it for: the first half of its rows for gates, the rest for ups."""
    return {
        row: (rank, "gate" if place < len(own) // 2 else "up")
        for rank, own in enumerate(rows)
        for place, row in enumerate(own)
    }


def partial_sums(made: Sequence[float], rows: Rows) -> list[float]:
    """What each rank adds to one output, where every number of down is 1."""
    halves = (torch.tensor([float(made[row]) for row in own]).chunk(2) for own in rows)
    return [(F.silu(gate) * up).sum().item() for gate, up in halves]


@styled
def draw_cuts(made: Sequence[float], ways: Mapping[str, Rows]):
    """The rows of gate and up and the columns of down for each way to cut them, and one output below.

    Args:
        made: the number that each row makes for one token: first those of the gate, then as many of up.
        ways: {title: [rows of rank 0, rows of rank 1, …]}; all ranks have equally many, and columns of down in order.
    """
    for title, rows in ways.items():
        if sorted(row for own in rows for row in own) != [*range(len(made))] or len(rows) > len(RANKS):
            raise ValueError(f"{title!r} must give each of the {len(made)} rows to one of at most {len(RANKS)} ranks")
    hidden = len(made) // 2
    right = partial_sums(made, [range(len(made))])[0]
    ranks = max(len(rows) for rows in ways.values())
    figure, panels = new_figure(11.5, 0.31 * len(made) + 0.27 * ranks + 1.8, columns=len(ways), squeeze=False)
    for axes, (title, rows) in zip(panels[0], ways.items()):
        _draw_weights(axes, made, rows)
        parts = partial_sums(made, rows)
        below = len(made) + 1.0
        for rank, (own, part) in enumerate(zip(rows, parts)):
            terms = " + ".join(f"silu({made[gate]:g}) · {made[up]:g}" for gate, up in zip(own, own[len(own) // 2 :]))
            axes.text(0, below + rank, f"rank {rank}:  {terms}  =  {part:.3f}", va="center", fontsize=10.5)
        wrong = abs(sum(parts) - right) > 1e-4
        verdict = f"all-reduce:  {sum(parts):.3f}" + (f", and {right:.3f} is right" if wrong else ", which is right")
        axes.text(0, below + len(rows), verdict, va="center", fontsize=11, weight="bold", color=RED if wrong else INK)
        right_edge = ROW_WIDTH + GAP + hidden * COLUMN_WIDTH
        axes.set(xlim=(-0.05, right_edge + 0.5), ylim=(below + ranks + 0.4, -1.0))
        axes.axis("off")
        axes.set_title(title)
    return figure


def _draw_weights(axes, made: Sequence[float], rows: Rows) -> None:
    hidden = len(made) // 2
    axes.text(0, -0.45, "gate and up: rows", fontsize=10.5, color=MUTED, va="center")
    axes.text(ROW_WIDTH + GAP, -0.45, "down: columns", fontsize=10.5, color=MUTED, va="center")
    for row, (rank, use) in uses(rows).items():
        name = "gate" if row < hidden else "up"
        face, ink = RANKS[rank]
        axes.add_patch(Rectangle((0, row + 0.05), ROW_WIDTH, 0.9, facecolor=face, edgecolor=PAPER))
        axes.text(0.12, row + 0.5, f"{name} {row % hidden} = {made[row]:g}", va="center", fontsize=10, color=ink)
        axes.text(ROW_WIDTH - 0.12, row + 0.5, f"rank {rank}", ha="right", va="center", fontsize=10, color=ink)
        if use != name:
            axes.text(ROW_WIDTH + 0.1, row + 0.5, f"taken as {use}", va="center", fontsize=10, color=RED, weight="bold")
    for column in range(hidden):
        rank = column * len(rows) // hidden
        face, ink = RANKS[rank]
        left = ROW_WIDTH + GAP + column * COLUMN_WIDTH
        axes.add_patch(Rectangle((left + 0.03, 0.05), COLUMN_WIDTH - 0.06, len(made) - 0.1, facecolor=face))
        words = f"column {column}, rank {rank}"
        axes.text(left + COLUMN_WIDTH / 2, len(made) / 2, words, ha="center", va="center", rotation=90, color=ink)
