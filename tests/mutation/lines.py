"""Long runs: tasks spread over processes until a clock says stop, and a file of JSON lines from which a run goes on."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


def spread(function: Callable, tasks: Sequence, processes: int, until: float) -> Iterator[Any]:
    """`function(task)` of every task, as they finish, until the clock (`time.monotonic`) says `until`.

    With one process the tasks run in order, in this one; with more, `function` must be one that can be imported.
    """
    if processes == 1:
        for task in tasks:
            if time.monotonic() > until:
                return
            yield function(task)
        return
    context = multiprocessing.get_context("spawn")
    turn = context.Value("i", 0)
    with context.Pool(processes, initializer=_alone_on_a_core, initargs=(turn,)) as pool:
        results = pool.imap_unordered(function, tasks)
        for _ in tasks:
            with contextlib.suppress(multiprocessing.TimeoutError):
                yield results.next(timeout=max(0.1, until - time.monotonic()))
            if time.monotonic() > until:
                pool.terminate()
                return


def _alone_on_a_core(turn: Any) -> None:
    """Threads that wait for a core that other processes hold make a check ten times as long.

    Where a process can be held to a core it is, and so are the judge's workers, which it starts.
    """
    import torch

    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        with turn.get_lock():
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[turn.value % len(cores)]})
            turn.value += 1


def kept(path: Path | None) -> list[dict]:
    """The rows of an earlier run; a last line cut short by a kill is left out."""
    if path is None or not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def keep(path: Path | None, row: dict) -> None:
    """Append one row, where a file is asked for."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
