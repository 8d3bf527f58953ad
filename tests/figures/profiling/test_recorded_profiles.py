"""Chapter 15's records of an H100 say what the text says of them."""

import pytest

from course_lib.figures.profiling import recorded_metrics, recorded_profiles, recorded_traces


def test_the_softmax_of_the_question_takes_five_copies_with_a_busy_memory():
    workloads, seen = recorded_profiles()["workloads"], recorded_metrics()["a_row_in_one_warp"]
    assert workloads["a_row_in_one_warp"]["bytes"] == workloads["a_copy"]["bytes"] == 536_870_912
    assert workloads["a_row_in_one_warp"]["seconds"] == pytest.approx(952e-6, rel=1e-3)
    assert workloads["a_copy"]["seconds"] == pytest.approx(182e-6, rel=2e-3)
    assert seen["memory_busy"] == pytest.approx(79, abs=0.5)
    assert seen["moved_bytes"] == pytest.approx(2.52e9, rel=1e-3)


def test_each_workload_has_the_figures_of_its_own_kernel():
    metrics = recorded_metrics()
    assert list(metrics) == list(recorded_profiles()["workloads"])
    assert metrics["one_split"]["programs"] == 8 and metrics["atomic_counts"]["atomic_requests"] == 524_288
    assert all(0 <= seen[what] <= 100 for seen in metrics.values() for what in seen if what.endswith("busy"))


def test_every_launch_of_a_trace_has_its_kernel():
    for run in recorded_traces().values():
        launches = {e["args"]["correlation"] for e in run["events"] if e["cat"] in ("cuda_runtime", "cuda_driver")}
        kernels = [e["args"]["correlation"] for e in run["events"] if e["cat"] == "kernel"]
        assert set(kernels) == launches and len(kernels) == len(launches)
        assert sum(event["cat"] == "user_annotation" for event in run["events"]) == 8


def test_one_layer_that_fell_back_makes_the_step_a_third_longer_and_more():
    steps = {asked: run["microseconds_in_all"] for asked, run in recorded_traces().items()}
    assert steps["mask"] < 1.05 * steps["none"]
    for asked in ("float32", "strides", "bias", "mask_without_cudnn"):
        assert 1.35 < steps[asked] / steps["none"] < 1.5
