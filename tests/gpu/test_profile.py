"""`profile` on a GPU: its time, ncu's figures where they may be read, and bytes that agree with the meter's."""

import time

import pytest
import torch

from course_lib.hardware.profile import counters, profile
from course_lib.kernels.memory.copy import copy
from course_lib.kernels.memory.strided_copy import strided_copy


def counted_or_skipped(function, *arguments):
    try:
        return counters.counted(function, arguments, {})
    except counters.NoCounters as reason:
        pytest.skip(str(reason))


def test_the_card_has_a_measured_share_and_counters_or_the_reason_why_not():
    card = profile(copy, torch.ones(2**21, device="cuda"))
    assert card.seconds and 0 < card.roof_share < 1.5
    assert bool(card.counters) != bool(card.counters_missing), card
    assert card.kernels[0].name == "copy_kernel" and card.kernels[0].view.registers > 0
    if card.counters:
        assert "copy_kernel" in card.counters and "time" in card.counters["copy_kernel"]


def test_the_card_is_there_within_ten_seconds_with_ncu_and_four_without():
    """Without ncu most of the time is another process's imports; with it, ncu's own repetitions."""
    x = torch.ones(2**18, device="cuda")
    profile(copy, x)
    for limit, asked in ((4, False), (10, True)):
        began = time.perf_counter()
        profile(copy, x, counters=asked)
        assert time.perf_counter() - began < limit


@pytest.mark.parametrize("function, stride, bytes_each", [(copy, 1, 4), (strided_copy, 8, 32)])
def test_bytes_read_are_those_of_the_meter_within_five_per_cent(function, stride, bytes_each):
    whole = torch.ones(2**24, device="cuda")
    x = whole[::stride] if stride > 1 else whole
    ((_, seen),) = counted_or_skipped(function, x)
    assert seen["dram__bytes_read.sum"] == pytest.approx(bytes_each * x.numel(), rel=0.05)


def test_registers_are_those_that_the_compiler_told():
    x = torch.ones(2**20, device="cuda")
    ((_, seen),) = counted_or_skipped(copy, x)
    told = profile(copy, x[: 2**16], counters=False).kernels[0].view.registers
    assert abs(seen["launch__registers_per_thread"] - told) <= 8  # the driver hands registers out in eights
