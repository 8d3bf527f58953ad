"""Chapter 11's figures say what their numbers say."""

import types

import pytest

from course_lib.figures.latent.crossing import crossing, draw_form_times
from course_lib.figures.latent.forms import draw_two_forms
from course_lib.figures.latent.one_load import draw_one_load
from course_lib.figures.latent.ranks import draw_rank_bytes
from course_lib.figures.latent.roofline import draw_datasheet_roofline, draw_latent_roofline, latent_intensity
from course_lib.figures.latent.seesaw import STEPS, draw_seesaw
from course_lib.figures.latent.sharing import draw_sharing
from course_lib.figures.latent.tiles import REPORTED, draw_tile_steps

GPU = types.SimpleNamespace(
    device="NVIDIA H200",
    memory_bandwidth=4.37e12,
    copy_bandwidth=4.25e12,
    matmul_rate={"float16": 720e12},
    fma_rate=60e12,
)


def texts(figure):
    (axes,) = figure.axes
    legend = axes.get_legend()
    return [text.get_text() for text in axes.texts] + [t.get_text() for t in (legend.get_texts() if legend else ())]


def test_a_line_of_ranks_holds_the_numbers_it_was_given():
    figure = draw_rank_bytes({"8 KV heads": {1: 4096, 8: 512}, "latent": {1: 1152, 8: 1152}})
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[4096, 512], [1152, 1152]]
    assert {"8 KV heads", "latent"} <= set(texts(figure))


def test_the_intensity_is_1_89_for_each_head_and_the_balance_is_told_in_heads():
    assert latent_intensity(128, 2) == pytest.approx(241.8, abs=0.1)
    assert any("from 88 heads on" in text for text in texts(draw_latent_roofline(GPU)))


def test_the_second_tile_begins_behind_64_rows():
    words = texts(draw_tile_steps(heads=16, tile_rows=64))
    assert [word.splitlines()[1] for word in words] == [
        *(f"{16 * tokens} rows: 1 tile" for tokens in (1, 2, 3, 4)),
        "80 rows: 2 tiles",
    ]
    assert REPORTED[5] / REPORTED[4] == pytest.approx(1.9, abs=0.01)


def test_both_forms_are_drawn_with_their_times():
    figure = draw_form_times({"absorbed": {1: 1e-5, 8: 7e-5}, "expanded": {1: 1e-3, 8: 1.1e-3}}, "an H200")
    assert [line.get_label() for line in figure.axes[0].lines] == ["absorbed", "expanded"]


def test_the_crossing_is_marked_and_points_that_wait_for_memory_are_hollow():
    times = {"absorbed": {100: 1.0, 400: 4.0}, "expanded": {100: 2.0, 400: 2.0}}
    assert crossing(times["absorbed"], times["expanded"]) == pytest.approx(200)
    figure = draw_form_times(times, "an H200", {"expanded": {100}})
    assert any("about 200" in text for text in texts(figure))
    assert "expanded, memory is the limit" in texts(figure)


def test_each_head_has_keys_of_its_own_but_in_grouped_query_attention():
    words = texts(draw_sharing(heads=4, groups=2))
    assert words.count("k, v 4") == 2 and words.count("k, v 2") == 3


def test_a_datasheet_draws_its_own_balance():
    sheet = types.SimpleNamespace(bandwidth=4.8e12, matmul_rate={"float16": 989e12})
    assert any("from 110 heads on" in text for text in texts(draw_datasheet_roofline("an H200", sheet)))


def test_a_worker_of_the_seesaw_does_one_thing_at_a_time():
    for worker in (0, 1):
        mine = [(start, start + length) for owner, start, length, *_ in STEPS if owner == worker]
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in zip(mine, mine[1:]))
    draw_seesaw()


def test_the_expanded_form_shows_what_it_makes_of_a_token():
    assert any("32,768" in text for text in texts(draw_two_forms(128, 128)))


def test_a_step_loads_one_row_in_two_tiles_and_uses_it_twice():
    figure = draw_one_load(rows=64, latent_dim=512, rope_dim=64, tokens=32)
    sizes = [(round(tile.get_width()), round(tile.get_height())) for tile in figure.axes[0].patches[:-4]]
    assert sizes == [(512, 64), (64, 64), (512, 32), (64, 32), (32, 64), (512, 64)]
    words = " ".join(texts(figure))
    assert "loaded once: 32 × 512 and 32 × 64" in words and "first use" in words and "second use" in words
