"""Answers that remember: what is kept by shape, address or identity is no answer to other numbers."""

from dataclasses import replace

import pytest
import torch

from course_lib.checker import Case, Exercise, NewTensors
from course_lib.checker.judge.decide import judge
from course_lib.checker.runner import running
from course_lib.checker.specification.draw import Draw
from tests.checker.samples import ADD, ADD_CELL, APPEND, COUNTER, DOUBLE, QUICK, TWO

KEPT = (
    "kept = {}\n"
    "def {function}({arguments}):\n"
    "    key = {key}\n"
    "    if key not in kept:\n        kept[key] = work({arguments})\n"
    "    return kept[key]\n"
)
KEYS = {
    "shape": "tuple(x.shape)",
    "shape and strides": "(x.shape, x.stride())",
    "address": "x.data_ptr()",
    "identity": "id(x)",
    "shape and the first address": "(tuple(x.shape), x.data_ptr())",
}


def keeping(key, function, arguments, work):
    cell = KEPT.replace("{key}", key).replace("{function}", function).replace("{arguments}", arguments)
    return cell + work.replace(f"def {function}", "def work")


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("kernel", [False, True])
def test_a_result_kept_from_an_earlier_call_is_found(key, kernel):
    """Every case has another shape and memory of its own, so that such answers passed."""
    if kernel:
        verdict = judge(ADD, keeping(key, "add", "x, y", ADD_CELL))
    else:
        verdict = judge(DOUBLE, keeping(key, "double", "x", "def double(x):\n    return x + x\n"))
    assert verdict.outcome == "failed", verdict
    if "shape" in key:  # an address that was freed may be the next case's, whose result is then of another shape
        assert verdict.mistake == "kept_result" and "kept from call to call" in verdict.diagnosis, verdict


@pytest.mark.parametrize(
    "body",
    [
        "    if x.shape not in sums: sums[x.shape] = torch.zeros_like(x)\n    sums[x.shape] += 2 * x\n"
        "    return sums[x.shape].clone()\n",
        "    sums[0] = sums.get(0, 0) + 1\n    return 2 * x if sums[0] < 4 else 3 * x\n",
    ],
    ids=["a buffer that is not set back", "a counter"],
)
def test_a_state_that_is_never_set_back_is_found(body):
    verdict = judge(replace(DOUBLE, requirements=()), "sums = {}\ndef double(x):\n" + body)
    assert verdict.mistake == "kept_result", verdict


RIGHT = {
    "a buffer by shape that is not given out": "    y = torch.mul(x, 2, out=out.setdefault(x.shape, x.clone()))\n"
    "    return y.clone()\n",
    "a factor by shape": "    return x * out.setdefault(x.shape, torch.tensor(2.0))\n",
}


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_what_may_be_kept_is_no_fault(body):
    verdict = judge(replace(DOUBLE, requirements=()), "out = {}\ndef double(x):\n" + body)
    assert verdict.passed, verdict


@pytest.mark.parametrize("change", ["x.t_()", "x.resize_(1)", "x.unsqueeze_(0)", "x.set_(3 * x)"])
def test_an_argument_that_becomes_another_tensor_was_changed(change):
    """Its elements may all be there; whoever handed it in has something else in hand."""
    verdict = judge(replace(DOUBLE, requirements=()), f"def double(x):\n    y = 2 * x\n    {change}\n    return y\n")
    assert verdict.mistake == "modified_input" and "`x` was changed" in verdict.message, verdict


def test_a_kept_result_that_is_written_in_place_is_found():
    cell = (
        "kept = {}\ndef append(cache, row, position):\n    cache[position] = kept.setdefault(row.shape, row.clone())\n"
    )
    many = replace(APPEND, cases=lambda draw: [Case("one", (running.InOut(draw.normal(6, 4)), draw.normal(4), 3))])
    assert judge(many, cell).mistake == "kept_result"
    assert judge(many, cell.replace("kept.setdefault(row.shape, row.clone())", "row")).passed


def test_an_error_of_a_later_call_is_told_of_its_case():
    cell = "n = []\ndef double(x):\n    n.append(0)\n    if len(n) == 4: raise ValueError('4')\n    return x + x\n"
    verdict = judge(DOUBLE, cell)
    assert verdict.outcome == "error" and "In case “a matrix”: ValueError" in verdict.message, verdict
    assert len(verdict.cases) == 2


def test_a_later_call_that_does_not_end_is_told_of_its_case():
    cell = "n = []\ndef double(x):\n    n.append(0)\n    while len(n) == 3: pass\n    return x + x\n"
    verdict = judge(replace(DOUBLE, limits=replace(QUICK, seconds=1.0)), cell)
    assert verdict.outcome == "timeout" and "in case “a matrix”" in verdict.message, verdict


def test_a_wrong_answer_is_not_called_a_kept_one():
    assert judge(DOUBLE, "def double(x):\n    return 3 * x\n").mistake is None


def test_later_calls_are_of_each_functions_smallest_case_that_tells_anything():
    run = running.run_cases(ADD, ADD_CELL, {"add": "add"}, seed=1)[0]
    assert [(run.cases[later.of].name, later.in_its_memory) for later in run.later] == [
        ("every second element of x", True),
        ("every second element of x", True),
        ("every second element of x", False),
    ]
    one, other, same = run.later
    assert not torch.equal(one.case.args[0], same.case.args[0]) and torch.equal(one.case.args[1], same.case.args[1])
    assert other.case.args[0].shape == same.case.args[0].shape
    assert not torch.equal(other.case.args[0], same.case.args[0])
    assert same.case.args == run.cases[same.of].args and not same.case.metered


@pytest.mark.parametrize("task, cell", [(TWO, "def flops(n): return 2 * n**3\ndef moved(n): return 12 * n**2\n")])
def test_plain_numbers_are_asked_once(task, cell):
    assert not running.run_cases(task, cell, {name: name for name in task.entries}, seed=1)[0].later
    counter = "class Counter:\n    n = 0\n    def step(self):\n        self.n += 1\n        return self.n\n"
    assert judge(task, cell).passed and judge(COUNTER, counter).passed


def test_a_draw_with_other_values_has_the_same_shapes_and_integers():
    def drawn(draw):
        shape = draw.integer(1, 99), draw.choice((2, 3, 5))
        return shape, draw.normal(*shape), draw.integers(4, low=0, high=9), draw.uniform(3), draw.permutation(7)

    first, other = drawn(Draw(3)), drawn(Draw(3, values=4))
    assert first[0] == other[0] and torch.equal(first[2], other[2]) and torch.equal(first[4], other[4])
    assert not torch.equal(first[1], other[1]) and not torch.equal(first[3], other[3])


def test_a_strided_input_gets_other_numbers_with_its_gaps():
    task = Exercise(
        id="90.7",
        title="Rows",
        entries=("rows",),
        limits=QUICK,
        oracle=lambda x: x.sum(-1),
        cases=lambda draw: [Case("with gaps", (draw.spread_out(draw.normal(4, 8)),))],
    )
    assert judge(task, "def rows(x):\n    assert not x.is_contiguous()\n    return x.sum(-1)\n").passed
    wrong = "kept = []\ndef rows(x):\n    kept.append(x.sum(-1))\n    return kept[0]\n"
    assert judge(task, wrong).mistake == "kept_result"


def test_a_result_that_a_later_call_overwrites_is_found():
    """One buffer for each shape, given out by each call: right numbers, until the next call."""
    cell = "out = {}\ndef double(x):\n    return torch.mul(x, 2, out=out.setdefault(x.shape, torch.empty_like(x)))\n"
    verdict = judge(replace(DOUBLE, requirements=()), cell)
    assert verdict.mistake == "earlier_result_changed", verdict
    assert "both calls gave out the same memory" in verdict.message


def test_a_result_that_the_next_call_with_the_same_memory_overwrites_is_found():
    """A buffer for each address: the further call in new memory got another, and the first one stayed as it was."""
    cell = (
        "out = {}\ndef double(x):\n"
        "    return torch.mul(x, 2, out=out.setdefault((x.data_ptr(), x.shape), torch.empty_like(x)))\n"
    )
    assert judge(replace(DOUBLE, requirements=()), cell).mistake == "earlier_result_changed"


def test_an_argument_that_is_there_to_be_written_may_be_returned_again():
    task = replace(APPEND, oracle=_appended_and_returned)
    cell = "def append(cache, row, position):\n    cache[position] = row\n    return cache\n"
    assert judge(task, cell).passed


def _appended_and_returned(cache, row, position):
    cache[position] = row
    return cache


PAIR = Exercise(
    id="90.10",
    title="The larger",
    entries=("larger",),
    limits=QUICK,
    oracle=torch.maximum,
    cases=lambda draw: [
        Case("4", (draw.normal(4), draw.normal(4))),
        Case("4, the second lower", (draw.normal(4), draw.normal(4, shift=-90.0))),
    ],
)
LARGER = "def larger(x, y):\n    return {} if (x > y).all() else torch.maximum(x, y)\n"


@pytest.mark.parametrize("given", ["x", "x[:]", "x.view(2, 2).flatten()"])
def test_an_argument_handed_back_is_told_where_new_tensors_are_promised(given):
    promised = replace(PAIR, requirements=(NewTensors(),))
    verdict = judge(promised, LARGER.format(given))
    assert verdict.mistake == "argument_returned" and "`x`" in verdict.message, verdict
    assert judge(promised, LARGER.format(f"{given}.clone()")).passed
    assert judge(PAIR, LARGER.format(given)).passed  # what is not promised is not asked


def test_what_was_kept_of_memory_without_effect_shows_in_another_case():
    """The smallest case's memory had no say in its result: an empty cache is as good as what was kept of it."""

    task = Exercise(
        "90.9",
        "Mean of a cache",
        ("mean",),
        lambda draw: [Case(f"{n} of 3 · {n}", (draw.normal(3 * n, 4), n - 1)) for n in (1, 2)],
        lambda cache, length: cache[:length].sum(0),
        limits=QUICK,
    )
    cell = (
        "kept = {}\ndef mean(cache, length):\n    return kept.setdefault(cache.shape, cache.clone())[:length].sum(0)\n"
    )
    assert judge(task, cell).mistake == "kept_result"


HALVES = Exercise(
    id="90.8",
    title="Halves",
    entries=("halves",),
    limits=QUICK,
    oracle=lambda x: x / 2,
    cases=lambda draw: [Case("a vector", (draw.normal(40),))],
)


def test_what_is_wrong_for_other_numbers_in_any_process_is_not_called_kept():
    """Some numbers are right by luck: a rounding that falls well, an overflow that does not come."""
    (numbers,) = HALVES.drawn(Draw(5))[0].args
    lucky = f"def halves(x):\n    return x / 2 if x[0].item() == {numbers[0].item()!r} else x / 3\n"
    verdict = judge(HALVES, lucky, seed=5)
    assert verdict.outcome == "failed" and verdict.mistake is None, verdict


def test_inputs_that_belong_together_get_other_numbers_at_once():
    """A maximum of other numbers is no input that a docstring allows."""

    def drawn(draw):
        x = draw.normal(3, 100)
        return [Case("rows", (x, x.amax(-1)))]

    task = replace(HALVES, cases=drawn, oracle=lambda x, top: torch.exp(x - top[:, None]), inputs_belong_together=True)
    cell = "def halves(x, top):\n    assert bool((x <= top[:, None]).all())\n    return torch.exp(x - top[:, None])\n"
    assert judge(task, cell).passed
    first, last = cell.split("torch.exp")
    kept = f"kept = {{}}\n{first}kept.setdefault(0, torch.exp{last.rstrip()})\n"
    assert judge(task, kept).mistake == "kept_result"
