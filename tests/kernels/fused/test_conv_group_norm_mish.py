"""Conv1d, GroupNorm and Mish in one kernel against float64, and as PyTorch's operator."""

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.fused.conv_group_norm_mish import (
    conv_group_norm_mish,
    conv_group_norm_mish_operator,
    conv_group_norm_mish_reference,
)
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


def inputs(batch, in_channels, channels, length, taps=5, dtype=torch.float32):
    """x, filters, conv_bias, weight, bias, scale, shift."""
    shapes = [(batch, in_channels, length), (channels, in_channels, taps)]
    shapes += [(channels,)] * 3 + [(batch, channels)] * 2
    return [normal(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes, start=1)]


def assert_right(groups, x, filters, conv_bias, *vectors, epsilon=1e-5):
    arguments = x, filters, conv_bias, groups, *vectors
    assert_as_exact_as_plain(
        conv_group_norm_mish(*arguments, epsilon=epsilon), conv_group_norm_mish_reference, *arguments, epsilon=epsilon
    )


@pytest.mark.parametrize("taps", [1, 3, 5])
def test_the_meaning_is_pytorchs(taps):
    x, filters, conv_bias, weight, bias, scale, shift = (tensor.double() for tensor in inputs(3, 7, 6, 9, taps))
    normal_ = F.group_norm(F.conv1d(x, filters, conv_bias, padding="same"), 3, weight, bias, 0.1)
    right = F.mish(normal_) * scale[:, :, None] + shift[:, :, None]
    arguments = x, filters, conv_bias, 3, weight, bias
    torch.testing.assert_close(conv_group_norm_mish_reference(*arguments, scale, shift, 0.1), right)
    torch.testing.assert_close(conv_group_norm_mish_reference(*arguments, epsilon=0.1), F.mish(normal_))


SHAPES = [  # batch, in_channels, channels, length, taps, groups
    (1, 1, 1, 1, 1, 1),
    (9, 3, 32, 16, 5, 4),
    (3, 20, 34, 7, 3, 2),
    (2, 7, 300, 5, 5, 2),
    (2, 5, 6, 127, 5, 3),
    (17, 2, 4, 4, 7, 4),
]


@pytest.mark.parametrize("batch, in_channels, channels, length, taps, groups", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_shape_is_right(batch, in_channels, channels, length, taps, groups, dtype):
    tensors = inputs(batch, in_channels, channels, length, taps, dtype)
    assert_right(groups, *tensors)
    assert_right(groups, *tensors[:5])


def test_strides_are_followed():
    x, filters, conv_bias, weight, bias, scale, shift = inputs(5, 6, 8, 10)
    films = torch.stack([scale, shift], dim=1)
    assert_right(2, in_wider_rows(x), filters, conv_bias, weight, bias, films[:, 0], films[:, 1])
    by_channels = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert_right(2, by_channels, filters, conv_bias, weight.float(), bias, in_wider_rows(scale), shift)


def test_a_large_bias_of_the_convolution_does_not_spoil_the_variance():
    """Its mean over a group is 10,000, and the variance near 1: E[x²] - E[x]² would be wrong by all of it."""
    x, filters, conv_bias, *vectors = inputs(3, 6, 8, 16)
    assert_right(2, x, filters / 5, conv_bias / 5 + 1e4, *vectors)


def test_nothing_of_the_convolution_reaches_memory():
    tensors = inputs(9, 3, 32, 16)
    report = metered(conv_group_norm_mish, *tensors[:3], 4, *tensors[3:])
    assert len(report.launches) == 1 and not report.out_of_bounds and report.contended_bytes == 0
    assert report.stored_bytes == 9 * 32 * 16 * 4


def test_no_samples_give_none():
    x, *others = inputs(1, 3, 4, 5)
    assert conv_group_norm_mish(x[:0], *others[:2], 2, *others[2:4]).shape == (0, 4, 5)


def test_opcheck_passes_and_a_compiled_function_has_one_graph():
    x, filters, conv_bias, *vectors = inputs(3, 4, 6, 5)
    arguments = x, filters, conv_bias, 3, *vectors, 1e-5
    torch.library.opcheck(conv_group_norm_mish_operator, arguments)
    torch.library.opcheck(conv_group_norm_mish_operator, (*arguments[:6], None, None, 1e-5))
    compiled = torch.compile(lambda x: conv_group_norm_mish_operator(2 * x, *arguments[1:]), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    torch.testing.assert_close(compiled(x), conv_group_norm_mish(2 * x, *arguments[1:]))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": torch.zeros(3, 4)}, ["x has shape (3, 4)", "[batch, channels, length]"]),
        ({"filters": torch.zeros(6, 3, 5)}, ["filters has shape (6, 3, 5)", "[channels, 4, taps]"]),
        ({"filters": torch.zeros(6, 4, 2)}, ["filters has shape (6, 4, 2)", "odd"]),
        ({"filters": torch.zeros(6, 4, 5).half()}, ["filters has dtype torch.float16"]),
        ({"filters": torch.zeros(5, 4, 6).transpose(0, 2)}, ["filters", "contiguous"]),
        ({"conv_bias": torch.zeros(4)}, ["conv_bias has shape (4,)", "(6,), one number for each channel"]),
        ({"groups": 4}, ["groups is 4 for 6 channels"]),
        ({"scale": torch.zeros(3, 4), "shift": torch.zeros(3, 6)}, ["scale has shape (3, 4)", "(3, 6)"]),
        ({"x": torch.zeros(3, 4, 5000)}, ["groups is 3", "16 × 8192", "4096 elements", "group_norm_mish"]),
        ({"epsilon": -1.0}, ["epsilon is -1.0"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    vector = torch.ones(6)
    good = {"x": torch.zeros(3, 4, 5), "filters": torch.zeros(6, 4, 5), "conv_bias": vector, "groups": 3}
    with pytest.raises(ValueError) as refusal:
        conv_group_norm_mish(**good | {"weight": vector, "bias": vector} | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
