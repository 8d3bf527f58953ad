"""What an answer that makes certain slips makes of a case, as its exercise's model foresees it."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from course_lib.checker.common import sparse
from course_lib.checker.judge.alike import exactly_alike
from course_lib.checker.judge.disturbed import Disturbed
from course_lib.checker.judge.evaluate import is_large, once
from course_lib.checker.specification.case import Case, arguments
from course_lib.checker.specification.model import Model, Slip, listening

DRAWS_OF_A_LARGE_CASE = 2  # results that other processors might have made; many elements need no luck


@dataclass(frozen=True)
class Made:
    """How an answer may have been made: its slips, and its style in what right answers differ by."""

    slips: tuple[Slip, ...]
    style: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Of its slips, and of what its style is."""
        return frozenset([*(slip.id for slip in self.slips), *self.style])


@dataclass(frozen=True)
class Predicted:
    """What an answer made so gives, and whether it reaches outside a tensor."""

    value: Any
    outside: bool


def prediction(model: Model, made: Made, case: Case) -> Predicted | None:
    """What the model makes of the case; of two slips, which are many, only what was made last is kept."""
    if len(made.slips) > 1:
        kept: dict[Made, Predicted | None] = once(case, ("of two slips", model), dict)
        if made not in kept:
            kept.clear()
            kept[made] = _worked_out(model, made, case)
        return kept[made]
    return once(case, ("model", model, made), lambda: _worked_out(model, made, case))


def disturbed(model: Model, made: Made, case: Case) -> Iterator[Any]:
    """What the model makes of the case where its sums are added in other orders; None where it then says nothing.

    Each is worked out when it is asked for. Where the slips change nothing, it is the right computation that moves, and
    it is worked out once for all such slips.
    """
    if changes_nothing(model, made, case):
        made = replace(made, slips=())
    known = once(case, ("disturbed", model, made), list)
    for seed in range(min(model.draws, DRAWS_OF_A_LARGE_CASE) if is_large(case) else model.draws):
        if seed == len(known):
            drawn = _worked_out(model, made, case, Disturbed(seed))
            known.append(None if drawn is None else drawn.value)
        yield known[seed]


def changes_nothing(model: Model, made: Made, case: Case) -> bool:
    """Whether the model makes the same of a case with these slips and with none, but for the last digits."""
    if len(made.slips) != 1:
        return False  # of two slips, which are many, nothing is kept

    def work() -> bool:
        mine, right = prediction(model, made, case), prediction(model, replace(made, slips=()), case)
        return mine is not None and right is not None and (mine is right or exactly_alike(mine.value, right.value))

    return once(case, ("changes nothing", model, made), work)


def _worked_out(model: Model, made: Made, case: Case, rounding: Disturbed | None = None) -> Predicted | None:
    """What the model makes of the case; it gets copies with the same strides, and writes those that are written."""
    try:
        convert = _at_least_float32 if model.in_float32 else _with_its_memory
        args, written = arguments(case, convert) if case.in_place or model.in_float32 else (case.args, [])
        with torch.no_grad(), rounding or contextlib.nullcontext(), listening() as outside:
            result = model.compute(made.names, *args)
        if result is NotImplemented or result is None and not written and not model.none_is_a_result:
            return None
        return Predicted((result, {"written": written}) if written else result, bool(outside))
    except Exception:
        raise_when_strict()
        return None


def _with_its_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, and what lies between the elements; but nothing where that would be gigabytes."""
    return sparse.apart(tensor, tensor.stride()) if sparse.is_far(tensor) else copy.deepcopy(tensor)


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor.clone()


def raise_when_strict() -> None:
    """Within an `except`: one unlucky guess must not cost the learner the verdict; tests run with COURSE_STRICT."""
    if os.environ.get("COURSE_STRICT"):
        raise
