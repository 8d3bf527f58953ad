"""The plots: what they show is what was measured, and no label covers another."""

import dataclasses
import itertools

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from course_lib.figures.memory.hierarchy import cpu_levels, gpu_levels, hierarchy_plot
from course_lib.figures.memory.roofline import Measured, merge_roofs, roofline_plot
from course_lib.figures.style import spread_labels
from course_lib.hardware.ceilings.measured import Ceilings
from course_lib.hardware.device import machine
from course_lib.hardware.roofline import Work
from course_lib.hardware.timing import Timing

GPU = Ceilings(
    device="NVIDIA H200",
    kind="cuda",
    copy_bandwidth=4e12,
    read_bandwidth=4.2e12,
    matmul_rate={"float32": 51e12, "tf32": 400e12, "float16": 745e12, "bfloat16": 760e12, "float8_e4m3fn": 1270e12},
    fma_rate=58e12,
    launch_overhead=6e-6,
    l2_bandwidth=7e12,
    on_chip_bandwidth=25e12,
    spread={},
    sweep=((8192, 25e12), (2**20, 7e12), (2**28, 4e12)),
    measured_at="2026-01-01T00:00:00+00:00",
)
CPU = dataclasses.replace(
    GPU,
    device="A CPU",
    kind="cpu",
    copy_bandwidth=4e10,
    read_bandwidth=5e10,
    matmul_rate={"float32": 2e11},
    fma_rate=5e10,
    l2_bandwidth=None,
    on_chip_bandwidth=2e11,
    sweep=tuple((2**power, 2e11 / power) for power in range(14, 28)),
)
HOPPER = dataclasses.replace(
    machine(),
    tier="hopper",
    gpu_name="NVIDIA H200",
    sm_count=132,
    registers_per_sm=65536,
    l2_bytes=50 * 2**20,
    shared_memory_per_sm_bytes=228 * 1024,
    memory_bytes=140 * 2**30,
)
POINTS = [
    Measured(Work("copy", 0, 2 * 2**30), 0.55e-3),
    Measured(Work("vector add", 2**28, 3 * 2**30), Timing(0.8e-3, 0.79e-3, 0.82e-3, 100, 0.78e-3)),
    Measured(Work("matmul", 2 * 8192**3, 3 * 2 * 8192**2, "bfloat16"), 1.5e-3),
]


def words(axes):
    return [text.get_text() for text in axes.texts]


def label_boxes(figure):
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [text for axes in figure.axes for text in axes.texts if len(text.get_text()) > 2]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in texts]


@pytest.mark.parametrize("ceilings", [GPU, CPU], ids=["gpu", "cpu"])
def test_no_label_of_the_roofline_covers_another(ceilings):
    points = POINTS[:2] if ceilings is CPU else POINTS
    for (name, box), (other, other_box) in itertools.combinations(label_boxes(roofline_plot(ceilings, points)), 2):
        assert not box.overlaps(other_box), f"{name!r} covers {other!r}"


def test_the_names_of_two_near_corners_do_not_cover_each_other():
    near = dataclasses.replace(CPU, matmul_rate={"float32": 1.15 * CPU.fma_rate})
    names = [(name, box) for name, box in label_boxes(roofline_plot(near)) if name.startswith("balance")]
    assert len(names) == 2 and not names[0][1].overlaps(names[1][1])


def test_kernels_at_one_place_of_the_roofline_have_numbers_side_by_side():
    crowd = [Measured(Work(f"kernel {n}", 2**28, 2**29), 0.02 * (1 + 0.01 * n)) for n in range(4)]
    figure = roofline_plot(CPU, crowd)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    numbers = [
        text.get_window_extent(renderer)
        for text in figure.axes[0].texts
        if text.get_text() in "1234" and text.get_text()
    ]
    assert len(numbers) == 4
    assert not any(one.overlaps(other) for one, other in itertools.combinations(numbers, 2))


def test_a_kernel_above_every_roof_is_still_in_the_picture():
    impossible = Measured(Work("kernel", 2**40, 2**20), 2**40 / (50 * max(CPU.matmul_rate.values())))
    axes = roofline_plot(CPU, [impossible]).axes[0]
    assert axes.get_ylim()[1] > impossible.work.flops / impossible.time


def test_every_label_is_inside_the_picture():
    figure = roofline_plot(GPU, POINTS)
    for name, box in label_boxes(figure):
        assert 0 <= box.x0 and box.x1 <= figure.bbox.width, f"{name!r} is cut off"


def test_a_point_stands_at_its_intensity_and_rate():
    axes = roofline_plot(GPU, POINTS).axes[0]
    markers = [line for line in axes.lines if line.get_marker() == "o"]
    (intensity,), (rate,) = markers[1].get_data()
    assert intensity == pytest.approx(1 / 12)
    assert rate == pytest.approx(2**28 / 0.8e-3)


def test_a_copy_stands_on_the_slopes_scale_at_the_left_edge():
    axes = roofline_plot(GPU, POINTS).axes[0]
    (intensity,), (rate,) = next(line for line in axes.lines if line.get_marker() == "o").get_data()
    assert intensity == axes.get_xlim()[0]
    assert rate / intensity == pytest.approx(2 * 2**30 / 0.55e-3)


def test_the_points_are_described_with_their_share_of_the_roof():
    legend = roofline_plot(GPU, POINTS).axes[0].get_legend()
    lines = [text.get_text() for text in legend.get_texts()]
    assert lines[1] == "2   vector add: 800 µs, 4.03 TB/s, 96 % of its roof"
    assert "733 TFLOP/s" in lines[2] and "96 % of its roof" in lines[2]


def test_dtypes_that_nearly_coincide_share_a_roof():
    assert [name for name, _, _ in merge_roofs(GPU)] == [
        "float32 matmul",
        "multiply-add",
        "tf32 matmul",
        "float16, bfloat16 matmul",
        "float8 matmul",
    ]


def test_the_slope_and_the_roof_meet_at_the_balance_point():
    axes = roofline_plot(CPU).axes[0]
    assert "balance 1" in words(axes)
    assert "balance 4" in words(axes)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_refused(seconds):
    with pytest.raises(ValueError, match="seconds of 'copy'"):
        Measured(Work("copy", 0, 1), seconds)


def test_a_plot_shows_itself_and_changes_no_ones_settings():
    before = dict(matplotlib.rcParams)
    data, size = roofline_plot(CPU)._repr_png_()
    assert data.startswith(b"\x89PNG") and size["width"] > 500
    assert dict(matplotlib.rcParams) == before


def test_the_hierarchy_of_a_gpu_has_measured_and_promised_speeds():
    registers, shared, cache, memory = gpu_levels(HOPPER, GPU)
    assert registers.capacity == 132 * 256 * 1024
    assert (shared.measured, cache.measured, memory.measured) == (25e12, 7e12, 4.2e12)
    assert memory.promised == 4.8e12
    assert "datasheet 4.80 TB/s" in " ".join(words(hierarchy_plot(HOPPER, GPU).axes[1]))


def test_the_hierarchy_of_a_cpu_takes_each_levels_speed_from_the_sweep():
    here = dataclasses.replace(machine(), cpu_caches=(("L1", 2**15), ("L2", 2**20), ("L3", 2**25)), memory_bytes=2**35)
    speeds = [level.measured for level in cpu_levels(here, CPU)]
    assert speeds[:3] == [2e11 / 14, 2e11 / 19, 2e11 / 24]
    assert speeds[3] == 5e10
    assert hierarchy_plot(here, CPU).axes


def test_labels_are_moved_apart_and_stay_in_order():
    placed = spread_labels([0.5, 0.51, 0.1, 0.52], least_gap=0.1)
    ordered = sorted(placed)
    assert all(later - earlier >= 0.1 - 1e-12 for earlier, later in zip(ordered, ordered[1:]))
    assert placed[2] == 0.1
    assert placed[0] < placed[1] < placed[3]
    assert sum((placed[0], placed[1], placed[3])) / 3 == pytest.approx(0.51)
