"""The product for Hopper: what can be said of it without a GPU. Gluon has no interpreter."""

import re

import pytest
import torch

from course_lib.hardware.compiler.views import compile_many
from course_lib.kernels.products import hopper_fp8
from course_lib.kernels.products.hopper import compile_cases
from course_lib.kernels.products.hopper_limits import matrices_refusal


def matrix(rows, columns, dtype=torch.bfloat16, stride=None):
    return torch.zeros(rows, stride or columns, dtype=dtype)[:, :columns]


@pytest.mark.parametrize(
    "x,weight,out,said",
    [
        (matrix(4, 64, torch.float32), matrix(8, 64, torch.float32), matrix(4, 8, torch.float32), "torch.float32"),
        (matrix(4, 64), matrix(8, 64), matrix(4, 8, torch.float32), "out torch.float32"),
        (matrix(4, 64, stride=68), matrix(8, 64), matrix(4, 8), "x has stride 68"),
        (matrix(4, 60), matrix(8, 60), matrix(4, 8), "x has stride 60"),
        (matrix(4, 64), matrix(12, 64), matrix(4, 12), "out has stride 12"),
        (matrix(4, 72)[:, 4:68], matrix(8, 64), matrix(4, 8), "x begins 8 bytes after a multiple of 16"),
    ],
)
def test_what_the_copy_engine_cannot_move_is_refused_in_a_sentence(x, weight, out, said):
    refusal = matrices_refusal(x, weight, None, out)
    assert said in refusal.reason and refusal.error is ValueError


@pytest.mark.parametrize("rows,inner,stride", [(1, 64, 64), (7, 60, 64), (0, 64, 64), (300, 8, 8)])
def test_ragged_sizes_are_taken(rows, inner, stride):
    x, weight = matrix(rows, inner, stride=stride), matrix(24, inner, stride=stride)
    assert matrices_refusal(x, weight, None, matrix(rows, 24)) is None


@pytest.mark.slow
def test_the_sums_stay_where_they_are():
    """Where an accumulator is copied between two products, or the compiler waits for each, a tenth of the speed is
    gone, and no result tells."""
    cases = compile_cases()
    for case, view in zip(cases, compile_many([{**case.requests()[0], "want_sass": True} for case in cases])):
        code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", view.sass, re.MULTILINE)
        products = [place for place, line in enumerate(code) if "HGMMA" in line]
        step = len(products) // 2  # of two consumers: 64 numbers of the inner dimension, 16 at a time, for 64 rows
        assert step in (4, 8), case.label
        for first in (0, step):
            last = products[first + step - 1]
            of_step = code[products[first] : last + 1]
            assert not [line for line in of_step if re.search(r"\b(MOV|LDL|STL|DEPBAR)\b", line)], case.label
            wait = next(line for line in code[last:] if "WARPGROUP.DEPBAR" in line)
            assert "0x1" in wait, case.label  # one may still run
        assert sum("WARPGROUP.ARRIVE" in line for line in code) == 2, case.label


@pytest.mark.slow
def test_of_two_products_in_eight_bits_the_second_runs_while_the_first_is_added():
    """Were one under way where the loop begins anew, the compiler would wait after each of its four instructions."""
    (view,) = compile_many([{**hopper_fp8.compile_cases()[0].requests()[0], "want_sass": True}])
    code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", view.sass, re.MULTILINE)
    signs = {"QGMMA": "P", "FFMA": "+", "WARPGROUP.DEPBAR.LE gsb0, 0x1": "1", "WARPGROUP.DEPBAR.LE gsb0, 0x0": "0"}
    text = "".join(sign for line in code for name, sign in signs.items() if name in line)
    # Of both consumers: two products, the first is waited for and added; the second; and one more if they are odd.
    assert re.fullmatch(r"(P{8}1\+{64}0\+{64}P{4}0\+{64}){2}", text), text
