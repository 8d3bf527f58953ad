"""The steps from a naive product to the fastest one: a bar for each, and lines at what the machine can do."""

from collections.abc import Mapping

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, new_figure, styled

# TFLOP/s of 8192³ in bf16, by `python -m course_lib bench large_products` on one H200, 2026-11-29, PyTorch 2.11,
# Triton 3.6. The last two steps are beside each other: the copy engine in Triton, and roles for warps in Gluon.
ON_AN_H200 = {"naive": 9, "tiled": 290, "ordered": 279, "pipelined": 482, "persistent": 669, "copy engine": 779,
              "warp roles": 745, "cuBLAS": 753}  # fmt: skip
PEAK_OF_AN_H200 = 989


@styled
def draw_ladder(rates: Mapping[str, float], title: str, peak: float | None = PEAK_OF_AN_H200):
    """A bar for each step, from the top down, and a dashed line at the peak.

    Args:
        rates: {step: TFLOP/s}. A step called "cuBLAS" has another colour.
        title: which product, and where.
        peak: TFLOP/s of the data sheet; None for no line.
    """
    figure, axes = new_figure(10, 0.42 * len(rates) + 1.5)
    places = range(len(rates))
    colors = [ORANGE if name == "cuBLAS" else BLUE for name in rates]
    axes.barh(places, list(rates.values()), color=colors, height=0.72)
    longest = max(*rates.values(), peak or 0)
    for place, rate in zip(places, rates.values()):
        share = f"   {100 * rate / peak:.0f} %" if peak else ""
        axes.text(rate + 0.01 * longest, place, f"{rate:,.0f}{share}", va="center", color=INK, fontsize=10.5)
    if peak:
        axes.axvline(peak, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.4)
        axes.text(peak, -0.75, f"peak {peak:,.0f}", ha="center", va="bottom", color=INK, fontsize=10)
    axes.set_yticks(list(places), list(rates))
    axes.set(ylim=(len(rates) - 0.4, -0.8), xlim=(0, 1.16 * longest), xlabel="TFLOP/s")
    axes.grid(axis="y", visible=False)
    axes.set_title(title, pad=20)
    return figure
