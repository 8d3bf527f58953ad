"""The journal loses no row that was written, takes none that was cut short, and knows its own table again."""

import csv
import io
import json

import pytest

from course_lib.checker import CourseError
from course_lib.grading import journal as journal_module
from course_lib.grading import tables
from course_lib.grading.journal import Journal
from course_lib.grading.version import version_for


def row(exercise="3.1", outcome="passed", **more):
    return {
        "exercise": exercise,
        "outcome": outcome,
        "points": 1,
        "mistake": None,
        "message": "Right.",
        "seconds": 0.5,
        "seed": 7,
        "cases": [],
        **more,
    }


def test_rows_are_there_again_after_the_run_was_killed(tmp_path):
    out = tmp_path / "grades.csv"
    journal = Journal(out).__enter__()
    journal.add("abc", row())
    journal._file.close()  # nothing else happens when a process is killed
    with Journal(out) as again:
        assert len(again) == 1 and again.row("abc", "3.1") == row()


def test_rows_can_be_read_between_those_that_are_written(tmp_path):
    with Journal(tmp_path / "grades.csv") as journal:
        for number in range(5):
            journal.add("abc", row(f"3.{number}", message="ü" * number))
            journal.will_write(str(number))
            found = [journal.row("abc", f"3.{earlier}")["message"] for earlier in range(number + 1)]
            assert found == ["ü" * earlier for earlier in range(number + 1)]


def test_a_line_that_was_cut_short_is_no_row_and_spoils_no_other(tmp_path):
    out = tmp_path / "grades.csv"
    with Journal(out) as journal:
        journal.add("abc", row())
        journal.add("def", row())
    path = tmp_path / "grades.csv.journal"
    path.write_bytes(path.read_bytes()[:-20])
    with Journal(out) as journal:
        assert len(journal) == 1 and journal.row("abc", "3.1") == row()
        journal.add("ghi", row(seed=8))
    with Journal(out) as journal:
        assert [journal.row(content, "3.1") for content in ("abc", "ghi")] == [row(), row(seed=8)]


def test_rows_of_another_version_of_the_course_are_judged_again(tmp_path, monkeypatch):
    out = tmp_path / "grades.csv"
    with Journal(out) as journal:
        journal.add("abc", row("3.1"))
        journal.add("abc", row("4.1"))
    changed = {"3.1": version_for("3.1"), "4.1": "another"}
    monkeypatch.setattr(journal_module, "version_for", changed.get)
    with Journal(out) as journal:
        assert ("abc", "3.1") in journal and len(journal) == 1 and journal.other_versions == 1


@pytest.mark.parametrize("outcome", ["unsupported", "ungraded"])
def test_what_another_machine_or_try_may_change_is_judged_again(tmp_path, outcome):
    out = tmp_path / "grades.csv"
    with Journal(out) as journal:
        journal.add("abc", row(outcome=outcome))
    with Journal(out) as journal:
        assert len(journal) == 0


def test_two_runs_do_not_write_one_journal(tmp_path):
    with Journal(tmp_path / "grades.csv"):
        with pytest.raises(CourseError, match="another run"):
            Journal(tmp_path / "grades.csv").__enter__()


def test_a_file_that_is_no_journal_is_left_alone(tmp_path):
    path = tmp_path / "grades.csv.journal"
    path.write_text("my notes\n")
    with pytest.raises(CourseError, match="no journal"):
        Journal(tmp_path / "grades.csv").__enter__()
    assert path.read_text() == "my notes\n"


def test_the_table_is_known_again_unless_somebody_changed_it(tmp_path):
    out = tmp_path / "grades.csv"
    with Journal(out) as journal:
        journal.will_write("a,b\n")
        out.write_text("a,b\n")
    with Journal(out) as journal:
        assert journal.wrote(out)
        out.write_text("a,b,points taken off\n")
        assert not journal.wrote(out)


def test_a_spreadsheet_finds_no_formula_and_no_broken_line():
    rows = [
        row(file="=cmd|' /C calc'!A0.ipynb", message="a\nb\tc \ud800 \x1b[31m"),
        row(file="  +1.py", message="-x"),
    ]
    head, first, second = csv.reader(io.StringIO(tables.as_csv(rows)))
    assert head == list(tables.COLUMNS)
    assert first[0].startswith("'=cmd") and first[5].isprintable() and first[4] == ""
    assert second[0] == "'  +1.py" and second[5] == "'-x"
    tables.as_csv(rows).encode()


def test_json_takes_whatever_text_comes_from_a_stranger():
    text = tables.as_json([row(file="a.py", message="\ud800")])
    assert json.loads(text.encode())[0]["message"] == "\ud800"
    assert list(json.loads(text)[0]) == [*tables.COLUMNS, *tables.MORE_IN_JSON]
