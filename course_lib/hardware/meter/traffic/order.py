"""The order in which the programs of a launch run: the interpreter's is ascending, and a GPU keeps none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

ASCENDING, DESCENDING = "ascending", "descending"


def numbering(order: str | int) -> Callable[[int, int], int] | None:
    """Which program runs in a turn, as ``function(turn, turns)``; None where each runs in its own.

    The turns of a launch are asked for from 0 on. Each launch is shuffled in another way.

    Args:
        order: "ascending", "descending", or a number, by which programs are shuffled.

    Raises:
        ValueError: another word.
    """
    if order == ASCENDING:
        return None
    if order == DESCENDING:
        return lambda turn, turns: turns - 1 - turn
    if not isinstance(order, int):
        raise ValueError(f"order={order!r}; it is {ASCENDING!r}, {DESCENDING!r} or a number to shuffle by.")
    generator, shuffled = np.random.default_rng(order), np.arange(0)

    def number(turn: int, turns: int) -> int:
        nonlocal shuffled
        if turn == 0:
            shuffled = generator.permutation(turns)
        return int(shuffled[turn])

    return number
