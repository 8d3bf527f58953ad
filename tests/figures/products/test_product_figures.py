"""Chapter 18's figures say what their numbers say."""

from course_lib.figures.products.ladder import ON_AN_H200, draw_ladder
from course_lib.figures.products.order import draw_order, tiles_at_work
from course_lib.figures.products.shares import draw_shares
from course_lib.kernels.products.parts import tile_of


def test_the_first_programs_are_at_work_in_their_tiles():
    at_work = tiles_at_work(tile_of.fn, 132, 64, 32, 8)
    assert at_work.sum() == 132 and at_work[:8, :16].all()


def test_each_panel_counts_what_its_tiles_load():
    titles = [axes.get_title(loc="left") for axes in draw_order(tile_of.fn, 132, 64, 32, (1, 8)).axes]
    assert titles == ["row by row: 5 + 32 = 37 tiles loaded", "in strips of 8: 8 + 17 = 25 tiles loaded"]


def test_every_step_has_its_bar_and_its_share_of_the_peak():
    (axes,) = draw_ladder(ON_AN_H200, "8192³").axes
    words = [text.get_text() for text in axes.texts]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(ON_AN_H200)
    assert words[0] == "9   1 %" and words[-1] == "peak 989"
    assert draw_ladder({"naive": 5.0}, "small", peak=None).axes[0].texts[0].get_text() == "5"


def test_a_programs_steps_are_bars_with_their_tile():
    events = [(0, ("multiply", 2, 0, 1), 0, 10), (0, ("leave",), 10, 16), (1, ("multiply", 2, 1, 4), 0, 30),
              (1, ("wait", 0), 30, 31), (1, ("add", 0), 31, 32), (1, ("store", 2), 32, 33)]  # fmt: skip
    (axes,) = draw_shares(events, 40).axes
    assert [text.get_text() for text in axes.texts] == ["2", "tile 2\n1 … 3", "whole tiles: 40"]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(e[2], e[3] - e[2]) for e in events]
