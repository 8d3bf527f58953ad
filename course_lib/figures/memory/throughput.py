"""Throughput over the sequence length: every implementation of `bench attention` against the machine's roof."""

from course_lib.figures.style import INK, MUTED, PALETTE, new_figure, styled

MARKERS = "osD^vPX"


@styled
def throughput_figure(record: dict, head_dim: int = 128):
    """Two plots, full and causal, from what `bench attention` wrote.

    Args:
        record: the content of attention.json: "gpu", "matmul_tflops" (dtype -> TFLOP/s) and "rows".
        head_dim: which rows to draw.

    Returns a figure: TFLOP/s over the length, and the rate of a large matrix product as the roof.
    """
    rows = [row for row in record["rows"] if row["head_dim"] == head_dim]
    if not rows:
        known = sorted({row["head_dim"] for row in record["rows"]})
        raise ValueError(f"head_dim is {head_dim}; the record has {', '.join(map(str, known))}.")
    names = list(rows[0]["results"])
    lengths = sorted({row["length"] for row in rows})
    roofs = record["matmul_tflops"]
    roof = roofs.get("bfloat16", roofs.get("float16"))
    figure, axes = new_figure(11.5, 5.4, columns=2, sharey=True)
    for axis, causal in zip(axes, (False, True)):
        for name, color, marker in zip(names, PALETTE, MARKERS):
            points = sorted(
                (row["length"], row["results"][name]["tflops"])
                for row in rows
                if row["causal"] == causal and "tflops" in row["results"][name]
            )
            if points:
                axis.plot(
                    *zip(*points),
                    color=color,
                    marker=marker,
                    markersize=6,
                    label=name,
                    linewidth=3 if name.startswith("ours") else 1.8,
                )
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths])
        axis.set_xlabel("sequence length (16384 tokens in all)")
        axis.set_title("causal" if causal else "full")
        if roof:
            axis.axhline(roof, color=MUTED, linestyle="--", linewidth=1.5)
            axis.annotate(
                f"large matrix product: {roof:.0f}",
                (lengths[0], roof),
                xytext=(0, 5),
                textcoords="offset points",
                color=INK,
                fontsize=10,
            )
        axis.set_ylim(bottom=0, top=1.15 * roof if roof else None)
    axes[0].set_ylabel("TFLOP/s")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"Attention forward, head dimension {head_dim}, on {record['gpu']}", x=0.02, ha="left", color=INK)
    return figure
