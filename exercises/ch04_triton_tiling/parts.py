"""What the exercises of chapter 04 share: inputs, bytes on paper, and the slips of every tiled kernel."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Forbids, Mistake
from course_lib.checker.specification.draw import Draw
from exercises.topics.attention import (
    attention,
    close_to,
    length_first,
    visible_pairs,
)
from exercises.topics.attention_inputs import fits
from exercises.topics.attention_sentences import READS_OUTSIDE, WRITES_OUTSIDE
from exercises.topics.evidence import (
    GRID_AXES_EXCHANGED,
    NAN_FROM_THE_START,
    all_nan,
    first_access,
    program_beyond_the_heads,
)
from exercises.topics.pytorch_operations import ARITHMETIC

TILE = 64  # BLOCK_M and BLOCK_N of the kernels in 4.3 to 4.6, as their launchers set them
BIG = 55.0  # standard deviation of scores whose exponentials overflow in float32


def matrices(draw, heads, query_length, key_length, head_dim, dtype=torch.float32, score=1.0):
    """Query, key and value [heads, length, head_dim] whose scaled scores have the standard deviation `score`."""
    size = math.sqrt(score)
    query = draw.normal(heads, query_length, head_dim, dtype=dtype, scale=size)
    key = draw.normal(heads, key_length, head_dim, dtype=dtype, scale=size)
    return query, key, draw.normal(heads, key_length, head_dim, dtype=dtype)


def far_below(draw, heads, query_length, key_length, head_dim=32):
    """Query, key and value whose scores all lie near -200, where exp(score - 0) is 0 in float32."""
    query = draw.normal(heads, query_length, head_dim, scale=0.3, shift=5.0)
    key = draw.normal(heads, key_length, head_dim, scale=0.2, shift=-7.0)
    return query, key, draw.normal(heads, key_length, head_dim)


def rising_by_tiles(draw, head_dim=32):
    """64 queries and 192 keys, in float32; the scores of each 64 keys lie 160 above those of the 64 before."""
    query, key, value = matrices(draw, 1, 64, 192, head_dim, score=0.1)
    query[..., 0], key[..., 0] = math.sqrt(head_dim), 160.0 * (torch.arange(192) // 64)
    return query, key, value


def far_below_finite(heads, query_length, key_length, head_dim=32):
    """Key 0 scores -1e20 with every query and the others -2e20: below any number that might hide a key.

    Such scores are all rounding, but for a weight of 1 and others of 0, which are exact.
    """
    query = torch.full((heads, query_length, head_dim), 1e10)
    key = torch.full((heads, key_length, head_dim), -2e10) / math.sqrt(head_dim)
    key[:, 0] /= 2
    value = torch.arange(float(heads * key_length * head_dim)).view(heads, key_length, head_dim)
    return query, key, torch.sin(value)


def hidden_above(heads, query_length, key_length):
    """The same, but for the last key, which scores 0: under a causal mask only the last query sees it."""
    query, key, value = far_below_finite(heads, query_length, key_length)
    key[:, -1] = 0.0
    return query, key, value


def large_in_16_bits():
    """Scores of ±600 in float16, head dimension 32, whose scale is no power of two; the same at every check."""
    return matrices(Draw(32), 1, 64, 64, 32, dtype=torch.float16, score=200.0)


def climbing():
    """128 keys that score about 0 and then 64 that score 11.5 more, in float16, which does not hold exp(11.5)."""
    query, key, value = matrices(Draw(12), 1, 64, 192, 16, dtype=torch.float16, score=0.01)
    query[..., 0], key[..., 0] = math.sqrt(16), 11.5 * (torch.arange(192) >= 128)
    return query, key, value


def thin_tail():
    """64 equal scores, then 2,048 keys that weigh 1/2100 each, in float16: 64 of them are less than half a step of 64.

    All values are 1, and so is the output; a sum in float16 stays at 64, and makes it too large by 1.5 %.
    """
    query, key = torch.zeros(1, 64, 16).half(), torch.zeros(1, 2112, 16).half()
    query[..., 0], key[:, 64:, 0] = math.sqrt(16), -math.log(2100.0)
    return query, key, torch.ones_like(key)


IN_16_BITS = {
    "float16, head dimension 32, scores of ±600": large_in_16_bits,
    "float16, 64 keys that score 11.5 more than 128 before them": climbing,
    "float16, 64 equal scores, 2,048 keys that weigh 1/2100 of one": thin_tail,
}


def cases_in_16_bits(*rest):
    """Float16 that a kernel must not compute in; the same at every check."""
    return [Case(name, (*made(), *rest)) for name, made in IN_16_BITS.items()]


def of_few_tiles(heads, query_length, key_length, head_dim, dtype, scores, **_) -> bool:
    """Whether Triton's interpreter is quick with these sizes, and the scores are for the dtype."""
    return heads * query_length * key_length * head_dim < 2**20 and fits(dtype, scores)


SKIPS_THE_WORK = Forbids(
    ("scaled_dot_product_attention", "_scaled_dot_product", "bmm", "mm", "matmul", "_softmax", "softmax", *ARITHMETIC)
)


def outputs_only(query, key, value, *rest):
    """The largest tensor that a kernel's launcher has any use for."""
    return max(query.numel(), key.numel(), value.numel())


def keys_read(query_length, key_length, causal, query_rows=TILE, key_rows=TILE) -> int:
    """Rows of K (or V) of one head that all its programs load, tiles above the diagonal skipped."""
    total = 0
    for first in range(0, query_length, query_rows):
        end = min(query_length, first + query_rows) + key_length - query_length if causal else key_length
        total += min(key_length, -(-max(0, end) // key_rows) * key_rows)
    return total


def tiled_bytes(query, key, value, causal=False, *, lse=False) -> int:
    """Bytes that programs of 64 queries move, keys in tiles of 64."""
    heads, query_length, head_dim = query.shape
    rows = 2 * query_length + 2 * keys_read(query_length, key.shape[1], causal)
    return heads * (rows * head_dim * query.element_size() + 4 * query_length * lse)


def causal_bytes(query, key, value) -> int:
    return tiled_bytes(query, key, value, True)


def makes_whole_matrix(case, seen, got):
    query, key = case.args[:2]
    pairs = query.shape[-3] * query.shape[-2] * key.shape[-2]
    return seen.largest_allocation >= pairs > outputs_only(*case.args)


def rereads_queries(case, seen, got):
    """The queries were loaded more than once, and the numbers are right."""
    query, key, value = case.args[:3]
    times = [
        counts["loaded"] / max(counts["distinct_loaded"], 1)
        for name, counts in seen.traffic.items()
        if name.startswith("q") and counts["loaded"]
    ]
    return bool(times) and max(times) > 1.5 and close_to(got, attention(query.double(), key.double(), value.double()))


def layout_case(draw, name, *sizes, rest=()):
    """Two heads: q as [length, heads, head_dim], k and v with gaps of their own, the output contiguous."""
    query, key, value = matrices(draw, *sizes)
    gap = query.shape[-1] // 4
    return Case(name, (length_first(query), draw.spread_out(key, gap), draw.spread_out(value, 3 * gap), *rest))


def overflowing(draw, dtype=torch.float16):
    """Equal scores, and values near 100 in float16: the weighted sum of 1024 of them is more than float16 holds."""
    query, key, value = matrices(draw, 1, 64, 1024, 16, dtype=dtype)
    return torch.zeros_like(query), key, value * 0.25 + 100.0


# What no numbers tell.
OF_EVERY_KERNEL = (
    Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
    Mistake("grid_axes_exchanged", GRID_AXES_EXCHANGED, when=program_beyond_the_heads),
)

OUTSIDE = (
    Mistake("reads_outside", READS_OUTSIDE, when=first_access("reads")),
    Mistake("writes_outside", WRITES_OUTSIDE, when=first_access("writes")),
)


def causal_pairs(query, key, distance=0):
    return visible_pairs(query.shape[1], key.shape[1], distance)


def causal_mask(query, key, causal):
    return causal_pairs(query, key) if causal else None
