"""What a forward pass leaves in memory for the backward pass: P whole, or the log-sum-exps."""

from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from course_lib.figures.style import BLUE, MUTED, RED, new_figure, styled
from course_lib.hardware.units import format_bytes

LENGTHS = [2**power for power in range(9, 18)]  # 512 to 131,072 tokens


def saved_probabilities(length: int, heads: int, item_bytes: int) -> int:
    """Bytes of P."""
    return heads * length * length * item_bytes


def saved_log_sum_exps(length: int, heads: int) -> int:
    """Bytes of L, in float32."""
    return heads * length * 4


@styled
def draw_saved(heads=32, head_dim=128, item_bytes=2, mark=16_384):
    """Bytes that one layer keeps over the sequence length: P, L, and Q, K, V, O, which both need.

    Args:
        heads, head_dim, item_bytes: the shape of one layer, batch size 1.
        mark: the length at which both are written beside their lines.
    """
    figure, axes = new_figure(9.5, 5.0)
    lines = (
        ("P", RED, [saved_probabilities(length, heads, item_bytes) for length in LENGTHS]),
        ("Q, K, V and O", MUTED, [4 * heads * length * head_dim * item_bytes for length in LENGTHS]),
        ("L, the log-sum-exps", BLUE, [saved_log_sum_exps(length, heads) for length in LENGTHS]),
    )
    for name, color, values in lines:
        axes.plot(LENGTHS, values, color=color, marker="o", markersize=4)
        at = values[LENGTHS.index(mark)]
        axes.annotate(
            f"{name}: {format_bytes(at)}",
            (mark, at),
            xytext=(10, -18),
            textcoords="offset points",
            ha="left",
            color=color,
            fontsize=12,
            fontweight="bold",
        )
    axes.axvline(mark, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set(xscale="log", yscale="log", xlim=(LENGTHS[0], LENGTHS[-1]))
    axes.xaxis.set_major_locator(FixedLocator(LENGTHS))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    )
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(10, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.set(
        xlabel="sequence length N",
        ylabel="bytes kept for the backward pass",
        title=f"One layer, {heads} heads of {head_dim}, {item_bytes} bytes an element",
    )
    return figure
