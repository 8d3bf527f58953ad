"""An executable model of what an exercise computes, with the slips that people make in it as switches.

The judge explains a wrong answer by the smallest set of slips with which the model makes what the answer made, in
every case. So a slip is written once, as an `if` where it happens, and two that meet in one answer need no entry of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from course_lib.checker.specification.errors import CourseError


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
            a model None: there a slip is a switch.
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


class Slips:
    """The slips that are switched on: `slips("scale_missing")` is true or false.

    A model may ask for slips that the exercise at hand does not have.

    Attributes:
        outside: whether an answer with these slips reaches outside a tensor, which the model sets. The judge names them
            only where it saw such an access, and others only where it saw none.
        asked: the names that the model has asked for; None where its result may hang on any.
    """

    def __init__(self, switched_on: Iterable[str] = ()):
        self._switched_on = frozenset(switched_on)
        self.outside = False
        self.asked: set[str] | None = set()

    @property
    def switched_on(self) -> frozenset[str]:
        """Their names, and those of styles."""
        self.asked = None
        return self._switched_on

    def __call__(self, *names: str) -> bool:
        """Whether one of these slips is made."""
        if self.asked is not None:
            self.asked.update(names)
        return not self._switched_on.isdisjoint(names)


@dataclass(frozen=True, eq=False)
class Model:
    """What an answer computes, step by step, and the slips that can be made on the way.

    Attributes:
        compute: `compute(slips, *args)` makes of a case's arguments what an answer with these slips makes of them, in
            the answer's own precision: it overflows where the answer does. It gets the case's tensors themselves, with
            their strides, and must not write them. NaN stands for an element that no one writes. None where it has
            nothing to say of a case.
        slips: what can be switched on, the most basic first: of two that explain an answer, the first is told first.
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

    def with_only(self, *names: str, **wording: str) -> Model:
        """The same model with these slips alone, in this order; `wording` replaces the sentences of some."""
        slips = {slip.id: slip for slip in self.slips}
        unknown = {*names, *wording} - {*slips}
        if unknown:
            raise CourseError(f"The model has no slips {sorted(unknown)}; it has {sorted(slips)}.")
        kept: Sequence[str] = names or tuple(slips)
        chosen = tuple(replace(slips[name], sentence=wording.get(name, slips[name].sentence)) for name in kept)
        return replace(self, slips=chosen)
