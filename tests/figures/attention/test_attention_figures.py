"""Chapter 02's figures: the bytes that they draw are those of the formulas, and they draw at odd shapes too."""

import pytest

from course_lib.figures.attention.memory import (
    draw_attention_memory,
    longest_that_fits,
    naive_bytes,
    tiled_bytes,
)
from course_lib.figures.attention.three_passes import draw_three_passes


def _words(figure):
    return " ".join(text.get_text() for axes in figure.axes for text in axes.texts)


def test_the_memory_of_naive_attention_is_that_of_its_six_tensors():
    assert naive_bytes(8192, 32, 128, 2) == 4 * 32 * 8192 * 128 * 2 + 2 * 32 * 8192 * 8192 * 2


def test_tiled_attention_keeps_one_number_a_row_beside_its_inputs_and_output():
    assert tiled_bytes(1000, 8, 64, 2) == 8 * 1000 * (4 * 64 * 2 + 4)


@pytest.mark.parametrize("need", [naive_bytes, tiled_bytes])
@pytest.mark.parametrize("capacity", [10**3, 16 * 2**30, 10**15])
def test_the_longest_length_fits_and_one_token_more_does_not(need, capacity):
    shape = (12, 64, 2)
    longest = longest_that_fits(need, capacity, *shape)
    assert longest == 0 or need(longest, *shape) <= capacity
    assert need(longest + 1, *shape) > capacity


def test_the_memory_figure_names_this_machine_and_its_longest_length():
    capacity = 24 * 2**30
    words = _words(draw_attention_memory(32, 128, 2, device_bytes=capacity))
    assert "this machine, 24.0 GiB" in words
    assert f"{longest_that_fits(naive_bytes, capacity, 32, 128, 2):,}" in words
    assert "this machine" not in _words(draw_attention_memory(32, 128, 2))


def test_the_three_passes_show_the_bytes_of_each():
    words = _words(draw_three_passes(32, 8192, 8192, 128, 2))
    assert words.count("4.43 GB moved") == 2 and "8.59 GB moved" in words
    assert "17.4 GB, of which 98 % are S and P" in words


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (32, 1, 100_000, 128, 2), (2, 4096, 16, 256, 4)])
def test_the_three_passes_draw_at_any_shape(shape, tmp_path):
    draw_three_passes(*shape).savefig(tmp_path / "passes.png")
