"""A layer before fusion and after: its parts on the roofline, and where its time goes."""

from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, PALETTE, PAPER, new_figure, styled
from course_lib.hardware.units import format_bandwidth, format_flop_rate, format_tick

FORMS = ("eager", "compiled", "ours")


@styled
def draw_layer_roofline(record: Mapping[str, Any]):
    """The parts of a layer on the roofline, each by the bytes that its kernels move; the glue once more, larger.

    Args:
        record: what `bench layer` writes. The slope is its copy, the roof its large matrix product.

    Parts of the glue have two marks, joined by an arrow: eager PyTorch, and the course's kernel. The others have one.
    """
    figure, (whole, near) = new_figure(12.0, 4.9, columns=2)
    glue = {name: part for name, part in record["parts"].items() if part["glue"]}
    others = {name: part for name, part in record["parts"].items() if not part["glue"]}
    _roof(whole, record, (1 / 64, 16_384), (1e10, 4e15))
    _roof(near, record, (1 / 32, 2), (5e10, 6e12))
    for part in others.values():
        whole.plot(*_place(part, part["bytes"], "ours"), marker="s", markersize=7, color=BLUE, linestyle="none")
    for (name, part), marker, size in reversed(list(zip(glue.items(), "^oD", (9, 15, 11)))):  # small marks in front
        before, after = _place(part, part["eager_bytes"], "eager"), _place(part, part["bytes"], "ours")
        for axes, share in ((whole, 0.5), (near, 1.0)):
            for place, color in ((before, ORANGE), (after, GREEN)):
                axes.plot(
                    *place, marker=marker, markersize=share * size, color=color, linestyle="none", markeredgecolor=PAPER
                )
        near.annotate("", after, xytext=before, arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkA": 7,
                                                            "shrinkB": 7, "linewidth": 1.2})  # fmt: skip
        near.plot([], [], marker=marker, markersize=8, color=MUTED, linestyle="none", label=name)
    for color, label in ((ORANGE, "glue, eager"), (GREEN, "glue, fused"), (BLUE, "matrix products, attention")):
        whole.plot([], [], marker="s", markersize=8, color=color, linestyle="none", label=label)
    for axes, title in ((whole, "The whole layer"), (near, "Its glue, larger")):
        axes.legend(loc="lower right", fontsize=10.5)
        axes.set_title(title, fontsize=12.5)
    return figure


def _place(part: Mapping[str, Any], moved: int, form: str) -> tuple[float, float]:
    """(FLOP/byte, FLOP/s) of a part of the record."""
    return part["flops"] / moved, part["flops"] / (part["us"][form] * 1e-6)


def _roof(axes, record: Mapping[str, Any], x: tuple[float, float], y: tuple[float, float]) -> None:
    bandwidth, roof = record["copy"], record["matmul_rate"]
    axes.set(xscale="log", yscale="log", xlim=x, ylim=y, xlabel="arithmetic intensity [FLOP/byte]")
    ridge = roof / bandwidth
    axes.plot([x[0], ridge, max(x[1], ridge)], [bandwidth * x[0], roof, roof], color=INK, linewidth=2.2)
    words = f"slope: a copy, {format_bandwidth(bandwidth)}"
    if ridge < x[1]:
        words += f"\nroof: a large product, {format_flop_rate(roof)}"
    axes.text(0.03, 0.96, words, transform=axes.transAxes, va="top", fontsize=10.5)
    axes.set_ylabel("rate [FLOP/s]")
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    axes.minorticks_off()


@styled
def draw_layer_times(record: Mapping[str, Any]):
    """A bar of milliseconds for each form of the layer: its matrix products, attention and the parts of the glue."""
    figure, axes = new_figure(10.0, 2.9)
    groups: dict[str, list[float]] = {"matrix products": [0.0] * len(FORMS)}
    for name, part in record["parts"].items():
        group = name if part["glue"] or name == "attention" else "matrix products"
        before = groups.get(group, [0.0] * len(FORMS))
        groups[group] = [sum_ + part["times"] * part["us"][form] / 1e3 for sum_, form in zip(before, FORMS)]
    rows, left = range(len(FORMS)), [0.0] * len(FORMS)
    for (group, lengths), color in zip(groups.items(), (MUTED, *PALETTE)):
        axes.barh(rows, lengths, left=left, height=0.62, color=color, label=group, edgecolor="white")
        left = [begin + length for begin, length in zip(left, lengths)]
    for row, total in zip(rows, left):
        axes.annotate(f"{total:.1f} ms", (total, row), xytext=(6, 0), textcoords="offset points", va="center",
                      fontsize=11, color=INK)  # fmt: skip
    axes.set_yticks(rows, FORMS, fontsize=11)
    axes.set(xlim=(0, 1.1 * max(left)), ylim=(len(FORMS) - 0.5, -0.5), xlabel="ms")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=5, fontsize=10, columnspacing=1.2,
                handlelength=1.2)  # fmt: skip
    return figure
