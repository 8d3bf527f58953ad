"""Wrong answers to exercise 12.6, and unusual right ones."""

from tests.submissions.edits import changed, rounded

PASSES = "math.ceil(query_heads // key_heads * query_tokens / 128)"
FUSED = "computing + passes * numbers / dequantise_rate"
PLANS = '("keep", "fuse", "once") if fits else ("fuse", "once")'
CHOSEN = "min(plans, key=lambda plan: plan_seconds(plan, *sizes))"

WRONG = {
    "values_forgotten": changed("12.6", ("numbers = 2 * batch", "numbers = batch")),
    "heads_of_queries": changed(
        "12.6", ("numbers = 2 * batch * context * key_heads", "numbers = 2 * batch * context * query_heads")
    ),
    "scales_forgotten": changed("12.6", (" + numbers / 64 * 4", "")),
    "bits_as_bytes": changed("12.6", ("numbers * bits / 8", "numbers * bits")),
    "half_the_flops": changed("12.6", ("computing = 4", "computing = 2")),
    "causal_forgotten": changed("12.6", (" - query_tokens * (query_tokens - 1) // 2", "")),
    "passes_forgotten": changed("12.6", (PASSES, "1")),
    "passes_forgotten__in_keep": changed("12.6", ("passes * large", "large")),
    "passes_forgotten__in_fuse": changed("12.6", ("passes * small", "small")),
    "passes_of_the_batch": changed("12.6", (PASSES, PASSES.replace("query_heads", "batch * query_heads"))),
    "passes_of_the_batch__of_each": changed("12.6", (PASSES, f"batch * {PASSES}")),
    "bytes_forgotten": changed("12.6", (f"max({FUSED}, passes * small / bandwidth)", FUSED)),
    "work_forgotten": changed("12.6", ("max(computing, passes * large / bandwidth)", "passes * large / bandwidth")),
    "group_forgotten": changed("12.6", (PASSES, "math.ceil(query_tokens / 128)")),
    "rounded_down": changed("12.6", (PASSES, "max(1, query_heads // key_heads * query_tokens // 128)")),
    # PocketLLM#83: what is inside the prefill loop is done in every pass.
    "dequantised_in_one_pass": changed("12.6", (FUSED, "computing + numbers / dequantise_rate")),
    "dequantising_free": changed("12.6", (FUSED, "computing")),
    "dequantising_beside": changed("12.6", (FUSED, "max(computing, passes * numbers / dequantise_rate)")),
    "writing_forgotten": changed("12.6", ("(small + large) / bandwidth", "small / bandwidth")),
    "attention_forgotten": changed("12.6", ("(small + large) / bandwidth) + kept", "(small + large) / bandwidth)")),
    "room_ignored": changed("12.6", (PLANS, '("keep", "fuse", "once")')),
    "size_in_numbers": changed("12.6", ("fits = 4 * batch", "fits = 2 * batch")),
    "kept_if_it_fits": changed("12.6", (PLANS, '("keep",) if fits else ("fuse", "once")')),
    # vllm#49077: quantised is not always faster.
    "never_kept": changed("12.6", (PLANS, '("fuse", "once")')),
    # Where 16 bits fit, `keep` is always faster than `once`.
    "never_once": changed("12.6", (PLANS, '("keep", "fuse", "once") if fits else ("fuse",)')),
    "by_query_tokens": changed("12.6", (CHOSEN, '"fuse" if query_tokens == 1 else "once"')),
    "exactly_refused": changed("12.6", ("<= room", "< room")),
}

UNUSUAL = {
    "the passes by whole numbers": changed("12.6", (PASSES, "-(-(query_heads * query_tokens) // (128 * key_heads))")),
    "pairs added one by one": changed(
        "12.6",
        (
            "query_tokens * context - query_tokens * (query_tokens - 1) // 2",
            "sum(range(context - query_tokens + 1, context + 1))",
        ),
    ),
    "sorted": changed("12.6", (CHOSEN, "sorted(plans, key=lambda plan: plan_seconds(plan, *sizes))[0]")),
}


WRONG["result_rounded"] = rounded("12.6", "plan_seconds", 5)
