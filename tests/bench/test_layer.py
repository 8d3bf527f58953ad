"""What `bench layer` counts without a GPU: the bytes that operations move."""

import pytest
import torch
import torch.nn.functional as F

from course_lib.bench.layer import PARTS, moved_bytes


def test_each_operation_counts_what_it_reads_and_writes_and_a_view_nothing():
    gate, up = torch.randn(64, 32), torch.randn(64, 32)
    assert moved_bytes(lambda: F.silu(gate) * up) == 5 * gate.nbytes
    assert moved_bytes(lambda: gate.t().view(32, 64)[:, ::2]) == 0
    assert moved_bytes(lambda: gate + up[:1].expand(64, 32)) == 2 * gate.nbytes + up[:1].nbytes
    assert moved_bytes(lambda: gate.copy_(up)) == 2 * gate.nbytes


@pytest.mark.parametrize("part", [part for part in PARTS if not part.glue], ids=lambda part: part.name)
def test_products_and_attention_are_bound_by_arithmetic(part):
    assert part.flops > 1e11


def test_a_layer_has_two_norms():
    assert [part.times for part in PARTS] == [2, 1, 1, 1, 1, 1, 1, 1]
