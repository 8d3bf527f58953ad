"""Exercise 7.6: how many KV heads the memory of a deployment's GPUs allows."""

from __future__ import annotations

from course_lib.checker import Case, Exercise
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.formulas import factors_missing, product


def rank_bytes(s: Slips, layers, key_heads, head_dim, tokens, item_bytes, ranks):
    """Bytes on one rank as they are counted with these slips."""
    heads = -(-key_heads // ranks)
    if s("no_head_left"):
        heads = key_heads // ranks
    if s("not_divided_among_ranks"):
        heads = key_heads
    if s("tokens_shared_too"):
        tokens = tokens // ranks
    if s("tokens_shared_too__rounded_last"):
        return 2 * layers * heads * head_dim * tokens // ranks * item_bytes
    matrices = 1 if s("values_forgotten") else 2
    size = matrices * product(s, layers=layers, head_dim=head_dim, tokens=tokens, item_bytes=item_bytes)
    if s("replication_forgotten", "replication_forgotten__rounded_down"):
        shared = size * key_heads / ranks
        return int(shared) if s("replication_forgotten__rounded_down") else shared
    return size * heads


def chosen(s: Slips, layers, query_heads, head_dim, tokens, item_bytes, budget, ranks):
    """The number of KV heads that is chosen with these slips."""

    def allowed(heads):
        divides = query_heads % heads == 0 or s("groups_uneven")
        even = heads % ranks == 0 and not s("only_divisors_of_ranks")
        even = even or ranks % heads == 0 or s("uneven_split", "uneven_split__rounded_down")
        return divides and even and not (s("powers_of_two_only") and heads & (heads - 1))

    def fits(heads):
        sharing = 1 if s("budget_of_one_for_all") else ranks
        need = rank_bytes(s, layers, heads, head_dim, tokens, item_bytes, sharing)
        if s("uneven_split__rounded_down"):
            need = rank_bytes(s, layers, max(1, heads // sharing), head_dim, tokens, item_bytes, 1)
        if s("budget_of_all_ranks"):
            need *= ranks
        return need < budget if s("fits_strictly") else need <= budget

    last = query_heads - (1 if s("as_many_as_query_heads_left_out") else 0)
    first = 2 if s("one_head_never_tried") else 1
    found = [heads for heads in range(first, last + 1) if allowed(heads) and fits(heads)]
    if s("stopped_at_the_first_that_fails"):
        found = [heads for place, heads in enumerate(found) if heads == first + place]
    if s("quotient_of_the_budget", "quotient_of_the_budget__rounded"):
        one = rank_bytes(Slips(), layers, 1, head_dim, tokens, item_bytes, 1)
        most = int(min(query_heads, (1 if s("quotient_of_the_budget__rounded") else ranks) * budget // one))
        found = [most] if most else []
    if s("fewest_of_the_same_bytes") and found:
        found = [heads for heads in found if -(-heads // ranks) == -(-max(found) // ranks)][:1]
    none = next((number for number in (0, 1) if s(f"none_forgotten__{number}")), None)
    return (min if s("smallest_chosen") else max)(found, default=none)


def rank_bytes_oracle(layers, key_heads, head_dim, tokens, item_bytes, ranks):
    return 2 * layers * -(-key_heads // ranks) * head_dim * tokens * item_bytes


def choose_oracle(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks):
    return chosen(Slips(), layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks)


def deployment_cases(draw):
    exact = rank_bytes_oracle(32, 8, 128, 65536, 2, 2)
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
            (3, 240, 8, 20, 4, float(rank_bytes_oracle(3, 1, 8, 20, 4, 1)), 1),
            "choose_key_heads",
        ),
        Case("8 GPUs, 2 GB on each: room for a third of a head", (80, 64, 128, 131072, 2, 2e9, 8), "choose_key_heads"),
        Case("room for all heads", (12, 12, 64, 1024, 2, 1e9, 1), "choose_key_heads"),
    ]


SIZES = (
    Slip(
        "values_forgotten",
        "The cache is half as large as it should be: keys and values are both kept. Multiply by 2.",
    ),
    Slip(
        "not_divided_among_ranks",
        "That is the whole cache. Its KV heads are divided among the GPUs: one holds key_heads / ranks of them.",
    ),
    *(
        Slip(
            name,
            "With more GPUs than KV heads the cache was still divided by the GPUs. A head can't be split: each GPU "
            "holds one whole head, and several GPUs hold the same.",
        )
        for name in ("replication_forgotten", "replication_forgotten__rounded_down")
    ),
    Slip(
        "no_head_left",
        "With more GPUs than KV heads the division was rounded down to no head at all. Each GPU holds one.",
    ),
    *(
        Slip(
            f"tokens_shared_too{how}",
            "The tokens are divided among the GPUs, on top of the KV heads. Every GPU holds all tokens, of its own "
            "heads.",
        )
        for how in ("", "__rounded_last")
    ),
    *factors_missing("layers", "head_dim", "tokens", "item_bytes"),
)

CHOICES = (
    *(slip for slip in SIZES if slip.id != "not_divided_among_ranks"),  # there it is budget_of_one_for_all
    Slip(
        "smallest_chosen",
        "The smallest number of KV heads that fits was chosen. More heads are better quality: take the largest.",
    ),
    Slip(
        "budget_of_one_for_all",
        "The whole cache was compared with the budget of a single GPU. budget_bytes is what each GPU has: compare "
        "with the bytes of one rank.",
    ),
    Slip(
        "budget_of_all_ranks",
        "The bytes of all GPUs together were compared with budget_bytes. That is what each GPU has: compare with the "
        "bytes of one rank.",
    ),
    *(
        Slip(
            f"uneven_split{how}",
            "The chosen KV heads can't be shared out evenly: of ranks and key_heads, one must divide the other. Else "
            "some GPUs hold more than others, and all wait for the fullest.",
        )
        for how in ("", "__rounded_down")
    ),
    Slip(
        "stopped_at_the_first_that_fails",
        "The search ends at the first number that is not allowed or does not fit. Larger ones may be allowed again: "
        "go on to query_heads.",
    ),
    *(
        Slip(
            f"quotient_of_the_budget{how}",
            "The number is the budget divided by the bytes of one head, whatever that gives. It must divide "
            "query_heads, and of it and ranks one must divide the other: try the numbers that do.",
        )
        for how in ("", "__rounded")
    ),
    Slip(
        "fewest_of_the_same_bytes",
        "Several numbers of KV heads take the same bytes, where each GPU holds one head, and the smallest of them was "
        "chosen. More heads are better quality: take the largest.",
    ),
    Slip(
        "one_head_never_tried",
        "A single KV head was never tried, and it is allowed. range(1, query_heads + 1) begins with it.",
    ),
    Slip("groups_uneven", "The chosen number of KV heads doesn't divide the query heads (exercise 7.1)."),
    Slip(
        "only_divisors_of_ranks",
        "Only numbers of KV heads that divide ranks were tried. Multiples of ranks are allowed too: each GPU then "
        "holds several heads.",
    ),
    Slip(
        "powers_of_two_only",
        "Only powers of two were tried. Any divisor of query_heads is possible: 48 query heads can share 12.",
    ),
    Slip(
        "as_many_as_query_heads_left_out",
        "A KV head for each query head was never tried, and it is allowed. range(1, query_heads) ends one before "
        "query_heads.",
    ),
    Slip(
        "fits_strictly",
        "A cache that fills the budget to the last byte was refused. It fits: compare with <=.",
    ),
    *(
        Slip(
            f"none_forgotten__{number}",
            f"Where not even one head fits, {number} was returned. Return None, which no one takes for a number of "
            "heads.",
        )
        for number in (0, 1)
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
    return layers, query_heads, 64, tokens, 2, room * rank_bytes_oracle(layers, 1, 64, tokens, 2, 1), ranks


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
        Model(rank_bytes, SIZES),
        Model(chosen, CHOICES, entry="choose_key_heads", none_is_a_result=True),
    ),
    oracle={"rank_cache_bytes": rank_bytes_oracle, "choose_key_heads": choose_oracle},
    hints=(
        "How many KV heads does one GPU hold? key_heads / ranks where that is a whole number, and one where there are "
        "more GPUs than heads, because a head cannot be divided.",
        "-(-key_heads // ranks) rounds up, and says both in one expression.",
        "choose_key_heads can try every number from 1 to query_heads. Keep it if it divides query_heads, if it "
        "divides ranks or ranks divides it, and if rank_cache_bytes(...) <= budget_bytes.",
        "max(candidates, default=None) is the largest, or None.",
    ),
)
