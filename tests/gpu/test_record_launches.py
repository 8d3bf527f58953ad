"""On a GPU, launches are recorded at the place through which every compiled kernel goes."""

import pytest
import torch
import triton
import triton.language as tl

from course_lib.hardware.meter.traffic import MeterUnavailable, TrafficMeter, record_launches


@triton.jit
def double_kernel(pointer, length, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pointer + lanes, 2 * tl.load(pointer + lanes, mask=lanes < length), mask=lanes < length)


@triton.autotune([triton.Config({"BLOCK": 64})], key=[])
@triton.jit
def tuned_kernel(pointer, length, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(pointer + lanes, 2 * tl.load(pointer + lanes, mask=lanes < length), mask=lanes < length)


def test_launches_are_recorded_with_kernel_and_grid():
    x = torch.ones(100, device="cuda")
    with record_launches() as launches:
        double_kernel[(2,)](x, 100, BLOCK=64)
        tuned_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]), 1)](x, 100)
        double_kernel.warmup(x, 100, BLOCK=32, grid=(1,))
        torch.relu(x)
    double_kernel[(2,)](x, 100, BLOCK=64)
    assert [(launch.kernel, launch.grid) for launch in launches] == [
        ("double_kernel", (2, 1, 1)),
        ("tuned_kernel", (2, 1, 1)),
    ]
    assert launches[0].file == __file__
    assert (x == 8).all()


def test_the_meter_refuses_and_names_the_interpreter():
    with pytest.raises(MeterUnavailable, match="TRITON_INTERPRET=1"):
        with TrafficMeter():
            pass
