"""The throughput plot draws every implementation that has figures, and the roof, and leaves out what is missing."""

import pytest

from course_lib.figures.memory.throughput import throughput_figure


def record(**results):
    rows = [
        {"head_dim": 128, "causal": causal, "length": length, "results": results}
        for causal in (False, True)
        for length in (512, 1024)
    ]
    return {"gpu": "a GPU", "matmul_tflops": {"bfloat16": 700.0}, "rows": rows}


def test_each_implementation_is_a_line_under_the_roof():
    figure = throughput_figure(record(FA2={"tflops": 300.0}, ours={"tflops": 500.0}, naive={"missing": "does not fit"}))
    for axes in figure.axes:
        lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        assert lines["FA2"] == [300.0, 300.0] and lines["ours"] == [500.0, 500.0] and "naive" not in lines
        assert [700, 700] in [list(line.get_ydata()) for line in axes.lines]


def test_an_unknown_head_dimension_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="head_dim is 64.*128"):
        throughput_figure(record(ours={"tflops": 1.0}), head_dim=64)
