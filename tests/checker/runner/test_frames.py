"""What comes back from a worker is read without fail, whatever was sent, and has the types that it claims."""

import pytest
import torch

from course_lib.checker.judge.exceptions import error_message
from course_lib.checker.runner.frames import DEEPEST, LONGEST_TEXT, last_word, raised_error, read_messages, well_formed

START = {"kind": "start", "index": 0}
DONE = {"kind": "done"}
TRAFFIC = {"loaded": 4, "stored": 4, "atomic": 0, "distinct_loaded": 4, "distinct_stored": 4}
CASE = {
    "kind": "case",
    "index": 0,
    "error": None,
    "result": torch.zeros(2),
    "written": {"out": torch.ones(2)},
    "seconds": 0.5,
    "launches": ["kernel"],
    "operations": {"mul": 2},
    "traffic": {"x": TRAFFIC},
    "out_of_bounds": [],
    "timing": {"answer": 0.1, "baseline": 0.2},
    "repeats": 3,
    "variants": [{"kernel": "kernel"}],
}


def nest(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def test_what_the_harness_sends_is_typed():
    report = read_messages([START, CASE, DONE], 1)
    frame = report.cases[0]
    assert report.forged is None and report.started == 0
    assert frame.error is None and frame.result is CASE["result"] and list(frame.written) == ["out"]
    assert frame.seen.launches == ("kernel",) and frame.seen.operations == {"mul": 2} and frame.seen.repeats == 3
    assert frame.seen.timing["answer"] == 0.1 and frame.variants == ({"kernel": "kernel"},)
    assert not frame.has_repeated and frame.result_after_timing is None


@pytest.mark.parametrize(
    "change",
    [
        {"operations": {5: 1}},
        {"operations": {"mul": "many"}},
        {"operations": {"mul": True}},
        {"operations": {"mul": 10**400}},
        {"traffic": {"x": 5}},
        {"traffic": {"x": {"loaded": 5}}},
        {"traffic": {"x": {**TRAFFIC, "stored": -1}}},
        {"timing": {"answer": 1.0}},
        {"timing": {"answer": float("nan"), "baseline": 1.0}},
        {"timing": {"answer": -1.0, "baseline": 1.0}},
        {"launches": [7]},
        {"out_of_bounds": "x"},
        {"modified_inputs": [["x"]]},
        {"written": {(1, 2): torch.zeros(1)}},
        {"repeats": 1.5},
        {"unwritten": -1},
        {"largest_grid": "all"},
        {"seconds": "long"},
        {"error": "KeyError"},
        {"result": nest(DEEPEST + 1)},
        {"variants": nest(5000)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_case_that_the_harness_would_not_send_is_forged(change):
    assert well_formed(CASE) and not well_formed({**CASE, **change})
    report = read_messages([START, {**CASE, **change}, DONE], 1)
    assert report.forged and not report.cases


def test_a_case_without_a_result_or_an_error_is_forged():
    assert not well_formed({key: value for key, value in CASE.items() if key != "result"})


@pytest.mark.parametrize(
    "messages",
    [
        [{**START, "index": 1}],
        [START, START],
        [START, CASE, CASE],
        [CASE],
        [{**START, "index": True}],
        [{**START, "index": [0]}],
        [{"kind": "start"}],
        [{"kind": "case"}],
        [DONE],
        [{"kind": "cell_error"}],
        [{"kind": "cell_error", "error": "none"}],
        [{"kind": "missing"}],
        [{"kind": "not_callable", "names": []}],
    ],
    ids=str,
)
def test_messages_out_of_turn_and_last_words_that_say_nothing_are_forged(messages):
    assert read_messages(messages, 2).forged


def test_a_case_that_raised_ends_the_check_without_the_others():
    error = {"type": "KeyError", "text": "'k'"}
    report = read_messages([START, {"kind": "case", "index": 0, "error": error}, DONE], 2)
    assert report.forged is None and report.cases[0].error.type == "KeyError"


@pytest.mark.parametrize(
    "sent", [None, 5, {}, {"type": 5, "text": ["a"], "outer": None, "line": "7", "unusable": "yes"}, {"line": True}]
)
def test_an_error_has_its_types_whatever_was_sent_and_can_be_told(sent):
    error = raised_error(sent)
    assert (error.type, error.text, error.outer, error.line) == ("Error", "", "", None)
    assert not error.out_of_memory and not error.unusable
    assert error_message(error, "").message == "Error: no message"


def test_an_errors_text_has_an_end():
    assert len(raised_error({"text": "x" * 10**6}).text) == LONGEST_TEXT


def test_the_last_word_is_what_came_last():
    assert last_word([]).kind == "nothing"
    assert last_word([START]).kind == "start"
    assert last_word([{"kind": "missing", "names": ["add"]}]).names == ("add",)
    assert last_word([{"kind": "cell_error", "error": {"type": "KeyError"}}]).error.type == "KeyError"
    assert last_word([{"kind": "harness_error", "text": "a bug"}]).text == "a bug"
