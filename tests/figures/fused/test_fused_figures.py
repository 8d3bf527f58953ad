"""The pictures of fusion: every byte that crosses has its arrow, every part its bar."""

import pytest

from course_lib.figures.fused.crossings import ADD_AND_NORM, draw_crossings
from course_lib.figures.fused.layer import draw_layer_roofline, draw_layer_times
from course_lib.figures.fused.ledger import draw_ledger
from course_lib.figures.fused.packed import draw_packed_row
from course_lib.figures.fused.rates import ON_AN_H200, draw_fused_rates
from course_lib.figures.recorded import recorded
from course_lib.hardware.datasheets import DATASHEETS


def test_each_read_and_each_write_has_an_arrow_with_its_bytes(tmp_path):
    figure = draw_crossings([("one by one", ADD_AND_NORM), ("fused", [("add and norm", 4, 4)])])
    figure.savefig(tmp_path / "crossings.png")
    first, second = figure.axes
    assert first.get_title(loc="left") == "one by one: 42 bytes"
    assert second.get_title(loc="left") == "fused: 8 bytes"
    numbers = [int(text.get_text()) for text in first.texts if text.get_text().isdigit()]
    assert sum(numbers) == 42 and len(numbers) == 13  # the mean writes too little to count


def test_a_ledgers_bars_are_its_parts_in_gigabytes(tmp_path):
    ways = {"one by one": {"norms": 4e9, "SwiGLU": 2e9}, "fused": {"norms": 1e9, "SwiGLU": 1e9}}
    figure = draw_ledger(ways, "a layer", bandwidth=4e12)
    figure.savefig(tmp_path / "ledger.png")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [4, 1, 2, 1]
    assert [text.get_text() for text in axes.texts] == ["6.00 GB, 1.50 ms", "2.00 GB, 500 µs"]


@pytest.mark.parametrize("ways", [{}, {"a": {}}, {"a": {"norms": 1}, "b": {"SwiGLU": 1}}])
def test_ledgers_of_other_parts_are_refused(ways):
    with pytest.raises(ValueError, match="ways is"):
        draw_ledger(ways, "a layer")


def test_a_way_without_a_step_is_refused():
    with pytest.raises(ValueError, match="rows is"):
        draw_crossings([("nothing", [])])


def test_each_rate_is_a_point_and_each_kernel_by_hand_has_its_name(tmp_path):
    figure = draw_fused_rates(ON_AN_H200)
    figure.savefig(tmp_path / "rates.png")
    (axes,) = figure.axes
    copy, eager, compiled, by_hand = axes.lines
    assert set(copy.get_xdata()) == {4.17}
    assert [len(line.get_xdata()) for line in (eager, compiled, by_hand)] == [8, 8, 5]
    assert [text.get_text() for text in axes.texts] == ["Liger"] * 4 + ["QuACK", "copy"]


@pytest.mark.parametrize("rates", [{}, {"norm": (0.0, None, None)}])
def test_rates_of_nothing_are_refused(rates):
    with pytest.raises(ValueError, match="rates is"):
        draw_fused_rates(rates)


def test_each_head_of_a_packed_row_has_its_box(tmp_path):
    figure = draw_packed_row(8, 2, head_dim=16)
    figure.savefig(tmp_path / "packed.png")
    row, head = figure.axes
    assert len(row.patches) == 8 + 2 + 2
    assert len(head.patches) == 16 + 3  # numbers, and the arcs of three pairs


@pytest.mark.parametrize("sizes", [(0, 1, 16), (4, 2, 5)])
def test_packed_rows_of_no_head_or_odd_heads_are_refused(sizes):
    with pytest.raises(ValueError, match="an even head_dim"):
        draw_packed_row(*sizes)


def test_a_layers_bars_add_up_to_its_time_and_fusion_moves_its_glue_along_the_slope(tmp_path):
    record = recorded("layer", "h100")
    figure = draw_layer_times(record)
    figure.savefig(tmp_path / "times.png")
    (axes,) = figure.axes
    for row, form in enumerate(("eager", "compiled", "ours")):
        total = sum(part["times"] * part["us"][form] for part in record["parts"].values()) / 1e3
        bars = sum(bar.get_width() for bar in axes.patches if abs(bar.get_y() + bar.get_height() / 2 - row) < 0.1)
        assert bars == pytest.approx(total) and axes.texts[row].get_text() == f"{total:.1f} ms"
    figure = draw_layer_roofline(record)
    figure.savefig(tmp_path / "roofline.png")
    for arrow in (text for text in figure.axes[1].texts if getattr(text, "arrow_patch", None)):
        after, before = arrow.xy, arrow.xyann
        assert after[0] > before[0] and after[1] > before[1], "more FLOP for a byte, and more in a second"
        assert after[1] <= DATASHEETS["H100"].bandwidth * after[0], "no kernel passes the memory"
