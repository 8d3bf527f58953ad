"""The parts of a block do what their formulas say."""

import torch

from course_lib.models.glue import TORCH
from course_lib.models.layers import RMSNorm, SwiGLU, rotary_angles, rotate


def test_rms_norm_leaves_a_root_mean_square_of_one():
    x = 7 * torch.randn(3, 5, 16) + 2
    assert torch.allclose(RMSNorm(16, 1e-9)(x).square().mean(dim=-1), torch.ones(3, 5), atol=1e-5)


def test_rms_norm_does_not_overflow_in_half_precision():
    assert torch.isfinite(RMSNorm(8, 1e-5).half()(torch.full((1, 8), 6e4, dtype=torch.float16))).all()


def test_swiglu_is_its_formula():
    block, x = SwiGLU(6, 10).double(), torch.randn(2, 6).double()
    gate, up, down = block.gate.weight, block.up.weight, block.down.weight
    wanted = ((x @ gate.T) * torch.sigmoid(x @ gate.T) * (x @ up.T)) @ down.T
    assert torch.allclose(block(x, TORCH.gated), wanted) and torch.equal(block(x), block(x, TORCH.gated))


def test_a_rotated_product_depends_on_the_distance_alone():
    query, key = torch.randn(1, 2, 1, 16).double(), torch.randn(1, 2, 1, 16).double()

    def product(query_position, key_position):
        turned = [
            rotate(x, *rotary_angles(torch.tensor([[position]]), 16, 10_000.0))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return (turned[0] * turned[1]).sum()

    assert torch.allclose(product(9, 4), product(905, 900), atol=1e-3)
    assert not torch.allclose(product(9, 4), product(9, 5), atol=1e-3)


def test_rotation_keeps_lengths_and_leaves_position_zero_alone():
    x = torch.randn(2, 3, 4, 8)
    positions = torch.arange(4).expand(2, 4)
    turned = rotate(x, *rotary_angles(positions, 8, 100.0))
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
