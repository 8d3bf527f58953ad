"""The simulated GPU keeps two clocks, and has the traps that it was given."""

import pytest

from course_lib.hardware.simulated_gpu import on_a_simulated_gpu

QUIET = {"kernel": 5.0, "launch": 8.0, "copies": 4, "compile": 0.0, "warm": 1.0, "slower": 0.0, "rises": 1.0,
         "between": 0.0, "seed": 1}  # fmt: skip


def played(function, **traps):
    return on_a_simulated_gpu({"time_kernel": function}, {**QUIET, **traps})


def time_of(replays, copies):
    """µs for each kernel of a graph, by events."""

    def function(device):
        replay = device.capture(copies)
        replay()
        begin = device.event()
        for _ in range(replays):
            replay()
        end = device.event()
        device.synchronize()
        return begin.elapsed_time(end) / (replays * len(copies))

    return function


def test_launches_hide_nothing_shorter_than_they_are_and_a_graph_takes_them_away():
    def by_the_host(device):
        device.synchronize()
        start = device.now()
        for _ in range(200):
            device.launch()
        device.synchronize()
        return (device.now() - start) / 200

    assert played(by_the_host) == pytest.approx(8.0, rel=0.02), "the launch, not the kernel"
    assert played(by_the_host, launch=1.0) == pytest.approx(5.0, rel=0.02)
    assert played(time_of(10, [0, 1, 2, 3] * 25)) == pytest.approx(5.0, rel=0.01)


def test_each_trap_is_seen():
    every, one = [0, 1, 2, 3] * 25, [0] * 100
    assert played(time_of(10, one), warm=0.5) == pytest.approx(2.5, rel=0.01)
    assert played(time_of(10, every), warm=0.5) == pytest.approx(5.0, rel=0.01), "another copy comes in between"
    assert played(time_of(1, every), slower=0.5, rises=1e9) == pytest.approx(7.5, rel=0.01)
    assert played(time_of(10, every), between=1000.0) > 5.2


def test_an_event_is_known_after_a_synchronisation_alone_and_to_half_a_microsecond():
    def early(device):
        begin, end = device.event(), device.event()
        return begin.elapsed_time(end)

    with pytest.raises(RuntimeError, match="synchronize first"):
        played(early)

    def late(device):
        begin = device.event()
        device.launch()
        end = device.event()
        device.synchronize()
        return begin.elapsed_time(end)

    assert 2 * played(late) == int(2 * played(late))


def test_copies_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="0 to 3"):
        played(lambda device: device.launch(4))
