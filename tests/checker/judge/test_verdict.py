"""A verdict as `--json` writes it."""

import pytest

from course_lib.checker.judge.verdict import Verdict


@pytest.mark.parametrize(
    "message, told",
    [
        ("Wrong.", "Wrong. Look there."),
        ("what the first has is lost", "what the first has is lost. Look there."),
        ("It says (in full.)", "It says (in full.) Look there."),
        ("", "Look there."),
    ],
)
def test_sentences_of_a_message_do_not_run_together(message, told):
    verdict = Verdict("90.2", "Double", "failed", message, diagnosis="Look there.")
    assert verdict.as_dict()["message"] == told
