"""An imitation of Colab: a kernel with PyTorch and without JupyterLab, an empty folder, and one notebook of the course.

Nothing is downloaded. The kernel's environment is made of links to the packages that are installed here, without those
that Colab lacks; what the first cell installs comes from a wheel that is packed here.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

from course_lib.builder import build_notebook
from course_lib.home import ROOT

# jupytext may be there or not; the test is of a Colab that lacks it.
NOT_IN_COLAB = ("jupyterlab", "nbmake", "jupytext")
FETCHED = ("course_lib", "exercises", "solutions", "notebooks")
OF_THIS_MACHINE = ("PIP_", "COURSE_", "TRITON_", "PYTHON", "VIRTUAL_ENV")
CHECKED = 'check("0.1", scale)'


def files_of(distribution: str) -> list[importlib.metadata.PackagePath]:
    """Its modules and metadata, without commands and caches."""
    files = importlib.metadata.files(distribution) or []
    return [file for file in files if ".." not in file.parts and "__pycache__" not in file.parts]


@pytest.fixture
def python(tmp_path):
    """The Python of an environment with what is installed here, linked, but what Colab lacks."""
    environment = tmp_path / "usr"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    left_out = {file.parts[0] for name in NOT_IN_COLAB for file in files_of(name)}
    target = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))
    for folder in map(Path, sys.path):
        if folder.name in ("site-packages", "dist-packages"):
            for path in folder.iterdir():
                if path.name not in left_out and path.suffix != ".pth" and not (target / path.name).exists():
                    (target / path.name).symlink_to(path)
    return environment / "bin" / "python"


@pytest.fixture
def wheels(tmp_path):
    """A folder in which pip finds jupytext."""
    name = "jupytext"
    wheel = tmp_path / "wheels" / f"{name}-{importlib.metadata.version(name)}-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in files_of(name):
            if file.name not in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
                archive.write(file.locate(), file.as_posix())
            if file.name == "RECORD":
                record = file.as_posix()
        archive.writestr(record, "".join(f"{name},,\n" for name in [*archive.namelist(), record]))
    return wheel.parent


@pytest.fixture
def published(tmp_path):
    """The address of an archive of the course."""
    folder = tmp_path / "course-main"
    for name in FETCHED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    shutil.copy(ROOT / "requirements.txt", folder)
    return Path(shutil.make_archive(str(tmp_path / "main"), "gztar", tmp_path, folder.name)).as_uri()


def as_a_learner_has_it() -> nbformat.NotebookNode:
    """Chapter 00 until its first check, with an answer written in."""
    path = next((ROOT / "solutions").glob("00_*.py"))
    given, solved = (build_notebook(path, with_answers=answers) for answers in (False, True))
    answers = {cell["id"]: cell for cell in solved["cells"]}
    cells = [answers[cell["id"]] if cell["id"] == "exercise-0-1" else cell for cell in given["cells"]]
    last = next(index for index, cell in enumerate(cells) if CHECKED in "".join(cell["source"]))
    return nbformat.reads(json.dumps({**given, "cells": cells[: last + 1]}), as_version=4)


def run(notebook: nbformat.NotebookNode, python: Path, folder: Path, **environment: str) -> None:
    """Runs it in a plain kernel of this Python, in the folder."""

    class Kernel(KernelManager):
        @property
        def kernel_spec(self):
            argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=40"]
            return KernelSpec(argv=argv, display_name="Python 3", language="python")

    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_MACHINE)}
    client = NotebookClient(notebook, km=Kernel(), timeout=600, resources={"metadata": {"path": str(folder)}})
    client.execute(env={**inherited, **environment})


def test_a_notebook_alone_sets_itself_up_and_its_first_check_passes(tmp_path, python, wheels, published):
    """Every check raised ModuleNotFoundError: it needed jupytext, which counted among what a notebook does without."""
    content = tmp_path / "content"
    content.mkdir()
    notebook = as_a_learner_has_it()
    run(
        notebook,
        python,
        content,
        COURSE_REPOSITORY=published,
        COURSE_ISOLATION="off",  # the links lead out of the folders that an answer may read
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(wheels),
    )
    texts = [
        output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert texts[-1].startswith("✓ Exercise 0.1"), texts[-1]
    doctors = next(text for text in texts if "What works" in text)
    assert "missing" not in doctors and "✗" not in doctors, doctors
    course = content / "attention-course" / "course-main"
    assert (course / ".course").is_dir() and {path.name for path in content.iterdir()} == {
        "attention-course",
        "main.tar.gz",
    }
