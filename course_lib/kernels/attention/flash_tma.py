"""FlashAttention, forward, on Hopper and later: the tensor memory accelerator (TMA) moves the tiles.

The algorithm, FLOPs and bytes are those of `flash_attention`. What differs is who computes addresses. There, each
thread computes the addresses of its own 16-byte pieces and keeps them in registers. Here one thread hands a tile's
coordinates to a copy engine, which knows the tensor from a descriptor (pointer, shape, strides, tile shape), fills in
zeros where the tensor ends, and leaves the registers to the accumulator. With 64 × 64 tiles and head dimension 128 a
thread then needs 138 registers instead of 168.

The engine asks for a pointer and strides that are multiples of 16 bytes.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.order import check_order, tile_of_program
from course_lib.kernels.attention.parts import (
    CAREFUL_KEYS,
    SIZES,
    all_finite,
    attend_carefully,
    key_ranges,
    visible_pairs,
)
from course_lib.kernels.attention.tiles import candidate_tiles, tiles_for
from course_lib.kernels.common.attention_checks import check_attention_inputs
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.common.softmax import check_threshold, finish_rows, scale_in_log2, weigh

ALIGNMENT_BYTES = 16


@triton.jit
def attend(query, keys, values, place, begin, end, band, softmax_state, scale_log2,
           BLOCK_N: tl.constexpr, THRESHOLD: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Stream over the tiles of keys and values in [begin, end); returns the softmax state after them.

    place: (batch index, key head), where the descriptors find the head's rows. THRESHOLD: of lazy rescaling; above 0
    the accumulator is left alone as long as no row's maximum changes.
    """
    BLOCK_D: tl.constexpr = query.shape[1]
    batch, key_head = place
    running_max, running_sum, accumulator = softmax_state
    for start in tl.range(begin, end, BLOCK_N):
        key_tile = keys.load([batch, key_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        scores = tl.dot(query, key_tile.T, input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            scores = tl.where(visible_pairs(start + tl.arange(0, BLOCK_N), band), scores, float("-inf"))
        running_max, weights, rescale = weigh(scores, running_max, scale_log2, MASKED, THRESHOLD=THRESHOLD)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        if THRESHOLD == 0:
            accumulator = accumulator * rescale[:, None]
        elif tl.min(rescale, axis=0) < 1.0:
            accumulator = accumulator * rescale[:, None]
        value_tile = values.load([batch, key_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator, input_precision=FLOAT32_PRECISION)
    return running_max, running_sum, accumulator  # [BLOCK_M], [BLOCK_M], [BLOCK_M, BLOCK_D]


@triton.jit(do_not_specialize=SIZES)
def flash_attention_tma_kernel(
    queries, keys, values, outputs, sink_pointer, lse_pointer, order_pointer,
    key_pointer, key_batch_stride, key_head_stride, key_stride,
    value_pointer, value_batch_stride, value_head_stride, value_stride,
    query_heads, heads_per_key_head, query_length, key_length, keys_before, keys_after, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    THRESHOLD: tl.constexpr = 0.0,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, against all the keys that they see."""
    batch_and_head, query_tile = tile_of_program(order_pointer, tl.cdiv(query_length, BLOCK_M))
    first_query = query_tile * BLOCK_M
    batch = batch_and_head // query_heads
    head = batch_and_head % query_heads
    key_head = head // heads_per_key_head

    # Positions count from the first key, and the last query stands at the last key.
    first_position = first_query + key_length - query_length
    band = first_position + tl.arange(0, BLOCK_M), key_length, keys_before, keys_after
    last_position = tl.minimum(first_position + BLOCK_M, key_length) - 1
    begin, whole_begin, whole_end, end = key_ranges(
        first_position, last_position, key_length, keys_before, keys_after, BLOCK_N
    )

    query = queries.load([batch, head, first_query, 0]).reshape(BLOCK_M, BLOCK_D)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    state = running_max, running_sum, accumulator
    place = batch, key_head
    if keys_before is not None:
        state = attend(query, keys, values, place, begin, whole_begin, band, state, scale_log2,
                       BLOCK_N, THRESHOLD, MASKED=True)  # fmt: skip
    state = attend(query, keys, values, place, whole_begin, whole_end, band, state, scale_log2,
                   BLOCK_N, THRESHOLD, MASKED=False)  # fmt: skip
    state = attend(query, keys, values, place, whole_end, end, band, state, scale_log2,
                   BLOCK_N, THRESHOLD, MASKED=True)  # fmt: skip

    running_max, running_sum, accumulator = state
    if keys_before is not None or keys_after is not None:
        if not all_finite(accumulator):
            key_rows = key_pointer + batch.to(tl.int64) * key_batch_stride + key_head * key_head_stride
            value_rows = value_pointer + batch.to(tl.int64) * value_batch_stride + key_head * value_head_stride
            running_max, running_sum, accumulator = attend_carefully(
                query, (key_rows, key_stride), (value_rows, value_stride), begin, end, key_length, band, scale_log2,
                HEAD_DIM, CAREFUL_KEYS,
            )  # fmt: skip
    sink = None
    if sink_pointer is not None:
        sink = tl.load(sink_pointer + head).to(tl.float32)
    output, log_sum_exp = finish_rows(accumulator, running_max, running_sum, sink)
    outputs.store([batch, head, first_query, 0], output.to(outputs.dtype).reshape(1, 1, BLOCK_M, BLOCK_D))
    if lse_pointer is not None:
        rows = first_query + tl.arange(0, BLOCK_M)
        lse_row = lse_pointer + batch_and_head.to(tl.int64) * query_length
        tl.store(lse_row + rows, log_sum_exp, mask=rows < query_length)


def flash_attention_tma(
    query, key, value, *, causal=False, window=None, scale=None, sink=None, return_lse=False, tiles=None,
    threshold=0.0, order=None, validate=True,
):  # fmt: skip
    """`flash_attention`, its arguments and results, on Hopper and later, for inputs that `tma_takes`.

    threshold, order, validate: two ideas that can be switched on, see `attention_with_ideas`; an order needs `tiles`,
    of which it is made.
    """
    check_attention_inputs(query, key, value, window=window, scale=scale, sink=sink)
    check_threshold(threshold)
    if order is not None and tiles is None:
        raise ValueError("order is given and tiles is None; an order is made for tiles of some number of rows.")
    check_order(order, query, tiles.query_rows if tiles else 1, validate)
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    block_d = triton.next_power_of_2(head_dim)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if return_lse else None

    def launch(tiles):
        flash_attention_tma_kernel[(triton.cdiv(query_length, tiles.query_rows) * batch * query_heads,)](
            *descriptors(query, key, value, output, tiles, block_d), sink, lse, order,
            key, *key.stride()[:3], value, *value.stride()[:3],
            query_heads, query_heads // key_heads, query_length, key_length, window, 0 if causal else window,
            scale_in_log2(scale, head_dim), head_dim, block_d, **tiles.settings(), THRESHOLD=float(threshold),
        )  # fmt: skip

    launch(tiles or tiles_for(query, key, launch, ("tma", causal, window is None)))
    return (output, lse) if return_lse else output


def tma_takes(query, key, value) -> bool:
    """Whether the copy engine can read these inputs, and write an output like `query`, which is contiguous."""
    return query.shape[3] * query.element_size() % ALIGNMENT_BYTES == 0 and copy_engine_takes(query, key, value)


def copy_engine_takes(*tensors: torch.Tensor) -> bool:
    """Whether the copy engine can address all of these [batch, heads, length, head_dim] tensors."""
    return all(
        tensor.data_ptr() % ALIGNMENT_BYTES == 0
        and all(stride > 0 and stride * tensor.element_size() % ALIGNMENT_BYTES == 0 for stride in tensor.stride()[:3])
        for tensor in tensors
    )


def descriptors(query, key, value, output, tiles, block_d: int) -> list[TensorDescriptor]:
    """What the copy engine needs to know of [batch, heads, length, head_dim] tensors, which it moves in tiles."""
    rows = (tiles.query_rows, tiles.key_rows, tiles.key_rows, tiles.query_rows)
    return [
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, tile_rows, block_d])
        for tensor, tile_rows in zip((query, key, value, output), rows)
    ]


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: each head dimension's best tiles with a window and a sink, all the code."""
    cases = [compile_case(*case) for case in ((90, 64), (90, 128), (90, 256), (100, 128))]
    return cases + [compile_case(90, head_dim, threshold=8.0, order="*i32") for head_dim in (64, 128)]


def compile_case(arch: int, head_dim: int, threshold: float = 0.0, order: str | None = None) -> CompileCase:
    """order: the type of its pointer, where there is one."""
    tiles = candidate_tiles(arch, torch.bfloat16, head_dim)[0]
    rows = {"queries": "BLOCK_M", "keys": "BLOCK_N", "values": "BLOCK_N", "outputs": "BLOCK_M"}
    boxes = {name: f"tensordesc<bf16[1,1,{tiles.blocks()[block]},{head_dim}]>" for name, block in rows.items()}
    return CompileCase(
        flash_attention_tma_kernel, signature_of(flash_attention_tma_kernel, "bf16", **boxes, order_pointer=order),
        {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, **tiles.blocks(), "THRESHOLD": threshold}
        | ({} if order else {"order_pointer": None}), num_warps=tiles.warps, num_stages=tiles.stages,
        archs=(arch,), instruction={90: "wgmma"},
        label=f"{head_dim} {tuple(tiles)}" + f", threshold {threshold:g}, order" * bool(order),
    )  # fmt: skip
