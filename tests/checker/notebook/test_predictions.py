"""Predictions: kept over a restart, set beside what was measured, and told kindly where they are no number."""

import math

import pytest

import course_lib.checker.notebook.store as kept
from course_lib.checker import CourseError, measured, predict, progress
from course_lib.checker.notebook.store import Store

NAME, UNIT = "01 second sum", "times as long"


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    def start_again():
        monkeypatch.setattr(kept, "_store", Store(tmp_path / "progress.sqlite3"))

    start_again()
    return start_again


def test_a_prediction_is_set_beside_what_was_measured_and_kept_over_a_restart(store):
    assert "Kept: 3 times as long" in repr(predict(NAME, 3, UNIT))
    store()
    said = repr(measured(NAME, 7.9))
    assert "You predicted 3 times as long. Measured: 7.9 times as long (2.63 times your number)." in said
    store()
    shown = progress()
    assert f"{NAME}: 3, 7.9 {UNIT}" in repr(shown) and "7.9" in shown._repr_html_()


@pytest.mark.parametrize("nothing", [..., None])
def test_the_dots_are_no_prediction_and_no_error(nothing):
    assert "in place of the dots" in repr(predict(NAME, nothing, UNIT))
    assert "Measured: 7.9 times as long" in repr(measured(NAME, 7.9, UNIT))
    assert "Predictions" not in repr(progress())


@pytest.mark.parametrize("wrong", ["three", "3", True, math.nan, math.inf, [3], 3 + 1j, lambda: 3])
def test_what_is_no_number_is_told_with_the_words_to_type_and_not_kept(wrong):
    said = repr(predict(NAME, wrong, UNIT))
    assert 'Write predict("01 second sum", 3, "times as long")' in said
    assert "Predictions" not in repr(progress())


def test_a_second_prediction_counts_and_the_first_is_not_lost(store, tmp_path):
    predict(NAME, 3, UNIT)
    measured(NAME, 7.9)
    predict(NAME, 8, UNIT)
    assert "not measured yet" in repr(progress())
    assert "within 10%" in repr(measured(NAME, 7.9))
    with kept.progress_file()._open() as connection:
        assert connection.execute("SELECT guess FROM predictions ORDER BY id").fetchall() == [(3.0,), (8.0,)]


@pytest.mark.parametrize(
    "guess, value, words",
    [
        (8, 2, "your number is 4 times it"),
        (0, 0, "within 10%"),
        (0, 5, "not what you expected"),
        (-1, 5, "not what you expected"),
        (1, math.inf, "not what you expected"),
        (1e-9, 1e-6, "1,000 times your number"),
    ],
)
def test_how_far_off_is_said_in_words_that_are_true(guess, value, words):
    predict(NAME, guess, UNIT)
    assert words in repr(measured(NAME, value))


@pytest.mark.parametrize("name", ["second sum", "1 second sum", "01", 5, ""])
def test_a_name_without_its_chapter_is_refused(name):
    with pytest.raises(CourseError, match="begins with its chapter"):
        predict(name, 3)


def test_what_is_measured_must_be_a_number():
    with pytest.raises(CourseError, match="takes a number"):
        measured(NAME, "long")


def test_markup_in_a_name_is_shown_as_it_is():
    predict("01 <b>sum</b>", 3, "<i>")
    assert "<b>sum</b>" not in progress()._repr_html_() and "&lt;b&gt;" in progress()._repr_html_()
