"""A few functions and classes that call each other, and what edits of their text make of them."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from course_lib.checker.specification.edited_text import Replacement, replaced, replacements
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.words import Words, canonical, nearest_line, words_of

MOST_KEPT = 4096  # compiled functions, of all models


class Program:
    """A few functions and classes that call each other, the last of which is the meaning, as text to be changed."""

    def __init__(self, functions: tuple[Callable, ...], uses: tuple[Callable, ...] = ()):
        self.uses = {function.__name__: function for function in uses}
        self.functions = {function.__name__: function for function in functions}
        self.texts: dict[str, Words] = {name: words_of(_text(function)) for name, function in self.functions.items()}
        *parts, self.name = self.functions
        self.calls = {name: _called(text.text) & {*self.texts} for name, text in self.texts.items()}
        if idle := {*parts}.difference(*self.calls.values()):
            raise CourseError(f"{self.name} and its parts do not call {sorted(idle)}, so these are no parts of it.")

    def found(self, edit: str, pieces: tuple[tuple[str, str], ...], within: str = "") -> dict[str, list[Replacement]]:
        """What an edit of this name changes in each function, or in one and those that it calls.

        Raises:
            CourseError: a piece does not occur, or the edit makes no program.
        """
        texts = {name: self.texts[name] for name in self._reached(within or self.name)}
        changes: dict[str, list[Replacement]] = {name: [] for name in texts}
        for old, new in pieces:
            here = replacements(texts, old, new)
            if not here:
                near = nearest_line("\n".join(text.text for text in texts.values()), old)
                raise CourseError(
                    f"{within or self.name} does not hold the piece {old!r} of the edit {edit!r}. The nearest line is "
                    f"{near!r}. Line breaks, blanks and quotes are no difference; names, signs and their order are. "
                    "Was the meaning reworded, or did a formatter do more than move text? Write the piece as that line "
                    "shows it, which is without brackets that Python does not need."
                )
            for name, found in here.items():
                changes[name] += found
        changes = {name: found for name, found in changes.items() if found}
        for name, found in changes.items():
            text = replaced(self.texts[name].text, found)
            if text is None:
                raise CourseError(f"{self.name}: two pieces of the edit {edit!r} change the same words of {name}.")
            self._check(name, text, edit, " ".join(new for _, new in pieces))
        return changes

    def _check(self, name: str, text: str, edit: str, written: str) -> None:
        """An edited function must be Python, and know all its names: a slip that raises explains nothing, unseen.

        written: all that the edit writes.
        """
        known = {*self.functions, *self.uses, *_module(self.functions[name]), *dir(builtins)}
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            line = text.splitlines()[(error.lineno or 1) - 1].strip()
            made = f"makes {line!r}, which is no Python: {error.msg}."
            raise CourseError(f"{self.name}: the edit {edit!r} {made}") from None
        if {*words_of(written).words} <= known.union(self.texts[name].words):
            return  # no new names
        names = [node for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.arg))]
        read = {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        stored = {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        bound = stored | {node.arg for node in names if isinstance(node, ast.arg)}
        unknown = read - bound - known
        if unknown:
            raise CourseError(
                f"{self.name}: the edit {edit!r} reads {sorted(unknown)}, which {name}'s module does not have. A name "
                "that edits alone use looks unused to a linter, and its import may be gone: name it in `uses`."
            )

    def _reached(self, name: str) -> list[str]:
        """A function of this name and those that it calls, in their order."""
        if name not in self.texts:
            raise CourseError(f"{self.name} has no part {name!r}; it has {sorted({*self.texts} - {self.name})}.")
        reached: set[str] = set()
        found = {name}
        while found := found - reached:
            reached |= found
            found = {called for one in found for called in self.calls[one]}
        return [name for name in self.texts if name in reached]

    def with_changes(self, chosen: list[tuple[str, dict[str, list[Replacement]]]]) -> Callable | None:
        """The meaning with these changes; None where two of them want to change the same words, or make no program.

        chosen: of each edit within which function it is made, "" for everywhere, and its changes.
        """
        apart: dict[str, Any] = {}
        for within in {within for within, _ in chosen} - {""}:
            made = self._made([found for place, found in chosen if place in ("", within)])
            if made is None:
                return None
            apart[within] = made[within]
        made = self._made([found for place, found in chosen if not place], apart)
        return None if made is None else made[self.name]

    def _made(self, changes: list[dict[str, list[Replacement]]], apart: dict[str, Any] | None = None) -> dict | None:
        """All functions with these changes, which call those that are `apart` in place of their own."""
        made: dict[str, Any] = {}
        modules = {name: _module(function) for name, function in self.functions.items()}
        scopes = {id(module): {**module, **self.uses} for module in modules.values()}
        for name, module in modules.items():
            text = replaced(self.texts[name].text, [change for found in changes for change in found.get(name, ())])
            if text is None:
                return None
            try:
                program = _compiled(text, name)
            except SyntaxError:
                return None
            scope = scopes[id(module)]
            exec(program, scope)
            made[name] = scope[name]
        made |= apart or {}
        for scope in scopes.values():  # each calls the changed ones
            scope.update(made)
        return made


def _text(function: Callable) -> str:
    of_a_module = inspect.isclass(function) or inspect.isfunction(function) and not function.__closure__
    if not of_a_module or "<" in function.__qualname__:
        raise CourseError(
            f"{function!r} cannot be edited: a meaning and its parts are functions or classes of a module, by `def` or "
            "`class`."
        )
    return canonical(inspect.getsource(function))


def _module(function: Callable) -> dict[str, Any]:
    """The names of the module that it stands in."""
    return vars(sys.modules[function.__module__])


@functools.lru_cache(MOST_KEPT)
def _compiled(text: str, name: str) -> types.CodeType:
    """Of two edits most functions are changed by one or by none: the same text is compiled once."""
    return compile(text, f"<{name}>", "exec")


def _called(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
