"""Wrong answers to exercise 2.1, and unusual right ones."""

from tests.submissions.edits import changed

PASSES = "return queries + keys + matrix, matrix + matrix, matrix + keys + queries"


def passes(text):
    return changed("2.1", (PASSES, f"return {text}"))


WRONG = {
    "scores_not_written": passes("queries + keys, matrix + matrix, matrix + keys + queries"),
    "probabilities_not_read": passes("queries + keys + matrix, 2 * matrix, keys + queries"),
    "matrix_free_in_both_products": passes("queries + keys, 2 * matrix, keys + queries"),
    "softmax_one_way": passes("queries + keys + matrix, matrix, matrix + keys + queries"),
    "softmax_reads_three_times": passes("queries + keys + matrix, 4 * matrix, matrix + keys + queries"),
    "heads_forgotten": changed("2.1", ("= heads * ", "= ")),
    "elements_not_bytes": changed("2.1", (" * item_bytes", "")),
    "queries_squared": changed(
        "2.1", ("key_length", "query_length"), ("query_length: int, query_length", "query_length: int, key_length")
    ),
    "keys_squared": """# Exercise 2.1 · Bytes of the three passes
def pass_bytes(heads, query_length, key_length, head_dim, item_bytes):
    n, d, unit = key_length, head_dim, heads * item_bytes
    product = unit * (2 * n * d + n * n)
    return product, unit * 2 * n * n, product
""",
    "output_not_written": passes("queries + keys + matrix, 2 * matrix, matrix + keys"),
}


UNUSUAL = {
    "one product for both": """# Exercise 2.1 · Bytes of the three passes
def pass_bytes(heads, query_length, key_length, head_dim, item_bytes):
    unit = heads * item_bytes
    product = unit * (head_dim * (query_length + key_length) + query_length * key_length)
    return product, unit * 2 * query_length * key_length, product
""",
    "a list of tensors": """# Exercise 2.1 · Bytes of the three passes
def pass_bytes(heads, query_length, key_length, head_dim, item_bytes):
    shapes = dict(Q=(query_length, head_dim), K=(key_length, head_dim), V=(key_length, head_dim),
                  O=(query_length, head_dim), S=(query_length, key_length), P=(query_length, key_length))
    def size(names):
        return sum(heads * item_bytes * math.prod(shapes[name]) for name in names)
    return size("QKS"), size("SP"), size("PVO")
""",
    "through torch": """# Exercise 2.1 · Bytes of the three passes
def pass_bytes(heads, query_length, key_length, head_dim, item_bytes):
    q = torch.empty(heads, query_length, head_dim, device="meta").numel() * item_bytes
    k = torch.empty(heads, key_length, head_dim, device="meta").numel() * item_bytes
    s = torch.empty(heads, query_length, key_length, device="meta").numel() * item_bytes
    return (q + k + s, s * 2, s + k + q)
""",
}


WRONG |= {
    "factor_missing__heads_of_the_queries": changed(
        "2.1", ("queries = heads * query_length", "queries = query_length")
    ),
    "factor_missing__bytes_of_the_matrix": changed(
        "2.1", ("query_length * key_length * item_bytes", "query_length * key_length")
    ),
    "factor_too_many": changed("2.1", ("key_length * item_bytes", "key_length * head_dim * item_bytes")),
    "term_twice": changed("2.1", ("matrix + keys + queries", "2 * matrix + keys + queries")),
    "wrong_factor": changed("2.1", ("matrix + matrix,", "3 * matrix,")),
    "wrong_order": changed(
        "2.1", ("queries + keys + matrix, matrix + matrix,", "2 * matrix, queries + keys + matrix,")
    ),
    "writes_not_counted": changed(
        "2.1",
        (
            "queries + keys + matrix, matrix + matrix, matrix + keys + queries",
            "queries + keys, matrix, matrix + keys",
        ),
    ),
}
