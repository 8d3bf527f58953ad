"""Decode on one page: bandwidth of each implementation by problem, and time against the length of the context."""

from course_lib.figures.style import INK, MUTED, PALETTE, new_figure, styled

MARKERS = "osD^vPX"
BAR_WIDTH = 0.8  # of the room that a problem has


@styled
def decode_bandwidth_figure(record: dict):
    """Two plots from what `bench decode` wrote.

    Args:
        record: the content of decode.json: "gpu", "read_bandwidth" [bytes/s] and "tables", whose "decode" and "context"
            are drawn. An implementation without a figure ("missing") is left out where it has none.

    Returns a figure: left, bytes of keys and values per second as bars, below the bandwidth of pure reading; right, the
    time of a step at batch 1 over the context, above the time in which that bandwidth reads the cache.
    """
    figure, (bars, lines) = new_figure(14.5, 6.0, columns=2, width_ratios=(1.35, 1))
    rows, roof = record["tables"]["decode"], record["read_bandwidth"]
    names = list(rows[0]["results"])
    colors = dict(zip(names, PALETTE))
    width = BAR_WIDTH / len(names)
    for index, name in enumerate(names):
        points = [
            (place + (index - (len(names) - 1) / 2) * width, row["results"][name]["bandwidth"] / 1e12)
            for place, row in enumerate(rows)
            if "bandwidth" in row["results"][name]
        ]
        bars.bar(
            [x for x, _ in points], [height for _, height in points], width=0.92 * width, color=colors[name], label=name
        )
    bars.axhline(roof / 1e12, color=MUTED, linestyle="--", linewidth=1.5)
    bars.annotate(
        f"pure read: {roof / 1e12:.2f}",
        (-0.5, roof / 1e12),
        xytext=(0, 5),
        textcoords="offset points",
        color=INK,
        fontsize=10,
    )
    bars.set_ylim(0, 1.15 * roof / 1e12)
    bars.set_xticks(range(len(rows)), [row["name"].replace(", ", "\n") for row in rows])
    bars.set_xlabel("batch, query heads / KV heads, context")
    bars.set_ylabel("keys and values read [TB/s]")
    bars.grid(axis="x", visible=False)
    bars.set_title("Bandwidth")

    rows = record["tables"]["context"]
    contexts = [row["context"] for row in rows]
    for name, marker in zip(names, MARKERS):
        points = [(row["context"], row["results"][name]["us"]) for row in rows if "us" in row["results"].get(name, {})]
        if points:
            lines.plot(*zip(*points), color=colors[name], marker=marker, markersize=6)
    lines.plot(contexts, [row["bytes"] / roof * 1e6 for row in rows], color=MUTED, linestyle="--", linewidth=1.5)
    middle = len(rows) // 2
    lines.annotate(
        "the bytes at pure read",
        (contexts[middle], rows[middle]["bytes"] / roof * 1e6),
        xytext=(14, -24),
        textcoords="offset points",
        color=INK,
        fontsize=10,
    )
    lines.set_xscale("log", base=2)
    lines.set_yscale("log")
    ticks = [tick for tick in (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if lines.get_ylim()[0] <= tick]
    lines.set_yticks([tick for tick in ticks if tick <= lines.get_ylim()[1]])
    lines.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    lines.yaxis.set_minor_formatter(lambda value, _: "")
    lines.set_xticks(contexts, [f"{context // 1024}k" for context in contexts])
    lines.set_xlabel("context [tokens]")
    lines.set_ylabel("time of a step [µs]")
    lines.set_title(f"Time, {rows[0]['batch']} sequence, {rows[0]['query_heads']}/{rows[0]['key_heads']} heads")
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    figure.suptitle(f"Decode on {record['gpu']}", x=0.02, ha="left", color=INK)
    return figure
