"""Slips as edits: what is right stands once, as a plain function, and a slip is the piece of text that one gets wrong.

    def row_means(x, block):
        total = torch.zeros(x.shape[0])
        for start in range(0, x.shape[1], block):
            offsets = start + torch.arange(block)
            total = total + load(x, rows * x.stride(0) + offsets, offsets < x.shape[1], 0.0).sum(-1)
        return total / x.shape[1]

    CHANGES = (
        *edits("Rows are read as if they had no gap. …", row_stride_ignored=("x.stride(0)", "x.shape[1]")),
        *edits(
            "Only the first tile counted. …",
            only_first_tile=("range(0, x.shape[1], block)", "range(0, block, block)"),
            only_first_tile__last_kept=("total = total + load(", "total = load("),
        ),
        *edits("", times_the_inverse=("total / x.shape[1]", "total * (1 / x.shape[1])")),  # a style: right as well
    )
    MODEL = model_of(row_means, CHANGES)

A slip's name says what a verdict calls it; what follows two underscores is one of several ways to make one mistake.
`load` is that of `exercises/topics/pointers.py`, which tells the judge what an answer reads outside a tensor. Write the
meaning so that each step that can go wrong is a piece of text of its own, and never with a switch. What
several meanings share is a function of `exercises/topics/` (`parts=`), or stands in one wording in all of them, and its
rows stand once in `exercises/topics/`. Where an answer is a class, such as an allocator, the meaning is a function that
drives a class, and the class is one of its parts. Where two parts call the same steps, such as two kernels, a row may
be made in one of them alone: see `Edit.within`.

A piece that stands in several places is changed in all of them: a longer one names one place. It is text, but an
expression in the place of one that binds more tightly gets brackets. Where the meaning does not hold a piece, or an
edit makes no Python of it, importing the exercise fails and says so. Two slips that change different words are looked
for as a pair, in whichever order they are written; two that want to change the same words are none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from course_lib.checker.specification.edited_program import Program
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.model import Model, Slip

MOST_KEPT = 2048  # programs of a model: its slips alone, and the pairs that were tried


class DoesNotRun(Exception):
    """What a function that edits call raises where an answer would not even compile: the model then says nothing."""


@dataclass(frozen=True)
class Edit(Slip):
    """A slip and the pieces of text that it changes: (what stands there, what a learner writes) each.

    One without a sentence is a style: what right answers differ by and slips show through.

    Attributes:
        within: the name of a part: the edit is made there and in what that part calls, and nowhere else. With "" it is
            made everywhere.
    """

    pieces: tuple[tuple[str, str], ...] = ()
    within: str = ""


def edits(sentence: str, /, *, alone: bool = False, is_nan: bool = False, **ways: tuple[str, ...]) -> tuple[Edit, ...]:
    """The ways of one mistake: `name=(old, new)`, or `name=(old, new, old, new, …)` where several pieces change.

    Args:
        sentence: the cause and where to look, as in `Slip`; with "" the ways are styles.
        alone, is_nan: as in `Slip`.
        ways: by the slip's name. All pieces are looked for in the meaning as it stands, not in what another makes.

    Raises:
        CourseError: an old piece without a new one, or one that is its own replacement.
    """
    for name, pieces in ways.items():
        if not isinstance(pieces, tuple) or len(pieces) % 2 or not pieces:
            raise CourseError(f"The edit {name!r} is {pieces!r}. It must be (old, new), or (old, new, old, new, …).")
        if any(old == new for old, new in _in_twos(pieces)):
            raise CourseError(f"The edit {name!r} changes nothing: a piece and what it becomes are one and the same.")
    return tuple(Edit(name, sentence, alone, is_nan, None, tuple(_in_twos(pieces))) for name, pieces in ways.items())


def without(changes: Iterable[Edit], *names: str) -> tuple[Edit, ...]:
    """Rows that several exercises share, but for those that this one does not have.

    Raises:
        CourseError: no row has such a name.
    """
    named = only(changes := tuple(changes), *names)
    return tuple(edit for edit in changes if edit not in named)


def only(changes: Iterable[Edit], *names: str) -> tuple[Edit, ...]:
    """Of rows that several exercises share those with these names, in the order of the rows.

    Raises:
        CourseError: no row has such a name.
    """
    changes = tuple(changes)
    unknown = {*names} - {edit.id for edit in changes}
    if unknown:
        raise CourseError(f"There are no edits {sorted(unknown)}; there are {sorted(edit.id for edit in changes)}.")
    return tuple(edit for edit in changes if edit.id in names)


def model_of(
    meaning: Callable,
    changes: Iterable[Edit],
    parts: Iterable[Callable] = (),
    uses: Iterable[Callable] = (),
    **options: Any,
) -> Model:
    """The model of a plain meaning.

    Args:
        meaning: what a right answer computes, step by step, in its own precision: called with a case's arguments. See
            `Model.compute` for what it may return.
        changes: its slips, the most basic first, and styles; see `edits`.
        parts: the functions and classes that it calls and that edits may change too, of whichever module.
        uses: functions that edits alone call.
        options: further attributes of `Model`; `styles` replaces those that the changes name.

    Raises:
        CourseError: an edit does not fit the meaning: which, and what stands nearest.
    """
    changes, program = tuple(changes), Program((*parts, meaning), tuple(uses))
    ways = {edit.id: program.found(edit.id, edit.pieces, edit.within) for edit in changes}
    places = {edit.id: edit.within for edit in changes}
    place = {name: number for number, name in enumerate(ways)}
    if len(ways) < len(changes):
        names = [edit.id for edit in changes]
        raise CourseError(
            f"{meaning.__name__}: edits are named twice: {sorted({n for n in names if names.count(n) > 1})}."
        )

    @functools.lru_cache(MOST_KEPT)
    def compiled(chosen: tuple[str, ...]) -> Callable | None:
        return program.with_changes([(places[name], ways[name]) for name in chosen])

    def compute(names: frozenset[str], *args: Any) -> Any:
        chosen = tuple(sorted(names & ways.keys(), key=place.__getitem__))
        function = compiled(chosen)
        if function is None:  # two that want to change the same words
            return NotImplemented
        try:
            return function(*args)
        except DoesNotRun:
            return NotImplemented
        except Exception:
            if len(chosen) < 2:
                raise
            return NotImplemented  # two that fit in the text need not fit in what it does

    styles = ((), *((edit.id,) for edit in changes if not edit.sentence))
    slips = tuple(edit for edit in changes if edit.sentence)
    return Model(compute, slips, **{"styles": styles, **options})


def _in_twos(pieces: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(pieces[::2], pieces[1::2]))
