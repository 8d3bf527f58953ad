"""Wrong answers to exercise 11.6, and unusual right ones."""

from tests.submissions.edits import changed

PAIRS = "pairs = query_tokens * context - query_tokens * (query_tokens - 1) // 2"
ABSORBED = "2 * query_tokens * head_dim * latent_dim + pairs"
EXPANDED = "2 * context * head_dim * latent_dim + pairs"
TIME = "max(flops / rate, moved / bandwidth)"
KEPT = "elements += 2 * 2 * context * heads * head_dim"

READ = "elements = context * (latent_dim + rope_dim) + 2"
FULL_TRIANGLE = "query_tokens * (query_tokens - 1) // 2"
FLOPS = "flops = 2 * heads * (2 * query_tokens * head_dim * latent_dim + pairs * (2 * latent_dim + rope_dim))"

WRONG = {
    "half_a_triangle": changed("11.6", (FULL_TRIANGLE, "query_tokens**2 / 2")),
    "half_a_triangle__rounded_down": changed("11.6", (FULL_TRIANGLE, "query_tokens * query_tokens // 2")),
    "half_a_triangle__square_and_triangle": changed(
        "11.6", (PAIRS, "pairs = query_tokens * (context - query_tokens) + query_tokens**2 // 2")
    ),
    "half_a_triangle__and_weights_forgotten": changed(
        "11.6", (FULL_TRIANGLE, "query_tokens**2 / 2"), (" + 2 * heads * head_dim * latent_dim", "")
    ),
    "hidden_pairs_added": changed("11.6", ("query_tokens * context - query", "query_tokens * context + query")),
    "causal_forgotten__absorbed": changed(
        "11.6", (FLOPS, FLOPS.replace("pairs", "query_tokens * context"))
    ),
    "sum_forgotten": changed(
        "11.6", ("(2 * latent_dim + rope_dim)", "(latent_dim + rope_dim)"), ("(2 * head_dim + rope", "(head_dim + rope")
    ),
    "sum_forgotten__expanded": changed("11.6", ("(2 * head_dim + rope_dim)", "(head_dim + rope_dim)")),
    "pairs_of_heads": changed("11.6", ("(2 * latent_dim + rope_dim)", "(2 * head_dim + rope_dim)")),
    "cache_not_read": changed("11.6", (READ, "elements = 2")),
    "cache_not_read__but_the_rotary_key": changed("11.6", (READ, "elements = context * rope_dim + 2")),
    "cache_not_read__expanded": changed("11.6", (KEPT, f"{KEPT} - context * (latent_dim + rope_dim)")),
    "cache_not_read__expanded_but_the_rotary_key": changed("11.6", (KEPT, f"{KEPT} - context * latent_dim")),
    "rope_not_cached__expanded": changed("11.6", (KEPT, f"{KEPT} - context * rope_dim")),
    "latent_read_twice__absorbed": changed("11.6", (FLOPS, f"{FLOPS}\n        elements += context * latent_dim")),
    "weights_forgotten__expanded": changed("11.6", (KEPT, f"{KEPT} - 2 * heads * head_dim * latent_dim")),
    "keys_written_in_both": changed(
        "11.6", (f"        {KEPT}\n", ""), (READ, f"{READ[:-1]}4 * context * heads * head_dim + 2")
    ),
    "causal_forgotten": changed("11.6", (PAIRS, "pairs = query_tokens * context")),
    "earlier_tokens_forgotten": changed("11.6", (PAIRS, "pairs = query_tokens * (query_tokens + 1) // 2")),
    "as_the_first_query": changed("11.6", (PAIRS, "pairs = query_tokens * (context - query_tokens + 1)")),
    "wrong_order": changed("11.6", ("2 * query_tokens * head_dim", "2 * context * head_dim")),
    "expanded_for_queries_alone": changed("11.6", (EXPANDED, "2 * query_tokens * head_dim * latent_dim + pairs")),
    "absorbing_forgotten": changed("11.6", (ABSORBED, "pairs")),
    "expanding_forgotten": changed("11.6", (EXPANDED, "pairs")),
    "one_matrix": changed("11.6", (ABSORBED, "query_tokens * head_dim * latent_dim + pairs")),
    "multiply_adds": changed("11.6", ("flops = 2 * heads", "flops = heads")),
    "rope_forgotten": changed(
        "11.6", ("2 * latent_dim + rope_dim)", "2 * latent_dim)"), ("2 * head_dim + rope_dim)", "2 * head_dim)")
    ),
    "rope_in_the_values": changed("11.6", ("(2 * head_dim + rope_dim)", "(2 * head_dim + 2 * rope_dim)")),
    "weights_forgotten": changed("11.6", (" + 2 * heads * head_dim * latent_dim", "")),
    "keys_written_alone": changed("11.6", (KEPT, KEPT.replace("2 * 2", "2"))),
    "latent_read_twice": changed(
        "11.6", ("context * (latent_dim + rope_dim)", "2 * context * (latent_dim + rope_dim)")
    ),
    "bytes_forgotten": changed("11.6", ("elements * item_bytes", "elements")),
    "flops_alone": changed("11.6", (TIME, "flops / rate")),
    "bytes_alone": changed("11.6", (TIME, "moved / bandwidth")),
    "times_added": changed("11.6", (TIME, "flops / rate + moved / bandwidth")),
    "shorter_time": changed("11.6", (TIME, TIME.replace("max", "min"))),
    "by_query_tokens__from_the_sizes": changed(
        "11.6",
        (
            'seconds["absorbed"] <= seconds["expanded"]',
            "query_tokens * (latent_dim - head_dim) <= latent_dim * head_dim",
        ),
    ),
    "one_token_absorbed": changed("11.6", ('if seconds["absorbed"]', 'if query_tokens == 1 or seconds["absorbed"]')),
    "rates_exchanged": changed("11.6", (TIME, "max(flops / bandwidth, moved / rate)")),
    "by_query_tokens": changed("11.6", ('seconds["absorbed"] <= seconds["expanded"]', "query_tokens == 1")),
    "causal_forgotten__and_weights_forgotten": changed(
        "11.6", (PAIRS, "pairs = query_tokens * context"), (" + 2 * heads * head_dim * latent_dim", "")
    ),
}

UNUSUAL = {
    "pairs added one by one": changed("11.6", (PAIRS, "pairs = sum(range(context - query_tokens + 1, context + 1))")),
    "floats": changed(
        "11.6", ("return flops, elements * item_bytes", "return float(flops), float(elements * item_bytes)")
    ),
    "by the key of the smaller time": changed(
        "11.6",
        (
            'return "absorbed" if seconds["absorbed"] <= seconds["expanded"] else "expanded"',
            "return min(seconds, key=seconds.get)",
        ),
    ),
}
