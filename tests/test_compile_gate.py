"""The compile gate: every kernel at the configurations it ships with, for every architecture it names, with no GPU.

A module of `course_lib.kernels`, in whatever folder, that has kernels says how they ship:

    def compile_cases() -> list[CompileCase]: ...

and is held to it: each of its kernels is there, compiles, fits the architecture's shared memory, spills no more than it
admits, and uses the matrix instruction it names. A test is a few kernels of a module for one architecture, so that
xdist can spread them. Their time is limited in seconds of the processor (see `compile_many`): a busy machine fails
nothing here.
"""

import ast
import functools
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.compiler.kernel_source import name_of
from course_lib.hardware.compiler.views import compile_many

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "course_lib" / "kernels"
KERNELS_PER_TEST = 5

pytestmark = pytest.mark.timeout(3600)  # of the clock on the wall


# ------------------------------------------------------------------------------------------ which kernels there are


def jit_functions(path: Path) -> list[ast.FunctionDef]:
    return [
        function
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and any(is_jit(decorator) for decorator in function.decorator_list)
    ]


def is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(target) in ("triton.jit", "jit", "gluon.jit")


@functools.cache
def called_by_kernels(folder: Path) -> frozenset[str]:
    """Names that the folder's jit functions use: those of helpers among them."""
    functions = [function for path in folder.rglob("*.py") for function in jit_functions(path)]
    return frozenset(node.id for function in functions for node in ast.walk(function) if isinstance(node, ast.Name))


def kernels_of(path: Path, folder: Path | None = None) -> list[str]:
    """The jit functions that a launcher starts: those that return no value and that no other jit function calls."""
    return [
        function.name
        for function in jit_functions(path)
        if not any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(function))
        and function.name not in called_by_kernels(folder or KERNELS)
    ]


def files_of_the_gate() -> list[Path]:
    """Those that have kernels, and those that say how another file's kernel ships."""
    return sorted(p for p in KERNELS.rglob("*.py") if kernels_of(p) or "def compile_cases(" in p.read_text())


# --------------------------------------------------------------------------------------------- what each test compiles


@dataclass
class Unit:
    """What one test compiles; or, in a sentence, why a module cannot be let through."""

    name: str
    module: str
    asked: list[tuple[CompileCase, dict]] = field(default_factory=list)
    refused: str = ""


def units_of(path: Path) -> Iterator[Unit]:
    place = path.relative_to(ROOT)
    module = ".".join(place.with_suffix("").parts)
    short = module.removeprefix("course_lib.kernels.")
    try:
        cases = importlib.import_module(module).compile_cases()
        compiled = {name_of(case.kernel) for case in cases if case.archs}
    except Exception as error:
        yield Unit(short, module, refused=f"{place} does not say how its kernels ship: {type(error).__name__}: {error}")
        return
    left_out = [name for name in kernels_of(path) if name not in compiled]
    if left_out or not compiled:
        yield Unit(
            short, module, refused=f"compile_cases() of {place} lists no CompileCase for {', '.join(left_out) or 'it'}"
        )
    for arch in ARCHITECTURES:
        asked = [(case, request) for case in cases for request in case.requests() if request["arch"] == arch]
        for part, start in enumerate(range(0, len(asked), KERNELS_PER_TEST), start=1):
            number = f"-part_{part}" if len(asked) > KERNELS_PER_TEST else ""
            yield Unit(f"{short}-sm_{arch}{number}", module, asked[start : start + KERNELS_PER_TEST])


UNITS = [unit for path in files_of_the_gate() for unit in units_of(path)]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_kernels_compile_as_they_ship(unit):
    assert not unit.refused, unit.refused
    views = compile_many([request for _, request in unit.asked], jobs=1)
    problems = [
        problem for (case, request), view in zip(unit.asked, views) for problem in case.problems(view, request["arch"])
    ]
    assert not problems, "\n".join(problems)


# ----------------------------------------------------------------------------------------------- the gate can fail


def test_no_file_that_launches_a_kernel_is_left_out():
    """Found another way: by a name before the brackets of a launch, `add_kernel[grid](...)`."""
    launched = {
        node.func.value.id
        for path in KERNELS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.endswith("_kernel")
    }
    kernels = {name for path in files_of_the_gate() for name in kernels_of(path)}
    compiled = {name_of(case.kernel) for unit in UNITS for case, _ in unit.asked}
    assert kernels and launched and launched <= kernels == compiled


def test_every_configuration_of_every_module_is_in_exactly_one_test():
    cases = [case for path in files_of_the_gate() for case in module_of(path).compile_cases()]
    assert sum(len(unit.asked) for unit in UNITS) == sum(len(case.archs) for case in cases) > 200
    assert {request["arch"] for unit in UNITS for _, request in unit.asked} == set(ARCHITECTURES)
    assert len({unit.name for unit in UNITS}) == len(UNITS)


def module_of(path: Path):
    return importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


KERNEL = """
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase

@triton.jit
def twice(x):
    return 2 * x

@triton.jit
def write(target, value):
    tl.store(target, value)

@triton.jit(do_not_specialize=["count"])
def planted_kernel(source, target, count):
    for index in range(count):
        write(target + index, twice(tl.load(source + index)))
"""
CASES = """
def compile_cases():
    types = {"source": "*fp16", "target": "*fp16", "count": "i32"}
    return [CompileCase(planted_kernel, types, {}, archs=(75, 90), instruction=INSTRUCTION)]
"""


def test_a_kernel_planted_in_a_new_folder_is_compiled_and_one_that_lists_no_case_is_refused(tmp_path):
    """The whole gate, over a copy of the course with three files more; it once looked at no folder but the first."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "course_lib", tmp_path / "course_lib", ignore=ignored)
    (tmp_path / "tests").mkdir()
    for name in (
        "pyproject.toml",
        *(f"tests/{name}.py" for name in ("conftest", "parts", "proven", Path(__file__).stem)),
    ):
        shutil.copy(ROOT / name, tmp_path / name)
    planted = tmp_path / "course_lib" / "kernels" / "a_new_topic" / "within"
    planted.mkdir(parents=True)
    (planted / "planted_right.py").write_text(KERNEL + CASES.replace("INSTRUCTION", "None"))
    (planted / "planted_wrong.py").write_text(KERNEL + CASES.replace("INSTRUCTION", "'wgmma'"))
    (planted / "planted_without.py").write_text(KERNEL)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "planted_", "-p", "no:cacheprovider", "-rA", "--tb=line", "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    test = f"tests/{Path(__file__).name}::test_kernels_compile_as_they_ship[a_new_topic.within.planted_"
    told = [line for line in done.stdout.splitlines() if test in line]
    assert {line.split(" - ")[0] for line in told} == {
        f"PASSED {test}right-sm_75]",
        f"PASSED {test}right-sm_90]",
        f"FAILED {test}wrong-sm_75]",
        f"FAILED {test}wrong-sm_90]",
        f"FAILED {test}without]",
    }, done.stdout
    assert "planted_kernel for sm_90 should use wgmma; it uses no matrix instruction" in done.stdout
    assert "planted_without.py does not say how its kernels ship" in done.stdout


def test_a_kernel_that_the_cases_leave_out_is_named(monkeypatch, tmp_path):
    folder = tmp_path / "half_listed_kernels"
    folder.mkdir()
    second = KERNEL.partition("@triton.jit(")[2].replace("planted_kernel", "forgotten_kernel")
    (folder / "pair.py").write_text(f"{KERNEL}\n@triton.jit({second}{CASES.replace('INSTRUCTION', 'None')}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "KERNELS", folder)
    refused = [unit.refused for unit in units_of(folder / "pair.py") if unit.refused]
    assert refused == ["compile_cases() of half_listed_kernels/pair.py lists no CompileCase for forgotten_kernel"]


def test_helpers_are_no_kernels(tmp_path):
    (tmp_path / "some.py").write_text(KERNEL)
    tuned = "@triton.autotune(configs)\n@triton.jit\ndef tuned(x):\n    tl.store(x, 1)\n"
    (tmp_path / "more.py").write_text(tuned + "@gluon.jit\ndef gluon_kernel(x):\n    gl.store(x, 1)\n")
    (tmp_path / "none.py").write_text("def launcher(x):\n    pass\n")
    found = {name: kernels_of(tmp_path / f"{name}.py", tmp_path) for name in ("some", "more", "none")}
    assert found == {"some": ["planted_kernel"], "more": ["tuned", "gluon_kernel"], "none": []}
