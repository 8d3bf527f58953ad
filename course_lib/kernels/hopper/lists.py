"""Block lists for attention on Hopper: a tile's list, numbered like the blocks of keys of a plain tile.

`key_blocks` numbers the blocks that a tile reads from the first key on, and the kernel takes them from the last to the
first, those under a mask before those that are seen whole. Here a number is a place on the tile's two lists instead:

    0 … full - 1                     the full tiles, the first of the list last
    full … full + partial - 1        the partial ones, likewise: these come first, under their masks

A block of the kernel may be smaller than that of the lists: then each entry counts several times. A tile of queries is
as long as that of the lists, so all consumers of a program go by the same list.
"""

from course_lib.kernels.gluon.names import gl, gluon

QUERY_ROWS, KEY_ROWS = gl.constexpr(128), gl.constexpr(128)  # of a tile of the lists


@gluon.jit
def list_of_tile(lists, sizes, batch_index, head, first_query, BLOCK_N: gl.constexpr):
    """What the functions below ask of a tile: how many blocks are full and partial, and where the lists say which."""
    full_counts, full_indices, partial_counts, partial_indices, partial_masks, masks, strides = lists
    batch_stride, head_stride = strides
    row = batch_index * batch_stride + head * head_stride + first_query // QUERY_ROWS
    place = row.to(gl.int64) * gl.cdiv(sizes.key_length, KEY_ROWS)
    pieces = KEY_ROWS // BLOCK_N
    full = gl.load(full_counts + row) * pieces
    partial = gl.load(partial_counts + row) * pieces
    return full, partial, full_indices + place, partial_indices + place, partial_masks + place, masks


@gluon.jit
def listed_blocks(tile_list):
    """begin, whole_begin, whole_end, end as of `key_blocks`: one block at least, hidden where both lists are empty."""
    full, partial, _full_indices, _partial_indices, _partial_masks, _masks = tile_list
    end = gl.maximum(full + partial, 1)
    return 0, 0, gl.minimum(full, end - 1), end


@gluon.jit
def place_of(block, tile_list, BLOCK_N: gl.constexpr):
    """(whether the block is full, its entry on that list, the first key of it that this piece of the entry has)."""
    full, partial, _full_indices, _partial_indices, _partial_masks, _masks = tile_list
    is_full = block < full
    step = gl.where(is_full, full, full + partial) - 1 - block
    return is_full, step // (KEY_ROWS // BLOCK_N), step % (KEY_ROWS // BLOCK_N) * BLOCK_N


@gluon.jit
def first_key_of(block, tile_list, BLOCK_N: gl.constexpr):
    """The first key of a block; 0 where both lists are empty."""
    full, partial, full_indices, partial_indices, _partial_masks, _masks = tile_list
    is_full, entry, piece = place_of(block, tile_list, BLOCK_N)
    indices = gl.where(is_full, full_indices + entry, partial_indices + entry)
    return gl.load(indices, mask=full + partial > 0, other=0) * KEY_ROWS + piece


@gluon.jit
def hide_by_mask(scores, rows, block, tile_list):
    """Scores [64, BLOCK_N] with minus infinity where the block's mask hides a pair; rows: places in the tile, [64]."""
    _full, partial, _full_indices, _partial_indices, partial_masks, masks = tile_list
    BLOCK_N: gl.constexpr = scores.shape[1]
    is_full, entry, piece = place_of(block, tile_list, BLOCK_N)
    is_partial = (is_full == 0) & (partial > 0)
    number = gl.load(partial_masks + entry, mask=is_partial, other=0)
    mask = masks + number.to(gl.int64) * (QUERY_ROWS * KEY_ROWS) + piece
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores.type.layout))
    offsets = gl.expand_dims(rows, 1) * KEY_ROWS + gl.expand_dims(columns, 0)
    visible = gl.load(mask + offsets, mask=is_partial, other=0) != 0
    return gl.where(visible | is_full, scores, float("-inf"))
