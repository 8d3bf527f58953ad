"""Answers that attack: each has its outcome, none a pass that it did not earn, an answer or a way out; the next works.

What the kernel keeps closed (files, processes, the network) stands in test_isolation.py; what one process cannot hold
against code that runs inside of it is said in the instructor's page on isolation.
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.checker.judge.decide import judge
from course_lib.checker.runner.process.isolation import landlock_version
from tests.checker.samples import ADD, ADD_CELL, APPEND, DOUBLE, ENDLESS, TWO

RIGHT = "def double(x):\n    return x + x\n"
WRONG_RESULT = "    return x.clone()\n"
HARNESS = (
    "import gc, os, sys, struct\n"
    "def harness():\n"
    "    frame = sys._getframe()\n"
    "    while frame and type(frame.f_locals.get('self')).__name__ != 'Child':\n"
    "        frame = frame.f_back\n"
    "    return frame.f_locals['self']\n"
)


def double(*lines, result=WRONG_RESULT, before="import gc, os, sys, time, subprocess, threading, struct\n"):
    """A cell for `double` that does these things before it returns something wrong."""
    return before + "def double(x):\n" + "".join(f"    {line}\n" for line in lines) + result


@pytest.fixture(autouse=True)
def the_next_check_works():
    yield
    assert judge(DOUBLE, RIGHT).passed


# ------------------------------------------------------------------------------------------ sources that fight Python

LONG_SUM = "+".join(["1"] * 50_000)


@pytest.mark.parametrize(
    "source",
    [
        RIGHT + "# \ud800\n",
        RIGHT + "name = '\ud800'\n",
        RIGHT + f"number = {LONG_SUM}\n",
        RIGHT + "number = " + "-" * 100_000 + "1\n",
        RIGHT + "number = a" + ".b" * 100_000 + "\n",
        RIGHT + "if 0: pass\n" + "elif 0: pass\n" * 20_000,
        "number = " + "(" * 100_000 + ")" * 100_000,
        RIGHT + "\0",
    ],
    ids=["half a character", "in a string", "sum", "minus", "attributes", "elif", "brackets", "zero byte"],
)
def test_a_source_that_python_cannot_read_is_an_error_of_the_cell(source):
    verdict = judge(DOUBLE, source)
    assert verdict.outcome == "error", verdict
    assert verdict.mistake == "unreadable_source" or "SyntaxError" in verdict.message


@pytest.mark.parametrize("filling", ["\n", " \n", "\t\n\f", " "], ids=["lines", "spaced lines", "tabs", "one line"])
def test_reading_a_long_source_takes_time_in_proportion_to_its_length(filling):
    started = time.process_time()
    assert judge(DOUBLE, filling * 250_000 + "\n" + RIGHT).passed
    assert time.process_time() - started < 20


# ----------------------------------------------------------------------------------------------- looking for answers


def test_no_oracle_case_or_judge_lies_in_the_process():
    """Neither as an object of the course nor as the numbers that are expected."""
    cell = (
        "returned = []\n"
        + HARNESS
        + double(
            "kinds = {str(type(o).__module__) + '.' + type(o).__name__ for o in gc.get_objects()}",
            "assert not [k for k in kinds if k.startswith(('course_lib', 'exercises', 'solutions'))], kinds",
            "functions = [o for o in gc.get_objects() if type(o) is type(harness)]",
            "code = [str(o.__code__.co_filename) + str(o.__name__) for o in functions]",
            "assert not [name for name in code if 'exercises' in name or 'oracle' in name]",
            "tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == x.shape]",
            "expected = [o for o in tensors if (o == 2 * x).all() and not any(o is mine for mine in returned)]",
            "assert not expected",
            result="    returned.append(x + x)\n    return returned[-1]\n",
        )
    )
    verdict = judge(DOUBLE, cell)
    assert verdict.passed, verdict


def test_the_job_that_the_process_holds_names_no_answer():
    cell = HARNESS + double("print(sorted(harness().job))", "print(sorted(harness().job['cases'][0]))")
    verdict = judge(DOUBLE, cell)
    assert not verdict.passed
    job = ["cases", "device", "entries", "exercise", "ranks", "records_variants", "repeat_seconds", "runs", "source"]
    told = str([*job, "undefined_lanes"])
    case = ["args", "baseline", "compiled", "driver", "entry", "later_of", "memory_of", "order", "turns"]
    assert verdict.printed.splitlines()[:2] == [told, str(case)]


@pytest.mark.skipif(landlock_version() < 1, reason="this kernel has no Landlock")
@pytest.mark.parametrize("what", ["mem", "fd/0", "cwd/README.md", "root/etc/hostname"])
def test_the_parent_cannot_be_looked_into(what):
    verdict = judge(DOUBLE, double(f"open(f'/proc/{{os.getppid()}}/{what}', 'rb').read()", result="    return x + x\n"))
    assert verdict.outcome == "error", verdict


# ------------------------------------------------------------------------------------- patching what a check stands on


@pytest.mark.parametrize(
    "patch",
    [
        "torch.equal = torch.allclose = torch.isclose = torch.Tensor.__eq__ = lambda *a, **k: True",
        "torch.testing.assert_close = lambda *a, **k: None",
        "torch.Tensor.double = torch.Tensor.clone = torch.Tensor.cpu = lambda self, *a, **k: self",
        "time.perf_counter = time.monotonic = lambda: 0.0",
        "sys.modules['wire'].decode = lambda message: {}",
        "sys.modules['wire']._raw = lambda tensor: bytes(tensor.numel() * 4)",
        "sys.modules['guards'].GuardedTensor.modified = lambda self: False",
        "sys.modules['child'].count_pattern = lambda *a: 0",
        "import builtins; builtins.isinstance = lambda *a: True",
        "import builtins; builtins.len = lambda value: 0",
        "import json; json.dumps = lambda value, **k: '{}'",
        "import atexit; atexit.register(print, 'still here')",
        "import signal; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]",
        "sys.exit = os._exit = exit = lambda *a: None",
        "sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)",
        "sys.setrecursionlimit(60)",
    ],
)
def test_patching_what_the_check_uses_makes_nothing_right(patch):
    verdict = judge(DOUBLE, double(patch))
    assert verdict.outcome in ("failed", "error", "crashed", "timeout"), verdict


def test_a_patched_meter_is_no_kernel():
    """The meter's own switch, and Triton's: nothing was launched, so nothing is counted."""
    cell = (
        "import sys\n"
        "traffic = sys.modules['_course_traffic']\n"
        "traffic.TrafficMeter.report = lambda self: traffic.TrafficReport((), (), (), 0)\n"
        "def add(x, y):\n    return torch.lerp(x, y, 0.5) * 2\n"
    )
    assert judge(ADD, cell).mistake == "no_kernel_launched"


# ------------------------------------------------------------------------------------------------- forging a result


@pytest.mark.parametrize(
    "deed",
    [
        "[os.write(fd, os.urandom(4096)) for fd in range(3, 64) if os.path.exists(f'/proc/self/fd/{fd}')]",
        "os.write(harness().pipe, b'\\0' * 8)",
        "os.write(harness().pipe, struct.pack('<Q', 1 << 60))",
        "os.write(harness().pipe, struct.pack('<Q', 5) + b'hello')",
        "harness().send({'kind': 'done'}); os._exit(0)",
        "harness().send({'kind': 'done'}); os.write(harness().pipe, b'\\0' * 8); os._exit(0)",
        "harness().send({'kind': 'passed'})",
        "harness().send({'kind': 'start', 'index': 1}); harness().send({'kind': 'done'}); os._exit(0)",
        "harness().send({'kind': 'start', 'index': -1})",
        "harness().send({'kind': 'start', 'index': 10**9})",
        "harness().send({'kind': 'case', 'index': 0, 'error': None, 'result': x.clone()})",
        "harness().send({'kind': 'case', 'index': 0})",
        "harness().send({'kind': 'case', 'index': 0, 'error': 7, 'result': {}, 'launches': 5, 'traffic': 'x'})",
        "harness().send({'kind': 'harness_error', 'text': '<script>alert(1)</script>'}); os._exit(0)",
        "harness().send({'kind': 'case', 'index': 0, 'error': None})",
        "harness().send({'kind': 'case', 'index': 0, 'result': x, 'traffic': {'x': {'loaded': 'y'}}})",
        "harness().send({'kind': 'case', 'index': 0, 'result': x, 'operations': {'add': [1]}, 'seconds': 'long'})",
        "harness().functions['double'] = None",
        "harness().run_case = lambda *a: {}",
    ],
)
def test_a_forged_message_is_no_result(deed):
    verdict = judge(DOUBLE, HARNESS + double(f"try:\n        {deed}\n    except OSError: pass"))
    assert not verdict.passed, verdict
    assert "<script>" not in verdict._repr_html_()


def test_a_case_that_is_reported_twice_is_forged():
    """The second report would take the first one's place, with whatever it claims to have been seen."""
    deed = "harness().send({'kind': 'case', 'index': 0, 'error': None, 'result': x + x, 'out_of_bounds': []})"
    verdict = judge(DOUBLE, HARNESS + double(deed, result="    return x + x\n"))
    assert verdict.outcome == "crashed" and "must not write to its pipes" in verdict.message, verdict


# ---------------------------------------------------------------------------------------------- results that are none


@pytest.mark.parametrize(
    "result",
    [
        "torch.zeros(1).expand(1 << 42)",
        "torch.empty(7, device='meta')",
        "torch.zeros(7).to_sparse()",
        "torch.quantize_per_tensor(torch.zeros(7), 0.1, 0, torch.qint8)",
        "torch.zeros(7, dtype=torch.complex128)",
        "type('Lazy', (torch.Tensor,), {})(x + x)",
        "(lambda kept: kept.append(kept) or kept)([])",
        "{(): {(): {(): x}}}",
        "iter([x])",
        "lambda: x + x",
        "10 ** 5000",
        "float('nan')",
        "b'2'",
        "np.array([object()])",
        "type('Int', (int,), {'__int__': lambda self: 1 / 0})(3)",
    ],
)
def test_a_result_of_another_kind_is_refused(result):
    verdict = judge(DOUBLE, double(result=f"    return {result}\n"))
    assert verdict.outcome in ("failed", "error"), verdict
    assert "fault of the course" not in verdict.message, verdict


@pytest.mark.parametrize(
    "cell, outcome",
    [
        ("class E(Exception):\n    def __str__(self): raise KeyError(1)\ndef double(x):\n    raise E()\n", "error"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit\ndef double(x):\n    raise E()\n", "error"),
        (
            "class T(str):\n    __getitem__ = __format__ = __contains__ = lambda *x: 1 / 0\n"
            "class E(Exception):\n    def __str__(self): return T('x')\ndef double(x):\n    raise E()\n",
            "error",
        ),
        ("class E(BaseException):\n    pass\ndef double(x):\n    raise E('x' * 10**7)\n", "error"),
        ("def double(x):\n    raise KeyboardInterrupt\n", "error"),
        ("def double(x):\n    return double(x)\n", "error"),
        ("def double(x):\n    raise SystemExit(0)\n", "error"),
        ("class E(Exception):\n    __cause__ = property(lambda s: s)\ndef double(x):\n    raise E()\n", "error"),
        (
            "class E(Exception):\n    __module__ = 'triton'\n    __cause__ = property(lambda s: s)\n"
            "def double(x):\n    raise E()\n",
            "error",
        ),
        (
            "class E(Exception):\n    __module__ = 'triton'\n    node = error_message = property(lambda s: 1 / 0)\n"
            "def double(x):\n    raise E()\n",
            "error",
        ),
        (
            "class E(Exception):\n    __module__ = 'triton'\n    node = error_message = src = 7\n    __cause__ = 7\n"
            "def double(x):\n    raise E()\n",
            "error",
        ),
        ("class E(Exception):\n    __module__ = 7\ndef double(x):\n    raise E()\n", "error"),
        ("class double:\n    def __call__(self, x): return x\n", "error"),
        ("import sys\nsys.modules[__name__] = None\ndouble = 1\n", "error"),
    ],
)
def test_an_error_that_fights_back_is_an_error(cell, outcome):
    verdict = judge(DOUBLE, cell)
    assert verdict.outcome == outcome and len(str(verdict)) < 8000, str(verdict)[:500]
    assert "fault of the course" not in verdict.message, verdict


@pytest.mark.parametrize("text", ["\\ud800", "\\x1b[2J\\x1b]0;title\\x07", "\\u202e"])
@pytest.mark.parametrize(
    "where", ["def double(x):\n    raise ValueError('{}')\n", "raise ValueError('{}')\ndouble = 1\n"]
)
def test_what_an_errors_text_would_do_to_a_terminal_or_a_file_is_not_handed_on(where, text):
    verdict = judge(DOUBLE, where.format(text))
    said = str(verdict) + json.dumps(verdict.as_dict(), ensure_ascii=False) + verdict._repr_html_()
    assert verdict.outcome == "error" and "ValueError" in said and "�" in said
    assert not [c for c in said if not c.isprintable() and c != "\n"]


# ------------------------------------------------------------------------------ the right numbers, and not by the work


def test_the_inputs_own_storage_is_no_result():
    assert judge(DOUBLE, "def double(x):\n    return x.mul_(2)\n").mistake == "modified_input"
    assert (
        judge(DOUBLE, "def double(x):\n    return x.set_((x + x).untyped_storage(), 0, x.shape)\n").outcome != "crashed"
    )
    assert not judge(APPEND, "def append(cache, row, position):\n    return cache\n").passed


def test_results_kept_by_identity_or_address_are_stale():
    cell = (
        "kept = {}\n"
        "def add(x, y):\n"
        "    key = KEY\n"
        "    if key not in kept:\n        kept[key] = work(x, y)\n"
        "    return kept[key]\n"
    ) + ADD_CELL.replace("def add", "def work")
    assert judge(ADD, cell.replace("KEY", "0")).outcome == "failed"


@pytest.mark.parametrize(
    "sum_of",
    [
        "torch.ops.aten.add(x, y)",
        "torch.Tensor.__add__(x, y)",
        "__import__('operator').add(x, y)",
        "getattr(torch, 'a' + 'dd')(x, y)",
        "torch._C._VariableFunctions.add(x, y)",
        "torch.jit.trace(lambda a, b: a + b, (x, y), check_trace=False)(x, y)",
        "torch.add(x, y, out=torch.empty_like(out))",
        "torch.func.vmap(torch.add)(x[None], y[None])[0]",
        "in_a_thread(lambda: x + y)",
        "in_a_pool(lambda: x + y)",
    ],
)
def test_a_forbidden_operation_under_another_name_is_seen(sum_of):
    helpers = (
        "import threading\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def in_a_thread(work):\n"
        "    kept = []\n"
        "    thread = threading.Thread(target=lambda: kept.append(work()))\n"
        "    thread.start(); thread.join()\n"
        "    return kept[0]\n"
        "def in_a_pool(work):\n"
        "    with ThreadPoolExecutor(1) as pool:\n        return pool.submit(work).result()\n"
    )
    verdict = judge(ADD, helpers + ADD_CELL.replace("    return out", f"    return {sum_of}"))
    assert verdict.mistake == "forbidden_operation", verdict


# -------------------------------------------------------------------------------------------- using up what there is


def test_a_file_too_large_ends_the_check_and_is_gone():
    verdict = judge(DOUBLE, double("f = open('leftover', 'wb')", "while True: f.write(bytes(1 << 24))"))
    assert verdict.outcome in ("crashed", "error"), verdict


def test_files_by_the_hundred_are_gone_afterwards():
    verdict = judge(
        DOUBLE,
        double(
            "print(os.getcwd())",
            "[open(f'leftover{i}', 'w').write('x' * 1000) for i in range(300)]",
            "os.makedirs('a/' * 50, exist_ok=True)",
            result="    return x + x\n",
        ),
    )
    assert verdict.passed and not Path(verdict.printed.split()[0]).exists()


def test_many_processes_are_ended_with_the_check():
    marker = "778811"
    verdict = judge(
        replace(DOUBLE, limits=ENDLESS),
        double(
            f"for i in range(20): subprocess.Popen(['sleep', '{marker}'], start_new_session=True)",
            "for i in range(10):",
            f"    if os.fork() == 0: os.setsid(); os.execvp('sleep', ['sleep', '{marker}'])",
            "while True: time.sleep(1)",
        ),
    )
    assert verdict.outcome in ("timeout", "error"), verdict
    assert not [p for p in Path("/proc").glob("[0-9]*") if marker.encode() in _command(p)]


def _command(process):
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    "cell",
    [
        "import time\ntime.sleep(600)\n" + RIGHT,
        double("time.sleep(600)"),
        double("threading.Thread(target=lambda: time.sleep(600)).start(); threading.Event().wait()"),
        double("os.read(os.pipe()[0], 1)"),
        double("while True:\n        try: time.sleep(600)\n        except BaseException: pass"),
    ],
)
def test_sleeping_past_the_end_is_a_timeout(cell):
    assert judge(replace(DOUBLE, limits=ENDLESS), cell).outcome == "timeout"


@pytest.mark.parametrize(
    "written",
    [
        "sys.stdout.buffer.write(bytes(range(256)) * 20)",
        "os.write(1, b'\\x1b[2J\\x1b]0;title\\x07\\x00\\xff\\xfe'); os.write(2, os.urandom(5000))",
        "print('<img src=x onerror=alert(1)>', '\\u202e', chr(0x9b) + '31m', '\\r\\b\\b')",
        "sys.stdout.close(); os.close(1); os.close(2)",
    ],
)
def test_whatever_is_printed_does_no_harm(written):
    verdict = judge(DOUBLE, double(written))
    assert verdict.outcome in ("failed", "error"), verdict
    shown = str(verdict) + verdict._repr_html_()
    assert "<img" not in shown.replace(str(verdict), "")
    assert not [c for c in shown if ord(c) < 32 and c not in "\n\t" or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u202d"]


@pytest.mark.parametrize(
    "deed",
    [
        "import ctypes; ctypes.string_at(0)",
        "import faulthandler; faulthandler._sigabrt()",
        "os.kill(os.getpid(), 11)",
        "os.killpg(0, 9)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (0, 0)); [None for _ in iter(int, 1)]",
        "os.close(harness().pipe)",
        "[os.close(fd) for fd in range(256) if os.path.exists(f'/proc/self/fd/{fd}')]",
    ],
)
def test_a_crash_of_any_kind_stays_in_the_check(deed):
    verdict = judge(DOUBLE, HARNESS + double(f"try:\n        {deed}\n    except OSError: pass"))
    assert verdict.outcome in ("crashed", "error"), verdict


def test_a_name_for_the_function_that_is_hostile_is_only_a_name():
    assert judge(TWO, "def flops(n): return 0\nmoved = flops\n", names={"flops": "__import__", "moved": "x; y"}).mistake
    assert os.getpid()
