"""Attention in 4 bits against exact attention: what two levels of scales and the keys' mean are worth, and the ends."""

import functools

import pytest
import torch
import triton.runtime.interpreter as triton_interpreter

from course_lib.hardware.device import interpreting
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.common.tiles import Tiles
from course_lib.kernels.quantised import fp4_attention as module
from course_lib.kernels.quantised.fp4 import quantise_nvfp4_reference, restore_fp4_reference
from course_lib.kernels.quantised.fp4_attention import (
    Fp4Inputs,
    fp4_attention,
    fp4_attention_reference,
    quantise_for_fp4,
)

needs_interpreter = pytest.mark.skipif(not interpreting(), reason="on a GPU, tests/gpu does this with the kernels")
# The kernel that quantises has tests of its own, and is slow in the interpreter: a program for each row.
in_pytorch = functools.partial(quantise_for_fp4, quantise=quantise_nvfp4_reference)
# Of a kernel against its meaning: a weight in the middle of two codes becomes either, and few lie there.
BY_TIES = 2e-3


def tensors(batch, query_heads, key_heads, query_length, key_length, head_dim, dtype=torch.float32, spread=1.0, seed=0):
    """Queries that make scores of that standard deviation; values with a mean of half theirs."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(query_heads, query_length), (key_heads, key_length), (key_heads, key_length)]
    query, key, value = (torch.randn(batch, *shape, head_dim, generator=generator) for shape in shapes)
    return [tensor.to(dtype) for tensor in (spread * query, key, value + 0.5)]


def error(found, exact) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def exact_attention(query, key, value, **options):
    return attention_reference(query.double(), key.double(), value.double(), **options)


def restored(inputs: Fp4Inputs):
    """What the codes stand for, as attention takes it: so only the weights' rounding is left to err."""
    query, key = (restore_fp4_reference(rows, 2 * rows.codes.shape[3]) for rows in inputs[:2])
    return query, key, restore_fp4_reference(inputs.value, inputs.key_length).transpose(2, 3)


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "spread, one, two, everything, kept",
    [(1, 0.005, 0.005, 0.012, 0.019), (2, 0.040, 0.011, 0.062, 0.12), (4, 0.041, 0.008, 0.24, 0.43)],
)
def test_the_errors_are_as_the_docstring_says(spread, one, two, everything, kept):
    """Without the scale of a row, blocks of small weights lose their digits: four to five times the error."""
    query, key, value = tensors(1, 2, 2, 256, 4096, 64, spread=spread)
    mean = 3 * torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(1))
    inputs, exact = in_pytorch(query, key, value), exact_attention(query, key, value)
    weights_alone = exact_attention(*restored(inputs))
    found = fp4_attention_reference(inputs)
    assert error(fp4_attention_reference(inputs, two_levels=False), weights_alone) == pytest.approx(one, abs=0.0006)
    assert error(found, weights_alone) == pytest.approx(two, abs=0.0006)
    assert error(found, exact) == pytest.approx(everything, rel=0.04)
    subtracted = in_pytorch(query, key + mean, value)
    assert error(fp4_attention_reference(subtracted), exact) == pytest.approx(everything, rel=0.04)
    with_mean = subtracted._replace(key=quantise_nvfp4_reference(key + mean))
    assert error(fp4_attention_reference(with_mean), exact) == pytest.approx(kept, rel=0.15)


def test_the_mean_of_the_values_cannot_be_left_out():
    query, key, value = tensors(1, 2, 2, 64, 1024, 64)
    exact, mean = exact_attention(query, key, value), value.mean(dim=2, keepdim=True)
    without = fp4_attention_reference(in_pytorch(query, key, value - mean))
    assert error(without, exact) > 0.9 and error(fp4_attention_reference(in_pytorch(query, key, value)), exact) < 0.05
    assert error(without + mean, exact) < 0.05  # it may be added again


def test_the_mean_key_is_one_for_each_head():
    query, key, value = tensors(1, 2, 2, 16, 64, 32)
    offset = torch.tensor([40.0, -7.0]).view(1, 2, 1, 1)
    shifted, usual = in_pytorch(query, key + offset, value), in_pytorch(query, key, value)
    assert error(restore_fp4_reference(shifted.key, 32), restore_fp4_reference(usual.key, 32).double()) < 1e-2


# --------------------------------------------------------------------------------------------------------- the kernel


@needs_interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(1, 1), (70, 130), (130, 70), (33, 97)], ids=str)
def test_the_kernel_does_what_it_means(lengths, causal):
    for heads, head_dim, dtype in (((4, 2), 32, torch.float32), ((2, 2), 64, torch.float16)):
        inputs = in_pytorch(*tensors(2, *heads, *lengths, head_dim, dtype, spread=2.0))
        found, meant = fp4_attention(inputs, causal=causal), fp4_attention_reference(inputs, causal=causal)
        assert found.dtype == dtype and found.is_contiguous()
        assert error(found, meant.double()) < BY_TIES
        if causal and lengths[0] > lengths[1]:
            assert not found[:, :, : lengths[0] - lengths[1]].any()


@needs_interpreter
def test_tiles_and_scale_are_those_that_are_given():
    inputs = in_pytorch(*tensors(1, 2, 1, 40, 100, 128))
    found = fp4_attention(inputs, scale=0.3, tiles=Tiles(32, 32, 4, 1))
    assert error(found, fp4_attention_reference(inputs, scale=0.3, key_rows=32).double()) < BY_TIES
    assert error(found, fp4_attention_reference(inputs, scale=0.3, key_rows=64).double()) > BY_TIES


@needs_interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_values_that_are_all_alike_come_out_as_they_are(causal):
    """Weights before rounding in the sum, rounded ones in the product: 0.98 instead of 1."""
    query, key, value = tensors(1, 2, 1, 70, 130, 32, spread=3.0)
    found = fp4_attention(in_pytorch(query, key, torch.full_like(value, 3.0)), causal=causal)
    torch.testing.assert_close(found, torch.full_like(query, 3.0), rtol=1e-6, atol=1e-6)


@needs_interpreter
def test_strides_are_free_and_sizes_of_inputs_do_not_matter():
    query, key, value = tensors(1, 2, 2, 20, 40, 32)
    usual = fp4_attention(quantise_for_fp4(query, key, value))
    strided = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value))
    assert torch.equal(fp4_attention(in_pytorch(*strided)), usual)
    larger = fp4_attention(in_pytorch(query * 2.0**40, key * 2.0**-40, value * 2.0**60))
    torch.testing.assert_close(larger, usual * 2.0**60)


@needs_interpreter
def test_the_matrix_units_for_4_bits_get_what_the_others_do(monkeypatch):
    """The interpreter takes every scale of a product for a power of two; here it is told what a byte of e4m3 means."""
    if not hasattr(triton_interpreter, "_dot_scaled_scale_to_f32"):
        pytest.skip("this Triton's interpreter has no product of codes and scales that could be corrected")
    inputs = in_pytorch(*tensors(1, 2, 1, 70, 130, 64, spread=2.0))
    usual = fp4_attention(inputs, causal=True)
    monkeypatch.setattr(module, "multiplies_fp4", lambda arch: True)
    assert error(fp4_attention(inputs, causal=True), usual.double()) > 0.5  # another path was taken
    monkeypatch.setattr(triton_interpreter, "_dot_scaled_scale_to_f32", lambda scale, compute_type: (
        torch.from_numpy(scale.data.view("uint8").copy()).view(torch.float8_e4m3fn).float().numpy()
    ))  # fmt: skip
    torch.testing.assert_close(fp4_attention(inputs, causal=True), usual, rtol=1e-6, atol=1e-6)


@needs_interpreter
@pytest.mark.parametrize(
    "call, words",
    [
        (lambda q, k, v: fp4_attention((q, k, v)), "inputs is a tuple; give what quantise_for_fp4"),
        (lambda q, k, v: fp4_attention(in_pytorch(q, k, v), scale=-1.0), "scale is -1.0"),
        (lambda q, k, v: in_pytorch(q[..., :16], k[..., :16], v[..., :16]), "head dimension 16; allowed are 32"),
        (lambda q, k, v: in_pytorch(q, k[:, :, :5], v), "value has shape"),
        (lambda q, k, v: in_pytorch(q, k, v / 0), "tensor holds -inf|tensor holds inf"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call(*tensors(1, 2, 2, 8, 8, 32))
