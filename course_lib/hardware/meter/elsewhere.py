"""A function taken to another process that interprets: how it is found there, and its tensors.

There the function is imported, or, when it was defined in a notebook, its cell is run alone, with torch, triton, tl,
np, math and F at hand; a cell that needs more must import it.
"""

import ast
import contextlib
import importlib
import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from course_lib.hardware.compiler.kernel_source import importable

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def environment() -> dict[str, str]:
    """The variables of a process that interprets, and finds the modules that this one finds."""
    variables = dict(os.environ, TRITON_INTERPRET="1", COURSE_NO_WARM_UP="1")
    variables.pop("PYTEST_CURRENT_TEST", None)  # another one in every test
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return variables


def located(function: Callable) -> dict:
    """How the other process finds the function: by its module, or by the source of its cell."""
    if importable(function):
        return {"module": function.__module__, "name": function.__qualname__}
    code, name = getattr(function, "__code__", None), getattr(function, "__name__", repr(function))
    source = "".join(linecache.getlines(code.co_filename)) if code is not None else ""
    if not source:
        raise ValueError(f"the source of {name} is not to be found; define it in a notebook cell or a file.")
    return {"source": source, "name": name}


def found(located: dict, folder: Path) -> Callable:
    """In the other process: the function that was located. A cell needs a file of its own, in `folder`."""
    if "module" in located:
        return getattr(importlib.import_module(located["module"]), located["name"])
    return _run_cell(located["source"], folder / "cell.py")[located["name"]]


def on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous()
    if isinstance(value, (tuple, list)):
        return type(value)(map(on_cpu, value))
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return value


def _run_cell(source: str, path: Path) -> dict:
    """The names that a cell defines. Triton reads a kernel's source from its file, so the cell gets one.

    What a cell does with them (loops, calls, prints) is for the notebook, and is left out here. So is an assignment
    that needs a name of another cell.
    """
    import math

    import numpy
    import torch.nn.functional
    import triton
    import triton.language

    path.write_text(source, encoding="utf-8")
    names = {
        "__name__": "cell",
        "__file__": str(path),
        "torch": torch,
        "triton": triton,
        "tl": triton.language,
        "np": numpy,
        "math": math,
        "F": torch.nn.functional,
    }
    for statement in ast.parse(source, str(path)).body:
        program = compile(ast.Module([statement], []), str(path), "exec")
        if isinstance(statement, DEFINITIONS):
            exec(program, names)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            with contextlib.suppress(NameError):
                exec(program, names)
    return names
