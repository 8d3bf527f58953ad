"""The cycles of a tile, against the figures of FlashAttention-4's paper."""

import pytest

from course_lib.hardware.cycles import CHIPS, backward, forward, with_share

B200 = CHIPS["B200"]


def test_the_forward_is_the_papers():
    assert forward(B200) == (1024, 1024, 768)
    assert forward(CHIPS["H100"])[:2] == (2048, 1024)
    assert forward(CHIPS["B300"])[:2] == (1024, 512)
    assert forward(B200, head_dim=64)[:2] == (512, 1024)


def test_the_backward_is_the_papers():
    assert backward(B200) == (2560, 1024, 3328)
    assert backward(B200).longest == 3328


def test_a_pair_of_multiprocessors_stages_half_of_the_second_operand():
    assert forward(B200, pair=True) == (1024, 1024, 512)
    # The paper says 2,688; by counting it is 2,560.
    assert backward(B200, pair=True) == (2560, 1024, 2560)


@pytest.mark.parametrize("share, exponentials, multiply_adds", [(0, 1024, 640), (0.25, 768, 928), (1, 0, 1792)])
def test_a_share_moves_from_one_unit_to_the_other(share, exponentials, multiply_adds):
    assert with_share(forward(B200), share, 128 * 128, 9, 5) == (exponentials, multiply_adds)
