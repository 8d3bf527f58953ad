"""Tensors in 4 bits: every code, the largest number of any block, the bounds of the errors, and short rows."""

import math

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.quantised.formats import unpack_halves
from course_lib.kernels.quantised.fp4 import (
    E2M1_NUMBERS,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    Fp4,
    nearest_codes,
    quantise_mxfp4,
    quantise_mxfp4_reference,
    quantise_nvfp4,
    quantise_nvfp4_reference,
    restore_fp4,
    restore_fp4_reference,
)

ALL_NUMBERS = torch.tensor(E2M1_NUMBERS + tuple(-number for number in E2M1_NUMBERS))
FORMATS = {
    "mxfp4": (quantise_mxfp4_reference, quantise_mxfp4, MXFP4_BLOCK),
    "nvfp4": (quantise_nvfp4_reference, quantise_nvfp4, NVFP4_BLOCK),
}
by_format = pytest.mark.parametrize("form", FORMATS)
needs_interpreter = pytest.mark.skipif(not interpreting(), reason="on a GPU, tests/gpu does this with the kernels")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(one: Fp4, other: Fp4) -> bool:
    """Whether all bits are the same."""
    return all(
        a is b or torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other)
        if a is None or a.dim() > 0
    ) and (one.tensor_scale is None or torch.equal(one.tensor_scale, other.tensor_scale))


def wide(rows, columns, seed=0):
    """Numbers of all sizes: each row a power of 2 from 2^-140, which float32 hardly has, to 2^126, and outliers."""
    sizes = torch.linspace(-140, 120, rows).round()[:, None]
    return torch.ldexp(normal(rows, columns, seed=seed), sizes.int()) * torch.where(
        torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed + 1)) < 0.05, 8.0, 1.0
    )


# ------------------------------------------------------------------------------------------------------ what it means


@by_format
@pytest.mark.parametrize("power", [-100, -3, 0, 90])
def test_every_code_comes_back(form, power):
    """Minus 0 too. A row of all codes, so that 6 is among them, times a power of 2."""
    quantise, _, block = FORMATS[form]
    rows = torch.ldexp(ALL_NUMBERS.repeat(2, 2), torch.tensor(power))
    fp4 = quantise(rows)
    assert torch.equal(unpack_halves(fp4.codes), torch.arange(16, dtype=torch.uint8).repeat(2, 2))
    assert torch.equal(restore_fp4_reference(fp4, 32), rows)
    assert torch.equal(restore_fp4_reference(fp4, 32).signbit(), rows.signbit())


def test_the_first_of_two_codes_lies_in_the_low_half():
    assert quantise_mxfp4_reference(torch.tensor([6.0, -0.5])).codes.tolist() == [7 | 9 << 4]


def test_halfway_between_two_codes_the_even_one_is_taken():
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert nearest_codes(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert nearest_codes(torch.nextafter(middles, torch.tensor(9.0))).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert nearest_codes(torch.nextafter(middles, torch.tensor(0.0))).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert nearest_codes(torch.tensor([6.9, 1e30, -1e30])).tolist() == [7, 7, 15]


@pytest.mark.parametrize("form, bits", [("mxfp4", 4.25), ("nvfp4", 4.5)])
def test_bits_a_number(form, bits):
    quantise, _, _ = FORMATS[form]
    fp4 = quantise(normal(64, 1024))
    assert 8 * (fp4.nbytes - (4 if form == "nvfp4" else 0)) == bits * 64 * 1024
    assert fp4.codes.nbytes == 64 * 512


@by_format
def test_a_block_of_zeros_stays_zero_beside_others(form):
    quantise, _, block = FORMATS[form]
    rows = normal(3, 4 * block)
    rows[:, block : 2 * block] = 0
    restored = restore_fp4_reference(quantise(rows), 4 * block)
    assert (restored[:, block : 2 * block] == 0).all() and (restored[:, :block] != 0).any()
    nothing = torch.zeros(2, 5)
    assert torch.equal(restore_fp4_reference(quantise(nothing), 5), nothing)


@by_format
@pytest.mark.parametrize("length", [1, 2, 15, 17, 33, 63])
def test_a_short_block_is_as_if_zeros_followed_it(form, length):
    quantise, _, block = FORMATS[form]
    rows = normal(2, 3, length)
    fp4 = quantise(rows)
    assert fp4.codes.shape == (2, 3, math.ceil(length / 2)) and fp4.scales.shape == (2, 3, math.ceil(length / block))
    full = quantise(torch.cat([rows, torch.zeros(2, 3, 64 - length)], -1))
    assert torch.equal(restore_fp4_reference(fp4, length), restore_fp4_reference(full, 64)[..., :length])
    if length % 2:
        assert (fp4.codes[..., -1] < 16).all()


# --------------------------------------------------------------------------------------------------- what it loses


def blocks_by_largest(block):
    """A block for each largest number just below, at and just above a power of 2 and 6 times one, and all between."""
    powers = 2.0 ** torch.arange(-60, 60)
    at = torch.cat([powers, 1.5 * powers, powers * (1 + torch.arange(1, 121) / 121)])
    largest = torch.cat([torch.nextafter(at, torch.tensor(0.0)), at, torch.nextafter(at, torch.tensor(math.inf))])
    blocks = largest[:, None] * (2 * torch.rand(len(largest), block, generator=torch.Generator().manual_seed(1)) - 1)
    blocks[:, 3] = -largest
    return blocks


def mxfp4_loss(blocks, exponents):
    """By block: by how much its largest number comes back too small, over the number, for scales 2^exponents."""
    codes = nearest_codes(torch.ldexp(blocks, -exponents[:, None]))
    restored = torch.ldexp(ALL_NUMBERS[codes], exponents[:, None])
    largest, place = blocks.abs().max(-1)
    return 1 - restored.abs().gather(1, place[:, None])[:, 0] / largest


def test_nothing_saturates_in_mxfp4_and_half_the_scale_would():
    blocks = blocks_by_largest(MXFP4_BLOCK)
    fp4 = quantise_mxfp4_reference(blocks)
    largest, scales = blocks.abs().amax(-1), fp4.scales[:, 0].float()
    assert (largest <= 6 * scales).all() and (largest > 3 * scales).all()


def test_mxfp4_errs_by_a_fifth_of_the_largest_at_most_and_by_half_a_step():
    blocks = blocks_by_largest(MXFP4_BLOCK)
    fives = torch.cat([torch.full((1, 31), 1.0), torch.full((1, 1), 5.0)], -1)  # a tie, to 4: the worst there is
    blocks = torch.cat([blocks, fives])
    fp4 = quantise_mxfp4_reference(blocks)
    off = (restore_fp4_reference(fp4, MXFP4_BLOCK) - blocks).abs()
    units = blocks.abs() / fp4.scales.float()
    half_step = torch.where(units <= 2, 0.25, torch.where(units <= 4, 0.5, 1.0)) * fp4.scales.float()
    assert (off <= half_step).all()
    relative = off.amax(-1) / blocks.abs().amax(-1)
    assert relative.max() <= 0.2 * (1 + 1e-6) and relative[-1] == pytest.approx(0.2)


def test_nvfp4_errs_by_half_a_step_and_17_ninety_sixths_of_the_largest():
    blocks = torch.cat([normal(4000, 16), normal(4000, 16, seed=1) * torch.rand(4000, 1)])
    fp4 = quantise_nvfp4_reference(blocks)
    scales = fp4.scales.float() * fp4.tensor_scale
    units = blocks.abs() / scales
    assert 6.3 < units.max() <= 6 * 17 / 16 * (1 + 1e-6)  # a scale is too small by up to 1 in 17
    off = (restore_fp4_reference(fp4, 16) - blocks).abs()
    half_step = torch.where(units <= 2, 0.25, torch.where(units <= 4, 0.5, 1.0)) * scales
    assert (off <= half_step * (1 + 1e-6)).all()
    above = fp4.scales.float()[:, 0] > 2.0**-6
    relative = off.amax(-1) / blocks.abs().amax(-1)
    assert 0.15 < relative[above].max() <= 17 / 96 * (1 + 1e-6)


def test_a_block_that_is_tiny_beside_the_tensor_keeps_the_least_scale_and_does_not_saturate():
    """e4m3 alone would round its scale to 2^-9 or 0, and the block to two thirds of itself or to nothing."""
    rows = normal(1, 32) * torch.tensor([1.0] * 16 + [1e-5] * 16)
    fp4 = quantise_nvfp4_reference(rows)
    assert fp4.scales.float()[0, 1] == 2.0**-6
    unit = float(2.0**-6 * fp4.tensor_scale)
    assert ((restore_fp4_reference(fp4, 32) - rows).abs()[:, 16:] <= unit / 4 * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    "rule, worst",
    [
        (lambda largest: torch.log2(largest / 6).round(), 1 - 1 / math.sqrt(2)),
        (lambda largest: torch.log2(largest).floor() - 2, 1 / 4),
    ],
    ids=["nearest", "floor"],
)
def test_other_scales_cut_the_largest_number_by_up_to(rule, worst):
    """The nearest power of 2 loses 29.3 %; the OCP's own rule, by floor, 25 %; ours a fifth, and that by rounding."""
    largest = 6 * 2 ** torch.linspace(0, 1, 4001, dtype=torch.float64)
    blocks = largest[:, None] * torch.linspace(0, 1, MXFP4_BLOCK, dtype=torch.float64)
    loss = mxfp4_loss(blocks, rule(largest).int())
    assert worst - 0.001 < loss.max() <= worst + 1e-9
    saturated = largest / 2 ** rule(largest) > 7  # more than half a step beyond 6: no rounding would do that
    assert saturated.float().mean() > 0.15
    ours = mxfp4_loss(blocks, quantise_mxfp4_reference(blocks.float()).scales[:, 0].float().log2().int())
    assert ours.max() <= 0.2 + 1e-9


# ------------------------------------------------------------------------------------------------------ the kernels


@needs_interpreter
@by_format
@pytest.mark.parametrize("shape", [(1,), (5, 2), (2, 3, 33), (3, 200), (2, 5000), (0, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernels_make_the_bits_of_their_meaning(form, shape, dtype):
    reference, quantise, _ = FORMATS[form]
    tensor = normal(*shape, seed=len(shape)).to(dtype)
    fp4 = quantise(tensor)
    if tensor.numel():
        assert same(fp4, reference(tensor))
    for out_dtype in (torch.float32, torch.float16):
        restored = restore_fp4(fp4, shape[-1], out_dtype)
        assert torch.equal(restored, restore_fp4_reference(fp4, shape[-1], out_dtype)) and restored.shape == shape


@needs_interpreter
@by_format
def test_numbers_of_every_size_and_blocks_at_every_border_too(form):
    reference, quantise, block = FORMATS[form]
    for tensor in (wide(40, 96), blocks_by_largest(block).view(30, -1), torch.zeros(2, 40)):
        fp4 = quantise(tensor)
        assert same(fp4, reference(tensor))
        assert torch.equal(restore_fp4(fp4, tensor.shape[-1]), restore_fp4_reference(fp4, tensor.shape[-1]))


@needs_interpreter
@by_format
def test_rows_may_lie_apart(form):
    reference, quantise, _ = FORMATS[form]
    tensor = normal(6, 100)[::2, :70]
    assert same(quantise(tensor), reference(tensor))


@needs_interpreter
def test_an_infinity_that_nobody_looked_for_stays_in_its_block_and_its_half_of_a_byte():
    tensor = normal(1, 64)
    tensor[0, 33] = -math.inf
    fp4, without = quantise_mxfp4(tensor, validate=False), quantise_mxfp4(tensor[:, :32])
    codes = unpack_halves(fp4.codes)[0]
    assert codes[33] == 15 and codes[32] % 8 == 0 and codes[34] % 8 == 0  # zeros beside it
    assert torch.equal(fp4.codes[:, :16], without.codes)


@needs_interpreter
@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: quantise_mxfp4(torch.tensor([1.0, math.nan])), r"tensor holds nan at \[1\]"),
        (lambda: quantise_nvfp4(torch.tensor([math.inf])), r"tensor holds inf at \[0\]"),
        (lambda: quantise_mxfp4(torch.zeros(3, dtype=torch.int32)), "int32"),
        (lambda: quantise_mxfp4(torch.zeros(4, 6)[:, ::2]), "must be contiguous"),
        (lambda: restore_fp4(quantise_mxfp4(torch.ones(2, 40)), 50), "codes have shape .2, 20."),
        (lambda: restore_fp4(quantise_mxfp4(torch.ones(2, 40))._replace(scales=torch.ones(2, 2)), 40), "float32"),
        (lambda: restore_fp4(quantise_nvfp4(torch.ones(2, 40))._replace(tensor_scale=None), 40), "tensor_scale"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()
