"""FLOPs, bytes and the least time that follows from them."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.hardware.datasheets import DATASHEETS, datasheet_for
from course_lib.hardware.roofline import Work, arithmetic_rate, attainable, balance_point, bound, floor_time


@dataclasses.dataclass
class Device:
    """Round numbers: 1 TB/s, 10 TFLOP/s of multiply-adds, 100 TFLOP/s in float16."""

    memory_bandwidth: float = 1e12
    fma_rate: float = 10e12
    matmul_rate: dict = dataclasses.field(default_factory=lambda: {"float16": 100e12})


def test_intensity_is_flops_per_byte():
    assert Work("add", flops=1e9, bytes=12e9).intensity == pytest.approx(1 / 12)
    assert Work("nothing moved", flops=1, bytes=0).intensity == math.inf


@pytest.mark.parametrize("flops, moved", [(-1, 1), (1, -1), (math.nan, 1), (1, math.inf), ("1", 1)])
def test_work_that_cannot_be_is_refused(flops, moved):
    with pytest.raises(ValueError, match="of 'odd' is"):
        Work("odd", flops, moved)


def test_the_balance_points_of_the_datasheets():
    expected = {"A100": 153, "H100": 295, "H200": 206}
    assert {name: round(DATASHEETS[name].balance_point()) for name in expected} == expected


@pytest.mark.parametrize("rate, bandwidth", [(0, 1), (1, 0), (-1, 1), (math.nan, 1)])
def test_a_balance_point_needs_positive_ceilings(rate, bandwidth):
    with pytest.raises(ValueError, match="must be positive"):
        balance_point(rate, bandwidth)


def test_below_the_balance_point_memory_decides_and_above_it_arithmetic():
    assert attainable(5, Device()) == 5e12
    assert attainable(20, Device()) == 10e12
    assert attainable(20, Device(), "float16") == 20e12
    with pytest.raises(ValueError, match="intensity"):
        attainable(-1, Device())


def test_the_least_time_is_the_longer_of_the_two():
    assert floor_time(Work("memory", flops=1e12, bytes=1e12), Device()) == pytest.approx(1.0)
    assert floor_time(Work("compute", flops=100e12, bytes=1e12), Device()) == pytest.approx(10.0)
    assert floor_time(Work("matmul", flops=100e12, bytes=1e11, unit="float16"), Device()) == pytest.approx(1.0)


@given(st.floats(1, 1e15), st.floats(1, 1e15))
def test_rate_at_the_floor_is_the_attainable_rate(flops, moved):
    work = Work("any", flops, moved)
    assert flops / floor_time(work, Device()) == pytest.approx(attainable(work.intensity, Device()), rel=1e-9)
    assert bound(work, Device()) == ("memory" if work.intensity < 10 else "compute")


def test_a_unit_that_was_not_measured_is_named_with_those_that_were():
    with pytest.raises(ValueError, match="float8.*fma, float16"):
        arithmetic_rate(Device(), "float8")


@pytest.mark.parametrize(
    "gpu_name, sheet",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 4090", None),
        (None, None),
    ],
)
def test_a_datasheet_is_found_by_the_drivers_name_and_never_a_variants(gpu_name, sheet):
    found = datasheet_for(gpu_name)
    assert (found.name if found else None) == sheet
