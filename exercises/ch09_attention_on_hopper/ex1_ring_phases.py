"""Exercise 9.1: the schedule of a producer and its consumers, played on a model of the ring and its barriers."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake, Slip
from course_lib.hardware.ring_model import play_ring


def schedule(
    *,
    producer_buffer=lambda block, stages: block % stages,
    consumer_buffer=lambda block, stages: block % stages,
    producer_parity=lambda block, stages: block // stages & 1 ^ 1,
    consumer_parity=lambda block, stages: block // stages & 1,
    producer_waits=True,
    consumer_waits=True,
    copies=lambda blocks: range(blocks),
    waits_for_its_copy=False,
    frees="after",
):
    """A producer and a consumer as `play_ring` takes them, with the classic slips on demand."""

    def producer(blocks, stages):
        for block in copies(blocks):
            buffer = producer_buffer(block, stages)
            if producer_waits:
                yield "wait", "free", buffer, producer_parity(block, stages)
            yield "load", buffer, block
            if waits_for_its_copy:
                yield "wait", "ready", buffer, consumer_parity(block, stages)

    def consumer(blocks, stages):
        for block in range(blocks):
            buffer = consumer_buffer(block, stages)
            if consumer_waits:
                yield "wait", "ready", buffer, consumer_parity(block, stages)
            if frees == "before":
                yield "arrive", "free", buffer
            yield "read", buffer
            if frees == "after":
                yield "arrive", "free", buffer

    return {"producer": producer, "consumer": consumer}


def played(**slips):
    """What the ring makes of a schedule with these slips: called like the driver, but for the functions."""
    return lambda *args: play_ring(schedule(**slips), *args)


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
    oracle=played(),
    hints=(
        "Number the uses of each buffer from 0: block b is use b // stages of buffer b % stages.",
        "When block b has landed, ready[buffer] has completed phase b // stages. A consumer waits for the parity of "
        "that phase.",
        "Before the producer fills use n of a buffer, use n - 1 must be over, so free[buffer] must have completed "
        "phase n - 1. That has the opposite parity of n. For n = 0 it is parity 1, which passes on a fresh barrier.",
        'The producer: ("wait", "free", buffer, phase ^ 1), ("load", buffer, block). A consumer: ("wait", "ready", '
        'buffer, phase), ("read", buffer), ("arrive", "free", buffer), with phase = block // stages & 1 in both.',
    ),
    slips=(
        Slip(
            "producer_waits_for_its_own_phase",
            "The producer waits for free[buffer] to complete the phase of the use that is about to begin. That phase "
            "completes only after the use has been read, so everyone waits for ever. Wait for the phase before, which "
            "has the opposite parity and passes on a fresh barrier.",
            formula=played(producer_parity=lambda block, stages: block // stages & 1),
        ),
        Slip(
            "consumer_waits_for_the_phase_before",
            "A consumer waits for the phase before its own, which is complete before the copy has begun. So it reads "
            "data that is not there yet. Use n of a buffer is ready when phase n of ready[buffer] is complete.",
            formula=(
                played(consumer_parity=lambda block, stages: block // stages & 1 ^ 1),
                played(
                    consumer_parity=lambda block, stages: block // stages & 1 ^ 1,
                    producer_parity=lambda block, stages: block // stages & 1,
                ),
            ),
        ),
        Slip(
            "parity_of_the_block",
            "The parity changes with every block. A barrier's phase changes when its buffer comes round again, after "
            "`stages` blocks: the phase is block // stages.",
            formula=(
                played(
                    producer_parity=lambda block, stages: block & 1 ^ 1, consumer_parity=lambda block, stages: block & 1
                ),
                played(producer_parity=lambda block, stages: block & 1 ^ 1),
                played(consumer_parity=lambda block, stages: block & 1),
            ),
        ),
        Slip(
            "parity_of_the_buffer",
            "You took the parity of the buffer's number. The parity depends on how often the buffer has been used: "
            "block // stages & 1.",
            formula=played(
                producer_parity=lambda block, stages: block % stages & 1 ^ 1,
                consumer_parity=lambda block, stages: block % stages & 1,
            ),
        ),
        Slip(
            "parity_never_changes",
            "The parity stays the same for every use of a buffer. It flips each time the buffer comes round again: "
            "block // stages & 1.",
            formula=(
                played(producer_parity=lambda block, stages: 1, consumer_parity=lambda block, stages: 0),
                played(producer_parity=lambda block, stages: 1),
                played(consumer_parity=lambda block, stages: 0),
            ),
        ),
        Slip(
            "filled_without_asking",
            "The producer fills a buffer without waiting until its last use is over, so blocks are overwritten before "
            "or while they are read. Wait for free[buffer] before each load.",
            formula=played(producer_waits=False),
        ),
        Slip(
            "read_without_asking",
            "A consumer reads without waiting for the copy. Wait for ready[buffer] first.",
            formula=played(consumer_waits=False),
        ),
        Slip(
            "never_freed",
            "The consumers never free a buffer, so the producer waits for ever once all buffers are full. Arrive at "
            "free[buffer] after each read.",
            formula=played(frees="never"),
        ),
        Slip(
            "freed_before_read",
            "A consumer frees its buffer before it reads it, so the next copy may overwrite what it is reading. "
            "Arrive at free[buffer] after the read.",
            formula=played(frees="before"),
        ),
        Slip(
            "one_buffer_only",
            "All blocks go through one buffer, and the others stay unused: no copy can run ahead. Block b belongs in "
            "buffer b % stages.",
            formula=played(
                producer_buffer=lambda block, stages: 0,
                consumer_buffer=lambda block, stages: 0,
                producer_parity=lambda block, stages: block & 1 ^ 1,
                consumer_parity=lambda block, stages: block & 1,
            ),
        ),
        Slip(
            "waits_for_its_own_copy",
            "The producer waits for each copy before it asks for the next, so only one runs at a time. It need not "
            "wait, because the copy arrives at ready[buffer] by itself.",
            formula=played(waits_for_its_copy=True),
        ),
        Slip(
            "last_block_missing",
            "The producer stops one block early, and the consumers wait for the last one for ever. There are `blocks` "
            "loads.",
            formula=played(copies=lambda blocks: range(blocks - 1)),
        ),
    ),
    mistakes=(
        Mistake(
            "consumers_wait_for_ever",
            "The producer has finished, and a consumer waits at ready[buffer] for a parity that never comes. Play one "
            "buffer by hand. When use n has landed, phase n of ready[buffer] is complete, and the consumer waits for "
            "the parity n & 1, with n = block // stages. The producer waits for use n - 1 to be over, so it waits for "
            "the opposite parity.",
            when=lambda case, seen, got: isinstance(got, dict) and got["ending"].startswith("deadlock: consumer"),
        ),
    ),
)
