"""Wrong answers to exercise 10.7, and unusual right ones."""

from tests.submissions.edits import changed

ELEMENTS = "2 * key_rows * query_rows + 2 * key_rows * head_dim + query_rows * head_dim"
THREADS = "return -(-elements // (128 * groups))"
RING = "ring = stages * (2 * query_rows * head_dim * 2 + 2 * query_rows * 4)"
SUM = "return blocks + ring + key_rows * query_rows * 2 + query_rows * head_dim * 4"

# Whoever miscounts makes choose_tiles wrong too, which calls the others: only one of them is to be at fault here.
OWN = (
    (
        "if key_rows % (64 * groups) == 0",
        "if key_rows % (64 * groups) == 0 and (2 * key_rows * query_rows + (2 * key_rows + query_rows) * head_dim)"
        " <= 128 * groups * (registers - 16) and 4 * key_rows * head_dim + 2 * query_rows * (4 * head_dim + 8)"
        " + 2 * key_rows * query_rows + 4 * query_rows * head_dim <= shared_memory_bytes",
    ),
    ("        and accumulator_registers(key_rows, query_rows, head_dim, groups) <= registers - 16\n", ""),
    ("        and shared_memory(key_rows, query_rows, head_dim, stages=2) <= shared_memory_bytes\n", ""),
)

WRONG = {
    "query_rows_first__area_then_keys": changed(
        "10.7", ("max(fitting, default=None)", "max(fitting, key=lambda p: (p[0] * p[1], p[0]), default=None)")
    ),
    "query_rows_first__most_registers": changed(
        "10.7",
        (
            "max(fitting, default=None)",
            "max(fitting, key=lambda p: accumulator_registers(*p, head_dim, groups), default=None)",
        ),
    ),
    "registers_capped": changed("10.7", ("<= registers - 16", "<= min(registers, 255) - 16")),
    "rows_in_16_bits": changed("10.7", *OWN, (RING, RING.replace("query_rows * 4", "query_rows * 2"))),
    "one_tile_for_each_stage": changed(
        "10.7", *OWN, (RING, RING.replace("2 * query_rows * head_dim", "query_rows * head_dim"))
    ),
    "smaller_query_rows": changed(
        "10.7", ("max(fitting, default=None)", "max(fitting, key=lambda pair: (pair[0], -pair[1]), default=None)")
    ),
    "accumulators_forgotten": changed("10.7", *OWN, (ELEMENTS, "2 * key_rows * query_rows + 2 * key_rows * head_dim")),
    "groups_forgotten": changed("10.7", *OWN, (THREADS, "return -(-elements // 128)")),
    "warps_for_groups": changed("10.7", *OWN, (THREADS, "return -(-elements // (32 * groups))")),
    "registers_rounded_down": changed("10.7", *OWN, (THREADS, "return elements // (128 * groups)")),
    "stages_forgotten": changed("10.7", *OWN, (RING, RING.replace("stages * ", ""))),
    "rows_forgotten": changed("10.7", *OWN, (RING, "ring = stages * 2 * query_rows * head_dim * 2")),
    "one_block": changed("10.7", *OWN, ("blocks = 2 * key_rows * head_dim * 2", "blocks = key_rows * head_dim * 2")),
    "score_gradients_forgotten": changed("10.7", *OWN, (SUM, "return blocks + ring + query_rows * head_dim * 4")),
    "query_gradient_in_16_bits": changed("10.7", *OWN, (SUM, SUM.replace("head_dim * 4", "head_dim * 2"))),
    "registers_all_for_accumulators": changed("10.7", ("registers - 16", "registers")),
    "groups_uneven": changed("10.7", ("if key_rows % (64 * groups) == 0", "if key_rows % 64 == 0")),
    "query_rows_first": changed(
        "10.7", ("max(fitting, default=None)", "max(fitting, key=lambda pair: pair[::-1], default=None)")
    ),
    "fits_strictly": changed(
        "10.7", ("<= registers - 16", "< registers - 16"), ("<= shared_memory_bytes", "< shared_memory_bytes")
    ),
    "shared_memory_ignored": changed("10.7", OWN[2]),
    "one_stage": changed("10.7", ("stages=2) <=", "stages=1) <=")),
    "groups_uneven__at_least_one": changed("10.7", ("key_rows % (64 * groups) == 0", "key_rows // groups >= 64")),
    "query_rows_first__by_area": changed(
        "10.7", ("max(fitting, default=None)", "max(fitting, key=lambda pair: pair[0] * pair[1], default=None)")
    ),
    "size_left_out": changed("10.7", ("(64, 128, 192, 256)", "(64, 128, 256)")),
    "none_forgotten": changed("10.7", ("max(fitting, default=None)", "max(fitting, default=(0, 0))")),
    "registers_rounded_one_by_one": changed(
        "10.7",
        *OWN,
        (
            THREADS,
            "tiles = [key_rows * query_rows] * 2 + [key_rows * head_dim] * 2 + [query_rows * head_dim]\n"
            "    return sum(-(-tile // (128 * groups)) for tile in tiles)",
        ),
    ),
}

LOOPS = """# Exercise 10.7 · Tiles for five accumulators
def accumulator_registers(key_rows, query_rows, head_dim, groups):
    tiles = [(key_rows, query_rows)] * 2 + [(key_rows, head_dim)] * 2 + [(query_rows, head_dim)]
    return math.ceil(sum(rows * columns for rows, columns in tiles) / (128 * groups))

def shared_memory(key_rows, query_rows, head_dim, stages):
    total = 0
    for rows, columns, size, copies in (
        (key_rows, head_dim, 2, 2), (query_rows, head_dim, 2, 2 * stages), (query_rows, 1, 4, 2 * stages),
        (key_rows, query_rows, 2, 1), (query_rows, head_dim, 4, 1),
    ):
        total += rows * columns * size * copies
    return total

def choose_tiles(head_dim, groups, registers, shared_memory_bytes):
    for key_rows in (256, 192, 128, 64):
        if (key_rows // 64) % groups:
            continue
        for query_rows in (128, 64):
            need = accumulator_registers(key_rows, query_rows, head_dim, groups) + 16
            if need <= registers and shared_memory(key_rows, query_rows, head_dim, 2) <= shared_memory_bytes:
                return key_rows, query_rows
"""

UNUSUAL = {
    "loops and an early return": LOOPS,
    "its own sums in choose_tiles": changed("10.7", *OWN),
    "sorted": changed("10.7", ("max(fitting, default=None)", "sorted(fitting)[-1] if fitting else None")),
}
