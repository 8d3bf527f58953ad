"""Exercise 7.6: how many KV heads the memory of a deployment's GPUs allows."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Slip
from exercises.topics.formulas import for_arguments


def rank_bytes_oracle(layers, key_heads, head_dim, tokens, item_bytes, ranks):
    return 2 * layers * -(-key_heads // ranks) * head_dim * tokens * item_bytes


def _choices(query_heads, ranks, *, even=True, divide=True, last=0):
    """The numbers of KV heads that are allowed; no model has 512 query heads, and a slip may put tokens in their place.

    last: how many numbers short of query_heads the search ends.
    """
    return [
        heads
        for heads in range(1, min(query_heads, 512) + 1 - last)
        if (query_heads % heads == 0 or not divide) and (heads % ranks == 0 or ranks % heads == 0 or not even)
    ]


def _chosen(layers, query_heads, head_dim, tokens, item_bytes, budget, ranks, *, need=None, pick=max, **rules):
    """The pick among allowed numbers of KV heads whose `need(heads)` is at most the budget."""
    need = need or (lambda heads: rank_bytes_oracle(layers, heads, head_dim, tokens, item_bytes, ranks))
    return pick((heads for heads in _choices(query_heads, ranks, **rules) if need(heads) <= budget), default=None)


def _largest_power_of_two(heads, default):
    return max((head for head in heads if head & (head - 1) == 0), default=default)


def choose_oracle(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks):
    return _chosen(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks)


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
        Case("room for all heads", (12, 12, 64, 1024, 2, 1e9, 1), "choose_key_heads"),
    ]


EXERCISE = Exercise(
    id="7.6",
    title="KV heads for a budget",
    entries=("rank_cache_bytes", "choose_key_heads"),
    cases=deployment_cases,
    oracle={"rank_cache_bytes": rank_bytes_oracle, "choose_key_heads": choose_oracle},
    hints=(
        "How many KV heads does one GPU hold? key_heads / ranks where that is a whole number, and one where there are "
        "more GPUs than heads, because a head cannot be divided.",
        "-(-key_heads // ranks) rounds up, and says both in one expression.",
        "choose_key_heads can try every number from 1 to query_heads. Keep it if it divides query_heads, if it "
        "divides ranks or ranks divides it, and if rank_cache_bytes(...) <= budget_bytes.",
        "max(candidates, default=None) is the largest, or None.",
    ),
    slips=(
        Slip(
            "replication_forgotten",
            "With more GPUs than KV heads the cache was still divided by the GPUs. A head can't be split: each GPU "
            "holds one whole head, and several GPUs hold the same.",
            formula=for_arguments(6, lambda n, k, d, t, b, r: 2 * n * k * d * t * b // r),
        ),
        Slip(
            "no_head_left",
            "With more GPUs than KV heads the division was rounded down to no head at all. Each GPU holds one.",
            formula=for_arguments(6, lambda n, k, d, t, b, r: 2 * n * (k // r) * d * t * b),
        ),
        Slip(
            "not_divided_among_ranks",
            "That is the whole cache. Its KV heads are divided among the GPUs: one holds key_heads / ranks of them.",
            formula=for_arguments(6, lambda n, k, d, t, b, r: 2 * n * k * d * t * b),
        ),
        Slip(
            "values_forgotten",
            "The cache is half as large as it should be: keys and values are both kept. Multiply by 2.",
            formula=for_arguments(6, lambda *args: rank_bytes_oracle(*args) // 2),
        ),
        Slip(
            "smallest_chosen",
            "The smallest number of KV heads that fits was chosen. More heads are better quality: take the largest.",
            formula=for_arguments(7, lambda *args: _chosen(*args, pick=min)),
        ),
        Slip(
            "uneven_split",
            "The chosen KV heads can't be shared out evenly: of ranks and key_heads, one must divide the other. Else "
            "some GPUs hold more than others, and all wait for the fullest.",
            formula=for_arguments(7, lambda *args: _chosen(*args, even=False)),
        ),
        Slip(
            "groups_uneven",
            "The chosen number of KV heads doesn't divide the query heads (exercise 7.1).",
            formula=for_arguments(7, lambda *args: _chosen(*args, divide=False)),
        ),
        Slip(
            "budget_of_one_for_all",
            "The whole cache was compared with the budget of a single GPU. budget_bytes is what each GPU has: compare "
            "with the bytes of one rank.",
            formula=for_arguments(
                7,
                lambda n, q, d, t, b, budget, r: _chosen(
                    n, q, d, t, b, budget, r, need=lambda heads: 2 * n * heads * d * t * b
                ),
            ),
        ),
        Slip(
            "fits_strictly",
            "A cache that fills the budget to the last byte was refused. It fits: compare with <=.",
            formula=for_arguments(7, lambda n, q, d, t, b, budget, r: _chosen(n, q, d, t, b, budget - 1, r)),
        ),
        Slip(
            "powers_of_two_only",
            "Only powers of two were tried. Any divisor of query_heads is possible: 48 query heads can share 12.",
            formula=for_arguments(7, lambda *args: _chosen(*args, pick=_largest_power_of_two)),
        ),
        Slip(
            "as_many_as_query_heads_left_out",
            "A KV head for each query head was never tried, and it is allowed. range(1, query_heads) ends one before "
            "query_heads.",
            formula=for_arguments(7, lambda *args: _chosen(*args, last=1)),
        ),
    ),
)
