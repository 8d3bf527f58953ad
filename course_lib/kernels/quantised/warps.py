"""Decode in which each warp has keys of its own: what kernels over quantised caches share.

Every tile has the warps as its first axis: scores are [WARPS, KEYS, BLOCK_M]. A warp so has its own maximum, its own
sums and its own accumulator, and waits for no other before the last key. Where all warps share a tile's rows instead,
they meet in shared memory three times a tile: for the row's maximum, its weights, and the keys' scales.

Keys are the rows of the products' tiles and heads the columns, of which a matrix instruction has 8. As rows there would
have to be 16: for a group of 4 heads half of the products, the accumulator and the exponentials would be wasted.
"""

import triton
import triton.language as tl

# Of a warp's tile of keys, as many as registers hold beside the rest.
FP8_NUMBERS, INT4_NUMBERS = tl.constexpr(4096), tl.constexpr(8192)


@triton.jit
def for_every_warp(tile, WARPS: tl.constexpr):
    """Queries [BLOCK_M, COLUMNS] as the right operand of every warp's product, [WARPS, COLUMNS, BLOCK_M]."""
    return tl.broadcast_to(tl.trans(tile)[None, :, :], (WARPS, tile.shape[1], tile.shape[0]))


@triton.jit
def add_weights(weight_sums, weights, rescale):
    """The sums [WARPS, 8, BLOCK_M] of every eighth key's weight after one more tile of them, [WARPS, KEYS, BLOCK_M].

    A thread holds the weights of every eighth key, so it adds its own alone. The eight meet when all keys are done.
    """
    WARPS: tl.constexpr = weights.shape[0]
    eighths = tl.reshape(weights, (WARPS, weights.shape[1] // 8, 8, weights.shape[2]))
    return weight_sums * rescale[:, None] + tl.sum(eighths, axis=1)


@triton.jit
def add_warps(rows):
    """[BLOCK_M, COLUMNS] from what each warp has of it, [BLOCK_M, COLUMNS, WARPS], one or four of them.

    In halves, so that the tile changes hands once, and a thread then adds what it has. A sum along the warps would pass
    through shared memory number by number.
    """
    if rows.shape[2] == 1:
        total = tl.reshape(rows, (rows.shape[0], rows.shape[1]))
    elif rows.shape[2] == 2:
        first, second = tl.split(rows)
        total = first + second
    else:
        first, second = tl.split(tl.reshape(rows, (rows.shape[0], rows.shape[1], 2, 2)))
        first, second = tl.split(first + second)
        total = first + second
    return total


@triton.jit
def merge_sums(running_max, weight_sums):
    """(running_max [BLOCK_M], running_sum [BLOCK_M], shares [WARPS, BLOCK_M]) of all warps' keys.

    shares: what a warp's accumulator has to be multiplied by before all are added.
    """
    merged_max = tl.max(running_max, axis=0)  # [BLOCK_M]
    reference_max = tl.where(merged_max == float("-inf"), 0.0, merged_max)
    shares = tl.exp2(running_max - reference_max[None, :])
    return merged_max, tl.sum(tl.sum(weight_sums, axis=1) * shares, axis=0), shares
