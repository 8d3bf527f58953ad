"""The backward pass of tiled attention, step by step (FlashAttention-2, arXiv 2307.08691, algorithm 2).

Two loops share their inside: a block of keys walks over tiles of queries and adds up dK and dV (`key_gradients`), and a
tile of queries walks over tiles of keys and adds up dQ (`query_gradients`). A meaning calls one of them or both, names
`KEY_PARTS` or `QUERY_PARTS` among its `parts`, and takes its rows from `attention_backward_slips.py`. Leading
dimensions are anything, such as heads; scores are natural, whatever base a kernel works in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from course_lib.checker.specification.edits import DoesNotRun
from course_lib.checker.specification.model import Model
from course_lib.checker.specification.nested import tensors

INF, LN_2 = math.inf, math.log(2)
ALL = torch.tensor(True)  # of pairs: looked at by a row of the slips
LARGEST_SCORE = 1000.0  # float32 rounds larger ones by so much that P depends on the order in which a product adds
LARGEST_EXPONENT = math.log(torch.finfo(torch.float32).max)


def visible_pairs(rows, keys, query_length, key_length, causal):
    """bool [rows, keys]: the pairs that count, of queries and keys with these numbers."""
    exist = (rows < query_length)[:, None] & (keys < key_length)
    positions = rows + key_length - query_length
    return exist & (keys <= positions[:, None]) if causal else exist


def foreseeable(exponents, visible):
    """The exponents; where exp overflows for a visible pair, the order of a sum decides which results are NaN."""
    if bool((visible & (exponents > LARGEST_EXPONENT)).any()):
        raise DoesNotRun
    return exponents


def recomputed(query, keys, values, gradient, log_sum, delta, visible, scale):
    """P and dS [..., rows, keys] of a tile of queries and a tile of keys, in the precision of products with them.

    query, gradient: [..., rows, head_dim]; keys, values: [..., keys, head_dim]; log_sum, delta: [..., rows].
    """
    scores = query.float() @ keys.float().mT * scale
    reference = log_sum[..., None]
    differences = foreseeable(scores - reference, visible)
    weights = torch.exp(torch.where(visible, differences, -INF))
    weight_gradients = gradient.float() @ values.float().mT
    score_gradients = weights * (weight_gradients - delta[..., None])
    return weights.to(query.dtype).float(), score_gradients.to(query.dtype).float()


def added(total, product):
    """A sum over tiles, in float32."""
    return total + product


def scaled(total, scale):
    """dQ or dK, of sums that lack the scale."""
    return total * scale


def key_gradients(query, keys, values, gradient, log_sum, delta, query_length, first_key, key_length, causal, step):
    """dK and dV of a block of keys, over tiles of `step` queries; what lies past query_length has no effect."""
    scale = query.shape[-1] ** -0.5
    key_gradient, value_gradient = torch.zeros(keys.shape), torch.zeros(keys.shape)
    offset = key_length - query_length
    start, stop = max(0, first_key - offset) if causal else 0, query_length
    for first in range(start, stop, step):
        queries, gradients = query[..., first : first + step, :], gradient[..., first : first + step, :]
        sums, deltas = log_sum[..., first : first + step], delta[..., first : first + step]
        rows, numbers = first + torch.arange(queries.shape[-2]), first_key + torch.arange(keys.shape[-2])
        visible = visible_pairs(rows, numbers, query_length, key_length, causal)
        weights, score_gradients = recomputed(queries, keys, values, gradients, sums, deltas, visible, scale)
        value_gradient = added(value_gradient, weights.mT @ gradients.float())
        key_gradient = added(key_gradient, score_gradients.mT @ queries.float())
    return scaled(key_gradient, scale), value_gradient


def query_gradients(query, key, value, gradient, log_sum, delta, first_query, query_length, key_length, causal, step):
    """dQ of a tile of queries, over tiles of `step` keys; what lies past key_length has no effect."""
    scale = query.shape[-1] ** -0.5
    query_gradient = torch.zeros(query.shape)
    offset = key_length - query_length
    reach = first_query + query.shape[-2] + offset
    start, stop = 0, min(key_length, reach) if causal else key_length
    for first in range(start, stop, step):
        keys, values = key[..., first : first + step, :], value[..., first : first + step, :]
        rows, numbers = first_query + torch.arange(query.shape[-2]), first + torch.arange(keys.shape[-2])
        visible = visible_pairs(rows, numbers, query_length, key_length, causal)
        weights, score_gradients = recomputed(query, keys, values, gradient, log_sum, delta, visible, scale)
        query_gradient = added(query_gradient, score_gradients @ keys.float())
    return scaled(query_gradient, scale)


def along_keys(column, tile):
    """Numbers [..., rows, 1] that a tile [..., rows, keys] lays along its keys."""
    return column.mT if tile.shape[-2] == tile.shape[-1] else not_square()


def square(tile):
    """A tile whose rows and keys are exchanged: a product takes it where they are equally many."""
    return tile if tile.shape[-2] == tile.shape[-1] else not_square()


def not_square():
    raise DoesNotRun


def maximum_of(scores, visible):
    """The maximum [..., rows, 1] of a tile's visible scores, 0 where there is none."""
    top = torch.where(visible, scores, -INF).amax(-1, keepdim=True)
    return torch.where(top == -INF, 0.0, top)


def standing_in(number, log_sum):
    """The exponent of a score that is this number."""
    return (number - torch.where(log_sum == -INF, 0.0, log_sum))[..., None]


KEY_PARTS = (visible_pairs, recomputed, added, scaled, key_gradients)
QUERY_PARTS = (visible_pairs, recomputed, added, scaled, query_gradients)
USES = (along_keys, square, maximum_of, standing_in, foreseeable)


def where_foreseen(model: Model, key_length_of: Callable[..., int], sure: tuple[str, ...]) -> Model:
    """The same model, which says nothing where rounding decides what a slip makes.

    Large scores are such a place, though not for the slips that are `sure`: these change more than a rounding can. One
    key is another: P is 1 there and dS is what rounding leaves, so that NaN alone is foreseen.

    Args:
        key_length_of: of a case's arguments.
        sure: slips by what a verdict calls them.
    """
    styles = {name for style in model.styles for name in style}

    def compute(names: frozenset[str], query, key, *rest):
        made = {name.partition("__")[0] for name in names - styles}
        if made - {*sure} and _largest_score(query, key) > LARGEST_SCORE:
            return None
        result = model.compute(names, query, key, *rest)
        if not made or result is NotImplemented or key_length_of(query, key, *rest) > 1:
            return result
        return result if any(bool(tensor.isnan().any()) for tensor in tensors(result)) else None

    return replace(model, compute=compute)


def _largest_score(query: torch.Tensor, key: torch.Tensor) -> float:
    return float((query.float() @ key.float().mT).abs().amax()) * query.shape[-1] ** -0.5
