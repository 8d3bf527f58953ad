"""nbgrader itself releases and autogrades the notebooks as they are built: a right, a wrong and an empty submission."""

import csv
import json
import os
import shutil
import subprocess

import pytest

from course_lib import builder
from course_lib.builder import build_notebook
from course_lib.checker.specification import catalog
from course_lib.home import ROOT

CHAPTER = os.environ.get("NBGRADER_CHAPTER", "00")
WRONG = {
    "0.1": ("values * factor", "values"),
}


def guide_configuration():
    """The settings that docs/instructors.md gives, as they stand there."""
    text = (ROOT / "docs" / "instructors.md").read_text(encoding="utf-8")
    return text.split("```python title=nbgrader_config.py\n")[1].split("```")[0]


def test_the_guide_gives_settings_that_are_python():
    compile(guide_configuration(), "nbgrader_config.py", "exec")


@pytest.fixture
def assignment(tmp_path):
    """A course folder of nbgrader's with the chapter as its source, and a function that runs nbgrader in it."""
    if shutil.which("nbgrader") is None:
        pytest.skip("nbgrader is not installed here")
    [chapter] = builder.chapters([CHAPTER])
    (tmp_path / "nbgrader_config.py").write_text(guide_configuration())
    source = tmp_path / "source" / "kernels" / f"{chapter.stem}.ipynb"
    source.parent.mkdir(parents=True)
    source.write_text(builder.as_text(build_notebook(chapter)))

    def nbgrader(*arguments):
        done = subprocess.run(
            ["nbgrader", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COURSE_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]

    return tmp_path, source.name, nbgrader


def hand_in(folder, name, student, answers):
    """Submit the released notebook with some exercise cells replaced."""
    notebook = json.loads((folder / "release" / "kernels" / name).read_text())
    for cell in notebook["cells"]:
        marked = cell["metadata"].get("nbgrader", {})
        identity = marked.get("grade_id", "").removeprefix("exercise-").replace("-", ".")
        if marked.get("solution") and identity in answers:
            cell["source"] = answers[identity]
        if marked.get("grade"):
            cell["source"] = "pass  # a check that was taken out"
    path = folder / "submitted" / student / "kernels" / name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(notebook))


@pytest.mark.slow
def test_nbgrader_gives_full_points_to_a_right_some_to_a_wrong_and_none_to_an_empty_submission(assignment):
    folder, name, nbgrader = assignment
    nbgrader("generate_assignment", "kernels")
    released = (folder / "release" / "kernels" / name).read_text()
    assert "YOUR CODE HERE" in released and "Exercise 0.1 · " in released or CHAPTER != "00"
    tasks = [task for task in catalog.exercises().values() if task.chapter == CHAPTER]
    right = {task.id: catalog.solution_source(task.id) for task in tasks}
    first = tasks[0].id
    wrong = right | {first: right[first].replace(*WRONG.get(first, ("return ", "return 1 + ")))}
    assert wrong != right
    hand_in(folder, name, "right", right)
    hand_in(folder, name, "wrong", wrong)
    hand_in(folder, name, "empty", {})
    nbgrader("autograde", "kernels")
    nbgrader("export", "--to", str(folder / "grades.csv"))
    with open(folder / "grades.csv", newline="") as file:
        scores = {row["student_id"]: (float(row["score"]), float(row["max_score"])) for row in csv.DictReader(file)}
    most = sum(task.points for task in tasks)
    assert scores == {"right": (most, most), "wrong": (most - tasks[0].points, most), "empty": (0, most)}
