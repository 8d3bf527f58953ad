"""The gradients of attention against float64, on the shapes and masks that break tiles, and their manners."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from course_lib.hardware.device import interpreting
from course_lib.kernels.attention.backward import flash_attention_backward
from course_lib.kernels.attention.backward_reference import attention_backward_reference
from course_lib.kernels.attention.backward_rows import delta_of_rows
from course_lib.kernels.attention.backward_tiles import BackwardTiles
from course_lib.kernels.attention.flash import flash_attention
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.common.tiles import Tiles
from tests.kernels.rounding import largest_error, rounded_otherwise

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
SMALL = BackwardTiles(Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1))
MASKS = [{}, {"causal": True}, {"window": 6}, {"causal": True, "window": 9}]


def tensors(batch, query_heads, key_heads, query_length, key_length, head_dim, dtype=torch.float32, seed=0):
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (query_heads, query_length),
        (key_heads, key_length),
        (key_heads, key_length),
        (query_heads, query_length),
    ]
    return [torch.randn(batch, *shape, head_dim, generator=generator).to(dtype) for shape in shapes]


def assert_right(query, key, value, gradient, tiles=SMALL, deterministic=True, log_sum_exp_gradient=None, **options):
    """Each gradient within twice the error of plain PyTorch in the same dtype, plus a rounding of the largest."""
    inputs = query, key, value
    output, log_sum_exp = flash_attention(*inputs, return_lse=True, tiles=tiles.queries if tiles else None, **options)
    found = flash_attention_backward(
        *inputs, output, log_sum_exp, gradient, tiles=tiles, deterministic=deterministic,
        log_sum_exp_gradient=log_sum_exp_gradient, **options,
    )  # fmt: skip
    wide = [tensor.double() for tensor in (*inputs, gradient)]
    wide_lse = None if log_sum_exp_gradient is None else log_sum_exp_gradient.double()
    exact = attention_backward_reference(*wide, log_sum_exp_gradient=wide_lse, **options)
    plain = rounded_otherwise(
        attention_backward_reference, *inputs, gradient, log_sum_exp_gradient=log_sum_exp_gradient, **options
    )
    for name, ours, right, theirs in zip(("dQ", "dK", "dV"), found, exact, zip(*plain)):
        rounding = 4 * torch.finfo(query.dtype).eps * max(1, right.abs().max().item())
        error, allowed = (ours - right).abs().max(), 2 * largest_error(theirs, right) + rounding
        assert error <= allowed, f"{name} is off by {error:.2e}, {allowed:.2e} are allowed"
        assert ours.dtype == query.dtype and ours.is_contiguous()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_reference_is_what_autograd_makes_of_attention(mask):
    query, key, value, gradient = tensors(2, 4, 2, 13, 9, 16, torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    output, log_sum_exp = attention_reference(*inputs, return_lse=True, **mask)
    sees = log_sum_exp != -math.inf
    lse_gradient = torch.randn(log_sum_exp.shape, dtype=torch.float64) * sees
    loss = (output * gradient).sum() + (log_sum_exp[sees] * lse_gradient[sees]).sum()
    found = attention_backward_reference(*inputs, gradient, log_sum_exp_gradient=lse_gradient, **mask)
    for ours, right in zip(found, torch.autograd.grad(loss, inputs)):
        torch.testing.assert_close(ours, right)


def test_delta_is_the_row_sum_of_p_and_dp_without_p():
    query, key, value, gradient = tensors(1, 2, 2, 20, 30, 17)
    output = attention_reference(query, key, value)
    probabilities = torch.softmax(query @ key.mT / math.sqrt(17), dim=-1)
    expected = (probabilities * (gradient @ value.mT)).sum(-1)
    torch.testing.assert_close(delta_of_rows(output, gradient), expected, rtol=1e-4, atol=1e-5)


# Without shrinking: a failure prints its draw, and smaller ones would take minutes in the interpreter.
@settings(max_examples=15, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_any_shape_strides_dtype_and_mask_are_right(data):
    draw = data.draw
    key_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 1)]))
    lengths = draw(st.tuples(st.integers(1, 50), st.integers(1, 50)))
    head_dim = draw(st.sampled_from([16, 17, 32, 40, 64]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16]))
    inputs = tensors(1, key_heads * group, key_heads, *lengths, head_dim, dtype, draw(st.integers(0, 9)))
    layout = draw(st.sampled_from(["contiguous", "length first", "padded"]))
    if layout == "length first":  # [batch, length, heads, head_dim] in memory
        inputs = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs]
    elif layout == "padded":  # rows wider than the head
        inputs = [torch.nn.functional.pad(tensor, (3, 5))[..., 3:-5] for tensor in inputs]
    window = draw(st.sampled_from([None, None, 0, 1, 15, 16, 40]))
    options = {"causal": draw(st.booleans()), "window": window, "scale": draw(st.sampled_from([None, 0.01, 0.3]))}
    assert_right(*inputs, deterministic=draw(st.booleans()), **options)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 65), (65, 1), (31, 33), (64, 64), (33, 97), (97, 33)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths_around_the_tiles_are_right(lengths, causal):
    assert_right(*tensors(1, 2, 1, *lengths, 24), causal=causal)


@pytest.mark.parametrize("head_dim", [16, 17, 80, 128, 256])
def test_head_dimensions_between_powers_of_two_are_right(head_dim):
    assert_right(*tensors(1, 1, 1, 20, 40, head_dim, torch.float16), causal=True)


def test_the_tiles_of_the_interpreter_are_right():
    assert_right(*tensors(1, 1, 1, 70, 130, 32), tiles=None, causal=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("deterministic", [True, False], ids=["kernel of its own", "atomics"])
def test_large_and_very_negative_scores_are_right(deterministic):
    """Beyond the last key S is 0; where all real scores are far below 0, exp(0 - LSE) there is infinite."""
    query, key, value, gradient = tensors(1, 1, 1, 40, 41, 16)
    assert_right(30 * query, 30 * key, value, gradient, deterministic=deterministic)
    assert_right(30 * query.abs(), -30 * key.abs(), value, gradient, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [True, False], ids=["kernel of its own", "atomics"])
def test_a_gradient_of_stride_0_as_a_sum_has_it_is_right(deterministic):
    query, key, value, _ = tensors(1, 2, 2, 20, 25, 16)
    gradient = torch.ones(()).expand(query.shape)
    assert gradient.stride() == (0, 0, 0, 0)
    assert_right(query, key, value, gradient, deterministic=deterministic)


def test_a_gradient_of_stride_0_in_its_rows_is_right():
    query, key, value, gradient = tensors(2, 2, 2, 20, 25, 16)
    assert_right(query, key, value, gradient[:, :, :1].expand(query.shape))
    assert_right(query, key, value, gradient[:1, :1].expand(query.shape))


def test_one_expanded_key_head_gets_a_gradient_for_each_time_it_is_seen():
    query, key, value, gradient = tensors(1, 4, 1, 20, 20, 16)
    assert_right(query, key.expand(1, 4, 20, 16), value.expand(1, 4, 20, 16), gradient)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_gradient_of_the_log_sum_exp_is_right(mask):
    lse_gradient = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(1))
    assert_right(*tensors(1, 2, 1, 40, 33, 16), log_sum_exp_gradient=lse_gradient, **mask)


@pytest.mark.parametrize("deterministic", [True, False], ids=["kernel of its own", "atomics"])
def test_queries_before_the_first_key_get_zeros_and_give_nothing(deterministic):
    inputs = tensors(1, 1, 1, 9, 4, 16)
    output, log_sum_exp = flash_attention(*inputs[:3], causal=True, return_lse=True)
    query_gradient, *others = flash_attention_backward(
        *inputs[:3], output, log_sum_exp, inputs[3], causal=True, deterministic=deterministic
    )
    assert torch.all(query_gradient[0, 0, :5] == 0)
    assert all(gradient.isfinite().all() for gradient in others)
    assert_right(*inputs, causal=True, deterministic=deterministic)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output": torch.zeros(1, 1, 8, 32)}, r"output has shape \(1, 1, 8, 32\)"),
        ({"output_gradient": torch.zeros(1, 1, 8, 16).half()}, "output_gradient has dtype torch.float16"),
        ({"log_sum_exp": torch.zeros(1, 1, 9)}, "log_sum_exp has shape"),
        ({"log_sum_exp": torch.zeros(1, 1, 8).double()}, "log_sum_exp has dtype torch.float64"),
        ({"log_sum_exp": None}, "log_sum_exp is a NoneType"),
        ({"log_sum_exp_gradient": torch.zeros(1, 1, 3)}, "log_sum_exp_gradient has shape"),
        ({"value": torch.zeros(1, 1, 7, 16)}, "value has shape"),
        ({"window": -1}, "window is -1"),
        ({"scale": 0.0}, "scale is 0.0"),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_bad_input_is_named(change, words):
    names = ("query", "key", "value", "output", "output_gradient")
    arguments = {name: torch.zeros(1, 1, 8, 16) for name in names} | {"log_sum_exp": torch.zeros(1, 1, 8)}
    with pytest.raises(ValueError, match=words):
        flash_attention_backward(**(arguments | change))
