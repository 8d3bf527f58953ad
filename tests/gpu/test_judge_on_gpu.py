"""The judge on a GPU machine: where it computes what is right, and how long a learner waits for a changed kernel."""

import os
import random
import re
from types import SimpleNamespace

import pytest
import torch

from course_lib.checker.judge import compare, evaluate
from course_lib.checker.judge.decide import judge, unsupported_here
from course_lib.checker.runner.running import run_cases
from course_lib.checker.specification import catalog
from course_lib.checker.specification.draw import Draw
from course_lib.hardware.device import supports_bfloat16

KERNELS = [task for task in catalog.exercises().values() if task.needs.uses_gpu and not unsupported_here(task)]
MANY_CORES = len(os.sched_getaffinity(0)) >= 8 if hasattr(os, "sched_getaffinity") else False


@pytest.mark.parametrize("task", KERNELS, ids=lambda task: task.id)
def test_the_truth_of_large_cases_is_computed_on_the_gpu_and_is_the_same(task, monkeypatch):
    cases = [c for c in task.cases(Draw(3, on_gpu=True, bfloat16=supports_bfloat16())) if evaluate.is_large(c)]
    for case in cases:
        there = compare.truth(task, case, tf32=task.uses_dot)
        results = {path: leaf for path, leaf in compare.leaves(there.want) if isinstance(leaf, torch.Tensor)}
        assert all(leaf.is_cuda for leaf in results.values()), f"{case.name}: the oracle does not run on a GPU"
        assert all(leaf.problem is None for leaf in compare.compare(there.like, there, task)), case.name
        if sum(leaf.numel() for leaf in results.values()) > 1 << 22:
            continue  # minutes on a CPU
        with monkeypatch.context() as without_gpu:
            without_gpu.setattr(evaluate, "machine", lambda: SimpleNamespace(tier="none"))
            here = compare.truth(task, case, tf32=task.uses_dot)
        for path, want in compare.leaves(here.want):
            if path in results:
                torch.testing.assert_close(results[path].cpu(), want, msg=f"{case.name}: {path or 'the result'}")
                mine, theirs = float(here.allowed(path).max()), float(there.allowed(path).max())
                assert mine / 5 <= theirs <= 5 * mine, f"{case.name}: {theirs:.2e} is allowed, on a CPU {mine:.2e}"
    evaluate.release()


@pytest.mark.skipif(not MANY_CORES, reason="kernels are compiled side by side on eight cores or more")
@pytest.mark.parametrize("identity", ["2.6", "4.5", "7.5", "8.5"])
def test_a_changed_kernel_is_checked_within_ten_seconds_and_one_that_is_not_at_once(identity):
    """With one parameter more everything is compiled anew; a remark and other lines change nothing."""
    task = catalog.exercise(identity)
    judge(task, catalog.solution_source(identity))  # starts the workers
    fresh = f"unused_{random.SystemRandom().randrange(1 << 30)}: tl.constexpr = 0):"
    changed = re.sub(r"(@triton\.jit\ndef [^)]*?),?\s*\):", rf"\1, {fresh}", catalog.solution_source(identity))
    verdict = judge(task, changed)
    assert verdict.passed, str(verdict)
    assert verdict.seconds < 10, f"{verdict.seconds:.1f} s"
    again = judge(task, "# a remark\n" * random.SystemRandom().randrange(1, 100) + changed)
    assert again.passed and again.seconds < 4, f"{again.seconds:.1f} s"


@pytest.mark.parametrize("identity", ["2.5", "4.5", "6.5"])
def test_every_case_runs_again_and_kernels_without_atomics_give_the_same_bits(identity):
    task = catalog.exercise(identity)
    runs = run_cases(task, catalog.solution_source(identity), {name: name for name in task.entries}, seed=3)
    assert not runs[-1].interpreted
    for index, frame in runs[-1].frames.items():
        assert frame.seen.repeats >= 5 and frame.seen.differing == 0, runs[-1].cases[index].name
    assert all(frame.seen.repeats == 0 for frame in runs[0].frames.values())


def test_the_judge_keeps_no_memory_of_the_gpu():
    task = catalog.exercise("1.5")
    assert judge(task, catalog.solution_source("1.5")).passed
    assert torch.cuda.memory_reserved() < 256 << 20, "one of the tensors compared there has 268 MB in float64"
