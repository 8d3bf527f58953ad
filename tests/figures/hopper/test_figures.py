"""The timeline's model keeps what physics asks of it, the layouts are Triton's own, and the pictures draw."""

import itertools

import pytest
import triton

from course_lib.figures.hopper.layouts import blocked_holder, draw_layouts, swizzled_place, wgmma_holder
from course_lib.figures.hopper.ring_trace import draw_ring
from course_lib.figures.hopper.timeline import DRAWN, SCHEDULES, busy, draw_timelines, run_schedule

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_does_all_its_work_in_an_order_that_is_possible(name, head_dim):
    tasks = run_schedule(name, head_dim, blocks=7)
    groups = SCHEDULES[name][0]
    assert len(tasks) == 3 * 7 * groups
    for task in tasks:
        assert task.end - task.begin >= task.work - 1e-6
        assert all(before.end <= task.begin + 1e-6 for before in task.after)
    for unit in ("matrix", "softmax"):
        assert busy(tasks, unit) <= 1 + 1e-9


@pytest.mark.parametrize("name", [name for name, (groups, turns, _) in SCHEDULES.items() if turns or groups == 1])
def test_who_has_the_matrix_units_has_them_alone(name):
    products = sorted((task for task in run_schedule(name) if task.unit == "matrix"), key=lambda task: task.begin)
    assert all(before.end <= after.begin + 1e-6 for before, after in zip(products, products[1:]))


def test_the_models_shares_are_those_of_the_arithmetic():
    """In turn a share of 2048 / (2048 + 1024); at once all of it, or what the softmax leaves."""
    assert busy(run_schedule("one group, in turn", 128, softmax_factor=1.0)) == pytest.approx(2 / 3, abs=0.01)
    assert busy(run_schedule("two groups, in step", 128, softmax_factor=1.0)) == pytest.approx(2 / 3, abs=0.01)
    assert busy(run_schedule("two groups, taking turns, overlapped", 128)) > 0.98
    # In step, overlapped: both scores, then both outputs under both softmaxes, which last 1.3 times as long.
    assert busy(run_schedule("two groups, in step, overlapped", 128)) == pytest.approx(2048 / (1024 + 1331), abs=0.01)
    # At head dimension 64 both units need as long; a softmax 1.3 times as long is the limit.
    limited = run_schedule("two groups, taking turns, overlapped", 64, blocks=200)
    assert busy(limited) == pytest.approx(1 / 1.3, abs=0.01)


def test_a_schedule_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="allowed are one group"):
        run_schedule("three groups")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_timelines_draw(head_dim):
    figure = draw_timelines(head_dim)
    assert len(figure.axes) == len(DRAWN)
    assert all("busy" in axis.get_title(loc="left") for axis in figure.axes)
    assert figure._repr_png_()[0]


def test_a_ring_draws_its_buffers_and_refuses_nothing_and_too_many():
    events = [("copy engine", "copy", 0, 0, 1, 9), ("consumer", "read", 0, 0, 10, 15)]
    events += [("consumer", "wait", 1, None, 0, 4)]
    assert [label.get_text() for label in draw_ring(events).axes[0].get_yticklabels()] == ["buffer 0", "buffer 1"]
    with pytest.raises(ValueError, match="empty"):
        draw_ring([])
    with pytest.raises(ValueError, match="at most 2"):
        draw_ring([(f"consumer {number}", "read", 0, 0, 1, 2) for number in range(3)])


def bases_of(layout, shape):
    """The linear layout that Triton makes of a Gluon layout; needs no GPU."""
    libtriton = pytest.importorskip("triton._C.libtriton")
    if not hasattr(libtriton.gluon_ir.GluonOpBuilder, "to_linear_layout"):
        pytest.skip("this Triton does not tell its layouts")
    context = libtriton.ir.context()
    libtriton.ir.load_dialects(context)
    libtriton.nvidia.load_dialects(context)
    builder = libtriton.gluon_ir.GluonOpBuilder(context)
    return builder.to_linear_layout(layout._to_ir(builder), shape)


def positions(bases):
    """(index, [row, column]) for every index; each bit that is set in it flips the bits of its base."""
    for index in range(2 ** len(bases)):
        row, column = 0, 0
        for bit, (down, right) in enumerate(bases):
            if index >> bit & 1:
                row, column = row ^ down, column ^ right
        yield index, (row, column)


@pytest.mark.parametrize("name", ["blocked", "wgmma"])
def test_who_holds_an_element_is_what_triton_says(name):
    gl = pytest.importorskip("triton.experimental.gluon.language")
    layout, holder, shape = {
        "blocked": (gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]), blocked_holder, [64, 64]),
        "wgmma": (gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]), wgmma_holder, [64, 128]),
    }[name]
    bases = bases_of(layout, shape)
    parts = [list(positions(part)) for part in (bases.warp_bases, bases.lane_bases, bases.reg_bases)]
    for (warp, a), (lane, b), (register, c) in itertools.product(*parts):
        assert holder(a[0] ^ b[0] ^ c[0], a[1] ^ b[1] ^ c[1]) == (warp, lane, register)


@pytest.mark.skipif(TRITON < (3, 7), reason="Triton 3.6 ends the process when asked for these bases")
def test_the_swizzle_is_what_triton_says():
    gl = pytest.importorskip("triton.experimental.gluon.language")
    bases = bases_of(gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16), [64, 64])
    for offset, (row, column) in positions(bases.offset_bases):
        assert offset == row * 64 + swizzled_place(row, column // 8) * 8 + column % 8


def test_pieces_of_one_column_lie_in_different_banks():
    assert all(len({swizzled_place(row, piece) for row in range(8)}) == 8 for piece in range(8))


def test_the_layouts_draw():
    texts = [text.get_text() for text in draw_layouts().axes[0].texts]
    assert texts.count("p0") == 16 and {"r0–7", "r6–7", "warp 3"} <= set(texts)
