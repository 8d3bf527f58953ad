# %% [markdown]
# # 17 · Not every key: windows, sinks and chosen keys

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device

import torch

device = default_device()

# %% [markdown]
# **One window, three conventions.** A model card says "a window of 128". How many keys does a query see, and does the
# number count its own? Each library answers in its own way, and none of them raises an error for the wrong number.
#
# - **FlashAttention** takes a pair, `window_size=(left, right)`, and a query at position $p$ sees the keys from
#   $p - \text{left}$ to $p + \text{right}$, both included. A side of -1 has no bound.
# - **transformers** has `sliding_window`, which counts the query's own key, as model cards do.
# - **This course's library** takes the number of keys *before* the query's own.
#
# Until August 2025 transformers gave its own number to FlashAttention, and each query saw one key too many
# ([hf#39408](https://github.com/huggingface/transformers/issues/39408)). The text stayed fluent.

# %%
# Exercise 17.1 · One window, three conventions
def visible(library: str, window: int | tuple, query_length: int, key_length: int) -> torch.Tensor:
    """Which keys each query sees, if a library is given this window.

    library: "course_lib", "flash_attn" or "transformers". A query at position p sees, of the keys that exist:
        "course_lib": window is 0 or more, and counts the keys before its own: p - window … p;
        "transformers": window is 1 or more, and counts its own key too: p - window + 1 … p;
        "flash_attn": window is a tuple (left, right), each 0 or more, or -1 for no bound on that side, with
        causal=False: p - left … p + right.
    query_length, key_length: any lengths of at least 1. They are aligned to the end: query i stands at position
        i + key_length - query_length, which may be negative.
    Returns: bool [query_length, key_length], True where the query sees the key. A row may have none.
    """
    # BEGIN SOLUTION
    if library == "flash_attn":
        before, after = (key_length + query_length if side == -1 else side for side in window)
    else:
        before, after = window - (library == "transformers"), 0
    position = torch.arange(query_length)[:, None] + key_length - query_length
    key = torch.arange(key_length)
    return (key >= position - before) & (key <= position + after)
    # END SOLUTION


def arguments(keys: int) -> dict:
    """The window to give to each library for causal attention in which a query sees `keys` keys, its own included.

    keys: at least 1.
    Returns: a dict {"course_lib": …, "flash_attn": …, "transformers": …} of Python ints, with a tuple or list
    (left, right) of two for "flash_attn". Each makes `visible` show the same keys: give numbers that depend on `keys`
    alone, and bound every side.
    """
    # BEGIN SOLUTION
    return {"course_lib": keys - 1, "flash_attn": (keys - 1, 0), "transformers": keys}
    # END SOLUTION


# %%
best_visible, best_arguments = check("17.1", visible, arguments).best

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

# %% [markdown]
# **Does choosing pay?** DeepSeek-V3.2 lets a small *indexer* choose 2,048 keys for each query, and attends to those
# alone. The indexer scores every key that a query may see, so it is $O(N^2)$ again, with a smaller factor: it has 64
# heads of 128 and no values. Attention to the chosen keys costs the same for each query, once there are $k$ keys. It
# runs at a lower rate, because it gathers its keys. So chosen keys lose on short texts, and win from some length on, if
# the indexer is cheap enough.
#
# A pair of a query and a key costs $4 \cdot H \cdot D$ FLOPs in attention, half for the score and half for the value,
# and $2 \cdot H_i \cdot D_i$ in the indexer. Everything else is a sum of $\min(t + 1, \text{most})$ over queries $t$.

# %%
# Exercise 17.7 · From which length choosing pays
def flops(kind: str, length: int, shape: dict) -> int:
    """The FLOPs of causal attention over a prompt of `length` tokens, 0 to 2⁴⁰, as an exact Python int.

    kind: "dense", "window" or "chosen". Query t, counted from 0, sees t + 1 keys. It attends to all of them; to the
        last shape["window"], its own included; or to shape["k"] chosen ones; to fewer where there are not so many.
    shape: a dict of whole numbers, each at least 1: "query_heads", "head_dim", "index_heads", "index_dim", "window"
        and "k".
    A query attends to a key for 4 · query_heads · head_dim FLOPs. For "chosen", an indexer also scores every key that a
    query sees, for 2 · index_heads · index_dim FLOPs each, however short the prompt is. Nothing else is counted. There
    may be 2⁴⁰ tokens, so without a loop through queries.
    """
    # BEGIN SOLUTION
    def pairs(most):
        full = min(length, most)
        return full * (full + 1) // 2 + (length - full) * full

    attended = 4 * shape["query_heads"] * shape["head_dim"]
    if kind == "chosen":
        return 2 * shape["index_heads"] * shape["index_dim"] * pairs(length) + attended * pairs(shape["k"])
    return attended * pairs(length if kind == "dense" else shape["window"])
    # END SOLUTION


def crossover(shape: dict, rates: dict) -> int | None:
    """The least length, at least 1, from which on chosen keys never take longer than dense attention; None if none is.

    shape: as for `flops`. rates: FLOPs a second, whole numbers or floats above 0: "dense" for dense attention, "index"
        for the indexer's scores, "chosen" for attention to the chosen keys. The indexer runs first, then attention.
    Returns: a Python int or None. If both take equally long at a length, chosen keys do not take longer there. No two
    times are so close, unless equal, that float64 could not tell them apart; equal ones are exact in float64. The
    length is at most 2⁴⁰, so it must not be searched one token after another.
    """
    # BEGIN SOLUTION
    dense = 4 * shape["query_heads"] * shape["head_dim"] / rates["dense"]  # seconds for a pair
    index = 2 * shape["index_heads"] * shape["index_dim"] / rates["index"]
    if index >= dense:
        return None
    chosen = 4 * shape["query_heads"] * shape["head_dim"] / rates["chosen"]

    def pays(length):
        full = min(length, shape["k"])
        attended = full * (full + 1) // 2 + (length - full) * full
        return index * (length * (length + 1) // 2) + chosen * attended <= dense * (length * (length + 1) // 2)

    high = 1
    while not pays(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
    # END SOLUTION


# %%
best_flops, best_crossover = check("17.7", flops, crossover).best
