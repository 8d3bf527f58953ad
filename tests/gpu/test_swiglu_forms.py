"""The two forms of SwiGLU that chapter 13 reads side by side compute what the course's own kernel does."""

import pytest
import torch

from course_lib.hardware.compiler.cute import missing_cute
from course_lib.kernels.fused.gluon_swiglu import TILE, swiglu_gluon
from course_lib.kernels.fused.swiglu import swiglu_reference


def forms():
    if missing_cute():
        return [swiglu_gluon]
    from course_lib.kernels.fused.cute_swiglu import swiglu_cute

    return [swiglu_gluon, swiglu_cute]


@pytest.mark.parametrize("form", forms(), ids=lambda form: form.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_is_right_to_a_rounding(form, dtype):
    gate, up = (10 * torch.randn(7, TILE, device="cuda", dtype=torch.float64) for _ in range(2))
    gate, up = gate.to(dtype), up.to(dtype)
    exact = swiglu_reference(gate.double(), up.double())
    rounding = torch.finfo(dtype).eps
    assert ((form(gate, up).double() - exact).abs() <= rounding * exact.abs() + 1e-6).all()
