"""Exercise 7.6: how many KV heads the memory of a deployment's GPUs allows."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.edits import without
from exercises.topics.formulas import factors_missing


def rank_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks):
    return 2 * layers * -(-key_heads // ranks) * head_dim * tokens * item_bytes


def chosen(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks):
    found = [
        heads
        for heads in range(1, query_heads + 1)
        if query_heads % heads == 0
        if heads % ranks == 0 or ranks % heads == 0
        if rank_bytes(layers, heads, head_dim, tokens, item_bytes, ranks) <= budget_bytes
    ]
    return max(found, default=None)


def choose_oracle(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks):
    # `chosen` reads some of these in several places. Here each stands once, so that a small change takes one for
    # another throughout.
    return chosen(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks)


def deployment_cases(draw):
    exact = rank_bytes(32, 8, 128, 65536, 2, 2)
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
        Case(
            "a budget that 8 heads on 2 GPUs fill to the last byte",
            (32, 32, 128, 65536, 2, float(exact), 2),
            "choose_key_heads",
        ),
        Case("one byte less than that", (32, 32, 128, 65536, 2, float(exact - 1), 2), "choose_key_heads"),
        Case("one GPU, 6 GB: room for one head", (80, 64, 128, 131072, 2, 6e9, 1), "choose_key_heads"),
        Case("48 query heads, 4 GPUs", (40, 48, 128, 65536, 2, 9e9, 4), "choose_key_heads"),
        Case("28 query heads, 4 GPUs, room for 2 heads each", (28, 28, 128, 100000, 2, 3e9, 4), "choose_key_heads"),
        Case(
            "240 query heads in 3 small layers, room for exactly one KV head",
            (3, 240, 8, 20, 4, float(rank_bytes(3, 1, 8, 20, 4, 1)), 1),
            "choose_key_heads",
        ),
        Case("8 GPUs, 2 GB on each: room for a third of a head", (80, 64, 128, 131072, 2, 2e9, 8), "choose_key_heads"),
        Case("room for all heads", (12, 12, 64, 1024, 2, 1e9, 1), "choose_key_heads"),
    ]


HEADS_HERE = "-(-key_heads // ranks)"
SIZES = (
    *edits(
        "The cache is half as large as it should be: keys and values are both kept. Multiply by 2.",
        values_forgotten=("2 * layers", "layers"),
    ),
    *edits(
        "That is the whole cache. Its KV heads are divided among the GPUs: one holds key_heads / ranks of them.",
        not_divided_among_ranks=(HEADS_HERE, "key_heads"),
    ),
    *edits(
        "With more GPUs than KV heads the cache was still divided by the GPUs. A head can't be split: each GPU "
        "holds one whole head, and several GPUs hold the same.",
        replication_forgotten=(HEADS_HERE, "key_heads", "* item_bytes", "* item_bytes / ranks"),
        replication_forgotten__rounded_down=(HEADS_HERE, "key_heads", "* item_bytes", "* item_bytes // ranks"),
    ),
    *edits(
        "With more GPUs than KV heads the division was rounded down to no head at all. Each GPU holds one.",
        no_head_left=(HEADS_HERE, "(key_heads // ranks)"),
    ),
    *edits(
        "The tokens are divided among the GPUs, on top of the KV heads. Every GPU holds all tokens, of its own heads.",
        tokens_shared_too=("* tokens", "* (tokens // ranks)"),
        tokens_shared_too__rounded_last=("* tokens", "* tokens // ranks"),
    ),
    *factors_missing("layers", "head_dim", "tokens", "item_bytes"),
)

DIVIDES, EVEN = "if query_heads % heads == 0", "if heads % ranks == 0 or ranks % heads == 0"
ON_A_RANK, RESULT = "item_bytes, ranks) <=", "max(found, default=None)"
ONE_HEAD = "rank_bytes(layers, 1, head_dim, tokens, item_bytes, 1)"
CHOICES = (
    *without(SIZES, "not_divided_among_ranks"),  # there it is budget_of_one_for_all
    *edits(
        "The smallest number of KV heads that fits was chosen. More heads are better quality: take the largest.",
        smallest_chosen=("max(found", "min(found"),
    ),
    *edits(
        "The whole cache was compared with the budget of a single GPU. budget_bytes is what each GPU has: compare "
        "with the bytes of one rank.",
        budget_of_one_for_all=(ON_A_RANK, "item_bytes, 1) <="),
    ),
    *edits(
        "The bytes of all GPUs together were compared with budget_bytes. That is what each GPU has: compare with the "
        "bytes of one rank.",
        budget_of_all_ranks=(ON_A_RANK, "item_bytes, ranks) * ranks <="),
    ),
    *edits(
        "The chosen KV heads can't be shared out evenly: of ranks and key_heads, one must divide the other. Else "
        "some GPUs hold more than others, and all wait for the fullest.",
        uneven_split=(EVEN, ""),
        uneven_split__rounded_down=(EVEN, "", HEADS_HERE, "max(1, key_heads // ranks)"),
    ),
    *edits(
        "The search ends at the first number that is not allowed or does not fit. Larger ones may be allowed again: "
        "go on to query_heads.",
        stopped_at_the_first_that_fails=(
            RESULT,
            "max([heads for place, heads in enumerate(found, 1) if heads == place], default=None)",
        ),
    ),
    *edits(
        "The number is the budget divided by the bytes of one head, whatever that gives. It must divide "
        "query_heads, and of it and ranks one must divide the other: try the numbers that do.",
        quotient_of_the_budget=(RESULT, f"int(min(query_heads, ranks * budget_bytes // {ONE_HEAD})) or None"),
        quotient_of_the_budget__rounded=(RESULT, f"int(min(query_heads, budget_bytes // {ONE_HEAD})) or None"),
    ),
    *edits(
        "Several numbers of KV heads take the same bytes, where each GPU holds one head, and the smallest of them was "
        "chosen. More heads are better quality: take the largest.",
        fewest_of_the_same_bytes=(
            RESULT,
            "min([heads for heads in found if -(-heads // ranks) == -(-max(found) // ranks)], default=None)",
        ),
    ),
    *edits(
        "A single KV head was never tried, and it is allowed. range(1, query_heads + 1) begins with it.",
        one_head_never_tried=("range(1,", "range(2,"),
    ),
    *edits("The chosen number of KV heads doesn't divide the query heads (exercise 7.1).", groups_uneven=(DIVIDES, "")),
    *edits(
        "Only numbers of KV heads that divide ranks were tried. Multiples of ranks are allowed too: each GPU then "
        "holds several heads.",
        only_divisors_of_ranks=(EVEN, "if ranks % heads == 0"),
    ),
    *edits(
        "Only powers of two were tried. Any divisor of query_heads is possible: 48 query heads can share 12.",
        powers_of_two_only=(DIVIDES, f"{DIVIDES} and heads & heads - 1 == 0"),
    ),
    *edits(
        "A KV head for each query head was never tried, and it is allowed. range(1, query_heads) ends one before "
        "query_heads.",
        as_many_as_query_heads_left_out=("query_heads + 1", "query_heads"),
    ),
    *edits(
        "A cache that fills the budget to the last byte was refused. It fits: compare with <=.",
        fits_strictly=("<= budget_bytes", "< budget_bytes"),
    ),
    *(
        edit
        for number in (0, 1)
        for edit in edits(
            f"Where not even one head fits, {number} was returned. Return None, which no one takes for a number of "
            "heads.",
            **{f"none_forgotten__{number}": ("default=None", f"default={number}")},
        )
    ),
)

RANK = Contract(
    lambda draw, *, key_heads, ranks: (draw.integer(2, 90), key_heads, 64, draw.integer(100, 9000), 2, ranks),
    choices={"key_heads": (1, 2, 6, 8, 24), "ranks": (1, 2, 8, 24)},
    says={"ranks": "Either ranks divides key_heads, or key_heads divides ranks"},
    valid=lambda key_heads, ranks: key_heads % ranks == 0 or ranks % key_heads == 0,
    most=6,
)


def _budgeted(draw, *, query_heads, ranks, room):
    layers, tokens = draw.integer(2, 90), draw.integer(100, 9000)
    return layers, query_heads, 64, tokens, 2, room * rank_bytes(layers, 1, 64, tokens, 2, 1), ranks


CHOICE = Contract(
    _budgeted,
    choices={
        "query_heads": (12, 24, 36, 64),
        "ranks": (1, 2, 3, 4),
        "room": (
            Level(0.9, "room for no head"),
            Level(1.0, "room for exactly one head"),
            Level(2.5, "room for 2 heads"),
            Level(6.0, "room for exactly 6 heads"),
            Level(11.5, "room for 11 heads"),
            Level(100.0, "room for all heads"),
        ),
    },
    says={
        "query_heads": "The number divides query_heads",
        "ranks": "it divides ranks or is divided by ranks",
        "room": "None if not even one head fits",
    },
    valid=lambda query_heads, ranks, room: query_heads % ranks == 0,
    entry="choose_key_heads",
    most=10,
)


EXERCISE = Exercise(
    id="7.6",
    title="KV heads for a budget",
    entries=("rank_cache_bytes", "choose_key_heads"),
    cases=deployment_cases,
    contracts=(RANK, CHOICE),
    models=(
        model_of(rank_bytes, SIZES),
        model_of(chosen, CHOICES, parts=(rank_bytes,), entry="choose_key_heads", none_is_a_result=True),
    ),
    oracle={"rank_cache_bytes": rank_bytes, "choose_key_heads": choose_oracle},
    hints=(
        "How many KV heads does one GPU hold? key_heads / ranks where that is a whole number, and one where there are "
        "more GPUs than heads, because a head cannot be divided.",
        "-(-key_heads // ranks) rounds up, and says both in one expression.",
        "choose_key_heads can try every number from 1 to query_heads. Keep it if it divides query_heads, if it "
        "divides ranks or ranks divides it, and if rank_cache_bytes(...) <= budget_bytes.",
        "max(candidates, default=None) is the largest, or None.",
    ),
)
