"""Append new keys and values to a cache in fewer bits: quantised and written in one launch.

    e4m3    codes[b, h, positions[b] + t] = e4m3(new[b, h, t] / scale)       or by slot into pages
    INT4    values: quantised as they come, each token by itself, 64 channels with one scale
            keys: into the window; with the 64th, the window's keys become codes, 64 tokens of a channel with one scale

No FLOPs to speak of. Bytes: new keys and values read once, and written once as codes: 4 KB read and 2 KB written for a
token with 8 KV heads of 128. Where a group of INT4 keys fills, the window's 16 KB are read for each head, once in 64
tokens. A decode step of one sequence moves that little: the launch is its time, so there is one.

A NaN or an infinity is refused where `validate` looks for it. Otherwise a NaN becomes 0, and what a code cannot stand
for the nearest that it can: 448 times the scale in e4m3, 65504 in INT4.
Source: Liu et al., KIVI, arXiv 2402.02750 (window and axes); Kwon et al., PagedAttention, arXiv 2309.06180 (slots).
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.cache_checks import check_indices, check_tables
from course_lib.kernels.common.checks import FLOAT_DTYPES, check_rows, check_same, check_tensor
from course_lib.kernels.decode.append import ROWS_PER_PROGRAM, check_positions, check_slots
from course_lib.kernels.quantised import formats
from course_lib.kernels.quantised.checks import check_head_dim, check_int4_cache, check_scale_values, check_scales
from course_lib.kernels.quantised.formats import check_finite
from course_lib.kernels.quantised.fp8 import E4M3_MAX
from course_lib.kernels.quantised.parts import block_number, bounded, e4m3_bytes, int4_codes, int4_scales, load_halves

GROUP = tl.constexpr(formats.GROUP)
BYTES = tl.constexpr(formats.GROUP // 2)  # of the codes of a group of channels
INT4_MAX = tl.constexpr(formats.INT4_MAX)
INT4_WARPS = 8  # four would need all registers for a tile of 64 tokens
CACHE_SIZES = ("key_heads", "new_tokens", "rows")


# ------------------------------------------------------------------------------------------------------------- e4m3


@triton.jit
def quantise_rows_e4m3(source_rows, target_rows, scale_pointers, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Quantise rows [ROWS] of HEAD_DIM numbers from their pointers to those of their codes, where `inside`."""
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (columns < HEAD_DIM)[None, :]  # [ROWS, BLOCK_D]
    tile = tl.load(source_rows[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    scales = tl.load(scale_pointers, mask=inside, other=1.0)[:, None] + 0.0 * tile  # [ROWS, BLOCK_D]
    codes = e4m3_bytes(bounded(tl.div_rn(tile, scales), E4M3_MAX))
    tl.store(target_rows[:, None] + columns[None, :], codes, mask=mask)


@triton.jit(do_not_specialize=CACHE_SIZES)
def append_to_fp8_cache_kernel(
    key, value, key_cache, value_cache, key_scales, value_scales, positions,
    key_batch_stride, key_head_stride, key_stride, value_batch_stride, value_head_stride, value_stride,
    key_cache_batch_stride, key_cache_head_stride, key_cache_stride,
    value_cache_batch_stride, value_cache_head_stride, value_cache_stride, key_scale_batch_stride,
    key_scale_head_stride, value_scale_batch_stride, value_scale_head_stride, key_heads, new_tokens, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS of the batch · key_heads · new_tokens rows, of the keys and of the values."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    token = row % new_tokens
    head = row // new_tokens % key_heads
    batch = row // (new_tokens * key_heads)
    inside = row < rows
    place = tl.load(positions + batch, mask=inside, other=0).to(tl.int64) + token  # [ROWS]
    quantise_rows_e4m3(
        key + batch * key_batch_stride + head * key_head_stride + token * key_stride,
        key_cache + batch * key_cache_batch_stride + head * key_cache_head_stride + place * key_cache_stride,
        key_scales + batch * key_scale_batch_stride + head * key_scale_head_stride, inside, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    quantise_rows_e4m3(
        value + batch * value_batch_stride + head * value_head_stride + token * value_stride,
        value_cache + batch * value_cache_batch_stride + head * value_cache_head_stride + place * value_cache_stride,
        value_scales + batch * value_scale_batch_stride + head * value_scale_head_stride, inside, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=("key_heads", "rows"))
def append_to_fp8_pages_kernel(
    key, value, key_pages, value_pages, key_scales, value_scales, slot_mapping,
    key_stride, key_head_stride, value_stride, value_head_stride,
    key_page_stride, key_page_head_stride, key_slot_stride,
    value_page_stride, value_page_head_stride, value_slot_stride, key_scale_page_stride, key_scale_head_stride,
    value_scale_page_stride, value_scale_head_stride, key_heads, rows,
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
    quantise_rows_e4m3(
        key + token * key_stride + head * key_head_stride,
        key_pages + page * key_page_stride + head * key_page_head_stride + offset * key_slot_stride,
        key_scales + page * key_scale_page_stride + head * key_scale_head_stride, inside, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    quantise_rows_e4m3(
        value + token * value_stride + head * value_head_stride,
        value_pages + page * value_page_stride + head * value_page_head_stride + offset * value_slot_stride,
        value_scales + page * value_scale_page_stride + head * value_scale_head_stride, inside, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


def append_to_fp8_cache(
    key, value, key_cache, value_cache, positions, *, key_scales, value_scales, validate=True
) -> None:
    """Write new tokens into a contiguous e4m3 cache, in place, each sequence at its own position.

    Args:
        key, value: [batch, key_heads, new_tokens, head_dim], float32, float16 or bfloat16, any strides with a
            contiguous last dimension.
        key_cache, value_cache: float8_e4m3fn [batch, key_heads, capacity, head_dim], on key's device.
        positions: int32 or int64 [batch], where the first new token of each sequence goes: its length before.
        key_scales, value_scales: float32, what a code will be multiplied by: [], [key_heads] or [batch, key_heads].
        validate: read positions, scales, keys and values from the device and check them, which waits for it. With
            False nothing waits and nothing is allocated; a position outside the cache then overwrites other memory.

    What lies beyond 448 times its scale becomes that. Raises a ValueError that names the argument when shapes, dtypes,
    devices, strides, positions, scales or numbers don't fit; nothing is written then.
    """
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    check_new_tokens(key, value, "[batch, key_heads, new_tokens, head_dim]")
    check_codes_for(key, caches, "[batch, key_heads, capacity, head_dim]")
    batch, key_heads, new_tokens, head_dim = key.shape
    check_same("key_cache", key_cache, "key", key, dtype=(0, 0), batch_size=(key_cache.shape[0], batch))
    check_indices("positions", positions, "[batch]", (batch,), key.device)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    check_scales(scales, key_cache, "[batch, key_heads]")
    if validate:
        check_positions(positions, new_tokens, key_cache.shape[2])
        check_scale_values(scales, None, positive=True)
        check_numbers(key, value)
    rows = batch * key_heads * new_tokens
    codes = [cache.view(torch.uint8) for cache in (key_cache, value_cache)]
    strides = [stride for tensor in (key, value, *codes) for stride in tensor.stride()[:3]]
    append_to_fp8_cache_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        key, value, *codes, key_scales, value_scales, positions, *strides, *two_strides(key_scales),
        *two_strides(value_scales), key_heads, new_tokens, rows, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), ROWS=ROWS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip


def append_to_fp8_pages(
    key, value, key_pages, value_pages, slot_mapping, *, key_scales, value_scales, validate=True
) -> None:
    """Write new tokens into e4m3 pages, in place, each at its own slot.

    Args:
        key, value: [tokens, key_heads, head_dim], float32, float16 or bfloat16, any strides with a contiguous last
            dimension.
        key_pages, value_pages: float8_e4m3fn [pages, key_heads, page_size, head_dim], on key's device.
        slot_mapping: int32 or int64 [tokens], page · page_size + offset of each token; -1 for one that is not written.
        key_scales, value_scales: float32: [], [key_heads] or [pages, key_heads]. A page's scales must stand before its
            first token is written: they are those of all of its tokens.
        validate: as for `append_to_fp8_cache`, for slots instead of positions.

    Raises as `append_to_fp8_cache` does.
    """
    pools = {"key_pages": key_pages, "value_pages": value_pages}
    check_new_tokens(key, value, "[tokens, key_heads, head_dim]")
    check_codes_for(key, pools, "[pages, key_heads, page_size, head_dim]")
    tokens, key_heads, head_dim = key.shape
    pages, _, page_size = key_pages.shape[:3]
    check_indices("slot_mapping", slot_mapping, "[tokens]", (tokens,), key.device)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    check_scales(scales, key_pages, "[pages, key_heads]")
    if validate:
        check_slots(slot_mapping, pages * page_size)
        check_scale_values(scales, slot_mapping[slot_mapping >= 0].long() // page_size, positive=True)
        check_numbers(key, value)
    rows = tokens * key_heads
    codes = [pool.view(torch.uint8) for pool in (key_pages, value_pages)]
    append_to_fp8_pages_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        key, value, *codes, key_scales, value_scales, slot_mapping, *key.stride()[:2], *value.stride()[:2],
        *codes[0].stride()[:3], *codes[1].stride()[:3], *two_strides(key_scales), *two_strides(value_scales), key_heads,
        rows, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), PAGE_SIZE=page_size, ROWS=ROWS_PER_PROGRAM,
        num_warps=4,
    )  # fmt: skip


def two_strides(scales) -> tuple[int, int]:
    """From page (or sequence) to page and from head to head, 0 where they share a scale."""
    return (0, 0, *scales.stride())[-2:]


# ------------------------------------------------------------------------------------------------------------- INT4


@triton.jit
def store_codes(codes, scales, middles, halves, rows_inside, BY_TOKEN: tl.constexpr):
    """Quantise and store 64 channels of 64 tokens, given as even and odd halves [64, 32], float32.

    codes: pointers [64, 32]. scales, middles: pointers of one scale for each token [64] of a value, or, not BY_TOKEN,
    of the even channels [32] of keys, the odd ones' beside them.
    """
    even, odd = halves
    if BY_TOKEN:
        lowest = tl.minimum(tl.min(even, axis=1), tl.min(odd, axis=1))
        highest = tl.maximum(tl.max(even, axis=1), tl.max(odd, axis=1))
        scale, middle = int4_scales(lowest, highest)
        tl.store(scales, scale, mask=rows_inside)
        tl.store(middles, middle, mask=rows_inside)
        low = int4_codes(even, scale[:, None], middle[:, None])
        high = int4_codes(odd, scale[:, None], middle[:, None])
    else:
        scale, middle = int4_scales(tl.min(even, axis=0), tl.max(even, axis=0))
        tl.store(scales, scale)
        tl.store(middles, middle)
        low = int4_codes(even, scale[None, :], middle[None, :])
        scale, middle = int4_scales(tl.min(odd, axis=0), tl.max(odd, axis=0))
        tl.store(scales + 1, scale)
        tl.store(middles + 1, middle)
        high = int4_codes(odd, scale[None, :], middle[None, :])
    tl.store(codes, low | (high << 4), mask=rows_inside[:, None])


@triton.jit
def bounded_halves(halves):
    return bounded(halves[0].to(tl.float32), INT4_MAX), bounded(halves[1].to(tl.float32), INT4_MAX)


@triton.jit(do_not_specialize=("key_heads", "blocks", "new_tokens"))
def append_to_int4_kernel(
    key, value, key_codes, key_scales, key_middles, value_codes, value_scales, value_middles, key_window, value_window,
    tables, positions, key_batch_stride, key_head_stride, key_stride, value_batch_stride, value_head_stride,
    value_stride, table_stride, key_heads, blocks, new_tokens, HEAD_DIM: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """One program: one of the groups of 64 tokens of one head that new tokens lie in.

    The first also does the last, where that stays unfinished: it reads what waits in the window before it writes what
    will wait there.
    """
    GROUPS: tl.constexpr = HEAD_DIM // GROUP
    part, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = tl.load(positions + batch).to(tl.int32)
    end = begin + new_tokens
    first, tail = begin // GROUP, end // GROUP
    is_whole = (first + part + 1) * GROUP <= end
    has_tail = (tail > first) & (end % GROUP > 0)
    count = tl.where(part == 0, 1 + has_tail.to(tl.int32), is_whole.to(tl.int32))
    row = tl.arange(0, GROUP)
    columns = 2 * tl.arange(0, BYTES)[None, :]
    window = ((batch * key_heads + head) * GROUP + row)[:, None] * HEAD_DIM + columns  # [64, 32]
    keys = key + batch * key_batch_stride + head.to(tl.int64) * key_head_stride
    values = value + batch * value_batch_stride + head.to(tl.int64) * value_head_stride
    for step in tl.range(0, count):
        group = tl.where(step == 0, first + part, tail)
        token = (group * GROUP + row - begin).to(tl.int64)  # [64], counted from the first new one
        is_new = (token >= 0) & (token < new_tokens)
        finished = (group + 1) * GROUP <= end
        block = block_number(tables, table_stride, batch, group, group + 1, head, key_heads, blocks, PAGED)
        code_rows = block * (GROUP * GROUPS * BYTES) + row[:, None] * (GROUPS * BYTES) + tl.arange(0, BYTES)[None, :]
        for channels in tl.static_range(GROUPS):
            shift = channels * GROUP
            new_values = load_halves(values + token[:, None] * value_stride + shift + columns, is_new[:, None])
            by_token = block * (GROUP * GROUPS) + row * GROUPS + channels
            store_codes(value_codes + code_rows + channels * BYTES, value_scales + by_token, value_middles + by_token,
                        bounded_halves(new_values), is_new, BY_TOKEN=True)  # fmt: skip
            new_keys = load_halves(keys + token[:, None] * key_stride + shift + columns, is_new[:, None])
            if finished:
                waiting = load_halves(key_window + window + shift, (token < 0)[:, None])
                even = tl.where(is_new[:, None], new_keys[0], waiting[0].to(new_keys[0].dtype))
                odd = tl.where(is_new[:, None], new_keys[1], waiting[1].to(new_keys[1].dtype))
                by_channel = block * HEAD_DIM + shift + 2 * tl.arange(0, BYTES)
                store_codes(key_codes + code_rows + channels * BYTES, key_scales + by_channel,
                            key_middles + by_channel, bounded_halves((even, odd)), row >= 0,
                            BY_TOKEN=False)  # fmt: skip
            else:
                store_halves(key_window + window + shift, new_keys, is_new[:, None])
                store_halves(value_window + window + shift, new_values, is_new[:, None])
        tl.debug_barrier()  # all threads have read the window before one of them writes to it


@triton.jit
def store_halves(pointers, halves, mask):
    tl.store(pointers, halves[0], mask=mask)
    tl.store(pointers + 1, halves[1], mask=mask)


def append_to_int4_cache(key, value, cache, positions, *, validate=True) -> None:
    """Write new tokens into a contiguous INT4 cache and its windows, in place, each sequence at its own position.

    Args:
        key, value: [batch, key_heads, new_tokens, head_dim], of the windows' dtype, any strides with a contiguous last
            dimension; head_dim 64, 128 or 256.
        cache: an `Int4Cache` with blocks [batch, key_heads, capacity / 64], on key's device.
        positions: int32 or int64 [batch], where the first new token of each sequence goes: its length before.
        validate: read positions, keys and values from the device and check them, which waits for it. With False nothing
            waits and nothing is allocated; a position outside the cache then overwrites other memory.

    Raises a ValueError that names the argument when shapes, dtypes, devices, strides, positions or numbers don't fit;
    nothing is written then. Source: Liu et al., KIVI, arXiv 2402.02750.
    """
    check_new_int4_tokens(key, value, cache, paged=False)
    check_indices("positions", positions, "[batch]", (key.shape[0],), key.device)
    if validate:
        check_positions(positions, key.shape[2], cache.key_codes.shape[2] * formats.GROUP)
        check_numbers(key, value, formats.INT4_MAX)
    launch_int4(key, value, cache, None, positions)


def append_to_int4_pages(key, value, cache, block_tables, positions, *, validate=True) -> None:
    """`append_to_int4_cache` for a cache that lies in pages of 64 tokens anywhere in a pool.

    Args:
        cache: an `Int4Cache` with blocks [pages, key_heads], and the windows of the batch's sequences.
        block_tables: int32 or int64 [batch, max_blocks]: the page of tokens 64 · i to 64 · i + 63 of a sequence at
            [sequence, i], the pages of the new tokens among them. A page may not be another sequence's too.
        the others: as for `append_to_int4_cache`; `validate` also checks the tables.
    """
    check_new_int4_tokens(key, value, cache, paged=True)
    check_indices("positions", positions, "[batch]", (key.shape[0],), key.device)
    check_indices("block_tables", block_tables, "[batch, max_blocks]", (key.shape[0], None), key.device)
    if validate:
        check_positions(positions, key.shape[2], block_tables.shape[1] * formats.GROUP)
        check_tables(block_tables, positions + key.shape[2], cache.key_codes.shape[0], formats.GROUP)
        check_numbers(key, value, formats.INT4_MAX)
    launch_int4(key, value, cache, block_tables, positions)


def launch_int4(key, value, cache, tables, positions) -> None:
    batch, key_heads, new_tokens, head_dim = key.shape
    most_groups = triton.cdiv(new_tokens + formats.GROUP - 1, formats.GROUP)
    blocks = 0 if tables is not None else cache.key_codes.shape[2]
    append_to_int4_kernel[(most_groups, key_heads, batch)](
        key, value, *cache, tables, positions, *key.stride()[:3], *value.stride()[:3],
        0 if tables is None else tables.stride(0), key_heads, blocks, new_tokens, HEAD_DIM=head_dim,
        PAGED=tables is not None, num_warps=INT4_WARPS,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ checks


def check_new_tokens(key, value, dimensions: str) -> None:
    """Raise a ValueError unless they are new keys and values of those dimensions."""
    check_rows("key", key, dimensions)
    check_tensor("key", key, FLOAT_DTYPES)
    check_rows("value", value, dimensions)
    check_same("value", value, "key", key, shape=(tuple(value.shape), tuple(key.shape)))


def check_codes_for(key, caches: dict, dimensions: str) -> None:
    """Raise a ValueError unless they are e4m3 codes {name: tensor} for keys [..., key_heads, (tokens,) head_dim]."""
    (key_name, keys), (value_name, values) = caches.items()
    for name, codes in caches.items():
        check_rows(name, codes, dimensions)
        check_tensor(name, codes, (torch.float8_e4m3fn,))
        check_same(name, codes, "key", key, dtype=(0, 0), number_of_heads=(codes.shape[1], key.shape[1]),
                   head_dimension=(codes.shape[-1], key.shape[-1]))  # fmt: skip
    check_same(value_name, values, key_name, keys, shape=(tuple(values.shape), tuple(keys.shape)))


def check_new_int4_tokens(key, value, cache, paged: bool) -> None:
    """Raise a ValueError unless they are new keys and values for that INT4 cache."""
    check_new_tokens(key, value, "[batch, key_heads, new_tokens, head_dim]")
    check_head_dim(key, "key")
    check_int4_cache(cache, key.shape[0], key.shape[3], key.device, paged)
    check_same("key", key, "cache.key_window", cache.key_window,
               number_of_heads=(key.shape[1], cache.key_window.shape[1]))  # fmt: skip


def check_numbers(key, value, largest=None) -> None:
    """Reads the device: raise a ValueError unless new keys and values are finite, and at most `largest`."""
    for name, tensor in (("key", key), ("value", value)):
        check_finite(name, tensor)
        if largest is not None and (tensor.abs() > largest).any():
            raise ValueError(f"{name} holds {tensor.abs().max().item()}; INT4 is made of numbers up to {largest:.0f}.")


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: rows of 128 numbers of 16 bits."""
    pointers = dict.fromkeys(("key", "value"), "*fp16") | {"positions": "*i32", "slot_mapping": "*i64"}
    pointers |= dict.fromkeys(("key_scales", "value_scales"), "*fp32")
    cache = {f"{tensor}{part}_stride": "i32" for tensor in ("key", "value", "key_cache", "value_cache", "key_scale",
             "value_scale") for part in ("_batch", "_head", "")} | dict.fromkeys(CACHE_SIZES, "i32")  # fmt: skip
    pages = {f"{tensor}{part}_stride": "i32" for tensor in ("key", "value")
             for part in ("", "_head", "_page", "_page_head", "_slot", "_scale_page", "_scale_head")}  # fmt: skip
    pages |= {"key_heads": "i32", "rows": "i32"}
    blocks = {"HEAD_DIM": 128, "BLOCK_D": 128, "ROWS": ROWS_PER_PROGRAM}
    int4 = {
        f"{side}_{part}": kind
        for side in ("key", "value")
        for part, kind in (("codes", "*u8"), ("scales", "*fp16"), ("middles", "*fp16"), ("window", "*fp16"))
    }
    int4 |= {"key": "*fp16", "value": "*fp16", "tables": "*i32", "positions": "*i32", "table_stride": "i32"}
    int4 |= {f"{side}{part}_stride": "i32" for side in ("key", "value") for part in ("_batch", "_head", "")}
    int4 |= dict.fromkeys(("key_heads", "blocks", "new_tokens"), "i32")

    def taken(kernel, types):
        return {name: kind for name, kind in types.items() if name in kernel.arg_names}

    return [
        CompileCase(append_to_fp8_cache_kernel, taken(append_to_fp8_cache_kernel, pointers | cache
                    | {"key_cache": "*u8", "value_cache": "*u8"}), blocks),
        CompileCase(append_to_fp8_pages_kernel, taken(append_to_fp8_pages_kernel, pointers | pages
                    | {"key_pages": "*u8", "value_pages": "*u8"}), blocks | {"PAGE_SIZE": 16}),
        *(CompileCase(append_to_int4_kernel, int4, {"HEAD_DIM": head_dim, "PAGED": True}, num_warps=INT4_WARPS,
                      label=f"{head_dim}")
          for head_dim in (64, 128, 256)),
    ]  # fmt: skip
