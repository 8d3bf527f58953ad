"""Top-k by pivots: which groups can hold the k first tokens of a row, and which token is the k-th.

Take the k groups with the largest maxima, of equals the first. All k first tokens are in them: each of these groups
holds a token that stands before whatever lies in another group. So 64·k tokens are left, at most 3,200 of 128,256 for
k = 50.

Among these, the last key to be kept is between two bounds. Two pivots cut what is between them into thirds, the tokens
on or above each are counted, and the bounds move to the third where the count passes k. A count of exactly k ends it
early, and mostly does. Where more tokens have the last key than are kept, the first ones are kept: one running count in
the order of the tokens finds them. The groups themselves are found in the same way before, among their maxima.
"""

import triton
import triton.language as tl

from course_lib.kernels.sampling.listed import load_listed
from course_lib.kernels.sampling.parts import LAST_TOKEN


@triton.jit
def thirds(low, high):
    """Two pivots between bounds, int64, that are at least 2 apart."""
    step = tl.maximum((high - low) // 3, 1)
    return (low + step).to(tl.int32), (high - step).to(tl.int32)


@triton.jit
def narrowed(low, high, first, second, above_first, above_second, above_low, above_high, k):
    """The bounds, and how many are on or above each, after the counts at two pivots: low has k or more, high fewer."""
    second_is_low = above_second >= k
    first_is_low = above_first >= k
    new_low = tl.where(second_is_low, second, tl.where(first_is_low, first, low))
    new_above_low = tl.where(second_is_low, above_second, tl.where(first_is_low, above_first, above_low))
    new_high = tl.where(second_is_low, high, tl.where(first_is_low, second, first))
    new_above_high = tl.where(second_is_low, above_high, tl.where(first_is_low, above_second, above_first))
    return new_low, new_high, new_above_low, new_above_high


@triton.jit
def list_groups(maxima, lowest, largest, list_pointer, k, GROUPS: tl.constexpr):
    """Write the k groups with the largest maxima, in the order of their index; returns the smallest of these maxima.

    maxima int32 [GROUPS], at least k of them; lowest, largest: of them.
    """
    low, high = lowest.to(tl.int64), largest.to(tl.int64) + 1
    above_low, above_high = tl.full([], GROUPS, tl.int32), tl.full([], 0, tl.int32)
    while (high - low > 1) & (above_low != k):
        first, second = thirds(low, high)
        above_first = tl.sum((maxima >= first).to(tl.int32), axis=0)
        above_second = tl.sum((maxima >= second).to(tl.int32), axis=0)
        low, high, above_low, above_high = narrowed(
            low, high, first, second, above_first, above_second, above_low, above_high, k
        )
    edge = low.to(tl.int32)
    at_edge = maxima == edge  # [GROUPS]
    above = tl.sum((maxima > edge).to(tl.int32), axis=0)
    taken = (maxima > edge) | (at_edge & (above + tl.cumsum(at_edge.to(tl.int32), axis=0) <= k))
    place = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(list_pointer + place, tl.arange(0, GROUPS), mask=taken)
    return edge


@triton.jit
def last_of_top_k(
    row_pointer, list_pointer, count, vocabulary, lowest, largest, k, GROUP: tl.constexpr, TILE_GROUPS: tl.constexpr
):
    """(key, token) of the k-th token in the listed groups, of which k or more reach the key `lowest`."""
    low, high = lowest.to(tl.int64), largest.to(tl.int64) + 1
    above_low, above_high = tl.full([], LAST_TOKEN, tl.int32), tl.full([], 0, tl.int32)
    first, second = lowest, lowest + 1  # so often it is the bound itself that exactly k tokens reach
    while (high - low > 1) & (above_low != k):
        reach_first = tl.zeros([TILE_GROUPS, GROUP], tl.int32)
        reach_second = tl.zeros([TILE_GROUPS, GROUP], tl.int32)
        for start in tl.range(0, count, TILE_GROUPS):
            _logits, keys, _token = load_listed(
                row_pointer, list_pointer, True, start, count, vocabulary, GROUP, TILE_GROUPS
            )  # [TILE_GROUPS, GROUP]
            reach_first += (keys >= first).to(tl.int32)
            reach_second += (keys >= second).to(tl.int32)
        low, high, above_low, above_high = narrowed(
            low, high, first, second, tl.sum(reach_first), tl.sum(reach_second), above_low, above_high, k
        )
        first, second = thirds(low, high)
    edge = low.to(tl.int32)
    last = tl.full([], LAST_TOKEN, tl.int32)
    if above_low != k:
        # More have the last key than are kept: count them in the order of the tokens.
        seen = above_high
        last = tl.full([], -1, tl.int32)
        for start in tl.range(0, count, TILE_GROUPS):
            _logits, keys, token = load_listed(
                row_pointer, list_pointer, True, start, count, vocabulary, GROUP, TILE_GROUPS
            )  # [TILE_GROUPS, GROUP]
            at_edge = tl.reshape(keys == edge, [TILE_GROUPS * GROUP]).to(tl.int32)
            kept = (at_edge != 0) & (seen + tl.cumsum(at_edge, axis=0) <= k)
            last = tl.maximum(last, tl.max(tl.where(kept, tl.reshape(token, [TILE_GROUPS * GROUP]), -1), axis=0))
            seen += tl.sum(at_edge, axis=0)
    return edge, last
