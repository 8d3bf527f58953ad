"""make: what a fresh machine, a second start, another Python and an environment of one's own get."""

import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from course_lib import bootstrap
from course_lib.home import ROOT

REQUIREMENTS = (
    "requirements.txt",
    "requirements-grade.txt",
    "requirements-serve.txt",
    "requirements-site.txt",
    "requirements-dev.txt",
)


@pytest.fixture
def clone(tmp_path):
    """What set-up consists of, in a folder with a space in its name; with no requirements nothing is fetched."""
    folder = tmp_path / "a course"
    (folder / "course_lib").mkdir(parents=True)
    for name in ("Makefile", "course_lib/bootstrap.py"):
        shutil.copy(ROOT / name, folder / name)
    for name in REQUIREMENTS:
        (folder / name).write_text("")
    return folder


@pytest.fixture
def recorder(tmp_path):
    """A stand-in for Python that writes down how it was called."""
    program, log = tmp_path / "recorder", tmp_path / "log"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\n')
    program.chmod(0o755)
    log.touch()
    return program, log


OPTIONS = ("VENV", "TESTS", "WORKERS", "ARGS", "CHAPTER", "LAB_ARGS", "NOTEBOOK", "BENCH")  # what make can be given


def run(folder, *command, **environment):
    """A command as a shell of its own would run it: this test may itself be run by make, which leaves variables, those
    that it was given among them."""
    of_make = ("MAKE", "MFLAGS", *OPTIONS)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(of_make)}
    return subprocess.run(
        [str(part) for part in command], cwd=folder, env={**inherited, **environment}, capture_output=True, text=True
    )


def make(folder, *arguments, **environment):
    return run(folder, "make", *arguments, **environment)


def test_a_fresh_machine_gets_an_environment_once(clone):
    first = make(clone, "install", f"PYTHON={sys.executable}")
    assert first.returncode == 0, first.stderr
    assert (clone / ".venv" / "bin" / "python").exists()
    second = make(clone, "install", "PYTHON=/not/asked/again")
    assert second.returncode == 0 and "pip" not in second.stdout + second.stderr
    os.utime(clone / "requirements.txt", (2**31, 2**31))
    assert "pip" in make(clone, "install", "--dry-run").stdout, "new requirements are not installed"


def test_an_interrupted_installation_is_taken_up_again(clone):
    (clone / "requirements.txt").write_text("./not_here\n")
    assert make(clone, "install", f"PYTHON={sys.executable}").returncode != 0
    (clone / "requirements.txt").write_text("")
    again = make(clone, "install", "PYTHON=/not/asked/again")
    assert again.returncode == 0, again.stderr
    assert (clone / ".venv" / ".installed").exists()


def test_a_python_that_is_not_there_is_one_sentence(clone):
    done = make(clone, "lab", "PYTHON=/no/such/python")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert len(said) == 1 and "no /no/such/python here" in said[0] and "3.10.10 to 3.13" in said[0]


def test_an_old_python_is_one_sentence(clone, tmp_path):
    old = tmp_path / "python3.9"
    run_as_old = (
        "import runpy, sys; sys.argv = sys.argv[1:]; sys.version_info = (3, 9, 18); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{run_as_old}" "$@"\n')
    old.chmod(0o755)
    done = make(clone, "lab", f"PYTHON={old}")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert done.returncode != 0 and len(said) == 1 and said[0].startswith("This is Python 3.9")
    assert not (clone / ".venv").exists()


def test_a_python_that_will_not_do_is_passed_over_for_one_that_will(clone, tmp_path):
    path = tmp_path / "bin"
    path.mkdir()
    (path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (path / "python3.12").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for name in ("python3", "python3.12"):
        (path / name).chmod(0o755)
    done = make(clone, "install", PATH=f"{path}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert f"with {sys.executable}" in done.stderr


def test_lab_opens_the_first_notebook_with_the_options_given(clone, recorder):
    program, log = recorder
    done = make(clone, "lab", "VENV=none", f"PYTHON={program}", "LAB_ARGS=--no-browser --port 8899")
    assert done.returncode == 0, done.stderr
    started = log.read_text().splitlines()[-1]
    assert started.startswith("-m jupyter lab notebooks/00_start_here.ipynb")
    assert started.endswith("--no-browser --port 8899")
    assert ("--allow-root" in started) == (os.getuid() == 0)


def test_an_environment_of_ones_own_is_given_only_what_it_lacks(clone, recorder):
    program, log = recorder
    assert make(clone, "lab", "VENV=none", f"PYTHON={program}").returncode == 0
    assert log.read_text().splitlines()[0] == "course_lib/bootstrap.py missing requirements.txt"
    assert "pip install" not in log.read_text() and not (clone / ".venv").exists()


def test_an_environment_that_is_there_already_is_used(clone, recorder):
    program, log = recorder
    python = clone / "mine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    shutil.copy(program, python)
    assert make(clone, "lab", "VENV=mine").returncode == 0
    calls = log.read_text().splitlines()
    assert calls[0].startswith("-m pip install") and calls[1].startswith("-m jupyter lab")
    assert not any("bootstrap" in call for call in calls)


def test_jupyterlab_does_not_ask_about_its_news_and_settings_that_are_there_stay(clone, recorder):
    program, _ = recorder
    python = clone / "mine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    shutil.copy(program, python)
    assert make(clone, "lab", "VENV=mine").returncode == 0
    settings = clone / "mine" / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    assert json.loads(settings.read_text())["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    settings.write_text("{}")
    assert make(clone, "lab", "VENV=mine").returncode == 0 and settings.read_text() == "{}"
    assert make(clone, "lab", "VENV=none", f"PYTHON={program}").returncode == 0 and not (clone / ".venv").exists()


def test_what_the_pages_need_is_installed_only_when_they_are_asked_for(clone, recorder):
    program, log = recorder
    (clone / "solutions").mkdir()
    python = clone / "mine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    shutil.copy(program, python)
    assert make(clone, "lab", "VENV=mine").returncode == 0 and "requirements-site" not in log.read_text()
    assert make(clone, "site", "VENV=mine").returncode == 0
    *_, installed, built = log.read_text().splitlines()
    assert installed.startswith("-m pip install") and installed.endswith("-r requirements-site.txt")
    assert built.strip() == "-m course_lib site"
    assert make(clone, "site", "VENV=mine").returncode == 0 and log.read_text().count("requirements-site") == 1


def test_nothing_is_registered_outside_the_environment():
    recipe = (ROOT / "Makefile").read_text() + (ROOT / "course_lib" / "bootstrap.py").read_text()
    assert "--user" not in recipe and "kernelspec" not in recipe and "ipykernel install" not in recipe


def test_the_dev_container_runs_commands_that_exist():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    targets = re.findall(r"make (\w+)", json.dumps(container))
    assert set(targets) == {"install", "lab"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert ".venv/bin/python -m course_lib doctor" in container["postCreateCommand"]
    python = re.fullmatch(r".*/python:3\.(\d+)", container["image"])
    assert python and bootstrap.OLDEST <= (3, int(python[1])) <= bootstrap.NEWEST


# ---------------------------------------------------------------------------------------------------- the gate


@pytest.mark.parametrize("status", [0, 1])
def test_the_ci_keeps_the_status_and_ends_with_the_tests_own_line(tmp_path, status):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text(f"test:\n\t@echo '=== 3 passed in 1 s ==='; exit {status}\n")
    done = run("/", tmp_path / ".ci" / "run")
    assert (done.returncode == 0) == (status == 0)
    assert done.stdout.splitlines()[-1] == "=== 3 passed in 1 s ===" and done.stderr == ""


def test_the_ci_does_not_hide_a_make_that_could_not_run(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text("other:\n")
    done = run("/", tmp_path / ".ci" / "run")
    assert done.returncode != 0 and "No rule to make target" in done.stdout


@pytest.fixture
def chapters(clone):
    (clone / "solutions").mkdir()
    for name in ("03_online_softmax", "04_triton_tiling"):
        (clone / "solutions" / f"{name}.py").write_text("")
    return clone


def test_a_chapters_author_runs_its_notebooks_its_submissions_and_the_rules(chapters, recorder):
    program, log = recorder
    done = make(chapters, "test", "CHAPTER=04", "VENV=none", f"PYTHON={program}")
    assert done.returncode == 0, done.stderr
    built, run = [line for line in log.read_text().splitlines() if "bootstrap" not in line]
    assert built == "-m course_lib build --solved --out build/solved 04"
    assert "--chapter 04" in run and "03_online" not in run and "--sampled" not in run
    for part in ("notebooks/04_triton_tiling.ipynb", "build/solved/04_triton_tiling.ipynb", "tests/submissions"):
        assert f" {part}" in run
    for part in ("tests/notebooks", "tests/test_style.py", "tests/test_imports.py"):
        assert f" {part}" in run and (ROOT / part).exists()


def test_without_a_chapter_everything_is_run(chapters, recorder):
    program, log = recorder
    assert make(chapters, "test", "VENV=none", f"PYTHON={program}").returncode == 0
    run = log.read_text().splitlines()[-1]
    assert run.endswith(" tests notebooks build/solved") and "--chapter" not in run and " --sampled " in run
    assert make(chapters, "test-all", "VENV=none", f"PYTHON={program}").returncode == 0
    run = log.read_text().splitlines()[-1]
    assert run.endswith(" tests notebooks build/solved") and "--sampled" not in run and " --record " in run


@pytest.mark.parametrize("chapter", ["77", "4", "triton"])
def test_a_chapter_that_does_not_exist_is_refused_in_words_before_anything_runs(chapters, recorder, chapter):
    program, log = recorder
    done = make(chapters, "test", f"CHAPTER={chapter}", "VENV=none", f"PYTHON={program}")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    assert done.returncode != 0 and log.read_text() == ""
    assert said == [f"There is no chapter {chapter}. CHAPTER takes one of these: 03 04."]


@pytest.mark.slow
def test_a_chapter_leaves_out_the_tests_of_other_chapters_and_no_general_one():
    def collected(*arguments):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
        done = run(ROOT, *command, "tests/submissions", "tests/notebooks")
        return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}

    every, fourth = collected(), collected("--chapter", "04")
    about = {name for name in every if re.search(r"\[(4\.\d|04[_\]])", name)}
    general = {name for name in every if "[" not in name}
    assert about and general and fourth == about | general


# ---------------------------------------------------------------------------------------------------- requirements


def requirements(name):
    return [
        Requirement(line)
        for line in map(str.strip, (ROOT / name).read_text().splitlines())
        if line and not line.startswith(("#", "-r"))
    ]


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_what_the_tests_run_on_lies_within_the_ranges(name):
    for requirement in requirements(name):
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(importlib.metadata.version(requirement.name)), str(requirement)


# What PyTorch's CUDA wheels for Linux pin, read from their metadata on the package index.
TRITON_OF = {"2.9": "3.5", "2.10": "3.6", "2.11": "3.6", "2.12": "3.7", "2.13": "3.7"}


def outermost(requirement, versions):
    """The first and the last of these versions that lie within a requirement."""
    within = [version for version in versions if requirement.specifier.contains(f"{version}.0")]
    return within[0], within[-1]


def test_the_oldest_and_the_newest_torch_bring_a_triton_that_is_allowed_too():
    """Once the ranges said torch from 2.9 and Triton from 3.6 on: torch 2.9 pins 3.5, so no pip found both."""
    wanted = {requirement.name: requirement for requirement in requirements("requirements.txt")}
    oldest, newest = outermost(wanted["torch"], TRITON_OF)
    assert str(wanted["torch"].specifier) in (f">={oldest},<2.14", f"<2.14,>={oldest}"), "a torch that TRITON_OF lacks"
    for torch in (oldest, newest):
        assert wanted["triton"].specifier.contains(f"{TRITON_OF[torch]}.0"), f"torch {torch} pins {TRITON_OF[torch]}"
    assert f">={TRITON_OF[oldest]}" in str(wanted["triton"].specifier), "the oldest Triton comes with the oldest torch"
    before = list(TRITON_OF)[list(TRITON_OF).index(oldest) - 1]
    assert not wanted["triton"].specifier.contains(f"{TRITON_OF[before]}.0"), f"torch {before} could be allowed too"


def test_every_requirement_has_a_floor_and_a_ceiling():
    for requirement in itertools.chain.from_iterable(map(requirements, REQUIREMENTS)):
        assert {specifier.operator for specifier in requirement.specifier} == {">=", "<"}, str(requirement)


def test_learners_do_not_install_the_instructors_or_the_maintainers_tools():
    learners = {requirement.name for requirement in requirements("requirements.txt")}
    for name in REQUIREMENTS[1:]:
        assert learners.isdisjoint(requirement.name for requirement in requirements(name))


def test_what_is_missing_is_read_from_the_same_lines():
    every = bootstrap.requirements(str(ROOT / "requirements-dev.txt"))
    assert {name for name, _ in every} == {
        requirement.name
        for file in REQUIREMENTS
        for requirement in requirements(file)
        if requirement.marker is None or requirement.marker.evaluate()
    }
    assert all(str(Requirement(text)) for _, text in every)
