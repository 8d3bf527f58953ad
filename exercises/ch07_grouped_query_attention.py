"""Chapter 07: how shared KV heads are judged, from the head map to a decode kernel that reads each key once."""

from __future__ import annotations

import math
import re

import torch

from course_lib.checker import Allocates, Case, Exercise, Forbids, LaunchesTriton, Mistake, Moves
from exercises.attention_slips import (
    attention,
    from_zero,
    not_divided,
    streamed,
    without_running_max,
)
from exercises.decode_slips import (
    by_count,
    by_modulo,
    cached,
    decode,
    decode_bytes,
    decode_lse,
    decode_prescaled,
    decode_rounded,
    each_sequence,
    first_head,
    tail_scored,
    tokens_first,
    whole_cache,
    whole_tiles,
)

TILE = 64  # keys of a tile in 7.5, as its launcher sets it
GAP = 8  # elements of NaN between the rows of queries and values in one case of 7.5
LAYOUTS = "queries, keys and values each stored in another way"
LARGE_VALUES = "float16, values near 300, 300 equal scores"
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


def _for_arguments(count, function):
    """A fingerprint for one of the exercise's functions, told apart by how many arguments it takes."""
    return lambda *args: function(*args) if len(args) == count else None


# ------------------------------------------------------------------------------------------------ 7.1 the head map


def key_head_driver(functions, query_head, query_heads, key_heads):
    try:
        return functions["key_head_of"](query_head, query_heads, key_heads)
    except ValueError:
        return "ValueError"


def groups_driver(functions, query_heads, key_heads):
    try:
        return functions["groups"](query_heads, key_heads)
    except ValueError:
        return "ValueError"


def key_head_oracle(query_head, query_heads, key_heads):
    if query_heads % key_heads:
        return "ValueError"
    return [head for head in range(key_heads) for _ in range(query_heads // key_heads)][query_head]


def groups_oracle(query_heads, key_heads):
    if query_heads % key_heads:
        return "ValueError"
    members = [
        [head for head in range(query_heads) if key_head_oracle(head, query_heads, key_heads) == key_head]
        for key_head in range(key_heads)
    ]
    return torch.tensor(members)


def head_map_cases(draw):
    head = draw.integer(9, 31)

    def of_head(name, *args):
        return Case(name, args, "key_head_of", key_head_driver)

    def of_all(name, *args):
        return Case(name, args, "groups", groups_driver)

    return [
        of_head("query head 5 of 8, 2 KV heads", 5, 8, 2),
        of_head("query head 2 of 8, 4 KV heads", 2, 8, 4),
        of_head("query head 11 of 12, 3 KV heads", 11, 12, 3),
        of_head(f"query head {head} of 32, 8 KV heads", head, 32, 8),
        of_head("as many KV heads as query heads", 6, 7, 7),
        of_head("one KV head for all 71", 30, 71, 1),
        of_head("10 query heads, 4 KV heads: refused", 9, 10, 4),
        of_head("2 query heads, 4 KV heads: refused", 1, 2, 4),
        of_all("8 query heads, 2 KV heads", 8, 2),
        of_all("15 query heads, 5 KV heads", 15, 5),
        of_all("7 of each", 7, 7),
        of_all("5 query heads, one KV head", 5, 1),
        of_all("9 query heads, 2 KV heads: refused", 9, 2),
    ]


def _where_it_divides(count, slip):
    """A fingerprint that says nothing of head counts that don't divide: those have a mistake of their own."""
    return _for_arguments(count, lambda *args: slip(*args) if args[-2] % args[-1] == 0 else None)


HEAD_MAP = Exercise(
    id="7.1",
    title="The head map",
    entries=("key_head_of", "groups"),
    cases=head_map_cases,
    oracle={"key_head_of": key_head_oracle, "groups": groups_oracle},
    hints=(
        "How many query heads share one KV head? That is the group's size, and it is the same for all of them.",
        "Groups are neighbours. With 8 query heads and 2 KV heads, 0 1 2 3 read KV head 0 and 4 5 6 7 read KV head 1: "
        "a whole-number division by the group's size.",
        "groups is the way back: KV head k is read by query heads k * group to (k + 1) * group - 1. As a tensor, that "
        "is torch.arange(query_heads) in rows of `group`.",
        "Before anything else: if query_heads % key_heads != 0: raise ValueError(...), with both numbers in its text.",
    ),
    mistakes=(
        Mistake("by_modulo", BY_MODULO, result=_where_it_divides(3, lambda h, q, k: h % k)),
        Mistake(
            "groups_by_modulo",
            BY_MODULO,
            result=_where_it_divides(2, lambda q, k: torch.arange(q).view(-1, k).T),
        ),
        Mistake("by_count", BY_COUNT, result=_where_it_divides(3, lambda h, q, k: h // k)),
        Mistake(
            "groups_of_key_heads",
            "You made groups of key_heads members each. It is the other way round: a row for each KV head, with "
            "query_heads // key_heads members.",
            result=_where_it_divides(2, lambda q, k: torch.arange(q).view(-1, k)),
        ),
        Mistake(
            "groups_turned",
            "The groups are right, and stand in columns. Row k holds the query heads of KV head k.",
            result=_where_it_divides(2, lambda q, k: torch.arange(q).view(k, -1).T),
        ),
        Mistake(
            "not_refused",
            "Head counts that don't divide were accepted. Some query heads would then share a KV head with fewer "
            "others, or read one that isn't there; no kernel is written for that. Raise a ValueError.",
            when=lambda case, seen, got: case.args[-2] % case.args[-1] != 0 and not isinstance(got, str),
        ),
    ),
)


# ------------------------------------------------------------------------------------------- 7.2 bytes and intensity


def cache_bytes_oracle(layers, query_heads, group, head_dim, tokens, item_bytes):
    return 2 * layers * (query_heads // group) * head_dim * tokens * item_bytes


def _intensity(query_heads, key_heads, length, head_dim, item_bytes, *, flops=4, keys=2, queries=2):
    moved = item_bytes * (keys * length * key_heads * head_dim + queries * query_heads * head_dim)
    return flops * query_heads * length * head_dim / moved


def intensity_oracle(query_heads, key_heads, length, head_dim, item_bytes):
    return _intensity(query_heads, key_heads, length, head_dim, item_bytes)


def balanced_group_oracle(rate, bandwidth, item_bytes):
    group = 1
    while 2 * group * bandwidth < rate * item_bytes:
        group += 1
    return group


def intensity_cases(draw):
    length = draw.integer(2, 3000)
    return [
        Case("Llama-2-70B, 4096 tokens, float16", (80, 64, 8, 128, 4096, 2), "cache_bytes"),
        Case("the same with a KV head for each query head", (80, 64, 1, 128, 4096, 2), "cache_bytes"),
        Case("one KV head, one token, float32", (3, 12, 12, 64, 1, 4), "cache_bytes"),
        Case("64 query heads, 8 KV heads, 32768 tokens, 16 bits", (64, 8, 32768, 128, 2), "decode_intensity"),
        Case("32 of each, 4096 tokens, 16 bits", (32, 32, 4096, 128, 2), "decode_intensity"),
        Case("32 query heads, one KV head, 1000 tokens, 8 bits", (32, 1, 1000, 64, 1), "decode_intensity"),
        Case(f"12 query heads, 4 KV heads, {length} tokens, float32", (12, 4, length, 80, 4), "decode_intensity"),
        Case("16 query heads, 2 KV heads, a single token", (16, 2, 1, 128, 2), "decode_intensity"),
        Case("H100: 989 TFLOP/s, 3.35 TB/s, 16 bits", (989e12, 3.35e12, 2), "balanced_group"),
        Case("H100 and an 8-bit cache, 16-bit arithmetic", (989e12, 3.35e12, 1), "balanced_group"),
        Case("a balance point of exactly 64, float32", (2.0**46, 2.0**40, 4), "balanced_group"),
        Case("a balance point below 1", (1e12, 3e12, 2), "balanced_group"),
    ]


INTENSITY = Exercise(
    id="7.2",
    title="What decode costs",
    entries=("cache_bytes", "decode_intensity", "balanced_group"),
    cases=intensity_cases,
    oracle={
        "cache_bytes": cache_bytes_oracle,
        "decode_intensity": intensity_oracle,
        "balanced_group": balanced_group_oracle,
    },
    hints=(
        "cache_bytes is chapter 05's formula; the only new thing is that a layer has query_heads // group KV heads.",
        "FLOPs first: a query head meets `length` keys. Its score with one key is head_dim multiply-adds, and so is "
        "adding one weighted value: 4 · head_dim FLOPs for each key and query head.",
        "Bytes: K and V are length · key_heads · head_dim elements each, read once. The queries and the output are "
        "query_heads · head_dim elements each.",
        "For a long context decode_intensity tends to 2 · group / item_bytes. balanced_group is the smallest whole "
        "group for which that is at least rate / bandwidth: math.ceil(rate / bandwidth * item_bytes / 2).",
    ),
    mistakes=(
        Mistake(
            "values_forgotten",
            "The cache is half as large as it should be: keys and values are both kept. Multiply by 2.",
            result=_for_arguments(6, lambda *args: cache_bytes_oracle(*args) // 2),
        ),
        Mistake(
            "group_ignored",
            "The cache holds a key for every query head. Only query_heads // group KV heads are kept.",
            result=_for_arguments(6, lambda n, q, g, d, t, b: cache_bytes_oracle(n, q, 1, d, t, b)),
        ),
        Mistake(
            "group_taken_for_key_heads",
            "The group's size was taken for the number of KV heads. A layer has query_heads // group of them.",
            result=_for_arguments(6, lambda n, q, g, d, t, b: cache_bytes_oracle(n, g, 1, d, t, b)),
        ),
        Mistake(
            "one_product_only",
            "Only one of the two products is counted, or a multiply-add as one FLOP. Scores and weighted values are "
            "head_dim multiply-adds each for a key and a query head: 4 · head_dim FLOPs.",
            result=_for_arguments(5, lambda *args: _intensity(*args, flops=2)),
        ),
        Mistake(
            "flops_of_key_heads",
            "The FLOPs are counted for the KV heads. Every query head computes scores of its own; only the bytes are "
            "shared.",
            result=_for_arguments(5, lambda q, k, *rest: _intensity(q, k, *rest) * k / q),
        ),
        Mistake(
            "bytes_of_query_heads",
            "Keys and values are counted once for every query head. A group shares them, and they are read once: "
            "key_heads of them.",
            result=_for_arguments(5, lambda q, k, *rest: _intensity(q, q, *rest)),
        ),
        Mistake(
            "queries_forgotten",
            "The queries and the output are missing from the bytes. They are little beside a long cache, and most of "
            "it for a single token.",
            result=_for_arguments(5, lambda *args: _intensity(*args, queries=0)),
        ),
        Mistake(
            "output_forgotten",
            "The output is missing from the bytes: as many as the queries.",
            result=_for_arguments(5, lambda *args: _intensity(*args, queries=1)),
        ),
        Mistake(
            "values_not_read",
            "The bytes hold the keys and not the values. Both are read.",
            result=_for_arguments(5, lambda *args: _intensity(*args, keys=1)),
        ),
        Mistake(
            "upside_down",
            "That is bytes for each FLOP. Intensity is FLOPs divided by bytes.",
            result=_for_arguments(5, lambda *args: 1 / _intensity(*args)),
        ),
        Mistake(
            "item_bytes_ignored",
            "The size of an element is missing from balanced_group. A group of G does 2 · G / item_bytes FLOPs for "
            "each byte: G only in 16 bits.",
            result=_for_arguments(3, lambda rate, bandwidth, item_bytes: math.ceil(rate / bandwidth)),
        ),
        Mistake(
            "group_rounded_down",
            "The group was rounded down. The last group below the balance point still waits for memory: round up.",
            result=_for_arguments(3, lambda rate, bandwidth, b: math.floor(rate / bandwidth * b / 2) or None),
        ),
    ),
)


# ---------------------------------------------------------------------------------------------- 7.3 mean-pooling


def _split(weight, key_heads, new_key_heads):
    """[new_key_heads, group, head_dim, ...]: the heads that become one stand together."""
    return weight.unflatten(0, (new_key_heads, key_heads // new_key_heads, -1))


def pool_oracle(weight, key_heads, new_key_heads):
    return _split(weight, key_heads, new_key_heads).mean(dim=1).flatten(0, 1)


def pool_added_up(weight, key_heads, new_key_heads):
    """Heads added one by one in the weight's own dtype, then scaled: as good, rounded more."""
    heads = _split(weight, key_heads, new_key_heads)
    total = heads[:, 0].clone()
    for member in range(1, heads.shape[1]):
        total = total + heads[:, member]
    return (total * (1 / heads.shape[1])).flatten(0, 1)


def pool_scaled_first(weight, key_heads, new_key_heads):
    """Every head divided first, then added, in the weight's own dtype."""
    heads = _split(weight, key_heads, new_key_heads) / (key_heads // new_key_heads)
    total = heads[:, 0].clone()
    for member in range(1, heads.shape[1]):
        total = total + heads[:, member]
    return total.flatten(0, 1)


def pool_cases(draw):
    def case(name, key_heads, new_key_heads, head_dim, *width, dtype=torch.float32):
        return Case(name, (draw.normal(key_heads * head_dim, *width, dtype=dtype), key_heads, new_key_heads))

    turned = draw.transposed(draw.normal(6 * 4, 10))
    return [
        case("8 heads of 4 become 2, width 6", 8, 2, 4, 6),
        case("8 heads become 1: multi-query", 8, 1, 4, 5),
        case("6 heads of 5 become 3, width 7", 6, 3, 5, 7),
        case("12 heads of 2 become 4", 12, 4, 2, 3),
        case("4 heads stay 4: nothing changes", 4, 4, 3, 8),
        Case("a weight stored column by column", (turned, 6, 2)),
        case("a bias: one dimension", 8, 4, 16),
        case("float16, 32 heads become 8", 32, 8, 8, 16, dtype=torch.float16),
    ]


def _unless_unchanged(slip):
    """A fingerprint that says nothing where the number of heads stays."""
    return lambda weight, key_heads, new: None if key_heads == new else slip(weight, key_heads, new)


POOL = Exercise(
    id="7.3",
    title="Convert a checkpoint by mean-pooling",
    entries=("pool_heads",),
    cases=pool_cases,
    oracle=pool_oracle,
    plain=(pool_added_up, pool_scaled_first),
    hints=(
        "The rows of the weight are heads, one after the other: row head · head_dim + d makes element d of that head. "
        "Take them apart before you average: which shape shows new head, member of the group and head_dim?",
        "weight.unflatten(0, (new_key_heads, key_heads // new_key_heads, head_dim)) is [new, group, head_dim, ...]. "
        "The groups of exercise 7.1 stand together, so that no row need move.",
        "Average over the members, dimension 1, and put heads and head_dim back into one dimension with flatten(0, 1). "
        "head_dim is weight.shape[0] // key_heads.",
    ),
    mistakes=(
        Mistake(
            "heads_interleaved",
            "Head h was averaged with h + new_key_heads and so on: every new_key_heads-th head. The query heads that "
            "will share a KV head are neighbours, so their KV heads are: split the rows as [new_key_heads, group, "
            "head_dim].",
            result=lambda w, k, new: w.unflatten(0, (k // new, new, -1)).mean(dim=0).flatten(0, 1),
        ),
        Mistake(
            "rows_averaged",
            "Neighbouring rows were averaged, which are elements of one head. The rows are [heads, head_dim], all of "
            "head 0 first: average element d of one head with element d of the others.",
            result=lambda w, k, new: w.unflatten(0, (-1, k // new)).mean(dim=1),
        ),
        Mistake(
            "summed",
            "The heads of a group are added up and not averaged: keys and scores grow by the group's size. Take the "
            "mean.",
            result=_unless_unchanged(lambda w, k, new: _split(w, k, new).sum(dim=1).flatten(0, 1)),
        ),
        Mistake(
            "first_of_group",
            "The first head of each group is kept and the others are dropped. It works less well than the mean of all "
            "(Ainslie et al., figure 4).",
            result=_unless_unchanged(lambda w, k, new: _split(w, k, new)[:, 0].flatten(0, 1)),
        ),
        Mistake(
            "first_heads_kept",
            "The first new_key_heads heads are kept and the rest is dropped. Average the members of each group.",
            result=_unless_unchanged(lambda w, k, new: w.unflatten(0, (k, -1))[:new].flatten(0, 1)),
        ),
        Mistake(
            "everything_averaged",
            "All heads were averaged into one, and that one is repeated. Average inside each group only.",
            result=_unless_unchanged(
                lambda w, k, new: torch.cat([w.unflatten(0, (k, -1)).mean(dim=0)] * new) if new > 1 else None
            ),
        ),
        Mistake(
            "pooled_then_repeated",
            "The result still has key_heads heads: the mean was written back to every member. One head for each group "
            "is what makes the cache smaller.",
            result=_unless_unchanged(
                lambda w, k, new: _split(w, k, new).mean(dim=1).repeat_interleave(k // new, dim=0).flatten(0, 1)
            ),
        ),
    ),
)


# --------------------------------------------------------------------------------- 7.4 grouped attention in PyTorch


def _all_keys(key):
    """Every sequence has as many tokens as the keys given."""
    return torch.full((key.shape[0],), key.shape[2])


def shared_oracle(query, key, value):
    return decode(query, key, value, _all_keys(key))


def shared_prescaled(query, key, value):
    return decode_prescaled(query, key, value, _all_keys(key))


def shared_rounded(query, key, value):
    return decode_rounded(query, key, value, _all_keys(key))


def shared_cases(draw):
    def case(name, query_heads, key_heads, head_dim, length, batch=1, change=None, **options):
        query, key, value, _ = cached(draw, query_heads, key_heads, head_dim, [length] * batch, length, **options)
        if change:
            key, value = change(key), change(value)
        return Case(name, (query, key, value))

    prime = draw.choice((37, 41, 53, 61))
    larger = cached(draw, 8, 4, 16, [30, 30], 50)
    return [
        case("8 query heads on 2 KV heads, 50 keys", 8, 2, 16, 50),
        case("two sequences, 12 query heads on 4", 12, 4, 16, 33, batch=2),
        case("one key", 6, 3, 8, 1),
        case("a KV head for each query head", 5, 5, 16, 40),
        case(f"one KV head for all, {prime} keys", 6, 1, 16, prime),
        case("scores of ±150: exp overflows", 8, 2, 32, 70, score=BIG),
        case("keys and values stored token by token", 8, 2, 16, 64, batch=2, change=tokens_first),
        Case("the first 30 slots of a cache with 50", (larger[0], larger[1][:, :, :30], larger[2][:, :, :30])),
        case("float16, 16 query heads on 2", 16, 2, 32, 100, dtype=torch.float16),
        case("64 query heads on 8 KV heads, 200 keys", 64, 8, 32, 200),
    ]


def _rounding_decides(query, key, value, lengths) -> bool:
    """Whether scores are so large that two nearly equal ones share a row by their roundings: nothing to recognise."""
    return bool(decode_lse(query, key, value, lengths).max() > 60)


def _on_all_keys(function=attention, **slips):
    """A fingerprint of 7.4: `function` of every query head with slips in the head map."""

    def result(query, key, value):
        lengths = _all_keys(key)
        if _rounding_decides(query, key, value, lengths):
            return None
        return each_sequence(function, query, key, value, lengths, **slips)

    return result


def _grouped(output, key_heads):
    """[batch, key_heads, group, head_dim]"""
    return output.unflatten(1, (key_heads, -1))


def _queries_interleaved(query, key, value):
    """The queries are split as [group, key_heads] and the output is put together as [key_heads, group]."""
    output = _on_all_keys(heads=by_modulo)(query, key, value)
    return None if output is None else output.unflatten(1, (-1, key.shape[1])).transpose(1, 2).flatten(1, 2)


def _outputs_interleaved(query, key, value):
    """The queries are split rightly and the output is put together as [group, key_heads]."""
    return _grouped(shared_oracle(query, key, value), key.shape[1]).transpose(1, 2).flatten(1, 2)


def _softmax_over_the_group(query, key, value):
    """The softmax runs over the query heads of a group instead of over the keys."""
    scores = _grouped(query, key.shape[1]) @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return (torch.softmax(scores, dim=2) @ value).flatten(1, 2)


def _close(got, right) -> bool:
    return (
        isinstance(got, torch.Tensor)
        and got.shape == right.shape
        and torch.allclose(got.double(), right.double(), rtol=2e-2, atol=2e-2)
    )


def _repeats_keys(case, seen, got):
    """Right numbers, and a tensor as large as all keys repeated for each query head was made."""
    query, key = case.args[:2]
    repeated = query.shape[0] * query.shape[1] * key.shape[2] * key.shape[3]
    return repeated > key.numel() and seen.largest_allocation >= repeated


KEYS_REPEATED = (
    "Keys or values were copied for every query head of a group: that much is written and read again on top of the "
    "cache. repeat_interleave says so; reshape after expand, and matmul of [.., group, 1, head_dim] with [.., 1, "
    "head_dim, length], copy without saying it."
)

SHARED = Exercise(
    id="7.4",
    title="Grouped attention without a copy",
    entries=("grouped_attention",),
    cases=shared_cases,
    oracle=shared_oracle,
    plain=(shared_prescaled, shared_rounded),
    requirements=(
        Allocates(lambda q, k, v: max(q.numel(), k.numel(), q.shape[0] * q.shape[1] * k.shape[2])),
        Forbids(("scaled_dot_product", "scaled_dot_product_attention")),
    ),
    hints=(
        "With one query head for each KV head this is a product of a vector [1, head_dim] and a matrix [head_dim, "
        "length]. Nothing says that there must be one row: a group of query heads is a matrix [group, head_dim].",
        "Neighbouring query heads share a KV head, so query.unflatten(1, (key_heads, -1)) is [batch, key_heads, group, "
        "head_dim], and no element moves.",
        "scores = grouped @ key.transpose(-1, -2) / math.sqrt(head_dim) is [batch, key_heads, group, length]. The "
        "batch dimensions of both operands agree, so matmul has nothing to copy.",
        "(torch.softmax(scores, dim=-1) @ value).flatten(1, 2) is [batch, query_heads, head_dim].",
    ),
    mistakes=(
        Mistake("by_modulo", BY_MODULO, result=_on_all_keys(heads=by_modulo)),
        Mistake("by_count", BY_COUNT, result=_on_all_keys(heads=by_count)),
        Mistake("first_head_for_all", FIRST_HEAD, result=_on_all_keys(heads=first_head)),
        Mistake(
            "queries_interleaved",
            "The query heads were split as [group, key_heads]. Neighbours share a KV head, so the split is "
            "[key_heads, group].",
            result=_queries_interleaved,
        ),
        Mistake(
            "outputs_interleaved",
            "The output's heads are in another order than the queries': they were put together as [group, key_heads]. "
            "Bring the result to [batch, key_heads, group, head_dim] before you flatten it.",
            result=_outputs_interleaved,
        ),
        Mistake(
            "softmax_over_the_group",
            "The softmax runs over the query heads of a group. Each query head weighs the keys: softmax over the last "
            "dimension of [batch, key_heads, group, length].",
            result=_softmax_over_the_group,
        ),
        Mistake("scale_missing", SCALE_MISSING, result=_on_all_keys(lambda q, k, v: attention(q, k, v, scale=1.0))),
        Mistake(
            "scale_twice",
            SCALE_TWICE,
            result=_on_all_keys(lambda q, k, v: attention(q, k, v, scale=1 / q.shape[-1])),
        ),
        Mistake(
            "no_maximum",
            "exp overflows float32 above 88, and infinity divided by infinity is NaN. Subtract each row's maximum "
            "first, or take torch.softmax.",
            result=lambda q, k, v: each_sequence(without_running_max, q, k, v, _all_keys(k)),
        ),
        Mistake(
            "keys_used_as_values",
            "The weights are multiplied with the keys. The second product takes the values.",
            result=lambda q, k, v: _on_all_keys()(q, k, k),
        ),
        Mistake("keys_repeated", KEYS_REPEATED, when=_repeats_keys),
    ),
)


# ------------------------------------------------------------------------------------------------ 7.5 the kernel


def kernel_cases(draw):
    def case(name, query_heads, key_heads, head_dim, lengths, capacity, metered=False, **options):
        return Case(name, cached(draw, query_heads, key_heads, head_dim, lengths, capacity, **options), metered=metered)

    prime = draw.choice((67, 71, 73, 79))
    query, key, value, lengths = cached(draw, 8, 2, 32, [60, 100], 104)
    layouts = (draw.spread_out(query, GAP), tokens_first(key), draw.spread_out(value, GAP), lengths)
    equal = cached(draw, 4, 1, 16, [300], 304, dtype=torch.float16)
    equal = (torch.zeros_like(equal[0]), equal[1], (equal[2] * 10 + 300), equal[3])
    far = cached(draw, 4, 2, 32, [70], 90)
    cases = [
        case("8 query heads on 2 KV heads, two sequences of 64 and 128", 8, 2, 32, [64, 128], 128),
        case("one token in the cache", 4, 2, 16, [1], 40),
        case(f"lengths 63, 65 and {prime}", 4, 1, 32, [63, 65, prime], 96),
        case("a sequence without a token between two others", 6, 2, 16, [20, 0, 33], 64),
        case("a KV head for each query head", 3, 3, 32, [70], 80),
        case("groups of 5, three KV heads", 15, 3, 16, [90], 100),
        case("groups of 20: more rows than 16", 40, 2, 16, [66], 70),
        case("one KV head for 16 query heads", 16, 1, 32, [130], 160),
        case("2,051 tokens", 2, 1, 16, [2051], 2060),
        case("scores of ±150: exp overflows", 8, 2, 32, [150], 192, score=BIG),
        Case("all scores near -200", (far[0] * 0.3 + 5.0, far[1] * 0.2 - 7.0, *far[2:])),
        Case(LAYOUTS, layouts),
        case("NaN in the slots that hold no token", 4, 2, 32, [40, 70], 128, unused=math.nan),
        case("float16, head dimension 64", 16, 4, 64, [100], 128, dtype=torch.float16),
        Case(LARGE_VALUES, equal),
        case("16 query heads on 2, lengths 200 and 130, bytes counted", 16, 2, 64, [200, 130], 256, metered=True),
    ]
    if draw.on_gpu:
        cases.append(case("32 on 4, lengths 1000 and 2049", 32, 4, 128, [1000, 2049], 2100, dtype=torch.float16))
    return cases


def _clear(slip):
    """The fingerprint where it can be recognised: not of an empty sequence, which is a question of its own, and not
    where scores are so large that roundings decide."""

    def result(query, key, value, lengths):
        if int(lengths.min()) == 0 or _rounding_decides(query, key, value, lengths):
            return None
        return slip(query, key, value, lengths)

    return result


def _each(function=attention, **slips):
    """A fingerprint of 7.5: `function` of every sequence, with slips in the map."""
    return _clear(lambda q, k, v, lengths: each_sequence(function, q, k, v, lengths, **slips))


def _scaled(scale):
    """A fingerprint with another scale, a function of head_dim."""
    return _each(lambda q, k, v: attention(q, k, v, scale=scale(q.shape[-1])))


def _with_lengths(change):
    """A fingerprint with other lengths, held inside the cache."""
    return _clear(lambda q, k, v, lengths: decode(q, k, v, change(lengths, k)))


def _off_by(shift, *, inside_tiles=False):
    """Lengths off by one; nothing is said of a sequence that would be left without a token."""

    def result(query, key, value, lengths):
        if int(lengths.min()) < 2:
            return None
        moved = lengths + shift
        return decode(query, key, value, torch.where(lengths % TILE == 0, lengths, moved) if inside_tiles else moved)

    return _clear(result)


def _exponentials(function, **options):
    """A fingerprint of slips that show where exponentials overflow or vanish: it speaks of large scores too."""

    def result(query, key, value, lengths):
        if int(lengths.min()) == 0:
            return None
        return each_sequence(lambda q, k, v: function(q, k, v, **options), query, key, value, lengths)

    return result


def _group_size(query, key):
    return query.shape[1] // key.shape[1]


@_clear
def _first_rows_only(query, key, value, lengths):
    """Tiles of 16 rows whatever the group: the heads beyond stay unwritten."""
    if _group_size(query, key) <= 16:
        return None
    output = _grouped(decode(query, key, value, lengths), key.shape[1]).clone()
    output[:, :, 16:] = math.nan
    return output.flatten(1, 2)


@_clear
def _group_offset_missing(query, key, value, lengths):
    """Every program takes the query heads of the first group and writes there; the last KV head's result stays."""
    group = _group_size(query, key)
    output = torch.full_like(query, math.nan)
    output[:, :group] = decode(query[:, :group], key[:, -1:], value[:, -1:], lengths)
    return output


def _unused_slots_count(query, key, value, lengths):
    """A tile's slots behind the last token weigh 0, and 0 · NaN is NaN: every head of such a sequence."""
    output = decode(query, key, value, lengths)
    for index, length in enumerate(lengths.tolist()):
        if value[index, :, length : -(-length // TILE) * TILE].isnan().any():
            output[index] = math.nan
    return output


def _different_layouts(key):
    """Whether this is the case of three layouts, the only one whose keys are not contiguous."""
    return not key.is_contiguous()


@_clear
def _queries_as_contiguous(query, key, value, lengths):
    """In the case of three layouts queries lie GAP elements apart; a float64 copy has lost the gaps."""
    if not _different_layouts(key):
        return decode(query, key, value, lengths)
    memory = torch.nn.functional.pad(query, (0, GAP), value=math.nan).flatten()
    return decode(memory[: query.numel()].view(query.shape), key, value, lengths)


@_clear
def _keys_as_contiguous(query, key, value, lengths):
    heads, capacity, head_dim = key.shape[1:]
    key = key.as_strided(key.shape, (heads * capacity * head_dim, capacity * head_dim, head_dim, 1))
    return decode(query, key, value, lengths)


@_clear
def _values_misread(query, key, value, lengths):
    """Values read as contiguous, or by the keys' strides: a gap of NaN reaches every output."""
    output = decode(query, key, value, lengths)
    return torch.full_like(output, math.nan) if _different_layouts(key) else output


def _rereads_keys(case, seen, got):
    """Right numbers, and keys or values loaded more than once."""
    times = [
        counts["loaded"] / max(counts["distinct_loaded"], 1)
        for name, counts in seen.traffic.items()
        if name.startswith(("key", "value"))
    ]
    return bool(times) and max(times) > 1.5 and _close(got, decode(*_float64(case.args)))


def _float64(args):
    return [arg.double() if arg.is_floating_point() else arg for arg in args]


def _access(*words):
    return lambda case, seen, got: any(word in access for access in seen.out_of_bounds for word in words)


def _program_beyond_the_key_heads(case, seen, got):
    """A program whose place on the grid's second axis is no KV head reached outside a tensor."""
    key_heads = case.args[1].shape[1]
    programs = [re.search(r"program \(\d+, (\d+)", access) for access in seen.out_of_bounds]
    return any(program and int(program[1]) >= key_heads for program in programs)


def _output_strays(case, seen, got):
    """Written outside, and the second head is wrong already: rows were stored further apart than they lie."""
    if case.name != LAYOUTS or not isinstance(got, torch.Tensor) or not _access("writes output")(case, seen, got):
        return False
    right = decode(*case.args)
    return got.shape == right.shape and not torch.allclose(got[0, 1].double(), right[0, 1].double(), atol=0.02)


KERNEL = Exercise(
    id="7.5",
    title="A decode kernel that reads each key once",
    entries=("grouped_decode",),
    cases=kernel_cases,
    oracle=decode,
    plain=(decode_prescaled, decode_rounded),
    needs="triton",
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda q, k, v, lengths: max(q.numel(), k.numel())),
        Forbids(("scaled_dot_product_attention", "_scaled_dot_product", "bmm", "mm", "matmul", "_softmax", "softmax")),
        Moves(lambda q, k, v, lengths: decode_bytes(q, k, lengths)),
    ),
    hints=(
        "A program owns a KV head of a sequence: sequence = tl.program_id(0), key_head = tl.program_id(1), and the "
        "grid is (batch, key_heads). Its query heads are key_head * GROUP + rows, with rows = tl.arange(0, ROWS).",
        "tl.dot needs at least 16 rows, and tiles are powers of two: ROWS = max(16, triton.next_power_of_2(group)). "
        "Rows from GROUP on are padding: mask=(rows < GROUP)[:, None] in the load of the queries and in the store.",
        "The loop is that of chapter 04, with one tile of queries: for first_key in range(0, length, BLOCK_N), where "
        "length = tl.load(lengths_pointer + sequence). Load keys and values with mask=(keys < length)[:, None], other="
        "0.0, and give scores behind the length minus infinity.",
        'scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2 is [ROWS, BLOCK_N]; the '
        "online softmax with tl.exp2 goes along axis 1. Every key counts for all rows of the tile.",
        "Without a token the loop makes no step, and accumulator / running_sum is 0 / 0. Divide by tl.where(running_sum"
        " == 0.0, 1.0, running_sum).",
    ),
    mistakes=(
        Mistake("by_modulo", BY_MODULO, result=_each(heads=by_modulo)),
        Mistake("by_count", BY_COUNT, result=_each(heads=by_count)),
        Mistake("first_head_for_all", FIRST_HEAD, result=_each(heads=first_head)),
        Mistake(
            "group_offset_missing",
            "Every program takes the query heads of the first group and writes its result there. Those of KV head k "
            "begin at k * GROUP.",
            result=_group_offset_missing,
        ),
        Mistake(
            "group_larger_than_the_tile",
            "A group of more than 16 query heads doesn't fit into 16 rows, and the others were never computed. Let "
            "ROWS be the next power of two, and at least 16.",
            result=_first_rows_only,
        ),
        Mistake("scale_missing", SCALE_MISSING, result=(_scaled(lambda dim: math.log(2)), _scaled(lambda dim: 1.0))),
        Mistake(
            "scale_twice",
            "The scale is applied twice. Look for scale_log2 both where the queries are loaded and where the scores "
            "are made.",
            result=_scaled(lambda dim: math.log2(math.e) / dim),
        ),
        Mistake(
            "natural_exp",
            "scale_log2 already holds log2(e), and the exponential is the natural one. Take tl.exp2 throughout.",
            result=_scaled(lambda dim: math.log2(math.e) / math.sqrt(dim)),
        ),
        Mistake(
            "log2e_missing",
            "The exponential is tl.exp2 and the scale lacks log2(e): 2^x is not e^x. Multiply by math.log2(math.e).",
            result=_scaled(lambda dim: math.log(2) / math.sqrt(dim)),
        ),
        Mistake(
            "length_ignored",
            "Every sequence was read as long as the cache has room. Slots behind its length hold no token: the loop "
            "ends at the sequence's own length.",
            result=_with_lengths(lambda lengths, key: whole_cache(key, lengths)),
        ),
        Mistake(
            "first_length_for_all",
            "All sequences were given the length of the first one. A program's own is at lengths_pointer + sequence.",
            result=_with_lengths(lambda lengths, key: lengths[:1].expand_as(lengths)),
        ),
        Mistake(
            "longest_length_for_all",
            "All sequences were given the length of the longest one. A program's own is at lengths_pointer + sequence.",
            result=_with_lengths(lambda lengths, key: lengths.max().expand_as(lengths)),
        ),
        Mistake(
            "one_token_too_few",
            "The newest token is left out: the lengths count the current token, so keys 0 to length - 1 are all seen.",
            result=_off_by(-1),
        ),
        Mistake(
            "one_token_too_many",
            "One slot too many counts, the one right behind the last token. Keys are counted from 0: the condition is "
            "keys < length.",
            result=(_off_by(1), _off_by(1, inside_tiles=True)),
        ),
        Mistake(
            "last_tile_dropped",
            "The last tile is dropped when it isn't full. Round the number of tiles up: range(0, length, BLOCK_N).",
            result=_with_lengths(lambda lengths, key: whole_tiles(lengths, TILE)),
        ),
        Mistake(
            "tail_keys_scored",
            "Keys past the length were loaded as zeros and counted: a key of zeros scores 0, and exp(0 - maximum) is "
            "not 0. Give their scores minus infinity.",
            result=_clear(lambda q, k, v, lengths: tail_scored(q, k, v, lengths, TILE)),
        ),
        Mistake(
            "unused_slots_count",
            "A slot without a token reached the result: its weight is 0, and 0 · NaN is NaN. Mask the loads of keys "
            "and values with keys < length, not only the scores.",
            result=_unused_slots_count,
        ),
        Mistake(
            "no_running_max",
            "The exponential is taken of the scores as they are, and overflows. Subtract the row's running maximum.",
            result=(_exponentials(without_running_max), _exponentials(without_running_max, guarded=True)),
        ),
        Mistake(
            "maximum_starts_at_zero",
            "The running maximum starts at 0, so a row whose scores all lie far below 0 underflows: its sum is 0. "
            "Start it at minus infinity.",
            result=(_exponentials(from_zero), _exponentials(from_zero, lost=math.nan)),
        ),
        Mistake(
            "accumulator_not_rescaled",
            "The accumulator is not rescaled when the running maximum grows. Multiply it by exp2(old maximum - new "
            "maximum) before the tile's product is added.",
            result=_each(lambda q, k, v: streamed(q, k, v, TILE, rescale_accumulator=False)),
        ),
        Mistake(
            "sum_not_rescaled",
            "The running sum is not rescaled when the running maximum grows. Multiply it by exp2(old maximum - new "
            "maximum).",
            result=_each(lambda q, k, v: streamed(q, k, v, TILE, rescale_sum=False)),
        ),
        Mistake("not_divided", "The accumulator is not divided by the running sum.", result=_each(not_divided)),
        Mistake(
            "keys_used_as_values",
            "The weights are multiplied with the keys. The second product takes the values: look at its pointer.",
            result=_clear(lambda q, k, v, lengths: decode(q, k, k, lengths)),
        ),
        Mistake(
            "empty_sequence_nan",
            "A sequence without a token gives 0 / 0 = NaN. Its output is 0: divide by 1 where the sum is 0.",
            result=lambda q, k, v, lengths: decode(q, k, v, lengths, empty=math.nan),
        ),
        Mistake(
            "strides_ignored",
            "A tensor was read as if it were contiguous, or by another tensor's strides. Queries, keys and values may "
            "be laid out in three ways: each has strides of its own among the kernel's arguments.",
            result=(_queries_as_contiguous, _keys_as_contiguous, _values_misread),
        ),
        Mistake(
            "accumulator_in_float16",
            "A sum has passed 65,504, the largest float16. The accumulator and the running sum are float32, whatever "
            "the inputs are; only the finished output is cast.",
            when=lambda case, seen, got: (
                case.name == LARGE_VALUES and isinstance(got, torch.Tensor) and bool(got.isinf().all())
            ),
        ),
        Mistake(
            "grid_axes_exchanged",
            "A length was read that isn't there. The grid is (batch, key_heads): does each program take its sequence "
            "from program_id(0) and its KV head from program_id(1)?",
            when=_access("lengths"),
        ),
        Mistake(
            "program_for_each_query_head",
            "There are more programs than KV heads, and those beyond the last one reached outside. A program takes a "
            "whole group: the grid is (batch, key_heads), not (batch, query_heads).",
            when=_program_beyond_the_key_heads,
        ),
        Mistake(
            "output_by_other_strides",
            "The output was written by another tensor's strides. It has strides of its own among the kernel's "
            "arguments: output_batch_stride and output_head_stride.",
            when=_output_strays,
        ),
        Mistake(
            "group_rows_not_masked",
            "Rows beyond the group were read or written. A tile has ROWS rows and the group only GROUP of them: the "
            "others are the next group's query heads, or no one's. Mask the load of the queries and the store, and "
            "begin at key_head * GROUP.",
            when=_access("query", "output"),
        ),
        Mistake(
            "tail_read_out_of_bounds",
            "Keys or values behind the end of the cache were read. Where the length is no multiple of the tile, mask "
            "the loads with keys < length.",
            when=_access("key", "value"),
        ),
        Mistake("keys_repeated", KEYS_REPEATED, when=_repeats_keys),
        Mistake(
            "keys_reread",
            "Right numbers, but the keys were loaded once for every query head of a group. Let one program take the "
            "whole group: a tile of ROWS query heads against each tile of keys.",
            when=_rereads_keys,
        ),
    ),
)


# ---------------------------------------------------------------------------------- 7.6 KV heads for a deployment


def rank_bytes_oracle(layers, key_heads, head_dim, tokens, item_bytes, ranks):
    return 2 * layers * -(-key_heads // ranks) * head_dim * tokens * item_bytes


def _choices(query_heads, ranks, *, even=True, divide=True):
    """The numbers of KV heads that are allowed."""
    return [
        heads
        for heads in range(1, query_heads + 1)
        if (query_heads % heads == 0 or not divide) and (heads % ranks == 0 or ranks % heads == 0 or not even)
    ]


def _chosen(layers, query_heads, head_dim, tokens, item_bytes, budget, ranks, *, need=None, pick=max, **rules):
    """The pick among allowed numbers of KV heads whose `need(heads)` is at most the budget."""
    need = need or (lambda heads: rank_bytes_oracle(layers, heads, head_dim, tokens, item_bytes, ranks))
    return pick((heads for heads in _choices(query_heads, ranks, **rules) if need(heads) <= budget), default=None)


def _largest_power_of_two(heads, default):
    return max((head for head in heads if head & (head - 1) == 0), default=default)


def choose_oracle(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks):
    return _chosen(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks)


def deployment_cases(draw):
    exact = rank_bytes_oracle(32, 8, 128, 65536, 2, 2)
    tokens = draw.integer(1000, 2000)
    return [
        Case("80 layers, 8 KV heads on 8 GPUs", (80, 8, 128, 32768, 2, 8), "rank_cache_bytes"),
        Case("the same on 2 GPUs", (80, 8, 128, 32768, 2, 2), "rank_cache_bytes"),
        Case("2 KV heads on 8 GPUs: each on four of them", (32, 2, 128, 4096, 2, 8), "rank_cache_bytes"),
        Case(f"12 KV heads on 4 GPUs, {tokens} tokens, 8 bits", (10, 12, 64, tokens, 1, 4), "rank_cache_bytes"),
        Case("one GPU, 40 GB", (80, 64, 128, 131072, 2, 40e9, 1), "choose_key_heads"),
        Case("8 GPUs, 20 GB on each", (80, 64, 128, 131072, 2, 20e9, 8), "choose_key_heads"),
        Case("8 GPUs, 6 GB on each: room for one head", (80, 64, 128, 131072, 2, 6e9, 8), "choose_key_heads"),
        Case("8 GPUs, 5 GB on each: not even one head fits", (80, 64, 128, 131072, 2, 5e9, 8), "choose_key_heads"),
        Case("a budget that 8 heads on 2 GPUs fill to the last byte", (32, 32, 128, 65536, 2, exact, 2),
             "choose_key_heads"),
        Case("one byte less than that", (32, 32, 128, 65536, 2, exact - 1, 2), "choose_key_heads"),
        Case("one GPU, 6 GB: room for one head", (80, 64, 128, 131072, 2, 6e9, 1), "choose_key_heads"),
        Case("48 query heads, 4 GPUs", (40, 48, 128, 65536, 2, 9e9, 4), "choose_key_heads"),
        Case("28 query heads, 4 GPUs, room for 2 heads each", (28, 28, 128, 100000, 2, 3e9, 4), "choose_key_heads"),
        Case("room for all heads", (12, 12, 64, 1024, 2, 1e9, 1), "choose_key_heads"),
    ]  # fmt: skip


DEPLOYMENT = Exercise(
    id="7.6",
    title="KV heads for a budget",
    entries=("rank_cache_bytes", "choose_key_heads"),
    cases=deployment_cases,
    oracle={"rank_cache_bytes": rank_bytes_oracle, "choose_key_heads": choose_oracle},
    hints=(
        "How many KV heads does one GPU hold? key_heads / ranks where that is a whole number, and one where there are "
        "more GPUs than heads: no GPU can do with less than a whole head.",
        "-(-key_heads // ranks) rounds up, and says both in one expression.",
        "choose_key_heads can try every number from 1 to query_heads. Keep it if it divides query_heads, if it and "
        "ranks divide one another one way or the other, and if rank_cache_bytes(...) <= budget_bytes.",
        "max(candidates, default=None) is the largest, or None.",
    ),
    mistakes=(
        Mistake(
            "replication_forgotten",
            "With more GPUs than KV heads the cache was still divided by the GPUs. A head can't be split: each GPU "
            "holds one whole head, and several GPUs hold the same.",
            result=_for_arguments(6, lambda n, k, d, t, b, r: 2 * n * k * d * t * b // r),
        ),
        Mistake(
            "no_head_left",
            "With more GPUs than KV heads the division was rounded down to no head at all. Each GPU holds one.",
            result=_for_arguments(6, lambda n, k, d, t, b, r: 2 * n * (k // r) * d * t * b),
        ),
        Mistake(
            "not_divided_among_ranks",
            "That is the whole cache. Its KV heads are divided among the GPUs: one holds key_heads / ranks of them.",
            result=_for_arguments(6, lambda n, k, d, t, b, r: 2 * n * k * d * t * b),
        ),
        Mistake(
            "values_forgotten",
            "The cache is half as large as it should be: keys and values are both kept. Multiply by 2.",
            result=_for_arguments(6, lambda *args: rank_bytes_oracle(*args) // 2),
        ),
        Mistake(
            "smallest_chosen",
            "The smallest number of KV heads that fits was chosen. More heads are better quality: take the largest.",
            result=_for_arguments(7, lambda *args: _chosen(*args, pick=min)),
        ),
        Mistake(
            "uneven_split",
            "The chosen KV heads can't be shared out evenly: of ranks and key_heads, one must divide the other. Else "
            "some GPUs hold more than others, and all wait for the fullest.",
            result=_for_arguments(7, lambda *args: _chosen(*args, even=False)),
        ),
        Mistake(
            "groups_uneven",
            "The chosen number of KV heads doesn't divide the query heads (exercise 7.1).",
            result=_for_arguments(7, lambda *args: _chosen(*args, divide=False)),
        ),
        Mistake(
            "budget_of_one_for_all",
            "The whole cache was held against the budget of a single GPU. budget_bytes is what each GPU has: compare "
            "with the bytes of one rank.",
            result=_for_arguments(
                7,
                lambda n, q, d, t, b, budget, r: _chosen(
                    n, q, d, t, b, budget, r, need=lambda heads: 2 * n * heads * d * t * b
                ),
            ),  # fmt: skip
        ),
        Mistake(
            "fits_strictly",
            "A cache that fills the budget to the last byte was refused. It fits: compare with <=.",
            result=_for_arguments(7, lambda n, q, d, t, b, budget, r: _chosen(n, q, d, t, b, budget - 1, r)),
        ),
        Mistake(
            "powers_of_two_only",
            "Only powers of two were tried. Any divisor of query_heads is possible: 48 query heads can share 12.",
            result=_for_arguments(7, lambda *args: _chosen(*args, pick=_largest_power_of_two)),  # fmt: skip
        ),
    ),
)

EXERCISES = (HEAD_MAP, INTENSITY, POOL, SHARED, KERNEL, DEPLOYMENT)
