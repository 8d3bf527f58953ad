"""Where a run's time went, part by part, printed at its end: the next author sees what a chapter costs the gate."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from pathlib import Path

from tests import proven

# The first whose path a test's begins with is its part.
PARTS = {
    "notebooks/": "notebooks, as a learner gets them",
    "build/solved/": "notebooks, solved",
    "tests/submissions/": "wrong, unusual and own answers",
    "tests/checker/specification/test_models.py": "slips told from each other",
    "tests/test_compile_gate.py": "kernels compiled",
    "tests/test_style.py": "style and types",
    "tests/test_types.py": "style and types",
    "tests/checker/": "the checker",
    "tests/grading/": "grading",
    "tests/hardware/": "hardware",
    "tests/kernels/": "kernels",
    "tests/models/": "models and serving",
    "tests/serving/": "models and serving",
    "tests/figures/": "figures",
}
OTHERS = "all other tests"


def part_of(nodeid: str) -> str:
    """The part of the gate that a test belongs to."""
    return next((name for start, name in PARTS.items() if nodeid.startswith(start)), OTHERS)


def configure(config) -> None:
    """Watches where results come together."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Parts())


class Parts:
    """Adds up what each part took, on all workers together."""

    def __init__(self):
        self.started = time.monotonic()
        self.seconds: dict[str, dict[str, float]] = defaultdict(Counter)  # of each part: by test
        self.claims: dict[str, str] = {}  # how each claim stood when the run began

    def pytest_runtest_logreport(self, report):
        self.seconds[part_of(report.nodeid)][report.nodeid] += report.duration
        self.claims |= {value[0]["name"]: value[2] for key, value in report.user_properties if key == "claim"}

    def pytest_terminal_summary(self, terminalreporter, config):
        if sum(map(len, self.seconds.values())) < 100 and config.option.verbose < 1:
            return  # a few tests, whose author asked for no table
        write = terminalreporter.write_line
        terminalreporter.section(f"where {time.monotonic() - self.started:.0f} s went")
        write(f"{'part':36}{'tests':>7}{'seconds':>9}   the longest")
        for part, tests in sorted(self.seconds.items(), key=lambda item: -sum(item[1].values())):
            longest, seconds = max(tests.items(), key=lambda item: item[1])
            name = longest.partition("::")[2] or Path(longest).name
            write(f"{part:36}{len(tests):7}{sum(tests.values()):9.0f}   {seconds:.0f} s {name[:100]}")
        if config.getoption("--sampled") and self.claims:
            write(told_of_claims(Counter(self.claims.values()), proven.read_record(proven.RECORD)))


def told_of_claims(standing: Counter, record: dict) -> str:
    """What the sample is a sample of, and when everything was last run."""
    runs = [f"{run['day']} ({machine})" for machine, run in record.get(proven.WHOLE_RUNS, {}).items()]
    last = max(runs, default="never")
    told = f"Of {sum(standing.values())} claims tried here {standing['proved']} are proved and were sampled"
    if standing["stale"]:
        told += f", {standing['stale']} were proved before what judges them changed (`make prove` renews them)"
    if standing["new"]:
        told += f", {standing['new']} are new and ran whole"
    return f"{told}. `make test-all`, which runs all, last passed: {last}."
