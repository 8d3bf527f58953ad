"""Wrong answers to exercise 9.2, and unusual right ones."""

from tests.submissions.edits import changed

START = "min(248, 65_536 // (128 * groups) // 8 * 8)"


LEGAL = "each and sum(registers) <= groups * starting_registers(groups)"


POOL = "pool = (consumers + 1) * starting_registers(consumers + 1)"


WRONG = {
    "shared_pool_of_the_chip__and_share_not_capped": changed(
        "9.2",
        ('pool = (consumers + 1) * starting_registers(consumers + 1)', 'pool = 512'),
        ('return min(256, (pool - producer) // consumers // 8 * 8)', 'return (pool - producer) // consumers // 8 * 8'),
    ),
    "half_a_group": changed(
        "9.2",
        ('65_536 // (128 * groups)', '65_536 // (64 * groups)'),
    ),
    "no_multiple_of_eight": changed(
        "9.2",
        (START, "min(248, 65_536 // (128 * groups))"),
        ("groups * starting_registers(groups)", "groups * (65_536 // (128 * groups) // 8 * 8)"),
        (POOL, "pool = (consumers + 1) * min(248, 65_536 // (128 * (consumers + 1)) // 8 * 8)"),
    ),
    "more_than_a_thread_may_have": changed(
        "9.2",
        (START, "65_536 // (128 * groups) // 8 * 8"),
        (POOL, "pool = (consumers + 1) * min(248, starting_registers(consumers + 1))"),
    ),
    "warps_for_groups": changed(
        "9.2",
        (START, "min(248, 65_536 // (32 * groups) // 8 * 8)"),
        ("groups * starting_registers(groups)", "groups * (65_536 // (128 * groups) // 8 * 8)"),
        (POOL, "pool = (consumers + 1) * min(248, 65_536 // (128 * (consumers + 1)) // 8 * 8)"),
    ),
    "pool_of_the_chip": changed("9.2", (LEGAL, "each and sum(registers) <= 512")),
    "pool_of_the_chip__in_registers": changed("9.2", (LEGAL, "each and 128 * sum(registers) <= 65536")),
    "multiples_of_eight_forgotten": changed("9.2", ("count % 8 == 0 and ", "")),
    "least_registers_forgotten": changed("9.2", ("24 <= count <= 256", "count <= 256")),
    "most_registers_forgotten": changed("9.2", ("24 <= count <= 256", "24 <= count")),
    "sum_must_be_equal": changed("9.2", (LEGAL, LEGAL.replace("<=", "=="))),
    "sum_forgotten": changed("9.2", (LEGAL, "each")),
    "weights_forgotten": changed("9.2", ("(4 + item_bytes)", "4")),
    "weights_in_float32": changed("9.2", ("(4 + item_bytes)", "8")),
    "accumulator_in_item_bytes": changed("9.2", ("head_dim * 4", "head_dim * item_bytes")),
    "bytes_for_registers": changed("9.2", ("tile_bytes // (128 * 4)", "tile_bytes // 128")),
    "rows_of_the_tile": changed("9.2", ("tile_bytes = 64 *", "tile_bytes = 128 *")),
    "capped_between_two_units": changed(
        "9.2",
        ("min(248, 65", "min(255, 65"),
        (POOL, "pool = (consumers + 1) * min(248, starting_registers(consumers + 1))"),
    ),
    "one_of_them_is_enough": changed("9.2", ("each = all(", "each = any(")),
    "shared_among_all_groups": changed("9.2", ("(pool - producer) // consumers", "pool // (consumers + 1)")),
    "share_not_capped": changed("9.2", ("min(256, (pool - producer) // consumers // 8 * 8)",
                                        "(pool - producer) // consumers // 8 * 8")),
    "share_no_multiple_of_eight": changed("9.2", ("consumers // 8 * 8", "consumers")),
    "producer_not_counted": changed("9.2", (POOL, "pool = consumers * starting_registers(consumers)")),
    "shared_pool_of_the_chip": changed("9.2", (POOL, "pool = 512")),
}


SEARCHED_REGISTERS = """# Exercise 9.2 · Sharing out the registers
def starting_registers(groups):
    return max(r for r in range(0, 249, 8) if r * groups * 128 <= 1 << 16)

def is_legal(registers):
    pool = starting_registers(len(registers)) * len(registers)
    for r in registers:
        if r not in range(24, 257, 8):
            return False
        pool -= r
    return pool >= 0

def live_registers(key_rows, head_dim, item_bytes):
    return key_rows / 2 + key_rows * item_bytes / 8 + head_dim / 2

def registers_of_a_consumer(consumers, producer):
    return max(r for r in range(24, 257, 8) if is_legal([r] * consumers + [producer]))
"""


UNUSUAL = {
        "searched": SEARCHED_REGISTERS,
        "bytes at the end": changed("9.2", ("tile_bytes // (128 * 4)", "int(tile_bytes / 512)")),
        "512 as a starting point": changed("9.2", (START, "min(31, 512 // groups // 8) * 8")),
    }
