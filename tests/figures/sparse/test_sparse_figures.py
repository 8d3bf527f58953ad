"""Chapter 17's figures say what their numbers say."""

import pytest
import torch

from course_lib.figures.sparse.costs import draw_costs
from course_lib.figures.sparse.lists import draw_block_lists, listed
from course_lib.figures.sparse.loads import draw_loads, finish, scheduled
from course_lib.figures.sparse.pages import draw_window_pages, held_pages
from course_lib.figures.sparse.tiles import CUT, HIDDEN, WHOLE, draw_window_tiles, level_costs, tile_kinds
from course_lib.kernels.attention.reference import visible_keys


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_tile_is_whole_only_if_it_is_complete_and_seen_all_over():
    kinds = tile_kinds(visible_keys(5, 5, causal=True, window=2), 2)  # queries see their own key and two before
    assert kinds.tolist() == [[CUT, HIDDEN, HIDDEN], [CUT, CUT, HIDDEN], [HIDDEN, CUT, CUT]]
    assert tile_kinds(torch.ones(4, 4, dtype=torch.bool), 2).eq(WHOLE).all()


@pytest.mark.parametrize(("window", "tiles"), [(128, 31), (256, 45), (2048, 136)])
def test_a_bounded_loop_pays_for_the_tiles_it_needs_and_the_others_for_the_triangle(window, tiles):
    costs = level_costs(tile_kinds(visible_keys(2048, 2048, causal=True, window=window - 1), 128))
    assert sum(costs["bound"].values()) == tiles
    assert sum(costs["mask"].values()) == sum(costs["skip"].values()) == 136
    _, bars = draw_window_tiles(2048, window, 128).axes
    assert texts(bars) == ["136 steps", "136 steps", f"{tiles} steps"]


def test_a_page_is_held_as_long_as_some_later_query_sees_a_token_of_it():
    for length in range(1, 60):
        seen = {position // 8 for position in range(max(0, length - 24), length)}
        assert set(held_pages(length, 8, 24)) == seen
    assert max(len(held_pages(length, 8, 24)) for length in range(1, 1000)) == 4  # ⌈23 / 8⌉ + 1
    assert texts(draw_window_pages(96, 8, 24).axes[1]) == ["without a window: 12", "with it: at most 4"]


def test_the_lists_hold_each_tile_once_and_the_transpose_holds_the_same():
    kinds = tile_kinds(visible_keys(32, 32, causal=True, window=11), 4)
    for kind in (CUT, WHOLE):
        pairs = {(row, column) for row, columns in enumerate(listed(kinds, kind)) for column in columns}
        assert pairs == {(row, column) for column, rows in enumerate(listed(kinds.T, kind)) for row in rows}
        assert len(pairs) == int((kinds == kind).sum())
    _, rows, columns = draw_block_lists(visible_keys(32, 32, causal=True, window=11), 4).axes
    assert len(rows.patches) == len(columns.patches) == int((kinds != HIDDEN).sum())


def test_programs_start_in_order_on_the_slot_that_is_free_first():
    bars = scheduled([4, 1, 1, 3], slots=2)
    assert bars == [(0, 0.0, 4), (1, 0.0, 1), (1, 1.0, 1), (1, 2.0, 3)] and finish(bars) == 5
    axes = draw_loads({"as they come": bars}, 2, "keys").axes[0]
    assert texts(axes) == ["ends at 5"] and axes.lines[0].get_xdata()[0] == 4.5


def test_a_cost_is_drawn_where_it_is_and_the_crossing_is_named():
    lines = {"all keys": {1024: 1.0, 4096: 16.0}, "a window": {1024: 1.0, 4096: 4.0}}
    axes = draw_costs(lines, "time", "an H200", (2048, "half here")).axes[0]
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[1.0, 16.0], [1.0, 4.0]]
    assert {"all keys", "a window", "half here"} <= set(texts(axes))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: draw_window_tiles(window=0),
        lambda: draw_window_tiles(length=128 * 41),
        lambda: draw_window_pages(window=0),
        lambda: draw_block_lists(torch.ones(65, 65, dtype=torch.bool), 8),
        lambda: draw_costs({}, "time", "nothing"),
    ],
)
def test_what_cannot_be_read_is_refused(draw):
    with pytest.raises(ValueError):
        draw()
