"""The command line: what each command says, and its exit status, on good input and on bad."""

import json
import os
import subprocess
import sys

import pytest

import course_lib.checker
from course_lib import cli
from course_lib.checker import CaseResult, CourseError, Verdict
from course_lib.home import ROOT


def run(*arguments, **environment):
    """The command line in a process of its own, as a learner runs it."""
    return subprocess.run(
        [sys.executable, "-m", "course_lib", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def checked(monkeypatch):
    """Stands in for the checker: a dict from file name to its verdicts, or to the error that reading it raises."""
    results = {}

    def check_file(path, exercise=None):
        result = results[path.name]
        if isinstance(result, Exception):
            raise result
        return [verdict for verdict in result if exercise in (None, verdict.exercise)]

    monkeypatch.setattr(course_lib.checker, "check_file", check_file)
    return results


def verdict(exercise, outcome, **more):
    return Verdict(exercise, "A title", outcome, "What to know.", cases=[CaseResult("n=1", outcome, "why")], **more)


def test_help_is_there_at_once_because_nothing_heavy_is_imported():
    code = (
        "import sys; from course_lib.cli import main; main([]); "
        "sys.exit(str([m for m in ('torch', 'triton', 'numpy', 'IPython', 'jupytext') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
    assert "doctor" in done.stdout and "usage: python -m course_lib" in done.stdout


def test_an_unknown_command_is_refused_with_those_there_are():
    done = run("chek", "x.py")
    assert done.returncode == 2 and "check" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["progress", "check mine.py", "bench", "reset 00"])
def test_a_python_without_what_the_course_needs_is_one_line(tmp_path, command):
    """The first thing that somebody types may well be `python3 -m course_lib ...`."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "course_lib", *command.split()],
        cwd=ROOT,
        env={**os.environ, "COURSE_HOME": str(tmp_path), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and " lacks " in done.stderr and "doctor` says what to do" in done.stderr


def test_an_old_python_is_told_so_in_one_line():
    code = "import sys; sys.version_info = (3, 9, 18); sys.argv = ['-m']; import course_lib"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("This is Python 3.9") and len(done.stderr.splitlines()) == 1
    in_a_notebook = code.replace("sys.argv = ['-m']; ", "")
    done = subprocess.run([sys.executable, "-c", in_a_notebook], cwd=ROOT, capture_output=True, text=True)
    assert "ImportError: This is Python 3.9" in done.stderr.splitlines()[-1]


# ----------------------------------------------------------------------------------------------------------- check


@pytest.mark.parametrize(
    "outcome, status",
    [
        ("passed", 0),
        ("not_attempted", 0),
        ("unsupported", 0),
        ("failed", 1),
        ("error", 1),
        ("timeout", 1),
        ("crashed", 1),
    ],
)
def test_the_status_says_whether_all_that_was_attempted_passed(checked, capsys, outcome, status):
    checked["mine.py"] = [verdict("3.1", "passed"), verdict("3.2", outcome)]
    assert cli.main(["check", "mine.py"]) == status
    assert "Exercise 3.2 · A title" in capsys.readouterr().out


def test_json_holds_what_the_design_promises(checked, tmp_path):
    out = tmp_path / "out.json"
    checked["mine.py"] = [verdict("3.1", "passed", seconds=0.25), verdict("3.2", "failed", mistake="no-maximum")]
    assert cli.main(["check", "some/mine.py", "--json", str(out)]) == 1
    passed, failed = json.loads(out.read_text())
    assert passed | {"message": ""} == passed | {
        "file": "some/mine.py",
        "exercise": "3.1",
        "outcome": "passed",
        "mistake": None,
        "message": "",
        "seconds": 0.25,
        "cases": [{"name": "n=1", "outcome": "passed", "detail": "why"}],
    }
    assert failed["mistake"] == "no-maximum" and "What to know." in failed["message"]


def test_one_exercise_may_be_asked_for(checked, tmp_path):
    out = tmp_path / "out.json"
    checked["mine.py"] = [verdict("3.1", "failed"), verdict("3.2", "passed")]
    assert cli.main(["check", "mine.py", "--exercise", "3.2", "--json", str(out)]) == 0
    assert [entry["exercise"] for entry in json.loads(out.read_text())] == ["3.2"]


def test_a_file_that_cannot_be_read_does_not_hide_the_others(checked, capsys, tmp_path):
    out = tmp_path / "out.json"
    checked["bad.ipynb"] = CourseError("bad.ipynb: is not a readable notebook.")
    checked["mine.py"] = [verdict("3.1", "passed")]
    assert cli.main(["check", "bad.ipynb", "mine.py", "--json", str(out)]) == 2
    said = capsys.readouterr()
    assert said.err == "bad.ipynb: is not a readable notebook.\n"
    assert "1 passed" in said.out and [entry["file"] for entry in json.loads(out.read_text())] == ["mine.py"]


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("missing.ipynb", None, "no such file"),
        ("broken.ipynb", '{"cells": [', "not a readable notebook"),
        ("empty.ipynb", "", "not a readable notebook"),
        ("list.ipynb", "[]", "not a readable notebook"),
        ("no_cells.ipynb", '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}}', "not a readable notebook"),
        ("plain.py", "print(1)\n", "no exercise"),
        ("notes.txt", "hello", "notebook"),
        ("latin.py", b"# Exercise 1.1 \xb7 T\n", "cannot be read"),
    ],
)
def test_bad_files_get_one_clear_line_and_status_2(tmp_path, capsys, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert cli.main(["check", str(path)]) == 2
    said = capsys.readouterr()
    assert len(said.err.strip().splitlines()) == 1 and name in said.err and words in said.err
    assert said.out == ""


def test_a_folder_is_no_file(tmp_path, capsys):
    assert cli.main(["check", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_result_that_has_nowhere_to_go_is_refused_before_anything_is_checked(checked, tmp_path, capsys):
    checked["mine.py"] = AssertionError("checked all the same")
    assert cli.main(["check", "mine.py", "--json", str(tmp_path / "no" / "out.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_what_an_answer_printed_is_no_command_of_a_workflow(checked, tmp_path, monkeypatch, capsys):
    """A line of the log that begins with :: is one, whoever printed it, unless commands are stopped."""
    (tmp_path / "mine.py").write_text("# Exercise 3.2 · Title\n")
    (tmp_path / "bad.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    checked["bad.py"] = CourseError("bad.py: holds no exercise.")
    checked["mine.py"] = [verdict("3.2", "failed", printed="\n::notice::passed")]
    assert cli.main(["check", "bad.py", "mine.py", "--github"]) == 2
    first, *said = capsys.readouterr().out.splitlines()
    token = first.removeprefix("::stop-commands::")
    assert len(token) == 32 and said.index("::notice::passed") < said.index(f"::{token}::")
    assert said[said.index(f"::{token}::") + 1 :] == [
        "::error file=mine.py,line=1,title=Exercise 3.2::What to know.",
        "::error file=bad.py,line=1,title=Not checked::bad.py: holds no exercise.",
    ]
    assert "| bad.py |  | not checked |" in (tmp_path / "summary").read_text()


def test_annotations_outside_a_workflow_are_refused_before_anything_is_checked(checked, monkeypatch, capsys):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    checked["mine.py"] = AssertionError("checked all the same")
    assert cli.main(["check", "mine.py", "--github"]) == 2
    assert "GITHUB_STEP_SUMMARY" in capsys.readouterr().err


def test_a_fault_of_the_courses_own_is_not_passed_off_as_the_learners(checked):
    checked["mine.py"] = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["check", "mine.py"])


def test_a_terminal_without_unicode_gets_the_verdict_all_the_same(tmp_path):
    path = tmp_path / "nothing.py"
    path.write_text("# %%\nprint(1)\n")
    done = run("check", path, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert done.returncode == 2 and "Exercise 3.2" in done.stderr and "Traceback" not in done.stderr


# ---------------------------------------------------------------------------------------------------- the others


def test_doctor_fits_one_screen_and_has_no_status_of_its_own_kind():
    done = run("doctor")
    assert done.returncode in (0, 1) and done.stderr == ""
    assert 5 < len(done.stdout.splitlines()) <= 40


def test_progress_is_shown(tmp_path):
    done = run("progress", COURSE_HOME=str(tmp_path))
    assert done.returncode == 0 and done.stdout.strip() and done.stderr == ""


def test_a_home_that_cannot_be_written_to_is_one_line_and_what_to_set(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("progress", COURSE_HOME=str(tmp_path / "file" / "home"))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "COURSE_HOME" in done.stderr


def test_reset_and_build_of_an_unknown_chapter_say_which_there_are():
    for command in ("reset", "build"):
        done = run(command, "77")
        assert done.returncode == 2 and "no chapter '77'" in done.stderr and "Traceback" not in done.stderr


def test_reset_says_where_the_learners_notebook_went(tmp_path, monkeypatch, capsys):
    from course_lib.builder import keeping

    (tmp_path / "solutions").mkdir()
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "solutions" / "03_sample.py").write_text("# %% [markdown]\n# # Sample\n")
    (tmp_path / "notebooks" / "03_sample.ipynb").write_text("mine")
    monkeypatch.setattr(keeping, "SOURCES", tmp_path / "solutions")
    monkeypatch.setattr(keeping, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reset", "03"]) == 0
    [copy] = tmp_path.glob("notebooks/*.kept-*.ipynb")
    said = capsys.readouterr().out
    assert said == f"notebooks/03_sample.ipynb is as it was given. Yours is kept as notebooks/{copy.name}.\n"
    assert cli.main(["build", "--check"]) == 0
    (tmp_path / "notebooks" / "03_sample.ipynb").write_text("mine again")
    assert cli.main(["build", "--check"]) == 1
    assert cli.main(["build"]) == 2
    assert "with the work in it: notebooks/03_sample.ipynb" in capsys.readouterr().err.replace(str(tmp_path) + "/", "")


def test_options_of_build_that_contradict_each_other_are_refused(capsys):
    assert cli.main(["build", "--check", "--solved"]) == 2
    assert "--check" in capsys.readouterr().err


def test_an_unknown_benchmark_is_answered_with_those_there_are(capsys):
    assert cli.main(["bench", "no_such_benchmark"]) == 2
    assert "no benchmark 'no_such_benchmark'; there are: " in capsys.readouterr().err
