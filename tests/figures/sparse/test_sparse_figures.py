"""Chapter 17's figures say what their numbers say."""

import pytest
import torch

from course_lib.figures.sparse.costs import draw_costs
from course_lib.figures.sparse.lists import draw_block_lists, listed
from course_lib.figures.sparse.loads import draw_loads
from course_lib.figures.sparse.pages import draw_window_pages, held_pages
from course_lib.figures.sparse.radix import draw_radix_passes, radix_passes
from course_lib.figures.sparse.ranges import draw_ranges, ranges_of
from course_lib.figures.sparse.tiles import CUT, HIDDEN, WHOLE, draw_window_tiles, level_costs, tile_kinds
from course_lib.hardware.schedule import scheduled
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


def test_each_slot_has_a_row_and_the_end_and_the_even_share_are_written():
    bars = scheduled([4, 1, 1, 3], slots=2)
    axes = draw_loads({"as they come": bars}, 2, "keys").axes[0]
    assert texts(axes) == ["ends at 5"] and axes.lines[0].get_xdata()[0] == 4.5


def test_bars_of_one_owner_have_one_colour():
    bars = scheduled([4, 1, 1, 3], slots=2)
    patches = draw_loads({"two heads": bars}, 2, "keys", {"two heads": [0, 1, 0, 1]}).axes[0].patches
    colors = [patch.get_facecolor() for patch in patches]
    assert colors[0] == colors[2] != colors[1] == colors[3]


def test_a_cost_is_drawn_where_it_is_and_the_crossing_is_named():
    lines = {"all keys": {1024: 1.0, 4096: 16.0}, "a window": {1024: 1.0, 4096: 4.0}}
    axes = draw_costs(lines, "time", "an H200", (2048, "half here")).axes[0]
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[1.0, 16.0], [1.0, 4.0]]
    assert {"all keys", "a window", "half here"} <= set(texts(axes))


@pytest.mark.parametrize(("before", "block"), [(9, 4), (3, 4), (0, 1), (20, 4), (11, 5)])
def test_visited_tiles_hold_a_seen_key_and_whole_ones_are_seen_by_every_query(before, block):
    queries = torch.arange(10, 14)[:, None]
    distance = queries - torch.arange(40)
    seen = ((distance >= 0) & (distance <= before)).view(4, 40 // block, block)
    found = ranges_of(10, 13, before, block)
    assert list(found.visited) == seen.any(2).any(0).nonzero().flatten().tolist()
    assert list(found.whole) == seen.all(2).all(0).nonzero().flatten().tolist()


def test_the_four_numbers_are_written_beside_their_ranges():
    assert {"rounded out: begin = 0, end = 4", "rounded in: whole_begin = 1, whole_end = 2"} <= set(
        texts(draw_ranges(10, 13, 9, 4).axes[0])
    )
    assert "no tile is whole" in texts(draw_ranges(10, 13, 3, 4).axes[0])


@pytest.mark.parametrize("k", [1, 7, 8, 9, 24])
def test_the_passes_end_at_the_k_th_largest(k):
    numbers = [21, 61, 14, 43, 35, 9, 58, 29, 47, 3, 40, 55, 12, 44, 26, 43, 19, 49, 31, 6, 45, 37, 22, 11]
    first, second = radix_passes(numbers, k)
    border = sorted(numbers)[-k]
    assert (first.border, second.border) == divmod(border, 8)
    assert first.larger + second.larger == sum(number > border for number in numbers)


def test_above_each_bar_stands_how_many_numbers_are_reached():
    first, second = draw_radix_passes([7, 7, 1, 0, 20, 9], 4).axes  # 20 and 9 are larger, so two of four are missing
    assert texts(first) == ["6", "2", "1", "0", "0", "0", "0", "0"]  # by digit, from 0 on
    assert texts(second) == ["4", "3", "2", "2", "2", "2", "2", "2"]
    assert second.get_title(loc="left") == "pass 2: 2 to be found among 4"


@pytest.mark.parametrize(
    "draw",
    [
        lambda: draw_window_tiles(window=0),
        lambda: draw_window_tiles(length=128 * 41),
        lambda: draw_window_pages(window=0),
        lambda: draw_block_lists(torch.ones(65, 65, dtype=torch.bool), 8),
        lambda: draw_costs({}, "time", "nothing"),
        lambda: draw_ranges(10, 30, 9, 4),
        lambda: draw_ranges(10, 9, 9, 4),
        lambda: draw_radix_passes([1, 2, 3], 4),
        lambda: draw_radix_passes([1, 64, 3], 2),
    ],
)
def test_what_cannot_be_read_is_refused(draw):
    with pytest.raises(ValueError):
        draw()
