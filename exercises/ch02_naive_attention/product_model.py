"""The two products of chapter 02 as tiled kernels compute them: S = scale · Q Kᵀ of exercise 2.4, O = P V of 2.6.

All programs are computed at once, in float32. A program has a tile of rows (and of columns) of one head, and the grid
is (tiles of rows, …, heads); NaN stands where no program writes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from course_lib.checker.specification.edits import model_of
from exercises.ch02_naive_attention.product_slips import OUTPUT, SCORES
from exercises.topics.pointers import load, store


def scores(query, key, scale):
    (heads, query_length, head_dim), key_length = query.shape, key.shape[1]
    rows = 64
    columns = 64
    row_tiles, column_tiles = -(-query_length // rows), -(-key_length // columns)
    head, queries = torch.arange(heads)[:, None, None], torch.arange(query_length)[:, None]
    keys, dims = torch.arange(key_length), torch.arange(head_dim)
    left = load(query, head * query.stride(0) + queries * query.stride(1) + dims).float()
    right = load(key, head * key.stride(0) + keys[:, None] * key.stride(1) + dims).float()
    result = left @ right.mT * scale
    written = (queries < row_tiles * rows) & (keys < column_tiles * columns)
    result_head_stride, result_row_stride = query_length * key_length, key_length
    places = head * result_head_stride + queries * result_row_stride + keys
    return store(torch.where(written, result, torch.nan).to(query.dtype), places, queries // rows * heads + head)


def weighted_values(probabilities, value):
    (heads, query_length, key_length), head_dim = probabilities.shape, value.shape[2]
    rows = 64
    tile = 64
    row_tiles = -(-query_length // rows)
    head, queries = torch.arange(heads)[:, None, None], torch.arange(query_length)[:, None]
    starts, dims = torch.arange(0, key_length, tile), torch.arange(head_dim)
    keys = (starts[:, None] + torch.arange(tile)).flatten()  # of all steps of the loop
    places = head * probabilities.stride(0) + queries * probabilities.stride(1) + keys
    left = load(probabilities, places, keys < key_length).float()
    places = head * value.stride(0) + keys[:, None] * value.stride(1) + dims
    right = load(value, places, keys[:, None] < key_length).float()
    result = left @ right
    written = queries < row_tiles * rows
    result_head_stride, result_row_stride = query_length * head_dim, head_dim
    places = head * result_head_stride + queries * result_row_stride + dims
    return store(torch.where(written, result, torch.nan).to(value.dtype), places, queries // rows * heads + head)


def not_transposed(left, right):
    """Tiles of as many keys as head_dim, as they were loaded: [keys, head_dim] where [head_dim, keys] belongs."""
    key_length, head_dim = right.shape[1:]
    tiles = torch.nn.functional.pad(right, (0, 0, 0, -key_length % head_dim)).unflatten(1, (-1, head_dim))
    return (left[:, None] @ tiles).transpose(1, 2).flatten(2)[..., :key_length]


def summed_in(dtype, left, right, tile):
    """The product with an accumulator of this dtype, which each tile of keys rounds."""
    total = torch.zeros(*left.shape[:2], right.shape[2])
    for weights, values in zip(left.split(tile, dim=2), right.split(tile, dim=1)):
        total = (total + weights @ values).to(dtype).float()
    return total


SCORES_MODEL = model_of(scores, SCORES, uses=(not_transposed,))
SCORES_MODEL = replace(
    SCORES_MODEL, styles=(*SCORES_MODEL.styles, ("rows_32", "columns_32"), ("rows_16", "columns_16"))
)
OUTPUT_MODEL = model_of(weighted_values, OUTPUT, uses=(summed_in,))
