"""The truth of exercise 10.5 is what a search through all plans finds."""

import pytest

from course_lib.checker.specification.draw import Draw
from exercises.ch10_backward_and_recomputation.ex5_plan import best_plan, by_search, limit_of, network

KINDS = ("alike", "attention and feed-forward", "any")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 2, 5, 8])
def test_the_best_plan_is_that_of_a_search_through_all(count, kind):
    draw = Draw(count)
    for share in (-0.01, 0.0, 0.1, 0.3, 0.5, 0.8, 1.0):
        layers = network(draw, count, kind)
        limit = limit_of(draw, layers, share)
        assert best_plan(layers, limit) == by_search(layers, limit), (layers, limit)
