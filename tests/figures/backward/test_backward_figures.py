"""Chapter 10's figures: what they draw is what the formulas say, and they draw at odd shapes too."""

import pytest

from course_lib.figures.backward.loops import draw_loops, visible_tiles
from course_lib.figures.backward.products import ARROWS, NODES, draw_products
from course_lib.figures.backward.saved import draw_saved, saved_log_sum_exps, saved_probabilities
from course_lib.figures.backward.work import ROWS, draw_work


def _words(figure):
    return " ".join(text.get_text() for axes in figure.axes for text in axes.texts)


def test_the_question_s_numbers_are_those_of_the_formulas():
    assert saved_probabilities(16_384, 32, 2) == 17_179_869_184
    assert saved_log_sum_exps(16_384, 32) == 2_097_152
    words = _words(draw_saved(32, 128, 2))
    assert "P: 17.2 GB" in words and "L, the log-sum-exps: 2.10 MB" in words


def test_every_product_of_the_backward_pass_is_drawn_with_what_it_reads():
    names = {start for start, _ in ARROWS} | {end for _, end in ARROWS}
    assert names == set(NODES)
    words = _words(draw_products())
    for product in ("dV = Pᵀ dO", "dK = scale · dSᵀ Q", "dQ = scale · dS K", "dP = dO Vᵀ"):
        assert product in words


def test_both_loops_look_at_the_same_tiles():
    causal = visible_tiles(4, 6, True)
    assert {row for row, _ in causal} == set(range(4)) and {column for _, column in causal} == set(range(6))
    assert (0, 3) not in causal and (0, 2) in causal
    assert len(visible_tiles(4, 6, False)) == 24


def test_the_backward_pass_has_two_and_a_half_times_the_products():
    forward, counted, in_two_kernels = (len(products) for _, products, _ in ROWS)
    assert counted / forward == 2.5 and in_two_kernels / forward == 3.5


@pytest.mark.parametrize("shape", [(6, 6, True, 2), (3, 8, False, 0), (5, 4, True, 3)])
def test_the_loops_draw_at_any_shape(shape, tmp_path):
    draw_loops(*shape).savefig(tmp_path / "loops.png")


def test_the_work_is_drawn(tmp_path):
    draw_work().savefig(tmp_path / "work.png")
