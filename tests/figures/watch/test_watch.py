"""`watch` shows what a known kernel reads and writes, and what goes wrong in another."""

import io
import sys

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from course_lib.figures.style import CourseFigure
from course_lib.figures.watch import watch
from course_lib.figures.watch.grid import grid_of
from course_lib.figures.watch.moment import (
    BY_ANOTHER,
    BY_SEVERAL,
    READ,
    READ_AGAIN,
    READ_AND_WRITTEN,
    UNTOUCHED,
    WRITTEN,
    Bytes,
    Moments,
)
from course_lib.hardware.meter import access_log
from course_lib.hardware.meter.accesses import Access, LaunchSeen, Tensor
from tests.hardware.meter.watched_kernels import (
    a_million_programs,
    add,
    add_unmasked,
    copy_tiles,
    endless,
    mismatched,
    shift_in_place,
    total,
)


def states_of(watched, program, step=None, launch=0):
    moments = watched.launches[launch]
    step = len(moments.of(program)) if step is None else step
    return [tensor.states.ravel().tolist() for tensor in moments.at(program, step)]


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


# ---- what a moment shows


def test_cells_show_what_the_program_did_so_far_and_what_others_did():
    watched = watch(add, torch.rand(70), torch.rand(70))
    mine, others = [READ] * 32, [BY_ANOTHER] * 70
    x, y, result = states_of(watched, (1, 0, 0), step=1)
    assert x == others[:32] + mine + others[64:] and y == result == others
    x, y, result = states_of(watched, (1, 0, 0))
    assert x == y == others[:32] + mine + others[64:]
    assert result == others[:32] + [WRITTEN] * 32 + others[64:]


def test_the_step_under_way_is_told_from_those_before():
    moments = watch(add, torch.rand(70), torch.rand(70)).launches[0]
    x, y, result = moments.at((1, 0, 0), 2)
    assert not x.now.any() and not result.now.any()
    assert np.flatnonzero(y.now).tolist() == list(range(32, 64))


def test_a_tile_is_drawn_in_the_shape_of_its_tensor():
    x, result = watch(copy_tiles, torch.rand(8, 12)).launches[0].at((1, 2, 0), 2)
    expected = np.full((8, 12), BY_ANOTHER)
    expected[4:8, 8:12] = READ
    assert (x.states == expected).all() and (result.states[4:8, 8:12] == WRITTEN).all()


def test_reading_again_and_writing_what_was_read_have_colours_of_their_own():
    def seen(kind, program, *elements):
        return Access(kind, (program, 0, 0), 1, "", 4, {0: np.array(elements, dtype=np.int64)}, {}, 0)

    launch = LaunchSeen("kernel", [Tensor("x", (6,), (1,), "float32", 4)], (3, 1, 1), [
        seen("load", 0, 0, 0, 1, 2), seen("load", 0, 1), seen("store", 0, 2), seen("load", 1, 4), seen("load", 2, 4, 0),
    ])  # fmt: skip
    moments = Moments(launch)
    (x,) = moments.at((0, 0, 0), 3)
    # One load that several lanes make of one element reads it once.
    assert x.states.tolist() == [READ, READ_AGAIN, READ_AND_WRITTEN, UNTOUCHED, BY_SEVERAL, UNTOUCHED]
    assert moments.bytes_of(moments.of((0, 0, 0))) == Bytes(read=20, written=4, distinct=12)


def test_bytes_are_those_that_the_meter_counts():
    moments = watch(copy_tiles, torch.rand(8, 12)).launches[0]
    assert moments.all_bytes == Bytes(read=8 * 12 * 4, written=8 * 12 * 4, distinct=2 * 8 * 12 * 4)
    x, result = torch.rand(5), 4
    assert watch(total, x, True).launches[0].all_bytes == Bytes(5 * 4 + 5 * 4, 5 * 4, 5 * 4 + result)


def test_outside_is_kept_apart_and_the_program_that_goes_there_comes_first():
    watched = watch(add_unmasked, torch.rand(70), torch.rand(70))
    assert watched.program == (2, 0, 0)
    x, _, result = watched.launches[0].at((2, 0, 0), 3)
    assert x.outside.after == result.outside.after == tuple(range(70, 96)) and x.outside.before == ()
    assert not watched.launches[0].at((1, 0, 0), 3)[0].outside.after


def test_a_view_is_left_by_a_step_into_its_gaps():
    def neighbours(x):
        return add(x.as_strided((10,), (1,)), torch.rand(10))

    # A kernel that is given the view, and takes its elements for neighbours.
    launch = LaunchSeen("kernel", [Tensor("x", (4,), (2,), "float32", 4)], (1, 1, 1), [
        Access("load", (0, 0, 0), 1, "", 4, {0: np.arange(4)}, {}, 0)
    ])  # fmt: skip
    moments = Moments(launch)
    (x,) = moments.at((0, 0, 0), 1)
    assert x.outside.between == (1, 3) and x.states.tolist() == [READ, READ, UNTOUCHED, UNTOUCHED]
    assert watch(neighbours, torch.rand(20)).launches[0].most_outside == [(0, 0)] * 3


def test_a_race_is_two_programs_on_one_cell():
    watched = watch(shift_in_place, torch.rand(20))
    assert watched.program == (0, 0, 0)
    assert list(watched.launches[0].races[0]) == [7, 15]
    words = "\n".join(texts(watched.still))
    assert "A race at x_pointer[7]" in words and "Program 0 writes it, program 1 reads it." in words


# ---- where cells are


@pytest.mark.parametrize(
    "shape", [(), (1,), (70,), (5, 7), (3, 300), (2, 3, 4), (1, 2, 8, 4), (2, 1, 5), (4096,), (0,)]
)
def test_each_element_has_a_cell_of_its_own(shape):
    grid = grid_of(shape)
    cells = set(zip(grid.row_of.tolist(), grid.column_of.tolist()))
    assert len(cells) == len(grid.row_of) == int(np.prod(shape, dtype=int))
    assert all(0 <= row < grid.rows and 0 <= column < grid.columns for row, column in cells)


def test_a_matrix_is_drawn_as_it_is_and_leading_dimensions_are_named():
    grid = grid_of((5, 7))
    assert (grid.rows, grid.columns) == (5, 7) and (grid.row_of[9], grid.column_of[9]) == (1, 2)
    assert [text for _, _, text in grid_of((1, 2, 8, 4)).headings] == ["[0, 0]", "[0, 1]"]


# ---- what is shown


@pytest.mark.parametrize("function, arguments", [
    (add, (torch.rand(70), torch.rand(70))), (add_unmasked, (torch.rand(70), torch.rand(70))),
    (copy_tiles, (torch.rand(8, 12),)), (shift_in_place, (torch.rand(20),)), (total, (torch.rand(3), False)),
    (mismatched, (torch.rand(8),)), (add, (torch.rand(16_384), torch.rand(16_384))),
])  # fmt: skip
def test_every_moment_is_a_picture_of_one_size(function, arguments):
    watched = watch(function, *arguments)
    assert isinstance(watched.still, CourseFigure)
    sizes = {
        imread(io.BytesIO(watched.picture(0, program, step))).shape
        for program in range(min(2, len(watched.launches[0].programs)))
        for step in range(len(watched.launches[0].of((program, 0, 0))) + 1)
    }
    assert len(sizes) == 1


def test_the_line_that_runs_stands_above():
    words = texts(watch(add, torch.rand(70), torch.rand(70), program=1).still)
    assert words[0] == "add_kernel, program 1 of 3"
    assert words[1] == "3 of 3: writes 32 elements of result_pointer"
    assert words[2].endswith("tl.store(result_pointer + offsets, x + y, mask=inside)")


@pytest.mark.parametrize("function, arguments, why", [
    (mismatched, (torch.rand(8),), "it raised ValueError"),
    (a_million_programs, (torch.rand(8),), "1,000,000 programs"),
    (endless, (torch.rand(8), True), "A loop may have no end"),
])  # fmt: skip
def test_what_was_seen_until_it_stopped_is_shown_and_why(function, arguments, why, monkeypatch):
    monkeypatch.setattr(access_log, "MOST_ACCESSES", 2000)
    watched = watch(function, *arguments)
    assert why in str(watched) and why in " ".join(texts(watched.still)).replace("\n", " ")


def test_a_slider_moves_the_picture():
    pytest.importorskip("ipywidgets")
    sliders, image = watch(add, torch.rand(70), torch.rand(70)).widget().children
    program, step = sliders.children
    assert (program.max, step.value, step.max) == (2, 3, 3), "all that the first program does is shown first"
    shown = {image.value}
    for slider, value in ((program, 2), (step, 2), (program, 1), (step, 0)):
        slider.value = value
        shown.add(image.value)
    assert len(shown) == 5


def test_another_program_is_shown_at_the_same_step():
    pytest.importorskip("ipywidgets")
    (program, step), _ = [box.children if hasattr(box, "children") else box for box in watch(
        add, torch.rand(70), torch.rand(70)).widget().children]  # fmt: skip
    step.value, program.value = 2, 1
    assert step.value == 2
    step.value, program.value = 3, 2
    assert step.value == 3


def test_of_several_launches_each_can_be_chosen():
    def twice(x):
        return shift_in_place(add(x, x))

    pytest.importorskip("ipywidgets")
    watched = watch(twice, torch.rand(40))
    sliders, image = watched.widget().children
    launch, program, step = sliders.children
    assert watched.launch == launch.value == 1, "the one with a race comes first"
    before = image.value
    launch.value = 0
    assert image.value != before and (program.max, step.max) == (1, 3)


@pytest.fixture
def displayed(monkeypatch):
    """What is displayed, as mime bundles."""
    bundles = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: bundles.append(bundle))
    return bundles


def test_where_sliders_live_the_still_picture_is_hidden(displayed, monkeypatch):
    ipywidgets = pytest.importorskip("ipywidgets")
    styles = []
    html = ipywidgets.HTML
    monkeypatch.setattr(ipywidgets, "HTML", lambda style, **look: styles.append(style) or html(style, **look))
    watch(add, torch.rand(70), torch.rand(70))._ipython_display_()
    still, alive = displayed
    name = still["text/html"].split('class="')[1].split('"')[0]
    assert "add_kernel: 3 programs" in still["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in alive
    assert styles == [f"<style>.{name} {{ display: none }}</style>"]


def test_without_widgets_the_still_picture_stands_alone(displayed, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    watch(add_unmasked, torch.rand(70), torch.rand(70))._ipython_display_()
    (still,) = displayed
    assert 'src="data:image/png;base64,' in still["text/html"] and "70 to 95" in still["text/plain"]


def test_what_never_launched_is_told_in_words(displayed, capsys):
    watch(torch.add, torch.rand(3), torch.rand(3))._ipython_display_()
    assert not displayed and "launched no Triton kernel" in capsys.readouterr().out


# ---- what is refused, and what has nothing to show


def test_a_function_without_a_kernel_is_told_so():
    watched = watch(torch.add, torch.rand(3), torch.rand(3))
    assert str(watched) == "add launched no Triton kernel, so there is nothing to draw." and watched.still is None


def test_a_large_tensor_is_refused_by_name():
    with pytest.raises(ValueError, match="up to 16,384 elements; y has 20,000"):
        watch(add, torch.rand(50), torch.rand(20_000))


def test_what_is_drawn_no_more_is_said():
    def add_long(x):
        return add(x.repeat(400), x.repeat(400))

    watched = watch(add_long, torch.rand(50))
    assert "x_pointer has 20,000 elements, too many to draw (at most 16,384)." in texts(watched.still)


@pytest.mark.parametrize("program, words", [(7, "3 programs, 0 to 2"), ((0, 1), "3 programs")])
def test_a_program_that_was_not_run_is_refused(program, words):
    with pytest.raises(ValueError, match=words):
        watch(add, torch.rand(70), torch.rand(70), program=program)


def test_a_kernel_itself_is_refused():
    from tests.hardware.meter.watched_kernels import add_kernel

    with pytest.raises(TypeError, match="'add_kernel' is the kernel itself"):
        watch(add_kernel, torch.rand(3))
