"""What the two kernels of 10.6 compute, as their pointers reach what they load, and the slips in it.

All heads are computed at once, and the blocks one after the other, in float32: a model overflows where a kernel does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.nn.functional import pad

from course_lib.checker import edits, model_of
from course_lib.checker.specification.edits import Edit, only
from exercises.topics.attention_backward_slips import (
    ALIGNED,
    ALL_KEYS,
    ALL_QUERIES,
    BOUNDED_BELOW,
    DIFFERENCE,
    EXIST,
    GUARDED,
    OF_KEYS,
    OF_KEYS_SKIPPED,
    OF_QUERIES,
    OF_QUERIES_SKIPPED,
    PUT_FOR_NUMBERS,
    SCALE,
    of_a_loop,
)
from exercises.topics.attention_backward_steps import (
    KEY_PARTS,
    QUERY_PARTS,
    USES,
    key_gradients,
    query_gradients,
    where_foreseen,
)
from exercises.topics.attention_steps import padded
from exercises.topics.pointers import load

ROWS = 64  # of every tile


def backward(query, key, value, output, log_sum_exp, gradient, causal):
    """dQ, dK and dV [heads, length, head_dim]; NaN where no program writes."""
    delta = (output.float() * gradient.float()).sum(-1)
    inputs = (query, key, value, gradient, log_sum_exp, delta, causal)
    query_gradient = query_kernel(*inputs)
    key_gradient, value_gradient = key_kernel(*inputs)
    return query_gradient, key_gradient, value_gradient


def key_kernel(query, key, value, gradient, log_sum_exp, delta, causal):
    """dK and dV: a program for each block of keys."""
    query_length, key_length = query.shape[1], key.shape[1]
    queries, keys, values, *rest = loaded(query, key, value, gradient, log_sum_exp, delta)
    key_gradient, value_gradient = (torch.full(keys.shape, math.nan, dtype=key.dtype) for _ in range(2))
    for first in range(0, key_length, ROWS):
        block = slice(first, first + ROWS)
        inputs = (queries, keys[:, block], values[:, block], *rest)
        stored = key_gradients(*inputs, query_length, first, key_length, causal, ROWS)
        key_gradient[:, block], value_gradient[:, block] = stored
    return key_gradient[:, :key_length], value_gradient[:, :key_length]


def query_kernel(query, key, value, gradient, log_sum_exp, delta, causal):
    """dQ: a program for each tile of queries."""
    query_length, key_length = query.shape[1], key.shape[1]
    queries, keys, values, *rest = loaded(query, key, value, gradient, log_sum_exp, delta)
    query_gradient = torch.full(queries.shape, math.nan, dtype=query.dtype)
    for first in range(0, query_length, ROWS):
        tile = slice(first, first + ROWS)
        inputs = (queries[:, tile], keys, values, *(each[:, tile] for each in rest))
        query_gradient[:, tile] = query_gradients(*inputs, first, query_length, key_length, causal, ROWS)
    return query_gradient[:, :query_length]


def loaded(query, key, value, gradient, log_sum_exp, delta):
    """The inputs, with zeros past the end: 64 rows from any row on are a tile."""
    queries = read(query, query.stride())
    keys = read(key, key.stride())
    values = read(value, value.stride())
    gradients = read(gradient, gradient.stride())
    more = queries.shape[1] - query.shape[1]
    return queries, keys, values, gradients, pad(log_sum_exp, (0, more)), pad(delta, (0, more))


@functools.lru_cache(maxsize=64)
def tile_offsets(rows: int, columns: int, strides: tuple[int, ...], heads: int) -> torch.Tensor:
    """Offsets of [heads, rows, columns] elements by strides (of a head, of a row, of a column)."""
    indices = torch.meshgrid(torch.arange(heads), torch.arange(rows), torch.arange(columns), indexing="ij")
    return sum(index * stride for index, stride in zip(indices, strides))


def read(tensor, strides):
    """A tensor [heads, length, head_dim] by these strides."""
    heads, length, head_dim = tensor.shape
    rows = (length // ROWS + 2) * ROWS
    return load(tensor, tile_offsets(rows, head_dim, strides, heads), (torch.arange(rows) < length)[:, None], 0.0)


def written_as_if_contiguous(like, result):
    """What `torch.empty_like` of this input holds, where a kernel writes the result into it row after row."""
    made = torch.empty_like(like, dtype=result.dtype)
    made.as_strided((made.numel(),), (1,)).copy_(result.flatten())
    return made


KERNELS = {
    "keys": ("key_kernel", "In the kernel of dK and dV: "),
    "queries": ("query_kernel", "In the kernel of dQ: "),
}


def in_one(loop: str, rows: Iterable[Edit]) -> tuple[Edit, ...]:
    """These rows, made in one kernel alone."""

    def name(row: Edit) -> str:
        return f"{row.id}_{loop}" if "__" in row.id else f"{row.id}__{loop}"

    return tuple(replace(row, id=name(row), within=KERNELS[loop][0]) for row in rows)


def in_either(of_keys: Iterable[Edit], of_queries: Iterable[Edit]) -> tuple[Edit, ...]:
    """Rows of what is easily right in one kernel and wrong in the other: made in one of them, and told so."""
    return tuple(
        replace(row, sentence=f"{KERNELS[loop][1]}{row.sentence}", alone=True)
        for loop, rows in (("keys", of_keys), ("queries", of_queries))
        for row in in_one(loop, rows)
    )


def read_by(tensor: str, strides: str) -> tuple[str, str]:
    """The pieces of a tensor that is read by these strides."""
    return (f"read({tensor}, {tensor}.stride())", f"read({tensor}, {strides})")


def rounded(total: str) -> tuple[str, str]:
    """The pieces of a sum that is rounded to the inputs' precision after each tile."""
    return (total, f"{total}.to(query.dtype).float()")


def head_forgotten(name: str, said: str, pieces: tuple[str, str]) -> tuple[Edit, ...]:
    """The rows of a tensor whose offset of a head is missing, in both kernels or in one."""
    kept = f"Head 0 of {said} is used for every head"
    both = edits(f"{kept}: its offset is missing.", **{f"head_forgotten__{name}": pieces})
    one = tuple(replace(edit, sentence=f"{kept}.") for edit in both)
    return (*both, *in_either(one, one))


def of_another(name: str, own: str, other: str) -> dict[str, tuple[str, ...]]:
    """A tensor that is read by another's strides: by all of them, or by some."""
    return {
        name: read_by(own, f"{other}.stride()"),
        f"{name}__rows": read_by(own, f"({own}.stride(0), *{other}.stride()[1:])"),
        f"{name}__heads": read_by(own, f"({other}.stride(0), *{own}.stride()[1:])"),
    }


IN_16_BITS = {
    "dk": "added(key_gradient, score_gradients.mT @ queries.float())",
    "dv": "added(value_gradient, weights.mT @ gradients.float())",
    "dq": "added(query_gradient, score_gradients @ keys.float())",
}
DELTA = "(output.float() * gradient.float()).sum(-1)"
KEY_GRID, QUERY_GRID = "range(0, key_length, ROWS)", "range(0, query_length, ROWS)"
UNCHECKED = (f"foreseeable({DIFFERENCE}, visible)", DIFFERENCE)
ROUNDED_DOWN = "the grid is rounded down, and no program computes the last rows. Use triton.cdiv."
NARROW_SUMS = (
    "Sums are kept in 16 bits. Before the scale those of dQ and dK are larger than the results, those of dV may be so "
    "on the way, and beyond 65,504 a float16 is infinite: keep sums in float32, and round once, when you store."
)
IN_EITHER = (
    *("scale_missing_in_scores", "scale_twice", "log_sum_missing", "log_sum_natural", "log2e_missing", "natural_exp"),
    *("log_sum_by_keys", "no_causal_mask", "no_causal_mask__in_tiles", "masked_after_the_exponential"),
    *("causal_misaligned", "causal_misaligned__in_tiles", "causal_off_by_one", "sees_the_next_key"),
    *("delta_missing", "delta_added", "delta_by_keys", "hidden_pairs_counted", "keys_used_as_values"),
    *("loop_ignores_offset", "diagonal_tile_skipped", "only_last_tile", "partial_tile_skipped"),
)
FORGOTTEN = {
    "query": ("Q", read_by("query", "(0, *query.stride()[1:])")),
    "key": ("K", read_by("key", "(0, *key.stride()[1:])")),
    "value": ("V", read_by("value", "(0, *value.stride()[1:])")),
    "output_gradient": ("dO", read_by("gradient", "(0, *gradient.stride()[1:])")),
    "log_sum_exp": ("L", ("pad(log_sum_exp,", "pad(log_sum_exp[:1].expand_as(log_sum_exp),")),
    "delta": ("Δ", ("pad(delta,", "pad(delta[:1].expand_as(delta),")),
}
STRIDES = (
    *edits(
        "dO is read as if its last stride were 1. A gradient may be expanded or transposed: multiply the columns by "
        "output_gradient_column_stride.",
        column_stride_ignored=read_by("gradient", "(*gradient.stride()[:2], 1)"),
    ),
    *edits(
        "dO is read as if it were contiguous. It has three strides of its own.",
        gradient_read_as_contiguous=read_by("gradient", "(gradient[0].numel(), gradient.shape[2], 1)"),
    ),
    *edits(
        "dO is read by the strides of the query. It has three of its own.",
        gradient_read_by_the_querys_strides=read_by("gradient", "(*query.stride()[:2], gradient.stride(2))"),
        gradient_read_by_the_querys_strides__all=read_by("gradient", "query.stride()"),
        gradient_read_by_the_querys_strides__rows=read_by(
            "gradient", "(gradient.stride(0), query.stride(1), gradient.stride(2))"
        ),
        gradient_read_by_the_querys_strides__heads=read_by("gradient", "(query.stride(0), *gradient.stride()[1:])"),
    ),
    *edits(
        "V is read by a stride of K. Each tensor has strides of its own.",
        **of_another("values_read_by_the_keys_strides", "value", "key"),
    ),
    *edits(
        "K is read by a stride of Q. Each tensor has strides of its own.",
        **of_another("keys_read_by_the_querys_strides", "key", "query"),
    ),
)
CHANGES = (
    *of_a_loop(*OF_KEYS_SKIPPED, *OF_QUERIES_SKIPPED),
    *edits(
        "The scale is missing in dQ and dK: S = scale · Q Kᵀ, so both have it as a factor.",
        scale_missing_in_gradients=("total * scale", "total"),
    ),
    *edits(
        "The scale is computed from the tile's columns, a power of two. It is 1/√head_dim, whatever the tile has.",
        scale_of_the_padded_dimension=(SCALE, "padded(query.shape[-1]) ** -0.5"),
    ),
    *edits(
        "Δ has a factor 1/√head_dim. The scale belongs to the scores alone, and O has none of it.",
        delta_scaled=(DELTA, f"{DELTA} * query.shape[-1] ** -0.5"),
    ),
    *edits(
        NARROW_SUMS, accumulated_in_16_bits=tuple(piece for total in IN_16_BITS.values() for piece in rounded(total))
    ),
    *edits(
        NARROW_SUMS,
        alone=True,
        **{f"accumulated_in_16_bits__{name}": rounded(total) for name, total in IN_16_BITS.items()},
    ),
    *edits(
        "Δ is a mean over head_dim. It is the sum of O ∘ dO.",
        delta_averaged=(DELTA, "(output.float() * gradient.float()).mean(-1)"),
    ),
    *edits(
        "Δ is computed from Q and dO. It is the sum of O ∘ dO.",
        delta_of_the_query=(DELTA, "(query.float() * gradient.float()).sum(-1)"),
    ),
    *in_either(*(only(of_a_loop(*skipped), *IN_EITHER) for skipped in (OF_KEYS_SKIPPED, OF_QUERIES_SKIPPED))),
    *in_one("keys", OF_KEYS),
    *in_one("queries", OF_QUERIES),
    *in_one(
        "queries",
        edits(
            "The keys past the end of the last tile have P = exp(0 - L), which overflows where L is far below zero, "
            "and infinity times a key of zeros is NaN. Give these pairs P = 0.",
            tail_not_masked=(EXIST, "(rows < query_length)[:, None]", *UNCHECKED),
        ),
    ),
    *in_one(
        "keys",
        edits(
            "Queries past the end of the last tile have L = -inf, and S - L is infinite there: infinity times a dO of "
            "0 is NaN. Give these pairs P = 0, or their L another number.",
            log_sum_past_the_end=(
                *(EXIST, "keys < key_length", *UNCHECKED),
                *("pad(log_sum_exp, (0, more))", "pad(log_sum_exp, (0, more), value=-math.inf)"),
            ),
        ),
    ),
    *edits(
        "dK and dV are returned in each other's place.",
        results_exchanged=(
            "query_gradient, key_gradient, value_gradient",
            "query_gradient, value_gradient, key_gradient",
        ),
    ),
    *(edit for name, (said, pieces) in FORGOTTEN.items() for edit in head_forgotten(name, said, pieces)),
    *STRIDES,
    *in_either(STRIDES, STRIDES),
    *edits(
        "The grid of the kernel of dK and dV is counted by the queries. Its programs are blocks of keys: "
        "triton.cdiv(key_length, 64).",
        grid_by_the_other_length__keys=(KEY_GRID, QUERY_GRID),
    ),
    *edits(
        "The grid of the kernel of dQ is counted by the keys. Its programs are tiles of queries: "
        "triton.cdiv(query_length, 64).",
        grid_by_the_other_length__queries=(QUERY_GRID, KEY_GRID),
    ),
    *edits(
        f"In the kernel of dK and dV: {ROUNDED_DOWN}",
        grid_rounded_down__keys=(KEY_GRID, "range(0, key_length - ROWS + 1, ROWS)"),
    ),
    *edits(
        f"In the kernel of dQ: {ROUNDED_DOWN}",
        grid_rounded_down__queries=(QUERY_GRID, "range(0, query_length - ROWS + 1, ROWS)"),
    ),
    *BOUNDED_BELOW,
    *in_either(BOUNDED_BELOW, BOUNDED_BELOW),
    *edits(
        "A result is not contiguous, and the kernels write it as if it were: torch.empty_like takes the strides of its "
        "argument, and an input may have any. Make results by torch.empty with a shape.",
        strides_of_an_input=(
            "return query_gradient, key_gradient, value_gradient",
            "results = (query_gradient, key_gradient, value_gradient)\n"
            "return tuple(map(written_as_if_contiguous, (query, key, value), results))",
        ),
    ),
    *edits("", all_tiles=(*ALL_QUERIES, *ALL_KEYS), guarded=GUARDED, aligned=ALIGNED),
)
MODEL = where_foreseen(
    model_of(
        backward,
        CHANGES,
        dict.fromkeys((*KEY_PARTS, *QUERY_PARTS, read, loaded, key_kernel, query_kernel)),
        (*USES, padded, written_as_if_contiguous),
        styles=((), ("guarded",), ("aligned", "guarded"), ("all_tiles", "guarded")),
        may_be_silent=True,
        first_of_equals=True,
    ),
    key_length_of=lambda query, key, *rest: key.shape[1],
    sure=(*PUT_FOR_NUMBERS, "strides_of_an_input"),
)
