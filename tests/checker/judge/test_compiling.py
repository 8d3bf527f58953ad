"""Without a GPU a right answer's kernels go before Triton's compiler, which refuses what only the interpreter runs."""

import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from course_lib.checker import TRITON, Case, Exercise, Limits
from course_lib.checker.judge import compiling
from course_lib.checker.judge.decide import judge
from course_lib.checker.runner import worker as workers
from course_lib.checker.runner.running import compiles_without_gpu
from course_lib.checker.runner.worker import Ending, WorkerDied
from course_lib.checker.specification import catalog
from course_lib.hardware.device import machine
from course_lib.hardware.meter import traffic

pytestmark = pytest.mark.skipif(
    machine().tier != "none" or machine().triton is None, reason="where there is a GPU, it compiles the kernels itself"
)

ROWS = Exercise(
    id="90.7",
    title="Row sums",
    entries=("row_sum",),
    needs=TRITON,
    limits=Limits(seconds=6.0),
    oracle=lambda x: x.sum(-1),
    cases=lambda draw: [
        Case("one number", (draw.normal(1, 1),)),
        Case("3 rows of 700", (draw.normal(3, 700),)),
        Case("float16", (draw.normal(2, 40, dtype=torch.float16),)),
    ],
)
CELL = """# Exercise 90.7 · Row sums
@triton.jit
def kernel(x, out, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        tile = tl.load(x + row * stride + start + lanes, mask=start + lanes < columns, other=0.0)
        total += tile
    tl.store(out + row, tl.sum(total))


def row_sum(x):
    out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), BLOCK=256)
    return out
"""
HEAD, ZEROS, ADDED, STORED = CELL.splitlines()[0], "tl.zeros([BLOCK], tl.float32)", "total += tile\n", "tl.sum(total)"
STORE = f"    tl.store(out + row, {STORED})\n"
LAUNCH = "x.stride(0), BLOCK=256)"


def changed(*pairs, before="", after=""):
    source = CELL
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    return before + source + after


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    compiling._said.clear()


def said():
    """What the compiler has said of each kernel since the test began."""
    return [message for kernels in compiling._said.values() for message in kernels.values()]


# --------------------------------------------------------------------------------------- what only the interpreter runs

ONLY_INTERPRETED = {
    "an int becomes a float in a loop": (
        changed((ZEROS, "0"), (ADDED, "total += tl.sum(tile)\n"), (STORED, "total")),
        "total has initial type int32",
    ),
    "a number becomes a tile in a loop": (changed((ZEROS, "0.0")), "Loop-carried variable total"),
    "a while loop changes a type": (
        changed((STORE, "    n = 1\n    while n < 2:\n        n = n + 0.5\n" + STORE)),
        "Loop-carried variable n",
    ),
    "a branch gives another type": (
        changed((STORE, f"    answer = {STORED} if columns > 0 else 0\n    tl.store(out + row, answer)\n")),
        "inconsistent types",
    ),
    "a name that one branch alone defines": (
        changed((STORE, f"    if columns > 0:\n        answer = {STORED}\n    tl.store(out + row, answer)\n")),
        "answer",
    ),
    "a name that a loop alone defines": (changed((STORED, "tl.sum(total + 0.0 * tile)")), "tile"),
    "break": (changed((ADDED, ADDED + "        if start < 0:\n            break\n")), "Break"),
    "continue": (changed((ADDED, "if start < 0:\n            continue\n        " + ADDED)), "Continue"),
    "return in a loop": (changed((ADDED, ADDED + "        if start < 0:\n            return\n")), "return"),
    "a global that is no constexpr": (changed(("[BLOCK]", "[SIZE]"), before="SIZE = 256\n"), "SIZE"),
    "a helper without triton.jit": (
        changed((STORED, f"same({STORED})"), before="def same(value):\n    return value\n\n\n"),
        "same",
    ),
    "a helper that returns two types": (
        changed(
            (STORED, f"pick({STORED}, columns)"),
            before="@triton.jit\ndef pick(value, n):\n    if n > 0:\n        return value\n    return 0\n\n\n",
        ),
        "Return type mismatch|pick",  # Triton 3.6 tells no more than where
    ),
    "a function of NumPy": (changed((STORED, f"{STORED} * np.abs(-1.0)")), "absolute"),
    "a function of Python": (changed((STORED, f"{STORED} * abs(-1)")), "abs"),
    "a list that grows": (
        changed((ZEROS, ZEROS + "\n    parts = []"), (ADDED, ADDED + "        parts.append(start)\n")),
        "append",
    ),
    "try": (changed((STORE, "    try:\n    " + STORE + "    except Exception:\n        pass\n")), "Try"),
    "a float as a loop's bound": (changed(("(0, columns, BLOCK)", "(0, columns * 1.0, BLOCK)")), "must all be ints"),
    "the inside of a tensor": (changed((STORED, "float(total.handle.data.sum())")), "data"),
    "a matrix product of 8 by 8": (
        changed((STORE, "    small = tl.zeros([8, 8], tl.float16)\n    tl.dot(small, small)\n" + STORE)),
        "K >= 16",
    ),
    "an argument of 1, a constant, as a tensor": (
        changed((STORED, f"{STORED} * columns.to(tl.float32) / columns.to(tl.float32)")),
        "attribute",
    ),
    "an option that Triton does not have": (changed((LAUNCH, "x.stride(0), BLOCK=256, num_warp=4)")), "num_warp"),
    "three warps": (changed((LAUNCH, "x.stride(0), BLOCK=256, num_warps=3)")), "power of 2"),
    "a list as an argument": (
        changed(("stride, BLOCK", "stride, names, BLOCK"), (LAUNCH, "x.stride(0), [1], BLOCK=256)")),
        "argument of type: list",
    ),
}


@pytest.mark.parametrize("cell, words", ONLY_INTERPRETED.values(), ids=list(ONLY_INTERPRETED))
def test_a_kernel_that_no_gpu_can_run_fails_and_is_told_why(cell, words, monkeypatch):
    verdict = judge(ROWS, cell)
    assert (verdict.outcome, verdict.mistake) == ("failed", "does_not_compile"), verdict
    assert verdict.message.startswith("The numbers are right in the interpreter, but a GPU cannot run the kernel")
    assert "`kernel`" in verdict.message
    assert [case.outcome for case in verdict.cases] == ["passed"] * 3
    monkeypatch.setattr(compiling, "error_message", lambda error, source: ("", str(error), None))
    compiling._said.clear()
    assert re.search(words, judge(ROWS, cell).message)


@pytest.mark.parametrize(
    "launcher, told",
    [
        ("(tl.cdiv(x.shape[0], 1),)", "`triton.cdiv` is meant"),
        ("(same(x.shape[0]),)", "Cannot call"),
        ("(triton.cdiv(x.shape[0], 1),)", ""),
        ("(same.fn(x.shape[0]),)", ""),
    ],
)
def test_a_kernels_function_called_by_a_launcher_raises_as_on_a_gpu(launcher, told):
    helper = "@triton.jit\ndef same(value):\n    return value\n\n\n"
    verdict = judge(ROWS, changed(("(x.shape[0],)]", f"{launcher}]"), (STORED, f"same({STORED})"), before=helper))
    assert verdict.passed == (told == ""), verdict
    assert told in verdict.message


def test_a_refused_answer_is_no_best_answer():
    assert not judge(ROWS, ONLY_INTERPRETED["break"][0]).passed


# ------------------------------------------------------------------------------------------------- what must still pass

INDENTED = "".join(f"    {line}\n" if line else "\n" for line in CELL[: CELL.index("\n\n\ndef")].splitlines()[1:])
ITS_LAUNCHER = CELL[CELL.index("    out = torch") :]
FOLD = "@triton.jit\ndef folded(tile):\n    return tl.sum(tile, axis=0)\n\n\n"
LAUNCHED_AT_ONCE = "\nassert torch.allclose(row_sum(torch.ones(2, 3)), torch.full((2,), 3.0))\n"
RIGHT = {
    "as it is": CELL,
    "in a function": f"{HEAD}\ndef row_sum(x):\n{INDENTED}\n{ITS_LAUNCHER}",
    "in a class": f"{HEAD}\nclass Sums:\n    @staticmethod\n{INDENTED}\n\ndef row_sum(x):\n"
    + ITS_LAUNCHER.replace("kernel[", "Sums.kernel["),
    "in a list": changed(
        ("def row_sum", "KERNELS = [kernel]\ndel kernel\n\n\ndef row_sum"), ("    kernel[", "    KERNELS[0][")
    ),
    "under another name": changed(
        ("def row_sum", "quick, kernel = kernel, None\n\n\ndef row_sum"), ("    kernel[", "    quick[")
    ),
    "autotuned": changed(
        ("@triton.jit", "@triton.autotune([triton.Config({'BLOCK': 128}, num_warps=8)], key=['columns'])\n@triton.jit"),
        (LAUNCH, "x.stride(0))"),
    ),
    "heuristics": changed(
        ("@triton.jit", "@triton.heuristics({'BLOCK': lambda given: 128})\n@triton.jit"), (LAUNCH, "x.stride(0))")
    ),
    "not specialised, so that an argument of 1 is a tensor": changed(
        ("@triton.jit", "@triton.jit(do_not_specialize=['columns'])"),
        (STORED, f"{STORED} * columns.to(tl.float32) / columns.to(tl.float32)"),
    ),
    "a descriptor made by the launcher": changed(
        ("columns, stride, BLOCK", "columns, BLOCK"),
        (
            "tl.load(x + row * stride + start + lanes, mask=start + lanes < columns, other=0.0)",
            "x.load([row, start]).reshape([BLOCK])",
        ),
        (
            "    kernel[",
            "    from triton.tools.tensor_descriptor import TensorDescriptor\n"
            "    x = F.pad(x, (0, 256 - x.shape[1] % 256))\n"
            "    x = TensorDescriptor.from_tensor(x, [1, 256])\n    kernel[",
        ),
        (LAUNCH, "BLOCK=256)"),
    ),
    "None for a tensor": changed(
        ("stride, BLOCK", "stride, bias, BLOCK"),
        (STORE, "    if bias is not None:\n        total += tl.load(bias)\n" + STORE),
        (LAUNCH, "x.stride(0), None, BLOCK=256)"),
    ),
    "a tuple of tensors": changed(
        ("kernel(x, out,", "kernel(both,"),
        ("    row = tl", "    x, out = both\n    row = tl"),
        ("(x, out, x.shape", "((x, out), x.shape"),
    ),
    "a helper": changed((STORED, "folded(total)"), before=FOLD),
    "a helper as a constant": changed(
        ("stride, BLOCK", "stride, FOLD: tl.constexpr, BLOCK"),
        (STORED, "FOLD(total)"),
        (LAUNCH, "x.stride(0), FOLD=folded, BLOCK=256)"),
        before=FOLD,
    ),
    "a dtype as a constant": changed(
        ("stride, BLOCK", "stride, DTYPE: tl.constexpr, BLOCK"),
        ("tl.float32)", "DTYPE)"),
        (LAUNCH, "x.stride(0), DTYPE=tl.float32, BLOCK=256)"),
    ),
    "constants that are global": changed(
        ("[BLOCK]", "[WIDE]"),
        (STORED, f"{STORED} * ONE"),
        before="WIDE: tl.constexpr = tl.constexpr(256)\nONE = tl.constexpr(1)\n",
    ),
    "imports of its own": changed(
        (STORED, "tl.sum(total) * m.floor(1.5)"),
        ("@triton.jit", "@tt.jit"),
        before="import math as m\nimport triton as tt\n",
    ),
    "annotations that are strings": changed(before="from __future__ import annotations\n"),
    "options": changed((LAUNCH, "x.stride(0), BLOCK=256, num_warps=8, num_stages=3, maxnreg=64)")),
    "a cell that tries itself": changed(
        (STORED, f"{STORED} * ONE"), before="ONE = tl.constexpr(1)\n", after=LAUNCHED_AT_ONCE
    ),
    "what it defines after it has tried itself": changed(
        (STORED, f"{STORED} * ONE * TWO / 2"),
        before="ONE = TWO = tl.constexpr(2)\n",
        after=LAUNCHED_AT_ONCE.replace("3.0", "6.0") + "ONE = tl.constexpr(1)\n",
    ),
}
NOT_ASKED = {
    "a helper as an argument": changed(
        ("stride, BLOCK", "stride, fold, BLOCK"),
        (STORED, "fold(total)"),
        (LAUNCH, "x.stride(0), folded, BLOCK=256)"),
        before=FOLD,
    ),
    "a constant that a kernel's result decides": changed(
        (STORED, f"{STORED} * ONE"),
        before="@triton.jit\ndef one(out):\n    tl.store(out, 1.0)\n\n\nresult = torch.zeros(1)\none[(1,)](result)\n"
        "if result[0] == 1:\n    ONE = tl.constexpr(1)\n",
    ),
    "the same in a helper of a helper": changed(
        (STORED, "outer(total)"),
        before="@triton.jit\ndef one(out):\n    tl.store(out, 1.0)\n\n\nresult = torch.zeros(1)\none[(1,)](result)\n"
        "if result[0] == 1:\n    ONE = tl.constexpr(1)\n"
        + FOLD.replace("axis=0)", "axis=0) * ONE")
        + FOLD.replace("folded", "outer").replace("tl.sum(tile, axis=0)", "folded(tile)"),
    ),
    "a named tuple": changed(
        ("kernel(x, out,", "kernel(both,"),
        ("    row = tl", "    x, out = both.given, both.wanted\n    row = tl"),
        ("(x, out, x.shape", "(Both(x, out), x.shape"),
        before="import collections\nBoth = collections.namedtuple('Both', 'given wanted')\n",
    ),
    "a helper in a tuple": changed(
        ("stride, BLOCK", "stride, helpers, BLOCK"),
        (STORED, "helpers[0](total)"),
        (LAUNCH, "x.stride(0), (folded, 1), BLOCK=256)"),
        before=FOLD,
    ),
    "a constant that the launcher sets": changed(
        (STORED, f"{STORED} * ONE"),
        ("    out = torch", "    global ONE\n    ONE = tl.constexpr(1)\n    out = torch"),
        before="ONE = None\n",
    ),
}


@pytest.mark.parametrize("cell", RIGHT.values(), ids=list(RIGHT))
def test_a_right_kernel_passes_and_the_compiler_has_read_it(cell):
    verdict = judge(ROWS, cell)
    assert verdict.passed, verdict
    assert set(said()) == {""}, said()


@pytest.mark.parametrize("cell", NOT_ASKED.values(), ids=list(NOT_ASKED))
def test_what_only_the_launch_knows_is_no_reason_to_refuse(cell):
    verdict = judge(ROWS, cell)
    assert verdict.passed, verdict
    assert not [message for message in said() if message is not None]


TRITON_EXERCISES = [task for task in catalog.exercises().values() if task.needs == TRITON]


@pytest.mark.parametrize("task", TRITON_EXERCISES, ids=[task.id for task in TRITON_EXERCISES])
def test_the_compiler_takes_every_kernel_of_the_courses_own_answer(task):
    verdict = judge(task, catalog.solution_source(task.id), seed=5)
    assert verdict.passed, verdict
    assert set(said()) <= {""}, said()


def test_a_machine_with_a_gpu_never_asks_the_compiler_beforehand(monkeypatch):
    assert compiles_without_gpu(ROWS)
    for tier in ("nvidia", "hopper"):
        monkeypatch.setattr("course_lib.checker.runner.running.machine", lambda tier=tier: SimpleNamespace(tier=tier))
        assert not compiles_without_gpu(ROWS)


def test_exercises_without_a_kernel_never_ask_the_compiler():
    assert not [task.id for task in catalog.exercises().values() if task.needs != TRITON and compiles_without_gpu(task)]


# -------------------------------------------------------------------------------------- when the compiler cannot answer


@pytest.fixture
def of_its_own(monkeypatch):
    """A compiling worker for this test alone, started with a meter in which one text is changed."""

    def start(name="__init__.py", before="", after=""):
        folder = Path(os.environ["COURSE_HOME"]) / "another course"
        meter = folder / "course_lib" / "hardware" / "meter" / "traffic"
        shutil.rmtree(meter, ignore_errors=True)
        shutil.copytree(Path(traffic.__file__).parent, meter, ignore=shutil.ignore_patterns("__pycache__"))
        source = (meter / name).read_text()
        assert not before or source.count(before) == 1
        (meter / name).write_text(source.replace(before, after))
        monkeypatch.setattr(workers, "ROOT", folder)
        monkeypatch.setitem(workers._workers, False, workers.Worker(interpreted=False))
        workers.worker(False).wait_until_ready()

    yield start
    if False in workers._workers:
        workers._workers[False].stop()


BROKEN = ONLY_INTERPRETED["break"][0]


def test_a_triton_whose_front_end_is_unknown_refuses_nothing_and_says_nothing(of_its_own, capfd):
    of_its_own("triton_internals/compiled.py", "source.make_ir(", "source.made_in_another_way(")
    verdict = judge(ROWS, BROKEN)
    assert verdict.passed, verdict
    assert said() and set(said()) == {None}
    assert capfd.readouterr() == ("", "")


def test_a_front_end_that_takes_everything_is_unknown(of_its_own):
    of_its_own("front_end.py", "    first = None\n", "    return None\n")
    assert judge(ROWS, BROKEN).passed
    assert set(said()) == {None}


def test_the_same_worker_with_the_module_as_it_is_refuses(of_its_own):
    of_its_own()
    assert judge(ROWS, BROKEN).mistake == "does_not_compile"


class _Answering:
    def __init__(self, *frames, **ending):
        self.frames, self.ending = frames, ending

    def run(self, job, limits, seconds):
        if "dies" in self.ending:
            raise self.ending["dies"]
        return Ending(frames=list(self.frames), **self.ending)


DONE = {"kind": "done"}
REFUSED = {
    "kind": "compiled",
    "taken": [],
    "refused": 0,
    "error": {"type": "CompilationError", "text": "no", "line": 2},
}


@pytest.mark.parametrize(
    "compiler",
    [
        _Answering(dies=WorkerDied("it was killed")),
        _Answering(dies=OSError("no process")),
        _Answering(),
        _Answering(DONE),
        _Answering(REFUSED),
        _Answering(REFUSED, DONE, forged="a malformed frame"),
        _Answering(REFUSED, REFUSED, DONE),
        _Answering({"kind": "harness_error", "text": "x"}, DONE),
        _Answering({**REFUSED, "refused": 99}, DONE),
        _Answering({**REFUSED, "refused": -1}, DONE),
        _Answering({**REFUSED, "refused": True}, DONE),
        _Answering({**REFUSED, "refused": "0"}, DONE),
        _Answering({**REFUSED, "refused": None, "taken": [[], "x", 10**30]}, DONE),
        _Answering({**REFUSED, "refused": None, "taken": {}}, DONE),
        _Answering({"kind": "compiled"}, DONE),
        _Answering(timeout=True),
    ],
)
def test_a_compiling_process_that_fails_costs_no_verdict(compiler, monkeypatch):
    monkeypatch.setattr(compiling, "worker", lambda interpreted: compiler)
    verdict = judge(ROWS, CELL)
    assert verdict.passed, verdict


@pytest.mark.parametrize("error", [None, 7, {}, {"type": 3, "text": [1], "line": "x"}, {"line": 10**40}, {"outer": {}}])
def test_an_error_of_another_form_is_a_refusal_with_few_words(error, monkeypatch):
    monkeypatch.setattr(compiling, "worker", lambda interpreted: _Answering({**REFUSED, "error": error}, DONE))
    assert judge(ROWS, CELL).mistake == "does_not_compile"


# ---------------------------------------------------------------------------------------------- answers that fight back

NATIVE = "import os, sys, time, signal\nif os.environ.get('TRITON_INTERPRET') != '1':\n    "
HARNESS = (
    "frame = sys._getframe()\n"
    "    while type(frame.f_locals.get('self')).__name__ != 'Child': frame = frame.f_back\n"
    "    child = frame.f_locals['self']\n    "
)


@pytest.mark.parametrize(
    "deed",
    [
        "raise RuntimeError('here too')",
        "sys.exit()",
        "os._exit(0)",
        "os.kill(os.getpid(), signal.SIGSEGV)",
        "os.kill(os.getppid(), signal.SIGKILL)",
        "time.sleep(600)",
        "while True: pass",
        "[os.fork() for _ in range(5)]",
        "os.fork() or time.sleep(600)",
        "kept = [bytearray(1 << 26) for _ in range(1000)]",
        "print('x' * (1 << 22))",
        "del triton, tl",
        "triton.jit = None",
        "sys.modules['triton'] = sys.modules['ast'] = None",
        "import builtins; builtins.isinstance = lambda *a: True",
        "sys.setrecursionlimit(30)",
        HARNESS + "os.write(child.pipe, b'\\0' * 8)",
        HARNESS + "os.write(child.pipe, os.urandom(1 << 12))",
        HARNESS + "child.send({'kind': 'done'})",
        HARNESS + "child.send({'kind': 'compiled', 'taken': [0, 1, 2], 'refused': None})",
        HARNESS
        + "child.send({'kind': 'compiled', 'taken': 7, 'refused': {}, 'error': []}); child.send({'kind': 'done'})",
        HARNESS + "child.send = None",
        HARNESS + "child.traffic.refusal = lambda *a: ValueError('nothing')",
    ],
)
@pytest.mark.parametrize("cell", [CELL, BROKEN], ids=["right", "broken"])
def test_a_second_run_that_fights_ends_soon_and_breaks_nothing(deed, cell, monkeypatch):
    monkeypatch.setattr(compiling, "LIMIT_SECONDS", 1.5)
    started = time.monotonic()
    verdict = judge(ROWS, f"{NATIVE}{deed}\n{cell}")
    assert verdict.passed or verdict.mistake == "does_not_compile", verdict
    assert time.monotonic() - started < 30
    compiling._said.clear()
    assert judge(ROWS, CELL).passed and set(said()) == {""}, "the next answer is compiled as ever"


@pytest.mark.parametrize(
    "variants",
    [
        "[1, None, {}, {'kernel': 1}]",
        "[{1: 2, 'kernel': 'k', 'line': 1, 'signature': {}, 'constants': [], 'options': {}}]",
        "[{'kernel': '<b>', 'line': 1, 'signature': {}, 'constants': [], 'options': {}, 'unbound': 'x'}]",
        "[{'kernel': 'kernel', 'line': 2, 'signature': {'x': 7}, 'constants': [1, [2], ((), ())], 'options': {}}]",
        "[{'kernel': 'kernel', 'line': 10 ** 30, 'signature': {(): x}, 'constants': [x] * 9, 'options': {x: x}}]",
        "[{'kernel': 'k', 'line': 1, 'signature': {}, 'constants': [], 'options': {}}] * 3_000",
        "{}",
    ],
)
def test_forged_launches_cost_the_judge_nothing(variants):
    forging = (
        "def row_sum(x):\n    import sys\n    frame = sys._getframe()\n"
        "    while type(frame.f_locals.get('self')).__name__ != 'Child': frame = frame.f_back\n"
        "    child = frame.f_locals['self']\n    send = child.send\n"
        "    child.send = lambda frame: send(\n"
        f"        {{**frame, 'variants': {variants}}} if frame['kind'] == 'case' else frame)\n"
    )
    verdict = judge(ROWS, CELL.replace("def row_sum(x):\n", forging))
    assert verdict.passed or verdict.outcome == "crashed" and "message that is none" in verdict.message, verdict


# ----------------------------------------------------------------------------------------------------- what it may cost


def test_the_same_source_is_compiled_once(monkeypatch):
    asked = []
    compile_ = compiling._compile
    monkeypatch.setattr(compiling, "_compile", lambda *given: asked.append(len(given[2])) or compile_(*given))
    for source, seed in ((CELL, 1), (CELL, 1), (BROKEN, 1), (BROKEN, 1), (CELL, 2)):
        judge(ROWS, source, seed=seed)
    assert len(asked) == 2, "once for each source"
    assert judge(ROWS, BROKEN).mistake == "does_not_compile"


def test_many_kernels_are_compiled_up_to_a_bound_and_each_of_them_once():
    one = "    kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), BLOCK=256)\n"
    second = BROKEN[BROKEN.index("@triton.jit") : BROKEN.index("def row_sum")].replace("def kernel", "def second")
    cell = changed(
        (
            one,
            "    for block in (16, 32, 64, 128, 256, 512, 1024, 2048):\n        for warps in (1, 2, 4, 8):\n"
            "            kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), BLOCK=block, num_warps=warps)\n",
        ),
    )
    started = time.monotonic()
    assert judge(ROWS, cell, seed=1).passed
    assert said() == [""] * compiling.MOST_VARIANTS
    assert time.monotonic() - started < 20
    verdict = judge(ROWS, second + cell.replace("    return out", one.replace("kernel", "second") + "    return out"))
    assert verdict.mistake == "does_not_compile" and "`second`" in verdict.message
