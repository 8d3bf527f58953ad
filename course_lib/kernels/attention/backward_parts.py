"""What the backward kernels share."""

import triton
import triton.language as tl

# No tile of queries is longer; the numbers of the rows are stored for a multiple of it, so that none needs a mask.
LONGEST_QUERY_TILE = 128


@triton.jit
def queries_as_seen_from(key_positions, query_length, key_length, keys_before, keys_after):
    """The band of `visible_pairs` and `key_ranges` with the roles exchanged: a key sees queries.

    A query sees keys_before keys before its place and keys_after after it; so a key is seen by keys_after queries
    before its own place and by keys_before after it. Positions count from the first query here.
    """
    return key_positions + query_length - key_length, query_length, keys_after, keys_before

