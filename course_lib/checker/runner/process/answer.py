"""A learner's cell as a module: compiled from a file of its own, with the names that every chapter imports."""

from __future__ import annotations

import ast
import contextlib
import math
import sys
import traceback
import types
from collections.abc import Iterable
from pathlib import Path

import graphs


class Answer:
    """A learner's cell, compiled from a file of its own so that Triton and tracebacks find its source.

    Args:
        source: the cell.
        label: the exercise's id.
        folder: where its file goes.
        names: of the functions that it must define.
    """

    def __init__(self, source: str, label: str, folder: Path, names: Iterable[str] = ()):
        self.path = folder / f"exercise_{label.replace('.', '_')}.py"
        self.path.write_text(source, encoding="utf-8")
        self.module = types.ModuleType("answer")
        self.module.__file__ = str(self.path)
        sys.modules["answer"] = self.module
        self.module.__dict__.update(usual_names())
        self.module.__dict__["check"] = _Check(self.module.__dict__, label, tuple(names))
        self.source = source

    def run(self) -> dict:
        exec(compile(self.source, str(self.path), "exec"), self.module.__dict__)
        return self.module.__dict__


class _Silent:
    """Stands in for notebook helpers (`check`, `get_ipython`, ...) that an exercise cell may mention: does nothing."""

    def __call__(self, *args, **kwargs):
        return self

    def __getattr__(self, name):
        return self


class _Check(_Silent):
    """Stands in for `check` in the answer's own cell, where the `best` function is the one that is being checked."""

    def __init__(self, namespace: dict, label: str, names: tuple[str, ...]):
        self.namespace, self.label, self.names = namespace, label, names

    def __call__(self, exercise=None, *answers, seed=None):
        if not answers and exercise == self.label:
            answers = tuple(self.namespace.get(name) for name in self.names)
        return _Checked(answers) if answers else _Silent()


class _Checked(_Silent):
    """What it gives: like a verdict, with the answers as they were handed over as its `best`."""

    def __init__(self, answers: tuple):
        self.best = answers[0] if len(answers) == 1 else answers


def usual_names() -> dict:
    """What a cell may use without importing it: the imports at the head of every chapter."""
    import numpy
    import torch
    import torch.nn.functional

    names = {"torch": torch, "np": numpy, "math": math, "F": torch.nn.functional}
    with contextlib.suppress(ImportError):
        import triton
        import triton.language

        names |= {"triton": triton, "tl": triton.language}
    return names | dict.fromkeys(("check", "hint", "solution", "progress", "submit", "get_ipython"), _Silent())


def _location(error: BaseException, path: Path) -> int | None:
    """The line in the learner's cell that an exception comes from."""
    line = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == str(path):
            line = number
    if isinstance(error, SyntaxError) and error.filename == str(path):
        line = error.lineno
    return line


def describe_error(error: BaseException, path: Path) -> dict:
    """An exception as plain data; the cause counts where Triton wraps it."""
    chain = _causes(error)
    inner, compiling = chain[-1], []
    line, text = None, _text(inner)
    with contextlib.suppress(Exception):  # an exception of the answer's own may fight back
        compiling = [cause for cause in chain if hasattr(cause, "node") and hasattr(cause, "error_message")]
        if compiling:
            line, text = _compiled_line(compiling, path), _compilers_words(compiling, inner)
        if str(type(inner).__module__).startswith("torch._dynamo"):
            text = graphs.in_a_line(text)
    line = line or _location(inner, path) or _location(error, path)  # in the kernel rather than at its launch
    return {
        "type": "CompilationError" if compiling else type(inner).__name__,
        "text": text[:4000],
        "outer": f"{type(error).__name__}: {_text(error)}"[:4000],
        "line": line,
        "out_of_memory": isinstance(inner, MemoryError)
        or "can't allocate memory" in text
        or type(inner).__name__ == "OutOfMemoryError",
    }


def _causes(error: BaseException) -> list[BaseException]:
    """An exception, and what it was raised from as long as Triton's own wrap another.

    The compiler's come in this order: the kernel's first, then those of the helpers that it calls, then what was met.
    """
    chain = [error]
    with contextlib.suppress(Exception):
        while len(chain) < 100 and str(type(chain[-1]).__module__).startswith("triton"):
            cause = chain[-1].__cause__
            if not isinstance(cause, BaseException):
                break
            chain.append(cause)
    return chain


def _compiled_line(errors: list, path: Path) -> int | None:
    """The line of the cell where the compiler stopped: the last place in the chain that stands in the cell.

    The compiler counts from the `def` of the function it reads, whose text it keeps without its indentation.
    """
    cell = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    for error in reversed(errors):
        count = getattr(error.node, "lineno", None)
        read = [line.strip() for line in str(error.src).splitlines()[:count]] if count else []
        for start in range(len(cell)) if read else ():
            if cell[start : start + len(read)] == read:
                return start + len(read)
    return None


def _compilers_words(errors: list, inner: BaseException) -> str:
    """What the compiler says at last, without the excerpt of the source above it."""
    if inner is not errors[-1] and not type(inner).__module__.startswith("triton"):
        return _text(inner)
    words = str(errors[-1].error_message or _text(errors[-1]).splitlines()[-1])
    with contextlib.suppress(SyntaxError, ValueError):
        call = ast.parse(words.strip(), mode="eval").body  # AssertionError('...'), as the compiler wraps its own
        if isinstance(call, ast.Call) and len(call.args) == 1:
            return str(ast.literal_eval(call.args[0]))
    return words


def _text(error: BaseException) -> str:
    """An exception's text; a class of the answer's own may fail at that too, or give a string that is not Python's."""
    try:
        return str.__str__(str(error))
    except BaseException:  # also exit()
        return "its text cannot be had"
