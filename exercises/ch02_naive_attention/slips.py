"""What slips of the kernels of chapter 02 look like in their results: the comparison, edges, tiles and heads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from exercises.ch02_naive_attention.requirements import SMALLEST_TILE

UNMASKED_WRITE = (
    "A store reaches past the end of the result. A length is seldom a multiple of the tile: mask the store in both "
    "directions, rows and columns. If it is masked, are two lengths or strides exchanged?"
)
HEADS_MISSING = (
    "Only the first head was written. The grid needs a dimension for the heads, and the result's pointer its offset."
)


def same(got, expected: torch.Tensor, rough: float = 1e-2) -> bool:
    """Whether a result is this one up to rounding; where `expected` is NaN nothing is known."""
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape:
        return False
    known = ~expected.isnan()
    if not known.any():
        return False
    got, expected = got.double()[known], expected.double()[known]
    finite = expected[torch.isfinite(expected)].abs()
    size = float(finite.max()) if finite.numel() else 1.0
    return bool(torch.isclose(got, expected, rtol=rough, atol=rough * 0.1 * max(size, 1e-6), equal_nan=False).all())


def writes_one_tile(right: Callable):
    """A `when`: of every matrix a first tile is right and the rest was never written."""

    def when(case, seen, got):
        expected = right(*case.args).double()
        if not seen.unwritten or not isinstance(got, torch.Tensor) or got.shape != expected.shape:
            return False
        written = ~got.isnan()
        rows, columns = written.any(dim=2).sum(dim=1), written.any(dim=1).sum(dim=1)
        m, n = int(rows.max()), int(columns.max())
        tile = torch.zeros_like(written)
        tile[:, :m, :n] = True
        heads = written.any(dim=2).any(dim=1)
        if m == 0 or (m, n) == tuple(expected.shape[1:]) or not torch.equal(tile & heads[:, None, None], written):
            return False
        if any(size % SMALLEST_TILE and size != whole for size, whole in zip((m, n), expected.shape[1:])):
            return False  # tiles end at a multiple of 16, or with the matrix
        return same(got[heads][:, :m, :n], expected[heads][:, :m, :n])

    return when


def only_some_heads_written(case, seen, got):
    """A `when`: whole heads were never written."""
    if not seen.unwritten or not isinstance(got, torch.Tensor) or got.dim() != 3 or got.shape[0] < 2:
        return False
    written = ~got.isnan()
    return bool(written[0].all()) and not written[1:].any()
