"""The words of a program's text, by which a piece of it is found however its lines are broken.

A text is compared word by word (a name, a number, a sign, the end of a statement), so blanks and quotes are no
difference. It is what `canonical` makes of a function: one line a statement, without comments and without brackets that
Python does not need. So nothing that a formatter does to the function can move a piece.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
import textwrap
from dataclasses import dataclass

WORD = re.compile(
    r"""(?P<line>\n\s*)
    | (?P<text>[rbfu]{0,2}(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    | (?P<name>[^\W\d]\w*)
    | (?P<number>(?:0[xob][\da-f_]+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[+-]?\d+)?))
    | (?P<sign>\*\*=?|//=?|<<=?|>>=?|->|:=|\.\.\.|[<>=!+\-*/%&|^@]=|\S)""",
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True)
class Words:
    """A text and its words: what they are, and where in the text each begins and ends."""

    text: str
    words: tuple[str, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    def places_of(self, piece: Words) -> list[int]:
        """At which words the piece begins, wherever it stands; places do not overlap."""
        found: list[int] = []
        at, length = 0, len(piece.words)
        if not {*piece.words} <= {*self.words}:
            return found
        while length and at + length <= len(self.words):
            there = self.words[at : at + length] == piece.words
            found += [at] * there
            at += length if there else 1
        return found


def words_of(text: str) -> Words:
    """The words of a text. The end of a line is one, but not within brackets."""
    found, depth = [], 0
    for match in WORD.finditer(text):
        word = match.group()
        depth += (word in "([{") - (word in ")]}")
        if match.lastgroup != "line":
            found.append((_plain(word, match.lastgroup or ""), match.start(), match.end()))
        elif depth <= 0:
            found.append(("\n", match.start(), match.end()))
    words, begins, ends = zip(*found) if found else ((), (), ())
    return Words(text, words, begins, ends)


def _plain(word: str, kind: str) -> str:
    """One spelling for what Python reads as one: 1e5 and 1e+05, 'a' and "a"."""
    try:
        return repr(ast.literal_eval(word)) if kind in ("number", "text") else word
    except (SyntaxError, ValueError):  # f"…"
        return word


@functools.lru_cache(1 << 10)
def piece_of(text: str) -> Words:
    """The words of a piece, without blank lines around it and without the indentation that all its lines share."""
    return words_of(textwrap.dedent(text.strip("\n")).strip())


def canonical(source: str) -> str:
    """Source as `ast.unparse` writes it, without docstrings, and without brackets around tuples that need none."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    lines = [line.encode() for line in ast.unparse(tree).splitlines()]
    for node in ast.walk(ast.parse(b"\n".join(lines))):
        value = node.value if isinstance(node, (ast.Return, ast.Assign)) else None
        if isinstance(value, ast.Tuple) and value.elts and value.end_col_offset is not None:
            line, begin, end = lines[value.lineno - 1], value.col_offset, value.end_col_offset
            lines[value.lineno - 1] = line[:begin] + line[begin + 1 : end - 1] + line[end:]
    return b"\n".join(lines).decode()


def nearest_line(text: str, piece: str) -> str:
    """The line of the text that looks most like the piece."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return max(lines, key=lambda line: difflib.SequenceMatcher(None, line, piece.strip()).ratio())
