"""What is told of memory that nobody wrote, beside kernels that add atomically."""

from course_lib.checker.judge.decide import judge
from course_lib.checker.specification import catalog
from tests.submissions.edits import changed


def test_beside_a_counter_of_tiles_nothing_was_added_to_the_result():
    """A tile that no program computed was told as "added to memory that nobody had set", for the counter's sake."""
    missing = changed("14.6", ("while tile < tiles:", "while tile < tiles - 1:"))
    verdict = judge(catalog.exercise("14.6"), missing, seed=3)
    assert "never written" in verdict.message and "added to memory" not in str(verdict), verdict
