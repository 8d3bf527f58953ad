"""Wrong answers to exercise 7.6, and unusual right ones."""

from tests.submissions.edits import changed

HERE = "heads_here = max(1, key_heads // ranks)"


OWN_RANK_BYTES = (
    "rank_cache_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks)",
    "2 * layers * -(-key_heads // ranks) * head_dim * tokens * item_bytes",
)


WRONG = {
    "only_divisors_of_ranks": changed(
        "7.6",
        ("(key_heads % ranks == 0 or ranks % key_heads == 0)", "ranks % key_heads == 0"),
    ),
    "groups_uneven__and_fits_strictly": changed(
        "7.6",
        ("<= budget_bytes", "< budget_bytes"),
        ("        if query_heads % key_heads == 0\n        and (key_heads", "        if (key_heads"),
    ),
    "as_many_as_query_heads_left_out": changed("7.6", ("range(1, query_heads + 1)", "range(1, query_heads)")),
    "replication_forgotten": changed("7.6", (HERE, "heads_here = key_heads / ranks")),
    "no_head_left": changed("7.6", (HERE, "heads_here = key_heads // ranks")),
    "not_divided_among_ranks": changed("7.6", (HERE, "heads_here = key_heads")),
    "values_forgotten": changed("7.6", ("return 2 * layers", "return layers")),
    "smallest_chosen": changed("7.6", ("return max(fitting", "return min(fitting")),
    "uneven_split": changed(
        "7.6",
        ("        and (key_heads % ranks == 0 or ranks % key_heads == 0)\n", ""),
        (
            " rank_cache_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks) <=",
            " 2 * layers * -(-key_heads // ranks) * head_dim * tokens * item_bytes <=",
        ),
    ),
    "groups_uneven": changed("7.6", ("query_heads % key_heads == 0\n        and ", "")),
    "budget_of_one_for_all": changed(
        "7.6",
        (
            "rank_cache_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks) <=",
            "2 * layers * key_heads * head_dim * tokens * item_bytes <=",
        ),
    ),
    "fits_strictly": changed("7.6", ("<= budget_bytes", "< budget_bytes")),
    "powers_of_two_only": changed(
        "7.6", ("query_heads % key_heads == 0", "query_heads % key_heads == 0 and key_heads & (key_heads - 1) == 0")
    ),
    "budget_of_all_ranks": changed(
        "7.6", ("item_bytes, ranks) <= budget_bytes", "item_bytes, ranks) * ranks <= budget_bytes")
    ),
    "uneven_split__rounded_down": changed(
        "7.6", ("        and (key_heads % ranks == 0 or ranks % key_heads == 0)\n", "")
    ),
    "stopped_at_the_first_that_fails": changed(
        "7.6",
        (
            "return max(fitting, default=None)",
            "return next((n for n in range(query_heads) if n + 1 not in fitting), query_heads) or None",
        ),
    ),
    "quotient_of_the_budget": changed(
        "7.6",
        (
            "return max(fitting, default=None)",
            "one = rank_cache_bytes(layers, 1, head_dim, tokens, item_bytes, 1)\n"
            "    return min(query_heads, int(ranks * budget_bytes // one)) or None",
        ),
    ),
    "fewest_of_the_same_bytes": changed(
        "7.6", ("max(fitting, default=None)", "max(fitting, key=lambda n: (max(1, n // ranks), -n), default=None)")
    ),
    "one_head_never_tried": changed("7.6", ("range(1, query_heads + 1)", "range(2, query_heads + 1)")),
    "tokens_shared_too": changed(
        "7.6", ("head_dim * tokens * item_bytes", "head_dim * (tokens // ranks) * item_bytes")
    ),
    "kept_result": "CHOSEN = {}\n\n"
    + changed(
        "7.6",
        (
            "return max(fitting, default=None)",
            "return CHOSEN.setdefault((layers, query_heads, tokens), max(fitting, default=None))",
        ),
    ),
}


for _name in ("no_head_left", "not_divided_among_ranks", "values_forgotten", "replication_forgotten"):
    head, _, tail = WRONG[_name].partition("def choose_key_heads")
    WRONG[_name] = head + "def choose_key_heads" + tail.replace(*OWN_RANK_BYTES)


DEPLOYMENT_DOWNWARDS = """# Exercise 7.6 · KV heads for a budget
def rank_cache_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks):
    return math.ceil(key_heads / ranks) * tokens * layers * head_dim * item_bytes * 2

def choose_key_heads(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks):
    for heads in range(query_heads, 0, -1):
        fair = math.gcd(heads, ranks) in (heads, ranks)
        if query_heads % heads == 0 and fair:
            if rank_cache_bytes(layers, heads, head_dim, tokens, item_bytes, ranks) <= budget_bytes:
                return heads
"""


DEPLOYMENT_BY_ROOM = """# Exercise 7.6 · KV heads for a budget
def rank_cache_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks):
    copies = max(ranks // key_heads, 1)
    return 2 * layers * key_heads * copies * head_dim * tokens * item_bytes // ranks

def choose_key_heads(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks):
    room = int(budget_bytes // (2 * layers * head_dim * tokens * item_bytes))  # heads on a rank
    best = None
    for here in range(1, room + 1):
        if query_heads % (here * ranks) == 0:
            best = here * ranks
    return best
"""


DEPLOYMENT_ALWAYS_EVEN = changed(
    "7.6", ("(key_heads % ranks == 0 or ranks % key_heads == 0)", "key_heads % ranks == 0")
)


UNUSUAL = {
    "downwards": DEPLOYMENT_DOWNWARDS,
    "by room": DEPLOYMENT_BY_ROOM,
    "heads never copied": DEPLOYMENT_ALWAYS_EVEN,
}
