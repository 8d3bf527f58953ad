"""What must stand in the compiled decode kernels over quantised caches, and no result tells."""

import dataclasses

import pytest

from course_lib.hardware.compiler.views import compile_many, compile_view
from course_lib.kernels.quantised import fp8_decode, int4_decode

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
    buffers = (case.num_stages - 1) * case.constexprs["BLOCK_N"] * bytes_per_key
    tile = f"<{case.num_stages - 1}x{case.constexprs['BLOCK_N']}x"
    of_tiles = [line for line in view.ttgir.splitlines() if "local_alloc" in line and tile in line]
    assert sum(bytes_of(line) for line in of_tiles) == buffers
    assert not [line for line in flat.ttgir.splitlines() if "local_alloc" in line and tile in line]


def bytes_of(line: str) -> int:
    """Of the shared memory that a line of Triton's GPU dialect allocates: "... !ttg.memdesc<2x64x128xf8E4M3FN, ..."."""
    *sizes, element = line.partition("memdesc<")[2].partition(",")[0].split("x")
    count = {"i8": 1, "f8E4M3FN": 1, "i16": 2, "i32": 4}[element]
    for size in sizes:
        count *= int(size)
    return count


def test_values_of_e4m3_are_read_as_words():
    """Read byte by byte, two tokens of a channel at a time, they were 64 of the loop's instructions, and its brake."""
    view = compile_view(**shipped(fp8_decode, 90).requests()[0], want_sass=True)
    assert "LDS.U8" not in view.sass and "LDS" in view.sass


def test_e4m3_is_converted_by_an_instruction_where_there_is_one():
    old, new = (compile_many(shipped(fp8_decode, arch).requests())[0].ptx for arch in (80, 90))
    assert "cvt.rn.f16x2.e4m3x2" in new and "e4m3" not in old
