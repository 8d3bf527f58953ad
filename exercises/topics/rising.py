"""Scores that a maximum cannot follow: they rise far above it, or lie far below where it begins; and how that shows.

A running maximum that is taken from the first tile and never updated does no harm until a later score lies 88 above it:
then exp overflows in float32, the sum is infinite, and the row is NaN. A number that stands for minus infinity does no
harm until all scores of a row lie below it.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.nested import tensors

RISE = 160.0  # of the last scores over the first
LAG = 11.5  # a rise by which a weight overflows float16: e^11.5 is 98,716
LAST = 40  # keys that lie so high
WIDEST, NARROWEST = 256, 16  # keys of a tile that an answer is free to choose
FINITE_IN_16_BITS = 10.0  # a rise above which a weight that is cast for a product with values overflows
FINITE, OVERFLOWN = 80.0, 92.0  # rises that a sum of some thousand exponentials in float32 still holds, and no longer

MAXIMUM_OF_THE_FIRST_TILE = (
    "The running maximum is that of the first tile and stays there: exp overflows where a later score lies 88 or more "
    "above it. At every tile take the larger of the old maximum and the tile's own, and rescale."
)
LOW = -900.0  # below it lie the numbers that people put for minus infinity
HIGH = -300.0  # a score above it outweighs them all
FINITE_FOR_MINUS_INFINITY = (
    "A finite number stands for minus infinity: as the maximum's start or its floor, or as the score of a key that is "
    "not to count. Where all true scores are lower still, it decides. Take -inf, and guard what becomes NaN."
)


def rising(draw, heads, query_length, key_length, head_dim):
    """Query, key, value [heads, length, head_dim]; the scaled scores of the last keys lie 160 above all before."""
    query, key, value = (draw.normal(heads, length, head_dim) for length in (query_length, key_length, key_length))
    query, key = 0.3 * query, 0.3 * key
    query[..., 0] = math.sqrt(head_dim)
    key[..., 0] = RISE * (torch.arange(key_length) >= key_length - LAST)
    return query, key, value


def lagging(draw, heads, query_length, key_length, head_dim):
    """The same, where scores are 0, and 11.5 for the last 32 keys: in float32 a maximum that stays behind does no harm.

    All keys have one value, in whole numbers: float16 rounds nothing of the result, so that slips are refuted at once.
    """
    query, value = (draw.normal(heads, length, head_dim) for length in (query_length, 1))
    query[..., 0] = math.sqrt(head_dim)
    key = torch.zeros(heads, key_length, head_dim)
    key[:, -32:, 0] = LAG
    return query, key, (4 * value).round().repeat(1, key_length, 1)


def rising_rows(draw, rows, columns, tile):
    """Scores [rows, columns]; those behind the first tile lie 160 above those in it."""
    return draw.normal(rows, columns) + RISE * (torch.arange(columns) >= tile)


def attention_scores(query, key, visible=None):
    """Scaled scores [..., query_length, key_length], -inf where a key is hidden."""
    scores = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    return scores if visible is None else scores.masked_fill(~visible, -math.inf)


def decode_scores(query, keys, lengths):
    """Scaled scores [batch, query_heads, slots] of one query a sequence, -inf behind its tokens."""
    group = query.shape[1] // keys.shape[1]
    scores = (keys.double().repeat_interleave(group, 1) @ query.double()[..., None])[..., 0]
    hidden = torch.arange(keys.shape[2]) >= lengths[:, None, None]
    return (scores / math.sqrt(query.shape[-1])).masked_fill(hidden, -math.inf)


def split_scores(query, keys, lengths, splits):
    """The same for each split, [splits, batch, query_heads, keys of the longest split]."""
    scores = decode_scores(query, keys, lengths)
    sizes = -(-lengths // splits)
    cut = scores.new_full((splits, *scores.shape[:2], max(1, int(sizes.max()))), -math.inf)
    for sequence, (size, length) in enumerate(zip(sizes.tolist(), lengths.tolist())):
        for split in range(splits):
            part = scores[sequence, :, split * size : min((split + 1) * size, length)]
            cut[split, sequence, :, : part.shape[-1]] = part
    return cut


def risen_cache(draw):
    """Query, key cache, value cache and lengths: one sequence of 300 tokens, 4 query heads on one KV head."""
    query, key, value = rising(draw, 1, 4, 304, 16)
    key[:, 300:] = 0.0
    key[:, 260:300, 0] = RISE
    return query, key[:, None], value[:, None], torch.tensor([300], dtype=torch.int32)


def cache_in_float16(draw, scores, tokens):
    """The same of one sequence of so many tokens in float16, with the scores of a function like `lagging`."""
    query, key, value = (part.half() for part in scores(draw, 1, 4, tokens, 16))
    return query, key[:, None], value[:, None], torch.tensor([tokens], dtype=torch.int32)


def stays_behind(scores_of, tile_of=None, parts=False):
    """A `when` for every failing case: rows overflow where scores rise by 88 after the first tile, and only there.

    Args:
        scores_of: `scores_of(*args)` makes [..., columns] scores, a row of them for each row of the result.
        tile_of: `tile_of(*args)` says how long a tile is; where an answer is free to choose, it is anything from 16
            to 256 columns.
        parts: whether the scores have a dimension more in front, of the parts that go into a row.
    """

    def when(case, seen, got):
        result = got[0] if isinstance(got, (tuple, list)) and got else got
        if not isinstance(result, torch.Tensor) or seen.unwritten or seen.out_of_bounds:
            return False
        scores = scores_of(*case.args)
        narrow_weights = any(tensor.dtype == torch.float16 for tensor in tensors(case.args))
        wide, narrow = (tile_of(*case.args),) * 2 if tile_of else (WIDEST, NARROWEST)
        least, most = (
            (scores.amax(-1) - scores[..., :tile].amax(-1)).nan_to_num(0.0, math.inf) for tile in (wide, narrow)
        )
        least = least.masked_fill(least.isinf(), 0.0)  # nothing visible in the first tile: who knows what is kept
        broken = ~result.isfinite()
        if parts:
            least, most = least.amax(0), most.amax(0)
        broken = broken.any(-1) if broken.dim() == least.dim() + 1 else broken
        if broken.shape != least.shape:
            return False
        allowed, needed = most > (FINITE_IN_16_BITS if narrow_weights else FINITE), least > OVERFLOWN
        return bool(broken.any()) and not bool((broken & ~allowed).any()) and not bool((needed & ~broken).any())

    return when


def below_a_stand_in(scores_of, values_of):
    """A `when` for every failing case: a row is wrong whose scores may all lie below a stand-in for minus infinity, and
    none is wrong that has a score far above one: what is wrong there is something else.

    Args:
        scores_of: as for `stays_behind`.
        values_of: `values_of(*args)` makes the values that the scores weigh: [..., columns, head_dim] for all rows, or
            with a dimension more for each row.
    """

    def when(case, seen, got):
        result = got[0] if isinstance(got, (tuple, list)) and got else got
        if not isinstance(result, torch.Tensor) or seen.unwritten or seen.out_of_bounds:
            return False
        scores = scores_of(*case.args)
        largest = scores.amax(-1)
        wrong = _wrong_rows(result.cpu(), scores, values_of(*case.args))
        return bool((wrong & (largest < LOW)).any()) and not bool((wrong & (largest > HIGH)).any())

    return when


def _wrong_rows(result, scores, values):
    """The rows of attention that differ from the right ones by more than 16 bits round off; none in another shape."""
    weights, values = scores.double().softmax(-1).nan_to_num(0.0), values.double()
    for_each_row = values.dim() > scores.dim()
    right = (weights[..., None, :] @ values)[..., 0, :] if for_each_row else weights @ values
    if result.shape != right.shape:
        return torch.zeros(scores.shape[:-1], dtype=torch.bool)
    allowed = 2e-2 * max(1.0, float(values.abs().max()))
    return ~((result.double() - right).abs() <= allowed).all(-1)
