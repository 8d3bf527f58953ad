"""Exercise 17.5: the lists of full and partial tiles of a mask, and their transpose."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level


def listed(chosen):
    """The counts of the rows of a bool matrix, and where they are True, ascending, -1 behind."""
    counts = chosen.sum(1)
    order = chosen.int().argsort(dim=1, descending=True, stable=True)
    used = torch.arange(chosen.shape[1]) < counts[:, None]
    return counts.int(), torch.where(used, order, -1).int()


def lists_of(visible, block):
    query_length, key_length = visible.shape
    query_tiles, key_tiles = -(-query_length // block), -(-key_length // block)
    padded = torch.zeros(query_tiles * block, key_tiles * block, dtype=torch.bool)
    padded[:query_length, :key_length] = visible
    tiles = padded.view(query_tiles, block, key_tiles, block).transpose(1, 2)
    seen = tiles.sum((2, 3))
    full = seen == block * block
    partial = (seen > 0) & ~full
    return *listed(full), *listed(partial)


def transpose_of(counts, indices, key_tiles):
    used = torch.arange(indices.shape[1]) < counts[:, None]
    query_tile = torch.arange(len(counts))[:, None].expand(indices.shape)
    visited = torch.zeros(len(counts), key_tiles, dtype=torch.bool)
    visited[query_tile[used], indices[used].long()] = True
    by_key = visited.T
    return listed(by_key)


def mask_of(draw, pattern, queries, keys):
    query, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    if pattern == "causal":
        return key <= query
    if pattern == "window":
        return (key <= query) & (key > query - 9)
    if pattern == "kept":  # the first tokens, and a window
        return (key <= query) & ((key < 3) | (key > query - 6))
    if pattern == "documents":
        ends = draw.integers(2, low=0, high=keys)
        return (key <= query) & (torch.bucketize(key, ends.sort()[0]) == torch.bucketize(query, ends.sort()[0]))
    if pattern == "sparse":
        return draw.uniform(queries, keys) < 0.02
    if pattern == "dense":
        return draw.uniform(queries, keys) > 0.02
    if pattern == "one hidden":
        return (torch.arange(queries * keys) != draw.integer(0, queries * keys - 1)).view(queries, keys)
    return torch.full((queries, keys), pattern == "all")


def of_mask(draw, *, pattern, queries, keys, block):
    return mask_of(draw, pattern, queries, keys), block


def of_lists(draw, *, query_tiles, key_tiles, share, spare, rubbish):
    """Lists of random tiles, with room for `spare` entries more than the longest needs, which hold what says nothing"""
    counts, indices = listed(draw.uniform(query_tiles, key_tiles) < share)
    width = max(1, int(counts.max()) + spare)
    indices = torch.nn.functional.pad(indices, (0, spare + 1), value=-1)[:, :width].contiguous()
    if rubbish is not None:
        low, high = {"tile": (0, key_tiles), "far": (10**8, 2 * 10**9)}[rubbish]
        unused = torch.arange(width) >= counts[:, None]
        indices[unused] = draw.integers(query_tiles, width, low=low, high=high).int()[unused]
    return counts, indices, key_tiles


def list_cases(draw):
    def lists(name, pattern, queries, keys, block):
        return Case(name, of_mask(draw, pattern=pattern, queries=queries, keys=keys, block=block), "block_lists")

    def transpose(name, query_tiles, key_tiles, share=0.4, spare=1, rubbish=None):
        return Case(name, of_lists(draw, query_tiles=query_tiles, key_tiles=key_tiles, share=share, spare=spare,
                                   rubbish=rubbish), "transposed")  # fmt: skip

    return [
        lists("causal, 12 × 12, tiles of 4", "causal", 12, 12, 4),
        lists("all visible, 8 × 8, tiles of 4", "all", 8, 8, 4),
        lists("nothing visible, 8 × 12", "none", 8, 12, 4),
        lists("all visible, 10 × 14: the last tiles are cut", "all", 10, 14, 4),
        lists("all visible, 8 × 14: the last keys are cut", "all", 8, 14, 4),
        lists("all visible, 10 × 12: the last queries are cut", "all", 10, 12, 4),
        lists("a window of 9 keys, 32 × 32", "window", 32, 32, 4),
        lists("kept first tokens and a window, 32 × 32", "kept", 32, 32, 4),
        lists("documents, 30 × 30, tiles of 3", "documents", 30, 30, 3),
        lists("causal, 5 queries at the end of 23 keys", "causal", 5, 23, 4),
        lists("few pairs, 40 × 40", "sparse", 40, 40, 8),
        lists("a few pairs hidden, 40 × 40", "dense", 40, 40, 4),
        lists("all visible, 300 tiles in a row", "all", 2, 600, 2),
        lists("one pair hidden, a tile of 64 × 64", "one hidden", 64, 64, 64),
        lists("tiles of one pair", "causal", 5, 7, 1),
        lists("a tile larger than the mask", "all", 5, 7, 16),
        transpose("transposed: 4 tiles of queries, 6 of keys", 4, 6),
        transpose("transposed: 5 tiles of queries, 5 of keys, mostly empty", 5, 5, 0.1),
        transpose("transposed: 6 tiles of queries, 3 of keys, all visited", 6, 3, 1.0, 0),
        transpose("transposed: no tile is visited", 3, 4, 0.0),
        transpose("transposed: other tiles after the count", 6, 6, rubbish="tile"),
        transpose("transposed: any number after the count", 6, 6, rubbish="far"),
        transpose("transposed: one tile of keys", 5, 1),
        transpose("transposed: 300 tiles of queries, all visit all", 300, 2, 1.0),
    ]


OF_MASKS = Contract(
    of_mask,
    choices={
        "pattern": tuple(Level(one, f"pattern {one}") for one in
                         ("causal", "window", "kept", "documents", "sparse", "dense", "all", "none")),
        "queries": (1, 2, 7, 16, 33, 65), "keys": (1, 2, 7, 16, 33, 65), "block": (1, 2, 3, 8, 16, 64),
    },
    says={"pattern": "any pattern", "queries": "any lengths of at least 1", "block": "at least 1"},
    entry="block_lists", most=24,
)  # fmt: skip
OF_LISTS = Contract(
    of_lists,
    choices={
        "query_tiles": (1, 2, 5, 17), "key_tiles": (1, 2, 5, 17), "share": (0.0, 0.1, 0.5, 1.0),
        "spare": tuple(Level(n, f"{n} entries more than needed") for n in (0, 1, 20)),
        "rubbish": (Level(None, "-1 after the count"), Level("tile", "tiles there"), Level("far", "anything there")),
    },
    says={"query_tiles": "[query_tiles, width]", "spare": "at least the largest count", "rubbish": "may hold anything",
          "share": "which may be 0"},
    entry="transposed", most=20,
)  # fmt: skip

PADDED, PAIRS, ENTRIES = "torch.zeros(query_tiles * block, key_tiles * block", "block * block", "used, order, -1"
QUERIES = "(query_length - block * torch.arange(query_tiles)).clamp(max=block)[:, None]"
KEYS = "(key_length - block * torch.arange(key_tiles)).clamp(max=block)"
CUT = (
    "A tile that the end of the queries or keys cuts was called full, because all its pairs that exist are visible. A "
    "full tile is visited without a mask, so it must have all its block · block pairs (pytorch#159247, #160861)."
)
BORDER = "(tiles[..., [0, -1], :].sum((2, 3)) + tiles[..., [0, -1]].sum((2, 3)))"
BY_COUNT = "torch.arange(indices.shape[1]) < counts[:, None]"
CORNER = "tiles[..., 0, 0].int() + tiles[..., 0, -1] + tiles[..., -1, 0] + tiles[..., -1, -1]"
OF_BOTH = (
    *edits("Entries after the count are not -1. Only the first `count` entries of a row are tiles.",
        unused_not_marked=(ENTRIES, "used, order, order"), unused_not_marked__0=(ENTRIES, "used, order, 0"),
        unused_not_marked__columns=(ENTRIES, f"used, order, {'chosen.shape[1]'}")),
    *edits("A row may have more than 255 tiles, but the counts went through 8 bits.",
        counts_wrap=("counts.int(), ", "(counts % 256).int(), ")),
    *edits("A row's tiles are not moved to its front: entry j is tile j or -1. Sort them, or find their places with a "
        "cumsum.",
        not_moved_to_the_front=("torch.where(used, order, -1)",
        "torch.where(chosen, torch.arange(chosen.shape[1]), -1)")),
    *edits("The last tile of each list is missing: a row has `count` tiles.",
        last_entry_missing=(ENTRIES, "used & (torch.arange(chosen.shape[1]) < counts[:, None] - 1), order, -1")),
)  # fmt: skip
IN_LISTS = (
    *OF_BOTH,
    *edits(CUT, cut_tile_full=(PAIRS, f"{QUERIES} * {KEYS}"),
        cut_tile_full__queries=(PAIRS, f"{QUERIES} * block"), cut_tile_full__keys=(PAIRS, f"{KEYS} * block")),
    *edits("Pairs beyond the last query or key were taken for visible. Pad the mask with False.",
        padded_with_true=(PADDED, PADDED.replace("zeros", "ones"))),
    *edits("Tiles that the end cuts are in no list, so their pairs are lost. Such a tile is partial if one of its "
        "pairs is visible.",
        cut_tile_lost=("padded[:query_length, :key_length] = visible", "padded[:query_length // block * block, "
        ":key_length // block * block] = visible[:query_length // block * block, :key_length // block * block]"),
        cut_tile_lost__queries=("padded[:query_length, :key_length] = visible",
        "padded[:query_length // block * block, :key_length] = visible[:query_length // block * block]"),
        cut_tile_lost__keys=("padded[:query_length, :key_length] = visible",
        "padded[:query_length, :key_length // block * block] = visible[:, :key_length // block * block]")),
    *edits("Full tiles are in both lists, so their pairs count twice. A partial tile is one that is not full.",
        full_in_both=("(seen > 0) & ~full", "seen > 0")),
    *edits("All tiles that are not full were called partial, even those without a visible pair, so nothing is skipped.",
        empty_called_partial=("(seen > 0) & ~full", "~full")),
    *edits("No tile was called full. A tile with all its pairs visible needs no mask.",
        never_full=("seen == block * block", "seen > block * block")),
    *edits("Tiles were judged by only some of their pairs. In a full tile all pairs are visible, and in a partial one "
        "any single pair may be.",
        corners_alone=("tiles.sum((2, 3))", f"({CORNER}) * block * block // 4"),
        corners_alone__for_full=("seen == block * block", f"({CORNER}) == 4"),
        corners_alone__border=("seen > 0", f"{BORDER} > 0"), corners_alone__for_partial=("seen > 0", f"({CORNER}) > 0"),
        corners_alone__first_pair=("tiles.sum((2, 3))", "tiles[..., 0, 0] * block * block")),
    *edits("A large tile with one hidden pair was called full, as with a mean in float16. Use `all`, or count pairs.",
        one_hidden=("seen == block * block", "seen >= block * block * (1 - 2**-12)")),
    *edits("The two lists are exchanged: the full tiles come first.",
        lists_exchanged=("*listed(full), *listed(partial)", "*listed(partial), *listed(full)")),
    *edits("True was taken for a hidden pair. It means that the query sees the key.",
        turned_round=(":key_length] = visible", ":key_length] = ~visible")),
    *edits("Tiles are listed by columns. Row i of a list has the tiles of keys that tile i of queries visits.",
        by_columns=("tiles.sum((2, 3))", "tiles.sum((2, 3)).T")),
)  # fmt: skip
IN_TRANSPOSE = (
    *OF_BOTH,
    *edits("Entries after a row's count were taken for tiles. They may hold anything, so use the counts.",
        counts_ignored=(BY_COUNT, "(indices >= 0) & (indices < key_tiles)"),
        counts_ignored__minus_one_too=(BY_COUNT, "(indices >= -1) & (indices < key_tiles)"),
        counts_ignored__clamped=(BY_COUNT, "indices < 2**31", "indices[used].long()",
        "indices[used].long().clamp(0, key_tiles - 1)")),
    *edits("The lists come back as they were. List j has the tiles of queries that visit tile j of keys.",
        not_transposed=("by_key = visited.T", "by_key = visited")),
    *edits("Tiles of queries that visit nothing were left out, so those after them have too small numbers.",
        empty_rows_left_out=("torch.arange(len(counts))[:, None]", "((counts > 0).long().cumsum(0) - 1)[:, None]")),
    *edits("A row has one tile too many or too few. Entry j is used if j < count.",
        count_off_by_one=(BY_COUNT, "torch.arange(1, 1 + indices.shape[1]) < counts[:, None]"),
        count_off_by_one__more=(BY_COUNT, "(torch.arange(indices.shape[1]) <= counts[:, None]) & (indices >= 0) & "
        "(indices < key_tiles)")),
)  # fmt: skip

RIGHT = {"block_lists": lists_of, "transposed": transpose_of}


def another_size(case, seen, got):
    return any(one.shape != right.shape for one, right in zip(got, RIGHT[case.entry](*case.args)))


def not_ascending(case, seen, got):
    """Whether some row's listed tiles do not rise."""
    return any(
        bool(((table[:, 1:] <= table[:, :-1]) & (torch.arange(1, table.shape[1]) < counts[:, None])).any())
        for counts, table in zip(got[::2], got[1::2])
    )


EXERCISE = Exercise(
    id="17.5", title="Block lists, and their transpose", entries=("block_lists", "transposed"), cases=list_cases,
    oracle=RIGHT, contracts=(OF_MASKS, OF_LISTS),
    models=(model_of(lists_of, IN_LISTS, (listed,), entry="block_lists"),
            model_of(transpose_of, IN_TRANSPOSE, (listed,), entry="transposed")),
    mistakes=(
        Mistake("another_size", "A table has the wrong size. It is [query_tiles, key_tiles], transposed [key_tiles, "
            "query_tiles], however long its lists are.", when=another_size),
        Mistake("not_ascending", "A row's tiles are not in ascending order. Sort them, or use a stable argsort.",
            when=not_ascending),
    ),
    hints=(
        "Pad the mask with False until both lengths are multiples of `block`. Then count what is True in a tile: block "
        "· block pairs make it full, and fewer, but at least one, make it partial.",
        "padded.view(query_tiles, block, key_tiles, block) holds a tile in its axes 1 and 3. Sum over these, or take "
        "`all` and `any`.",
        "Both functions need, for each row of a matrix of tiles, the list of its True entries. A stable argsort that "
        "puts True first gives them in ascending order; set the entries from the count on to -1.",
        "transposed: rebuild the matrix. Set visited[row, tile] = True for the first `count` entries of each row, then "
        "list the rows of visited.T.",
    ),
)  # fmt: skip
