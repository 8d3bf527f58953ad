"""Online softmax, one tile at a time: what is on the chip, and how the running numbers change.

The still version is a strip of steps; in a live notebook a slider walks through all of them.
"""

import dataclasses
import math

from course_lib.figures.stepping import Stepper
from course_lib.figures.style import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PAPER, new_figure, styled

MOST_IN_STRIP = 4


@dataclasses.dataclass(frozen=True)
class Step:
    """What is known once a tile has been used.

    start, end: the tile's positions. running_max (m), running_sum (ℓ) and accumulator are those after it; rescale is
    the factor by which the earlier sum and accumulator were multiplied (1 for the first tile, which had none).
    """

    start: int
    end: int
    running_max: float
    rescale: float
    running_sum: float
    accumulator: tuple[float, ...]


def online_steps(scores, values, tile: int) -> list[Step]:
    """The states of an online softmax over `scores` in tiles of `tile`, the accumulator over the rows of `values`."""
    running_max, running_sum, accumulator = -math.inf, 0.0, [0.0] * len(values[0])
    steps = []
    for start in range(0, len(scores), tile):
        end = min(start + tile, len(scores))
        new_max = max(running_max, *scores[start:end])
        rescale = math.exp(running_max - new_max)  # 0 for the first tile: there is nothing yet to rescale
        weights = [math.exp(score - new_max) for score in scores[start:end]]
        running_sum = running_sum * rescale + sum(weights)
        accumulator = [
            total * rescale + sum(weight * row[column] for weight, row in zip(weights, values[start:end]))
            for column, total in enumerate(accumulator)
        ]
        running_max = new_max
        steps.append(Step(start, end, running_max, rescale if start else 1.0, running_sum, tuple(accumulator)))
    return steps


def chosen_steps(steps: list[Step]) -> list[int]:
    """Which steps a strip shows: the first, the last, and of the others those that rescale most."""
    if len(steps) <= MOST_IN_STRIP:
        return list(range(len(steps)))
    inner = sorted(range(1, len(steps) - 1), key=lambda index: steps[index].rescale)[: MOST_IN_STRIP - 2]
    return sorted({0, len(steps) - 1, *inner})


@styled
def draw_steps(scores, values, tile: int, chosen: list[int] | None = None):
    """The chosen steps side by side: scores, weights relative to the maximum so far, and the running numbers.

    Args:
        scores: the row, numbers.
        values: a value row for each score; the accumulator has as many entries as a row.
        tile: scores in a tile.
        chosen: numbers of the steps to draw, from 0; the telling ones by default.
    """
    steps = online_steps(scores, values, tile)
    chosen = chosen_steps(steps) if chosen is None else chosen
    width = 10.4 if len(chosen) > 1 else 6.4
    figure, axes = new_figure(
        width, 7.0, rows=3, columns=len(chosen), squeeze=False, sharey="row", height_ratios=(1.25, 1, 1.1)
    )
    largest_number = max(max(step.running_sum, *map(abs, step.accumulator)) for step in steps)
    for column, index in enumerate(chosen):
        draw_scores(axes[0, column], scores, steps[index])
        draw_weights(axes[1, column], scores, steps[index])
        draw_numbers(axes[2, column], steps[index], largest_number)
        axes[0, column].set_title(f"tile {index + 1} of {len(steps)} (orange)", fontsize=12)
    axes[0, 0].set_ylabel("scores", fontsize=11)
    axes[1, 0].set_ylabel("weights $e^{s-m}$", fontsize=11)
    return figure


def draw_scores(axes, scores, step: Step) -> None:
    """The row as it lies in memory; only the current tile is on the chip."""
    low, high = min(*scores, 0.0), max(scores)
    for position, score in enumerate(scores):
        if step.start <= position < step.end:
            axes.bar(position, score, color=ORANGE, width=0.8)
        elif position < step.start:
            axes.bar(position, score, color=GRID, width=0.8)
        else:
            axes.bar(position, score, facecolor="none", edgecolor=MUTED, linestyle=":", width=0.8)
    axes.axhline(step.running_max, color=BLUE, linewidth=1.6)
    axes.text(
        len(scores) - 0.4,
        step.running_max + 0.03 * (high - low),
        f"m = {step.running_max:.1f}",
        color=BLUE,
        ha="right",
        va="bottom",
        fontsize=11,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1, "alpha": 0.85},
    )
    axes.set(xlim=(-0.7, len(scores) - 0.3), ylim=(low - 0.08 * (high - low), high + 0.2 * (high - low)), xticks=[])
    axes.grid(axis="x", visible=False)


def draw_weights(axes, scores, step: Step) -> None:
    """What every score seen so far weighs, relative to the maximum so far."""
    for position in range(step.end):
        current = position >= step.start
        axes.bar(
            position,
            math.exp(scores[position] - step.running_max),
            width=0.8,
            color=ORANGE if current else BLUE,
            alpha=1.0 if current else 0.55,
        )
    note = f"earlier weights × {step.rescale:.2f}" if step.rescale < 1 else "maximum unchanged" if step.start else ""
    axes.text(0.5, 0.985, note, transform=axes.transAxes, ha="center", va="top", fontsize=10.5, color=INK)
    axes.set(xlim=(-0.7, len(scores) - 0.3), ylim=(0, 1.28), xticks=[], yticks=[0, 0.5, 1])
    axes.grid(axis="x", visible=False)


def draw_numbers(axes, step: Step, largest: float) -> None:
    """The running sum and the accumulator, all that is kept of the row beside m."""
    bars = [("ℓ", step.running_sum, BLUE)]
    bars += [(f"acc {column}", total, GREEN) for column, total in enumerate(step.accumulator)]
    for position, (_, value, color) in enumerate(bars):
        axes.barh(position, value, color=color, height=0.62)
        output = f", ÷ ℓ: {value / step.running_sum:.2f}" if position else ""
        axes.text(
            max(value, 0) + 0.03 * largest, position, f"{value:.2f}{output}", va="center", fontsize=10.5, color=INK
        )
    axes.set(
        xlim=(min(0, *step.accumulator), 2.1 * largest),
        yticks=range(len(bars)),
        yticklabels=[name for name, _, _ in bars],
        xticks=[],
    )
    if not axes.yaxis_inverted():  # the columns of a strip share this axis
        axes.invert_yaxis()
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)


def online_softmax_stepper(scores, values, tile: int) -> Stepper:
    """Online softmax over one row, tile by tile.

    Args:
        scores: the row's scores, 2 to 64 finite numbers.
        values: one value row for each score, 1 to 4 numbers each.
        tile: scores in a tile, at least 1.

    Raises:
        ValueError: an argument that cannot be drawn; the message says what is allowed.
    """
    if not 2 <= len(scores) <= 64 or not all(math.isfinite(score) for score in scores):
        raise ValueError(f"scores holds {len(scores)} entries; it must hold 2 to 64 finite numbers to be drawn.")
    if len(values) != len(scores) or len({len(row) for row in values}) != 1 or not 1 <= len(values[0]) <= 4:
        raise ValueError(
            f"values has {len(values)} rows for {len(scores)} scores; give each score a row of 1 to 4 numbers."
        )
    if tile < 1:
        raise ValueError(f"tile is {tile}; it must be at least 1.")
    scores, values = [float(score) for score in scores], [[float(entry) for entry in row] for row in values]
    return Stepper(
        draw_steps(scores, values, tile),
        lambda index: draw_steps(scores, values, tile, [index]),
        len(online_steps(scores, values, tile)),
        interval=1500,
        width=640,
        what="tile",
    )
