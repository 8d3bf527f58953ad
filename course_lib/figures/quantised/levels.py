"""The numbers that a few bits can stand for, as marks on a line."""

from collections.abc import Mapping

import torch

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, PALETTE, new_figure, styled

COLORS = {"INT4": ORANGE, "e4m3": BLUE}


def int4_levels() -> torch.Tensor:
    """The 16 numbers of INT4 for a group from -1 to 1: float32, rising."""
    return torch.linspace(-1, 1, 16)


def e4m3_levels() -> torch.Tensor:
    """The 253 finite numbers of e4m3 (0 once), the largest scaled to 1: float32, rising."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return codes[codes.isfinite()].unique() / 448


@styled
def draw_levels(formats: Mapping[str, torch.Tensor]):
    """A line for each format with a mark at every number that it has, the largest being 1; above it how many.

    Args:
        formats: {name: numbers from -1 to 1}.

    Returns a figure. Raises a ValueError for a format without numbers, or with one beyond 1.
    """
    for name, numbers in formats.items():
        if numbers.numel() == 0 or numbers.abs().max() > 1:
            raise ValueError(f"formats[{name!r}] is {numbers!r}; give at least one number, each from -1 to 1.")
    figure, axes = new_figure(10, 0.9 * len(formats) + 1.2)
    for row, (name, numbers) in enumerate(formats.items()):
        color = COLORS.get(name, PALETTE[row % len(PALETTE)])
        axes.vlines(numbers.tolist(), row - 0.28, row + 0.28, color=color, linewidth=1.1)
        told = f"{numbers.numel()} numbers, {int((numbers.abs() < 0.1).sum())} of them within ±0.1"
        axes.text(0, row - 0.38, told, ha="center", va="bottom", color=MUTED, fontsize=10.5)
    axes.set_yticks(range(len(formats)), list(formats), color=INK, fontsize=12)
    axes.set_ylim(len(formats) - 0.5, -0.75)
    axes.set_xlim(-1.03, 1.03)
    axes.set_xlabel("number, as a share of the largest one")
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title("What the bits can stand for")
    return figure
