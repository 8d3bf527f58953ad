"""Quantities with their units, three digits."""

import pytest

from course_lib.hardware.units import (
    format_bandwidth,
    format_bytes,
    format_capacity,
    format_flop_rate,
    format_seconds,
    format_tick,
)


@pytest.mark.parametrize(
    "written, expected",
    [
        (format_bandwidth(4.25e12), "4.25 TB/s"),
        (format_flop_rate(312e12), "312 TFLOP/s"),
        (format_flop_rate(999.9e9), "1.00 TFLOP/s"),
        (format_bytes(0), "0 B"),
        (format_bytes(999), "999 B"),
        (format_capacity(228 * 1024), "228 KiB"),
        (format_capacity(50 * 2**20), "50.0 MiB"),
        (format_seconds(17.3e-6), "17.3 µs"),
        (format_seconds(1.5), "1.50 s"),
        (format_seconds(0.9999e-3), "1.00 ms"),
        (format_seconds(250e-9), "250 ns"),
        (format_seconds(0), "0 s"),
        (format_tick(1e10), "10 G"),
        (format_tick(2**20, "B", binary=True), "1 MiB"),
        (format_tick(100), "100"),
    ],
)
def test_a_quantity_reads_with_its_unit(written, expected):
    assert written == expected
