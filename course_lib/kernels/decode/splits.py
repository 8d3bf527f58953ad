"""Into how many parts decode splits the keys of each sequence: enough to fill the chip, few enough to merge.

One program per sequence and KV head leaves most of a GPU idle when there are few: 8 programs for one sequence with 8 KV
heads, on the 132 multiprocessors of an H200. Split into 16, there are 128. Parts cost too: each wave of programs starts
and ends, and each part is written, read and merged. `choose_splits` weighs that in one unit, the time in which a
multiprocessor reads a key and its value:

    time(splits) = waves · residents · keys of a split + ⌈waves⌉ · START + splits · MERGE
    waves = programs · splits / (multiprocessors · residents), of which the last counts as 0.95 at least

Residents are the programs that a multiprocessor works on at a time: they share what it can read. Memory is busy before
the last multiprocessors are, so 128 programs on 132 take no longer for their bytes than 132 would; but a wave that is
emptier than 95 % leaves bandwidth unused. 17 parts instead of 16 would need a second wave for the last four programs,
and take nearly twice as long.
Source: Dao et al., Flash-Decoding for long-context inference, 2023 (the split); the cost model is this course's.
"""

import functools

# In keys of 16 ns (D = 128, 16 bits, 1/132 of an H200's bandwidth): measured there, a wave costs 2 to 3 µs besides its
# keys, and each part adds 0.1 µs to the merge.
START_KEYS = 128
MERGE_KEYS = 7
# Of the multiprocessors; that many draw all of memory's bandwidth.
SATURATING_SHARE = 0.95
# A smaller part costs about what it saves.
LEAST_KEYS_PER_SPLIT = 64
MOST_SPLITS = 256


def choose_splits(batch: int, key_heads: int, longest: int, multiprocessors: int, *, residents: int = 1) -> int:
    """How many parts to split the keys of each sequence into.

    Args:
        batch: sequences.
        key_heads: programs that a sequence has without splits: its KV heads.
        longest: keys of the longest sequence, or a bound of it. Too large a bound costs empty parts.
        multiprocessors: of the GPU.
        residents: programs that a multiprocessor works on at a time.

    Returns the number with the least estimated time, the smaller of equals; at least 1.
    Raises a ValueError for a number below 1 (longest: below 0).
    """
    least = {"batch": 1, "key_heads": 1, "longest": 0, "multiprocessors": 1, "residents": 1}
    for (name, smallest), number in zip(least.items(), (batch, key_heads, longest, multiprocessors, residents)):
        if not isinstance(number, int) or number < smallest:
            raise ValueError(f"{name} is {number!r}; it must be a whole number of at least {smallest}.")
    return cheapest_splits(batch * key_heads, longest, multiprocessors, residents)


@functools.lru_cache(maxsize=4096)
def cheapest_splits(programs: int, longest: int, multiprocessors: int, residents: int) -> int:
    """`choose_splits` for that many programs without splits."""
    most = max(1, min(MOST_SPLITS, -(-longest // LEAST_KEYS_PER_SPLIT)))
    return min(range(1, most + 1),
               key=lambda splits: estimated_keys(splits, programs, longest, multiprocessors, residents))  # fmt: skip


def estimated_keys(splits: int, programs: int, longest: int, multiprocessors: int, residents: int) -> float:
    """The time of a decode step, in keys that a multiprocessor reads meanwhile."""
    slots = multiprocessors * residents
    full_waves, rest = divmod(programs * splits, slots)
    last_wave = max(rest / slots, SATURATING_SHARE) if rest else 0
    merge = MERGE_KEYS * splits if splits > 1 else 0
    keys = residents * -(-longest // splits)
    return (full_waves + last_wave) * keys + -(-programs * splits // slots) * START_KEYS + merge
