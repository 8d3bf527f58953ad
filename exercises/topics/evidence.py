"""What a slip looks like from outside, whatever the numbers: accesses beyond a tensor, NaN from the first tile on."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from course_lib.checker.specification.exercise import Mistake
from course_lib.checker.specification.nested import map_leaves, tensors


def in_cases_of(words: str):
    """A `when` for every failing case: its name has these words, and no access outside a tensor explains it."""

    def when(case, seen, got):
        return words in case.name and not seen.out_of_bounds

    return when


NAN_FROM_THE_START = (
    "Every element is NaN, so the running values were NaN after the first tile already. Before it the maximum is -inf "
    "and the sum 0, and the factor exp(old maximum - new maximum) is exp(-inf) = 0. Is the difference the other way "
    "round (0 times exp(+inf) is NaN), are the weights measured from the old maximum, is the exp missing, or does the "
    "maximum start at +inf?"
)
GRID_AXES_EXCHANGED = (
    "The grid's axes are exchanged: program (0, {heads}, ...) works on a head that does not exist. The kernel takes "
    "`tl.program_id(1)` for the head, so the grid is (tiles of queries, heads)."
).replace("{heads}", "n")

ROUNDED_TO_16_BITS = (
    "A result has 16 bits though its dtype is float32: it was rounded before it was stored. Cast to the output's own "
    "dtype, output_pointer.dtype.element_ty, and to nothing smaller before that."
)
COMPUTED_IN_16_BITS = (
    "No case in 16 bits is wrong, and the others are right to about three digits. Is something on the way rounded to "
    "16 bits, by a cast that does not ask for the tensors' own dtype? Or is a constant written with few digits?"
)

FAR_END = "more than a grid or a tile of fixed size has"
FIXED_SIZE = Mistake(
    "fixed_size",
    "Only the largest numbers are wrong, far beyond those of the other cases: of rows, heads, sequences or columns. Is "
    "the grid or a tile a fixed number? Compute it from the sizes, as in (triton.cdiv(rows, ROWS),), or let each "
    "program go on in a loop until nothing is left.",
    when=in_cases_of(FAR_END),
    every=True,
    first=True,
)


def raised(*names: str):
    """A `when`: the call raised an error of one of these classes."""

    def when(case, seen, got):
        return seen.error is not None and seen.error.type in names

    return when


def stored_in_16_bits(oracle: Callable):
    """A `when` for every failing case: each result in float32 is right, or is right to 16 bits and has no more."""

    def when(case, seen, got):
        short = False
        for mine, right in _paired(case, got, oracle):
            if torch.allclose(mine.double(), right, rtol=1e-5, atol=1e-6):
                continue
            if mine.dtype != torch.float32 or not _near(mine, right, 5e-3):
                return False
            if not any(torch.equal(mine, mine.to(dtype).float()) for dtype in (torch.float16, torch.bfloat16)):
                return False
            short = True
        return short

    return when


def right_to_three_digits(oracle: Callable):
    """A `when` for every failing case: no argument has 16 bits, and the results err by what 16 bits round off."""

    def when(case, seen, got):
        given = [tensor for tensor in tensors(case.args) if tensor.is_floating_point()]
        if any(tensor.dtype not in (torch.float32, torch.float64) for tensor in given):
            return False
        pairs = _paired(case, got, oracle)
        return all(_near(*pair, 1.5e-3) for pair in pairs) and not all(_near(*pair, 3e-5) for pair in pairs)

    return when


def _paired(case, got, oracle: Callable) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor that was returned with the right one; none where there is anything else."""
    exact = map_leaves(
        lambda leaf: leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, case.args
    )
    mine, right = tensors(got), tensors(oracle(*exact))
    same = [one.shape for one in mine] == [one.shape for one in right]
    return list(zip(mine, right)) if same and all(one.is_floating_point() for one in mine) else []


def _near(mine: torch.Tensor, right: torch.Tensor, share: float) -> bool:
    """Whether no element errs by more than a share of the largest; what is not finite stands in the same places."""
    mine, finite = mine.double(), right.isfinite()
    if not torch.equal(mine.isfinite(), finite) or not torch.equal(mine[~finite], right[~finite]):
        return False
    return not bool(finite.any()) or bool((mine - right)[finite].abs().max() <= share * right[finite].abs().max())


def all_nan(case, seen, got) -> bool:
    """A `when` for every failing case: NaN from the first step on, save rows of zeros, which made no step at all."""
    first = got[0] if isinstance(got, (tuple, list)) and got else got
    if not isinstance(first, torch.Tensor) or seen.unwritten or seen.guard_values or seen.out_of_bounds:
        return False
    return bool(first.isnan().any()) and bool((first.isnan() | (first == 0)).all())


def first_access(verb: str, whole: bool = False):
    """A `when`: memory outside a tensor was reached, first by a load ("reads") or a store ("writes").

    whole: only where all tensors are contiguous. A missing mask shows there too, and a wrong row stride does not: it
        reaches outside where tensors are laid out otherwise.
    """

    def when(case, seen, got):
        # The first access is the one that the card shows: the diagnosis speaks of the same.
        return any(f": {verb} " in access for access in seen.out_of_bounds[:1]) and not (whole and has_gaps(case))

    return when


def has_gaps(case) -> bool:
    """Whether some tensor of a case is not contiguous, so that a wrong stride shows."""
    return not all(tensor.is_contiguous() for tensor in tensors(case.args))


def program_beyond_the_heads(case, seen, got) -> bool:
    """A `when` for kernels whose axis 1 counts heads: the first wild program is number 0 of one head too many."""
    heads = case.args[0].shape[0]
    found = re.search(r"program \((\d+), (\d+), 0\)", seen.out_of_bounds[0]) if seen.out_of_bounds else None
    return found is not None and found.groups() == ("0", str(heads))
