"""Tables of rows, of which the first that fits decides: calls that decide every row of one, and moved rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

Table = Sequence[tuple[Callable[[SimpleNamespace], bool], Any]]  # for each row: whether it fits a call, what it says
Call = dict[str, Any]
DRAWN = 5000  # calls of which those are kept that tell something new


def deciding(
    draw, table: Table, levels: Mapping[str, Sequence], shares: Mapping[str, Sequence], known: Sequence[Call] = ()
) -> Iterator[Call]:
    """Calls that decide every row, every value of an argument in it, and every two rows that can fit together.

    Args:
        draw: of the check.
        table: its last row fits every call.
        levels: for each argument the values that it may have, in the order of the arguments.
        shares: how often the values of an argument are drawn; equally often by default.
        known: calls that are made anyhow: what they tell need not be told again.
    """
    told = set().union(*(_told_by(table, levels, call) for call in known))
    source = random.Random(draw.integer(0, 1 << 30))
    drawn = [
        {name: source.choices(values, shares.get(name))[0] for name, values in levels.items()} for _ in range(DRAWN)
    ]
    tells = [(call, _told_by(table, levels, call)) for call in drawn]
    for least in (12, 8, 5, 3, 2, 1):  # calls that tell much come first, so that fewer are needed
        for call, tell in tells:
            if len(tell - told) >= least:
                told |= tell
                yield call


def _told_by(table: Table, levels: Mapping[str, Sequence], call: Call) -> set[tuple]:
    """What a call can tell of an answer: a value that a row has to let pass, a value that it has to stop, and every
    lower row that fits as well and says something else."""
    fit = [row for row, (fits, _) in enumerate(table) if fits(SimpleNamespace(**call))]
    says = table[fit[0]][1]
    told: set[tuple] = {(fit[0], lower) for lower in fit[1:] if table[lower][1] != says}
    if len(fit) == 1 or table[fit[1]][1] != says:
        told |= {(fit[0], name, value) for name, value in call.items()}
    for name, values in levels.items():
        for value in values:
            other = SimpleNamespace(**{**call, name: value})
            above = next((row for row in range(fit[0]) if table[row][0](other)), None)
            if above is not None and table[above][1] != says:
                told.add((above, "not", name, call[name]))
    return told


def moves(
    name: str,
    pieces: Sequence[str],
    below: Mapping[int, Collection[int]],
    above: Mapping[int, Collection[int]],
) -> dict[str, tuple[str, ...]]:
    """Edits of a chain of `if`s that returns: each row below each that follows, each row above each before it.

    Args:
        name: of the slip; the ways are `name__2_below_4` and `name__4_above_2`.
        pieces: for each row its condition, or "if …:" where the condition stands within another one as well.
        below, above: by the upper row the lower ones for which there is no such edit.
    """

    def condition(piece: str) -> str:
        return piece.removeprefix("if ").removesuffix(":")

    def narrowed(piece: str, others: str) -> tuple[str, str]:
        form = "if {}:" if piece.startswith("if ") else "{}"
        return piece, form.format(f"({condition(piece)}) and not ({others})")

    ways: dict[str, tuple[str, ...]] = {}
    for row, last in itertools.combinations(range(len(pieces)), 2):
        if last not in below.get(row, ()):
            passed = " or ".join(f"({condition(piece)})" for piece in pieces[row + 1 : last + 1])
            ways[f"{name}__{row}_below_{last}"] = narrowed(pieces[row], passed)
        if last > row + 1 and last not in above.get(row, ()):
            each = (narrowed(piece, condition(pieces[last])) for piece in pieces[row:last])
            ways[f"{name}__{last}_above_{row}"] = tuple(itertools.chain(*each))
    return ways
