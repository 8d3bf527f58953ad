"""Which slips explain an answer: the smallest set with which the exercise's model makes what the answer made.

A set explains an answer only if it does so in every case that finished. Where several do, the answer runs once more, on
a case drawn so that they differ on it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from course_lib.checker.judge.alike import TWO, alike, clearly_apart, exactly_alike
from course_lib.checker.judge.compare import ULPS
from course_lib.checker.judge.evaluate import is_large
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.judge.prediction import Made, Predicted, changes_nothing, disturbed, prediction
from course_lib.checker.specification.case import Case, InOut
from course_lib.checker.specification.model import Model, Slip
from course_lib.checker.specification.nested import leaves, map_leaves, structure, tensors

BAND = TWO * ULPS * torch.finfo(torch.float16).eps  # two float16 results; it ranks pairs, and decides nothing
INFINITE = 1e38  # a number that stands for what is not finite is larger
TELLING = 8  # failing cases by which pairs of slips are ranked; right ones that are asked at once
MOST_ELEMENTS = 400 << 16  # of the cheapest wrong case, over all pairs: with 500,000 numbers in a cache few are tried
ROUNDS = 3  # further cases that are drawn to tell explanations apart


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
    if mine is None or theirs is None or exactly_alike(mine.value, theirs.value):
        return False
    as_one = alike(theirs.value, mine.value, partial(disturbed, model, one, case))
    return not as_one and not alike(mine.value, theirs.value, partial(disturbed, model, other, case))


def _smallest(model: Model, outcomes: Sequence[Outcome], outside: bool) -> list[Made]:
    """All explanations of one slip, else all of two; those that reach outside a tensor as the answer did, if any.

    Styles are tried with one slip. Two are looked for in the first style alone.
    """
    search = _Search(model, sorted(outcomes, key=lambda outcome: (outcome.right_at_first, turn(outcome))))
    written = not any(outcome.seen.unwritten for outcome in search.wrong)

    def possible(found: list[Made]) -> list[Made]:
        return [made for made in found if written or not any(slip.is_nan for slip in made.slips)]

    def as_far(found: list[Made]) -> list[Made]:
        return [made for made in found if search.reaches_outside(made) == outside]

    found = search.explaining_slips()
    if len({_told(made) for made in found}) > 1 or as_far(possible(found)) != found:
        found = search.explaining_slips(each=True)
    if not found and model.pairs:
        found = search.explaining_pairs()
    found = possible(found)
    return as_far(found) or (found if outside else [])


class _Search:
    """Answers that may have been made, against all outcomes; the first is wrong, firm, and cheap to compute."""

    def __init__(self, model: Model, outcomes: Sequence[Outcome]):
        self.model, self.outcomes = model, outcomes
        self.wrong = [outcome for outcome in outcomes if not outcome.right_at_first]
        self.right = [outcome for outcome in outcomes if outcome.right_at_first]
        self._asked: dict[tuple, bool] = {}

    def explaining_slips(self, each: bool = False) -> list[Made]:
        """Single slips that explain all, style after style.

        each: also those that tell what one before them tells already. That is said once, so they matter only where
            there are others, or where what is known of the run speaks against the first.
        """
        found: list[Made] = []
        told: set[str] = set()
        for made in singles(self.model):
            sentence = made.slips[0].sentence
            if (each or sentence not in told) and self.explains(made):
                found.append(made)
                told.add(sentence)
        return found

    def pairs(self) -> list[Made]:
        """Two slips in the first style, the likeliest first, judged by what each of them alone makes of some cases.

        Several, since one case may hide a slip: what is not rescaled does not show where scores fall.
        """
        style = self.model.styles[0]
        slips = [slip for slip in self.model.slips if not slip.alone]
        failed = self.wrong[:TELLING]
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
        """The pairs that explain all, of the likeliest; those of the most basic slips first."""
        fewer = MOST_ELEMENTS // max(1, min((_cost(outcome.case) for outcome in self.wrong), default=1))
        found = [made for made in self.pairs()[: min(self.model.most_pairs, fewer)] if self.explains(made)]
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
        band = BAND * size.clamp(min=float(finite.mean()) if len(finite) else 0.0)
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
        if not all(self._may_give(made, outcome) for outcome in (*self.wrong, *self.right[:TELLING])):
            return False
        # Settled before the right outcomes, which are many, are asked: most slips show in none of the wrong ones.
        return (
            all(self._allows(made, outcome, prediction(self.model, made, outcome.case)) for outcome in self.wrong)
            and self._shows_in_half(made)
            and all(self._allows(made, outcome, prediction(self.model, made, outcome.case)) for outcome in self.right)
        )

    def _shows_in_half(self, made: Made) -> bool:
        """Whether an answer made so can be told from a right one in half of the wrong outcomes that tell it at all.

        No more outcomes are asked than that takes: each may take the model's other roundings.
        """
        failed = shown = 0
        for left, outcome in zip(range(len(self.wrong) - 1, -1, -1), self.wrong):
            predicted = prediction(self.model, made, outcome.case)
            is_shown = None if predicted is None else self._shows(made, outcome, predicted)
            failed += is_shown is not None
            shown += bool(is_shown)
            if 0 < failed + left <= 2 * shown:  # whatever the others say
                return True
            if failed + left > 2 * (shown + left):
                return False
        return 0 < failed <= 2 * shown

    def _may_give(self, made: Made, outcome: Outcome) -> bool:
        """Whether nothing speaks clearly against an answer made so. Other roundings, which cost most, are left alone:
        of several outcomes, one refutes most slips without them. So are large cases, of which nothing is kept. Only
        that no slip shows in a wrong outcome is asked at once: it is asked for all such slips together."""
        if is_large(outcome.case):
            return True
        predicted = prediction(self.model, made, outcome.case)
        shared = not outcome.right_at_first and changes_nothing(self.model, made, outcome.case)
        if predicted is None or not self.model.draws or shared:
            return self._allows(made, outcome, predicted)
        return not clearly_apart(_got(outcome, predicted), predicted.value, outcome.truth)

    def _allows(self, made: Made, outcome: Outcome, predicted: Predicted | None) -> bool:
        """Whether an answer made so gives the outcome, or the model has nothing to say there and may."""
        return self.model.may_be_silent if predicted is None else self._fits(made, outcome, predicted)

    def _fits(self, made: Made, outcome: Outcome, predicted: Predicted) -> bool:
        """Whether an answer made so gives the outcome.

        Asked once of all slips that change nothing there, and of all styles in which some slips make the same numbers.
        """
        none = changes_nothing(self.model, made, outcome.case)
        key = (outcome, made.style) if none else (outcome, made.slips, _digest(predicted))
        if key not in self._asked:
            self._asked[key] = _explained(self.model, made, outcome, predicted)
        return self._asked[key]

    def _shows(self, made: Made, outcome: Outcome, predicted: Predicted) -> bool | None:
        """Whether an answer made so can be told from a right one in a case; None where float32 decides nothing there.

        There the model's own result, rounded otherwise, moves by as much as the slips move it.
        """
        want = outcome.truth.want
        if exactly_alike(want, predicted.value, outcome.truth):
            return False
        others = partial(disturbed, self.model, made, outcome.case)
        return None if alike(want, predicted.value, others, outcome.truth) else True

    def reaches_outside(self, made: Made) -> bool:
        """Whether an answer made so reaches outside a tensor in some case."""
        predicted = (prediction(self.model, made, outcome.case) for outcome in self.outcomes)
        return any(seen is not None and seen.outside for seen in predicted)


def singles(model: Model) -> Iterator[Made]:
    """Answers that make one slip, style after style."""
    for style, slip in itertools.product(model.styles, model.slips):
        yield Made((slip,), style)


def _numbers(predicted: Predicted | None) -> torch.Tensor | None:
    """All numbers of a result in a row, NaN and infinities as large ones; None where there are none.

    A text is a number too, by its bytes: two are alike only where they are equal, or by chance.
    """
    if predicted is None:
        return None
    said = (zlib.crc32(leaf.encode()) if isinstance(leaf, str) else leaf for _, leaf in leaves(predicted.value))
    found = [_as_tensor(leaf) for leaf in said if isinstance(leaf, (torch.Tensor, int, float))]
    if not found:
        return None
    return torch.cat([leaf.double().cpu().flatten() for leaf in found]).nan_to_num(nan=3e38, posinf=2e38, neginf=-2e38)


def _as_tensor(leaf: torch.Tensor | int | float) -> torch.Tensor:
    """A whole number of Python may have more than 64 bits: it is then as good as infinite."""
    if isinstance(leaf, int) and abs(leaf) >= 1 << 63:
        leaf = math.inf if leaf > 0 else -math.inf
    return torch.as_tensor(leaf)


def _explained(model: Model, made: Made, outcome: Outcome, predicted: Predicted) -> bool:
    """Whether an answer made so gives the outcome."""
    others = partial(disturbed, model, made, outcome.case)
    return alike(_got(outcome, predicted), predicted.value, others, outcome.truth)


def _got(outcome: Outcome, predicted: Predicted) -> Any:
    """What the answer gave. What it reads outside a tensor is told as NaN: in bfloat16 the interpreter makes other
    numbers of it."""
    narrow = any(tensor.dtype == torch.bfloat16 for tensor in tensors(outcome.case.args))
    unknown = narrow and predicted.outside and bool(outcome.seen.out_of_bounds)
    return _with_nan_where(predicted.value, outcome.got) if unknown else outcome.got


def _digest(predicted: Predicted) -> bytes:
    """The same for predictions that are equal to the last bit."""
    found = hashlib.sha1(repr((predicted.outside, structure(predicted.value))).encode())
    for _, leaf in leaves(predicted.value):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
            # A clone: of a single element any stride counts as contiguous, and only a stride of 1 can be seen as bytes.
            numbers = leaf.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
            found.update(numbers.view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.digest()


def _with_nan_where(told: Any, got: Any) -> Any:
    """A result with NaN wherever the model has one."""
    if structure(got) != structure(told):
        return got
    foreseen = iter([leaf for _, leaf in leaves(told)])

    def hidden(mine: Any) -> Any:
        theirs = next(foreseen)
        both = isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)
        if not both or not mine.is_floating_point() or mine.shape != theirs.shape:
            return mine
        return mine.masked_fill(theirs.isnan().to(mine.device), math.nan)

    return map_leaves(hidden, got)


def _reproduces(model: Model, made: Made, outcome: Outcome) -> bool:
    predicted = prediction(model, made, outcome.case)
    return predicted is not None and _explained(model, made, outcome, predicted)


def turn(outcome: Outcome) -> tuple[bool, int]:
    """By which outcomes are asked one after the other: what is firm first, and what is cheap to compute."""
    return _is_soft(outcome), _cost(outcome.case)


def _is_soft(outcome: Outcome) -> bool:
    """Whether a quarter of a right result is undecided digits. What is firm refutes most slips, and at once."""
    like = [
        leaf for _, leaf in leaves(outcome.truth.like) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    epsilon = torch.finfo(like[0].dtype).eps if like else 1.0
    return any(loss > epsilon**0.75 for loss in outcome.truth.losses())


def _cost(case: Case) -> int:
    """Elements of a case's tensors, those that are written too."""
    given = [leaf.tensor if isinstance(leaf, InOut) else leaf for _, leaf in leaves(case.args)]
    return sum(leaf.numel() for leaf in given if isinstance(leaf, torch.Tensor))
