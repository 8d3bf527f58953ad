"""The compile gate: every kernel at the configurations it ships with, for every architecture it names, with no GPU.

A module of `course_lib.kernels` that has kernels says how they ship:

    def compile_cases() -> list[CompileCase]: ...

and is held to it: it compiles, fits the architecture's shared memory, spills no more than it admits, and uses the
matrix instruction it names. Each module is one call of the compiler's process, so that xdist can spread them.
"""

import ast
import importlib
from pathlib import Path

import pytest

from course_lib.hardware.compiler.views import CompileCase, compile_many

KERNELS = Path(__file__).resolve().parents[1] / "course_lib" / "kernels"


def has_launchable_kernels(source: str) -> bool:
    """Whether a module defines jit functions, other than helpers that return a value to the kernel calling them."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any(is_jit(decorator) for decorator in function.decorator_list):
            returns = [node for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
            if not returns:
                return True
    return False


def is_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(target) in ("triton.jit", "jit", "gluon.jit")


MODULES = sorted(path.stem for path in KERNELS.glob("*.py") if has_launchable_kernels(path.read_text()))


@pytest.mark.parametrize("name", MODULES)
def test_kernels_compile_as_they_ship(name):
    module = importlib.import_module(f"course_lib.kernels.{name}")
    cases = module.compile_cases() if hasattr(module, "compile_cases") else []
    assert cases, f"course_lib/kernels/{name}.py has kernels and no compile_cases() that lists a CompileCase"
    assert all(isinstance(case, CompileCase) for case in cases)
    asked = [(case, request) for case in cases for request in case.requests()]
    views = compile_many([request for _, request in asked])
    problems = [
        problem for (case, request), view in zip(asked, views) for problem in case.problems(view, request["arch"])
    ]
    assert not problems, "\n".join(problems)


def test_the_gate_finds_kernels_and_leaves_helpers_alone():
    helper = "@triton.jit\ndef twice(x):\n    return 2 * x\n"
    assert not has_launchable_kernels(helper)
    tuned = "@triton.autotune(configs)\n@triton.jit\ndef kernel(x):\n    tl.store(x, 1)\n"
    assert has_launchable_kernels(helper + tuned)
    assert has_launchable_kernels("@gluon.jit\ndef kernel(x):\n    gl.store(x, 1)\n")
    assert not has_launchable_kernels("def launcher(x):\n    pass\n")
