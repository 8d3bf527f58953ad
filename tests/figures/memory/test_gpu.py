"""The picture of the GPU: its numbers are the datasheet's and the course's measurements, and its labels can be read."""

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle

from course_lib.figures.memory.gpu import FOLLOWED, draw_gpu, memories
from course_lib.figures.style import RED
from course_lib.hardware.datasheets import DATASHEETS


def texts(figure):
    return [text for axes in figure.axes for text in axes.texts]


def words(figure):
    return " ".join(text.get_text().replace("\n", " ") for text in texts(figure))


def test_sizes_and_speeds_are_those_of_the_datasheet_and_of_the_measurement():
    registers, shared, cache, memory = memories()
    assert registers.size == shared.size == 132 * 256 * 1024
    assert registers.speed == pytest.approx(33.5e12 * 12)  # every multiply-add reads three registers of 4 bytes
    assert (shared.speed, cache.speed) == (32.7e12, 8.75e12)
    assert (memory.size, memory.speed) == (DATASHEETS["H100"].memory_bytes, 3.35e12)
    assert "141 GiB, 4.8 TB/s" in memory.note


def test_each_memory_is_faster_than_the_next_and_none_is_larger():
    for near, far in itertools.pairwise(memories()):
        assert near.speed > far.speed and near.size <= far.size


def test_the_words_that_later_chapters_use_are_in_the_picture():
    shown = words(draw_gpu()).lower()
    for term in (
        "program",
        "grid",
        "warp",
        "lane",
        "multiprocessor",
        "register",
        "shared memory",
        "l2",
        "hbm",
        "tensor",
    ):
        assert term in shown, f"{term!r} is not in the picture"
    assert "33 MiB at 400 TB/s" in words(draw_gpu()) and "80 GiB at 3.35 TB/s" in words(draw_gpu())


def test_one_program_is_followed_through_all_panels():
    """Red: the program in the launch, its four warps on the multiprocessor, and that multiprocessor on the chip."""
    (axes,) = draw_gpu().axes
    red = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_alpha() is None]
    red = [patch for patch in red if patch.get_edgecolor()[:3] == pytest.approx(_rgb(RED))]
    assert len(red) == 1 + 4 + 1
    assert str(FOLLOWED) in [text.get_text() for text in axes.texts]


def _rgb(color):
    return tuple(int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))


def test_no_label_covers_another_or_leaves_the_picture():
    figure = draw_gpu()
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts(figure)]
    for (name, box), (other, other_box) in itertools.combinations(boxes, 2):
        assert not box.overlaps(other_box), f"{name!r} covers {other!r}"
    for name, box in boxes:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert inside, f"{name!r} is cut off"
