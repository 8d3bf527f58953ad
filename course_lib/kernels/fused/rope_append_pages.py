"""Turn the queries and keys of a packed QKV by their positions, and append keys and values to pages, in one launch.

    query[t, h] = turned by positions[t]
    key_pages[slot // page_size, h, slot % page_size] = turned,    value_pages[…] = as it came,    slot = slots[t]

`rope_append` for tokens that lie one after another, each of a sequence of its own or not: the cache's tables have said
where a token goes. With gains, each query and key head is normalised before it is turned (QK-norm, as in Qwen3):

    head = head ∘ gain / √(mean of head² + ε)

FLOPs: 3 per number of Q and K, and 4 more for the norm. Bytes: each number of the packed QKV read once and written
once, 24 KB a token for 32 and 8 heads of 128 in 16 bits, and 528 bytes of angles and of where it goes. A step of
decode moves little more than that: the launch is its time, and the norms, rotations and the append would be six.

Sources: Su et al., RoFormer, arXiv 2104.09864; Kwon et al., PagedAttention, arXiv 2309.06180; Qwen3, arXiv 2505.09388.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.cache_checks import check_indices
from course_lib.kernels.common.checks import check_alike
from course_lib.kernels.common.dependent import launch_options, wait_for_kernel_before
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.decode.append import check_slots
from course_lib.kernels.fused.checks import check_epsilon, check_weight
from course_lib.kernels.fused.rope_parts import (
    ROWS_PER_PROGRAM,
    blocks_of,
    check_angles,
    check_packed,
    rows_of_program,
    turn_and_store,
    turned_halves,
)


def rope_append_to_pages_reference(
    qkv, cosine, sine, key_pages, value_pages, positions, slots, *, query_gain=None, key_gain=None, epsilon=1e-6
):
    """The plain PyTorch meaning of `rope_append_to_pages`; the pages are changed. Returns the query."""
    key_heads, page_size, head_dim = key_pages.shape[1:]
    heads = qkv.unflatten(-1, (-1, head_dim))  # [tokens, heads, head_dim]
    value = heads[:, -key_heads:]
    turned = heads[:, :-key_heads].to(torch.promote_types(qkv.dtype, torch.float32))
    if query_gain is not None:
        query_heads = turned.shape[1] - key_heads
        gain = torch.cat([query_gain.expand(query_heads, -1), key_gain.expand(key_heads, -1)]).to(turned.dtype)
        turned = turned * torch.rsqrt(turned.square().mean(dim=-1, keepdim=True) + epsilon) * gain
    angles = cosine[positions.long()], sine[positions.long()]  # [tokens, head_dim / 2]
    turned = turned_halves(turned.transpose(0, 1), *angles).transpose(0, 1).to(qkv.dtype)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_pages[slot // page_size, :, slot % page_size] = turned[token, -key_heads:]
            value_pages[slot // page_size, :, slot % page_size] = value[token]
    return turned[:, :-key_heads].contiguous()


@triton.jit(do_not_specialize=("query_heads", "key_heads", "rows"))
def rope_append_to_pages_kernel(
    qkv_pointer, cosine_pointer, sine_pointer, key_pages_pointer, value_pages_pointer, positions_pointer, slots_pointer,
    query_pointer, query_gain_pointer, key_gain_pointer, epsilon,
    qkv_stride, key_page_stride, key_head_stride, key_stride, value_page_stride, value_head_stride, value_stride,
    query_heads, key_heads, rows,
    PAGE_SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """One program: ROWS of the tokens · (query_heads + 2 · key_heads) heads. query is contiguous."""
    wait_for_kernel_before(DEPENDENT)
    row = rows_of_program(rows, ROWS)
    exists = row < rows
    heads = query_heads + 2 * key_heads
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    position = tl.load(positions_pointer + token, mask=exists, other=0).to(tl.int64)  # [ROWS]
    slot = tl.load(slots_pointer + token, mask=exists, other=-1).to(tl.int64)  # [ROWS]
    page = slot // PAGE_SIZE
    place = slot % PAGE_SIZE
    source_row = qkv_pointer + token * qkv_stride + head * (2 * HALF)
    query_row = query_pointer + (token * query_heads + head) * (2 * HALF)
    key_head = head - query_heads
    key_row = key_pages_pointer + page * key_page_stride + key_head * key_head_stride + place * key_stride
    value_head = key_head - key_heads
    value_row = value_pages_pointer + page * value_page_stride + value_head * value_head_stride + place * value_stride
    turn_and_store(source_row, query_row, key_row, value_row, head, position, exists, slot >= 0, cosine_pointer,
                   sine_pointer, query_gain_pointer, key_gain_pointer, epsilon, query_heads, key_heads, HALF,
                   BLOCK_H)  # fmt: skip


def rope_append_to_pages(
    qkv, cosine, sine, key_pages, value_pages, positions, slots, validate=True, *,
    query_gain=None, key_gain=None, epsilon=1e-6, dependent=False,
) -> torch.Tensor:  # fmt: skip
    """The turned query [tokens, query_heads, head_dim]; turned keys, and values, are written into the pages.

    Args:
        qkv: [tokens, (query_heads + 2 · key_heads) · head_dim], float32, float16 or bfloat16: the query heads, then the
            key heads, then the value heads. Rows may lie apart.
        cosine, sine: float32 [places, head_dim / 2], contiguous: of the angles of the positions from 0 on.
        key_pages, value_pages: [pages, key_heads, page_size, head_dim], of qkv's dtype; any strides, the last one 1.
            head_dim is even. query_heads follows from the widths, and need be no multiple of key_heads.
        positions: int32 or int64 [tokens], where each token stands in its sequence: its angle.
        slots: int32 or int64 [tokens], where it goes: page · page_size + place; -1 for one that is stored nowhere.
        validate: read `positions` and `slots` from the device and check them, which waits for it. With False nothing
            waits; a slot outside the pool then overwrites other memory.
        query_gain, key_gain: [head_dim], of qkv's dtype or float32: the weights of a norm of each query and key head
            before it is turned; None, both of them, for no norm.
        epsilon: of these norms, at least 0.
        dependent: start while the kernel before still runs; from sm_90 on.

    Raises:
        ValueError: an argument is not as above; the message names it. Nothing is written then.
    """
    query_heads = check_packed(qkv, "[tokens, width]", {"key_pages": key_pages, "value_pages": value_pages},
                               "[pages, key_heads, page_size, head_dim]")  # fmt: skip
    tokens = qkv.shape[0]
    pages, key_heads, page_size, head_dim = key_pages.shape
    check_angles(cosine, sine, head_dim, 1)
    check_alike("sine", sine, "cosine", cosine)
    check_gains(query_gain, key_gain, qkv, head_dim, epsilon)
    check_indices("positions", positions, "[tokens]", (tokens,), qkv.device)
    check_indices("slots", slots, "[tokens]", (tokens,), qkv.device)
    if validate:
        check_places(positions, cosine.shape[0])
        check_slots(slots, pages * page_size, "slots")
    query = torch.empty(tokens, query_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    rows = tokens * (query_heads + 2 * key_heads)
    rope_append_to_pages_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        qkv, cosine, sine, key_pages, value_pages, positions, slots, query, query_gain, key_gain, float(epsilon),
        qkv.stride(0), *key_pages.stride()[:3], *value_pages.stride()[:3], query_heads, key_heads, rows,
        PAGE_SIZE=page_size, **blocks_of(head_dim), num_warps=4, **launch_options(dependent, qkv.device),
    )  # fmt: skip
    return query


def check_gains(query_gain, key_gain, qkv, head_dim: int, epsilon) -> None:
    if (query_gain is None) != (key_gain is None):
        given, missing = ("key", "query") if query_gain is None else ("query", "key")
        raise ValueError(f"{given}_gain is given and {missing}_gain is None; give both, or neither for no norm.")
    if query_gain is not None:
        for name, gain in (("query_gain", query_gain), ("key_gain", key_gain)):
            check_weight(gain, qkv, name, head_dim, "number of a head")
        check_epsilon(epsilon)


def check_places(positions, places: int) -> None:
    """Reads the device: raise a ValueError unless there are angles for each position."""
    for token, position in enumerate(positions.tolist()):
        if not 0 <= position < places:
            raise ValueError(
                f"positions[{token}] is {position}; cosine and sine have the angles of the positions 0 to {places - 1}."
            )


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: heads of 128 numbers and pages of 16 tokens, with a norm and without one."""
    angles = {"cosine_pointer": "*fp32", "sine_pointer": "*fp32"}
    places = {"positions_pointer": "*i64", "slots_pointer": "*i64"}
    cases = []
    for kind, normed in (("fp16", False), ("fp16", True), ("fp32", True)):
        gains = {} if normed else dict.fromkeys(("query_gain_pointer", "key_gain_pointer"))
        signature = signature_of(rope_append_to_pages_kernel, kind, **angles, **places, **gains)
        constants = {"PAGE_SIZE": 16, **blocks_of(128), **gains}
        label = f"{kind} normed" if normed else kind
        cases.append(CompileCase(rope_append_to_pages_kernel, signature, constants, label=label))
    return cases
