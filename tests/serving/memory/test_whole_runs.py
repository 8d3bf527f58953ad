"""Runs of pages, reserved in advance: a refused call has changed nothing."""

import pytest

from course_lib.serving.memory import NoHole, RegionFull, WholeRuns


def test_a_run_that_is_full_and_a_pool_without_runs_refuse_and_change_nothing():
    runs = WholeRuns(9, 4, 16)  # two runs of 4 pages; the ninth is no use
    runs.append("a", 15)
    runs.append("b", 1)
    with pytest.raises(NoHole, match="All runs of 16 tokens are taken"):
        runs.append("c", 1)
    with pytest.raises(RegionFull, match="17 tokens; a run holds 16"):
        runs.append("a", 2)
    assert runs.table("a") == [0, 1, 2, 3] and runs.table("b") == [4, 5, 6, 7] and runs.free_pages() == 9 - 4 - 1
    runs.append("a", 1)
    runs.free("b")
    runs.append("c", 16)
    assert runs.table("c") == [4, 5, 6, 7]
