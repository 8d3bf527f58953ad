"""FlashAttention against float64, on the shapes and masks that break tiles, and its manners with bad input."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from course_lib.hardware.device import interpreting
from course_lib.kernels.attention.flash import flash_attention
from course_lib.kernels.attention.flash_tma import flash_attention_tma
from course_lib.kernels.attention.reference import attention_reference, visible_keys
from course_lib.kernels.attention.tiles import candidate_tiles
from course_lib.kernels.common.tiles import Tiles
from tests.kernels.rounding import largest_error, rounded_otherwise

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
SMALL = Tiles(32, 16, warps=4, stages=1)


def tensors(batch, query_heads, key_heads, query_length, key_length, head_dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(query_heads, query_length), (key_heads, key_length), (key_heads, key_length)]
    return [torch.randn(batch, *shape, head_dim, generator=generator).to(dtype) for shape in shapes]


def sinks(query_heads, around=0.0):
    """A sink for each head, near a number."""
    return around + torch.linspace(-1, 2, query_heads)


def assert_right(query, key, value, tiles=SMALL, **options):
    """Output and log-sum-exp within twice the error of plain PyTorch in the same dtype, plus its rounding."""
    output, lse = flash_attention(query, key, value, return_lse=True, tiles=tiles, **options)
    wide = [tensor.double() for tensor in (query, key, value)]
    expected, expected_lse = attention_reference(*wide, return_lse=True, **options)
    plain = rounded_otherwise(attention_reference, query, key, value, return_lse=True, **options)
    for ours, right, theirs in zip((output, lse), (expected, expected_lse), zip(*plain)):
        ours_dtype, empty = ours.dtype, right == -math.inf
        assert torch.equal(ours == -math.inf, empty)
        allowed = 2 * largest_error(theirs, right)
        ours, right = (tensor.double().masked_fill(empty, 0) for tensor in (ours, right))
        # Four roundings of the last digit: of the maximum, the logarithm, their sum and its product with log 2.
        rounding = 4 * torch.finfo(ours_dtype).eps * max(1, right.abs().max().item())
        assert (ours - right).abs().max() <= allowed + rounding
    assert output.dtype == query.dtype and output.shape == query.shape and lse.dtype == torch.float32


# Without shrinking: a failure prints its draw, and smaller ones would take minutes in the interpreter.
@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
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
    scale = draw(st.sampled_from([None, 0.01, 0.3]))
    sink = draw(st.sampled_from([None, sinks(key_heads * group), sinks(key_heads * group).to(dtype)]))
    assert_right(*inputs, causal=draw(st.booleans()), window=window, scale=scale, sink=sink)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 65), (65, 1), (31, 33), (64, 64), (33, 97), (97, 33)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths_around_the_tiles_are_right(lengths, causal):
    assert_right(*tensors(1, 2, 1, *lengths, 24), causal=causal)


@pytest.mark.parametrize("head_dim", [16, 17, 80, 128, 256])
def test_head_dimensions_between_powers_of_two_are_right(head_dim):
    assert_right(*tensors(1, 1, 1, 20, 40, head_dim, torch.float16), causal=True)


def test_the_tiles_of_the_interpreter_are_right():
    assert_right(*tensors(1, 1, 1, 70, 130, 32), tiles=None, causal=True)


def test_large_scores_do_not_overflow():
    query, key, value = tensors(1, 1, 1, 40, 40, 16)
    assert_right(100 * query, 100 * key, value)


def test_one_expanded_key_head_serves_as_many():
    query, key, value = tensors(1, 4, 1, 20, 20, 16)
    shared = flash_attention(query, key.expand(1, 4, 20, 16), value.expand(1, 4, 20, 16), tiles=SMALL)
    assert torch.equal(shared, flash_attention(query, key, value, tiles=SMALL))


# -------------------------------------------------------------------------------------------------------------- sinks


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 5}], ids=str)
def test_the_sink_of_the_reference_is_a_column_that_has_no_value(mask):
    """The column made by hand: a key of its own, whose score is the sink, and whose value is zero."""
    query, key, value = tensors(2, 4, 2, 9, 6, 16, torch.float64)
    sink = sinks(4).double()
    scores = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) / 4
    scores = scores.masked_fill(~visible_keys(9, 6, **mask), -math.inf)
    powers = torch.cat([scores, sink.view(4, 1, 1).expand(2, 4, 9, 1)], dim=-1).exp()
    weights = powers / powers.sum(dim=-1, keepdim=True)
    values = torch.nn.functional.pad(value.repeat_interleave(2, dim=1), (0, 0, 0, 1))
    output, lse = attention_reference(query, key, value, sink=sink, return_lse=True, **mask)
    torch.testing.assert_close(output, weights @ values)
    torch.testing.assert_close(lse, powers.sum(dim=-1).log())


@pytest.mark.parametrize("around", [-1e4, 0.0, 1e4], ids=str)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 5}], ids=str)
def test_a_sink_of_any_size_joins_the_sum_of_its_head(around, mask):
    assert_right(*tensors(2, 4, 2, 33, 37, 16), sink=sinks(4, around), **mask)


def test_the_kernel_of_the_copy_engine_takes_a_sink():
    query, key, value = tensors(2, 4, 2, 33, 37, 16)
    options = {"causal": True, "window": 5, "sink": sinks(4), "return_lse": True, "tiles": SMALL}
    ours = flash_attention_tma(query, key, value, **options)
    for found, right in zip(ours, flash_attention(query, key, value, **options)):
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


def test_scores_far_below_the_sink_and_far_below_zero_are_right():
    """A running maximum that began at -5e4 gave zeros for scores of -2.45e5 (flashinfer#4267)."""
    query, key, value = tensors(1, 1, 1, 20, 20, 16)
    query, key = 1000 * (1 + query.abs()), -20 - key.abs()  # every score is below -8e4
    assert attention_reference(query, key, value, return_lse=True)[1].max() < -8e4
    assert_right(query, key, value)
    assert_right(query, key, value, sink=sinks(1))
    assert_right(query, key, value, sink=torch.tensor([-2.5e5]))


def test_a_row_that_sees_no_key_has_its_sink_alone():
    sink = sinks(2)
    output, lse = flash_attention(*tensors(1, 2, 1, 9, 4, 16), causal=True, sink=sink, return_lse=True, tiles=SMALL)
    assert torch.all(output[:, :, :5] == 0) and torch.all(output[:, :, 5:] != 0)
    torch.testing.assert_close(lse[0, :, :5], sink[:, None].expand(2, 5))


def test_a_sink_of_minus_infinity_is_none():
    inputs = tensors(1, 2, 1, 9, 4, 16)
    none = flash_attention(*inputs, causal=True, return_lse=True, tiles=SMALL)
    lowest = flash_attention(*inputs, causal=True, sink=torch.full((2,), -math.inf), return_lse=True, tiles=SMALL)
    assert all(torch.equal(*pair) for pair in zip(none, lowest))


def test_a_sink_of_nan_reaches_the_rows_of_its_head():
    inputs, sink = tensors(1, 3, 1, 9, 9, 16), sinks(3)
    clean = flash_attention(*inputs, sink=sink, tiles=SMALL)
    output = flash_attention(*inputs, sink=sink.index_fill(0, torch.tensor([1]), math.nan), tiles=SMALL)
    assert output[:, 1].isnan().all() and torch.equal(output[:, ::2], clean[:, ::2])


def test_queries_before_the_first_key_get_zeros():
    output, lse = flash_attention(*tensors(1, 1, 1, 9, 4, 16), causal=True, return_lse=True, tiles=SMALL)
    assert torch.all(output[0, 0, :5] == 0) and torch.all(lse[0, 0, :5] == -math.inf)
    assert torch.all(output[0, 0, 5:] != 0) and torch.all(lse[0, 0, 5:].isfinite())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 5}, {"window": 6}], ids=str)
def test_a_bad_number_reaches_only_the_rows_that_see_it(bad, name, mask):
    """0 · NaN is NaN: a tile under the mask used to hand a NaN in value to rows that may not see its key."""
    inputs = dict(zip(("query", "key", "value"), tensors(1, 2, 2, 40, 40, 16)))
    clean = flash_attention(**inputs, **mask, tiles=SMALL)
    inputs[name][0, 1, 21, 3] = bad
    output = flash_attention(**inputs, **mask, tiles=SMALL)
    touched = torch.zeros(1, 2, 40, dtype=torch.bool)
    touched[0, 1] = torch.arange(40) == 21 if name == "query" else visible_keys(40, 40, **mask)[:, 21]
    assert torch.allclose(output[~touched], clean[~touched], atol=1e-6)
    if name == "value":
        column = output[touched][:, 3]
        assert column.isnan().all() if math.isnan(bad) else (column == bad).all()


def test_keys_that_the_mask_hides_are_not_read():
    """Tiles above the diagonal and left of the window are skipped: the values there could not even be NaN."""
    query, key, value = tensors(1, 1, 1, 64, 64, 16)
    last_rows = flash_attention(query[:, :, -8:], key, value, causal=True, window=7, tiles=SMALL)
    key[:, :, :32], value[:, :, :32] = math.nan, math.nan
    again = flash_attention(query[:, :, -8:], key, value, causal=True, window=7, tiles=SMALL)
    assert torch.equal(last_rows, again)


def good_inputs():
    return dict(zip(("query", "key", "value"), tensors(1, 2, 1, 4, 4, 16)))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"query": torch.zeros(2, 4, 16)}, ["query", "(2, 4, 16)", "[batch, heads, length, head_dim]"]),
        ({"query": torch.zeros(0, 2, 4, 16)}, ["query", "(0, 2, 4, 16)"]),
        ({"query": torch.zeros(1, 2, 4, 8)}, ["8"]),
        ({"query": [1.0]}, ["query", "list"]),
        ({"key": torch.zeros(1, 1, 4, 32)}, ["key", "32", "16"]),
        ({"key": torch.zeros(2, 1, 4, 16)}, ["key", "batch size 2", "1"]),
        ({"key": torch.zeros(1, 1, 4, 16).half()}, ["key", "float16", "float32"]),
        ({"key": torch.zeros(1, 1, 4, 16, device="meta")}, ["key", "meta", "cpu"]),
        ({"value": torch.zeros(1, 1, 5, 16)}, ["value", "(1, 1, 5, 16)", "(1, 1, 4, 16)"]),
        ({"query": torch.zeros(1, 2, 16, 4).transpose(2, 3)}, ["query", "stride", "contiguous()"]),
        ({"query": torch.zeros(1, 2, 4, 16).bfloat16()}, ["query", "bfloat16", "float16"]),
        ({"query": torch.zeros(1, 2, 4, 16).int()}, ["query", "int32", "float32"]),
        ({"window": -1}, ["window", "-1", "0"]),
        ({"window": 2.5}, ["window", "2.5"]),
        ({"scale": -1.0}, ["scale", "-1.0", "0"]),
        ({"scale": 0.0}, ["scale", "0.0", "above 0"]),
        ({"scale": math.nan}, ["scale", "nan"]),
        ({"sink": 0.5}, ["sink", "float", "torch.Tensor"]),
        ({"sink": torch.zeros(1, 2)}, ["sink", "(1, 2)", "[query_heads]"]),
        ({"sink": torch.zeros(1)}, ["sink", "1 numbers", "2 heads"]),
        ({"sink": torch.zeros(2).double()}, ["sink", "float64", "float32"]),
        ({"sink": torch.zeros(2).half()}, ["sink", "float16", "float32"]),
        ({"sink": torch.zeros(2, device="meta")}, ["sink", "meta", "cpu"]),
        ({"sink": torch.zeros(()).expand(2)}, ["sink", "(0,)", "contiguous()"]),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, dict) else "",
)
def test_bad_input_is_refused_with_the_argument_its_value_and_what_is_allowed(change, words):
    with pytest.raises(ValueError) as refusal:
        flash_attention(**(good_inputs() | change))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_head_dimensions_beyond_256_and_uneven_groups_are_refused():
    with pytest.raises(ValueError, match="head dimension 272.*16 to 256"):
        flash_attention(*tensors(1, 1, 1, 2, 2, 272))
    with pytest.raises(ValueError, match="3 heads.*multiple of the 2"):
        flash_attention(*tensors(1, 3, 2, 2, 2, 16))


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_architecture_has_tiles_for_every_head_dimension(arch, dtype):
    assert all(candidate_tiles(arch, dtype, block_d) for block_d in (16, 32, 64, 128, 256))
