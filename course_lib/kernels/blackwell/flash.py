"""draft"""

import torch
import triton

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.blackwell.bundles import Barriers, Buffers, Columns
from course_lib.kernels.blackwell.correction import correct_outputs
from course_lib.kernels.blackwell.names import TensorMemoryLayout, allocate_tensor_memory
from course_lib.kernels.blackwell.parts import TILE_ROWS
from course_lib.kernels.blackwell.products import load_tiles, start_products
from course_lib.kernels.blackwell.softmax import weigh_scores
from course_lib.kernels.gluon.names import fence_async_shared, gl, gluon
from course_lib.kernels.gluon.parts import new_barriers
from course_lib.kernels.hopper.bundles import Sizes
from course_lib.kernels.hopper.launch import descriptor, descriptor_type
from course_lib.kernels.hopper.parts import tile_of

SIZES = ("batch", "query_heads", "heads_per_key_head", "query_length", "key_length", "heads_at_once")


@gluon.jit
def shared_memory(queries, keys, values, STAGES: gl.constexpr):
    """A program's buffers and barriers."""
    key_shape: gl.constexpr = [STAGES] + keys.block_type.shape  # [.., 1, 1, BLOCK_N, HEAD_DIM]
    ONE_BY_ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buffers = Buffers(
        queries=gl.allocate_shared_memory(queries.dtype, [2] + queries.block_type.shape, queries.layout),
        keys=gl.allocate_shared_memory(keys.dtype, key_shape, keys.layout),
        values=gl.allocate_shared_memory(values.dtype, key_shape, values.layout),
        factors=gl.allocate_shared_memory(gl.float32, [2, TILE_ROWS], ONE_BY_ONE),
        totals=gl.allocate_shared_memory(gl.float32, [2, TILE_ROWS], ONE_BY_ONE),
        references=gl.allocate_shared_memory(gl.float32, [2, TILE_ROWS], ONE_BY_ONE),
    )
    barriers = Barriers(
        query_ready=new_barriers(2, 1),
        key_ready=new_barriers(STAGES, 1),
        key_free=new_barriers(STAGES, 1),
        value_ready=new_barriers(STAGES, 1),
        value_free=new_barriers(STAGES, 1),
        scores_ready=new_barriers(2, 1),
        factors_ready=new_barriers(2, 1),
        weights_ready=new_barriers(2, 1),
        corrected=new_barriers(2, 1),
        output_ready=new_barriers(2, 1),
        totals_ready=new_barriers(2, 1),
    )
    fence_async_shared()
    return buffers, barriers


@gluon.jit(do_not_specialize=(*SIZES, "keys_after"))
def flash_attention_blackwell_kernel(
    queries, keys, values, outputs, lse_pointer,
    batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once, keys_after, scale_log2,
    STAGES: gl.constexpr, THRESHOLD: gl.constexpr, DEGREE: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """One program: 256 queries of one head, in two tiles."""
    BLOCK_N: gl.constexpr = keys.block_type.shape[2]
    HEAD_DIM: gl.constexpr = keys.block_type.shape[3]
    sizes = Sizes(batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once)
    place = tile_of(gl.program_id(0), sizes, 2 * TILE_ROWS)
    batch_index, head, first_query = place
    row = (batch_index * query_heads + head).to(gl.int64) * query_length
    blocks = gl.cdiv(key_length, BLOCK_N)
    if keys_after is not None:
        last_position = gl.minimum(first_query + 2 * TILE_ROWS, query_length) - 1 + key_length - query_length
        blocks = gl.minimum(blocks, gl.cdiv(gl.maximum(last_position + keys_after + 1, 0), BLOCK_N))
    blocks = gl.maximum(blocks, 1)

    buffers, barriers = shared_memory(queries, keys, values, STAGES)
    SCORES: gl.constexpr = TensorMemoryLayout((TILE_ROWS, BLOCK_N), col_stride=1)
    OUTPUTS: gl.constexpr = TensorMemoryLayout((TILE_ROWS, HEAD_DIM), col_stride=1)
    columns = Columns(
        scores=allocate_tensor_memory(gl.float32, [2, TILE_ROWS, BLOCK_N], SCORES),
        outputs=allocate_tensor_memory(gl.float32, [2, TILE_ROWS, HEAD_DIM], OUTPUTS),
    )
    lse_rows = lse_pointer
    if lse_pointer is not None:
        lse_rows += row
    gl.warp_specialize([
        (correct_outputs, (outputs, lse_rows, buffers, columns, barriers, place, query_length, blocks)),
        (weigh_scores, (buffers, columns, barriers, first_query, query_length, key_length, keys_after,
                        blocks, scale_log2, 0, THRESHOLD, DEGREE, SHARE)),
        (weigh_scores, (buffers, columns, barriers, first_query, query_length, key_length, keys_after,
                        blocks, scale_log2, 1, THRESHOLD, DEGREE, SHARE)),
        (start_products, (buffers, columns, barriers, blocks)),
        (load_tiles, ((queries, keys, values), buffers, barriers, place, head // heads_per_key_head, blocks)),
    ], [4, 4, 1, 1], [192, 192, 24, 24])  # fmt: skip


def compile_cases() -> list[CompileCase]:
    return [case(64, "bf16", 0, 4), case(128, "bf16", 0, 2), case(128, "fp16", None, 2)]


def case(head_dim, kind, keys_after, stages):
    types = {name: descriptor_type(kind, 128, head_dim) for name in ("queries", "keys", "values", "outputs")}
    types |= {"lse_pointer": "*fp32", "scale_log2": "fp32"} | dict.fromkeys(SIZES, "i32")
    constants = {"STAGES": stages, "THRESHOLD": 8.0, "DEGREE": 3, "SHARE": 4}
    if keys_after is None:
        constants["keys_after"] = None
    else:
        types["keys_after"] = "i32"
    return CompileCase(flash_attention_blackwell_kernel, types, constants, num_warps=4, archs=(100,),
                       instruction="tcgen05", options={"maxnreg": 128}, label=f"{head_dim} {kind}")
