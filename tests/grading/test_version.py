"""Stored grades are good for as long as nothing was edited that decides them, and no longer."""

import re
import shutil

import pytest

from course_lib.checker.specification import catalog
from course_lib.grading import journal as journal_module
from course_lib.grading.journal import Journal
from course_lib.grading.version import course_version, deciding_files, version_for
from course_lib.home import ROOT
from tests.grading.test_journal import row

CHAPTERS = sorted({task.chapter for task in catalog.exercises().values()})
READING = ""  # what decides before a chapter is known


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of what can decide, to be edited."""
    copy = tmp_path_factory.mktemp("course")
    for folder in ("course_lib", "exercises", "solutions"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def versions(course):
    course_version.cache_clear()
    return {chapter: course_version(chapter, course) for chapter in (READING, *CHAPTERS)}


@pytest.fixture(scope="module")
def before(course):
    return versions(course)


@pytest.fixture
def changed_by(course, before):
    """The chapters whose version another line in some files changes."""

    def changed(*names):
        kept = {path: path.read_bytes() for name in names for path in course.glob(name)}
        assert len(kept) == len(names), names
        for path, content in kept.items():
            path.write_bytes(content + b"\nEDITED = True\n")
        try:
            after = versions(course)
        finally:
            for path, content in kept.items():
                path.write_bytes(content)
        return {chapter for chapter in before if before[chapter] != after[chapter]}

    yield changed
    course_version.cache_clear()


@pytest.mark.parametrize("name", ["exercises/ch04_*/ex3_*.py", "exercises/ch04_*/parts.py", "solutions/04_*.py"])
def test_an_edit_of_a_chapter_is_that_chapters_alone(changed_by, name):
    assert changed_by(name) == {"04"}


def test_every_exercise_decides_for_its_own_chapter_and_no_other():
    files = {chapter: set(deciding_files(chapter)) for chapter in (READING, *CHAPTERS)}
    for identity, path in catalog.exercise_files().items():
        assert [chapter for chapter in files if path in files[chapter]] == [path.parent.name[2:4]], identity


@pytest.mark.parametrize(
    "name",
    [
        "course_lib/builder/answers.py",  # which cell was not attempted
        "course_lib/checker/judge/decide.py",
        "course_lib/checker/judge/compare.py",
        "course_lib/checker/specification/draw.py",
        "course_lib/checker/runner/process/main.py",  # started as a program, imported by nobody
        "course_lib/checker/runner/process/guards.py",  # and what that imports from its own folder
        "course_lib/hardware/meter/traffic/accounts.py",  # counts the bytes, in the worker
        "course_lib/hardware/meter/traffic/front_end.py",  # asks the compiler, in another
        "course_lib/hardware/compiler/cuda_block.h",  # sent as a text to where CUDA C++ runs
        "course_lib/grading/reading.py",
        "course_lib/grading/judging.py",
    ],
)
def test_an_edit_of_what_judges_is_every_chapters(changed_by, name):
    assert changed_by(name) == {READING, *CHAPTERS}


@pytest.mark.parametrize("topic", [path.name for path in sorted((ROOT / "exercises" / "topics").glob("[a-z]*.py"))])
def test_an_edit_of_a_topic_is_that_of_the_chapters_which_need_it(changed_by, topic):
    name = topic.removesuffix(".py")
    imported = re.compile(rf"\bexercises\.topics\.{name}\b|\bfrom exercises\.topics import {name}\b")
    importers = {
        path.parent.name[2:4] for path in (ROOT / "exercises").glob("ch*/*.py") if imported.search(path.read_text())
    }
    changed = changed_by(f"exercises/topics/{topic}")
    assert importers and importers <= changed < {READING, *CHAPTERS}


def test_an_edit_of_what_decides_nothing_is_nobodys(changed_by):
    changed = changed_by(
        "course_lib/grading/run.py",
        "course_lib/grading/tables.py",
        "course_lib/figures/style.py",
        "course_lib/kernels/memory/vector_add.py",
        "course_lib/hardware/doctor/report.py",
        "course_lib/cli.py",
    )
    assert changed == set()


def test_line_ends_of_another_system_are_no_edit(course, before):
    path = course / "course_lib" / "builder" / "answers.py"
    kept = path.read_bytes()
    path.write_bytes(kept.replace(b"\n", b"\r\n"))
    try:
        assert versions(course) == before
    finally:
        path.write_bytes(kept)
        course_version.cache_clear()


def test_after_an_edit_of_4_3_a_journal_gives_the_grades_of_every_other_chapter(tmp_path, course, monkeypatch):
    def version_in_the_copy(exercise):
        return course_version(exercise.split(".")[0].zfill(2), course)

    monkeypatch.setattr(journal_module, "version_for", version_in_the_copy)
    course_version.cache_clear()
    with Journal(tmp_path / "grades.csv") as journal:
        for exercise in ("3.1", "4.1", "4.3", "5.1"):
            journal.add("abc", row(exercise))
    [path] = course.glob("exercises/ch04_*/ex3_*.py")
    kept = path.read_bytes()
    path.write_bytes(kept + b"\nEDITED = True\n")
    course_version.cache_clear()
    try:
        with Journal(tmp_path / "grades.csv") as journal:
            assert [e for e in ("3.1", "4.1", "4.3", "5.1") if ("abc", e) in journal] == ["3.1", "5.1"]
            assert journal.other_versions == 2
    finally:
        path.write_bytes(kept)
        course_version.cache_clear()


def test_an_exercise_has_its_chapters_version_and_a_file_without_one_that_of_reading():
    assert version_for("3.1") == version_for("3.2") == course_version("03") and version_for("") == course_version()
