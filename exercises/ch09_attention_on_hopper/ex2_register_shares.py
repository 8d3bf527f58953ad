"""Exercise 9.2: the registers of one multiprocessor, shared out among its warp groups."""

from __future__ import annotations

from course_lib.checker import Case, Exercise
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.model import Model, Slip, Slips

REGISTERS = 65_536  # of a multiprocessor


GROUP_THREADS = 128


def live(s: Slips, key_rows, head_dim, item_bytes):
    """The registers in use as they are counted with these slips."""
    weights = 0 if s("weights_forgotten") else 4 if s("weights_in_float32") else item_bytes
    scores = 0 if s("scores_forgotten") else 4
    wide = 0 if s("accumulator_forgotten") else item_bytes if s("accumulator_in_item_bytes") else 4
    count = (key_rows * (scores + weights) + head_dim * wide) // 8
    return count * (4 if s("bytes_for_registers") else 1) * (2 if s("rows_of_the_tile") else 1)


LIVE = (
    Slip("scores_forgotten", "The scores are missing: key_rows / 2 registers."),
    Slip("accumulator_forgotten", "The accumulator is missing: head_dim / 2 registers."),
    Slip(
        "weights_forgotten",
        "The weights are missing. With the overlap they are needed together with the next block's scores: key_rows "
        "· item_bytes / 8 registers more.",
    ),
    Slip(
        "weights_in_float32",
        "The weights were counted with 4 bytes. They are cast to the inputs' type before the second product.",
    ),
    Slip(
        "accumulator_in_item_bytes",
        "The accumulator was counted in the inputs' type. It is float32, whatever the inputs are.",
    ),
    Slip("bytes_for_registers", "You counted bytes. A register holds four of them."),
    Slip(
        "rows_of_the_tile",
        "Your result is twice as large as it should be. A group's 64 rows are held by 128 threads: did you count "
        "64 threads, or 128 rows?",
    ),
)


def starting(s: Slips, groups):
    """The registers at the start as they are computed with these slips."""
    threads = 32 if s("warps_for_groups") else 64 if s("half_a_group") else GROUP_THREADS
    count = REGISTERS // (threads * groups)
    if not s("no_multiple_of_eight"):
        count = count // 8 * 8
    most = 256 if s("more_than_a_thread_may_have") else 255 if s("capped_between_two_units") else 248
    return min(most, count)


STARTING = (
    Slip(
        "warps_for_groups",
        "You counted 32 threads for each group, but that is one warp. A warp group has four warps, 128 threads.",
    ),
    Slip("half_a_group", "You counted 64 threads for each group. A warp group has four warps, 128 threads."),
    Slip(
        "no_multiple_of_eight",
        "The registers at the start are not rounded down to a multiple of 8, the unit in which they are handed out.",
    ),
    Slip(
        "capped_between_two_units",
        "With two groups the result is 255, which is no multiple of 8. The multiple of 8 below it is 248.",
    ),
    Slip(
        "more_than_a_thread_may_have",
        "With two groups there would be 256 registers for each thread at the start, and a kernel is compiled for "
        "255 at most: the multiple of 8 below that is 248.",
    ),
)


def legal(s: Slips, registers):
    """Whether these registers are taken for legal with these slips."""
    groups = len(registers)
    pool = 512 if s("pool_of_the_chip") else groups * starting(s, groups)
    least = 0 if s("least_registers_forgotten") else 25 if s("least_registers_refused") else 24
    most = 255 if s("most_registers_refused") else 10**6 if s("most_registers_forgotten") else 256
    unit = 1 if s("multiples_of_eight_forgotten") else 8
    several = any if s("one_of_them_is_enough") else all
    each = several(count % unit == 0 and least <= count <= most for count in registers)
    if s("sum_must_be_equal"):
        return each and sum(registers) == pool
    if s("all_of_them_refused"):
        return each and sum(registers) < pool
    return each and (s("sum_forgotten") or sum(registers) <= pool)


LEGAL = (
    Slip("one_of_them_is_enough", "Registers were taken for legal where one group's are. All of them must be."),
    Slip(
        "sum_forgotten",
        "Each number is legal by itself, but together they may be more than the launch took. Compare their sum "
        "with groups · starting_registers(groups).",
    ),
    Slip(
        "pool_of_the_chip",
        "The sum is compared with all that a multiprocessor has, 65,536 / 128 = 512. Groups can share only what "
        "the launch took: 3 groups started with 3 · 168 = 504. A request for more waits for ever.",
    ),
    Slip("sum_must_be_equal", "You reject shares that leave registers unused. Groups may ask for less than there is."),
    Slip(
        "all_of_them_refused",
        "Shares that take all registers are refused. Together the groups can have what they started with: compare "
        "with <=.",
    ),
    Slip(
        "multiples_of_eight_forgotten",
        "A number that is no multiple of 8 was taken for legal. `setmaxnreg` takes multiples of 8 only.",
    ),
    Slip("least_registers_forgotten", "Fewer than 24 registers were taken for legal. `setmaxnreg` takes 24 to 256."),
    Slip("most_registers_forgotten", "More than 256 registers were taken for legal. `setmaxnreg` takes 24 to 256."),
    Slip("least_registers_refused", "24 registers were refused. `setmaxnreg` takes 24 to 256, both ends included."),
    Slip(
        "most_registers_refused",
        "256 registers were refused. `setmaxnreg` takes 24 to 256, both ends included; 248 and 255 are limits at the "
        "start.",
    ),
)


def share(s: Slips, consumers, producer):
    """A consumer's registers as they are computed with these slips."""
    groups = consumers + (0 if s("producer_not_counted") else 1)
    left = 512 if s("shared_pool_of_the_chip") else groups * starting(s, groups)
    if not s("producers_share_forgotten"):
        left -= producer
    count = groups * starting(s, groups) // groups if s("shared_among_all_groups") else left // consumers
    if not s("share_no_multiple_of_eight"):
        count = count // 8 * 8
    return count if s("share_not_capped") else min(256, count)


SHARE = (
    Slip(
        "producer_not_counted",
        "The producer's group is missing from the pool. With two consumers three groups start with 3 · 168 in all.",
    ),
    Slip(
        "producers_share_forgotten",
        "What the producer keeps is not taken off. Consumers share what is left of the pool.",
    ),
    Slip(
        "shared_among_all_groups",
        "All groups got the same, what they started with. The producer keeps less, and what it gives back is for the "
        "consumers: take its registers off the pool and share the rest among the consumers alone.",
    ),
    Slip(
        "shared_pool_of_the_chip",
        "You shared out all 512 registers that a multiprocessor has for each of 128 threads. The launch took only "
        "(consumers + 1) · starting_registers(consumers + 1).",
    ),
    Slip(
        "share_no_multiple_of_eight",
        "What a consumer gets is not rounded down to a multiple of 8. `setmaxnreg` takes multiples of 8 only.",
    ),
    Slip("share_not_capped", "One consumer was given more registers than `setmaxnreg` allows: 256 is the most."),
)


def live_registers(key_rows, head_dim, item_bytes):
    return key_rows * (4 + item_bytes) // 8 + head_dim * 4 // 8


def starting_oracle(groups):
    return min(248, REGISTERS // (GROUP_THREADS * groups) // 8 * 8)


def legal_oracle(registers):
    return legal(Slips(), registers)


def consumer_oracle(consumers, producer):
    left = (consumers + 1) * starting_oracle(consumers + 1) - producer
    return min(256, left // consumers // 8 * 8)


def register_cases(draw):
    groups, head_dim = draw.integer(5, 9), draw.choice((80, 96, 192))
    loose = 8 * draw.integer(4, 10)
    start, legal, live, share = EXERCISE.entries
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
        Case("24, 24, 24: the least that a thread can name", ([24, 24, 24],), legal),
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
        Case("4 consumers, the producer keeps 32: 480, where the chip has 512", (4, 32), share),
        Case("1 consumer, the producer keeps 24: more than a thread can name", (1, 24), share),
    ]


SHARES = Contract(
    lambda draw, *, consumers, producer: (consumers, producer),
    choices={"consumers": (1, 2, 3, 4, 6), "producer": (24, 32, 40, 56)},
    says={"consumers": "`consumers` equal groups"},
    entry="registers_of_a_consumer",
    most=9,
)

EXERCISE = Exercise(
    id="9.2",
    title="Sharing out the registers",
    entries=("starting_registers", "is_legal", "live_registers", "registers_of_a_consumer"),
    cases=register_cases,
    contracts=(SHARES,),
    models=(
        Model(starting, STARTING),
        Model(legal, LEGAL, entry="is_legal"),
        Model(live, LIVE, entry="live_registers"),
        Model(share, SHARE, entry="registers_of_a_consumer"),
    ),
    oracle={
        "starting_registers": starting_oracle,
        "is_legal": legal_oracle,
        "live_registers": live_registers,
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
)
