"""Attention in 8 bits on a Hopper GPU: as right as its operands let it be, on any shape, and fast."""

import pytest
import torch

from course_lib.hardware.device import machine
from course_lib.hardware.timing import measure
from course_lib.kernels.attention.reference import attention_reference, visible_keys
from course_lib.kernels.quantised.fp8 import (
    KEY_ROWS,
    QUERY_ROWS,
    quantise_for_attention,
    quantise_rows,
    quantise_rows_reference,
    quantise_values,
    quantise_values_reference,
    restored_rows,
    restored_values,
    signed_hadamard,
)
from tests.gpu.attention_claims import assert_agrees, ragged_shapes

pytestmark = pytest.mark.skipif(
    machine().tier == "none" or machine().compute_capability != (9, 0), reason="needs a Hopper GPU (sm_90)"
)

MASKS = [{}, {"causal": True}, {"causal": True, "window": 77}, {"window": 100}]


def fp8(*arguments, **options):
    from course_lib.kernels.hopper.flash_fp8 import flash_attention_fp8

    return flash_attention_fp8(*arguments, **options)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def restored(inputs, length):
    """The inputs that the codes stand for, in float64."""
    rows = restored_rows(inputs.query, QUERY_ROWS), restored_rows(inputs.key, KEY_ROWS)
    return [tensor.double() for tensor in (*rows, restored_values(inputs.value, length))]


def with_rounded_weights(query, key, value, *, causal=False, window=None):
    """Attention in float64 but for the weights, rounded to e4m3: the error that 8-bit weights cost."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    visible = visible_keys(query.shape[2], key.shape[2], causal=causal, window=window, device="cuda")
    scores = scores.masked_fill(~visible, float("-inf"))
    largest = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - largest.where(largest.isfinite(), torch.zeros_like(largest)))
    rounded = (weights.float() * 256).to(torch.float8_e4m3fn).double() / 256
    total = weights.sum(dim=-1, keepdim=True)
    return rounded @ value / total.where(total > 0, torch.ones_like(total))


def assert_right(query, key, value, **options):
    inputs = quantise_for_attention(query, key, value)
    output, lse = fp8(inputs, return_lse=True, **options)
    operands = restored(inputs, key.shape[2])
    exact, exact_lse = attention_reference(*operands, return_lse=True, **options)
    allowed = 2 * (with_rounded_weights(*operands, **options) - exact).norm() + 2**-8 * exact.norm()
    assert output.dtype == query.dtype
    # The matrix units add 8-bit products with fewer bits than float32 has.
    assert_agrees(output, lse, exact, exact_lse, allowed, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_it_agrees_with_float64_on_what_its_codes_stand_for(head_dim, options):
    for batch, heads, key_heads, query_length, key_length in ragged_shapes(head_dim):
        query = normal(batch, heads, query_length, head_dim)
        key, value = (normal(batch, key_heads, key_length, head_dim) for _ in range(2))
        assert_right(query, key, value, **options)


def test_scales_of_blocks_channels_and_heads_end_up_in_their_places():
    """Each block, channel and head a size of its own: one scale taken for another is off by a factor."""
    query, key, value = (normal(2, heads, 600, 128, dtype=torch.float16) for heads in (6, 3, 3))
    rows = torch.arange(600, device="cuda")
    query *= (0.5 + rows // QUERY_ROWS % 3)[:, None] * torch.linspace(0.5, 2, 6, device="cuda")[:, None, None]
    key *= (0.25 + rows // KEY_ROWS % 4)[:, None] * torch.linspace(0.5, 1, 3, device="cuda")[:, None, None]
    value *= torch.linspace(0.01, 10, 128, device="cuda") * torch.linspace(1, 5, 3, device="cuda")[:, None, None]
    for options in MASKS:
        assert_right(query, key, value, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [1, 16, 100, 1000])
def test_the_kernels_quantise_as_their_plain_meaning_does(head_dim, length):
    packed = normal(2, length, 3, 2, head_dim)  # heads after the length in memory
    query, _, value = (packed[:, :, which].transpose(1, 2) for which in range(3))
    for rotation in (None, signed_hadamard(head_dim, 0, query.device, query.dtype)):
        made, meant = (quantise(query, rotation, QUERY_ROWS) for quantise in (quantise_rows, quantise_rows_reference))
        torch.testing.assert_close(made.scales, meant.scales, rtol=1e-5, atol=0)
        # A number within rounding of the middle between two codes may go either way: by one code, and rarely.
        apart = (made.codes.float() - meant.codes.float()).abs()
        assert (apart <= meant.codes.float().abs() / 7 + 2**-9).all() and (apart > 0).float().mean() < 1e-3
    made, meant = quantise_values(value), quantise_values_reference(value)
    assert torch.equal(made.scales, meant.scales)
    assert (made.codes.float() != meant.codes.float()).float().mean() < 1e-3


def test_a_hundred_runs_give_the_same_bits():
    inputs = quantise_for_attention(*(normal(4, 16, 1000, 128) for _ in range(3)))
    first = fp8(inputs, causal=True)
    assert all(torch.equal(fp8(inputs, causal=True), first) for _ in range(100))


def test_outliers_cost_less_with_the_rotation():
    rare = torch.rand(1, 8, 2048, 128, device="cuda") < 0.001
    query, key, value = (normal(1, 8, 2048, 128) + 10 * normal(1, 8, 2048, 128) * rare for _ in range(3))
    exact = attention_reference(query.double(), key.double(), value.double())
    plain, rotated = (quantise_for_attention(query, key, value, rotate=rotate) for rotate in (False, True))
    assert (fp8(rotated) - exact).norm() < (fp8(plain) - exact).norm() / 1.3


def test_it_outruns_bfloat16_by_half_at_head_dimension_256():
    from course_lib.kernels.hopper.flash import flash_attention_hopper

    query, key, value = (normal(1, 8, 16384, 256) for _ in range(3))
    inputs = quantise_for_attention(query, key, value)
    wide = measure(lambda: flash_attention_hopper(query, key, value), seconds=0.2).median
    assert measure(lambda: fp8(inputs), seconds=0.2).median < wide / 1.4
