"""Bytes are counted alike in this process and in one of their own; chapter 04's kernels meet their formulas."""

import math

import pytest
import torch

from course_lib.checker.specification import catalog
from course_lib.hardware.meter import elsewhere
from course_lib.hardware.meter import metered as module
from course_lib.hardware.meter.metered import metered
from course_lib.hardware.meter.traffic import MeterUnavailable
from course_lib.kernels.memory.vector_add import vector_add


def reference(identity):
    answer = catalog.reference(identity)
    return answer[0] if isinstance(answer, tuple) and len(answer) == 1 else answer


def formula(heads, query_length, key_rows_read, head_dim, item_bytes):
    return heads * (2 * query_length + 2 * key_rows_read) * head_dim * item_bytes


@pytest.mark.parametrize("query_length, key_length, dtype", [(192, 320, torch.float16), (384, 384, torch.float32)])
def test_the_flash_kernel_moves_what_the_formula_says(query_length, key_length, dtype):
    query, key = torch.randn(2, query_length, 64, dtype=dtype), torch.randn(2, key_length, 64, dtype=dtype)
    counted = metered(reference("4.3"), query, key, key).total_bytes
    expected = formula(2, query_length, query_length // 64 * key_length, 64, query.element_size())
    assert math.isclose(counted, expected, rel_tol=0.05)


def test_the_causal_kernel_moves_only_the_tiles_on_and_below_the_diagonal():
    query = torch.randn(1, 512, 32)
    counted = metered(reference("4.4"), query, query, query).total_bytes
    assert math.isclose(counted, formula(1, 512, 64 * 8 * 9 // 2, 32, 4), rel_tol=0.05)


def test_nothing_but_the_output_is_stored():
    query = torch.randn(1, 256, 64)
    report = metered(reference("4.3"), query, query, query)
    assert report.stored_bytes == query.numel() * 4
    assert [row.name for row in report.tensors if row.stored_bytes] == ["output_pointer"]


def test_a_process_of_its_own_counts_the_same(monkeypatch):
    x, query = torch.randn(1000), torch.randn(1, 128, 64)
    here = [metered(vector_add, x, x).as_dict(), metered(reference("4.3"), query, query, query).total_bytes]
    monkeypatch.setattr(module, "interpreting", lambda: False)
    there = [metered(vector_add, x, x).as_dict(), metered(reference("4.3"), query, query, query).total_bytes]
    assert here[1] == there[1] and here[0]["total_bytes"] == there[0]["total_bytes"] == 12000


def test_a_function_that_fails_over_there_says_why(monkeypatch):
    monkeypatch.setattr(module, "interpreting", lambda: False)
    with pytest.raises(MeterUnavailable, match="vector_add could not be counted"):
        metered(vector_add, torch.randn(3), torch.randn(4))


def test_a_function_without_a_source_is_named(monkeypatch):
    monkeypatch.setattr(module, "interpreting", lambda: False)
    scope = {"__name__": "nowhere"}
    exec("def lost(): pass", scope)
    with pytest.raises(ValueError, match="lost"):
        metered(scope["lost"])


def test_of_a_cell_only_what_it_defines_is_run_elsewhere(tmp_path):
    """A cell that defines a kernel and calls it, with names of other cells, raised a NameError in the other process."""
    cell = (
        "SIZE = 3\nshown = of_another_cell(SIZE)\nfor name in of_another_cell:\n    print(name)\n\n\n"
        "def doubled(x):\n    return SIZE * x\n\n\nmetered(doubled, 2)\n"
    )
    function = elsewhere.found({"source": cell, "name": "doubled"}, tmp_path)
    assert function(2) == 6
