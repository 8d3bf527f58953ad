"""Programs of unequal length on a GPU: who runs what, when the last one ends, and causal attention's best order.

A multiprocessor that is free takes the next program of the list. That is list scheduling, and the list decides how long
it takes. With S slots, works w and T* the best possible time,

    in any order      T ≤ (2 - 1/S) T*         a long program that starts last runs alone
    longest first     T ≤ (4/3 - 1/(3S)) T*    short programs fill the gaps at the end

T* is at least Σw / S, an even share, and at least the longest work. (Graham, Bounds on Multiprocessing Timing
Anomalies, 1969.)

Under a causal mask a tile of queries reads all blocks of keys up to its own: of 64 tiles the last works 64 times as
long as the first. A grid starts them head by head, the short ones first, so its last programs are the longest ones of
the last heads. Longest first over all heads is the other end: all heads are at work at once, and their keys and values
do not fit in the L2 cache. FlashAttention-4 takes as many heads at a time as fit, a power of 2, and of these the
longest tiles first; `causal_tiles` makes that order. In units of a tile of 128 queries times 128 keys, head dimension
128, 16 bits and 50 MiB of L2, with the most heads at work at a time:

    heads, tokens      slots   even share   as a grid starts them   in sections     all at once
    16, 4096            132        64.0        85  (11 heads)         65  (16)        65  (16)
                        148        57.1        78  (13)               60  (16)        60  (16)
    16, 16384           132      1000.7      1076   (4)             1003   (8)      1002  (16)
                        148       892.5       970   (4)              902   (8)       894  (16)
    64, 8192            132      1008.5      1048   (6)             1009  (16)      1009  (64)
                        148       899.5       940   (7)              904  (16)       900  (64)

At the border between two sections both are at work, so up to twice as many heads as fit. The fewer tiles a slot gets,
the more a long one at the end costs: a grid takes 31 % longer than sections with 16 heads of 4096 tokens, and 4 % with
64 heads of 8192.

What the model leaves out: a program's start and end, and what a read costs that misses the L2.
Source: FlashAttention-4, arXiv 2603.05451, which measured 4 to 8 % for it with a key head for each query head and 7 to
14 % with one for all, on an H200.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

Bar = tuple[int, float, float]  # slot, start, length
TILE_ROWS, KEY_ROWS = 128, 128


class Tile(NamedTuple):
    """A tile of queries: whose it is, which of its head's, and how many blocks of keys it reads."""

    head: int
    row: int
    work: int


def scheduled(works: Sequence[float], slots: int) -> list[Bar]:
    """Where and when each program runs: they start in order, each on the slot that is free first."""
    free = [(0.0, slot) for slot in range(slots)]
    bars = []
    for work in works:
        start, slot = heapq.heappop(free)
        bars.append((slot, start, work))
        heapq.heappush(free, (start + work, slot))
    return bars


def finish(bars: Sequence[Bar]) -> float:
    """When the last program ends."""
    return max(start + work for _, start, work in bars)


def busy_share(bars: Sequence[Bar], slots: int) -> float:
    """Of the time until the last program ends, the part in which a slot is busy, on average."""
    return sum(work for _, _, work in bars) / (slots * finish(bars))


def causal_tiles(heads: int, length: int, *, heads_at_once: int | None = None, longest_first: bool = True,
                 tile_rows: int = TILE_ROWS, key_rows: int = KEY_ROWS) -> list[Tile]:  # fmt: skip
    """The tiles of causal attention over `length` tokens, in the order in which they are handed out.

    longest_first: `heads_at_once` heads after each other (None: all at once), of each such section the last tiles of
    all heads before the second to last ones. Otherwise head by head from the first tile on, as a grid starts them.
    """
    rows = range(-(-length // tile_rows))
    works = [-(-min((row + 1) * tile_rows, length) // key_rows) for row in rows]
    if not longest_first:
        return [Tile(head, row, works[row]) for head in range(heads) for row in rows]
    section = heads_at_once or heads
    return [
        Tile(head, row, works[row])
        for first in range(0, heads, section)
        for row in reversed(rows)
        for head in range(first, min(first + section, heads))
    ]


def heads_that_fit(l2_bytes: int, length: int, head_dim: int, *, itemsize: int = 2, heads_per_key_head: int = 1) -> int:
    """For how many query heads keys and values fit in the L2 cache at once: a power of 2, and at least 1.

    Query heads that share a key head share its bytes, so there are `heads_per_key_head` times as many of them.
    """
    key_head_bytes = 2 * length * head_dim * itemsize
    fitting = max(1, l2_bytes * heads_per_key_head // key_head_bytes)
    return 1 << (fitting.bit_length() - 1)


def most_heads_at_work(tiles: Sequence[Tile], bars: Sequence[Bar]) -> int:
    """How many heads have tiles at work at the same time, at most: so many heads' keys and values are in use."""
    events = sorted(
        event
        for tile, (_, start, work) in zip(tiles, bars)
        for event in ((start, 1, tile.head), (start + work, 0, tile.head))
    )
    running: dict[int, int] = {}
    most = 0
    for _, begins, head in events:  # at the same time ends come before beginnings
        running[head] = running.get(head, 0) + (1 if begins else -1)
        if not running[head]:
            del running[head]
        most = max(most, len(running))
    return most
