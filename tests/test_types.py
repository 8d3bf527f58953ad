"""mypy, as a test: course_lib's types, and those of the process that runs answers, which is a program of its own."""

import os
import subprocess
import sys

from course_lib.home import ROOT

PROCESS = ROOT / "course_lib" / "checker" / "runner" / "process"


COMMON = ROOT / "course_lib" / "checker" / "common"


def mypy(*arguments, folder=ROOT):
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *arguments]
    beside = {"MYPYPATH": str(COMMON)} if folder == PROCESS else {}
    return subprocess.run(command, cwd=folder, env={**os.environ, **beside}, capture_output=True, text=True)


def test_the_code_is_what_its_types_say():
    """course_lib; and the process that runs answers, which runs from its own folder, where its modules find one another
    and those of checker/common by their names alone. One after the other: what mypy has read of PyTorch serves both."""
    for modules, folder in (([], ROOT), (sorted(path.name for path in PROCESS.glob("*.py")), PROCESS)):
        done = mypy("--cache-dir", str(ROOT / ".mypy_cache"), *modules, folder=folder)
        assert done.returncode == 0, "\n" + done.stdout + done.stderr


def test_mypy_would_find_something(tmp_path):
    (tmp_path / "wrong.py").write_text("def length(text: str) -> int:\n    return text\n")
    done = mypy("--cache-dir", str(tmp_path / "cache"), "wrong.py", folder=tmp_path)
    assert done.returncode == 1 and "return-value" in done.stdout
