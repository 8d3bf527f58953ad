"""What need not be run whole each time: tests whose outcome follows from files that have not changed since they passed.

Two thirds of the gate ask the same of the same content in every run: what each wrong answer is told, whether each slip
is told from the others, whether each kernel compiles for seven architectures. So they are proved once, and the proof is
written down: `make prove` runs them and stores, for each *claim* (the submissions of exercise 3.2, the kernels of one
file), a hash of all that decides its outcome, in `proven.json`. The gate (`--sampled`) runs a claim whole where that
hash is another, or where this processor's instructions are others than those of the proof; else it runs one test in
SHARE of it, others each day, so that a record that is wrong does not stay unnoticed for long.

A record cannot be written for less than the claim: `--prove` refuses -k, -m and single tests, and a claim is stored
only when each of its tests ran here and none failed. Nothing writes it but that.
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
from dataclasses import dataclass
from pathlib import Path

import pytest

from course_lib.checker.specification import catalog
from course_lib.grading.imports import closure
from course_lib.grading.version import JUDGE
from course_lib.home import ROOT

RECORD = ROOT / "tests" / "proven.json"
DAY = "COURSE_DAY"  # a day's number: set, it plays another day's sample
SHARE = 8  # of a claim that is proved one test in so many is run
PACKAGES = ("torch", "triton", "numpy")


# ------------------------------------------------------------------------------------------------------- the claims


@dataclass(frozen=True)
class Claim:
    """Some tests whose outcome their content decides.

    Attributes:
        name: of all tests of a file on one exercise, or on one kernels' file.
        hash: of all that decides their outcome.
        processor: whose instructions decide with it; "any" where none do.
    """

    name: str
    hash: str
    processor: str


def exercise_claim(given: dict, tests: Path) -> Claim | None:
    """Of a test on one exercise."""
    identity = given["identity"] if "identity" in given else given["task"].id if "task" in given else None
    if identity is None:
        return None
    files = frozenset(files_of_exercise(identity, tests))
    return Claim(f"{tests.stem.removeprefix('test_')} {identity}", digest(files, cell_of(identity)), processor())


def kernel_claim(given: dict, tests: Path) -> Claim | None:
    """Of a unit of the compile gate."""
    if "unit" not in given:
        return None
    module = given["unit"].module
    file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return Claim(f"compiled {module}", digest(frozenset(closure([file, tests], ROOT)), ""), "any")


CLAIMS = {
    "tests/submissions/test_submissions.py": exercise_claim,
    "tests/checker/specification/test_models.py": exercise_claim,
    "tests/test_compile_gate.py": kernel_claim,
}


@functools.cache
def files_of_exercise(identity: str, tests: Path) -> set[Path]:
    """The judge, the exercise with what it imports, its submissions and the tests themselves."""
    description = catalog.exercise_files()[identity]
    submissions = ROOT / "tests/submissions" / description.relative_to(ROOT / "exercises")
    start = [ROOT / name for name in JUDGE] + [description, tests, Path(__file__)]
    return closure(start + [path for path in (submissions,) if path.exists()], ROOT)


@functools.cache
def cell_of(identity: str) -> str:
    """As the learner meets it and as it is solved: the rest of a chapter's text decides nothing."""
    return catalog.untouched_source(identity) + catalog.solution_source(identity)


@functools.cache
def digest(files: frozenset[Path], text: str) -> str:
    """Twenty hexadecimal digits of the files, a text and the versions that they run on."""
    found = hashlib.sha256(json.dumps([text, *versions()]).encode())
    for path in sorted(files):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + content(path) + b"\0")
    return found.hexdigest()[:20]


@functools.cache
def content(path: Path) -> bytes:
    return path.read_bytes().replace(b"\r\n", b"\n")


@functools.cache
def versions() -> tuple[str, ...]:
    """Of Python and of the packages that compute, in two numbers each."""
    found = [".".join(importlib.metadata.version(name).split(".")[:2]) for name in PACKAGES]
    return (f"python {sys.version_info[0]}.{sys.version_info[1]}", *map(" ".join, zip(PACKAGES, found)))


@functools.cache
def processor() -> str:
    """The instructions that PyTorch takes here: what they add up in another order may come out differently."""
    import torch

    return torch.backends.cpu.get_cpu_capability()


# --------------------------------------------------------------------------------------------------- pytest's hooks


def read_record(path: Path) -> dict[str, dict[str, str]]:
    """Of each processor: the claims that were proved on it, with their hashes."""
    return json.loads(path.read_text()) if path.exists() else {}


def add_options(parser) -> None:
    """`--sampled` and `--prove`; without them every test runs."""
    parser.addoption("--sampled", action="store_true", help=f"of what is proved run one test in {SHARE}")
    parser.addoption("--prove", action="store_true", help="run what is not proved yet, and write down what then is")


def configure(config) -> None:
    """Fixes the day for all workers, and gathers what they prove where their results come together."""
    os.environ.setdefault(DAY, str(datetime.date.today().toordinal()))
    if not config.getoption("--prove"):
        return
    if is_part(config):
        raise pytest.UsageError("--prove proves whole files: leave out -k, -m and names of single tests.")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Prover())


def is_part(config) -> bool:
    """Whether some tests are asked for by name: these run whole."""
    return bool(config.option.keyword or config.option.markexpr or any("::" in name for name in config.args))


def claim_of(item) -> Claim | None:
    """The claim of which a test is a part; None for one that is run each time."""
    finder = CLAIMS.get(item.path.relative_to(ROOT).as_posix()) if item.path.is_relative_to(ROOT) else None
    return finder(item.callspec.params, item.path) if finder and hasattr(item, "callspec") else None


def choose(config, items: list, path: Path = RECORD) -> None:
    """With `--sampled` one test in SHARE of each proved claim; with `--prove` what is not proved, and nothing else.

    With both the gate runs, and writes down what it proves.
    """
    prove, gate = config.getoption("--prove"), config.getoption("--sampled")
    if not prove and (not gate or is_part(config)):
        return
    claims = {item: claim for item in items if (claim := claim_of(item))}
    sizes, record, left_out = Counter(claims.values()), read_record(path), set()
    for item in items:
        if item not in claims:
            left_out |= set() if gate else {item}
            continue
        claim = claims[item]
        item.user_properties.append(("claim", [claim.name, claim.hash, claim.processor, sizes[claim]]))
        proved = record.get(claim.processor, {}).get(claim.name) == claim.hash
        if proved and not (gate and sampled(item.nodeid, int(os.environ[DAY]))):
            left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def sampled(name: str, day: int) -> bool:
    """Whether it is this test's day."""
    return (zlib.crc32(name.encode()) + day) % SHARE == 0


class Prover:
    """Gathers, where results come together, what was proved, and writes it down at the end."""

    def __init__(self, path: Path = RECORD):
        self.path = path
        self.failed: set[str] = set()
        self.done: dict[tuple[str, str, str, int], set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report):
        for key, claim in report.user_properties:
            if key != "claim":
                continue
            if report.failed:
                self.failed.add(claim[0])
            elif report.when == "teardown":
                self.done[tuple(claim)].add(report.nodeid)

    def pytest_sessionfinish(self):
        record = read_record(self.path)
        for (name, hashed, machine, size), tests in self.done.items():
            if name not in self.failed and len(tests) == size:
                record.setdefault(machine, {})[name] = hashed
        self.path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
