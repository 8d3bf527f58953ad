"""What goes wrong in exercise 17.7, where the FLOPs of attention are counted, and compared by their time."""

from course_lib.checker.specification.edits import edits

DENSE, INDEX = "attended * pairs_of(length, length)", "scored * pairs_of(length, length)"
K, W, D_RATE, I_RATE, C_RATE = 'shape["k"]', 'shape["window"]', 'rates["dense"]', 'rates["index"]', 'rates["chosen"]'
CHOSEN, WINDOW = f"attended * pairs_of(length, {K})", f"attended * pairs_of(length, {W})"
INDEX_TIME, CHOSEN_TIME = 'Fraction(index) / Fraction(rates["index"])', 'Fraction(chosen) / Fraction(rates["chosen"])'
ATTENDED, SCORED = '4 * shape["query_heads"] * shape["head_dim"]', '2 * shape["index_heads"] * shape["index_dim"]'
RAMP, TIMES = "full * (full + 1) // 2 + (length - full) * full", f"dense_time - {INDEX_TIME} - {CHOSEN_TIME}"
TRIANGLE = "The first queries were counted with a full window, or with k keys, but query t sees only t + 1 keys."
SHARED = (
    *edits("Every query was counted with all keys, even those after it. Query t sees t + 1 keys, length · (length + 1) "
        "/ 2 for all.", not_causal=(DENSE, "attended * length * length", INDEX, "scored * length * length"),
        not_causal__dense=(DENSE, "attended * length * length"), not_causal__index=(INDEX, "scored * length * length")),
    *edits(TRIANGLE, triangle_forgotten=(WINDOW, 'attended * length * min(length, shape["window"])', CHOSEN,
        'attended * length * min(length, shape["k"])'), triangle_forgotten__all=(RAMP, "length * full"),
        triangle_forgotten__chosen=(CHOSEN, 'attended * length * min(length, shape["k"])')),
    *edits("Query t sees t + 1 keys, not t keys.", own_key_missing=("full * (full + 1) // 2", "full * (full - 1) // 2"),
        own_key_missing__index=(INDEX, "scored * pairs_of(length - 1, length)")),
    *edits("Pairs were counted as length² / 2. Query t sees t + 1 keys, or length · (length + 1) / 2 together.",
        half_the_diagonal=(DENSE, "attended * length * length // 2"),
        half_the_diagonal__floats=(DENSE, "int(attended * length * length / 2)")),
    *edits("Attention's FLOPs are half of what they should be. In each head a pair costs 2 · head_dim for the score "
        "and 2 · head_dim for the value.", half_the_flops=(ATTENDED, ATTENDED.replace("4", "2"))),
    *edits("The indexer's FLOPs are twice what they should be. It computes scores but no values: 2 · index_dim for "
        "each head.", indexer_with_values=(SCORED, SCORED.replace("2", "4"))),
    *edits("The indexer's FLOPs are half as many: a multiply-add counts as two.", indexer_halved=(SCORED, SCORED[4:])),
    *edits("The indexer is missing, or was counted as running beside attention. It scores every key that a query sees, "
        "in short prompts too.", indexer_free__beside=(TIMES, f"dense_time - max({INDEX_TIME}, {CHOSEN_TIME})"),
        indexer_free__up_to_k=(INDEX, f'(length > shape["k"]) * {INDEX}'),
        indexer_free=("index + chosen}", "chosen}", TIMES, TIMES.replace(f" - {INDEX_TIME}", ""))),
    *edits("Attention to the chosen keys is missing: only the indexer was counted.",
        attention_missing=("index + chosen}", "index}", TIMES, TIMES.replace(f" - {CHOSEN_TIME}", ""))),
    *edits("The indexer was counted only for the chosen keys. To choose them it scores all keys that the query sees.",
        indexer_of_the_chosen=(INDEX, 'scored * pairs_of(length, shape["k"])')),
    *edits("The indexer was counted with attention's heads or dimension. It has index_heads heads of index_dim.",
        indexer_of_attention=(SCORED, '2 * shape["query_heads"] * shape["head_dim"]'),
        indexer_of_attention__heads=(SCORED, '2 * shape["query_heads"] * shape["index_dim"]'),
        indexer_of_attention__dimension=(SCORED, '2 * shape["index_heads"] * shape["head_dim"]')),
    *edits("Only the last query was counted. Add up the keys that each query sees.", last_query_alone=(RAMP, "full")),
)  # fmt: skip
OF_FLOPS = (
    *edits(TRIANGLE, triangle_forgotten__window=(WINDOW, 'attended * length * min(length, shape["window"])')),
    *edits("In a prompt shorter than the window, or than k, no query sees so many keys: use min(length, most).",
        shorter_than_the_window=("min(length, most)", "most")),
    *edits("The window has one key too many. `window` counts all keys, the query's own included.",
        window_without_itself=('shape["window"])', 'shape["window"] + 1)')),
    *edits("The window has one key too few. `window` counts all keys, the query's own included.",
        window_too_short=('shape["window"])', 'shape["window"] - 1)')),
    *edits("`window` stands where `k` should, or `k` where `window` should.",
        window_for_k=(K, W, W, K), window_for_k__in_chosen=(K, W), window_for_k__in_window=(W, K)),
)  # fmt: skip
OF_CROSSOVER = (
    *edits(TRIANGLE, triangle_forgotten__crossover=("_, index, chosen = parts_of", "_, index, chosen = rough_parts")),
    *edits("", asked_before=("gained(high, shape, rates) < 0",
        f'Fraction({SCORED}) / Fraction(rates["index"]) >= Fraction({ATTENDED}) / Fraction(rates["dense"])')),
    *edits("FLOPs were compared, or all parts got one rate. Each part has a rate of its own, so compare times.",
        one_rate=(I_RATE, "1", C_RATE, "1", D_RATE, "1")),
    *edits("The indexer's time was computed at the rate of attention: it is index FLOPs / rates[\"index\"].",
        index_at_another_rate=(I_RATE, D_RATE), index_at_another_rate__chosen=(I_RATE, C_RATE)),
    *edits("The chosen keys' time was computed at another rate: it is their FLOPs / rates[\"chosen\"].",
        chosen_at_another_rate=(C_RATE, D_RATE), chosen_at_another_rate__index=(C_RATE, I_RATE)),
    *edits("A length at which both take equally long was left out. Chosen keys do not take longer there.",
        equal_left_out=("rates) >= 0", "rates) > 0", "rates) < 0", "rates) <= 0")),
    *edits("The length is one too small: chosen keys still take longer there.",
        one_too_small=("return high", "return low"), one_too_small__not_0=("return high", "return max(low, 1)")),
    *edits("The length is one too large: it pays one token earlier.", one_too_large=("return high", "return high + 1")),
    *edits("A length was doubled until choosing paid, but the crossing lies between it and its half.",
        doubled_alone=("return high", "return 1 << (high - 1).bit_length()")),
    *edits("No length up to k was considered. With a higher rate for chosen keys, choosing may pay from 1 token on.",
        not_before_k=("return high", 'return max(high, shape["k"])'),
        not_before_k__behind=("return high", 'return max(high, shape["k"] + 1)')),
)  # fmt: skip
