"""From an exercise's cell to the learner's: the marked answers found, held to the rules and replaced by stubs."""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

STUB = "# YOUR CODE HERE"
EXERCISE = re.compile(r"# Exercise (\d+\.\d+) · (\S.*)")
BEGIN, END = "# BEGIN SOLUTION", "# END SOLUTION"
# A misspelt marker would hand the answer to the learner: whatever looks like one must be one.
LIKE_A_MARKER = re.compile(r"#?\s*(begin|end)[\s_]*solutions?\b", re.IGNORECASE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


class BuildError(ValueError):
    """A chapter that cannot be built, or a notebook that must not be overwritten; the text says which and why."""


@dataclass
class Cell:
    """A cell of a chapter's source; `line` is the line of the file on which its text begins."""

    kind: str  # "code", "markdown" or "raw"
    text: str
    line: int
    metadata: dict = field(default_factory=dict)


def exercise_of(cell: Cell) -> str | None:
    """The id of the exercise that the cell holds, such as "3.2"; None for other cells."""
    match = EXERCISE.fullmatch(cell.text.split("\n", 1)[0].rstrip()) if cell.kind == "code" else None
    return match.group(1) if match else None


def answers(cell: Cell, path: Path) -> list[tuple[int, int]]:
    """The first and last line, within the cell and markers included, of each answer in it.

    Raises:
        BuildError: markers that are misspelt, unpaired, nested, differently indented or around nothing.
    """

    def wrong(index: int, reason: str) -> BuildError:
        return BuildError(f"{path}, line {cell.line + index}: {reason}")

    found, begin = [], None
    lines = cell.text.split("\n")
    for index, line in enumerate(lines):
        marker = line.strip()
        if not LIKE_A_MARKER.match(marker):
            continue
        if cell.kind != "code":
            raise wrong(index, f"'{marker}' stands in prose; an answer is marked in the code cell of its exercise.")
        if marker not in (BEGIN, END):
            raise wrong(index, f"'{marker}' looks like a marker; they read '{BEGIN}' and '{END}'.")
        if marker == BEGIN:
            if begin is not None:
                raise wrong(index, f"a second '{BEGIN}' before the '{END}' of line {cell.line + begin}.")
            begin = index
            continue
        if begin is None:
            raise wrong(index, f"'{END}' without a '{BEGIN}' before it in the cell.")
        if indentation(lines[begin]) != indentation(line):
            raise wrong(index, f"'{END}' is not indented like its '{BEGIN}' in line {cell.line + begin}.")
        if not any(is_code(inner) for inner in lines[begin + 1 : index]):
            raise wrong(begin, f"'{BEGIN}' and '{END}' enclose no code.")
        found.append((begin, index))
        begin = None
    if begin is not None:
        raise wrong(begin, f"'{BEGIN}' has no '{END}' in its cell.")
    return found


def indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def is_code(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith("#")


def stubbed(cell: Cell, path: Path) -> str:
    """The text of an exercise cell with each answer replaced by its stub.

    Raises:
        BuildError: an answer that stands outside a function, no answer at all, or text that is no Python.
    """
    blocks, exercise = answers(cell, path), exercise_of(cell)
    if not blocks:
        raise BuildError(f"{path}, line {cell.line}: exercise {exercise} marks no answer with '{BEGIN}'.")
    tree = parsed(cell.text, cell, path)
    lines = cell.text.split("\n")
    for begin, end in reversed(blocks):
        function = enclosing_function(tree, begin, next(i for i in range(begin + 1, end) if is_code(lines[i])))
        if function is None:
            raise BuildError(
                f"{path}, line {cell.line + begin}: the answer of exercise {exercise} is not inside a function, where "
                "its stub would stop the notebook; put it into the body of the function that the learner completes."
            )
        stub = "pass" if is_kernel(function) else f'raise NotImplementedError("Exercise {exercise}")'
        indent = indentation(lines[begin])
        lines[begin : end + 1] = [indent + STUB, indent + stub]
    text = "\n".join(lines)
    parsed(text, cell, path, "with the answers taken out, ")
    return text


def parsed(text: str, cell: Cell, path: Path, when: str = "") -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        line = cell.line + (error.lineno or 1) - 1
        raise BuildError(f"{path}, line {line}: {when}the exercise cell is not valid Python ({error.msg}).") from error


def enclosing_function(tree: ast.Module, marker: int, content: int) -> Function | None:
    """The innermost function whose `def` comes before line index `marker` and whose body holds line index `content`."""
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno - 1 < marker
        and content < (node.end_lineno or 0)
    ]
    return max(found, key=lambda node: node.lineno, default=None)


def is_kernel(function: Function) -> bool:
    """Whether the function is compiled by Triton or Gluon: decorated with `jit`, called or not, under any prefix."""
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if (target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")) == "jit":
            return True
    return False


def solved(cell: Cell, path: Path) -> str:
    """The text of a cell with its answers and without their markers."""
    answers(cell, path)
    return "\n".join(line for line in cell.text.split("\n") if line.strip() not in (BEGIN, END))
