"""PyTorch's habits in a kernel: what such a line means there, and what Triton has in its place.

Python's own message says nothing of that: of `x_pointer[offsets]` it is "'int' object is not iterable".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from course_lib.checker.specification import cells
from course_lib.checker.specification.seen import RaisedError

# What the interpreter says of such lines; any other error has another cause.
_SAID = re.compile(
    r"is not iterable|can be converted to|item assignment|tensor index|for @|__(?:r?matmul|getitem|setitem|iter)__"
    r"|has no attribute|has no len|out of range|values to unpack|is not callable|must be Tensor"
)
_SIZES = {"shape", "size", "stride", "numel", "dim", "ndim", "device"}
_LIBRARIES = {"torch", "F", "np", "math"}

_READ = "`{name}` is the address of a tensor's first element. Read with `tl.load({name} + offsets, mask=...)`."
_WRITE = (
    "`{name}` is the address of a tensor's first element. Write with `tl.store({name} + offsets, values, mask=...)`."
)
_SIZE = (
    "`{name}` is the address of a tensor's first element, and knows no sizes. Pass what the kernel needs as arguments: "
    "the launcher has `.shape`, `.stride()` and `.numel()`."
)
_ELEMENT = (
    "A tile's elements have no numbers. Reduce it (`tl.sum`, `tl.max`), choose by a mask (`tl.where`) or by a tile of "
    "indices (`tl.gather`), or load one element by its own address."
)
_CHANGE = "A tile is never changed in place: `tl.where(condition, new, old)` makes another."
_PRODUCT = "The matrix product of two tiles is `tl.dot(a, b)`."
_FUNCTION = "It takes no tile. A kernel computes with functions of `tl`, such as `tl.exp`, `tl.maximum`, `tl.where`."
_METHOD = "A tile has no `{name}`. What Triton does with tiles are functions of `tl`: `tl.sum(values, axis=0)`."


def advice(error: RaisedError, source: str) -> tuple[str, str] | None:
    """The expression that is PyTorch's, as code, and what a kernel has instead; None for another error.

    Args:
        error: what was raised.
        source: the cell.
    """
    kernel = cells.kernel_at(source, error.line)
    if error.type == "CompilationError":
        return None  # the compiler's own words are better than Python's
    if kernel is None or not _SAID.search(error.text):
        return None
    (name, parameters), nodes = kernel, list(_nodes_of_line(source, error.line or 0))
    launched = re.search(rf"\b{name}\s*\[", source) is not None  # what a helper is given may be a tile
    for habit in _HABITS if launched else _HABITS[1:]:
        for node in nodes:
            words = habit(node, parameters, error.text)
            if words is not None:
                return _short(node), words
    return None


def _nodes_of_line(source: str, line: int) -> Iterator[ast.AST]:
    for node in ast.walk(ast.parse(cells.without_magics(source))):
        if isinstance(node, (ast.expr, ast.AugAssign, ast.For)) and node.lineno <= line <= (node.end_lineno or line):
            yield node


def _short(node: ast.AST) -> str:
    walk = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}" if isinstance(node, ast.For) else None
    code = walk or ast.unparse(node).replace("\n", " ")
    return code if len(code) <= 60 else code[:57] + "..."


def _name(node: ast.AST, names: list[str]) -> str | None:
    """The name that a node is, if it is one of these."""
    return node.id if isinstance(node, ast.Name) and node.id in names else None


def _size(node: ast.AST, parameters: list[str], text: str) -> str | None:
    asked = None
    if isinstance(node, ast.Attribute) and node.attr in _SIZES:
        asked = _name(node.value, parameters)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and node.args:
        asked = _name(node.args[0], parameters)
    return _SIZE.format(name=asked) if asked else None


def _element_of_an_argument(node: ast.AST, parameters: list[str], text: str) -> str | None:
    name = _name(node.value, parameters) if isinstance(node, ast.Subscript) else None
    if name is None or not isinstance(node, ast.Subscript):
        return None
    return (_READ if isinstance(node.ctx, ast.Load) else _WRITE).format(name=name)


def _product(node: ast.AST, parameters: list[str], text: str) -> str | None:
    is_one = isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.MatMult)
    return _PRODUCT if is_one else None


def _element_of_a_tile(node: ast.AST, parameters: list[str], text: str) -> str | None:
    if not isinstance(node, ast.Subscript) or isinstance(node.value, ast.Attribute):
        return None
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if all(ast.unparse(part) in (":", "None") for part in parts):
        return None
    return _ELEMENT if isinstance(node.ctx, ast.Load) else _CHANGE


def _walk(node: ast.AST, parameters: list[str], text: str) -> str | None:
    return _ELEMENT if isinstance(node, ast.For) and isinstance(node.iter, ast.Name) else None


def _function(node: ast.AST, parameters: list[str], text: str) -> str | None:
    called = node.func if isinstance(node, ast.Call) else None
    of_a_library = isinstance(called, ast.Attribute) and _name(called.value, sorted(_LIBRARIES)) is not None
    return _FUNCTION if of_a_library else None


def _method(node: ast.AST, parameters: list[str], text: str) -> str | None:
    missing = re.search(r"'tensor' object has no attribute '(\w+)'", text)
    is_it = missing is not None and isinstance(node, ast.Attribute) and node.attr == missing[1]
    return _METHOD.format(name=missing[1]) if missing is not None and is_it else None


# The first that knows a node of the line speaks. What has no sizes is told of kernels that are launched alone.
_HABITS: tuple[Callable[[ast.AST, list[str], str], str | None], ...] = (
    _size,
    _element_of_an_argument,
    _product,
    _function,
    _method,
    _element_of_a_tile,
    _walk,
)
