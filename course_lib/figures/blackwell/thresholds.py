"""A row's running maximum over the blocks of keys, and the reference that follows it only from a threshold on."""

import torch

from course_lib.figures.stepping import Stepper
from course_lib.figures.style import BLUE, INK, ORANGE, RED, new_figure, styled

THRESHOLDS = tuple(step / 2 for step in range(0, 25))  # in base 2


def references(maxima: torch.Tensor, threshold: float, together: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of each row after each block, and in which blocks it was made anew.

    It is made anew if the block's maximum exceeds it by more than the threshold, in this row or in another one of its
    group, and becomes the larger of the two.

    Args:
        maxima: float [rows, blocks], the largest score of each block, in base 2.
        threshold: in base 2; 0 is the usual online softmax.
        together: rows of a group, which must divide the rows.

    Returns:
        (references, made anew), float and bool [rows, blocks].
    """
    reference = maxima[:, 0]
    kept, anew = [reference], [torch.zeros_like(reference, dtype=torch.bool)]
    for block in maxima.unbind(1)[1:]:
        groups = (block > reference + threshold).view(-1, together)
        rescaled = groups.any(1).repeat_interleave(together)
        reference = torch.where(rescaled, torch.maximum(block, reference), reference)
        kept.append(reference)
        anew.append(rescaled)
    return torch.stack(kept, 1), torch.stack(anew, 1)


def rescales(maxima: torch.Tensor, threshold: float, together: int = 1) -> float:
    """How many rescales a row has on average; arguments as above."""
    return references(maxima, threshold, together)[1].sum(1).float().mean().item()


@styled
def draw_threshold(maxima: torch.Tensor, threshold: float):
    """One row: its blocks' maxima as dots, the usual reference and the lazy one as steps.

    Args:
        maxima: float [blocks], base 2.
        threshold: in base 2; 0 is the usual online softmax.
    """
    figure, axes = new_figure(9.5, 4.6)
    blocks = range(len(maxima))
    (usual, before), (lazy, moved) = ([part[0] for part in references(maxima[None], value)] for value in (0, threshold))
    axes.plot(blocks, maxima, "o", color=BLUE, markersize=5, label="largest score of a block")
    axes.step(blocks, usual, where="post", color=ORANGE, label="running maximum")
    axes.step(blocks, lazy, where="post", color=RED, label="reference of the row")
    axes.step(blocks, lazy + threshold, where="post", color=RED, linewidth=1.2, linestyle=(0, (4, 3)),
              label="reference + threshold")  # fmt: skip
    axes.set_title(f"threshold {threshold:g}: {moved.sum()} rescales of the row, instead of {before.sum()}")
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
