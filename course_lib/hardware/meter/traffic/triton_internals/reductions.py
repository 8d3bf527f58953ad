"""`tl.reduce` and `tl.associative_scan` with a function of one's own, whole tiles at a time.

The interpreter calls the function once for every element: a softmax over rows of a million took 19 s of a processor.
Here neighbours are combined in pairs, then the pairs, as compiled kernels do: ten calls for 1,024 elements. Elements
keep their order, so the function must be associative, which Triton asks for, but need not commute. A function that
branches on its arguments works on single elements alone, and goes the interpreter's way.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator

import numpy as np

Tiles = list[np.ndarray]  # one for each tensor that is combined; the axis that is reduced or scanned comes last
Combine = Callable[[Tiles, Tiles], Tiles]


def quicken_reductions() -> bool:
    """Put the quick way before the interpreter's own; returns whether anything was."""
    from triton.runtime import interpreter

    reductions, scans = interpreter.ReduceOps, interpreter.ScanOps
    slow_reduce, slow_scan = reductions.generic_reduce, scans.generic_scan
    if hasattr(slow_reduce, "quick"):
        return False

    def generic_reduce(self, input):
        with contextlib.suppress(Exception):  # what it cannot do, or does wrongly, the slow way says
            flat, axis = self.unravel(input, self.axis)
            tiles = _reduced([np.moveaxis(one.handle.data, axis, -1) for one in flat], _combine(self, flat))
            packed = [_packed(self, tile, input[0].handle.data.ndim) for tile in tiles]
            return [self.to_tensor(tile, one.dtype) for tile, one in zip(packed, flat)]
        return slow_reduce(self, input)

    def generic_scan(self, input):
        with contextlib.suppress(Exception):
            tiles = _scanned([np.moveaxis(one.handle.data, self.axis, -1) for one in input], _combine(self, input))
            return [
                self.to_tensor(np.ascontiguousarray(np.moveaxis(tile, -1, self.axis)), one.dtype)
                for tile, one in zip(tiles, input)
            ]
        return slow_scan(self, input)

    if not _agree(reductions, generic_reduce, slow_reduce, False) or not _agree(scans, generic_scan, slow_scan, True):
        return False
    generic_reduce.quick = True  # type: ignore[attr-defined]
    reductions.generic_reduce, scans.generic_scan = generic_reduce, generic_scan
    return True


def _agree(operation, quick: Callable, slow: Callable, last_option: bool) -> bool:
    """Whether both make the same of a function that keeps the left, and of one that keeps the right of two."""
    import triton.language as tl
    from triton.runtime import interpreter

    numbers = np.arange(16, dtype=np.int32).reshape(2, 8)
    tile = tl.tensor(interpreter.TensorHandle(numbers, tl.int32), tl.block_type(tl.int32, [2, 8]))
    for function in (lambda left, right: left, lambda left, right: right):
        operations = [operation(axis, types.SimpleNamespace(fn=function), last_option) for axis in (0, 1)]
        for found, expected in ((quick(one, (tile,))[0], slow(one, (tile,))[0]) for one in operations):
            same = np.array_equal(found.handle.data, expected.handle.data) and found.type == expected.type
            if not same or found.handle.data.dtype != expected.handle.data.dtype:
                return False
    return True


def _packed(operation, tile: np.ndarray, dimensions: int):
    """A reduced tile [..., 1] in the shape that the interpreter gives it."""
    if operation.axis is None:
        return tile.reshape([1] * dimensions) if operation.keep_dims else tile.item()
    return np.moveaxis(tile, -1, operation.axis) if operation.keep_dims else tile[..., 0]


def _reduced(tiles: Tiles, combine: Combine) -> Tiles:
    """[..., length] each -> [..., 1]: neighbours together, until one is left."""
    while (length := tiles[0].shape[-1]) > 1:
        even = length // 2 * 2
        pairs = combine([tile[..., 0:even:2] for tile in tiles], [tile[..., 1:even:2] for tile in tiles])
        tiles = [np.concatenate([pair, tile[..., even:]], axis=-1) for pair, tile in zip(pairs, tiles)]
    return tiles


def _scanned(tiles: Tiles, combine: Combine) -> Tiles:
    """[..., length] each: all up to each element, which reaches back twice as far at every step."""
    reach = 1
    while reach < tiles[0].shape[-1]:
        further = combine([tile[..., :-reach] for tile in tiles], [tile[..., reach:] for tile in tiles])
        tiles = [np.concatenate([tile[..., :reach], more], axis=-1) for tile, more in zip(tiles, further)]
        reach *= 2
    return tiles


def _combine(operation, inputs) -> Combine:
    """The kernel's function on arrays, in the dtypes of `inputs`."""
    function = operation.combine_fn.fn

    def combine(left: Tiles, right: Tiles) -> Tiles:
        one, other = (
            [operation.to_tensor(np.ascontiguousarray(tile), given.dtype) for tile, given in zip(tiles, inputs)]
            for tiles in (left, right)
        )
        with _no_branches():
            found = function(*one, *other)
        found = found if isinstance(found, tuple) else (found,)
        if len(found) != len(left):
            raise ValueError("the function returns another number of tensors than it gets")
        return [
            np.broadcast_to(getattr(getattr(new, "handle", None), "data", new), tile.shape).astype(tile.dtype)
            for new, tile in zip(found, left)
        ]

    return combine


@contextlib.contextmanager
def _no_branches() -> Iterator[None]:
    """A tile is neither true nor false, where the interpreter takes it for true."""
    import triton.language as tl

    def refuse(tile):
        raise TypeError("a branch on a tile")

    kind = tl.core.tensor
    kept = kind.__bool__
    kind.__bool__ = refuse
    try:
        yield
    finally:
        kind.__bool__ = kept
