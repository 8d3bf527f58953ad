"""Which slips explain an answer: the smallest set with which the exercise's model makes what the answer made.

A set explains an answer only if it does so in every case that finished. Where several do, the answer runs once more, on
a case drawn so that they differ on it.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from course_lib.checker.judge.compare import Truth
from course_lib.checker.judge.evaluate import once
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.runner.process import sparse
from course_lib.checker.specification.exercise import Case, InOut, arguments
from course_lib.checker.specification.model import Model, Slip, Slips
from course_lib.checker.specification.nested import leaves, structure, tensors

ROUNDING = 3e-4  # of the largest value: what a float32 kernel and a model that adds in another order may differ by
ROUNDING_16 = 1e-2  # the same where results have 16 bits
INFINITE = 1e38  # a number that stands for what is not finite is larger
TELLING = 8  # failing cases by which pairs of slips are ranked
MOST_PAIRS = 400  # of the likeliest, which are tried
SECONDS = 3.0  # of a processor, for trying pairs
ROUNDS = 3  # further cases that are drawn to tell explanations apart


@dataclass(frozen=True)
class Made:
    """How an answer may have been made: its slips, and its style in what right answers differ by."""

    slips: tuple[Slip, ...]
    style: tuple[str, ...] = ()


@dataclass(frozen=True)
class Predicted:
    """What an answer made so gives, and whether it reaches outside a tensor."""

    value: Any
    outside: bool


@dataclass(frozen=True)
class Explanation:
    """The slips that an answer makes, the most basic first."""

    slips: tuple[Slip, ...]

    @property
    def sentence(self) -> str:
        """What a learner is told."""
        if len(self.slips) == 1:
            return self.slips[0].sentence
        first, second = self.slips
        return f"Two things are wrong. First: {first.sentence} Second: {second.sentence}"


def explain(
    model: Model,
    outcomes: Sequence[Outcome],
    outside: bool = False,
    again: Callable[[Made, Made], Outcome | None] | None = None,
) -> Explanation | None:
    """The slips that reproduce every outcome, or None where none do, or where several do and nothing tells them apart.

    Args:
        model: of the function whose cases these are.
        outcomes: the finished cases of the function, one of them wrong at least.
        outside: whether an access outside a tensor was seen; slips that make one are then asked first.
        again: runs the answer on a case on which two sets of slips differ; None where it finds no such case.
    """
    found = _smallest(model, outcomes, outside)
    for _ in range(ROUNDS):
        other = next((made for made in found if _told(made) != _told(found[0])), None)
        if other is None or again is None:
            break
        outcome = again(found[0], other)
        if outcome is None:
            break
        found = [made for made in found if _reproduces(model, made, outcome)]
    taught = {_told(made) for made in found if made.slips[0].formula}
    if len({_told(made) for made in found}) == 1 or found and model.first_of_equals and len(taught) < 2:
        return Explanation(found[0].slips)
    shared = set.intersection(*(set(_told(made)) for made in found)) if found else set()
    common = tuple(slip for slip in found[0].slips if slip.sentence in shared) if shared else ()
    return Explanation(common) if common else None


def _told(made: Made) -> tuple[str, ...]:
    """What a learner would be told: two ways of making the same mistakes need not be told apart."""
    return tuple(slip.sentence for slip in made.slips)


def differ(model: Model, one: Made, other: Made, case: Case) -> bool:
    """Whether two answers make different things of a case, both of which the model can say."""
    mine, theirs = (prediction(model, made, case) for made in (one, other))
    return mine is not None and theirs is not None and not alike(mine.value, theirs.value)


def _smallest(model: Model, outcomes: Sequence[Outcome], outside: bool) -> list[Made]:
    """All explanations of one slip, else all of two; those that reach outside a tensor as the answer did, if any.

    Styles are tried with one slip. Two are looked for in the first style alone.
    """
    search = _Search(model, sorted(outcomes, key=lambda outcome: (outcome.right_at_first, _cost(outcome.case))))
    found = [made for style in model.styles for slip in model.slips if search.explains(made := Made((slip,), style))]
    if not found and model.pairs:
        found = search.explaining_pairs()
    if any(outcome.seen.unwritten for outcome in outcomes if not outcome.right_at_first):
        found = [made for made in found if not any(slip.is_nan for slip in made.slips)]
    return [made for made in found if search.reaches_outside(made) == outside] or (found if outside else [])


class _Search:
    """Answers that may have been made, against all outcomes; the first is wrong and the cheapest to compute."""

    def __init__(self, model: Model, outcomes: Sequence[Outcome]):
        self.model, self.outcomes = model, outcomes

    def pairs(self) -> list[Made]:
        """Two slips in the first style, the likeliest first, judged by what each of them alone makes of some cases.

        Several, since one case may hide a slip: what is not rescaled does not show where scores fall.
        """
        style = self.model.styles[0]
        slips = [slip for slip in self.model.slips if not slip.alone]
        failed = [outcome for outcome in self.outcomes if not outcome.right_at_first][:TELLING]
        if len(slips) < 2:
            return []
        likely = sum((self._likely(slips, style, outcome) for outcome in failed), torch.zeros(len(slips), len(slips)))
        couples = [
            (-float(likely[one, other]), one, other)
            for one, other in itertools.combinations(range(len(slips)), 2)
            if likely[one, other] > 0 and slips[one].sentence != slips[other].sentence
        ]
        return [Made((slips[one], slips[other]), style) for _, one, other in sorted(couples)]

    def explaining_pairs(self) -> list[Made]:
        """The pairs that explain all, as far as time allows; those of the most basic slips first."""
        end = time.process_time() + SECONDS
        found = [
            made
            for made in itertools.takewhile(lambda _: time.process_time() < end, self.pairs()[:MOST_PAIRS])
            if self.explains(made)
        ]
        place = {slip: number for number, slip in enumerate(self.model.slips)}
        return sorted(found, key=lambda made: [place[slip] for slip in made.slips])

    def _likely(self, slips: Sequence[Slip], style: tuple[str, ...], outcome: Outcome) -> torch.Tensor:
        """For two slips each, the share of the result's elements that they may have made, or 0 where neither shows.

        An element that one of them changes should be what it makes of it, and one that neither changes should be right;
        of one that both change nothing is known.
        """
        right = _numbers(prediction(self.model, Made((), style), outcome.case))
        got = _numbers(Predicted(outcome.got, False))
        alone = [_numbers(prediction(self.model, Made((slip,), style), outcome.case)) for slip in slips]
        if right is None or got is None or right.shape != got.shape:
            return torch.ones(len(slips), len(slips))
        unknown = torch.full_like(right, math.inf)
        made = torch.stack([unknown if one is None or one.shape != right.shape else one for one in alone])
        size = right.abs()
        finite = size[size < INFINITE]
        band = ROUNDING_16 * size.clamp(min=float(finite.mean()) if len(finite) else 0.0)
        changed, fits = ((made - other).abs() > band for other in (right, got))
        changed, fits, is_right = changed.float(), 1 - fits.float(), ((got - right).abs() <= band).float()
        same = 1 - changed
        share = changed @ changed.T + (changed * fits) @ same.T + same @ (changed * fits).T + (same * is_right) @ same.T
        shows = changed.any(1).float()
        return share / max(1, right.numel()) * torch.maximum(shows[:, None], shows)

    def explains(self, made: Made) -> bool:
        """Whether an answer made so gives every outcome, and can be told from a right one in half of the wrong ones.

        An error that is too small for a model's rounding is explained by no slip: one without effect would do for it.
        """
        failed = shown = 0
        for outcome in self.outcomes:
            predicted = prediction(self.model, made, outcome.case)
            if predicted is None and self.model.may_be_silent:
                continue
            if predicted is None or not _explained(outcome, predicted):
                return False
            if not outcome.right_at_first:
                failed += 1
                shown += not alike(predicted.value, outcome.truth.want)
        return 0 < failed <= 2 * shown

    def reaches_outside(self, made: Made) -> bool:
        """Whether an answer made so reaches outside a tensor in some case."""
        predicted = (prediction(self.model, made, outcome.case) for outcome in self.outcomes)
        return any(seen is not None and seen.outside for seen in predicted)


def _numbers(predicted: Predicted | None) -> torch.Tensor | None:
    """All numbers of a result in a row, NaN and infinities as large ones; None where there are none.

    A text is a number too, by its bytes: two are alike only where they are equal, or by chance.
    """
    if predicted is None:
        return None
    said = (zlib.crc32(leaf.encode()) if isinstance(leaf, str) else leaf for _, leaf in leaves(predicted.value))
    found = [torch.as_tensor(leaf) for leaf in said if isinstance(leaf, (torch.Tensor, int, float))]
    if not found:
        return None
    return torch.cat([leaf.double().cpu().flatten() for leaf in found]).nan_to_num(nan=3e38, posinf=2e38, neginf=-2e38)


def _explained(outcome: Outcome, predicted: Predicted) -> bool:
    """Whether an answer made so gives the outcome.

    What is read outside a tensor is told as NaN. In bfloat16 the interpreter makes other numbers of it.
    """
    narrow = any(tensor.dtype == torch.bfloat16 for tensor in tensors(outcome.case.args))
    unknown = narrow and predicted.outside and bool(outcome.seen.out_of_bounds)
    return alike(outcome.got, predicted.value, outcome.truth, unknown)


def _reproduces(model: Model, made: Made, outcome: Outcome) -> bool:
    predicted = prediction(model, made, outcome.case)
    return predicted is not None and _explained(outcome, predicted)


def _cost(case: Case) -> int:
    """Elements of a case's tensors, those that are written too."""
    given = [leaf.tensor if isinstance(leaf, InOut) else leaf for _, leaf in leaves(case.args)]
    return sum(leaf.numel() for leaf in given if isinstance(leaf, torch.Tensor))


def prediction(model: Model, made: Made, case: Case) -> Predicted | None:
    """What the model makes of the case; of two slips, which are many, nothing is kept."""
    if len(made.slips) > 1:
        return _worked_out(model, made, case)
    return once(case, ("model", model, made), lambda: _worked_out(model, made, case))


def _worked_out(model: Model, made: Made, case: Case) -> Predicted | None:
    """What the model makes of the case; it gets copies with the same strides, and writes those that are written."""
    try:
        convert = _at_least_float32 if model.in_float32 else _with_its_memory
        args, written = arguments(case, convert) if case.in_place or model.in_float32 else (case.args, [])
        with torch.no_grad():
            slips = Slips([*(slip.id for slip in made.slips), *made.style])
            result = model.compute(slips, *args)
        if result is NotImplemented or result is None and not written and not model.none_is_a_result:
            return None
        return Predicted((result, {"written": written}) if written else result, slips.outside)
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


def alike(got: Any, predicted: Any, truth: Truth | None = None, unknown: bool = False) -> bool:
    """Whether a result is what a model makes, up to rounding; what is not finite must stand in the same places.

    With `unknown`, anything may stand where the model makes NaN.

    The error that a right answer may make counts too, where the truth is given: large scores leave large errors.
    """
    if structure(got) != structure(predicted):
        return False
    for (path, mine), (_, told) in zip(leaves(got), leaves(predicted)):
        if unknown and isinstance(told, torch.Tensor) and isinstance(mine, torch.Tensor) and mine.shape == told.shape:
            mine = mine.masked_fill(told.isnan().to(mine.device), math.nan) if mine.is_floating_point() else mine
        if not _same(mine, told, truth.slack(path) if truth else 0.0):
            return False
    return True


def _same(got: Any, told: Any, slack: float) -> bool:
    if not isinstance(told, torch.Tensor) or not isinstance(got, torch.Tensor):
        if type(told) is int and type(got) is int:
            return got == told
        if isinstance(told, (int, float)) and isinstance(got, (int, float)):
            return math.isclose(got, told, rel_tol=1e-6) or (math.isnan(told) and math.isnan(got))
        return type(got) is type(told) and got == told
    if got.shape != told.shape:
        return False
    if not told.is_floating_point() or not got.is_floating_point():
        return bool(torch.equal(got.double(), told.double()))
    mine, theirs = _array(got), _array(told if told.dtype == got.dtype else told.to(got.dtype))
    finite = np.isfinite(theirs)
    if not np.array_equal(np.isfinite(mine), finite):
        return False
    if not finite.all():
        if not np.array_equal(mine == -math.inf, theirs == -math.inf):
            return False
        mine, theirs = mine[finite], theirs[finite]
    if not theirs.size:
        return True
    band = max((ROUNDING if got.element_size() > 2 else ROUNDING_16) * float(np.abs(theirs).max()), slack, 1e-30)
    return bool(np.abs(mine - theirs).max() <= band)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """In float64: the tensors compared here are small, and NumPy's steps on such are several times shorter."""
    return tensor.detach().double().cpu().numpy()
