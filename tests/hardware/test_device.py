"""The tier: decided before Triton is imported, from what the driver says, and explained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.hardware import device, gpu_probe

ROOT = Path(__file__).resolve().parents[2]
H100 = {
    "name": "NVIDIA H100",
    "capability_major": 9,
    "capability_minor": 0,
    "driver_cuda": [13, 0],
    "gpu_count": 1,
    "sm_count": 132,
    "memory_bytes": 80 * 2**30,
}


def run_python(code: str, **variables) -> str:
    """The output of a fresh Python, with TRITON_INTERPRET as given or not set at all."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


# course_lib without its __init__, which decides the tier of the real machine at once.
UNDECIDED = (
    "import sys, types\n"
    "package = types.ModuleType('course_lib'); package.__path__ = ['course_lib']; sys.modules['course_lib'] = package\n"
    "from course_lib.hardware import device\n"
)
SHOW = "print(device.interpreting(), device.default_device(), device.machine().tier)\n"


def pretend(facts: dict) -> str:
    """Code that puts a machine with these facts, and a PyTorch for CUDA 13, in the place of this one."""
    return f"{UNDECIDED}device.gpu_facts = lambda: {facts!r}\ndevice.torch_build = lambda: ('2.11.0', '13.0')\n"


def test_a_usable_gpu_is_accepted():
    assert device.judge_gpu(H100, torch_cuda="13.0") is None


@pytest.mark.parametrize(
    "facts, torch_cuda, words",
    [
        ({"missing": "no NVIDIA driver is installed here"}, "13.0", "no NVIDIA driver"),
        ({"error": "cuInit: unknown error (CUDA error 999)"}, "13.0", "CUDA error 999"),
        (H100 | {"capability_major": 7, "name": "Tesla V100"}, "13.0", "V100 is sm_70"),
        (H100, None, "built without CUDA"),
        (H100 | {"driver_cuda": [12, 8]}, "13.0", "serves CUDA 12.8, older than the CUDA 13.0"),
    ],
    ids=["no driver", "driver fails", "V100", "CPU build of torch", "old driver"],
)
def test_an_unusable_gpu_gets_a_reason(facts, torch_cuda, words):
    assert words in device.judge_gpu(facts, torch_cuda)


def test_a_driver_of_the_same_major_version_is_new_enough():
    assert device.judge_gpu(H100 | {"driver_cuda": [13, 0]}, torch_cuda="13.2") is None


def test_turing_is_the_oldest_that_is_used():
    assert device.judge_gpu(H100 | {"capability_major": 7, "capability_minor": 5}, torch_cuda="12.6") is None


def test_without_a_gpu_the_interpreter_is_chosen_before_triton_is_imported():
    assert run_python(pretend({"missing": "none"}) + "device.prepare_triton()\n" + SHOW) == "True cpu none"


def test_a_usable_gpu_leaves_the_compiler_on():
    assert run_python(pretend(H100) + "device.prepare_triton()\n" + SHOW) == "False cuda hopper"


@pytest.mark.parametrize("chosen, expected", [("1", "True cpu none"), ("0", "False cuda hopper")])
def test_the_users_own_setting_is_respected(chosen, expected):
    code = pretend(H100) + "device.prepare_triton()\n" + SHOW
    assert run_python(code, TRITON_INTERPRET=chosen) == expected


def test_bfloat16_and_float8_follow_the_generation():
    code = (
        f"{pretend(H100)}"
        "for capability in ((7, 5), (8, 0), (8, 9), (9, 0)):\n"
        f"    device.gpu_facts = lambda: {H100!r} | dict(zip(('capability_major', 'capability_minor'), capability))\n"
        "    device.machine.cache_clear()\n"
        "    print(device.machine().tier, device.supports_bfloat16(), device.supports_float8())\n"
    )
    assert run_python(code).splitlines() == [
        "nvidia False False",
        "nvidia True False",
        "nvidia True True",
        "hopper True True",
    ]


def test_triton_imported_too_early_is_noticed_and_said():
    code = (
        "import warnings, triton\n"
        + pretend({"missing": "none"})
        + "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always'); device.prepare_triton(); device.prepare_triton()\n"
        "print(device.triton_imported_too_early(), 'Restart' in str(caught[0].message))"
    )
    assert run_python(code) == "True True"


def test_triton_imported_in_time_is_no_complaint():
    code = pretend({"missing": "none"}) + (
        "device.prepare_triton()\nimport triton\ndevice.prepare_triton(); print(device.triton_imported_too_early())"
    )
    assert run_python(code) == "False"


def test_deciding_does_not_import_triton_nor_initialise_cuda():
    code = pretend({"missing": "none"}) + (
        "device.prepare_triton()\nimport sys, torch; print('triton' in sys.modules, torch.cuda.is_initialized())"
    )
    assert run_python(code) == "False False"


def test_the_probe_answers_in_json_on_any_machine():
    command = [sys.executable, "-I", "-S", gpu_probe.__file__]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert {"name", "missing", "error"} & json.loads(answer.stdout).keys()


def test_a_probe_that_dies_is_a_reason_and_no_crash(monkeypatch):
    device.gpu_facts.cache_clear()
    monkeypatch.setattr(device.sys, "executable", "/nowhere/python")
    try:
        assert "could not be asked" in device.gpu_facts()["error"]
    finally:
        monkeypatch.undo()
        device.gpu_facts.cache_clear()


class FakeDriver:
    """A driver whose every call returns `status`."""

    def __init__(self, status):
        self.status = status

    def cuGetErrorString(self, status, pointer):
        return 1

    def __getattr__(self, name):
        return lambda *arguments: self.status


def test_a_failing_driver_call_is_named():
    with pytest.raises(gpu_probe.DriverError, match="cuInit.*CUDA error 803"):
        gpu_probe.describe_first_gpu(FakeDriver(803))


def test_a_driver_without_devices_is_named():
    with pytest.raises(gpu_probe.DriverError, match="shows no device"):
        gpu_probe.describe_first_gpu(FakeDriver(0))


def test_the_machines_facts_are_of_this_machine():
    found = device.machine()
    assert found.cpu_cores >= 1 and found.cpu_name
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.memory_bytes > 2**28
    assert device.machine() is found


def test_the_interpreter_is_repaired_only_on_the_pair_that_needs_it(monkeypatch):
    from course_lib.hardware.meter import interpreter

    for triton_version, numpy_version, needed in (
        ((3, 6), (2, 4), True),
        ((3, 6), (2, 3), False),
        ((3, 7), (2, 5), False),
        (None, (2, 5), False),
    ):
        versions = {"triton": triton_version, "numpy": numpy_version}
        monkeypatch.setattr(interpreter, "version_pair", versions.get)
        assert interpreter.needs_repair() is needed
