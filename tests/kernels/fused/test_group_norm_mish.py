"""GroupNorm + Mish with scale and shift against float64: in registers and in a loop."""

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.fused.group_norm_mish import group_norm_mish_forward, group_norm_mish_reference
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
DTYPES = [torch.float32, torch.float16]
# batch, channels, length, groups. The last three have groups that do not stay in registers: long, wide, and both.
SHAPES = [(1, 1, 1, 1), (3, 6, 5, 3), (5, 32, 16, 8), (2, 35, 127, 5), (2, 6, 600, 2), (130, 2, 1, 2), (2, 514, 3, 2)]
LOOPED = [(1, 1, 16385, 1), (1, 3000, 5, 1), (1, 6, 5003, 2)]


def inputs(batch, channels, length, dtype=torch.float32, scale=1.0):
    """x, weight, bias, scale and shift."""
    shapes = (batch, channels, length), (channels,), (channels,), (batch, channels), (batch, channels)
    x, *others = (normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes, start=1))
    return x * scale, *others


def assert_right(groups, x, weight, bias, scale, shift, epsilon=1e-5):
    """With scale and shift and without."""
    for film in ((scale, shift), (None, None)):
        arguments = x, groups, weight, bias, *film
        out, _ = group_norm_mish_forward(*arguments, epsilon)
        assert_as_exact_as_plain(out, group_norm_mish_reference, *arguments, epsilon=epsilon)


def test_the_meaning_is_pytorchs():
    x, weight, bias, scale, shift = (tensor.double() for tensor in inputs(3, 6, 5))
    plain = F.mish(F.group_norm(x, 3, weight, bias, 0.1))
    torch.testing.assert_close(group_norm_mish_reference(x, 3, weight, bias, epsilon=0.1), plain)
    out = plain * scale[:, :, None] + shift[:, :, None]
    torch.testing.assert_close(group_norm_mish_reference(x, 3, weight, bias, scale, shift, 0.1), out)


@pytest.mark.parametrize("batch, channels, length, groups", SHAPES + LOOPED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_shape_is_right(batch, channels, length, groups, dtype):
    assert_right(groups, *inputs(batch, channels, length, dtype))


@pytest.mark.parametrize("shape", [(5, 8, 17, 2), LOOPED[2]])
def test_strides_are_followed(shape):
    *shape, groups = shape
    x, weight, bias, scale, shift = inputs(*shape)
    films = torch.stack([scale, shift], dim=1)  # the halves of one layer's result
    assert_right(groups, in_wider_rows(x), weight, bias, films[:, 0], films[:, 1])
    twice = torch.cat([x, x + 1], dim=1)
    assert_right(groups, twice[:, shape[1] :], weight, bias, scale, in_wider_rows(shift))
    by_channels = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert_right(groups, by_channels, weight, bias, in_wider_rows(scale), shift)


@pytest.mark.parametrize("shape", [(4, 32, 16, 4), (1, 6, 5003, 2)], ids=["in registers", "in a loop"])
def test_a_mean_of_ten_thousand_with_variance_one_is_right(shape):
    """E[x²] - E[x]² is wrong by the whole variance here: float32 steps by 8 near 10⁸."""
    *shape, groups = shape
    x, *others = inputs(*shape)
    rows = (x + 1e4).unflatten(1, (groups, -1)).flatten(2)
    by_squares = rows.square().mean(-1) - rows.mean(-1).square()
    assert (by_squares - 1).abs().max() > 0.5, "the trap is none"
    assert_right(groups, x + 1e4, *others)
    out, statistics = group_norm_mish_forward(x + 1e4, groups, *others[:2])
    # x itself steps by 0.001 there, and its mean is rounded like that: n is off by at most that much.
    right = group_norm_mish_reference((x + 1e4).double(), groups, *(tensor.double() for tensor in others[:2]))
    assert (out - right).abs().max() < 2 * 2**-10 * others[0].abs().max()
    torch.testing.assert_close(statistics[..., 0], rows.double().mean(-1).float(), rtol=1e-7, atol=0)


def test_parts_of_a_group_that_lie_far_apart_are_merged_right():
    """A loop whose tiles have means of their own: the distances between them are most of the variance."""
    x, *others = inputs(1, 3, 5003)
    x += torch.tensor([0.0, 100.0, 1e4])[None, :, None]
    x[:, :, 4096:] -= 500
    assert_right(1, x, *others)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a tile's places beyond the batch hold 0 · 1/√0
@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1e12), (torch.float32, 1e-6), (torch.float16, 1e3)])
@pytest.mark.parametrize("shape", [(3, 6, 50, 2), (1, 6, 5003, 2)])
def test_large_and_small_numbers_are_right(shape, dtype, scale):
    *shape, groups = shape
    assert_right(groups, *inputs(*shape, dtype, scale), epsilon=0.0)


def test_large_activations_are_right():
    """exp(100) squared overflows; Mish of 100 is 100, and of -100 it is 0."""
    x, weight, bias, scale, shift = inputs(2, 6, 50)
    far = torch.tensor([1.0, 30.0, 1e3, 1e20, 0.0, 20.0])
    assert_right(2, x, weight * far, bias * far, scale, shift)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("shape", [(2, 4, 9, 2), (2, 4, 9001, 2)])
def test_a_group_of_equal_numbers_is_its_bias_and_with_epsilon_0_nan_as_in_pytorch(shape):
    *shape, groups = shape
    x, weight, bias, *_ = inputs(*shape)
    x[1, :2] = 7.0
    out, _ = group_norm_mish_forward(x, groups, weight, bias)
    torch.testing.assert_close(out[1, :2], F.mish(bias[:2])[:, None].expand(2, shape[2]))
    out, _ = group_norm_mish_forward(x, groups, weight, bias, epsilon=0.0)
    right = F.mish(F.group_norm(x, groups, weight, bias, 0.0))
    assert torch.equal(out.isnan(), right.isnan()) and out[1, :2].isnan().all() and out.isnan().sum() == 2 * shape[2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_stays_in_its_group():
    x, weight, bias, scale, shift = inputs(4, 6, 10)
    x[2, 3, 1] = torch.nan
    out, _ = group_norm_mish_forward(x, 3, weight, bias, scale, shift)
    assert out[2, 2:4].isnan().all() and out.isnan().sum() == 20


def test_float32_weights_beside_16_bit_numbers_are_right():
    x, weight, bias, scale, shift = inputs(3, 8, 20, torch.float16)
    assert_right(2, x, weight.float(), bias.float(), scale, shift)


def test_no_samples_are_empty():
    out, statistics = group_norm_mish_forward(torch.zeros(0, 4, 5), 2, torch.ones(4), torch.ones(4))
    assert out.shape == (0, 4, 5) and statistics.shape == (0, 2, 2)


@pytest.mark.parametrize("shape, reads", [((13, 32, 16, 8), 1), ((1, 6, 5003, 2), 2)])
def test_each_element_is_read_once_and_in_the_loop_twice(shape, reads):
    *shape, groups = shape
    x, *others = inputs(*shape)
    forward = metered(group_norm_mish_forward, x, groups, *others)
    assert forward["x_pointer"].loaded_bytes == reads * x.nbytes and forward["out_pointer"].stored_bytes == x.nbytes
    assert not forward.out_of_bounds and forward.contended_bytes == 0


X, VECTOR, FILM = torch.zeros(2, 4, 3), torch.ones(4), torch.ones(2, 4)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": 3}, ["x is a int"]),
        ({"x": X.int()}, ["x has dtype torch.int32", "torch.float16"]),
        ({"x": torch.zeros(2, 4)}, ["x has shape (2, 4)", "[batch, channels, length]"]),
        ({"x": torch.zeros(2, 4, 0)}, ["x has shape (2, 4, 0)", "at least one"]),
        ({"x": torch.zeros(2, 3, 4).transpose(1, 2)}, ["x has strides", "x.contiguous()"]),
        ({"groups": 3}, ["groups is 3 for 4 channels", "divides"]),
        ({"groups": 0}, ["groups is 0"]),
        ({"groups": True}, ["groups is True"]),
        ({"weight": torch.ones(3)}, ["weight has shape (3,)", "(4,), one number for each channel"]),
        ({"bias": VECTOR.double()}, ["bias has dtype torch.float64"]),
        ({"shift": None}, ["shift is None beside a scale", "both, or neither"]),
        ({"scale": None}, ["scale is None beside a shift"]),
        ({"scale": torch.ones(4)}, ["scale has shape (4,)", "(2, 4)"]),
        ({"shift": FILM.half()}, ["shift has dtype torch.float16", "torch.float32"]),
        ({"shift": torch.ones(4, 2).t()}, ["shift has strides", "shift.contiguous()"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    good = {"x": X, "groups": 2, "weight": VECTOR, "bias": VECTOR, "scale": FILM, "shift": FILM}
    with pytest.raises(ValueError) as refusal:
        group_norm_mish_forward(**good | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_negative_epsilon_is_refused():
    with pytest.raises(ValueError, match="epsilon is -1.0"):
        group_norm_mish_forward(X, 2, VECTOR, VECTOR, epsilon=-1.0)
