"""What an edit changes in a text: which characters become what, and whether two edits want to change the same ones."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass

from course_lib.checker.specification.words import Words, canonical, piece_of

BINDS = (  # operators by how tightly they bind, the loosest first
    (ast.NamedExpr, ast.Lambda, ast.IfExp),
    (ast.Or,),
    (ast.And,),
    (ast.Not,),
    (ast.Compare,),
    (ast.BitOr,),
    (ast.BitXor,),
    (ast.BitAnd,),
    (ast.LShift, ast.RShift),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.MatMult, ast.Div, ast.FloorDiv, ast.Mod),
    (ast.USub, ast.UAdd, ast.Invert),
    (ast.Pow,),
)


@dataclass(frozen=True)
class Replacement:
    """The characters from `begin` to `end` of a text become `new`; nothing is taken away where the two are one."""

    begin: int
    end: int
    new: str

    def disturbs(self, other: Replacement) -> bool:
        """Whether the two want to change one place; two that want the same of it agree."""
        if self == other:
            return False
        if self.begin == self.end or other.begin == other.end:
            inside = self.begin < other.begin < self.end or other.begin < self.begin < other.end
            return inside or self.begin == self.end == other.begin == other.end
        return self.begin < other.end and other.begin < self.end


def replacements(texts: dict[str, Words], old: str, new: str) -> dict[str, list[Replacement]]:
    """What changes in each text where `old` becomes `new`, at every place where it stands; none where it does not.

    A piece is looked for as it is written, and where it stands in no text, as `canonical` writes it.
    """
    for written in (lambda piece: piece, _rewritten):
        piece = piece_of(written(old))
        places = {name: text.places_of(piece) for name, text in texts.items()}
        if any(places.values()):
            changes = _changes(piece, piece_of(_in_brackets_if_looser(old, new)))
            return {
                name: [_replacement(texts[name], at, change) for at in found for change in changes]
                for name, found in places.items()
            }
    return {}


def _rewritten(piece: str) -> str:
    try:
        return canonical(textwrap.dedent(piece.strip("\n")).strip())
    except SyntaxError:
        return ""


def _in_brackets_if_looser(old: str, new: str) -> str:
    """Brackets around an expression that binds less tightly than the one whose place it takes: it stays one operand."""
    was, is_now = _tightness(old.strip()), _tightness(new.strip())
    return f"({new.strip()})" if was is not None and is_now is not None and is_now < was else new


def _tightness(piece: str) -> int | None:
    """How tightly an expression binds; None for what is no expression, or several."""
    try:
        node = ast.parse(piece, mode="eval").body
    except SyntaxError:
        return None
    if isinstance(node, ast.Tuple):
        return None
    kind = getattr(node, "op", node)
    in_brackets = node.col_offset > 0
    return next((at for at, kinds in enumerate(BINDS) if isinstance(kind, kinds) and not in_brackets), len(BINDS))


def _changes(old: Words, new: Words) -> list[tuple[int, int, str]]:
    """(first word, word after the last, text in their place): as few words of `old` as can be.

    What stands around the old words is put around them, what is left of them is cut out of them, and else what both
    begin and end with stays. So two edits of neighbouring words can be made at once.
    """
    count, others = len(old.words), len(new.words)
    if len(around := new.places_of(old)) == 1:
        (at,) = around
        before, after = _span(new, 0, at), _span(new, at + count, others)
        return [(0, 0, before)] * bool(before.strip()) + [(count, count, after)] * bool(after)
    if len(within := old.places_of(new)) == 1:
        (at,) = within
        return [(0, at, "")] * (at > 0) + [(at + others, count, "")] * (at + others < count)
    same = _shared(old.words, new.words)
    tail = _shared(old.words[same:][::-1], new.words[same:][::-1])
    return [(same, count - tail, _span(new, same, others - tail))]


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many words two begin with alike."""
    return next((at for at, (mine, theirs) in enumerate(zip(one, other)) if mine != theirs), min(len(one), len(other)))


def _span(words: Words, first: int, last: int) -> str:
    """The text of these words, and the blank or line's end before them."""
    if first >= last:
        return ""
    return words.text[words.ends[first - 1] if first else 0 : words.ends[last - 1]]


def _replacement(text: Words, at: int, change: tuple[int, int, str]) -> Replacement:
    first, last, new = change
    begins, ends = text.begins, text.ends
    line = text.text[text.text.rfind("\n", 0, begins[at]) + 1 :]
    indent = line[: len(line) - len(line.lstrip())]
    new = new.replace("\n", "\n" + indent)
    if first == last:
        place = begins[at] if first == 0 else ends[at + first - 1]
        return Replacement(place, place, new)
    begin, end = begins[at + first], ends[at + last - 1]
    whole_line = not text.text[text.text.rfind("\n", 0, begin) + 1 : begin].strip() and text.text[end:].lstrip(" ")[
        :1
    ] in ("", "\n")
    return Replacement(begin, end, new.strip(" ") or "pass" * whole_line)


def replaced(text: str, changes: list[Replacement]) -> str | None:
    """The text with all of these; None where two of them want to change one place."""
    ordered = sorted(set(changes), key=lambda change: (change.begin, change.end))
    if any(one.disturbs(other) for at, one in enumerate(ordered) for other in ordered[at + 1 :]):
        return None
    made, kept = "", 0
    for change in ordered:
        made = _joined(_joined(made, text[kept : change.begin]), change.new)
        kept = change.end
    return _joined(made, text[kept:])


def _joined(one: str, other: str) -> str:
    """One text behind the other, with a blank where the two would be read as one word: `in` and `x` are not `inx`."""
    return f"{one} {other}" if re.fullmatch(r"\w\w", one[-1:] + other[:1]) else one + other
