"""Products for few rows on a GPU against float64, at a model's sizes: in bf16, fused, in a graph, the same bits."""

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.graphs import captured
from course_lib.kernels.common.dependent import dependent_launches
from course_lib.kernels.products.few_rows import few_rows_product
from course_lib.kernels.products.tiles import FewRowsTiles
from course_lib.kernels.products.workspace import few_rows_workspace
from tests.kernels.fused.cases import normal
from tests.kernels.products.error import assert_right, unscaled

pytestmark = pytest.mark.skipif(interpreting(), reason="needs a GPU: tests/kernels/products has the interpreter's part")
SIZES = [(3072, 2048), (2048, 8192), (16_384, 2048), (1152, 576), (1001, 333), (32, 8192)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 40, 64])
@pytest.mark.parametrize("outer, inner", SIZES)
def test_every_option_is_right_in_every_dtype(outer, inner, rows, dtype):
    x = normal(1, rows, inner, dtype=dtype)
    weight = normal(2, outer, inner, dtype=dtype, scale=inner**-0.5)
    assert_right(x, weight)
    gain = normal(3, outer, dtype=dtype)
    assert_right(x, weight, gain=gain, residual=normal(4, rows, outer, dtype=dtype))
    if outer % 2 == 0:
        assert_right(unscaled(x, 32), weight, epsilon=1e-5, gated=True)


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("rows", [1, 64])
def test_a_graph_replays_products_with_the_same_bits_a_thousand_times(rows, dependent):
    """A part that was added before it was in memory, a counter that was left, or a product that began before the one
    whose result it reads had ended, would show in some of them."""
    if dependent and not dependent_launches():
        pytest.skip("kernels start early from sm_90 on")
    weights = [normal(seed, 2048, 2048, dtype=torch.float16, scale=0.02) for seed in range(8)]
    workspace = few_rows_workspace(rows, weights)
    x, gain = normal(9, rows, 2048, dtype=torch.float16), torch.ones(2048, dtype=torch.float16, device="cuda")

    def products(dependent: bool):
        result, before = x, unscaled(x)
        for weight in weights:
            result, before = few_rows_product(before, weight, epsilon=1e-5, residual=result, gain=gain,
                                              workspace=workspace, dependent=dependent)  # fmt: skip
        return result

    first = products(False).clone()
    replay = captured(lambda: products(dependent))
    for _ in range(1000):
        assert torch.equal(replay(), first)
    assert not workspace.arrivals.any()


def test_offsets_beyond_32_bits_are_right():
    """A weight whose rows lie so far apart that the last begins behind 2³¹ elements."""
    room = torch.empty(2**31 + 2**20, dtype=torch.float16, device="cuda")
    weight = room.as_strided((64, 512), (2**31 // 63 // 16 * 16 + 16, 1))
    weight.normal_(std=0.05)
    tiles = FewRowsTiles(outer=32, inner=128, splits=2, warps=4, stages=3)
    assert_right(normal(1, 5, 512, dtype=torch.float16), weight, tiles=tiles)
