"""Chapter 11's figures: every point and rank that they draw is the one given, and they draw at the edges."""

import itertools
import types

import pytest

from course_lib.figures.latent.energy import draw_energy
from course_lib.figures.latent.loss_against_bytes import draw_loss_against_bytes
from course_lib.figures.latent.roofline import draw_latent_roofline


def words_of(figure):
    return " ".join(text.get_text() for axes in figure.axes for text in axes.texts)


def points_of(figure):
    return [
        (float(x), float(y))
        for line in figure.axes[0].lines
        if line.get_marker() != "None"
        for x, y in zip(line.get_xdata(), line.get_ydata())
    ]


def test_each_kind_stands_at_its_bytes_and_loss(tmp_path):
    figure = draw_loss_against_bytes({"full heads": (4096, 1.9), "GQA": (2048, 2.0), "MLA": (768, 2.1)})
    assert points_of(figure) == [(4096, 1.9), (2048, 2.0), (768, 2.1)]
    assert "MLA: 2.10" in words_of(figure)
    figure.savefig(tmp_path / "points.png")


def test_several_trainings_are_points_and_their_mean():
    figure = draw_loss_against_bytes({"GQA": (2048, [2.0, 2.5, 3.0])})
    assert sorted(points_of(figure)) == [(2048, 2.0), (2048, 2.5), (2048, 2.5), (2048, 3.0)]


@pytest.mark.parametrize("points", [{"one": (1, 2.0)}, {"same": (8, 2.0), "as this": (8, 2.0)}])
def test_one_point_and_equal_ones_draw_too(points, tmp_path):
    draw_loss_against_bytes(points).savefig(tmp_path / "points.png")


@pytest.mark.parametrize("points", [{}, {"nothing": (0, 2.0)}])
def test_points_without_bytes_are_refused(points):
    with pytest.raises(ValueError, match="points is"):
        draw_loss_against_bytes(points)


def test_the_rank_that_is_marked_is_the_first_to_reach_the_share(tmp_path):
    figure = draw_energy({"fast": [0.9, 0.995, 1.0], "slow": [0.5, 0.6, 0.7, 0.99, 1.0]}, share=0.99, mark=3)
    assert points_of(figure) == [(2, 0.995), (4, 0.99)]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["fast: 99 % from rank 2 on", "slow: 99 % from rank 4 on"]
    assert words_of(figure) == "3 numbers a token"
    figure.savefig(tmp_path / "energy.png")


@pytest.mark.parametrize("curves", [{}, {"empty": []}, {str(number): [1.0] for number in range(8)}])
def test_lines_that_cannot_be_drawn_are_refused(curves):
    with pytest.raises(ValueError, match="curves has"):
        draw_energy(curves)


def test_names_under_a_flat_roof_do_not_overlap():
    """On a CPU all but one of the heads lie under it, and their names ran into each other."""
    roof = types.SimpleNamespace(device="a CPU", memory_bandwidth=41.6e9, matmul_rate={"float32": 111e9})
    figure = draw_latent_roofline(roof, "float32", item_bytes=4)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 5
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
