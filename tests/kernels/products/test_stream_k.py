"""Stream-K's plan: even shares, every step once, one owner for a tile, and nobody waits for who has not begun."""

import itertools

import pytest

from course_lib.kernels.products.stream_k import stream_k_plan

SIZES = [(1, 1, 1), (1, 7, 3), (9, 4, 4), (5, 3, 15), (5, 3, 16), (12, 5, 7), (3, 100, 132), (513, 64, 132)]


@pytest.fixture(params=SIZES, ids=lambda sizes: "{} tiles, {} steps, {} programs".format(*sizes))
def plan(request):
    return request.param, stream_k_plan(*request.param)


def test_shares_differ_by_one_step_at_most(plan):
    (tiles, steps, programs), shares = plan
    sizes = [sum(segment.end - segment.begin for segment in share) for share in shares]
    assert len(sizes) == min(programs, tiles * steps)
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1 and sum(sizes) == tiles * steps


def test_every_step_is_done_once(plan):
    (tiles, steps, _), shares = plan
    done = [(segment.tile, step) for share in shares for segment in share for step in range(segment.begin, segment.end)]
    assert sorted(done) == list(itertools.product(range(tiles), range(steps)))


def test_a_tile_has_one_owner_and_that_is_the_last_of_its_programs(plan):
    (tiles, _, _), shares = plan
    for tile in range(tiles):
        takers = [(number, it.owned) for number, share in enumerate(shares) for it in share if it.tile == tile]
        assert [owned for _, owned in takers] == [False] * (len(takers) - 1) + [True]
        assert [number for number, _ in takers] == list(range(takers[0][0], takers[0][0] + len(takers)))


def test_a_program_leaves_one_part_at_most_and_first(plan):
    for share in plan[1]:
        assert all(segment.owned for segment in share[1:])


def test_nine_tiles_on_four_programs_take_the_time_of_two_and_a_quarter():
    shares = stream_k_plan(9, 4, 4)
    assert shares[0] == [(2, 0, 1, False), (1, 0, 4, True), (0, 0, 4, True)]
    assert shares[1] == [(4, 0, 2, False), (3, 0, 4, True), (2, 1, 4, True)]
