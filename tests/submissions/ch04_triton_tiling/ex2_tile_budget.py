"""Wrong answers to exercise 4.2, and unusual right ones."""

from tests.submissions.edits import changed

WRONG = {
    "registers_strictly": changed("4.2", ("<= 128 * threads", "< 128 * threads")),
    "largest_product": changed(
        "4.2",
        ("max(fitting, default=None)", "max(fitting, key=lambda tile: (tile[0] * tile[1], tile[0]), default=None)"),
    ),
    "largest_product__the_first_of_equals": changed(
        "4.2", ("max(fitting, default=None)", "max(fitting, key=lambda tile: tile[0] * tile[1], default=None)")
    ),
    "value_tile_forgotten": changed("4.2", ("query_rows + 2 * stages * key_rows", "query_rows + stages * key_rows")),
    "stages_forgotten": changed("4.2", ("query_rows + 2 * stages * key_rows", "query_rows + 2 * key_rows")),
    "stages_on_queries": changed(
        "4.2", ("(query_rows + 2 * stages * key_rows)", "stages * (query_rows + 2 * key_rows)")
    ),
    "keys_read_once": changed("4.2", ("query_tiles * 2 * key_length", "2 * key_length")),
    "output_forgotten": changed("4.2", ("2 * query_length + query_tiles", "query_length + query_tiles")),
    "tiles_rounded_down": changed("4.2", ("-(-query_length // query_rows)", "query_length // query_rows")),
    "heads_forgotten": changed("4.2", ("return heads * rows", "return rows")),
    "registers_ignored": changed("4.2", ("and query_rows * (head_dim + key_rows) <= 128 * threads", "")),
    "key_rows_first": changed(
        "4.2", ("max(fitting, default=None)", "max(fitting, key=lambda pair: (pair[1], pair[0]), default=None)")
    ),
    "fits_strictly": changed("4.2", ("stages=2) <= shared_memory_bytes", "stages=2) < shared_memory_bytes")),
}


# The wrong budgets of the first two would make choose_tiles wrong too, which calls shared_memory: only one is at fault.
OWN_BUDGET = (
    "shared_memory(query_rows, key_rows, head_dim, item_bytes, stages=2)",
    "(query_rows + 4 * key_rows) * head_dim * item_bytes",
)


for _name in ("value_tile_forgotten", "stages_forgotten", "stages_on_queries"):
    WRONG[_name] = WRONG[_name].replace(*OWN_BUDGET)


LOOPED_CHOICE = """# Exercise 4.2 · Tiles within a budget
def shared_memory(query_rows, key_rows, head_dim, item_bytes, stages):
    row = head_dim * item_bytes
    return query_rows * row + sum(2 * key_rows * row for stage in range(stages))

def traffic(heads, query_length, key_length, head_dim, item_bytes, query_rows):
    total = 0
    for first in range(0, query_length, query_rows):
        rows = min(query_rows, query_length - first)
        total += 2 * rows + 2 * key_length
    return total * heads * head_dim * item_bytes

def choose_tiles(head_dim, item_bytes, shared_memory_bytes, threads):
    for m in (256, 128, 64, 32, 16):
        for n in (256, 128, 64, 32, 16):
            if m * (head_dim + n) / threads > 128:
                continue
            if shared_memory(m, n, head_dim, item_bytes, 2) <= shared_memory_bytes:
                return m, n
"""


UNUSUAL = {
        "loops and early return": LOOPED_CHOICE,
        "ceil of a fraction": changed(
            "4.2", ("-(-query_length // query_rows)", "math.ceil(query_length / query_rows)")
        ),
        "a list for a tuple's maximum": changed(
            "4.2", ("return max(fitting, default=None)", "return sorted(fitting)[-1] if fitting else None")
        ),
    }


WRONG |= {
    "one_stage_counted": changed("4.2", ("stages=2)", "stages=1)")),
    "accumulator_alone": changed("4.2", ("query_rows * (head_dim + key_rows) <=", "query_rows * head_dim <=")),
}
