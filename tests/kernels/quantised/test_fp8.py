"""FP8 inputs of attention: what the codes stand for, and what the rotation does to outliers."""

import math

import pytest
import torch

from course_lib.bench.fp8 import quantised
from course_lib.hardware.device import interpreting
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.quantised.fp8 import (
    KEY_ROWS,
    QUERY_ROWS,
    quantise_for_attention,
    quantise_rows_reference,
    quantise_values_reference,
    restored_rows,
    restored_values,
    signed_hadamard,
)

CPU = torch.device("cpu")
needs_interpreter = pytest.mark.skipif(not interpreting(), reason="on a GPU, tests/gpu does this with the kernels")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(*shape, seed=0):
    rare = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.001
    return normal(*shape, seed=seed) + 10 * normal(*shape, seed=seed + 2) * rare


@pytest.mark.parametrize(("length", "rows"), [(1, 64), (64, 64), (65, 64), (200, 128), (257, 128)])
def test_each_block_reaches_448_and_is_restored_to_a_sixteenth(length, rows):
    tensor = normal(2, 3, length, 64)
    quantised = quantise_rows_reference(tensor, None, rows)
    assert quantised.codes.dtype == torch.float8_e4m3fn and quantised.codes.shape == tensor.shape
    assert quantised.scales.shape == (2, 3, math.ceil(length / rows))
    for block in range(quantised.scales.shape[2]):
        codes = quantised.codes[:, :, block * rows : (block + 1) * rows].float()
        assert (codes.abs().amax(dim=(2, 3)) == 448).all()
    off = (restored_rows(quantised, rows) - tensor).abs()
    smallest_step = quantised.scales.max() * 2**-9
    assert (off <= torch.maximum(tensor.abs() / 16, smallest_step)).all()


def test_a_block_of_zeros_stays_zero():
    quantised = quantise_rows_reference(torch.zeros(1, 1, 70, 64), None, 64)
    assert (quantised.scales == 1).all() and (restored_rows(quantised, 64) == 0).all()
    values = quantise_values_reference(torch.zeros(1, 1, 70, 64))
    assert (values.scales == 1).all() and (restored_values(values, 70) == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_rotation_is_orthogonal_and_leaves_scores_alone(head_dim):
    rotation = signed_hadamard(head_dim, 0, CPU, torch.float64)
    assert torch.equal(rotation @ rotation.T, head_dim * torch.eye(head_dim, dtype=torch.float64))
    assert not torch.equal(rotation, signed_hadamard(head_dim, 1, CPU, torch.float64))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_values_come_transposed_in_the_order_of_the_kernels_weights(length):
    """Thread t has the weights of keys 2t, 2t + 1, 2t + 8, 2t + 9; their values must be its places 4t to 4t + 3."""
    value = normal(1, 2, length, 64)
    quantised = quantise_values_reference(value)
    places = math.ceil(length / 16) * 16
    assert quantised.codes.shape == (1, 2, 64, places) and quantised.codes.is_contiguous()
    order = [
        16 * group + key
        for group in range(places // 16)
        for t in range(4)
        for key in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)
    ]
    restored = restored_values(quantised, length)
    for place, key in enumerate(order):
        stored = quantised.codes[..., place].float() * quantised.scales
        assert torch.equal(stored, restored[:, :, key] if key < length else torch.zeros_like(stored))
    step = quantised.scales[:, :, None] * 2**-9
    assert ((restored - value).abs() <= torch.maximum(value.abs() / 16, step)).all()


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float16])
def test_attention_of_what_is_restored_is_close_to_attention(dtype):
    query, key, value = normal(1, 4, 130, 64).to(dtype), normal(1, 2, 300, 64, seed=1).to(dtype), normal(1, 2, 300, 64)
    inputs = quantise_for_attention(query, key, value.to(dtype))
    assert inputs.dtype == dtype
    restored = restored_rows(inputs.query, QUERY_ROWS), restored_rows(inputs.key, KEY_ROWS)
    output = attention_reference(*restored, restored_values(inputs.value, 300))
    exact = attention_reference(query.double(), key.double(), value.double())
    assert (output - exact).norm() / exact.norm() < 0.06
    # Each side's rotation undoes the other's; of one alone nothing would be left.
    wrong = attention_reference(query.float(), restored[1], value)
    assert (wrong - exact).norm() / exact.norm() > 0.5


def test_kernel_and_quantisation_mean_the_same_blocks():
    from course_lib.kernels.hopper.operands import KEYS_OF_A_SCALE, QUERIES_OF_A_SCALE

    assert (QUERIES_OF_A_SCALE.value, KEYS_OF_A_SCALE.value) == (QUERY_ROWS, KEY_ROWS)


def test_the_rotation_pays_where_there_are_outliers_and_costs_nothing_where_there_are_none():
    rotation = signed_hadamard(128, 0, CPU, torch.float32)

    def worst_score(draw, rotated):
        query, key = draw(4, 4, 512, 128), draw(4, 4, 512, 128, seed=7)
        matrix = rotation if rotated else None
        restored = [
            restored_rows(quantise_rows_reference(side, matrix, rows), rows)
            for side, rows in ((query, QUERY_ROWS), (key, KEY_ROWS))
        ]
        return (restored[0] @ restored[1].mT - query @ key.mT).abs().amax(dim=(2, 3)).mean() / math.sqrt(128)

    assert worst_score(with_outliers, True) < worst_score(with_outliers, False) / 1.5
    assert worst_score(normal, True) < 1.25 * worst_score(normal, False)


@needs_interpreter
@pytest.mark.parametrize("length", [64, 130, 256])
def test_one_scale_for_a_head_is_what_the_benchmark_compares_with(length):
    query, key, value = (normal(1, 2, length, 64, seed=seed).half() for seed in range(3))
    inputs = quantised(query, key, value, blocks=False, rotate=False)
    usual = quantise_for_attention(query, key, value, rotate=False)
    for made, meant in zip(inputs[:3], usual[:3]):
        assert made.codes.shape == meant.codes.shape and made.scales.shape == meant.scales.shape
        largest = made.scales.amax(dim=2, keepdim=True)
        assert torch.equal(made.scales, largest.expand_as(made.scales))
        torch.testing.assert_close(largest[..., 0], meant.scales.amax(dim=2))
    restored = restored_rows(inputs.query, QUERY_ROWS), restored_values(inputs.value, length)
    for meant, got in zip((query, value), restored):
        assert (got - meant).norm() < 0.04 * meant.float().norm()


@needs_interpreter
def test_what_fp8_cannot_take_is_refused_in_a_sentence():
    half = torch.zeros(1, 2, 40, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="query has dtype torch.float32; FP8 is made of"):
        quantise_for_attention(half.float(), half.float(), half.float())
    odd = torch.zeros(1, 2, 40, 96, dtype=torch.float16)
    with pytest.raises(ValueError, match="head dimension 96; the FP8 kernel takes 64, 128 and 256"):
        quantise_for_attention(odd, odd, odd)


@needs_interpreter
def test_the_kernel_says_what_it_needs():
    from course_lib.kernels.hopper.flash_fp8 import ARRANGEMENTS, flash_attention_fp8

    half = torch.zeros(1, 2, 40, 64, dtype=torch.float16)
    inputs = quantise_for_attention(half, half, half)
    with pytest.raises(RuntimeError, match="use a Hopper GPU"):
        flash_attention_fp8(inputs)
    with pytest.raises(ValueError, match="inputs is a Tensor; give what quantise_for_attention"):
        flash_attention_fp8(half)
    with pytest.raises(ValueError, match="window is -1"):
        flash_attention_fp8(inputs, window=-1)
    with pytest.raises(ValueError, match="key_rows 256"):
        flash_attention_fp8(inputs, arrangement=ARRANGEMENTS[64]._replace(key_rows=256))
