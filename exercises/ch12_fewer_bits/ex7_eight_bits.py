"""Exercise 12.7: eight bits for attention's inputs, and a rotation that spreads outliers before they are rounded."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, Forbids, Mistake, Slip

LARGEST = 448.0  # of float8_e4m3fn
E4M3_CODES = "float32, all of them e4m3 values"  # what the driver says of right codes


def hadamard_matrix(size: int) -> torch.Tensor:
    """[size, size] of 1 and -1 in the order in which doubling makes it, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


# A driver is sent to the worker by its source alone, so these two stand by themselves.


def rotated(functions, vectors):
    """The learner's rotation, and the largest difference between scores before and after it, over their size."""
    turned = functions["hadamard"](vectors.clone())
    before, after = vectors @ vectors.T, turned @ turned.T
    return turned, round(float((before - after).norm() / before.norm()), 3)


def quantised(functions, tensor, rows):
    """What codes and scales amount to: the scales, what kind of codes, the largest, and the error over the size."""
    import torch

    codes, scales = functions["quantise"](tensor.clone(), rows)
    told = {"scales": scales, "codes": codes, "largest_code": math.nan, "error": math.nan}
    blocks = -(-len(tensor) // rows)
    if not isinstance(codes, torch.Tensor) or not isinstance(scales, torch.Tensor) or scales.numel() != blocks:
        return told
    each = scales.float().flatten().repeat_interleave(rows)[: len(tensor), None]
    told["codes"] = str(codes.dtype).removeprefix("torch.")
    if codes.shape != tensor.shape:
        return told | {"codes": f"{told['codes']} of shape {list(codes.shape)}"}

    def rounded(values):
        # What lies beyond 448 becomes NaN (PyTorch 2.11) or 448 (2.13); both are e4m3 values.
        return values.to(torch.float8_e4m3fn).float()

    given = codes.float()
    scaled = given / each
    if bool(((rounded(given) == given) | given.isnan()).all()):
        told["codes"] += ", all of them e4m3 values"
    elif torch.allclose(rounded(scaled), scaled, rtol=1e-5, atol=0.0):
        told["codes"] += ", e4m3 values times their scales"
    else:
        told["codes"] += ", not all of them e4m3 values"
    codes = rounded(given)
    size, error = float(tensor.norm()), float((codes * each - tensor).norm())
    return told | {"largest_code": float(codes.abs().max()), "error": error / size if size else error}


def hadamard_of(vectors, *, divisor=None):
    size = vectors.shape[-1]
    matrix = hadamard_matrix(size).to(vectors.dtype)
    return vectors @ matrix / (math.sqrt(size) if divisor is None else divisor(size))


def rotated_oracle(vectors):
    return hadamard_of(vectors), 0.0


def _butterfly(vectors, step):
    """The fast transform: `step` makes two parts of two, in pairs of blocks that grow from 1 to half of a vector."""
    shape, width = vectors.shape, 1
    while width < shape[-1]:
        vectors = torch.stack(step(*vectors.reshape(-1, 2, width).unbind(1)), dim=1).reshape(shape)
        width *= 2
    return vectors / math.sqrt(shape[-1])


def by_doubling(vectors):
    """The same rotation, its additions in the order of the fast transform: another rounding that is as good."""
    return _butterfly(vectors, lambda a, b: (a + b, a - b)), 0.0


def scales_of(tensor, rows, *, largest=LARGEST, size=lambda block: block.abs().amax()):
    scales = torch.stack([size(block) for block in tensor.split(rows)]) / largest
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def quantised_with(tensor, rows, scales):
    codes = (tensor.float() / scales.float().repeat_interleave(rows)[: len(tensor), None]).to(torch.float8_e4m3fn)
    restored = codes.double() * scales.double().repeat_interleave(rows)[: len(tensor), None]
    size = float(tensor.double().norm())
    error = float((restored - tensor.double()).norm())
    return {
        "scales": scales,
        "codes": E4M3_CODES,
        "largest_code": float(codes.float().abs().max()),
        "error": error / size if size else error,
    }


def quantised_oracle(tensor, rows):
    return quantised_with(tensor, rows, scales_of(tensor, rows))


def number_cases(draw):
    rows, blocks = draw.choice((16, 48)), draw.integer(3, 6)
    heavy = draw.normal(96, 64)
    heavy[draw.integer(0, 96), draw.integer(0, 64)] = 400.0
    growing = draw.normal(128, 32) * torch.logspace(-4, 3, 128)[:, None]
    negative = draw.normal(64, 32)
    negative[7, 3] = -60.0
    empty = torch.cat((draw.normal(32, 16), torch.zeros(32, 16)))
    plain, turn, code = draw.normal, "hadamard", "quantise"
    one_hot = torch.zeros(3, 64)
    one_hot[0, 0] = one_hot[1, 5] = one_hot[2, 63] = 8.0
    return [
        Case("20 vectors of 64", (plain(20, 64),), turn, rotated),
        Case("5 vectors of 128", (plain(5, 128),), turn, rotated),
        Case("one number each", (plain(4, 1),), turn, rotated),
        Case("vectors of 2", (plain(7, 2),), turn, rotated),
        Case("one outlier in each", (one_hot,), turn, rotated),
        Case("64 × 32, one block", (plain(64, 32), 64), code, quantised),
        Case(f"{rows * blocks} × 64 in blocks of {rows}", (plain(rows * blocks, 64), rows), code, quantised),
        Case("an outlier of 400 in one block", (heavy, 32), code, quantised),
        Case("rows from 0.0001 to 1000", (growing, 16), code, quantised),
        Case("numbers around 1e-9", (1e-9 * plain(48, 16), 16), code, quantised),
        Case("the largest is negative", (negative, 64), code, quantised),
        Case("a block of zeros", (empty, 32), code, quantised),
        Case("the last block is smaller: 70 rows in blocks of 32", (plain(70, 32), 32), code, quantised),
        Case("the last block is one row: 65 in blocks of 32", (plain(65, 32), 32), code, quantised),
    ]


def _vectors(slip):
    """A slip's formula of the rotation: the rotated vectors, and how far scores then are from what they were."""

    def result(*args):
        if len(args) != 1:
            return None
        vectors, turned = args[0], slip(args[0])
        before, after = vectors @ vectors.T, turned @ turned.T
        return turned, round(float((before - after).norm() / before.norm()), 3)

    return result


def _codes(scales):
    return lambda *args: quantised_with(*args, scales(*args)) if len(args) == 2 else None


def _whole_tensor(tensor, rows):
    count = -(-len(tensor) // rows)
    return scales_of(tensor, len(tensor)).expand(count).clone()


def _power_of_two(tensor, rows):
    return torch.exp2(scales_of(tensor, rows).log2().ceil())


def _small_is_one(tensor, rows):
    """Scales with 1 not for blocks of zeros alone, but for those of small numbers too."""
    scales = scales_of(tensor, rows)
    return torch.where(scales * LARGEST < 1e-6, torch.ones_like(scales), scales)


def _bits_reversed(vectors):
    """Right numbers in another order: that of the indices whose bits are read from the other end."""
    order = torch.zeros(1, dtype=torch.int64)
    while len(order) < vectors.shape[-1]:
        order = torch.cat((2 * order, 2 * order + 1))
    return hadamard_of(vectors)[..., order]


def _walsh(vectors):
    """The rows of the matrix in order of their sign changes: a rotation, but another one."""
    matrix = hadamard_matrix(vectors.shape[-1])
    changes = (matrix[:, 1:] != matrix[:, :-1]).sum(dim=1)
    return vectors @ matrix[changes.argsort()].T.to(vectors.dtype) / math.sqrt(vectors.shape[-1])


def _minus_at(vectors, corner):
    """The rotation by a matrix that is doubled with its minus sign at another corner: 0, 1 or 2 of 4, row by row."""
    matrix = torch.ones(1, 1, dtype=vectors.dtype)
    while len(matrix) < vectors.shape[-1]:
        parts = [-matrix if place == corner else matrix for place in range(4)]
        matrix = torch.cat([torch.cat(parts[:2], dim=1), torch.cat(parts[2:], dim=1)])
    return vectors @ matrix / math.sqrt(vectors.shape[-1])


EXERCISE = Exercise(
    id="12.7",
    title="Eight bits, and where outliers go",
    entries=("hadamard", "quantise"),
    cases=number_cases,
    oracle={"hadamard": rotated_oracle, "quantise": quantised_oracle},
    plain=(lambda *args: by_doubling(*args) if len(args) == 1 else quantised_oracle(*args),),
    relative_tolerance=2e-3,
    requirements=(Forbids(("_fake_quantize_per_tensor_affine", "quantize_per_tensor")),),
    hints=(
        "H of 2n is [[H, H], [H, -H]], and H of 1 is [[1]]. torch.cat twice doubles the matrix.",
        "Each row of H has the length √head_dim. Divide by that, so that the rotation keeps lengths and dot products.",
        "Each block has one scale: its largest absolute value, divided by 448. torch.split(tensor, rows) gives the "
        "blocks, and the last one may be smaller.",
        "codes = (block / scale).to(torch.float8_e4m3fn).float(). A block of zeros would divide by 0: its scale is 1.",
    ),
    slips=(
        Slip(
            "not_normalised",
            "The rotated vectors are √head_dim times too long, and scores grow by head_dim. Divide by √head_dim.",
            formula=_vectors(lambda vectors: hadamard_of(vectors, divisor=lambda size: 1.0)),
        ),
        Slip(
            "divided_by_the_size",
            "The rotated vectors are √head_dim times too short. Each row of H has the length √head_dim; divide by "
            "that, not by head_dim.",
            formula=_vectors(lambda vectors: hadamard_of(vectors, divisor=float)),
        ),
        Slip(
            "sign_changes_order",
            "That is a Hadamard matrix with its rows in another order (by the number of sign changes). Keep the order "
            "in which doubling makes them.",
            formula=_vectors(_walsh),
        ),
        Slip(
            "bits_reversed_order",
            "The numbers are right but in another order: element i stands at the place that i with its bits reversed "
            "has. Add and subtract the halves within blocks, so that each result stays where its two parts were.",
            formula=_vectors(_bits_reversed),
        ),
        Slip(
            "minus_forgotten",
            "All signs are plus, so every element of a rotated vector is the same sum. H of 2n is [[H, H], [H, -H]].",
            formula=_vectors(lambda v: v.sum(-1, keepdim=True).expand_as(v) / math.sqrt(v.shape[-1])),
        ),
        Slip(
            "minus_in_another_corner",
            "The minus sign stands in another corner. H of 2n is [[H, H], [H, -H]]: it is at the bottom right.",
            formula=tuple(_vectors(lambda v, corner=corner: _minus_at(v, corner)) for corner in range(3)),
        ),
        Slip(
            "only_one_doubling",
            "Neighbours (or the two halves) were added and subtracted once. The matrix is doubled log2(head_dim) "
            "times.",
            formula=(_vectors(lambda v: _one_doubling(v, 1)), _vectors(lambda v: _one_doubling(v, v.shape[-1] // 2))),
        ),
        Slip(
            "overwritten_too_early",
            "One half of a pair was overwritten before the other was computed from it. Keep both: "
            "a, b = a + b, a - b, where a and b are no views of what you write.",
            formula=(
                _vectors(lambda vectors: _butterfly(vectors, lambda a, b: (a + b, a))),
                _vectors(lambda vectors: _butterfly(vectors, lambda a, b: (a + b, a + 2 * b))),
                _vectors(lambda vectors: _butterfly(vectors, lambda a, b: (2 * a - b, a - b))),
                _vectors(lambda vectors: _butterfly(vectors, lambda a, b: (b, a - b))),
            ),
        ),
        Slip(
            "one_scale_for_all",
            "All blocks have the same scale, from the largest value of the tensor. Then one outlier costs every block "
            "precision. Compute a scale for each block.",
            formula=_codes(_whole_tensor),
        ),
        Slip(
            "sign_forgotten",
            "The scale was taken from the largest value, not from the largest absolute value. A negative number that "
            "is larger in size gets a code below -448, which becomes NaN or is cut off.",
            formula=_codes(lambda tensor, rows: scales_of(tensor, rows, size=lambda block: block.amax())),
        ),
        Slip(
            "largest_of_another_format",
            "The largest code is not 448. e4m3fn reaches from -448 to 448; 240 is e4m3fnuz, 57,344 is e5m2, and 127 an "
            "8-bit integer.",
            formula=tuple(
                _codes(lambda tensor, rows, largest=largest: scales_of(tensor, rows, largest=largest))
                for largest in (240.0, 127.0, 57344.0)
            ),
        ),
        Slip(
            "power_of_two_scales",
            "The scales were rounded up to powers of two, so the largest code of a block is anywhere from 224 to 448. "
            "Here it is 448: the scale is largest / 448 itself.",
            formula=_codes(_power_of_two),
        ),
        Slip(
            "small_taken_for_zero",
            "A block of small numbers got the scale 1, and its codes all became 0 or nearly so. Only a block of zeros "
            "has the scale 1: compare its largest value with 0, not with a small number.",
            formula=_codes(_small_is_one),
        ),
        Slip(
            "mean_for_largest",
            "The scale was taken from the mean of the absolute values. What is larger than 448 scales becomes NaN or "
            "is cut off: take the largest.",
            formula=_codes(lambda tensor, rows: scales_of(tensor, rows, size=lambda block: block.abs().mean())),
        ),
    ),
    mistakes=(
        Mistake(
            "scale_upside_down",
            "You returned what the values were multiplied by, 448 / largest. The scale is what codes are multiplied "
            "by to restore the values: largest / 448.",
            when=lambda case, seen, got: _upside_down(case, got),
        ),
        Mistake(
            "zeros_divided_by_zero",
            "A block of zeros has the scale 0, so its codes are 0 / 0, which is NaN. Give such a block the scale 1.",
            when=lambda case, seen, got: _zero_scale(case, got),
            every=True,
        ),
        Mistake(
            "zeros_divided_too_early",
            "The scales are right, but the codes of a block of zeros are NaN, because it was divided by something else "
            "than the scale that is returned. Give such a block the scale 1 before you divide.",
            when=lambda case, seen, got: _zeros_without_codes(case, got),
            every=True,
        ),
        Mistake(
            "scale_with_a_floor",
            "The smallest scale is a floor, such as 1e-12, by `clamp` or by an addition. A block of zeros then has the "
            "floor's scale, and it should have 1. Set the scale to 1 where the largest value is 0, and leave the "
            "others as they are.",
            when=lambda case, seen, got: _has_a_floor(case, got),
            every=True,
        ),
        Mistake(
            "last_block_left_out",
            "The last block is left out where it has fewer rows: there is no scale for it. A matrix of `length` rows "
            "has (length + rows - 1) // rows blocks, and a slice beyond its end is shorter.",
            when=lambda case, seen, got: _without_the_last(case, got),
            every=True,
            first=True,
        ),
        Mistake(
            "codes_left_in_eight_bits",
            "The codes are still float8. Return them as float32, as the docstring says: .float() after the cast.",
            when=lambda case, seen, got: _codes_are(got, "float8_e4m3fn, all"),
        ),
        Mistake(
            "codes_restored",
            "The codes were multiplied by their scale again. Return the codes themselves, from -448 to 448. Whoever "
            "reads them multiplies by the scale.",
            when=lambda case, seen, got: _codes_are(got, "float32, e4m3 values times"),
        ),
        Mistake(
            "not_rounded",
            "The codes are not e4m3 values: were they cast, and to this format? (block / "
            "scale).to(torch.float8_e4m3fn).float() rounds them.",
            when=lambda case, seen, got: _codes_are(got, "float32, not all"),
        ),
    ),
)


def _codes_are(got, words):
    """Whether this is what the driver says of the codes."""
    return isinstance(got, dict) and isinstance(got["codes"], str) and got["codes"].startswith(words)


def _one_doubling(vectors, width):
    if vectors.shape[-1] < 2:
        return vectors
    pairs = vectors.reshape(-1, 2, width)
    turned = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
    return turned.reshape(vectors.shape) / math.sqrt(2)


def _scales_and_right_ones(case, got):
    """The scales that quantise gave, the right ones, and which blocks are zeros; None where they do not pair up."""
    if len(case.args) != 2 or not isinstance(got, dict) or not isinstance(got["scales"], torch.Tensor):
        return None
    right = scales_of(*case.args)
    zero = torch.stack([block.abs().amax() == 0 for block in case.args[0].split(case.args[1])])
    return (got["scales"].float(), right, zero) if got["scales"].shape == right.shape else None


def _without_the_last(case, got):
    """All scales but that of a smaller last block."""
    if len(case.args) != 2 or not isinstance(got, dict) or not isinstance(got["scales"], torch.Tensor):
        return False
    full, right = len(case.args[0]) // case.args[1], scales_of(*case.args)
    return got["scales"].shape == (full,) < right.shape and torch.allclose(
        got["scales"].float(), right[:full], atol=0.0
    )


def _upside_down(case, got):
    found = _scales_and_right_ones(case, got)
    return found is not None and torch.allclose(found[0] * found[1], torch.ones(()))


def _zero_scale(case, got):
    """Only blocks of zeros are wrong: their scale is 0."""
    found = _scales_and_right_ones(case, got)
    if found is None:
        return False
    scales, right, zero = found
    same = torch.allclose(scales[~zero], right[~zero], atol=0.0)
    return same and bool(zero.any()) and bool((scales[zero] == 0).all())


def _zeros_without_codes(case, got):
    """All scales are right, that of a block of zeros too, and codes are NaN."""
    found = _scales_and_right_ones(case, got)
    if found is None:
        return False
    scales, right, zero = found
    return torch.allclose(scales, right, atol=0.0) and bool(zero.any()) and math.isnan(got["error"])


def _has_a_floor(case, got):
    """The scales are right but for the smallest, which all have one value, below 1."""
    found = _scales_and_right_ones(case, got)
    if found is None:
        return False
    scales, right, zero = found
    floor = float(scales.min())
    kept = torch.where(zero, torch.zeros(()), right).clamp(min=floor)
    return 0 < floor < 1 and torch.allclose(scales, kept, atol=0.0) and not torch.allclose(scales, right, atol=0.0)
