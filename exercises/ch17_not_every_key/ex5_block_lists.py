"""Exercise 17.5: the lists of full and partial tiles of a mask, and their transpose."""

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
    return listed(visited.T)


def of_mask(draw, pattern, queries, keys, block):
    query, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    causal, ends = key <= query, draw.integers(2, low=0, high=keys).sort()[0]
    masks = {
        "causal": causal,
        "window": causal & (key > query - 9),
        "kept": causal & ((key < 3) | (key > query - 6)),  # the first tokens, and a window
        "documents": causal & (torch.bucketize(key, ends) == torch.bucketize(query, ends)),
        "sparse": draw.uniform(queries, keys) < 0.02,
        "dense": draw.uniform(queries, keys) > 0.02,
        "one hidden": (torch.arange(queries * keys) != draw.integer(0, queries * keys)).view(queries, keys),
        "all": torch.full((queries, keys), True),
        "none": torch.full((queries, keys), False),
    }
    return masks[pattern], block


def of_lists(draw, query_tiles, key_tiles, share=0.4, spare=1, rubbish=None):
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
    masks = {
        "causal, 12 × 12, tiles of 4": ("causal", 12, 12, 4),
        "all visible, 8 × 8, tiles of 4": ("all", 8, 8, 4),
        "nothing visible, 8 × 12": ("none", 8, 12, 4),
        "all visible, 10 × 14: the last tiles are cut": ("all", 10, 14, 4),
        "all visible, 8 × 14: the last keys are cut": ("all", 8, 14, 4),
        "all visible, 10 × 12: the last queries are cut": ("all", 10, 12, 4),
        "a window of 9 keys, 32 × 32": ("window", 32, 32, 4),
        "kept first tokens and a window, 32 × 32": ("kept", 32, 32, 4),
        "documents, 30 × 30, tiles of 3": ("documents", 30, 30, 3),
        "causal, 5 queries at the end of 23 keys": ("causal", 5, 23, 4),
        "few pairs, 40 × 40": ("sparse", 40, 40, 8),
        "a few pairs hidden, 40 × 40": ("dense", 40, 40, 4),
        "all visible, 300 tiles in a row": ("all", 2, 600, 2),
        "one pair hidden, a tile of 64 × 64": ("one hidden", 64, 64, 64),
        "a tile larger than the mask": ("all", 5, 7, 16),
    }
    lists = {
        "4 tiles of queries, 6 of keys": (4, 6),
        "5 tiles of queries, 5 of keys, mostly empty": (5, 5, 0.1),
        "6 tiles of queries, 3 of keys, all visited": (6, 3, 1.0, 0),
        "other tiles after the count": (6, 6, 0.4, 1, "tile"),
        "any number after the count": (6, 6, 0.4, 1, "far"),
        "300 tiles of queries, all visit all": (300, 2, 1.0),
    }
    return [Case(name, of_mask(draw, *given), "block_lists") for name, given in masks.items()] + [
        Case(f"transposed: {name}", of_lists(draw, *given), "transposed") for name, given in lists.items()
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

PAIRS, ENTRIES, TILES, SEEN = "block * block", "used, order, -1", "tiles = padded", "tiles.sum((2, 3))"
QUERIES = "(query_length - block * torch.arange(query_tiles)).clamp(max=block)[:, None]"
KEYS = "(key_length - block * torch.arange(key_tiles)).clamp(max=block)"
CUT_QUERIES = "padded[query_length // block * block:] = False\n"
CUT_KEYS = "padded[:, key_length // block * block:] = False\n"
BORDER = "(tiles[..., [0, -1], :].sum((2, 3)) + tiles[..., [0, -1]].sum((2, 3)))"
BY_COUNT = "torch.arange(indices.shape[1]) < counts[:, None]"
CORNERS = "(tiles[..., 0, 0].int() + tiles[..., 0, -1] + tiles[..., -1, 0] + tiles[..., -1, -1])"
OF_BOTH = (
    *edits("Entries after the count are not -1. Only the first `count` entries of a row are tiles.",
        unused_not_marked=(ENTRIES, "used, order, order"), unused_not_marked__0=(ENTRIES, "used, order, 0"),
        unused_not_marked__columns=(ENTRIES, "used, order, chosen.shape[1]")),
    *edits("A count above 255 was cut to its last 8 bits.", counts_wrap=("counts.int(), ", "(counts % 256).int(), ")),
    *edits("A row's tiles are not moved to its front: entry j is tile j or -1. Sort them, or find places by a cumsum.",
        not_moved_to_the_front=(ENTRIES, "chosen, torch.arange(chosen.shape[1]), -1")),
    *edits("The last tile of each list is missing: a row has `count` tiles.",
        last_entry_missing=(ENTRIES, "used & (torch.arange(chosen.shape[1]) < counts[:, None] - 1), order, -1")),
)  # fmt: skip
IN_LISTS = (
    *OF_BOTH,
    *edits("A tile that the end cuts was called full. A full tile gets no mask, so it must have all its block · block "
        "pairs (pytorch#159247, #160861).", cut_tile_full=(PAIRS, f"{QUERIES} * {KEYS}"),
        cut_tile_full__queries=(PAIRS, f"{QUERIES} * block"), cut_tile_full__keys=(PAIRS, f"{KEYS} * block")),
    *edits("Pairs beyond the last query or key count. Pad the mask with False.", padded_with_true=("zeros", "ones")),
    *edits("Tiles that the end cuts are in no list. Such a tile is partial if one of its pairs is visible.",
        cut_tile_lost=(TILES, CUT_QUERIES + CUT_KEYS + TILES),
        cut_tile_lost__queries=(TILES, CUT_QUERIES + TILES), cut_tile_lost__keys=(TILES, CUT_KEYS + TILES)),
    *edits("Full tiles are in both lists and count twice. A full one is not partial.", full_in_both=("& ~full", "")),
    *edits("Tiles without a visible pair were called partial.", empty_called_partial=("(seen > 0) &", "")),
    *edits("No tile was called full. One with all pairs visible needs no mask.", never_full=("seen ==", "seen >")),
    *edits("Tiles were judged by some of their pairs. In a full tile all are visible, in a partial one any may be.",
        corners_alone=(SEEN, f"{CORNERS} * block * block // 4"),
        corners_alone__for_full=("seen == block * block", f"{CORNERS} == 4"),
        corners_alone__border=("seen > 0", f"{BORDER} > 0"), corners_alone__for_partial=("seen > 0", f"{CORNERS} > 0"),
        corners_alone__first_pair=(SEEN, "tiles[..., 0, 0] * block * block")),
    *edits("A large tile with one hidden pair was called full, as with a mean in float16. Use `all`, or count pairs.",
        one_hidden=("seen == block * block", "seen >= block * block * (1 - 2**-12)")),
    *edits("The two lists are exchanged: the full tiles come first.",
        lists_exchanged=("*listed(full), *listed(partial)", "*listed(partial), *listed(full)")),
    *edits("True was taken for hidden. It means that the query sees the key.",
        turned_round=("] = visible", "] = ~visible")),
    *edits("Tiles are listed by columns. Row i belongs to tile i of the queries.", by_columns=(SEEN, f"{SEEN}.T")),
)  # fmt: skip
IN_TRANSPOSE = (
    *OF_BOTH,
    *edits("Entries after a row's count were taken for tiles. They may hold anything, so use the counts.",
        counts_ignored=(BY_COUNT, "(indices >= 0) & (indices < key_tiles)"),
        counts_ignored__minus_one_too=(BY_COUNT, "(indices >= -1) & (indices < key_tiles)"),
        counts_ignored__clamped=(BY_COUNT, "indices < 2**31", "indices[used].long()",
        "indices[used].long().clamp(0, key_tiles - 1)")),
    *edits("The lists come back as they were. Row j is for tile j of keys.", not_transposed=("visited.T", "visited")),
    *edits("Tiles of queries that visit nothing were left out, so those after them have too small numbers.",
        empty_rows_left_out=("torch.arange(len(counts))[:, None]", "((counts > 0).long().cumsum(0) - 1)[:, None]")),
    *edits("A row has one tile too many or too few. Use j < count.", count_off_by_one=(BY_COUNT, f"{BY_COUNT} - 1"),
        count_off_by_one__more=(BY_COUNT, f"({BY_COUNT} + 1) & (indices >= 0) & (indices < key_tiles)")),
)  # fmt: skip

RIGHT = {"block_lists": lists_of, "transposed": transpose_of}


def not_ascending(case, seen, got):
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
            "query_tiles], however long its lists are.", when=lambda case, seen, got: any(
                one.shape != right.shape for one, right in zip(got, RIGHT[case.entry](*case.args)))),
        Mistake("not_ascending", "A row's tiles do not ascend. Sort them, or use a stable argsort.",
            when=not_ascending),
    ),
    hints=(
        "Pad the mask with False until both lengths are multiples of `block`. Then count the True pairs of a tile: it "
        "is full with block · block of them, and partial with fewer, but at least one.",
        "padded.view(query_tiles, block, key_tiles, block) has a tile in axes 1 and 3: sum, `all` or `any` over these.",
        "Both functions need, for each row of a matrix of tiles, the list of its True entries. A stable argsort that "
        "puts True first gives them in ascending order; set the entries from the count on to -1.",
        "transposed: set visited[row, tile] = True for each row's first `count` entries, then list visited.T's rows.",
    ),
)  # fmt: skip
