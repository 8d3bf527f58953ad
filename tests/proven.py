"""What need not be run whole each time: tests whose outcome follows from files that have not changed since they passed.

Most of a whole run asks the same of the same content again: what each wrong answer is told, whether each slip is told
from the others, whether each kernel compiles for seven architectures, whether each solved notebook runs to its end. So
these are proved once, and the proof is written down. A *claim* is some tests of one thing (the submissions of exercise
3.2, the kernels of one file, the solved chapter 04), with two hashes. `own` covers what an author of that thing writes:
its files, what they share with their neighbours, and its cell. `shared` covers all else that decides: the judge, the
runner, the compiler's view. `proven.json` holds both of each claim, and on which machines it was proved when.

The gate (`--sampled`) runs a claim whole where its own content is another than the proved one. Else it runs a share of
it, other tests each day, so that a record that is wrong does not stay unnoticed for long: one test in SHARE where all
that decides is as it was, one in STALE_SHARE where the judge has changed since. (A test that tries many things is
marked `divisible`, and tries a share of them.) On which processor something was proved makes no difference to the gate:
what one adds up in another order is found by the sample, and by a whole run there.

`--record` writes down what the run proves; alone, with everything (`make test-all`), or with `--unproved`, which runs
only what is not proved yet (`make prove`). A claim is stored only when each of its tests ran here and none failed, and
nothing else writes the file.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from course_lib.checker.specification import catalog
from course_lib.grading.imports import closure
from course_lib.grading.version import JUDGE
from course_lib.home import ROOT

RECORD = ROOT / "tests" / "proven.json"
DAY = "COURSE_DAY"  # a day's number: set, it plays another day's sample
SHARE, STALE_SHARE = 24, 8  # one test in so many is run
PACKAGES = ("torch", "triton", "numpy")
WHOLE_RUNS = "whole runs"  # what the record calls them
KNOWN: dict[Path, set[Path]] = {}  # what single files need
TODAYS = pytest.StashKey[int]()  # of a divisible test: one part in so many is tried


# ------------------------------------------------------------------------------------------------------- the claims


@dataclass(frozen=True)
class Claim:
    """Some tests whose outcome their content decides.

    Attributes:
        name: of all tests of a file on one exercise, on one kernels' file, or of one solved notebook.
        own: a hash of what its author writes.
        shared: a hash of all else that decides the outcome.
    """

    name: str
    own: str
    shared: str


def exercise_claim(item) -> Claim | None:
    """Of the tests of a file on one exercise."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    identity = given["identity"] if "identity" in given else given["task"].id if "task" in given else None
    known = identity in catalog.exercise_files()  # a test of the checker has exercises of its own
    return claim_of_exercise(identity, item.path) if known else None


@functools.cache
def claim_of_exercise(identity: str, tests: Path) -> Claim:
    """It hangs on the judge, the exercise with what it imports, its submissions and the tests themselves."""
    description = catalog.exercise_files()[identity]
    submissions = ROOT / "tests/submissions" / description.relative_to(ROOT / "exercises")
    start = [*(ROOT / name for name in JUDGE), description, tests, *filter(Path.exists, [submissions])]
    name = f"{tests.stem.removeprefix('test_')} {identity}"
    return _claim(name, start, ("exercises", "tests/submissions/ch"), cell_of(identity))


def kernel_claim(item) -> Claim | None:
    """Of a unit of the compile gate."""
    if not hasattr(item, "callspec") or "unit" not in item.callspec.params:
        return None
    module = item.callspec.params["unit"].module
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return _claim(f"compiled {module}", [file, item.path], ("course_lib/kernels",))


def file_claim(item) -> Claim:
    """Of a test on one exercise, and else of its whole file, which names by imports all that it is about."""
    name = item.path.relative_to(ROOT / "tests").with_suffix("").as_posix()
    return exercise_claim(item) or _claim(name, [item.path], ("course_lib", "tests"))


def notebook_claim(item) -> Claim:
    """Of a solved notebook: the chapter itself, and on the other hand all that it calls."""
    chapter = item.path.stem[:2]
    start = [*(ROOT / name for name in JUDGE), *ROOT.glob(f"exercises/ch{chapter}_*/*.py")]
    return _claim(f"solved {chapter}", [ROOT / "solutions" / f"{item.path.stem}.py", *start], ("solutions",))


# Of the files whose path begins so, by the longest that fits. Files of tests stand here where they take long.
CLAIMS = {
    "build/solved/": notebook_claim,
    "tests/submissions/": exercise_claim,
    "tests/checker/": exercise_claim,
    "tests/checker/judge/test_compiling.py": file_claim,
    "tests/checker/runner/test_ahead.py": file_claim,
    "tests/checker/runner/test_graphs.py": file_claim,
    "tests/checker/runner/test_ranks.py": file_claim,
    "tests/checker/runner/test_standing_by.py": file_claim,
    "tests/hardware/compiler/": file_claim,
    "tests/hardware/meter/test_interpreter_speed.py": file_claim,
    "tests/hardware/profile/": file_claim,
    "tests/kernels/": file_claim,
    "tests/kernels/test_meanings.py": None,  # it looks for its kernels by itself
    "tests/models/test_transformers_attention.py": file_claim,
    "tests/serving/test_draft.py": file_claim,
    "tests/serving/test_engine.py": file_claim,
    "tests/serving/test_fast_step.py": file_claim,
    "tests/serving/test_speculation.py": file_claim,
    "tests/test_compile_gate.py": kernel_claim,
}


def _claim(name: str, start: Iterable[Path], homes: tuple[str, ...], text: str = "") -> Claim:
    """start: the files that decide, with all that they need. homes: where what is the claim's own lies."""
    return _hashed(name, frozenset(start), homes, text)


@functools.cache
def _hashed(name: str, start: frozenset[Path], homes: tuple[str, ...], text: str) -> Claim:
    files = closure(start, ROOT, KNOWN)
    own = {path for path in files if path.relative_to(ROOT).as_posix().startswith(homes)}
    return Claim(name, digest(own, text), digest(files - own))


@functools.cache
def cell_of(identity: str) -> str:
    """As the learner meets it and as it is solved: the rest of a chapter's text decides nothing."""
    return catalog.untouched_source(identity) + catalog.solution_source(identity)


def digest(files: Iterable[Path], text: str = "") -> str:
    """Sixteen hexadecimal digits of the files and a text."""
    found = hashlib.sha256(text.encode())
    for path in sorted(files):
        found.update(content(path))
    return found.hexdigest()[:16]


@functools.cache
def content(path: Path) -> bytes:
    """A hash of a file's place and text."""
    text = path.read_bytes().replace(b"\r\n", b"\n")
    return hashlib.sha256(path.relative_to(ROOT).as_posix().encode() + b"\0" + text).digest()


@functools.cache
def machine() -> str:
    """The instructions that PyTorch takes here, and the versions that compute, in two numbers each."""
    import torch

    versions = (".".join(importlib.metadata.version(name).split(".")[:2]) for name in PACKAGES)
    python = f"python {sys.version_info[0]}.{sys.version_info[1]}"
    return ", ".join([torch.backends.cpu.get_cpu_capability(), python, *map(" ".join, zip(PACKAGES, versions))])


# ------------------------------------------------------------------------------------------------------ the record


def read_record(path: Path) -> dict[str, dict]:
    """By claim `own`, `shared`, and `on`: the machines that proved it, each with the day. And `WHOLE_RUNS`."""
    return json.loads(path.read_text()) if path.exists() else {}


def standing(claim: Claim, record: dict[str, dict]) -> str:
    """ "proved", "stale" where what it shares with others has changed since, or "new"."""
    proof = record.get(claim.name)
    if proof is None or proof["own"] != claim.own:
        return "new"
    return "proved" if proof["shared"] == claim.shared else "stale"


def write_record(path: Path, claims: Iterable[Claim], whole_run: dict | None = None) -> None:
    """Adds what was proved here, today, and a run of everything where there was one."""
    record, today = read_record(path), datetime.date.today().isoformat()
    for claim in claims:
        on = record[claim.name]["on"] if standing(claim, record) == "proved" else {}
        record[claim.name] = {"own": claim.own, "shared": claim.shared, "on": {**on, machine(): today}}
    if whole_run:
        record.setdefault(WHOLE_RUNS, {})[machine()] = {"day": today, **whole_run}
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


# --------------------------------------------------------------------------------------------------- pytest's hooks


def add_options(parser) -> None:
    """Without any of these every test runs, and nothing is written."""
    parser.addoption("--sampled", action="store_true", help=f"of what is proved run one test in {SHARE}")
    parser.addoption(
        "--unproved", action="store_true", help="run only what could be proved and is not, on this machine"
    )
    parser.addoption("--record", action="store_true", help="write down what this run proves")


def configure(config) -> None:
    """Fixes the day for all workers, and gathers what they prove where their results come together."""
    os.environ.setdefault(DAY, str(datetime.date.today().toordinal()))
    if not config.getoption("--record"):
        return
    if is_part(config):
        raise pytest.UsageError("--record writes down what is proved whole: leave out -k, -m and single tests.")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config))


def is_part(config) -> bool:
    """Whether some tests are asked for by name: these run whole."""
    return bool(config.option.keyword or config.option.markexpr or any("::" in name for name in config.args))


def claim_of(item) -> Claim | None:
    """The claim of which a test is a part; None for one that is run each time."""
    if not item.path.is_relative_to(ROOT):
        return None
    place = item.path.relative_to(ROOT).as_posix()
    finder = CLAIMS.get(max(filter(place.startswith, CLAIMS), key=len, default=""))
    return finder(item) if finder else None


def choose(config, items: list, path: Path = RECORD) -> None:
    """With `--sampled` a share of each proved claim and all else; with `--unproved` what is not proved here."""
    unproved, gate = config.getoption("--unproved"), config.getoption("--sampled") and not is_part(config)
    if not (unproved or gate or config.getoption("--record")):
        return
    claims = {item: claim for item in items if (claim := claim_of(item))}
    sizes, record, left_out = Counter(claims.values()), read_record(path), set()
    for item in items:
        if item not in claims:
            if unproved or gate and item.get_closest_marker("slow"):
                left_out.add(item)
            continue
        claim = claims[item]
        state = standing(claim, record)
        item.user_properties.append(("claim", [asdict(claim), sizes[claim], state]))
        if unproved and state == "proved" and machine() in record[claim.name]["on"]:
            left_out.add(item)
        elif gate and state != "new":
            share = SHARE if state == "proved" else STALE_SHARE
            if item.get_closest_marker("divisible"):
                item.stash[TODAYS] = share
            elif not sampled(item.nodeid, share):
                left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def todays(item, names: Iterable[str]) -> list[str]:
    """Of a test marked as divisible: which of these names it is to try, all of them where it runs whole."""
    share = item.stash.get(TODAYS, 1)
    return [name for name in names if sampled(f"{item.nodeid} {name}", share)]


def sampled(name: str, share: int) -> bool:
    """Whether it is this test's day, one in `share`."""
    return (zlib.crc32(name.encode()) + int(os.environ[DAY])) % share == 0


class Recorder:
    """Gathers, where results come together, what was proved, and writes it down at the end."""

    def __init__(self, config=None, path: Path = RECORD):
        self.config, self.path = config, path
        self.failed: set[str] = set()
        self.done: dict[Claim, set[str]] = defaultdict(set)
        self.sizes: dict[Claim, int] = {}

    def pytest_runtest_logreport(self, report):
        for key, value in report.user_properties:
            if key != "claim":
                continue
            claim = Claim(**value[0])
            self.sizes[claim] = value[1]
            if report.failed:
                self.failed.add(claim.name)
            elif report.when == "teardown":
                self.done[claim].add(report.nodeid)

    def pytest_sessionfinish(self, session, exitstatus):
        proved = [
            claim
            for claim, tests in self.done.items()
            if claim.name not in self.failed and len(tests) == self.sizes[claim]
        ]
        whole = exitstatus == 0 and not self.config.getoption("--unproved") and not self.config.getoption("--sampled")
        write_record(self.path, proved, {"tests": session.testscollected} if whole else None)
