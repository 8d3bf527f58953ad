"""FlashAttention, forward, for Hopper: copies, matrix products and exponentials at the same time.

The algorithm is that of `flash_attention`; what changes is who does what, and when. A program is split into groups of
warps with one task each (warp specialisation), which meet at barriers:

    producer      one warp     asks the copy engine (TMA) for tiles of Q, K and V, as buffers fall free
    consumers     2 or 3 × 4   64 queries each: scores, softmax, output; the copy engine takes the finished tile

Four things then happen at once that used to happen in turn:

    copies       K and V of later blocks arrive while earlier ones are used; Q of the next tile, too.
    overlap      the scores of block i are asked for before the product of block i - 1's weights with its values; while
                 that product runs, the softmax of block i is computed.
    ping-pong    consumers take turns at the matrix units: one multiplies while the other takes exponentials. Where it
                 pays: see ARRANGEMENTS. Buffers are freed and turns given by named barriers.
    tiles        a program stays for many tiles, and one tile's end overlaps the next one's beginning.

Registers go where they are needed: the producer gives its own back, so that a consumer thread has 240 (with three
consumers, 160) for the scores and the accumulator.

FLOPs: 4 · batch · query_heads · query_length · key_length · head_dim, half of it when causal. Per 128 × 128 block at
head dimension 128 the matrix units need 2048 cycles of a multiprocessor, and its 16 exponentials per cycle 1024: hidden
behind the products, these cost nothing; one after the other, a third of the time. At head dimension 64 both need 1024.
Bytes: as for `flash_attention`. Tiles are handed out such that the keys and values in use stay in the L2 cache.

Source: Shah et al., FlashAttention-3, arXiv 2407.08608, Algorithm 2.
"""

import torch
import triton

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.attention_checks import check_attention_inputs
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.common.softmax import PAPERS_THRESHOLD, check_threshold, scale_in_log2
from course_lib.kernels.gluon.names import fence_async_shared, gl, gluon
from course_lib.kernels.gluon.parts import new_barriers
from course_lib.kernels.hopper.bundles import Barriers, Buffers, Sizes, Tickets
from course_lib.kernels.hopper.consumer import consume
from course_lib.kernels.hopper.launch import Arrangement, descriptor, descriptor_type, ticket_counter
from course_lib.kernels.hopper.limits import hopper_refusal
from course_lib.kernels.hopper.parts import GROUP_ROWS, TICKET_SLOTS
from course_lib.kernels.hopper.producer import produce

# Triton compiles anew for sizes that are 1 or multiples of 16; these would make dozens of kernels that don't differ.
SIZES = ("batch", "query_heads", "heads_per_key_head", "query_length", "key_length", "heads_at_once")

SCALES = ("query_scales", "key_scales", "value_scales")  # of 8-bit inputs


@gluon.jit
def shared_memory(descriptors, STAGES: gl.constexpr, GROUPS: gl.constexpr, QUERY_BUFFERS: gl.constexpr):
    """A program's buffers, barriers and tickets."""
    queries, keys, values, outputs = descriptors
    dtype: gl.constexpr = queries.dtype
    query_shape: gl.constexpr = [QUERY_BUFFERS * GROUPS] + queries.block_type.shape  # [.., 1, 1, 64, HEAD_DIM]
    key_shape: gl.constexpr = [STAGES] + keys.block_type.shape  # [.., 1, 1, BLOCK_N, HEAD_DIM]
    query_tiles = gl.allocate_shared_memory(dtype, query_shape, queries.layout)
    key_tiles = gl.allocate_shared_memory(dtype, key_shape, keys.layout)
    value_tiles = gl.allocate_shared_memory(dtype, [STAGES] + values.block_type.shape, values.layout)
    output_tiles = query_tiles
    if outputs.dtype != dtype:  # 8-bit queries leave too little room for a 16-bit output
        output_tiles = gl.allocate_shared_memory(outputs.dtype, [GROUPS] + outputs.block_type.shape, outputs.layout)
    slots = gl.allocate_shared_memory(gl.int32, [TICKET_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = Barriers(
        query_ready=new_barriers(QUERY_BUFFERS * GROUPS, 1),
        query_free=new_barriers(QUERY_BUFFERS * GROUPS, 1),
        key_ready=new_barriers(STAGES, 1),
        value_ready=new_barriers(STAGES, 1),
    )
    tickets = Tickets(slots, ready=new_barriers(TICKET_SLOTS, 1), free=new_barriers(TICKET_SLOTS, GROUPS))
    fence_async_shared()
    buffers = Buffers(query_tiles, key_tiles, value_tiles, output_tiles)
    return buffers, barriers, tickets


@gluon.jit(do_not_specialize=(*SIZES, "keys_before", "keys_after"))
def flash_attention_hopper_kernel(
    queries, keys, values, outputs, sink_pointer, lse_pointer, counter, query_scales, key_scales, value_scales,
    batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once,
    keys_before, keys_after, scale_log2,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, QUERY_BUFFERS: gl.constexpr, TURNS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, THRESHOLD: gl.constexpr = 0.0,
):  # fmt: skip
    """One program per multiprocessor: makes buffers and barriers, and sends the groups of warps to their tasks."""
    descriptors = queries, keys, values, outputs
    buffers, barriers, tickets = shared_memory(descriptors, STAGES, GROUPS, QUERY_BUFFERS)
    sizes = Sizes(batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once)
    band = keys_before, keys_after
    scales = scale_log2, query_scales, key_scales, value_scales
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (outputs, sink_pointer, lse_pointer, buffers, barriers, tickets, sizes, band, None, scales,
                       0, GROUPS, QUERY_BUFFERS, TURNS, THRESHOLD)),
            (consume, (outputs, sink_pointer, lse_pointer, buffers, barriers, tickets, sizes, band, None, scales,
                       1, GROUPS, QUERY_BUFFERS, TURNS, THRESHOLD)),
            (produce, (descriptors, buffers, barriers, tickets, counter, sizes, band, None,
                       STAGES, GROUPS, QUERY_BUFFERS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (outputs, sink_pointer, lse_pointer, buffers, barriers, tickets, sizes, band, None, scales,
                       0, GROUPS, QUERY_BUFFERS, TURNS, THRESHOLD)),
            (consume, (outputs, sink_pointer, lse_pointer, buffers, barriers, tickets, sizes, band, None, scales,
                       1, GROUPS, QUERY_BUFFERS, TURNS, THRESHOLD)),
            (consume, (outputs, sink_pointer, lse_pointer, buffers, barriers, tickets, sizes, band, None, scales,
                       2, GROUPS, QUERY_BUFFERS, TURNS, THRESHOLD)),
            (produce, (descriptors, buffers, barriers, tickets, counter, sizes, band, None,
                       STAGES, GROUPS, QUERY_BUFFERS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# At head dimension 64 a block takes as long in exponentials as in products: three consumers keep both busier than two,
# and turns at the matrix units would only hold them up.
ARRANGEMENTS = {  # by head dimension, padded
    64: Arrangement(128, stages=4, query_buffers=2, consumers=3, turns=False),
    128: Arrangement(128, stages=2, query_buffers=2, consumers=2, turns=True),
    256: Arrangement(64, stages=2, query_buffers=1, consumers=2, turns=True),
}
L2_SHARE_BYTES = 16 * 2**20  # of keys and values in use at a time: a third of an H200's L2 cache


def flash_attention_hopper(
    query, key, value, *, causal=False, window=None, scale=None, sink=None, return_lse=False, arrangement=None,
    threshold=0.0, heads_at_once=None,
):  # fmt: skip
    """Exact softmax attention on Hopper. Arguments and results are those of `flash_attention`, but for `tiles`.

    Args:
        query: [batch, query_heads, query_length, head_dim], float16 or bfloat16; head_dim from 16 to 256. A multiple of
            16 bytes in address and strides, the last dimension contiguous.
        key, value: [batch, key_heads, key_length, head_dim], likewise; query_heads is a multiple of key_heads.
        causal, window, scale, sink, return_lse: see `flash_attention`.
        arrangement: an `Arrangement` to use; by head dimension when None.
        threshold: of lazy rescaling, see `common.softmax.weigh`: 64 rows at a time are multiplied only if one of them
            has a score that exceeds its maximum by more than that, in powers of 2. 0: at every block. At head dimension
            64 without a mask Triton 3.9 moves the exponentials behind the branch, where no product hides them.
        heads_at_once: on how many query heads to work at a time; as many as leave their keys and values in the L2
            cache when None. 1: head by head.

    Returns the output, contiguous, or (output, log-sum-exp [batch, query_heads, query_length]), the same bits at every
    run. One difference: a NaN or an infinity in a value that a mask hides can reach the queries of the same tile, since
    its weight is 0, and 0 · NaN is NaN.

    Raises the ValueErrors of `flash_attention`, a ValueError for inputs that only `flash_attention` takes, and a
    RuntimeError where this machine cannot run the kernel.
    """
    check_attention_inputs(query, key, value, window=window, scale=scale, sink=sink)
    check_threshold(threshold)
    if heads_at_once is not None and heads_at_once not in range(1, query.shape[0] * query.shape[1] + 1):
        raise ValueError(
            f"heads_at_once is {heads_at_once!r}; it must be None or a number of the heads of all batches."
        )
    refusal = hopper_refusal(query, key, value)
    if refusal is not None:
        raise refusal.error(f"flash_attention_hopper: {refusal.reason} flash_attention takes these inputs.")
    block_d = padded_head_dim(query.shape[3])
    arrangement = arrangement or ARRANGEMENTS[block_d]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if return_lse else None
    values = descriptor(value, arrangement.key_rows, block_d)
    launch(query, key, values, output, lse, (None, None, None), causal, window, scale, arrangement, sink,
           threshold, heads_at_once)  # fmt: skip
    return (output, lse) if return_lse else output


def launch(query, key, values, output, lse, scales, causal, window, scale, arrangement, sink=None,
           threshold=0.0, heads_at_once=None) -> None:  # fmt: skip
    """Starts the kernel on checked tensors; `values` comes as the copy engine's descriptor.

    scales: of 8-bit queries, keys and values, or three times None.
    """
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    heads_per_key_head = query_heads // key_heads
    block_d = padded_head_dim(head_dim)
    tiles = triton.cdiv(query_length, GROUP_ROWS.value * arrangement.consumers) * batch * query_heads
    if window is not None:
        window = min(window, query_length + key_length)  # sees as much, and sums with it stay within 32 bits
    programs = min(tiles, multiprocessor_count(query.device))
    flash_attention_hopper_kernel[(programs,)](
        descriptor(query, GROUP_ROWS.value, block_d), descriptor(key, arrangement.key_rows, block_d), values,
        descriptor(output, GROUP_ROWS.value, block_d), sink, lse, ticket_counter(query.device), *scales,
        batch, query_heads, heads_per_key_head, query_length, key_length,
        heads_at_once or heads_in_cache(query, key), window, 0 if causal else window, scale_in_log2(scale, head_dim),
        **arrangement.settings(), THRESHOLD=float(threshold), num_warps=4, maxnreg=arrangement.registers[2],
    )  # fmt: skip


def heads_in_cache(query, key) -> int:
    """How many query heads to work on at a time, so that their keys and values stay in the L2 cache."""
    key_bytes = 2 * key.shape[2] * key.shape[3] * key.element_size() * key.shape[1] // query.shape[1]  # per query head
    return min(query.shape[0] * query.shape[1], max(1, L2_SHARE_BYTES // max(1, key_bytes)))


def padded_head_dim(head_dim: int) -> int:
    """The width of a tile in shared memory: the copy engine fills what is more than head_dim with zeros."""
    return max(64, triton.next_power_of_2(head_dim))


# Beside scores, weights and accumulator a few numbers of the tile may find no register, such as where its output goes:
# they are set aside before the loop over keys and fetched after it. Triton 3.6 needs 24 bytes at most, 3.9 needs 56 (a
# window at head dimension 128, and head dimension 256).
FEW_SPILLS = 56


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: each arrangement, with a sink and the masks that need the most registers."""
    causal = {"keys_after": "i32", "sink_pointer": "*fp32"}
    window = {"keys_before": "i32", **causal}
    return [
        compile_case(64, ARRANGEMENTS[64], "fp16", **window),
        compile_case(64, ARRANGEMENTS[64], "bf16", **causal),
        compile_case(128, ARRANGEMENTS[128], "bf16", **window),
        compile_case(256, ARRANGEMENTS[256], "bf16", **causal),
        compile_case(64, ARRANGEMENTS[64], "bf16", keys_after="i32", threshold=PAPERS_THRESHOLD),
        compile_case(128, ARRANGEMENTS[128], "bf16", keys_after="i32", threshold=PAPERS_THRESHOLD),
    ]


def compile_case(
    block_d, arrangement, kind, keys_before=None, keys_after=None, sink_pointer=None, threshold=0.0
) -> CompileCase:  # fmt: skip
    """kind: "fp16" or "bf16", or "fp8e4nv" with an output in bf16 and with scales."""
    key_rows, fp8 = arrangement.key_rows, kind == "fp8e4nv"
    types = {
        "queries": descriptor_type(kind, GROUP_ROWS.value, block_d), "keys": descriptor_type(kind, key_rows, block_d),
        "values": descriptor_type(kind, *((block_d, key_rows) if fp8 else (key_rows, block_d))),
        "outputs": descriptor_type("bf16" if fp8 else kind, GROUP_ROWS.value, block_d),
        "lse_pointer": "*fp32", "counter": "*i32", "scale_log2": "fp32",
    }  # fmt: skip
    types |= dict.fromkeys(SIZES, "i32") | (dict.fromkeys(SCALES, "*fp32") if fp8 else {})
    given = {"keys_before": keys_before, "keys_after": keys_after, "sink_pointer": sink_pointer}
    types |= {name: kind for name, kind in given.items() if kind}
    constants = {name: None for name, kind in given.items() if kind is None} | arrangement.settings()
    constants |= {"THRESHOLD": threshold}
    constants |= {} if fp8 else dict.fromkeys(SCALES)
    return CompileCase(
        flash_attention_hopper_kernel, types, constants, num_warps=4, archs=(90,), instruction="wgmma",
        max_spill_bytes=FEW_SPILLS, options={"maxnreg": arrangement.registers[2]},
        label=f"{kind} {block_d} {given} {arrangement.consumers} consumers" + (f" {threshold=:g}" if threshold else ""),
    )  # fmt: skip
