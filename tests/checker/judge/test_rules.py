"""Each rule of the judge on evidence built by hand, and why the rules stand in the order in which they stand."""

import inspect
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from course_lib.checker import Allocates, Case, FasterThan, Mistake, Needs, Requirement, Seen, Slip
from course_lib.checker.judge import compiling, diagnosis, rules_of_numbers, rules_of_right_numbers
from course_lib.checker.judge.case_lines import case_lines
from course_lib.checker.judge.evidence import Evidence
from course_lib.checker.judge.rules import (
    AFTER_THE_RUN,
    BEFORE_THE_RUN,
    first_finding,
    not_attempted,
    out_of_bounds,
    raised_error,
    stopped_early,
    unreadable_source,
    unsupported,
    worker_died,
)
from course_lib.checker.judge.rules_of_numbers import (
    argument_written,
    kept_result,
    known_mistake,
    race,
    undefined_lanes,
    unwritten_memory,
    wrong_numbers,
)
from course_lib.checker.judge.rules_of_right_numbers import (
    below_the_floor,
    does_not_compile,
    earlier_result_changed,
    input_modified,
    passed,
    requirement_broken,
)
from course_lib.checker.runner.frames import Frame
from course_lib.checker.runner.running import Later, Run
from course_lib.checker.runner.worker import Ending
from course_lib.checker.specification.seen import RaisedError
from course_lib.hardware.ceilings import measured
from tests.checker.samples import DOUBLE

X = torch.tensor([1.0, 2.0, 3.0])
RIGHT, WRONG, NAN = 2 * X, 2 * X + 1, torch.full((3,), torch.nan)
CELL = "def double(x):\n    return 2 * x\n"
STUB = "def double(x):\n    raise NotImplementedError\n"
UNREADABLE = CELL + "# \ud800\n"

PLAIN = replace(DOUBLE, requirements=())
FRUGAL = replace(DOUBLE, requirements=(Allocates(lambda x: 3),))
# One byte takes this machine a second, see `machine_of_one_byte_a_second`.
FAST = replace(DOUBLE, requirements=(FasterThan(torch.add, 1.0, lambda x: 12),))
LACKING = replace(DOUBLE, needs=Needs(packages=("no_such_package",)))
REFUSED = replace(PLAIN, title="Refused")
ADDS_ONE = Slip("adds_one", "You add one.", formula=lambda x: 2 * x + 1)
REACHES = Mistake("no_mask", "There is no mask.", when=lambda case, seen, got: bool(seen.out_of_bounds))
LOOKS_UP = Mistake("looks_up", "Nothing is there.", when=lambda case, seen, got: bool(seen.error))
HOARDS = Mistake("hoards", "You keep it all.", when=lambda case, seen, got: seen.largest_allocation > 3)

TIMED = {"timing": {"answer": 1.0, "baseline": 2.0}}
WILD = {"out_of_bounds": ("line 3 reads x outside its 3 elements",)}
KEY_ERROR = {"error": RaisedError("KeyError", "'k'", line=2)}
TORN = {"undefined_loads": ("kernel, line 4",), "undefined_values": 3}


@pytest.fixture(autouse=True)
def machine_of_one_byte_a_second(monkeypatch):
    """And a compiler that refuses the exercise that is titled so."""
    here = SimpleNamespace(memory_bandwidth=1.0, fma_rate=1e9, matmul_rate={})
    monkeypatch.setattr(measured, "ceilings", lambda: here)
    monkeypatch.setattr(compiling, "refusal", lambda task, *rest: "No." if task.title == "Refused" else None)


def case(result=RIGHT, repeated=None, **seen):
    """What the worker says of a case."""
    return Frame(Seen(**seen), result, has_repeated=repeated is not None, result_repeated=repeated)


def changing(now_and_then, always=False):
    """A case whose result was another in one of 19 further runs, or in all of them."""
    runs = {"repeats": 19, "differing": 19, "changes": 1} if always else {"repeats": 19, "differing": 1, "changes": 2}
    return case(RIGHT, now_and_then, **runs)


def told(*frames, task=PLAIN, cell=CELL, mistakes=(), slips=(), **ending):
    """The evidence of one run over cases of the same three numbers, of which the worker said this."""
    cases = [Case(f"number {index}", (X,)) for index in range(len(frames))]
    run = Run(cases, True, Ending([{"kind": "done"}], **ending), dict(enumerate(frames)))
    return Evidence(replace(task, mistakes=tuple(mistakes), slips=tuple(slips)), cell, {"double": "double"}, runs=[run])


def called_again(evidence):
    """The same with a later call that changed what the first had returned."""
    (run,) = evidence.runs
    later = Later(0, run.cases[0], in_its_memory=False, frame=case(overwrites=1))
    return replace(evidence, runs=[replace(run, later=[later])])


def test_a_rule_says_what_it_is_for_and_fits_a_screen():
    for rule in (*BEFORE_THE_RUN, *AFTER_THE_RUN):
        assert rule.__doc__ and len(inspect.getsource(rule).splitlines()) <= 40, rule.__name__


@pytest.mark.parametrize("rule", [*BEFORE_THE_RUN, *AFTER_THE_RUN[:-1]], ids=lambda rule: rule.__name__)
def test_every_rule_but_the_last_is_silent_about_a_right_answer(rule):
    assert rule(told(case(), case())) is None


def test_an_unreadable_source_is_an_error():
    found = unreadable_source(told(cell=UNREADABLE))
    assert (found.outcome, found.mistake) == ("error", "unreadable_source")


def test_a_cell_as_it_was_given_is_not_attempted():
    assert not_attempted(told(cell=STUB)).outcome == "not_attempted"


def test_what_a_machine_lacks_is_said():
    found = unsupported(told(task=LACKING))
    assert found.outcome == "unsupported" and "`no_such_package`" in found.message


def test_a_worker_that_died_is_told_with_its_end():
    found = worker_died(replace(told(), runs=(), died="it ended with status 3."))
    assert found.outcome == "crashed" and "it ended with status 3. The next" in found.message


@pytest.mark.parametrize(
    "ending, outcome",
    [
        ({"timeout": True}, "timeout"),
        ({"excess": "memory"}, "error"),
        ({"too_much_output": True}, "error"),
        ({"forged": "a case out of turn"}, "crashed"),
    ],
)
def test_an_answer_that_was_stopped_is_told_and_its_cases_are_not_compared(ending, outcome):
    evidence = told(case(WRONG), **ending)
    assert stopped_early(evidence).outcome == outcome
    assert [line.outcome for line in case_lines(evidence)] == ["not_run"] and not evidence.outcomes


def test_an_access_outside_a_tensor_is_told_whatever_the_numbers_are():
    for result in (RIGHT, WRONG):
        found = out_of_bounds(told(case(result, **WILD)))
        assert found.mistake == "out_of_bounds" and "“number 0”: line 3 reads x" in found.message


def test_an_access_is_named_by_a_mistake_that_is_seen_in_it():
    found = out_of_bounds(told(case(), case(**WILD), mistakes=[REACHES]))
    assert (found.mistake, found.diagnosis) == ("no_mask", "There is no mask.")


def test_a_slip_says_more_than_an_access():
    evidence = told(case(WRONG, **WILD), slips=[ADDS_ONE])
    assert out_of_bounds(evidence) is None and known_mistake(evidence).mistake == "adds_one"


def test_an_error_is_told_with_its_case_and_line():
    found = raised_error(told(case(), Frame(Seen(**KEY_ERROR))))
    assert found.outcome == "error" and "“number 1”: KeyError (line 2 of the cell)" in found.message


def test_an_error_is_named_by_a_mistake_that_looks_at_it():
    assert raised_error(told(Frame(Seen(**KEY_ERROR)), mistakes=[LOOKS_UP])).mistake == "looks_up"


def test_a_known_mistake_is_named_with_its_sentence_and_the_place():
    found = known_mistake(told(case(WRONG), slips=[ADDS_ONE]))
    assert (found.mistake, found.diagnosis) == ("adds_one", "You add one.")
    assert "all 3 elements are wrong" in found.message


def test_undefined_lanes_are_told_with_their_load():
    found = undefined_lanes(told(case(NAN, **TORN)))
    assert found.mistake == "undefined_lanes" and "kernel, line 4" in found.diagnosis


def test_memory_that_was_never_written_is_told():
    assert unwritten_memory(told(case(WRONG, unwritten=3))).mistake == "unwritten_memory"


def test_a_result_that_changes_now_and_then_is_a_race():
    found = race(told(changing(WRONG)))
    assert (found.mistake, found.diagnosis) == ("race", diagnosis.RACE)
    assert kept_result(told(changing(WRONG))) is None


def test_a_first_result_unlike_all_later_ones_is_something_kept():
    found = kept_result(told(changing(WRONG, always=True)))
    assert (found.mistake, found.diagnosis) == ("kept_result", diagnosis.KEPT)
    assert race(told(changing(WRONG, always=True))) is None


def test_wrong_numbers_without_a_cause_are_told_without_a_name():
    found = wrong_numbers(told(case(WRONG)))
    assert found.outcome == "failed" and found.mistake is None and "should be 2" in found.message


def test_a_broken_requirement_is_told_and_named_by_a_mistake_that_is_seen_there():
    frame = case(largest_allocation=4)
    assert requirement_broken(told(frame, task=FRUGAL)).mistake == "too_much_memory"
    assert requirement_broken(told(frame, task=FRUGAL, mistakes=[HOARDS])).mistake == "hoards"


def test_a_changed_argument_is_told():
    found = input_modified(told(case(modified_inputs=("x",))))
    assert found.mistake == "modified_input" and "`x` was changed" in found.message


@pytest.mark.parametrize(
    "seconds, words", [(0.5e-6, "12,000 bytes must move"), (1.4e-6, "4,000 FLOPs must be done"), (3e-6, None)]
)
def test_a_time_below_the_roofline_is_refused(monkeypatch, seconds, words):
    floor_of_bytes = words is not None and "bytes" in words
    rate = 1e12 if floor_of_bytes else 4000 / 2e-6
    here = SimpleNamespace(memory_bandwidth=12_000 / 1e-6, fma_rate=rate, matmul_rate={"float16": rate / 2})
    monkeypatch.setattr(measured, "ceilings", lambda: here)
    faster = FasterThan(torch.add, 1.0, lambda x: 4000 * x.numel(), lambda x: 4000 / 3 * x.numel())
    timing = {"answer": seconds, "baseline": 1.0}
    found = below_the_floor(told(case(timing=timing), task=replace(PLAIN, requirements=(faster,))))
    assert found is None if words is None else words in found.message


def test_what_the_compiler_refuses_fails():
    assert does_not_compile(told(case(), task=REFUSED)).mistake == "does_not_compile"


def test_a_pass_says_how_many_cases_are_right_and_how_fast():
    assert passed(told(case(), case())).message == "All 2 cases are right."
    assert passed(told(case(**TIMED))).message.endswith("1,000,000 µs against the baseline's 2,000,000 µs.")


# Two rules that both have something to say of the evidence: the first speaks, for the reason given.
ORDER = {
    "a parser that fails would fail on what follows": (
        unreadable_source,
        unsupported,
        told(cell=UNREADABLE, task=LACKING),
    ),
    "an empty cell is empty on every machine": (not_attempted, unsupported, told(cell=STUB, task=LACKING)),
    "without a run there is nothing to praise": (worker_died, passed, replace(told(), died="it ended")),
    "a time-out says why the rest is missing": (stopped_early, passed, told(case(), timeout=True)),
    "the limit is the cause of the error": (
        stopped_early,
        raised_error,
        told(Frame(Seen(**KEY_ERROR)), excess="memory"),
    ),
    "an error may come of what lies outside": (out_of_bounds, raised_error, told(Frame(Seen(**KEY_ERROR, **WILD)))),
    "numbers from outside are wrong for that": (out_of_bounds, wrong_numbers, told(case(WRONG, **WILD))),
    "what finished is not all": (raised_error, wrong_numbers, told(case(WRONG), Frame(Seen(**KEY_ERROR)))),
    "a slip explains, a pattern describes": (
        known_mistake,
        unwritten_memory,
        told(case(WRONG, unwritten=1), slips=[ADDS_ONE]),
    ),
    "a proved cause before the place": (undefined_lanes, unwritten_memory, told(case(NAN, unwritten=1, **TORN))),
    "memory never written changes by itself": (
        unwritten_memory,
        race,
        told(case(WRONG, unwritten=3), changing(WRONG)),
    ),
    "a race may make the first run the odd one": (
        race,
        kept_result,
        told(changing(WRONG), changing(WRONG, always=True)),
    ),
    "any name says more than none": (kept_result, wrong_numbers, told(changing(WRONG, always=True))),
    "what the answer did says more than nothing": (
        argument_written,
        wrong_numbers,
        told(case(WRONG, modified_inputs=("x",))),
    ),
    "right numbers first": (
        wrong_numbers,
        requirement_broken,
        told(case(WRONG), case(largest_allocation=4), task=FRUGAL),
    ),
    "what the exercise asks for before what all do": (
        requirement_broken,
        input_modified,
        told(case(largest_allocation=4, modified_inputs=("x",)), task=FRUGAL),
    ),
    "what was given before what is given back": (
        input_modified,
        earlier_result_changed,
        called_again(told(case(modified_inputs=("x",)))),
    ),
    "memory that two results share makes the time worth nothing": (
        earlier_result_changed,
        below_the_floor,
        called_again(told(case(**TIMED), task=FAST)),
    ),
    "a changed input makes the time worth nothing": (
        input_modified,
        below_the_floor,
        told(case(modified_inputs=("x",), **TIMED), task=FAST),
    ),
    "the compiler is asked of what would pass": (
        below_the_floor,
        does_not_compile,
        told(case(**TIMED), task=replace(FAST, title="Refused")),
    ),
    "only what no one refuses passes": (does_not_compile, passed, told(case(), task=REFUSED)),
}


@pytest.mark.parametrize("first, second, evidence", ORDER.values(), ids=list(ORDER))
def test_of_two_rules_that_apply_the_one_that_explains_the_other_speaks(first, second, evidence):
    rules = (*BEFORE_THE_RUN, *AFTER_THE_RUN)
    fresh = replace(evidence)
    assert first(fresh) is not None and second(fresh) is not None
    assert rules.index(first) < rules.index(second)
    assert first_finding(rules, fresh) == first(fresh)


def test_the_rules_of_numbers_stand_between_what_stops_and_what_is_asked_beside_them():
    assert [rule.__name__ for rule in AFTER_THE_RUN] == [
        *("worker_died", "stopped_early", "out_of_bounds", "raised_error"),
        *(rule.__name__ for rule in rules_of_numbers.RULES_OF_NUMBERS),
        *(rule.__name__ for rule in rules_of_right_numbers.RULES_OF_RIGHT_NUMBERS),
    ]
    assert AFTER_THE_RUN[-1] is passed, "the last rule always finds"


def test_each_requirement_is_asked_once_of_each_case():
    asked = []

    @dataclass(frozen=True)
    class Counting(Requirement):
        def complaint(self, case, seen):
            asked.append(case.name)
            return None

    evidence = told(case(), case(), task=replace(PLAIN, requirements=(Counting(),)))
    assert first_finding(AFTER_THE_RUN, evidence).outcome == "passed"
    assert [line.outcome for line in case_lines(evidence)] == ["passed", "passed"]
    assert asked == ["number 0", "number 1"]


def test_evidence_is_compared_once_and_anew_in_a_copy():
    evidence = told(case())
    assert evidence.outcomes is evidence.outcomes
    assert replace(evidence).outcomes is not evidence.outcomes
