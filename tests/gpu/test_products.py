"""The portable ladder of products and the MLP in one kernel against float64: ragged sizes, 16 bits, the same bits."""

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.products.fused_mlp import fused_mlp, fused_mlp_reference
from course_lib.kernels.products.naive import naive_product
from course_lib.kernels.products.persistent import persistent_product
from course_lib.kernels.products.split_k import split_k_product
from course_lib.kernels.products.stream_k import stream_k_product
from course_lib.kernels.products.tiled import ordered, pipelined, tiled, tiled_product
from course_lib.kernels.products.tma import FIRST_WITH_COPY_ENGINE, tma_product

pytestmark = pytest.mark.skipif(interpreting(), reason="needs a GPU: large shapes")
SHAPES = [(1, 8, 8), (128, 256, 576), (300, 264, 328), (257, 1048, 1000), (2048, 4096, 1024), (129, 16, 4096)]
STEPS = {
    "naive": naive_product,
    **{it.__name__: lambda x, weight, it=it: tiled_product(x, weight, it(x)) for it in (tiled, ordered, pipelined)},
    "persistent": persistent_product,
    "copy engine": tma_product,
    "split K": split_k_product,
    "stream K": stream_k_product,
}
SUM_ROUNDING = 2e-6  # of the sizes that are added: 16 units in the last place of float32


def normal(*shape, scale=1.0, dtype=torch.float16):
    return (scale * torch.randn(*shape, device="cuda")).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rows, outer, inner", SHAPES)
def test_every_step_is_right(rows, outer, inner, step, dtype):
    arch = architecture_of(torch.device("cuda"))
    if step == "copy engine" and arch < FIRST_WITH_COPY_ENGINE or dtype == torch.bfloat16 and arch < 80:
        pytest.skip("this GPU lacks it")
    torch.manual_seed(0)
    x, weight = normal(rows, inner, dtype=dtype), normal(outer, inner, scale=inner**-0.5, dtype=dtype)
    found = STEPS[step](x, weight)
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    allowed = torch.finfo(dtype).eps * exact.abs() / 2 + SUM_ROUNDING * sizes + torch.finfo(dtype).tiny
    assert ((found.double() - exact).abs() <= allowed).all()
    assert torch.equal(STEPS[step](x, weight), found)


@pytest.mark.parametrize("rows, inner, hidden, columns", [(1, 8, 8, 8), (1000, 128, 512, 128), (300, 256, 1000, 256)])
def test_an_mlp_in_one_kernel_is_right(rows, inner, hidden, columns):
    torch.manual_seed(0)
    x, first = normal(rows, inner), normal(hidden, inner, scale=inner**-0.5)
    given = [x, first, normal(columns, hidden, scale=hidden**-0.5), normal(hidden), normal(columns)]

    def error(function, x, first, second, first_bias, second_bias):
        return (function(x, first, second, first_bias=first_bias, second_bias=second_bias).double() - exact).abs().max()

    exact = fused_mlp_reference(*(it.double() for it in given[:3]), first_bias=given[3].double(),
                                second_bias=given[4].double())  # fmt: skip
    assert error(fused_mlp, *given) <= 2 * error(fused_mlp_reference, *given)
