"""Wrong answers to exercise 9.3, and unusual right ones."""

from tests.submissions.edits import changed

ROWS = "rows = 64 * consumers * query_buffers + 2 * stages * key_rows"


LOOPS = """        for query_buffers in (2, 1):
            for stages in (4, 3, 2):"""


WRONG = {
    "barriers_forgotten": changed("9.3", ("232_448 - 1024", "232_448")),
    "full_memory_refused": changed("9.3", ("<= 232_448 - 1024", "< 232_448 - 1024")),
    "values_forgotten__and_queries_of_128_rows": changed(
        "9.3", (ROWS, "rows = 128 * consumers * query_buffers + stages * key_rows")
    ),
    "values_forgotten": changed("9.3", (ROWS, "rows = 64 * consumers * query_buffers + stages * key_rows")),
    "one_query_tile": changed("9.3", (ROWS, "rows = 64 * query_buffers + 2 * stages * key_rows")),
    "elements_for_bytes": changed("9.3", ("return rows * head_dim * item_bytes", "return rows * head_dim")),
    "query_buffers_forgotten": changed("9.3", (ROWS, "rows = 64 * consumers + 2 * stages * key_rows")),
    "output_counted": changed("9.3", (ROWS, "rows = 64 * consumers * (query_buffers + 1) + 2 * stages * key_rows")),
    "registers_ignored": changed("9.3", ("live + 24 > registers", "False")),
    "no_registers_spared": changed("9.3", ("live + 24 > registers", "live > registers")),
    "divided_before_the_product": changed(
        "9.3", ("key_rows * (4 + item_bytes) // 8", "(4 + item_bytes) // 8 * key_rows")
    ),
    "one_stage_allowed": changed("9.3", ("(4, 3, 2)", "(4, 3, 2, 1)")),
    "gives_up_at_registers": changed("9.3", ("            continue", "            return 0, 0, 0")),
    "stages_before_query_buffers": changed(
        "9.3",
        (LOOPS, "        for stages in (4, 3, 2):\n            for query_buffers in (2, 1):"),
    ),
    "more_than_four_stages": changed("9.3", ("(4, 3, 2)", "range(20, 1, -1)")),
    "second_query_buffer_never_taken": changed("9.3", ("in (2, 1)", "in (1,)")),
    "second_query_buffer_insisted_on": changed("9.3", ("in (2, 1)", "in (2,)")),
}


# A slip in shared_memory reaches choose_arrangement too; these keep the second function right.
for _name in ("elements_for_bytes", "values_forgotten", "one_query_tile", "query_buffers_forgotten", "output_counted"):
    WRONG[_name] = WRONG[_name].replace(
        "if shared_memory(head_dim, item_bytes, consumers, key_rows, stages, query_buffers) <=",
        "if (64 * consumers * query_buffers + 2 * stages * key_rows) * head_dim * item_bytes <=",
    )


SORTED_ARRANGEMENTS = """# Exercise 9.3 · 227 kilobytes
def shared_memory(head_dim, item_bytes, consumers, key_rows, stages, query_buffers):
    row = head_dim * item_bytes
    return sum([64 * row] * consumers * query_buffers + [key_rows * row] * 2 * stages)

def choose_arrangement(head_dim, item_bytes, consumers, registers):
    fits = [
        (n, q, s)
        for n in (64, 128, 256) for q in (1, 2) for s in (2, 3, 4)
        if shared_memory(head_dim, item_bytes, consumers, n, s, q) + 1024 <= 227 * 1024
        and n / 2 + n * item_bytes / 8 + head_dim / 2 <= registers - 24
    ]
    n, q, s = max(fits, default=(0, 0, 0))
    return [n, s, q]
"""


UNUSUAL = {
        "all that fit, sorted": SORTED_ARRANGEMENTS,
        "tiles added": changed(
            "9.3", (ROWS, "rows = sum(64 for _ in range(consumers * query_buffers)) + 2 * key_rows * stages")
        ),
        "the limit in bytes": changed("9.3", ("232_448 - 1024", "231424")),
    }
