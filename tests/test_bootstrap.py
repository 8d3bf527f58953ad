"""The first cell of every notebook, where the course is and where it is not; and what is installed, by whom."""

import json
import os
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from course_lib import bootstrap, builder
from course_lib.home import ROOT

CHAPTER = """\
# %% [markdown]
# # A chapter

# %%
import course_lib.home
print("course in", course_lib.home.ROOT)
"""


@pytest.fixture
def cell(tmp_path):
    """The first code cell, as the builder writes it into a notebook."""
    path = tmp_path / "03_sample.py"
    path.write_text(CHAPTER)
    return "".join(builder.build_notebook(path)["cells"][1]["source"])


@pytest.fixture
def remote(tmp_path):
    """A git repository that holds as much of the course as the first cell needs."""
    folder = tmp_path / "remote"
    shutil.copytree(ROOT / "course_lib", folder / "course_lib", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "requirements.txt", folder)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "All"]):
        subprocess.run(["git", *who, *command], cwd=folder, check=True)
    return folder


@pytest.fixture
def empty(tmp_path):
    """An empty folder, as a hosted notebook starts in."""
    folder = tmp_path / "content"
    folder.mkdir()
    return folder


WHERE = "import course_lib.home; print(course_lib.home.ROOT)"


def run(cell, folder, *, then=WHERE, **environment):
    """The cell, and a line after it, in a fresh Python in `folder`."""
    variables = {name: value for name, value in os.environ.items() if name not in ("COURSE_REPOSITORY", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-c", f"{cell}\n{then}"],
        cwd=folder,
        env={**variables, **environment},
        capture_output=True,
        text=True,
    )


def test_one_notebook_in_an_empty_folder_gets_the_course_from_a_git_remote(tmp_path, empty, remote, monkeypatch):
    """As in Colab: nothing but the notebook is there, and nobody has cloned anything."""
    source = tmp_path / "03_sample.py"
    source.write_text(CHAPTER)
    (empty / "03_sample.ipynb").write_text(json.dumps(builder.build_notebook(source)))
    monkeypatch.setenv("COURSE_REPOSITORY", remote.as_uri())
    monkeypatch.delenv("PYTHONPATH", raising=False)
    notebook = nbformat.read(empty / "03_sample.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(empty)}}).execute()
    assert f"course in {empty / 'attention-course'}" in notebook.cells[-1].outputs[0].text


@pytest.mark.parametrize("kind", ["gztar", "zip"])
def test_an_archive_with_a_folder_at_its_top_does_as_well(empty, remote, cell, kind):
    archive = shutil.make_archive(str(remote.parent / "main"), kind, remote.parent, remote.name)
    done = run(cell, empty, COURSE_REPOSITORY=f"file://{archive}")
    assert done.stdout.strip() == str(empty / "attention-course" / "remote"), done.stderr


def test_the_course_is_fetched_once(empty, remote, cell):
    assert run(cell, empty, COURSE_REPOSITORY=remote.as_uri()).returncode == 0
    shutil.rmtree(remote)
    again = run(cell, empty, COURSE_REPOSITORY=remote.as_uri())
    assert again.stdout.strip() == str(empty / "attention-course"), again.stderr


def test_a_fetch_that_failed_can_be_repeated(empty, remote, cell):
    failed = run(cell, empty, COURSE_REPOSITORY=(remote / "wrong").as_uri())
    assert failed.returncode != 0 and "wrong" in failed.stderr
    assert run(cell, empty, COURSE_REPOSITORY=remote.as_uri()).returncode == 0


def test_without_an_address_the_cell_says_what_to_set_and_fetches_nothing(empty, cell, monkeypatch):
    without = cell.replace(f'"{bootstrap.COURSE_REPOSITORY}")', '"")')
    done = run(without, empty)
    assert done.returncode == 1 and "set COURSE_REPOSITORY above" in done.stderr.splitlines()[-1]
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("folder", [".", "notebooks", "tests/gpu"])
def test_in_a_checkout_the_cell_finds_the_course_above_and_starts_no_process(cell, folder):
    # The audit hook sees every process that Python starts, a download or an installation among them.
    guard = "import sys\nsys.addaudithook(lambda event, _: event == 'subprocess.Popen' and sys.exit('a process'))\n"
    done = run(guard + cell, ROOT / folder, TRITON_INTERPRET="1")
    assert done.stdout.strip() == str(ROOT), done.stderr


def test_where_the_course_is_importable_the_cell_changes_nothing(empty, cell):
    before = "import sys; before = list(sys.path)\n"
    done = run(before + cell, empty, then="assert sys.path == before", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert list(empty.iterdir()) == []


def test_the_repository_is_named_in_one_place_only(tmp_path, monkeypatch):
    monkeypatch.setattr(builder.notebook, "COURSE_REPOSITORY", "https://example.org/course.git")
    (tmp_path / "03_sample.py").write_text(CHAPTER)
    assert "https://example.org/course.git" in "".join(
        builder.build_notebook(tmp_path / "03_sample.py")["cells"][1]["source"]
    )
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "solutions").glob("*.py"))
    assert "COURSE_REPOSITORY" not in text and "git clone" not in text


# --------------------------------------------------------------------------------------------- what is installed


@pytest.fixture
def installed(monkeypatch):
    """Plays an environment: `absent` names what it lacks, `commands` gathers what would have been run."""

    class Environment:
        absent, commands = set(), []

    monkeypatch.setattr(bootstrap, "importable", lambda module: module not in Environment.absent)
    monkeypatch.setattr(bootstrap.subprocess, "call", lambda command: Environment.commands.append(command) or 0)
    Environment.absent, Environment.commands = set(), []
    return Environment


def requested(command):
    return [word for word in command[command.index("install") + 1 :] if not word.startswith("-")]


def test_where_nothing_is_missing_nothing_is_installed(installed):
    assert bootstrap.main(["missing", str(ROOT / "requirements-dev.txt")]) == 0
    assert installed.commands == []


def test_only_what_is_missing_is_installed_and_torch_is_held_where_it_is(installed, monkeypatch):
    held = {"torch": "2.11.0+cu126", "triton": "3.6.0"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: held.get(name, "99.0"))
    installed.absent = {"ipywidgets", "jupyterlab", "nbmake"}
    assert bootstrap.main(["missing", "--notebook"]) == 0
    [command] = installed.commands
    assert requested(command) == ["ipywidgets>=8.1,<9", "torch==2.11.0+cu126", "triton==3.6.0"]


@pytest.mark.parametrize("absent", ["torch", "triton"])
def test_torch_and_triton_are_asked_for_and_never_installed(installed, capsys, absent):
    installed.absent = {absent, "matplotlib"}
    assert bootstrap.main(["missing", str(ROOT / "requirements.txt")]) == 1
    assert installed.commands == []
    said = capsys.readouterr().err
    assert f"lacks {absent}," in said and len(said.strip().splitlines()) == 1


def test_what_is_too_old_counts_as_missing_and_torch_is_told_both_versions(installed, monkeypatch, capsys):
    """PyTorch 2.8 with Triton 3.4 could be imported, and went through."""
    held = {"torch": "2.8.0+cu126", "triton": "3.4.0", "numpy": "1.24.4"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: held.get(name, "99.0"))
    assert bootstrap.main(["missing", "--notebook"]) == 1
    said = capsys.readouterr().err
    assert "has torch 2.8.0+cu126 and triton 3.4.0, too old" in said and '"torch>=2.10,<2.14"' in said
    assert len(said.strip().splitlines()) == 1 and installed.commands == []
    held.update(torch="2.10.0", triton="3.6.0")
    assert bootstrap.main(["missing", "--notebook"]) == 0
    [command] = installed.commands
    assert requested(command) == ["numpy>=1.26,<3", "torch==2.10.0", "triton==3.6.0"]


def test_triton_is_not_missed_where_it_is_not_made_for(installed, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "platform", "darwin")
    installed.absent = {"triton"}
    assert bootstrap.main(["missing", str(ROOT / "requirements.txt")]) == 0


# ------------------------------------------------------------------------------------------------ the environment


@pytest.mark.parametrize(
    "version, good",
    [((3, 9, 1), False), ((3, 10, 9), False), ((3, 10, 10), True), ((3, 13, 5), True), ((3, 14, 0), False)],
)
def test_the_pythons_that_the_course_runs_on(monkeypatch, version, good):
    """Before 3.10.10 `inspect.getsource` cuts decorated functions short."""
    monkeypatch.setattr(bootstrap.sys, "version_info", version)
    assert (bootstrap.obstacle() is None) == good
    if not good:
        assert (
            f"This is Python {version[0]}.{version[1]}.{version[2]}" in bootstrap.obstacle()
            and "PYTHON=" in bootstrap.obstacle()
        )


def test_a_python_without_venv_is_told_the_package_to_install(monkeypatch):
    monkeypatch.setattr(bootstrap, "importable", lambda module: module != "ensurepip")
    said = bootstrap.obstacle()
    assert f"apt install python3.{sys.version_info[1]}-venv" in said and "VENV=none" in said


def test_a_folder_of_somebody_elses_is_not_made_an_environment(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("mine")
    assert bootstrap.main(["environment", str(tmp_path)]) == 1
    assert (tmp_path / "thesis.tex").exists() and "not empty" in capsys.readouterr().err
