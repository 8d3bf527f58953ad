"""What went wrong, in words: where in a result the errors lie, what they follow, what the failing cases share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from course_lib.checker.judge.compare import Leaf, place_of
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.runner.frames import Frame
from course_lib.checker.specification.case import Case
from course_lib.checker.specification.exercise import Exercise
from course_lib.checker.specification.nested import tensors
from course_lib.figures.error_map import error_map

UNDEFINED_LANES = (
    "A load has a mask and no `other=`: what it gives where the mask is off is undefined (a check puts NaN there), and "
    "it reached the result. If these lanes lie inside the tensor, the mask leaves out too much. Else say what they "
    "should hold: 0 adds nothing to a sum, -inf wins no maximum. The load: "
    "{place}"
)


RACE = (
    "The same inputs give another result from run to run. A GPU's programs run side by side and end in any order: do "
    "two of them write to the same place, or does one read what another has yet to write? Give each a place of its "
    "own. What belongs together is added with tl.atomic_add, or combined by a second kernel; what is not to be written "
    "needs a mask, and no place that others use. Or is something kept from "
    "call to call, a buffer or a counter that is not set back? (The interpreter runs one program after the other.)"
)

KEPT = (
    "The first call gave one result and later ones another, with the same inputs or with other numbers in the same "
    "shapes or the same memory. Is something kept from call to call: a result, a buffer or a counter that is not set "
    "back?"
)

KEPT_OF_ANOTHER = (
    "Where this case is the only one, its result is right. Behind others it is not: something is kept from call to "
    "call. Is a result or a choice remembered without one of the arguments that it depends on?"
)


def written(argument: str) -> str:
    """The sentence on an argument that an answer changes, where that made its results wrong."""
    return (
        f"The argument `{argument}` was changed, and only cases in which that happened are wrong. Elements of a "
        "tensor may stand in one place, or be asked for again: leave it as it was, and make something of your own."
    )


def undefined_lanes(failed: Sequence[Outcome], again: Callable[[], list[Frame]]) -> str:
    """The sentence on lanes that a load left undefined, where it is proved that they spoil the result; else "".

    Proof is a result that carries their NaN's payload, or one whose NaN are gone when the interpreter runs its cases
    `again` with 0 in those lanes.
    """
    suspects = [o for o in failed if o.seen.undefined_loads]
    guilty = next((o for o in suspects if o.seen.undefined_values), None)
    if guilty is None and any(_nan_count(o.got) for o in suspects):
        before = sum(_nan_count(o.got) for o in failed if o.interpreted)
        after = sum(_nan_count([frame.result, dict(frame.written)]) for frame in again())
        guilty = suspects[0] if after < before else None
    return UNDEFINED_LANES.format(place=guilty.seen.undefined_loads[0]) if guilty else ""


def _nan_count(result: Any) -> int:
    return sum(int(tensor.isnan().sum()) for tensor in tensors(result) if tensor.is_floating_point())


def most_telling(failed: Sequence[Outcome]) -> Outcome:
    """The simplest failed case, which is the first, of those clearly wrong; else one whose errors have a pattern.

    A result that is off by a rounding, or by a hair in one element, says less than one that is wrong altogether; one
    that is a single element says nothing of a factor.
    """
    clear = [o for o in failed if o.first_problem.excess is None or float(o.first_problem.excess.max()) > 100]
    telling = [o for o in clear if o.first_problem.wrong is None or o.first_problem.wrong.numel() > 1]
    return next(iter(telling or clear or [o for o in failed if follows(o.first_problem)] or failed))


def which(exercise: Exercise, case: Case) -> str:
    """The case that a verdict speaks of, and which of several functions it calls."""
    return f"case “{case.name}”" + (f" of {called(exercise, case)}" if len(exercise.entries) > 1 else "")


def called(exercise: Exercise, case: Case) -> str:
    """The function that a case calls, as code."""
    return f"`{exercise.entry_of(case)}`"


def added_to_what_was_there(outcome: Outcome) -> bool:
    """Whether atomic operations added to tensors into which no store wrote first, and which can be the result.

    A counter of tiles is added to as well. It has far fewer bytes than the elements that nobody wrote; of a result that
    was added to, some elements may be left out.
    """
    added = [counts for counts in outcome.seen.traffic.values() if counts["atomic"] and not counts["stored"]]
    sizes = [tensor.element_size() for tensor in tensors(outcome.got) if tensor.is_floating_point()]
    least = outcome.seen.unwritten * min(sizes, default=1)
    return any(4 * counts["distinct_stored"] >= least for counts in added)


ADDED_TO_UNSET = (
    "An atomic operation adds to what is in memory, and `torch.empty` leaves there whatever it was. Begin with zeros: "
    "torch.zeros."
)


def describe(outcome: Outcome) -> str:
    """The first wrong leaf in full: how many elements, where the first is, and what they follow."""
    leaf = outcome.first_problem
    if leaf.wrong is None:
        return brief(outcome)
    first = tuple(int(i) for i in leaf.wrong.nonzero()[0]) if leaf.wrong.dim() else ()
    got, want = leaf.got[first].item(), leaf.want[first].item()
    here = f"[{', '.join(map(str, first))}]" if first else "The value"
    digits = next((d for d in (5, 7, 9, 12) if f"{got:.{d}g}" != f"{want:.{d}g}"), 17)
    return f"{brief(outcome)}. {here} is {got:.{digits}g} and should be {want:.{digits}g}"


def brief(outcome: Outcome) -> str:
    """The first wrong leaf in a few words, for a list of cases."""
    leaf = outcome.first_problem
    where = place_of(leaf.path, outcome.written)
    if outcome.case.distributed:
        where = re.sub(r"^result\[(\d+)\]", r"rank \1's result", where)
    where = f" in {where}" if where else ""
    if leaf.wrong is None:
        return outcome.problem + where
    total, bad = leaf.wrong.numel(), int(leaf.wrong.sum())
    if total == 1:
        text = f"the one element{where} is wrong"
    elif bad == total:
        text = f"all {total:,} elements{where} are wrong"
    else:
        text = f"{bad:,} of {total:,} elements{where} {'is' if bad == 1 else 'are'} wrong"
    notes = [follows(leaf)]
    if outcome.seen.unwritten > 1 and added_to_what_was_there(outcome):  # one element is as large as a counter
        notes = ["added to memory that nobody had set", place(leaf.wrong)]
    elif outcome.seen.unwritten >= sum(int(one.wrong.sum()) for one in outcome.leaves if one.wrong is not None):
        notes = ["never written" if total > 1 else "it was never written", place(leaf.wrong)]
    elif outcome.seen.unwritten:
        notes.append(f"{outcome.seen.unwritten:,} hold memory that was never written")
    if outcome.seen.undefined_values:
        notes.append(f"{outcome.seen.undefined_values:,} come from lanes that a load left undefined")
    if outcome.seen.guard_values:
        notes.append(f"{outcome.seen.guard_values:,} come from memory beside an input")
    if outcome.unsteady or outcome.kept and outcome.seen.differing:
        notes.append(f"{outcome.seen.differing} of {outcome.seen.repeats} more runs gave another result")
    notes = [note for note in notes if note]
    return f"{text}: {', '.join(notes)}" if notes else text


def follows(leaf: Leaf) -> str:
    """What the wrong elements have in common: a constant factor or offset, a tail, a triangle; "" when nothing is."""
    wrong, got, want = leaf.wrong, leaf.got, leaf.want
    if wrong is None or not want.is_floating_point() or wrong.dim() == 0 or wrong.numel() == 1:
        return ""
    if not torch.isfinite(got[wrong]).any():
        kinds = [name for name, test in (("NaN", torch.isnan), ("infinite", torch.isinf)) if test(got[wrong]).any()]
        return ", ".join(part for part in (" or ".join(kinds), place(wrong)) if part)
    usable = torch.isfinite(got) & torch.isfinite(want) & wrong
    factor = _constant((got / want)[usable & (want.abs() > 1e-6)])
    if factor is not None and abs(factor - 1) > 0.01:
        return f"each is {factor:.4g} times what it should be"
    offset = _constant((got - want)[usable])
    if offset is not None:
        return f"each is off by {offset:+.4g}"
    return place(wrong)


def _constant(values: torch.Tensor) -> float | None:
    """The value that at least three numbers share, if they do."""
    if values.numel() < 3:
        return None
    middle = float(values.median())
    close = (values - middle).abs() <= 0.005 * abs(middle)
    return middle if middle and bool(close.all()) else None


def shared(finished: Sequence[Outcome], names: Sequence[str] = ()) -> str:
    """What all failing cases have and no right one does, as a sentence; "" where nothing is, or one side is too few.

    Args:
        finished: all cases, of which at least two must be right, and as many wrong or their trait a rare one.
        names: of the arguments, for switches such as `causal`.
    """
    wrong = [_traits(o.case, names) for o in finished if not o.right]
    right = [_traits(o.case, names) for o in finished if o.right]
    if not wrong or len(right) < 2:
        return ""
    telling = [trait for trait in wrong[0] if all(trait in w for w in wrong) and not any(trait in r for r in right)]
    return f"Only cases with {telling[0]} are wrong." if telling else ""


def _traits(case: Case, names: Sequence[str]) -> list[str]:
    """What is special about a case's arguments, the most telling first."""
    inputs = tensors(case.args)
    floats = [tensor for tensor in inputs if tensor.is_floating_point() and tensor.numel()]
    floats = [tensor.float() if tensor.element_size() == 1 else tensor for tensor in floats]  # no arithmetic in 8 bits
    found = {
        "float16 inputs": any(tensor.dtype == torch.float16 for tensor in floats),
        "bfloat16 inputs": any(tensor.dtype == torch.bfloat16 for tensor in floats),
        "an input that is not contiguous": any(not tensor.is_contiguous() for tensor in inputs),
        "minus infinity among the inputs": any(bool(torch.isneginf(tensor).any()) for tensor in floats),
        "inputs above 50 in size": any(float(t.abs().nan_to_num(posinf=0.0).max()) > 50 for t in floats),
        "a length that is no multiple of 16": any(size % 16 for t in floats if t.dim() > 1 for size in t.shape[-2:-1]),
    }
    for name, value in zip(names, case.args):
        if isinstance(value, bool):
            found[f"`{name}={value}`"] = True
        elif isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[0] > 1:
            found[f"`{name}.shape[0]` above 1"] = True
    return [trait for trait, holds in found.items() if holds]


def place(wrong: torch.Tensor) -> str:
    """Where wrong elements lie: "all from index 768, a multiple of 256, on", "only above the diagonal"; or ""."""
    if wrong.dim() == 0 or bool(wrong.all()):
        return ""
    names = [name for name in (_stretch(wrong, dimension) for dimension in range(wrong.dim())) if name]
    if names:
        return " and ".join(names[:2])
    if wrong.dim() >= 2 and wrong.shape[-1] > 2 and wrong.shape[-2] > 2:
        rows = torch.arange(wrong.shape[-2])[:, None]
        columns = torch.arange(wrong.shape[-1])[None, :] - (wrong.shape[-1] - wrong.shape[-2])
        flat = wrong.reshape(-1, *wrong.shape[-2:]).any(dim=0)
        if not flat[columns <= rows].any():
            return "only above the diagonal"
        if not flat[columns > rows].any():
            return "only on and below the diagonal"
    return ""


def _stretch(wrong: torch.Tensor, dimension: int) -> str:
    """Where along one dimension the wrong elements stand, when that is one stretch and not the whole."""
    others = [d for d in range(wrong.dim()) if d != dimension]
    touched = wrong.any(dim=others) if others else wrong
    where = touched.nonzero().flatten()
    first, last, length = int(where[0]), int(where[-1]), wrong.shape[dimension]
    if len(where) == length or len(where) != last - first + 1:
        return ""
    whole = bool((wrong.all(dim=others) if others else wrong)[where].all())
    along = f" along dimension {dimension}" if wrong.dim() > 1 else ""
    every = "all" if whole else "only"
    if first == last:
        return f"{every} at index {first}{along}"
    if last == length - 1:
        block = next((b for b in (256, 128, 64, 32, 16) if first % b == 0), None)
        return f"{every} from index {first}{f', a multiple of {block},' if block else ''} on{along}"
    return f"{every} from index {first} to {last}{along}"


def picture(exercise: Exercise, outcome: Outcome) -> str:
    """The error map of the first wrong tensor, as inline SVG; "" when a picture would say nothing more."""
    for leaf in outcome.leaves:
        if leaf.problem and leaf.wrong is not None and leaf.excess is not None:
            return "" if bool(leaf.wrong.all()) else error_map(leaf.excess, exercise.tile)
    return ""
