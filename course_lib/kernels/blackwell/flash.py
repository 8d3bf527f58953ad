"""Nothing has run this on a Blackwell yet. FlashAttention, forward, for B200: tensor memory, and warps with one task.

It was compiled for sm_100 with Triton 3.6 and 3.9, its machine code was read, and its source was played on a CPU, in
thousands of orders of events (`tests/kernels/blackwell/`). No dispatch chooses it. What it takes on a GPU is unknown.

A B200 has matrix units twice as fast as those of an H100, and the same 16 exponentials a cycle on each multiprocessor.
So they decide, and everything here keeps their unit busy, or spares it work. A program takes 256 queries of a head, in
two tiles of 128. While one tile's products run, the other tile's exponentials are taken:

    load          1 warp      asks the copy engine (TMA) for tiles of Q, K and V, as buffers fall free
    products      1 warp      starts S = Q Kᵀ and O += P V of both tiles; the tensor cores run them, in order
    softmax       2 × 4       the weights P of one tile each; a thread has a row, so no maximum crosses threads
    correction    4           multiplies O where a reference moved, and hands the finished tiles to the copy engine

The product warp starts S₀ and S₁ of the first block of keys. Then for each block: O₀, S₀ of the next, O₁, S₁ of the
next. Products take their results from and to tensor memory, 128 lanes of 512 columns of 4 bytes, all of it used here:

    column  0 … 127    S₀, and P₀ in the first half of it: 16 bits a weight, written when S₀ has been read
          128 … 255    S₁ and P₁
          256 … 383    O₀ (at head dimension 64: 256 … 319)
          384 … 511    O₁ (at head dimension 64: 320 … 383)

Who tells whom, through barriers in shared memory, and of what:

    query_ready, key_ready, value_ready    copy engine -> products        the tile is there
    key_free, value_free                   S₁, O₁ -> load                 the second tile's product was the last reader
    scores_ready                           S -> its softmax
    factors_ready                          softmax -> correction          what each row of O is multiplied by
    weights_ready                          softmax -> products            P stands over S
    corrected                              correction -> products         O may grow by this block
    output_ready, totals_ready             last O, softmax -> correction  the tile can be finished

Three things need no barrier. The next S is written over P, and P may still be read: but both products come from one
warp, and run in order. A block's factors replace those of the block before: but S of this block was started after
`corrected` of that one. O is multiplied while the block before is added to it: no, S of this block is ready, and the
products before it are over.

**Lazy rescaling.** A row's scores are measured from a reference, and any will do as long as nothing overflows. Here it
moves when a block exceeds it by more than THRESHOLD = 8 in units of log 2; weights reach 2⁸ at most, the sums are in
float32, and the division at the end cancels it. A tile in which no row moved is not touched, which with usual inputs is
most of them. `meaning.py` has it in plain PyTorch.

**Exponentials by multiply-adds.** SHARE of every 32 columns go to the polynomial of `common.exponentials`. For both
tiles and a block of 128 keys, in cycles of a multiprocessor, from the machine code of the loop without a mask:

    head dimension   products   exponentials             instructions started
    128              2048       2048, with SHARE 4 1808  8 · 499 / 4 =  998
    64               1024       2048, with SHARE 6 1680  8 · 541 / 4 = 1082

At 64, a share of 12 would balance the last two columns, near 1340. But its temporary values find no registers: from 8
on the loop spills.

Machine code (sm_100, Triton 3.9; a loop counts once). The softmax loop without a mask: 2 LDTM (tcgen05.ld) of 64
columns, 1 STTM (tcgen05.st), 113 MUFU.EX2, 92 FFMA2, 84 FADD2, 60 FMNMX3, 64 F2FP. With it: 128 ISETP and 128 FSEL
more. tcgen05.mma × 48 at head dimension 128 (8 for each product of 128³, in 6 places), × 32 at 64. Registers a thread:
192 for softmax (200 at 64), 104 for correction (88), 24 for the others. No loop spills; causal kernels set three
numbers aside before the roles part. PTX asks for tcgen05.fence where tensor memory passes between threads; Triton
writes none, and waits (tcgen05.wait) before every barrier instead.

FLOPs and bytes: as for `flash_attention`. Under a causal mask both tiles go through the blocks that the second needs,
half a block a tile for nothing.

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
        compile_case(64, "bf16", keys_after="i32", max_spill_bytes=CAUSAL_SPILLS),
        compile_case(128, "bf16"),
        compile_case(128, "fp16", keys_after="i32", max_spill_bytes=CAUSAL_SPILLS),
    ]


def compile_case(block_d, kind, keys_after=None, max_spill_bytes=0) -> CompileCase:
    """kind: "fp16" or "bf16"."""
    types = {name: descriptor_type(kind, TILE_ROWS.value, block_d) for name in ("queries", "outputs")}
    types |= {name: descriptor_type(kind, KEY_ROWS, block_d) for name in ("keys", "values")}
    types |= {"lse_pointer": "*fp32", "scale_log2": "fp32"} | dict.fromkeys(SIZES, "i32")
    types |= {"keys_after": keys_after} if keys_after else {}
    constants = {"STAGES": STAGES[block_d], **SETTINGS} | ({} if keys_after else {"keys_after": None})
    return CompileCase(
        flash_attention_blackwell_kernel, types, constants, num_warps=4, archs=(100,), instruction="tcgen05",
        max_spill_bytes=max_spill_bytes, options={"maxnreg": START_REGISTERS},
        label=f"{kind} {block_d} {'causal' if keys_after else 'full'}",
    )  # fmt: skip
