"""A row's running maximum over the blocks of keys, and the reference that follows it only from a threshold on."""

import torch

from course_lib.figures.stepping import Stepper
from course_lib.figures.style import BLUE, INK, ORANGE, RED, new_figure, styled

THRESHOLDS = tuple(step / 2 for step in range(0, 25))  # in base 2


def references(maxima: torch.Tensor, threshold: float) -> torch.Tensor:
    """The reference of each row after each block: it moves only when a block's maximum exceeds it by more than that.

    maxima: float [rows, blocks], the largest score of each block, in base 2.
    """
    reference, kept = maxima[:, 0], [maxima[:, 0]]
    for block in maxima.unbind(1)[1:]:
        reference = torch.where(block > reference + threshold, block, reference)
        kept.append(reference)
    return torch.stack(kept, 1)


def rescales(maxima: torch.Tensor, threshold: float) -> torch.Tensor:
    """How often the reference of each row moves, int64 [rows]."""
    return (references(maxima, threshold).diff(dim=1) != 0).sum(1)


@styled
def draw_threshold(maxima: torch.Tensor, threshold: float):
    """One row: its blocks' maxima as dots, the usual reference and the lazy one as steps.

    Args:
        maxima: float [blocks], base 2.
        threshold: in base 2; 0 is the usual online softmax.
    """
    figure, axes = new_figure(9.5, 4.6)
    blocks = range(len(maxima))
    usual, lazy = (references(maxima[None], value)[0] for value in (0.0, threshold))
    axes.plot(blocks, maxima, "o", color=BLUE, markersize=5, label="largest score of a block")
    axes.step(blocks, usual, where="post", color=ORANGE, label="running maximum")
    axes.step(blocks, lazy, where="post", color=RED, label="reference of the row")
    axes.step(blocks, lazy + threshold, where="post", color=RED, linewidth=1.2, linestyle=(0, (4, 3)),
              label="reference + threshold")  # fmt: skip
    moved = [(lazy if line == "lazy" else usual).diff().ne(0).sum().item() for line in ("usual", "lazy")]
    axes.set_title(f"threshold {threshold:g}: {moved[1]} rescales of the row, instead of {moved[0]}")
    low, high = maxima.min().item(), maxima.max().item() + THRESHOLDS[-1]
    axes.set(xlabel="block of 128 keys", ylabel="score, base 2", ylim=(low - 1, high), xlim=(-0.5, len(maxima) - 0.5))
    figure.legend(loc="outside lower center", ncols=4, fontsize=10, labelcolor=INK)
    return figure


def choose_threshold(maxima: torch.Tensor, still: float = 8.0) -> Stepper:
    """The row with a slider over thresholds from 0 to 12, drawn at `still` first.

    maxima: float [blocks], base 2, at least 2.
    """
    if maxima.dim() != 1 or len(maxima) < 2:
        raise ValueError(f"maxima has shape {list(maxima.shape)}; it must be [blocks], with at least 2.")
    return Stepper(
        draw_threshold(maxima, still), lambda step: draw_threshold(maxima, THRESHOLDS[step]), len(THRESHOLDS),
        interval=700, what="threshold",
    )  # fmt: skip
