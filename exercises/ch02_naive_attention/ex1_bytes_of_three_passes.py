"""Exercise 2.1: bytes of the three passes."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Slip


def pass_bytes_oracle(heads, query_length, key_length, head_dim, item_bytes):
    queries = heads * query_length * head_dim * item_bytes
    keys = heads * key_length * head_dim * item_bytes
    matrix = heads * query_length * key_length * item_bytes
    return queries + keys + matrix, 2 * matrix, matrix + keys + queries


def pass_bytes_cases(draw):
    heads, queries, keys = draw.integer(2, 64), draw.integer(2, 4000), draw.integer(4001, 9000)
    head_dim, item_bytes = draw.choice((16, 64, 80, 128)), draw.choice((1, 2, 4))
    return [
        Case("32 heads, 8192 × 8192, head dimension 128, float16", (32, 8192, 8192, 128, 2)),
        Case("a single query against 32768 keys", (32, 1, 32768, 128, 2)),
        Case("8 heads, 512 queries, 4096 keys, float32", (8, 512, 4096, 64, 4)),
        Case("one of everything, one byte an element", (1, 1, 1, 1, 1)),
        Case(
            f"{heads} heads, {queries} × {keys}, head dimension {head_dim}, {item_bytes} B an element",
            (heads, queries, keys, head_dim, item_bytes),
        ),
    ]


EXERCISE = Exercise(
    id="2.1",
    title="Bytes of the three passes",
    entries=("pass_bytes",),
    cases=pass_bytes_cases,
    oracle=pass_bytes_oracle,
    hints=(
        "Each pass is a kernel of its own, and nothing stays on the chip between two kernels. What must each one read "
        "from memory, and what must it write there?",
        "Pass 1 reads Q and K and writes S. Pass 2 reads S and writes P. Pass 3 reads P and V and writes O.",
        "Per head, Q and O have query_length × head_dim elements, K and V key_length × head_dim, S and P "
        "query_length × key_length. Multiply each sum by the heads and by the bytes of an element.",
        "`matrix = query_length * key_length`; pass 1 is `heads * item_bytes * (query_length * head_dim + "
        "key_length * head_dim + matrix)`, pass 2 is `heads * item_bytes * 2 * matrix`. Pass 3 moves as "
        "much as pass 1.",
    ),
    slips=(
        Slip(
            "scores_not_written",
            "Pass 1 does not count the scores. They do not fit on the chip, so the kernel writes all of them to "
            "memory. That is the largest part of the pass.",
            formula=lambda h, m, n, d, b: (h * b * (m * d + n * d), 2 * h * b * m * n, h * b * (m * n + n * d + m * d)),
        ),
        Slip(
            "probabilities_not_read",
            "Pass 3 does not count the probabilities. The kernel before it wrote them to memory, so this one must "
            "read them back.",
            formula=lambda h, m, n, d, b: (h * b * (m * d + n * d + m * n), 2 * h * b * m * n, h * b * (n * d + m * d)),
        ),
        Slip(
            "matrix_free_in_both_products",
            "The matrix counts in pass 2 only. Pass 1 writes it and pass 3 reads it: that makes four crossings, "
            "not two.",
            formula=lambda h, m, n, d, b: (h * b * (m * d + n * d), 2 * h * b * m * n, h * b * (n * d + m * d)),
        ),
        Slip(
            "writes_not_counted",
            "Only what is read was counted. Each pass writes its result to memory as well: S, P and O.",
            formula=lambda h, m, n, d, b: (h * b * (m * d + n * d), h * b * m * n, h * b * (m * n + n * d)),
        ),
        Slip(
            "reads_not_counted",
            "Only what is written was counted. Each pass reads what it works on as well.",
            formula=lambda h, m, n, d, b: (h * b * m * n, h * b * m * n, h * b * m * d),
        ),
        Slip(
            "softmax_one_way",
            "The softmax is counted with one crossing of the matrix. It has two, because it reads the scores and "
            "writes the probabilities.",
            formula=lambda h, m, n, d, b: (
                h * b * (m * d + n * d + m * n),
                h * b * m * n,
                h * b * (m * n + n * d + m * d),
            ),
        ),
        Slip(
            "softmax_reads_three_times",
            "The softmax is counted with three reads of the row: for the maximum, the sum and the result. The row "
            "fits on the chip, so one read is enough.",
            formula=lambda h, m, n, d, b: (
                h * b * (m * d + n * d + m * n),
                4 * h * b * m * n,
                h * b * (m * n + n * d + m * d),
            ),
        ),
        Slip(
            "heads_forgotten",
            "The number of heads is missing. Every head has its own Q, K, V, O and its own matrix.",
            formula=lambda h, m, n, d, b: pass_bytes_oracle(1, m, n, d, b),
        ),
        Slip(
            "elements_not_bytes",
            "These are elements, not bytes. Multiply by `item_bytes`.",
            formula=lambda h, m, n, d, b: pass_bytes_oracle(h, m, n, d, 1),
        ),
        Slip(
            "queries_squared",
            "The keys are counted with the length of the queries. The matrix is query_length × key_length, and K and "
            "V have key_length rows; the two differ whenever a cache holds earlier keys.",
            formula=lambda h, m, n, d, b: pass_bytes_oracle(h, m, m, d, b),
        ),
        Slip(
            "keys_squared",
            "The queries are counted with the length of the keys. The matrix is query_length × key_length, and Q and "
            "O have query_length rows.",
            formula=lambda h, m, n, d, b: pass_bytes_oracle(h, n, n, d, b),
        ),
        Slip(
            "output_not_written",
            "Pass 3 does not count its result. It writes query_length × head_dim elements of O for each head.",
            formula=lambda h, m, n, d, b: (h * b * (m * d + n * d + m * n), 2 * h * b * m * n, h * b * (m * n + n * d)),
        ),
    ),
)
