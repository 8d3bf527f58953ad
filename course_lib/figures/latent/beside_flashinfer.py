"""Latent decode kernels beside FlashInfer's: ratios of times, as bars."""

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, new_figure, styled

COLORS = {"portable": ORANGE, "Hopper": BLUE}
LABELS = {"portable": "the course's in Triton", "Hopper": "the course's for Hopper, in Gluon"}
HEIGHT = 0.36  # of a bar; two stand in a row


@styled
def draw_beside_flashinfer(record: dict):
    """Two bars for each problem, with their numbers; a line at 1 is FlashInfer.

    Args:
        record: "gpu", "date", and "rows" with "name" (batch, heads, context), "flashinfer" (its own figure, as text)
            and "ratios": FlashInfer's time over that of "portable" and of "Hopper", where it was measured.

    Returns:
        A figure.
    """
    rows = record["rows"]
    figure, axes = new_figure(9.5, 0.62 * len(rows) + 1.7)
    for place, name in enumerate(COLORS):
        found = [(at + (place - 0.5) * HEIGHT, row["ratios"].get(name)) for at, row in enumerate(rows)]
        bars = [(at, ratio) for at, ratio in found if ratio is not None]
        if bars:
            drawn = axes.barh(*zip(*bars), height=0.92 * HEIGHT, color=COLORS[name], label=LABELS[name])
            axes.bar_label(drawn, fmt="%.2f", fontsize=10, padding=-30, color=INK if name == "portable" else "white")
        for at, _ in (pair for pair in found if pair[1] is None):
            axes.text(0.01, at, "not measured", va="center", fontsize=9.5, color=MUTED)
    axes.axvline(1, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [f"{row['name']}\n({row['flashinfer']})" for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.4)
    axes.set_xlabel("times as fast as FlashInfer")
    axes.set_ylabel("batch, heads, context\n(FlashInfer's own figure)")
    axes.set_title(f"MLA decode, {record['gpu']}, {record['date']}", loc="left")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
