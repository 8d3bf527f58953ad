"""Exercise 9.1: the schedule of a producer and its consumers, played on a model of the ring and its barriers."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake
from course_lib.checker.specification.model import Model, Slip, Slips
from course_lib.hardware.ring_model import play_ring


def schedule(s: Slips):
    """A producer and a consumer as `play_ring` takes them, with these slips."""

    def buffer_of(block, stages):
        return 0 if s("one_buffer_only") else block % stages

    def phase_of(who, block, stages):
        if s("parity_of_the_block", f"parity_of_the_block__{who}", "one_buffer_only"):
            return block & 1
        if s("parity_of_the_buffer", f"parity_of_the_buffer__{who}"):
            return block % stages & 1
        if s("parity_never_changes", f"parity_never_changes__{who}"):
            return 0
        if s("parity_changes_too_early", f"parity_changes_too_early__{who}"):
            return (block + 1) // stages & 1
        return block // stages & 1

    def producer(blocks, stages):
        for block in range(blocks - 1 if s("last_block_missing") else blocks):
            buffer, parity = buffer_of(block, stages), phase_of("producer", block, stages) ^ 1
            first = s("own_phase_after_the_first_use") and block < stages
            if s("producer_waits_for_its_own_phase", "own_phase_after_the_first_use"):
                parity ^= 1
            wait = [] if first or s("filled_without_asking") else [("wait", "free", buffer, parity)]
            load = [("load", buffer, block)]
            yield from load + wait if s("filled_before_asking") else wait + load
            if s("waits_for_its_own_copy"):
                yield "wait", "ready", buffer, phase_of("consumer", block, stages)

    def consumer(blocks, stages):
        for block in range(1 if s("first_block_not_read") else 0, blocks):
            buffer, parity = buffer_of(block, stages), phase_of("consumer", block, stages)
            if s("consumer_waits_for_the_phase_before"):
                parity ^= 1
            if not s("read_without_asking"):
                yield "wait", "ready", buffer, parity
            read = ("read", (buffer + 1) % stages if s("next_buffer_read") else buffer)
            free = ("arrive", "free", buffer)
            yield from (free, read) if s("freed_before_read") else (read,) if s("never_freed") else (read, free)
            if s("freed_twice"):
                yield free

    return {"producer": producer, "consumer": consumer}


def played(s: Slips, *args):
    """What the ring makes of a schedule with these slips: called like the driver, but for the functions."""
    return play_ring(schedule(s), *args)


def ring_oracle(blocks, stages, consumers, copy_ticks, read_ticks):
    return played(Slips(), blocks, stages, consumers, copy_ticks, read_ticks)


SLIPS = (
    Slip(
        "producer_waits_for_its_own_phase",
        "The producer waits for free[buffer] to complete the phase of the use that is about to begin. That phase "
        "completes only after the use has been read, so everyone waits for ever. Wait for the phase before, which "
        "has the opposite parity and passes on a fresh barrier.",
    ),
    Slip(
        "own_phase_after_the_first_use",
        "From the second use of a buffer on, the producer waits for the parity of the use that is about to begin, when "
        "it should wait for the use before. Use n may be filled when free[buffer] has completed phase n - 1, whose "
        "parity is the opposite: block // stages & 1 ^ 1. Then the first use needs no exception, since a fresh barrier "
        "lets parity 1 pass.",
    ),
    Slip(
        "consumer_waits_for_the_phase_before",
        "A consumer waits for the phase before its own, which is complete before the copy has begun. So it reads "
        "data that is not there yet. Use n of a buffer is ready when phase n of ready[buffer] is complete.",
    ),
    *(
        Slip(
            name,
            "The parity changes with every block. A barrier's phase changes when its buffer comes round again, after "
            "`stages` blocks: the phase is block // stages.",
        )
        for name in ("parity_of_the_block", "parity_of_the_block__producer", "parity_of_the_block__consumer")
    ),
    *(
        Slip(
            name,
            "You took the parity of the buffer's number. The parity depends on how often the buffer has been used: "
            "block // stages & 1.",
        )
        for name in ("parity_of_the_buffer", "parity_of_the_buffer__producer", "parity_of_the_buffer__consumer")
    ),
    *(
        Slip(
            name,
            "The parity stays the same for every use of a buffer. It flips each time the buffer comes round again: "
            "block // stages & 1.",
        )
        for name in ("parity_never_changes", "parity_never_changes__producer", "parity_never_changes__consumer")
    ),
    *(
        Slip(
            f"parity_changes_too_early{who}",
            "The parity changes one block too early. Block b is use b // stages of its buffer, so it changes after "
            "`stages` blocks: block // stages & 1.",
        )
        for who in ("", "__producer", "__consumer")
    ),
    Slip(
        "filled_without_asking",
        "The producer fills a buffer without waiting until its last use is over, so blocks are overwritten before "
        "or while they are read. Wait for free[buffer] before each load.",
    ),
    Slip(
        "filled_before_asking",
        "The producer asks for a copy first and waits for the buffer afterwards, so a block that is still being read "
        "is overwritten. Wait for free[buffer] before the load.",
    ),
    Slip("read_without_asking", "A consumer reads without waiting for the copy. Wait for ready[buffer] first."),
    Slip(
        "next_buffer_read",
        "A consumer waits for one buffer and reads the one behind it. Block b lies in buffer b % stages.",
    ),
    Slip("first_block_not_read", "A consumer begins with block 1. It reads blocks 0 to blocks - 1."),
    Slip(
        "never_freed",
        "The consumers free no buffer while blocks are still to come, so the producer waits for ever once all buffers "
        "are full. Arrive at free[buffer] after each read, in the loop.",
    ),
    Slip(
        "freed_before_read",
        "A consumer frees its buffer before it reads it, so the next copy may overwrite what it is reading. "
        "Arrive at free[buffer] after the read.",
    ),
    Slip(
        "freed_twice",
        "A consumer arrives at free[buffer] twice for one block, so the barrier completes a phase too many and its "
        "parity says the opposite. Arrive once after each read.",
    ),
    Slip(
        "one_buffer_only",
        "All blocks go through one buffer, and the others stay unused: no copy can run ahead. Block b belongs in "
        "buffer b % stages.",
    ),
    Slip(
        "waits_for_its_own_copy",
        "The producer waits for each copy before it asks for the next, so only one runs at a time. It need not "
        "wait, because the copy arrives at ready[buffer] by itself.",
    ),
    Slip(
        "last_block_missing",
        "The producer stops one block early, and the consumers wait for the last one for ever. There are `blocks` "
        "loads.",
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
    oracle=ring_oracle,
    models=(Model(played, SLIPS),),
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
