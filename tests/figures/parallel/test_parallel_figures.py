"""The pictures of chapter 20 and the numbers in them."""

from fractions import Fraction

import pytest

from course_lib.figures.parallel.cuts import draw_cuts, partial_sums, uses
from course_lib.figures.parallel.race import choose_order, draw_race, play, too_new
from course_lib.figures.parallel.ring import draw_ring, pairs, work_of_steps, working_share

MADE = [1, -1, 2, 0, 1, 1, 1, 1]  # four gates, four ups
RIGHT, ONE_BLOCK = [[0, 1, 4, 5], [2, 3, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]
NUMBERS = [[1, 2], [10, 20]]
CONTIGUOUS, ZIG_ZAG = [[0], [1], [2], [3]], [[0, 7], [1, 6], [2, 5], [3, 4]]
WRONG, GOOD = 0, 2  # orders of the race


def words(axes):
    return [text.get_text() for text in axes.texts]


def title(axes):
    return axes.get_title(loc="left")


def test_the_partial_sums_of_the_chapters_example():
    assert partial_sums(MADE, RIGHT) == pytest.approx([0.462, 1.762], abs=5e-4)
    assert partial_sums(MADE, ONE_BLOCK) == pytest.approx([1.462, 1.462], abs=5e-4)


def test_rows_that_a_rank_takes_for_what_they_are_not_are_named():
    assert uses(ONE_BLOCK)[2] == (0, "up") and uses(ONE_BLOCK)[4] == (1, "gate") and uses(RIGHT)[4] == (0, "up")
    right, one_block = draw_cuts(MADE, {"right": RIGHT, "one block": ONE_BLOCK}).axes
    taken = [[word for word in words(axes) if word.startswith("taken as")] for axes in (right, one_block)]
    assert taken == [[], ["taken as up"] * 2 + ["taken as gate"] * 2]
    assert "all-reduce:  2.224, which is right" in words(right)
    assert "all-reduce:  2.924, and 2.224 is right" in words(one_block)


def test_the_columns_of_down_go_to_the_ranks_in_order():
    (axes,) = draw_cuts([1] * 16, {"four ranks": [[2 * r, 2 * r + 1, 2 * r + 8, 2 * r + 9] for r in range(4)]}).axes
    assert [word for word in words(axes) if word.startswith("column")] == [
        f"column {column}, rank {column // 2}" for column in range(8)
    ]


@pytest.mark.parametrize("order", range(20))
def test_a_sum_is_wrong_exactly_where_a_read_is_marked(order):
    events, sums = play(NUMBERS, order)
    marked = {events[place][1] for place in too_new(events)}
    assert marked == {rank for rank in range(2) if sums[rank] != [11, 22]}
    assert all(events[place][0] == "read" and events[place][3] == 1 for place in too_new(events))


def test_the_second_call_of_two_is_never_wrong():
    assert all(sums[1] == 22 for order in range(20) for sums in play(NUMBERS, order)[1])


def test_a_wrong_order_says_who_found_what_and_marks_it_by_a_frame_and_an_arrow():
    (wrong,), (good,) = draw_race(NUMBERS, WRONG).axes, draw_race(NUMBERS, GOOD).axes
    assert title(wrong) == "Order 0: rank 0 finds numbers of call 2 in call 1 (right sums: 11, 22)"
    assert title(good) == "Order 2: all reads find the numbers of their own call (right sums: 11, 22)"
    assert len(wrong.patches) == len(good.patches) + 1 == 16 + 1  # a box for each step, and the arrow
    assert "sums\n21, 22" in words(wrong) and words(good).count("sums\n11, 22") == 2


def test_the_slider_goes_over_the_orders_and_the_still_picture_is_a_wrong_one():
    stepper = choose_order(NUMBERS, 4)
    assert stepper.steps == 4 and stepper.picture(3).startswith(b"\x89PNG")
    assert title(stepper.still.axes[0]) == title(draw_race(NUMBERS, WRONG).axes[0])


@pytest.mark.parametrize("chunks", [CONTIGUOUS, ZIG_ZAG, [[0, 3], [1, 2]], [[0]]])
def test_each_pair_that_causality_allows_is_computed_once(chunks):
    count = sum(map(len, chunks))
    found = [(query, key) for _, _, query, key, _ in pairs(chunks)]
    assert sorted(found) == [(query, key) for query in range(count) for key in range(query + 1)]
    assert sum(map(sum, work_of_steps(chunks))) == Fraction(len(chunks) ** 2, 2)


def test_one_chunk_for_each_rank_works_four_sevenths_of_the_time_and_zig_zag_all_of_it():
    assert working_share(CONTIGUOUS) == Fraction(4, 7) and working_share(ZIG_ZAG) == 1
    assert [sum(step[3] for step in work_of_steps(CONTIGUOUS)), work_of_steps(CONTIGUOUS)[1][0]] == [3.5, 0]
    figure = draw_ring({"one": CONTIGUOUS, "zig-zag": ZIG_ZAG})
    assert [title(axes) for axes in figure.axes[2:]] == [f"the ranks work {share} % of the time" for share in (57, 100)]


def test_a_cell_says_in_which_step_the_keys_arrive():
    step = {(query, key): step for _, step, query, key, _ in pairs(ZIG_ZAG)}
    assert step[1, 0] == 1 and step[6, 2] == 3 and step[4, 3] == step[7, 0] == 0  # rank 1 has rank 2's keys last


@pytest.mark.parametrize(
    "draw, given, told",
    [
        (draw_cuts, (MADE, {"lost": [[0, 1], [2, 3]]}), "'lost' must give each of the 8 rows"),
        (draw_race, ([[1], [10]], 0), "each rank must have 2"),
        (draw_ring, ({"twice": [[0, 1], [1, 2]]},), "'twice' must give each chunk"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, given, told):
    with pytest.raises(ValueError, match=told):
        draw(*given)
