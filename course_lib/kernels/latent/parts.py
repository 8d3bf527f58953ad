"""The parts of the latent decode kernel: which rows, which keys, one tile of the cache.

The heads of all query tokens are packed into the rows of a tile, row r being head r % heads of token r // heads: all of
them read the same latent, so a tile that was loaded serves 16 to 64 rows, and serves each twice, as keys and as values.
"""

import triton
import triton.language as tl

from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.softmax import weigh


@triton.jit
def load_query_rows(
    query_pointer, token_stride, head_stride, rows, heads, is_row,
    VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The packed queries of one sequence: their latent part [BLOCK_M, VALUE_DIM], their rotary part [BLOCK_M, BLOCK_R].

    Two tiles, since 576 is no power of two.
    """
    offsets = (rows // heads).to(tl.int64) * token_stride + (rows % heads).to(tl.int64) * head_stride  # [BLOCK_M]
    pointers = query_pointer + offsets[:, None]
    latent_part = tl.load(pointers + tl.arange(0, VALUE_DIM)[None, :], mask=is_row[:, None], other=0.0)
    columns = tl.arange(0, BLOCK_R)
    rotary_part = tl.load(pointers + VALUE_DIM + columns[None, :],
                          mask=is_row[:, None] & (columns < ROPE_DIM)[None, :], other=0.0)  # fmt: skip
    return latent_part, rotary_part


@triton.jit
def load_latents(tile, rows, inside, VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_R: tl.constexpr):
    """A tile of the cache: latents [BLOCK_N, VALUE_DIM] and rotary keys [BLOCK_N, BLOCK_R], zeros where not `inside`.

    tile: pointer; rows: how far from there each of its rows begins [BLOCK_N], in 64 bits. The L2 is to keep them:
    programs with other heads of the same sequence read them too.
    """
    latents = tl.load(tile + rows[:, None] + tl.arange(0, VALUE_DIM)[None, :], mask=inside[:, None], other=0.0)
    columns = tl.arange(0, BLOCK_R)
    if ROPE_DIM < BLOCK_R:
        exists = inside[:, None] & (columns < ROPE_DIM)[None, :]
    else:
        exists = inside[:, None]
    return latents, tl.load(tile + rows[:, None] + VALUE_DIM + columns[None, :], mask=exists, other=0.0)


@triton.jit
def scores_of(query, latents, rotary_keys, scale_log2):
    """Scores [BLOCK_M, BLOCK_N] in units of log 2, without a mask.

    Scaled one by one: a sum of two products without a factor becomes a chain of them, which `scores_apart` avoids.
    """
    latent_part, rotary_part = query
    latent_scores = tl.dot(latent_part, tl.trans(latents), input_precision=FLOAT32_PRECISION)
    rotary_scores = tl.dot(rotary_part, tl.trans(rotary_keys), input_precision=FLOAT32_PRECISION)
    return latent_scores * scale_log2 + rotary_scores * scale_log2


@triton.jit
def scores_apart(query, latents, rotary_keys, scale_log2, has_keys):
    """`scores_of`, in a branch of which the compiler learns too late that it is always taken.

    A product whose result goes into another product has its rows dealt to the warps, and eight warps that share 64 rows
    would all compute each score twice (H100, 128 sequences of 1,151 tokens and 128 heads: 202 µs instead of 140). The
    compiler does not look beyond a branch, and then deals out the keys too. Afterwards it finds that a program which is
    in its loop has keys, and drops the branch: none is in the machine code.
    """
    if has_keys:
        scores = scores_of(query, latents, rotary_keys, scale_log2)
    else:  # as expensive: a constant would be cheap enough to compute twice, and bring the two layouts back
        scores = scores_of(query, latents, rotary_keys, 0.5 * scale_log2)
    return scores


@triton.jit
def attend_to_latents(scores, latents, last_seen, softmax_state):
    """The softmax state after one more tile of the cache, whose latents are the keys and, as they are, the values.

    last_seen [BLOCK_M]: the last key that each row sees, counted from the tile's first. softmax_state: running_max
    [BLOCK_M], weight_sums [BLOCK_M, BLOCK_N], accumulator [BLOCK_M, VALUE_DIM]. Each column of a tile has a sum of its
    own: a row's columns lie in different warps, which wait for each other once, at the end (measured on an H100: 7 % of
    the whole).
    """
    running_max, weight_sums, accumulator = softmax_state
    visible = tl.arange(0, latents.shape[0])[None, :] <= last_seen[:, None]  # [BLOCK_M, BLOCK_N]
    scores = tl.where(visible, scores, float("-inf"))  # [BLOCK_M, BLOCK_N]
    new_max, weights, rescale = weigh(scores, running_max, 1.0, MASKED=True)
    weight_sums = weight_sums * rescale[:, None] + weights
    weights = weights.to(latents.dtype)
    accumulator = tl.dot(weights, latents, accumulator * rescale[:, None], input_precision=FLOAT32_PRECISION)
    return new_max, weight_sums, accumulator
