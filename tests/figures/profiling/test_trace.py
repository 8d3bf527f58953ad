"""A window of a trace: whose kernels are drawn, and that it draws."""

import pytest

from course_lib.figures.profiling import recorded_traces
from course_lib.figures.profiling.trace import draw_trace, parts_of

LAYER = "layer 5: attention"


def test_kernels_belong_to_the_window_that_launched_them_whenever_they_run():
    events = recorded_traces()["mask_without_cudnn"]["events"]
    window, operations, launches, kernels = parts_of(events, LAYER)
    end = window["ts"] + window["dur"]
    assert {event["name"] for event in operations} == {
        "aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math",
    }  # fmt: skip
    assert any(kernel["ts"] > end for kernel in kernels) and all(launch["ts"] <= end for launch in launches)
    assert {kernel["args"]["correlation"] for kernel in kernels} <= {event["args"]["correlation"] for event in launches}


def test_every_launch_of_the_window_and_every_kernel_is_drawn():
    events = recorded_traces()["mask_without_cudnn"]["events"]
    _, operations, launches, kernels = parts_of(events, LAYER)
    axes = draw_trace(events, LAYER).axes[0]
    assert len(axes.collections) == 1 + len(operations) + len(launches) + len(kernels)


def test_a_window_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="layer 9.*layer 0"):
        parts_of(recorded_traces()["none"]["events"], "layer 9")
