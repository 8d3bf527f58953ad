"""Exercise 7.2: what decode with shared KV heads costs in bytes, and its FLOPs for each of them."""

from __future__ import annotations

import math

from course_lib.checker import Case, Exercise, Slip
from exercises.topics.formulas import for_arguments


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


EXERCISE = Exercise(
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
        "FLOPs first: a query head is compared with `length` keys. Its score with one key is head_dim multiply-adds, "
        "and so is adding one weighted value: 4 · head_dim FLOPs for each key and query head.",
        "Bytes: K and V are length · key_heads · head_dim elements each, read once. The queries and the output are "
        "query_heads · head_dim elements each.",
        "For a long context decode_intensity tends to 2 · group / item_bytes. balanced_group is the smallest whole "
        "group for which that is at least rate / bandwidth: math.ceil(rate / bandwidth * item_bytes / 2).",
    ),
    slips=(
        Slip(
            "values_forgotten",
            "The cache is half as large as it should be: keys and values are both kept. Multiply by 2.",
            formula=for_arguments(6, lambda *args: cache_bytes_oracle(*args) // 2),
        ),
        Slip(
            "group_ignored",
            "The cache holds a key for every query head. Only query_heads // group KV heads are kept.",
            formula=for_arguments(6, lambda n, q, g, d, t, b: cache_bytes_oracle(n, q, 1, d, t, b)),
        ),
        Slip(
            "group_taken_for_key_heads",
            "The group's size was taken for the number of KV heads. A layer has query_heads // group of them.",
            formula=for_arguments(6, lambda n, q, g, d, t, b: cache_bytes_oracle(n, g, 1, d, t, b)),
        ),
        Slip(
            "one_product_only",
            "Only one of the two products is counted, or a multiply-add as one FLOP. Scores and weighted values are "
            "head_dim multiply-adds each for a key and a query head: 4 · head_dim FLOPs.",
            formula=for_arguments(5, lambda *args: _intensity(*args, flops=2)),
        ),
        Slip(
            "flops_of_key_heads",
            "The FLOPs are counted for the KV heads. Every query head computes scores of its own; only the bytes are "
            "shared.",
            formula=for_arguments(5, lambda q, k, *rest: _intensity(q, k, *rest) * k / q),
        ),
        Slip(
            "bytes_of_query_heads",
            "Keys and values are counted once for every query head. A group shares them, and they are read once: "
            "key_heads of them.",
            formula=for_arguments(5, lambda q, k, *rest: _intensity(q, q, *rest)),
        ),
        Slip(
            "queries_forgotten",
            "The queries and the output are missing from the bytes. Beside a long cache they are few, but for a "
            "single token they are most of the bytes.",
            formula=for_arguments(5, lambda *args: _intensity(*args, queries=0)),
        ),
        Slip(
            "output_forgotten",
            "The output is missing from the bytes: as many as the queries.",
            formula=for_arguments(5, lambda *args: _intensity(*args, queries=1)),
        ),
        Slip(
            "values_not_read",
            "The bytes hold the keys and not the values. Both are read.",
            formula=for_arguments(5, lambda *args: _intensity(*args, keys=1)),
        ),
        Slip(
            "queries_in_float32",
            "The queries or the output are counted with 4 bytes an element. All have item_bytes here.",
            formula=(
                for_arguments(5, lambda *args: _intensity(*args, queries=1 + 4 / args[4])),
                for_arguments(5, lambda *args: _intensity(*args, queries=8 / args[4])),
            ),
        ),
        Slip(
            "upside_down",
            "That is bytes for each FLOP. Intensity is FLOPs divided by bytes.",
            formula=for_arguments(5, lambda *args: 1 / _intensity(*args)),
        ),
        Slip(
            "item_bytes_ignored",
            "The size of an element is missing from balanced_group. A group of G does 2 · G / item_bytes FLOPs for "
            "each byte: G only in 16 bits.",
            formula=for_arguments(3, lambda rate, bandwidth, item_bytes: math.ceil(rate / bandwidth)),
        ),
        Slip(
            "group_rounded_down",
            "The group was rounded down. The last group below the balance point still waits for memory: round up.",
            formula=tuple(
                for_arguments(3, lambda rate, bandwidth, b, least=least: max(least, int(rate / bandwidth * b / 2)))
                for least in (0, 1)
            ),
        ),
        Slip(
            "one_more_than_rounded_down",
            "The group is rounded down and 1 added. Where the balance is a whole number that is one too many: a group "
            "of exactly this size is enough. Round up with math.ceil.",
            formula=for_arguments(3, lambda rate, bandwidth, b: math.floor(rate / bandwidth * b / 2) + 1),
        ),
    ),
)
