"""Where the large numbers of a cache are: keys and values of one head, tokens down and channels across."""

import torch
from matplotlib.colors import LinearSegmentedColormap

from course_lib.figures.style import BLUE, INK, ORANGE, PAPER, new_figure, styled

FROM_PAPER = LinearSegmentedColormap.from_list("paper to ink", [PAPER, "#9CC7E3", BLUE, "#08304A"])


@styled
def draw_outliers(keys: torch.Tensor, values: torch.Tensor, title: str = "Where the large numbers are"):
    """Sizes |x| as two pictures, and above each what the largest number of every channel is.

    Args:
        keys, values: [tokens, channels] of one head.
        title: above the picture.

    Returns a figure. Raises a ValueError when they do not have one shape of two dimensions.
    """
    if keys.dim() != 2 or keys.shape != values.shape or keys.numel() == 0:
        raise ValueError(
            f"keys are {tuple(keys.shape)}, values {tuple(values.shape)}; both must be [tokens, channels]."
        )
    figure, axes = new_figure(11, 5.6, rows=2, columns=2, sharex="col", height_ratios=(1, 2.6))
    largest = max(keys.abs().max().item(), values.abs().max().item())
    for column, (name, numbers) in enumerate((("keys", keys), ("values", values))):
        sizes = numbers.detach().float().abs().cpu().numpy()
        above, map_ = axes[0, column], axes[1, column]
        by_channel = sizes.max(axis=0)
        above.bar(range(len(by_channel)), by_channel.tolist(), width=1.0, color=ORANGE)
        above.set_ylim(0, 1.08 * largest)
        above.set_title(
            f"{name}: the largest of each channel, {by_channel.min():.1f} to {by_channel.max():.1f}", size=12
        )
        picture = map_.imshow(sizes, aspect="auto", cmap=FROM_PAPER, vmin=0, vmax=largest, interpolation="nearest")
        map_.set_xlabel("channel")
        map_.grid(visible=False)
        above.grid(axis="x", visible=False)
    axes[0, 0].set_ylabel("largest |x|")
    axes[1, 0].set_ylabel("token")
    figure.colorbar(picture, ax=axes[1, :], label="|x|", aspect=30, pad=0.01)
    figure.suptitle(title, x=0.02, ha="left", color=INK, weight="bold", size=14)
    return figure
