"""Decode attention over an INT4 cache: one query token per sequence; keys by channel, values by token, and a window.

    score[n]  = (query · s_k) · K[n] + query · m_k            s_k, m_k [head_dim]: of the 64 keys that n is among
    output    = Σ_n (w_n · s_v[n]) V[n] + Σ_n w_n · m_v[n]    s_v, m_v [64 keys]: of 64 channels of each token's value

K, V: the codes, -8 to 7. So a scale multiplies what is small: the query's row once for 64 keys, a weight once for 64
numbers of a value. Multiplied into the codes it would be one multiplication a number. The middles' parts are sums of
their own, one number a row. The last `length` mod 64 tokens are read from the window, in 16 bits.

The scaled query is two rows of 16 bits, what it rounds to and the rest: its product with a large channel's codes would
be off by 2^-9 of the score otherwise, and with keys of which four channels are 30 times as large the output by 1 %.

FLOPs: 6 · query_heads · head_dim per key. Bytes: key_heads · head_dim · 9/8 per key, each read once: a half of each
byte is a code, and 64 codes have 4 bytes of scale and middle. 131,072 tokens with 8 KV heads of 128 are 151 MB, against
537 MB in 16 bits.

A byte's low and high half become two tiles, of even and of odd channels. Products go over both, and the output's
columns are put in order when all keys are done. Scales are asked for one tile ahead.
Source: Liu et al., KIVI, arXiv 2402.02750; Dao et al., Flash-Decoding for long-context inference, 2023.
"""

import math

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.parts import FLOAT32_PRECISION, LOG2_E
from course_lib.kernels.decode.checks import check_indices, check_lengths, check_output, check_splits, check_tables
from course_lib.kernels.decode.combine import finish_split
from course_lib.kernels.decode.parts import DECODE_SIZES, packed_heads
from course_lib.kernels.decode.tiles import group_rows
from course_lib.kernels.decode.workspace import prepare_step
from course_lib.kernels.latent.parts import whole_tiles
from course_lib.kernels.quantised import formats
from course_lib.kernels.quantised.checks import check_int4_cache, check_int4_query
from course_lib.kernels.quantised.parts import block_number, int4_numbers, load_halves, weigh
from course_lib.kernels.quantised.tiles import int4_cuts, int4_plan, quantised_compile_cases

GROUP = tl.constexpr(formats.GROUP)
BYTES = tl.constexpr(formats.GROUP // 2)  # of the codes of a group of channels
# A weight is multiplied by a scale of up to 8734 (65504 · 2 / 15), and float16 ends at 65504.
LARGEST_WEIGHT = tl.constexpr(0.0)


@triton.jit
def product(rows, columns, total):
    """rows · columns added to `total`; columns are [N, K] if total is [M, N] of keys, both of one dtype."""
    return tl.dot(rows, columns, total, input_precision=FLOAT32_PRECISION)


@triton.jit
def one_more(parts, part):
    """A tuple with one part more behind: one for each 64 channels."""
    return parts + (part,)


@triton.jit
def load_scales(cache, block, exists, HEAD_DIM: tl.constexpr):
    """Scales and middles of a block of 64 tokens, float32; zeros unless `exists`, a number, is above 0.

    Returns, for the keys, (scales, middles) of even channels [HEAD_DIM / 2] and of odd ones; for the values, a tuple of
    (scales, middles) [64] of each 64 channels.
    """
    key_scales, key_middles, value_scales, value_middles = cache
    GROUPS: tl.constexpr = HEAD_DIM // GROUP
    channels = block * HEAD_DIM + 2 * tl.arange(0, HEAD_DIM // 2)
    tokens = block * (GROUP * GROUPS) + tl.arange(0, GROUP) * GROUPS
    even = load_pair(key_scales, key_middles, channels, exists)
    odd = load_pair(key_scales, key_middles, channels + 1, exists)
    values = (load_pair(value_scales, value_middles, tokens, exists),)
    for group in tl.static_range(1, GROUPS):
        values = one_more(values, load_pair(value_scales, value_middles, tokens + group, exists))
    return even, odd, values


@triton.jit
def load_pair(scales, middles, places, exists):
    mask = places * 0 < exists  # a tile: the interpreter wants one for a tile of pointers
    return (tl.load(scales + places, mask=mask, other=0.0).to(tl.float32),
            tl.load(middles + places, mask=mask, other=0.0).to(tl.float32))  # fmt: skip


@triton.jit
def scores_of_block(query, codes, even, odd, dtype: tl.constexpr):
    """Scores [BLOCK_M, 64] without the softmax's scale, of packed codes [64, HEAD_DIM / 2].

    query: (even, odd) channels [BLOCK_M, HEAD_DIM / 2], float32. even, odd: (scales, middles) of the keys' channels.
    """
    even_query, odd_query = query
    middles = tl.sum(even_query * even[1][None, :] + odd_query * odd[1][None, :], axis=1)  # [BLOCK_M]
    scores = scaled_product(even_query * even[0][None, :], tl.trans(int4_numbers(codes & 15, dtype)), None, dtype)
    scores = scaled_product(odd_query * odd[0][None, :], tl.trans(int4_numbers(codes >> 4, dtype)), scores, dtype)
    return scores + middles[:, None]


@triton.jit
def scaled_product(rows, codes, total, dtype: tl.constexpr):
    """rows · codes added to `total`; rows float32, taken as a number of `dtype` and what it leaves of them, another.

    A scaled query is no longer a number of 16 bits. Rounded to one, it would put an error of 2^-9 (bfloat16) of a large
    channel's score into all scores of that channel's group.
    """
    rounded = rows.to(dtype)
    total = product(rounded, codes, total)
    if dtype != tl.float32:
        total = product((rows - rounded.to(tl.float32)).to(dtype), codes, total)
    return total


@triton.jit
def add_block(total, weights, rescale, codes, scales, middles, dtype: tl.constexpr):
    """A group of 64 channels after one more block of values, given as packed codes [64, 32].

    total: even and odd channels [BLOCK_M, 32], and what the middles add [BLOCK_M, 64], a column a token.
    """
    even, odd, shifts = total
    scaled = (weights * scales[None, :]).to(dtype)  # [BLOCK_M, 64]
    even = product(scaled, int4_numbers(codes & 15, dtype), even * rescale[:, None])
    odd = product(scaled, int4_numbers(codes >> 4, dtype), odd * rescale[:, None])
    return even, odd, shifts * rescale[:, None] + weights * middles[None, :]


@triton.jit
def add_window(total, weights, values, dtype: tl.constexpr):
    """A group of 64 channels, of which nothing is there yet, after the window's values: (even, odd) [64, 32]."""
    even = product(weights.to(dtype), values[0].to(dtype), total[0])
    return even, product(weights.to(dtype), values[1].to(dtype), total[1]), total[2]


@triton.jit
def finished_group(total):
    """The 64 channels of a group in their order, [BLOCK_M, 64]."""
    even, odd, shifts = total
    shift = tl.sum(shifts, axis=1)[:, None]  # [BLOCK_M, 1]
    return tl.reshape(tl.join(even + shift, odd + shift), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def beside(left, right):
    """[ROWS, COLUMNS] and another as one tile [ROWS, 2 · COLUMNS]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def finished_channels(totals, GROUPS: tl.constexpr):
    """All channels in their order, [BLOCK_M, 64 · GROUPS]."""
    channels = finished_group(totals[0])
    if GROUPS == 2:
        channels = beside(channels, finished_group(totals[1]))
    elif GROUPS == 4:
        channels = beside(beside(channels, finished_group(totals[1])),
                          beside(finished_group(totals[2]), finished_group(totals[3])))  # fmt: skip
    return channels


@triton.jit(do_not_specialize=(*DECODE_SIZES, "blocks"))
def int4_decode_kernel(
    query_pointer, key_codes, key_scales, key_middles, value_codes, value_scales, value_middles, key_window,
    value_window, tables_pointer, lengths_pointer, output_pointer, lse_pointer, partial_outputs, partial_lses, arrivals,
    query_batch_stride, query_head_stride, table_stride, output_batch_stride, output_head_stride,
    blocks, query_heads, heads_per_key_head, scale_log2,
    HEAD_DIM: tl.constexpr, PAGED: tl.constexpr, GROUP_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of a KV head [BLOCK_M], against one split of one sequence's keys.

    blocks: of a sequence of a contiguous cache; of no use in pages. BLOCK_N is GROUP.
    """
    GROUPS: tl.constexpr = HEAD_DIM // GROUP
    HALF: tl.constexpr = HEAD_DIM // 2
    batch = tl.program_id(2).to(tl.int64)
    key_head, heads, is_head = packed_heads(heads_per_key_head, BLOCK_M)
    key_heads = query_heads // heads_per_key_head
    length = tl.load(lengths_pointer + batch).to(tl.int32)
    begin, end = whole_tiles(length, tl.program_id(1), tl.num_programs(1), BLOCK_N)
    last_block = end // GROUP  # the first that is not whole: its keys are in the window

    pointers = query_pointer + batch * query_batch_stride + heads[:, None] * query_head_stride
    even_query, odd_query = load_halves(pointers + 2 * tl.arange(0, HALF)[None, :], is_head[:, None])
    dtype: tl.constexpr = even_query.dtype

    # The window first, so that the loop needs no mask: of the split that ends with it, and not of empty ones behind.
    first_row = (batch * key_heads + key_head) * GROUP
    rows = tl.arange(0, GROUP)
    waiting = (rows < end - last_block * GROUP) & (rows * 0 + begin < end)  # [64]
    window = (first_row + rows)[:, None] * HEAD_DIM + 2 * tl.arange(0, HALF)[None, :]
    even_keys, odd_keys = load_halves(key_window + window, waiting[:, None])
    scores = product(even_query, tl.trans(even_keys.to(dtype)), None)
    scores = product(odd_query, tl.trans(odd_keys.to(dtype)), scores) * scale_log2
    scores = tl.where(waiting[None, :], scores, float("-inf"))  # [BLOCK_M, 64]
    nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights, running_max, weight_sums, rescale = weigh(
        scores, nothing, tl.zeros([BLOCK_M, GROUP], tl.float32), LARGEST_WEIGHT
    )
    values = (first_row + rows)[:, None] * HEAD_DIM + 2 * tl.arange(0, BYTES)[None, :]
    empty = (tl.zeros([BLOCK_M, BYTES], tl.float32), tl.zeros([BLOCK_M, BYTES], tl.float32),
             tl.zeros([BLOCK_M, GROUP], tl.float32))  # fmt: skip
    totals = (add_window(empty, weights, load_halves(value_window + values, waiting[:, None]), dtype),)
    for group in tl.static_range(1, GROUPS):
        halves = load_halves(value_window + values + group * GROUP, waiting[:, None])
        totals = one_more(totals, add_window(empty, weights, halves, dtype))

    query = even_query.to(tl.float32) * scale_log2, odd_query.to(tl.float32) * scale_log2
    scale_pointers = key_scales, key_middles, value_scales, value_middles
    code_rows = rows.to(tl.int64)[:, None] * HALF  # [64, 1]
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
        codes = block * (GROUP * HALF) + code_rows
        even, odd, by_token = scales
        tile = tl.load(key_codes + codes + tl.arange(0, HALF)[None, :], eviction_policy="evict_first")
        scores = scores_of_block(query, tile, even, odd, dtype)
        weights, running_max, weight_sums, rescale = weigh(scores, running_max, weight_sums, LARGEST_WEIGHT)
        tile = tl.load(value_codes + codes + tl.arange(0, BYTES)[None, :], eviction_policy="evict_first")
        added = (add_block(totals[0], weights, rescale, tile, by_token[0][0], by_token[0][1], dtype),)
        for group in tl.static_range(1, GROUPS):
            tile = tl.load(value_codes + codes + group * BYTES + tl.arange(0, BYTES)[None, :],
                           eviction_policy="evict_first")  # fmt: skip
            added = one_more(
                added, add_block(totals[group], weights, rescale, tile, by_token[group][0], by_token[group][1], dtype)
            )
        totals = added
        block = next_block
        scales = next_scales

    accumulator = finished_channels(totals, GROUPS)
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
    holds beyond a length is not read. In float16 a weight times a value's scale loses digits below 6e-5, and all of
    them below 6e-8.

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
        query, *cache, tables, lengths, output, lse, *parts, *query.stride()[:2],
        0 if tables is None else tables.stride(0), *output.stride()[:2], longest // formats.GROUP, query_heads,
        query_heads // key_heads, LOG2_E * (1 / math.sqrt(head_dim) if scale is None else scale), HEAD_DIM=head_dim,
        PAGED=tables is not None, GROUP_ROWS=group_rows(query_heads // key_heads, plan.tiles), **plan.tiles.settings(),
    )  # fmt: skip
    return (output, lse) if return_lse else output


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate, in pages."""
    half = torch.bfloat16
    wanted = [(arch, 128, 4, half) for arch in (80, 86, 89, 90, 100, 120)]
    wanted += [(90, 64, 4, half), (90, 128, 1, half), (90, 128, 16, half), (90, 128, 32, half), (90, 256, 4, half),
               (90, 128, 4, torch.float16)]  # fmt: skip
    slow = [(75, 64, 4, torch.float16), (75, 128, 4, torch.float16), (90, 128, 4, torch.float32)]

    def types(case):
        window = "*fp16" if case[3] == torch.float16 else "*bf16"
        return ({f"{side}_codes": "*u8" for side in ("key", "value")} | {"blocks": "i32"}
                | {f"{side}_{part}": "*fp16" for side in ("key", "value") for part in ("scales", "middles")}
                | {f"{side}_window": window for side in ("key", "value")})  # fmt: skip

    return quantised_compile_cases(int4_decode_kernel, int4_cuts, types, lambda case: {"PAGED": True}, wanted, slow)
