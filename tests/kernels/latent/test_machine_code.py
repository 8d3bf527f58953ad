"""What must stand in the machine code of latent decode on Hopper, and no result tells."""

import re

import pytest

from course_lib.hardware.compiler.views import compile_many
from course_lib.kernels.latent.hopper_kernel import compile_cases


@pytest.mark.slow
def test_products_are_asked_for_in_groups_and_not_waited_for_one_by_one():
    """A product whose operands find no registers makes ptxas wait after each of them: 132 waits instead of 10."""
    cases = compile_cases()
    for case, view in zip(cases, compile_many([{**case.requests()[0], "want_sass": True} for case in cases])):
        products, waits = view.sass.count("HGMMA"), view.sass.count("WARPGROUP.DEPBAR")
        # Scores: 36 steps of 16 numbers, in three places. Output: 4 steps of 16 keys, in two places of each group's
        # loop, one before the left group's loop and one after it.
        assert products == 3 * 36 + (2 + 2 + 1 + 1) * 4
        assert waits <= products // 8
        assert view.spill_bytes <= case.max_spill_bytes
        moved = re.findall(r"USETMAXREG\.\w+(?:\.\w+)* +(?:U?P\d+, *)?(?:0x)?(\w+)", view.sass)
        assert {int(number, 16) for number in moved} >= {24, 240}
