"""mypy, as a test: course_lib's types, and those of the process that runs answers, which is a program of its own."""

import subprocess
import sys

import pytest

from course_lib.home import ROOT

PROCESS = ROOT / "course_lib" / "checker" / "runner" / "process"


def mypy(*arguments, folder=ROOT):
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_the_library_is_what_its_types_say():
    done = mypy()
    assert done.returncode == 0, "\n" + done.stdout + done.stderr


@pytest.mark.slow
def test_the_process_that_runs_answers_is_what_its_types_say():
    """It runs without course_lib, from its own folder; its modules import one another by their names alone."""
    done = mypy(*sorted(path.name for path in PROCESS.glob("*.py")), folder=PROCESS)
    assert done.returncode == 0, "\n" + done.stdout + done.stderr


def test_mypy_would_find_something(tmp_path):
    (tmp_path / "wrong.py").write_text("def length(text: str) -> int:\n    return text\n")
    done = mypy("--cache-dir", str(tmp_path / "cache"), "wrong.py", folder=tmp_path)
    assert done.returncode == 1 and "return-value" in done.stdout
