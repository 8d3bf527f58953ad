"""Tensors that reach beyond 2³¹ elements: laid out without their memory, sent, guarded, counted, and told of."""

import os
import re

import pytest
import torch

from course_lib.checker.common import sparse
from course_lib.checker.judge.decide import judge
from course_lib.checker.runner.process import wire
from course_lib.checker.specification import catalog
from course_lib.checker.specification.catalog import exercise
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.layouts import beyond_32_bits, far
from tests.submissions.edits import changed


def megabytes_in_use() -> float:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_a_far_tensor_holds_its_values_and_takes_no_memory_for_its_gaps(dtype):
    before = megabytes_in_use()
    values = torch.arange(4 * 5 * 3).reshape(4, 5, 3).to(dtype)
    tensor = far(Draw(1), values)
    assert torch.equal(tensor, values) and tensor.dtype == dtype
    assert tensor.stride(0) < 2**31 <= 2 * tensor.stride(0) and sparse.is_far(tensor)
    assert megabytes_in_use() - before < 50


def test_on_a_gpu_there_is_no_such_case():
    assert not beyond_32_bits(Draw(1, on_gpu=True), "heads", [torch.zeros(3, 2)])


def test_its_strides_survive_the_way_to_the_worker():
    tensor = far(Draw(1), torch.arange(12.0).reshape(3, 4))
    message = wire.encode({"in_out": [tensor, 7]}, apart=True)
    assert len(message) < 1000
    back, seven = wire.decode(message, sparse.apart)["in_out"]
    assert torch.equal(back, tensor) and back.stride() == tensor.stride() and seven == 7


def test_what_a_worker_sends_may_not_choose_how_much_memory_it_takes():
    message = wire.encode(far(Draw(1), torch.arange(12.0).reshape(3, 4)), apart=True)
    with pytest.raises(wire.WireError):
        wire.decode(message)


def test_a_result_that_is_a_far_tensor_arrives_without_its_gaps():
    tensor = far(Draw(1), torch.arange(12.0).reshape(3, 4))
    assert torch.equal(wire.decode(wire.encode(tensor)), tensor)


ANY_STRIDES = re.compile(r"any strides?\b|any layout|strides? of (its|their) own", re.IGNORECASE)
BOUND = re.compile(r"within 2³¹|fewer than 2³¹|2³¹ elements or more|no row begins beyond 2\^31")
PROMISING = [
    pytest.param(task, statement, id=task.id)
    for task in catalog.exercises().values()
    if task.needs.triton or task.needs.cuda_on_host
    for statement in [" ".join(catalog.untouched_source(task.id).split())]
    if ANY_STRIDES.search(statement)
]


@pytest.mark.parametrize("task, statement", PROMISING)
def test_who_promises_a_kernel_any_strides_shows_far_ones_or_bounds_them(task, statement):
    """13.2 and 13.3 promised any stride, and `row * stride` in 32 bits passed, in the course's own answers too."""
    if not BOUND.search(statement):
        assert any(case.reaches_far for case in task.cases(Draw(3))), "no case reaches beyond 2³¹ elements"


IN_32_BITS = (".to(tl.int64)", "")


@pytest.mark.parametrize("identity", ["2.4", "2.5", "2.6", "5.3", "6.5", "7.5", "8.5", "13.2", "13.3"])
def test_an_offset_worked_out_in_32_bits_is_named(identity):
    verdict = judge(exercise(identity), changed(identity, IN_32_BITS), seed=5)
    assert verdict.outcome == "failed" and verdict.mistake == "offset_in_32_bits"
    assert "beyond 2³¹ elements" in verdict.message


@pytest.mark.parametrize("identity, pages", [("6.5", True), ("8.5", True), ("7.5", False)])
def test_where_pages_lie_the_sentence_speaks_of_their_numbers(identity, pages):
    """It named program numbers and tl.arange alone, where a page's number is loaded from a table of int32."""
    verdict = judge(exercise(identity), changed(identity, IN_32_BITS), seed=5)
    assert ("Page numbers from an int32 table" in str(verdict)) == pages


def test_what_is_wrong_near_the_first_element_is_told_first():
    source = changed("2.4", IN_32_BITS, (" * scale", ""))
    assert judge(exercise("2.4"), source, seed=5).mistake == "scale_missing"


def test_writing_into_a_far_argument_is_seen():
    written = "    if key.stride(0) > 2**29:\n        key[-1, 0, 0] = 1.0\n    return result"
    source = changed("2.4", ("    return result", written))
    assert judge(exercise("2.4"), source, seed=5).mistake == "modified_input"
