"""Exercise 7.2: what decode with shared KV heads costs in bytes, and its FLOPs for each of them."""

from __future__ import annotations

import math

from course_lib.checker import Case, Exercise
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.formulas import factors_missing, product, rounded_result


def cache_bytes_oracle(layers, query_heads, group, head_dim, tokens, item_bytes):
    return 2 * layers * (query_heads // group) * head_dim * tokens * item_bytes


def intensity_oracle(query_heads, key_heads, length, head_dim, item_bytes):
    elements = 2 * length * key_heads * head_dim + 2 * query_heads * head_dim
    return 4 * query_heads * length * head_dim / (item_bytes * elements)


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


def cached(s: Slips, layers, query_heads, group, head_dim, tokens, item_bytes):
    """Bytes of a cache as they are counted with these slips."""
    heads = query_heads // group
    if s("group_ignored"):
        heads = query_heads
    if s("group_taken_for_key_heads"):
        heads = group
    size = heads * product(s, layers=layers, head_dim=head_dim, tokens=tokens, item_bytes=item_bytes)
    return size if s("values_forgotten") else 2 * size


CACHED = (
    Slip(
        "values_forgotten", "The cache is half as large as it should be: keys and values are both kept. Multiply by 2."
    ),
    Slip("group_ignored", "The cache holds a key for every query head. Only query_heads // group KV heads are kept."),
    Slip(
        "group_taken_for_key_heads",
        "The group's size was taken for the number of KV heads. A layer has query_heads // group of them.",
    ),
    *factors_missing("layers", "head_dim", "tokens", "item_bytes"),
)


def intensity(s: Slips, query_heads, key_heads, length, head_dim, item_bytes):
    """FLOP/byte as they are counted with these slips."""
    flops = 2 if s("one_product_only") else 4
    flops *= length * head_dim * (key_heads if s("flops_of_key_heads") else query_heads)
    rows = (1 if s("values_not_read") else 2) * length * (query_heads if s("bytes_of_query_heads") else key_heads)
    few = 2 - (1 if s("output_forgotten") else 0)
    few = 0 if s("queries_forgotten") else few
    wide = next((count for name, count in FLOAT32.items() if s(name)), 0)  # of the queries and the output, in float32
    of_query = query_heads * ((few - wide) * item_bytes + 4 * wide)
    moved = head_dim * (rows * item_bytes + of_query)
    if s("scores_counted", "scores_counted__twice"):
        moved += (4 if s("scores_counted__twice") else 2) * query_heads * length * item_bytes
    if s("scores_counted__once"):
        moved += query_heads * length * item_bytes
    if s("per_element"):
        moved /= item_bytes
    if s("intensity_rounded_down"):
        return flops // moved
    return moved / flops if s("upside_down") else flops / moved


FLOAT32 = {"queries_in_float32": 1, "queries_in_float32__and_output": 2}
INTENSITY = (
    Slip(
        "one_product_only",
        "Only one of the two products is counted, or a multiply-add as one FLOP. Scores and weighted values are "
        "head_dim multiply-adds each for a key and a query head: 4 · head_dim FLOPs.",
    ),
    Slip(
        "flops_of_key_heads",
        "The FLOPs are counted for the KV heads. Every query head computes scores of its own; only the bytes are "
        "shared.",
    ),
    Slip(
        "bytes_of_query_heads",
        "Keys and values are counted once for every query head. A group shares them, and they are read once: "
        "key_heads of them.",
    ),
    Slip("values_not_read", "The bytes hold the keys and not the values. Both are read."),
    Slip(
        "queries_forgotten",
        "The queries and the output are missing from the bytes. Beside a long cache they are few, but for a "
        "single token they are most of the bytes.",
    ),
    Slip("output_forgotten", "The output is missing from the bytes: as many as the queries."),
    *(
        Slip(name, "The queries or the output are counted with 4 bytes an element. All have item_bytes here.")
        for name in FLOAT32
    ),
    *(
        Slip(
            f"scores_counted{times}",
            "The scores or their weights are counted among the bytes. They stay on the chip: only queries, keys, "
            "values and the output cross to memory.",
        )
        for times in ("", "__once", "__twice")
    ),
    Slip(
        "per_element",
        "decode_intensity counts FLOPs for each element. They are asked for each byte: an element has item_bytes of "
        "them.",
    ),
    Slip(
        "intensity_rounded_down",
        "decode_intensity was rounded down to a whole number. FLOP/byte is a quotient: divide with /.",
    ),
    Slip("upside_down", "That is bytes for each FLOP. Intensity is FLOPs divided by bytes."),
)


def balanced(s: Slips, rate, bandwidth, item_bytes):
    """The group as it is computed with these slips."""
    group = rate / bandwidth * (1 if s("item_bytes_ignored", "half_of_it") else item_bytes / 2)
    if s("half_of_it"):
        group /= 2
    if s("item_bytes_turned_round"):
        group = rate / bandwidth * 2 / item_bytes
    if s("twice_as_large"):
        group *= 2
    if s("group_rounded_down", "group_rounded_down__at_least_one"):
        return max(int(group), 1 if s("group_rounded_down__at_least_one") else 0)
    if s("rounded_to_nearest"):
        return round(group)
    if s("not_rounded"):
        return group
    if s("power_of_two_above"):
        return 1 << (math.ceil(group) - 1).bit_length()
    if s("power_of_two_above__by_its_logarithm"):
        return 2 ** math.ceil(math.log2(group))
    for rows in (8, 16):
        if s(f"rounded_up_to_tiles__{rows}"):
            return rows * math.ceil(group / rows)
    return math.floor(group) + 1 if s("one_more_than_rounded_down") else math.ceil(group)


BALANCED = (
    Slip(
        "item_bytes_ignored",
        "The size of an element is missing from balanced_group. A group of G does 2 · G / item_bytes FLOPs for "
        "each byte: G only in 16 bits.",
    ),
    Slip(
        "half_of_it",
        "item_bytes is missing from balanced_group: rate / bandwidth is halved and not multiplied by the size of an "
        "element.",
    ),
    Slip(
        "twice_as_large",
        "That is twice the group. A query head does 4 FLOPs for each element of a key and its value, 2 · item_bytes "
        "bytes: a group of G does 2 · G / item_bytes FLOPs for each byte.",
    ),
    *(
        Slip(
            name, "The group was rounded down. The last group below the balance point still waits for memory: round up."
        )
        for name in ("group_rounded_down", "group_rounded_down__at_least_one")
    ),
    Slip(
        "one_more_than_rounded_down",
        "The group is rounded down and 1 added. Where the balance is a whole number that is one too many: a group "
        "of exactly this size is enough. Round up with math.ceil.",
    ),
    Slip(
        "rounded_to_nearest",
        "The group is rounded to the nearest whole number. Below the balance point a group still waits for memory: "
        "round up.",
    ),
    Slip(
        "item_bytes_turned_round",
        "rate / bandwidth is multiplied by 2 / item_bytes. A group of G does 2 · G / item_bytes FLOPs for each byte, "
        "and that is to be rate / bandwidth: G is rate / bandwidth times item_bytes / 2.",
    ),
    *(
        Slip(
            f"power_of_two_above{how}",
            "The group was rounded up to a power of two. The smallest group is asked for, whatever number that is.",
        )
        for how in ("", "__by_its_logarithm")
    ),
    *(
        Slip(
            f"rounded_up_to_tiles__{rows}",
            "The group was rounded up to whole tiles of rows. The smallest group is asked for, whatever number that "
            "is.",
        )
        for rows in (8, 16)
    ),
    Slip("not_rounded", "A group has a whole number of heads: round up."),
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
        Model(cached, CACHED),
        Model(intensity, INTENSITY, entry="decode_intensity"),
        Model(balanced, BALANCED, entry="balanced_group"),
    ),
    oracle={
        "cache_bytes": cache_bytes_oracle,
        "decode_intensity": intensity_oracle,
        "balanced_group": balanced_group_oracle,
    },
    slips=(rounded_result(intensity_oracle),),
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
