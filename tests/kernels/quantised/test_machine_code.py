"""What must stand in the compiled decode kernels over quantised caches, and no result tells."""

import dataclasses
import math
import re

import pytest

from course_lib.hardware.compiler.views import compile_many, compile_view
from course_lib.kernels.quantised import fp8_decode, int4_decode
from course_lib.kernels.quantised.tiles import WARPS

GROUP_OF_4 = "bf16 128 group 4 "


def shipped(module, arch):
    return next(case for case in module.compile_cases() if case.archs == (arch,) and case.label.startswith(GROUP_OF_4))


@pytest.mark.slow
@pytest.mark.parametrize("module, bytes_per_key", [(fp8_decode, 256), (int4_decode, 128)], ids=["e4m3", "int4"])
@pytest.mark.parametrize("arch", [80, 90])
def test_two_tiles_of_codes_are_in_flight_and_no_number_is_kept_in_their_place(module, bytes_per_key, arch):
    """INT4's page number, handed on over two steps, left no tile in flight: the compiler pipelines no such loop.

    The keys' and values' bytes, twice; float16 in their place would be two and four times as many.
    """
    case = shipped(module, arch)
    shallow = dataclasses.replace(case, num_stages=1)
    view, flat = compile_many([*case.requests(), *shallow.requests()])
    tiles = re.compile(rf"local_alloc .*memdesc<({case.num_stages - 1}x{WARPS}x\d+x\d+)x(i8|f8E4M3FN|i16),")
    held = [math.prod(map(int, sizes.split("x"))) * (2 if element == "i16" else 1)
            for sizes, element in tiles.findall(view.ttgir)]  # fmt: skip
    assert sum(held) == (case.num_stages - 1) * case.constexprs["BLOCK_N"] * bytes_per_key
    assert not tiles.findall(flat.ttgir)


@pytest.mark.parametrize("module, waits", [(fp8_decode, 4), (int4_decode, 2)], ids=["e4m3", "int4"])
def test_warps_wait_for_each_other_only_where_tiles_are_handed_on(module, waits):
    """Twice a step for the buffers, and in pages of e4m3 twice for the pages' numbers; for no maximum, weight or scale.

    Of one head's keys in a tile that all warps shared, the INT4 loop had seven.
    """
    view = compile_view(**shipped(module, 90).requests()[0], want_sass=True)
    assert longest_loop(view.sass).count("BAR.SYNC") == waits
    assert "LDSM.16.MT88.4" in longest_loop(view.sass)  # values: two tokens of a channel come side by side


def longest_loop(sass: str) -> str:
    """The longest piece of machine code that a jump backwards repeats."""
    lines = sass.splitlines()
    labels = {match[1]: number for number, line in enumerate(lines) if (match := re.match(r"\s*(\.L_x_\d+):", line))}
    loops = [(labels[target[1]], number) for number, line in enumerate(lines)
             if (target := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and labels[target[1]] < number]  # fmt: skip
    begin, end = max(loops, key=lambda loop: loop[1] - loop[0])
    return "\n".join(lines[begin : end + 1])


def test_e4m3_is_converted_by_an_instruction_where_there_is_one():
    old, new = (compile_many(shipped(fp8_decode, arch).requests())[0].ptx for arch in (80, 90))
    assert "cvt.rn.f16x2.e4m3x2" in new and "e4m3" not in old
