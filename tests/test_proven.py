"""What the gate samples is what was proved, of this content, and whole."""

from dataclasses import asdict, replace
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
    def __init__(self, name, identity="1.3", path=SUBMISSIONS, marks=()):
        self.nodeid, self.path, self.user_properties, self.stash = f"{path.name}::{name}", path, [], pytest.Stash()
        self.callspec = SimpleNamespace(params={"identity": identity})
        self.get_closest_marker = lambda name: name in marks or None


CLAIM = proven.exercise_claim(Item("test"))


@pytest.fixture(autouse=True)
def hashed_anew():
    """What a test makes of a file's text is not kept for the next one."""
    yield
    proven._hashed.cache_clear()
    proven.claim_of_exercise.cache_clear()


@pytest.fixture
def forgotten():
    proven._hashed.cache_clear()
    proven.claim_of_exercise.cache_clear()


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setenv(proven.DAY, "7")
    path = tmp_path / "proven.json"
    proven.write_record(path, [CLAIM])
    return path


def chosen(record, *options, number=240, identity="1.3", **asked):
    items = [Item(f"test_{place}", identity) for place in range(number)] + [
        Item("test_other", path=ROOT / "tests/x.py")
    ]
    proven.choose(Config(*options, **asked), items, record)
    return items


def test_of_what_is_proved_a_share_is_run_and_all_others(record):
    kept = chosen(record, "--sampled")
    assert kept[-1].nodeid.endswith("test_other")
    assert 240 / proven.SHARE / 2 < len(kept) - 1 < 240 / proven.SHARE * 2


def test_where_the_judge_has_changed_since_the_share_is_larger(record):
    proven.write_record(record, [replace(CLAIM, shared="another judge")])
    kept = chosen(record, "--sampled")
    assert 240 / proven.STALE_SHARE / 1.5 < len(kept) - 1 < 240 / proven.STALE_SHARE * 1.5


def test_a_test_of_many_things_tries_a_share_of_them(record):
    """One test that tries sixty slips took nine minutes: sampled or not, it was all or nothing."""
    item = Item("test_slips", marks=["divisible"])
    names = [f"slip_{number}" for number in range(240)]
    assert proven.todays(item, names) == names
    proven.choose(Config("--sampled"), items := [item], record)
    assert items == [item]
    assert 240 / proven.SHARE / 2 < len(proven.todays(item, names)) < 240 / proven.SHARE * 2


def test_a_proof_alone_leaves_out_what_is_proved_and_all_else(record):
    assert chosen(record, "--unproved") == []
    assert len(chosen(record, "--unproved", identity="1.4")) == 240


def test_what_another_machine_has_proved_is_sampled_here_and_can_be_proved_here(record, monkeypatch):
    monkeypatch.setattr(proven, "machine", lambda: "AVX1024, python 4")
    assert len(chosen(record, "--sampled")) < 40
    assert len(chosen(record, "--unproved")) == 240
    proven.write_record(record, [CLAIM])
    assert len(proven.read_record(record)[CLAIM.name]["on"]) == 2
    assert chosen(record, "--unproved") == []


def test_each_test_has_its_day(monkeypatch):
    for name in ("test_a", "test_b"):
        seen = 0
        for day in range(100, 100 + proven.SHARE):
            monkeypatch.setenv(proven.DAY, str(day))
            seen += proven.sampled(name, proven.SHARE)
        assert seen == 1


def test_what_is_asked_for_by_itself_runs_whole(record):
    assert len(chosen(record)) == 241
    assert len(chosen(record, "--sampled", keyword="1.3")) == 241


def test_what_is_not_proved_runs_whole(record):
    assert len(chosen(record, "--sampled", identity="1.4")) == 241


def test_a_cell_that_was_edited_is_not_proved(record, monkeypatch, forgotten):
    monkeypatch.setattr(proven, "cell_of", lambda identity: "another cell")
    assert len(chosen(record, "--sampled")) == 241


def test_the_gate_leaves_what_is_slow_to_a_run_of_everything(record):
    slow = Item("test_slow", path=ROOT / "tests/x.py", marks=["slow"])
    for options, kept in (("--sampled",), []), ((), [slow]):
        proven.choose(Config(*options), items := [slow], record)
        assert items == kept


def test_a_file_of_tests_is_a_claim_where_that_is_said():
    path = ROOT / "tests/kernels/decode/test_append.py"
    assert proven.claim_of(SimpleNamespace(path=path)).name == "kernels/decode/test_append"
    assert proven.claim_of(SimpleNamespace(path=ROOT / "tests/kernels/test_meanings.py")) is None
    assert proven.claim_of(SimpleNamespace(path=ROOT / "tests/checker/judge/test_hostile.py")) is None
    assert all((ROOT / start).exists() or start.startswith("build/") for start in proven.CLAIMS)


def test_a_solved_notebook_is_a_claim_of_its_chapter():
    item = SimpleNamespace(path=ROOT / "build/solved/04_triton_tiling.ipynb")
    claim = proven.claim_of(item)
    assert claim.name == "solved 04" and claim.own != claim.shared
    assert proven.claim_of(SimpleNamespace(path=ROOT / "notebooks/04_triton_tiling.ipynb")) is None


@pytest.mark.parametrize(
    "file, own",
    [
        ("exercises/ch01_memory_hierarchy_and_roofline/ex3_vector_add.py", True),
        ("tests/submissions/ch01_memory_hierarchy_and_roofline/ex3_vector_add.py", True),
        ("exercises/topics/elementwise.py", True),
        ("course_lib/checker/judge/explain.py", False),
        ("course_lib/checker/runner/process/child.py", False),
        ("course_lib/hardware/meter/traffic/triton_internals/speed.py", False),
        ("tests/submissions/test_submissions.py", False),
        ("exercises/ch03_online_softmax/ex5_online_softmax_kernel.py", None),
    ],
)
def test_an_exercise_and_its_answers_are_its_own_the_judge_is_shared_and_others_are_neither(
    file, own, monkeypatch, forgotten
):
    same = proven.content
    monkeypatch.setattr(proven, "content", lambda path: b"changed" if path == ROOT / file else same(path))
    claim = proven.exercise_claim(Item("test"))
    assert (ROOT / file).is_file()
    assert (claim.own != CLAIM.own, claim.shared != CLAIM.shared) == (own is True, own is False)


def report(name, claim, size, when="teardown", failed=False):
    properties = [("claim", [asdict(claim), size, "new"])]
    return SimpleNamespace(user_properties=properties, failed=failed, when=when, nodeid=name)


def finished(recorder, *, status=0):
    recorder.pytest_sessionfinish(SimpleNamespace(testscollected=5), status)
    return proven.read_record(recorder.path)


WHOLE, PART, BROKEN = (proven.Claim(name, "own", "shared") for name in ("whole", "part", "broken"))


def test_a_claim_is_written_down_when_each_of_its_tests_ran_and_none_failed(tmp_path):
    recorder = proven.Recorder(Config("--unproved"), tmp_path / "proven.json")
    for name, claim in (("one", WHOLE), ("two", WHOLE), ("one", PART), ("one", BROKEN)):
        recorder.pytest_runtest_logreport(report(name, claim, 2))
    recorder.pytest_runtest_logreport(report("two", BROKEN, 2, "call", failed=True))
    recorder.pytest_runtest_logreport(report("two", BROKEN, 2))
    record = finished(recorder, status=1)
    assert [*record] == ["whole"] and [*record["whole"]["on"]] == [proven.machine()]


def test_one_test_run_twice_is_not_two(tmp_path):
    recorder = proven.Recorder(Config("--unproved"), tmp_path / "proven.json")
    for _ in range(2):
        recorder.pytest_runtest_logreport(report("one", PART, 2))
    assert finished(recorder) == {}


@pytest.mark.parametrize("options, status, told", [((), 0, True), ((), 1, False), (("--unproved",), 0, False)])
def test_a_run_of_everything_that_passed_is_written_down(tmp_path, options, status, told):
    record = finished(proven.Recorder(Config(*options), tmp_path / "proven.json"), status=status)
    assert (record.get(proven.WHOLE_RUNS, {}).get(proven.machine(), {}).get("tests") == 5) == told


def test_a_changed_claim_keeps_no_machine_that_proved_what_it_was(tmp_path, monkeypatch):
    path = tmp_path / "proven.json"
    monkeypatch.setattr(proven, "machine", lambda: "one")
    proven.write_record(path, [WHOLE])
    monkeypatch.setattr(proven, "machine", lambda: "another")
    proven.write_record(path, [replace(WHOLE, own="changed")])
    assert [*proven.read_record(path)["whole"]["on"]] == ["another"]


def test_a_record_of_a_part_is_refused():
    option = SimpleNamespace(keyword="2.3", markexpr="")
    config = SimpleNamespace(getoption=lambda name: name == "--record", option=option, args=["tests/submissions"])
    with pytest.raises(pytest.UsageError, match="leave out -k"):
        proven.configure(config)
