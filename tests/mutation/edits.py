"""A source text with its syntax tree, and small edits of it by the tree's nodes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

OPERATORS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.MatMult: "@",
    ast.Pow: "**",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
NOT_LOGIC = {"input_precision", "num_warps", "num_stages", "device"}  # arguments that change no number in a check
ATOMS = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.List)


class Text:
    """A Python source, its tree with parents, and the text between any two places.

    Columns of `ast` count bytes, and comments hold √ and ·, so the source is kept as bytes.
    """

    def __init__(self, source: str):
        self.source, self.bytes = source, source.encode()
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def span(self, node: ast.AST) -> tuple[int, int]:
        """First byte of a node, and the byte after its last one."""
        first = self.starts[node.lineno - 1] + node.col_offset
        return first, self.starts[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.AST) -> str:
        """A node as it is written."""
        first, end = self.span(node)
        return self.bytes[first:end].decode()

    def operand(self, node: ast.AST) -> str:
        """A node as it is written, in parentheses unless it needs none anywhere."""
        return self.of(node) if isinstance(node, ATOMS) else f"({self.of(node)})"

    def with_replaced(self, *changes: tuple[tuple[int, int], str]) -> str:
        """The source with these stretches replaced."""
        result = self.bytes
        for (first, end), text in sorted(changes, reverse=True):
            result = result[:first] + text.encode() + result[end:]
        return result.decode()

    def replaced(self, node: ast.AST, text: str) -> str:
        """The source with one node written otherwise."""
        return self.with_replaced((self.span(node), text))

    def exchanged(self, one: ast.AST, other: ast.AST) -> str:
        """The source with two nodes in each other's place."""
        return self.with_replaced((self.span(one), self.of(other)), (self.span(other), self.of(one)))

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> str | None:
        """The source with the operator between two operands replaced."""
        first, end = self.span(left)[1], self.span(right)[0]
        text = self.bytes[first:end].decode()
        changed = re.sub(rf"(?<![-+*/<>=!&|@%]){re.escape(old)}(?![-+*/<>=&|])", lambda _: new, text, count=1)
        return None if changed == text else self.with_replaced(((first, end), changed))

    def without(self, call: ast.Call, keyword: ast.keyword) -> str:
        """The source with one keyword argument taken out of a call."""
        first, end = self.span(keyword)
        arguments = [*call.args, *call.keywords]
        before = [self.span(item)[1] for item in arguments if self.span(item)[1] <= first]
        if before:
            first = max(before)
        else:
            after = [self.span(item)[0] for item in arguments if self.span(item)[0] >= end]
            end = min(after, default=end)
        return self.with_replaced(((first, end), ""))

    def lines(self, statement: ast.stmt) -> tuple[int, int]:
        """The whole lines of a statement, decorators and all, as bytes; its own line must hold nothing else."""
        return self.starts[statement.lineno - 1], self.starts[statement.end_lineno]

    def functions(self) -> Iterator[ast.FunctionDef]:
        """Every function of the cell, kernels and launchers alike."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef))

    def expressions(self) -> Iterator[ast.AST]:
        """Every node that computes something: no docstring, annotation, decorator, default or tuning keyword."""
        skipped: set[ast.AST] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                skipped.update(*map(ast.walk, node.decorator_list), *map(ast.walk, [node.args]))
                skipped.update(ast.walk(node.returns) if node.returns else ())
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                skipped.update(ast.walk(node))
            elif isinstance(node, ast.keyword) and node.arg in NOT_LOGIC:
                skipped.update(ast.walk(node))
            elif isinstance(node, ast.Dict):  # arguments that are handed on by **
                for key, value in zip(node.keys, node.values):
                    skipped.update(ast.walk(value) if getattr(key, "value", None) in NOT_LOGIC else ())
        return (node for node in ast.walk(self.tree) if node not in skipped)

    def blocks(self) -> Iterator[list[ast.stmt]]:
        """Every list of statements inside a function."""
        for node in ast.walk(self.tree):
            for name in ("body", "orelse"):
                block = getattr(node, name, None)
                if isinstance(block, list) and not isinstance(node, ast.Module):
                    yield [statement for statement in block if not _is_docstring(statement)]


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def named(text: Text, node: ast.AST) -> str:
    """The name of the argument that a node is given as, in a call or in a dict of arguments; "" where it has none."""
    parent = text.parents[node]
    if isinstance(parent, ast.keyword):
        return parent.arg or ""
    if isinstance(parent, ast.Dict) and node in parent.values:
        return str(getattr(parent.keys[parent.values.index(node)], "value", ""))
    return ""


def called(node: ast.AST) -> str:
    """The last name of what a call calls: "load" for `tl.load(...)`; "" for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def names(node: ast.AST, stored: bool) -> set[str]:
    """The variables that a piece of code sets, or reads."""
    wanted = ast.Store if stored else ast.Load
    found = {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, wanted)}
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and not stored:
        found.add(node.target.id)
    return found
