"""Write a quantity with its unit, three significant digits: 4.25 TB/s, 17.3 µs, 312 TFLOP/s, 228 KiB.

Rates and sizes of data transfers use powers of 1000 (as datasheets do); capacities of caches use KiB and MiB.
"""

import math

DECIMAL_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
BINARY_PREFIXES = ("", "Ki", "Mi", "Gi", "Ti")


def three_digits(value: float) -> str:
    """`value` (0 <= value < about 1000) with three significant digits and no exponent."""
    if value == 0:
        return "0"
    value = float(f"{value:.3g}")  # first, so that 0.9999 is written as 1.00
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def with_prefix(value: float, unit: str, prefixes=DECIMAL_PREFIXES, base: int = 1000) -> str:
    """`value` scaled so that it reads between 1 and `base`, with its prefixed unit."""
    index = 0
    while abs(value) >= base * 0.9995 and index < len(prefixes) - 1:
        value /= base
        index += 1
    return f"{three_digits(value)} {prefixes[index]}{unit}"


def format_bytes(count: float) -> str:
    """Bytes moved: powers of 1000."""
    return with_prefix(count, "B")


def format_capacity(count: float) -> str:
    """Bytes a memory can hold: powers of 1024."""
    return with_prefix(count, "B", BINARY_PREFIXES, 1024)


def format_bandwidth(bytes_per_second: float) -> str:
    return with_prefix(bytes_per_second, "B/s")


def format_flop_rate(flops_per_second: float) -> str:
    return with_prefix(flops_per_second, "FLOP/s")


def format_tick(value: float, unit: str = "", binary: bool = False) -> str:
    """A round number as an axis shows it: 10 G, 500 M, 64 KiB."""
    number, prefixed = with_prefix(value, unit, *((BINARY_PREFIXES, 1024) if binary else ())).split(" ")
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return f"{number} {prefixed}".strip()


def format_seconds(seconds: float) -> str:
    """A duration in s, ms, µs or ns."""
    if seconds == 0:
        return "0 s"
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale * 0.9995:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{three_digits(seconds / 1e-9)} ns"
