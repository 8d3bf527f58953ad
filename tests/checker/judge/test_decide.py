"""What the judge says of right, wrong and hostile answers."""

import gc
from dataclasses import replace

import pytest
import torch

from course_lib.checker import HOPPER, Case, Exercise, Mistake, Slip
from course_lib.checker.judge import evaluate
from course_lib.checker.judge.decide import judge
from course_lib.checker.judge.outcome import Outcome
from course_lib.hardware.device import machine
from tests.checker.samples import ADD, ADD_CELL, APPEND, COUNTER, DOUBLE, ENDLESS, HALF, QUICK, TWO


def changed(cell, old, new):
    assert old in cell
    return cell.replace(old, new)


def test_a_right_kernel_passes_and_its_bytes_are_told():
    verdict = judge(ADD, ADD_CELL)
    assert verdict.passed, verdict
    assert "12,300 bytes" in verdict.message


def test_what_was_compared_is_gone_when_memory_is_given_back(monkeypatch):
    """On a GPU it lies there: a judge that still held it kept 1.6 GB from the learner's next kernel."""

    def outcomes():
        return sum(isinstance(thing, Outcome) for thing in gc.get_objects())

    left = []
    monkeypatch.setattr(evaluate, "release", lambda: left.append(outcomes()))
    before = outcomes()
    assert judge(DOUBLE, "def double(x): return 2 * x\n").passed
    assert left == [before]


@pytest.mark.parametrize(
    "old, new, mistake",
    [
        ("mask=mask) + tl.load", "mask=mask) - tl.load", "subtracts"),
        ("tl.store(out + i, total,", "tl.store(out + i, total + 1,", "adds_one"),
        (
            "mask=mask)\n    tl.store(out + i, total, mask=mask)",
            "mask=mask)\n    tl.store(out + i, total)",
            "tail_not_masked",
        ),
    ],
)
def test_a_known_mistake_is_named(old, new, mistake):
    assert judge(ADD, changed(ADD_CELL, old, new)).mistake == mistake


def test_an_unknown_mistake_is_located_but_not_named():
    verdict = judge(ADD, changed(ADD_CELL, "triton.cdiv(x.numel(), 512)", "1"))
    assert verdict.outcome == "failed"
    assert "index 512" in verdict.message and "never written" in verdict.message
    assert verdict.mistake == "unwritten_memory" and "<svg" in verdict.picture


def test_ignoring_strides_is_caught_by_the_gaps():
    verdict = judge(ADD, changed(ADD_CELL, "x + i * x_stride", "x + i"))
    assert verdict.outcome == "failed"
    assert [case.outcome for case in verdict.cases] == ["passed"] * 4 + ["failed"]


def test_integers_are_compared_exactly_and_their_mistakes_named():
    slots = replace(
        DOUBLE,
        cases=lambda draw: [Case("int64", (draw.integers(20, low=1, high=1 << 40),))],
        oracle=lambda x: 2 * x,
        slips=(Slip("squares", "You square.", formula=lambda x: x * x),),
    )
    name = DOUBLE.entries[0]
    assert judge(slots, f"def {name}(x):\n    return x + x\n").passed
    verdict = judge(slots, f"def {name}(x):\n    return 2 * x + (x == x[3])\n")
    assert verdict.outcome == "failed" and "1 of 20 elements is wrong" in verdict.message, verdict
    assert judge(slots, f"def {name}(x):\n    return x ** 2\n").mistake == "squares"


@pytest.mark.parametrize(
    "body, words",
    [
        ("2.15966", "got 2.15966, a float; expected is the integer 3"),
        ("torch.tensor(2.15966)", "got 2.15966, a float; expected is the integer 3"),
        ("4", "got 4, expected 3"),
        ("4.0", "got 4, expected 3"),
        ("3.0", None),
    ],
)
def test_a_float_where_an_integer_is_asked_is_told(body, words):
    """Of 2.15966 where 3 is right it looked as though another number would do."""
    count = Exercise(
        id="90.9",
        title="Count",
        entries=("count",),
        limits=QUICK,
        oracle=lambda x: x.numel(),
        cases=lambda draw: [Case("three elements", (draw.normal(3),))],
    )
    verdict = judge(count, f"def count(x):\n    return {body}\n")
    assert verdict.passed if words is None else words in verdict.message, verdict


def test_two_fingerprints_that_agree_name_nothing():
    twins = replace(
        DOUBLE,
        slips=(
            Slip("zero", "You return zeros.", formula=torch.zeros_like),
            Slip("cancels", "The terms cancel.", formula=lambda x: x - x),
        ),
    )
    verdict = judge(twins, "def double(x):\n    return 0 * x\n")
    assert verdict.outcome == "failed" and verdict.mistake is None


def test_half_of_a_run_proves_no_mistake():
    """A kernel that raised has launched nothing yet; that is no sign of the mistake that launches nothing."""
    lazy = Mistake("launches_nothing", "No kernel.", when=lambda case, seen, got: not seen.launches)
    division = Mistake(
        "by_zero",
        "You divide.",
        when=lambda case, seen, got: bool(seen.error) and seen.error.type == "ZeroDivisionError",
    )
    verdict = judge(replace(ADD, mistakes=(lazy, division)), "def add(x, y):\n    raise KeyError(1 / 1)\n")
    assert verdict.outcome == "error" and verdict.mistake is None
    assert judge(replace(ADD, mistakes=(lazy, division)), "def add(x, y):\n    return 1 / 0\n").mistake == "by_zero"


def test_a_constant_factor_is_found():
    verdict = judge(ADD, changed(ADD_CELL, "tl.store(out + i, total,", "tl.store(out + i, total * 3.7,"))
    assert verdict.outcome == "failed" and verdict.mistake is None
    assert "3.7 times" in verdict.message


def test_out_of_bounds_names_tensor_line_and_program():
    verdict = judge(ADD, changed(ADD_CELL, "tl.load(y + i * y_stride, mask=mask)", "tl.load(y + i * y_stride)"))
    assert "line 6" in verdict.message and "reads y outside its 1 elements" in verdict.message


@pytest.mark.parametrize(
    "cell, mistake",
    [
        ("def add(x, y):\n    return torch.cat([x[None], y[None]]).sum(0)\n", "no_kernel_launched"),
        (
            changed(ADD_CELL, "    return out", "    kernel[(1,)](x, y, out, 1, 1, 1, BLOCK=512)\n    return out"),
            "no_kernel_launched",
        ),
    ],
)
def test_the_kernel_must_do_the_work(cell, mistake):
    verdict = judge(ADD, cell)
    assert verdict.outcome == "failed" and verdict.mistake == mistake


def test_reading_twice_is_too_many_bytes():
    twice = changed(ADD_CELL, "    tl.store(", "    total += 0 * tl.load(x + i * x_stride, mask=mask)\n    tl.store(")
    verdict = judge(ADD, twice)
    assert verdict.mistake == "too_many_bytes" and "1.33 times" in verdict.message


def test_a_forbidden_operation_is_named():
    verdict = judge(ADD, changed(ADD_CELL, "    return out", "    return torch.add(x, y) if False else out + 0"))
    assert verdict.mistake == "forbidden_operation" and "`add`" in verdict.message


def test_a_tensor_that_is_too_large_is_refused():
    assert judge(DOUBLE, "def double(x):\n    return 2 * x\n").passed
    verdict = judge(
        DOUBLE, "def double(x):\n    return (torch.ones(x.numel(), 2) @ torch.ones(2, 2))[:, 0].view(x.shape) * x\n"
    )
    assert verdict.mistake == "too_much_memory"


def test_changing_an_input_is_refused():
    verdict = judge(DOUBLE, "def double(x):\n    x *= 2\n    return x.clone()\n")
    assert verdict.mistake == "modified_input" and "`x`" in verdict.message


def test_an_argument_that_may_be_written_is_judged():
    assert judge(APPEND, "def append(cache, row, position):\n    cache[position] = row\n").passed
    wrong = judge(APPEND, "def append(cache, row, position):\n    cache[position + 1] = row\n")
    assert wrong.mistake == "one_too_far"


def test_classes_are_driven():
    cell = "class Counter:\n    n = 0\n    def step(self):\n        self.n += 1\n        return self.n\n"
    assert judge(COUNTER, cell).passed
    assert judge(COUNTER, cell.replace("+= 1", "+= 2")).outcome == "failed"


def test_several_functions_have_their_own_oracles_and_names():
    cell = "def work(n): return 2 * n ** 3\ndef moved(n): return 12 * n * n\n"
    assert judge(TWO, cell, names={"flops": "work", "moved": "moved"}).passed
    assert judge(TWO, cell).mistake == "missing_name"
    assert "got 1,024, expected 768" in judge(TWO, cell.replace("12", "16"), names={"flops": "work"}).message


TWO_RIGHT = "def flops(n): return 2 * n**3\ndef moved(n): return 12 * n**2\n"


@pytest.mark.parametrize(
    "exercise, cell",
    [
        (TWO, TWO_RIGHT + 'flops, moved = check("90.5", flops, moved).best\n'),
        (TWO, TWO_RIGHT + 'flops, moved = check("90.5").best\nassert flops(1) == 2\n'),
        (TWO, TWO_RIGHT + 'check("90.5", flops, moved, seed=3).show()\n'),
        (DOUBLE, 'def double(x): return x + x\ndouble = check("90.2", double).best\n'),
        (DOUBLE, 'def double(x): return x + x\nbest = check("90.2").best\nassert best(1) == 2\n'),
        (DOUBLE, 'earlier = check("90.1").best\ndef double(x): return x + x\nearlier(1, 2)\n'),
    ],
)
def test_a_check_in_the_answers_own_cell_gives_the_answer_back(exercise, cell):
    """Two functions could not be unpacked ("cannot unpack non-iterable _Silent object"), and one was lost."""
    verdict = judge(exercise, cell)
    assert verdict.passed, verdict


def test_half_precision_is_judged_by_its_own_rounding():
    assert judge(HALF, "def row_sum(x):\n    return x.float().sum(-1).half()\n").passed
    assert judge(HALF, "def row_sum(x):\n    return x.sum(-1)\n").passed
    assert judge(HALF, "def row_sum(x):\n    return x[:, :-1].sum(-1)\n").outcome == "failed"
    assert "dtype" in judge(HALF, "def row_sum(x):\n    return x.float().sum(-1)\n").message


@pytest.mark.parametrize(
    "cell, outcome, words",
    [
        ("def double(x):\n    while True: pass\n", "timeout", "at line 2: `while True: pass`."),
        ("import time\ndef double(x):\n    time.sleep(9)\n", "timeout", "It was at line 3: `time.sleep(9)`."),
        ("import time\ntime.sleep(9)\ndef double(x): return x\n", "timeout", "while the cell itself ran; it was"),
        (
            "import signal\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)\ndef double(x):\n    while True: pass\n",
            "timeout",
            "Still running after 2 s, in case “seven elements”; it was stopped. Either a loop",
        ),
        (
            "import os\nfor fd in range(3, 40):\n"
            "    try: os.pwrite(fd, b'  File \"/exercise_1.py\", line 77' * 99, 0)\n"
            "    except OSError: pass\ndef double(x):\n    while True: pass\n",
            "timeout",
            "Still running after 2 s",
        ),
        ("def double(x):\n    exit()\n", "error", "called exit() (line 2"),
        ("import os\ndef double(x):\n    os._exit(3)\n", "crashed", "status 3"),
        ("import ctypes\ndef double(x):\n    ctypes.string_at(0)\n", "crashed", "SIGSEGV"),
        ("import os, signal\ndef double(x):\n    os.kill(os.getpid(), signal.SIGKILL)\n", "crashed", "SIGKILL"),
        ("def double(x):\n    while True: print('x' * 100000)\n", "error", "printed more than 1 MB"),
        (
            "def double(x):\n    held = []\n    while True: held.append(torch.ones(1 << 26))\n",
            "error",
            "ran out of memory",
        ),
        ("def double(x):\n    return bytearray(1 << 40)\n", "error", "ran out of memory"),
        (
            "torch.allclose = torch.equal = lambda *a, **k: True\ndef double(x):\n    return x.clone()\n",
            "failed",
            "0.5 times",
        ),
        ("def double(x):\n    return x * FACTOR\n", "error", "`FACTOR` is not defined in this cell"),
        ("def double(x):\n  return )\n", "error", "SyntaxError (line 2"),
        ("raise KeyError('at once')\ndef double(x): return x\n", "error", "The cell itself failed. KeyError (line 1"),
        (
            "from course_lib.kernels.memory.vector_add import vector_add\ndef double(x): return vector_add(x, x)\n",
            "error",
            "stand alone",
        ),
        ("import exercises.topics.decode\ndef double(x): return 2 * x\n", "error", "No module named 'exercises'"),
        ("def triple(x): return x\n", "error", "does not define `double`"),
        ("double = 7\n", "error", "is not a function"),
        ("def double(x):\n    print(2 * x)\n", "failed", "returned None"),
        ("def double(x):\n    return (2 * x)[None]\n", "failed", "the shape is [1, 7]; expected is [7]"),
        ("def double(x):\n    return object()\n", "error", "a value of type object"),
        ("def double(x):\n    return input()\n", "error", "no one to answer"),
        (
            "def double(x):\n    if x.dim() == 1: return 2 * x\n    raise NotImplementedError('Exercise 90.2')\n",
            "failed",
            "still to be written",
        ),
        (
            "import threading\nthreading.Timer(99, print).start()\ndef double(x): return 2 * x\n",
            "passed",
            "",
        ),
    ],
)
def test_each_kind_of_bad_answer_has_its_outcome_and_the_next_check_works(cell, outcome, words):
    verdict = judge(replace(DOUBLE, limits=ENDLESS) if outcome == "timeout" else DOUBLE, cell)
    assert verdict.outcome == outcome, verdict
    assert words in str(verdict)
    assert judge(DOUBLE, "def double(x):\n    return x + x\n").passed


@pytest.mark.parametrize(
    "cell",
    [
        "",
        "# Exercise 90.2 · Double\n",
        "def double(x):\n    pass\n",
        "def double(x):\n    '''Twice.'''\n    ...\n",
        "def double(x):\n    # YOUR CODE HERE\n    raise NotImplementedError('Exercise 90.2')\n",
        "import torch\n\ndef helper(x): return x\n\ndef double(x):\n    raise NotImplementedError\n",
    ],
)
def test_an_untouched_answer_is_not_attempted_rather_than_wrong(cell):
    assert judge(DOUBLE, cell).outcome == "not_attempted"


@pytest.mark.parametrize(
    "cell",
    [
        "double = lambda x: 2 * x\n",
        "%matplotlib inline\n!ls\ndef double(x):\n    return x + x\n",
        "def helper(x):\n    return x\n\n\ndef double(x):\n    return helper(x) + helper(x)\n",
        "from functools import partial\ndouble = partial(torch.mul, 2)\n",
        "def double(x):\n    return x + x\n\n\nprint(double(torch.ones(2)))\ncheck('90.2', double)\nhint('90.2')\n",
        "class double:\n    def __new__(cls, x):\n        return 2 * x\n",
    ],
)
def test_a_right_answer_written_in_another_way_passes(cell):
    assert judge(DOUBLE, cell).passed


def test_a_seed_repeats_the_inputs():
    cell = "def double(x):\n    return 2 * x + (x.sum() > 0)\n"
    first, second = judge(DOUBLE, cell, seed=5), judge(DOUBLE, cell, seed=5)
    assert [case.detail for case in first.cases] == [case.detail for case in second.cases]
    assert len({judge(DOUBLE, cell).seed for _ in range(3)}) == 3


def test_a_triton_exercise_without_its_hardware_is_unsupported():
    if machine().compute_capability == (9, 0):
        pytest.skip("this machine is a Hopper")
    assert judge(replace(ADD, needs=HOPPER), ADD_CELL).outcome == "unsupported"


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("[(triton.cdiv(x.numel(), 512),)]", "[triton.cdiv(x.numel(), 512)]", "must be a tuple"),
        ("@triton.jit\n", "", "@triton.jit"),
        ("kernel[(triton.cdiv(x.numel(), 512),)](", "kernel(", "launched with a grid"),
        ("triton.cdiv(x.numel(), 512)", "x.numel() / 512 + 1", "whole number"),
        ("    mask = i < length", "    breakpoint()\n    mask = i < length", "`breakpoint()` waits"),
        (
            "tl.load(x + i * x_stride",
            "tl.load(x_pointer + i * x_stride",
            "no parameter of the kernel `kernel`, which has `x`",
        ),
    ],
)
def test_a_beginners_slip_is_put_in_words(old, new, words):
    verdict = judge(ADD, changed(ADD_CELL, old, new))
    assert verdict.outcome == "error" and words in verdict.message, verdict


def test_an_error_inside_a_kernel_names_the_kernels_line():
    verdict = judge(ADD, changed(ADD_CELL, "tl.arange(0, BLOCK)", "tl.arrange(0, BLOCK)"))
    assert "line 4 of the cell" in verdict.message, verdict


def test_a_sum_that_cancels_may_err_by_the_size_of_its_terms():
    """A plain implementation that is exact by luck must not make every other order of adding wrong."""

    def cases(draw):
        x = draw.normal(8, scale=1000.0)
        return [Case("its terms cancel", (torch.cat([x, -x.flip(0), draw.normal(1, scale=1e-3)]),))]

    task = replace(DOUBLE, entries=("total",), cases=cases, oracle=lambda x: x.sum(), requirements=())
    sequential = (
        "def total(x):\n    result = x[0]\n    for value in x[1:]: result = result + value\n    return result\n"
    )
    assert all(judge(task, sequential, seed=seed).passed for seed in range(10))
    assert judge(task, "def total(x):\n    return x[1:].sum()\n").outcome == "failed"
