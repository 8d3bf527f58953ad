"""Exercise 11.6: FLOPs and bytes of the absorbed and the expanded form, and which of the two takes less time."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract


def form_work(form, heads, context, query_tokens, latent_dim, rope_dim, head_dim, item_bytes):
    pairs = query_tokens * context - query_tokens * (query_tokens - 1) // 2
    weights = 2 * heads * head_dim * latent_dim
    row = latent_dim + rope_dim
    if form == "absorbed":
        flops = 2 * heads * (2 * query_tokens * head_dim * latent_dim + pairs * (row + latent_dim))
        elements = context * row + weights
    else:
        flops = 2 * heads * (2 * context * head_dim * latent_dim + pairs * (2 * head_dim + rope_dim))
        elements = weights + context * row + 2 * context * heads * 2 * head_dim
    return flops, elements * item_bytes


def chosen_form(heads, context, query_tokens, latent_dim, rope_dim, head_dim, item_bytes, rate, bandwidth):
    sizes = heads, context, query_tokens, latent_dim, rope_dim, head_dim, item_bytes
    absorbed_flops, absorbed_bytes = form_work("absorbed", *sizes)
    expanded_flops, expanded_bytes = form_work("expanded", *sizes)
    absorbed = max(absorbed_flops / rate, absorbed_bytes / bandwidth)
    expanded = max(expanded_flops / rate, expanded_bytes / bandwidth)
    return "absorbed" if absorbed <= expanded else "expanded"


V3 = (512, 64, 128, 2)


def form_cases(draw):
    odd = draw.integer(3, 60)
    work = [
        Case("absorbed: 128 heads, 32,768 tokens, one query token", ("absorbed", 128, 32_768, 1, *V3), "form_work"),
        Case("absorbed: 16 heads, 8 query tokens", ("absorbed", 16, 4096, 8, *V3), "form_work"),
        Case("absorbed: a prompt of 100 tokens", ("absorbed", 4, 100, 100, 40, 8, 24, 4), "form_work"),
        Case("expanded: 128 heads, 32,768 tokens, one query token", ("expanded", 128, 32_768, 1, *V3), "form_work"),
        Case("expanded: a prompt of 4096 tokens", ("expanded", 128, 4096, 4096, *V3), "form_work"),
        Case(f"expanded: {odd} query tokens", ("expanded", 6, 500, odd, 40, 12, 24, 4), "form_work"),
        Case(f"absorbed: {odd} query tokens", ("absorbed", 6, 500, odd, 40, 12, 24, 4), "form_work"),
    ]
    choices = [
        Case(
            f"{heads} heads, {context:,} tokens, {queries} of them queries, {rate / 1e12:g} TFLOP/s",
            (heads, context, queries, *sizes, rate, bandwidth),
            "choose_form",
        )
        for heads, context, queries, sizes, rate, bandwidth in (
            (128, 32_768, 1, V3, 989e12, 4.8e12),
            (16, 32_768, 8, V3, 989e12, 4.8e12),
            (128, 4096, 4096, V3, 989e12, 4.8e12),
            (128, 8192, 171, V3, 989e12, 3.35e12),
            (64, 128, 128, V3, 65e12, 3.2e11),
            (128, 1024, 400, (512, 64, 512, 2), 2250e12, 8e12),
            (128, 1024, 400, V3, 312e12, 2e12),
            (64, 2, 2, V3, 989e12, 3.35e12),
            (128, 400, 160, V3, 65e12, 3.2e11),  # 171 holds for a long context
            (128, 8192, 200, V3, 2250e12, 1e12),  # by its FLOPs expanded, but memory is the limit
            (128, 1, 1, V3, 1e12, 4e12),
        )
    ]
    tie = Case("both take equally long", (2, 6, 6, 8, 4, 8, 2, 1e3, 1e15), "choose_form")
    return [*work, *choices, tie]


PAIRS = "query_tokens * context - query_tokens * (query_tokens - 1) // 2"
ABSORBED = "2 * query_tokens * head_dim * latent_dim + pairs * (row + latent_dim)"
OF_HEADS = "pairs * (2 * head_dim + rope_dim)"
EXPANDED = f"2 * context * head_dim * latent_dim + {OF_HEADS}"
ABSORBED_READS, EXPANDED_READS = "context * row + weights", "weights + context * row"
OF_QUERIES, OF_CONTEXT = "2 * query_tokens * head_dim * latent_dim", "2 * context * head_dim * latent_dim"
CAUSAL = (
    "Every query is counted with all tokens, in one form or in both. It sees only those up to itself: T · N - T · (T - "
    "1) / 2 pairs."
)
WRONG_ORDER = (
    "In the absorbed form, W_UK and W_UV are counted for every token of the context. There they are applied once to "
    "each query and once to each output."
)
CONTENT = "The FLOPs are half of what they should be. A multiply-add is two."
WRITTEN = (
    "The keys and values in the expanded form's bytes are miscounted. It writes them for all heads, without the rotary "
    "part, and reads them again: 4 · head_dim · heads numbers for each token."
)
WORK = (
    *edits(CAUSAL, causal_forgotten=(PAIRS, "query_tokens * context"),
        causal_forgotten__absorbed=("pairs * (row + latent_dim)", "query_tokens * context * (row + latent_dim)"),
        causal_forgotten__expanded=(OF_HEADS, f"query_tokens * context * {OF_HEADS[8:]}")),
    *edits("A query's own token is left out. It sees itself too: the pairs are T · N - T · (T - 1) / 2.",
        diagonal_forgotten=("query_tokens * (query_tokens - 1) // 2", "query_tokens * (query_tokens + 1) // 2")),
    *edits("The triangle of pairs among the query tokens was taken for half a square, T · T / 2. A query sees its own "
        "token, so T · (T - 1) / 2 pairs are hidden.", half_a_triangle=("query_tokens * (query_tokens - 1) // 2",
        "query_tokens * query_tokens / 2"),
        half_a_triangle__rounded_down=("query_tokens * (query_tokens - 1) // 2", "query_tokens * query_tokens // 2"),
        half_a_triangle__rounded_up=("query_tokens * (query_tokens - 1) // 2", "-(-query_tokens * query_tokens // 2)")),
    *edits("The hidden pairs are added. Subtract them: T · N - T · (T - 1) / 2.",
        hidden_pairs_added=("query_tokens * context - query_tokens", "query_tokens * context + query_tokens")),
    *edits("The query tokens are counted with each other alone. They also see all tokens before them.",
        earlier_tokens_forgotten=(PAIRS, "query_tokens * (query_tokens + 1) // 2")),
    *edits("Every query is counted with the tokens that the first one sees. Each later query sees one token more.",
        as_the_first_query=(PAIRS, "query_tokens * (context - query_tokens + 1)")),
    *edits("The pairs are halved. That holds only for a prompt: after a long context a query sees nearly all tokens.",
        pairs_halved=(PAIRS, "query_tokens * context // 2"),
        pairs_halved__not_rounded=(PAIRS, "query_tokens * context / 2")),
    *edits(WRONG_ORDER, wrong_order=(OF_QUERIES, OF_CONTEXT)),
    *edits("The expanded form computes keys and values of every token of the context, not only of the query tokens.",
        expanded_for_queries_alone=(OF_CONTEXT, OF_QUERIES)),
    *edits("The matrices are missing from the absorbed form's FLOPs: W_UK on each query and W_UV on each output.",
        absorbing_forgotten=(ABSORBED, "pairs * (row + latent_dim)")),
    *edits("Only one of the two matrices is counted. W_UK and W_UV both have head_dim · latent_dim multiply-adds.",
        one_matrix=(OF_QUERIES, OF_QUERIES[4:]), one_matrix__expanded=(OF_CONTEXT, OF_CONTEXT[4:]),
        one_matrix__both=(OF_QUERIES, OF_QUERIES[4:], OF_CONTEXT, OF_CONTEXT[4:])),
    *edits("The expanded form's FLOPs lack the computation of the keys and values: W_UK and W_UV on every token.",
        expanding_forgotten=(EXPANDED, "pairs * (2 * head_dim + rope_dim)")),
    *edits(CONTENT, multiply_adds=("2 * heads * (2", "heads * (2")),
    *edits(CONTENT, multiply_adds__absorbed=(f"2 * heads * ({ABSORBED})", f"heads * ({ABSORBED})")),
    *edits(CONTENT, multiply_adds__expanded=(f"2 * heads * ({EXPANDED})", f"heads * ({EXPANDED})")),
    *edits("The rotary part is missing from the scores' FLOPs.",
        rope_forgotten=("pairs * (row + latent_dim)", "pairs * (2 * latent_dim)", "2 * head_dim + rope_dim",
        "2 * head_dim"), rope_forgotten__absorbed=("pairs * (row + latent_dim)", "pairs * (2 * latent_dim)"),
        rope_forgotten__expanded=("2 * head_dim + rope_dim", "2 * head_dim")),
    *edits("A rotary part is counted for the values too. Only the scores have one.",
        rope_in_the_values=("row + latent_dim", "2 * row", "2 * head_dim + rope_dim", "2 * (head_dim + rope_dim)"),
        rope_in_the_values__absorbed=("row + latent_dim", "2 * row"),
        rope_in_the_values__expanded=("2 * head_dim + rope_dim", "2 * (head_dim + rope_dim)")),
    *edits("The weighted sum is missing from the FLOPs of a pair. Beside the terms of the score it takes a multiply-"
        "add for each number of a value (expanded, head_dim) or of a latent (absorbed, latent_dim).",
        sum_forgotten=("row + latent_dim", "row", "2 * head_dim + rope_dim", "head_dim + rope_dim"),
        sum_forgotten__absorbed=("row + latent_dim", "row"),
        sum_forgotten__expanded=("2 * head_dim + rope_dim", "head_dim + rope_dim")),
    *edits("The absorbed form's pairs are counted with a head's length. Its scores and sums run over the latent: "
        "latent_dim + rope_dim and latent_dim numbers.",
        pairs_of_heads=("row + latent_dim", "2 * head_dim + rope_dim")),
    *edits("The rotary key is missing from the cache's bytes: a row is latent_dim + rope_dim numbers.",
        rope_not_cached=("context * row", "context * latent_dim"),
        rope_not_cached__absorbed=(ABSORBED_READS, "context * latent_dim + weights"),
        rope_not_cached__expanded=(EXPANDED_READS, "weights + context * latent_dim")),
    *edits("The latents are not read, or not in both forms. The expanded form reads them too: it computes the keys and "
        "values from them.", cache_not_read=("context * row", "0"),
        cache_not_read__but_the_rotary_key=("context * row", "context * rope_dim"),
        cache_not_read__absorbed=(ABSORBED_READS, "weights"), cache_not_read__expanded=(EXPANDED_READS, "weights"),
        cache_not_read__expanded_but_the_rotary_key=(EXPANDED_READS, "weights + context * rope_dim")),
    *edits("The row, or its latent, is counted twice, as key and as value. It is read once.",
        latent_read_twice=("context * row", "2 * context * row"),
        latent_read_twice__alone=("context * row", "context * (row + latent_dim)"),
        latent_read_twice__absorbed=(ABSORBED_READS, "2 * context * row + weights"),
        latent_read_twice__absorbed_alone=(ABSORBED_READS, "context * (row + latent_dim) + weights"),
        latent_read_twice__expanded=(EXPANDED_READS, "weights + 2 * context * row")),
    *edits("W_UK and W_UV are missing from the bytes, or from one form's. Both forms read them.",
        weights_forgotten=("2 * heads * head_dim * latent_dim", "0"),
        weights_forgotten__absorbed=(ABSORBED_READS, "context * row"),
        weights_forgotten__expanded=(EXPANDED_READS, "context * row")),
    *edits("Only one weight is counted in the bytes. There are two, W_UK and W_UV.",
        one_weight=("2 * heads * head_dim * latent_dim", "heads * head_dim * latent_dim")),
    *edits(WRITTEN, keys_written_alone=("2 * context * heads * 2 * head_dim", "context * heads * 2 * head_dim"),
        keys_written_alone__not_at_all=(" + 2 * context * heads * 2 * head_dim", ""),
        keys_written_alone__rotary_too=("heads * 2 * head_dim", "heads * (2 * head_dim + rope_dim)")),
    *edits("`item_bytes` is missing: numbers are counted, and not bytes.",
        bytes_forgotten=("elements * item_bytes", "elements")),
    *edits("The absorbed form's bytes include keys and values of all heads. It never makes them.",
        keys_written_in_both=(ABSORBED_READS, "context * row + weights + 2 * context * heads * 2 * head_dim")),
)  # fmt: skip
ABSORBED_TIME = "max(absorbed_flops / rate, absorbed_bytes / bandwidth)"
EXPANDED_TIME = "max(expanded_flops / rate, expanded_bytes / bandwidth)"
LONGER = "A form's time is the longer of two: its FLOPs at the rate, and its bytes at the bandwidth."


def _times(how):
    """Edits of both forms' times: `how` has {f} for the FLOPs' time and {b} for the bytes'."""
    pieces = []
    for time, form in ((ABSORBED_TIME, "absorbed"), (EXPANDED_TIME, "expanded")):
        pieces += [time, how.format(f=f"{form}_flops / rate", b=f"{form}_bytes / bandwidth")]
    return tuple(pieces)


CHOICE = (
    *edits(f"Only the FLOPs decide. {LONGER}", flops_alone=_times("{f}")),
    *edits(f"Only the bytes decide. {LONGER}", bytes_alone=_times("{b}")),
    *edits(f"The two times are added, but a GPU reads and computes at the same time. {LONGER}",
        times_added=_times("{f} + {b}")),
    *edits("A form's time was taken as the shorter of two. Take the longer one.",
        shorter_time=("max(absorbed_flops", "min(absorbed_flops", "max(expanded_flops", "min(expanded_flops")),
    *edits("When both forms take equally long, choose absorbed.",
        tie_expanded=("absorbed <= expanded", "absorbed < expanded")),
    *edits("The slower form was chosen. Compare the two times the other way round.",
        slower_chosen=("absorbed <= expanded", "absorbed > expanded")),
    *edits("The form was chosen by the number of query tokens alone. Compare the times from FLOPs and bytes.",
        by_query_tokens=("absorbed <= expanded", "query_tokens == 1"),
        by_query_tokens__fewer_than_171=("absorbed <= expanded", "query_tokens < 171"),
        by_query_tokens__up_to_171=("absorbed <= expanded", "query_tokens <= 171"),
        by_query_tokens__a_few=("absorbed <= expanded", "query_tokens <= 8"),
        by_query_tokens__not_the_whole=("absorbed <= expanded", "query_tokens < context"),
        by_query_tokens__from_the_sizes=("absorbed <= expanded",
        "query_tokens * (latent_dim - head_dim) <= latent_dim * head_dim")),
    *edits("One query token was always given the absorbed form. Compare the times for it too.",
        one_token_absorbed=("absorbed <= expanded", "query_tokens == 1 or absorbed <= expanded")),
    *edits("FLOPs were divided by the bandwidth, and bytes by the rate. It is the other way round.",
        rates_exchanged=("/ rate", "/ bandwidth", "/ bandwidth", "/ rate")),
)  # fmt: skip

SIZES = Contract(
    lambda draw, *, form, heads, context, queries, rope_dim: (
        form, heads, context, max(1, context * queries // 4), draw.integer(5, 40), rope_dim, draw.integer(3, 30), 2,
    ),
    choices={
        "form": ("absorbed", "expanded"), "heads": (1, 5), "context": (1, 2, 77), "queries": (0, 2, 4),
        "rope_dim": (1, 16),
    },
    says={"queries": "1 to context"},
    entry="form_work",
    most=8,
)  # fmt: skip

EXERCISE = Exercise(
    id="11.6",
    title="Choose the form",
    entries=("form_work", "choose_form"),
    cases=form_cases,
    oracle={"form_work": form_work, "choose_form": chosen_form},
    contracts=(SIZES,),
    models=(
        model_of(form_work, WORK, entry="form_work"),
        model_of(chosen_form, CHOICE, entry="choose_form"),
    ),
    hints=(
        "How many tokens does the first of the query tokens see, and how many the last? Count the pairs of a query "
        "and a token that it sees: query_tokens * context - query_tokens * (query_tokens - 1) // 2.",
        "A head's FLOPs are twice its multiply-adds. Absorbed: head_dim · latent_dim for W_UK on each query, the same "
        "for W_UV on each output, and latent_dim + rope_dim + latent_dim for each pair.",
        "Expanded: head_dim · latent_dim for each of the two matrices and each token of the context, and head_dim + "
        "rope_dim + head_dim for each pair.",
        "Numbers moved in both forms: context · (latent_dim + rope_dim) + 2 · heads · head_dim · latent_dim. The "
        "expanded form adds 2 · head_dim numbers for each token and head, written once and read once.",
        "choose_form: compute max(flops / rate, bytes / bandwidth) for each form, and return absorbed unless it takes "
        "longer.",
    ),
)
