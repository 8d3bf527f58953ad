"""The picture of measured decode shows the record's numbers, and leaves out what was not measured."""

import copy

from course_lib.figures.quantised.measured import COLORS, draw_measured_decode
from course_lib.figures.recorded import recorded


def numbers_in(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_every_measured_ratio_stands_on_its_bar():
    record = recorded("quantised", "h200")
    expected = [f"{row['ratios'][name]:.2f}" for name in COLORS for row in record["rows"]]
    assert sorted(numbers_in(draw_measured_decode(record))) == sorted(expected)


def test_a_run_without_flashinfer_has_no_bar_for_it():
    record = copy.deepcopy(recorded("quantised", "h200"))
    for row in record["rows"]:
        del row["ratios"]["FlashInfer FP8"]
    figure = draw_measured_decode(record)
    assert len(numbers_in(figure)) == 2 * len(record["rows"])
    assert "FlashInfer's, e4m3" not in [text.get_text() for text in figure.legends[0].get_texts()]
