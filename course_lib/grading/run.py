"""`grade`: any number of files to one table, whatever any of them does.

Contents are read, sent out and forgotten one after the other, and rows stay on the disk, so that memory does not grow
with the number of files; two files of the same content are judged once. A task that takes its Dask worker down with it
is tried once more alone.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from course_lib.builder.keeping import write
from course_lib.checker.specification.errors import CourseError
from course_lib.grading import cluster, reading, tables
from course_lib.grading.bar import Bar
from course_lib.grading.journal import Journal
from course_lib.grading.judging import row_for_file, row_of_a_fault
from course_lib.grading.reading import Answer, Unreadable
from course_lib.grading.version import version_for

AHEAD = 2  # tasks sent out for each worker, so that none waits for this process
WRITE_EVERY = 30.0  # seconds between two writings of the table


def grade(
    arguments: Iterable[str | Path],
    out: Path,
    json_out: Path | None = None,
    *,
    jobs: int | None = None,
    scheduler: str | None = None,
    sandboxed: bool = True,
) -> list[dict]:
    """Judge every exercise of every file and write the table; an interrupted run goes on where it stopped.

    Args:
        arguments: files, folders and patterns.
        out: the CSV file; the journal lies beside it as `out`.journal.
        json_out: the same rows, with seeds and cases, as JSON.
        jobs, scheduler, sandboxed: see `cluster.connected`.

    Returns:
        The rows, in the order of the files and the course's exercises.

    Raises:
        CourseError: nothing to grade, an output that is not this run's own, or no workers that can judge.
    """
    files = reading.files_in(arguments)
    with Journal(out) as journal:
        if out.exists() and not journal.wrote(out):
            raise CourseError(
                f"{out} was not written by `grade`, or was changed since. It is left as it is: move it, or name "
                "another --out."
            )
        run = Run(files, journal, out, json_out)
        with cluster.connected(jobs, scheduler, sandboxed) as client:
            try:
                run.work(client, sandboxed)
            finally:
                run.write_tables()
        return list(run.rows())


class Run:
    """One grading run: which content each file has, which exercises each content holds, and the rows so far."""

    def __init__(self, files: list[Path], journal: Journal, out: Path, json_out: Path | None):
        self.files, self.journal, self.out, self.json_out = files, journal, out, json_out
        self.content_of: dict[Path, str] = {}
        self.problems: dict[Path, str] = {}
        self.exercises: dict[str, list[str]] = {}  # of a content that was read
        self.open: collections.Counter[str] = collections.Counter()  # rows still to come, by content
        self.graded = 0
        self.table_written = time.monotonic()

    # ------------------------------------------------------------------------------------------------ the work

    def work(self, client, sandboxed: bool) -> None:
        """Send out all there is to do and collect the rows.

        Raises:
            CourseError: the scheduler or all its workers went away; the rows so far are kept.
        """
        from distributed import as_completed

        bar = Bar(len(self.files))
        todo = self._reading_tasks()
        ready: collections.deque[tuple] = collections.deque()  # tasks to judge, or to try once more
        sent: dict = {}
        finished = as_completed(loop=client.loop, with_results=False)

        def send() -> None:
            room = AHEAD * max(1, len(client.nthreads()))
            while len(sent) < room:
                task = ready.popleft() if ready else next(todo, None)
                if task is None:
                    return
                future = self._send(client, task, sandboxed)
                sent[future] = task
                finished.add(future)

        try:
            send()
            while sent:
                future = next(finished)
                task = sent.pop(future)
                ready.extend(self._receive(future, task))
                future.release()
                send()
                if bar.is_due():
                    bar.show(self._files_done(), self.graded)
                if time.monotonic() - self.table_written > WRITE_EVERY:
                    self.write_csv()
        finally:
            bar.show(self._files_done(), self.graded, last=True)

    def _reading_tasks(self) -> Iterator[tuple]:
        """A task for each content that was not seen before; the bytes are held until it is sent, and no longer."""
        for path in self.files:
            try:
                content = reading.read_bytes(path)
            except Unreadable as error:
                self.problems[path] = str(error)
                continue
            name = self.content_of[path] = reading.fingerprint(content)
            if name not in self.exercises:
                self.exercises[name] = []
                self.open[name] = 1
                yield ("read", name, content, 0)

    def _send(self, client, task: tuple, sandboxed: bool):
        kind, _, payload, _ = task
        if kind == "read":
            return client.submit(cluster.read, payload, pure=False, priority=-1)
        version = version_for(payload.exercise)
        return client.submit(cluster.judge_here, payload, sandboxed, version, pure=False)

    def _receive(self, future, task: tuple) -> list[tuple]:
        """Take a task's result in; returns the tasks that follow from it."""
        from distributed.scheduler import KilledWorker

        kind, content, payload, tries = task
        if future.status in ("cancelled", "lost"):
            raise CourseError("The Dask scheduler went away. What was graded is kept: run the same command again.")
        error = future.exception() if future.status == "error" else None
        if isinstance(error, KilledWorker) and tries == 0:
            return [(kind, content, payload, 1)]
        if kind == "read" and error is None:
            return self._found(content, *future.result())
        if kind == "read":
            payload, self.exercises[content] = Answer("", None), [""]
        self.open[content] -= 1
        if isinstance(error, KilledWorker):
            row = row_of_a_fault(payload, "its process died twice")
        elif error is not None:
            row = row_of_a_fault(payload, f"{type(error).__name__}: {error}")
        else:
            row = future.result()
        self.journal.add(content, row)
        self.graded += 1
        return []

    def _found(self, content: str, answers: list[Answer], problem: str | None) -> list[tuple]:
        """What a content holds is known now: the answers that have no row yet are to be judged."""
        self.exercises[content] = [answer.exercise for answer in answers] or [""]
        if problem is not None and (content, "") not in self.journal:
            self.journal.add(content, row_for_file(problem))
        missing = [answer for answer in answers if (content, answer.exercise) not in self.journal]
        self.open[content] = len(missing)
        return [("judge", content, answer, 0) for answer in missing]

    def _files_done(self) -> int:
        return len(self.problems) + sum(self.open[content] == 0 for content in self.content_of.values())

    # ---------------------------------------------------------------------------------------------- the tables

    def rows(self) -> Iterator[dict]:
        """Every row so far, file by file."""
        return itertools.chain.from_iterable(map(self._rows_of, self.files))

    def _rows_of(self, path: Path) -> Iterator[dict]:
        name = {"file": reading.printable(path)}
        if path in self.problems:
            yield name | row_for_file(self.problems[path])
        content = self.content_of.get(path)
        if content is None:
            return
        for exercise in self.exercises.get(content, ()):
            if (content, exercise) in self.journal:
                yield name | self.journal.row(content, exercise)

    def write_csv(self) -> None:
        """Write what is known, whole or not at all."""
        text = tables.as_csv(self.rows())
        self.journal.will_write(text)
        write(self.out, text)
        self.table_written = time.monotonic()

    def write_tables(self) -> None:
        """Write what is known as CSV and, where it was asked for, as JSON."""
        self.write_csv()
        if self.json_out is not None:
            write(self.json_out, tables.as_json(self.rows()))
