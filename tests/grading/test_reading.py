"""Strangers' files: each gives its exercises or one sentence, and none stops the grader or leads it elsewhere."""

import json
import os

import pytest

from course_lib.checker import CourseError
from course_lib.checker.specification import catalog, cells
from course_lib.grading import reading
from course_lib.grading.reading import Unreadable, answers_in, files_in, read_bytes
from course_lib.grading.submission import FORMAT, VERSION
from tests.checker.samples import ALL

DOUBLE_CELL = "# Exercise 90.2 · Double\ndef double(x):\n    return 2 * x\n"


@pytest.fixture(autouse=True)
def course(monkeypatch):
    monkeypatch.setattr(catalog, "exercises", lambda: ALL)


def notebook(*cells):
    entries = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": text, "outputs": [], "execution_count": None}
        for i, text in enumerate(cells)
    ]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": entries}).encode()


def submission(**changes):
    content = {
        "format": FORMAT,
        "version": VERSION,
        "chapter": "90",
        "exercises": [{"exercise": "90.2", "source": DOUBLE_CELL, "outcome": "passed"}],
    }
    return json.dumps(content | changes).encode()


def found(content):
    return {answer.exercise: answer for answer in answers_in(content)}


@pytest.mark.parametrize(
    "content",
    [
        notebook("x = 1", DOUBLE_CELL),
        f"# %%\nx = 1\n\n# %%\n{DOUBLE_CELL}".encode(),
        b"\xef\xbb\xbf# %%\n" + DOUBLE_CELL.encode(),
        submission(),
    ],
    ids=["notebook", "script", "script with a byte order mark", "submission file"],
)
def test_one_answer_is_found_in_every_kind_of_file_and_the_chapters_others_are_missing(content):
    answers = found(content)
    assert answers["90.2"].source.strip() == DOUBLE_CELL.strip()
    assert set(answers) == set(ALL) and answers["90.1"].source is None


def test_the_last_of_several_cells_counts_and_the_row_will_say_so():
    answer = found(notebook(DOUBLE_CELL, DOUBLE_CELL.replace("2 * x", "x + x")))["90.2"]
    assert "x + x" in answer.source and "Several cells" in answer.note


def test_an_exercise_that_the_course_does_not_have_is_named_and_the_others_count():
    answers = found(notebook(DOUBLE_CELL, "# Exercise 99.7 · None\nx = 1"))
    assert "99.7" in answers["90.1"].note and answers["90.2"].note == ""


def test_an_exercise_under_its_old_number_is_judged_alone_and_the_row_says_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setitem(cells.MOVED, "88.5", "90.2")
    monkeypatch.setattr(catalog, "solution_file", lambda chapter: tmp_path / f"{chapter}_sample.py")
    answers = found(notebook(DOUBLE_CELL.replace("90.2", "88.5")))
    assert list(answers) == ["90.2"] and "Exercise 88.5 is 90.2 now" in answers["90.2"].note


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b'{"cells": [', "broken JSON"),
        (b"{}", "not a readable notebook"),
        (b"\xff\xfe\x00\x01", "is no text"),
        (b"# %%\n# Exercise 90.2 \xc2\xb7 Double\n\0", "zero bytes"),
        (b"print(1)\n", "holds no exercise"),
        (notebook("# Exercise 77.1 · X\nx = 1"), r"does not have \(77.1\)"),
        (b'{"a":' * 100_000, "cannot be read|broken JSON"),
        (b'{"nbformat": 4, "cells": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "cannot be read|readable"),
        (b"# %%\n" * 5_001, "has 5,001 cells"),
        (notebook(*["x"] * 5_001), "has 5,001 cells"),
        (b"#%%\n" + b"\n" * (4 << 20), "has 4.0 MB; of a script"),
        (submission(version=99), "version '99'"),
        (submission(exercises="all"), "without its list"),
        (submission(exercises=[7]), "names no exercise"),
        (submission(exercises=[{"exercise": "90.2", "source": 7}]), "is no text"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(content, words):
    with pytest.raises(Unreadable, match=words) as caught:
        answers_in(content)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_what_a_submission_says_of_its_outcome_is_not_read():
    entries = [{"exercise": "90.2", "source": None, "outcome": "passed"}, {"exercise": "90.1", "source": "x = 1"}]
    assert found(submission(exercises=entries))["90.2"].source is None


def test_files_that_would_block_lead_elsewhere_or_never_end_are_refused(tmp_path):
    (tmp_path / "real.py").write_text(DOUBLE_CELL)
    (tmp_path / "link.py").symlink_to(tmp_path / "real.py")
    (tmp_path / "nowhere.py").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe.py")
    with open(tmp_path / "big.py", "wb") as file:
        file.truncate(1 << 30)
    for name, words in [
        ("link.py", "is a link"),
        ("nowhere.py", "is a link|no longer there"),
        ("pipe.py", "no regular file"),
        ("big.py", "1,024 MB"),
        ("gone.py", "no longer there"),
    ]:
        with pytest.raises(Unreadable, match=words):
            read_bytes(tmp_path / name)
    with pytest.raises(Unreadable):
        read_bytes(tmp_path)
    assert read_bytes(tmp_path / "real.py") == DOUBLE_CELL.encode()


def test_folders_are_searched_and_patterns_expanded_without_following_links(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / ".ipynb_checkpoints").mkdir(parents=True)
    for name in ("a/1.ipynb", "a/2.py", "b/3.json", "b/notes.txt", "b/.ipynb_checkpoints/3.ipynb"):
        (tmp_path / name).write_text("")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    names = [str(path.relative_to(tmp_path)) for path in files_in([tmp_path, tmp_path / "a" / "1.ipynb"])]
    assert names == ["a/1.ipynb", "a/2.py", "b/3.json"]
    assert files_in([str(tmp_path / "*" / "*.py")]) == [tmp_path / "a" / "2.py"]


def test_an_argument_that_means_no_file_is_refused_by_name(tmp_path):
    for argument in (tmp_path, tmp_path / "no.ipynb", tmp_path / "*.ipynb"):
        with pytest.raises(CourseError, match=str(argument.name).replace("*", r"\*")):
            files_in([argument])


def test_a_name_that_is_no_utf8_can_be_shown():
    assert reading.printable(os.fsdecode(b"gr\xfcn.py")) == "gr\\xfcn.py"
