"""What is compiled before a check: in processes that hold nothing up, without a GPU, and once for each variant."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from course_lib.home import ROOT

PROCESS = ROOT / "course_lib/checker/runner/process"
TRAFFIC = ROOT / "course_lib/hardware/meter/traffic"
HEAD = f"""
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(PROCESS)!r})
from main import _load
import ahead, torch
"""
CELL = '''
@triton.jit
def double_kernel(x_pointer, y_pointer, length, BLOCK: tl.constexpr):
    """Twice a vector."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_pointer + lanes, 2 * tl.load(x_pointer + lanes, mask=lanes < length), mask=lanes < length)


def double(x):
    y = torch.empty_like(x)
    block = 64 if torch.cuda.get_device_capability(x.device) == (8, 6) else 32
    double_kernel[(triton.cdiv(len(x), block),)](x, y, len(x), BLOCK=block)
    return y
'''
JOB = """
def job(cell, *tensors):
    case = {"entry": "double", "driver": None, "turns": [], "compiled": False, "order": "ascending", "later_of": None,
            "memory_of": None, "baseline": {"name": "none"}}
    return {"exercise": "90.1", "source": cell, "entries": {"double": "double"}, "device": "cuda", "ranks": 0,
            "gpu": {"major": 8, "minor": 6}, "undefined_lanes": True, "runs": 20, "repeat_seconds": 0.2,
            "cases": [{**case, "args": [tensor]} for tensor in tensors]}
"""


def _in_a_process_of_its_own(folder: Path, program: str) -> subprocess.CompletedProcess:
    """Helpers are forked, which pytest's own threads would not survive; and Triton compiles where it was not told to
    interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", HEAD + JOB + textwrap.dedent(program)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment | {"TRITON_CACHE_DIR": str(folder / "cache")},
    )


def test_tasks_run_side_by_side_and_no_more_than_allowed(tmp_path):
    done = _in_a_process_of_its_own(
        tmp_path,
        """
        def task(number):
            def run():
                open(f"here-{number}", "w").close()
                while len([name for name in os.listdir() if name.startswith("here")]) < 3: time.sleep(0.01)
                time.sleep(0.5 if number < 3 else 0)
                open(f"there-{number}", "w").write(str(len([name for name in os.listdir() if name[:5] == "there"])))
            return run
        processes = ahead.SideBySide(3)
        for number in range(4): processes.start(task(number))
        print(processes.running, len(processes.waiting))
        processes.wait()
        print(Path("there-3").read_text())
        """,
    )
    running, waiting, ended_before = map(int, done.stdout.split())
    assert (running, waiting) == (3, 1) and ended_before >= 1 and done.stderr == ""


def test_tasks_that_crash_or_raise_hold_nothing_up(tmp_path):
    done = _in_a_process_of_its_own(
        tmp_path,
        """
        processes = ahead.SideBySide(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for task in (lambda: os.kill(os.getpid(), signal.SIGSEGV), lambda: 1 / 0, lambda: sys.exit(3)):
            processes.start(task)
        processes.wait()
        print("went on")
        """,
    )
    assert done.stdout == "went on\n" and done.stderr == ""


@pytest.mark.parametrize("cores, number", [(1, 0), (2, 2), (64, 16)])
def test_there_are_as_many_compilers_as_cores(tmp_path, cores, number):
    program = f"""
    os.sched_getaffinity = lambda pid: range({cores})
    print(ahead.compilers())
    """
    assert _in_a_process_of_its_own(tmp_path, program).stdout == f"{number}\n"


COMPILE = f"""
    traffic = _load("_course_traffic", {str(TRAFFIC)!r})
    traffic.recognise_kernels_by_meaning()
    os.sched_getaffinity = lambda pid: range(2)
    def kernels(): return sorted(str(path.parent) for path in Path("cache").glob("*/double_kernel.cubin"))
    def compile_for(cell, *tensors):
        if os.fork() == 0:
            ahead.compile_for(traffic, job(cell, *tensors), Path("."))
            assert not torch.cuda.is_initialized()
            os._exit(0)
        os.wait()
    cell = {CELL!r}
"""


def test_each_variant_is_compiled_once_and_for_the_gpu_that_is_there(tmp_path):
    done = _in_a_process_of_its_own(
        tmp_path,
        COMPILE
        + """
    compile_for(cell, torch.zeros(100), torch.zeros(36), torch.zeros(32), torch.zeros(100).half())
    print(len(kernels()))  # float32 of any length, of a multiple of 16, float16
    read = next(Path("cache").glob("*/double_kernel.ptx")).read_text()
    print(".target sm_86" in read, "64" in next(Path("cache").glob("*/double_kernel.ttir")).read_text())
    """,
    )
    assert done.stdout.split() == ["3", "True", "True"], done.stderr


def test_remarks_docstrings_and_lines_above_compile_nothing_anew_and_a_change_does(tmp_path):
    done = _in_a_process_of_its_own(
        tmp_path,
        COMPILE
        + """
    compile_for(cell, torch.zeros(100))
    first = kernels()
    remarked = cell.replace("Twice a vector.", "2 x").replace("    lanes =", "    # a remark\\n    lanes  =  ")
    compile_for("# above\\n\\n" + remarked, torch.zeros(100))
    print(len(first), kernels() == first)
    compile_for(cell.replace("2 * tl", "2.0 * tl"), torch.zeros(100))
    print(len(kernels()))
    asserted = cell.replace("    lanes =", "    tl.device_assert(length > 0)\\n    lanes =")
    compile_for(asserted, torch.zeros(100))
    compile_for("# above\\n" + asserted, torch.zeros(100))  # tells the line that it stands in
    print(len(kernels()))
    """,
    )
    assert done.stdout.split() == ["1", "True", "2", "4"], done.stderr


def test_an_answer_that_hangs_or_raises_ends_in_time_with_what_it_has_met(tmp_path):
    started = time.monotonic()
    done = _in_a_process_of_its_own(
        tmp_path,
        COMPILE
        + """
    ahead.MEETING = 2.0
    broken = cell.replace("    return y", "    while len(x) > 99: pass\\n    raise ValueError")
    compile_for(broken, torch.zeros(100), torch.zeros(36).half(), torch.zeros(36))
    print(len(kernels()))
    """,
    )
    assert done.stdout == "2\n", done.stderr
    assert time.monotonic() - started < 300
