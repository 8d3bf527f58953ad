"""Exercise 9.2: the registers of one multiprocessor, shared out among its warp groups."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Slip
from exercises.topics.formulas import for_arguments

REGISTERS = 65_536  # of a multiprocessor


def live_oracle(key_rows, head_dim, item_bytes):
    return key_rows * (4 + item_bytes) // 8 + head_dim * 4 // 8


GROUP_THREADS = 128


def starting_oracle(groups, *, limit=248, step=8):
    return min(limit, REGISTERS // (GROUP_THREADS * groups) // step * step)


def legal_oracle(registers, *, step=8, least=24, most=256, pool=None):
    pool = len(registers) * starting_oracle(len(registers)) if pool is None else pool(registers)
    return all(count % step == 0 and least <= count <= most for count in registers) and sum(registers) <= pool


def consumer_oracle(consumers, producer, *, most=256, step=8):
    left = (consumers + 1) * starting_oracle(consumers + 1) - producer
    return min(most, left // consumers // step * step)


def register_cases(draw):
    groups, head_dim = draw.integer(5, 9), draw.choice((80, 96, 192))
    loose = 8 * draw.integer(4, 10)
    start, legal, live, share = (
        "starting_registers",
        "is_legal",
        "live_registers",
        "registers_of_a_consumer",
    )
    return [
        Case("3 groups", (3,), start),
        Case("4 groups", (4,), start),
        Case("5 groups: 102.4", (5,), start),
        Case("2 groups: more than a thread may have", (2,), start),
        Case(f"{groups} groups", (groups,), start),
        Case("240, 240, 24: what this chapter's kernel asks for", ([240, 240, 24],), legal),
        Case("160, 160, 160, 32", ([160, 160, 160, 32],), legal),
        Case("240, 240, 32: 512, which the chip has and the launch did not take", ([240, 240, 32],), legal),
        Case("248, 232, 24: as many in all, in other shares", ([248, 232, 24],), legal),
        Case("256, 224, 24: the most that a thread can name", ([256, 224, 24],), legal),
        Case("240, 240, 16: too few for a group", ([240, 240, 16],), legal),
        Case("236, 236, 24: no multiples of 8", ([236, 236, 24],), legal),
        Case("168, 168, 168: nothing given away", ([168, 168, 168],), legal),
        Case("264, 208, 24: more than a thread can name", ([264, 208, 24],), legal),
        Case("240, 240, 240: what three consumers would like", ([240, 240, 240],), legal),
        Case(f"{loose}, {loose}, {loose}: some left over", ([loose, loose, loose],), legal),
        Case("128 keys, head dimension 128, 16 bit", (128, 128, 2), live),
        Case("64 keys, head dimension 256, 16 bit", (64, 256, 2), live),
        Case("128 keys, head dimension 64, 8 bit", (128, 64, 1), live),
        Case(f"128 keys, head dimension {head_dim}, 16 bit", (128, head_dim, 2), live),
        Case("2 consumers, the producer keeps 24", (2, 24), share),
        Case("2 consumers, the producer keeps 32", (2, 32), share),
        Case("2 consumers, the producer keeps 40", (2, 40), share),
        Case("3 consumers, the producer keeps 32", (3, 32), share),
        Case("3 consumers, the producer keeps 24", (3, 24), share),
        Case("1 consumer, the producer keeps 24: more than a thread can name", (1, 24), share),
    ]


def _legal(slip):
    """A slip's formula of `is_legal`: the one function that takes a list."""
    return lambda *args: slip(args[0]) if len(args) == 1 and isinstance(args[0], list) else None


def _starting(slip):
    return lambda *args: slip(args[0]) if len(args) == 1 and isinstance(args[0], int) else None


EXERCISE = Exercise(
    id="9.2",
    title="Sharing out the registers",
    entries=("starting_registers", "is_legal", "live_registers", "registers_of_a_consumer"),
    cases=register_cases,
    oracle={
        "starting_registers": starting_oracle,
        "is_legal": legal_oracle,
        "live_registers": live_oracle,
        "registers_of_a_consumer": consumer_oracle,
    },
    hints=(
        "A group has 128 threads, so g groups with r registers for each thread take 128 · g · r of the 65,536. Round r "
        "down to a multiple of 8, and allow at most 248.",
        "Groups can share only what the launch took: groups · starting_registers(groups) registers, for each of 128 "
        "threads. For 3 groups that is 3 · 168 = 504, not 512.",
        "64 rows over 128 threads means half a row for each thread. Scores: key_rows / 2 registers. "
        "Weights: key_rows · item_bytes / 8. Accumulator: head_dim / 2.",
        "registers_of_a_consumer: (consumers + 1) · starting_registers(consumers + 1), less the producer's, divided by "
        "consumers, down to a multiple of 8, at most 256.",
    ),
    slips=(
        Slip(
            "no_multiple_of_eight",
            "The registers at the start are not rounded down to a multiple of 8, the unit in which they are handed "
            "out.",
            formula=_starting(lambda groups: min(248, REGISTERS // (GROUP_THREADS * groups))),
        ),
        Slip(
            "more_than_a_thread_may_have",
            "With two groups there would be 256 registers for each thread at the start, and a kernel is compiled for "
            "255 at most: the multiple of 8 below that is 248.",
            formula=_starting(lambda groups: starting_oracle(groups, limit=256)),
        ),
        Slip(
            "warps_for_groups",
            "You counted 32 threads for each group, but that is one warp. A warp group has four warps, 128 threads.",
            formula=_starting(lambda groups: min(248, REGISTERS // (32 * groups) // 8 * 8)),
        ),
        Slip(
            "pool_of_the_chip",
            "The sum is compared with all that a multiprocessor has, 65,536 / 128 = 512. Groups can share only what "
            "the launch took: 3 groups started with 3 · 168 = 504. A request for more waits for ever.",
            formula=_legal(lambda registers: legal_oracle(registers, pool=lambda r: 512)),
        ),
        Slip(
            "multiples_of_eight_forgotten",
            "A number that is no multiple of 8 was taken for legal. `setmaxnreg` takes multiples of 8 only.",
            formula=_legal(lambda registers: legal_oracle(registers, step=1)),
        ),
        Slip(
            "least_registers_forgotten",
            "Fewer than 24 registers were taken for legal. `setmaxnreg` takes 24 to 256.",
            formula=_legal(lambda registers: legal_oracle(registers, least=0)),
        ),
        Slip(
            "most_registers_forgotten",
            "More than 256 registers were taken for legal. `setmaxnreg` takes 24 to 256.",
            formula=_legal(lambda registers: legal_oracle(registers, most=10**6)),
        ),
        Slip(
            "sum_must_be_equal",
            "You reject shares that leave registers unused. Groups may ask for less than there is.",
            formula=_legal(
                lambda registers: (
                    legal_oracle(registers) and sum(registers) == len(registers) * starting_oracle(len(registers))
                )
            ),
        ),
        Slip(
            "sum_forgotten",
            "Each number is legal by itself, but together they may be more than the launch took. Compare their sum "
            "with groups · starting_registers(groups).",
            formula=_legal(lambda registers: legal_oracle(registers, pool=lambda r: 10**6)),
        ),
        Slip(
            "weights_forgotten",
            "The weights are missing. With the overlap they are needed together with the next block's scores: key_rows "
            "· item_bytes / 8 registers more.",
            formula=for_arguments(3, lambda keys, dim, item: keys // 2 + dim // 2),
        ),
        Slip(
            "weights_in_float32",
            "The weights were counted with 4 bytes. They are cast to the inputs' type before the second product.",
            formula=for_arguments(3, lambda keys, dim, item: keys + dim // 2),
        ),
        Slip(
            "accumulator_in_item_bytes",
            "The accumulator was counted in the inputs' type. It is float32, whatever the inputs are.",
            formula=for_arguments(3, lambda keys, dim, item: keys * (4 + item) // 8 + dim * item // 8),
        ),
        Slip(
            "bytes_for_registers",
            "You counted bytes. A register holds four of them.",
            formula=for_arguments(3, lambda keys, dim, item: 4 * live_oracle(keys, dim, item)),
        ),
        Slip(
            "rows_of_the_tile",
            "Your result is twice as large as it should be. A group's 64 rows are held by 128 threads: did you count "
            "64 threads, or 128 rows?",
            formula=for_arguments(3, lambda keys, dim, item: 2 * live_oracle(keys, dim, item)),
        ),
        Slip(
            "producer_not_counted",
            "The producer's group is missing from the pool. With two consumers three groups start with 3 · 168 in all.",
            formula=for_arguments(
                2,
                lambda consumers, producer: min(
                    256, (consumers * starting_oracle(consumers) - producer) // consumers // 8 * 8
                ),
            ),
        ),
        Slip(
            "share_not_capped",
            "One consumer was given more registers than `setmaxnreg` allows: 256 is the most.",
            formula=for_arguments(2, lambda consumers, producer: consumer_oracle(consumers, producer, most=10**6)),
        ),
        Slip(
            "share_no_multiple_of_eight",
            "What a consumer gets is not rounded down to a multiple of 8. `setmaxnreg` takes multiples of 8 only.",
            formula=for_arguments(2, lambda consumers, producer: consumer_oracle(consumers, producer, step=1)),
        ),
        Slip(
            "shared_pool_of_the_chip",
            "You shared out all 512 registers that a multiprocessor has for each of 128 threads. The launch took only "
            "(consumers + 1) · starting_registers(consumers + 1).",
            formula=for_arguments(2, lambda consumers, producer: min(256, (512 - producer) // consumers // 8 * 8)),
        ),
    ),
)
