"""FlashAttention, forward, on Hopper with warp specialisation: one warp group fetches, two compute.

In `flash_attention_tma` all warps of a program do the same thing at the same time: wait for a tile, multiply, take
exponentials, multiply. While they take exponentials the matrix units idle. `warp_specialize=True` asks Triton to split
the loop instead: one warp group issues the copies, and each of two others owns half of the query rows and runs free of
the other, so that one can multiply while the other takes exponentials. Asked for 4 warps, the compiled kernel has 12.

Triton does this on Hopper for a narrow form, which is what is here: descriptors made in the kernel, one loop, no mask,
so that lengths are multiples of the tiles, and nothing but the output. Found by measurement on an H200 with Triton 3.6:
a mask by rows and a log-sum-exp come out wrong for the second half of a tile's rows, and a third stage gives NaN. Other
versions compile this form, but were not run. `specialization_pays` names what was seen to be right, and faster.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.parts import SIZES
from course_lib.kernels.common.attention_checks import check_attention_inputs
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.common.softmax import finish_rows, scale_in_log2, weigh
from course_lib.kernels.common.tiles import Tiles

SPECIALIZED_TILES = Tiles(128, 128, warps=4, stages=2)
SPECIALIZED_BLOCK_D = 128
# Each program makes its descriptors first, which short sequences don't repay.
SPECIALIZED_LEAST_KEYS = 2048
TRITON_VERSIONS_RUN = ("3.6",)


@triton.jit(do_not_specialize=SIZES[:4])
def flash_attention_specialized_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    output_batch_stride, output_head_stride, output_stride,
    query_heads, heads_per_key_head, query_length, key_length, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head against all keys. The lengths are multiples of BLOCK_M and BLOCK_N."""
    query_blocks = query_length // BLOCK_M
    batch_and_head = tl.program_id(0) // query_blocks
    first_query = tl.program_id(0) % query_blocks * BLOCK_M
    batch = (batch_and_head // query_heads).to(tl.int64)
    head = (batch_and_head % query_heads).to(tl.int64)
    key_head = head // heads_per_key_head
    queries = tl.make_tensor_descriptor(
        query_pointer + batch * query_batch_stride + head * query_head_stride,
        shape=[query_length, HEAD_DIM],
        strides=[query_stride, 1],
        block_shape=[BLOCK_M, BLOCK_D],
    )
    keys = tl.make_tensor_descriptor(
        key_pointer + batch * key_batch_stride + key_head * key_head_stride,
        shape=[key_length, HEAD_DIM],
        strides=[key_stride, 1],
        block_shape=[BLOCK_N, BLOCK_D],
    )
    values = tl.make_tensor_descriptor(
        value_pointer + batch * value_batch_stride + key_head * value_head_stride,
        shape=[key_length, HEAD_DIM],
        strides=[value_stride, 1],
        block_shape=[BLOCK_N, BLOCK_D],
    )
    outputs = tl.make_tensor_descriptor(
        output_pointer + batch * output_batch_stride + head * output_head_stride,
        shape=[query_length, HEAD_DIM],
        strides=[output_stride, 1],
        block_shape=[BLOCK_M, BLOCK_D],
    )

    query = queries.load([first_query, 0])  # [BLOCK_M, BLOCK_D]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(0, key_length, BLOCK_N, warp_specialize=True):
        key_tile = keys.load([start, 0])  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(query, key_tile.T)  # [BLOCK_M, BLOCK_N]
        running_max, weights, rescale = weigh(scores, running_max, scale_log2, MASKED=False)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        accumulator = accumulator * rescale[:, None]
        value_tile = values.load([start, 0])  # [BLOCK_N, BLOCK_D]
        accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator)  # [BLOCK_M, BLOCK_D]

    output, _ = finish_rows(accumulator, running_max, running_sum)
    outputs.store([first_query, 0], output.to(output_pointer.dtype.element_ty))


def flash_attention_specialized(query, key, value, *, scale=None):
    """The output of `flash_attention` without a mask, for inputs that `tma_takes` where `specialization_pays`."""
    check_attention_inputs(query, key, value, scale=scale)
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    triton.set_allocator(allocate_descriptors)
    flash_attention_specialized_kernel[(query_length // SPECIALIZED_TILES.query_rows * batch * query_heads,)](
        query, key, value, output,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
        query_heads, query_heads // key_heads, query_length, key_length,
        scale_in_log2(scale, head_dim), head_dim, SPECIALIZED_BLOCK_D, **SPECIALIZED_TILES.settings(),
    )  # fmt: skip
    return output


def specialization_pays(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether the kernel above is right, and faster than the others, on these [batch, heads, length, head_dim].

    That is without a mask and a log-sum-exp, which it knows nothing of.
    """
    return (
        architecture_of(query.device) == 90
        and triton.__version__.startswith(TRITON_VERSIONS_RUN)
        and key.dtype != torch.float32
        and triton.next_power_of_2(query.shape[3]) == SPECIALIZED_BLOCK_D
        and key.shape[2] >= SPECIALIZED_LEAST_KEYS
        and key.shape[2] % SPECIALIZED_TILES.key_rows == 0
        and query.shape[2] % SPECIALIZED_TILES.query_rows == 0
    )


def allocate_descriptors(size: int, alignment: int, stream) -> torch.Tensor:
    """Memory for the descriptors that the programs make, as Triton asks for it: 512 bytes for each program."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    constants = {"HEAD_DIM": 128, "BLOCK_D": SPECIALIZED_BLOCK_D, **SPECIALIZED_TILES.blocks()}
    return [CompileCase(
        flash_attention_specialized_kernel, signature_of(flash_attention_specialized_kernel, "bf16"), constants,
        num_warps=SPECIALIZED_TILES.warps, num_stages=SPECIALIZED_TILES.stages, archs=(90,), instruction="wgmma",
    )]  # fmt: skip
