"""`submit`: the right source of each exercise, judged once more, in one file that grading reads."""

import json
from types import SimpleNamespace

import pytest

import course_lib.checker.notebook.store as kept
import course_lib.grading.handing_in as handing_in
from course_lib.checker import CourseError
from course_lib.checker.notebook.store import ASIDE, Store
from course_lib.checker.runner.worker import end_workers, worker
from course_lib.checker.specification import catalog
from course_lib.grading.handing_in import submit
from course_lib.grading.reading import answers_in
from course_lib.hardware.device import interpreting
from tests.checker.samples import ALL

RIGHT = "# Exercise 90.2 · Double\ndef double(x):\n    return 2 * x\n"
WRONG = RIGHT.replace("2 * x", "3 * x")
UNTOUCHED = RIGHT.replace("return 2 * x", 'raise NotImplementedError("Exercise 90.2")')


@pytest.fixture(autouse=True)
def course(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "exercises", lambda: {name: ALL[name] for name in ("90.2", "90.3")})
    monkeypatch.setattr(kept, "_store", Store(tmp_path / "progress.sqlite3"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """How often the workers were to be ended. They live on: starting one takes two seconds, and each test hands in."""
    times = []
    monkeypatch.setattr(handing_in, "end_workers", lambda: times.append(1))
    return times


def attempt(source, outcome, origin="notebook"):
    kept.progress_file().add("90.2", source, outcome, None, "", 0.1, 1, origin)


def cells_run(monkeypatch, *sources):
    shell = SimpleNamespace(user_ns={"In": ["", *sources]}, kernel=True)
    monkeypatch.setattr(handing_in, "_shell", lambda: shell)


def entries_of(submitted):
    entries = json.loads(submitted.path.read_text())["exercises"]
    return {entry["exercise"]: entry for entry in entries}


def test_the_last_attempt_that_passed_is_handed_in_and_judged_again():
    attempt(RIGHT, "passed")
    attempt(WRONG, "failed")
    submitted = submit("90")
    assert [verdict.outcome for verdict in submitted.verdicts] == ["passed", "not_attempted"]
    assert entries_of(submitted)["90.2"]["source"] == RIGHT and entries_of(submitted)["90.3"]["source"] is None
    assert "submission_90.json" in repr(submitted) and "1 of 2" in submitted._repr_html_()


def test_a_worker_in_which_code_has_run_does_not_judge_what_is_handed_in(monkeypatch):
    monkeypatch.setattr(handing_in, "end_workers", end_workers)
    attempt(RIGHT, "passed")
    worker(interpreted=interpreting()).wait_until_ready()
    before = worker(interpreted=interpreting())._process.pid
    assert submit("90").verdicts[0].passed
    assert worker(interpreted=interpreting())._process.pid != before


def test_workers_are_ended_once_for_a_chapter(ended):
    attempt(RIGHT, "passed")
    submit("90")
    assert len(ended) == 1


def test_what_the_store_says_of_an_outcome_is_not_believed():
    attempt(WRONG, "passed")
    assert submit("90").verdicts[0].outcome == "failed"


def test_the_cell_as_it_was_run_last_comes_first(monkeypatch):
    other = RIGHT.replace("2 * x", "x + x")
    attempt(RIGHT, "passed")
    cells_run(monkeypatch, WRONG, other)
    assert entries_of(submit("90"))["90.2"]["source"] == other


@pytest.mark.parametrize("cell", [WRONG, UNTOUCHED], ids=["a wrong cell", "a cell given anew"])
def test_a_cell_that_does_not_pass_does_not_hide_the_attempt_that_did(monkeypatch, cell):
    attempt(RIGHT, "passed")
    cells_run(monkeypatch, cell)
    assert entries_of(submit("90"))["90.2"]["source"] == RIGHT


def test_an_untouched_cell_does_not_hide_a_wrong_attempt(monkeypatch):
    attempt(WRONG, "failed")
    cells_run(monkeypatch, UNTOUCHED)
    assert entries_of(submit("90"))["90.2"]["source"] == WRONG


def test_a_demonstration_is_no_answer():
    attempt(WRONG, "failed", origin=ASIDE)
    with pytest.raises(CourseError, match="No exercise of chapter 90 has an answer yet"):
        submit("90")


def test_grading_reads_what_submit_writes():
    attempt(RIGHT, "passed")
    answers = answers_in(submit(90).path.read_bytes())
    assert [(answer.exercise, answer.source) for answer in answers] == [("90.2", RIGHT), ("90.3", None)]


def test_a_file_of_another_kind_is_not_written_over(tmp_path):
    attempt(RIGHT, "passed")
    (tmp_path / "submission_90.json").write_text("my notes")
    with pytest.raises(CourseError, match="is there and is no submission"):
        submit("90")
    assert (tmp_path / "submission_90.json").read_text() == "my notes"


def test_a_second_submission_replaces_the_first():
    attempt(RIGHT, "passed")
    first = submit("90").path.read_bytes()
    attempt(RIGHT.replace("2 * x", "x * 2"), "passed")
    assert submit("90").path.read_bytes() != first


@pytest.mark.parametrize("chapter, words", [("77", "no chapter '77'"), ("x", "no chapter 'x'; |no chapter 'x' with")])
def test_an_unknown_chapter_is_answered_with_those_there_are(chapter, words):
    with pytest.raises(CourseError, match=words) as caught:
        submit(chapter)
    assert "90" in str(caught.value)


def test_a_folder_that_is_not_there_is_refused_before_anything_is_judged(tmp_path):
    with pytest.raises(CourseError, match="folder"):
        submit("90", folder=tmp_path / "no")
