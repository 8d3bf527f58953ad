"""Decode attention over an e4m3 cache: one query token per sequence, the codes made numbers in registers.

    output[b, h] = v · softmax(scale · k · query[b, h] · Kᵀ) V        K, V: the codes of the first lengths[b] keys

k and v are the scales of keys and values: by tensor or by head they are two factors of a program, one of the scores'
own scale, one of the finished row. Multiplied into every tile instead they would cost a multiplication a number. Scales
by page differ from tile to tile: k multiplies the scores of its keys, v their weights.

FLOPs: 4 · query_heads · head_dim per key. Bytes: 2 · key_heads · head_dim per key, each read once, half of those of a
16-bit cache, and nothing else of that size is read or written: what the codes stand for is never in memory. 131,072
tokens with 8 KV heads of 128 are 268 MB.

Each warp has keys of its own (`quantised.warps`). Values are loaded as words of two codes, of the channels 2i and
2i + 1, each of which has an accumulator of its own. A product wants two tokens of one channel side by side. An
instruction lays words of 16 bits so on their way from shared memory; single bytes would be a load each.

Products are those of float16, in which every code is exact: a query row's largest number is brought between 1 and 2
(`normalised_queries`). bfloat16 would take a conversion by float32 for every code.
Source: Dao et al., Flash-Decoding for long-context inference, 2023; Micikevicius et al., FP8 Formats for Deep Learning,
arXiv 2209.05433.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.kept import kept
from course_lib.kernels.common.cache_checks import (
    check_indices,
    check_lengths,
    check_output,
    check_splits,
    check_tables,
)
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.pages import page_rows
from course_lib.kernels.common.softmax import scale_in_log2, weigh
from course_lib.kernels.common.splits import split_keys
from course_lib.kernels.decode.combine import finish_split
from course_lib.kernels.decode.parts import DECODE_SIZES, load_queries, packed_heads
from course_lib.kernels.decode.tiles import group_rows
from course_lib.kernels.decode.workspace import prepare_step
from course_lib.kernels.quantised.checks import check_fp8_caches, check_scale_values, check_scales
from course_lib.kernels.quantised.parts import e4m3_halves, e4m3_numbers, normalised_queries
from course_lib.kernels.quantised.tiles import NATIVE_E4M3, fp8_cuts, fp8_plan, native_e4m3, quantised_compile_cases
from course_lib.kernels.quantised.warps import FP8_NUMBERS, add_warps, add_weights, for_every_warp, merge_sums

# The largest weight of a tile, as a power of 2: float16 ends at 2^16, and keeps all digits down to 2^-14. So only
# weights below 2^-28 of the largest lose any.
LARGEST_WEIGHT = tl.constexpr(14.0)


@triton.jit
def load_page_scales(scales, pages, inside, stride):
    """The scale of each position, given its page; 0 where not `inside`."""
    return tl.load(scales + pages.to(tl.int64) * stride, mask=inside, other=0.0)


@triton.jit(do_not_specialize=DECODE_SIZES)
def fp8_decode_kernel(
    query_pointer, key_pointer, value_pointer, key_scales, value_scales, tables_pointer, lengths_pointer,
    output_pointer, lse_pointer, partial_outputs, partial_lses, arrivals,
    query_batch_stride, query_head_stride, key_block_stride, key_head_stride, key_stride,
    value_block_stride, value_head_stride, value_stride, key_scale_block_stride, key_scale_head_stride,
    value_scale_block_stride, value_scale_head_stride, table_stride, output_batch_stride, output_head_stride,
    query_heads, heads_per_key_head, scale_log2,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SAME_STRIDES: tl.constexpr, KEY_SCALES_BY_PAGE: tl.constexpr,
    VALUE_SCALES_BY_PAGE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of a KV head [BLOCK_M], against one split of one sequence's keys.

    A block is a page, or where PAGE_SIZE is 0, without tables, a sequence of a contiguous cache.
    """
    KEYS: tl.constexpr = min(BLOCK_N, FP8_NUMBERS // HEAD_DIM)
    WARPS: tl.constexpr = BLOCK_N // KEYS
    WORDS: tl.constexpr = HEAD_DIM // 2  # of two codes, in a value
    batch = tl.program_id(2).to(tl.int64)
    key_head, heads, is_head = packed_heads(heads_per_key_head, BLOCK_M)
    length = tl.load(lengths_pointer + batch).to(tl.int32)
    begin, end = split_keys(length, tl.program_id(1), tl.num_programs(1))
    keys = key_pointer + key_head.to(tl.int64) * key_head_stride
    values = value_pointer + key_head.to(tl.int64) * value_head_stride
    key_scales += key_head * key_scale_head_stride
    value_scales += key_head * value_scale_head_stride
    places = tl.arange(0, WARPS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]  # [WARPS, KEYS]
    inside = begin + places < end
    table = tables_pointer
    pages = places  # of no use without tables
    if PAGE_SIZE > 0:
        table += batch * table_stride
        pages = tl.load(table + (begin + places) // PAGE_SIZE, mask=inside, other=0)
    else:
        keys += batch * key_block_stride
        values += batch * value_block_stride

    query = load_queries((query_pointer + batch * query_batch_stride, query_head_stride), heads, is_head, HEAD_DIM,
                         HEAD_DIM)  # fmt: skip
    query, score_scale = normalised_queries(query)  # [BLOCK_M, HEAD_DIM], [BLOCK_M]
    dtype: tl.constexpr = query.dtype
    query = for_every_warp(query, WARPS)  # [WARPS, HEAD_DIM, BLOCK_M]
    score_scale *= scale_log2
    if not KEY_SCALES_BY_PAGE:
        score_scale *= tl.load(key_scales + batch * key_scale_block_stride)
    score_scale = score_scale[None, None, :]
    value_unit = tl.zeros([WARPS], tl.float32)  # what the accumulator's numbers are in
    if not VALUE_SCALES_BY_PAGE:
        value_unit += tl.load(value_scales + batch * value_scale_block_stride)
    running_max = tl.full([WARPS, BLOCK_M], float("-inf"), tl.float32)
    weight_sums = tl.zeros([WARPS, 8, BLOCK_M], tl.float32)
    even = tl.zeros([WARPS, WORDS, BLOCK_M], tl.float32)  # the accumulator of the channels 2i
    odd = tl.zeros([WARPS, WORDS, BLOCK_M], tl.float32)
    page_key_scales = tl.zeros([WARPS, KEYS], tl.float32)  # of no use without scales by page
    page_value_scales = tl.zeros([WARPS, KEYS], tl.float32)
    if KEY_SCALES_BY_PAGE:
        page_key_scales = load_page_scales(key_scales, pages, inside, key_scale_block_stride)
    if VALUE_SCALES_BY_PAGE:
        page_value_scales = load_page_scales(value_scales, pages, inside, value_scale_block_stride)
    channels, words = tl.arange(0, HEAD_DIM)[None, None, :], tl.arange(0, WORDS)[None, :, None]
    for start in tl.range(begin, end, BLOCK_N):
        positions = start + places  # [WARPS, KEYS]
        inside = positions < end
        next_inside = positions + BLOCK_N < end
        if PAGE_SIZE > 0:
            next_pages = tl.load(table + (positions + BLOCK_N) // PAGE_SIZE, mask=next_inside, other=0)
            key_rows = page_rows(pages, positions, key_block_stride, key_stride, PAGE_SIZE)
            value_rows = key_rows // 2 if SAME_STRIDES else page_rows(
                pages, positions, value_block_stride, value_stride, PAGE_SIZE)  # fmt: skip
        else:
            key_rows = positions.to(tl.int64) * key_stride
            value_rows = key_rows // 2 if SAME_STRIDES else positions.to(tl.int64) * value_stride
        codes = tl.load(keys + (key_rows[:, :, None] + channels), mask=inside[:, :, None], other=0.0,
                        eviction_policy="evict_first")  # [WARPS, KEYS, HEAD_DIM]  # fmt: skip
        scores = tl.dot(e4m3_numbers(codes, dtype, NATIVE), query, input_precision=FLOAT32_PRECISION) * score_scale
        if KEY_SCALES_BY_PAGE:
            scores *= page_key_scales[:, :, None]
        scores = tl.where(inside[:, :, None], scores, float("-inf"))  # [WARPS, KEYS, BLOCK_M]
        running_max, weights, rescale = weigh(scores, running_max, 1.0, MASKED=True, EXPONENT=LARGEST_WEIGHT)
        weight_sums = add_weights(weight_sums, weights, rescale)
        if VALUE_SCALES_BY_PAGE:
            # The accumulator is kept in the largest scale so far, as it is in the largest weight: no weight grows.
            new_unit = tl.maximum(value_unit, tl.max(page_value_scales, axis=1))  # [WARPS]
            divisor = tl.where(new_unit == 0.0, 1.0, new_unit)
            weights *= (page_value_scales / divisor[:, None])[:, :, None]
            rescale *= (value_unit / divisor)[:, None]
            value_unit = new_unit
        weights, rescale = weights.to(dtype), rescale[:, None]
        codes = tl.load(values + (value_rows[:, None, :] + words), mask=inside[:, None, :], other=0,
                        eviction_policy="evict_first")  # [WARPS, WORDS, KEYS]  # fmt: skip
        first, second = e4m3_halves(codes, dtype, NATIVE)
        even = tl.dot(first, weights, even * rescale, input_precision=FLOAT32_PRECISION)
        odd = tl.dot(second, weights, odd * rescale, input_precision=FLOAT32_PRECISION)
        if PAGE_SIZE > 0:
            pages = next_pages
            # Asked for a step ahead too, when the page's number has come: a load that waits for another's result, used
            # in the same step, would stop every step for the time of a trip to memory.
            if KEY_SCALES_BY_PAGE:
                page_key_scales = load_page_scales(key_scales, pages, next_inside, key_scale_block_stride)
            if VALUE_SCALES_BY_PAGE:
                page_value_scales = load_page_scales(value_scales, pages, next_inside, value_scale_block_stride)

    running_max, running_sum, shares = merge_sums(running_max, weight_sums)
    shares *= value_unit[:, None]
    rows = tl.permute(tl.join(even, odd) * shares[:, None, :, None], (2, 1, 3, 0))  # [BLOCK_M, WORDS, 2, WARPS]
    accumulator = add_warps(tl.reshape(rows, (BLOCK_M, HEAD_DIM, WARPS)))
    finish_split(running_max, running_sum, accumulator, heads, is_head,
                 (output_pointer + batch * output_batch_stride, output_head_stride),
                 lse_pointer if lse_pointer is None else lse_pointer + batch * query_heads,
                 (partial_outputs, partial_lses, arrivals), batch, query_heads, heads_per_key_head,
                 HEAD_DIM, GROUP_ROWS)  # fmt: skip


@kept
def fp8_decode_attention(
    query,
    key_cache,
    value_cache,
    lengths,
    *,
    key_scales,
    value_scales,
    scale=None,
    splits=None,
    return_lse=False,
    output=None,
    workspace=None,
    validate=True,
):
    """Attention of one query token per sequence to the sequence's keys in a contiguous e4m3 cache.

    Args:
        query: [batch, query_heads, head_dim], float32, float16 or bfloat16; head_dim 64, 128 or 256. Any strides, with
            a contiguous last dimension; the caches too, but the strides of values, and where they begin, are multiples
            of 2.
        key_cache, value_cache: float8_e4m3fn [batch, key_heads, capacity, head_dim], on query's device. query_heads is
            a multiple of key_heads; query head h reads key head h // (query_heads // key_heads).
        lengths: int32 or int64 [batch], tokens of each sequence in the cache, the current one included; 0 to capacity.
        key_scales, value_scales: float32, what a code is multiplied by: [], [key_heads] or [batch, key_heads]. Finite
            and 0 or more. There is no default: a cache that was made with scales means nothing without them.
        scale: factor of the scores, above 0; 1/√head_dim when None.
        splits, return_lse, output, workspace: as for `decode_attention`; splits are chosen by `fp8_plan`.
        validate: read `lengths` and the scales from the device and check them, which waits for it. With False, an
            output and a workspace, the host neither waits nor allocates: the step can be captured in a CUDA graph. A
            length that is wrong then reads memory of others.

    Returns the output, or (output, log-sum-exp); zeros and minus infinity for a sequence of length 0. What the cache
    holds beyond a length is not read. GPUs before compute capability 8.9 have no instruction for e4m3: their codes
    become numbers by integer arithmetic.

    Raises a ValueError that names the argument when shapes, dtypes, devices, strides, lengths, scales or options don't
    fit.
    """
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    check_fp8_caches(query, caches, "[batch, key_heads, capacity, head_dim]", scale)
    batch = query.shape[0]
    if key_cache.shape[0] != batch:
        raise ValueError(f"key_cache has batch size {key_cache.shape[0]}; it must be that of query, {batch}.")
    check_indices("lengths", lengths, "[batch]", (batch,), query.device)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    check_scales(scales, key_cache, "[batch, key_heads]")
    if validate:
        check_lengths(lengths, key_cache.shape[2], "the cache")
        check_scale_values(scales, None)
    return launch(query, key_cache, value_cache, None, lengths, key_cache.shape[2], key_scales, value_scales, scale,
                  splits, return_lse, output, workspace)  # fmt: skip


@kept
def paged_fp8_decode_attention(
    query,
    key_pages,
    value_pages,
    block_tables,
    lengths,
    *,
    key_scales,
    value_scales,
    scale=None,
    splits=None,
    return_lse=False,
    output=None,
    workspace=None,
    validate=True,
):
    """`fp8_decode_attention` for a cache that lies in pages anywhere in a pool.

    Args:
        key_pages, value_pages: float8_e4m3fn [pages, key_heads, page_size, head_dim], page_size a multiple of 16.
        block_tables: int32 or int64 [batch, max_blocks]: the page of tokens i·page_size to (i + 1)·page_size - 1 of a
            sequence at [sequence, i]. Entries that the length doesn't reach are not read, and may be anything.
        key_scales, value_scales: float32: [], [key_heads] or [pages, key_heads]; those of pages that no sequence has
            may be anything.
        the others: as for `fp8_decode_attention`; `validate` also checks the tables.
    """
    pools = {"key_pages": key_pages, "value_pages": value_pages}
    check_fp8_caches(query, pools, "[pages, key_heads, page_size, head_dim]", scale)
    batch, (pages, _, page_size) = query.shape[0], key_pages.shape[:3]
    if page_size % 16 != 0:
        raise ValueError(f"key_pages has pages of {page_size} tokens; the page size must be a multiple of 16.")
    check_indices("lengths", lengths, "[batch]", (batch,), query.device)
    check_indices("block_tables", block_tables, "[batch, max_blocks]", (batch, None), query.device)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    check_scales(scales, key_pages, "[pages, key_heads]")
    if validate:
        check_tables(block_tables, lengths, pages, page_size)
        used = torch.arange(block_tables.shape[1], device=lengths.device) * page_size < lengths[:, None]
        check_scale_values(scales, block_tables[used].long())
    return launch(query, key_pages, value_pages, block_tables, lengths, block_tables.shape[1] * page_size, key_scales,
                  value_scales, scale, splits, return_lse, output, workspace)  # fmt: skip


def launch(query, keys, values, tables, lengths, longest, key_scales, value_scales, scale, splits, return_lse, output,
           workspace):  # fmt: skip
    """The step itself, for arguments that were checked, but for `splits`, `output`, `workspace` and words of values."""
    check_output(output, query)
    check_splits(splits)
    check_words("value_cache" if tables is None else "value_pages", values)
    _, query_heads, head_dim = query.shape
    key_heads = keys.shape[1]
    plan, output, parts, lse = prepare_step(query, key_heads, longest, splits, return_lse, output, workspace, fp8_plan)
    native = native_e4m3(query.device)
    same_strides = keys.stride() == values.stride()
    values = values.view(torch.int16)
    if not native:
        keys = keys.view(torch.int8)
    scale_strides = [stride for scales in (key_scales, value_scales) for stride in (0, 0, *scales.stride())[-2:]]
    fp8_decode_kernel[(plan.programs, plan.splits, query.shape[0])](
        query, keys, values, key_scales, value_scales, tables, lengths, output, lse, *parts, *query.stride()[:2],
        *keys.stride()[:3], *values.stride()[:3], *scale_strides, 0 if tables is None else tables.stride(0),
        *output.stride()[:2], query_heads, query_heads // key_heads,
        scale_in_log2(scale, head_dim), HEAD_DIM=head_dim,
        PAGE_SIZE=0 if tables is None else keys.shape[2], GROUP_ROWS=group_rows(query_heads // key_heads, plan.tiles),
        SAME_STRIDES=same_strides,
        KEY_SCALES_BY_PAGE=tables is not None and key_scales.dim() == 2,
        VALUE_SCALES_BY_PAGE=tables is not None and value_scales.dim() == 2, NATIVE=native, **plan.tiles.settings(),
    )  # fmt: skip
    return (output, lse) if return_lse else output


def check_words(name: str, codes) -> None:
    """Raise a ValueError unless two codes after another are always a word of memory: they are loaded as one."""
    if codes.storage_offset() % 2 or any(stride % 2 for stride in codes.stride()[:-1]):
        raise ValueError(
            f"{name} begins {codes.storage_offset()} bytes into its memory and has strides {codes.stride()}; both must "
            "be multiples of 2 but for the last dimension's: codes are loaded two at a time. Take a copy, "
            f"{name}.contiguous()."
        )


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: pages of 16, of which the scales are one, or each its own."""
    half = torch.bfloat16
    wanted = [(arch, 128, 4, half) for arch in (80, 86, 89, 90, 100, 120)]
    wanted += [(90, 64, 4, half), (90, 128, 1, half), (90, 128, 16, half), (90, 128, 32, half), (90, 256, 4, half),
               (90, 128, 4, torch.float16)]  # fmt: skip
    slow = [(75, 64, 4, torch.float16), (75, 128, 4, torch.float16), (90, 128, 4, torch.float32)]

    def types(case):
        codes = "*fp8e4nv" if case[0] >= NATIVE_E4M3 else "*i8"
        return {"key_pointer": codes, "value_pointer": "*i16", "key_scales": "*fp32", "value_scales": "*fp32"}

    return [
        case
        for by_page in (False, True)
        for case in quantised_compile_cases(
            fp8_decode_kernel,
            fp8_cuts,
            types,
            lambda case, by_page=by_page: {
                "PAGE_SIZE": 16,
                "SAME_STRIDES": True,
                "KEY_SCALES_BY_PAGE": by_page,
                "VALUE_SCALES_BY_PAGE": by_page,
                "NATIVE": case[0] >= NATIVE_E4M3,
            },
            wanted[:6] if by_page else wanted,
            [] if by_page else slow,
            spills={(90, 256): 72},  # with Triton 3.9; with 3.6 nothing
        )
    ]
