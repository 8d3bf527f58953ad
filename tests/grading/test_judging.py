"""One answer to one row: whatever it is, a row comes back, and what is no fault of it is not laid at its door."""

import io

import pytest

from course_lib.checker import CaseResult, Verdict
from course_lib.checker.specification import catalog
from course_lib.grading import bar as bar_module
from course_lib.grading import judging
from course_lib.grading.bar import Bar
from course_lib.grading.reading import LARGEST_SOURCE, Answer
from tests.checker.samples import ALL

RIGHT = "# Exercise 90.2 · Double\ndef double(x):\n    return 2 * x\n"


@pytest.fixture(autouse=True)
def course(monkeypatch):
    monkeypatch.setattr(catalog, "exercises", lambda: ALL)


def verdicts(monkeypatch, *given):
    """Stands in for the judge: the verdicts that it gives in turn."""
    left = list(given)

    def judge(task, source):
        verdict = left.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    monkeypatch.setattr(judging, "judge", judge)
    return left


DIED = Verdict("90.2", "Double", "crashed", "The worker process ended during the check.")
PASSED = Verdict("90.2", "Double", "passed", "Right.", cases=[CaseResult("one", "passed")], seed=3)


def test_a_right_answer_has_the_exercises_points_and_a_note_is_added():
    row = judging.row_of(Answer("90.2", RIGHT, "Several cells were there."))
    assert row["outcome"] == "passed" and row["points"] == 1 and row["message"].endswith("Several cells were there.")
    assert row["seed"] is not None and row["cases"]


def test_an_answer_gets_a_second_try_when_its_worker_died_and_no_third(monkeypatch):
    left = verdicts(monkeypatch, DIED, PASSED)
    assert judging.row_of(Answer("90.2", RIGHT))["outcome"] == "passed" and not left
    left = verdicts(monkeypatch, DIED, DIED, PASSED)
    assert judging.row_of(Answer("90.2", RIGHT))["outcome"] == "crashed" and len(left) == 1


def test_an_answer_that_crashed_by_itself_gets_no_second_try(monkeypatch):
    crashed = Verdict("90.2", "Double", "crashed", "SIGSEGV", mistake="crashed")
    left = verdicts(monkeypatch, crashed, PASSED)
    assert judging.row_of(Answer("90.2", RIGHT))["outcome"] == "crashed" and len(left) == 1


def test_a_fault_of_the_judge_is_not_the_answers(monkeypatch):
    verdicts(monkeypatch, ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        judging.row_of(Answer("90.2", RIGHT))
    row = judging.row_of_a_fault(Answer("90.2", RIGHT), "ValueError: a bug")
    assert row["outcome"] == "ungraded" and "no fault of the answer" in row["message"]


@pytest.mark.parametrize(
    "source, outcome, mistake",
    [
        (None, "not_attempted", None),
        ("#" * (LARGEST_SOURCE + 1), "error", "source_too_long"),
        ("x = 1\0", "error", None),
        ("x = " + "(" * 10_000, "error", None),
        ("x = " + "-" * 100_000 + "1", "error", None),
        ("def double(x) return", "error", "syntax_error"),
    ],
)
def test_what_cannot_be_judged_is_said(source, outcome, mistake):
    row = judging.row_of(Answer("90.2", source))
    assert row["outcome"] == outcome and row["points"] == 0 and len(row["message"]) < 500
    assert mistake in (None, row["mistake"])


def test_a_message_without_end_is_cut(monkeypatch):
    verdicts(monkeypatch, Verdict("90.2", "Double", "error", "x\n" * 100_000, mistake="e"))
    message = judging.row_of(Answer("90.2", RIGHT))["message"]
    assert len(message) < judging.LONGEST_MESSAGE + 10 and "\n" not in message


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_changes_one_line_of_a_terminal(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(bar_module.time, "monotonic", lambda: next(clock))
    stream = Terminal()
    bar = Bar(10, stream)
    assert bar.is_due()
    bar.show(2, 12)
    bar.show(10, 60, last=True)
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.count("\r") == 2 and "2 of 10 files, 12 exercises graded" in text
    assert "80 s left" in text


def test_the_bar_is_a_few_lines_in_a_log():
    stream = io.StringIO()
    bar = Bar(0, stream)
    assert not bar.is_due()
    bar.show(0, 0, last=True)
    assert stream.getvalue().count("\n") == 1 and "0 of 0 files" in stream.getvalue()
