"""Answers to a chapter's last questions, folded, so that a reader can think first."""

from __future__ import annotations

import html

from course_lib.checker.notebook.shown import Shown


def self_check(*answers: str) -> Shown:
    """The answers to the questions above, in their order: folded in a notebook, in a terminal one below the other."""
    numbered = list(enumerate(answers, 1))
    return Shown(
        "\n".join(f"{number}. {answer}" for number, answer in numbered),
        "".join(
            f"<details><summary>Answer {number}</summary>{html.escape(answer)}</details>" for number, answer in numbered
        ),
    )
