"""A worker that dies by a signal: which one, in words, what is usually behind it in this course, and what to do."""

import os
import re
import signal
import threading
import time

import pytest

from course_lib.checker import Case
from course_lib.checker.judge.decide import judge
from course_lib.checker.judge.exceptions import error_message
from course_lib.checker.judge.stopping import stopped
from course_lib.checker.runner.running import Run, run_cases
from course_lib.checker.runner.worker import Ending, Worker, WorkerDied
from course_lib.checker.specification.seen import RaisedError
from tests.checker.samples import ADD, ADD_CELL, DOUBLE

RIGHT = "def double(x):\n    return x + x\n"


def dying(deed):
    return f"import ctypes, os, sys\ndef double(x):\n    {deed}\n    return x + x\n"


@pytest.mark.parametrize(
    "deed, words",
    [
        ("os.abort()", ["SIGABRT (abort)", "a library met what must never happen", "dtypes"]),
        ("os.kill(os.getpid(), 9)", ["SIGKILL (killed)", "Usually the machine's memory ran out", "close other"]),
        ("ctypes.string_at(0)", ["SIGSEGV (segmentation fault)", "memory that is not its own", "made by hand"]),
    ],
)
def test_the_signal_its_usual_cause_and_what_to_do_are_said(deed, words):
    verdict = judge(DOUBLE, dying(deed))
    assert verdict.outcome == verdict.mistake == "crashed"
    assert all(word in verdict.message for word in [*words, "in case “seven elements”", "the next check works"])
    assert "status" not in verdict.message and judge(DOUBLE, RIGHT).passed


def test_an_assertion_of_the_compiler_is_shown_with_the_abort():
    assertion = "LLVM ERROR: unsupported layout conversion"
    verdict = judge(DOUBLE, dying(f"os.write(2, b'{assertion}'); os.abort()"))
    assert assertion in str(verdict) and "what it printed" in verdict.message


def killed(number, interpreted):
    """What is said of a child that this signal ended in its first case."""
    run = Run([Case("seven elements", ())], interpreted, Ending(signal=number), started=0)
    return stopped(ADD, run, ADD_CELL, {"add": "add"}).message


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGILL, signal.SIGTRAP])
def test_the_compiler_is_blamed_only_where_it_ran(number):
    assert "Usually the compiler" in killed(number, interpreted=False)
    assert "compiler" not in killed(number, interpreted=True)


def test_every_signal_gets_a_name_and_a_word():
    for number in signal.Signals:
        message = killed(number, interpreted=True)
        said = rf"died of {number.name} \([\w /,-]+\) in case “seven elements”: \w.*check works"
        assert re.search(said, message), message
    assert "died of signal 50 (one of the system's own)" in killed(50, interpreted=True)


@pytest.mark.parametrize("number, words", [(signal.SIGKILL, "SIGKILL (killed)"), (signal.SIGABRT, "SIGABRT (abort)")])
def test_the_warm_worker_itself_names_its_signal(monkeypatch, number, words):
    """The out-of-memory killer may take the worker rather than the check's child."""
    own = Worker(interpreted=True)
    own.wait_until_ready()
    monkeypatch.setattr("course_lib.checker.runner.running.worker", lambda interpreted: own)
    timer = threading.Timer(0.5, os.kill, (own._process.pid, number))
    timer.start()
    verdict = judge(DOUBLE, "import time\ndef double(x):\n    time.sleep(3)\n    return x + x\n")
    assert verdict.outcome == "crashed" and words in verdict.message and ".." not in verdict.message
    assert judge(DOUBLE, RIGHT).passed
    own.stop()


def test_a_worker_that_dies_before_the_job_reaches_it_is_no_broken_pipe(monkeypatch):
    own = Worker(interpreted=True)
    own.wait_until_ready()
    monkeypatch.setattr("course_lib.checker.runner.running.worker", lambda interpreted: own)
    monkeypatch.setattr(own, "wait_until_ready", lambda: (os.kill(own._process.pid, 9), time.sleep(0.3)))
    with pytest.raises(WorkerDied, match="SIGKILL"):
        run_cases(DOUBLE, RIGHT, {"double": "double"}, seed=1)


@pytest.mark.parametrize("code, words", [(-6, "SIGABRT (abort)"), (-9, "SIGKILL (killed)"), (-11, "SIGSEGV")])
def test_a_tool_of_the_compiler_that_died_is_put_in_words(code, words):
    """Triton says of ptxas no more than the number."""
    text = f"PTXAS error: `ptxas` failed with error code {code}\n`ptxas` stderr:\n\nRepro command: ..."
    message = error_message(RaisedError("PTXASError", text, line=4), ADD_CELL)[1]
    assert words in message and "(line 4 of the cell)" in message and "error code" not in message


def test_a_tool_of_the_compiler_that_refused_keeps_its_own_words():
    text = "PTXAS error: `ptxas` failed with error code 2\n"
    assert "failed with error code 2" in error_message(RaisedError("PTXASError", text), ADD_CELL)[1]
