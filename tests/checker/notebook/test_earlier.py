"""Another notebook's functions: the newest answer that passed, and the course's own until there is one."""

import time

import pytest

import course_lib.checker.notebook.store as kept
from course_lib.checker import CourseError
from course_lib.checker.notebook.earlier import earlier
from course_lib.checker.notebook.store import Store
from course_lib.checker.specification import catalog
from tests.checker.samples import ALL


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "exercises", lambda: ALL)
    monkeypatch.setattr(kept, "_store", Store(tmp_path / "progress.sqlite3"))
    monkeypatch.setattr(catalog, "reference", lambda identity: (lambda x: "the course's own",))
    return kept._store


def add(store, body, outcome="passed"):
    store.add("90.2", f"# Exercise 90.2 · Double\ndef double(x):\n    return {body}\n", outcome, None, "", 0.1, 1, None)


def test_the_newest_answer_that_passed_counts(store):
    add(store, "'old'")
    add(store, "'new', torch.sqrt is not None, math.pi > 3")
    add(store, "'wrong'", "failed")
    found = earlier("90.2")
    assert found.functions[0](1) == ("new", True, True)
    day = time.localtime()
    assert str(found) == f"90.2 double: yours of {day.tm_mday} {time.strftime('%B', day)}"


def test_the_courses_own_stands_in_until_one_has_passed(store):
    add(store, "'wrong'", "failed")
    found = earlier("90.2")
    assert found.functions[0](1) == "the course's own" and found.whose == "the course's"


def test_a_call_of_check_in_the_same_cell_does_nothing(store):
    add(store, "2 * x\n\nbest = check('90.2', double).best\n%time best")
    assert earlier("90.2").functions[0](4) == 8


def test_an_answer_that_does_not_run_any_more_is_told(store):
    add(store, "x\n\nraise OSError('gone')")
    found = earlier("90.2")
    assert found.functions[0](1) == "the course's own" and "does not run by itself: OSError: gone" in found.whose


def test_a_name_of_its_own_is_told(store):
    store.add("90.2", "def twice(x):\n    return 2 * x\n", "passed", None, "", 0.1, 1, None)
    assert "does not run by itself: KeyError: 'double'" in earlier("90.2").whose


def test_an_unknown_exercise_is_an_error():
    with pytest.raises(CourseError, match="99.9"):
        earlier("99.9")
