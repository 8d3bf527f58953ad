"""Nothing has run this on a Blackwell. FlashAttention, forward, for B200: tensor memory, and warps with one task each.

It is compiled for sm_100 with Triton 3.6 to 3.9. Its machine code was read. Its own source was played on a CPU, in many
orders of events (`tests/kernels/blackwell`). No dispatch chooses it, and how fast it is nobody knows.

A B200 multiplies matrices twice as fast as an H100, and takes exponentials no faster: 16 a cycle on a multiprocessor.
They have become the bottleneck, so this kernel keeps the exponential unit busy and spares it work. A program takes 256
queries of one head, in two tiles of 128. While the products of one tile run, the exponentials of the other are taken.
Each group of warps has one task:

    load          1 warp       asks the copy engine (TMA) for tiles of Q, K and V as buffers fall free
    products      1 warp       starts S = Q Kᵀ and O += P V of both tiles; the tensor cores run them one by one
    softmax       2 × 4 warps  one tile each: scores S in, weights P out; a thread has a row
    correction    4 warps      multiplies O when a row's reference moves; at the end divides it and hands it to TMA

The product warp starts S₀ and S₁ of the first block of keys. Then, for each block, it starts O₀, S₀ of the next block,
O₁, and S₁ of the next block. Scores, weights and outputs live in tensor memory: 128 lanes, one for each query, of 512
columns of 4 bytes. At head dimension 128 all are in use; at 64 the outputs end at column 383:

    columns    0 … 127   S₀, float32. P₀, 16 bits, lies in the first half of them once S₀ has been read
             128 … 255   S₁, and P₁ likewise
             256 … 383   O₀, float32
             384 … 511   O₁

The groups meet at barriers in shared memory, one for each tile or buffer:

    barrier                               who completes it       who waits for it
    query_ready, key_ready, value_ready   the copy engine        products
    key_free, value_free                  the product S₁, O₁     load
    scores_ready                          the product S          softmax
    factors_ready                         softmax                correction: what to multiply the rows of O by
    weights_ready                         softmax                products
    corrected                             correction             products
    output_ready, totals_ready            the last O, softmax    correction: the tile can be finished

Three things need no barrier of their own. The next scores overwrite weights that a product may still read; but one warp
starts both products, and the tensor cores run them in order. A block's factors overwrite those of the block before; but
its scores were started only after `corrected` of that block. The correction group multiplies O while a product could
still add to it; but the scores of this block are ready, and that product was started before theirs.

**Lazy rescaling.** What is subtracted from a row's scores, its reference, need not be their maximum: the division at
the end cancels it. So a reference moves only when a block exceeds it by more than 8 in units of log 2. A weight is then
at most 2⁸, which 16-bit numbers hold. If no row of a tile moves, the correction group leaves its output alone.
`meaning.py` says the same in plain PyTorch.

**Exponentials by multiply-adds.** The last 4 of every 32 columns go to the polynomial of `common/exponentials.py`. For
128 keys and both tiles, in cycles of a multiprocessor, counted in the loop without a mask:

    head dimension   products   exponentials: all by ex2, with the share of 4   instructions started: 8 warps · 499 / 4
    128              2048       2064                      1808                  998
    64               1024       2064                      1808                  998

At head dimension 64 a share of 12 would balance the last two columns, near 1350. But its temporary values find no
registers: from 6 on the loop spills.

Machine code for sm_100 (Triton 3.9, a loop counted once). The loop without a mask: 2 LDTM of 64 columns (tcgen05.ld),
1 STTM (tcgen05.st), 113 MUFU.EX2, 92 FFMA2, 84 FADD2, 60 FMNMX3, 64 F2FP. A mask adds 128 ISETP and 128 FSEL. There are
48 tcgen05.mma at head dimension 128, 8 for each of 6 products, and 32 at 64. A thread has 192 registers for softmax,
104 for correction, 24 for the rest. No loop spills. PTX asks for a tcgen05.fence on both sides of a barrier that passes
tensor memory on; Triton writes none, but waits for loads and stores (tcgen05.wait) before the barrier.

FLOPs and bytes are those of `flash_attention`. Under a causal mask the first tile, too, goes through the blocks of the
second: one block in each program is hidden from it whole.

Source: FlashAttention-4, arXiv 2603.05451.
"""

import torch
import triton

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.blackwell.bundles import Barriers, Buffers, Columns
from course_lib.kernels.blackwell.correction import correct_outputs
from course_lib.kernels.blackwell.limits import blackwell_refusal
from course_lib.kernels.blackwell.names import TensorMemoryLayout, allocate_tensor_memory
from course_lib.kernels.blackwell.parts import TILE_ROWS
from course_lib.kernels.blackwell.products import load_tiles, start_products
from course_lib.kernels.blackwell.softmax import weigh_scores
from course_lib.kernels.common.attention_checks import check_attention_inputs
from course_lib.kernels.common.softmax import scale_in_log2
from course_lib.kernels.gluon.names import fence_async_shared, gl, gluon
from course_lib.kernels.gluon.parts import new_barriers
from course_lib.kernels.hopper.bundles import Sizes
from course_lib.kernels.hopper.flash import SIZES, heads_in_cache, padded_head_dim
from course_lib.kernels.hopper.launch import descriptor, descriptor_type
from course_lib.kernels.hopper.parts import tile_of

THRESHOLD = 8.0  # in units of log 2: how far a row's scores may exceed its reference
DEGREE, SHARE = 3, 4  # of the polynomial, and how many of every 32 exponentials it computes
SOFTMAX_REGISTERS, OTHER_REGISTERS = gl.constexpr(192), gl.constexpr(24)  # correction has the rest of 512: 104


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
    _batch_index, head, first_query = place
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
    gl.warp_specialize([
        (correct_outputs, (outputs, lse_pointer, buffers, columns, barriers, place, sizes, blocks)),
        (weigh_scores, (buffers, columns, barriers, first_query, query_length, key_length, keys_after,
                        blocks, scale_log2, 0, THRESHOLD, DEGREE, SHARE)),
        (weigh_scores, (buffers, columns, barriers, first_query, query_length, key_length, keys_after,
                        blocks, scale_log2, 1, THRESHOLD, DEGREE, SHARE)),
        (start_products, (buffers, columns, barriers, blocks)),
        (load_tiles, ((queries, keys, values), buffers, barriers, place, head // heads_per_key_head, blocks)),
    ], [4, 4, 1, 1], [SOFTMAX_REGISTERS, SOFTMAX_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS])  # fmt: skip


STAGES = {64: 4, 128: 2}  # buffers for keys and for values, by head dimension
KEY_ROWS = 128
START_REGISTERS = 128  # of each of the 16 warps' threads, before the roles part
SETTINGS = {"THRESHOLD": THRESHOLD, "DEGREE": DEGREE, "SHARE": SHARE}


def flash_attention_blackwell(query, key, value, *, causal=False, scale=None, return_lse=False):
    """Exact softmax attention on a B200; nothing has run it on one.

    Args:
        query: [batch, query_heads, query_length, head_dim], float16 or bfloat16; head_dim from 16 to 128. A multiple of
            16 bytes in address and strides, the last dimension contiguous.
        key, value: [batch, key_heads, key_length, head_dim], likewise; query_heads is a multiple of key_heads.
        causal, scale, return_lse: see `flash_attention`.

    Returns the output, contiguous, or (output, log-sum-exp [batch, query_heads, query_length]). A NaN or an infinity
    in a value that a mask hides can reach the queries of the same tile, since its weight is 0, and 0 · NaN is NaN.

    Raises the ValueErrors of `flash_attention`, a ValueError for inputs that only `flash_attention` takes, and a
    RuntimeError where this machine cannot run the kernel.
    """
    check_attention_inputs(query, key, value, scale=scale)
    refusal = blackwell_refusal(query, key, value)
    if refusal is not None:
        raise refusal.error(f"flash_attention_blackwell: {refusal.reason} flash_attention takes these inputs.")
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    block_d = padded_head_dim(head_dim)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if return_lse else None
    programs = triton.cdiv(query_length, 2 * TILE_ROWS.value) * batch * query_heads
    flash_attention_blackwell_kernel[(programs,)](
        descriptor(query, TILE_ROWS.value, block_d), descriptor(key, KEY_ROWS, block_d),
        descriptor(value, KEY_ROWS, block_d), descriptor(output, TILE_ROWS.value, block_d), lse,
        batch, query_heads, query_heads // key_heads, query_length, key_length, heads_in_cache(query, key),
        0 if causal else None, scale_in_log2(scale, head_dim),
        STAGES=STAGES[block_d], **SETTINGS, num_warps=4, maxnreg=START_REGISTERS,
    )  # fmt: skip
    return (output, lse) if return_lse else output


# Three numbers that a causal mask is made from, each a function of the thread alone: ptxas computes them before the
# roles part, and they find no register in the 24 of the load warp. They are fetched before and after the loops.
CAUSAL_SPILLS = 16


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    return [
        compile_case(64, "fp16"),
        compile_case(64, "bf16", lse_pointer="*fp32", keys_after="i32", max_spill_bytes=CAUSAL_SPILLS),
        compile_case(128, "bf16", lse_pointer="*fp32"),
        compile_case(128, "fp16", keys_after="i32", max_spill_bytes=CAUSAL_SPILLS),
    ]


def compile_case(block_d, kind, lse_pointer=None, keys_after=None, max_spill_bytes=0) -> CompileCase:
    """kind: "fp16" or "bf16"."""
    types = {name: descriptor_type(kind, TILE_ROWS.value, block_d) for name in ("queries", "outputs")}
    types |= {name: descriptor_type(kind, KEY_ROWS, block_d) for name in ("keys", "values")}
    types |= {"scale_log2": "fp32"} | dict.fromkeys(SIZES, "i32")
    given = {"lse_pointer": lse_pointer, "keys_after": keys_after}
    types |= {name: kind for name, kind in given.items() if kind}
    constants = {name: None for name, kind in given.items() if kind is None} | {"STAGES": STAGES[block_d], **SETTINGS}
    return CompileCase(
        flash_attention_blackwell_kernel, types, constants, num_warps=4, archs=(100,), instruction="tcgen05",
        max_spill_bytes=max_spill_bytes, options={"maxnreg": START_REGISTERS},
        label=f"{kind} {block_d} {given}",
    )  # fmt: skip
