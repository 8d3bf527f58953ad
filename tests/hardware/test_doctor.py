"""The doctor: every kind of machine gets its findings, each trouble what to do about it."""

import dataclasses
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from course_lib.bootstrap import requirements
from course_lib.hardware.device import Machine
from course_lib.hardware.doctor import report as doctor
from course_lib.hardware.doctor.checks import TORCHES, TRITONS, Surroundings, examine
from course_lib.home import ROOT

H100 = Machine(
    tier="hopper",
    reason="sm_90, CUDA 13.0",
    gpu_name="NVIDIA H100",
    compute_capability=(9, 0),
    gpu_count=1,
    sm_count=132,
    shared_memory_per_block_bytes=232448,
    shared_memory_per_sm_bytes=233472,
    registers_per_sm=65536,
    l2_bytes=50 * 2**20,
    memory_bytes=80 * 2**30,
    driver=(13, 0),
    cpu_name="Xeon",
    cpu_cores=8,
    cpu_caches=(),
    system="Linux",
    python="3.12.3",
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    triton="3.6.0",
)
FINE = Surroundings(
    interpreting=False,
    interpret_variable=None,
    imported_too_early=False,
    interpreter_repaired=False,
    triton_wanted="3.6.0",
    numpy="2.3.1",
    c_compiler="/usr/bin/gcc",
    python_header=True,
    missing_packages=(),
    own_python=None,
    colab=False,
    home="/course/.course",
    home_problem=None,
    ceilings=None,
)
NO_GPU = dataclasses.replace(
    H100,
    tier="none",
    reason="no NVIDIA driver is installed here",
    gpu_name=None,
    compute_capability=None,
    gpu_count=0,
    driver=None,
    torch="2.13.0+cpu",
    torch_cuda=None,
    triton="3.9.0",
)
INTERPRETING = dataclasses.replace(FINE, interpreting=True, interpret_variable="1", triton_wanted=None)


def find(subject, machine=H100, around=FINE, **changes):
    """The line on a subject, after changing fields of the machine or of its surroundings."""
    for name, value in changes.items():
        if name in {field.name for field in dataclasses.fields(Machine)}:
            machine = dataclasses.replace(machine, **{name: value})
        else:
            around = dataclasses.replace(around, **{name: value})
    return next((line for line in examine(machine, around) if line.subject == subject), None)


def test_a_healthy_hopper_has_nothing_to_do():
    lines = examine(H100, FINE)
    assert {line.status for line in lines if line.subject != "Ceilings"} == {"ok"}
    assert not [line.action for line in lines if line.subject != "Ceilings" and line.action]


def test_a_blackwell_is_not_told_that_it_is_a_hopper():
    assert find("What works").finding.endswith("every chapter")
    later = find("What works", gpu_name="NVIDIA B200", compute_capability=(10, 0)).finding
    assert "every chapter but what Hopper alone can run" in later


def test_a_machine_without_a_gpu_is_no_problem():
    report = doctor.Report(examine(NO_GPU, INTERPRETING))
    assert report.healthy
    assert "interpreter" in report.text


@pytest.mark.parametrize(
    "subject, status, action, changes",
    [
        (
            "GPU",
            "warning",
            "Update the NVIDIA driver",
            {"tier": "none", "driver": (12, 4), "reason": "serves CUDA 12.4, older than the CUDA 13.0"},
        ),
        ("GPU", "warning", "CUDA build", {"tier": "none", "reason": "H100 is there, but built without CUDA"}),
        (
            "GPU",
            "warning",
            "T4",
            {"tier": "none", "reason": "Tesla V100 is sm_70; Triton needs sm_75", "compute_capability": (7, 0)},
        ),
        (
            "GPU",
            "warning",
            "nvidia-smi",
            {
                "tier": "none",
                "gpu_name": None,
                "compute_capability": None,
                "reason": "the NVIDIA driver is there but fails: cuInit",
            },
        ),
        ("GPU", "note", "Unset TRITON_INTERPRET", {"tier": "none", "reason": "TRITON_INTERPRET is set, so ..."}),
        ("Interpreter", "problem", "import course_lib first", {"imported_too_early": True}),
        ("Interpreter", "problem", "Unset", {"tier": "none", "interpret_variable": "0"}),
        ("Triton", "problem", "Colab", {"triton": None, "system": "Darwin"}),
        ("Triton", "problem", "WSL", {"triton": None, "system": "Windows"}),
        ("Triton", "problem", "make lab", {"triton": None}),
        ("Triton", "warning", "triton==3.6.0", {"triton": "3.7.1"}),
        ("Triton", "problem", "triton==3.6.0", {"triton": "3.2.0"}),
        ("Triton", "warning", "triton==3.6.0", {"triton": "3.12.0"}),
        # What torch 2.9 itself asks for is no Triton of the course's: it is not recommended.
        ("Triton", "problem", "make lab", {"triton": "3.5.0", "triton_wanted": "3.5.0"}),
        ("PyTorch", "problem", "requirements.txt", {"torch": "2.5.1"}),
        ("PyTorch", "warning", "requirements.txt", {"torch": "2.19.0"}),
        ("PyTorch", "problem", "requirements.txt", {"torch": "2.9.1"}),
        ("What works", "problem", "make lab", {"torch": None}),
        ("What works", "problem", ".venv/bin/python", {"torch": None, "own_python": ".venv/bin/python"}),
        ("What works", "problem", "first cell", {"torch": None, "colab": True}),
        (
            "GPU",
            "note",
            "Change runtime type",
            {"tier": "none", "gpu_name": None, "reason": "no NVIDIA driver is installed here", "colab": True},
        ),
        ("Python", "warning", "environment", {"python": "3.9.18"}),
        ("Python", "warning", "environment", {"python": "3.10.9"}),
        ("Python", "warning", "environment", {"python": "3.14.0"}),
        ("Shared memory", "note", "tiles", {"shared_memory_per_block_bytes": 65536}),
        ("bfloat16", "note", "float16", {"compute_capability": (7, 5)}),
        ("C compiler", "problem", "apt-get install gcc;", {"c_compiler": None}),
        ("C compiler", "problem", "gcc python3.12-dev;", {"c_compiler": None, "python_header": False}),
        ("Python.h", "problem", "apt-get install python3.12-dev", {"python_header": False}),
        ("Packages", "warning", "make lab", {"missing_packages": ("ipywidgets",)}),
        ("Packages", "warning", "first cell", {"missing_packages": ("jupytext",), "colab": True}),
        ("Your work", "problem", "COURSE_HOME", {"home_problem": "/course cannot be written to"}),
        ("Ceilings", "note", "bench memory", {}),
    ],
)
def test_each_trouble_is_told_with_what_to_do(subject, status, action, changes):
    line = find(subject, **changes)
    assert line.status == status
    assert action in line.action


def test_where_all_is_missing_what_to_do_is_said_once():
    """Three lines said it in three ways, and the first said that every notebook worked."""
    bare = dataclasses.replace(NO_GPU, torch=None, triton=None)
    lines = examine(bare, dataclasses.replace(INTERPRETING, missing_packages=("numpy", "jupytext")))
    assert [line.subject for line in lines if "make lab" in line.action] == ["What works"]
    assert {line.subject for line in lines if line.status == "problem"} == {"What works", "PyTorch", "Triton"}


def test_the_versions_are_those_that_the_requirements_allow():
    """PyTorch 2.9 passed for tested, and its Triton 3.5 for missing."""
    allowed = {name: Requirement(line).specifier for name, line in requirements(str(ROOT / "requirements.txt"))}
    for name, ((major, oldest), (_, newest)) in (("torch", TORCHES), ("triton", TRITONS)):
        tested = [minor for minor in range(40) if allowed[name].contains(f"{major}.{minor}.0")]
        assert tested == list(range(oldest, newest + 1))


def test_another_python_than_the_courses_own_is_told_of_it(tmp_path, monkeypatch):
    assert doctor.own_python(tmp_path) is None
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    assert doctor.own_python(tmp_path) == ".venv/bin/python"
    monkeypatch.setattr(doctor.sys, "prefix", str(tmp_path / ".venv"))
    assert doctor.own_python(tmp_path) is None


def test_a_notebook_in_a_python_without_torch_is_told_which_kernel_to_choose(tmp_path, monkeypatch):
    """An editor's default kernel ended in "No module named 'torch'"."""
    assert doctor.kernel_refusal() is None
    monkeypatch.setitem(sys.modules, "torch", None)
    python = tmp_path / ".venv/bin/python"
    assert f"run `make install` in {tmp_path}, then choose {python}" in doctor.kernel_refusal(tmp_path)
    python.parent.mkdir(parents=True)
    python.touch()
    assert doctor.kernel_refusal(tmp_path).endswith(f"lacks PyTorch: choose {python} as its kernel.")
    code = "import IPython, sys; sys.modules['torch'] = None; import course_lib"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "ImportError: This notebook's Python" in done.stderr.splitlines()[-1]


def test_a_notebook_in_a_python_with_too_old_a_torch_is_told_both_versions(tmp_path, monkeypatch):
    """PyTorch 2.8 with Triton 3.4 went through, and failed later."""
    (tmp_path / "requirements.txt").write_text("torch>=2.10,<2.14\ntriton>=3.6,<3.10\n")
    monkeypatch.setattr("importlib.metadata.version", {"torch": "2.8.0+cu126", "triton": "3.6.0"}.__getitem__)
    refusal = doctor.kernel_refusal(tmp_path)
    assert "has torch 2.8.0+cu126, older than torch>=2.10,<2.14: run `make install`" in refusal
    monkeypatch.setattr("importlib.metadata.version", {"torch": "2.15.0", "triton": "3.6.0"}.__getitem__)
    assert doctor.kernel_refusal(tmp_path) is None


def test_what_a_first_launch_lacks_is_told_before_it(monkeypatch, tmp_path):
    """On a container without headers it ended in "fatal error: Python.h"."""
    monkeypatch.setattr(doctor.device, "machine", lambda: H100)
    monkeypatch.setattr(doctor, "python_header", lambda: tmp_path / "Python.h")
    monkeypatch.setattr(doctor, "c_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setattr(doctor.device, "interpreting", lambda: True)
    assert doctor.launcher_warning() is None
    monkeypatch.setattr(doctor.device, "interpreting", lambda: False)
    warning = doctor.launcher_warning()
    assert warning.startswith("Python.h: not found") and "apt-get install python3.12-dev" in warning
    assert "\n" not in warning
    (tmp_path / "Python.h").touch()
    assert doctor.launcher_warning() is None


def test_the_header_is_looked_for_where_triton_looks():
    assert doctor.python_header().name == "Python.h" and doctor.python_header().is_absolute()


def test_a_triton_that_differs_in_the_last_digit_only_is_fine():
    assert find("Triton", triton="3.6.1").status == "ok"


def test_the_interpreter_line_speaks_of_the_repair():
    assert "repaired for NumPy 2.3.1" in find("Interpreter", NO_GPU, INTERPRETING, interpreter_repaired=True).finding


@pytest.mark.parametrize("machine, around", [(H100, FINE), (NO_GPU, INTERPRETING)], ids=["hopper", "no gpu"])
def test_the_report_fits_one_screen(machine, around):
    text = doctor.Report(examine(machine, around)).text.splitlines()
    assert len(text) <= 24
    assert max(map(len, text)) <= 120


def test_the_table_in_a_notebook_escapes_what_it_shows():
    line = find("Your work", home_problem="<script>")
    assert "<script>" not in doctor.Report((line,))._repr_html_()


def test_this_machine_can_be_looked_at(capsys):
    assert doctor.main() in (0, 1)
    assert "PyTorch" in capsys.readouterr().out


def test_a_home_that_cannot_be_made_is_a_line_not_a_crash(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "file" / "home"))
    report = doctor.doctor()
    assert not report.healthy
    assert "COURSE_HOME" in report.text


def test_the_triton_that_torch_was_released_with_is_read_from_its_requirements(monkeypatch):
    lists = {
        "plain": ["filelock", 'triton==3.6.0; platform_system == "Linux"'],
        "old": ["pytorch-triton==3.5.1"],
        "cpu": ["filelock"],
    }
    for name, expected in (("plain", "3.6.0"), ("old", "3.5.1"), ("cpu", None)):
        monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _, name=name: lists[name])
        assert doctor.triton_wanted_by_torch() == expected
