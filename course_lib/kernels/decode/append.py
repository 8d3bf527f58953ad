"""Append new keys and values to a cache: in place at a position, or into pages by slot.

    contiguous    cache[b, h, positions[b] + t] = new[b, h, t]
    paged         pages[slot // page_size, h, slot % page_size] = new[t, h],    slot = slot_mapping[t]

No FLOPs. Bytes: each new key and value read once and written once, 4 · key_heads · head_dim · itemsize a token: 8 KB
for 8 heads of 128 numbers of 16 bits. A decode step of one sequence moves that little: the launch is its time.
Source of the slots: Kwon et al., PagedAttention, arXiv 2309.06180.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.kept import kept
from course_lib.kernels.common.cache_checks import check_indices
from course_lib.kernels.common.checks import check_rows, check_same, check_tensor, integer_view

ROWS_PER_PROGRAM = 16  # of key or value: 4 KB of head dimension 128 in 16 bits
SIZES = ("key_heads", "new_tokens", "rows")


def append_to_cache_reference(key, value, key_cache, value_cache, positions):
    """The plain PyTorch meaning of `append_to_cache`."""
    for sequence, position in enumerate(positions.tolist()):
        key_cache[sequence, :, position : position + key.shape[2]] = key[sequence]
        value_cache[sequence, :, position : position + key.shape[2]] = value[sequence]


def append_to_pages_reference(key, value, key_pages, value_pages, slot_mapping):
    """The plain PyTorch meaning of `append_to_pages`."""
    page_size = key_pages.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_pages[slot // page_size, :, slot % page_size] = key[token]
            value_pages[slot // page_size, :, slot % page_size] = value[token]


@triton.jit
def copy_rows(source_rows, target_rows, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copy rows [ROWS] of HEAD_DIM elements from their pointers to other pointers, where `inside`."""
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (columns < HEAD_DIM)[None, :]  # [ROWS, BLOCK_D]
    tile = tl.load(source_rows[:, None] + columns[None, :], mask=mask)
    tl.store(target_rows[:, None] + columns[None, :], tile, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def append_to_cache_kernel(
    key, value, key_cache, value_cache, positions,
    key_batch_stride, key_head_stride, key_stride, value_batch_stride, value_head_stride, value_stride,
    key_cache_batch_stride, key_cache_head_stride, key_cache_stride,
    value_cache_batch_stride, value_cache_head_stride, value_cache_stride, key_heads, new_tokens, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS of the batch · key_heads · new_tokens rows, of the keys and of the values."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    token = row % new_tokens
    head = row // new_tokens % key_heads
    batch = row // (new_tokens * key_heads)
    inside = row < rows
    place = tl.load(positions + batch, mask=inside, other=0).to(tl.int64) + token  # [ROWS]
    copy_rows(key + batch * key_batch_stride + head * key_head_stride + token * key_stride,
              key_cache + batch * key_cache_batch_stride + head * key_cache_head_stride + place * key_cache_stride,
              inside, HEAD_DIM, BLOCK_D)  # fmt: skip
    copy_rows(value + batch * value_batch_stride + head * value_head_stride + token * value_stride,
              value_cache + batch * value_cache_batch_stride + head * value_cache_head_stride
              + place * value_cache_stride, inside, HEAD_DIM, BLOCK_D)  # fmt: skip


@triton.jit(do_not_specialize=("key_heads", "rows"))
def append_to_pages_kernel(
    key, value, key_pages, value_pages, slot_mapping, key_stride, key_head_stride, value_stride, value_head_stride,
    key_page_stride, key_page_head_stride, key_slot_stride,
    value_page_stride, value_page_head_stride, value_slot_stride, key_heads, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS of the tokens · key_heads rows, of the keys and of the values."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    token = row // key_heads
    head = row % key_heads
    slot = tl.load(slot_mapping + token, mask=row < rows, other=-1).to(tl.int64)  # [ROWS]
    inside = slot >= 0
    page = slot // PAGE_SIZE
    offset = slot % PAGE_SIZE
    copy_rows(key + token * key_stride + head * key_head_stride,
              key_pages + page * key_page_stride + head * key_page_head_stride + offset * key_slot_stride,
              inside, HEAD_DIM, BLOCK_D)  # fmt: skip
    copy_rows(value + token * value_stride + head * value_head_stride,
              value_pages + page * value_page_stride + head * value_page_head_stride + offset * value_slot_stride,
              inside, HEAD_DIM, BLOCK_D)  # fmt: skip


@kept
def append_to_cache(key, value, key_cache, value_cache, positions, *, validate=True) -> None:
    """Write new tokens into a contiguous cache, in place, each sequence at its own position.

    Args:
        key, value: [batch, key_heads, new_tokens, head_dim], any dtype, any strides with a contiguous last dimension.
        key_cache, value_cache: [batch, key_heads, capacity, head_dim], of the same dtype and device.
        positions: int32 or int64 [batch], where the first new token of each sequence goes: its length before.
        validate: read `positions` from the device and check them, which waits for it. With False nothing waits and
            nothing is allocated; a position outside the cache then overwrites other memory.

    Raises a ValueError that names the argument when shapes, dtypes, devices, strides or positions don't fit; nothing is
    written then.
    """
    check_new_rows(key, value, key_cache, value_cache, ("key_cache", "value_cache"),
                   "[batch, key_heads, new_tokens, head_dim]", "[batch, key_heads, capacity, head_dim]")  # fmt: skip
    batch, key_heads, new_tokens, head_dim = key.shape
    capacity = key_cache.shape[2]
    check_same("key_cache", key_cache, "key", key, batch_size=(key_cache.shape[0], batch),
               number_of_heads=(key_cache.shape[1], key_heads))  # fmt: skip
    check_indices("positions", positions, "[batch]", (batch,), key.device)
    if validate:
        check_positions(positions, new_tokens, capacity)
    rows = batch * key_heads * new_tokens
    views = [integer_view(tensor, "key") for tensor in (key, value, key_cache, value_cache)]
    strides = [stride for tensor in (key, value, key_cache, value_cache) for stride in tensor.stride()[:3]]
    append_to_cache_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        *views, positions, *strides, key_heads, new_tokens, rows,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), ROWS=ROWS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip


@kept
def append_to_pages(key, value, key_pages, value_pages, slot_mapping, *, validate=True) -> None:
    """Write new tokens into pages, in place, each at its own slot.

    Args:
        key, value: [tokens, key_heads, head_dim], any dtype, any strides with a contiguous last dimension.
        key_pages, value_pages: [pages, key_heads, page_size, head_dim], of the same dtype and device.
        slot_mapping: int32 or int64 [tokens], page · page_size + offset of each token; -1 for one that is not written.
        validate: read `slot_mapping` from the device and check it, which waits for it. With False nothing waits and
            nothing is allocated; a slot outside the pool then overwrites other memory.

    Raises a ValueError that names the argument when shapes, dtypes, devices, strides or slots don't fit; nothing is
    written then.
    """
    check_new_rows(key, value, key_pages, value_pages, ("key_pages", "value_pages"),
                   "[tokens, key_heads, head_dim]", "[pages, key_heads, page_size, head_dim]")  # fmt: skip
    tokens, key_heads, head_dim = key.shape
    pages, _, page_size = key_pages.shape[:3]
    check_same("key_pages", key_pages, "key", key, number_of_heads=(key_pages.shape[1], key_heads))
    check_indices("slot_mapping", slot_mapping, "[tokens]", (tokens,), key.device)
    if validate:
        check_slots(slot_mapping, pages * page_size)
    rows = tokens * key_heads
    views = [integer_view(tensor, "key") for tensor in (key, value, key_pages, value_pages)]
    append_to_pages_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        *views, slot_mapping, *key.stride()[:2], *value.stride()[:2], *key_pages.stride()[:3],
        *value_pages.stride()[:3], key_heads, rows, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        PAGE_SIZE=page_size, ROWS=ROWS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip


def check_positions(positions, new_tokens: int, capacity: int) -> None:
    """Reads the device: raise a ValueError unless that many new tokens fit at each position."""
    for sequence, position in enumerate(positions.tolist()):
        if not 0 <= position <= capacity - new_tokens:
            raise ValueError(
                f"positions[{sequence}] is {position}; {new_tokens} new tokens fit at positions from 0 to "
                f"{capacity - new_tokens} in a cache of {capacity}."
            )


def check_slots(slot_mapping, slots: int, name: str = "slot_mapping") -> None:
    """Reads the device: raise a ValueError unless each is -1 or one of the pool's slots."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if not -1 <= slot < slots:
            raise ValueError(
                f"{name}[{token}] is {slot}; the pool has the slots 0 to {slots - 1}, and -1 skips a token."
            )


def check_new_rows(key, value, keys, values, names, new_dimensions: str, dimensions: str) -> None:
    """What both layouts ask of the new rows and of what they are written into."""
    check_rows("key", key, new_dimensions)
    check_tensor("key", key)
    check_rows("value", value, new_dimensions)
    check_same("value", value, "key", key, shape=(tuple(value.shape), tuple(key.shape)))
    for name, tensor in zip(names, (keys, values)):
        check_rows(name, tensor, dimensions)
        check_same(name, tensor, "key", key, head_dimension=(tensor.shape[-1], key.shape[-1]))
    check_same(names[1], values, names[0], keys, shape=(tuple(values.shape), tuple(keys.shape)))


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: rows of 128 numbers of 16 bits."""
    blocks = {"HEAD_DIM": 128, "BLOCK_D": 128, "ROWS": ROWS_PER_PROGRAM}
    cache = {f"{tensor}{part}_stride": "i32" for tensor in ("key", "value", "key_cache", "value_cache")
             for part in ("_batch", "_head", "")} | dict.fromkeys(SIZES, "i32")  # fmt: skip
    pages = {f"{tensor}{part}_stride": "i32" for tensor in ("key", "value")
             for part in ("", "_head", "_page", "_page_head", "_slot")}  # fmt: skip
    pointers = dict.fromkeys(("key", "value"), "*i16")
    return [
        CompileCase(append_to_cache_kernel, pointers | {"key_cache": "*i16", "value_cache": "*i16",
                    "positions": "*i32"} | cache, blocks),
        CompileCase(append_to_pages_kernel, pointers | {"key_pages": "*i16", "value_pages": "*i16",
                    "slot_mapping": "*i64", "key_heads": "i32", "rows": "i32"} | pages, blocks | {"PAGE_SIZE": 16}),
    ]  # fmt: skip
