"""CuTe's DSL, where it is installed: compiled without a GPU, with loads as wide as the layout says."""

import pytest
import torch

from course_lib.hardware.compiler import cute
from course_lib.hardware.compiler.cute import compile_cute, missing_cute
from course_lib.hardware.compiler.views import compile_view
from course_lib.kernels.fused.gluon_swiglu import TILE, swiglu_gluon, swiglu_gluon_kernel

POINTERS = dict.fromkeys(("gate_pointer", "up_pointer", "out_pointer"), "*fp16")


def tensors(numbers=2 * TILE):
    return [torch.zeros(numbers, dtype=torch.float16) for _ in range(3)]


@pytest.mark.skipif(missing_cute() is not None, reason=str(missing_cute()))
@pytest.mark.parametrize("arch", [80, 90, "sm_90"])
def test_a_thread_moves_its_eight_numbers_at_once(arch):
    from course_lib.kernels.fused import cute_swiglu

    kernel = compile_cute(cute_swiglu.swiglu, *cute_swiglu.arguments(*tensors()), arch=arch)
    assert kernel.load_widths == {16: 2} and kernel.store_widths == {16: 1} and kernel.local_accesses == 0
    with pytest.raises(ValueError, match="they must be alike"):
        cute_swiglu.arguments(*tensors(TILE + 8))
    with pytest.raises(ValueError, match="sm_80 and newer"):
        compile_cute(cute_swiglu.swiglu, arch=75)


@pytest.mark.parametrize("arch", [80, 90])
def test_gluon_moves_as_wide(arch):
    view = compile_view(swiglu_gluon_kernel, POINTERS, {"TILE": TILE}, arch=arch)
    assert view.load_widths == {16: 2} and view.store_widths == {16: 1}


def test_without_the_package_the_refusal_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cute, "missing_cute", lambda: "CuTe's DSL is not installed: `pip install nvidia-cutlass-dsl`")
    with pytest.raises(RuntimeError, match="pip install nvidia-cutlass-dsl"):
        compile_cute(print)


def test_numbers_that_fill_no_tile_are_refused():
    with pytest.raises(ValueError, match="a multiple of 1024 numbers"):
        swiglu_gluon(torch.zeros(3), torch.zeros(3))
