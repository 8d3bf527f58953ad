"""What goes wrong where FLOPs of attention to chosen keys are counted, and where they are compared by their time.

The pieces are those of the meanings in `ex7_crossover.py`.
"""

from __future__ import annotations

from course_lib.checker.specification.edits import edits

DENSE, INDEX = "attended * pairs_of(length, length)", "scored * pairs_of(length, length)"
CHOSEN, WINDOW = 'attended * pairs_of(length, shape["k"])', 'attended * pairs_of(length, shape["window"])'
INDEX_TIME, CHOSEN_TIME = 'Fraction(index) / Fraction(rates["index"])', 'Fraction(chosen) / Fraction(rates["chosen"])'
ATTENDED, SCORED = '4 * shape["query_heads"] * shape["head_dim"]', '2 * shape["index_heads"] * shape["index_dim"]'
RAMP, TIMES = "full * (full + 1) // 2 + (length - full) * full", f"dense_time - {INDEX_TIME} - {CHOSEN_TIME}"
TRIANGLE = (
    "The first queries were counted with a full window, or with k keys. Query t sees only t + 1 keys, so the sum of "
    "min(t + 1, most) begins with a triangle."
)
SHARED = (
    *edits("Every query was counted with all keys, even those after it. Query t sees t + 1 keys, which makes length · "
        "(length + 1) / 2 for all queries together.",
        not_causal=(DENSE, "attended * length * length", INDEX, "scored * length * length"),
        not_causal__dense=(DENSE, "attended * length * length"), not_causal__index=(INDEX, "scored * length * length")),
    *edits(TRIANGLE, triangle_forgotten=(WINDOW, 'attended * length * min(length, shape["window"])',
        CHOSEN, 'attended * length * min(length, shape["k"])'),
        triangle_forgotten__all=(RAMP, "length * full"),
        triangle_forgotten__chosen=(CHOSEN, 'attended * length * min(length, shape["k"])')),
    *edits("A query's own key was not counted: query t sees t + 1 keys, not t.",
        own_key_missing=("full * (full + 1) // 2", "full * (full - 1) // 2"),
        own_key_missing__index=(INDEX, "scored * pairs_of(length - 1, length)")),
    *edits("Pairs were counted as length² / 2. Query t sees t + 1 keys, or length · (length + 1) / 2 together.",
        half_the_diagonal=(DENSE, "attended * length * length // 2"),
        half_the_diagonal__floats=(DENSE, "int(attended * length * length / 2)")),
    *edits("Attention's FLOPs are half of what they should be. In each head a pair costs 2 · head_dim for the score "
        "and 2 · head_dim for the value.", half_the_flops=(ATTENDED, ATTENDED.replace("4", "2"))),
    *edits("The indexer's FLOPs are twice what they should be. It computes scores but no values: 2 · index_dim for "
        "each head.",
        indexer_with_values=(SCORED, SCORED.replace("2", "4"))),
    *edits("The indexer's FLOPs are half of what they should be: a multiply-add counts as two.",
        indexer_halved=(SCORED, SCORED.replace("2 *", "1 *"))),
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
    *edits("Only the last query was counted. Add up the keys that each query of the prompt sees.",
        last_query_alone=(RAMP, "full")),
)  # fmt: skip
OF_FLOPS = (
    *edits(TRIANGLE, triangle_forgotten__window=(WINDOW, 'attended * length * min(length, shape["window"])')),
    *edits("In a prompt shorter than the window, or than k, no query sees so many keys: use min(length, most).",
        shorter_than_the_window=("min(length, most)", "most")),
    *edits("The window has one key too many. `window` counts all keys that a query attends to, its own included.",
        window_without_itself=('shape["window"])', 'shape["window"] + 1)')),
    *edits("The window has one key too few. `window` counts all keys that a query attends to, its own included.",
        window_too_short=('shape["window"])', 'shape["window"] - 1)')),
    *edits("`window` stands where `k` should, or `k` where `window` should.",
        window_for_k=('shape["k"]', 'shape["window"]', 'shape["window"]', 'shape["k"]'),
        window_for_k__in_chosen=('shape["k"]', 'shape["window"]'),
        window_for_k__in_window=('shape["window"]', 'shape["k"]')),
)  # fmt: skip
OF_CROSSOVER = (
    *edits(TRIANGLE, triangle_forgotten__crossover=("_, index, chosen = parts_of", "_, index, chosen = rough_parts")),
    *edits("", asked_before=("gained(high, shape, rates) < 0",
        f'Fraction({SCORED}) / Fraction(rates["index"]) >= Fraction({ATTENDED}) / Fraction(rates["dense"])')),
    *edits("FLOPs were compared, or all parts got one rate. Each part has a rate of its own, so compare times.",
        one_rate=('rates["index"]', "1", 'rates["chosen"]', "1", 'rates["dense"]', "1")),
    *edits("The indexer's time was computed at the rate of attention: it is index FLOPs / rates[\"index\"].",
        index_at_another_rate=('rates["index"]', 'rates["dense"]'),
        index_at_another_rate__chosen=('rates["index"]', 'rates["chosen"]')),
    *edits("The chosen keys' time was computed at another rate: it is their FLOPs / rates[\"chosen\"].",
        chosen_at_another_rate=('rates["chosen"]', 'rates["dense"]'),
        chosen_at_another_rate__index=('rates["chosen"]', 'rates["index"]')),
    *edits("A length at which both take equally long was left out. Chosen keys do not take longer there.",
        equal_left_out=("rates) >= 0", "rates) > 0", "rates) < 0", "rates) <= 0")),
    *edits("The length is one too small: chosen keys still take longer there.",
        one_too_small=("return high", "return low"), one_too_small__not_0=("return high", "return max(low, 1)")),
    *edits("The length is one too large: one token earlier, chosen keys do not take longer either.",
        one_too_large=("return high", "return high + 1")),
    *edits("A length was doubled until chosen keys were no slower, but the crossing lies between it and its half.",
        doubled_alone=("return high", "return 1 << (high - 1).bit_length()")),
    *edits("No length up to k was considered. If attention to the chosen keys has a higher rate, choosing may pay "
        "from 1 token on.",
        not_before_k=("return high", 'return max(high, shape["k"])'),
        not_before_k__behind=("return high", 'return max(high, shape["k"] + 1)')),
)  # fmt: skip
