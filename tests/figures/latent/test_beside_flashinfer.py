"""Latent decode beside FlashInfer's: every ratio is drawn, gaps are told, and rows are those that can compare."""

import pytest

from course_lib.bench.latent import TABLE, beside_flashinfer
from course_lib.figures.latent.beside_flashinfer import draw_beside_flashinfer
from course_lib.figures.recorded import recorded


def test_every_ratio_of_the_recorded_run_is_drawn_and_what_is_missing_said(tmp_path):
    record = recorded("latent", "h100")
    figure = draw_beside_flashinfer(record)
    figure.savefig(tmp_path / "ratios.png")
    texts = [text.get_text() for text in figure.axes[0].texts]
    ratios = [f"{ratio:.2f}" for row in record["rows"] for ratio in row["ratios"].values()]
    assert sorted(text for text in texts if text != "not measured") == sorted(ratios)
    assert texts.count("not measured") == 2 * len(record["rows"]) - len(ratios)


def test_the_recorded_run_has_the_rows_of_the_benchmark():
    assert [row["name"] for row in recorded("latent", "h100")["rows"]] == [row.name for row in TABLE]


def test_a_run_is_drawn_where_flashinfer_has_a_figure():
    measured = {"FlashInfer fa3": {"us": 50.0}, "Hopper": {"us": 40.0}, "portable": {"missing": "no"}}
    rows = beside_flashinfer({"1, 16, 1k": measured, "2, 16, 1k": {"Hopper": {"us": 3.0}}})
    assert [row["name"] for row in rows] == ["1, 16, 1k"]
    assert rows[0]["ratios"] == pytest.approx({"Hopper": 1.25})
    draw_beside_flashinfer({"gpu": "some GPU", "date": "2026-01-01", "rows": rows})
