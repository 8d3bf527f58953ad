"""Turn the queries and keys of a packed QKV by their positions, and append keys and values to a cache, in one launch.

    place          = positions[b] + t                                    of new token t of sequence b
    (first, second) of each query and key head become (first · cos - second · sin, second · cos + first · sin)
    query[b, h, t] = turned,    key_cache[b, h, place] = turned,    value_cache[b, h, place] = as it came

Element i of a head is paired with element i + head_dim / 2. FLOPs: 3 per number of Q and K.
Bytes: each number of the packed QKV read once and written once: 2 · (query_heads + 2 · key_heads) · head_dim · itemsize
a token, 24 KB for 32 and 8 heads of 128 in 16 bits, and 512 bytes of angles, which its heads share. Turned first and
appended after, keys are written and read once more, and a decode step pays for one launch more at least.

Source: Su et al., RoFormer, arXiv 2104.09864; the pairs are those of the released Llama weights for Hugging Face.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.cache_checks import check_indices
from course_lib.kernels.common.checks import FLOAT_DTYPES, check_contiguous, check_rows, check_same, check_tensor
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.decode.append import check_positions

ROWS_PER_PROGRAM = 16  # heads: 4 KB of head dimension 128 in 16 bits
SIZES = ("tokens", "query_heads", "key_heads", "rows")


def rope_append_reference(qkv, cosine, sine, key_cache, value_cache, positions):
    """The plain PyTorch meaning of `rope_append`; the caches are changed. Returns the query."""
    key_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    heads = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # [batch, heads, tokens, head_dim]
    wide = heads.to(torch.promote_types(qkv.dtype, torch.float32))
    tokens = heads.shape[2]
    turned = torch.empty_like(heads)
    for sequence, position in enumerate(positions.tolist()):
        places = slice(position, position + tokens)
        first, second = wide[sequence].chunk(2, dim=-1)
        halves = first * cosine[places] - second * sine[places], second * cosine[places] + first * sine[places]
        turned[sequence] = torch.cat(halves, dim=-1).to(qkv.dtype)
        key_cache[sequence, :, places] = turned[sequence, -2 * key_heads : -key_heads]
        value_cache[sequence, :, places] = heads[sequence, -key_heads:]
    return turned[:, : -2 * key_heads].contiguous()


@triton.jit(do_not_specialize=SIZES)
def rope_append_kernel(
    qkv_pointer, cosine_pointer, sine_pointer, key_cache_pointer, value_cache_pointer, positions_pointer, query_pointer,
    qkv_batch_stride, qkv_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride, tokens, query_heads, key_heads, rows,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS of the batch · tokens · (query_heads + 2 · key_heads) heads. query is contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    heads = query_heads + 2 * key_heads
    head = row % heads
    token = row // heads % tokens
    batch = row // (heads * tokens)
    exists = row < rows
    place = tl.load(positions_pointer + batch, mask=exists, other=0).to(tl.int64) + token  # [ROWS]
    column = tl.arange(0, BLOCK_H)[None, :]  # [1, BLOCK_H], of a half
    inside = exists[:, None] & (column < HALF)  # [ROWS, BLOCK_H]
    source = (qkv_pointer + batch * qkv_batch_stride + token * qkv_stride + head * (2 * HALF))[:, None] + column
    first = tl.load(source, mask=inside, other=0.0)  # [ROWS, BLOCK_H]
    second = tl.load(source + HALF, mask=inside, other=0.0)  # [ROWS, BLOCK_H]
    is_value = head >= query_heads + key_heads
    turns = inside & (is_value == 0)[:, None]
    angle = (place * HALF)[:, None] + column
    cosine = tl.load(cosine_pointer + angle, mask=turns, other=0.0)  # [ROWS, BLOCK_H]
    sine = tl.load(sine_pointer + angle, mask=turns, other=0.0)  # [ROWS, BLOCK_H]
    x, y = first.to(tl.float32), second.to(tl.float32)
    # A value is taken as it came, not turned by nothing: 0 · inf would be NaN.
    first = tl.where(is_value[:, None], first, (x * cosine - y * sine).to(first.dtype))
    second = tl.where(is_value[:, None], second, (y * cosine + x * sine).to(second.dtype))

    is_query = head < query_heads
    query_row = query_pointer + ((batch * query_heads + head) * tokens + token) * (2 * HALF)
    store_halves(query_row, first, second, inside & is_query[:, None], column, HALF)
    key_head = head - query_heads
    key_row = key_cache_pointer + batch * key_batch_stride + key_head * key_head_stride + place * key_stride
    store_halves(key_row, first, second, turns & (is_query == 0)[:, None], column, HALF)
    value_head = key_head - key_heads
    value_row = value_cache_pointer + batch * value_batch_stride + value_head * value_head_stride + place * value_stride
    store_halves(value_row, first, second, inside & is_value[:, None], column, HALF)


@triton.jit
def store_halves(row_pointers, first, second, mask, column, HALF: tl.constexpr):
    """Both halves [ROWS, BLOCK_H] of some heads to where their rows [ROWS] begin."""
    tl.store(row_pointers[:, None] + column, first, mask=mask)
    tl.store(row_pointers[:, None] + column + HALF, second, mask=mask)


def rope_append(qkv, cosine, sine, key_cache, value_cache, positions, validate=True):
    """The turned query [batch, query_heads, tokens, head_dim]; turned keys, and values, are written into the caches.

    Args:
        qkv: [batch, tokens, (query_heads + 2 · key_heads) · head_dim], float32, float16 or bfloat16: the query heads,
            then the key heads, then the value heads. Any strides with a contiguous last dimension.
        cosine, sine: float32 [at least capacity, head_dim / 2], contiguous: of the angles of every position.
        key_cache, value_cache: [batch, key_heads, capacity, head_dim], of qkv's dtype; any strides, the last one 1.
            head_dim is even. query_heads follows from the widths, and need be no multiple of key_heads.
        positions: int32 or int64 [batch], where the first new token of each sequence goes: its length before.
        validate: read `positions` from the device and check them, which waits for it. With False nothing waits; a
            position outside the cache then overwrites other memory.

    Raises:
        ValueError: an argument is not as above; the message names it. Nothing is written then.
    """
    check_rows("qkv", qkv, "[batch, tokens, width]")
    check_tensor("qkv", qkv, FLOAT_DTYPES)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_rows(name, cache, "[batch, key_heads, capacity, head_dim]")
        check_same(name, cache, "qkv", qkv, batch_size=(cache.shape[0], qkv.shape[0]))
    check_same("value_cache", value_cache, "key_cache", key_cache,
               shape=(tuple(value_cache.shape), tuple(key_cache.shape)))  # fmt: skip
    batch, tokens, width = qkv.shape
    key_heads, capacity, head_dim = key_cache.shape[1:]
    query_heads = width // head_dim - 2 * key_heads
    if head_dim % 2 or width % head_dim or query_heads < 1:
        raise ValueError(
            f"qkv has width {width} beside caches of {key_heads} heads of {head_dim}; it must be (query_heads + "
            f"{2 * key_heads}) · {head_dim}, with at least one query head and an even head dimension."
        )
    for name, table in (("cosine", cosine), ("sine", sine)):
        check_tensor(name, table, (torch.float32,))
        check_contiguous(name, table)
        if table.dim() != 2 or table.shape[0] < capacity or table.shape[1] != head_dim // 2:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}; it must have a row for each of the cache's {capacity} places, "
                f"of {head_dim // 2} numbers."
            )
    check_indices("positions", positions, "[batch]", (batch,), qkv.device)
    if validate:
        check_positions(positions, tokens, capacity)
    query = torch.empty(batch, query_heads, tokens, head_dim, dtype=qkv.dtype, device=qkv.device)
    rows = batch * tokens * (query_heads + 2 * key_heads)
    rope_append_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        qkv, cosine, sine, key_cache, value_cache, positions, query, *qkv.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3], tokens, query_heads, key_heads, rows, HALF=head_dim // 2,
        BLOCK_H=triton.next_power_of_2(head_dim // 2), ROWS=ROWS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return query


SCHEMA = (
    "(Tensor qkv, Tensor cosine, Tensor sine, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor positions, "
    "bool validate) -> Tensor"
)
# As an operator, `torch.ops.course_lib.rope_append`. It serves, and has no gradient.
rope_append_operator = torch.library.custom_op(
    "course_lib::rope_append", rope_append, mutates_args=("key_cache", "value_cache"), schema=SCHEMA
)


@rope_append_operator.register_fake
def _(qkv, cosine, sine, key_cache, value_cache, positions, validate):
    key_heads, head_dim = key_cache.shape[1], key_cache.shape[3]
    return qkv.new_empty(qkv.shape[0], qkv.shape[2] // head_dim - 2 * key_heads, qkv.shape[1], head_dim)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: heads of 128 numbers, 16 and 32 bits."""
    names = rope_append_kernel.arg_names
    constants = {"HALF": 64, "BLOCK_H": 64, "ROWS": ROWS_PER_PROGRAM}
    cases = []
    for kind in ("fp16", "fp32"):
        angles = {name: "*fp32" for name in names if name.startswith(("cosine", "sine")) and name.endswith("_pointer")}
        signature = signature_of(rope_append_kernel, kind, **angles)
        cases.append(CompileCase(rope_append_kernel, signature, constants, label=kind))
    return cases
