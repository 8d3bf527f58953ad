"""What the exercises of chapter 07 share: sentences of their verdicts, and how slips are recognised."""

from __future__ import annotations

BIG = 55.0  # standard deviation of scores whose exponentials overflow in float32

KEYS_REPEATED = (
    "Keys or values were copied for every query head of a group, so they are written and read again on top of the "
    "cache. repeat_interleave copies; so do reshape after expand, and matmul of [.., group, 1, head_dim] with [.., 1, "
    "head_dim, length]."
)


PRODUCTS_KEPT = (
    "The products of each query's and each key's numbers were all kept before they were added up: a tensor as large as "
    "the keys repeated for every query head. A matrix product, `@`, adds them up as it goes."
)

COPY = ("clone", "repeat", "copy_", "index", "index_select", "gather", "cat", "stack", "_to_copy")


def repeats_keys(case, seen, got):
    """A tensor as large as all keys repeated for each query head was made, by an operation that copies them."""
    of_caches = list(seen.read_by_pytorch.values())[1:3]
    return makes_as_much(case, seen) and any(of_caches) and any(name in seen.operations for name in COPY)


def keeps_products(case, seen, got):
    """Such a tensor was made by a product, and nothing was copied."""
    return makes_as_much(case, seen) and "mul" in seen.operations and not any(name in seen.operations for name in COPY)


def makes_as_much(case, seen):
    """Whether a tensor as large as all keys repeated for each query head was made, and nothing else is as large."""
    query, key = case.args[:2]
    repeated = query.shape[0] * query.shape[1] * key.shape[2] * key.shape[3]
    scores = query.shape[0] * query.shape[1] * key.shape[2]
    tile = query.numel() * max(16, query.shape[1])
    return repeated > max(key.numel(), scores, tile) and seen.largest_allocation >= repeated
