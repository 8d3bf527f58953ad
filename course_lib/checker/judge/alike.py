"""Is a result what a model foresees? As far as float32 decides: a tolerance follows from the case, and is not picked.

Two right computations of one formula differ in their last digits, and how much of a result these are is the inputs'
choice: where scores reach ±150, an exponential makes 10⁻⁵ of a rounding, and where they lie near -10²⁰ the order of a
dot product's additions says which key wins. So what is not equal to the last digits is compared with how far the
model's own results lie apart when it rounds in other ways (`disturbed`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from course_lib.checker.judge.compare import ULPS, Truth
from course_lib.checker.specification.nested import leaves, structure

TWO = 2.0  # computations that are compared, each of them with an error
EXACT = np.finfo(np.float32).eps

Others = Callable[[], Iterable[Any]]  # the results that other processors might have made; asked for where it matters


def alike(got: Any, told: Any, others: Others, truth: Truth | None = None) -> bool:
    """Whether a result is what a model makes, up to rounding; what is not finite must stand in the same places.

    Args:
        got, told: the result, and what the model makes.
        others: what it makes rounding otherwise.
        truth: of the case. The error that a right answer may make counts too: large scores leave large errors. And what
            is clearly different by that measure needs no `others`.
    """
    near, moved = _near(got, told, truth), _Moved(others)
    if near is None:
        return False
    return all(_same_as_one_of(mine, theirs, slack, moved.at(path)) for path, mine, theirs, slack in near)


def clearly_apart(got: Any, told: Any, truth: Truth | None = None) -> bool:
    """Whether a result is not what a model makes, however that is rounded: what `alike` says without `others`."""
    return _near(got, told, truth) is None


def exactly_alike(got: Any, told: Any, truth: Truth | None = None) -> bool:
    """Whether two results are equal but for the last digits that any two computations differ by."""
    return alike(got, told, lambda: [told], truth)


def _near(got: Any, told: Any, truth: Truth | None) -> list[tuple[str, torch.Tensor, torch.Tensor, float]] | None:
    """The tensors of which other roundings say whether they are the same, and the error allowed in each.

    None where something is clearly different. In a list that is empty, all is the same.
    """
    if structure(got) != structure(told):
        return None
    near = []
    for (path, mine), (_, theirs) in zip(leaves(got), leaves(told)):
        if isinstance(theirs, torch.Tensor) and isinstance(mine, torch.Tensor):
            slack, size = (truth.slack(path), truth.size(path)) if truth else (0.0, None)
            same = _same_clearly(mine, theirs, slack, size)
            near += [(path, mine, theirs, slack)] if same is None else []
        else:
            same = _same_number(mine, theirs)
        if same is False:
            return None
    return near


class _Moved:
    """The leaves of other results, worked out when the first is asked for."""

    def __init__(self, others: Others):
        self._others = others
        self._known: list[dict[str, Any] | None] = []
        self._further: Iterator[Any] | None = None

    def at(self, path: str) -> Iterator[Any]:
        """What stands at a path in each of the results in turn; None where there is no such."""
        for number in itertools.count():
            if number == len(self._known):
                self._further = iter(self._others()) if self._further is None else self._further
                try:
                    other = next(self._further)
                except StopIteration:
                    return
                self._known.append(None if other is None else dict(leaves(other)))
            known = self._known[number]
            yield None if known is None else known.get(path)


def _same_number(got: Any, told: Any) -> bool:
    """Whether two numbers are the same: integers exactly, others but for what float32 leaves."""
    if type(told) is int and type(got) is int:
        return got == told
    if isinstance(told, (int, float)) and isinstance(got, (int, float)):
        return math.isclose(got, told, rel_tol=TWO * ULPS * float(EXACT)) or (math.isnan(told) and math.isnan(got))
    return type(got) is type(told) and got == told


def _same_clearly(got: torch.Tensor, told: torch.Tensor, slack: float, right: float | None) -> bool | None:
    """Whether two tensors are the same, or None where that is for other roundings to say.

    slack, right: the error allowed to a right result, and its largest number; None where nobody knows.
    """
    if got.shape != told.shape:
        return False
    mine, theirs, epsilon, floor = _prepared(got, told)
    wrong = _differ(mine, theirs, max(floor, slack, 1e-30 if epsilon else 0.0))
    if not wrong.any():
        return True
    if right is None or not epsilon:
        return None
    size = _largest(theirs)
    loss, growth = (slack / right, size / right) if right else (0.0, math.inf if size and slack else 1.0)
    return False if _share(mine, theirs, wrong) > _at_most(loss, growth, epsilon) else None


def _same_as_one_of(got: torch.Tensor, told: torch.Tensor, slack: float, others: Iterator[Any]) -> bool:
    """Whether a tensor is off from what a model makes by no more than twice what that moves by, rounded otherwise."""
    like = _coarser(got, told)
    mine, theirs, epsilon, floor = _prepared(got, told)
    # Where sums meet infinities of both signs, one more or one less that overflows makes NaN of an infinity.
    unsure = ~np.isfinite(mine) & ~np.isfinite(theirs) if np.isnan(theirs).any() else np.zeros(theirs.shape, dtype=bool)
    spread = 0.0
    for moved in others:
        other = _array(moved, like) if isinstance(moved, torch.Tensor) else None
        if other is None or other.shape != theirs.shape:
            return True  # whether the model says anything hangs on a rounding: then this decides nothing
        if not epsilon:
            unsure |= other != theirs
        else:
            unsure |= _kind(other) != _kind(theirs)
            both = np.isfinite(other) & np.isfinite(theirs)
            spread = max(spread, _largest(other[both] - theirs[both]))
        band = max(TWO * spread + floor, slack) if epsilon else 0.0
        # Next to the largest number that there is, a rounding overflows; what is chosen and not computed has none.
        near = np.isfinite(theirs) & (np.abs(theirs) + band > torch.finfo(like.dtype).max) if spread else False
        if not (_differ(mine, theirs, band) & ~(unsure | near)).any():
            return True
    return False


def _coarser(got: torch.Tensor, told: torch.Tensor) -> torch.Tensor:
    """The one whose dtype counts: a truth in float64 has more digits than anybody is asked for."""
    return told if got.dtype == torch.float64 else got


def _prepared(got: torch.Tensor, told: torch.Tensor) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Both as arrays, their dtype's epsilon (0 for integers), and what any two computations may differ by."""
    like = _coarser(got, told)
    mine, theirs = _array(got, like), _array(told, like)
    epsilon = torch.finfo(like.dtype).eps if like.is_floating_point() else 0.0
    # In 16 bits too: plain PyTorch rounds scores, weights and their sums, where a model may round in the end alone.
    return mine, theirs, epsilon, TWO * ULPS * epsilon * _largest(theirs)


def _at_most(loss: float, growth: float, epsilon: float) -> float:
    """The share of its largest number that a model's result may move by; what is further off is clearly different.

    A right answer loses `loss` of its own. Slips magnify that, but by no more than half of the dtype's digits, or where
    the result has grown as well, by as much again: a difference that cancels has grown from roundings alone.
    """
    return (loss + epsilon) * max(1.0, growth) / math.sqrt(epsilon)


def _differ(mine: np.ndarray, theirs: np.ndarray, band: float) -> np.ndarray:
    """Where two arrays are further apart than a band, or of different kinds."""
    with np.errstate(invalid="ignore"):
        return (_kind(mine) != _kind(theirs)) | (np.isfinite(theirs) & ~(np.abs(mine - theirs) <= band))


def _kind(numbers: np.ndarray) -> np.ndarray:
    """0 for what is finite, 1 for minus infinity, 2 for infinity and NaN, of which a sum may be either."""
    return np.where(np.isfinite(numbers), 0, np.where(numbers == -math.inf, 1, 2))


def _share(mine: np.ndarray, theirs: np.ndarray, wrong: np.ndarray) -> float:
    """How far two arrays are apart: a share of the largest number, or of the places where their kinds differ."""
    both = np.isfinite(mine) & np.isfinite(theirs)
    size = max(_largest(mine), _largest(theirs), 1e-30)
    apart = _largest(mine[both] - theirs[both]) / size if both.any() else 0.0
    return max(apart, float((wrong & (_kind(mine) != _kind(theirs))).mean()))


def _largest(numbers: np.ndarray) -> float:
    """The size of the largest finite number; 0 where there is none."""
    sizes = np.abs(numbers[np.isfinite(numbers)])
    return float(sizes.max()) if sizes.size else 0.0


def _array(tensor: torch.Tensor, like: torch.Tensor | None = None) -> np.ndarray:
    """In float64, as another tensor's dtype holds it. NumPy's steps on such small tensors are several times shorter."""
    if like is not None and like.is_floating_point() and tensor.is_floating_point():
        tensor = tensor.to(like.dtype)
    return tensor.detach().double().cpu().numpy()
