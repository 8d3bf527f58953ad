"""An executable model of what an exercise computes, and the slips that people make in it.

The judge explains a wrong answer by the smallest set of slips with which the model makes what the answer made, in
every case. So a slip is written once, and two that meet in one answer need no entry of their own. `edits` makes a
model of a plain function, `judge/formula_slips.py` one of a formula.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from course_lib.checker.specification.errors import CourseError

_OUTSIDE: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("what was said", default=None)


def reaches_outside() -> None:
    """Say that an access lies outside a tensor: for functions with which a meaning reads and writes memory."""
    said = _OUTSIDE.get()
    if said is not None:
        said.append(True)


@contextlib.contextmanager
def listening() -> Iterator[list[bool]]:
    """Collects what `reaches_outside` says meanwhile: empty as long as it says nothing."""
    said: list[bool] = []
    before = _OUTSIDE.set(said)
    try:
        yield said
    finally:
        _OUTSIDE.reset(before)


@dataclass(frozen=True)
class Slip:
    """One thing that can go wrong.

    Attributes:
        id: snake_case name. What follows two underscores is one way of several to make the same mistake.
        sentence: the cause and where to look, in the second person.
        alone: whether it is left out of pairs: one of many that seldom meet another slip.
        is_nan: whether it leaves NaN that a kernel computes, so that it is not named where memory was never written.
        formula: in `Exercise.slips` the whole computation as somebody who makes this slip writes it, called like the
            oracle; None where it has nothing to say of these arguments. Several where the slip takes several forms. In
            a model None: there `compute` knows what the slip makes.
    """

    id: str
    sentence: str
    alone: bool = False
    is_nan: bool = False
    formula: Callable | tuple[Callable, ...] | None = None

    @property
    def mistake(self) -> str:
        """What a verdict calls it."""
        return self.id.partition("__")[0]


@dataclass(frozen=True, eq=False)
class Model:
    """What an answer computes, step by step, and the slips that can be made on the way.

    Attributes:
        compute: `compute(names, *args)` makes of a case's arguments what an answer makes of them that has the slips and
            styles of these names, a frozenset, in the answer's own precision: it overflows where the answer does. It
            gets the case's tensors themselves, with their strides, and must not write them. NaN stands for an element
            that no one writes. None where it has nothing to say of a case. It says with `reaches_outside` that such an
            answer reaches outside a tensor: its slips are then named only where the judge saw such an access, and
            others only where it saw none.
        slips: the most basic first: of two in one answer, the first is told first.
        styles: sets of further names that right answers differ by and slips show through, such as how a sum of zero is
            guarded. They are tried with every set of slips, in turn, and never told.
        entry: the function of the exercise that it is a model of; the first one by default.
        pairs: whether two slips at once are looked for.
        most_pairs: of the likeliest, which are tried: a number and no time, so that a slow machine tries the same. Less
            for a model that computes long, such as one that generates a text.
        draws: how often it is computed with other roundings, where these decide whether a slip explains a case.
        first_of_equals: of several explanations that no drawn case tells apart, name the first; else none is named.
            Where an author wrote the sentences of two of them, none is either.
        none_is_a_result: whether None is what may be computed; `NotImplemented` then says that there is nothing to say.
        in_float32: whether it gets copies, those of 16-bit tensors in float32: for whole formulas, whose slips are no
            rounding.
        may_be_silent: whether cases of which it has nothing to say speak neither for its slips nor against them.
    """

    compute: Callable[..., Any]
    slips: tuple[Slip, ...]
    styles: tuple[tuple[str, ...], ...] = ((),)
    entry: str | None = None
    pairs: bool = True
    most_pairs: int = 400
    draws: int = 6
    first_of_equals: bool = False
    none_is_a_result: bool = False
    may_be_silent: bool = False
    in_float32: bool = False

    def __post_init__(self) -> None:
        names = [slip.id for slip in self.slips]
        if len(set(names)) != len(names):
            raise CourseError(f"A model's slips are named twice: {sorted({n for n in names if names.count(n) > 1})}.")

    def right(self, *args: Any) -> Any:
        """What an answer without any slip makes of these arguments."""
        return self.compute(frozenset(), *args)

    def with_only(self, *names: str, **wording: str) -> Model:
        """The same model with these slips alone, in this order; `wording` replaces the sentences of some."""
        slips = {slip.id: slip for slip in self.slips}
        unknown = {*names, *wording} - {*slips}
        if unknown:
            raise CourseError(f"The model has no slips {sorted(unknown)}; it has {sorted(slips)}.")
        kept: Sequence[str] = names or tuple(slips)
        chosen = tuple(replace(slips[name], sentence=wording.get(name, slips[name].sentence)) for name in kept)
        return replace(self, slips=chosen)
