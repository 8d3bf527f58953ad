"""What is logged of kernels whose accesses are known, and that every kernel comes to an end."""

import time

import numpy as np
import pytest
import torch

from course_lib.checker.specification import catalog
from course_lib.hardware.meter import access_log as module
from course_lib.hardware.meter.access_log import log_accesses
from course_lib.hardware.meter.accesses import Race
from tests.hardware.meter.watched_kernels import (
    a_million_idle_programs,
    a_million_programs,
    add,
    add_unmasked,
    copy_tiles,
    endless,
    endless_in_python,
    mismatched,
    shift_in_place,
    total,
)


def seen(log, program=(0, 0, 0), launch=0):
    """Of one program: kind, the argument's parameter and its elements, in order."""
    of = log.launches[launch]
    return [
        (access.kind, of.tensors[number].parameter, sorted(elements.tolist()))
        for access in of.of(program)
        for number, elements in access.inside.items()
    ]


def test_each_program_reads_and_writes_its_block():
    x, y = torch.rand(70), torch.rand(70)
    log = log_accesses(add, x, y)
    (launch,) = log.launches
    assert log.stopped is None and log.function == "add"
    assert launch.kernel == "add_kernel" and launch.grid == (3, 1, 1)
    assert [tensor.parameter for tensor in launch.tensors] == ["x_pointer", "y_pointer", "result_pointer"]
    for number in range(3):
        block = list(range(32 * number, min(70, 32 * number + 32)))
        assert seen(log, (number, 0, 0)) == [
            ("load", "x_pointer", block),
            ("load", "y_pointer", block),
            ("store", "result_pointer", block),
        ]
    assert not any(access.outside for access in launch.accesses) and launch.races() == {}


def test_each_access_has_its_line_of_source():
    texts = [access.text for access in log_accesses(add, torch.rand(8), torch.rand(8)).launches[0].accesses]
    assert [text.split(" = ")[0] for text in texts[:2]] == ["x", "y"]
    assert texts[2] == "tl.store(result_pointer + offsets, x + y, mask=inside)"


def test_a_tile_is_its_rows_and_columns():
    x = torch.rand(8, 12)
    ((_, _, loaded), (_, _, stored)) = seen(log_accesses(copy_tiles, x), (1, 2, 0))
    expected = (np.arange(96).reshape(8, 12)[4:8, 8:12]).ravel().tolist()
    assert loaded == stored == expected


def test_a_view_keeps_its_strides():
    x = torch.rand(20, 3)[:, 1]
    (kind, parameter, elements), *_ = seen(log_accesses(add, x, torch.rand(20)))
    assert (kind, parameter, elements) == ("load", "x_pointer", list(range(0, 60, 3)))


def test_what_reaches_outside_is_told_by_element():
    launch = log_accesses(add_unmasked, torch.rand(70), torch.rand(70)).launches[0]
    for access in launch.of((2, 0, 0)):
        ((number, outside),) = access.outside.items()
        assert outside.tolist() == list(range(70, 96)) and access.inside[number].tolist() == list(range(64, 70))
    assert not any(access.outside for access in launch.of((1, 0, 0)))


def test_watching_changes_nothing():
    x = torch.arange(20.0)
    log_accesses(shift_in_place, x)
    assert torch.equal(x, torch.arange(20.0))


def test_a_race_names_two_programs_and_what_they_did():
    races = log_accesses(shift_in_place, torch.rand(20)).launches[0].races()
    first, second = (0, 0, 0), (1, 0, 0)
    # Both arguments are one tensor, so the race is seen in both.
    assert races[0] == races[1]
    assert races[0] == {
        7: Race(first, "writes", second, "reads"),
        15: Race(second, "writes", (2, 0, 0), "reads"),
    }


def test_two_stores_race_and_two_atomics_do_not():
    stored = log_accesses(total, torch.rand(3), False).launches[0].races()
    assert stored == {1: {0: Race((0, 0, 0), "writes", (2, 0, 0), "writes")}}
    assert log_accesses(total, torch.rand(3), True).launches[0].races() == {}


def test_a_loop_that_loads_for_ever_is_stopped_by_its_loads(monkeypatch):
    monkeypatch.setattr(module, "MOST_ACCESSES", 300)
    log = log_accesses(endless, torch.rand(4), True)
    assert "300 loads and stores" in log.stopped and len(log.launches[0].accesses) == 300


@pytest.mark.parametrize("function, arguments", [(endless, (False,)), (endless_in_python, ())])
def test_a_loop_that_does_nothing_is_stopped_by_the_clock(function, arguments, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 1)
    began = time.monotonic()
    log = log_accesses(function, torch.rand(4), *arguments)
    assert time.monotonic() - began < 20
    assert "still running after 1 second" in log.stopped and log.launches[0].accesses
    assert log_accesses(add, torch.rand(4), torch.rand(4)).stopped is None  # the next one is watched as before


def test_what_a_kernel_raises_is_told_with_its_line():
    log = log_accesses(mismatched, torch.rand(8))
    assert log.stopped.startswith("it raised ValueError: ")
    assert "tl.store(x_pointer + tl.arange(0, 8), values + tl.arange(0, 4))" in log.stopped
    assert [access.kind for access in log.launches[0].accesses] == ["load"]


def test_a_million_programs_are_watched_until_the_limit():
    began = time.monotonic()
    log = log_accesses(a_million_programs, torch.rand(1))
    assert time.monotonic() - began < 30
    assert "1,000,000 programs" in log.stopped and "1,024 were run" in log.stopped
    assert len(log.launches[0].programs()) == 1024


def test_a_million_programs_that_do_nothing_are_ended_by_the_clock(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 1)
    log = log_accesses(a_million_idle_programs, torch.rand(1))
    assert "still running" in log.stopped and log.launches[0].programs() == [(0, 0, 0)]


def test_a_process_of_its_own_logs_the_same(monkeypatch):
    vector_add = catalog.reference("1.3")[0]
    x, y = torch.rand(60)[::2], torch.rand(30)
    here = log_accesses(vector_add, x, y)
    monkeypatch.setattr(module, "interpreting", lambda: False)
    there = log_accesses(vector_add, x, y)
    assert there.stopped is None and seen(there) == seen(here)
    assert there.launches[0].tensors == here.launches[0].tensors
    assert seen(there)[0] == ("load", "x_pointer", list(range(0, 60, 2)))
