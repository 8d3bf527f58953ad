"""Wrong answers to exercise 7.2, and unusual right ones."""

from tests.submissions.edits import changed, rounded

FLOPS = "flops = 4 * query_heads * length * head_dim"


BALANCE = "return math.ceil(rate / bandwidth * item_bytes / 2)"


WRONG = {
    "one_product_only__and_queries_forgotten": changed(
        "7.2",
        ("4 * query_heads * length", "2 * query_heads * length"),
        (" + 2 * query_heads * head_dim", ""),
    ),
    "one_more_than_rounded_down": changed(
        "7.2", ("math.ceil(rate / bandwidth * item_bytes / 2)", "math.floor(rate / bandwidth * item_bytes / 2) + 1")
    ),
    "values_forgotten": changed("7.2", ("return 2 * layers", "return layers")),
    "group_ignored": changed("7.2", ("key_heads = query_heads // group", "key_heads = query_heads")),
    "group_taken_for_key_heads": changed("7.2", ("key_heads = query_heads // group", "key_heads = group")),
    "one_product_only": changed("7.2", (FLOPS, "flops = 2 * query_heads * length * head_dim")),
    "flops_of_key_heads": changed("7.2", (FLOPS, "flops = 4 * key_heads * length * head_dim")),
    "bytes_of_query_heads": changed(
        "7.2", ("2 * length * key_heads * head_dim", "2 * length * query_heads * head_dim")
    ),
    "queries_forgotten": changed("7.2", (" + 2 * query_heads * head_dim", "")),
    "output_forgotten": changed("7.2", (" + 2 * query_heads * head_dim", " + query_heads * head_dim")),
    "values_not_read": changed("7.2", ("elements = 2 * length", "elements = length")),
    "upside_down": changed("7.2", ("return flops / (elements * item_bytes)", "return elements * item_bytes / flops")),
    "item_bytes_ignored": changed("7.2", (BALANCE, "return math.ceil(rate / bandwidth)")),
    "group_rounded_down": changed("7.2", (BALANCE, "return int(rate / bandwidth * item_bytes / 2)")),
    "group_rounded_down__at_least_one": changed(
        "7.2", (BALANCE, "return max(1, int(rate / bandwidth * item_bytes / 2))")
    ),
    "scores_counted": changed("7.2", ("elements = ", "elements = 2 * query_heads * length + ")),
    "per_element": changed("7.2", ("flops / (elements * item_bytes)", "flops / elements")),
    "intensity_rounded_down": changed("7.2", ("flops / (elements", "flops // (elements")),
    "item_bytes_turned_round": changed("7.2", ("item_bytes / 2)", "2 / item_bytes)")),
    "power_of_two_above": changed(
        "7.2", (BALANCE, "return 2 ** max(0, math.ceil(math.log2(rate / bandwidth * item_bytes / 2)))")
    ),
    "rounded_up_to_tiles": changed("7.2", (BALANCE, "return 16 * math.ceil(rate / bandwidth * item_bytes / 32)")),
}


COST_BY_TOKEN = """# Exercise 7.2 · What decode costs
def cache_bytes(layers, query_heads, group, head_dim, tokens, item_bytes):
    per_token = layers * 2 * (query_heads / group) * head_dim * item_bytes
    return int(tokens * per_token)

def decode_intensity(query_heads, key_heads, length, head_dim, item_bytes):
    return 2 * query_heads * length / (item_bytes * (length * key_heads + query_heads))

def balanced_group(rate, bandwidth, item_bytes):
    group = 1
    while 2 * group / item_bytes < rate / bandwidth:
        group = group + 1
    return group
"""


COST_SPELLED_OUT = """# Exercise 7.2 · What decode costs
def cache_bytes(layers, query_heads, group, head_dim, tokens, item_bytes):
    total = 0
    for kind in ("key", "value"):
        total += layers * query_heads * head_dim * tokens * item_bytes // group
    return total

def decode_intensity(query_heads, key_heads, length, head_dim, item_bytes):
    flops = query_heads * length * (2 * head_dim + 2 * head_dim)
    keys = values = length * key_heads * head_dim * item_bytes
    queries = output = query_heads * head_dim * item_bytes
    return flops / (keys + values + queries + output)

def balanced_group(rate, bandwidth, item_bytes):
    return max(int(-(-(rate * item_bytes) // (2 * bandwidth))), 1)
"""


COST_AS_FLOATS = changed("7.2", ("return 2 * layers", "return 2.0 * layers"))


UNUSUAL = {"by token, searched": COST_BY_TOKEN, "spelled out": COST_SPELLED_OUT, "a float": COST_AS_FLOATS}


WRONG["result_rounded"] = rounded("7.2", "decode_intensity", 2)
