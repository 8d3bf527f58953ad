"""The parts that kernels over block lists are made of: the next entry of a list, and the mask of a partial tile.

A kernel's own tile may be smaller than the lists' block: an entry is then worked on in pieces, one after the other.
"""

import triton
import triton.language as tl

# Arguments that Triton is not to compile anew for when one is 1 or a multiple of 16.
LIST_SIZES = ("query_heads", "heads_per_key_head", "query_length", "key_length", "list_batch_stride",
              "list_head_stride", "padded_length")  # fmt: skip
# What the compile gate is told of the arguments that say lists.
LIST_NAMES = ("full_counts_pointer", "full_indices_pointer", "partial_counts_pointer", "partial_indices_pointer",
              "partial_masks_pointer")  # fmt: skip
LIST_TYPES = {**dict.fromkeys(LIST_NAMES, "*i32"), "masks_pointer": "*i8"}


@triton.jit
def list_of_row(lists, row, length):
    """The list of a row of tiles, out of (counts, indices, masks' numbers), with `length` places a row.

    Returns the count, and the pointers to its indices and its masks' numbers. Full tiles have no masks: their indices
    stand in for the numbers, which nobody reads.
    """
    counts, indices, numbers = lists
    place = row.to(tl.int64) * length
    return tl.load(counts + row), indices + place, numbers + place


@triton.jit
def load_entry(indices, numbers, step, steps, PIECES: tl.constexpr, MASKED: tl.constexpr):
    """(tile, number of its mask) at a step of a list whose entries take PIECES steps each; 0 beyond the last step.

    Without MASKED the number means nothing.

    Kernels ask for the next step's entry before they work on this one's: were the address of a tile known in its own
    iteration only, Triton would keep one tile in flight, whatever num_stages says.
    """
    tile = tl.load(indices + step // PIECES, mask=step < steps, other=0)
    number = tile
    if MASKED:
        number = tl.load(numbers + step // PIECES, mask=step < steps, other=0)
    return tile, number


@triton.jit
def load_mask(masks, number, queries, keys, QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr):
    """Which pairs of a partial tile are visible, bool, of the shape that queries and keys broadcast to.

    queries, keys: places within the tile, such as [BLOCK_M, 1] and [1, BLOCK_N].
    """
    mask = masks + number.to(tl.int64) * (QUERY_ROWS * KEY_ROWS)
    return tl.load(mask + (queries * KEY_ROWS + keys)) != 0
