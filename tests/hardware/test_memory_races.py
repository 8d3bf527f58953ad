"""Races in the memory of simulated ranks are found whatever order is played, and right programs have none."""

import pytest
import torch

from course_lib.hardware.memory_races import watch_memory
from course_lib.hardware.simulated_ranks import play_ranks

ORDERS = ("ascending", "descending", 0, 1, 2)


def by_barriers(rank, ranks, x, without):
    """An all-reduce in two phases, without some of the things that order its reads and writes."""
    half = len(x) // ranks
    begin = rank * half
    yield ("write", x, 0)
    if "first" not in without:
        yield ("barrier",)
    total = torch.zeros(half)
    for other in range(ranks):
        total += yield ("read", other, begin, begin + half)
    yield ("write", total, 0 if "place" in without else begin)
    if "second" not in without:
        yield ("barrier",)
    for other in range(ranks):
        yield ("read", other, 0, len(x))
    if "third" not in without:
        yield ("barrier",)


def by_signals(rank, ranks, x, without):
    others = [other for other in range(ranks) if other != rank]
    yield ("write", x, 0)
    for slot, missing in (("written", "first"), ("read", "third")):
        for other in others:
            yield ("signal", other, slot)
        for other in others:
            if missing not in without:
                yield ("wait", other, slot)
        if slot == "written":
            for other in others:
                yield ("read", other, 0, len(x))


def races_of(program, order, ranks, without=()):
    watched, races = watch_memory(ranks, 6)

    def calls(rank, ranks, *xs):
        for call, x in enumerate(xs):
            yield from watched(rank, program(rank, ranks, x, without), call)

    arguments = [(torch.arange(6.0) + rank, torch.arange(6.0) - rank) for rank in range(ranks)]
    played = play_ranks(calls, arguments, order, (6, torch.float32))
    assert played["ending"] == "finished"
    return races


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("program", (by_barriers, by_signals))
def test_what_barriers_or_signals_order_is_no_race(program, order):
    assert not races_of(program, order, 3)
    assert not races_of(program, order, 1, ("first", "second", "third"))


@pytest.mark.parametrize("order", ORDERS)
def test_each_missing_barrier_is_told_in_every_order(order):
    assert races_of(by_barriers, order, 3, ("first",)) == {"read too early"}
    assert races_of(by_barriers, order, 3, ("second",)) == {"sums too early"}
    assert races_of(by_barriers, order, 3, ("third",)) == {"overwritten by the next call"}
    assert races_of(by_barriers, order, 3, ("place",)) == {"overwritten while read"}


@pytest.mark.parametrize("order", ORDERS)
def test_a_signal_that_nobody_waits_for_orders_nothing(order):
    assert races_of(by_signals, order, 2, ("first",)) == {"read too early"}
    assert "overwritten by the next call" in races_of(by_signals, order, 2, ("third",))


def test_numbers_that_are_written_again_as_they_were_are_no_race():
    watched, races = watch_memory(2, 3)

    def program(rank, ranks, x):
        yield ("write", x, 0)
        yield ("barrier",)
        yield ("write", x, 0)
        return (yield ("read", 1 - rank, 0, 3))

    def play(rank, ranks, x):
        return (yield from watched(rank, program(rank, ranks, x), 0))

    played = play_ranks(play, [(torch.ones(3),), (torch.zeros(3),)], 0, (3, torch.float32))
    assert not races and played["results"][0].tolist() == [0.0, 0.0, 0.0]


def test_a_rank_that_reads_until_something_has_come_is_stopped():
    watched, _ = watch_memory(2, 3)

    def program(rank, ranks):
        while True:
            yield ("read", 1 - rank, 0, 3)

    def play(rank, ranks):
        return (yield from watched(rank, program(rank, ranks), 0))

    with pytest.raises(RuntimeError, match="rank 0 of 2 has not come to its end after 1,000 steps"):
        play_ranks(play, [(), ()], "ascending", (3, torch.float32))
