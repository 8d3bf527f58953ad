"""The decode plot draws every implementation that has figures under the roof, and leaves out what is missing."""

from course_lib.figures.decode.bandwidth import decode_bandwidth_figure


def row(context, **microseconds):
    size = context * 4096
    results = {
        name: {"missing": "no such backend"} if us is None else {"us": us, "bandwidth": size / us * 1e6}
        for name, us in microseconds.items()
    }
    return {
        "name": f"1, 32/8, {context // 1024}k",
        "batch": 1,
        "query_heads": 32,
        "key_heads": 8,
        "context": context,
        "bytes": size,
        "results": results,
    }


def record(**microseconds):
    rows = [row(context, **microseconds) for context in (8192, 131072)]
    return {"gpu": "a GPU", "read_bandwidth": 4.0e12, "tables": {"decode": rows, "context": rows}}


def test_bars_are_bandwidths_and_lines_are_times():
    figure = decode_bandwidth_figure(record(FA2=30.0, cuDNN=None, ours=15.0))
    bars, lines = figure.axes
    heights = {container.get_label(): [bar.get_height() for bar in container] for container in bars.containers}
    assert heights["ours"] == [8192 * 4096 / 15.0 / 1e6, 131072 * 4096 / 15.0 / 1e6] and heights["cuDNN"] == []
    assert [30.0, 30.0] in [list(line.get_ydata()) for line in lines.lines]
    assert len(lines.lines) == 3  # two implementations and the bound


def test_the_bound_is_the_bytes_over_the_bandwidth():
    _, lines = decode_bandwidth_figure(record(ours=15.0)).axes
    assert list(lines.lines[-1].get_ydata()) == [8192 * 4096 / 4.0e12 * 1e6, 131072 * 4096 / 4.0e12 * 1e6]
