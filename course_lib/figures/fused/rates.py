"""How near each way to run an operation comes to the device's copy: a row for each operation."""

from collections.abc import Mapping

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, PAPER, RED, new_figure, styled

COPY_ON_AN_H200 = 4.17  # TB/s, read and written
# TB/s of the least bytes that must move: eager PyTorch, torch.compile, and the best other that was measured, with its
# name. One H200, 2026-11-22, PyTorch 2.11, bf16; None: nothing else was measured.
ON_AN_H200: dict[str, tuple[float, float | None, tuple[str, float] | None]] = {
    "add + RMSNorm, 16k × 4,096": (3.01, 3.96, ("Liger", 3.97)),
    "add + RMSNorm, 16k × 8,192": (2.76, 4.01, ("Liger", 4.08)),
    "SwiGLU, 8k × 14,336": (2.47, 4.22, ("Liger", 4.19)),
    "RoPE, 32 and 8 heads of 128": (0.35, 3.86, ("Liger", 1.07)),
    "RMSNorm, rows of 64k": (2.52, 2.85, ("QuACK", 4.10)),
    "cross-entropy of .float() and gradient, 128,256": (0.31, 1.57, None),
    "GroupNorm + Mish, 4,096 × 256 × 16": (0.25, 1.17, None),
    "GroupNorm + Mish, 256 × 512 × 256": (0.60, 1.28, None),
}
COPY_ON_AN_H100 = 3.00
# The same with the course's kernels, by `python -m course_lib bench fused` on one H100, 2026-11-27, PyTorch 2.11, bf16.
# Those of the last three rows are in CUDA C++.
ON_AN_H100: dict[str, tuple[float, float | None, tuple[str, float] | None]] = {
    "add + RMSNorm, 16k × 4,096": (2.06, 2.88, ("", 2.93)),
    "add + RMSNorm, 16k × 8,192": (1.98, 2.93, ("", 2.98)),
    "SwiGLU, 8k × 14,336": (1.80, 2.98, ("", 2.98)),
    "RoPE and append, 32 and 8 heads of 128": (0.20, 1.48, ("", 2.79)),
    "RMSNorm, rows of 64k": (1.91, 2.09, ("", 2.98)),
    "softmax, rows of 64k": (1.59, 1.83, ("", 2.97)),
    "LayerNorm, rows of 64k": (1.83, 1.90, ("", 2.46)),
    "RMSNorm backward, 16k × 8,192": (0.96, 1.54, ("", 2.78)),
    "cross-entropy and gradient, 128,256": (0.67, 1.43, ("", 2.73)),
    "GroupNorm + Mish, 4,096 × 256 × 16": (0.18, 1.08, ("", 2.17)),
    "GroupNorm + Mish, 256 × 512 × 256": (0.33, 1.21, ("", 2.35)),
}


@styled
def draw_fused_rates(rates: Mapping[str, tuple[float, float | None, tuple[str, float] | None]], copy=COPY_ON_AN_H200):
    """A row of points for each operation, in TB/s, and a line at the copy's rate.

    Args:
        rates: {operation: (eager, compiled, (name, rate) of the best other)}, None where there is no figure; a name may
            be empty.
        copy: TB/s of the device's copy.

    Returns a figure. Raises a ValueError when there is no row, or a rate that is not above 0.
    """
    found = [rate for eager, compiled, other in rates.values() for rate in (eager, compiled, other and other[1])]
    if not rates or any(rate is not None and rate <= 0 for rate in found):
        raise ValueError(f"rates is {dict(rates)!r}; give at least one row, with rates above 0.")
    figure, axes = new_figure(10.5, 0.5 * len(rates) + 1.6)
    axes.axvline(copy, color=INK, linewidth=1.4, linestyle=(0, (4, 3)), zorder=0)
    points: dict[str, tuple[str, str, list]] = {
        "eager": (BLUE, "o", []),
        "torch.compile": (RED, "s", []),
        "written by hand": (GREEN, "D", []),
    }
    for row, (eager, compiled, other) in enumerate(rates.values()):
        for (_, _, places), rate in zip(points.values(), (eager, compiled, other and other[1])):
            if rate is not None:
                places.append((rate, row))
        if other is not None and other[0]:
            name, rate = other
            look = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 9.5, "color": MUTED}
            axes.annotate(name, (rate, row), bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.5}, **look)
    for label, (color, marker, places) in points.items():
        if places:
            style = {"linestyle": "none", "markersize": 10, "markeredgecolor": "white", "alpha": 0.9}
            axes.plot(*zip(*places), color=color, marker=marker, label=label, **style)
    axes.set_yticks(range(len(rates)), list(rates), color=INK, fontsize=11)
    axes.set(xlim=(0, 1.12 * max(copy, *(rate for rate in found if rate))), ylim=(len(rates) - 0.5, -0.6))
    axes.set_xlabel("TB/s of the least bytes that must move")
    axes.annotate("copy", (copy, len(rates) - 0.5), xytext=(4, 6), textcoords="offset points", color=MUTED)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.12), ncols=3)
    return figure
