# %% [markdown]
# # 17 · Not every key: windows, sinks and chosen keys

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device

import torch

device = default_device()

# %% [markdown]
# **Which tiles?** A program works on a tile of queries, at positions `first` to `last`. It visits the tiles that hold a
# key which *at least one* of its queries sees. The first query's window begins earliest, and the last one's keys end
# latest, so these are the keys from first - before up to last + after. A tile that *every* query sees whole needs no
# mask. The last query's window begins latest and the first one's keys end earliest, so such tiles lie within the keys
# from last - before up to first + after. A kernel then runs three loops: with a mask from `begin` to `whole_begin`,
# without one up to `whole_end`, and with a mask up to `end`.
#
# Both ranges are cut where the keys end. The first is then rounded outwards to tiles, and the second inwards. No loop
# is needed for any of this, and the kernel computes it before it loads a key.

# %%
# Exercise 17.2 · The tiles that a tile visits
def key_tiles(first: int, last: int, key_length: int, before: int | None, after: int | None, block: int) -> tuple:
    """Which tiles of keys a tile of queries visits, and which of them need no mask.

    first, last: the queries stand at all positions from first to last, with first at most last. Positions may be
        negative or beyond the keys. They are between -2⁴¹ and 2⁴¹.
    key_length: keys 0 … key_length - 1 exist; 0 to 2⁴⁰ of them. Tile j holds those of the keys j · block …
        (j + 1) · block - 1 that exist. block: at least 1.
    before, after: the query at position p sees the keys p - before … p + after that exist. Both are 0 or more, or
        None: no bound on this side.
    Returns: a tuple or list of four Python ints, (begin, whole_begin, whole_end, end), with begin ≤ whole_begin ≤
    whole_end ≤ end. Tiles begin … end - 1 are exactly those that hold a key which at least one of the queries sees.
    Tiles whole_begin … whole_end - 1 are exactly those that hold `block` keys and of which every query sees every key.
    If no query sees a key, begin = end; if no tile is whole, whole_begin = whole_end: either may then be anywhere.
    It takes as long for 2⁴⁰ keys or queries as for few: without a loop through tiles, keys or queries.
    """
    # BEGIN SOLUTION
    def keys_between(left_query, right_query):
        """The keys from before the one query up to after the other, cut where the keys end."""
        start = 0 if before is None else max(0, left_query - before)
        stop = key_length if after is None else min(key_length, right_query + after + 1)
        return start, stop

    start, stop = keys_between(first, last)  # seen by at least one query
    begin = start // block
    end = -(-stop // block) if start < stop else begin
    start, stop = keys_between(last, first)  # seen by every query
    whole_begin = min(-(-start // block), end)
    whole_end = max(stop // block, whole_begin)
    return begin, whole_begin, whole_end, end
    # END SOLUTION


# %%
best_key_tiles = check("17.2", key_tiles).best
