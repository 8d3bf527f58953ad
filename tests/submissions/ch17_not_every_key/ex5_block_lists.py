"""Wrong answers to exercise 17.5, and unusual right ones."""

from tests.submissions.edits import changed

PAD = "F.pad(visible, (0, -key_length % block, 0, -query_length % block))"
FULL, SOME, PARTIAL = "tiles.all(3).all(1)", "tiles.any(3).any(1)", "some & ~full"
MARK = "order[torch.arange(order.shape[1], device=visible.device) >= counts] = -1"
MARK_TRANSPOSED = "order[torch.arange(len(counts), device=counts.device) >= totals[:, None]] = -1"
LIST = "order = chosen.int().argsort(dim=1, descending=True, stable=True)"
LIST_TRANSPOSED = "order = visited.int().argsort(dim=1, descending=True, stable=True)"
USED = "(torch.arange(indices.shape[1], device=counts.device) < counts[:, None])"
PADDED = "    tiles = padded"


def wrong(*replacements):
    return changed("17.5", *replacements)


def full_if_padded(how, outer=""):
    """A tile is full if its pairs are visible in a mask that was filled up in this way."""
    padded = f"{outer}F.pad(visible, {how}.unflatten(1, (-1, block)).unflatten(0, (-1, block))"
    return wrong((FULL, f"{padded}.all(3).all(1) & {SOME}"))


WRONG = {
    # pytorch#159247, #160861: the key length is no multiple of the block, and the last tile gets no mask.
    "cut_tile_full": full_if_padded("(0, -key_length % block, 0, -query_length % block), value=True)"),
    "cut_tile_full__queries": full_if_padded(
        "(0, -key_length % block)), (0, 0, 0, -query_length % block), value=True)", "F.pad("
    ),
    "cut_tile_full__keys": full_if_padded(
        "(0, -key_length % block), value=True), (0, 0, 0, -query_length % block))", "F.pad("
    ),
    "padded_with_true": wrong((PAD, PAD[:-1] + ", value=True)")),
    "cut_tile_lost": wrong(
        (
            PADDED,
            "    padded[query_length // block * block:] = False\n"
            "    padded[:, key_length // block * block:] = False\n" + PADDED,
        )
    ),
    "cut_tile_lost__keys": wrong((PADDED, "    padded[:, key_length // block * block:] = False\n" + PADDED)),
    "cut_tile_lost__queries": wrong((PADDED, "    padded[query_length // block * block:] = False\n" + PADDED)),
    "full_in_both": wrong((PARTIAL, "some")),
    # pytorch#188322: the lists play no part, and every tile is computed.
    "empty_called_partial": wrong((PARTIAL, "~full")),
    "never_full": wrong((FULL, "torch.zeros_like(tiles[:, 0, :, 0])")),
    "corners_alone": wrong(
        (FULL, "tiles[:, [0, 0, -1, -1], :, [0, -1, 0, -1]].all(0)"),
        (SOME, "tiles[:, [0, 0, -1, -1], :, [0, -1, 0, -1]].any(0)"),
    ),
    "corners_alone__for_full": wrong((FULL, "tiles[:, [0, 0, -1, -1], :, [0, -1, 0, -1]].all(0)")),
    "corners_alone__for_partial": wrong((SOME, "tiles[:, [0, 0, -1, -1], :, [0, -1, 0, -1]].any(0)")),
    "corners_alone__border": wrong((SOME, "(tiles[:, [0, -1]].any(3).any(1) | tiles[..., [0, -1]].any(3).any(1))")),
    "one_hidden": wrong((FULL, "(tiles.float().mean(dim=(1, 3)).half() == 1)")),
    "counts_wrap": wrong(("counts[:, 0].int()", "counts[:, 0].to(torch.uint8).int()")),
    "counts_wrap__transposed": wrong(("totals.int(), order", "totals.to(torch.uint8).int(), order")),
    "another_size": wrong(("order.int()]", "order[:, : max(int(counts.max()), 1)].int()]")),
    "another_size__transposed": wrong(
        ("return totals.int(), order", "return totals.int(), order[:, : int(totals.max())]")
    ),
    "another_size__rows": wrong(
        ("    visited = torch", "    key_tiles = 1 + max(indices[row, entry].tolist(), default=0)\n    visited = torch")
    ),
    "empty_rows_left_out": wrong((".long(), row] = True", ".long(), (counts > 0).long().cumsum(0)[row] - 1] = True")),
    "not_ascending__unstable": wrong((LIST, LIST.replace(", stable=True", ""))),
    "lists_exchanged": wrong((f"(full, {PARTIAL})", f"({PARTIAL}, full)")),
    "turned_round": wrong((PAD, PAD.replace("visible", "~visible"))),
    "unused_not_marked": wrong((MARK, "counts + 0")),
    "unused_not_marked__0": wrong((MARK, MARK.replace("-1", "0"))),
    "unused_not_marked__transposed": wrong((MARK_TRANSPOSED, "order + 0")),
    "not_ascending": wrong(
        (LIST, "order = (chosen * torch.arange(1, chosen.shape[1] + 1)).argsort(dim=1, descending=True)")
    ),
    "not_ascending__transposed": wrong(
        (LIST_TRANSPOSED, "order = (visited * torch.arange(1, len(counts) + 1)).argsort(dim=1, descending=True)")
    ),
    "not_moved_to_the_front": wrong((MARK, "order = torch.where(chosen, torch.arange(order.shape[1]), -1)")),
    "last_entry_missing": wrong((MARK, MARK.replace(">= counts", ">= counts - 1"))),
    # attention-gym#34: lists that were cut for a shorter text keep what stands behind their counts.
    "counts_ignored": wrong((USED, "((indices >= 0) & (indices < key_tiles))")),
    "counts_ignored__minus_one_too": wrong((USED, "((indices >= -1) & (indices < key_tiles))")),
    "counts_ignored__clamped": wrong(
        (USED, "(indices < 2**31)"),
        ("indices[row, entry].long()", "indices[row, entry].long().clamp(0, key_tiles - 1)"),
    ),
    "count_off_by_one": wrong((USED, USED.replace("< counts[:, None]", "< counts[:, None] - 1"))),
}

UNUSUAL = {
    "Python loops": """# Exercise 17.5 · Block lists, and their transpose
def table(rows, width):
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    filled = [row + [-1] * (width - len(row)) for row in rows]
    return counts, torch.tensor(filled, dtype=torch.int32)

def block_lists(visible, block):
    rows, columns = visible.shape
    full, partial = [], []
    for i in range(0, rows, block):
        full.append([])
        partial.append([])
        for j in range(0, columns, block):
            seen = int(visible[i : i + block, j : j + block].sum())
            if seen:
                (full if seen == block**2 else partial)[-1].append(j // block)
    width = math.ceil(columns / block)
    return (*table(full, width), *table(partial, width))

def transposed(counts, indices, key_tiles):
    lists = [[] for _ in range(key_tiles)]
    for i, count in enumerate(counts.tolist()):
        for j in indices[i, :count].tolist():
            lists[j].append(i)
    return table(lists, len(counts))
""",
    "pooling and a cumsum": """# Exercise 17.5 · Block lists, and their transpose
def by_cumsum(chosen):
    rows, columns = chosen.shape
    place = (chosen.cumsum(1) - 1).masked_fill(~chosen, columns)
    out = torch.full((rows, columns + 1), -1, dtype=torch.int32)
    numbers = torch.arange(columns, dtype=torch.int32).expand(rows, columns)
    out.scatter_(1, place, numbers)
    return chosen.sum(1).to(torch.int32), out[:, :columns].clone()

def block_lists(visible, block):
    q, k = visible.shape
    image = F.pad(visible.float(), (0, -k % block, 0, -q % block))[None, None]
    share = F.avg_pool2d(image, block)[0, 0]
    most = F.max_pool2d(image, block)[0, 0]
    return (*by_cumsum(share == 1), *by_cumsum((most > 0) & (share != 1)))

def transposed(counts, indices, key_tiles):
    wide = torch.full((len(counts), key_tiles + 1), False)
    entries = torch.arange(indices.shape[1])[None]
    kept = torch.where(entries < counts[:, None], indices, key_tiles).long()
    wide.scatter_(1, kept, torch.ones_like(kept, dtype=torch.bool))
    return by_cumsum(wide[:, :key_tiles].T)
""",
    "sorted tile numbers": """# Exercise 17.5 · Block lists, and their transpose
def rows_of(chosen):
    far = chosen.shape[1]
    tiles = torch.where(chosen, torch.arange(far), far).sort(1).values
    return chosen.count_nonzero(1).int(), tiles.masked_fill(tiles == far, -1).int()

def block_lists(visible, block):
    counted = visible.long()
    for axis in (0, 1):
        pieces = counted.split(block, axis)
        counted = torch.stack([piece.sum(axis) for piece in pieces], axis)
    return rows_of(counted == block * block) + rows_of((counted > 0) & (counted < block * block))

def transposed(counts, indices, key_tiles):
    behind = torch.arange(indices.shape[1]) >= counts[:, None]
    tiles = indices.masked_fill(behind, -1)
    return rows_of((tiles[None] == torch.arange(key_tiles)[:, None, None]).any(2))
""",
    "counts by bincount, ordered pairs": """# Exercise 17.5 · Block lists, and their transpose
def from_pairs(row, column, rows, columns):
    order = torch.argsort(row * columns + column)
    row, column = row[order], column[order]
    counts = torch.bincount(row, minlength=rows)
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    out = torch.full((rows, columns), -1, dtype=torch.int32)
    out[row, place] = column.int()
    return counts.int(), out

def block_lists(visible, block):
    rows, columns = -(-visible.shape[0] // block), -(-visible.shape[1] // block)
    q, k = visible.nonzero().T
    seen = torch.bincount(q // block * columns + k // block, minlength=rows * columns).view(rows, columns)
    full = (seen == block**2).nonzero().T
    some = ((seen > 0) & (seen < block**2)).nonzero().T
    return [*from_pairs(*full, rows, columns), *from_pairs(*some, rows, columns)]

def transposed(counts, indices, key_tiles):
    query = torch.repeat_interleave(torch.arange(len(counts)), counts.long())
    key = torch.cat([indices[i, :n] for i, n in enumerate(counts.tolist())]).long()
    return list(from_pairs(key, query, key_tiles, len(counts)))
""",
}
