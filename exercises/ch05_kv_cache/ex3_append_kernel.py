"""Exercise 5.3: new keys and values written behind those of a cache, each sequence at a place of its own.

Layouts are the library's: key, value [batch, key_heads, new_tokens, head_dim]; key_cache, value_cache [batch,
key_heads, capacity, head_dim]; positions int32 [batch], the slot of the first new token.
"""

from __future__ import annotations

import re

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, InOut, LaunchesTriton, Mistake, ReadByKernels, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import beyond_32_bits
from exercises.topics.cache_inputs import cache_layouts, row_layouts
from exercises.topics.cache_model import append, copy_rows, is_copied, packed, packed_at, replaced_at
from exercises.topics.cache_requirements import ROUNDED, MovesRows, rounded_on_the_way
from exercises.topics.cache_slips import APPEND, TAIL_NOT_MASKED
from exercises.topics.decode import tokens_first

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


def append_oracle(key, value, key_cache, value_cache, positions):
    for sequence, start in enumerate(positions.tolist()):
        key_cache[sequence, :, start : start + key.shape[2]] = key[sequence]
        value_cache[sequence, :, start : start + key.shape[2]] = value[sequence]


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
        case("37 new tokens: more than a tile, and not a multiple", 1, 2, 37, 32, 64, [somewhere], metered=True),
        case("16 new tokens that fill the cache to its end", 1, 3, 16, 16, 25, [9]),
        case("a cache stored [batch, capacity, heads, head_dim]", 2, 3, 3, 16, 11, [2, 6], cache_store=tokens_first),
        case("float16, 2 × 4 heads of 128, 16 new tokens", 2, 4, 16, 128, 40, [11, 20], dtype=half, metered=True),
    ]
    # Each stride in turn, of all four tensors.
    for dimension, (which, batch, heads, new) in enumerate(
        (("sequences", 3, 1, 2), ("heads", 1, 3, 2), ("tokens", 1, 1, 3))
    ):
        cases += beyond_32_bits(
            draw,
            which,
            (*new_rows(draw, batch, heads, new, 16), *filled(draw, batch, heads, 5, 16)),
            draw.integers(batch, low=0, high=3).int(),
            dimension=dimension,
        )
    if not draw.on_gpu:
        late = draw.integer(32_768, 32_900)
        cases.append(case("2 new tokens behind more than 2¹⁵", 1, 1, 2, 16, late + 2, [late], dtype=half))
    else:
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
    """Every new element read once and written once."""
    return 4 * key.numel() * key.element_size()


def drawn(
    draw,
    *,
    batch,
    key_heads,
    new_tokens,
    head_dim,
    dtype,
    positions,
    key_layout,
    value_layout,
    key_cache_layout,
    value_cache_layout,
):
    """What the contract's choices make: arguments of `append_to_cache`."""
    starts, capacity = positions(draw, batch, new_tokens)
    rows = [draw.normal(batch, key_heads, new_tokens, head_dim, dtype=dtype) for _ in "kv"]
    caches = [draw.normal(batch, key_heads, capacity, head_dim, dtype=dtype) for _ in "kv"]
    key, value = (layout(draw, tensor) for layout, tensor in zip((key_layout, value_layout), rows))
    layouts = key_cache_layout, value_cache_layout
    key_cache, value_cache = (InOut(layout(draw, tensor)) for layout, tensor in zip(layouts, caches))
    return key, value, key_cache, value_cache, torch.tensor(starts, dtype=torch.int32)


def _empty(draw, batch, new_tokens):
    return [0] * batch, new_tokens + draw.integer(0, 4)


def _somewhere(draw, batch, new_tokens):
    capacity = new_tokens + draw.integer(5, 24)
    return [draw.integer(1, capacity - new_tokens) for _ in range(batch)], capacity


def _to_the_end(draw, batch, new_tokens):
    starts = [draw.integer(0, 9) for _ in range(batch)]
    return starts, max(starts) + new_tokens


CONTRACT = Contract(
    drawn,
    choices={
        "batch": (1, 2, 3),
        "key_heads": (1, 2, 3),
        "new_tokens": (1, 2, 15, 16, 17, 37),
        "head_dim": (16, 32, 64, 128),
        "dtype": (torch.float32, torch.float16),
        "positions": (
            Level(_somewhere, ""),
            Level(_empty, "an empty cache"),
            Level(_to_the_end, "up to the last slot"),
        ),
        "key_layout": row_layouts("key"),
        "value_layout": row_layouts("value"),
        "key_cache_layout": cache_layouts("key_cache"),
        "value_cache_layout": cache_layouts("value_cache"),
    },
    says={
        "new_tokens": "new_tokens at least 1",
        "head_dim": "head_dim\n            is 16, 32, 64 or 128",
        "dtype": "float32 or float16",
        "positions": "All new tokens fit",
        "key_layout": "Any strides, save that the last dimension is contiguous",
        "key_cache_layout": "likewise, written in place",
    },
    valid=lambda batch, key_heads, new_tokens, **_: batch * key_heads * (new_tokens + 15) < 120,
    most=8,
)


def _behind(case, seen, got):
    """Whether the new tokens stand right, and slots behind them were written as well."""
    key, _, key_cache, value_cache, positions = case.args
    right = [cache.tensor.clone() for cache in (key_cache, value_cache)]
    append_oracle(case.args[0], case.args[1], *right, positions)
    written = got[1]["written"] if isinstance(got, tuple) else []
    if len(written) != 2 or any(mine.shape != cache.shape for mine, cache in zip(written, right)):
        return False
    behind = torch.arange(right[0].shape[2])[None] >= (positions + key.shape[2])[:, None]  # [batch, capacity]
    wrong = torch.stack([(mine != cache).any(-1).any(1) for mine, cache in zip(written, right)]).any(0)
    return bool(wrong.any()) and not bool((wrong & ~behind).any())


def _reaches(verb, pointer=r"\w"):
    """Whether the first access outside a tensor is such a one, by a pointer whose name begins like this."""
    return lambda case, seen, got: any(re.search(f": {verb} {pointer}", text) for text in seen.out_of_bounds[:1])


def _in_16_bits(case, seen, got):
    """Whether a position beyond 2¹⁵ led to slots before the cache."""
    before = any(": writes " in text and "before its start" in text for text in seen.out_of_bounds[:1])
    return before and int(case.args[4].max()) >= 2**15


EXERCISE = Exercise(
    id="5.3",
    title="The append kernel",
    entries=("append_to_cache",),
    cases=append_cases,
    oracle=append_oracle,
    contracts=(CONTRACT,),
    models=(model_of(append, APPEND, (copy_rows,), uses=(is_copied, packed, packed_at, replaced_at)),),
    needs=TRITON,
    requirements=(LaunchesTriton(), Forbids(COPIES), ReadByKernels((0, 1)), MovesRows(append_bytes)),
    hints=(
        "A program has three numbers: its tile of new tokens, its head and its sequence. It copies one tile [BLOCK_T, "
        "HEAD_DIM] from the new tokens to the cache.",
        "The source tile: `new_pointer + batch * new_batch_stride + head * new_head_stride + tokens[:, None] * "
        "new_token_stride + columns[None, :]`, with `tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)`.",
        "The target uses the cache's strides, and the slot in place of the token: `position + tokens`, where position "
        "is `tl.load(positions_pointer + batch)`.",
        "Mask both the load and the store with `tokens < new_tokens`. Without the mask the last tile overwrites slots "
        "after the new tokens.",
    ),
    mistakes=(
        Mistake("rounded_to_16_bits", ROUNDED, when=rounded_on_the_way(append_oracle)),
        Mistake(
            "tail_not_masked",
            TAIL_NOT_MASKED,
            when=_behind,
        ),
        Mistake(
            "positions_out_of_bounds",
            "positions has one number for each sequence, and was read past the last. The sequence's number is "
            "`tl.program_id(2)`: the grid is (tiles, heads, batch).",
            when=_reaches("reads", "positions"),
        ),
        Mistake(
            "position_in_16_bits",
            "From slot 32,768 on the row lies before the cache: the position was kept in 16 bits or fewer. It is "
            "int32; leave it so wide, or wider.",
            when=_in_16_bits,
            every=True,
        ),
        Mistake(
            "out_of_bounds_write",
            "The store reaches past the end of the cache. Check its mask, `tokens < new_tokens`, and its address: "
            "batch, head and slot each need their own stride of the cache.",
            when=_reaches("writes"),
        ),
        Mistake(
            "out_of_bounds_read",
            "The load reaches past the end of the new tokens. Check its mask, `tokens < new_tokens`, and its address, "
            "which needs the strides of the tensor that is read.",
            when=_reaches("reads", "(?!cache)"),
        ),
    ),
)
