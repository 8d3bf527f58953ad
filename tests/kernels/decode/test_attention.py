"""Decode over a contiguous cache against float64: any group, head dimension, lengths, strides and number of splits."""

import math
from random import Random

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.decode.reference import decode_attention_reference
from course_lib.kernels.decode.tiles import cheapest_plan, windowed
from course_lib.kernels.decode.workspace import decode_workspace
from tests.kernels.decode.cases import (
    assert_close_to_float64,
    forget_beyond,
    largest_terms,
    odd_strides,
    plain_results,
    random_tensor,
)

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


def tensors(draw, batch, key_heads, group, capacity, head_dim, dtype=torch.float32):
    query = random_tensor(draw, batch, key_heads * group, head_dim, dtype=dtype)
    return query, *(random_tensor(draw, batch, key_heads, capacity, head_dim, dtype=dtype) for _ in range(2))


def sinks(query_heads, around=0.0):
    """A sink for each head, near a number."""
    return around + torch.linspace(-1, 2, query_heads)


def assert_right(query, key, value, lengths, case="", **options):
    ours = decode_attention(query, key, value, lengths, return_lse=True, **options)
    known = [torch.nan_to_num(tensor) for tensor in (key, value)]
    scale = {name: options.get(name) for name in ("window", "scale", "sink")}
    right = decode_attention_reference(
        query.double(), *(tensor.double() for tensor in known), lengths, return_lse=True, **scale
    )
    theirs = plain_results(decode_attention_reference, query, *known, lengths, **scale)
    assert_close_to_float64(ours, right, theirs, case, largest_terms(query, key, options.get("scale")))
    return ours


@pytest.mark.parametrize("seed", range(24))
def test_any_shape_lengths_strides_and_splits_are_right(seed):
    draw = Random(seed)
    batch, key_heads, group = draw.choice([(1, 1, 1), (2, 1, 3), (1, 2, 4), (3, 1, 8), (1, 1, 16), (1, 1, 32)])
    capacity, head_dim = draw.randint(1, 150), draw.choice([16, 33, 64, 80, 96, 128])
    query, key, value = tensors(
        draw, batch, key_heads, group, capacity, head_dim, draw.choice([torch.float32, torch.float16])
    )
    lengths = torch.tensor([draw.choice([0, 1, capacity, draw.randint(0, capacity)]) for _ in range(batch)])
    lengths = lengths.to(draw.choice([torch.int32, torch.int64]))
    key, value = forget_beyond(key, lengths), forget_beyond(value, lengths)
    if draw.random() < 0.5:
        query, key, value = odd_strides(query), odd_strides(key), odd_strides(value)
    splits, scale = draw.choice([None, 1, 2, 3, 5]), draw.choice([None, 0.3])
    window, sink = draw.choice([None, None, 0, 1, 40, 200]), draw.choice([None, sinks(query.shape[1])])
    assert_right(
        query,
        key,
        value,
        lengths,
        splits=splits,
        window=window,
        scale=scale,
        sink=sink,
        case=f"{seed=} {key_heads=} {group=} {capacity=} {head_dim=} {lengths=} {splits=} {window=}",
    )


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_lengths_around_tiles_and_splits_are_right(length, splits):
    draw = Random(length)
    assert_right(*tensors(draw, 1, 1, 2, 130, 16), torch.tensor([length]), splits=splits)


@pytest.mark.parametrize("window", [0, 1, 63, 64, 100, 129, 2**40])
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_a_window_is_right_whatever_lies_before_it(window, splits):
    """NaN in keys and values outside, also where the window begins in the middle of a tile."""
    query, key, value = tensors(Random(0), 3, 1, 2, 130, 16)
    lengths = torch.tensor([130, 0, 65])
    seen = torch.arange(130) >= lengths[:, None] - 1 - window
    key, value = (forget_beyond(cache, lengths).where(seen[:, None, :, None], math.nan) for cache in (key, value))
    output, _ = assert_right(query, key, value, lengths, window=window, splits=splits)
    assert output.isfinite().all()


@pytest.mark.parametrize("around", [-1e4, 0.0, 1e4], ids=str)
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_a_sink_is_added_once_whatever_the_splits(splits, around):
    """Of 7 splits of 5 keys two are empty, and a sequence of none has its sink alone."""
    query, key, value = tensors(Random(0), 2, 2, 3, 20, 16)
    sink = sinks(6, around)
    output, lse = assert_right(query, key, value, torch.tensor([5, 0]), sink=sink, splits=splits)
    assert torch.all(output[1] == 0)
    torch.testing.assert_close(lse[1], sink)


def test_a_sink_reaches_the_heads_of_every_program_of_a_group():
    assert_right(*tensors(Random(0), 1, 1, 100, 40, 16), torch.tensor([40]), splits=2, sink=sinks(100))


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_only_the_keys_of_the_window_are_read(splits):
    """Their bytes once, whatever the window's edge: not those of a tile that begins at a multiple of its size."""
    query, key, value = tensors(Random(0), 2, 2, 2, 300, 16)
    report = metered(decode_attention, query, key, value, torch.tensor([300, 20]), window=63, splits=splits)
    for name in ("key_pointer", "value_pointer"):
        assert report[name].loaded_bytes == (64 + 20) * 2 * 16 * 4  # keys, heads, numbers, bytes


def test_the_plan_is_made_for_the_keys_of_the_window():
    query = torch.zeros(1, 8, 128, device="meta", dtype=torch.float16)
    assert windowed(131072, 4096) == (4097, 4096) and windowed(100, 2**40) == (100, 100)
    assert windowed(100, None) == (100, None)
    longest = [windowed(131072, window)[0] for window in (None, 100)]
    many, few = (cheapest_plan(90, query.dtype, 128, 1, 4, 2, keys, 132, None).splits for keys in longest)
    assert few < many


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_head_dimensions_are_right(head_dim):
    assert_right(*tensors(Random(0), 1, 1, 4, 70, head_dim, torch.float16), torch.tensor([70]), splits=2)


def test_a_group_larger_than_a_tile_takes_several_programs():
    assert_right(*tensors(Random(0), 1, 1, 100, 40, 16), torch.tensor([40]), splits=2)


def test_large_scores_do_not_overflow():
    query, key, value = tensors(Random(0), 1, 1, 2, 90, 16)
    assert_right(100 * query, 100 * key, value, torch.tensor([90]), splits=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim, length", [(16, 5), (128, 150), (64, 3000)])
def test_the_tolerance_sees_a_log_sum_exp_without_the_last_key(dtype, head_dim, length):
    query, key, value = tensors(Random(length), 1, 1, 4, length, head_dim, dtype)
    exact = [tensor.double() for tensor in (query, key, value)]
    output, lse = decode_attention_reference(*exact, torch.tensor([length]), return_lse=True)
    _, without = decode_attention_reference(*exact, torch.tensor([length - 1]), return_lse=True)
    theirs = plain_results(decode_attention_reference, query, key, value, torch.tensor([length]))
    assert_close_to_float64((output.to(dtype), lse.float()), (output, lse), theirs, terms=largest_terms(query, key))
    with pytest.raises(AssertionError):
        assert_close_to_float64(
            (output.to(dtype), without.float()), (output, lse), theirs, terms=largest_terms(query, key)
        )


@pytest.mark.parametrize("splits", [1, 4])
def test_a_sequence_without_tokens_gets_zeros(splits):
    query, key, value = tensors(Random(0), 2, 1, 2, 20, 16)
    output, lse = decode_attention(
        query, key * math.nan, value * math.nan, torch.tensor([0, 0]), splits=splits, return_lse=True
    )
    assert torch.all(output == 0) and torch.all(lse == -math.inf)


def test_more_splits_than_tokens_leave_splits_without_keys():
    assert_right(*tensors(Random(0), 2, 1, 2, 20, 16), torch.tensor([3, 0]), splits=8)


def test_buffers_that_are_given_are_used_again_and_again():
    query, key, value = tensors(Random(0), 2, 2, 2, 80, 32)
    lengths = torch.tensor([80, 41], dtype=torch.int32)
    output, workspace = torch.full_like(query, math.nan), decode_workspace(2, 4, 32, splits=3, device="cpu")
    results = []
    for _ in range(3):
        result, lse = assert_right(query, key, value, lengths, splits=3, output=output, workspace=workspace)
        assert result.data_ptr() == output.data_ptr() and lse.data_ptr() == workspace.lse.data_ptr()
        assert torch.all(workspace.arrivals == 0), "the counters must be 0 for the next step"
        results.append(result.clone())
    assert all(torch.equal(result, results[0]) for result in results)


def test_an_output_with_gaps_is_written_in_its_place_alone():
    query, key, value = tensors(Random(0), 1, 1, 2, 30, 16)
    wide = torch.full((1, 4, 20), 7.0)
    decode_attention(query, key, value, torch.tensor([30]), output=wide[:, 1:3, 2:18], splits=2)
    assert torch.equal(wide[:, 1:3, 2:18], decode_attention(query, key, value, torch.tensor([30]), splits=2))
    wide[:, 1:3, 2:18] = 7.0
    assert torch.all(wide == 7.0)


def good_inputs():
    query, key, value = tensors(Random(0), 2, 2, 2, 8, 16)
    return {"query": query, "key_cache": key, "value_cache": value, "lengths": torch.tensor([8, 3])}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"query": torch.zeros(2, 4, 1, 16)}, ["query", "(2, 4, 1, 16)", "[batch, query_heads, head_dim]"]),
        ({"query": torch.zeros(2, 3, 16)}, ["query", "3 heads", "multiple of the 2", "key_cache"]),
        ({"query": torch.zeros(2, 4, 16).bfloat16()}, ["query", "bfloat16", "float16"]),
        ({"query": torch.zeros(2, 4, 32)}, ["key_cache", "head dimension 16", "32"]),
        ({"query": torch.zeros(3, 4, 16)}, ["key_cache", "batch size 2", "3"]),
        ({"query": torch.zeros(2, 16, 4).transpose(1, 2)}, ["query", "stride", "contiguous()"]),
        ({"key_cache": torch.zeros(2, 2, 8, 16).half()}, ["key_cache", "float16", "float32"]),
        ({"value_cache": torch.zeros(2, 2, 9, 16)}, ["value_cache", "(2, 2, 9, 16)", "(2, 2, 8, 16)"]),
        ({"lengths": torch.tensor([8, -1])}, ["lengths[1]", "-1", "0 tokens or more"]),
        ({"lengths": torch.tensor([9, 3])}, ["lengths[0]", "9", "room for 8"]),
        ({"lengths": torch.tensor([8, 3, 3])}, ["lengths", "(3,)", "2"]),
        ({"lengths": torch.tensor([8.0, 3.0])}, ["lengths", "float32", "int32"]),
        ({"lengths": [8, 3]}, ["lengths", "list"]),
        ({"lengths": torch.tensor([8, 0, 3, 0])[::2]}, ["lengths", "stride 2", "contiguous()"]),
        ({"scale": -1.0}, ["scale", "-1.0", "above 0"]),
        ({"window": -1}, ["window", "-1", "0"]),
        ({"sink": torch.zeros(2)}, ["sink", "2 numbers", "4 heads"]),
        ({"splits": 0}, ["splits", "0", "at least 1"]),
        ({"output": torch.zeros(2, 4, 8)}, ["output", "(2, 4, 8)", "(2, 4, 16)"]),
        ({"workspace": torch.zeros(3)}, ["workspace", "Tensor", "decode_workspace"]),
        ({"workspace": decode_workspace(2, 4, 16, 3, "cpu"), "splits": 2}, ["workspace", "[3, 2, 4, 16]", "splits=3"]),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, dict) else "",
)
def test_bad_input_is_refused_with_the_argument_its_value_and_what_is_allowed(change, words):
    with pytest.raises(ValueError) as refusal:
        decode_attention(**(good_inputs() | change))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
