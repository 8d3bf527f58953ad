"""Latent decode on Hopper, the launcher: the decode of `latent_decode_reference`, by `hopper_kernel`.

FLOPs: 2 · heads · 1,088 per key and query token. Bytes: 1,152 per key, for each 64 rows of heads and query tokens; two
tiles of rows of one sequence run side by side, and the second finds the keys in the L2 cache. With 128 heads a key is
278,528 FLOPs for its 1,152 bytes, 242 a byte, about as many as an H100 does while its memory brings one.

A program is 64 rows and one split of the keys. Where there are splits, their parts are merged by a second kernel.

Measured on an H100 in bf16, pages of 64 tokens, beside FlashInfer 0.7.2's "fa3" in turns, batch × heads × context, when
the maximum did not yet go ahead of the weights: 1 × 128 × 32k 38 µs (47), 16 × 128 × 8k 438 TFLOP/s (430),
64 × 128 × 4k 504 (507), 128 × 128 × 4k 516 (523), 64 × 16 × 8k 2.74 TB/s (2.71).
An H200 multiplies as fast and reads 4.2 TB/s. There 64 × 128 × 4k takes 138 µs, and 128 sequences with 128 heads 100 µs
at 1,151 tokens, 264 at 4k (553 TFLOP/s) and 1,978 at 32k (591). With the scores of both groups behind the other group's
product, the last two took 270 and 2,110; with the right group's first, 1,151 tokens took 102: see `scores_first`.

A block of 64 keys takes 3,250 cycles on the H200 at 128 × 128 × 4k. The matrix units have work for 2,176 of them, and
shared memory, at 128 bytes a cycle, for 2,370: 1,152 for scores, whose operands it cannot bring faster than they are
multiplied, 640 for the output, 576 for the copies. In about 700 cycles of a softmax the matrix units wait, since both
buffers are taken: a block's is free after its last product only. Copies alone take 184 of the 266 µs, 92 from the L2
cache; all but the copies 256.

Tried on the H200 and slower: both groups' scores first (by a fifth, since the next copies begin late), one wait for all
chunks of a block (3 %), programs that go on to a second tile (1 to 6 %), the own block's weights from registers (even
to 3 %). Even at 4k: two chunks of the right group's scores first; a third warp group for scores and softmax alone, its
programs going on to a second tile (1,151 tokens took 97 µs with it, 32k 2,200).
On an H100, whose copies alone take 235 of 283 µs: fetching blocks into the L2 cache ahead of their copies (slower by a
quarter), the own product put off until the other group has its scores (4 % slower), a part of the queries kept in
registers (even).
Sources: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434 (the attention); the FlashMLA project's deep dive of April 2025
(the output shared between two warp groups, which it calls a seesaw).
"""

import functools
from copy import copy

import torch

from course_lib.kernels.common.cache_checks import check_indices, check_lengths, check_splits, check_tables
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.common.numbers import LOG2_E
from course_lib.kernels.gluon.limits import machine_refusal
from course_lib.kernels.gluon.names import TensorDescriptor
from course_lib.kernels.latent.checks import check_cache, check_output, check_query
from course_lib.kernels.latent.hopper_kernel import CHUNK_COLUMNS, REGISTERS_AT_START, latent_decode_hopper_kernel
from course_lib.kernels.latent.hopper_limits import ROPE_DIM, VALUE_DIM, latent_input_refusal
from course_lib.kernels.latent.hopper_parts import BOX, ROWS
from course_lib.kernels.latent.merge import merge_latent_splits


def latent_decode_hopper(
    query, cache, lengths, *, scale, causal=True, splits=None, return_lse=False, output=None, validate=True
):
    """Decode of multi-head latent attention on Hopper, cache contiguous: see `latent_decode_reference` for the meaning.

    Args:
        query: [batch, query_tokens, heads, 576], float16 or bfloat16, the last dimension contiguous.
        cache: [batch, capacity, 576], of query's dtype; address and strides are multiples of 16 bytes.
        lengths, scale, causal, splits, return_lse, output, validate: as for `latent_decode_attention`.

    Returns what `latent_decode_attention` returns, the same bits at every run.
    Raises its ValueErrors, a ValueError for inputs that only the portable kernel takes, and a RuntimeError where this
    machine cannot run the kernel.
    """
    refuse(machine_refusal(query.device))
    check_query(query, VALUE_DIM, scale)
    check_cache("cache", cache, "[batch, capacity, value_dim + rope_dim]", query)
    if cache.shape[0] != query.shape[0]:
        raise ValueError(f"cache has batch size {cache.shape[0]}; it must be that of query, {query.shape[0]}.")
    check_indices("lengths", lengths, "[batch]", (query.shape[0],), query.device)
    refuse(latent_input_refusal(query, cache))
    if validate:
        check_lengths(lengths, cache.shape[1], "the cache")
    return launch(query, cache, None, lengths, scale, causal, splits, return_lse, output)


def paged_latent_decode_hopper(
    query, pages, block_tables, lengths, *, scale, causal=True, splits=None, return_lse=False, output=None,
    validate=True,
):  # fmt: skip
    """`latent_decode_hopper` for a cache in pages [pages, page_size, 576], page_size a multiple of 64.

    block_tables: int32 or int64 [batch, max_blocks]; entries that a length doesn't reach are not read.
    """
    refuse(machine_refusal(query.device))
    check_query(query, VALUE_DIM, scale)
    check_cache("pages", pages, "[pages, page_size, value_dim + rope_dim]", query)
    check_indices("lengths", lengths, "[batch]", (query.shape[0],), query.device)
    check_indices("block_tables", block_tables, "[batch, max_blocks]", (query.shape[0], None), query.device)
    refuse(latent_input_refusal(query, pages, paged=True))
    if validate:
        check_tables(block_tables, lengths, *pages.shape[:2])
    return launch(query, pages, block_tables, lengths, scale, causal, splits, return_lse, output)


def refuse(refusal) -> None:
    if refusal is not None:
        raise refusal.error(f"latent_decode_hopper: {refusal.reason} latent_decode_attention takes these inputs.")


def launch(query, cache, tables, lengths, scale, causal, splits, return_lse, output):
    """Starts the kernel on checked tensors, and the one that merges splits; cache is the pool if tables are given."""
    check_splits(splits)
    check_output(output, query, VALUE_DIM)
    batch, tokens, heads, width = query.shape
    rows = tokens * heads
    packed = query.reshape(batch, rows, width)
    if packed.data_ptr() % 16 or packed.stride(2) != 1 or packed.stride(1) % 8 or packed.stride(0) % 8:
        packed = packed.contiguous().clone()
    capacity = cache.shape[1] if tables is None else tables.shape[1] * cache.shape[1]
    row_tiles = -(-rows // ROWS.value)
    if splits is None:
        splits = latent_splits(batch, row_tiles, capacity, multiprocessor_count(query.device))
    if output is None:
        output = torch.empty(batch, tokens, heads, VALUE_DIM, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, tokens, heads, dtype=torch.float32, device=query.device) if return_lse else None
    partial_outputs, partial_lses = output, lse
    if splits > 1:
        partial_outputs = torch.empty(splits, batch, rows, VALUE_DIM, dtype=torch.float32, device=query.device)
        partial_lses = torch.empty(splits, batch, rows, dtype=torch.float32, device=query.device)
    chunk = CHUNK_COLUMNS
    pairs = -(-capacity // (2 * ROWS.value)) // splits
    # Without a causal mask all rows see what the last token sees: as if they were one token's.
    heads_of_token, masked_tokens = (heads, tokens) if causal else (rows, 1)
    latent_decode_hopper_kernel[(row_tiles, splits, batch)](
        descriptor(packed, chunk), descriptor(packed, ROPE_DIM), descriptor(cache, chunk), descriptor(cache, ROPE_DIM),
        tables, 0 if tables is None else tables.stride(0), lengths, partial_outputs, partial_lses,
        rows, heads_of_token, masked_tokens, cache.shape[1], scale * LOG2_E.value,
        CHUNK=chunk, SCORES_FIRST=scores_first(row_tiles, pairs), num_warps=4, maxnreg=REGISTERS_AT_START,
    )  # fmt: skip
    if splits > 1:
        merge_latent_splits(partial_outputs.view(splits, -1, VALUE_DIM), partial_lses.view(splits, -1), output, lse)
    return (output, lse) if return_lse else output


def scores_first(row_tiles: int, pairs: int) -> bool:
    """Whether the right group asks for its scores before it multiplies by the left group's block.

    It then has them when the left group has its maximum, but the first pair of a program takes longer. Measured on an
    H200 with two tiles of rows: 9 pairs of blocks 2 % slower, 32 even to 2 % faster, 256 pairs 6 % faster.
    """
    return row_tiles > 1 and pairs >= SCORES_FIRST_PAIRS


SCORES_FIRST_PAIRS = 32


@functools.cache
def latent_splits(batch: int, row_tiles: int, longest: int, multiprocessors: int) -> int:
    """Into how many parts to split the keys: the number with the least estimated time, the smaller of equals.

    The numbers were measured on an H100: a pair of blocks takes 4.3 µs where 128 heads share them.
    """
    pairs = max(1, -(-longest // (2 * ROWS.value)))
    return min(range(1, min(pairs, 128) + 1),
               key=lambda splits: estimated_microseconds(splits, batch, row_tiles, pairs, multiprocessors))  # fmt: skip


def estimated_microseconds(splits: int, batch: int, row_tiles: int, pairs: int, multiprocessors: int) -> float:
    """Of a decode step: waves of programs, each a start and its pairs of blocks, and the merge."""
    programs = batch * row_tiles * splits
    waves = -(-programs // multiprocessors)
    pair = max(PAIR_MICROSECONDS, min(programs, multiprocessors) / row_tiles * PAIR_DRAM_MICROSECONDS)
    merged_bytes = 2 * 4 * splits * batch * row_tiles * ROWS.value * VALUE_DIM
    merge = MERGE_MICROSECONDS + merged_bytes / MERGE_BYTES_PER_MICROSECOND if splits > 1 else 0
    return waves * (-(-pairs // splits) * pair + START_MICROSECONDS) + merge


PAIR_MICROSECONDS = 4.3  # two blocks of keys, copied and computed
PAIR_DRAM_MICROSECONDS = 128 * 576 * 2 / 4.2e6  # by memory, for each program of those that run at once
START_MICROSECONDS = 4.0
MERGE_MICROSECONDS = 2.0
MERGE_BYTES_PER_MICROSECOND = 3.5e6


def descriptor(tensor: torch.Tensor, columns: int) -> TensorDescriptor:
    """What the copy engine needs to know of a tensor [batch or pages, length, 576] to move boxes [1, 64, columns]."""
    known = copy(descriptor_like(tensor.shape, tensor.stride(), tensor.dtype, columns))
    known.base = tensor
    return known


@functools.lru_cache(1024)
def descriptor_like(shape, strides, dtype, columns) -> TensorDescriptor:
    """A descriptor for tensors like this, checked once and not at every launch; its own tensor is a stand-in."""
    strides = [stride if size > 1 else shape[2] for size, stride in zip(shape[:2], strides)]
    return TensorDescriptor(
        torch.empty(1, dtype=dtype), list(shape), [*strides, 1], [1, ROWS.value, columns], BOX.value
    )
