"""What a docstring promises of the arguments, as data, and the cases that are drawn from it.

A `Contract` names the choices that its exercise leaves open (a length, a layout, a magnitude) with the levels of each:
the ends of its range, what lies around a block, what is no power of two. A check draws cases in which every level
stands, and every two levels of different choices meet, in as few cases as a greedy search finds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from course_lib.checker.specification.case import Case
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.errors import CourseError

Choice = Mapping[str, Any]  # one level for each of a contract's choices
TRIES = 12  # rows that compete for each place in the list


@dataclass(frozen=True)
class Level:
    """One level of a choice that a plain value does not say well: what it is, and how a learner reads it."""

    value: Any
    words: str

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True, eq=False)
class Contract:
    """The choices that a docstring leaves open, and the arguments that a set of choices makes.

    Attributes:
        make: `make(draw, **choices)` makes a case's arguments: a tuple.
        choices: name to levels: plain values or `Level`s. A name is read by learners: "query_length" becomes "query
            length 65".
        says: name to the words of the docstring that promise its range; a test looks for them there.
        valid: whether these choices may meet; all may by default.
        entry, driver: as for a `Case`.
        most: cases drawn at a check. Where more would be needed for all pairs to meet, every level still stands in
            one, and which pairs meet differs from check to check.
    """

    make: Callable[..., tuple]
    choices: Mapping[str, Sequence[Any]]
    says: Mapping[str, str] = field(default_factory=dict)
    valid: Callable[..., bool] | None = None
    entry: str | None = None
    driver: Callable | None = None
    most: int = 16

    def __post_init__(self) -> None:
        empty = [name for name, levels in self.choices.items() if not levels]
        unknown = [name for name in self.says if name not in self.choices]
        if empty or unknown:
            raise CourseError(f"A contract's choices {empty} have no level, and {unknown} are none of its choices.")

    def cases(self, draw: Draw) -> list[Case]:
        """The cases of one check."""
        return [
            Case(self._name(row), self.make(draw, **_values(row)), entry=self.entry, driver=self.driver)
            for row in self.rows(draw)
        ]

    def rows(self, draw: Draw) -> list[dict[str, Any]]:
        """Sets of choices in which every level stands, and every two levels meet as far as `most` rows can hold."""
        missing = self._pairs
        rows: list[dict[str, Any]] = []
        fresh = {(name, level) for name, levels in self.choices.items() for level in range(len(levels))}
        while missing and len(rows) < self.most:
            row = max(
                (self._candidate(draw, missing, fresh, from_fresh=number % 2 == 0) for number in range(TRIES)),
                key=lambda row: (len(fresh & _levels(row)), len(missing.keys() & _met(row))),
            )
            if not missing.keys() & _met(row) and not fresh & _levels(row):
                break
            met = _met(row)
            missing = {pair: None for pair in missing if pair not in met}
            fresh -= _levels(row)
            rows.append(row)
        return [{name: self.choices[name][level] for name, level in row.items()} for row in rows]

    @functools.cached_property
    def _pairs(self) -> dict[frozenset, None]:
        """All pairs of levels that may meet, in order; those of one choice alone where there is no other."""
        draw = Draw(0)
        singles = [[(name, level) for level in range(len(levels))] for name, levels in self.choices.items()]
        if len(singles) == 1:
            return {frozenset([single]): None for single in singles[0]}
        return {
            frozenset(pair): None
            for one, other in itertools.combinations(singles, 2)
            for pair in itertools.product(one, other)
            if self._completed(draw, dict(pair)) is not None
        }

    def _candidate(
        self, draw: Draw, missing: Mapping[frozenset, None], fresh: Set, from_fresh: bool = False
    ) -> dict[str, int]:
        """A row that holds one missing pair, or one level that has not stood yet, filled up with such levels, or any.

        Few sets of choices may hold a level, such as many splits that meet few rows alone: it is begun with.
        """
        if fresh and from_fresh:
            row = self._completed(draw, dict([draw.choice(sorted(fresh))]), fresh)
            if row:
                return row
        pair = next(itertools.islice(missing, draw.integer(0, len(missing)), None))
        row = self._completed(draw, dict(pair), fresh) or self._completed(draw, dict(pair))
        return row or self._candidate(draw, missing, fresh)

    def _completed(self, draw: Draw, given: dict[str, int], fresh: Set = frozenset()) -> dict[str, int] | None:
        """Levels for the other choices as well; None where none was found that is valid."""
        for _ in range(40 if self.valid else 1):
            row = {}
            for name, levels in self.choices.items():
                wanted = [level for level in range(len(levels)) if (name, level) in fresh]
                row[name] = given.get(name, draw.choice(wanted or range(len(levels))))
            if self.valid is None or self.valid(**_values({n: self.choices[n][level] for n, level in row.items()})):
                return row
            fresh = frozenset() if draw.integer(0, 2) else fresh
        return None

    def _name(self, row: Choice) -> str:
        said = []
        for name, level in row.items():
            if isinstance(level, Level):
                said.append(level.words)
            elif isinstance(level, torch.dtype):
                said.append(str(level).removeprefix("torch."))
            elif isinstance(level, bool):
                said.append(f"{name}={level}")
            else:
                said.append(f"{name.replace('_', ' ')} {level:,}" if isinstance(level, (int, float)) else str(level))
        return ", ".join(word for word in said if word)


def _values(row: Choice) -> dict[str, Any]:
    return {name: level.value if isinstance(level, Level) else level for name, level in row.items()}


def _levels(row: Mapping[str, int]) -> set:
    return set(row.items())


def _met(row: Mapping[str, int]) -> set[frozenset]:
    items = list(row.items())
    return {frozenset(pair) for pair in (itertools.combinations(items, 2) if len(items) > 1 else zip(items))}
