"""A call made once and repeated with other tensors: the same results, and refusals instead of wrong ones.

Here kernels are interpreted, so a repeated call goes through Triton's launcher with the arguments that were kept.
"""

import math
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from course_lib.bench import launches
from course_lib.hardware.meter.traffic import repair_interpreter
from course_lib.hardware.prepared import prepared
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.decode.append import append_to_pages
from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.decode.workspace import decode_workspace
from course_lib.kernels.paged.attention import paged_decode_attention

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU: tests/gpu/test_prepared.py")


@pytest.fixture(autouse=True, scope="module")
def as_in_a_notebook():
    repair_interpreter()


@triton.jit
def scaled_kernel(x_pointer, output_pointer, length, factor, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + places, mask=places < length)
    tl.store(output_pointer + places, x * factor, mask=places < length)


def scaled(x, *, factor=2.0, part=slice(None), output=None):
    output = torch.empty_like(x[part]) if output is None else output
    scaled_kernel[(triton.cdiv(len(output), 4),)](x[part], output, len(output), factor, BLOCK=4)
    return output


def aligned(*shape, dtype=torch.float32):
    """A tensor of random numbers that begins at a multiple of 64 bytes."""
    size = math.prod(shape)
    block = torch.empty(size + 64, dtype=dtype)
    first = -block.data_ptr() % 64 // block.element_size()
    return block[first : first + size].view(shape).normal_()


def decode_inputs(batch=2, query_heads=4, key_heads=2, capacity=150, head_dim=16, seed=0):
    torch.manual_seed(seed)
    tensors = [aligned(batch, query_heads, head_dim)]
    tensors += [aligned(batch, key_heads, capacity, head_dim) for _ in "kv"]
    lengths = torch.empty(64, dtype=torch.int32)[:batch]
    return *tensors, lengths.copy_(torch.randint(1, capacity + 1, (batch,)))


def test_decode_gives_for_other_tensors_what_the_launcher_gives():
    first, buffers = decode_inputs(), {"workspace": decode_workspace(2, 4, 16, 3, "cpu"), "validate": False}
    step = prepared(decode_attention, *first, **buffers)
    for seed in (1, 2, 3):
        others = decode_inputs(seed=seed)
        assert torch.equal(step(*others), decode_attention(*others, splits=3))
    assert torch.equal(step(*first), decode_attention(*first, splits=3)) and step(*first) is step.result
    assert "interpreter" in step.reason


def test_the_log_sum_exp_comes_back_as_well():
    first, other = decode_inputs(), decode_inputs(seed=1)
    step = prepared(decode_attention, *first, splits=1, return_lse=True, validate=False)
    for ours, theirs in zip(step(*other), decode_attention(*other, splits=1, return_lse=True)):
        assert torch.equal(ours, theirs)


def test_keys_and_values_of_one_storage_are_told_apart():
    """Found by storage alone, the values were taken for a part of the keys, and moved with them."""
    query, key, value, lengths = decode_inputs()
    both = torch.stack([key, value])
    step = prepared(decode_attention, query, both[0], both[1], lengths, splits=1, validate=False)
    other = decode_inputs(seed=1)
    assert torch.equal(step(*other), decode_attention(*other, splits=1))


def test_pages_and_whole_attention_are_prepared_too():
    query, _, _, lengths = decode_inputs()
    pages = aligned(20, 2, 16, 16), aligned(20, 2, 16, 16)
    tables = torch.randperm(20, dtype=torch.int32).view(2, 10)
    step = prepared(paged_decode_attention, query, *pages, tables, lengths, splits=1, validate=False)
    query, tables = aligned(2, 4, 16), tables.flip(0).contiguous()
    wanted = paged_decode_attention(query, *pages, tables, lengths, splits=1)
    assert torch.equal(step(query, *pages, tables, lengths), wanted)
    inputs = [aligned(1, heads, 33, 16) for heads in (4, 2, 2)]
    whole = prepared(attention, *inputs, causal=True)
    others = [aligned(1, heads, 33, 16) for heads in (4, 2, 2)]
    assert torch.equal(whole(*others), attention(*others, causal=True))


def test_a_function_that_writes_into_an_input_writes_into_the_one_it_is_given():
    """Its kernel takes another view of each tensor, as integers."""
    key, value = aligned(3, 2, 16), aligned(3, 2, 16)
    pools = [torch.zeros(4, 2, 4, 16) for _ in range(4)]
    slots = torch.tensor([5, 0, 9])
    step = prepared(append_to_pages, key, value, *pools[:2], slots, validate=False)
    other = aligned(3, 2, 16)
    assert step(other, value, *pools[2:], slots) is None
    assert torch.equal(pools[2][1, :, 1], other[0]) and torch.equal(pools[3][1, :, 1], value[0])
    assert torch.equal(pools[0][1, :, 1], key[0])


@triton.jit
def copied_kernel(x_pointer, output_pointer, length, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(output_pointer + places, tl.load(x_pointer + places, mask=places < length), mask=places < length)


def test_a_view_as_longer_words_moves_with_its_input():
    """A kernel that takes four numbers of 16 bits as one word of 64."""

    def copied(x):
        output = torch.empty_like(x)
        copied_kernel[(1,)](x[4:].view(torch.int64), output[4:].view(torch.int64), len(x) // 4 - 1, BLOCK=8)
        return output[4:]

    x, other = (aligned(24, dtype=torch.float16) for _ in range(2))
    step = prepared(copied, x)
    assert torch.equal(step(other), other[4:])


def test_a_view_moves_with_its_input():
    x, other = aligned(20), aligned(20)
    step = prepared(scaled, x, part=slice(3, 15))
    assert torch.equal(step(other), other[3:15] * 2)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda x: aligned(21), r"input 0 has shape \(21,\); scaled was prepared for \(20,\)"),
        (lambda x: aligned(40)[::2], r"input 0 has strides \(2,\); scaled was prepared for \(1,\)"),
        (lambda x: x.double(), "input 0 has dtype torch.float64"),
        (lambda x: x.to("meta"), "input 0 has device meta"),
        (lambda x: aligned(24)[1:21], "input 0 begins 4 bytes after a multiple of 16"),
    ],
)
def test_another_layout_is_refused_and_nothing_is_launched(change, words):
    x = aligned(20)
    step = prepared(scaled, x)
    before = step.result.clone()
    with pytest.raises(ValueError, match=words):
        step(change(x))
    assert torch.equal(step.result, before)


def test_what_was_prepared_without_alignment_takes_either():
    step = prepared(scaled, aligned(24)[1:21])
    for x in (aligned(20), aligned(24)[2:22]):
        assert torch.equal(step(x), x * 2)


def test_another_number_of_tensors_is_refused():
    step = prepared(scaled, x := aligned(20))
    with pytest.raises(ValueError, match="2 tensors were given; scaled was prepared for 1"):
        step(x, x)


def also_adds(x):
    return scaled(x) + 1


def also_reads_a_number(x):
    return scaled(x, factor=x.max().item())


@pytest.mark.parametrize("function, operation", [(also_adds, "aten.add"), (also_reads_a_number, "aten.max")])
def test_a_function_that_does_more_than_launch_is_refused_by_what_it_does(function, operation):
    with pytest.raises(RuntimeError, match=f"besides launching kernels it does {operation}"):
        prepared(function, aligned(20))


def test_lengths_that_are_read_on_the_host_are_refused():
    with pytest.raises(RuntimeError, match="cannot be prepared.*validate=False"):
        prepared(decode_attention, *decode_inputs(), splits=1)


def test_a_function_without_a_kernel_is_refused():
    with pytest.raises(RuntimeError, match="launched no Triton kernel"):
        prepared(torch.empty_like, aligned(20))


def test_views_of_inputs_that_overlap_cannot_be_told_apart():
    def pair(x, y, *, output):
        return scaled(x, output=output, part=slice(0, 8))

    x = aligned(20)
    with pytest.raises(RuntimeError, match="inputs 0 and 1 lie in the same memory"):
        prepared(pair, x, x, output=torch.empty(8))


def test_what_is_no_tensor_has_a_name():
    with pytest.raises(ValueError, match="input 1 is a float; pass what is no tensor by its name"):
        prepared(scaled, aligned(20), 2.0)


def test_a_partial_has_its_arguments_fixed_too():
    x, other = aligned(20), aligned(20)
    assert torch.equal(prepared(partial(scaled, factor=3.0), x)(other), other * 3)


def test_the_benchmark_measures_the_python_of_a_call_and_says_what_it_cannot(capsys):
    assert launches.main([]) == 0
    said = capsys.readouterr().out
    assert "whole calls, and Triton's own part of them, cannot be measured" in said
    python = {}
    for line in said.splitlines():
        if line.startswith("  "):
            way, number = line.split("–")[0].rsplit(maxsplit=1)
            python.setdefault(way.strip(), []).append(float(number))
    assert len(python["decided anew"]) == len(python["prepared"]) == 2
    assert all(2 * short < whole for short, whole in zip(python["prepared"], python["decided anew"]))
