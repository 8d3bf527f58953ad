"""What the rotations with append share, whatever the cache: the body of a program, and what they ask of arguments."""

import torch
import triton
import triton.language as tl

from course_lib.kernels.common.checks import FLOAT_DTYPES, check_contiguous, check_rows, check_same, check_tensor
from course_lib.kernels.fused.add_rms_norm import inverse_of_rms

ROWS_PER_PROGRAM = 16  # heads: 4 KB of head dimension 128 in 16 bits


def turned_halves(heads, cosine, sine):
    """The plain PyTorch meaning of a turn: heads [..., tokens, head_dim] by angles [tokens, head_dim / 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


@triton.jit
def rows_of_program(rows, ROWS: tl.constexpr):
    """[ROWS] of the heads that a program takes, in as many bits as their number `rows` has.

    They are divided into tokens and heads. With divisions of 64 bits the kernel of `rope_append` has 408 instructions,
    with those of 32 bits 272 (sm_90, Triton 3.6).
    """
    return tl.program_id(0).to(rows.dtype) * ROWS + tl.arange(0, ROWS)


@triton.jit
def turn_and_store(
    source_rows, query_rows, key_rows, value_rows, head, position, exists, kept, cosine_pointer, sine_pointer,
    query_gain_pointer, key_gain_pointer, epsilon, query_heads, key_heads, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Read some heads [ROWS] of packed QKV, turn queries and keys, and store each where a head of its kind goes.

    The rows are pointers [ROWS] to where a head begins. exists: heads that are there; kept: those among them whose keys
    and values are stored. The gains are None together: nothing is normalised.
    """
    column = tl.arange(0, BLOCK_H)[None, :]  # [1, BLOCK_H], of a half
    inside = exists[:, None] & (column < HALF)  # [ROWS, BLOCK_H]
    source = source_rows[:, None] + column
    first = tl.load(source, mask=inside, other=0.0)  # [ROWS, BLOCK_H]
    second = tl.load(source + HALF, mask=inside, other=0.0)  # [ROWS, BLOCK_H]
    is_query = (head < query_heads)[:, None]
    is_value = (head >= query_heads + key_heads)[:, None]
    turns = inside & (is_value == 0)
    angle = (position * HALF)[:, None] + column
    cosine = tl.load(cosine_pointer + angle, mask=turns, other=0.0)  # [ROWS, BLOCK_H]
    sine = tl.load(sine_pointer + angle, mask=turns, other=0.0)  # [ROWS, BLOCK_H]
    x, y = first.to(tl.float32), second.to(tl.float32)
    if query_gain_pointer is not None:
        inverse = inverse_of_rms(tl.sum(x * x + y * y, axis=1, keep_dims=True), 2 * HALF, epsilon)  # [ROWS, 1]
        x *= inverse * load_gain(query_gain_pointer, key_gain_pointer, is_query, column, HALF)
        y *= inverse * load_gain(query_gain_pointer + HALF, key_gain_pointer + HALF, is_query, column, HALF)
    turned_first = (x * cosine - y * sine).to(first.dtype)  # [ROWS, BLOCK_H]
    turned_second = (y * cosine + x * sine).to(second.dtype)  # [ROWS, BLOCK_H]

    kept = inside & kept[:, None]
    store_halves(query_rows, turned_first, turned_second, inside & is_query, column, HALF)
    store_halves(key_rows, turned_first, turned_second, kept & turns & (is_query == 0), column, HALF)
    # A value is stored as it came, not turned by nothing: 0 · inf would be NaN.
    store_halves(value_rows, first, second, kept & is_value, column, HALF)


@triton.jit
def load_gain(query_gain_pointer, key_gain_pointer, is_query, column, HALF: tl.constexpr):
    """The norm's weights [ROWS, BLOCK_H] for a half of each head."""
    query_gain = tl.load(query_gain_pointer + column, mask=column < HALF, other=0.0)  # [1, BLOCK_H]
    key_gain = tl.load(key_gain_pointer + column, mask=column < HALF, other=0.0)  # [1, BLOCK_H]
    return tl.where(is_query, query_gain.to(tl.float32), key_gain.to(tl.float32))


@triton.jit
def store_halves(row_pointers, first, second, mask, column, HALF: tl.constexpr):
    """Both halves [ROWS, BLOCK_H] of some heads to where their rows [ROWS] begin."""
    tl.store(row_pointers[:, None] + column, first, mask=mask)
    tl.store(row_pointers[:, None] + column + HALF, second, mask=mask)


def blocks_of(head_dim: int) -> dict:
    """What a launch tells the compiler."""
    half = head_dim // 2
    return {"HALF": half, "BLOCK_H": triton.next_power_of_2(half), "ROWS": ROWS_PER_PROGRAM}


def check_packed(qkv, dimensions: str, caches: dict, cache_dimensions: str) -> int:
    """The number of query heads. caches: {name: tensor} of keys, then of values.

    Raises a ValueError unless qkv and the caches fit together; their first and third dimensions are not compared.
    """
    check_rows("qkv", qkv, dimensions)
    check_tensor("qkv", qkv, FLOAT_DTYPES)
    for name, cache in caches.items():
        check_rows(name, cache, cache_dimensions)
        check_same(name, cache, "qkv", qkv)
    (key_name, keys), (value_name, values) = caches.items()
    check_same(value_name, values, key_name, keys, shape=(tuple(values.shape), tuple(keys.shape)))
    width, key_heads, head_dim = qkv.shape[-1], keys.shape[1], keys.shape[3]
    query_heads = width // head_dim - 2 * key_heads
    if head_dim % 2 or width % head_dim or query_heads < 1:
        raise ValueError(
            f"qkv has width {width} beside caches of {key_heads} heads of {head_dim}; it must be (query_heads + "
            f"{2 * key_heads}) · {head_dim}, with at least one query head and an even head dimension."
        )
    return query_heads


def check_angles(cosine, sine, head_dim: int, places: int) -> None:
    """Raise a ValueError unless both have the angles of this many places."""
    for name, table in (("cosine", cosine), ("sine", sine)):
        check_tensor(name, table, (torch.float32,))
        check_contiguous(name, table)
        if table.dim() != 2 or table.shape[0] < places or table.shape[1] != head_dim // 2:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}; it must have {head_dim // 2} numbers for each of {places} "
                "places or more."
            )
