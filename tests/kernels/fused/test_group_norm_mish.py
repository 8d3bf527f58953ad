"""GroupNorm + Mish with scale and shift, forward and backward, against float64: in registers and in a loop."""

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.fused.group_norm_mish import group_norm_mish_forward, group_norm_mish_reference
from course_lib.kernels.fused.group_norm_mish_backward import (
    group_norm_mish_backward,
    group_norm_mish_backward_reference,
)
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
DTYPES = [torch.float32, torch.float16]
# batch, channels, length, groups. The last three have groups that do not stay in registers: long, wide, and both.
SHAPES = [(1, 1, 1, 1), (3, 6, 5, 3), (5, 32, 16, 8), (2, 35, 127, 5), (2, 6, 600, 2), (130, 2, 1, 2), (2, 514, 3, 2)]
LOOPED = [(1, 1, 16385, 1), (1, 3000, 5, 1), (1, 6, 5003, 2)]


def inputs(batch, channels, length, dtype=torch.float32, scale=1.0):
    """x, weight, bias, scale, shift, and the gradient of the result."""
    shapes = (batch, channels, length), (channels,), (channels,), (batch, channels), (batch, channels)
    x, *others = (normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes, start=1))
    return x * scale, *others, normal(6, batch, channels, length, dtype=dtype)


def assert_right(groups, x, weight, bias, scale, shift, gradient, epsilon=1e-5):
    """Both passes, with scale and shift and without."""
    for film in ((scale, shift), (None, None)):
        arguments = x, groups, weight, bias, *film
        out, statistics = group_norm_mish_forward(*arguments, epsilon)
        assert_as_exact_as_plain(out, group_norm_mish_reference, *arguments, epsilon=epsilon)
        found = group_norm_mish_backward(x, statistics, groups, weight, bias, *film, gradient)
        assert_as_exact_as_plain(found, group_norm_mish_backward_reference, *arguments, gradient, epsilon=epsilon)


def test_the_meaning_is_pytorchs_and_its_gradients_are_what_autograd_finds():
    tensors = [tensor.double() for tensor in inputs(3, 6, 5)]
    x, weight, bias, scale, shift = leaves = [tensor.requires_grad_() for tensor in tensors[:-1]]
    out = F.mish(F.group_norm(x, 3, weight, bias, 0.1)) * scale[:, :, None] + shift[:, :, None]
    torch.testing.assert_close(group_norm_mish_reference(x, 3, weight, bias, scale, shift, 0.1), out)
    right = torch.autograd.grad(out, leaves, tensors[-1])
    found = group_norm_mish_backward_reference(x, 3, *leaves[1:], tensors[-1], 0.1)
    for ours, exact in zip(found, right, strict=True):
        torch.testing.assert_close(ours, exact)
    plain = F.mish(F.group_norm(x, 3, weight, bias, 0.1))
    torch.testing.assert_close(group_norm_mish_reference(x, 3, weight, bias, epsilon=0.1), plain)
    right = torch.autograd.grad(plain, leaves[:3], tensors[-1])
    found = group_norm_mish_backward_reference(x, 3, weight, bias, None, None, tensors[-1], 0.1)
    assert found[3:] == (None, None)
    for ours, exact in zip(found, right):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("batch, channels, length, groups", SHAPES + LOOPED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_shape_is_right(batch, channels, length, groups, dtype):
    assert_right(groups, *inputs(batch, channels, length, dtype))


@pytest.mark.parametrize("shape", [(5, 8, 17, 2), LOOPED[2]])
def test_strides_are_followed_and_gradients_that_cannot_be_are_copied(shape):
    *shape, groups = shape
    x, weight, bias, scale, shift, gradient = inputs(*shape)
    films = torch.stack([scale, shift], dim=1)  # the halves of one layer's result
    apart = in_wider_rows(x)
    assert_right(groups, apart, weight, bias, films[:, 0], films[:, 1], in_wider_rows(gradient))
    twice = torch.cat([x, x + 1], dim=1)
    assert_right(groups, twice[:, shape[1] :], weight, bias, scale, in_wider_rows(shift), gradient)
    by_channels = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert_right(groups, by_channels, weight, bias, in_wider_rows(scale), shift, torch.ones(()).expand(shape))
    assert_right(groups, x, weight, bias, scale, shift, gradient.transpose(1, 2).contiguous().transpose(1, 2))


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
    """exp(100) squared overflows; Mish of 100 is 100, with the slope 1, and of -100 it is 0."""
    x, weight, bias, scale, shift, gradient = inputs(2, 6, 50)
    far = torch.tensor([1.0, 30.0, 1e3, 1e20, 0.0, 20.0])
    assert_right(2, x, weight * far, bias * far, scale, shift, gradient)


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
    x, weight, bias, scale, shift, gradient = inputs(4, 6, 10)
    x[2, 3, 1] = torch.nan
    out, statistics = group_norm_mish_forward(x, 3, weight, bias, scale, shift)
    x_gradient = group_norm_mish_backward(x, statistics, 3, weight, bias, scale, shift, gradient)[0]
    for result in (out, x_gradient):
        assert result[2, 2:4].isnan().all() and result.isnan().sum() == 20


def test_float32_weights_beside_16_bit_numbers_are_right():
    x, weight, bias, scale, shift, gradient = inputs(3, 8, 20, torch.float16)
    assert_right(2, x, weight.float(), bias.float(), scale, shift, gradient)


def test_no_samples_leave_the_weights_alone():
    x, weight, bias = torch.zeros(0, 4, 5), torch.ones(4), torch.ones(4)
    out, statistics = group_norm_mish_forward(x, 2, weight, bias)
    found = group_norm_mish_backward(x, statistics, 2, weight, bias, None, None, x)
    assert out.shape == found[0].shape == (0, 4, 5) and statistics.shape == (0, 2, 2)
    assert torch.equal(found[1], torch.zeros(4)) and torch.equal(found[2], torch.zeros(4)) and found[3] is None


@pytest.mark.parametrize("shape, reads", [((13, 32, 16, 8), 1), ((1, 6, 5003, 2), 2)])
def test_each_element_is_read_once_and_in_the_loop_twice(shape, reads):
    *shape, groups = shape
    x, weight, bias, scale, shift, gradient = inputs(*shape)
    forward = metered(group_norm_mish_forward, x, groups, weight, bias, scale, shift)
    assert forward["x_pointer"].loaded_bytes == reads * x.nbytes and forward["out_pointer"].stored_bytes == x.nbytes
    _, statistics = group_norm_mish_forward(x, groups, weight, bias)
    backward = metered(group_norm_mish_backward, x, statistics, groups, weight, bias, scale, shift, gradient)
    for name in ("x_pointer", "gradient_pointer"):
        assert backward[name].loaded_bytes == reads * x.nbytes
    assert backward["x_gradient_pointer"].stored_bytes == x.nbytes
    assert not forward.out_of_bounds and not backward.out_of_bounds and forward.contended_bytes == 0


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
        ({"statistics": torch.ones(2, 2)}, ["statistics has shape (2, 2)", "(2, 2, 2)"]),
        ({"out_gradient": torch.zeros(2, 3, 4)}, ["out_gradient has shape (2, 3, 4)", "(2, 4, 3)"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    good = {"x": X, "groups": 2, "weight": VECTOR, "bias": VECTOR, "scale": FILM, "shift": FILM}
    backward_only = {"statistics": torch.ones(2, 2, 2), "out_gradient": X}
    functions = [lambda **them: group_norm_mish_backward(**backward_only | them)]
    if not set(change) & set(backward_only):
        functions.append(group_norm_mish_forward)
    for function in functions:
        with pytest.raises(ValueError) as refusal:
            function(**good | change)
        assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_negative_epsilon_is_refused():
    with pytest.raises(ValueError, match="epsilon is -1.0"):
        group_norm_mish_forward(X, 2, VECTOR, VECTOR, epsilon=-1.0)
