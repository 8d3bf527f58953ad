"""Decode attention over an INT4 cache: one query token per sequence; keys by channel, values by token, and a window.

    output = softmax(scale · query · Kᵀ) V        K, V: code · s + m, float16

s, m: scale and middle, for a key's code of its channel in the 64 keys that it is among, for a value's code of its
token's 64 channels. The last `length` mod 64 tokens are read from the window, in 16 bits.

Codes become numbers in registers, two at a time: float16 multiplies and adds two in one instruction. A scale multiplied
into the query's row or into the weights instead would be fewer multiplications, but those rows then have to be brought
to the products' layout for every 64 keys, in two numbers each to keep their digits, with sums for the middles: 1,250
instructions of a warp for 64 keys, against 710 (sm_90, from the machine code). float16 rounds a number by 2^-12 of
itself at most, as a cache of 16 bits would. A query row's largest number is brought between 1 and 2
(`normalised_queries`), so that bfloat16 of any size fits; numbers are made as halves, so that none overflows.

FLOPs: 6 · query_heads · head_dim per key. Bytes: key_heads · head_dim · 9/8 per key, each read once: a half of each
byte is a code, and 64 codes have 4 bytes of scale and middle. 131,072 tokens with 8 KV heads of 128 are 151 MB, against
537 MB in 16 bits.

Codes are loaded as words of four neighbouring channels. A word's first code becomes a number of one tile, its second of
another, and so on. So every tile of this kernel comes as four *quarters*: quarter q holds the channels 4i + q. A score
is the sum of four products, one for each quarter of the channels, and the accumulator is four tiles, one for each
quarter of the output, whose columns are put in order when all keys are done. Scales are asked for one tile ahead.
Source: Liu et al., KIVI, arXiv 2402.02750; Dao et al., Flash-Decoding for long-context inference, 2023.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.cache_checks import (
    check_indices,
    check_lengths,
    check_output,
    check_splits,
    check_tables,
)
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.softmax import scale_in_log2, weigh
from course_lib.kernels.common.splits import whole_tiles
from course_lib.kernels.decode.combine import finish_split
from course_lib.kernels.decode.parts import DECODE_SIZES, load_queries, packed_heads
from course_lib.kernels.decode.tiles import group_rows
from course_lib.kernels.decode.workspace import prepare_step
from course_lib.kernels.quantised import formats
from course_lib.kernels.quantised.checks import check_int4_cache, check_int4_query
from course_lib.kernels.quantised.parts import block_number, int4_numbers, normalised_queries
from course_lib.kernels.quantised.tiles import int4_cuts, int4_plan, quantised_compile_cases

GROUP = tl.constexpr(formats.GROUP)
# As for e4m3: float16 ends at 2^16, and keeps all digits down to 2^-14.
LARGEST_WEIGHT = tl.constexpr(14.0)


@triton.jit
def quarters_of(rows):
    """The four quarters of [ROWS, COLUMNS]: the columns 4i, 4i + 1, 4i + 2 and 4i + 3, [ROWS, COLUMNS / 4] each."""
    even, odd = tl.split(tl.reshape(rows, (rows.shape[0], rows.shape[1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def load_quarters(pointers, mask):
    """The quarters of a tile, [ROWS, COLUMNS / 4] each, from pointers to the columns 4i."""
    found = ()
    for quarter in tl.static_range(4):
        found = found + (tl.load(pointers + quarter, mask=mask, other=0.0),)
    return found


@triton.jit
def key_products(query, keys, dtype: tl.constexpr):
    """Scores [BLOCK_M, BLOCK_N] from the quarters of the queries, [BLOCK_M, K], and of the keys, [BLOCK_N, K].

    A score is a sum over all channels: over the first quarter of them, and then over the others.
    """
    scores = tl.dot(query[0], tl.trans(keys[0].to(dtype)), input_precision=FLOAT32_PRECISION)
    for quarter in tl.static_range(1, 4):
        keys_t = tl.trans(keys[quarter].to(dtype))  # [K, BLOCK_N]
        scores = tl.dot(query[quarter], keys_t, scores, input_precision=FLOAT32_PRECISION)
    return scores


@triton.jit
def add_values(totals, weights, values, rescale):
    """The accumulator's quarters [BLOCK_M, K] after one more tile of values, whose quarters are [BLOCK_N, K]."""
    rescale = rescale[:, None]
    added = ()
    for quarter in tl.static_range(4):
        value_tile = values[quarter].to(weights.dtype)  # [BLOCK_N, K]
        total = tl.dot(weights, value_tile, totals[quarter] * rescale, input_precision=FLOAT32_PRECISION)
        added = added + (total,)
    return added


@triton.jit
def load_scales(cache, block, exists, HEAD_DIM: tl.constexpr):
    """Scales and middles of a block of 64 tokens, float16; zeros unless `exists`, a number, is above 0.

    Returns, for the keys, words of the scales and of the middles of four channels, int64 [HEAD_DIM / 4]; for the
    values, scales and middles [64, HEAD_DIM / 4], of the group that a column's channels are in.
    """
    key_scales, key_middles, value_scales, value_middles = cache
    WORDS: tl.constexpr = HEAD_DIM // 4
    words = block * WORDS + tl.arange(0, WORDS)
    groups = tl.arange(0, WORDS) // (GROUP // 4)
    tokens = block * HEAD_DIM + (tl.arange(0, GROUP) * (HEAD_DIM // GROUP))[:, None] + groups[None, :]
    return load_pair(key_scales, key_middles, words, exists), load_pair(value_scales, value_middles, tokens, exists)


@triton.jit
def load_pair(scales, middles, places, exists):
    mask = places * 0 < exists  # a tile: the interpreter wants one for a tile of pointers
    return tl.load(scales + places, mask=mask, other=0), tl.load(middles + places, mask=mask, other=0)


@triton.jit
def numbers_of(words):
    """The four float16 numbers in each of the int64 words [K], one for a quarter: four times [1, K]."""
    found = ()
    for quarter in tl.static_range(4):
        bits = (words >> (16 * quarter)).to(tl.int16)  # [K]
        found = found + (bits.to(tl.float16, bitcast=True)[None, :],)
    return found


@triton.jit
def halved(quarters):
    half = ()
    for quarter in tl.static_range(4):
        half = half + (quarters[quarter] * 0.5,)
    return half


@triton.jit
def columns_in_order(quarters):
    """[ROWS, COLUMNS] from its four quarters, [ROWS, COLUMNS / 4] each: what `quarters_of` undoes."""
    even = tl.join(quarters[0], quarters[2])  # [ROWS, COLUMNS / 4, 2]
    odd = tl.join(quarters[1], quarters[3])
    return tl.reshape(tl.join(even, odd), (quarters[0].shape[0], 4 * quarters[0].shape[1]))


@triton.jit(do_not_specialize=(*DECODE_SIZES, "blocks"))
def int4_decode_kernel(
    query_pointer, key_codes, key_scales, key_middles, value_codes, value_scales, value_middles, key_window,
    value_window, tables_pointer, lengths_pointer, output_pointer, lse_pointer, partial_outputs, partial_lses, arrivals,
    query_batch_stride, query_head_stride, table_stride, output_batch_stride, output_head_stride,
    blocks, query_heads, heads_per_key_head, scale_log2,
    HEAD_DIM: tl.constexpr, PAGED: tl.constexpr, GROUP_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of a KV head [BLOCK_M], against one split of one sequence's keys.

    key_codes, value_codes: int16, codes of four neighbouring channels. key_scales, key_middles: int64, of four
    channels. blocks: of a sequence of a contiguous cache; of no use in pages. BLOCK_N is GROUP.
    """
    WORDS: tl.constexpr = HEAD_DIM // 4
    batch = tl.program_id(2).to(tl.int64)
    key_head, heads, is_head = packed_heads(heads_per_key_head, BLOCK_M)
    key_heads = query_heads // heads_per_key_head
    length = tl.load(lengths_pointer + batch).to(tl.int32)
    begin, end = whole_tiles(length, tl.program_id(1), tl.num_programs(1), BLOCK_N)
    last_block = end // GROUP  # the first that is not whole: its keys are in the window

    query = load_queries((query_pointer + batch * query_batch_stride, query_head_stride), heads, is_head, HEAD_DIM,
                         HEAD_DIM)  # fmt: skip

    # The window first, so that the loop needs no mask: of the split that ends with it, and not of empty ones behind.
    first_row = (batch * key_heads + key_head) * GROUP
    rows = tl.arange(0, GROUP)
    waiting = (rows < end - last_block * GROUP) & (rows * 0 + begin < end)  # [64]
    window = (first_row + rows)[:, None] * HEAD_DIM + 4 * tl.arange(0, WORDS)[None, :]
    keys = load_quarters(key_window + window, waiting[:, None])
    scores = key_products(quarters_of(query), keys, query.dtype) * scale_log2
    scores = tl.where(waiting[None, :], scores, float("-inf"))  # [BLOCK_M, 64]
    nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_max, weights, rescale = weigh(scores, nothing, 1.0, MASKED=True, EXPONENT=LARGEST_WEIGHT)
    weight_sums = tl.zeros([BLOCK_M, GROUP], tl.float32) * rescale[:, None] + weights
    empty = tl.zeros([BLOCK_M, WORDS], tl.float32)
    values = load_quarters(value_window + window, waiting[:, None])
    totals = add_values((empty, empty, empty, empty), weights.to(query.dtype), values, rescale)
    totals = halved(totals)  # as numbers from codes are

    query, score_scale = normalised_queries(query)  # [BLOCK_M, HEAD_DIM], [BLOCK_M]
    score_scale = (score_scale * (2.0 * scale_log2))[:, None]
    dtype: tl.constexpr = query.dtype
    query = quarters_of(query)
    scale_pointers = key_scales, key_middles, value_scales, value_middles
    code_rows = rows.to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]  # [64, HEAD_DIM / 4]
    first_block = begin // GROUP
    block = block_number(tables_pointer, table_stride, batch, first_block, last_block, key_head, key_heads, blocks,
                         PAGED)  # fmt: skip
    scales = load_scales(scale_pointers, block, last_block - first_block, HEAD_DIM)
    for index in tl.range(first_block, last_block):
        # The compiler pipelines no loop that hands a value on over two steps: the next number is asked for here, and
        # seven times of eight the L1 has it.
        next_block = block_number(
            tables_pointer, table_stride, batch, index + 1, last_block, key_head, key_heads, blocks, PAGED
        )
        next_scales = load_scales(scale_pointers, next_block, last_block - index - 1, HEAD_DIM)
        codes = block * (GROUP * WORDS) + code_rows
        by_channel, by_token = scales
        words = tl.load(key_codes + codes, eviction_policy="evict_first")
        key_tiles = int4_numbers(words, numbers_of(by_channel[0]), halved(numbers_of(by_channel[1])), dtype, ASSEMBLY)
        scores = key_products(query, key_tiles, dtype) * score_scale
        running_max, weights, rescale = weigh(scores, running_max, 1.0, MASKED=True, EXPONENT=LARGEST_WEIGHT)
        weight_sums = weight_sums * rescale[:, None] + weights
        words = tl.load(value_codes + codes, eviction_policy="evict_first")
        scale, middle = by_token[0], by_token[1] * 0.5
        value_tiles = int4_numbers(
            words, (scale, scale, scale, scale), (middle, middle, middle, middle), dtype, ASSEMBLY
        )
        totals = add_values(totals, weights.to(dtype), value_tiles, rescale)
        block = next_block
        scales = next_scales

    accumulator = 2.0 * columns_in_order(totals)  # [BLOCK_M, HEAD_DIM]
    finish_split(running_max, tl.sum(weight_sums, axis=1), accumulator, heads, is_head,
                 (output_pointer + batch * output_batch_stride, output_head_stride),
                 lse_pointer if lse_pointer is None else lse_pointer + batch * query_heads,
                 (partial_outputs, partial_lses, arrivals), batch, query_heads, heads_per_key_head,
                 HEAD_DIM, GROUP_ROWS)  # fmt: skip


def int4_decode_attention(
    query,
    cache,
    lengths,
    *,
    scale=None,
    splits=None,
    return_lse=False,
    output=None,
    workspace=None,
    validate=True,
):
    """Attention of one query token per sequence to the sequence's keys in a contiguous INT4 cache.

    Args:
        query: [batch, query_heads, head_dim], of the windows' dtype or float32; head_dim 64, 128 or 256. Any strides,
            with a contiguous last dimension.
        cache: an `Int4Cache` with blocks [batch, key_heads, capacity / 64], on query's device. query_heads is a
            multiple of key_heads; query head h reads key head h // (query_heads // key_heads).
        lengths: int32 or int64 [batch], tokens of each sequence in the cache, the current one included; 0 to capacity.
            The last `length` mod 64 are read from the windows, all others from codes.
        scale: factor of the scores, above 0; 1/√head_dim when None.
        splits, return_lse, output, workspace: as for `decode_attention`; splits are chosen by `int4_plan`.
        validate: read `lengths` from the device and check them, which waits for it. With False, an output and a
            workspace, the host neither waits nor allocates: the step can be captured in a CUDA graph. A length that is
            wrong then reads memory of others.

    Returns the output, or (output, log-sum-exp); zeros and minus infinity for a sequence of length 0. What the cache
    holds beyond a length is not read. Products with codes are those of float16, but for a float32 query: a weight below
    2^-28 of the largest loses digits, and so does half a middle below 2^-14.

    Raises a ValueError that names the argument when shapes, dtypes, devices, strides, lengths or options don't fit.
    Source: Liu et al., KIVI, arXiv 2402.02750.
    """
    check_int4_query(query, scale)
    check_int4_cache(cache, query.shape[0], query.shape[2], query.device, paged=False)
    check_windows(query, cache)
    check_indices("lengths", lengths, "[batch]", (query.shape[0],), query.device)
    capacity = cache.key_codes.shape[2] * formats.GROUP
    if validate:
        check_lengths(lengths, capacity, "the cache")
    return launch(query, cache, None, lengths, capacity, scale, splits, return_lse, output, workspace)


def paged_int4_decode_attention(
    query,
    cache,
    block_tables,
    lengths,
    *,
    scale=None,
    splits=None,
    return_lse=False,
    output=None,
    workspace=None,
    validate=True,
):
    """`int4_decode_attention` for a cache that lies in pages of 64 tokens anywhere in a pool.

    Args:
        cache: an `Int4Cache` with blocks [pages, key_heads], and the windows of the batch's sequences.
        block_tables: int32 or int64 [batch, max_blocks]: the page of tokens 64 · i to 64 · i + 63 of a sequence at
            [sequence, i]. Entries that the length doesn't reach are not read, and may be anything.
        the others: as for `int4_decode_attention`; `validate` also checks the tables.
    """
    check_int4_query(query, scale)
    check_int4_cache(cache, query.shape[0], query.shape[2], query.device, paged=True)
    check_windows(query, cache)
    batch = query.shape[0]
    check_indices("lengths", lengths, "[batch]", (batch,), query.device)
    check_indices("block_tables", block_tables, "[batch, max_blocks]", (batch, None), query.device)
    if validate:
        check_tables(block_tables, lengths, cache.key_codes.shape[0], formats.GROUP)
    longest = block_tables.shape[1] * formats.GROUP
    return launch(query, cache, block_tables, lengths, longest, scale, splits, return_lse, output, workspace)


def check_windows(query, cache) -> None:
    """Raise a ValueError unless the windows are of the query's dtype, or the query is wider, and their heads fit."""
    key_heads, dtype = cache.key_codes.shape[1], cache.key_window.dtype
    if query.dtype not in (dtype, torch.float32):
        raise ValueError(f"query has dtype {query.dtype}; it must be that of cache.key_window, {dtype}, or float32.")
    if query.shape[1] % key_heads != 0:
        raise ValueError(f"query has {query.shape[1]} heads; it must have a multiple of the {key_heads} of cache.")


def launch(query, cache, tables, lengths, longest, scale, splits, return_lse, output, workspace):
    """The step itself, for arguments that were checked, but for `splits`, `output` and `workspace`."""
    check_output(output, query)
    check_splits(splits)
    _, query_heads, head_dim = query.shape
    key_heads = cache.key_codes.shape[1]
    plan, output, parts, lse = prepare_step(query, key_heads, longest, splits, return_lse, output, workspace, int4_plan)
    int4_decode_kernel[(plan.programs, plan.splits, query.shape[0])](
        query, *in_words(cache), tables, lengths, output, lse, *parts, *query.stride()[:2],
        0 if tables is None else tables.stride(0), *output.stride()[:2], longest // formats.GROUP, query_heads,
        query_heads // key_heads, scale_in_log2(scale, head_dim), HEAD_DIM=head_dim,
        PAGED=tables is not None, GROUP_ROWS=group_rows(query_heads // key_heads, plan.tiles),
        ASSEMBLY=architecture_of(query.device) is not None, **plan.tiles.settings(),
    )  # fmt: skip
    return (output, lse) if return_lse else output


def in_words(cache):
    """The cache's parts as the kernel takes them: four codes as int16, scales and middles of four channels as int64."""
    return cache._replace(
        key_codes=cache.key_codes.view(torch.int16), value_codes=cache.value_codes.view(torch.int16),
        key_scales=cache.key_scales.view(torch.int64), key_middles=cache.key_middles.view(torch.int64),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate, in pages."""
    half = torch.bfloat16
    wanted = [(arch, 128, 4, half) for arch in (80, 86, 89, 90, 100, 120)]
    wanted += [(90, 64, 4, half), (90, 128, 1, half), (90, 128, 16, half), (90, 128, 32, half), (90, 256, 4, half),
               (90, 128, 4, torch.float16)]  # fmt: skip
    slow = [(75, 64, 4, torch.float16), (75, 128, 4, torch.float16), (90, 128, 4, torch.float32)]

    def types(case):
        window = "*fp16" if case[3] == torch.float16 else "*bf16"
        return ({f"{side}_codes": "*i16" for side in ("key", "value")}
                | {f"{side}_{part}": kind for side, kind in (("key", "*i64"), ("value", "*fp16"))
                   for part in ("scales", "middles")}
                | {f"{side}_window": window for side in ("key", "value")})  # fmt: skip

    return quantised_compile_cases(
        int4_decode_kernel, int4_cuts, types, lambda case: {"PAGED": True, "ASSEMBLY": True}, wanted, slow
    )
