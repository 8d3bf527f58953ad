"""DeepSeek's lightning indexer: a cheap score of each key for each query, by which the keys to attend to are chosen.

    score(t, s) = Σ_h w[t, h] · ReLU(q[t, h] · k[s])            for s ≤ t; minus infinity after it

The indexer has small queries of its own, a few heads of them, and one key for each token that all heads share. The
ReLU stands before the sum over heads: without it the heads would fold into one query, Σ_h w[t, h] · q[t, h], and any
number of them would say no more than one.

FLOPs: 2 · heads · head_dim · query_length · key_length a sequence, half of it when the lengths are equal, since a tile
that no query sees is not computed. That still grows with N²: at N = 65,536 with 64 heads of 128, 35 TFLOP, 44 ms at 800
TFLOP/s. Attention with 128 heads of 128 takes four times as much.
Bytes: 4 · query_length · key_length of scores, which are most of them: 17 GB at that length. So queries are scored a
chunk at a time, and each chunk's keys are chosen before the next.

A tile of the matrix units has 16 rows or more. In a prefill they are queries, and the program goes through the heads;
in a decode step there are too few queries for that, so they are the heads of one query.
Source: DeepSeek-AI, DeepSeek-V3.2, arXiv 2512.02556, equation 1.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.parts import load_rows
from course_lib.kernels.common.checks import check_rows, check_runnable, check_same
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.common.tiles import Tiles

SIZES = ("heads", "query_length", "key_length")
FEW_QUERIES = 8  # a tile of 64 queries would be mostly empty; 1 was measured, not where the two cross


@triton.jit(do_not_specialize=SIZES)
def index_scores_kernel(
    query_pointer, weight_pointer, key_pointer, score_pointer,
    query_batch_stride, query_stride, query_head_stride, weight_batch_stride, weight_stride, key_batch_stride,
    key_stride, heads, query_length, key_length,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: the scores of BLOCK_M queries and BLOCK_N keys, of all heads."""
    key_tiles = tl.cdiv(key_length, BLOCK_N)
    first_key = tl.program_id(0) % key_tiles * BLOCK_N
    first_query = tl.program_id(0) // key_tiles * BLOCK_M
    batch = tl.program_id(1).to(tl.int64)
    queries = query_pointer + batch * query_batch_stride
    keys = key_pointer + batch * key_batch_stride, key_stride
    rows = first_query + tl.arange(0, BLOCK_M)
    columns = first_key + tl.arange(0, BLOCK_N)
    positions = rows + key_length - query_length  # the last query stands at the last key
    weights = weight_pointer + batch * weight_batch_stride + rows.to(tl.int64) * weight_stride
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if first_key < first_query + BLOCK_M + key_length - query_length:  # else no query of the tile sees a key of it
        key = load_rows(keys, first_key, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED=True)
        for head in tl.range(0, heads):
            of_head = queries + head * query_head_stride, query_stride
            query = load_rows(of_head, first_query, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
            products = tl.dot(query, tl.trans(key), input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
            weight = tl.load(weights + head, mask=rows < query_length, other=0.0)  # [BLOCK_M]
            scores += weight[:, None] * tl.maximum(products, 0.0)
    scores = tl.where(columns[None, :] <= positions[:, None], scores, float("-inf"))
    stored = (batch * query_length + rows)[:, None] * key_length + columns[None, :]
    inside = (rows < query_length)[:, None] & (columns < key_length)[None, :]
    tl.store(score_pointer + stored, scores, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def index_scores_of_few_kernel(
    query_pointer, weight_pointer, key_pointer, score_pointer,
    query_batch_stride, query_stride, query_head_stride, weight_batch_stride, weight_stride, key_batch_stride,
    key_stride, heads, query_length, key_length,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: the scores of one query and BLOCK_N keys, BLOCK_M heads at a time."""
    key_tiles = tl.cdiv(key_length, BLOCK_N)
    first_key = tl.program_id(0) % key_tiles * BLOCK_N
    row = (tl.program_id(0) // key_tiles).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    queries = query_pointer + batch * query_batch_stride + row * query_stride, query_head_stride
    keys = key_pointer + batch * key_batch_stride, key_stride
    weights = weight_pointer + batch * weight_batch_stride + row * weight_stride
    columns = first_key + tl.arange(0, BLOCK_N)
    scores = tl.zeros([BLOCK_N], tl.float32)
    key = load_rows(keys, first_key, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED=True)
    for first_head in tl.range(0, heads, BLOCK_M):
        query = load_rows(queries, first_head, heads, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
        products = tl.dot(query, tl.trans(key), input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        here = first_head + tl.arange(0, BLOCK_M)
        weight = tl.load(weights + here, mask=here < heads, other=0.0)  # [BLOCK_M]
        scores += tl.sum(weight[:, None] * tl.maximum(products, 0.0), axis=0)
    scores = tl.where(columns <= row + key_length - query_length, scores, float("-inf"))
    tl.store(score_pointer + (batch * query_length + row) * key_length + columns, scores, mask=columns < key_length)


def index_scores(query, weights, key) -> torch.Tensor:
    """The score of each key for each query, float32 [batch, query_length, key_length]; minus infinity where hidden.

    Args:
        query: [batch, query_length, heads, head_dim], float32, float16 or bfloat16, with a contiguous last dimension.
            Positions are rotated into it, and into key, beforehand, in the same pairing of dimensions.
        weights: float32 [batch, query_length, heads], of any sign; factors such as 1/√head_dim are in them.
        key: [batch, key_length, head_dim], of query's dtype and device. The last query stands at the last key, and a
            query sees the keys up to its own position.

    Raises a ValueError that names the argument when shapes, dtypes or devices don't fit.
    """
    check_rows("query", query, "[batch, query_length, heads, head_dim]")
    check_rows("weights", weights, "[batch, query_length, heads]")
    check_rows("key", key, "[batch, key_length, head_dim]")
    check_runnable("query", query)
    batch, query_length, heads, head_dim = query.shape
    check_same("key", key, "query", query, batch=(key.shape[0], batch), head_dimension=(key.shape[2], head_dim))
    check_same("weights", weights, "query", query, dtype=(weights.dtype, torch.float32),
               shape=(tuple(weights.shape), (batch, query_length, heads)))  # fmt: skip
    key_length = key.shape[1]
    scores = torch.empty(batch, query_length, key_length, dtype=torch.float32, device=query.device)
    tiles = indexer_tiles(architecture_of(query.device), query.dtype)
    few = query_length <= FEW_QUERIES
    query_tiles = query_length if few else triton.cdiv(query_length, tiles.query_rows)
    kernel = index_scores_of_few_kernel if few else index_scores_kernel
    kernel[(query_tiles * triton.cdiv(key_length, tiles.key_rows), batch)](
        query, weights, key, scores, *query.stride()[:3], *weights.stride()[:2], *key.stride()[:2],
        heads, query_length, key_length, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        **tiles.settings(),
    )  # fmt: skip
    return scores


def indexer_tiles(arch: int | None, dtype: torch.dtype) -> Tiles:
    """The cut for an architecture (80, 90, ...; None: the interpreter); chosen by registers without a spill."""
    if arch is not None and (arch < 80 or dtype == torch.float32):  # no matrix units: operands stay in registers
        return Tiles(32, 32, warps=8, stages=1)
    return Tiles(64, 64, warps=4, stages=2)


def index_scores_reference(query, weights, key) -> torch.Tensor:
    """What `index_scores` means, in plain PyTorch and in the inputs' dtype."""
    products = torch.einsum("bthd,bsd->bhts", query, key).relu()
    scores = torch.einsum("bth,bhts->bts", weights.to(products.dtype), products)
    query_length, key_length = scores.shape[1:]
    hidden = torch.ones(query_length, key_length, dtype=torch.bool).triu(1 + key_length - query_length)
    return scores.masked_fill(hidden.to(scores.device), -torch.inf)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate, with heads of 128 as DeepSeek's."""
    cases = []
    for arch, dtype in ((75, torch.float16), (80, torch.float32), *((arch, torch.bfloat16) for arch in (80, 90, 120))):
        tiles = indexer_tiles(arch, dtype)
        fast = arch >= 80 and dtype != torch.float32
        types = signature_of(index_scores_kernel, KINDS[dtype], weight_pointer="*fp32", score_pointer="*fp32")
        cases += [CompileCase(
            kernel, types, {"HEAD_DIM": 128, "BLOCK_D": 128, **tiles.blocks()},
            num_warps=tiles.warps, num_stages=tiles.stages, archs=(arch,), max_spill_bytes=0 if fast else None,
            instruction={80: "mma.sync", 90: "wgmma"} if fast else None, label=f"{KINDS[dtype]} {tuple(tiles)}",
        ) for kernel in (index_scores_kernel, index_scores_of_few_kernel)]  # fmt: skip
    return cases
