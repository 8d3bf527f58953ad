"""What the codes of a cache stand for: every byte, both ends, groups of nothing, and what no code stands for."""

import math

import pytest
import torch

from course_lib.kernels.quantised.formats import (
    GROUP,
    Int4Cache,
    Int4Groups,
    empty_int4_cache,
    pack_int4,
    quantise_e4m3_reference,
    quantise_int4,
    quantise_int4_keys,
    quantise_int4_values,
    restored_e4m3,
    restored_int4,
    restored_int4_keys,
    restored_int4_values,
    unpack_int4,
)

ONE = torch.tensor(1.0)
SMALLEST_STEP = 2**-9  # of e4m3, between its subnormals


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def half_float16_digits(numbers):
    """How far rounding to float16 moves a number at most: half of its last digit, or of the smallest one there is."""
    return numbers.abs() * 2**-11 + 2**-25


# ------------------------------------------------------------------------------------------------------------- e4m3


def test_every_e4m3_byte_that_is_a_number_is_its_own_code():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].view(torch.float8_e4m3fn)  # all but the two NaN
    numbers = restored_e4m3(codes.view(1, 1, 1, 254), ONE)
    assert torch.equal(
        quantise_e4m3_reference(numbers, ONE).view(torch.uint8), codes.view(1, 1, 1, 254).view(torch.uint8)
    )
    assert numbers.max() == 448 and numbers.min() == -448


@pytest.mark.parametrize("number", [449.0, 465.0, 480.0, 1e30])
def test_what_is_beyond_448_saturates_and_is_never_nan(number):
    """A plain cast makes NaN of 465 and of all that is larger."""
    codes = quantise_e4m3_reference(torch.tensor([number, -number]).view(1, 1, 1, 2), ONE)
    assert restored_e4m3(codes, ONE).flatten().tolist() == [448, -448]


@pytest.mark.parametrize("axes", ["tensor", "head", "page"])
def test_scales_stand_for_a_tensor_a_head_or_a_page_and_head(axes):
    tensor = normal(5, 3, 16, 64) * torch.arange(1, 6).view(5, 1, 1, 1) * torch.tensor([1.0, 10, 100]).view(3, 1, 1)
    largest = tensor.abs().amax(dim={"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "page": (2, 3)}[axes])
    codes = quantise_e4m3_reference(tensor, largest / 448)
    assert codes.shape == tensor.shape and codes.float().abs().max() == 448
    spread = (largest / 448).view({"tensor": (1, 1, 1, 1), "head": (1, 3, 1, 1), "page": (5, 3, 1, 1)}[axes])
    off = (restored_e4m3(codes, largest / 448) - tensor).abs()
    # Half a step: of 8 in the numbers' binade, or of the subnormals; and float32's rounding of the two products.
    assert (off <= torch.maximum(tensor.abs() / 16, spread * SMALLEST_STEP / 2) * (1 + 1e-5)).all()


@pytest.mark.parametrize("scales", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_are_no_scales_are_refused(scales):
    with pytest.raises(ValueError, match=rf"scales hold {scales} at \[\]; they must be finite and above 0"):
        quantise_e4m3_reference(torch.ones(1, 1, 1, 2), torch.tensor(scales))


def test_scales_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"scales have shape \(5,\).*\(\), \(3,\) or \(5, 3\)"):
        quantise_e4m3_reference(torch.ones(5, 3, 16, 64), torch.ones(5))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_nan_or_an_infinity_is_refused_with_its_place(number):
    tensor = torch.ones(1, 1, 2, GROUP)
    tensor[0, 0, 1, 3] = number
    for quantise in (lambda: quantise_e4m3_reference(tensor, ONE), lambda: quantise_int4(tensor, -1)):
        with pytest.raises(ValueError, match=rf"tensor holds {number} at \[0, 0, 1, 3\]"):
            quantise()


# ------------------------------------------------------------------------------------------------------------- INT4


def test_all_256_bytes_hold_two_signed_codes_the_low_half_first():
    packed = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = unpack_int4(packed)
    pairs = [[byte % 16, byte // 16] for byte in range(256)]
    assert codes.tolist() == [[half - 16 if half > 7 else half for half in pair] for pair in pairs]
    assert codes.min() == -8 and codes.max() == 7
    assert torch.equal(pack_int4(codes), packed)


@pytest.mark.parametrize("codes", [[-9, 0], [0, 8]])
def test_codes_that_4_bits_do_not_hold_are_refused(codes):
    with pytest.raises(ValueError, match="4 bits hold -8 to 7"):
        pack_int4(torch.tensor(codes, dtype=torch.int8))


def test_an_odd_row_is_refused():
    with pytest.raises(ValueError, match="codes have 3 numbers in a row"):
        pack_int4(torch.zeros(3, dtype=torch.int8))


@pytest.mark.parametrize("offset", [0.0, 50.0, -3000.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_number_is_off_by_half_a_step_and_what_float16_rounds(offset, size, dim):
    tensor = offset + size * normal(GROUP, GROUP)
    groups = quantise_int4(tensor, dim)
    assert groups.scales.dtype == groups.middles.dtype == torch.float16
    assert groups.codes.min() >= -8 and groups.codes.max() <= 7
    spread = tensor.amax(dim, keepdim=True) - tensor.amin(dim, keepdim=True)
    # The codes' ends are off where scale and middle were rounded: 8 times the scale's error, once the middle's.
    ends = 8 * half_float16_digits(spread / 15) + half_float16_digits(tensor.abs().amax(dim, keepdim=True))
    off = (restored_int4(groups) - tensor).abs()
    assert (off <= groups.scales.float() / 2 + ends + tensor.abs() * 1e-6).all()


@pytest.mark.parametrize("number", [0.0, -2.5, 1e-7, 65504.0])
def test_a_group_of_equal_numbers_has_the_scale_0_and_is_restored(number):
    groups = quantise_int4(torch.full((3, GROUP), number), 1)
    assert (groups.scales == 0).all() and (groups.codes == 0).all()
    assert ((restored_int4(groups) - number).abs() <= half_float16_digits(torch.tensor(number))).all()


def test_the_widest_group_that_float16_holds_stays_finite():
    groups = quantise_int4(torch.tensor([[-65504.0] + [0.0] * 62 + [65504.0]]), 1)
    assert restored_int4(groups).isfinite().all() and groups.codes[0, [0, -1]].tolist() == [-8, 7]


def test_what_float16_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="tensor holds 65520.0; a group's middle can be 65504 at most"):
        quantise_int4(torch.full((1, GROUP), 65520.0), 1)


def test_keys_are_grouped_by_channel_and_values_by_token():
    """One outlier costs its own group's accuracy: that of a channel of keys, of a token's 64 channels of values."""
    tensor = normal(2, 3, GROUP, 128)
    tensor[..., 5, 70] = 1000.0
    keys, values = quantise_int4_keys(tensor), quantise_int4_values(tensor)
    assert keys.codes.shape == values.codes.shape == (2, 3, GROUP, 64) and keys.codes.dtype == torch.uint8
    assert keys.scales.shape == (2, 3, 128) and values.scales.shape == (2, 3, GROUP, 2)
    assert ((keys.scales > 10).nonzero()[:, 2] == 70).all() and (keys.scales > 10).sum() == 6
    assert values.scales[:, :, 5, 1].min() > 10 and (values.scales > 10).sum() == 6


@pytest.mark.parametrize("where", [{"pages": 4}, {"capacity": 128}])
def test_a_cache_holds_groups_and_windows_and_is_restored(where):
    cache = empty_int4_cache(2, 3, 128, **where)
    blocks = (4, 3) if "pages" in where else (2, 3, 2)
    assert cache.paged == ("pages" in where) and cache.key_window.shape == (2, 3, GROUP, 128)
    numbers = normal(*blocks, GROUP, 128)
    held = Int4Cache(*quantise_int4_keys(numbers), *quantise_int4_values(numbers), *cache[6:])
    assert [(part.shape, part.dtype) for part in held] == [(part.shape, part.dtype) for part in cache]
    by_token = quantise_int4(numbers.unflatten(-1, (2, GROUP)), -1)
    assert torch.equal(restored_int4_keys(held), restored_int4(quantise_int4(numbers, -2)))
    assert torch.equal(restored_int4_values(held), restored_int4(Int4Groups(*by_token)).flatten(-2))
    sixteen_bits = 2 * 2 * numbers.numel()
    bytes_held = sum(part.numel() * part.element_size() for part in held[:6])
    assert bytes_held == sixteen_bits * 4.5 / 16


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"head_dim": 96, "pages": 1}, "head_dim is 96; it must be a multiple of 64"),
        ({"head_dim": 64, "capacity": 100}, "capacity is 100; it must be a multiple of 64"),
        ({"head_dim": 64}, "pages is None and capacity is None; give the one"),
        ({"head_dim": 64, "pages": 1, "capacity": 64}, "pages is 1 and capacity is 64; give the one"),
    ],
)
def test_a_cache_that_groups_do_not_divide_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        empty_int4_cache(1, 1, **arguments)
