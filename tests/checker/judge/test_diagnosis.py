"""What the diagnosis says beyond each exercise's list of mistakes, and when it is silent."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from course_lib.checker import TRITON, Case, Exercise, Mistake, Seen, Slip
from course_lib.checker.judge import compare
from course_lib.checker.judge.decide import judge
from course_lib.checker.judge.diagnosis import brief, undefined_lanes
from course_lib.checker.judge.known_mistakes import find_mistake
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.runner.frames import Frame
from tests.checker.samples import ADD, APPEND, DOUBLE, QUICK, TWO

TOTAL = Exercise(
    id="91.1",
    title="Sum",
    entries=("total",),
    needs=TRITON,
    limits=QUICK,
    oracle=lambda x: x.sum(dim=0, keepdim=True),
    cases=lambda draw: [Case("whole", (draw.normal(64),)), Case("a tail", (draw.normal(50, shift=2.0),))],
)


def total(value="tl.load(x + i, mask=i < n)", end="tl.sum(value, axis=0)"):
    """A cell for the sum with one part replaced."""
    return f"""@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = {value}
    tl.store(out, {end})


def total(x):
    out = torch.empty(1, device=x.device)
    kernel[(1,)](x, out, x.numel(), BLOCK=64)
    return out
"""


def test_lanes_that_a_load_leaves_undefined_are_no_zeros():
    """The interpreter gives 0 in lanes that are masked off, and a GPU what it pleases."""
    verdict = judge(TOTAL, total())
    assert verdict.mistake == "undefined_lanes" and [case.outcome for case in verdict.cases] == ["passed", "failed"]
    assert "kernel, line 4: value = tl.load(x + i, mask=i < n)" in verdict.diagnosis
    assert judge(TOTAL, total("tl.load(x + i, mask=i < n, other=0.0)")).passed


def test_undefined_lanes_that_no_one_uses_are_no_fault():
    assert judge(TOTAL, total("tl.where(i < n, tl.load(x + i, mask=i < n), 0.0)")).passed


def test_undefined_lanes_are_found_where_arithmetic_loses_their_payload():
    verdict = judge(TOTAL, total(end="tl.log(tl.exp(tl.sum(tl.sqrt(value * value) * 0 + value, axis=0)))"))
    assert verdict.mistake == "undefined_lanes"


def test_nan_of_another_cause_is_not_blamed_on_a_harmless_load():
    harmless = "tl.where(i < n, tl.load(x + i, mask=i < n), 0.0)"
    verdict = judge(TOTAL, total(harmless, end="tl.sum(value, axis=0) + tl.sqrt(-1.0 - tl.sum(value * value, axis=0))"))
    assert verdict.outcome == "failed" and verdict.mistake is None


def test_what_a_gpu_leaves_unwritten_is_not_blamed_on_the_interpreters_loads():
    """The interpreter's cases alone are run again: NaN that only the GPU's results hold are no proof."""
    case, nan = Case("one", (torch.zeros(2),)), torch.full((2,), math.nan)
    wrong = [compare.Leaf("", "values", nan, torch.zeros(2, dtype=torch.float64))]
    seen, truth = Seen(undefined_loads=("kernel, line 4",)), compare.Truth(None, None)
    interpreted = Outcome(case, seen, nan, truth, wrong, interpreted=True)
    on_gpu = Outcome(case, Seen(), nan, truth, wrong, interpreted=False)
    assert undefined_lanes([interpreted, on_gpu], lambda: [Frame(result=nan)]) == ""
    assert "kernel, line 4" in undefined_lanes([interpreted, on_gpu], lambda: [Frame(result=torch.zeros(2))])


def test_what_one_result_lacks_is_not_said_of_another():
    """Four elements were never written: those of the second result, whose first is written and wrong."""
    case, zeros = Case("two", (torch.zeros(2),)), torch.zeros(4, dtype=torch.float64)
    leaves = [
        compare.Leaf(where, "values", value, zeros, wrong=torch.ones(4, dtype=torch.bool))
        for where, value in (("result[0]", torch.ones(4)), ("result[1]", torch.full((4,), math.nan)))
    ]
    outcome = Outcome(case, Seen(unwritten=4), None, compare.Truth(None, None), leaves, interpreted=True)
    text = brief(outcome)
    assert "all 4 elements" in text and "4 hold memory that was never written" in text


NOTHING_ELSE = {
    "errors": [],
    "wild": [],
    "undefined": "",
    "undefined_alone": False,
    "complaints": [],
    "numbers_are_right": False,
    "cell": "",
    "names": {},
}


@pytest.mark.parametrize("factor, mistake", [(3, "tripled"), (4, None)])
def test_a_race_on_a_gpu_hides_no_mistake_that_the_interpreter_shows(factor, mistake):
    """Which of two programs wins there, no fingerprint foresees; what ran in order is evidence enough."""
    task = replace(DOUBLE, slips=(Slip("tripled", "Three.", formula=lambda x: 3 * x),), requirements=())
    x = torch.tensor([1.0, 2.0, 3.0])
    case = Case("three", (x,))
    truth = compare.truth(task, case, tf32=False)

    def outcome(got, interpreted):
        return Outcome(case, Seen(), got, truth, compare.compare(got, truth, task), (), interpreted)

    raced = outcome(torch.tensor([3.0, 0.5, 9.0]), interpreted=False)

    def named(*outcomes):
        failed = [outcome for outcome in outcomes if not outcome.right]
        found = find_mistake(SimpleNamespace(exercise=task, finished=outcomes, failed=failed, **NOTHING_ELSE))
        return found and found.id

    assert named(outcome(factor * x, interpreted=True), raced) == mistake
    assert named(outcome(2 * x, interpreted=True), raced) is None
    assert named(raced) is None


@pytest.mark.parametrize("off, mistake", [("0", "waves"), ("0.5 * (x > 1)", None)])
def test_a_mistake_that_rounds_more_than_the_right_answer_is_named(off, mistake):
    """float32 holds sin(1e4 x) to 1e-3 where x is 3, and 2 x to 1e-7."""
    task = replace(
        DOUBLE,
        cases=lambda draw: [Case("50 elements", (draw.uniform(50, low=2.0, high=4.0),))],
        slips=(Slip("waves", "No waves.", formula=lambda x: 2 * x + torch.sin(1e4 * x)),),
    )
    cell = f"def double(x):\n    return 2 * x + torch.sin(1e4 * x) + {off}\n"
    assert judge(task, cell, seed=4).mistake == mistake


def test_a_guess_that_fails_costs_no_verdict(monkeypatch):
    unlucky = Mistake("unlucky", "No.", when=lambda case, seen, got: got.no_such_attribute)
    monkeypatch.delenv("COURSE_STRICT", raising=False)
    verdict = judge(replace(TOTAL, mistakes=(unlucky,)), total("tl.load(x + i, mask=i < n, other=1.0)"))
    assert verdict.outcome == "failed" and verdict.mistake is None
    monkeypatch.setenv("COURSE_STRICT", "1")
    with pytest.raises(AttributeError):
        judge(replace(TOTAL, mistakes=(unlucky,)), total("tl.load(x + i, mask=i < n, other=1.0)"))


def test_a_proof_goes_before_a_guess():
    """An exercise's own mistake that looks for NaN must not hide what is known for certain."""
    guess = Mistake("nan", "NaN.", when=lambda case, seen, got: bool(got.isnan().any()))
    assert judge(replace(TOTAL, mistakes=(guess,)), total()).mistake == "undefined_lanes"


@pytest.mark.parametrize("factor, mistake", [("3", "a_multiple"), ("5", "a_multiple"), ("7", None)])
def test_a_mistake_may_take_several_forms(factor, mistake):
    multiple = Slip("a_multiple", "Twice, not more.", formula=(lambda x: 3 * x, lambda x: 5 * x))
    cell = f"def double(x):\n    return {factor} * x\n"
    assert judge(replace(DOUBLE, slips=(multiple,)), cell).mistake == mistake


def test_a_mistake_may_have_to_show_in_every_failing_case():
    flat = Mistake("flat", "A vector.", when=lambda case, seen, got: case.args[0].dim() == 1)
    wrong = "def double(x):\n    return 2.5 * x\n"
    assert judge(replace(DOUBLE, mistakes=(flat,)), wrong).mistake == "flat"
    assert judge(replace(DOUBLE, mistakes=(replace(flat, every=True),)), wrong).mistake is None


def test_a_mistake_may_be_asked_before_the_models():
    """10.6 searched for 11 s among slips for what its own bound told at once."""
    slip = Slip("four_times", "Four is too much.", formula=lambda x: 4 * x)
    known = Mistake("large", "Too large.", when=lambda case, seen, got: bool((got.abs() >= case.args[0].abs()).all()))
    wrong = "def double(x):\n    return 4 * x\n"
    assert judge(replace(DOUBLE, slips=(slip,), mistakes=(known,)), wrong).mistake == "four_times"
    assert judge(replace(DOUBLE, slips=(slip,), mistakes=(replace(known, first=True),)), wrong).mistake == "large"


def test_a_fingerprint_overflows_as_the_answers_dtype_does():
    large = replace(
        DOUBLE,
        cases=lambda draw: [Case("large float16", (draw.uniform(9, low=3e4, high=3.2e4, dtype=torch.float16),))],
        slips=(Slip("four_times", "Four is too much.", formula=lambda x: 4 * x),),
    )
    assert judge(large, "def double(x):\n    return 4 * x\n").mistake == "four_times"


def test_a_wrong_answer_to_codes_of_8_bits_is_told():
    """PyTorch compares no e4m3 numbers, and an error while the judge looked for what cases share cost the verdict."""
    codes = torch.tensor([1.0, 2.0, 448.0]).to(torch.float8_e4m3fn)
    task = replace(DOUBLE, cases=lambda draw: [Case("codes", (codes,))], oracle=lambda x: 2 * x.float(), models=())
    verdict = judge(task, "def double(x):\n    return 3 * x.float()\n")
    assert verdict.outcome == "failed" and "should be" in verdict.message


def test_a_verdict_names_the_function_where_there_are_several():
    cell = "def flops(n): return 2 * n**3\ndef moved(n): return 16 * n * n\n"
    verdict = judge(TWO, cell)
    assert "of `moved`" in verdict.message and "`moved`: got" in verdict.cases[1].detail
    assert "of `add`" not in judge(ADD, "def add(x, y):\n    return 1 / 0\n").message


@pytest.mark.parametrize(
    "wrong, told",
    [
        ("x.dtype == torch.float16", "float16 inputs"),
        ("not x.is_contiguous()", "an input that is not contiguous"),
        ("twice", "`twice=True`"),
        ("x.shape[0] % 16", "a length that is no multiple of 16"),
        ("x.numel() > 0", None),
        ("x.numel() == 32 * 3", None),
    ],
)
def test_what_the_failing_cases_share_is_said(wrong, told):
    cases = [
        Case(f"{rows} rows, {dtype}, {strided}, {twice}", (x, twice))
        for rows, dtype, strided, twice in (
            (32, torch.float32, False, False),
            (32, torch.float16, False, False),
            (32, torch.float32, True, False),
            (32, torch.float32, False, True),
            (33, torch.float32, False, False),
            (48, torch.float32, False, False),
        )
        for x in [torch.ones(3, rows, dtype=dtype).T if strided else torch.ones(rows, 3, dtype=dtype)]
    ]
    task = replace(
        DOUBLE,
        entries=("scaled",),
        oracle=lambda x, twice: x * (2 if twice else 3),
        cases=lambda draw: cases,
        requirements=(),
    )
    cell = f"def scaled(x, twice):\n    return x * (2 if twice else 3) + (1 if {wrong} else 0)\n"
    message = judge(task, cell).message
    assert ("Only cases with" in message) == (told is not None) and (told or "") in message, message


@pytest.mark.parametrize(
    "body, told",
    [
        ("there[place - 1] = row", "8 of 24 elements in `there` are wrong"),
        ("there[place] = row; return row", "got a tensor of shape [4], expected None."),
        ("there[place] = row; return row, row", "it returned 2 values; expected is None."),
    ],
)
def test_what_is_written_in_place_is_called_as_the_learner_calls_it(body, told):
    verdict = judge(APPEND, f"def append(there, row, place):\n    {body}\n")
    assert verdict.outcome == "failed" and told in verdict.message


def test_a_result_beside_what_is_written_is_the_only_result():
    both = replace(APPEND, oracle=lambda cache, row, position: (cache[position].copy_(row), cache[0].clone())[1])
    verdict = judge(both, "def append(cache, row, position):\n    cache[position] = row\n")
    assert "it returned None; expected is a tensor of shape [4]." in verdict.message


PAIRS = Exercise(
    id="90.9",
    title="A number and those below it",
    entries=("below",),
    oracle=lambda n: (n, list(range(n))) if n else (0, []),
    cases=lambda draw: [Case("none", (0,)), Case("three", (3,))],
)


@pytest.mark.parametrize(
    "body, told",
    [
        ("return n, list(range(n + 1))", "got 1 value, expected 0 values in result[1]."),
        ("return n", "it returned int 0; expected is 2 values."),
        ("if n: return n, list(range(n))", "it returned None; expected is 2 values. Is a `return` missing?"),
        ("return (n, list(range(n))) if n else None", "it returned None; expected is 2 values."),
        ("if n: return n, list(range(n))\n    return None", "it returned None; expected is 2 values."),
        ("if n:\n        return n, list(range(n))\n    else:\n        return", "returned None; expected is 2 values."),
    ],
)
def test_values_of_another_number_are_told_where_they_stand_and_none_as_what_it_is(body, told):
    """The numbers of the outermost values may be the same; and not everyone who gives None has forgotten `return`."""
    message = judge(PAIRS, f"def below(n):\n    {body}\n").message
    assert message.endswith(told), message


def _of(count, function):
    """A fingerprint of the function that takes this many arguments."""
    return lambda *sides: function(*sides) if len(sides) == count else None


PERIMETER = Slip("adds_once", "There are two sides of each length.", formula=_of(2, lambda a, b: a + b))
DIAGONAL = Slip("square_root_left_out", "Take the root.", formula=_of(3, lambda a, b, c: a * a + b * b + c * c))
WIDE = Slip("wide", "b is the shorter one.", formula=lambda *sides: sum(sides) if len(sides) == 2 else _box(*sides))


def _box(*sides):
    return 2 * sum(sides) if len(sides) == 2 else sum(side * side for side in sides) ** 0.5


def box(slips):
    """An exercise that asks for two functions."""
    sides = ((3.0, 4.0), (5.0, 6.0)), ((3.0, 4.0, 5.0), (2.0, 3.0, 7.0))
    cases = [Case(f"{a} × {b}", (a, b)) for a, b in sides[0]]
    cases += [Case(f"{a} × {b} × {c}", (a, b, c), entry="diagonal") for a, b, c in sides[1]]
    entries = ("perimeter", "diagonal")
    oracle = dict.fromkeys(entries, partial(_box))  # without a source, of which slips of the formula would be made
    return Exercise("91.2", "A box", entries, lambda draw: cases, oracle, limits=QUICK, slips=slips)


def boxed(perimeter="2 * (a + b)", diagonal="(a * a + b * b + c * c) ** 0.5"):
    """A cell that answers `box`."""
    return f"def perimeter(a, b):\n    return {perimeter}\ndef diagonal(a, b, c):\n    return {diagonal}\n"


TWO_SLIPS = boxed("a + b", "a * a + b * b + c * c")


@pytest.mark.parametrize("slips", [(PERIMETER, DIAGONAL), (DIAGONAL, PERIMETER)])
def test_of_a_mistake_in_each_of_two_functions_the_first_functions_is_named(slips):
    """No single mistake makes both results, and each explains its own function to the last digit."""
    verdict = judge(box(slips), TWO_SLIPS)
    assert verdict.mistake == "adds_once" and "of `perimeter`" in verdict.message
    mended = judge(box(slips), boxed(diagonal="a * a + b * b + c * c"))
    assert mended.mistake == "square_root_left_out" and "of `diagonal`" in mended.message


def test_a_mistake_that_leaves_the_other_function_right_is_named_while_that_is_wrong():
    assert judge(box((WIDE,)), boxed("a + b", "a + b + c")).mistake == "wide"


@pytest.mark.parametrize(
    "slips, cell",
    [
        pytest.param((PERIMETER, DIAGONAL), boxed("3 * a + b", "a + b + c"), id="neither-is-known"),
        pytest.param((PERIMETER, WIDE), TWO_SLIPS, id="two-slips-make-the-same-of-the-first"),
        pytest.param(
            (PERIMETER, DIAGONAL),
            TWO_SLIPS.replace("a + b\n", "a + b if a < 4 else 1 / 0\n", 1),
            id="a-case-of-the-first-function-raised",
        ),
    ],
)
def test_no_mistake_is_named_on_the_half_of_the_evidence_that_suits_it(slips, cell):
    assert judge(box(slips), cell).mistake is None


def test_the_case_that_is_told_is_one_that_the_named_mistake_explains():
    """The message told of the first function, and the likely cause of the second."""
    verdict = judge(box((DIAGONAL,)), boxed("7 * a", "a * a + b * b + c * c"))
    assert verdict.mistake == "square_root_left_out" and "of `diagonal`" in verdict.message


def test_the_headline_speaks_of_the_simplest_case_that_fails():
    """It spoke of the first whose errors follow a pattern, which may be the oddest of all."""
    cases = [Case("small", (torch.tensor([1.0, 2.0, 4.0, 3.0]),)), Case("large", (torch.arange(1.0, 300.0),))]
    task = Exercise("91.3", "One more", ("more",), lambda draw: cases, lambda x: x + 1, limits=QUICK)
    cell = "def more(x):\n    return x * x + 7 if len(x) == 4 else 2 * (x + 1)\n"
    assert judge(task, cell).message.startswith("In case “small”")


def test_a_dimension_is_called_by_its_argument():
    """Dimension 0 of a cache is its batch, and the card spoke of heads."""
    cases = [Case(f"{n}", (torch.arange(1.0, 1 + 12 * n).view(n, 3, 4),)) for n in (1, 1, 2, 3)]
    task = Exercise("91.4", "One more", ("more",), lambda draw: cases, lambda cache: cache + 1, limits=QUICK)
    message = judge(task, "def more(cache):\n    return cache[:1] + 1 + 0 * cache\n").message
    assert "Only cases with `cache.shape[0]` above 1 are wrong." in message
