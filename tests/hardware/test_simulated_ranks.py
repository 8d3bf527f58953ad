"""Simulated GPUs: messages, shared memory and signals in chosen orders, with races and deadlocks that are told."""

import pytest
import torch

from course_lib.hardware.simulated_ranks import play_ranks

ORDERS = ("ascending", "descending", *range(20))
MEMORY = (3, torch.float32)


def numbers(ranks):
    return [(torch.arange(3.0) + 10 * rank,) for rank in range(ranks)]


def one_shot(rank, ranks, x, rounds=1, before=True, after=True):
    """An all-reduce by reading everybody's numbers, with both of its barriers or without one."""
    for _ in range(rounds):
        yield ("write", x, 0)
        if before:
            yield ("barrier",)
        total = torch.zeros_like(x)
        for other in range(ranks):
            total += yield ("read", other, 0, 3)
        if after:
            yield ("barrier",)
        x = total
    return x


def ring(rank, ranks, x):
    total, travelling = x.clone(), x
    for _ in range(ranks - 1):
        travelling = yield ("exchange", (rank + 1) % ranks, travelling, (rank - 1) % ranks)
        total = total + travelling
    return total


def sends_first(rank, ranks, x):
    yield ("send", (rank + 1) % ranks, x)
    return (yield ("receive", (rank - 1) % ranks))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", (1, 2, 4))
def test_sums_are_right_in_every_order(order, ranks):
    expected = sum(x for (x,) in numbers(ranks))
    played = play_ranks(one_shot, [(x, 2) for (x,) in numbers(ranks)], order, MEMORY)
    assert played["ending"] == "finished"
    assert all(torch.equal(result, expected * ranks) for result in played["results"])
    assert played["received"] == [2 * 12 * (ranks - 1)] * ranks
    played = play_ranks(ring, numbers(ranks), order, buffered=False)
    assert played["ending"] == "finished" and all(torch.equal(result, expected) for result in played["results"])


@pytest.mark.parametrize("kind", ("all_reduce", "all_gather", "all_to_all"))
@pytest.mark.parametrize("order", ORDERS)
def test_a_tensor_may_be_used_again_after_a_step_of_all_ranks(order, kind):
    """What others got was read when they went on, so a rank that cleared its buffer before had sent zeros."""

    def clears(rank, ranks, x):
        buffer = x.clone()
        got = yield (kind, [buffer] * ranks if kind == "all_to_all" else buffer)
        buffer.zero_()
        return got if kind == "all_reduce" else sum(got)

    played = play_ranks(clears, numbers(3), order)
    assert all(torch.equal(result, sum(x for (x,) in numbers(3))) for result in played["results"])


def wrong_in(program, arguments, **options):
    right = [play_ranks(program, [(*one, 3) for one in arguments], order, MEMORY)["results"][0] for order in ORDERS]
    played = [play_ranks(program, [(*one, 3, *options.values()) for one in arguments], order, MEMORY)
              for order in ORDERS]  # fmt: skip
    assert all(one["ending"] == "finished" for one in played)
    return [order for order, one, good in zip(ORDERS, played, right)
            if not all(torch.equal(result, good) for result in one["results"])]  # fmt: skip


def test_a_missing_barrier_is_found_before_and_after_the_reads():
    assert {"ascending", "descending"} <= set(wrong_in(one_shot, numbers(3), before=False, after=True))
    assert wrong_in(one_shot, numbers(3), before=True, after=False)
    assert not wrong_in(one_shot, numbers(3), before=True, after=True)


def test_sends_that_wait_for_their_receivers_wait_for_ever_in_a_ring():
    assert play_ranks(sends_first, numbers(3), "ascending")["ending"] == "finished"
    told = play_ranks(sends_first, numbers(3), "ascending", buffered=False)["ending"]
    assert told.startswith("rank 0 waits for its message to be received by rank 1; rank 1 waits")


def test_a_rank_that_dies_is_named_by_those_that_wait():
    told = play_ranks(ring, numbers(3), "ascending", dies={1: 1})["ending"]
    assert told == "rank 1 died; rank 2 waits for a message of rank 1, which died"
    told = play_ranks(one_shot, numbers(2), "ascending", MEMORY, dies={0: 1})["ending"]
    assert told == "rank 0 died; rank 1 waits at barrier for rank 0, which died"


def test_a_rank_that_returns_early_is_named():
    def leaves(rank, ranks):
        if rank == 1:
            return
        yield ("barrier",)

    assert play_ranks(leaves, [(), ()])["ending"] == "rank 0 waits at barrier for rank 1, which returned"


def test_ranks_that_disagree_are_told():
    def other_shapes(rank, ranks):
        yield ("all_reduce", torch.zeros(rank + 1))

    def other_steps(rank, ranks):
        yield ("barrier",) if rank else ("all_gather", torch.zeros(1))

    assert play_ranks(other_shapes, [(), ()])["ending"] == "ranks disagree: rank 0 adds [1], rank 1 adds [2]"
    assert (
        play_ranks(other_steps, [(), ()])["ending"] == "ranks disagree: rank 0 is at all_gather, rank 1 is at barrier"
    )


@pytest.mark.parametrize("order", ORDERS)
def test_all_gather_and_all_to_all_take_parts_of_any_size(order):
    def program(rank, ranks):
        gathered = yield ("all_gather", torch.full((rank,), rank))
        parts = yield ("all_to_all", [torch.full((rank * other,), rank) for other in range(ranks)])
        return [len(part) for part in gathered], [len(part) for part in parts]

    results = play_ranks(program, [(), (), ()], order)["results"]
    assert results == [([0, 1, 2], [0, rank, 2 * rank]) for rank in range(3)]


@pytest.mark.parametrize("order", ORDERS)
def test_signals_are_counted_for_each_sender_and_slot(order):
    def program(rank, ranks):
        if rank == 0:
            yield ("signal", 1, 5)
            yield ("signal", 1, 5)
            return "signalled"
        yield ("wait", 0, 5)
        yield ("wait", 0, 5)
        return "waited"

    assert play_ranks(program, [(), ()], order)["results"] == ["signalled", "waited"]

    def other_slot(rank, ranks):
        yield ("signal", 1, 4) if rank == 0 else ("wait", 0, 5)

    assert play_ranks(other_slot, [(), ()], order)["ending"] == "rank 1 waits for a signal of rank 0, which returned"


@pytest.mark.parametrize("step", [("sent", 0), ("send", 7, torch.zeros(1)), ("send", 0, 3.0), ("read", 0, 0, 1),
                                  ("wait", 0), ("all_to_all", [torch.zeros(1)]), None])  # fmt: skip
def test_steps_that_do_not_exist_are_refused(step):
    def program(rank, ranks):
        yield step

    with pytest.raises(ValueError, match="of rank 0 does not exist among 2 ranks"):
        play_ranks(program, [(), ()])


@pytest.mark.parametrize("order", ORDERS)
def test_slices_of_the_memory_are_written_and_read(order):
    def program(rank, ranks):
        yield ("write", torch.tensor([rank + 1.0]), rank)
        yield ("barrier",)
        return (yield ("read", 1 - rank, 0, 2))

    first, second = play_ranks(program, [(), ()], order, (2, torch.float32))["results"]
    assert first[0].isnan() and first[1] == 2 and second[0] == 1 and second[1].isnan()


@pytest.mark.parametrize("step", [("read", 0, 0, 3), ("read", 0, -1, 1), ("write", torch.zeros(2), 1),
                                  ("write", torch.zeros(2), "a")])  # fmt: skip
def test_slices_beyond_the_memory_are_refused(step):
    def program(rank, ranks):
        yield step

    with pytest.raises(ValueError, match="does not exist"):
        play_ranks(program, [(), ()], memory=(2, torch.float32))


def test_ranks_may_have_devices_of_their_own():
    def program(rank, ranks, x):
        yield ("write", x, 0)
        yield ("barrier",)
        total = yield ("read", 1 - rank, 0, 2)
        total += yield ("exchange", 1 - rank, x, 1 - rank)
        total += yield ("all_reduce", x)
        return total

    arguments, memory = [(torch.tensor([1.0, 2.0]),), (torch.tensor([10.0, 20.0]),)], (2, torch.float32)
    played = play_ranks(program, arguments, memory=memory, devices=["cpu", "cpu"])
    assert [result.tolist() for result in played["results"]] == [[31.0, 62.0], [13.0, 26.0]]
    # On the device "meta" there are shapes and no numbers: what comes from elsewhere must have been moved.
    arguments = [tuple(tensor.to("meta") for tensor in one) for one in arguments]
    played = play_ranks(program, arguments, memory=memory, devices=["meta", "meta"])
    assert all(result.device.type == "meta" for result in played["results"])


def test_a_program_that_is_no_generator_is_refused():
    with pytest.raises(TypeError, match="rank 0 is no generator but returned int at once: it must yield"):
        play_ranks(lambda rank, ranks: 3, [(), ()])


def test_a_step_is_told_as_it_was_given():
    def program(rank, ranks):
        yield "barrier"

    with pytest.raises(ValueError, match="the step 'barrier' of rank 0"):
        play_ranks(program, [()])


def test_a_program_that_never_ends_is_told():
    def program(rank, ranks):
        while True:
            yield ("signal", 0, 0)

    assert play_ranks(program, [()])["ending"] == "endless"
