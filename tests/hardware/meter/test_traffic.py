"""The traffic meter counts exactly, finds what leaves a tensor, and never lets it through."""

import contextlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.language import arange, load, static_range
from triton.language import store as put
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from course_lib.hardware.meter import traffic
from course_lib.hardware.meter.traffic import (
    MeterUnavailable,
    TrafficMeter,
    accounts,
    record_launches,
    self_test,
    tensors,
    triton_internals,
)

pytestmark = pytest.mark.skipif(not triton_internals.interpreting(), reason="the meter works in the interpreter")


@triton.jit
def copy_kernel(source, target, length, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + lanes, tl.load(source + lanes, mask=lanes < length), mask=lanes < length)


@triton.jit
def unmasked_load_kernel(source, target, length, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + lanes)
    tl.store(target + lanes, values, mask=lanes < length)


@triton.jit
def unmasked_store_kernel(source, target, length, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + lanes, mask=lanes < length, other=7.0)
    tl.store(target + lanes, values)


@triton.jit
def shifted_load_kernel(source, target, shift, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(target + lanes, tl.load(source + lanes + shift))


@triton.jit
def overlapping_kernel(source, target, step, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(target + tl.program_id(0) * step + lanes, tl.load(source + lanes))


@triton.jit
def matrix_kernel(matrix, total, rows, columns, row_stride, column_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    values = tl.load(matrix + row * row_stride + lanes * column_stride, mask=lanes < columns, other=0.0)
    tl.store(total + row, tl.sum(values))


@triton.jit
def run_time_loop_kernel(source, target, repeats_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(tl.load(repeats_ptr)):
        total += tl.load(source + lanes)
    tl.store(target + lanes, total)


@triton.jit
def atomic_kernel(counters, old, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.atomic_add(counters + lanes // 2, 1.0)
    tl.atomic_cas(old + tl.program_id(0), 0, 5)


@triton.jit
def device_descriptor_kernel(source, target, rows, columns, BLOCK: tl.constexpr):
    read = tl.make_tensor_descriptor(source, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    write = tl.make_tensor_descriptor(target, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    row = tl.program_id(0) * BLOCK
    write.store([row, 0], read.load([row, 0]))


@triton.jit
def host_descriptor_kernel(read, write, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK
    write.store([row, 0], read.load([row, 0]))


@triton.jit
def careless_helper(pointer, lanes):
    return tl.load(pointer + lanes)


@triton.jit
def calling_kernel(source, target, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = careless_helper(source, lanes)
    tl.store(target + lanes, values)


@triton.jit
def table_kernel(table, target, BLOCK: tl.constexpr):
    page = tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    lanes = tl.arange(0, BLOCK)
    tl.store(target + tl.program_id(0) * BLOCK + lanes, tl.load(page + lanes))


@triton.jit
def mixed_pointer_kernel(left, right, target, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    pointers = tl.where(lanes % 2 == 0, left + lanes, right + lanes)
    tl.store(target + lanes, tl.load(pointers))


@triton.jit
def product_kernel(left, right, target, SIDE: tl.constexpr):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, SIDE)[None, :]
    tile = tl.load(left + rows * SIDE + columns)  # [16, SIDE]
    other = tl.load(right + tl.arange(0, SIDE)[:, None] * 32 + tl.arange(0, 32)[None, :])  # [SIDE, 32]
    tl.store(target + rows * 32 + tl.arange(0, 32)[None, :], tl.dot(tile.to(tl.float32), other))


@triton.jit
def failing_kernel(source, BLOCK: tl.constexpr):
    tl.load(source + tl.arange(0, BLOCK))
    tl.static_assert(BLOCK > 1000, "too small")


def line_of(kernel, text):
    """Line number, in this file, of the one line of a kernel that contains a text."""
    lines, first = inspect.getsourcelines(kernel.fn)
    matches = [first + number for number, line in enumerate(lines) if text in line]
    assert len(matches) == 1
    return matches[0]


def triton_state():
    """Everything of Triton that the meter replaces."""
    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    return (
        interpreter._interpreter,
        interpreter._implicit_cvt,
        executor._init_args_hst,
        executor.__call__,
        "set_grid_dim" in vars(builder),
        interpreter.InterpreterBuilder.create_dot,
    )


# ---------------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool])
def test_a_masked_tail_counts_active_lanes_only(dtype):
    source, target = torch.ones(1000).to(dtype), torch.zeros(1000).to(dtype)
    with TrafficMeter() as meter:
        copy_kernel[(8,)](source, target, 1000, BLOCK=128)
    report = meter.report()
    size = 1000 * source.element_size()
    assert (report["source"].loaded_bytes, report["source"].stored_bytes) == (size, 0)
    assert (report["target"].loaded_bytes, report["target"].stored_bytes) == (0, size)
    assert report["source"].distinct_loaded_bytes == report["target"].distinct_stored_bytes == size
    assert report["source"].loads == report["target"].stores == 8
    assert report.out_of_bounds == () and report.total_bytes == 2 * size
    assert torch.equal(source, target)


@settings(max_examples=20)
@given(length=st.integers(1, 300), block=st.sampled_from([16, 64, 128]))
def test_any_length_and_block_count_each_element_once(length, block):
    source, target = torch.randn(length), torch.empty(length)
    with TrafficMeter() as meter:
        copy_kernel[(triton.cdiv(length, block),)](source, target, length, BLOCK=block)
    assert (meter.report().loaded_bytes, meter.report().stored_bytes) == (4 * length, 4 * length)
    assert not meter.report().out_of_bounds


def test_reading_again_shows_as_times_read():
    source, target = torch.randn(64), torch.empty(64)
    with TrafficMeter() as meter:
        run_time_loop_kernel[(1,)](source, target, torch.tensor([5]), BLOCK=64)
    assert meter.report()["source"].times_read == 5.0
    assert meter.report()["source"].distinct_loaded_bytes == 256
    torch.testing.assert_close(target, source * 5)


def test_strides_are_followed_and_gaps_are_not_counted():
    matrix, total = torch.randn(6, 40)[:, ::2], torch.empty(6)
    with TrafficMeter(matrix=matrix) as meter:
        matrix_kernel[(6,)](matrix, total, 6, 20, *matrix.stride(), BLOCK=32)
    assert meter.report()["matrix"].loaded_bytes == meter.report()["matrix"].distinct_loaded_bytes == 6 * 20 * 4
    assert not meter.report().out_of_bounds
    torch.testing.assert_close(total, matrix.sum(dim=1))


def test_neighbouring_lanes_that_read_distant_bytes_cost_whole_sectors():
    rows, total = torch.randn(32, 32), torch.empty(32)
    sectors = []
    for matrix in (rows, rows.T):
        with TrafficMeter(count_sectors=True, matrix=matrix) as meter:
            matrix_kernel[(32,)](matrix, total, 32, 32, *matrix.stride(), BLOCK=32)
        sectors.append(meter.report()["matrix"].loaded_sector_bytes)
    assert sectors == [32 * 32 * 4, 32 * 32 * 32]


def test_two_launches_add_up_and_are_both_listed():
    source, target = torch.randn(100), torch.empty(100)
    with TrafficMeter() as meter:
        copy_kernel[(1,)](source, target, 100, BLOCK=128)
        copy_kernel[(2,)](source, target, 100, BLOCK=64)
    report = meter.report()
    assert [(launch.kernel, launch.grid) for launch in report.launches] == [
        ("copy_kernel", (1, 1, 1)),
        ("copy_kernel", (2, 1, 1)),
    ]
    assert report["source"].loaded_bytes == 800 and report["source"].distinct_loaded_bytes == 400
    assert report.launches[0].line == line_of(copy_kernel, "def copy_kernel")


@pytest.mark.parametrize(
    "memory, contended",
    [
        (lambda x: (x, torch.empty(64)), 0),
        (lambda x: (x, x), 256),
        (lambda x: (x, x[32:]), 128),  # another view of the same memory
        (lambda x: (x, torch.empty(1).expand(64)), 0),  # its stride does not matter: the kernel writes 64 elements
    ],
    ids=["two tensors", "in place", "views that overlap", "outside"],
)
def test_memory_that_is_stored_and_loaded_is_contended(memory, contended):
    source, target = memory(torch.zeros(96))
    with TrafficMeter() as meter:
        copy_kernel[(4,)](source, target, 64, BLOCK=16)
    assert meter.report().contended_bytes == contended


def test_memory_that_a_launch_stores_twice_or_updates_is_contended():
    source, target = torch.zeros(16), torch.empty(28)
    with TrafficMeter() as meter:
        overlapping_kernel[(2,)](source, target, 12, BLOCK=16)
    assert meter.report().contended_bytes == 4 * 4
    counters, old = torch.zeros(8), torch.zeros(4, dtype=torch.int32)
    with TrafficMeter() as meter:
        atomic_kernel[(1,)](counters, old, BLOCK=16)
    assert meter.report().contended_bytes > 0


def test_what_one_launch_stores_and_another_loads_or_stores_is_not_contended():
    """The second of two kernels merges what the first one left: both ran again for every wrong answer to 8.5."""
    source, between, target = torch.zeros(32), torch.empty(32), torch.empty(32)
    with TrafficMeter() as meter:
        copy_kernel[(2,)](source, between, 32, BLOCK=16)
        copy_kernel[(2,)](between, target, 32, BLOCK=16)
        copy_kernel[(1,)](source, between, 32, BLOCK=32)
    assert meter.report().contended_bytes == 0
    assert meter.report()["target"].distinct_stored_bytes == 4 * 32


def test_atomics_are_counted_apart():
    counters, old = torch.zeros(8), torch.zeros(4, dtype=torch.int32)
    with TrafficMeter() as meter:
        atomic_kernel[(4,)](counters, old, BLOCK=16)
    report = meter.report()
    assert (report["counters"].atomic_operations, report["counters"].atomic_bytes) == (64, 256)
    assert report["counters"].distinct_stored_bytes == 32
    assert report["old"].atomic_operations == 4 and report["old"].loaded_bytes == 0
    assert counters.tolist() == [8.0] * 8 and old.tolist() == [5] * 4


@pytest.mark.parametrize("where", ["host", "device"])
def test_descriptors_count_what_lies_inside_their_shape(where):
    source, target = torch.randn(20, 16), torch.zeros(20, 16)
    with TrafficMeter(source=source, target=target) as meter:
        if where == "host":
            boxes = [TensorDescriptor.from_tensor(tensor, [16, 16]) for tensor in (source, target)]
            host_descriptor_kernel[(2,)](*boxes, BLOCK=16)
        else:
            device_descriptor_kernel[(2,)](source, target, 20, 16, BLOCK=16)
    report = meter.report()
    assert report["source"].loaded_bytes == report["target"].stored_bytes == 20 * 16 * 4
    assert not report.out_of_bounds and torch.equal(source, target)


def test_a_descriptor_larger_than_its_tensor_is_out_of_bounds():
    source, target = torch.randn(20, 16), torch.zeros(32, 16)
    with TrafficMeter() as meter:
        device_descriptor_kernel[(2,)](source, target, 32, 16, BLOCK=16)
    (wild,) = meter.report().out_of_bounds
    assert (wild.kind, wild.tensor, wild.lanes, wild.length) == ("load", "source", 12 * 16, 320)


def test_the_meter_changes_no_result():
    source, plain, metered = torch.randn(500), torch.empty(500), torch.empty(500)
    copy_kernel[(4,)](source, plain, 500, BLOCK=128)
    with TrafficMeter():
        copy_kernel[(4,)](source, metered, 500, BLOCK=128)
    assert torch.equal(plain, metered)


# ------------------------------------------------------------------------------------------------------------- names


def test_a_given_name_covers_views_and_may_be_given_afterwards():
    buffer, target = torch.randn(200), torch.empty(100)
    with TrafficMeter(buffer=buffer) as meter:
        copy_kernel[(1,)](buffer[:100], target, 100, BLOCK=128)
        copy_kernel[(1,)](buffer[100:], target, 100, BLOCK=128)
    meter.watch(result=target)
    report = meter.report()
    assert [row.name for row in report.tensors] == ["buffer", "result"]
    assert report["buffer"].loaded_bytes == report["buffer"].distinct_loaded_bytes == 800
    assert report["result"].parameters == ("copy_kernel.target",)


def test_three_parts_of_one_buffer_are_three_rows():
    query, key, value = torch.randn(3 * 64).chunk(3)
    with TrafficMeter(query=query, key=key, value=value) as meter:
        copy_kernel[(1,)](query, value, 64, BLOCK=64)
    assert meter.report()["query"].loaded_bytes == meter.report()["value"].stored_bytes == 256
    assert [row.name for row in meter.report().tensors] == ["query", "value"]


def test_a_tensor_passed_on_keeps_its_row_and_equal_names_are_told_apart():
    first, between, last = torch.randn(64), torch.empty(64), torch.empty(64)
    with TrafficMeter() as meter:
        copy_kernel[(1,)](first, between, 64, BLOCK=64)
        copy_kernel[(1,)](between, last, 64, BLOCK=64)
    names = {row.name: (row.loaded_bytes, row.stored_bytes) for row in meter.report().tensors}
    assert names == {"source": (256, 0), "target": (256, 256), "copy_kernel.target": (0, 256)}


def test_a_freed_temporary_does_not_share_its_row_with_the_next():
    source, target = torch.randn(4096), torch.empty(4096)
    with TrafficMeter(target=target) as meter:
        for _ in range(3):
            copy_kernel[(1,)](source + 1, target, 4096, BLOCK=4096)
    rows = [row for row in meter.report().tensors if row.name != "target"]
    assert [row.loaded_bytes for row in rows] == [4 * 4096] * 3


def test_what_is_no_tensor_cannot_be_watched():
    with pytest.raises(TypeError, match="x=int"):
        TrafficMeter(x=3)


def test_an_unknown_row_names_those_seen():
    source, target = torch.randn(8), torch.empty(8)
    with TrafficMeter() as meter:
        copy_kernel[(1,)](source, target, 8, BLOCK=8)
    with pytest.raises(KeyError, match="source"):
        meter.report()["sauce"]


# ----------------------------------------------------------------------------------------------------- out of bounds


def test_an_unmasked_tail_is_named_with_line_program_and_elements():
    source, target = torch.randn(1000), torch.zeros(1000)
    with TrafficMeter() as meter:
        unmasked_load_kernel[(8,)](source, target, 1000, BLOCK=128)
    (wild,) = meter.report().out_of_bounds
    assert (wild.kind, wild.tensor, wild.parameter, wild.kernel) == ("load", "source", "source", "unmasked_load_kernel")
    assert (wild.first_element, wild.last_element, wild.length) == (1000, 1023, 1000)
    assert (wild.program, wild.programs, wild.lanes) == ((7, 0, 0), 1, 24)
    assert wild.line == line_of(unmasked_load_kernel, "tl.load(source") and wild.file == __file__
    assert wild.source == "values = tl.load(source + lanes)"
    assert meter.report()["source"].loaded_bytes == 4000
    assert torch.equal(source, target)


def test_a_wild_store_never_reaches_the_guard_band_beside_the_tensor():
    buffer = torch.full((64 + 100 + 64,), -1.0)
    target = buffer[64:164]
    with TrafficMeter() as meter:
        unmasked_store_kernel[(1,)](torch.randn(100), target, 100, BLOCK=128)
    (wild,) = meter.report().out_of_bounds
    assert (wild.kind, wild.tensor, wild.first_element, wild.last_element) == ("store", "target", 100, 127)
    assert (buffer[164:] == -1.0).all() and (buffer[:64] == -1.0).all()


def test_reaching_into_a_neighbouring_known_tensor_is_still_out_of_bounds():
    left, right = torch.arange(128.0).split(64)
    target = torch.empty(64)
    with TrafficMeter(left=left, right=right) as meter:
        shifted_load_kernel[(1,)](left, target, 32, BLOCK=64)
    (wild,) = meter.report().out_of_bounds
    assert (wild.tensor, wild.first_element, wild.last_element) == ("left", 64, 95)
    assert target[:32].tolist() == left[32:].tolist() and target[32:].isnan().all()


@pytest.mark.parametrize("shift", [-40, -(2**40), 2**40, 2**20])
def test_a_pointer_gone_far_astray_does_not_kill_the_process(shift):
    source, target = torch.randn(64), torch.zeros(64)
    with TrafficMeter() as meter:
        shifted_load_kernel[(1,)](source, target, shift, BLOCK=64)
    (wild,) = meter.report().out_of_bounds
    assert (wild.kind, wild.tensor) == ("load", "source")
    assert (wild.first_element, wild.last_element) == (shift, -1 if shift == -40 else shift + 63)


def test_a_wild_atomic_is_dropped():
    counters, old = torch.zeros(16)[:4], torch.zeros(16, dtype=torch.int32)[:2]
    whole = counters._base, old._base
    with TrafficMeter() as meter:
        atomic_kernel[(4,)](counters, old, BLOCK=16)
    assert {(wild.kind, wild.tensor) for wild in meter.report().out_of_bounds} == {
        ("atomic", "counters"),
        ("atomic", "old"),
    }
    assert [base.count_nonzero().item() for base in whole] == [4, 2]
    assert meter.report()["old"].atomic_operations == 2


def test_the_line_is_the_helpers_and_the_kernel_the_launched_one():
    with TrafficMeter() as meter:
        calling_kernel[(1,)](torch.randn(10), torch.empty(16), BLOCK=16)
    (wild,) = meter.report().out_of_bounds
    assert wild.kernel == "calling_kernel"
    assert wild.line == line_of(careless_helper, "tl.load")


def test_an_empty_tensor_has_no_inside():
    with TrafficMeter() as meter:
        unmasked_load_kernel[(1,)](torch.empty(0), torch.empty(16), 0, BLOCK=16)
    assert meter.report().out_of_bounds[0].lanes == 16


def test_a_page_table_of_addresses_finds_its_tensors():
    pages = [torch.randn(16) for _ in range(2)]
    with TrafficMeter(first=pages[0]) as meter:
        made = pages[1] + 1  # known because it was made inside the block
        table = torch.tensor([pages[0].data_ptr(), made.data_ptr()])
        target = torch.empty(32)
        table_kernel[(2,)](table, target, BLOCK=16)
    assert meter.report()["first"].loaded_bytes == 64
    assert not meter.report().out_of_bounds
    assert torch.equal(target, torch.cat([pages[0], made]))


def test_an_address_that_nobody_owns_is_not_read():
    target = torch.zeros(16)
    with TrafficMeter() as meter:
        table_kernel[(1,)](torch.tensor([4096]), target, BLOCK=16)
    (wild,) = meter.report().out_of_bounds
    assert (wild.tensor, wild.first_element, wild.lanes) == ("unknown", None, 16)
    assert "belongs to no tensor" in str(wild)


def test_lanes_of_one_load_may_belong_to_two_tensors():
    left, right, target = torch.zeros(16), torch.ones(16), torch.empty(16)
    with TrafficMeter() as meter:
        mixed_pointer_kernel[(1,)](left, right, target, BLOCK=16)
    report = meter.report()
    assert report["left"].loaded_bytes == report["right"].loaded_bytes == 32
    assert not report.out_of_bounds and target.tolist() == [0.0, 1.0] * 8


def test_the_list_of_places_is_bounded_and_the_rest_counted(monkeypatch):
    monkeypatch.setattr(accounts, "MAX_RECORDS", 1)
    with TrafficMeter() as meter:
        shifted_load_kernel[(1,)](torch.randn(8), torch.empty(4), 4, BLOCK=8)
    assert len(meter.report().out_of_bounds) == 1
    assert meter.report().out_of_bounds_unlisted == 4


# ----------------------------------------------------------------------------------------------- report, allocations


def test_the_report_reads_as_table_html_and_json():
    with TrafficMeter() as meter:
        unmasked_load_kernel[(8,)](torch.randn(1000), torch.zeros(1000), 1000, BLOCK=128)
    report = meter.report()
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["loaded_bytes"] == 4000 and plain["tensors"][0]["times_read"] == 1.0
    assert plain["out_of_bounds"][0]["program"] == [7, 0, 0] and plain["launches"][0]["grid"] == [8, 1, 1]
    text = str(report)
    assert "4 kB" in text and "unmasked_load_kernel[8, 1, 1]" in text and "elements 1000 to 1023" in text
    assert report._repr_html_().startswith("<table>") and "<th>loaded</th>" in report._repr_html_()


def test_new_memory_is_listed_and_views_are_not():
    x = torch.randn(8, 8)
    with TrafficMeter() as meter:
        scores = x @ x.T
        scores.mul_(2).view(64)
        x.clone()
        copy_kernel[(1,)](x, scores, 64, BLOCK=64)
    assert [(made.shape, made.bytes) for made in meter.report().allocations] == [((8, 8), 256), ((8, 8), 256)]


# ------------------------------------------------------------------------------------------- leaving Triton as it was


def test_an_exception_in_a_kernel_leaves_triton_as_it_was():
    before = triton_state()
    with pytest.raises(Exception, match="too small"):
        with TrafficMeter() as meter:
            failing_kernel[(1,)](torch.randn(16), BLOCK=16)
    assert triton_state() == before
    assert meter.report()["source"].loaded_bytes == 64
    with TrafficMeter() as again:
        copy_kernel[(1,)](torch.randn(16), torch.empty(16), 16, BLOCK=16)
    assert again.report().loaded_bytes == 64


def test_a_second_meter_is_refused_and_the_first_goes_on():
    before = triton_state()
    source, target = torch.randn(16), torch.empty(16)
    with TrafficMeter() as meter:
        with pytest.raises(MeterUnavailable, match="already counting"):
            with TrafficMeter():
                pass
        copy_kernel[(1,)](source, target, 16, BLOCK=16)
    assert meter.report().loaded_bytes == 64
    assert triton_state() == before


def test_wrong_arguments_raise_what_they_raise_without_a_meter():
    with pytest.raises(TypeError, match="length"):
        with TrafficMeter():
            copy_kernel[(1,)](torch.randn(4), torch.empty(4), BLOCK=4)


@triton.jit
def undefined_scalar_kernel(source, target, length):
    tl.store(target, tl.load(source, mask=length > 1))


@triton.jit
def zero_for_a_scalar_kernel(source, target, length):
    tl.store(target, tl.load(source, mask=length > 1, other=0.0))


@triton.jit
def zero_by_position_kernel(source, target, length):
    tl.store(target, tl.load(source, length > 1, 0))


@triton.jit
def zero_constant_kernel(source, target, length, ZERO: tl.constexpr = 0.0):
    lanes = tl.arange(0, 1)
    tl.store(target + lanes, tl.load(source + lanes, mask=lanes < length - 1, other=ZERO))


@triton.jit
def zero_for_a_block_kernel(source, target, length):
    lanes = tl.arange(0, 8)
    tl.store(target + lanes, tl.load(source + lanes, mask=lanes < length - 1, other=0), mask=lanes < 1)


class Sevens:
    float32 = 0x40E0_0000


@pytest.mark.parametrize(
    "kernel", [zero_for_a_scalar_kernel, zero_by_position_kernel, zero_constant_kernel, zero_for_a_block_kernel]
)
def test_a_zero_that_a_load_is_given_is_not_missing(kernel):
    """`other=0.0` of a scalar is falsy in the interpreter, so that right answers were told to write what they had."""
    source, target = torch.ones(8), torch.ones(8)
    with TrafficMeter(undefined_lanes=Sevens) as meter:
        kernel[(1,)](source, target, 1)
    assert target[0] == 0.0 and not meter.report().undefined_loads


def test_a_scalar_that_a_load_leaves_undefined_is_still_seen():
    source, target = torch.ones(8), torch.ones(8)
    with TrafficMeter(undefined_lanes=Sevens) as meter:
        undefined_scalar_kernel[(1,)](source, target, 1)
    assert target[0] == 7.0 and len(meter.report().undefined_loads) == 1


@triton.jit
def turns_kernel(counter, turns, wide, BLOCK: tl.constexpr):
    program = (tl.program_id(0) * 3 + tl.program_id(1)) * 2 + tl.program_id(2)
    tl.store(turns + program, tl.atomic_add(counter, 1))
    if program > 2:
        tl.store(wide + program, tl.load(wide + 90 + program))
    tl.store(wide + BLOCK, program)


def turns_in(order):
    """The turn in which each of 12 programs ran, in each of two launches, and the accesses that lie outside."""
    turns = torch.zeros(2, 12, dtype=torch.int32)
    with TrafficMeter(order=order) as meter:
        for row in turns:
            turns_kernel[(2, 3, 2)](torch.zeros(1, dtype=torch.int32), row, torch.zeros(20), BLOCK=90)
    return turns.tolist(), [str(access) for access in meter.report().out_of_bounds]


def test_programs_run_in_the_order_asked_for():
    up, down = list(range(12)), list(range(12))[::-1]
    assert turns_in("ascending")[0] == [up, up] and turns_in("descending")[0] == [down, down]
    (first, second), again, other = turns_in(5)[0], turns_in(5)[0], turns_in(6)[0]
    assert sorted(first) == sorted(second) == up and len({str(o) for o in (first, second, up, down)}) == 4
    assert again == [first, second] != other


@pytest.mark.parametrize("order", ["descending", 5])
def test_what_lies_outside_is_told_alike_in_any_order(order):
    """The first access told, and its program, are those of programs that run one after the other."""
    assert turns_in(order)[1] == turns_in("ascending")[1]
    assert "program (0, 0, 0)" in turns_in(order)[1][0] and "program (0, 1, 1)" in turns_in(order)[1][1]


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order='backwards'; it is 'ascending', 'descending' or a number"):
        TrafficMeter(order="backwards")


# --------------------------------------------------------------------------------------- a Triton it does not know


def test_moved_internals_turn_the_meter_off_with_a_message(monkeypatch):
    monkeypatch.setattr(self_test, "_result", None)
    monkeypatch.delattr(interpreter.GridExecutor, "_init_args_hst")
    with pytest.raises(MeterUnavailable, match=rf"_init_args_hst.*Triton {triton.__version__}.*NumPy {np.__version__}"):
        with TrafficMeter():
            pass
    assert TrafficMeter._active is None


def test_a_miscount_turns_the_meter_off(monkeypatch):
    monkeypatch.setattr(self_test, "_result", None)
    add = tensors.Row.add
    monkeypatch.setattr(tensors.Row, "add", lambda row, kind, offsets, size: add(row, kind, offsets[1:], size))
    with pytest.raises(MeterUnavailable, match="loaded is 32, not 40"):
        with TrafficMeter():
            pass


def test_a_triton_that_defines_all_lanes_by_itself_turns_the_meter_off(monkeypatch):
    monkeypatch.setattr(self_test, "_result", None)
    semantic = type(interpreter.interpreter_semantic)
    load, zero = semantic.load, interpreter.interpreter_semantic.to_tensor(0.0)
    monkeypatch.setattr(
        semantic,
        "load",
        lambda self, pointer, mask, other, *rest: load(self, pointer, mask, other or zero, *rest),
        raising=False,
    )
    with pytest.raises(MeterUnavailable, match="undefined is 0, not 1"):
        with TrafficMeter():
            pass


def test_a_triton_that_takes_no_order_turns_the_meter_off(monkeypatch):
    monkeypatch.setattr(self_test, "_result", None)
    monkeypatch.setattr(triton_internals, "renumbered_programs", contextlib.nullcontext)
    with pytest.raises(MeterUnavailable, match="last program is 1, not 0"):
        with TrafficMeter():
            pass


def test_without_the_interpreter_it_says_how_to_start_it(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(MeterUnavailable, match="TRITON_INTERPRET=1"):
        with TrafficMeter():
            pass


ALONE = """
import importlib.util, sys
front = sys.argv[1] + "/__init__.py"
spec = importlib.util.spec_from_file_location("meter", front, submodule_search_locations=[sys.argv[1]])
meter = sys.modules["meter"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(meter)
import torch
with meter.TrafficMeter() as traffic:
    torch.ones(4)
print(traffic.report().allocations[0].bytes, [name for name in sys.modules if name.startswith("course_lib")])
"""


def test_the_folder_loads_as_a_package_of_its_own_without_the_course(tmp_path):
    """As the checker's worker does, which must not see the course."""
    folder = str(Path(traffic.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, folder], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "16 []", done.stderr


def test_one_folder_alone_touches_tritons_inside():
    """Of the meter, and of all that stands on it: what Triton does not promise to keep is imported in one place."""
    private = re.compile(r"from triton\.(_|runtime|compiler|backends)|interpreter_builder|\.handle\b")
    folder = Path(traffic.__file__).parent
    touching = {path.parent.name for path in folder.rglob("*.py") if private.search(path.read_text())}
    assert touching == {"triton_internals"}


@pytest.fixture
def repaired():
    """The interpreter as the checks have it; what was repaired stays so, as in the worker."""
    traffic.repair_interpreter()


def test_a_loop_bound_read_from_memory_runs_after_the_repair(repaired):
    """Triton 3.6 under NumPy 2.4 raised 'only 0-dimensional arrays can be converted'."""
    target = torch.empty(16)
    run_time_loop_kernel[(1,)](torch.ones(16), target, torch.tensor([3]), BLOCK=16)
    assert target.tolist() == [3.0] * 16
    assert traffic.repair_interpreter() is False


@triton.jit
def scalar_condition_kernel(source, target, slot_pointer, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    slot = tl.load(slot_pointer)
    inside = (lanes < LENGTH) & (slot >= 0)
    tl.store(target + lanes, tl.load(source + lanes, mask=inside, other=7.0), mask=inside)


@pytest.mark.parametrize("slot, wanted", [(3, [1.0, 1.0, 1.0, 0.0]), (-1, [0.0] * 4)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_mask_with_a_scalar_condition_runs_after_the_repair(repaired, slot, wanted, dtype):
    """The interpreter said 'mask has unsupported dtype' to a condition on an integer, and of a float, to
    `mask & (tl.max(scores) > 0)`, "ufunc 'bitwise_and' not supported"."""
    target = torch.zeros(4)
    scalar_condition_kernel[(1,)](torch.ones(4), target, torch.tensor([slot], dtype=dtype), LENGTH=3, BLOCK=4)
    assert target.tolist() == wanted
    with traffic.TrafficMeter() as meter:
        scalar_condition_kernel[(1,)](torch.ones(4), target, torch.tensor([slot], dtype=dtype), LENGTH=3, BLOCK=4)
    assert meter.report()["source"].loaded_bytes == (12 if slot >= 0 else 0)


@triton.jit
def scalar_choice_kernel(source, target, length, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(source + lanes, mask=lanes < length, other=0.0)
    chosen = (lanes < length) & ~(tl.max(values) > 10.0) | (tl.sum(values) == 99.0)
    tl.store(target + lanes, tl.where(chosen, values, -1.0))


def test_a_block_is_chosen_by_conditions_on_its_own_sums(repaired):
    target = torch.empty(4)
    scalar_choice_kernel[(1,)](torch.ones(4), target, 3, BLOCK=4)
    assert target.tolist() == [1.0, 1.0, 1.0, -1.0]


@triton.jit
def factor_kernel(source, target, factor, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(target + lanes, tl.load(source + lanes) * factor.to(tl.float16) + 0.0 * tl.exp(factor))


def test_a_float_argument_has_the_methods_of_a_scalar(repaired):
    """It was a Python number: "'float' object has no attribute 'to'"."""
    target = torch.empty(4)
    factor_kernel[(1,)](torch.ones(4), target, 2.5, BLOCK=4)
    assert target.tolist() == [2.5] * 4


@triton.jit
def imported_names_kernel(source, target, length, BLOCK: tl.constexpr):
    lanes = arange(0, BLOCK)
    for part in static_range(2):
        put(target + part * BLOCK + lanes, load(source + lanes, mask=lanes < length, other=7.0))


def test_names_imported_from_triton_are_the_interpreters_in_a_kernel_and_their_own_again_after_it(repaired):
    """Of `load(...)` in a kernel it said "Did you forget to add @triton.jit ?"."""
    target = torch.empty(8)
    imported_names_kernel[(1,)](torch.ones(4), target, 3, BLOCK=4)
    assert target.tolist() == [1.0, 1.0, 1.0, 7.0] * 2
    assert load is tl.load and put is tl.store and static_range is tl.static_range


@triton.autotune(configs=[triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 4})], key=["length"])
@triton.jit
def tuned_kernel(source, target, length, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + lanes, tl.load(source + lanes, mask=lanes < length), mask=lanes < length)


def test_an_autotuned_kernel_runs_once_by_its_first_configuration(repaired):
    """The tuner asked for a GPU to time them on: "0 active drivers"."""
    target = torch.zeros(10)
    with traffic.TrafficMeter() as meter:
        tuned_kernel[lambda meta: (triton.cdiv(10, meta["BLOCK"]),)](torch.ones(10), target, 10)
    assert target.tolist() == [1.0] * 10
    assert [launch.grid for launch in meter.report().launches] == [(2, 1, 1)]


@triton.jit
def nested_call_kernel(source, target, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(target, tl.sum(tl.load(source + lanes) + tl.zeros([BLOCK], tl.float32), axis=0))


def test_a_launch_leaves_the_language_as_it_was_and_a_nested_call_the_launchs(repaired):
    """The members of `triton.language` are listed once, not at each launch and each call of `tl.sum`."""
    before = {name: getattr(tl, name) for name in dir(tl)}
    target = torch.empty(1)
    for _ in range(2):
        nested_call_kernel[(1,)](torch.ones(8), target, BLOCK=8)
        assert target.item() == 8.0
    assert all(getattr(tl, name) is member for name, member in before.items())


def test_a_triton_that_has_moved_what_is_repaired_stays_as_it_is(monkeypatch):
    monkeypatch.delattr(interpreter, "_implicit_cvt")
    monkeypatch.delattr(interpreter, "_patch_lang")
    assert traffic.repair_interpreter() is False


# ---------------------------------------------------------------------------------------------------------- launches


def test_launches_are_recorded_with_kernel_and_grid():
    source, target = torch.randn(16), torch.empty(16)
    with record_launches() as launches:
        copy_kernel[lambda meta: (triton.cdiv(16, meta["BLOCK"]), 1)](source, target, 16, BLOCK=8)
        torch.add(source, target)
    copy_kernel[(1,)](source, target, 16, BLOCK=16)
    assert [(launch.kernel, launch.grid) for launch in launches] == [("copy_kernel", (2, 1, 1))]
    assert launches[0].file == __file__


def test_a_listener_hears_what_happens_while_it_is_asked_to():
    class Heard:
        def __init__(self):
            self.kinds = []

        def begun(self, kernel, arguments):
            self.kinds.append("begun")

        def launched(self, kernel, grid):
            self.kinds.append("launched")

        def accessed(self, kind, program, item_bytes, reached, file, line):
            self.kinds.append(kind)

        def multiplied(self, left, right, bits):
            self.kinds.append((left, right, bits))

    heard, source = Heard(), torch.ones(4)
    with TrafficMeter() as meter:
        copy_kernel[(1,)](source, torch.empty(4), 4, BLOCK=4)
        meter.listen(heard)
        copy_kernel[(1,)](source, torch.empty(4), 4, BLOCK=4)
        meter.listen(None)
        copy_kernel[(1,)](source, torch.empty(4), 4, BLOCK=4)
    assert heard.kinds == ["begun", "launched", "load", "store"]


def test_a_listener_hears_of_products_what_tiles_they_multiply():
    class Heard:
        products = []

        def begun(self, kernel, arguments):
            pass

        def launched(self, kernel, grid):
            pass

        def accessed(self, kind, program, item_bytes, reached, file, line):
            pass

        def multiplied(self, left, right, bits):
            self.products.append((tuple(left), tuple(right), bits))

    left, right, product = torch.ones(16, 64, dtype=torch.float16), torch.ones(64, 32), torch.empty(16, 32)
    with TrafficMeter(listener=Heard()):
        product_kernel[(2,)](left, right, product, SIDE=64)
    assert Heard.products == [((16, 64), (64, 32), (32, 32))] * 2
    assert product.eq(64).all()


def test_a_launch_refused_before_it_starts_is_not_recorded():
    with record_launches() as launches, pytest.raises(TypeError):
        copy_kernel[(1,)](BLOCK=8)
    assert launches == []


def test_compiled_launches_are_seen_where_triton_prepares_them(monkeypatch):
    """No GPU here: a stand-in kernel walks through the method that every launch of a compiled kernel calls."""
    from triton.compiler.compiler import CompiledKernel

    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel.__dict__.update(name="add_kernel", src=copy_kernel, module=None)
    monkeypatch.setattr(CompiledKernel, "launch_metadata", lambda self, grid, stream, *args: "unchanged")
    launches = []
    with triton_internals.compiled_launches(launches.append):
        assert kernel.launch_metadata((4, 2), 0, "x") == "unchanged"
    assert kernel.launch_metadata((1,), 0) == "unchanged"
    assert [(launch.kernel, launch.grid) for launch in launches] == [("add_kernel", (4, 2, 1))]
