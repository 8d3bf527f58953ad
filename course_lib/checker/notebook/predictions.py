"""Predictions that are kept: a number written down before it is measured, and the measured one beside it."""

from __future__ import annotations

import html
import math
import re
from numbers import Real
from typing import Any

from course_lib.checker.notebook.shown import Shown
from course_lib.checker.notebook.store import Prediction, progress_file
from course_lib.checker.specification.errors import CourseError

SIDES = ("left", "right", "right", "left", "left")  # on which the columns of the table are aligned
NEAR = 0.1  # relative: so close, a prediction was right


def predict(name: str, guess: Any = ..., unit: str = "") -> Shown:
    """Write down what you expect, before you measure it. `progress()` shows it beside what came out.

    Args:
        name: what it is about, after its chapter's number: "01 second sum".
        guess: a number; `...` or None while you have none.
        unit: what the number counts, in words: "times as long".

    Returns:
        A sentence to show. What is no number is told, and not kept: nothing is raised, so that a notebook goes on.

    Raises:
        CourseError: the name does not begin with a chapter's number.
    """
    _hold_to_a_chapter(name)
    if guess is ... or guess is None:
        return _sentence("Put your number in place of the dots. You can also go on without one.")
    if isinstance(guess, bool) or not isinstance(guess, Real) or not math.isfinite(guess):
        example = f'predict("{name}", 3, "{unit}")' if unit else f'predict("{name}", 3)'
        return _sentence(f"A prediction is one number, such as 3, 0.25 or 2e9; this is {guess!r:.60}. Write {example}.")
    progress_file().add_prediction(name, float(guess), unit)
    return _sentence(f"Kept: {_number(float(guess))}{_with(unit)}. Now measure it.")


def measured(name: str, value: float, unit: str = "") -> Shown:
    """Put what was measured beside the prediction of that name, and keep it.

    Args:
        name, unit: as in `predict`.
        value: what was measured.

    Raises:
        CourseError: the name does not begin with a chapter's number, or value is no number.
    """
    _hold_to_a_chapter(name)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise CourseError(f"measured({name!r}, ...) takes a number; it got {value!r:.60}.")
    kept = progress_file().add_measured(name, float(value))
    if kept is None:
        return _sentence(f"Measured: {_number(float(value))}{_with(unit)}. (You predicted nothing here.)")
    counted = _with(kept.unit or unit)
    return _sentence(
        f"You predicted {_number(kept.guess)}{counted}. Measured: {_number(float(value))}{counted} ({how_near(kept)})."
    )


def how_near(kept: Prediction) -> str:
    """In words, how far a prediction was off."""
    if kept.measured is None:
        return "not measured yet"
    guess, value = kept.guess, kept.measured
    if math.isclose(guess, value, rel_tol=NEAR, abs_tol=1e-12):
        return f"within {NEAR:.0%}"
    if guess * value > 0 and math.isfinite(value):
        ratio = value / guess
        return f"{_number(ratio)} times your number" if ratio > 1 else f"your number is {_number(1 / ratio)} times it"
    return "not what you expected"


def table_of_predictions(kept: list[Prediction]) -> tuple[list[str], str]:
    """Lines for a terminal and a table in HTML; nothing where there are none."""
    if not kept:
        return [], ""
    rows = [
        (one.name, _number(one.guess), "–" if one.measured is None else _number(one.measured), one.unit, how_near(one))
        for one in kept
    ]
    lines = ["Predictions: yours, measured"]
    lines += [f"  {name}: {guess}, {value}{_with(unit)} ({words})" for name, guess, value, unit, words in rows]
    heads = ("prediction", "yours", "measured", "", "")
    body = "".join(f"<tr>{''.join(map(_cell, row, SIDES))}</tr>" for row in rows)
    return lines, f"<table><tr>{''.join(map(_cell, heads, SIDES))}</tr>{body}</table>"


def _cell(text: str, side: str) -> str:
    return f'<td style="text-align:{side};padding-right:1em">{html.escape(text)}</td>'


def _hold_to_a_chapter(name: str) -> None:
    if not isinstance(name, str) or re.match(r"\d\d \S", name) is None:
        raise CourseError(f'A prediction\'s name begins with its chapter, as in "01 second sum"; this is {name!r:.60}.')


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 100 and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _with(unit: str) -> str:
    return f" {unit}" if unit else ""


def _sentence(text: str) -> Shown:
    return Shown(text, f'<div style="border-left:4px solid #cc79a7;padding:.2em .8em">{html.escape(text)}</div>')
