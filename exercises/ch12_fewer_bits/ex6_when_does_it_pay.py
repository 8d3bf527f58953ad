"""Exercise 12.6: a cache in 16 bits, one of codes read by a fused kernel, or one that is dequantised once."""

from __future__ import annotations

import math

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract
from exercises.topics.formulas import rounded_result


def seconds_of(
    plan, batch, context, query_tokens, query_heads, key_heads, head_dim, bits, rate, dequantise_rate, bandwidth
):
    numbers = 2 * batch * context * key_heads * head_dim
    large = 2 * numbers
    small = numbers * bits / 8 + numbers / 64 * 4
    pairs = query_tokens * context - query_tokens * (query_tokens - 1) // 2
    computing = 4 * batch * query_heads * head_dim * pairs / rate
    passes = math.ceil(query_heads // key_heads * query_tokens / 128)
    kept = max(computing, passes * large / bandwidth)
    fused = max(computing + passes * numbers / dequantise_rate, passes * small / bandwidth)
    first = max(numbers / dequantise_rate, (small + large) / bandwidth)
    return {"keep": kept, "fuse": fused, "once": first + kept}[plan]


def shortest(*sizes_and_room):
    *sizes, room = sizes_and_room
    fits = 4 * sizes[0] * sizes[1] * sizes[4] * sizes[5] <= room
    plans = ["keep", "fuse", "once"] if fits else ["fuse", "once"]
    times = [seconds_of(plan, *sizes) for plan in plans]
    return plans[times.index(min(times))]


H200 = (989e12, 4e12, 4.8e12)  # FLOPs and bytes by the datasheet; numbers dequantised per second are assumed
SLOW = (312e12, 3e11, 2e12)


def plan_cases(draw):
    odd = draw.integer(43, 60)  # more than 128 rows in a KV head: two passes, whose bytes take longest
    seconds = [
        Case(f"{plan}: {name}", (plan, *sizes), "plan_seconds")
        for name, sizes in (
            ("a decode step, 131,072 tokens", (1, 131_072, 1, 32, 8, 128, 4, *H200)),
            ("a batch of 16, 8 bits, one KV head for each query head", (16, 4096, 1, 8, 8, 64, 8, *SLOW)),
            ("a prompt of 8,192 tokens", (1, 8192, 8192, 32, 8, 128, 4, *H200)),
            (f"{odd} query tokens", (2, 500, odd, 12, 4, 64, 4, 1e15, 1e13, 1e12)),
            ("slow to dequantise", (1, 1000, 40, 16, 2, 64, 8, 1e14, 1e9, 1e12)),
        )
        for plan in ("keep", "fuse", "once")
    ]
    choices = [
        Case(name, (*sizes, room), "choose_plan")
        for name, sizes, room in (
            ("a decode step that fits", (1, 131_072, 1, 32, 8, 128, 4, *H200), 1e12),
            ("a decode step, slow to dequantise", (1, 131_072, 1, 32, 8, 128, 4, 312e12, 1e11, 2e12), 1e12),
            ("the same, and 16 bits do not fit", (1, 131_072, 1, 32, 8, 128, 4, 312e12, 1e11, 2e12), 1e6),
            ("the same, and three quarters fit", (1, 131_072, 1, 32, 8, 128, 4, 312e12, 1e11, 2e12), 4e8),
            ("a prompt that fits", (1, 8192, 8192, 32, 8, 128, 4, *H200), 1e12),
            ("a prompt that does not fit", (1, 8192, 8192, 32, 8, 128, 4, *H200), 1e6),
            ("a short prompt that does not fit", (1, 8192, 30, 32, 8, 128, 8, *H200), 1e6),
            ("64 query tokens that do not fit", (1, 8192, 64, 64, 8, 128, 4, 989e12, 4e11, 4.8e12), 1e6),
            ("it fits exactly", (1, 1024, 1, 4, 2, 64, 8, 1e12, 1e9, 1e12), 4 * 1024 * 128),
            ("both take equally long, limited by arithmetic", (1, 64, 1, 64, 1, 64, 8, 1.0, math.inf, 1e9), 1e6),
        )
    ]
    return seconds + choices


FUSED = "computing + passes * numbers / dequantise_rate"
KEPT = "max(computing, passes * large / bandwidth)"
ALL_FUSED = f"max({FUSED}, passes * small / bandwidth)"
LONGER = "Each takes the longer of two times, that of its work and that of its bytes."
PASSES = "math.ceil(query_heads // key_heads * query_tokens / 128)"
FIRST = "max(numbers / dequantise_rate, (small + large) / bandwidth)"
SECONDS = (
    *edits("Only keys or only values are counted. The cache holds both: 2 · context · key_heads · head_dim numbers.",
        values_forgotten=("2 * batch * context", "batch * context")),
    *edits("The cache is counted with the query heads. It holds key_heads heads.",
        heads_of_queries=("context * key_heads", "context * query_heads")),
    *edits("The batch is missing from the cache. Each sequence has keys and values of its own.",
        batch_forgotten=("2 * batch * context", "2 * context")),
    *edits("The scales and middles are missing: 4 bytes for every 64 numbers.",
        scales_forgotten=(" + numbers / 64 * 4", "")),
    *edits("Only the scale is counted, or only the middle. Both have 16 bits: 4 bytes for every 64 numbers.",
        one_of_two=("numbers / 64 * 4", "numbers / 64 * 2")),
    *edits("Bits are counted as bytes: divide by 8.", bits_as_bytes=("numbers * bits / 8", "numbers * bits")),
    *edits("The FLOPs are half of what they should be. A multiply-add is two, for the keys and for the values.",
        half_the_flops=("4 * batch * query_heads", "2 * batch * query_heads")),
    *edits("The FLOPs are counted with the KV heads. Every query head multiplies.",
        flops_of_key_heads=("4 * batch * query_heads", "4 * batch * key_heads")),
    *edits("Every query is counted with all tokens. It sees those up to itself. Together these are "
        "query_tokens · (query_tokens - 1) / 2 pairs fewer.",
        causal_forgotten=("query_tokens * context - query_tokens * (query_tokens - 1) // 2", "query_tokens * context")),
    *edits("The cache is counted as read once. It is read, and in `fuse` dequantised, for each block of 128 rows of "
        "queries.", passes_forgotten=(PASSES, "1")),
    *edits("In `keep` the cache is counted as read once. It is read for each block of 128 rows of queries.",
        passes_forgotten__in_keep=("passes * large", "large")),
    *edits("In `fuse` the cache is counted as read once. It is read for each block of 128 rows of queries.",
        passes_forgotten__in_fuse=("passes * small", "small"),
        passes_forgotten__in_all_of_fuse=("passes * small", "small", "passes * numbers", "numbers")),
    *edits("The number of passes grows with the batch. `numbers` holds the caches of all sequences already, and each "
        "is read once for each block of its own rows: query_heads / key_heads · query_tokens.",
        passes_of_the_batch=(PASSES, "math.ceil(batch * query_heads // key_heads * query_tokens / 128)"),
        passes_of_the_batch__of_each=(PASSES, f"batch * {PASSES}")),
    *edits("The group is missing from the rows of queries: a KV head has query_heads / key_heads · query_tokens rows.",
        group_forgotten=("query_heads // key_heads * query_tokens / 128", "query_tokens / 128")),
    *edits("All query heads are counted as rows of one KV head. It has query_heads / key_heads of them.",
        rows_of_all_heads=("query_heads // key_heads * query_tokens / 128", "query_heads * query_tokens / 128")),
    *edits("The last block of rows is left out, or counted in part, but it reads the whole cache too. Round up.",
        rounded_down=(PASSES, "max(1, query_heads // key_heads * query_tokens // 128)"),
        rounded_down__not_at_all=(PASSES, "query_heads // key_heads * query_tokens / 128")),
    *edits("In `fuse` each number is dequantised once. The kernel dequantises what it reads, again in every pass.",
        dequantised_in_one_pass=(FUSED, "computing + numbers / dequantise_rate")),
    *edits("Dequantising is missing from the work of `fuse`.", dequantising_free=(FUSED, "computing")),
    *edits("In `fuse` dequantising was counted as running beside the products. It comes after the FLOPs: add its time.",
        dequantising_beside=(FUSED, "max(computing, passes * numbers / dequantise_rate)")),
    *edits("The times of work and bytes are added. A kernel reads while it computes: take the longer one.",
        times_added=(KEPT, "computing + passes * large / bandwidth", ALL_FUSED,
        f"{FUSED} + passes * small / bandwidth")),
    *edits(f"The bytes of `keep` or of `fuse` are missing. {LONGER}",
        bytes_forgotten=(KEPT, "computing", ALL_FUSED, FUSED),
        bytes_forgotten__of_keep=(KEPT, "computing"), bytes_forgotten__of_fuse=(ALL_FUSED, FUSED)),
    *edits(f"The work of `keep` or of `fuse` is missing. {LONGER}",
        work_forgotten=("max(computing, passes * large", "(passes * large", f"max({FUSED}, passes", "(passes"),
        work_forgotten__of_keep=("max(computing, passes * large", "(passes * large"),
        work_forgotten__of_fuse=(f"max({FUSED}, passes", "(passes")),
    *edits("`once` does not count that the large cache is written.",
        writing_forgotten=("(small + large) / bandwidth", "small / bandwidth")),
    *edits("`once` does not count that the small cache is read.",
        reading_forgotten=("(small + large) / bandwidth", "large / bandwidth")),
    *edits("`once` counts its first step alone. After it the cache of 16 bits is attended to, as in `keep`.",
        attention_forgotten=("first + kept", "first")),
    *edits("The two steps of `once` come one after the other: add their times.",
        steps_beside=("first + kept", "max(first, kept)")),
    *edits("The first step of `once` counts its dequantising or its bytes alone. Take the longer of the two times.",
        first_by_bytes=(FIRST, "(small + large) / bandwidth"), first_by_work=(FIRST, "numbers / dequantise_rate")),
)  # fmt: skip
CHOICE = (
    *edits("`keep` was chosen although a cache of 16 bits does not fit into `room`.",
        room_ignored=('["keep", "fuse", "once"] if fits else ["fuse", "once"]', '["keep", "fuse", "once"]')),
    *edits("A cache that takes exactly `room` bytes fits. Compare with <=.", exactly_refused=("<= room", "< room")),
    *edits("The size of the cache in 16 bits is wrong: 2 bytes for each number of the keys and of the values.",
        size_in_numbers=("4 * sizes[0]", "2 * sizes[0]")),
    *edits("`keep` was chosen wherever it fits. Compare its time with those of the others.",
        kept_if_it_fits=('["keep", "fuse", "once"] if fits', '["keep"] if fits')),
    *edits("A quantised cache was always chosen. Compare with `keep` too, which is faster where dequantising is slow.",
        never_kept=('["keep", "fuse", "once"] if fits else ["fuse", "once"]', '["fuse", "once"]')),
    *edits("`once` is never chosen where 16 bits do not fit into `room`, or never at all. It needs no such room, "
        "and for many query tokens `fuse`, which dequantises in every pass, is slower.",
        never_once=('"fuse", "once"] if', '"fuse"] if', '["fuse", "once"]', '["fuse"]')),
    *edits("Of two plans that take equally long, choose the one that stands first in the list keep, fuse, once.",
        last_of_equals=("plans[times.index(min(times))]", "plans[len(times) - 1 - times[::-1].index(min(times))]")),
    *edits("The slowest plan was chosen.", slowest=("min(times)", "max(times)")),
    *edits("The plan was chosen by the number of query tokens alone: `fuse` for one, `once` for more. Compare times.",
        by_query_tokens=("plans[times.index(min(times))]", '"fuse" if sizes[2] == 1 else "once"')),
)  # fmt: skip

EXERCISE = Exercise(
    id="12.6",
    title="When does it pay?",
    entries=("plan_seconds", "choose_plan"),
    cases=plan_cases,
    oracle={"plan_seconds": seconds_of, "choose_plan": shortest},
    contracts=(
        Contract(
            lambda draw, *, plan, batch, group, query_tokens, bits: (
                plan, batch, 300, query_tokens, 2 * group, 2, 64, bits, 1e12, draw.choice((1e9, 1e11)), 1e11,
            ),
            choices={
                "plan": ("keep", "fuse", "once"), "batch": (1, 5), "group": (1, 8), "query_tokens": (1, 17, 128, 300),
                "bits": (4, 8),
            },
            says={"query_tokens": "1 to context", "bits": "4 or 8"},
            entry="plan_seconds",
            most=8,
        ),
    ),
    models=(
        model_of(seconds_of, SECONDS, entry="plan_seconds"),
        model_of(shortest, CHOICE, uses=(seconds_of,), entry="choose_plan"),
    ),
    slips=(rounded_result(seconds_of),),
    hints=(
        "Keys and values of all sequences are 2 · batch · context · key_heads · head_dim numbers. In 16 bits these are "
        "2 bytes each, and in codes bits / 8 bytes each, plus 4 bytes for every 64 numbers.",
        "The FLOPs are 4 · batch · query_heads · head_dim for each pair of a query and a token that it sees: "
        "query_tokens * context - query_tokens * (query_tokens - 1) // 2 pairs.",
        "passes = math.ceil(query_heads // key_heads * query_tokens / 128). Bytes read and numbers dequantised in the "
        "kernel are `passes` times those of the cache.",
        "once: max(numbers / dequantise_rate, (small + large) / bandwidth), plus the time of keep.",
    ),
)  # fmt: skip
