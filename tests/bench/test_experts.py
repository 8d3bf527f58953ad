"""What `bench experts` measures beside ours means the same, and its sweep tries cuts that fit."""

import pytest
import torch

from course_lib.bench.experts import SWEPT, SWEPT_FOR_FEW, by_grouped_mm, by_loop, sorted_rows
from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.kernels.experts.mlp import expert_mlp_reference


def block(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = (19, 32), (5, 48, 32), (5, 32, 24)
    x, gate_up, down = (torch.randn(*shape, generator=generator).to(dtype) / 4 for shape in shapes)
    experts = torch.rand(19, 5, generator=generator).argsort(dim=1)[:, :3]
    return x, gate_up, down, experts.where(experts != 2, 4), torch.rand(19, 3, generator=generator)


def test_pytorchs_block_is_the_meaning():
    x, gate_up, down, experts, weights = block()
    exact = expert_mlp_reference(x.double(), gate_up.double(), down.double(), experts, weights.double())
    found = by_grouped_mm(x, gate_up, down, experts, weights).double()
    assert (found - exact).norm() <= 0.02 * exact.norm()


def test_a_loop_over_experts_is_the_grouped_product():
    x, weight, _, experts, _ = block(torch.float32)
    order, ends = sorted_rows(experts, len(weight))
    found = by_loop(x[order // 3], weight, ends.tolist())
    for row, slot in zip(found, order.tolist()):
        torch.testing.assert_close(row, weight[experts.flatten()[slot]] @ x[slot // 3])


@pytest.mark.parametrize("tiles", SWEPT + SWEPT_FOR_FEW, ids=str)
def test_a_cut_of_the_sweep_fits_an_h100(tiles):
    assert tiles.shared_bytes(2) <= ARCHITECTURES[90].shared_per_block and tiles.accumulator_registers() <= 128
