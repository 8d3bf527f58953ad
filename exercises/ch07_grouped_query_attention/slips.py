"""What the exercises of chapter 07 share: sentences of their verdicts, and how slips are recognised."""

from __future__ import annotations

from exercises.topics.decode import decode_lse

BIG = 55.0  # standard deviation of scores whose exponentials overflow in float32

BY_MODULO = (
    "The heads are shared out like cards: query head h goes to KV head h % key_heads. Groups are neighbours: the first "
    "query_heads // key_heads query heads share KV head 0, so it is a division by the group's size."
)
BY_COUNT = (
    "The query head is divided by the number of KV heads. Divide it by the group's size, query_heads // key_heads: "
    "that many neighbours share one KV head."
)
FIRST_HEAD = "Every query head reads KV head 0. Which one is it for this group? It belongs into the pointer or index."
SCALE_MISSING = "The scores are not scaled. Multiply the products of query and keys by 1/√head_dim."
SCALE_TWICE = "The scale is applied twice: the scores are divided by head_dim instead of its square root."

KEYS_REPEATED = (
    "Keys or values were copied for every query head of a group: that much is written and read again on top of the "
    "cache. repeat_interleave says so; reshape after expand, and matmul of [.., group, 1, head_dim] with [.., 1, "
    "head_dim, length], copy without saying it."
)


def rounding_decides(query, key, value, lengths) -> bool:
    """Whether scores are so large that two nearly equal ones share a row by their roundings: nothing to recognise."""
    return bool(decode_lse(query, key, value, lengths).max() > 60)


def grouped(output, key_heads):
    """[batch, key_heads, group, head_dim]"""
    return output.unflatten(1, (key_heads, -1))


def repeats_keys(case, seen, got):
    """Right numbers, and a tensor as large as all keys repeated for each query head was made."""
    query, key = case.args[:2]
    repeated = query.shape[0] * query.shape[1] * key.shape[2] * key.shape[3]
    return repeated > key.numel() and seen.largest_allocation >= repeated
