"""Wrong answers to exercise 5.2, and unusual right ones."""

from tests.submissions.edits import changed

FORMULA = "return 2 * layers * key_heads * head_dim * batch * length * item_bytes"


FIT = "return max(0, left // cache_bytes(layers, query_heads, key_heads, head_dim, 1, length, item_bytes))"


def size(text):
    return changed("5.2", (FORMULA, f"return {text}"))


OWN_FIT = """    one = 2 * layers * key_heads * head_dim * length * item_bytes
    return max(0, left // one)"""


WRONG = {
    "head_dim_shared_too": size(
        "2 * layers * key_heads * (head_dim // (query_heads // key_heads)) * batch * length * item_bytes"
    ),
    "weights_of_one_layer": changed("5.2", ("parameters * item_bytes", "parameters * layers * item_bytes")),
    "below_zero__positive": changed("5.2", ("return max(0, left", "return abs(left")),
    "weights_in_elements__and_keys_only": changed(
        "5.2",
        ('left = memory_bytes - parameters * item_bytes', 'left = memory_bytes - parameters'),
        (
            "cache_bytes(layers, query_heads, key_heads, head_dim, 1, length, item_bytes)",
            "(layers * key_heads * head_dim * length * item_bytes)",
        ),
    ),
    "keys_only__and_query_heads_counted": changed(
        "5.2",
        (
            "return 2 * layers * key_heads * head_dim * batch * length * item_bytes",
            "return layers * query_heads * head_dim * batch * length * item_bytes",
        ),
    ),
    "keys_only": size("layers * key_heads * head_dim * batch * length * item_bytes"),
    "query_heads_counted": size("2 * layers * query_heads * head_dim * batch * length * item_bytes"),
    "query_heads_counted__2": changed(
        "5.2",
        (FORMULA, "return 2 * layers * query_heads * head_dim * batch * length * item_bytes"),
        ("    " + FIT, OWN_FIT),
    ),
    "group_size_counted": size("2 * layers * (query_heads // key_heads) * head_dim * batch * length * item_bytes"),
    "queries_kept": size("layers * (query_heads + 2 * key_heads) * head_dim * batch * length * item_bytes"),
    "one_layer": size("2 * key_heads * head_dim * batch * length * item_bytes"),
    "one_sequence": size("2 * layers * key_heads * head_dim * length * item_bytes"),
    "elements_not_bytes": size("2 * layers * key_heads * head_dim * batch * length"),
    "length_squared": size("2 * layers * key_heads * head_dim * batch * length * length * item_bytes"),
    "weights_forgotten": changed("5.2", ("left = memory_bytes - parameters * item_bytes", "left = memory_bytes")),
    "weights_in_elements": changed(
        "5.2", ("left = memory_bytes - parameters * item_bytes", "left = memory_bytes - parameters")
    ),
    "rounded_up": changed(
        "5.2",
        (
            FIT,
            "one = cache_bytes(layers, query_heads, key_heads, head_dim, 1, length, item_bytes)\n"
            "    return max(0, math.ceil(left / one))",
        ),
    ),
    "part_of_a_sequence": changed("5.2", (FIT, FIT.replace("//", "/"))),
    "part_of_a_sequence__below_zero": changed("5.2", (FIT, FIT.replace("//", "/").replace("max(0, ", "("))),
    "weights_for_each_sequence": changed(
        "5.2",
        (FIT, FIT.replace("left // cache_bytes(", "memory_bytes // (parameters * item_bytes + cache_bytes(") + ")"),
    ),
    "exactly_full": changed(
        "5.2",
        (
            FIT,
            """one, count = 2 * layers * key_heads * head_dim * length * item_bytes, 0
    while (count + 1) * one < left:
        count += 1
    return count""",
        ),
    ),
    "below_zero": changed(
        "5.2", (FIT, "return left // cache_bytes(layers, query_heads, key_heads, head_dim, 1, length, item_bytes)")
    ),
    "query_heads_counted__in_fit": changed(
        "5.2", (FIT, "return max(0, left // (2 * layers * query_heads * head_dim * length * item_bytes))")
    ),
    "below_zero__int": changed(
        "5.2", (FIT, "return int(left / cache_bytes(layers, query_heads, key_heads, head_dim, 1, length, item_bytes))")
    ),
}


UNUSUAL = {
    "a loop over layers": """# Exercise 5.2 · The size of a cache
def cache_bytes(layers, query_heads, key_heads, head_dim, batch, length, item_bytes):
    total = 0
    for _ in range(layers):
        for _ in ("key", "value"):
            total += batch * length * key_heads * head_dim * item_bytes
    return total

def sequences_that_fit(memory_bytes, parameters, layers, query_heads, key_heads, head_dim, length, item_bytes):
    per_token = cache_bytes(layers, query_heads, key_heads, head_dim, 1, 1, item_bytes)
    tokens = (memory_bytes - item_bytes * parameters) // per_token
    return tokens // length if tokens > 0 else 0
""",
    "through the group": """# Exercise 5.2 · The size of a cache
def cache_bytes(layers, query_heads, key_heads, head_dim, batch, length, item_bytes):
    group = query_heads // key_heads
    return 2 * layers * (query_heads // group) * head_dim * batch * length * item_bytes

def sequences_that_fit(memory_bytes, parameters, layers, query_heads, key_heads, head_dim, length, item_bytes):
    weights = parameters * item_bytes
    if weights >= memory_bytes:
        return 0
    return (memory_bytes - weights) // cache_bytes(layers, query_heads, key_heads, head_dim, 1, length, item_bytes)
""",
    "tensors on no device": """# Exercise 5.2 · The size of a cache
def cache_bytes(layers, query_heads, key_heads, head_dim, batch, length, item_bytes):
    cache = torch.empty(2, layers, batch, key_heads, length, head_dim, device="meta", dtype=torch.int8)
    return cache.numel() * item_bytes

def sequences_that_fit(memory_bytes, parameters, layers, query_heads, key_heads, head_dim, length, item_bytes):
    one, count = cache_bytes(layers, query_heads, key_heads, head_dim, 1, length, item_bytes), 0
    left = memory_bytes - parameters * item_bytes
    while left >= one:
        left -= one
        count += 1
    return count
""",
}
