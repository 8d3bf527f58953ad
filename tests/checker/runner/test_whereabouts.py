"""A child that does not end says where it is, also while C computes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from course_lib.checker.judge.stopping import stopped
from course_lib.checker.runner.process import whereabouts
from course_lib.checker.runner.running import Run
from course_lib.checker.runner.worker import Ending
from course_lib.checker.specification.exercise import Exercise
from course_lib.checker.specification.needs import TRITON

TASK = Exercise("9.9", "Double", ("double",), cases=lambda draw: [], oracle=lambda x: x, needs=TRITON)
SOURCE = "import compiler\n\ndef double(x):\n    compiler.compile()\n"


def asked(folder, body: str) -> dict:
    """What is answered of a child that runs `SOURCE`, whose last line calls a function with this body."""
    slow = folder / "triton" / "compiler" / "compiler.py"
    slow.parent.mkdir(parents=True)
    slow.write_text(f"def compile():\n{body}")
    cell = folder / "exercise_9_9.py"
    with tempfile.TemporaryFile() as stack:
        started, begun = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                whereabouts.tell_when_asked(stack)
                scope = {}
                exec(compile(slow.read_text(), str(slow), "exec"), scope)
                lines = compile(SOURCE.replace("import compiler", "pass"), str(cell), "exec")
                names = {"compiler": type("compiler", (), {"compile": staticmethod(scope["compile"])})}
                exec(lines, names)
                os.write(begun, b"1")
                names["double"](1)
            finally:
                os._exit(0)
        os.read(started, 1)
        time.sleep(0.3)
        try:
            return whereabouts.ask(pid, stack)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(started)
            os.close(begun)


@pytest.mark.parametrize("body", ["    while 1: 0\n", "    sum(range(1 << 60))\n", "    import time; time.sleep(60)\n"])
def test_the_line_of_the_cell_and_the_compiler_are_seen(tmp_path, body):
    assert asked(tmp_path, body) == {"line": 4, "compiling": True}


LONG_TO_COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
import triton, triton.language as tl, whereabouts
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def kernel(x, B: tl.constexpr):
    o = tl.arange(0, B)
    values = tl.load(x + o)
    tl.store(x + o, tl.exp(values - tl.max(values, 0)) / tl.sum(values, 0))

whereabouts.tell_when_asked(open(int(sys.argv[2]), "wb"))
print("ready", flush=True)
source = ASTSource(kernel, {"x": "*fp32", "B": "constexpr"}, {"B": 1 << 19})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


def test_tritons_compiler_is_seen_at_work(tmp_path):
    """LLVM has signals of its own, which must not be this one."""
    (tmp_path / "kernel.py").write_text(LONG_TO_COMPILE)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    with tempfile.TemporaryFile() as stack:
        folder, fd = str(Path(whereabouts.__file__).parent), stack.fileno()
        command = [sys.executable, "-W", "ignore", str(tmp_path / "kernel.py"), folder, str(fd)]
        child = subprocess.Popen(command, pass_fds=[fd], env=environment, stdout=subprocess.PIPE)
        try:
            assert child.stdout.readline() == b"ready\n"  # a signal before that would end it
            deadline = time.monotonic() + 600
            while child.poll() is None and time.monotonic() < deadline:
                if whereabouts.ask(child.pid, stack)["compiling"] and b"make_llir" in os.pread(fd, 1 << 16, 0):
                    return
            pytest.fail("the compiler's work was not seen")
        finally:
            child.kill()
            child.communicate()


def test_a_child_that_is_gone_or_silent_costs_a_moment():
    with tempfile.TemporaryFile() as stack:
        started = time.monotonic()
        assert whereabouts.ask(2**22 + 1, stack) == {"line": None, "compiling": False}
        assert time.monotonic() - started < 2


@pytest.mark.parametrize("written", [b"\xff" * 999, b'  File "/exercise_9_9.py", line ' + b"9" * 5000, b"line" * 9999])
def test_nonsense_is_no_line(written):
    with tempfile.TemporaryFile() as stack:
        stack.write(written)
        stack.flush()
        assert whereabouts.ask(2**22 + 1, stack)["line"] is None


@pytest.mark.parametrize(
    "line, words",
    [
        (4, "Still compiling the kernel that line 4 launches after 60 s"),
        (None, "Still compiling a kernel after 60 s"),
        (400, "Still compiling a kernel after 60 s"),
    ],
)
def test_a_compiler_that_does_not_end_is_told_apart_from_a_loop(line, words):
    run = Run([], interpreted=False, ending=Ending(timeout=True, line=line, compiling=True))
    found = stopped(TASK, run, SOURCE, {"double": "double"})
    assert (found.outcome, found.mistake) == ("timeout", "timeout")
    assert words in found.message and "loop never ends" not in found.message


BUSY, WAITING = "while True: pass", "import time; time.sleep(60)"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("program", "computes"),
    [
        pytest.param(BUSY, True, id="a loop"),
        pytest.param(WAITING, False, id="asleep"),
        pytest.param(
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])", True, id="a compiler"
        ),
    ],
)
def test_what_a_child_has_started_computes_for_it(program, computes):
    """13.8's answers were stopped by the clock on a busy machine: while g++ worked, they seemed to wait."""
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        time.sleep(1.0)
        before, _ = whereabouts.computed(child.pid)
        time.sleep(0.5)
        after, states = whereabouts.computed(child.pid)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert (after > before and "R" in states) == computes
    assert whereabouts.computed(child.pid) == (0.0, "")
