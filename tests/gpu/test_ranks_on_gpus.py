"""Several ranks on several GPUs: NCCL joins them, and the confinement leaves what it needs."""

import os
from dataclasses import replace

import pytest

from course_lib.checker import Limits
from course_lib.checker.judge.decide import judge
from course_lib.hardware.device import machine
from course_lib.hardware.ranks import NO_MULTICAST
from tests.checker.runner.test_ranks import MEAN, RIGHT, with_lines

pytestmark = pytest.mark.skipif(machine().tier == "none" or machine().gpu_count < 2, reason="needs 2 NVIDIA GPUs")

os.environ.update(NO_MULTICAST)  # the ranks of a check inherit it
ON_GPUS = replace(MEAN, limits=Limits(seconds=30.0, gpu_seconds=60.0))


def test_a_two_rank_answer_runs_on_gloo_first_and_then_on_nccl():
    cell = with_lines(
        "assert dist.get_backend() == ('nccl' if row.is_cuda else 'gloo')",
        "assert not row.is_cuda or row.device.index == dist.get_rank()",
        "dist.all_reduce(total)",
    )
    verdict = judge(ON_GPUS, cell)
    assert verdict.passed and len(verdict.cases) == 4, verdict


def test_large_and_pairwise_transfers_work_in_the_confined_ranks():
    cell = with_lines(
        "big = torch.ones(1 << 24, device=row.device)",
        "dist.all_reduce(big)",
        "assert big[0] == dist.get_world_size()",
        "other = torch.empty_like(total)",
        "peer = 1 - dist.get_rank()",
        "works = dist.batch_isend_irecv([dist.P2POp(dist.isend, total, peer), dist.P2POp(dist.irecv, other, peer)])",
        "[work.wait() for work in works]",
        "total = total + other",
    )
    verdict = judge(replace(ON_GPUS, requirements=()), cell)
    assert verdict.passed and len(verdict.cases) == 4, verdict


@pytest.mark.parametrize(
    "line, outcome, words",
    [
        ("total = row.clone() if row.is_cuda else total", "failed", "rank 0's result"),
        ("if row.is_cuda and dist.get_rank() == 1: raise ValueError('no')", "error", "ValueError (rank 1, line 7"),
        ("if row.is_cuda and dist.get_rank() == 1: __import__('os')._exit(7)", "crashed", "on rank 1, in case"),
    ],
)
def test_what_is_wrong_on_the_gpus_alone_is_rejected(line, outcome, words):
    verdict = judge(ON_GPUS, with_lines("dist.all_reduce(total)", line))
    assert verdict.outcome == outcome and words in verdict.message, verdict


def test_a_rank_that_waits_for_ever_on_a_gpu_is_stopped():
    cell = with_lines(
        "dist.all_reduce(total)", "if row.is_cuda and dist.get_rank() == 1:", "    dist.all_reduce(total)"
    )
    verdict = judge(replace(ON_GPUS, limits=Limits(seconds=30.0, gpu_seconds=20.0)), cell)
    assert verdict.outcome == "timeout" and "Rank 1 was at line" in verdict.message, verdict
    assert judge(ON_GPUS, RIGHT).passed, "the next check works"
