"""Which keys one of several programs takes, where a sequence's keys are split among them."""

import triton
import triton.language as tl


@triton.jit
def split_keys(length, split, splits, window=None):
    """The keys [begin, end) of one of `splits` equal parts of a sequence; the last parts are shorter, or empty.

    window: only the last key and `window` before it are split, which the query at the end sees; None: all. The parts
    are counted from the window's edge: on a grid from the first key, most windows would reach into one tile more.
    """
    first = 0
    if window is not None:
        first = tl.maximum(length - 1 - window, 0)
    keys_per_split = tl.cdiv(length - first, splits)
    begin = tl.minimum(first + split * keys_per_split, length)
    return begin, tl.minimum(begin + keys_per_split, length)


@triton.jit
def whole_tiles(length, split, splits, BLOCK_N: tl.constexpr):
    """The keys [begin, end) of one of `splits` parts of a sequence, which begin at a multiple of BLOCK_N.

    So a tile never crosses a page that holds a multiple of BLOCK_N keys. The last parts are shorter, or empty.
    """
    keys_per_split = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    begin = tl.minimum(split * keys_per_split, length)
    return begin, tl.minimum(begin + keys_per_split, length)
