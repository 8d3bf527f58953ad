"""The order of tiles, for every kernel that has one: each tile once, in strips."""

import pytest

from course_lib.kernels.products.parts import tile_of


def tiles(row_tiles: int, column_tiles: int, group: int) -> list[tuple[int, int]]:
    return [tile_of.fn(number, row_tiles, column_tiles, group) for number in range(row_tiles * column_tiles)]


@pytest.mark.parametrize("row_tiles", [1, 2, 7, 8, 9, 31])
@pytest.mark.parametrize("column_tiles", [1, 3, 16])
@pytest.mark.parametrize("group", [1, 2, 3, 8, 40])
def test_each_tile_comes_once(row_tiles, column_tiles, group):
    every = {(row, column) for row in range(row_tiles) for column in range(column_tiles)}
    found = tiles(row_tiles, column_tiles, group)
    assert len(found) == len(every) and set(found) == every


def test_programs_walk_down_a_strip_and_the_last_one_is_thinner():
    assert tiles(3, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


def test_a_group_of_one_is_row_by_row():
    assert tiles(3, 4, 1) == [(row, column) for row in range(3) for column in range(4)]


def test_a_strip_has_fewer_tiles_to_load_than_rows_have():
    """The 132 programs of an H200 at 8192³ in tiles of 128 × 256: 37 tiles a block of inner, or 25."""

    def loads(group):
        at_work = tiles(64, 32, group)[:132]
        return len({row for row, _ in at_work}) + len({column for _, column in at_work})

    assert (loads(1), loads(8)) == (37, 25)
