"""Which product runs for many rows, by architecture, dtype, strides and number of tiles; and that it is one."""

import pytest
import torch

from course_lib.kernels.products import large
from course_lib.kernels.products.epilogue import product_reference
from course_lib.kernels.products.large import choose, large_product
from tests.kernels.fused.cases import in_wider_rows, normal


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(large, "architecture_of", lambda device: 90)
    monkeypatch.setattr(large, "hopper_product_refusal", lambda *arguments: None)


def kernel(rows=8192, outer=8192, inner=64, dtype=torch.float16, **options):
    return choose(torch.zeros(rows, inner, dtype=dtype), torch.zeros(outer, inner, dtype=dtype), **options).kernel


def test_few_tiles_and_many_go_to_the_faster_one(on_hopper):
    assert kernel() == "hopper"
    assert kernel(rows=4096, outer=4096) == "copy engine"
    assert kernel(rows=4096, outer=4096, gated=True) == "hopper"


def test_what_the_copy_engine_cannot_move_and_float32_are_persistent(on_hopper):
    x, weight = torch.zeros(64, 64, dtype=torch.float16), torch.zeros(64, 64, dtype=torch.float16)
    assert choose(x[:, 1:], weight[:, 1:]).kernel == "persistent"
    assert kernel(outer=60) == "persistent"
    assert kernel(dtype=torch.float32) == "persistent"


def test_another_gpu_and_the_interpreter_have_their_own(monkeypatch):
    assert kernel(rows=64, outer=64) == "persistent"
    monkeypatch.setattr(large, "architecture_of", lambda device: 100)
    assert kernel() == "copy engine"  # no Hopper: its kernel refuses
    monkeypatch.setattr(large, "architecture_of", lambda device: 80)
    assert kernel() == "persistent"


def test_it_is_the_product_with_what_stands_behind_it():
    x, weight = in_wider_rows(normal(1, 35, 40)), normal(2, 24, 40)
    options = {"bias": normal(3, 24), "residual": normal(4, 35, 12), "gated": True}
    torch.testing.assert_close(large_product(x, weight, **options), product_reference(x, weight, **options))


def test_an_argument_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="activation is 'relu'"):
        choose(torch.zeros(4, 4), torch.zeros(4, 4), activation="relu")
