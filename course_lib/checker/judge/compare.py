"""Is a result right? Twice the error of plain implementations in the same precision, plus a rounding band.

The rule is that of the FlashAttention test-suite: the truth is computed in float64; the same formula, run plainly in
the case's own dtype, shows what that dtype can give; an answer may err twice as much.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.checker.judge.evaluate import call, float64, is_large
from course_lib.checker.specification.case import Case
from course_lib.checker.specification.exercise import Exercise
from course_lib.checker.specification.nested import items, leaves, structure, tensors

REPEAT_SLACK = 4.0  # tolerances that two runs of one answer may differ by: atomic additions round anew each time
ULPS = 4.0  # that float32 sums in another order may be off by; a plain implementation can be lucky in all its elements
FEW_BITS = 1e-5  # epsilon of a 16-bit dtype, whose rounding at the end hides that of the sums
SHAKES, MORE_SHAKES = 3, 5  # exact results of inputs a rounding off, from which a tolerance is taken


@dataclass
class Leaf:
    """One tensor or number of a result, compared.

    Attributes:
        path: where it stands, as `nested.leaves` says it; `place_of` puts it in words.
        problem: None when right, else a sentence.
        got, want: the values (tensors in float64 where numeric).
        wrong: boolean tensor, True where an element is outside the tolerance; None where none is, for numbers and for
            errors of shape.
        excess: error over allowed error, elementwise; above 1 is wrong; None where `wrong` is.
    """

    path: str
    problem: str | None = None
    got: Any = None
    want: Any = None
    wrong: torch.Tensor | None = None
    excess: torch.Tensor | None = None


@dataclass
class Truth:
    """What a case's result should be: float64 values, and for each tensor the largest allowed error, elementwise."""

    want: Any
    like: Any  # the plain implementation's result: its dtypes are the ones asked for
    plains: list[Any] = field(default_factory=list)
    in_place: bool = False  # whether the case has arguments to write: results are then pairs, as `call` makes them
    _allowed: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _slack: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _size: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def allowed(self, path: str) -> torch.Tensor:
        """The largest allowed error of a tensor, elementwise, on its device; worked out once."""
        if path not in self._allowed:
            plains = [dict(leaves(plain))[path] for plain in self.plains]
            self._allowed[path] = tolerance(dict(leaves(self.want))[path], plains)
        return self._allowed[path]

    def slack(self, path: str) -> float:
        """The largest error allowed anywhere in a leaf; 0 for what is no tensor. Worked out once."""
        if path not in self._slack:
            leaf = dict(leaves(self.want)).get(path)
            allowed = self.allowed(path) if isinstance(leaf, torch.Tensor) else None
            self._slack[path] = float(allowed.max()) if allowed is not None and allowed.numel() else 0.0
        return self._slack[path]

    def size(self, path: str) -> float:
        """The size of the largest finite element of a leaf; 0 for what is no tensor. Worked out once."""
        if path not in self._size:
            leaf = dict(leaves(self.want)).get(path)
            self._size[path] = _largest(leaf) if isinstance(leaf, torch.Tensor) else 0.0
        return self._size[path]

    def losses(self) -> list[float]:
        """Of each tensor, the error allowed as a share of its largest element; infinite where all should be 0."""
        sizes = [(self.slack(path), self.size(path)) for path, _ in leaves(self.want)]
        return [slack / size if size else math.inf for slack, size in sizes if slack]


def _cut(bits: int) -> Callable:
    """float32 without the last bits of its mantissa; other dtypes as they are."""

    def cut(tensor):
        if tensor.dtype != torch.float32:
            return tensor.clone()
        return (tensor.contiguous().view(torch.int32) & -(1 << bits)).view(torch.float32)

    return cut


# Tensor cores cut the operands of a tf32 product to 10 bits of mantissa, without rounding: all errors go one way and
# add up. They cut a kernel's own values too, such as the weights that multiply the values. An oracle has none to cut,
# so its inputs are cut by a bit more as well; and to 10 bits, since where two scores tie either may be the nearer.
_TF32 = (_cut(13), _cut(14))


def _one_by_one(case: Case, convert: Callable) -> list[Callable]:
    """Conversions of one of a case's tensors each, the others as they are.

    A kernel may take a sum of uncut tensors from a product of cut ones, such as Δ from dP. Where all inputs are cut,
    the two err alike. A product has two operands that are cut, so one is cut by a bit more.
    """
    count = len(tensors(case.args))
    turns = [itertools.cycle(range(count)) for _ in range(count)]
    return [
        lambda tensor, turn=turn, place=place: convert(tensor) if next(turn) == place else tensor.clone()
        for place, turn in enumerate(turns)
    ]


class _ProductsOfCut(TorchDispatchMode):
    """PyTorch's products as tensor cores take them: of operands that are cut, those a function made on its way too."""

    FACTORS = {
        torch.ops.aten.mm: (0, 1),
        torch.ops.aten.bmm: (0, 1),
        torch.ops.aten.mv: (0, 1),
        torch.ops.aten.dot: (0, 1),
        torch.ops.aten.addmm: (1, 2),
        torch.ops.aten.baddbmm: (1, 2),
    }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        factors = self.FACTORS.get(function.overloadpacket, ())
        args = [_TF32[0](value) if place in factors else value for place, value in enumerate(args)]
        return function(*args, **(kwargs or {}))


def truth(exercise: Exercise, case: Case, tf32: bool) -> Truth:
    """Run the oracle in float64, and plainly in the case's dtype."""
    oracle = exercise.oracle_for(case)
    like = call(oracle, case, torch.clone)
    plains = [like, *(call(plain, case, torch.clone) for plain in exercise.plain_for(case))]
    if tf32:
        plains += [call(oracle, case, cut) for cut in (*_TF32, *_one_by_one(case, _TF32[1]))]
        with _ProductsOfCut():
            plains.append(call(oracle, case, torch.clone))
    plains += shaken(oracle, case, SHAKES, seed=0)
    return Truth(call(oracle, case, float64), like, plains, case.in_place)


def surer(expected: Truth, exercise: Exercise, case: Case) -> Truth:
    """The same truth with a tolerance from more draws: what a result that failed is held against once more.

    Where two large scores tie, a whole result hangs on one rounding, and a few draws can all be lucky: of 41,000 checks
    of right answers one failed with three, and passes with eight.
    """
    more = shaken(exercise.oracle_for(case), case, MORE_SHAKES, seed=1)
    return replace(expected, plains=expected.plains + more)


def shaken(oracle: Callable, case: Case, draws: int, seed: int) -> list[Any]:
    """An oracle's exact results of inputs moved by one float32 rounding, up or down at random.

    A right answer that adds in another order errs by about as much: where large terms cancel, far more than a plain
    implementation that happened to be lucky. Skipped for large cases, whose many elements leave no room for luck.
    """
    if is_large(case):
        return []
    generator = torch.Generator().manual_seed(seed)

    def shake(tensor):
        if not tensor.is_floating_point():
            return tensor.clone()
        signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
        return tensor.double() * (1 + signs * torch.finfo(torch.float32).eps)

    return [call(oracle, case, shake) for _ in range(draws)]


def place_of(path: str, written: Sequence[str]) -> str:
    """Where a leaf stands, for the learner: "result[1]", "`key_pages`" for an argument written in place, "" for a lone
    result. `written` names these arguments, in order; none where the case has none.
    """
    if written:  # `call` makes pairs: what was returned, and what was written
        argument = re.fullmatch(r"\[1\]\.written\[(\d+)\]", path)
        if argument:
            return f"`{written[int(argument[1])]}`"
        path = path.removeprefix("[0]")
    return f"result{path}" if path else ""


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} value{'' if len(value) == 1 else 's'}"
    if value is None:
        return "None"
    return f"{type(value).__name__} {value!r}"[:80]


def _first_difference(got: Any, want: Any, path: str = "") -> tuple[str, Any, Any]:
    """The first place where two values have other containers, and what stands there in each."""
    for (step, mine), (other, theirs) in zip(items(got), items(want)):
        if step != other or len(items(got)) != len(items(want)):
            break
        if structure(mine) != structure(theirs):
            return _first_difference(mine, theirs, path + step)
    return path, got, want


def compare(got: Any, expected: Truth, exercise: Exercise) -> list[Leaf]:
    """Every leaf of a result, compared with the truth; one leaf with a problem when the structures differ."""
    if structure(got) != structure(expected.want):
        returned, wanted = (got[0], expected.like[0]) if expected.in_place else (got, expected.like)
        path, mine, theirs = _first_difference(returned, wanted)
        if path:
            path = f"[0]{path}" if expected.in_place else path
            return [Leaf(path, f"got {_kind(mine)}, expected {_kind(theirs)}", mine, theirs)]
        return [Leaf("", f"it returned {_kind(returned)}; expected is {_kind(wanted)}", got, expected.want)]
    results = []
    likes = dict(leaves(expected.like))
    for (path, mine), (_, want) in zip(leaves(got), leaves(expected.want)):
        if isinstance(want, torch.Tensor):
            results.append(_compare_tensor(path, mine, want, expected.allowed(path), likes[path]))
        else:
            results.append(_compare_number(path, mine, want, exercise.relative_tolerance))
    return results


def agrees(got: Any, repeated: Any, expected: Truth, exercise: Exercise) -> bool:
    """Whether two runs of an answer gave the same, give or take `REPEAT_SLACK` tolerances.

    The tolerance is the truth's own; where a wrong answer makes larger values than that, its errors are larger too.
    """
    if not (structure(got) == structure(repeated) == structure(expected.want)):
        return False
    likes = dict(leaves(expected.like))
    for (path, mine), (_, told), (_, want) in zip(leaves(got), leaves(repeated), leaves(expected.want)):
        if isinstance(told, torch.Tensor) != isinstance(want, torch.Tensor):
            return False
        if isinstance(told, torch.Tensor):
            told = _as_stored(told, mine)
            band = _repeat_tolerance(told, want, likes[path], expected.allowed(path))
            allowed = torch.full_like(told, band, dtype=torch.float64)
            problem = _compare_tensor(path, mine, told, allowed, None).problem
        else:
            problem = _compare_number(path, mine, told, exercise.relative_tolerance * REPEAT_SLACK).problem
        if problem:
            return False
    return True


def _as_stored(told: torch.Tensor, mine: Any) -> torch.Tensor:
    """A result with infinities where the answer's dtype holds nothing as large."""
    if not (isinstance(mine, torch.Tensor) and mine.is_floating_point() and told.is_floating_point()):
        return told
    return torch.where(told.abs() > torch.finfo(mine.dtype).max, told.sign() * math.inf, told)


def _repeat_tolerance(told: torch.Tensor, want: torch.Tensor, like: torch.Tensor, allowed: torch.Tensor) -> float:
    """One absolute error for all elements: a mistake may put a large value where the truth has a small one."""
    rounding = torch.finfo(like.dtype).eps * _largest(told) if like.is_floating_point() else 0.0
    growth = max(1.0, _largest(told) / max(_largest(want), 1e-30)) if _largest(want) else 1.0
    return REPEAT_SLACK * max(rounding, growth * (float(allowed.max()) if allowed.numel() else 0.0))


def _largest(tensor: torch.Tensor) -> float:
    """The largest size of a finite element; 0 where there is none."""
    if not tensor.numel():
        return 0.0
    if tensor.is_floating_point():
        tensor = torch.where(torch.isfinite(tensor), tensor, 0.0)
    return float(tensor.double().abs().max())  # a mask of booleans has no abs


def _compare_number(path: str, got: Any, want: Any, relative: float) -> Leaf:
    if isinstance(got, torch.Tensor) and got.numel() == 1:
        got = got.item()
    numeric = isinstance(want, (int, float)) and not isinstance(want, bool)
    exact = numeric and isinstance(want, int) and relative <= 1e-6
    if not numeric or isinstance(got, (bool, str)) or not isinstance(got, (int, float)):
        right = type(got) is type(want) and got == want
    elif exact:
        right = got == want
    else:
        right = math.isclose(got, want, rel_tol=relative) or (math.isnan(want) and math.isnan(got))
    shown = (
        f"{want:,}"
        if isinstance(want, int) and numeric
        else f"{want!r}"
        if not isinstance(want, float)
        else f"{want:.6g}"
    )
    mine = (
        f"{got:,}"
        if isinstance(got, int) and not isinstance(got, bool)
        else f"{got:.6g}"
        if isinstance(got, float)
        else _kind(got)
        if got is None or isinstance(got, (torch.Tensor, tuple, list))
        else repr(got)[:80]
    )
    problem = f"got {mine}, expected {shown}"
    if exact and isinstance(got, float) and not got.is_integer():
        problem = f"got {mine}, a float; expected is the integer {shown}"
    return Leaf(path, None if right else problem, got, want)


def tolerance(want: torch.Tensor, plains: list[torch.Tensor]) -> torch.Tensor:
    """The allowed absolute error, elementwise, for a float64 truth and its plain implementations; 0 for integers."""
    if not want.is_floating_point() or not want.numel():
        return torch.zeros(want.shape, dtype=torch.float64, device=want.device)
    finite = torch.isfinite(want)
    plain_error = 0.0
    for plain in plains:
        plain = plain.to(want.device)
        error = torch.where(finite & torch.isfinite(plain), (plain.double() - want).abs(), 0.0)
        plain_error = max(plain_error, float(error.max()))
    size = torch.where(finite, want.abs(), 0.0)
    typical = float((size.square().sum() / finite.sum().clamp(min=1)).sqrt())
    epsilon = torch.finfo(plains[0].dtype).eps if plains[0].is_floating_point() else 0.0
    ulps = 1.0 if epsilon > FEW_BITS else ULPS
    return 2.0 * plain_error + ulps * epsilon * (size + typical)


def _compare_tensor(path: str, got: Any, want: torch.Tensor, allowed: torch.Tensor, like: torch.Tensor | None) -> Leaf:
    """Compare with `want` within `allowed`; the dtype must be that of `like`, unless it is None."""
    if not isinstance(got, torch.Tensor):
        if isinstance(got, (int, float)) and want.dim() == 0:
            got = torch.tensor(got, dtype=want.dtype if like is None else like.dtype)
        else:
            return Leaf(path, f"it returned {_kind(got)}; expected is {_kind(want)}", got, want)
    if got.shape != want.shape:
        return Leaf(path, f"the shape is {list(got.shape)}; expected is {list(want.shape)}", got, want)
    if like is not None and got.dtype != like.dtype:
        return Leaf(path, f"the dtype is {got.dtype}; expected is {like.dtype}", got, want)
    got, allowed = got.to(want.device), allowed.to(want.device)
    if not want.is_floating_point():
        wrong = got != want if not got.is_floating_point() else got.double() != want.double()
        excess = torch.where(wrong, math.inf, 0.0)
    else:
        value = got.double()
        finite = torch.isfinite(want)
        error = torch.where(finite & torch.isfinite(value), (value - want).abs(), math.inf)
        same = (value == want) | (value.isnan() & want.isnan())  # infinities and NaN must stand where they belong
        wrong = ~torch.where(finite, error <= allowed, same)
        got = value
        excess = torch.where(
            wrong, torch.where(finite, error / allowed.clamp(min=1e-300), math.inf).clamp(min=1.01), 0.0
        )
    if not wrong.any():
        return Leaf(path, None, got, want)
    return Leaf(path, "values", got.cpu(), want.cpu(), wrong.cpu(), excess.cpu())
