"""Chapter 07's figures: they say what the formulas say, refuse what can't be drawn, and no label covers another."""

import dataclasses
import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from course_lib.figures.cache.per_token import MODELS, CacheShape, draw_cache_per_token
from course_lib.figures.decode.head_maps import draw_head_maps, key_head_of, kind_of
from course_lib.figures.decode.packed_tile import draw_packed_tile
from course_lib.figures.decode.roofline import draw_decode_roofline, group_intensity
from course_lib.hardware.ceilings.measured import Ceilings

GPU = Ceilings(
    device="NVIDIA H200",
    kind="cuda",
    copy_bandwidth=4e12,
    read_bandwidth=4.2e12,
    matmul_rate={"float32": 51e12, "float16": 745e12},
    fma_rate=58e12,
    launch_overhead=6e-6,
    l2_bandwidth=7e12,
    on_chip_bandwidth=25e12,
    spread={},
    sweep=((8192, 25e12),),
    measured_at="2026-01-01T00:00:00+00:00",
)
CPU = dataclasses.replace(
    GPU,
    device="A CPU",
    kind="cpu",
    copy_bandwidth=4e10,
    read_bandwidth=4.1e10,
    matmul_rate={"float32": 6e10},
    fma_rate=5e10,
    l2_bandwidth=None,
    on_chip_bandwidth=2e11,
)
MEASURED = {"repeated first": {1: 4e8, 2: 4e8, 4: 4.2e8}, "shared (7.4)": {1: 1.5e9, 2: 3e9, 4: 6e9, 8: 7e9}}


def words(figure):
    return " ".join(text.get_text() for axes in figure.axes for text in axes.texts)


def overlaps(figure):
    """Pairs of labels whose boxes share an area, and labels that leave the picture."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [text for axes in figure.axes for text in axes.texts if len(text.get_text()) > 2]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    pairs = [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]
    outside = [name for name, box in boxes if box.x0 < 0 or box.x1 > figure.bbox.x1 or box.y0 < 0]
    return pairs + outside


def test_neighbours_share_a_key_head():
    assert [key_head_of(head, 8, 2) for head in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_panels_are_named_by_their_heads():
    shown = words(draw_head_maps(8, (8, 2, 1)))
    assert [kind_of(8, heads) for heads in (8, 2, 1)] == [
        "multi-head (MHA)",
        "grouped-query (GQA)",
        "multi-query (MQA)",
    ]
    assert "groups of 4: 1/4 of the cache" in shown and "groups of 1: the whole cache" in shown


@pytest.mark.parametrize("query_heads, key_heads", [(8, (3,)), (17, (1,)), (8, (0,)), (8, ()), (8, (1, 1, 1, 1, 1))])
def test_heads_that_cannot_be_drawn_are_refused(query_heads, key_heads):
    with pytest.raises(ValueError, match="heads"):
        draw_head_maps(query_heads, key_heads)


@pytest.mark.parametrize("sizes, padding", [((16, 2, 16), "50 % of"), ((16, 1, 16), "No row"), ((40, 2, 32), None)])
def test_the_tile_names_its_padding(sizes, padding):
    if padding is None:
        with pytest.raises(ValueError, match="at most 32"):
            draw_packed_tile(*sizes)
    else:
        assert padding in words(draw_packed_tile(*sizes))


@pytest.mark.parametrize("tile_rows", [7, 33])
def test_a_tile_smaller_than_the_group_or_too_large_is_refused(tile_rows):
    with pytest.raises(ValueError, match="tile_rows"):
        draw_packed_tile(16, 2, tile_rows)


def test_the_cache_of_a_token_is_that_of_the_formulas():
    llama, deepseek = (next(model for model in MODELS if model.name == name) for name in ("Llama-2-70B", "DeepSeek-V2"))
    assert llama.bytes_per_token() == 2 * 80 * 8 * 128 * 2 and llama.full_bytes_per_token() == 2 * 80 * 64 * 128 * 2
    assert deepseek.bytes_per_token() == 60 * (512 + 64) * 2
    assert deepseek.full_bytes_per_token() / deepseek.bytes_per_token() == pytest.approx(32768 / 576)


def test_kinds_follow_from_the_heads():
    assert [CacheShape("x", 1, 8, heads, 64).kind for heads in (8, 2, 1)] == ["MHA", "GQA", "MQA"]
    assert CacheShape("x", 1, 8, 8, 64, latent=100).kind == "MLA"


def test_the_figure_of_caches_shows_bytes_and_factors():
    shown = words(draw_cache_per_token())
    assert "2.62 MB" in shown and "328 kB" in shown and "56.9 ×" in shown and "69.1 kB" in shown


def test_in_16_bits_the_intensity_is_the_group():
    assert [group_intensity(group, 2) for group in (1, 8, 64)] == [1, 8, 64]
    assert group_intensity(8, 1) == 16


def test_marks_stand_on_the_roof_at_their_intensity():
    axes = draw_decode_roofline(GPU, "float16").axes[0]
    marks = {
        float(x): float(y)
        for line in axes.lines
        if line.get_markersize() == 10
        for x, y in zip(line.get_xdata(), line.get_ydata())
    }
    assert marks[8] == pytest.approx(8 * GPU.memory_bandwidth)
    assert max(marks.values()) <= GPU.matmul_rate["float16"]


def test_measured_rates_are_drawn_where_they_were_measured():
    axes = draw_decode_roofline(CPU, "float32", item_bytes=4, measured=MEASURED).axes[0]
    line = next(line for line in axes.lines if line.get_label() == "measured: shared (7.4)")
    assert list(line.get_xdata()) == [0.5, 1, 2, 4] and list(line.get_ydata()) == [1.5e9, 3e9, 6e9, 7e9]


def test_an_unknown_unit_is_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        draw_decode_roofline(GPU, "bfloat16")


@pytest.mark.parametrize(
    "figure",
    [
        pytest.param(lambda: draw_head_maps(), id="maps"),
        pytest.param(lambda: draw_head_maps(16, (16, 4, 1)), id="maps of 16"),
        pytest.param(lambda: draw_packed_tile(), id="tile"),
        pytest.param(lambda: draw_packed_tile(32, 1, 32, 64), id="full tile"),
        pytest.param(lambda: draw_packed_tile(5, 1, 16), id="group of 5"),
        pytest.param(lambda: draw_cache_per_token(), id="caches"),
        pytest.param(lambda: draw_decode_roofline(GPU), id="roofline of a GPU"),
        pytest.param(lambda: draw_decode_roofline(CPU, "float32", 4, measured=MEASURED), id="roofline of a CPU"),
    ],
)
def test_no_label_covers_another_or_leaves_the_picture(figure):
    assert not overlaps(figure())
