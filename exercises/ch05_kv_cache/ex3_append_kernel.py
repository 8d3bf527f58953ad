"""Exercise 5.3: new keys and values written behind those of a cache, each sequence at a place of its own.

Layouts are the library's: key, value [batch, key_heads, new_tokens, head_dim]; key_cache, value_cache [batch,
key_heads, capacity, head_dim]; positions int32 [batch], the slot of the first new token.
"""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, InOut, LaunchesTriton, Mistake, Moves
from exercises.topics.decode import tokens_first

TILE = 16  # BLOCK_T, as the launcher sets it
# Not copy_, which Triton's interpreter itself calls.
COPIES = (
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "index_copy",
    "index_copy_",
    "scatter",
    "scatter_",
    "slice_scatter",
    "cat",
    "where",
)


def write(
    key,
    value,
    key_cache,
    value_cache,
    positions,
    *,
    slot=lambda start, token, new: start + token,
    heads=lambda head, count: (head, head),
    tokens=None,
):
    """Append in place, token by token; the options are slips.

    slot: `slot(start, token, new_tokens)`, where a token goes. Outside its head's slots it lands, as a pointer would,
        in a neighbour's; outside the cache it is lost.
    heads: `heads(head, count)`, the (source, target) head.
    tokens: how many of the new tokens are written; None for all.
    """
    (batch, count, new, _), capacity = key.shape, key_cache.shape[2]
    for sequence in range(batch):
        for token in range(new if tokens is None else min(tokens, new)):
            for head in range(count):
                source, target = heads(head, count)
                row = (sequence * count + target) * capacity + slot(int(positions[sequence]), token, new)
                if 0 <= row < batch * count * capacity:
                    place = (row // (count * capacity), row // capacity % count, row % capacity)
                    key_cache[place] = key[sequence, source, token]
                    value_cache[place] = value[sequence, source, token]


def append_oracle(key, value, key_cache, value_cache, positions):
    write(key, value, key_cache, value_cache, positions)


def filled(draw, batch, heads, capacity, head_dim, dtype=torch.float32, store=lambda cache: cache):
    """A key cache and a value cache, full of numbers, ready to be written into."""
    return tuple(InOut(store(draw.normal(batch, heads, capacity, head_dim, dtype=dtype))) for _ in range(2))


def new_rows(draw, batch, heads, new, head_dim, dtype=torch.float32, store=lambda tensor: tensor):
    return tuple(store(draw.normal(batch, heads, new, head_dim, dtype=dtype)) for _ in range(2))


def append_cases(draw):
    half = torch.float16

    def case(
        name,
        batch,
        heads,
        new,
        head_dim,
        capacity,
        positions,
        dtype=torch.float32,
        projected=False,
        cache_store=lambda cache: cache,
        **options,
    ):
        rows = new_rows(draw, batch, heads, new, head_dim, dtype, tokens_first if projected else lambda rows: rows)
        caches = filled(draw, batch, heads, capacity, head_dim, dtype, cache_store)
        return Case(name, (*rows, *caches, torch.tensor(positions, dtype=torch.int32)), **options)

    somewhere = draw.integer(4, 9)
    cases = [
        case("one new token, 2 heads", 1, 2, 1, 16, 8, [somewhere - 3]),
        case("one new token each, sequences of 3, 0 and 7 tokens", 3, 2, 1, 32, 12, [3, 0, 7]),
        case("a prompt of 5 into an empty cache", 1, 2, 5, 32, 8, [0]),
        case("7 new tokens behind 4 and 9, as a projection leaves them", 2, 2, 7, 16, 24, [4, 9], projected=True),
        case("37 new tokens: more than a tile, and not a multiple", 1, 2, 37, 32, 64, [somewhere]),
        case("the last slot", 2, 1, 1, 16, 10, [9, 2]),
        case("16 new tokens that fill the cache to its end", 1, 3, 16, 16, 25, [9]),
        case("behind 2,049 and 2,051 tokens", 2, 1, 2, 16, 2060, [2049, 2051]),
        case("a cache stored [batch, capacity, heads, head_dim]", 2, 3, 3, 16, 11, [2, 6], cache_store=tokens_first),
        case("float16, 2 × 4 heads of 128, 16 new tokens", 2, 4, 16, 128, 40, [11, 20], dtype=half, metered=True),
    ]
    if draw.on_gpu:
        cases.append(
            case(
                "64 sequences, 8 heads of 128, float16",
                64,
                8,
                1,
                128,
                500,
                draw.integers(64, low=0, high=500).tolist(),
                dtype=half,
            )
        )
        cases.append(
            case("a prompt of 300, float16, projected", 2, 8, 300, 128, 900, [17, 500], dtype=half, projected=True)
        )
    return cases


def append_bytes(key, value, key_cache, value_cache, positions):
    """Every new element read once and written once, every position read once by each of the two launches."""
    return 4 * key.numel() * key.element_size() + 2 * positions.numel() * positions.element_size()


def _written(**slips):
    return lambda *args: write(*args, **slips)


def _in_memory_order(tensor):
    """The tensor's memory under the strides of a contiguous tensor of its shape."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def _rows_as_contiguous(key, value, key_cache, value_cache, positions):
    write(_in_memory_order(key), _in_memory_order(value), key_cache, value_cache, positions)


def _cache_as_contiguous(key, value, key_cache, value_cache, positions):
    write(key, value, _in_memory_order(key_cache), _in_memory_order(value_cache), positions)


def _first_position(key, value, key_cache, value_cache, positions):
    write(key, value, key_cache, value_cache, positions[:1].expand(len(positions)))


def _one_sequence(key, value, key_cache, value_cache, positions):
    write(key[:1], value[:1], key_cache[:1], value_cache[:1], positions[:1])


def _one_source(key, value, key_cache, value_cache, positions):
    write(key[:1].expand(key.shape), value[:1].expand(value.shape), key_cache, value_cache, positions)


def _keys_alone(key, value, key_cache, value_cache, positions):
    write(key, torch.zeros_like(value), key_cache, torch.empty_like(value_cache), positions)


def _keys_twice(key, value, key_cache, value_cache, positions):
    write(key, key, key_cache, value_cache, positions)


def _at_source_strides(key, value, key_cache, value_cache, positions):
    """The cache addressed by the strides of the new rows; what lands outside is lost."""
    batch, heads, new, head_dim = key.shape
    for rows, cache in ((key, key_cache), (value, value_cache)):
        memory, strides = cache.as_strided((cache.numel(),), (1,)), rows.stride()
        for first in range(0, new, TILE):
            for head in range(heads):
                for sequence in range(batch):
                    for token in range(first, min(new, first + TILE)):
                        slot = int(positions[sequence]) + token
                        place = sequence * strides[0] + head * strides[1] + slot * strides[2]
                        if place + head_dim <= memory.numel():
                            memory[place : place + head_dim] = rows[sequence, head, token]


def _nothing(key, value, key_cache, value_cache, positions):
    pass


def _behind(case, seen, got):
    """Whether the new tokens stand right, and slots behind them were written as well."""
    key, _, key_cache, value_cache, positions = case.args
    right = [cache.tensor.clone() for cache in (key_cache, value_cache)]
    write(case.args[0], case.args[1], *right, positions)
    written = got[1]["written"] if isinstance(got, tuple) else []
    if len(written) != 2 or any(mine.shape != cache.shape for mine, cache in zip(written, right)):
        return False
    behind = torch.arange(right[0].shape[2])[None] >= (positions + key.shape[2])[:, None]  # [batch, capacity]
    wrong = torch.stack([(mine != cache).any(-1).any(1) for mine, cache in zip(written, right)]).any(0)
    return bool(wrong.any()) and not bool((wrong & ~behind).any())


def _reaches(verb, pointer=""):
    return lambda case, seen, got: any(f": {verb} {pointer}" in sentence for sentence in seen.out_of_bounds[:1])


EXERCISE = Exercise(
    id="5.3",
    title="The append kernel",
    entries=("append_to_cache",),
    cases=append_cases,
    oracle=append_oracle,
    needs=TRITON,
    requirements=(LaunchesTriton(), Forbids(COPIES), Moves(append_bytes)),
    hints=(
        "A program has a sequence, a head and a tile of new tokens: three program numbers. It copies a tile [BLOCK_T, "
        "HEAD_DIM] from one place to another.",
        "The source tile: `new_pointer + batch * new_batch_stride + head * new_head_stride + tokens[:, None] * "
        "new_token_stride + columns[None, :]`, with `tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)`.",
        "The target has the cache's strides, and in place of the token its slot: `position + tokens`, where position "
        "is `tl.load(positions_pointer + batch)`.",
        "Mask the load and the store with `tokens < new_tokens`: what stands in the cache behind the new tokens is no "
        "business of this program.",
    ),
    mistakes=(
        Mistake(
            "position_ignored",
            "The new tokens were written from slot 0 on, over the oldest ones. Load the sequence's position and add "
            "it to the token's number.",
            result=_written(slot=lambda start, token, new: token),
        ),
        Mistake(
            "slot_too_late",
            "Every token was written one slot too far. The position given is already the first free slot: token t goes "
            "to position + t.",
            result=_written(slot=lambda start, token, new: start + token + 1),
        ),
        Mistake(
            "slot_too_early",
            "Every token was written one slot too early, and the first of them over the newest token in the cache. "
            "Token t goes to position + t.",
            result=_written(slot=lambda start, token, new: start + token - 1),
        ),
        Mistake(
            "one_slot_for_all",
            "All new tokens of a sequence were written to the same slot, one over the other. Token t goes to position "
            "+ t: add the token's number to the slot as well.",
            result=_written(slot=lambda start, token, new: start),
        ),
        Mistake(
            "position_of_first_sequence",
            "Every sequence was written at the position of the first. Load `positions_pointer + batch`.",
            result=_first_position,
        ),
        Mistake(
            "only_first_token",
            "Only the first new token of each sequence was written. A prompt brings many at once: cover them with "
            "`tl.arange(0, BLOCK_T)`.",
            result=_written(tokens=1),
        ),
        Mistake(
            "only_first_tile",
            "Only the first tile of new tokens was written. The tokens of tile i begin at i * BLOCK_T, and the grid "
            "needs a program for each tile.",
            result=_written(tokens=TILE),
        ),
        Mistake(
            "only_first_sequence",
            "Only the first sequence of the batch was written. Move both pointers by `batch` times their batch stride.",
            result=_one_sequence,
        ),
        Mistake(
            "rows_of_first_sequence",
            "Every sequence was given the new tokens of the first one. Move the source pointer by the batch stride.",
            result=_one_source,
        ),
        Mistake(
            "head_ignored_in_source",
            "Every head of the cache was given head 0's new rows. Add `head` times the source's head stride.",
            result=_written(heads=lambda head, count: (0, head)),
        ),
        Mistake(
            "head_ignored_in_target",
            "All heads were written into head 0 of the cache, one over the other. Add `head` times the cache's head "
            "stride.",
            result=_written(heads=lambda head, count: (head, 0)),
        ),
        Mistake(
            "rows_read_as_contiguous",
            "The new rows were read as if they were contiguous. A projection leaves them as [batch, tokens, heads, "
            "head_dim], and a transpose moves no byte: use the strides of the tensor for heads and for tokens.",
            result=_rows_as_contiguous,
        ),
        Mistake(
            "cache_written_as_contiguous",
            "The cache was written as if it were contiguous. Its heads lie `stride(1)` and its slots `stride(2)` "
            "elements apart; they may be stored in another order.",
            result=_cache_as_contiguous,
        ),
        Mistake(
            "source_strides_in_cache",
            "The slots of the cache were found with the strides of the new rows. The cache has strides of its own: "
            "cache_batch_stride, cache_head_stride, cache_slot_stride.",
            result=_at_source_strides,
        ),
        Mistake(
            "slots_masked_by_new_tokens",
            "The store was masked by slot < new_tokens. new_tokens counts the new rows: compare their numbers with it, "
            "before the position is added.",
            result=_written(slot=lambda start, token, new: start + token if start + token < new else -(10**9)),
        ),
        Mistake("values_forgotten", "Only the keys were appended. The values need the same.", result=_keys_alone),
        Mistake(
            "keys_as_values",
            "The keys were written into both caches. Hand the second launch `value` and `value_cache`.",
            result=_keys_twice,
        ),
        Mistake(
            "nothing_written",
            "The caches are as they were. Does the kernel store, and into the tensors that it was given, not into "
            "copies of them?",
            result=_nothing,
        ),
        Mistake(
            "tail_not_masked",
            "The new tokens stand where they should, and slots behind them were written as well: the last tile is "
            "wider than the tokens that are left. Mask the store with `tokens < new_tokens`.",
            when=_behind,
        ),
        Mistake(
            "out_of_bounds_write",
            "The store reaches past the end of the cache. Mask it with `tokens < new_tokens`. If it is masked: are two "
            "strides exchanged, or two program numbers? The grid is (tiles, heads, batch).",
            when=_reaches("writes"),
        ),
        Mistake(
            "positions_out_of_bounds",
            "positions has one number for each sequence, and was read behind the last. The sequence's number is "
            "`tl.program_id(2)`: the grid is (tiles, heads, batch).",
            when=_reaches("reads", "positions"),
        ),
        Mistake(
            "out_of_bounds_read",
            "The load reaches past the end of the new tokens. Mask it with `tokens < new_tokens`. If it is masked: the "
            "new rows are counted from 0, without the position; and the grid is (tiles, heads, batch), in this order.",
            when=_reaches("reads"),
        ),
    ),
)
