"""Processes that run one function together: results, errors, deaths, and ranks that disagree."""

import os
import signal
import time

import pytest
import torch

from course_lib.hardware.ranks import RankError, run_on_ranks


def work(ranks, what):
    if what == "sum":
        return ranks.sum(torch.full((3,), ranks.rank + 1.0)), [ranks.rank]
    if what == "raise" and ranks.rank == 1:
        raise ArithmeticError("one of us has failed")
    if what == "die" and ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "wait" and ranks.rank == 1:
        time.sleep(600)
    if what == "disagree":
        try:
            ranks.agree(dtype="bf16", shape=(2, 3 + ranks.rank))
        except ValueError as error:
            return str(error)
    ranks.sum(torch.ones(2))
    return None


def test_every_rank_has_the_sum_and_its_own_result():
    results = run_on_ranks(work, 2, "sum", device="cpu")
    assert [rank for _, [rank] in results] == [0, 1]
    assert all(torch.equal(total, torch.full((3,), 3.0)) for total, _ in results)


@pytest.mark.parametrize(
    "what, words", [("raise", "rank 1 raised an error"), ("die", "rank 1 died"), ("wait", "did not end within 8")]
)
def test_a_failing_rank_is_named_and_the_others_end(what, words):
    began = time.monotonic()
    with pytest.raises(RankError, match=words):
        run_on_ranks(work, 2, what, device="cpu", seconds=8 if what == "wait" else None)
    assert time.monotonic() - began < 200


def test_all_ranks_are_told_that_they_disagree():
    told = run_on_ranks(work, 2, "disagree", device="cpu")
    assert told[0] == told[1] and "shape: rank 0 has (2, 3), rank 1 has (2, 4)" in told[0]


@pytest.mark.parametrize("size, device, words", [(0, "cpu", "at least one"), (99, "cuda", "this machine has")])
def test_refusals(size, device, words):
    with pytest.raises(ValueError, match=words):
        run_on_ranks(work, size, "sum", device=device)
