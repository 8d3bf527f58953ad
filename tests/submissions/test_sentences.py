"""What is said of one mistake holds beside another."""

import re

import pytest

from course_lib.checker.specification import catalog

EXERCISES = [pytest.param(task, id=task.id) for task in catalog.exercises().values()]
VOUCHES = re.compile(
    r"\b(?:is|are) right(?: but|,)|[Rr]ight numbers|\brow holds the right\b|^Only \w+ (?:goes|is|are) wrong|"
    r"\b(?:everything|all) else is right|\botherwise right\b"
)


@pytest.mark.parametrize("task", EXERCISES)
def test_a_slip_that_may_stand_beside_another_vouches_for_nothing(task):
    """5.6 said "First: The tokens are right, and …", and with "Second:" why three of six were wrong."""
    vouching = {
        slip.sentence
        for model in task.models
        for slip in model.slips
        if model.pairs and not slip.alone and VOUCHES.search(slip.sentence)
    }
    assert not vouching
