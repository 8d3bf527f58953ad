"""Programs on slots: orders held against every assignment there is, and causal tiles in sections of heads."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.hardware.schedule import (
    busy_share,
    causal_tiles,
    finish,
    heads_that_fit,
    most_heads_at_work,
    scheduled,
)

L2_BYTES = 50 * 2**20  # of an H100 and an H200
some_works = st.lists(st.integers(1, 20), min_size=1, max_size=7)


def end(works, slots):
    return finish(scheduled(works, slots))


def best_end(works, slots):
    """By trying every assignment of programs to slots."""
    return min(
        max(sum(work for work, at in zip(works, places) if at == slot) for slot in range(slots))
        for places in itertools.product(range(slots), repeat=len(works))
    )


def planned(slots, heads, length, **order):
    """The tiles in an order, the time until the last one ends, and how many heads are at work at most."""
    tiles = causal_tiles(heads, length, **order)
    bars = scheduled([tile.work for tile in tiles], slots)
    return tiles, bars, finish(bars), most_heads_at_work(tiles, bars)


def test_programs_start_in_order_on_the_slot_that_is_free_first():
    bars = scheduled([4, 1, 1, 3], slots=2)
    assert bars == [(0, 0.0, 4), (1, 0.0, 1), (1, 1.0, 1), (1, 2.0, 3)] and finish(bars) == 5
    assert busy_share(bars, 2) == 0.9


@settings(max_examples=40)
@given(some_works, st.integers(1, 3))
def test_no_order_is_worse_than_twice_the_best_and_longest_first_than_four_thirds(works, slots):
    best = best_end(works, slots)
    assert best >= max(sum(works) / slots, max(works))
    assert best <= end(works, slots) <= (2 - 1 / slots) * best + 1e-9
    assert end(sorted(works, reverse=True), slots) <= (4 / 3 - 1 / (3 * slots)) * best + 1e-9


def test_both_bounds_are_reached():
    assert end([1, 1, 1, 1, 1, 1, 3], 3) == 5 and best_end([1, 1, 1, 1, 1, 1, 3], 3) == 3  # 2 - 1/3
    assert end([3, 3, 2, 2, 2], 2) == 7 and best_end([3, 3, 2, 2, 2], 2) == 6  # 4/3 - 1/6


@pytest.mark.parametrize("heads_at_once", [None, 1, 3, 4, 16])
@pytest.mark.parametrize("longest_first", [True, False])
def test_every_tile_is_handed_out_once_whatever_the_order(heads_at_once, longest_first):
    tiles = causal_tiles(7, 1000, heads_at_once=heads_at_once, longest_first=longest_first)
    assert sorted((tile.head, tile.row) for tile in tiles) == [(head, row) for head in range(7) for row in range(8)]


@pytest.mark.parametrize(
    "length, tile_rows, key_rows", [(1000, 128, 128), (1000, 256, 64), (130, 128, 32), (1, 64, 64)]
)
def test_a_tile_reads_the_blocks_of_keys_that_its_queries_see(length, tile_rows, key_rows):
    for tile in causal_tiles(1, length, tile_rows=tile_rows, key_rows=key_rows):
        queries = range(tile.row * tile_rows, min((tile.row + 1) * tile_rows, length))
        assert tile.work == len({key // key_rows for key in range(max(queries) + 1)})


def test_a_section_is_done_before_the_next_one_starts_and_in_it_rows_go_down():
    tiles = causal_tiles(5, 512, heads_at_once=2)
    assert [tile.head // 2 for tile in tiles] == [0] * 8 + [1] * 8 + [2] * 4
    assert [(tile.head, tile.row) for tile in tiles[:5]] == [(0, 3), (1, 3), (0, 2), (1, 2), (0, 1)]
    as_started = causal_tiles(2, 256, longest_first=False)
    assert [(tile.head, tile.row) for tile in as_started] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_heads_that_fit_are_a_power_of_two_and_share_a_key_heads_bytes():
    """8192 tokens of 128 are 4 MiB of keys and values, so 12 heads fit in 50 MiB, and 8 is the power of 2."""
    assert heads_that_fit(L2_BYTES, 8192, 128) == 8
    assert heads_that_fit(L2_BYTES, 8192, 128, itemsize=1) == 16
    assert heads_that_fit(L2_BYTES, 8192, 128, heads_per_key_head=8) == 64
    assert heads_that_fit(L2_BYTES, 2**20, 128) == 1
    assert heads_that_fit(2**22, 8192, 128) == 1 and heads_that_fit(2**23, 8192, 128) == 2


@pytest.mark.parametrize(
    "slots, heads, length, as_started, sections, all_at_once",
    [
        (132, 16, 4096, (85, 11), (65, 16), (65, 16)),
        (148, 16, 4096, (78, 13), (60, 16), (60, 16)),
        (132, 16, 16384, (1076, 4), (1003, 8), (1002, 16)),
        (148, 16, 16384, (970, 4), (902, 8), (894, 16)),
        (132, 64, 8192, (1048, 6), (1009, 16), (1009, 64)),
        (148, 64, 8192, (940, 7), (904, 16), (900, 64)),
    ],
)
def test_the_figures_of_the_table(slots, heads, length, as_started, sections, all_at_once):
    fitting = heads_that_fit(L2_BYTES, length, 128)
    for order, expected in (
        ({"longest_first": False}, as_started),
        ({"heads_at_once": fitting}, sections),
        ({}, all_at_once),
    ):
        tiles, bars, ends, heads_at_work = planned(slots, heads, length, **order)
        assert (ends, heads_at_work) == expected
        assert ends >= sum(tile.work for tile in tiles) / slots and busy_share(bars, slots) <= 1
    assert sections[1] <= 2 * fitting


@pytest.mark.parametrize("slots", [132, 148])
@pytest.mark.parametrize("length", [2048, 5000, 16384])
def test_longest_first_gains_most_where_slots_get_few_tiles(slots, length):
    gains = []
    for heads in (16, 64, 128):
        _, _, started, _ = planned(slots, heads, length, longest_first=False)
        _, _, first, _ = planned(slots, heads, length, heads_at_once=heads_that_fit(L2_BYTES, length, 128))
        gains.append(started / first)
    assert gains[0] > gains[1] > gains[2] > 1


def test_heads_at_work_are_counted_while_they_overlap():
    tiles = causal_tiles(3, 128)
    assert most_heads_at_work(tiles, scheduled([tile.work for tile in tiles], 1)) == 1  # one after the other
    assert most_heads_at_work(tiles, scheduled([tile.work for tile in tiles], 2)) == 2
