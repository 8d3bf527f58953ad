"""The model of a ring and its barriers: what completes, what waits, and what a read meets."""

import pytest

from course_lib.hardware.ring_model import play_ring


def producer(blocks, stages):
    for block in range(blocks):
        yield "wait", "free", block % stages, block // stages & 1 ^ 1
        yield "load", block % stages, block


def consumer(blocks, stages):
    for block in range(blocks):
        yield "wait", "ready", block % stages, block // stages & 1
        yield "read", block % stages
        yield "arrive", "free", block % stages


RIGHT = {"producer": producer, "consumer": consumer}


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
@pytest.mark.parametrize("read_ticks", [[1], [90], [3, 40], [40, 3, 9]], ids=str)
def test_a_right_schedule_reads_every_block_in_order_whatever_the_speeds(stages, read_ticks):
    played = play_ring(RIGHT, 20, stages, len(read_ticks), 30, read_ticks)
    assert played.pop("ending") == "finished"
    assert (played.pop("copies_at_once"), played.pop("buffers_used")) == (stages, stages)
    assert set(played.values()) == {" ".join(map(str, range(20)))}


def test_a_fresh_barrier_lets_parity_1_pass_and_parity_0_wait():
    for parity, ending in ((1, "finished"), (0, "deadlock: producer at free[0] parity 0")):
        steps = {
            "producer": lambda blocks, stages, parity=parity: [("wait", "free", 0, parity)],
            "consumer": lambda blocks, stages: [],
        }
        assert play_ring(steps, 1, 1, 1, 5, [5])["ending"] == ending


def test_a_phase_completes_only_when_all_consumers_have_arrived():
    def silent_second():
        """The second consumer to be asked for its steps never frees a buffer."""
        asked = []

        def steps(blocks, stages):
            asked.append(True)
            return [step for step in consumer(blocks, stages) if len(asked) == 1 or step[0] != "arrive"]

        return steps

    played = play_ring({"producer": producer, "consumer": silent_second()}, 3, 1, 2, 5, [5, 5])
    assert played["ending"].startswith("deadlock: producer at free[0] parity 0")


def test_a_read_that_meets_a_copy_is_torn_and_one_of_nothing_is_empty():
    def hasty(blocks, stages):
        return [("read", 0)]

    assert play_ring({"producer": lambda b, s: [], "consumer": hasty}, 1, 1, 1, 5, [5])["consumer"] == "empty"
    assert play_ring({"producer": producer, "consumer": hasty}, 1, 1, 1, 50, [50])["consumer"] == "torn"


def test_events_say_who_did_what_when():
    events = []
    play_ring(RIGHT, 2, 1, 1, 20, [5], events)
    kinds = [(who, what, block) for who, what, _buffer, block, _begin, _end in events]
    assert kinds.count(("copy engine", "copy", 0)) == 1 and ("consumer", "read", 1) in kinds
    assert all(begin < end for *_, begin, end in events)


@pytest.mark.parametrize(
    "step",
    [
        ("wait", "full", 0, 0),
        ("wait", "free", 3, 0),
        ("wait", "free", 0, 2),
        ("read", 0),
        "x",
    ],
)
def test_a_step_that_does_not_exist_is_refused_with_those_that_do(step):
    with pytest.raises(ValueError, match="does not exist"):
        play_ring({"producer": lambda b, s: [step], "consumer": consumer}, 1, 1, 1, 5, [5])


def test_a_schedule_without_end_is_stopped():
    def forever(blocks, stages):
        while True:
            yield "load", 0, 0

    assert play_ring({"producer": forever, "consumer": consumer}, 1, 1, 1, 3, [5])["ending"] == "endless"
