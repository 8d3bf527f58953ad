"""What must stand in the machine code of the Hopper kernels, and no result tells: read with exercise 9.6's answer."""

import re

import pytest

from course_lib.checker.specification.catalog import reference
from course_lib.hardware.compiler.views import compile_many
from course_lib.kernels.hopper import flash_fp8 as flash_attention_fp8
from course_lib.kernels.hopper.flash import ARRANGEMENTS, compile_case

CASES = {
    "bf16, head dimension 128": compile_case(128, ARRANGEMENTS[128], "bf16"),
    "fp16, head dimension 64": compile_case(64, ARRANGEMENTS[64], "fp16", keys_after="i32"),
    "e4m3, head dimension 128": compile_case(128, flash_attention_fp8.ARRANGEMENTS[128], "fp8e4nv", keys_after="i32"),
}


@pytest.mark.slow
def test_registers_move_and_softmax_runs_under_products():
    """Without the first the consumers spill; without the second ptxas has moved a wait, and nothing overlaps.

    Where among the exponentials it waits for the output is its own choice, and differs from version to version. But
    each consumer's loop over whole blocks has taken at least 16 of the 64 maxima by then.
    """
    census, _hidden = reference("9.6")
    views = compile_many([{**case.requests()[0], "want_sass": True} for case in CASES.values()])
    for (name, case), view in zip(CASES.items(), views):
        sass = view.sass.replace("QGMMA", "HGMMA")  # the same instruction on 8-bit operands
        products, registers, _spills = census(sass)
        assert products > 0, name
        for task in ("CONSUMER_REGISTERS", "PRODUCER_REGISTERS"):
            assert case.constexprs[task] in registers, (name, registers)
        under_output = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", sass, re.DOTALL)
        early = [text.count("FMNMX") >= 16 for text in under_output]
        assert sum(early) >= case.constexprs["GROUPS"], (name, early)


@pytest.mark.slow
def test_registers_stay_whole_and_masks_are_not_stored():
    """A loop that carries 16-bit numbers takes registers apart and joins them again (PRMT); comparisons that come long
    before their scores are packed into words bit by bit (SEL). Each cost a tenth of the causal kernel's speed."""
    views = compile_many([{**case.requests()[0], "want_sass": True} for case in CASES.values()])
    for name, view in zip(CASES, views):
        instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?\s*(\w+)", view.sass, re.MULTILINE)
        assert instructions.count("HGMMA") + instructions.count("QGMMA") > 0, name
        assert instructions.count("PRMT") < 16 and instructions.count("SEL") < 16, name


def test_eight_bits_use_the_matrix_units_of_eight_bits():
    (view,) = compile_many([{**CASES["e4m3, head dimension 128"].requests()[0], "want_sass": True}])
    assert "QGMMA" in view.sass and "HGMMA" not in view.sass
