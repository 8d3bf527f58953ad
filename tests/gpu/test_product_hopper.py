"""The products for Hopper against float64: every form and option, ragged sizes, and the same bits at every run."""

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.kernels.gluon.limits import machine_refusal

pytestmark = pytest.mark.skipif(
    interpreting() or machine_refusal(torch.device("cuda")) is not None, reason="needs a Hopper GPU: Gluon"
)
SUM_ROUNDING = 2e-6  # of the sizes that are added, float32 with wgmma's own additions: 16 units in the last place


def meaning(x, weight, bias, activation, residual, gated):
    """(the product and what follows in float64, the sum of the sizes that were added)."""
    result = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        result = result + bias.double()
    if gated:
        gate, up = result.chunk(2, 1)
        gate_size, up_size = size.chunk(2, 1)
        result, size = F.silu(gate) * up, gate_size * up.abs() + up_size * F.silu(gate).abs() + gate_size * up_size
    elif activation == "gelu_tanh":
        result = F.gelu(result, approximate="tanh")
    return (result if residual is None else result + residual.double()), size


SHAPES = [(1, 8, 8), (128, 256, 576), (300, 264, 328), (257, 1048, 1000), (2048, 4096, 1024), (129, 16, 4096)]
OPTIONS = [{}, {"bias"}, {"bias", "gelu"}, {"residual"}, {"gated"}, {"gated", "bias", "residual"}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(sorted(options)) or "plain")
@pytest.mark.parametrize("rows, outer, inner", SHAPES)
def test_every_option_is_right(rows, outer, inner, options, dtype):
    from course_lib.kernels.products.hopper import product_hopper

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator, device="cuda")).to(dtype)

    gated = "gated" in options
    outer *= 2 if gated else 1
    columns = outer // 2 if gated else outer
    wide = normal(rows, inner + 8), normal(outer, inner + 8, scale=inner**-0.5)
    for matrix in wide:
        matrix[:, inner:] = torch.nan  # what lies between the rows is nobody's
    x, weight = (matrix[:, :inner] for matrix in wide)
    given = {"bias": normal(outer) if "bias" in options else None,
             "residual": normal(rows, columns) if "residual" in options else None,
             "activation": "gelu_tanh" if "gelu" in options else None, "gated": gated}  # fmt: skip
    around = torch.full((rows + 2, columns), 7.0, device="cuda", dtype=dtype)
    found = product_hopper(x, weight, out=around[1:-1], **given)
    right, size = meaning(x, weight, **given)
    limits = torch.finfo(dtype)
    allowed = limits.eps * right.abs() / 2 + SUM_ROUNDING * (size + right.abs()) + limits.tiny
    assert ((found.double() - right).abs() <= allowed).all()
    assert (around[[0, -1]] == 7).all()
    assert torch.equal(product_hopper(x, weight, **given), found)


@pytest.mark.parametrize("rows, outer, inner", [(128, 128, 128), (300, 264, 400), (4096, 1024, 2048)])
def test_blocks_of_eight_bits_are_summed_on_two_levels(rows, outer, inner):
    from course_lib.kernels.products.hopper_fp8 import product_fp8

    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.rand(count, inner, generator=generator, device="cuda").to(torch.float8_e4m3fn)
                 for count in (rows, outer))  # fmt: skip
    blocks = -(-inner // 128)
    x_scales = torch.rand(rows, blocks, generator=generator, device="cuda") + 0.5
    weight_scales = torch.rand(-(-outer // 128), blocks, generator=generator, device="cuda") + 0.5
    wide_x = x.double() * x_scales.double().repeat_interleave(128, 1)[:, :inner]
    wide_weight = (
        weight.double() * weight_scales.double().repeat_interleave(128, 0)[:outer].repeat_interleave(128, 1)[:, :inner]
    )
    right = wide_x @ wide_weight.T
    # bfloat16 rounds by 2⁻⁸ at most. A block is four products of 32 numbers and the sum so far, all of them positive
    # here; the matrix units cut each off at about 2⁻¹³ of the largest, which is no more than the sum.
    found = product_fp8(x, weight, x_scales, weight_scales).double()
    assert ((found - right).abs() <= (2**-8 + 4 * 33 * 2**-13) * right).all()
