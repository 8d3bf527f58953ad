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
from course_lib.kernels.common.checks import check_same
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.decode.append import check_positions
from course_lib.kernels.fused.rope_parts import (
    ROWS_PER_PROGRAM,
    blocks_of,
    check_angles,
    check_packed,
    rows_of_program,
    turn_and_store,
    turned_halves,
)

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
        turned[sequence] = turned_halves(wide[sequence], cosine[places], sine[places]).to(qkv.dtype)
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
    row = rows_of_program(rows, ROWS)
    exists = row < rows
    heads = query_heads + 2 * key_heads
    head = (row % heads).to(tl.int64)
    token = (row // heads % tokens).to(tl.int64)
    batch = (row // heads // tokens).to(tl.int64)
    place = tl.load(positions_pointer + batch, mask=exists, other=0).to(tl.int64) + token  # [ROWS]
    source_row = qkv_pointer + batch * qkv_batch_stride + token * qkv_stride + head * (2 * HALF)
    query_row = query_pointer + ((batch * query_heads + head) * tokens + token) * (2 * HALF)
    key_head = head - query_heads
    key_row = key_cache_pointer + batch * key_batch_stride + key_head * key_head_stride + place * key_stride
    value_head = key_head - key_heads
    value_row = value_cache_pointer + batch * value_batch_stride + value_head * value_head_stride + place * value_stride
    turn_and_store(source_row, query_row, key_row, value_row, head, place, exists, exists, cosine_pointer, sine_pointer,
                   None, None, 0.0, query_heads, key_heads, HALF, BLOCK_H)  # fmt: skip


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
    query_heads = check_packed(qkv, "[batch, tokens, width]", {"key_cache": key_cache, "value_cache": value_cache},
                               "[batch, key_heads, capacity, head_dim]")  # fmt: skip
    check_same("key_cache", key_cache, "qkv", qkv, batch_size=(key_cache.shape[0], qkv.shape[0]))
    batch, tokens = qkv.shape[:2]
    key_heads, capacity, head_dim = key_cache.shape[1:]
    check_angles(cosine, sine, head_dim, capacity)
    check_indices("positions", positions, "[batch]", (batch,), qkv.device)
    if validate:
        check_positions(positions, tokens, capacity)
    query = torch.empty(batch, query_heads, tokens, head_dim, dtype=qkv.dtype, device=qkv.device)
    rows = batch * tokens * (query_heads + 2 * key_heads)
    rope_append_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        qkv, cosine, sine, key_cache, value_cache, positions, query, *qkv.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3], tokens, query_heads, key_heads, rows, **blocks_of(head_dim), num_warps=4,
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
    cases = []
    for kind in ("fp16", "fp32"):
        angles = {name: "*fp32" for name in names if name.startswith(("cosine", "sine")) and name.endswith("_pointer")}
        signature = signature_of(rope_append_kernel, kind, **angles)
        cases.append(CompileCase(rope_append_kernel, signature, blocks_of(128), label=kind))
    return cases
