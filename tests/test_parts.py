"""The table at a run's end: each test belongs to one part, and what is sampled is told."""

from collections import Counter

from course_lib.home import ROOT
from tests import parts, proven


def test_each_folder_of_tests_is_a_part_that_exists():
    for start in parts.PARTS:
        assert start.startswith("build/") or (ROOT / start).exists(), start
    assert parts.part_of("tests/checker/specification/test_models.py::test_x") == "slips told from each other"
    assert parts.part_of("tests/checker/specification/test_needs.py::test_x") == "the checker"
    assert parts.part_of("tests/test_cli.py::test_x") == parts.OTHERS


def test_the_table_says_what_was_sampled_and_when_all_was_last_run():
    runs = {"AVX2, python 3.11": {"day": "2026-11-27"}, "AVX512, python 3.13": {"day": "2026-11-28"}}
    told = parts.told_of_claims(Counter(proved=5, stale=2), {proven.WHOLE_RUNS: runs})
    assert "Of 7 claims tried here 5 are proved" in told and "2 were proved before what judges them changed" in told
    assert "last passed: 2026-11-28 (AVX512, python 3.13)" in told and "ran whole" not in told
    assert "last passed: never" in parts.told_of_claims(Counter(new=1), {})
