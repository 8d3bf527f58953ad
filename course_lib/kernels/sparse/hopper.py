"""Attention over block lists on Hopper, forward: the kernel of `flash_attention_hopper`, by a tile's lists.

Producer and consumers are the same. Where they count the blocks of keys that a tile of queries reads, they read them
off the two lists instead (`hopper.lists`): the partial tiles first, each under its mask, then the full ones.

FLOPs and bytes: as for the portable kernel, `sparse.forward`. Which tile comes next is looked up by the producer alone,
which runs ahead of the consumers and hides the time that it takes; they look up the masks of partial tiles.
Sources: Shah et al., FlashAttention-3, arXiv 2407.08608; Dong et al., Flex Attention, arXiv 2412.05496.
"""

import triton

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.common.softmax import scale_in_log2
from course_lib.kernels.gluon.names import gl, gluon
from course_lib.kernels.hopper.bundles import Sizes
from course_lib.kernels.hopper.consumer import consume
from course_lib.kernels.hopper.flash import SIZES, heads_in_cache, padded_head_dim, shared_memory
from course_lib.kernels.hopper.launch import Arrangement, descriptor, descriptor_type, ticket_counter
from course_lib.kernels.hopper.lists import KEY_ROWS, QUERY_ROWS
from course_lib.kernels.hopper.parts import GROUP_ROWS
from course_lib.kernels.hopper.producer import produce
from course_lib.kernels.sparse.parts import LIST_TYPES

BLOCK = QUERY_ROWS.value, KEY_ROWS.value  # of the lists that the kernel takes


@gluon.jit(do_not_specialize=(*SIZES, "list_batch_stride", "list_head_stride"))
def listed_tiles_hopper_kernel(
    queries, keys, values, outputs, lse_pointer, counter,
    full_counts_pointer, full_indices_pointer,
    partial_counts_pointer, partial_indices_pointer, partial_masks_pointer, masks_pointer,
    batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once,
    list_batch_stride, list_head_stride, scale_log2,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, QUERY_BUFFERS: gl.constexpr, TURNS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor, as `flash_attention_hopper_kernel`."""
    descriptors = queries, keys, values, outputs
    buffers, barriers, tickets = shared_memory(descriptors, STAGES, GROUPS, QUERY_BUFFERS)
    sizes = Sizes(batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once)
    band = None, None
    lists = (full_counts_pointer, full_indices_pointer, partial_counts_pointer, partial_indices_pointer,
             partial_masks_pointer, masks_pointer, (list_batch_stride, list_head_stride))  # fmt: skip
    scales = scale_log2, None, None, None
    gl.warp_specialize([
        (consume, (outputs, None, lse_pointer, buffers, barriers, tickets, sizes, band, lists, scales,
                   0, GROUPS, QUERY_BUFFERS, TURNS)),
        (consume, (outputs, None, lse_pointer, buffers, barriers, tickets, sizes, band, lists, scales,
                   1, GROUPS, QUERY_BUFFERS, TURNS)),
        (produce, (descriptors, buffers, barriers, tickets, counter, sizes, band, lists,
                   STAGES, GROUPS, QUERY_BUFFERS)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# By head dimension, padded; measured on an H200. Two consumers, of 64 queries each, share a tile of the lists.
ARRANGEMENTS = {
    64: Arrangement(128, stages=4, query_buffers=2, consumers=2, turns=False),
    128: Arrangement(128, stages=2, query_buffers=2, consumers=2, turns=False),
    256: Arrangement(64, stages=2, query_buffers=1, consumers=2, turns=True),
}


def launch(query, key, value, output, lse, lists, list_strides, scale, arrangement=None) -> None:
    """Starts the kernel on checked tensors that `hopper_refusal` has nothing against."""
    batch, query_heads, query_length, head_dim = query.shape
    block_d = padded_head_dim(head_dim)
    arrangement = arrangement or ARRANGEMENTS[block_d]
    tiles = triton.cdiv(query_length, BLOCK[0]) * batch * query_heads
    listed_tiles_hopper_kernel[(min(tiles, multiprocessor_count(query.device)),)](
        descriptor(query, GROUP_ROWS.value, block_d), descriptor(key, arrangement.key_rows, block_d),
        descriptor(value, arrangement.key_rows, block_d), descriptor(output, GROUP_ROWS.value, block_d), lse,
        ticket_counter(query.device), *lists.full[:2], *lists.partial, lists.masks,
        batch, query_heads, query_heads // key.shape[1], query_length, key.shape[2], heads_in_cache(query, key),
        *list_strides, scale_in_log2(scale, head_dim),
        **arrangement.settings(), num_warps=4, maxnreg=arrangement.registers[2],
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    return [compile_case(block_d, arrangement) for block_d, arrangement in ARRANGEMENTS.items()]


def compile_case(block_d: int, arrangement: Arrangement) -> CompileCase:
    rows = {"queries": GROUP_ROWS.value, "outputs": GROUP_ROWS.value}
    rows |= {"keys": arrangement.key_rows, "values": arrangement.key_rows}
    types = {name: descriptor_type("bf16", count, block_d) for name, count in rows.items()}
    types |= {"lse_pointer": "*fp32", "counter": "*i32", "scale_log2": "fp32", **LIST_TYPES}
    types |= dict.fromkeys((*SIZES, "list_batch_stride", "list_head_stride"), "i32")
    spilled = {128: 8, 256: 72}  # bytes a thread: with Triton 3.6 and with 3.9
    return CompileCase(
        listed_tiles_hopper_kernel, types, arrangement.settings(), num_warps=4, archs=(90,), instruction="wgmma",
        max_spill_bytes=spilled.get(block_d, 0), options={"maxnreg": arrangement.registers[2]}, label=f"bf16 {block_d}",
    )  # fmt: skip
