"""The workflows of .github: GitHub's schema takes them, and their steps do here what they do there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from course_lib.bootstrap import NEWEST, OLDEST
from course_lib.builder import build_notebook
from course_lib.builder.notebook import as_text
from course_lib.home import ROOT
from tests.submissions.ch02_naive_attention.ex2_longest_sequence import WRONG

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# YAML 1.1 reads the key `on` as true; GitHub does not.
READ = {
    path.stem: {{True: "on"}.get(key, key): value for key, value in yaml.safe_load(path.read_text()).items()}
    for path in WORKFLOWS
}
STEPS = [
    (workflow, step.get("name", step.get("uses")), step)
    for workflow, content in READ.items()
    for job in content["jobs"].values()
    for step in job["steps"]
]
SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail")  # what GitHub makes of `shell: bash`


def run(workflow, name, folder, **environment):
    """A step's script, run in a folder with the workflow's shell and this Python; what it wrote is in `folder`.env."""
    [step] = [step for of, called, step in STEPS if (of, called) == (workflow, name)]
    files = {name: str(folder) + end for name, end in (("GITHUB_ENV", ".env"), ("GITHUB_STEP_SUMMARY", ".summary"))}
    inherited = {key: value for key, value in os.environ.items() if key not in ("COURSE_REPOSITORY", "PYTHONPATH")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [*SHELL, "-c", step["run"]],
        cwd=folder,
        env={**inherited, "PATH": path, "RUNNER_TEMP": str(folder.parent), **files, **environment},
        capture_output=True,
        text=True,
    )


# ---------------------------------------------------------------------------------------------------- as files


def test_githubs_schema_takes_them():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert len(WORKFLOWS) == 3 and done.returncode == 0, done.stdout + done.stderr


def test_the_schema_refuses_a_workflow_that_is_none(tmp_path):
    path = tmp_path / "wrong.yml"
    path.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", path]
    assert subprocess.run(command, capture_output=True).returncode == 1


@pytest.mark.parametrize("workflow", READ)
def test_each_reads_only_and_ends(workflow):
    content = READ[workflow]
    assert content["permissions"] == {"contents": "read"} and content["concurrency"]["group"]
    assert all("timeout-minutes" in job for job in content["jobs"].values())
    more = {name for job in content["jobs"].values() for name in job.get("permissions", {})}
    assert more == ({"pages", "id-token"} if workflow == "pages" else set())
    assert "secrets." not in json.dumps(content) and "pull_request_target" not in content["on"]


def test_only_githubs_own_actions_are_used_at_a_major_version():
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for _, _, step in STEPS if "uses" in step)


@pytest.mark.parametrize("workflow, name, step", [each for each in STEPS if "run" in each[2]])
def test_each_script_is_bash_into_which_nothing_is_pasted(workflow, name, step):
    """What somebody may choose, such as a branch's name, reaches a script as a variable and never as its text."""
    assert READ[workflow]["defaults"] == {"run": {"shell": "bash"}} and "${{" not in step["run"]
    done = subprocess.run(["bash", "-n", "-c", step["run"]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------------------------------------------- test, pages


def test_the_gate_runs_on_the_oldest_and_the_newest_python():
    [job] = READ["test"]["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == [f"{major}.{minor}" for major, minor, *_ in (OLDEST, NEWEST)]


@pytest.mark.parametrize(
    "workflow, name, target",
    [
        ("test", "make test, or make test-all", "test"),
        ("test", "make test, or make test-all", "test-all"),
        ("pages", "make site", "site"),
    ],
)
def test_make_is_asked_for_a_target_that_it_has(tmp_path, workflow, name, target):
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text('#!/bin/sh\necho "$1"\n')
    make.chmod(0o755)
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert target in READ[workflow].get("env", {}).get("TARGET", "site")
    done = subprocess.run(
        [*SHELL, "-c", next(step["run"] for of, called, step in STEPS if (of, called) == (workflow, name))],
        env={"PATH": f"{make.parent}:{os.environ['PATH']}", "TARGET": target},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"{target}\n")


def test_pages_are_published_only_where_they_are_turned_on():
    build, publish = READ["pages"]["jobs"].values()
    assert "github.event.repository.has_pages" in build["if"] and publish["needs"] == "build"
    [upload] = [step for step in build["steps"] if step.get("uses", "").startswith("actions/upload-pages-artifact")]
    assert upload["with"]["path"] == "build/site/pages"


# ---------------------------------------------------------------------------------------------------- notebooks

FIND, CHECK, RUN = "Find the course, or fetch it", "Check the exercises", "Run the notebooks"


@pytest.fixture
def classroom(tmp_path):
    """A repository that holds only notebooks."""
    folder = tmp_path / "classroom"
    folder.mkdir()
    return folder


@pytest.fixture
def course(tmp_path):
    """As much of the course as tells that it is one, in git."""
    folder = tmp_path / "course-main"
    (folder / "course_lib").mkdir(parents=True)
    (folder / "course_lib" / "home.py").touch()
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "All"]):
        subprocess.run(["git", *who, *command], cwd=folder, check=True)
    return folder


def found(folder):
    """The folder in which later steps find the course."""
    name, _, value = Path(f"{folder}.env").read_text().strip().partition("=")
    assert name == "PYTHONPATH" and (Path(value) / "course_lib" / "home.py").exists()
    return Path(value)


def test_in_a_fork_the_course_is_its_own(course):
    done = run("notebooks", FIND, course, COURSE_REPOSITORY="https://elsewhere.invalid/course")
    assert done.returncode == 0, done.stderr
    assert found(course) == course


@pytest.mark.parametrize("kind", ["git", "gztar", "zip"])
def test_beside_notebooks_alone_the_course_is_fetched(classroom, course, kind):
    if kind == "git":
        address = course.as_uri()
    else:
        address = Path(shutil.make_archive(str(course.parent / "main"), kind, course.parent, course.name)).as_uri()
    done = run("notebooks", FIND, classroom, COURSE_REPOSITORY=address)
    assert done.returncode == 0, done.stderr
    assert classroom / "attention-course" in (found(classroom), found(classroom).parent)


def test_without_an_address_the_step_says_what_to_set(classroom):
    done = run("notebooks", FIND, classroom, COURSE_REPOSITORY="")
    assert done.returncode == 1 and done.stdout.startswith("::error::") and "COURSE_REPOSITORY" in done.stdout


def notebook(*sources):
    """A notebook's text: a heading that looks like an exercise, then the cells."""
    code = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    cells = [{"cell_type": "markdown", "id": "title", "metadata": {}, "source": ["# Exercise 2.1 · By heart"]}]
    for number, source in enumerate(sources):
        cells.append({**code, "id": f"cell-{number}", "source": source.splitlines(keepends=True)})
    python = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return as_text({"cells": cells, "metadata": python, "nbformat": 4, "nbformat_minor": 5})


def cell(exercise, answered):
    """The exercise's cell of chapter 02, with the course's answer or as it is given."""
    built = build_notebook(next((ROOT / "solutions").glob("02_*.py")), with_answers=answered)
    return next(
        text for each in built["cells"] if (text := "".join(each["source"])).startswith(f"# Exercise {exercise}")
    )


def test_each_verdict_stands_at_its_cells_line_and_in_the_table(classroom):
    """A right, a wrong and an untouched exercise in one notebook, and another notebook without any."""
    folder = classroom / "home, work"
    folder.mkdir()
    mistake, wrong = next(iter(WRONG.items()))
    text = notebook("print(50)\n", cell("2.1", True), "\n\n" + wrong, cell("2.3", False))
    (folder / "mine.ipynb").write_text(text)
    (folder / "notes.ipynb").write_text(notebook("x = 1  # Exercise 2.2").replace("# Exercise 2.1", "# Notes"))
    done = run("notebooks", CHECK, classroom, NOTEBOOKS=folder.name, PYTHONPATH=str(ROOT))
    assert done.returncode == 1, done.stderr
    line = {
        exercise: number
        for number, content in enumerate(text.splitlines(), 1)
        for exercise in re.findall(r'^ *"# Exercise (\S+)', content)  # of two lines with a number the later, the cell's
    }
    verdicts = {each["exercise"]: each for each in json.loads((classroom / "verdicts.json").read_text())}
    assert [each["outcome"] for each in verdicts.values()] == ["passed", "failed", "not_attempted"]
    assert verdicts["2.2"]["mistake"] == mistake.partition("__")[0]

    shown = [said for said in done.stdout.splitlines() if said.startswith(("::notice", "::error", "::warning"))]
    at = "file=home%2C work/mine.ipynb,line={},title=Exercise {}::"
    assert len(shown) == 2
    assert shown[0].startswith("::notice " + at.format(line["2.1"], "2.1"))
    message = verdicts["2.2"]["message"].replace("%", "%25").replace("\n", "%0A")
    assert shown[1] == "::error " + at.format(line["2.2"], "2.2") + message

    _, _, *rows = Path(f"{classroom}.summary").read_text().splitlines()
    assert [row.split(" | ")[1:3] for row in rows] == [["2.1", "passed"], ["2.2", "failed"], ["2.3", "not attempted"]]


def test_notebooks_as_they_were_given_pass_the_check(classroom):
    (classroom / "notebooks").mkdir()
    (classroom / "notebooks" / "given.ipynb").write_text(notebook(cell("2.3", False)))
    done = run("notebooks", CHECK, classroom, NOTEBOOKS="notebooks", PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and "::error" not in done.stdout, done.stderr


def test_a_folder_that_is_not_there_is_told(classroom):
    done = run("notebooks", CHECK, classroom, NOTEBOOKS="homework")
    assert done.returncode == 1 and done.stdout.startswith("::error::There is no folder homework")


@pytest.mark.parametrize("source, status", [("print(1)", 0), ("1 / 0", 1)])
def test_the_notebooks_run_from_top_to_bottom_and_nothing_beside_them(classroom, source, status):
    (classroom / "mine.ipynb").write_text(notebook(source))
    (classroom / "test_own.py").write_text("raise SystemExit(3)")
    (classroom / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--no-such-option'\n")
    fetched = classroom / "attention-course" / "notebooks"
    fetched.mkdir(parents=True)
    (fetched / "chapter.ipynb").write_text(notebook("1 / 0"))
    done = run("notebooks", RUN, classroom, NOTEBOOKS=".", PYTHONPATH=str(ROOT))
    assert done.returncode == status and ("1 passed" in done.stdout) == (status == 0), done.stdout + done.stderr
    assert "2 " not in done.stdout.splitlines()[-1]
