"""The doctor's judgement: from facts about a machine to findings, each with what to do about it.

Nothing is looked up here, so every kind of machine can be put before it.
"""

import dataclasses
import re
import sys

from course_lib.bootstrap import NEWEST, OLDEST, numbers
from course_lib.hardware.device import HOPPER_CAPABILITY, Machine
from course_lib.hardware.units import format_bandwidth, format_capacity, format_flop_rate

TORCHES = ((2, 10), (2, 13))
TRITONS = ((3, 6), (3, 9))
REINSTALL = "This Python's -m pip install -r requirements.txt; or make lab, in an environment of its own."
SMALL_SHARED_MEMORY = 99 * 1024  # of one program; below this the largest tiles of the course do not fit


@dataclasses.dataclass(frozen=True)
class Line:
    """One finding. status: "ok", "note" (good to know), "warning" (something may fail), "problem" (something does)."""

    status: str
    subject: str
    finding: str
    action: str = ""  # what to do about it; empty when there is nothing to do


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What the doctor looks at beside the machine itself."""

    interpreting: bool
    interpret_variable: str | None  # TRITON_INTERPRET as it is set
    imported_too_early: bool
    interpreter_repaired: bool
    triton_wanted: str | None  # the Triton that the installed PyTorch was released with, "3.6.0"
    numpy: str | None
    c_compiler: str | None
    python_header: bool  # whether Python.h is there
    missing_packages: tuple[str, ...]
    own_python: str | None  # the Python of the course's .venv, where that is there and another one runs
    colab: bool
    home: str
    home_problem: str | None
    ceilings: object | None  # remembered `Ceilings`, None when not measured yet


def examine(machine: Machine, around: Surroundings) -> tuple[Line, ...]:
    """Every finding on a machine and its surroundings, the most telling first."""
    checks = (
        check_tier,
        check_gpu,
        check_interpreter,
        check_torch,
        check_triton,
        check_python,
        check_shared_memory,
        check_dtypes,
        check_c_compiler,
        check_cpu,
        check_packages,
        check_home,
        check_ceilings,
    )
    return tuple(line for check in checks if (line := check(machine, around)) is not None)


def pair(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "2.13.0+cpu"."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def span(versions: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """ "3.6 to 3.9"."""
    return " to ".join(".".join(map(str, version)) for version in versions)


def how_to_install(around: Surroundings) -> str:
    """What gets whatever is missing, in one line."""
    if around.colab:
        return "Run the notebook's first cell: it installs what Colab lacks."
    if around.own_python:
        return f"This is not the course's own Python: use {around.own_python}, where make lab installs."
    return "make lab, which installs it in .venv; or this Python's -m pip install -r requirements.txt."


def check_tier(machine, around) -> Line:
    if machine.torch is None:
        return Line("problem", "What works", "nothing yet, because PyTorch is missing", how_to_install(around))
    later = machine.compute_capability is not None and machine.compute_capability > HOPPER_CAPABILITY
    works = {
        "hopper": "real kernels, FP8: every chapter but what Hopper alone can run (wgmma)"
        if later
        else "real kernels, Hopper's own features, FP8: every chapter",
        "nvidia": "real kernels: every chapter but those on Hopper's own features",
        "none": "every notebook and check but those about speed; kernels run in Triton's interpreter, slowly",
    }
    return Line("ok" if machine.tier != "none" else "note", "What works", works[machine.tier])


def check_gpu(machine, around) -> Line:
    if machine.tier != "none":
        memory = format_capacity(machine.memory_bytes)
        others = f"; the first of {machine.gpu_count}" if machine.gpu_count > 1 else ""
        finding = f"{machine.gpu_name}, {machine.reason}, {machine.sm_count} multiprocessors, {memory}{others}"
        return Line("ok", "GPU", finding)
    if "TRITON_INTERPRET" in machine.reason:
        return Line("note", "GPU", f"{machine.gpu_name}: {machine.reason}", "Unset TRITON_INTERPRET to use the GPU.")
    if machine.gpu_name is None and "fails" not in machine.reason:
        action = "Nothing, or open the course on Colab with a T4."
        if around.colab:
            action = "Nothing, or choose a T4: Runtime, Change runtime type; then run the notebook from the top."
        return Line("note", "GPU", f"none: {machine.reason}", action)
    if "older than the CUDA" in machine.reason:
        action = f"Update the NVIDIA driver, or install a PyTorch built for CUDA {machine.driver[0]}.x."
    elif "without CUDA" in machine.reason:
        action = "Install a CUDA build of PyTorch (pytorch.org/get-started), if you want the GPU used."
    elif machine.compute_capability is not None:
        action = "The course falls back to the interpreter. For real kernels use a T4, an RTX 20 card or later."
    else:
        action = "Run nvidia-smi; if it fails too, reinstall the driver or restart the machine."
    return Line("warning", "GPU", machine.reason, action)


def check_interpreter(machine, around) -> Line | None:
    if around.imported_too_early:
        return Line(
            "problem",
            "Interpreter",
            "Triton was imported before course_lib, set up for a GPU.",
            "Restart the notebook's kernel and import course_lib first.",
        )
    if not around.interpreting:
        if machine.tier == "none" and machine.triton is not None:
            return Line(
                "problem",
                "Interpreter",
                f"TRITON_INTERPRET={around.interpret_variable} turns it off, "
                "and there is no usable GPU: no kernel can run.",
                "Unset TRITON_INTERPRET and restart the notebook's kernel.",
            )
        return None
    if machine.triton is None:
        return None
    repaired = f"; repaired for NumPy {around.numpy}" if around.interpreter_repaired else ""
    return Line("ok", "Interpreter", f"on: float32 and float16, small shapes, about 0.5 ms a program{repaired}")


def check_torch(machine, around) -> Line:
    if machine.torch is None:
        return Line("problem", "PyTorch", "not installed")  # what to do is said where it says that nothing works
    build = f"for CUDA {machine.torch_cuda}" if machine.torch_cuda else "without CUDA"
    finding = f"{machine.torch}, built {build}"
    if not TORCHES[0] <= pair(machine.torch) <= TORCHES[1]:
        status = "problem" if pair(machine.torch) < TORCHES[0] else "warning"
        return Line(status, "PyTorch", f"{finding}; the course is tested with {span(TORCHES)}", REINSTALL)
    return Line("ok", "PyTorch", finding)


def check_triton(machine, around) -> Line:
    if machine.triton is None:
        if machine.system == "Linux":
            return Line("problem", "Triton", "not installed", how_to_install(around) if machine.torch else "")
        system = {"Darwin": "macOS"}.get(machine.system, machine.system)
        action = (
            "Use WSL 2 (Linux inside Windows), Colab or a Linux machine"
            if system == "Windows"
            else "Use Colab, a Linux machine or a Linux container"
        )
        return Line(
            "problem",
            "Triton",
            f"has no package for {system}; chapters without kernels of yours still run",
            f"{action} for the Triton exercises.",
        )
    wanted = around.triton_wanted
    if not TRITONS[0] <= pair(machine.triton) <= TRITONS[1]:
        return Line(
            "problem" if pair(machine.triton) < TRITONS[0] else "warning",
            "Triton",
            f"{machine.triton}; the course is tested with {span(TRITONS)}",
            f'pip install "triton=={wanted}"' if wanted and TRITONS[0] <= pair(wanted) <= TRITONS[1] else REINSTALL,
        )
    if wanted and pair(wanted) != pair(machine.triton):
        return Line(
            "warning",
            "Triton",
            f"{machine.triton}, but PyTorch {machine.torch} was released with {wanted}; torch.compile may fail",
            f'pip install "triton=={wanted}"',
        )
    return Line("ok", "Triton", machine.triton)


def check_python(machine, around) -> Line:
    if numbers(machine.python) < [*OLDEST] or pair(machine.python) > NEWEST:
        return Line(
            "warning",
            "Python",
            f"{machine.python}; the course is tested with {span((OLDEST, NEWEST))}",
            "Make an environment with one of those: make lab VENV=another-folder PYTHON=python3.12.",
        )
    return Line("ok", "Python", f"{machine.python} at {sys.executable}")


def check_shared_memory(machine, around) -> Line | None:
    if machine.tier == "none":
        return None
    size = machine.shared_memory_per_block_bytes
    if size < SMALL_SHARED_MEMORY:
        return Line(
            "note",
            "Shared memory",
            f"{format_capacity(size)} for a program: kernels take smaller tiles here",
            "Nothing; your own tiles must fit it too.",
        )
    return Line("ok", "Shared memory", f"{format_capacity(size)} for a program")


def check_dtypes(machine, around) -> Line | None:
    if machine.tier == "none":
        return (
            Line(
                "note",
                "bfloat16",
                "not for kernels here: the interpreter computes wrong numbers with it",
                "Nothing; checks use float32 and float16.",
            )
            if around.interpreting
            else None
        )
    if machine.compute_capability < (8, 0):
        return Line("note", "bfloat16", "this GPU has none", "Nothing; checks use float16 instead.")
    return Line("ok", "bfloat16", "yes" + (", and FP8" if machine.compute_capability >= (8, 9) else ""))


def check_c_compiler(machine, around) -> Line | None:
    """Triton builds what launches a kernel in C, from a source that includes Python.h."""
    if machine.tier == "none" or around.c_compiler and around.python_header:
        return None
    header = f"python{'.'.join(machine.python.split('.')[:2])}-dev"
    if around.c_compiler:
        return Line(
            "problem",
            "Python.h",
            "not found; Triton builds each kernel's launcher with it",
            f"apt-get install {header}; or an environment of conda or uv, which has it.",
        )
    packages = "gcc" if around.python_header else f"gcc {header}"
    return Line(
        "problem",
        "C compiler",
        "none found; Triton builds each kernel's launcher with one",
        f"apt-get install {packages}; or name a compiler in CC.",
    )


def check_cpu(machine, around) -> Line:
    memory = format_capacity(machine.memory_bytes) if machine.tier == "none" and machine.memory_bytes else None
    finding = f"{machine.cpu_name}, {machine.cpu_cores} cores" + (f", {memory}" if memory else "")
    if machine.cpu_cores < 2:
        return Line("note", "CPU", finding, "Checks take their time: the worker shares the core with the notebook.")
    return Line("ok", "CPU", finding)


def check_packages(machine, around) -> Line | None:
    """PyTorch and Triton have lines of their own."""
    if not around.missing_packages:
        return None
    return Line(
        "warning",
        "Packages",
        f"missing: {', '.join(around.missing_packages)}",
        how_to_install(around) if machine.torch else "",
    )


def check_home(machine, around) -> Line:
    if around.home_problem:
        return Line("problem", "Your work", around.home_problem, "Set COURSE_HOME to a folder that you can write to.")
    return Line("ok", "Your work", f"is kept in {around.home}")


def check_ceilings(machine, around) -> Line:
    found = around.ceilings
    if found is None:
        return Line("note", "Ceilings", "not measured yet", "Chapter 01 does; or python -m course_lib bench memory.")
    best = max(found.matmul_rate, key=found.matmul_rate.get)
    return Line(
        "ok",
        "Ceilings",
        f"copy {format_bandwidth(found.copy_bandwidth)}, {best} matmul "
        f"{format_flop_rate(found.matmul_rate[best])}, measured {found.measured_at[:10]}",
    )
