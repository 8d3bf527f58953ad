"""Exercise 9.2: the registers of one multiprocessor, shared out among its warp groups."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, edits, model_of
from course_lib.checker.specification.contract import Contract

REGISTERS, GROUP_THREADS = 65_536, 128  # of a multiprocessor and of a warp group


def live_registers(key_rows, head_dim, item_bytes):
    return key_rows * (4 + item_bytes) // 8 + head_dim * 4 // 8


LIVE = (
    *edits(
        "The scores are missing: key_rows / 2 registers.", scores_forgotten=("(4 + item_bytes)", "(0 + item_bytes)")
    ),
    *edits(
        "The accumulator is missing: head_dim / 2 registers.", accumulator_forgotten=("head_dim * 4", "head_dim * 0")
    ),
    *edits(
        "The weights are missing. With the overlap they are needed together with the next block's scores: key_rows "
        "· item_bytes / 8 registers more.",
        weights_forgotten=("(4 + item_bytes)", "(4 + 0)"),
    ),
    *edits(
        "The weights were counted with 4 bytes. They are cast to the inputs' type before the second product.",
        weights_in_float32=("(4 + item_bytes)", "(4 + 4)"),
    ),
    *edits(
        "The accumulator was counted in the inputs' type. It is float32, whatever the inputs are.",
        accumulator_in_item_bytes=("head_dim * 4", "head_dim * item_bytes"),
    ),
    *edits("You counted bytes. A register holds four of them.", bytes_for_registers=("// 8", "// 2")),
    *edits(
        "Your result is twice as large as it should be. A group's 64 rows are held by 128 threads: did you count "
        "64 threads, or 128 rows?",
        rows_of_the_tile=("key_rows * (", "2 * key_rows * (", "head_dim * 4", "2 * head_dim * 4"),
    ),
)


def starting_registers(groups):
    return min(248, REGISTERS // (GROUP_THREADS * groups) // 8 * 8)


STARTING = (
    *edits(
        "You counted 32 threads for each group, but that is one warp. A warp group has four warps, 128 threads.",
        warps_for_groups=("GROUP_THREADS", "32"),
    ),
    *edits(
        "You counted 64 threads for each group. A warp group has four warps, 128 threads.",
        half_a_group=("GROUP_THREADS", "64"),
    ),
    *edits(
        "The registers at the start are not rounded down to a multiple of 8, the unit in which they are handed out.",
        no_multiple_of_eight=("groups) // 8 * 8", "groups)"),
    ),
    *edits(
        "With two groups the result is 255, which is no multiple of 8. The multiple of 8 below it is 248.",
        capped_between_two_units=("248", "255"),
    ),
    *edits(
        "With two groups there would be 256 registers for each thread at the start, and a kernel is compiled for "
        "255 at most: the multiple of 8 below that is 248.",
        more_than_a_thread_may_have=("248", "256"),
    ),
)


def is_legal(registers):
    pool = len(registers) * starting_registers(len(registers))
    each = all(count % 8 == 0 and 24 <= count <= 256 for count in registers)
    return each and sum(registers) <= pool


LEGAL_CHANGES = (
    *edits(
        "Registers were taken for legal where one group's are. All of them must be.",
        one_of_them_is_enough=("all", "any"),
    ),
    *edits(
        "Each number is legal by itself, but together they may be more than the launch took. Compare their sum "
        "with groups · starting_registers(groups).",
        sum_forgotten=("each and sum(registers) <= pool", "each"),
    ),
    *edits(
        "The sum is compared with all that a multiprocessor has, 65,536 / 128 = 512. Groups can share only what "
        "the launch took: 3 groups started with 3 · 168 = 504. A request for more waits for ever.",
        pool_of_the_chip=("len(registers) * starting_registers(len(registers))", "512"),
    ),
    *edits(
        "You reject shares that leave registers unused. Groups may ask for less than there is.",
        sum_must_be_equal=("<= pool", "== pool"),
    ),
    *edits(
        "Shares that take all registers are refused. Together the groups can have what they started with: compare "
        "with <=.",
        all_of_them_refused=("<= pool", "< pool"),
    ),
    *edits(
        "A number that is no multiple of 8 was taken for legal. `setmaxnreg` takes multiples of 8 only.",
        multiples_of_eight_forgotten=("count % 8 == 0 and 24", "24"),
    ),
    *edits(
        "Fewer than 24 registers were taken for legal. `setmaxnreg` takes 24 to 256.",
        least_registers_forgotten=("24 <= count", "0 <= count"),
    ),
    *edits(
        "More than 256 registers were taken for legal. `setmaxnreg` takes 24 to 256.",
        most_registers_forgotten=("count <= 256", "count"),
    ),
    *edits(
        "24 registers were refused. `setmaxnreg` takes 24 to 256, both ends included.",
        least_registers_refused=("24 <= count", "25 <= count"),
    ),
    *edits(
        "256 registers were refused. `setmaxnreg` takes 24 to 256, both ends included; 248 and 255 are limits at the "
        "start.",
        most_registers_refused=("<= 256", "<= 255"),
    ),
)
LEGAL = model_of(is_legal, LEGAL_CHANGES, entry="is_legal")


def legal_oracle(registers):
    return LEGAL.right(registers)  # True or False says too little to tell small changes of `is_legal` apart


def registers_of_a_consumer(consumers, producer):
    left = (consumers + 1) * starting_registers(consumers + 1) - producer
    return min(256, left // consumers // 8 * 8)


SHARE = (
    *edits(
        "The producer's group is missing from the pool. With two consumers three groups start with 3 · 168 in all.",
        producer_not_counted=("consumers + 1", "consumers"),
    ),
    *edits(
        "What the producer keeps is not taken off. Consumers share what is left of the pool.",
        producers_share_forgotten=("starting_registers(consumers + 1) - producer", "starting_registers(consumers + 1)"),
    ),
    *edits(
        "All groups got the same, what they started with. The producer keeps less, and what it gives back is for the "
        "consumers: take its registers off the pool and share the rest among the consumers alone.",
        shared_among_all_groups=("left // consumers", "starting_registers(consumers + 1)"),
    ),
    *edits(
        "You shared out all 512 registers that a multiprocessor has for each of 128 threads. The launch took only "
        "(consumers + 1) · starting_registers(consumers + 1).",
        shared_pool_of_the_chip=("(consumers + 1) * starting_registers(consumers + 1)", "512"),
    ),
    *edits(
        "What a consumer gets is not rounded down to a multiple of 8. `setmaxnreg` takes multiples of 8 only.",
        share_no_multiple_of_eight=("consumers // 8 * 8", "consumers"),
    ),
    *edits(
        "One consumer was given more registers than `setmaxnreg` allows: 256 is the most.",
        share_not_capped=("min(256, left // consumers // 8 * 8)", "left // consumers // 8 * 8"),
    ),
)


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
        model_of(starting_registers, STARTING),
        LEGAL,
        model_of(live_registers, LIVE, entry="live_registers"),
        model_of(registers_of_a_consumer, SHARE, entry="registers_of_a_consumer"),
    ),
    oracle={
        "starting_registers": starting_registers,
        "is_legal": legal_oracle,
        "live_registers": live_registers,
        "registers_of_a_consumer": registers_of_a_consumer,
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
