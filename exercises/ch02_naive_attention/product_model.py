"""The two products of chapter 02 as tiled kernels compute them, step by step, with what can go wrong at each step.

S = scale · Q Kᵀ of exercise 2.4 and O = P V of exercise 2.6. All heads and tiles are computed at once, on the
case's own tensors: a wrong stride reads what the kernel reads.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.memory import in_place_of_the_first, load, store, tile_offsets

TILES = (16, 32, 64, 128, 256)  # rows or columns that a tile may have; 64 unless a style says otherwise


def styles(*sides: str) -> tuple[tuple[str, ...], ...]:
    """Styles in which a tile's sides ("rows", "columns", "keys") have any of the usual lengths, each in turn."""
    return ((), *((f"{side}_{count}",) for side in sides for count in TILES if count != 64))


def scores_model(slips: tuple[Slip, ...]) -> Model:
    """The model of exercise 2.4, called with query, key and scale; tiles of "rows" by "columns"."""
    return Model(
        _scores, slips, styles=(*styles("rows", "columns"), ("rows_32", "columns_32"), ("rows_16", "columns_16"))
    )


def output_model(slips: tuple[Slip, ...]) -> Model:
    """The model of exercise 2.6, called with probabilities and value; tiles of "rows" by "keys"."""
    return Model(_output, slips, styles=styles("rows", "keys"))


def _scores(s: Slips, query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor | None:
    named = {"query": query, "key": key}
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    left = key if s("keys_used_as_queries") else query
    right = query if s("queries_used_as_keys") else key
    left, right = _read(s, named, "query", left, query_length), _read(s, named, "key", right, key_length)
    if s("scaled_in_float16", "scaled_in_float16__key"):  # and the product is not scaled any more
        left = left if s("scaled_in_float16__key") else (left * scale).to(query.dtype).float()
        right = (right * scale).to(query.dtype).float() if s("scaled_in_float16__key") else right
        scale = 1.0
    if s("scale_twice__in_float16_first"):
        left = (left * scale).to(query.dtype).float()
    if s("key_not_transposed"):
        right = torch.nn.functional.pad(right, (0, 0, 0, -key_length % head_dim)).unflatten(1, (-1, head_dim))
        product = (left.unsqueeze(1) @ right).transpose(1, 2).flatten(2)[..., :key_length]
    else:
        product = left @ right.transpose(1, 2)
    if s("product_in_float16"):
        product = product.to(query.dtype).float()
    result = (product * _factor(s, scale, head_dim) + (scale if s("scale_added") else 0.0)).to(query.dtype)

    rows, columns = _side(s, "rows"), _side(s, "columns")
    row_tiles, column_tiles = -(-query_length // rows), -(-key_length // columns)
    if s("grid_axes_exchanged"):
        row_tiles, column_tiles = column_tiles, row_tiles
    if s("only_first_tile", "only_first_tile__rows"):
        row_tiles = 1
    if s("only_first_tile", "only_first_tile__columns"):
        column_tiles = 1
    if s("last_tile_unwritten", "last_tile_unwritten__rows"):
        row_tiles = query_length // rows
    if s("last_tile_unwritten", "last_tile_unwritten__columns"):
        column_tiles = key_length // columns
    result[:, row_tiles * rows :] = math.nan
    result[..., column_tiles * columns :] = math.nan
    return _written(s, named, result, rows)


def _factor(s: Slips, scale: float, head_dim: int) -> torch.Tensor:
    factor = torch.tensor(float(scale))
    if s("scale_missing"):
        factor = torch.ones(())
    if s("scale_twice"):
        factor = factor * factor
    if s("scale_ignored"):
        factor = torch.tensor(head_dim**-0.5)
    if s("divided_by_root_as_well"):
        factor = factor * head_dim**-0.5
    if s("scale_added"):
        factor = torch.ones(())
    if s("divided_by_scale"):
        factor = 1.0 / factor
    return factor


def _output(s: Slips, probabilities: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    named = {"probabilities": probabilities, "value": value}
    query_length, key_length = probabilities.shape[1:]
    rows, tile = _side(s, "rows"), _side(s, "keys")
    padded = -(-key_length // tile) * tile
    first, end = 0, padded
    if s("only_first_tile"):
        end = tile
    if s("last_tile_skipped"):
        end = key_length // tile * tile
    if s("last_tile_skipped__always"):
        end = padded - tile
    if s("first_tile_skipped"):
        first = tile
    if s("keys_counted_by_queries"):
        end = min(end, -(-query_length // tile) * tile)
    if s("accumulator_overwritten"):
        first = end - tile
    left = _read(s, named, "probabilities", probabilities, query_length, padded)
    right = _read(s, named, "value", value, padded)
    if s("start_forgotten", "start_forgotten__probabilities"):
        left = left[..., :tile].repeat(1, 1, padded // tile)
    if s("start_forgotten", "start_forgotten__value"):
        right = right[:, :tile].repeat(1, padded // tile, 1)
    if s("start_forgotten__probabilities"):
        left = left * (torch.arange(padded) < key_length)
    if s("start_forgotten__value"):
        right = right * (torch.arange(padded) < key_length)[:, None]
    left, right = left[..., first:end], right[:, first:end]
    if s("every_second_tile"):
        kept = torch.arange(left.shape[2]) // tile % 2 == 0
        left, right = left[..., kept], right[:, kept]
    if s("accumulator_in_float16"):
        result = torch.zeros(*left.shape[:2], right.shape[2])
        for weights, values in zip(left.split(tile, dim=2), right.split(tile, dim=1)):
            result = (result + weights @ values).to(value.dtype).float()
    else:
        result = left @ right
    if s("mean_over_keys"):
        result = result / key_length
    result = result.to(value.dtype)
    if s("only_first_rows"):
        result[:, rows:] = math.nan
    if s("query_tail_unwritten"):
        result[:, query_length // rows * rows :] = math.nan
    if s("rows_counted_by_keys"):
        result[:, -(-key_length // rows) * rows :] = math.nan
    return _written(s, named, result, rows)


def _side(s: Slips, side: str) -> int:
    """The length of a tile's side."""
    return next((count for count in TILES if s(f"{side}_{count}")), 64)


def _read(
    s: Slips, named: dict[str, torch.Tensor], name: str, source: torch.Tensor, rows: int, columns: int | None = None
) -> torch.Tensor:
    """float32 [heads, rows, columns] of a tensor as the kernel's pointers reach it; 0 past its length.

    named: the kernel's operands; the strides are those of the one called `name`, the memory is the source's.
    """
    tensor = named[name]
    heads, length, width = tensor.shape
    strides = tensor.stride()
    other = next(each for each in named if each != name)
    theirs = named[other].stride()
    if s(f"strides_ignored__{name}_by_{other}"):
        strides = (theirs[0], theirs[1], 1)
    if s(f"strides_ignored__{name}_rows_by_{other}"):
        strides = (strides[0], theirs[1], 1)
    if s(f"strides_ignored__{name}_heads_by_{other}"):
        strides = (theirs[0], strides[1], 1)
    if s("strides_ignored", f"strides_ignored__{name}"):
        strides = (length * width, width, 1)
    if s("strides_ignored__rows", f"strides_ignored__{name}_rows"):
        strides = (strides[0], width, 1)
    if s("head_ignored", f"head_ignored_in_{name}"):
        strides = (0, *strides[1:])
    if s(f"transposed_{name}"):
        strides = (strides[0], 1, strides[1])
    columns = columns or width
    inside = (torch.arange(rows) < length)[:, None] & (torch.arange(columns) < width)
    if s(f"mask_by_the_block__{name}"):  # of keys, which are the columns of P and the rows of V
        along = torch.arange(rows)[:, None] if name == "value" else torch.arange(columns)
        inside = ((torch.arange(rows) < length)[:, None] | (name == "value")) & (along < _side(s, "keys"))
    if s("keys_not_masked", f"keys_not_masked__{name}"):
        inside = torch.ones_like(inside)
    offsets = tile_offsets(rows, columns, (strides[0], strides[1], strides[2]), heads)
    return load(s, source, offsets, inside[None]).float()


def _written(s: Slips, named: dict[str, torch.Tensor], result: torch.Tensor, rows: int) -> torch.Tensor:
    """The result as it lies in memory; NaN where no one wrote."""
    heads, length, width = result.shape
    if s("only_first_head"):
        result[1:] = math.nan
    strides = result.stride()[:2]
    for name, tensor in named.items():
        if s(f"result_strides__{name}", f"result_strides__heads_of_{name}"):
            strides = (tensor.stride(0), strides[1])
        if s(f"result_strides__{name}", f"result_strides__rows_of_{name}"):
            strides = (strides[0], tensor.stride(1))
    if s("stored_in_first_rows"):
        result = in_place_of_the_first(result, rows)
    if s("stored_in_one_head"):
        strides = (0, strides[1])
    if strides == result.stride()[:2]:
        return result
    program = (torch.arange(length) // rows)[None, :, None] * heads + torch.arange(heads)[:, None, None]
    return store(s, result, tile_offsets(length, width, (*strides, 1), heads), program)
