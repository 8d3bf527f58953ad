"""What the gate samples is what was proved, of this content and on this processor, and whole."""

import json
from types import SimpleNamespace

import pytest

from course_lib.home import ROOT
from tests import proven

SUBMISSIONS = ROOT / "tests/submissions/test_submissions.py"


class Config:
    def __init__(self, *options, keyword=""):
        self.options, self.deselected = options, []
        self.option, self.args = SimpleNamespace(keyword=keyword, markexpr=""), ["tests"]
        self.hook = SimpleNamespace(pytest_deselected=lambda items: self.deselected.extend(items))

    def getoption(self, name):
        return name in self.options


class Item:
    def __init__(self, name, identity="1.3", path=SUBMISSIONS):
        self.nodeid, self.path, self.user_properties = f"{path}::{name}", path, []
        self.callspec = SimpleNamespace(params={"identity": identity})


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setenv(proven.DAY, "7")
    claim = proven.exercise_claim({"identity": "1.3"}, SUBMISSIONS)
    path = tmp_path / "proven.json"
    path.write_text(json.dumps({claim.processor: {claim.name: claim.hash}}))
    return path


def chosen(record, *options, number=160, identity="1.3", **asked):
    items = [Item(f"test_{place}", identity) for place in range(number)] + [
        Item("test_other", path=ROOT / "tests/x.py")
    ]
    proven.choose(Config(*options, **asked), items, record)
    return items


def test_of_what_is_proved_one_test_in_eight_is_run_and_all_others(record):
    kept = chosen(record, "--sampled")
    assert kept[-1].nodeid.endswith("test_other")
    assert 160 / proven.SHARE / 2 < len(kept) - 1 < 160 / proven.SHARE * 2


def test_a_proof_alone_leaves_out_what_is_proved_and_all_else(record):
    assert chosen(record, "--prove") == []
    assert len(chosen(record, "--prove", identity="1.4")) == 160
    assert len(chosen(record, "--prove", "--sampled", identity="1.4")) == 161


def test_each_test_has_its_day():
    for name in ("test_a", "test_b"):
        assert sum(proven.sampled(name, day) for day in range(100, 100 + proven.SHARE)) == 1


def test_what_is_asked_for_by_itself_runs_whole(record):
    assert len(chosen(record)) == 161
    assert len(chosen(record, "--sampled", keyword="1.3")) == 161


def test_what_is_not_proved_runs_whole(record):
    assert len(chosen(record, "--sampled", identity="1.4")) == 161


@pytest.mark.parametrize("change", ["content", "processor"])
def test_other_content_and_another_processor_are_not_proved(record, change, monkeypatch):
    if change == "content":
        monkeypatch.setattr(proven, "cell_of", lambda identity: "another cell")
    else:
        monkeypatch.setattr(proven, "processor", lambda: "AVX1024")
    assert len(chosen(record, "--sampled")) == 161


def test_the_hash_covers_judge_description_topics_submissions_and_tests_and_no_other_exercise():
    files = {path.relative_to(ROOT).as_posix() for path in proven.files_of_exercise("4.3", SUBMISSIONS)}
    for needed in (
        "course_lib/checker/judge/explain.py",
        "course_lib/checker/runner/process/child.py",
        "course_lib/hardware/meter/traffic/triton_internals/speed.py",
        "exercises/topics/attention_steps.py",
        "exercises/ch04_triton_tiling/ex3_forward_kernel.py",
        "tests/submissions/ch04_triton_tiling/ex3_forward_kernel.py",
        "tests/submissions/test_submissions.py",
        "tests/proven.py",
    ):
        assert needed in files
    assert not any(name.startswith("exercises/ch03") for name in files)


def report(name, claim, when="teardown", failed=False):
    return SimpleNamespace(user_properties=[("claim", claim)], failed=failed, when=when, nodeid=name)


def test_a_claim_is_written_down_when_each_of_its_tests_ran_and_none_failed(tmp_path):
    path = tmp_path / "proven.json"
    prover = proven.Prover(path)
    whole, part, broken = (["whole", "h1", "any", 2], ["part", "h2", "any", 2], ["broken", "h3", "any", 2])
    for name, claim in (("one", whole), ("two", whole), ("one", part), ("one", broken)):
        prover.pytest_runtest_logreport(report(name, claim))
    prover.pytest_runtest_logreport(report("two", broken, "call", failed=True))
    prover.pytest_runtest_logreport(report("two", broken))
    prover.pytest_sessionfinish()
    assert json.loads(path.read_text()) == {"any": {"whole": "h1"}}


def test_one_test_run_twice_is_not_two(tmp_path):
    prover = proven.Prover(tmp_path / "proven.json")
    for _ in range(2):
        prover.pytest_runtest_logreport(report("one", ["part", "h", "any", 2]))
    prover.pytest_sessionfinish()
    assert proven.read_record(tmp_path / "proven.json") == {}


def test_a_proof_of_a_part_is_refused():
    option = SimpleNamespace(keyword="2.3", markexpr="")
    config = SimpleNamespace(getoption=lambda name: name == "--prove", option=option, args=["tests/submissions"])
    with pytest.raises(pytest.UsageError, match="leave out -k"):
        proven.configure(config)
