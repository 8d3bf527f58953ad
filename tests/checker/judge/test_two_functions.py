"""Two functions of an answer that are wrong, each in its own way."""

import pytest

from course_lib.checker.judge.decide import judge
from course_lib.checker.specification import catalog
from tests.submissions.edits import changed

SLOTS_KEPT, NO_SCALE = ("    slots[count:] = unused_slot\n", ""), (" / math.sqrt(head_dim)", "")


def test_both_causes_are_told_each_with_its_function():
    verdict = judge(catalog.exercise("14.4"), changed("14.4", SLOTS_KEPT, NO_SCALE), seed=5)
    assert verdict.mistake == "scale_missing" and verdict.diagnosis.startswith(
        "Two functions are wrong. `paged_step`: "
    )
    assert "`fill_buffers`: Rows behind the batch kept the slots" in verdict.diagnosis


@pytest.mark.parametrize("edit, function", [(SLOTS_KEPT, "fill_buffers"), (NO_SCALE, "paged_step")])
def test_the_function_that_is_wrong_is_named(edit, function):
    """Cases of `fill_buffers` were once told "of `paged_step`", because both ran together."""
    verdict = judge(catalog.exercise("14.4"), changed("14.4", edit), seed=5)
    assert f"of `{function}`" in verdict.message and "Two functions" not in verdict.diagnosis


def test_what_is_wrong_in_the_same_way_is_told_once():
    both = changed("14.6", ("tl.cdiv(rows, BLOCK_ROWS)", "(rows // BLOCK_ROWS)"))
    verdict = judge(catalog.exercise("14.6"), both, seed=5)
    assert verdict.mistake == "rounded_down" and verdict.diagnosis.count("rounded down") == 1
