"""Where an answer's source comes from: a live function's notebook cell, a notebook file, or a percent-format .py file.

An exercise cell is known by its first line, `# Exercise 3.2 · Title`, and by nothing else.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from course_lib.checker.specification.errors import CourseError

HEADER = re.compile(r"^#\s*Exercise\s+(\d+\.\d+)\b\s*[·:.–-]?\s*(.*)$")
SOLUTION_PREFIX = "<course solution "
MOVED = {"9.5": "12.7"}  # an exercise's first number, and its number since its section moved to another chapter
_MAGIC = re.compile(r"^([^\S\n]*)([%!].*)$", re.MULTILINE)  # \s would run over lines, in quadratic time


def exercise_id(source: str) -> str | None:
    """The id in a cell's first line that is not blank, or None."""
    for line in source.splitlines():
        if line.strip():
            match = HEADER.match(line.strip())
            return match.group(1) if match else None
    return None


def number_now(identity: str) -> str:
    """The number that an exercise goes by; another than the given one if it has moved."""
    return MOVED.get(identity, identity)


def numbers_of(identity: str) -> list[str]:
    """The number that an exercise goes by, and those under which it was known before."""
    return [identity, *(before for before, now in MOVED.items() if now == identity)]


def without_magics(source: str) -> str:
    """The cell with IPython's magics and shell lines turned into `pass`, so that line numbers stay."""
    return _MAGIC.sub(r"\1pass  # \2", source)


def meaning(source: str) -> str:
    """The source as Python reads it, without remarks, layout and docstrings; as it is where it cannot be read so."""
    try:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and ast.get_docstring(node) is not None:
                del node.body[0]
        return ast.dump(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


def read_cells(path: Path) -> list[str]:
    """The code cells of a notebook or of a percent-format .py file.

    Raises:
        CourseError: the file is missing, of another kind, or not readable as what its name says.
    """
    if path.suffix not in (".ipynb", ".py"):
        raise CourseError(f"{path}: only notebooks (.ipynb) and percent-format scripts (.py) hold exercises.")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CourseError(f"{path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CourseError(f"{path}: cannot be read ({error}).") from error
    return notebook_cells(path, text) if path.suffix == ".ipynb" else percent_cells(path, text)


def notebook_cells(name: str | Path, text: str) -> list[str]:
    """The code cells of a notebook's text.

    Raises:
        CourseError: it is no notebook; the sentence begins with the name.
    """
    import nbformat

    try:
        notebook = nbformat.reads(text, as_version=4)
        return [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise CourseError(f"{name}: is not a readable notebook ({type(error).__name__}: {reason}).") from error


def percent_cells(name: str | Path, text: str) -> list[str]:
    """The code cells of a percent-format script's text.

    Raises:
        CourseError: it cannot be read as one; the sentence begins with the name.
    """
    import jupytext

    try:
        notebook = jupytext.reads(text, fmt="py:percent")
    except Exception as error:
        raise CourseError(f"{name}: is not a readable percent-format script ({error}).") from error
    return [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def own_cells(text: str) -> list[str]:
    """The code cells of a chapter's source, in which every cell begins with `# %%` or `# %% [markdown]`.

    `percent_cells` reads whatever people write, with jupytext. But to import that takes a second, or four beside
    JupyterLab's validators, and the first check of a notebook would wait for it.
    """
    _, *parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
    return [
        source.strip("\n")
        for mark, source in zip(parts[::2], parts[1::2], strict=True)
        if not mark.lstrip().startswith("[")
    ]


def by_exercise(sources: Sequence[str]) -> dict[str, str]:
    """Exercise id to source, the id as it is now; of two cells with one id the later counts."""
    found = {}
    for source in sources:
        identity = exercise_id(source)
        if identity:
            found[number_now(identity)] = source
    return found


def why_unreadable(source: str) -> str | None:
    """Why a cell is beyond Python's parser: nested too deeply, or characters that are none; None for any other.

    An error of syntax is no such reason: it is found, and told, where the cell runs.
    """
    try:
        ast.dump(ast.parse(without_magics(source)))
    except SyntaxError:
        return None
    except (RecursionError, MemoryError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200] or 'too deeply nested'}"
        return f"The cell cannot be read as Python ({reason}). Split what is nested so deeply, or delete the character."
    return None


def is_attempted(source: str, names: Sequence[str], untouched: str | None = None) -> bool:
    """Whether a cell holds an answer: any of the named functions more than a stub, and the code not as it was given.

    A stub is a docstring, `pass`, `...` and NotImplementedError. A cell that does not parse, or does not define the
    names, counts as attempted as soon as it holds any statement.

    Args:
        untouched: the cell as the learner was given it, if known; comments and layout are not compared.
    """
    try:
        tree = ast.parse(without_magics(source))
    except SyntaxError:
        return True
    if untouched is not None and ast.dump(tree) == ast.dump(ast.parse(untouched)):
        return False
    named = [
        node
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in names
    ]
    if not named:
        return any(not isinstance(node, (ast.Expr, ast.Pass, ast.Import, ast.ImportFrom)) for node in tree.body)
    return any(not _is_stub(node) for node in named)


def calls(cell: str, name: str) -> set[str]:
    """The names that one of a cell's functions or classes looks up, others that it calls among them."""
    tree = ast.parse(cell)
    named = [node for node in tree.body if getattr(node, "name", None) == name]
    return {part.id for node in named for part in ast.walk(node) if isinstance(part, ast.Name)}


def may_lack_a_return(cell: str, name: str) -> bool:
    """Whether one of a cell's functions may come to its end without `return`, and nowhere returns None on purpose."""
    named = [node for node in ast.parse(cell).body if isinstance(node, ast.FunctionDef) and node.name == name]
    returns = [part for node in named for part in ast.walk(node) if isinstance(part, ast.Return)]
    on_purpose = any(
        part.value is None or isinstance(part.value, ast.Constant) and part.value.value is None for part in returns
    )
    return bool(named) and not on_purpose and not _leaves(named[-1].body)


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether statements always end in `return` or an error, as far as that is seen."""
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return _leaves(last.body) and _leaves(last.orelse)
    if isinstance(last, (ast.With, ast.Try)):
        return _leaves(last.body)
    endless = isinstance(last, ast.While) and isinstance(last.test, ast.Constant) and bool(last.test.value)
    return endless or isinstance(last, (ast.Return, ast.Raise))


def _is_stub(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if isinstance(node, ast.ClassDef):
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        return all(_is_stub(method) for method in methods) if methods else all(map(_says_nothing, node.body))
    for statement in node.body:
        if _says_nothing(statement):
            continue
        return _raises_not_implemented(statement)
    return True


def _says_nothing(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _raises_not_implemented(statement: ast.AST) -> bool:
    if not isinstance(statement, ast.Raise) or statement.exc is None:
        return False
    raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"


def source_of(answer: Any, exercise: str) -> tuple[str, str]:
    """The whole cell (or file) that defines a live function or class, and the name it has there.

    Raises:
        CourseError: the object is not a function or class with a source; says what to pass.
    """
    ask = f'Pass the function that the cell of exercise {exercise} defines, as in check("{exercise}", that_function).'
    if type(answer).__module__.split(".")[0] == "triton":
        raise CourseError(f"A Triton kernel was given. Pass the Python function that launches it. {ask}")
    if not callable(answer):
        raise CourseError(f"A {type(answer).__name__} was given ({str(answer)[:40]!r}), not a function. {ask}")
    target = inspect.unwrap(answer)
    target = getattr(target, "func", target)  # functools.partial has no source of its own
    code = getattr(target, "__code__", None)
    if code is None and inspect.isclass(target):
        code = next((member.__code__ for member in vars(target).values() if inspect.isfunction(member)), None)
    if code is None:
        raise CourseError(
            f"{answer!r} has no Python source (it is built in, or an object of class {type(answer).__name__}). {ask}"
        )
    if code.co_filename.startswith(SOLUTION_PREFIX):
        raise CourseError(f"That is the course's own answer, which `check(...).best` or `solution` gave. {ask}")
    lines = linecache.getlines(code.co_filename)
    if not lines:
        raise CourseError(
            f"The source of {getattr(answer, '__name__', answer)!r} is not to be found: it was made by "
            "exec, under a cell magic such as %%time, or typed in a plain terminal. Define it in a notebook cell, "
            f"without a cell magic, or in a file. {ask}"
        )
    source = "".join(lines)
    name = _name_of(answer, target)
    if name is None or not re.search(rf"\b{re.escape(name)}\b", source):
        raise CourseError(
            f"A function without a name of its own was given (a lambda?). Give it a name in the exercise "
            f"cell: `def ...` or `name = lambda ...`. {ask}"
        )
    return textwrap.dedent(source), name


def _name_of(answer: Any, target: Any) -> str | None:
    """The name under which a cell's namespace holds the object."""
    name = getattr(answer, "__name__", None)
    scope = getattr(target, "__globals__", None) or vars(inspect.getmodule(target) or object)
    if name and scope.get(name) is answer:
        return name
    names = [key for key, value in scope.items() if value is answer and not key.startswith("_")]
    if names:
        return names[0]
    return name if name and name.isidentifier() else None


def kernel_at(source: str, line: int | None) -> tuple[str, list[str]] | None:
    """The name and the parameters of the jitted function that holds a line of a cell; None elsewhere."""
    try:
        tree = ast.parse(without_magics(source))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and line is not None and node.lineno <= line <= (node.end_lineno or 0):
            if any("jit" in ast.dump(decorator) for decorator in node.decorator_list):
                return node.name, [argument.arg for argument in node.args.args]
    return None


def undefined_names(source: str, known: Sequence[str] = ()) -> set[str]:
    """Names that a cell reads but never binds, apart from builtins and `known`."""
    import builtins
    import symtable

    try:
        table = symtable.symtable(without_magics(source), "cell", "exec")
    except SyntaxError:
        return set()
    bound = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    read: set[str] = set()
    stack = [table]
    while stack:
        current = stack.pop()
        stack.extend(current.get_children())
        for symbol in current.get_symbols():
            if symbol.is_referenced() and (current is table or symbol.is_global()):
                read.add(symbol.get_name())
    return {name for name in read - bound if not hasattr(builtins, name)} - set(known)
