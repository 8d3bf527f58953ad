"""Grading as a whole: every file gets its rows, whatever any of them does, and a killed run loses none."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
from distributed import LocalCluster
from distributed.scheduler import KilledWorker

from course_lib import cli
from course_lib.checker import CourseError
from course_lib.checker.runner.worker import confine_workers
from course_lib.checker.specification import catalog
from course_lib.grading import cluster, sandbox
from course_lib.grading.journal import Journal
from course_lib.grading.reading import Answer
from course_lib.grading.run import Run, grade
from course_lib.grading.submission import FORMAT, VERSION
from course_lib.home import ROOT
from tests.grading.test_reading import notebook

SANDBOXED = sandbox.why_not() is None
RIGHT = catalog.solution_source("2.1")
WRONG = RIGHT.replace("matrix + matrix", "matrix")
HEADER = RIGHT.splitlines()[0] + "\n"


def doing(*lines):
    """The right answer to exercise 2.1 that does something else first."""
    return RIGHT.replace("    queries =", "".join(f"    {line}\n" for line in lines) + "    queries =")


HOSTILE = {
    "exits": doing("import os; os._exit(0)"),
    "kills": doing("import os, signal; os.kill(os.getppid(), signal.SIGKILL)"),
    "prints": doing("while True: print('x' * 10000)"),
    "forks": doing("import os", "while True: os.fork()") if SANDBOXED else doing("raise OSError"),
    "reads": doing(f"raise ValueError(open({str(ROOT / 'solutions' / '02_naive_attention.py')!r}).read())"),
    "nests": HEADER + "x = " + "(" * 5000 + ")" * 5000,
    "digs": HEADER + "x = " + "-" * 200_000 + "1",
    "bloats": HEADER + "#" * 300_000,
    "zero": HEADER + "x = 1\0",
    "surrogate": doing("raise ValueError('\\udc80 \\x1b[2J =1+1')"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("handed in")
    (folder / "right.ipynb").write_bytes(notebook("import torch", RIGHT))
    (folder / "wrong.py").write_text(f"# %%\n{WRONG}")
    entries = [{"exercise": "2.1", "source": WRONG, "outcome": "passed", "points": 100}]
    (folder / "boasts.json").write_text(json.dumps({"format": FORMAT, "version": VERSION, "exercises": entries}))
    (folder / "copied.ipynb").write_bytes(notebook("import torch", RIGHT))
    (folder / "given.ipynb").write_bytes((ROOT / "notebooks" / "02_naive_attention.ipynb").read_bytes())
    (folder / "broken.ipynb").write_text('{"cells": ')
    (folder / "twice.ipynb").write_bytes(notebook(RIGHT, WRONG))
    (folder / "=1+1.py").write_text("print(1)")
    with open(folder / "big.ipynb", "wb") as file:
        file.truncate(1 << 30)
    (folder / "link.py").symlink_to(folder / "wrong.py")
    for name, source in HOSTILE.items():
        (folder / f"{name}.ipynb").write_bytes(notebook(source))
    return folder


@pytest.fixture(scope="module")
def rows(folder):
    """One run over all of it: the rows of 2.1, or of the file, by file name."""
    out = folder.parent / "grades.csv"
    found = grade([folder], out, folder.parent / "grades.json", jobs=1, sandboxed=SANDBOXED)
    assert all(row["points"] == (row["outcome"] == "passed") for row in found)
    return {row["file"].rsplit("/", 1)[1]: row for row in found if row["exercise"] in ("", "2.1")}


def test_every_file_has_its_rows_and_every_exercise_of_its_chapter(folder, rows):
    with open(folder.parent / "grades.csv", newline="") as file:
        table = list(csv.DictReader(file))
    counts = Counter(row["file"].rsplit("/", 1)[1] for row in table)
    assert set(counts) == set(rows) == {path.name for path in folder.iterdir()}
    unreadable = {row["file"].rsplit("/", 1)[1] for row in table if row["outcome"] == "unreadable"}
    assert unreadable == {"broken.ipynb", "=1+1.py", "big.ipynb", "link.py"}
    assert all(counts[name] == (1 if name in unreadable else 6) for name in counts)


def test_right_answers_pass_in_every_file_and_copies_are_equal(rows):
    assert rows["right.ipynb"]["outcome"] == rows["copied.ipynb"]["outcome"] == "passed"
    assert rows["right.ipynb"]["seed"] == rows["copied.ipynb"]["seed"], "the same content was judged twice"
    assert rows["given.ipynb"]["outcome"] == "not_attempted"


def test_a_wrong_answer_is_told_its_mistake_wherever_it_stands(rows):
    for name in ("wrong.py", "boasts.json", "twice.ipynb"):
        assert rows[name]["outcome"] == "failed" and rows[name]["mistake"] and rows[name]["points"] == 0, name
    assert "Several cells" in rows["twice.ipynb"]["message"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_gets_its_row_and_no_point(rows, name):
    row = rows[f"{name}.ipynb"]
    assert row["outcome"] in ("error", "crashed", "timeout", "unreadable", "failed"), row
    assert "queries" not in row["message"], "an answer of the course was read"


def test_json_has_the_same_rows_with_seeds_and_cases(folder, rows):
    entries = json.loads((folder.parent / "grades.json").read_text())
    [right] = [entry for entry in entries if entry["file"].endswith("right.ipynb") and entry["exercise"] == "2.1"]
    assert right["outcome"] == "passed" and right["seed"] is not None and len(right["cases"]) > 3


def test_a_second_run_judges_nothing_again_and_a_new_file_alone(folder, rows, monkeypatch):
    judged = []
    original = Run._send
    monkeypatch.setattr(
        Run, "_send", lambda run, client, task, s: judged.append(task) or original(run, client, task, s)
    )
    late = folder.parent / "late.py"
    late.write_text(f"# %%\n{RIGHT}# late\n")
    found = grade([folder, late], folder.parent / "grades.csv", jobs=1, sandboxed=SANDBOXED)
    assert {task[2].exercise for task in judged if task[0] == "judge"} == {f"2.{n}" for n in range(1, 7)}
    assert sum(task[0] == "judge" for task in judged) == 6
    assert {row["file"].rsplit("/", 1)[1] for row in found if row["outcome"] == "passed"} == {
        "right.ipynb",
        "copied.ipynb",
        "late.py",
    }


def test_a_table_that_was_edited_is_not_written_over(folder, rows, tmp_path):
    out = tmp_path / "grades.csv"
    out.write_text("file,points\nmine,3\n")
    with pytest.raises(CourseError, match="was changed since"):
        grade([folder], out)
    assert out.read_text() == "file,points\nmine,3\n"


def _slow_files(place, number):
    """A folder of so many files whose first answer takes a while, each with contents of its own."""
    folder = place / "files"
    folder.mkdir()
    for name in range(number):
        source = doing("import time; time.sleep(0.3)") + f"# {name}\n"
        (folder / f"{name}.ipynb").write_bytes(notebook(source))
    return folder


def _rows_in(journal):
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [json.loads(line) for line in lines if '"row"' in line]


def _start(folder, out):
    command = [sys.executable, "-m", "course_lib", "grade", str(folder), "--out", str(out), "--jobs", "1"]
    return subprocess.Popen(
        command + ([] if SANDBOXED else ["--unsandboxed"]),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job ignores Ctrl-C, and would hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _wait_for(condition, process, seconds=1200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_its_successor_loses_no_row_and_judges_none_twice(tmp_path):
    folder, out = _slow_files(tmp_path, 5), tmp_path / "grades.csv"
    journal = tmp_path / "grades.csv.journal"
    process = _start(folder, out)
    _wait_for(lambda: len(_rows_in(journal)) >= 6, process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=300)
    assert not alive, [child.cmdline() for child in alive]
    before = len(_rows_in(journal))
    assert before < 30
    again = _start(folder, out)
    output, errors = again.communicate(timeout=1200)
    assert again.returncode == 0, output + errors
    found = [(line["content"], line["row"]["exercise"]) for line in _rows_in(journal)]
    assert len(found) == len(set(found)) == 30
    assert f"{30 - before} exercises graded" in errors and "5 passed" in output
    assert len(out.read_text().splitlines()) == 31


@pytest.mark.slow
def test_ctrl_c_is_one_line_and_keeps_the_rows(tmp_path):
    folder, out = _slow_files(tmp_path, 3), tmp_path / "grades.csv"
    process = _start(folder, out)
    _wait_for(lambda: _rows_in(tmp_path / "grades.csv.journal"), process)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process of the command
    output, errors = process.communicate(timeout=1200)
    assert process.returncode == 130 and output == ""
    bar, said = errors.strip().splitlines()
    assert bar.startswith("[") and said.startswith("Interrupted.") and "the same command goes on" in said
    assert len(out.read_text().splitlines()) == 1 + len(_rows_in(tmp_path / "grades.csv.journal")) > 1


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_no_row(tmp_path):
    folder, out = _slow_files(tmp_path, 4), tmp_path / "grades.csv"
    process = _start(folder, out)
    _wait_for(lambda: len(_rows_in(tmp_path / "grades.csv.journal")) >= 3, process)
    spawned = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    spawned[0].kill()
    output, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, output + errors
    with open(out, newline="") as file:
        assert Counter(row["outcome"] for row in csv.DictReader(file)) == {"passed": 4, "not_attempted": 20}


def test_an_answer_whose_process_dies_is_tried_once_more_and_then_said_to_be_ungraded(tmp_path):
    with Journal(tmp_path / "grades.csv") as journal:
        run = Run([], journal, tmp_path / "grades.csv", None)
        future = SimpleNamespace(status="error", exception=lambda: KilledWorker("task", None, 2))
        [again] = run._receive(future, ("judge", "abc", Answer("2.1", RIGHT), 0))
        assert again == ("judge", "abc", Answer("2.1", RIGHT), 1) and len(journal) == 0
        assert run._receive(future, again) == []
        row = journal.row("abc", "2.1")
        assert row["outcome"] == "ungraded" and "no fault of the answer" in row["message"] and row["points"] == 0


def test_a_file_that_a_worker_failed_to_read_is_ungraded_and_not_called_unreadable(tmp_path):
    with Journal(tmp_path / "grades.csv") as journal:
        run = Run([tmp_path / "a.py"], journal, tmp_path / "grades.csv", None)
        run.content_of[tmp_path / "a.py"] = "abc"
        run.open["abc"] = 1
        future = SimpleNamespace(status="error", exception=lambda: RuntimeError("no such module"))
        assert run._receive(future, ("read", "abc", b"", 0)) == []
        [row] = run.rows()
        assert row["outcome"] == "ungraded" and "no such module" in row["message"] and run._files_done() == 1


def test_a_cluster_that_does_not_know_the_course_is_said_with_what_to_do():
    def unknown(function):
        raise ModuleNotFoundError("No module named 'course_lib'")

    client = SimpleNamespace(wait_for_workers=lambda *a, **k: None, run_on_scheduler=unknown)
    with pytest.raises(CourseError, match="No module named 'course_lib'.*PYTHONPATH"):
        cluster._require_able_workers(client, "tcp://there", sandboxed=True)


@pytest.mark.parametrize(
    "about, words",
    [(("0123", None), "version 0123 of the course"), ((None, "no bubblewrap"), "On the worker w1: no bubblewrap")],
)
def test_a_worker_that_cannot_judge_is_named(about, words):
    answer = (about[0] or cluster.course_version(), about[1])
    client = SimpleNamespace(
        wait_for_workers=lambda *a, **k: None, run_on_scheduler=lambda f: None, run=lambda f: {"w1": answer}
    )
    with pytest.raises(CourseError, match=words):
        cluster._require_able_workers(client, "tcp://there", sandboxed=True)


def test_a_scheduler_that_goes_away_ends_the_run_with_a_sentence(tmp_path):
    with Journal(tmp_path / "grades.csv") as journal:
        run = Run([], journal, tmp_path / "grades.csv", None)
        with pytest.raises(CourseError, match="run the same command again"):
            run._receive(SimpleNamespace(status="lost"), ("judge", "abc", Answer("2.1", RIGHT), 0))


# ---------------------------------------------------------------------------------------------- the command line


def test_without_dask_the_command_says_what_to_install(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert cli.main(["grade", str(folder), "--out", str(tmp_path / "grades.csv")]) == 2
    said = capsys.readouterr().err
    assert "requirements-grade.txt" in said and len(said.strip().splitlines()) == 1


def test_without_a_sandbox_the_command_asks_for_unsandboxed(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cluster.sandbox, "why_not", lambda: "There is none. Or grade with --unsandboxed.")
    assert cli.main(["grade", str(folder), "--out", str(tmp_path / "grades.csv")]) == 2
    assert capsys.readouterr().err == "There is none. Or grade with --unsandboxed.\n"


def test_a_scheduler_that_does_not_answer_is_said(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cluster, "WAIT_FOR_SCHEDULER", 1.0)
    out = str(tmp_path / "grades.csv")
    assert cli.main(["grade", str(folder), "--out", out, "--scheduler", "tcp://127.0.0.1:9"]) == 2
    assert "No Dask scheduler answers at tcp://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nothing.ipynb", "--out", "{}/grades.csv"], "nothing.ipynb: is no file"),
        (["{}", "--out", "{}/grades.csv"], "a folder without"),
        (["{}", "--out", "{}/no/grades.csv"], "--out takes a file in a folder that exists"),
        (["{}", "--out", "{}"], "cannot be written"),
    ],
)
def test_a_command_that_cannot_run_is_one_line_and_status_2(tmp_path, capsys, arguments, words):
    assert cli.main(["grade", *(argument.replace("{}", str(tmp_path)) for argument in arguments)]) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_a_number_of_jobs_that_is_none_is_refused(tmp_path, jobs, capsys):
    with pytest.raises(SystemExit):
        cli.main(["grade", "x.py", "--out", str(tmp_path / "g.csv"), "--jobs", jobs])
    assert "a whole number from 1 on" in capsys.readouterr().err


def test_an_existing_cluster_judges_too(tmp_path):
    (tmp_path / "right.ipynb").write_bytes(notebook(RIGHT))
    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address="127.0.0.1:0"
    ) as other:
        found = grade([tmp_path], tmp_path / "grades.csv", scheduler=other.scheduler_address, sandboxed=SANDBOXED)
    confine_workers(None)  # the cluster's worker lived in this process
    assert [row["outcome"] for row in found] == ["passed"] + ["not_attempted"] * 5
