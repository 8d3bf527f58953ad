"""Block lists: which tiles of keys each tile of queries visits, and which of these need a mask.

The pairs of query and key are cut into tiles of query_rows × key_rows, 128 × 128 unless said otherwise. A tile is

    full       all of its pairs exist and are visible: the kernel computes it without a mask
    partial    some are: the kernel hides the others
    hidden     none is: on no list, so it is neither read nor computed

For each row of tiles there are two lists, of its full and its partial tiles. The gradients of keys and values are sums
over queries, so their kernel needs the transposed lists: the tiles of queries for each column of tiles.

**The mask of a partial tile** is a tile of bytes, made here once, and partial tiles with equal masks share one. So any
function of Python can be a mask, and it runs when the lists are built, not in the kernel. The other way is to hand a
Triton function to the kernel. That reads no bytes, but a mask then is code: the kernel is compiled anew for each, in
both directions, and a mask that is data (documents, a random pattern) needs pointers of its own. A tile of bytes is 16
KB, beside 64 KB of keys and values at head_dim 128 in 16 bits, and the L2 cache serves the shared ones.

Memory, with T = query_length / query_rows and U = key_length / key_rows rounded up: 24 · T · U + 8 · (T + U) bytes for
each batch and head that has lists of its own, and query_rows · key_rows bytes for each different mask. At N = 65,536,
causal: 6.3 MB of lists, and 16 KB for the one mask that all 512 tiles on the diagonal share. The whole mask would be
4.3 GB. A mask that is random within its tiles shares nothing: its partial tiles take as much as the mask.
Time: the mask function is called once for each row of tiles, on [batch, heads, query_rows, key_length] pairs, and a
mask of [query_length, key_length] never exists.
Source: Dong et al., Flex Attention, arXiv 2412.05496.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

LEAST_ROWS = 16  # of a tile of tl.dot
BLOCK = 128
MIXER = 0x2545F4914F6CDD1D  # an odd number with its bits well mixed


class TileLists(NamedTuple):
    """For each row of tiles how many it visits, which, and the number of each one's mask; int32.

    counts: [batch or 1, heads or 1, rows of tiles]. indices, masks: [batch or 1, heads or 1, rows of tiles, tiles of a
    row]; the first `count` entries of a row are its list, in ascending order, and the others are 0. Full tiles have no
    masks.
    """

    counts: torch.Tensor
    indices: torch.Tensor
    masks: torch.Tensor | None


@dataclass(frozen=True)
class BlockLists:
    """What `block_lists` and `given_block_lists` make. masks: int8 [different masks, query_rows, key_rows], 1: visible.

    full, partial: for each tile of queries its tiles of keys. full_of_keys, partial_of_keys: the transposed lists.
    """

    query_length: int
    key_length: int
    query_rows: int
    key_rows: int
    masks: torch.Tensor
    full: TileLists
    partial: TileLists
    full_of_keys: TileLists
    partial_of_keys: TileLists

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in the order in which `lists_from_tensors` reads them."""
        lists = self.full, self.partial, self.full_of_keys, self.partial_of_keys
        return [self.masks, *(tensor for part in lists for tensor in part if tensor is not None)]


def block_lists(mask, query_length, key_length, *, batch=1, heads=1, query_rows=BLOCK, key_rows=BLOCK, device=None):
    """The lists of a mask.

    Args:
        mask: a function `mask(batch, head, query_position, key_position)` of int64 tensors that broadcast against each
            other, to a bool tensor that broadcasts with them: True where the query sees the key. Positions count from 0
            on either side. Or a bool tensor, [query_length, key_length] or [batch or 1, heads or 1, query_length,
            key_length], and `batch` and `heads` are then its own.
        query_length, key_length: of the tensors that the lists are for; at least 1, and no multiple of anything.
        batch, heads: how many of each have lists of their own; with 1 all share them. Heads are query heads.
        query_rows, key_rows: the block size, powers of two from 16 on.
        device: where the lists are made and lie; the bool tensor's own, or the default device, when None.

    Raises a ValueError that names the argument where it does not fit.
    """
    sizes = {"query_length": query_length, "key_length": key_length, "batch": batch, "heads": heads}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} is {size!r}; it must be an int of at least 1.")
    check_block(query_rows, key_rows)
    if isinstance(mask, torch.Tensor):
        mask, batch, heads, device = mask_of_tensor(mask, query_length, key_length, device)
    device = torch.get_default_device() if device is None else torch.device(device)
    key_tiles = -(-key_length // key_rows)
    batches, all_heads, keys = (torch.arange(size, device=device) for size in (batch, heads, key_tiles * key_rows))
    rows = [[], [], []]  # of each strip: which tiles are full, which partial, and the masks of these
    for first_query in range(0, query_length, query_rows):
        queries = torch.arange(first_query, first_query + query_rows, device=device)
        exists = (queries < query_length)[:, None] & (keys < key_length)[None, :]
        # Positions beyond the last are not handed to the mask, which may look them up in a table.
        seen = mask(batches[:, None, None, None], all_heads[None, :, None, None],
                    queries.clamp(max=query_length - 1)[None, None, :, None],
                    keys.clamp(max=key_length - 1)[None, None, None, :])  # fmt: skip
        check_mask(seen)
        seen = (seen & exists).expand(batch, heads, query_rows, key_tiles * key_rows)
        tiles = seen.unflatten(3, (key_tiles, key_rows)).transpose(2, 3)  # [batch, heads, key_tiles, rows, rows]
        full = tiles.all(-1).all(-1)  # [batch, heads, key_tiles]
        partial = tiles.any(-1).any(-1) & ~full
        for row, made in zip(rows, (full, partial, tiles[partial].to(torch.int8))):
            row.append(made)
    full, partial = (torch.stack(tables, dim=2) for tables in rows[:2])  # [batch, heads, query_tiles, key_tiles]
    masks, numbers_by_strip = shared_masks(torch.cat(rows[2]))
    numbers = torch.zeros(partial.shape, dtype=torch.int32, device=device)
    by_strip = numbers.permute(2, 0, 1, 3)  # a view, in the order in which the masks were made
    by_strip[partial.permute(2, 0, 1, 3)] = numbers_by_strip
    return lists_of_tables(full, partial, masks, numbers, query_length, key_length, query_rows, key_rows)


def given_block_lists(full, partial=None, mask=None, *, query_length, key_length, query_rows=BLOCK, key_rows=BLOCK):
    """The lists from lists that are given, as another library or a model's own choice of blocks makes them.

    full, partial: (counts, indices), ints of the shapes of `TileLists`, of one batch and heads, in any order. All pairs
    that exist in a tile of `full` are visible; in one of `partial`, those for which `mask` says so, and all when it is
    None. Tiles at the end of a length that is no multiple of the block become partial by themselves.

    Raises a ValueError that names the argument where it does not fit: an index outside, one that a row has twice, a
    tile on both lists.
    """
    check_block(query_rows, key_rows)
    tiles = -(-query_length // query_rows), -(-key_length // key_rows)
    full = table_of("full", *full, tiles)
    partial = torch.zeros_like(full) if partial is None else table_of("partial", *partial, tiles)
    if partial.shape != full.shape:
        raise ValueError(f"partial has shape {tuple(partial.shape)}; it must be that of full, {tuple(full.shape)}.")
    if (full & partial).any():
        place = (full & partial).nonzero()[0].tolist()
        raise ValueError(f"full and partial both list the tile {place} [batch, head, row, tile]; it may be on one.")

    # Only tiles whose pairs differ are looked at: those of `partial`, and those that an end cuts.
    cut = torch.zeros(tiles, dtype=torch.bool, device=full.device)
    cut[-1] |= query_length % query_rows > 0
    cut[:, -1] |= key_length % key_rows > 0
    looked_at = partial | (full & cut)
    batch, head, row, column = looked_at.nonzero(as_tuple=True)
    query = (row * query_rows)[:, None, None] + torch.arange(query_rows, device=full.device)[:, None]
    key = (column * key_rows)[:, None, None] + torch.arange(key_rows, device=full.device)
    seen = (query < query_length) & (key < key_length)  # [tiles, query_rows, key_rows]
    if mask is not None:
        place = batch[:, None, None], head[:, None, None]
        visible = mask(*place, query.clamp(max=query_length - 1), key.clamp(max=key_length - 1))
        check_mask(visible)
        seen = seen & (visible | full[looked_at][:, None, None])
    all_seen, some_seen = seen.flatten(1).all(-1), seen.flatten(1).any(-1)
    is_partial = some_seen & ~all_seen
    masks, different = shared_masks(seen[is_partial].to(torch.int8))
    full, partial = full & ~looked_at, torch.zeros_like(full)
    full[looked_at], partial[looked_at] = all_seen, is_partial
    numbers = torch.zeros(full.shape, dtype=torch.int32, device=full.device)
    numbers[partial] = different
    return lists_of_tables(full, partial, masks, numbers, query_length, key_length, query_rows, key_rows)


def lists_of_tables(full, partial, masks, numbers, query_length, key_length, query_rows, key_rows) -> BlockLists:
    """full, partial: which tiles are, [batch, heads, query_tiles, key_tiles]; numbers: of the partial ones' masks."""
    return BlockLists(
        query_length, key_length, query_rows, key_rows, masks,
        lists_of(full), lists_of(partial, numbers),
        lists_of(full.transpose(2, 3)), lists_of(partial.transpose(2, 3), numbers.transpose(2, 3)),
    )  # fmt: skip


def lists_from_tensors(tensors, query_length, key_length, query_rows, key_rows) -> BlockLists:
    """The lists whose `tensors()` these are."""
    masks, *rest = tensors
    full, partial = TileLists(rest[0], rest[1], None), TileLists(*rest[2:5])
    full_of_keys, partial_of_keys = TileLists(rest[5], rest[6], None), TileLists(*rest[7:])
    return BlockLists(
        query_length, key_length, query_rows, key_rows, masks, full, partial, full_of_keys, partial_of_keys
    )


def lists_of(table: torch.Tensor, numbers: torch.Tensor | None = None) -> TileLists:
    """The lists of a table [batch, heads, rows, tiles] of bool, with the masks' numbers of the same shape."""
    counts = table.sum(dim=-1, dtype=torch.int32)
    order = torch.sort(~table, dim=-1, stable=True).indices  # those that are listed first, each part ascending
    listed = table.gather(-1, order)
    masks = None if numbers is None else numbers.gather(-1, order).masked_fill(~listed, 0).contiguous()
    return TileLists(counts, order.masked_fill(~listed, 0).to(torch.int32).contiguous(), masks)


def shared_masks(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The different ones of int8 [tiles, query_rows, key_rows], and which of them each tile has, int32 [tiles]."""
    if len(tiles) == 0:
        return tiles, torch.zeros(0, dtype=torch.int32, device=tiles.device)
    words = tiles.flatten(1).view(torch.int64)
    factors = torch.arange(1, 2 * words.shape[1], 2, device=tiles.device) * MIXER  # sums wrap around, and may collide
    _, numbers = torch.unique((words * factors).sum(1), return_inverse=True)
    first = torch.full((len(tiles),), len(tiles), device=tiles.device)
    first = first.scatter_reduce(0, numbers, torch.arange(len(tiles), device=tiles.device), "amin")[: numbers.max() + 1]
    if not torch.equal(words[first[numbers]], words):  # two different masks with one sum: compare them whole
        different, numbers = torch.unique(words, dim=0, return_inverse=True)
        return different.view(torch.int8).view(-1, *tiles.shape[1:]).contiguous(), numbers.to(torch.int32)
    return tiles[first].contiguous(), numbers.to(torch.int32)


def table_of(name: str, counts, indices, tiles: tuple[int, int]) -> torch.Tensor:
    """Which tiles given lists name: bool [batch, heads, query_tiles, key_tiles]. Raises a ValueError where they err."""
    query_tiles, key_tiles = tiles
    if counts.dim() != 3 or counts.shape[2] != query_tiles or indices.shape[:3] != counts.shape or indices.dim() != 4:
        raise ValueError(
            f"{name} has counts of shape {tuple(counts.shape)} and indices of shape {tuple(indices.shape)}; they must "
            f"be [batch, heads, {query_tiles}] and [batch, heads, {query_tiles}, tiles], for these lengths and blocks."
        )
    if ((counts < 0) | (counts > indices.shape[3])).any():
        raise ValueError(f"{name} has counts from {counts.min()} to {counts.max()}; a row has 0 to {indices.shape[3]}.")
    listed = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
    outside = listed & ((indices < 0) | (indices >= key_tiles))
    if outside.any():
        raise ValueError(f"{name} lists the tile {indices[outside][0].item()}; there are 0 to {key_tiles - 1}.")
    times = torch.zeros(*counts.shape, key_tiles, dtype=torch.int32, device=indices.device)
    times.scatter_add_(3, indices.masked_fill(~listed, 0).long(), listed.to(torch.int32))
    if (times > 1).any():
        batch, head, row, tile = (times > 1).nonzero()[0].tolist()
        raise ValueError(
            f"{name} lists the tile {tile} {times[batch, head, row, tile]} times in row {row} of batch {batch} and "
            f"head {head}; a tile that is there twice would count twice."
        )
    return times > 0


def mask_of_tensor(tensor, query_length: int, key_length: int, device) -> tuple[Callable, int, int, torch.device]:
    """A bool tensor as (mask function, batch, heads, device)."""
    check_mask(tensor)
    if tensor.dim() not in (2, 4) or tensor.shape[-2:] != (query_length, key_length):
        raise ValueError(
            f"mask has shape {tuple(tensor.shape)}; it must be [{query_length}, {key_length}], query_length by "
            "key_length, or [batch or 1, heads or 1] of these."
        )
    four = tensor.expand(1, 1, -1, -1) if tensor.dim() == 2 else tensor
    four = four if device is None else four.to(device)
    return (lambda *place: four[place]), four.shape[0], four.shape[1], four.device


def check_mask(seen) -> None:
    if not isinstance(seen, torch.Tensor) or seen.dtype != torch.bool:
        given = seen.dtype if isinstance(seen, torch.Tensor) else type(seen).__name__
        raise ValueError(
            f"mask gives {given}; it must be, or return, a bool tensor: True where the query sees the key."
        )


def check_block(query_rows, key_rows) -> None:
    for name, rows in (("query_rows", query_rows), ("key_rows", key_rows)):
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < LEAST_ROWS or rows & (rows - 1):
            raise ValueError(f"{name} is {rows!r}; a block has a power of two of rows, {LEAST_ROWS} or more.")


def check_lists(lists, query, key) -> None:
    """Raise a ValueError, with both numbers, unless the lists were made for tensors of these shapes."""
    if not isinstance(lists, BlockLists):
        raise ValueError(f"lists is a {type(lists).__name__}; it must be what block_lists or given_block_lists made.")
    for what, made_for, given in (
        ("query_length", lists.query_length, query.shape[2]),
        ("key_length", lists.key_length, key.shape[2]),
    ):
        if made_for != given:
            raise ValueError(f"lists were made for {what} {made_for}; these tensors have {given}. Build them anew.")
    for what, own, given in zip(("batches", "heads"), lists.full.counts.shape, query.shape):
        if own not in (1, given):
            raise ValueError(f"lists have {own} {what}; query has {given}. They must have as many, or 1 for all.")
    if lists.masks.device != query.device:
        raise ValueError(f"lists are on device {lists.masks.device}; query is on {query.device}.")
