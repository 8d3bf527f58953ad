"""The walk over tiles counts what the formula says, and draws what it is asked for."""

import pytest

from course_lib.figures.attention.tile_stepper import Walk, chosen_steps, draw_step, tile_stepper


def test_the_whole_walk_reads_what_the_formula_says():
    walk = Walk(query_length=1000, key_length=700, head_dim=64, query_rows=128, key_rows=64, item_bytes=2)
    read, written = walk.bytes_after(len(walk.steps()) - 1)
    assert read == (1000 + 8 * 2 * 700) * 64 * 2
    assert written == 1000 * 64 * 2


def test_causal_skips_the_tiles_above_the_diagonal():
    walk = Walk(512, 512, 64, 128, 128, 2, causal=True)
    assert len(walk.steps()) == 4 + 3 + 2 + 1
    assert all(column <= row for row, column in walk.steps())


def test_causal_is_aligned_to_the_end():
    walk = Walk(query_length=128, key_length=512, head_dim=64, query_rows=64, key_rows=128, item_bytes=2, causal=True)
    assert walk.visited(0, 3), "query 63 stands at key 447, in the last tile of keys"
    assert len(walk.steps()) == 8


def test_an_output_is_written_with_the_last_step_of_its_row():
    walk = Walk(256, 256, 32, 128, 128, 4)
    assert [walk.bytes_after(index)[1] for index in range(4)] == [0, 128 * 32 * 4, 128 * 32 * 4, 256 * 32 * 4]


def test_the_chip_holds_less_than_one_row_of_tiles_would_take():
    walk = Walk(4096, 4096, 64, 512, 512, 2)
    assert sum(walk.on_chip(0).values()) < walk.query_rows * walk.key_length * 4


@pytest.mark.parametrize("sizes", [(768, 768, 64, 128, 128), (100, 30, 16, 128, 64), (65, 700, 80, 64, 64)])
def test_the_first_and_last_steps_are_among_those_shown(sizes):
    walk = Walk(*sizes, item_bytes=2)
    chosen = chosen_steps(walk)
    assert chosen[0] == 0 and chosen[-1] == len(walk.steps()) - 1 and len(chosen) <= 4


def test_every_step_draws():
    walk = Walk(200, 130, 32, 64, 64, 2)
    for index in range(len(walk.steps())):
        assert draw_step(walk, index).axes[0].get_title(loc="left").startswith(f"Step {index + 1} of")


def test_the_slider_changes_the_picture():
    box = tile_stepper(256, 256, 64, 128, 128).widget()
    (play, slider), image = box.children[0].children, box.children[1]
    before = image.value
    slider.value = 3
    assert image.value != before and play.max == slider.max == 3


@pytest.mark.parametrize(
    "wrong, name",
    [
        ({"query_rows": 0}, "query_rows"),
        ({"head_dim": 2.5}, "head_dim"),
        ({"key_length": 10**6}, "tiles"),
        ({"causal": True, "key_length": 128}, "causal"),
    ],
)
def test_what_cannot_be_drawn_is_named(wrong, name):
    sizes = {"query_length": 512, "key_length": 512, "head_dim": 64, "query_rows": 64, "key_rows": 64} | wrong
    with pytest.raises(ValueError, match=name):
        tile_stepper(**sizes)
