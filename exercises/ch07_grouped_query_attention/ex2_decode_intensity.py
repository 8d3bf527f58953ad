"""Exercise 7.2: what decode with shared KV heads costs in bytes, and its FLOPs for each of them."""

from __future__ import annotations

import math

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract
from exercises.topics.formulas import factors_missing, rounded_result


def cached(layers, query_heads, group, head_dim, tokens, item_bytes):
    return 2 * layers * (query_heads // group) * head_dim * tokens * item_bytes


def intensity(query_heads, key_heads, length, head_dim, item_bytes):
    elements = 2 * length * key_heads * head_dim + 2 * query_heads * head_dim
    flops = 4 * query_heads * length * head_dim
    return flops / (item_bytes * elements)


def balanced(rate, bandwidth, item_bytes):
    group = rate / bandwidth * item_bytes / 2
    return math.ceil(group)


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


CACHED = (
    *edits(
        "The cache is half as large as it should be: keys and values are both kept. Multiply by 2.",
        values_forgotten=("2 * layers", "layers"),
    ),
    *edits(
        "The cache holds a key for every query head. Only query_heads // group KV heads are kept.",
        group_ignored=("query_heads // group", "query_heads"),
    ),
    *edits(
        "The group's size was taken for the number of KV heads. A layer has query_heads // group of them.",
        group_taken_for_key_heads=("query_heads // group", "group"),
    ),
    *factors_missing("layers", "head_dim", "tokens", "item_bytes"),
)

INTENSITY = (
    *edits(
        "Only one of the two products is counted, or a multiply-add as one FLOP. Scores and weighted values are "
        "head_dim multiply-adds each for a key and a query head: 4 · head_dim FLOPs.",
        one_product_only=("4 * query_heads", "2 * query_heads"),
    ),
    *edits(
        "The FLOPs are counted for the KV heads. Every query head computes scores of its own; only the bytes are "
        "shared.",
        flops_of_key_heads=("4 * query_heads", "4 * key_heads"),
    ),
    *edits(
        "Keys and values are counted once for every query head. A group shares them, and they are read once: "
        "key_heads of them.",
        bytes_of_query_heads=("length * key_heads", "length * query_heads"),
    ),
    *edits("The bytes hold the keys and not the values. Both are read.", values_not_read=("2 * length", "length")),
    *edits(
        "The queries and the output are missing from the bytes. Beside a long cache they are few, but for a "
        "single token they are most of the bytes.",
        queries_forgotten=("+ 2 * query_heads * head_dim", ""),
    ),
    *edits(
        "The output is missing from the bytes: as many as the queries.",
        output_forgotten=("+ 2 * query_heads", "+ query_heads"),
    ),
    *edits(
        "The queries or the output are counted with 4 bytes an element. All have item_bytes here.",
        queries_in_float32=("+ 2 * query_heads", "+ (1 + 4 / item_bytes) * query_heads"),
        queries_in_float32__and_output=("+ 2 * query_heads", "+ 8 / item_bytes * query_heads"),
    ),
    *edits(
        "The scores or their weights are counted among the bytes. They stay on the chip: only queries, keys, "
        "values and the output cross to memory.",
        scores_counted=("elements = ", "elements = 2 * query_heads * length + "),
        scores_counted__once=("elements = ", "elements = query_heads * length + "),
        scores_counted__twice=("elements = ", "elements = 4 * query_heads * length + "),
    ),
    *edits(
        "decode_intensity counts FLOPs for each element. They are asked for each byte: an element has item_bytes of "
        "them.",
        per_element=("(item_bytes * elements)", "elements"),
    ),
    *edits(
        "decode_intensity was rounded down to a whole number. FLOP/byte is a quotient: divide with /.",
        intensity_rounded_down=("flops /", "flops //"),
    ),
    *edits(
        "That is bytes for each FLOP. Intensity is FLOPs divided by bytes.",
        upside_down=("flops / (item_bytes * elements)", "item_bytes * elements / flops"),
    ),
)

BALANCED = (
    *edits(
        "The size of an element is missing from balanced_group. A group of G does 2 · G / item_bytes FLOPs for "
        "each byte: G only in 16 bits.",
        item_bytes_ignored=("* item_bytes / 2", ""),
    ),
    *edits(
        "item_bytes is missing from balanced_group: rate / bandwidth is halved and not multiplied by the size of an "
        "element.",
        half_of_it=("* item_bytes", ""),
    ),
    *edits(
        "That is twice the group. A query head does 4 FLOPs for each element of a key and its value, 2 · item_bytes "
        "bytes: a group of G does 2 · G / item_bytes FLOPs for each byte.",
        twice_as_large=("/ 2", ""),
    ),
    *edits(
        "The group was rounded down. The last group below the balance point still waits for memory: round up.",
        group_rounded_down=("math.ceil(group)", "int(group)"),
        group_rounded_down__at_least_one=("math.ceil(group)", "max(1, int(group))"),
    ),
    *edits(
        "The group is rounded down and 1 added. Where the balance is a whole number that is one too many: a group "
        "of exactly this size is enough. Round up with math.ceil.",
        one_more_than_rounded_down=("math.ceil(group)", "math.floor(group) + 1"),
    ),
    *edits(
        "The group is rounded to the nearest whole number. Below the balance point a group still waits for memory: "
        "round up.",
        rounded_to_nearest=("math.ceil(group)", "round(group)"),
    ),
    *edits(
        "rate / bandwidth is multiplied by 2 / item_bytes. A group of G does 2 · G / item_bytes FLOPs for each byte, "
        "and that is to be rate / bandwidth: G is rate / bandwidth times item_bytes / 2.",
        item_bytes_turned_round=("item_bytes / 2", "2 / item_bytes"),
    ),
    *edits(
        "The group was rounded up to a power of two. The smallest group is asked for, whatever number that is.",
        power_of_two_above=("math.ceil(group)", "1 << (math.ceil(group) - 1).bit_length()"),
        power_of_two_above__by_its_logarithm=("math.ceil(group)", "2 ** math.ceil(math.log2(group))"),
    ),
    *edits(
        "The group was rounded up to whole tiles of rows. The smallest group is asked for, whatever number that is.",
        rounded_up_to_tiles__8=("math.ceil(group)", "8 * math.ceil(group / 8)"),
        rounded_up_to_tiles__16=("math.ceil(group)", "16 * math.ceil(group / 16)"),
    ),
    *edits("A group has a whole number of heads: round up.", not_rounded=("math.ceil(group)", "group")),
)

INTENSITIES = Contract(
    lambda draw, *, key_heads, group, length, item_bytes: (key_heads * group, key_heads, length, 64, item_bytes),
    choices={"key_heads": (1, 3, 8), "group": (1, 2, 8), "length": (1, 2, 50, 4096), "item_bytes": (1, 2, 4)},
    says={"length": "one query token of a sequence against `length` keys and values"},
    entry="decode_intensity",
    most=6,
)
GROUPS = Contract(
    lambda draw, *, balance, item_bytes: (balance * 2.0**40, 2.0**40, item_bytes),
    choices={"balance": (1, 2, 3, 5, 64, 295), "item_bytes": (1, 2, 4)},
    says={"item_bytes": "item_bytes the size of a cached element"},
    entry="balanced_group",
    most=8,
)


EXERCISE = Exercise(
    id="7.2",
    title="What decode costs",
    entries=("cache_bytes", "decode_intensity", "balanced_group"),
    cases=intensity_cases,
    contracts=(INTENSITIES, GROUPS),
    models=(
        model_of(cached, CACHED),
        model_of(intensity, INTENSITY, entry="decode_intensity"),
        model_of(balanced, BALANCED, entry="balanced_group"),
    ),
    oracle={
        "cache_bytes": cached,
        "decode_intensity": intensity,
        "balanced_group": balanced_group_oracle,
    },
    slips=(rounded_result(intensity),),
    hints=(
        "cache_bytes is chapter 05's formula; the only new thing is that a layer has query_heads // group KV heads.",
        "FLOPs first: a query head is compared with `length` keys. Its score with one key is head_dim multiply-adds, "
        "and so is adding one weighted value: 4 · head_dim FLOPs for each key and query head.",
        "Bytes: K and V are length · key_heads · head_dim elements each, read once. The queries and the output are "
        "query_heads · head_dim elements each.",
        "For a long context decode_intensity tends to 2 · group / item_bytes. balanced_group is the smallest whole "
        "group for which that is at least rate / bandwidth: math.ceil(rate / bandwidth * item_bytes / 2).",
    ),
)
