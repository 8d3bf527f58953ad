"""Decode attention over an INT4 cache: one query token per sequence; keys by channel, values by token, and a window.

    output = softmax(scale · query · Kᵀ) V        K, V: code · s + m, float16

s, m: scale and middle, for a key's code of its channel in the 64 keys that it is among, for a value's code of its
token's 64 channels. The last `length` mod 64 tokens are read from the window, in 16 bits.

Codes become numbers in registers, two at a time: float16 multiplies and adds two in one instruction. float16 rounds a
number by 2^-12 of itself at most, as a cache of 16 bits would. A query row's largest number is brought between 1 and 2
(`normalised_queries`), so that bfloat16 of any size fits; numbers are made as halves, so that none overflows.

The bytes are few, so the instructions count. For 64 keys and their values, 16,384 numbers, a program of four warps
executes 1,350 in all (sm_90, from the machine code): 830 make numbers of codes, 64 are products. That takes warps with
keys of their own (`quantised.warps`). When all four shared the rows of one tile, the same keys took 3,200.

FLOPs: 6 · query_heads · head_dim per key. Bytes: key_heads · head_dim · 9/8 per key, each read once: a half of each
byte is a code, and 64 codes have 4 bytes of scale and middle. 131,072 tokens with 8 KV heads of 128 are 151 MB, against
537 MB in 16 bits.

Codes are loaded as words of four neighbouring channels. A word's first code becomes a number of one tile, its second of
another, and so on. So every tile of this kernel comes as four *quarters*: quarter q holds the channels 4i + q. A score
is the sum of four products, one for each quarter of the channels, and the accumulator is four tiles, one for each
quarter of the output, whose columns are put in order when all keys are done. The scales come as words too: the four of
a word's channels for keys, those of all groups of a token for values. So all that a step needs can be copied to shared
memory while others are at work. Values are taken group by group: one scale belongs to 64 channels.
Source: Liu et al., KIVI, arXiv 2402.02750; Dao et al., Flash-Decoding for long-context inference, 2023.
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
from course_lib.kernels.quantised.parts import EACH_ITS_OWN, block_number, int4_numbers, normalised_queries
from course_lib.kernels.quantised.tiles import int4_cuts, int4_plan, quantised_compile_cases
from course_lib.kernels.quantised.warps import INT4_NUMBERS, add_warps, add_weights, for_every_warp, merge_sums

GROUP = tl.constexpr(formats.GROUP)
# As for e4m3: float16 ends at 2^16, and keeps all digits down to 2^-14.
LARGEST_WEIGHT = tl.constexpr(14.0)
GROUP_WORDS = {1: torch.int16, 2: torch.int32, 4: torch.int64}  # that hold a float16 for each group of a value


@triton.jit
def quarters_of(rows):
    """The four quarters of [ROWS, COLUMNS]: the columns 4i, 4i + 1, 4i + 2 and 4i + 3, [ROWS, COLUMNS / 4] each."""
    even, odd = tl.split(tl.reshape(rows, (rows.shape[0], rows.shape[1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def query_quarters(query, WARPS: tl.constexpr):
    """The quarters of queries [BLOCK_M, HEAD_DIM] for every warp, [WARPS, HEAD_DIM / 4, BLOCK_M] each."""
    first, second, third, fourth = quarters_of(query)
    return (for_every_warp(first, WARPS), for_every_warp(second, WARPS), for_every_warp(third, WARPS),
            for_every_warp(fourth, WARPS))  # fmt: skip


@triton.jit
def load_quarters(pointers, mask):
    """The quarters of a tile, each of the shape of `pointers`, which point to the channels 4i."""
    found = ()
    for quarter in tl.static_range(4):
        found = found + (tl.load(pointers + quarter, mask=mask, other=0.0),)
    return found


@triton.jit
def key_products(keys, query, dtype: tl.constexpr):
    """Scores [WARPS, KEYS, BLOCK_M] of keys, quarters [WARPS, KEYS, K], and queries, quarters [WARPS, K, BLOCK_M].

    A score is a sum over all channels: over the first quarter of them, and then over the others.
    """
    scores = tl.dot(keys[0].to(dtype), query[0], input_precision=FLOAT32_PRECISION)
    for quarter in tl.static_range(1, 4):
        scores = tl.dot(keys[quarter].to(dtype), query[quarter], scores, input_precision=FLOAT32_PRECISION)
    return scores


@triton.jit
def add_values(totals, values, weights, rescale):
    """A group's accumulator, quarters [WARPS, 16, BLOCK_M], after one more tile of its values, [WARPS, 16, KEYS]."""
    rescale = rescale[:, None]
    added = ()
    for quarter in tl.static_range(4):
        value_tile = values[quarter].to(weights.dtype)  # [WARPS, 16, KEYS]
        total = tl.dot(value_tile, weights, totals[quarter] * rescale, input_precision=FLOAT32_PRECISION)
        added = added + (total,)
    return added


@triton.jit
def one_more(totals, total):
    """The accumulators of the groups so far, and of one more."""
    return totals + (total,)


@triton.jit
def attend_to_window(query, windows, count, scale_log2, WARPS: tl.constexpr):
    """The softmax's state of each warp after its part of a window, of which `count` keys exist.

    windows: (those of the keys, those of the values, the first row of this one in both).
    Returns running_max [WARPS, BLOCK_M], weight_sums [WARPS, 8, BLOCK_M] and half of each group's accumulator.
    """
    BLOCK_M: tl.constexpr = query.shape[0]
    HEAD_DIM: tl.constexpr = query.shape[1]
    KEYS: tl.constexpr = GROUP // WARPS
    key_window, value_window, first_row = windows
    rows = tl.arange(0, WARPS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]  # [WARPS, KEYS]
    places = (first_row + rows) * HEAD_DIM
    words = 4 * tl.arange(0, HEAD_DIM // 4)
    group_words = 4 * tl.arange(0, GROUP // 4)
    exists = rows < count
    keys = load_quarters(key_window + (places[:, :, None] + words[None, None, :]), exists[:, :, None])
    scores = key_products(keys, query_quarters(query, WARPS), query.dtype) * scale_log2
    scores = tl.where(exists[:, :, None], scores, float("-inf"))  # [WARPS, KEYS, BLOCK_M]
    nothing = tl.full([WARPS, BLOCK_M], float("-inf"), tl.float32)
    running_max, weights, rescale = weigh(scores, nothing, 1.0, MASKED=True, EXPONENT=LARGEST_WEIGHT)
    weight_sums = add_weights(tl.zeros([WARPS, 8, BLOCK_M], tl.float32), weights, rescale)
    weights = weights.to(query.dtype)
    empty = tl.zeros([WARPS, GROUP // 4, BLOCK_M], tl.float32)
    totals = ()
    for group in tl.static_range(HEAD_DIM // GROUP):
        pointers = value_window + (places[:, None, :] + group * GROUP + group_words[None, :, None])
        values = load_quarters(pointers, exists[:, None, :])
        added = add_values((empty, empty, empty, empty), values, weights, rescale)
        totals = one_more(totals, halved(added))  # halves, as numbers from codes are
    return running_max, weight_sums, totals


@triton.jit
def by_channel(words):
    """Scales or middles of keys, int64 words [WARPS, K] of four channels each: pairs of two and two [WARPS, 1, K]."""
    return words.to(tl.int32)[:, None, :], (words >> 32).to(tl.int32)[:, None, :]


@triton.jit
def by_token(words, GROUP_INDEX: tl.constexpr):
    """Scales or middles of values, words [WARPS, KEYS] of a token's groups: a group's pair, twice [WARPS, 1, KEYS]."""
    pairs = words
    if words.dtype == tl.int64:
        pairs = words >> (32 * (GROUP_INDEX // 2))
    pairs = pairs.to(tl.int32)[:, None, :]
    return pairs, pairs


@triton.jit
def halved(quarters):
    half = ()
    for quarter in tl.static_range(4):
        half = half + (quarters[quarter] * 0.5,)
    return half


@triton.jit
def merge_totals(totals, shares):
    """The accumulator [BLOCK_M, HEAD_DIM] of all warps, its columns in order."""
    GROUPS: tl.constexpr = len(totals)
    found = ()
    for group in tl.static_range(GROUPS):
        found = found + (side_by_side(totals[group]) * shares[:, None, :, None, None],)  # [WARPS, 16, BLOCK_M, 2, 2]
    if GROUPS == 1:
        rows = tl.permute(found[0], (2, 1, 3, 4, 0))
    elif GROUPS == 2:
        rows = tl.permute(tl.join(found[0], found[1]), (2, 5, 1, 3, 4, 0))  # [BLOCK_M, 2, 16, 2, 2, WARPS]
    else:
        rows = tl.permute(side_by_side(found), (2, 5, 6, 1, 3, 4, 0))
    return add_warps(tl.reshape(rows, (shares.shape[1], GROUPS * GROUP, shares.shape[0])))


@triton.jit
def side_by_side(tiles):
    """Four tiles as one with two more axes, whose places 00, 01, 10 and 11 are the four."""
    return tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))


@triton.jit
def tiles_of_warps(tables, table_stride, batch, index, last_tile, key_head, key_heads, blocks, WARPS: tl.constexpr,
                   KEYS: tl.constexpr, PAGED: tl.constexpr):  # fmt: skip
    """Where the tiles from `index` on lie among all of the cache, one for each warp: [WARPS].

    Beyond the last tile a warp gets that once more, which is sure to exist, and gives its keys no weight.
    """
    TILES: tl.constexpr = GROUP // KEYS  # in a block
    tiles = tl.maximum(tl.minimum(index + tl.arange(0, WARPS), last_tile - 1), 0)
    block = block_number(tables, table_stride, batch, tiles // TILES, last_tile // TILES, key_head, key_heads, blocks,
                         PAGED)  # fmt: skip
    return block * TILES + tiles % TILES


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
    channels. value_scales, value_middles: words of a token's groups. blocks: of a sequence of a contiguous cache; of no
    use in pages. BLOCK_N: keys of all warps' tiles.
    """
    WORDS: tl.constexpr = HEAD_DIM // 4
    KEYS: tl.constexpr = min(GROUP, INT4_NUMBERS // HEAD_DIM)
    WARPS: tl.constexpr = BLOCK_N // KEYS
    batch = tl.program_id(2).to(tl.int64)
    key_head, heads, is_head = packed_heads(heads_per_key_head, BLOCK_M)
    key_heads = query_heads // heads_per_key_head
    length = tl.load(lengths_pointer + batch).to(tl.int32)
    begin, end = whole_tiles(length, tl.program_id(1), tl.num_programs(1), BLOCK_N)
    last_tile = end // GROUP * (GROUP // KEYS)  # of those that are in codes: the keys behind them are in the window
    first_tile = begin // KEYS
    tile = tiles_of_warps(tables_pointer, table_stride, batch, first_tile, last_tile, key_head, key_heads, blocks,
                          WARPS, KEYS, PAGED)  # fmt: skip

    query = load_queries((query_pointer + batch * query_batch_stride, query_head_stride), heads, is_head, HEAD_DIM,
                         HEAD_DIM)  # fmt: skip

    # The window first, so that the loop needs no mask: of the split that ends with it, and not of empty ones behind.
    waiting = tl.where(begin < end, end - last_tile * KEYS, 0)
    windows = (key_window, value_window, (batch * key_heads + key_head) * GROUP)
    running_max = tl.full([WARPS, BLOCK_M], float("-inf"), tl.float32)
    weight_sums = tl.zeros([WARPS, 8, BLOCK_M], tl.float32)
    empty = tl.zeros([WARPS, GROUP // 4, BLOCK_M], tl.float32)
    totals = ()
    for _ in tl.static_range(HEAD_DIM // GROUP):
        totals = one_more(totals, (empty, empty, empty, empty))
    if waiting > 0:
        running_max, weight_sums, totals = attend_to_window(query, windows, waiting, scale_log2, WARPS)

    query, score_scale = normalised_queries(query)  # [BLOCK_M, HEAD_DIM], [BLOCK_M]
    score_scale = (score_scale * (2.0 * scale_log2))[None, None, :]
    dtype: tl.constexpr = query.dtype
    query = query_quarters(query, WARPS)
    warp, words, tokens = tl.arange(0, WARPS), tl.arange(0, WORDS), tl.arange(0, KEYS)
    group_words = tl.arange(0, GROUP // 4)
    key_places = tokens[None, :, None] * WORDS + words[None, None, :]  # [1, KEYS, HEAD_DIM / 4]
    value_places = tokens[None, None, :] * WORDS + group_words[None, :, None]  # [1, 16, KEYS]
    for index in tl.range(first_tile, last_tile, WARPS):
        # Carried to the next step, or the loads that need it would not be asked for ahead.
        next_tile = tiles_of_warps(tables_pointer, table_stride, batch, index + WARPS, last_tile, key_head, key_heads,
                                   blocks, WARPS, KEYS, PAGED)  # fmt: skip
        codes = tile[:, None, None] * (KEYS * WORDS)
        channels = tile[:, None] // (GROUP // KEYS) * WORDS + words[None, :]  # [WARPS, HEAD_DIM / 4]
        key_words = tl.load(key_codes + codes + key_places, eviction_policy="evict_first")
        scales, middles = tl.load(key_scales + channels), tl.load(key_middles + channels)
        keys = int4_numbers(key_words, by_channel(scales), by_channel(middles), EACH_ITS_OWN, dtype, ASSEMBLY)
        scores = key_products(keys, query, dtype) * score_scale
        scores = tl.where((index + warp < last_tile)[:, None, None], scores, float("-inf"))  # [WARPS, KEYS, BLOCK_M]
        running_max, weights, rescale = weigh(scores, running_max, 1.0, MASKED=True, EXPONENT=LARGEST_WEIGHT)
        weight_sums = add_weights(weight_sums, weights, rescale)
        weights = weights.to(dtype)
        places = tile[:, None] * KEYS + tokens[None, :]  # [WARPS, KEYS]
        scales, middles = tl.load(value_scales + places), tl.load(value_middles + places)
        new_totals = ()
        for group in tl.static_range(HEAD_DIM // GROUP):
            pointers = value_codes + codes + value_places + group * (GROUP // 4)
            value_words = tl.load(pointers, eviction_policy="evict_first")
            values = int4_numbers(value_words, by_token(scales, group), by_token(middles, group), group % 2, dtype,
                                  ASSEMBLY)  # fmt: skip
            new_totals = one_more(new_totals, add_values(totals[group], values, weights, rescale))
        totals = new_totals
        tile = next_tile

    running_max, running_sum, shares = merge_sums(running_max, weight_sums)
    finish_split(running_max, running_sum, 2.0 * merge_totals(totals, shares), heads, is_head,
                 (output_pointer + batch * output_batch_stride, output_head_stride),
                 lse_pointer if lse_pointer is None else lse_pointer + batch * query_heads,
                 (partial_outputs, partial_lses, arrivals), batch, query_heads, heads_per_key_head,
                 HEAD_DIM, GROUP_ROWS)  # fmt: skip


@kept
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


@kept
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
    groups = GROUP_WORDS[cache.value_scales.shape[-1]]
    return cache._replace(
        key_codes=cache.key_codes.view(torch.int16), value_codes=cache.value_codes.view(torch.int16),
        key_scales=cache.key_scales.view(torch.int64), key_middles=cache.key_middles.view(torch.int64),
        value_scales=cache.value_scales.view(groups), value_middles=cache.value_middles.view(groups),
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
                | {f"{side}_{part}": kind for side, kind in (("key", "*i64"), ("value", f"*i{case[1] // 4}"))
                   for part in ("scales", "middles")}
                | {f"{side}_window": window for side in ("key", "value")})  # fmt: skip

    return quantised_compile_cases(
        int4_decode_kernel, int4_cuts, types, lambda case: {"PAGED": True, "ASSEMBLY": True}, wanted, slow
    )
