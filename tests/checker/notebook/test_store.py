"""No attempt is ever lost: not by two writers at once, not by a damaged file."""

import subprocess
import sys

import pytest

from course_lib.checker import CourseError
from course_lib.checker.notebook.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "progress.sqlite3")


def _add(store, exercise="3.2", outcome="failed", source="def f(): ..."):
    store.add(exercise, source, outcome, None, "message", 0.1, 7, "notebook")


def test_every_attempt_keeps_its_source(store):
    for number in range(3):
        _add(store, source=f"version {number} · ü")
    assert [row["source"] for row in store.attempts("3.2")] == [f"version {n} · ü" for n in range(3)]


def test_having_passed_once_counts_for_ever(store):
    for outcome in ("failed", "passed", "error"):
        _add(store, outcome=outcome)
    standing = store.standings()["3.2"]
    assert (standing.passed, standing.last, standing.attempts) == (True, "error", 3)


def test_hints_go_on_to_the_last_and_stay_there(store):
    assert [store.next_hint("3.2", 3) for _ in range(5)] == [0, 1, 2, 2, 2]
    assert store.standings()["3.2"].hints == 3


def test_two_processes_may_write_at_once(store):
    program = (
        "import sys; from pathlib import Path; from course_lib.checker.notebook.store import Store\n"
        "store = Store(Path(sys.argv[1]))\n"
        "for n in range(40): store.add('1.1', 'x', 'failed', None, 'm', 0.0, n, sys.argv[2])"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(store.path), str(n)]) for n in range(3)]
    for _ in range(20):
        _add(store, "1.1")
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert len(store.attempts("1.1")) == 140


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"not a database at all, but long enough to be read as one" * 40,
        lambda data: data[: len(data) // 2] + b"\xff" * (len(data) // 2),
        lambda data: data[:100],
    ],
)
def test_a_damaged_file_is_set_aside_and_work_goes_on(store, capsys, damage):
    for _ in range(50):
        _add(store, source="x" * 500)
    damaged = damage(store.path.read_bytes())
    store.path.write_bytes(damaged)
    _add(store, "1.1")
    assert len(store.attempts("1.1")) == 1
    kept = list(store.path.parent.glob("progress.sqlite3.damaged-*"))
    assert len(kept) == 1 and kept[0].read_bytes() == damaged
    assert str(kept[0]) in capsys.readouterr().out


def test_a_folder_that_cannot_hold_the_file_is_named(tmp_path):
    with pytest.raises(CourseError, match="COURSE_HOME"):
        _add(Store(tmp_path / "missing" / "progress.sqlite3"))
