"""What a timed answer must withstand: new numbers in the same memory at every call, the last of them judged."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from course_lib.checker import TRITON, Case, FasterThan
from course_lib.checker.judge import decide as judging
from course_lib.checker.runner import frames, running
from course_lib.checker.runner.worker import Ending
from course_lib.hardware.ceilings import measured as ceilings
from tests.checker.samples import DOUBLE

WORKER = Path(running.__file__).parent / "process"
# A clock that needs no GPU: the worker's own timing, with calls that are counted in place of CUDA's events.
TIMED = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import torch
import main  # first: it finds what the others import
import again
from guards import Arguments

class Event:
    def __init__(self, enable_timing): pass
    def record(self): self.at = time.perf_counter()
    def synchronize(self): pass
    def elapsed_time(self, other): return (other.at - self.at) * 1e3

torch.cuda.Event, torch.cuda.synchronize = Event, lambda: None
empty = torch.empty
torch.empty = lambda size, **more: empty(8 if size == 256 << 20 else size, **more)  # no L2 cache to flush here
cpu = torch.device("cpu")
x, y = torch.arange(8.0), torch.arange(8.0) * 10
arguments = Arguments([x, y, 3], ["x", "y", "n"], cpu)
calls = []
def answer(x, y, n):
    calls.append([x[0].item(), y[0].item()])
    result = x + y
    x.zero_()  # spoils what the baseline would find
    return result
torch.seen = []
source = {"name": "baseline", "source": "def baseline(x, y, n):\\n    torch.seen.append([x[0].item(), y[0].item()])"}
timing, last = again.measure(cpu, {"baseline": source, "turns": list(range(1, 30))}, answer, arguments)
print(json.dumps({"timing": timing, "last": last.tolist(), "calls": calls, "baselines": torch.seen}))
"""


@pytest.fixture(scope="module")
def timed():
    command = [sys.executable, "-c", TIMED, str(WORKER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_timed_call_has_other_numbers_in_the_same_memory(timed):
    assert len(timed["calls"]) == running.TIMED_CALLS
    assert all(first != second for first, second in zip(timed["calls"], timed["calls"][1:]))
    assert timed["calls"][0] == [7.0, 60.0], "x rolled by 1, y by 2"
    assert set(timed["timing"]) == {"answer", "baseline"} and min(timed["timing"].values()) >= 0


def test_the_baseline_finds_the_answers_numbers(timed):
    assert timed["baselines"] == timed["calls"][:-1]


def test_the_judge_knows_what_the_last_call_got(timed):
    case = Case("timed", (torch.arange(8.0), torch.arange(8.0) * 10, 3), timed=True)
    x, y, n = running.Run([case], False, Ending(), turns=list(range(1, 30))).timed_last(case).args
    assert (x + y).tolist() == timed["last"] and n == 3
    assert case.args[0].tolist() == torch.arange(8.0).tolist()


FAST = replace(DOUBLE, requirements=(FasterThan(torch.add, 1.0, lambda x: 0, lambda x: 0),), needs=TRITON)


@pytest.mark.parametrize("fresh, outcome", [(True, "passed"), (False, "failed")])
def test_a_result_that_was_kept_of_an_earlier_call_does_not_pass(monkeypatch, fresh, outcome):
    case = Case("1 to 5", (torch.arange(1.0, 6.0),), timed=True)
    run = running.Run([case], False, Ending([{"kind": "done"}]), turns=[4, 3])
    last = run.timed_last(case).args[0]
    frame = {"kind": "case", "index": 0, "error": None, "result": 2 * case.args[0], "written": {}, "seconds": 1.0}
    frame |= {"timing": {"answer": 1.0, "baseline": 2.0}, "result_after_timing": 2 * (last if fresh else case.args[0])}
    run.frames[0] = frames.frame(frame)
    monkeypatch.setattr(judging, "run_cases", lambda *args, **more: [run])
    here = SimpleNamespace(memory_bandwidth=1.0, fma_rate=1.0, matmul_rate={})
    monkeypatch.setattr(ceilings, "ceilings", lambda: here)
    verdict = judging.judge(FAST, "def double(x):\n    return 2 * x\n")
    assert verdict.outcome == outcome, verdict
    if not fresh:
        assert verdict.mistake == "kept_result" and "kept from call to call" in verdict.diagnosis
