"""How much memory attention needs over the sequence length: with S and P written out, and without."""

import math

from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from course_lib.figures.style import BLACK, BLUE, INK, MUTED, RED, new_figure, spread_labels, styled
from course_lib.hardware.datasheets import DATASHEETS
from course_lib.hardware.units import format_bytes, format_capacity

LENGTHS = [2**power for power in range(9, 21)]  # 512 to a million tokens
KNOWN = ("T4", "A100", "H200")


def naive_bytes(length, heads, head_dim, item_bytes):
    """Q, K, V, O, and the two matrices S and P, all alive at once."""
    return item_bytes * heads * (4 * length * head_dim + 2 * length * length)


def tiled_bytes(length, heads, head_dim, item_bytes):
    """Q, K, V, O, and one float32 log-sum-exp a row: what FlashAttention leaves in memory."""
    return heads * (4 * length * head_dim * item_bytes + 4 * length)


def longest_that_fits(need, capacity, *shape):
    """The largest length whose need is at most `capacity`, or 0."""
    low, high = 0, 2
    while need(high, *shape) <= capacity:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle, *shape) <= capacity else (low, middle)
    return low


@styled
def draw_attention_memory(heads=32, head_dim=128, item_bytes=2, device_bytes=None):
    """Bytes of one layer's attention over the sequence length, naive against tiled, with memories of GPUs across.

    Args:
        heads, head_dim, item_bytes: the shape of one layer, batch size 1.
        device_bytes: this machine's memory, drawn in black; None leaves it out.
    """
    shape = (heads, head_dim, item_bytes)
    naive = [naive_bytes(length, *shape) for length in LENGTHS]
    tiled = [tiled_bytes(length, *shape) for length in LENGTHS]
    figure, axes = new_figure(10, 5.6)
    dots = {"marker": "o", "markersize": 4}
    axes.plot(LENGTHS, naive, color=RED, **dots, label="naive, S and P in memory: grows with N²")
    axes.plot(LENGTHS, tiled, color=BLUE, **dots, label="tiled, neither ever written: grows with N")
    axes.set(xscale="log", yscale="log", xlim=(LENGTHS[0], LENGTHS[-1] * 1.02), ylim=(tiled[0] / 2, 1.3e14))

    memories = [(name, DATASHEETS[name].memory_bytes, MUTED) for name in KNOWN]
    if device_bytes:
        memories.append(("this machine", device_bytes, BLACK))
    heights = spread_labels([math.log10(capacity) for _, capacity, _ in memories], 0.64)
    for (name, capacity, color), height in zip(memories, heights):
        axes.axhline(capacity, color=color, linewidth=1.4, linestyle=(0, (4, 3)), zorder=1)
        longest = longest_that_fits(naive_bytes, capacity, *shape)
        axes.plot([longest], [capacity], marker="D", markersize=6.5, color=color, zorder=4)
        text = f"{name}, {format_capacity(capacity)}:\nnaive up to N = {longest:,}"
        axes.annotate(
            text,
            (LENGTHS[-1], 10**height),
            xytext=(10, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            fontsize=10.5,
            color=INK if color == BLACK else MUTED,
            annotation_clip=False,
        )
    axes.legend(loc="upper left")
    axes.xaxis.set_major_locator(FixedLocator(LENGTHS[::2]))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    )
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(10, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.set(
        xlabel="sequence length N (queries and keys)",
        ylabel="bytes of one layer's attention",
        title=f"One layer, {heads} heads of {head_dim}, {item_bytes} bytes an element",
    )
    return figure
