"""Exercise 9.1: the schedule of a producer and its consumers, played on a model of the ring and its barriers."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.hardware.ring_model import play_ring


def producer(blocks, stages):
    for block in range(blocks):
        buffer = block % stages
        yield ("wait", "free", buffer, block // stages & 1 ^ 1)
        yield ("load", buffer, block)


def consumer(blocks, stages):
    for block in range(blocks):
        buffer = block % stages
        yield ("wait", "ready", buffer, block // stages & 1)
        yield ("read", buffer)
        yield ("arrive", "free", buffer)


def played(*args):
    """What the ring makes of their schedule: called like the driver, but for the functions."""
    return play_ring({"producer": producer, "consumer": consumer}, *args)


PARITY, IN_THE_PRODUCER, IN_THE_CONSUMER = "block // stages & 1", '"free", buffer, ', '"ready", buffer, '
ASKED, LOADED = f'yield ("wait", "free", buffer, {PARITY} ^ 1)', 'yield ("load", buffer, block)'
WAITED, READ, FREED = (
    f'yield ("wait", "ready", buffer, {PARITY})',
    'yield ("read", buffer)',
    'yield ("arrive", "free", buffer)',
)


def parities(name, parity):
    """The ways of taking another parity: in both functions, or in one."""
    return {
        name: (PARITY, parity),
        f"{name}__producer": (IN_THE_PRODUCER + PARITY, IN_THE_PRODUCER + parity),
        f"{name}__consumer": (IN_THE_CONSUMER + PARITY, IN_THE_CONSUMER + parity),
    }


CHANGES = (
    *edits(
        "The producer waits for free[buffer] to complete the phase of the use that is about to begin. That phase "
        "completes only after the use has been read, so everyone waits for ever. Wait for the phase before, which "
        "has the opposite parity and passes on a fresh barrier.",
        producer_waits_for_its_own_phase=("& 1 ^ 1", "& 1"),
    ),
    *edits(
        "From the second use of a buffer on, the producer waits for the parity of the use that is about to begin, when "
        "it should wait for the use before. Use n may be filled when free[buffer] has completed phase n - 1, whose "
        "parity is the opposite: block // stages & 1 ^ 1. Then the first use needs no exception, since a fresh barrier "
        "lets parity 1 pass.",
        own_phase_after_the_first_use=(
            *('yield ("wait", "free"', 'if block >= stages:\n    yield ("wait", "free"'),
            *("& 1 ^ 1", "& 1"),
        ),
    ),
    *edits(
        "A consumer waits for the phase before its own, which is complete before the copy has begun. So it reads "
        "data that is not there yet. Use n of a buffer is ready when phase n of ready[buffer] is complete.",
        consumer_waits_for_the_phase_before=(IN_THE_CONSUMER + PARITY, f"{IN_THE_CONSUMER}{PARITY} ^ 1"),
    ),
    *edits(
        "The parity changes with every block. A barrier's phase changes when its buffer comes round again, after "
        "`stages` blocks: the phase is block // stages.",
        **parities("parity_of_the_block", "block & 1"),
    ),
    *edits(
        "You took the parity of the buffer's number. The parity depends on how often the buffer has been used: "
        "block // stages & 1.",
        **parities("parity_of_the_buffer", "block % stages & 1"),
    ),
    *edits(
        "The parity stays the same for every use of a buffer. It flips each time the buffer comes round again: "
        "block // stages & 1.",
        **parities("parity_never_changes", "0"),
    ),
    *edits(
        "The parity changes one block too early. Block b is use b // stages of its buffer, so it changes after "
        "`stages` blocks: block // stages & 1.",
        **parities("parity_changes_too_early", "(block + 1) // stages & 1"),
    ),
    *edits(
        "The producer fills a buffer without waiting until its last use is over, so blocks are overwritten before "
        "or while they are read. Wait for free[buffer] before each load.",
        filled_without_asking=(ASKED, "pass"),
    ),
    *edits(
        "The producer asks for a copy first and waits for the buffer afterwards, so a block that is still being read "
        "is overwritten. Wait for free[buffer] before the load.",
        filled_before_asking=('yield ("wait", "free"', f'{LOADED}\nyield ("wait", "free"', LOADED, "pass"),
    ),
    *edits(
        "A consumer reads without waiting for the copy. Wait for ready[buffer] first.",
        read_without_asking=(WAITED, "pass"),
    ),
    *edits(
        "A consumer waits for one buffer and reads the one behind it. Block b lies in buffer b % stages.",
        next_buffer_read=(READ, 'yield ("read", (buffer + 1) % stages)'),
    ),
    *edits(
        "A consumer begins with block 1. It reads blocks 0 to blocks - 1.",
        first_block_not_read=(
            "def consumer(blocks, stages):\n    for block in range(blocks)",
            "def consumer(blocks, stages):\n    for block in range(1, blocks)",
        ),
    ),
    *edits(
        "The consumers free no buffer while blocks are still to come, so the producer waits for ever once all buffers "
        "are full. Arrive at free[buffer] after each read, in the loop.",
        never_freed=(FREED, "pass"),
    ),
    *edits(
        "A consumer frees its buffer before it reads it, so the next copy may overwrite what it is reading. "
        "Arrive at free[buffer] after the read.",
        freed_before_read=(READ, f"{FREED}\n{READ}", FREED, "pass"),
    ),
    *edits(
        "A consumer arrives at free[buffer] twice for one block, so the barrier completes a phase too many and its "
        "parity says the opposite. Arrive once after each read.",
        freed_twice=(FREED, f"{FREED}\n{FREED}"),
    ),
    *edits(
        "All blocks go through one buffer, and the others stay unused: no copy can run ahead. Block b belongs in "
        "buffer b % stages.",
        one_buffer_only=("block % stages", "0", PARITY, "block & 1"),
    ),
    *edits(
        "The producer waits for each copy before it asks for the next, so only one runs at a time. It need not "
        "wait, because the copy arrives at ready[buffer] by itself.",
        waits_for_its_own_copy=(LOADED, f"{LOADED}\n{WAITED}"),
    ),
    *edits(
        "The producer stops one block early, and the consumers wait for the last one for ever. There are `blocks` "
        "loads.",
        last_block_missing=(
            "def producer(blocks, stages):\n    for block in range(blocks)",
            "def producer(blocks, stages):\n    for block in range(blocks - 1)",
        ),
    ),
)


def ring_cases(draw):
    def case(name, blocks, stages, read_ticks, copy_ticks=20):
        return Case(name, (blocks, stages, len(read_ticks), copy_ticks, read_ticks), driver=play_ring)

    stages, blocks = draw.choice((3, 5, 6)), draw.integer(14, 30)
    slow, fast = draw.integer(60, 90), draw.integer(2, 6)
    return [
        case("1 block, 1 buffer, 1 consumer", 1, 1, [5]),
        case("5 blocks, 1 buffer", 5, 1, [5]),
        case("8 blocks, 2 buffers, slow copies", 8, 2, [5], copy_ticks=100),
        case("9 blocks, 3 buffers, a slow consumer", 9, 3, [60]),
        case("8 blocks, 4 buffers, 2 consumers", 8, 4, [10, 10]),
        case("7 blocks, 2 buffers, 2 consumers, the second slow", 7, 2, [5, 50]),
        case(f"{blocks} blocks, {stages} buffers, 2 consumers, the first slow", blocks, stages, [slow, fast]),
        case("3 blocks, 4 buffers: more than needed", 3, 4, [5]),
    ]


EXERCISE = Exercise(
    id="9.1",
    title="The phases of a ring",
    entries=("producer", "consumer"),
    cases=ring_cases,
    oracle=played,
    models=(model_of(played, CHANGES, (producer, consumer)),),
    hints=(
        "Number the uses of each buffer from 0: block b is use b // stages of buffer b % stages.",
        "When block b has landed, ready[buffer] has completed phase b // stages. A consumer waits for the parity of "
        "that phase.",
        "Before the producer fills use n of a buffer, use n - 1 must be over, so free[buffer] must have completed "
        "phase n - 1. That has the opposite parity of n. For n = 0 it is parity 1, which passes on a fresh barrier.",
        'The producer: ("wait", "free", buffer, phase ^ 1), ("load", buffer, block). A consumer: ("wait", "ready", '
        'buffer, phase), ("read", buffer), ("arrive", "free", buffer), with phase = block // stages & 1 in both.',
    ),
    mistakes=(
        Mistake(
            "consumers_wait_for_ever",
            "The producer has finished, and a consumer waits at ready[buffer] for a parity that never comes. Play one "
            "buffer by hand, step by step, and write down which phase each barrier has completed: who waits for which "
            "parity, and who arrives how often?",
            when=lambda case, seen, got: isinstance(got, dict) and got["ending"].startswith("deadlock: consumer"),
        ),
    ),
)
