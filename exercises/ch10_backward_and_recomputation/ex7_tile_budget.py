"""Exercise 10.7: tiles of a Hopper kernel for the backward pass, within registers and shared memory."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Slip
from exercises.topics.formulas import for_arguments

HOPPER_BYTES = 227 << 10


def accumulator_oracle(key_rows, query_rows, head_dim, groups):
    elements = 2 * key_rows * query_rows + 2 * key_rows * head_dim + query_rows * head_dim
    return -(-elements // (128 * groups))


def shared_memory_oracle(key_rows, query_rows, head_dim, stages):
    blocks = 4 * key_rows * head_dim
    ring = stages * (4 * query_rows * head_dim + 8 * query_rows)
    return blocks + ring + 2 * key_rows * query_rows + 4 * query_rows * head_dim


def _chosen(
    head_dim,
    groups,
    registers,
    shared_memory_bytes,
    *,
    reserve=16,
    stages=2,
    whole=True,
    order=lambda pair: pair,
    strictly=False,
    memory=True,
    key_rows=(64, 128, 192, 256),
):
    def fits(need, room):
        return need < room if strictly else need <= room

    pairs = [
        (m, n)
        for m in key_rows
        for n in (64, 128)
        if (not whole or m % (64 * groups) == 0)
        and fits(accumulator_oracle(m, n, head_dim, groups), registers - reserve)
        and (not memory or fits(shared_memory_oracle(m, n, head_dim, stages), shared_memory_bytes))
    ]
    return max(pairs, key=order, default=None)


def choose_oracle(head_dim, groups, registers, shared_memory_bytes):
    return _chosen(head_dim, groups, registers, shared_memory_bytes)


def budget_cases(draw):
    head_dim, keys = draw.choice((80, 96, 192)), draw.choice((64, 128, 192))
    exact = shared_memory_oracle(128, 64, 128, 2)
    registers, memory, choose = "accumulator_registers", "shared_memory", "choose_tiles"
    return [
        Case("128 keys, 64 queries, head dimension 128, 2 groups", (128, 64, 128, 2), registers),
        Case("128 × 128, head dimension 64, 2 groups", (128, 128, 64, 2), registers),
        Case("192 × 64, head dimension 128, 3 groups: a third left over", (192, 64, 128, 3), registers),
        Case(f"{keys} × 64, head dimension {head_dim}, one group", (keys, 64, head_dim, 1), registers),
        Case("1 × 1, head dimension 1", (1, 1, 1, 1), registers),
        Case("128 keys, 64 queries, head dimension 128, 2 stages", (128, 64, 128, 2), memory),
        Case("128 × 128, head dimension 64, one stage", (128, 128, 64, 1), memory),
        Case(f"{keys} × 128, head dimension {head_dim}, 3 stages", (keys, 128, head_dim, 3), memory),
        Case("H100: head dimension 128, 2 groups of 240 registers", (128, 2, 240, HOPPER_BYTES), choose),
        Case("H100: head dimension 64, 2 groups of 240 registers", (64, 2, 240, HOPPER_BYTES), choose),
        Case("H100: head dimension 128, one group", (128, 1, 255, HOPPER_BYTES), choose),
        Case("H100: head dimension 64, one group of 240", (64, 1, 240, HOPPER_BYTES), choose),
        Case("H100: head dimension 64, 3 groups of 160", (64, 3, 160, HOPPER_BYTES), choose),
        Case("H100: head dimension 256, 2 groups: dK and dV alone take 256", (256, 2, 240, HOPPER_BYTES), choose),
        Case("3 groups, head dimension 32", (32, 3, 160, HOPPER_BYTES), choose),
        Case("one register fewer than the accumulators of 128 × 64 need", (128, 2, 239, HOPPER_BYTES), choose),
        Case("shared memory that 128 × 64 fills to the last byte", (128, 2, 240, exact), choose),
        Case("the same, less one byte", (128, 2, 240, exact - 1), choose),
        Case("head dimension 64, 99 KiB", (64, 2, 240, 99 << 10), choose),
        Case("head dimension 32: 256 × 64 and 128 × 128 both fit", (32, 2, 240, HOPPER_BYTES), choose),
        Case("head dimension 32, 2 groups, 64 KiB", (32, 2, 240, 64 << 10), choose),
        Case("head dimension 64, registers to spare, 2 groups", (64, 2, 250, HOPPER_BYTES), choose),
        Case(
            "a chip with 512 registers a thread and 1 MiB: query_rows still ends at 128", (32, 4, 512, 1 << 20), choose
        ),
        Case("a chip with 300 registers a thread, head dimension 16, one group", (16, 1, 300, HOPPER_BYTES), choose),
        Case("330 registers, head dimension 16: 192 × 64 and 128 × 128 both fit", (16, 1, 330, HOPPER_BYTES), choose),
        Case("head dimension 16, 4 groups of 120", (16, 4, 120, HOPPER_BYTES), choose),
    ]


# Two functions take four numbers: registers of a thread and tiles of a kernel are told apart by the cases' entries.
def _registers(function):
    return for_arguments(4, function)


def _sentences():
    return (
        (
            "accumulators_forgotten",
            "There are five accumulators: S and dP of key_rows × query_rows, dK and dV of key_rows × head_dim, dQ of "
            "query_rows × head_dim. One is missing.",
            (
                lambda m, n, d, g: -(-(m * n + 2 * m * d + n * d) // (128 * g)),
                lambda m, n, d, g: -(-(2 * m * n + 2 * m * d) // (128 * g)),
                lambda m, n, d, g: -(-(2 * m * n + m * d + n * d) // (128 * g)),
            ),
        ),
        (
            "groups_forgotten",
            "The accumulators are divided among 128 threads. All `groups` warp groups share them: 128 · groups.",
            (lambda m, n, d, g: accumulator_oracle(m, n, d, 1),),
        ),
        (
            "warps_for_groups",
            "A warp group has four warps, 128 threads, not 32.",
            (lambda m, n, d, g: -(-(2 * m * n + 2 * m * d + n * d) // (32 * g)),),
        ),
        (
            "registers_rounded_down",
            "The registers of a thread are rounded down. What is left over needs a register too.",
            (lambda m, n, d, g: (2 * m * n + 2 * m * d + n * d) // (128 * g),),
        ),
        (
            "registers_rounded_one_by_one",
            "Each accumulator's registers are rounded up by themselves. Add all elements first, and round up once.",
            (lambda m, n, d, g: 2 * -(-m * n // (128 * g)) + 2 * -(-m * d // (128 * g)) - (-n * d // (128 * g)),),
        ),
        (
            "two_bytes_an_element",
            "The accumulators are counted with half a register an element. They are float32: one register each.",
            (lambda m, n, d, g: -(-(2 * m * n + 2 * m * d + n * d) // (256 * g)),),
        ),
        (
            "one_block",
            "Only one block of keys is counted. K and V both lie in shared memory.",
            (lambda m, n, d, st: shared_memory_oracle(m, n, d, st) - 2 * m * d,),
        ),
        (
            "stages_forgotten",
            "The stages are missing: each has a tile of Q and one of dO, with their L and Δ.",
            (lambda m, n, d, st: shared_memory_oracle(m, n, d, 1),),
        ),
        (
            "rows_forgotten",
            "L and Δ of the queries are missing: 8 bytes for each query of each stage.",
            (lambda m, n, d, st: shared_memory_oracle(m, n, d, st) - 8 * st * n,),
        ),
        (
            "rows_once",
            "L and Δ are counted once. Each stage has its own.",
            (lambda m, n, d, st: shared_memory_oracle(m, n, d, st) - 8 * (st - 1) * n,),
        ),
        (
            "score_gradients_forgotten",
            "The tile of dS is missing. It goes through shared memory to the product with K.",
            (lambda m, n, d, st: shared_memory_oracle(m, n, d, st) - 2 * m * n,),
        ),
        (
            "score_gradients_in_float32",
            "The tile of dS takes twice its bytes. There is one, of 2 bytes an element; P stays in registers.",
            (lambda m, n, d, st: shared_memory_oracle(m, n, d, st) + 2 * m * n,),
        ),
        (
            "rows_in_16_bits",
            "L and Δ are counted with 2 bytes. They are float32.",
            (lambda m, n, d, st: shared_memory_oracle(m, n, d, st) - 4 * st * n,),
        ),
        (
            "one_tile_for_each_stage",
            "Q and dO both need a tile in each stage. One of them is missing, or has no stages.",
            (
                lambda m, n, d, st: shared_memory_oracle(m, n, d, st) - 2 * st * n * d,
                lambda m, n, d, st: shared_memory_oracle(m, n, d, st) - 2 * (st - 1) * n * d,
            ),
        ),
        (
            "query_gradient_forgotten",
            "The tile of dQ on its way out is missing.",
            (lambda m, n, d, st: shared_memory_oracle(m, n, d, st) - 4 * n * d,),
        ),
        (
            "query_gradient_in_16_bits",
            "dQ is counted with 2 bytes. It leaves as float32, because other blocks add to it.",
            (lambda m, n, d, st: shared_memory_oracle(m, n, d, st) - 2 * n * d,),
        ),
        (
            "blocks_for_each_stage",
            "K and V are counted for each stage. They are loaded once and stay.",
            (lambda m, n, d, st: shared_memory_oracle(m, n, d, st) + 4 * (st - 1) * m * d,),
        ),
        (
            "registers_all_for_accumulators",
            "The accumulators may take all registers of a thread. 16 of them are needed for other things.",
            (lambda *args: _chosen(*args, reserve=0),),
        ),
        (
            "groups_uneven",
            "key_rows is not a multiple of 64 for each warp group. A group's share of the keys is one or more whole "
            "matrix instructions of 64 rows: key_rows % (64 * groups) == 0.",
            (
                lambda *args: _chosen(*args, whole=False),
                lambda *args: _chosen(
                    *args, whole=False, key_rows=[m for m in (64, 128, 192, 256) if m >= 64 * args[1]]
                ),
            ),
        ),
        (
            "query_rows_first",
            "A tile of fewer keys is preferred, for its query_rows or for its area. What costs bytes is a small block "
            "of keys: take the largest key_rows first.",
            (
                lambda *args: _chosen(*args, order=lambda pair: pair[::-1]),
                lambda *args: _chosen(*args, order=lambda pair: pair[0] * pair[1]),
                lambda *args: _chosen(*args, order=lambda pair: (pair[0] * pair[1], pair[0])),
                lambda *args: _chosen(*args, order=lambda pair: accumulator_oracle(*pair, args[0], args[1])),
            ),
        ),
        (
            "registers_capped",
            "`registers` was cut off at 255. A chip may have more: take the number that you are given.",
            (
                lambda d, g, registers, memory: _chosen(d, g, min(registers, 255), memory),
                lambda d, g, registers, memory: _chosen(d, g, min(registers - 16, 255) + 16, memory),
            ),
        ),
        (
            "size_left_out",
            "One of the key_rows is never tried: they are 64, 128, 192 and 256.",
            tuple(
                lambda *args, left=left: _chosen(*args, key_rows=[m for m in (64, 128, 192, 256) if m != left])
                for left in (128, 192)
            ),
        ),
        (
            "none_forgotten",
            "Tiles are returned where none fit. Return None there.",
            (lambda *args: _chosen(*args) or (0, 0), lambda *args: _chosen(*args) or (64, 64)),
        ),
        (
            "smaller_query_rows",
            "Of two tiles with the same key_rows the smaller query_rows is taken. The larger one wins.",
            (lambda *args: _chosen(*args, order=lambda pair: (pair[0], -pair[1])),),
        ),
        (
            "fits_strictly",
            "Tiles that fill registers or shared memory exactly were refused, but they fit. Compare with <=.",
            (lambda *args: _chosen(*args, strictly=True),),
        ),
        (
            "shared_memory_ignored",
            "The shared memory is not looked at.",
            (lambda *args: _chosen(*args, memory=False),),
        ),
        (
            "one_stage",
            "shared_memory is asked for one stage. The kernel has two.",
            (lambda *args: _chosen(*args, stages=1),),
        ),
    )


EXERCISE = Exercise(
    id="10.7",
    title="Tiles for five accumulators",
    entries=("accumulator_registers", "shared_memory", "choose_tiles"),
    cases=budget_cases,
    oracle={
        "accumulator_registers": accumulator_oracle,
        "shared_memory": shared_memory_oracle,
        "choose_tiles": choose_oracle,
    },
    hints=(
        "Count elements first. S and dP have key_rows · query_rows each, dK and dV key_rows · head_dim each, dQ "
        "query_rows · head_dim. One float32 element takes one register of one thread.",
        "Divide by the threads, 128 · groups, and round up: -(-elements // (128 * groups)). For 128 keys, 64 queries, "
        "head dimension 128 and two groups that is 224.",
        "Shared memory: 2 · key_rows · head_dim · 2 bytes for K and V; each stage 2 · query_rows · head_dim · 2 for Q "
        "and dO and 2 · query_rows · 4 for L and Δ; key_rows · query_rows · 2 for dS; query_rows · head_dim · 4 for "
        "dQ.",
        "choose_tiles tries all eight pairs, keeps those with key_rows % (64 * groups) == 0 that fit both budgets, and "
        "takes max(fitting, default=None): Python compares tuples from the left.",
    ),
    slips=tuple(
        Slip(name, sentence, formula=tuple(map(_registers, formulas))) for name, sentence, formulas in _sentences()
    ),
)
