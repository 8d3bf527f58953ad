"""The pictures of chapter 19 and the numbers in them."""

import pytest
import torch

from course_lib.figures.blackwell.shares import best_of, choose_share, draw_shares
from course_lib.figures.blackwell.thresholds import THRESHOLDS, choose_threshold, references, rescales
from course_lib.hardware.cycles import CHIPS, forward, with_share

PNG = b"\x89PNG"


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("instructions, others", [(9, 5), (4, 0), (16, 10)])
def test_no_other_share_is_better_and_no_smaller_one_as_good(chip, head_dim, instructions, others):
    cycles = forward(CHIPS[chip], head_dim=head_dim)

    def longest(share):
        return max(cycles.products, cycles.shared_memory, *with_share(cycles, share, 128**2, instructions, others))

    share, least = best_of(chip, head_dim, instructions, others)
    assert least <= min(longest(step / 1000) for step in range(1001)) + 1e-9
    assert share == 0 or longest(share - 1e-3) > least


def test_the_shares_of_a_b200():
    assert best_of("B200", 128, 9, 4) == (0, 1024)
    assert best_of("B200", 64, 9, 4) == pytest.approx((512 / 2176, 783.06), abs=0.01)
    assert (
        draw_shares("B200", 64).axes[0].get_title(loc="left") == "B200, head dimension 64: shortest at 24 %, 783 cycles"
    )


def test_a_reference_moves_only_beyond_the_threshold():
    maxima = torch.tensor([[0.0, 7.9, 8.0, 8.1, 16.0, 16.2], [5.0, 4.0, 3.0, 13.1, 13.1, 30.0]])
    expected = torch.tensor([[0, 0, 0, 8.1, 8.1, 16.2], [5, 5, 5, 13.1, 13.1, 30]])
    torch.testing.assert_close(references(maxima, 8.0)[0], expected)
    assert rescales(maxima, 8.0) == 2
    assert rescales(maxima, 0.0) == (5 + 2) / 2


def test_rows_of_a_group_are_rescaled_together():
    maxima = torch.tensor([[0.0, 1.0, 9.0, 9.0], [0.0, 9.0, 5.0, 9.5]])
    references_of, anew = references(maxima, 8.0, together=2)
    assert references_of.tolist() == [[0, 1, 1, 1], [0, 9, 9, 9]]
    assert anew.tolist() == [[False, True, False, False]] * 2
    assert rescales(maxima, 8.0, together=2) == 1 and rescales(maxima, 8.0) == 1


def test_both_have_pictures_for_their_controls():
    assert choose_share().picture("H100", 128, 9, 5).startswith(PNG)
    stepper = choose_threshold(torch.tensor([0.0, 3.0, 9.0]))
    assert stepper.steps == len(THRESHOLDS) and stepper.picture(0).startswith(PNG)


def test_what_the_controls_do_not_offer_is_refused():
    with pytest.raises(ValueError, match="H300"):
        choose_share("H300")
    with pytest.raises(ValueError, match=r"\[1\]"):
        choose_threshold(torch.zeros(1))
