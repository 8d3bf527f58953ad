"""The model of programs that share tiles: what they add, what a slot holds when, and who waits for whom."""

import pytest

from course_lib.hardware.stream_model import play_stream_k
from course_lib.kernels.products.stream_k import stream_k_plan


def program(number, programs, tiles, steps):
    """The library's plan, as actions."""
    plan = stream_k_plan(tiles, steps, programs)
    for tile, begin, end, owned in plan[number] if number < len(plan) else ():
        yield "multiply", tile, begin, end
        if not owned:
            yield from (("leave",), ("barrier",), ("raise",))
            continue
        other = number
        while begin > 0:
            other -= 1
            yield from (("wait", other), ("add", other))
            begin = min(segment.begin for segment in plan[other] if segment.tile == tile)
        yield "store", tile


def played(actions, programs=2, tiles=1, steps=4, room=2, step_ticks=(1,), store_ticks=(1, 2, 3, 90)):
    return play_stream_k({"program": actions}, programs, tiles, steps, room, step_ticks, store_ticks)


def of_two(first, second):
    """A function that gives program 0 and program 1 these actions."""
    return lambda number, *sizes: (first, second)[number]


LEFT = [("multiply", 0, 0, 2), ("leave",), ("barrier",), ("raise",)]
OWNED = [("multiply", 0, 2, 4), ("wait", 0), ("add", 0), ("store", 0)]


@pytest.mark.parametrize("programs, tiles, steps", [(1, 1, 1), (4, 9, 4), (7, 2, 5), (5, 1, 3), (16, 3, 8)])
@pytest.mark.parametrize("room", [1, 2, 99])
@pytest.mark.parametrize("step_ticks", [[1], [70, 1], [1, 1, 50]], ids=str)
def test_the_librarys_plan_makes_every_tile_whole_on_any_machine(programs, tiles, steps, room, step_ticks):
    told = played(program, programs, tiles, steps, room, step_ticks)
    assert told["ending"] == "finished" and told["parts"] == "at most one of each program"
    assert set(told["tiles"].values()) == {"whole"}


def test_a_flag_that_is_raised_before_the_barrier_shows_a_slot_that_is_half_stored():
    """ROCm/triton#745: one warp raised the flag while another had not stored yet."""
    told = played(of_two([LEFT[0], LEFT[1], LEFT[3], LEFT[2]], OWNED))
    assert told["tiles"] == {"tile 0": "a part was read that was not stored yet"}


def test_a_slot_that_nobody_has_stored_is_poison():
    told = played(of_two(LEFT, [step for step in OWNED if step[0] != "wait"]))
    assert told["tiles"] == {"tile 0": "a part was read that was not stored yet"}


def test_one_that_waits_for_a_program_without_room_waits_for_ever():
    first = [("multiply", 0, 0, 2), ("wait", 1), ("add", 1), ("store", 0)]
    second = [("multiply", 0, 2, 4), ("leave",), ("barrier",), ("raise",)]
    assert played(of_two(first, second), room=2)["ending"] == "finished"
    told = played(of_two(first, second), room=1)
    assert told["ending"] == "deadlock: program 0 waits for program 1; there is no room for program 1"
    assert told["steps"] == {"program 0": "0 to 1", "program 1": "none"}


@pytest.mark.parametrize(
    "second, told",
    [
        ([*OWNED[:3], ("add", 0), OWNED[3]], "has the steps 0, 1 more than once"),
        ([OWNED[0], OWNED[3]], "lacks the steps 0, 1"),
        ([("multiply", 0, 3, 4), *OWNED[1:]], "lacks the steps 2"),
        ([*OWNED, ("store", 0)], "stored 2 times"),
        (OWNED[:3], "never stored"),
        ([("add", 1), ("store", 0)], "a part was read that was not stored yet"),
        ([("wait", 0), ("add", 0), OWNED[0], ("store", 0)], "whole"),
    ],
)
def test_what_is_wrong_with_a_tile_is_told(second, told):
    assert played(of_two(LEFT, second))["tiles"] == {"tile 0": told}


def test_steps_of_two_tiles_in_one_sum_are_told():
    told = played(lambda *sizes: [("multiply", 0, 0, 1), ("multiply", 1, 0, 1), ("store", 1)], 1, 2, 1)
    assert told["tiles"] == {"tile 0": "never stored", "tile 1": "steps of other tiles are in it"}


def test_two_parts_of_one_program_are_told():
    told = played(of_two([*LEFT, ("multiply", 0, 0, 1), ("leave",)], OWNED))
    assert told["parts"] == "program 0 left 2"


def test_events_say_who_did_what_when():
    events = []
    play_stream_k({"program": program}, 2, 1, 4, 2, [3], [1, 1, 1, 5], events)
    assert (0, ("multiply", 0, 0, 2), 0, 6) in events and (1, ("store", 0)) in [event[:2] for event in events]
    assert all(begin < end for *_, begin, end in events)


@pytest.mark.parametrize("action", [("wait",), ("wait", "0"), ("leave", 0), "leave", ("stop",), ("store", 0.0)])
def test_an_action_that_does_not_exist_is_refused_with_those_that_do(action):
    with pytest.raises(ValueError, match="does not exist; allowed are"):
        played(lambda *sizes: [action])


@pytest.mark.parametrize("action", [("multiply", 0, 0, 5), ("multiply", 0, 3, 2), ("multiply", 1, 0, 1), ("wait", 2),
                                    ("add", -1), ("store", 1)])  # fmt: skip
def test_a_program_tile_or_step_that_does_not_exist_ends_the_play(action):
    assert played(lambda *sizes: [action])["ending"].startswith("impossible: program 0 ")


def test_a_program_that_gives_no_actions_is_refused():
    with pytest.raises(ValueError, match="returns a list"):
        played(lambda *sizes: None)


def test_a_program_without_end_is_stopped():
    def forever(*sizes):
        while True:
            yield "multiply", 0, 0, 1

    assert played(forever)["ending"] == "endless"
