"""The bars of backward passes: every figure of a record is drawn, and what is missing leaves a gap."""

import pytest

from course_lib.bench.backward import ROWS
from course_lib.figures.backward.rates import draw_rates
from course_lib.figures.recorded import recorded


def _numbers(figure):
    return [int(text.get_text()) for axes in figure.axes for text in axes.texts]


def test_every_figure_of_the_recorded_run_is_drawn(tmp_path):
    record = recorded("backward")
    rates = [result["tflops"] for row in record["rows"] for result in row["results"].values()]
    figure = draw_rates(record)
    figure.savefig(tmp_path / "rates.png")
    assert sorted(_numbers(figure)) == sorted(rates)


def test_the_recorded_run_has_the_rows_of_the_benchmark():
    rows = {(row["head_dim"], row["length"], row["causal"]) for row in recorded("backward")["rows"]}
    assert rows == {(row.head_dim, row.length, row.causal) for row in ROWS}


def test_what_is_missing_leaves_a_gap():
    row = {"head_dim": 64, "length": 4096, "causal": True}
    results = {"FA2": {"missing": "does not fit"}, "ours": {"tflops": 100.0}, "another": {"tflops": 7.4}}
    assert sorted(_numbers(draw_rates({"gpu": "some GPU", "rows": [row | {"results": results}]}))) == [7, 100]


def test_a_run_that_nobody_recorded_is_told_with_those_that_are():
    with pytest.raises(ValueError, match="backward_h200"):
        recorded("backward", "b300")
