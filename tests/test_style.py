"""ruff, as a test: one run of the gate tells all that is wrong, style and behaviour together."""

import subprocess
import sys

from course_lib.home import ROOT


def ruff(*arguments, source=None):
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", *arguments]
    return subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True)


def test_ruff_finds_nothing():
    done = ruff(".")
    assert done.returncode == 0, "\n" + done.stdout + done.stderr


def test_every_file_is_laid_out_by_ruff():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, "run `.venv/bin/ruff format .`\n" + done.stdout + done.stderr


def test_ruff_would_find_something():
    """Its settings are read, and a line too long or a name that does not exist is not passed over."""
    done = ruff("--stdin-filename", "course_lib/kernels/new.py", "-", source=f"x = undefined  # {'long ' * 30}\n")
    assert done.returncode == 1 and "E501" in done.stdout and "F821" in done.stdout
