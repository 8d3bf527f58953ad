"""Decode over caches of fewer bits, as measured: how many times as fast as over one of 16 bits."""

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, new_figure, styled

COLORS = {"FP8, by head": BLUE, "INT4": ORANGE, "FlashInfer FP8": GREEN}
LABELS = {"FP8, by head": "the course's, e4m3", "INT4": "the course's, INT4", "FlashInfer FP8": "FlashInfer's, e4m3"}
HEIGHT = 0.26  # of a bar; three stand in a row


@styled
def draw_measured_decode(record: dict):
    """A bar for each form and problem with its number, and a tick where its bytes alone would put it.

    Args:
        record: "gpu", "date", "bits" of a number in each form, and "rows" with "name" (batch, context), "us" of 16
            bits, and "ratios": the time of 16 bits over that of each form, where it was measured.

    Returns:
        A figure.
    """
    rows = record["rows"]
    figure, axes = new_figure(9.5, 0.95 * len(rows) + 1.8)
    for place, name in enumerate(COLORS):
        at = [row + (place - 1) * HEIGHT for row in range(len(rows))]
        ratios = [row["ratios"].get(name) for row in rows]
        found = [(height, ratio) for height, ratio in zip(at, ratios) if ratio is not None]
        if found:
            drawn = axes.barh(*zip(*found), height=0.9 * HEIGHT, color=COLORS[name], label=LABELS[name])
            axes.bar_label(
                drawn, fmt="%.2f", fontsize=10, padding=-30, color="white" if name == "FP8, by head" else INK
            )
        by_bytes = 16 / record["bits"][name]
        axes.vlines([by_bytes] * len(at), [y - 0.45 * HEIGHT for y in at], [y + 0.45 * HEIGHT for y in at], color=INK,
                    linewidth=2, label="what its bytes alone would give" if place == 0 else None)  # fmt: skip
    axes.axvline(1, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [f"{row['name']}\n({row['us']:.0f} µs)" for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 3.8)
    axes.set_xlabel("times as fast as the course's kernel for 16 bits")
    axes.set_ylabel("batch, context\n(time with 16 bits)")
    axes.set_title(f"Decode, 32 query heads on 8, {record['gpu']}, {record['date']}", loc="left")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
