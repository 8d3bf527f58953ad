"""The pieces of the backward pass against their meanings: what is between the products, and the weights' gradients."""

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.experts.arrange import arrange
from course_lib.kernels.experts.gate_gradients import gate_gradients, gate_gradients_reference
from course_lib.kernels.experts.weight_gradients import weight_gradient, weight_gradient_reference
from course_lib.kernels.products.candidates import ProductTiles
from tests.kernels.experts.cases import ragged, served
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),  # exp of a large number, in the interpreter
]
SMALL = ProductTiles(32, 16, 16, warps=4, stages=1, group=2)
DTYPES = [torch.float32, torch.float16]


def poisoned(arrangement, rows):
    """NaN where there is no slot."""
    return rows.where((arrangement.slots < arrangement.sentinel)[:, None], torch.nan)


@pytest.mark.parametrize("hidden", [1, 37, 1025])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_and_a_weight_have_their_gradients(hidden, dtype):
    arrangement = arrange(ragged(5, 3, 5), 5, 16)
    places = len(arrangement.slots)
    gate_up, gradient = normal(1, places, 2 * hidden, dtype=dtype, scale=3), normal(2, places, hidden, dtype=dtype)
    gate_up[arrangement.places[0, 0], 0] = -1e4
    found = gate_gradients(
        poisoned(arrangement, gate_up), poisoned(arrangement, gradient), arrangement, normal(3, 5, 3)
    )
    found = *(served(rows, arrangement) for rows in found[:2]), found[2]
    assert_as_exact_as_plain(found, gate_gradients_reference, gate_up, gradient, arrangement, normal(3, 5, 3))


def test_gate_and_weight_are_what_autograd_finds():
    arrangement = arrange(ragged(5, 3, 5, missing=False), 5, 16)
    gate_up, gradient = (normal(seed, len(arrangement.slots), size).double() for seed, size in ((1, 8), (2, 4)))
    weights, leaf = normal(3, 5, 3).double().requires_grad_(), gate_up.requires_grad_()
    slots = arrangement.slots.long().clamp(max=arrangement.sentinel - 1)
    weight = weights.flatten()[slots, None].where((arrangement.slots < arrangement.sentinel)[:, None], 0)
    gate, up = leaf.chunk(2, dim=1)
    weighted = weight * torch.nn.functional.silu(gate) * up
    right = torch.autograd.grad(weighted, (leaf, weights), gradient)
    ours = gate_gradients_reference(gate_up, gradient, arrangement, weights.detach())
    for mine, exact in zip(ours, (right[0], weighted.detach(), right[1])):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("outer, inner", [(1, 1), (40, 33), (64, 16)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_expert_gets_the_gradient_of_its_own_rows(outer, inner, transposed, dtype):
    arrangement = arrange(ragged(37, 3, 5), 5, 16)
    rows, x = normal(1, len(arrangement.slots), outer, dtype=dtype), normal(2, 37, inner, dtype=dtype)
    given = in_wider_rows(poisoned(arrangement, rows)), in_wider_rows(x)
    found = weight_gradient(*given, arrangement, transposed=transposed, tiles=SMALL)
    assert_as_exact_as_plain(found, weight_gradient_reference, rows, x, arrangement, transposed=transposed)
    assert found.is_contiguous() and not found[4].any()  # the last expert has no token


def test_a_step_may_be_longer_than_a_tile_of_the_arrangement():
    """64 places a step over tiles of 16: those behind the expert's last are another expert's."""
    arrangement = arrange(ragged(70, 2, 4), 4, 16)  # 80 places of the expert that has every token
    rows, x = normal(1, len(arrangement.slots), 10), normal(2, 70, 12)
    assert_as_exact_as_plain(weight_gradient(rows, x, arrangement), weight_gradient_reference, rows, x, arrangement)


def test_rows_without_a_slot_are_not_read():
    arrangement = arrange(ragged(20, 2, 4), 4, 16)
    rows, x = normal(1, len(arrangement.slots), 32), normal(2, 20, 16)
    report = metered(weight_gradient, rows, x, arrangement, tiles=SMALL)
    slots = int((arrangement.places >= 0).sum())
    assert report["rows_pointer"].loaded_bytes == slots * 32 * 4 and report["x_pointer"].loaded_bytes == slots * 16 * 4
    assert not report.out_of_bounds and report.contended_bytes == 0
