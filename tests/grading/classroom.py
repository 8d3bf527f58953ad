"""A class of learners, made up of right, unusual, wrong and hostile answers: what grading at scale is measured with.

    python -m tests.grading.classroom make FOLDER --learners 500 --chapters 02,03
    python -m course_lib grade FOLDER --out grades.csv
    python -m tests.grading.classroom compare FOLDER grades.csv

`make` writes one notebook for each learner and `expected.txt` beside the folder, `compare` holds the table against it:
each row there once, no right answer failed, no wrong or hostile one passed, the share of mistakes that were named.
"""

import argparse
import ast
import csv
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

from course_lib.checker.specification import catalog
from course_lib.home import ROOT
from tests.submissions.everything import unusual, wrong

HOSTILE_SHARE = 0.2
ANSWERS = ROOT / "solutions" / "03_online_softmax.py"
# What a hostile answer does before it raises: none of these may pass, end the grader, or keep it for long.
DEEDS = {
    "sleeps": "import time; time.sleep(3600)",
    "loops": "while True: pass",
    "forks": "import os\nwhile True: os.fork()",
    "spawns": "import subprocess\nwhile True: subprocess.Popen(['sleep', '600'], start_new_session=True)",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()",
    "hoards": "hoard = []\nwhile True: hoard.append(bytearray(64 << 20))",
    "fills": "while True: open(str(id(object())) + str(__import__('time').time()), 'wb').write(bytes(32 << 20))",
    "prints": "while True: print('x' * 1000)",
    "prints binary": "import os; os.write(1, bytes(range(256)) * 100)",
    "exits": "import os; os._exit(0)",
    "quits": "raise SystemExit(0)",
    "segfaults": "import ctypes; ctypes.string_at(0)",
    "recurses": "import sys; sys.setrecursionlimit(10**9); f = lambda: f(); f()",
    "kills": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "kills all": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "reads": f"raise ValueError(open({str(ANSWERS)!r}).read())",
    "imports": "import exercises.ch03_online_softmax",
    "lists": f"import os; raise ValueError(os.listdir({str(ROOT / 'solutions')!r}))",
    "deletes": "import shutil; shutil.rmtree('/', ignore_errors=True)",
    "connects": "import socket; socket.create_connection(('127.0.0.1', 8786), 2)",
    "forges": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\xff' * 64)\n    except OSError: pass",
    "patches": "import torch; torch.equal = torch.allclose = torch.Tensor.__eq__ = lambda *a, **k: True",
    "says formulas": "raise ValueError('=HYPERLINK(\"http://x\") \\udc80 \\x1b[2J')",
}


def attacking(identity: str, deed: str) -> str:
    """The course's answer to an exercise, which does the deed at the head of its first function and then gives up."""
    source = catalog.solution_source(identity)
    entry = catalog.exercise(identity).entries[0]
    [function] = [node for node in ast.parse(source).body if getattr(node, "name", "") == entry]
    first = function.body[0] if isinstance(function, ast.FunctionDef) else function.body[-1].body[0]
    lines = source.splitlines()
    indent = " " * first.col_offset
    added = [indent + line for line in [*DEEDS[deed].splitlines(), "raise RuntimeError('and gave up')"]]
    return "\n".join([*lines[: first.lineno - 1], *added, *lines[first.lineno - 1 :]]) + "\n"


def as_notebook(sources: list[str], note: str) -> str:
    cells = [
        {"cell_type": "code", "id": f"c{n}", "metadata": {}, "source": text, "outputs": [], "execution_count": None}
        for n, text in enumerate([f"import torch  # {note}", *sources])
    ]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells})


def spoiled(kind: str, path: Path, text: str) -> None:
    """Write a file that is itself an attack."""
    if kind == "broken":
        path.write_text(text[: len(text) // 2])
    elif kind == "binary":
        path.write_bytes(os.urandom(10_000))
    elif kind == "huge":
        with open(path, "wb") as file:
            file.truncate(1 << 30)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(ANSWERS)
    elif kind == "deep":
        path.write_text('{"cells": ' + "[" * 200_000)


SPOILS = ("broken", "binary", "huge", "pipe", "link", "deep")


def make(folder: Path, learners: int, chapters: list[str], seed: int) -> None:
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    expected = []
    for number in range(learners):
        chapter = chapters[number % len(chapters)]
        tasks = [task for task in catalog.exercises().values() if task.chapter == chapter]
        path = folder / f"learner_{number:04d}_{chapter}.ipynb"
        hostile = number % round(1 / HOSTILE_SHARE) == 0
        sources, kinds = [], {}
        for task in tasks:
            way = draw.choices(["right", "unusual", "wrong", "none"], [5, 1, 3, 1])[0]
            if way == "unusual" and not unusual(task.id):
                way = "right"
            if way == "wrong":
                name, source = draw.choice(list(wrong(task.id).items()))
                kinds[task.id] = f"wrong {name.split('__')[0]}"
            elif way == "unusual":
                source, kinds[task.id] = draw.choice(list(unusual(task.id).values())), way
            else:
                source = catalog.solution_source(task.id) if way == "right" else catalog.untouched_source(task.id)
                kinds[task.id] = way
            header = f"# Exercise {task.id} · {task.title}\n"
            sources.append(source if source.startswith(header) else header + source)
        if hostile and number % 25 == 0:
            spoil = SPOILS[number // 25 % len(SPOILS)]
            spoiled(spoil, path, as_notebook(sources, str(number)))
            expected.append(f"{path.name}\t\tspoiled {spoil}")
            continue
        if hostile:
            place = draw.randrange(len(tasks))
            deed = list(DEEDS)[number // 5 % len(DEEDS)]
            sources[place], kinds[tasks[place].id] = attacking(tasks[place].id, deed), f"hostile {deed}"
        path.write_text(as_notebook(sources, str(number)))
        expected += [f"{path.name}\t{task.id}\t{kinds[task.id]}" for task in tasks]
    folder.with_name("expected.txt").write_text("\n".join(expected) + "\n")


def compare(folder: Path, table: Path) -> int:
    with open(table, newline="") as file:
        rows = {(Path(row["file"]).name, row["exercise"]): row for row in csv.DictReader(file)}
    with open(table, newline="") as file:
        written = sum(1 for _ in csv.DictReader(file))
    lines = [line.split("\t") for line in folder.with_name("expected.txt").read_text().splitlines()]
    counts, wrongs = Counter(), []
    named = silent = 0
    for name, exercise, kind in lines:
        row = rows.get((name, exercise))
        outcome = row["outcome"] if row else "lost"
        counts[kind.split()[0], outcome] += 1
        sort, _, detail = kind.partition(" ")
        allowed = {
            "right": ("passed",),
            "unusual": ("passed",),
            "none": ("not_attempted",),
            "spoiled": ("unreadable",),
            "wrong": ("failed", "error", "timeout"),
            "hostile": ("failed", "error", "timeout", "crashed"),
        }[sort]
        if outcome not in allowed:
            wrongs.append(f"{name} {exercise} {kind}: {outcome} {row['message'][:200] if row else ''}")
        if sort == "wrong" and row:
            named, silent = named + (row["mistake"] == detail), silent + (not row["mistake"])
    print(f"{len(lines)} rows expected, {written} written, {len(rows)} different")
    for (sort, outcome), count in sorted(counts.items()):
        print(f"  {sort:8} {outcome:14} {count}")
    total = sum(count for (sort, _), count in counts.items() if sort == "wrong")
    print(f"of {total} wrong answers {named} were named as meant, {silent} got no name")
    print("\n".join(wrongs) or "every row is as it should be")
    return bool(wrongs) or written != len(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("table", type=Path, nargs="?")
    parser.add_argument("--learners", type=int, default=500)
    parser.add_argument("--chapters", default="02,03")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.folder, given.table)
    make(given.folder, given.learners, given.chapters.split(","), given.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
