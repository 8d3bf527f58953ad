"""While an answer runs, the judge works ahead: on truths, and on what slips make of a case that is wrong."""

import threading

from course_lib.checker.judge import prediction
from course_lib.checker.judge.meanwhile import meanwhile
from course_lib.checker.runner.running import run_cases
from course_lib.checker.specification import catalog

TASK = catalog.exercise("1.4")
WRONG = catalog.solution_source("1.4").replace("row * row_stride", "row * columns")


def test_what_slips_make_of_a_wrong_case_is_worked_out_before_anybody_asks(monkeypatch):
    ahead, work_out = threading.Event(), prediction._worked_out

    def seen(*how):
        ahead.set()
        return work_out(*how)

    monkeypatch.setattr(prediction, "_worked_out", seen)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with meanwhile(TASK, seed=3) as heard:
        run_cases(TASK, WRONG, {name: name for name in TASK.entries}, 3, heard=heard)
        assert ahead.wait(30.0)
