"""What an exercise needs, as data, and the sentence for a machine that lacks it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from course_lib.checker import ANY, HOPPER, HOPPER_AND_LATER, NVIDIA, TRITON, CourseError, FasterThan, Needs
from course_lib.checker.judge.decide import judge
from course_lib.checker.specification import catalog
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.needs import missing
from tests.checker.samples import DOUBLE


def gpu(name, capability, count=1):
    tier = "hopper" if capability >= (9, 0) else "nvidia"
    return SimpleNamespace(
        tier=tier, name=name, compute_capability=capability, gpu_count=count, triton="3.9", reason="sm_90"
    )


CPU = SimpleNamespace(
    tier="none", name="a CPU", compute_capability=None, gpu_count=0, triton="3.9", reason="No driver is there."
)
VOLTA = SimpleNamespace(**{**vars(CPU), "compute_capability": (7, 0), "gpu_count": 8, "reason": "V100 is sm_70."})
MAC = SimpleNamespace(**{**vars(CPU), "triton": None})
T4, A100 = gpu("Tesla T4", (7, 5)), gpu("NVIDIA A100", (8, 0))
H100, B200, H100S = gpu("NVIDIA H100", (9, 0)), gpu("NVIDIA B200", (10, 0)), gpu("NVIDIA H100", (9, 0), count=8)


MACHINES = {
    "CPU": CPU,
    "Mac": MAC,
    "Volta": VOLTA,
    "T4": T4,
    "A100": A100,
    "H100": H100,
    "B200": B200,
    "8 H100": H100S,
}


@pytest.mark.parametrize(
    "needs, enough",
    [
        (ANY, {*MACHINES}),
        (TRITON, {*MACHINES} - {"Mac"}),
        (NVIDIA, {"T4", "A100", "H100", "B200", "8 H100"}),
        (HOPPER, {"H100", "8 H100"}),
        (HOPPER_AND_LATER, {"H100", "8 H100", "B200"}),
        (Needs(capability=(8, 0)), {"A100", "H100", "8 H100", "B200"}),
        (Needs(gpus=2), {"8 H100"}),
        (Needs(packages=("json", "torch.nn")), {*MACHINES}),
    ],
)
def test_a_machine_that_has_what_is_needed_lacks_nothing_and_no_other(needs, enough):
    assert {name for name, here in MACHINES.items() if missing(needs, here) is None} == enough


@pytest.mark.parametrize(
    "needs, here, words",
    [
        (
            HOPPER,
            CPU,
            "This exercise needs a Hopper GPU (H100, H200: compute capability 9.0, which alone has wgmma); this "
            "machine has a CPU.",
        ),
        (
            HOPPER,
            B200,
            "This exercise needs a Hopper GPU (H100, H200: compute capability 9.0, which alone has wgmma); this "
            "machine has NVIDIA B200, of compute capability 10.0.",
        ),
        (
            HOPPER_AND_LATER,
            A100,
            "This exercise needs a GPU of compute capability 9.0 or later (H100, H200, B200, RTX 50); this machine has "
            "NVIDIA A100, of compute capability 8.0.",
        ),
        (
            NVIDIA,
            CPU,
            "This exercise needs an NVIDIA GPU (T4 or newer, as in Colab); this machine has none that works. No driver "
            "is there.",
        ),
        (TRITON, MAC, "This exercise needs Triton, which exists for Linux only. Use Linux, WSL2 or Colab."),
        (Needs(gpus=2), H100, "This exercise needs 2 NVIDIA GPUs in one machine; this machine has 1."),
        (
            Needs(gpus=2),
            VOLTA,
            "This exercise needs 2 NVIDIA GPUs in one machine; this machine has none that works. V100 is sm_70.",
        ),
        (
            Needs(exact=(10, 0)),
            H100,
            "This exercise needs a Blackwell GPU (B200: compute capability 10.0, and no other); this machine has "
            "NVIDIA H100, of compute capability 9.0.",
        ),
        (
            Needs(exact=(8, 0)),
            T4,
            "This exercise needs an Ampere GPU (A100: compute capability 8.0, and no other); this machine has Tesla "
            "T4, of compute capability 7.5.",
        ),
        (
            Needs(exact=(13, 7)),
            T4,
            "This exercise needs a GPU of compute capability 13.7 and no other; this machine has Tesla T4, of compute "
            "capability 7.5.",
        ),
        (
            Needs(packages=("torch", "no_such_package")),
            CPU,
            "This exercise needs the Python package `no_such_package`, which this machine does not have. Install it, "
            "and restart the notebook's kernel.",
        ),
        (
            Needs(triton=True, packages=("no_such", "no.such")),
            MAC,
            "This exercise needs Triton, which exists for Linux only. Use Linux, WSL2 or Colab. It also needs the "
            "Python packages `no_such`, `no.such`, which this machine does not have. Install them, and restart the "
            "notebook's kernel.",
        ),
    ],
)
def test_what_is_missing_is_said_in_words(needs, here, words):
    assert missing(needs, here) == words


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"triton": "yes"}, "triton='yes'"),
        ({"gpus": -1}, "gpus=-1"),
        ({"gpus": True}, "gpus=True"),
        ({"gpus": 1.0}, "gpus=1.0"),
        ({"capability": 90}, "capability=90; a compute capability is a pair such as (9, 0)"),
        ({"exact": (9,)}, "exact=(9,)"),
        ({"exact": "sm_90"}, "exact='sm_90'"),
        ({"exact": (9, 0), "capability": (8, 0)}, "capability and exact together"),
        ({"packages": "flash_attn"}, "packages='flash_attn'"),  # the comma that makes a tuple is missing
        ({"packages": ("flash-attn",)}, "a tuple of names to import"),
        ({"packages": (1,)}, "packages=(1,)"),
    ],
)
def test_needs_that_say_nothing_are_refused(wrong, words):
    with pytest.raises(CourseError) as refused:
        Needs(**wrong)
    assert words in str(refused.value)


def test_a_word_is_no_needs():
    with pytest.raises(CourseError, match="Exercise 90.2: needs='triton'; it must be a `Needs`"):
        replace(DOUBLE, needs="triton")


def test_a_package_that_is_missing_makes_an_exercise_unsupported_and_nothing_runs():
    verdict = judge(
        replace(DOUBLE, needs=Needs(packages=("no_such_package",))),
        "import os\nos._exit(3)\ndef double(x):\n    return 2 * x\n",
    )
    assert verdict.outcome == "unsupported" and "`no_such_package`" in verdict.message


def test_a_package_is_looked_for_and_not_run(tmp_path, monkeypatch):
    (tmp_path / "says_something.py").write_text("raise SystemExit('it was run')")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing(Needs(packages=("says_something",)), CPU) is None


FASTER = [
    task
    for task in catalog.exercises().values()
    if any(isinstance(requirement, FasterThan) for requirement in task.requirements)
]


@pytest.mark.parametrize("task", FASTER, ids=[task.id for task in FASTER])
def test_an_exercise_about_speed_has_a_timed_case_on_a_gpu(task):
    """Without one its requirement would be met by every answer."""
    timed = [case.timed for case in task.cases(Draw(5, on_gpu=True, bfloat16=True))]
    assert sum(timed) == 1
    assert not any("timed" in case.name for case in task.cases(Draw(5)))
