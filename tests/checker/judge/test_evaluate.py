"""Where plain functions are computed. Here PyTorch's "meta" device, which holds no values, stands for a GPU."""

from types import SimpleNamespace

import pytest
import torch

from course_lib.checker import Case, Exercise, InOut
from course_lib.checker.judge import compare, evaluate
from course_lib.checker.judge.decide import judge

BIG, SMALL = Case("big", (torch.ones(evaluate.LARGE + 1),)), Case("small", (torch.ones(3),))


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(evaluate, "machine", lambda: SimpleNamespace(tier="nvidia"))
    monkeypatch.setattr(evaluate, "GPU", torch.device("meta"))


def test_large_cases_are_computed_on_the_gpu_and_small_ones_where_they_lie(gpu):
    def doubled(x):
        return x * torch.full((), 2.0)  # made on the device that computes

    assert evaluate.call(doubled, BIG, evaluate.float64).is_meta
    assert evaluate.call(doubled, SMALL, evaluate.float64).tolist() == [2.0, 2.0, 2.0]


def test_what_the_gpu_cannot_do_is_done_on_the_cpu(gpu):
    def needs_values(x):
        return x.sum().item()  # RuntimeError on "meta", as when memory runs out

    assert evaluate.call(needs_values, BIG, evaluate.float64) == evaluate.LARGE + 1


def test_a_device_that_a_notebook_broke_costs_no_verdict(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    task = Exercise(id="1.1", title="t", entries=("f",), cases=lambda draw: [Case("c", (3,))], oracle=lambda n: n + 1)
    assert judge(task, "def f(n):\n    return n + 1\n").passed


def test_a_gpu_too_small_to_compare_on_costs_no_verdict(monkeypatch):
    real = compare.truth

    def truth(*args, **more):
        if evaluate._on_the_gpu:
            raise torch.OutOfMemoryError
        return real(*args, **more)

    monkeypatch.setattr(compare, "truth", truth)
    task = Exercise(id="1.1", title="t", entries=("f",), cases=lambda draw: [Case("c", (3,))], oracle=lambda n: n + 1)
    assert judge(task, "def f(n):\n    return n + 1\n").passed
    assert judge(task, "def f(n):\n    return n + 2\n").outcome == "failed"
    assert evaluate._on_the_gpu


def test_without_a_gpu_everything_is_computed_where_it_lies():
    assert evaluate.call(torch.neg, BIG, evaluate.float64).device.type == "cpu"


def test_arguments_to_be_written_count_and_are_copies(gpu):
    case = Case("in place", (torch.ones(2), InOut(torch.zeros(evaluate.LARGE))))
    assert evaluate.is_large(case) and case.in_place
    small = Case("in place", (torch.ones(2), InOut(torch.zeros(2))))
    result, written = evaluate.call(lambda x, out: out.copy_(x).sum(), small, evaluate.float64)
    assert float(result) == 2.0 and written["written"][0].tolist() == [1.0, 1.0]
    assert small.args[1].tensor.tolist() == [0.0, 0.0]


def test_a_notebooks_tf32_does_not_widen_the_tolerance_and_comes_back(gpu):
    seen = []
    torch.set_float32_matmul_precision("high")
    try:
        evaluate.call(lambda x: seen.append(torch.backends.cuda.matmul.fp32_precision) or x, BIG, torch.clone)
        assert seen == ["ieee"]
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_tolerance_is_worked_out_once_and_anew_when_draws_are_added(monkeypatch):
    task = Exercise(id="1.1", title="t", entries=("f",), cases=lambda draw: [], oracle=torch.exp)
    truth = compare.truth(task, Case("three", (torch.tensor([1.0, 2.0, 3.0]),)), tf32=False)
    calls, real = [], compare.tolerance
    monkeypatch.setattr(compare, "tolerance", lambda *args: calls.append(1) or real(*args))
    for _ in range(3):
        assert compare.compare(truth.like, truth, task)[0].problem is None
    assert len(calls) == 1
    surer = compare.surer(truth, task, Case("three", (torch.tensor([1.0, 2.0, 3.0]),)))
    assert (surer.allowed("") >= truth.allowed("")).all() and len(calls) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_has_no_part_in_the_tolerance(bad):
    want = torch.tensor([1.0, bad, 3.0], dtype=torch.float64)
    plain = torch.tensor([1.5, bad, 3.0])
    allowed = compare.tolerance(want, [plain, torch.tensor([bad, 0.0, 3.0])])
    assert allowed[0] == pytest.approx(1.0, rel=1e-5) and torch.isfinite(allowed).all()
    assert compare.tolerance(torch.full((2,), bad, dtype=torch.float64), [torch.zeros(2)]).tolist() == [0.0, 0.0]
