"""The rates of backward passes side by side: what `bench backward` measured, as bars."""

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, PALETTE, SKY, new_figure, styled

COLORS = {"FA2": MUTED, "cuDNN": INK, "ours": ORANGE, "ours, atomics": "#F3CE85", "ours, Gluon": BLUE}
COLORS["Gluon, any order"] = SKY
LABELS = {
    "FA2": "FlashAttention-2",
    "ours": "the course's two kernels",
    "ours, atomics": "one kernel, dQ by atomic adds",
    "ours, Gluon": "the course's for Hopper, dQ in turns",
    "Gluon, any order": "the same, dQ in any order",
}


@styled
def draw_rates(record: dict):
    """A row of bars for each head dimension, in groups by sequence length and mask, each with its number.

    Args:
        record: what `bench backward` wrote: "gpu", and "rows" with "head_dim", "length", "causal" and "results", which
            maps an implementation to {"tflops": ...}, or to {"missing": ...} where it has no figure.

    Returns:
        A figure: TFLOP/s of the gradients, five products counted.
    """
    head_dims = sorted({row["head_dim"] for row in record["rows"]}, reverse=True)
    names = list(dict.fromkeys(name for row in record["rows"] for name in row["results"]))
    colors = {name: COLORS.get(name, PALETTE[place % len(PALETTE)]) for place, name in enumerate(names)}
    figure, axes = new_figure(11.5, 3.0 * len(head_dims) + 1.2, rows=len(head_dims), squeeze=False, sharey=True)
    for axis, head_dim in zip(axes[:, 0], head_dims):
        rows = [row for row in record["rows"] if row["head_dim"] == head_dim]
        width = 0.86 / len(names)
        for place, name in enumerate(names):
            found = [(group, row["results"].get(name, {}).get("tflops")) for group, row in enumerate(rows)]
            bars = [(group + (place - (len(names) - 1) / 2) * width, rate) for group, rate in found if rate is not None]
            if bars:
                drawn = axis.bar(*zip(*bars), width=0.94 * width, color=colors[name], label=LABELS.get(name, name))
                axis.bar_label(drawn, fmt="%.0f", fontsize=9.5, padding=2, color=INK)
        masks = ("causal" if row["causal"] else "full" for row in rows)
        axis.set_xticks(range(len(rows)), [f"{mask}, {row['length']:,} tokens" for mask, row in zip(masks, rows)])
        axis.grid(axis="x", visible=False)
        axis.set_ylabel("TFLOP/s")
        axis.set_title(f"head dimension {head_dim}")
        axis.margins(y=0.12)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    on = f"{record['gpu']}, {record['date']}" if "date" in record else record["gpu"]
    figure.suptitle(f"Attention's backward pass, {on}", x=0.02, ha="left", color=INK)
    return figure
