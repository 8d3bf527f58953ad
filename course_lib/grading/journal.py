"""The rows so far, one JSON line each, beside the table that they become: what makes a grading run resumable.

A line is written and flushed as its row arrives, so a run that is killed loses at most the answers in flight. A row is
found again by what was graded, not by name: the file's content, the exercise and the version of the course. A line that
an interruption cut short is no row, and is graded again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import BinaryIO

from course_lib.checker.specification.errors import CourseError
from course_lib.grading.version import version_for

# Outcomes that another machine or another try may change: kept in the table, but graded again when resumed.
NOT_KEPT = ("unsupported", "ungraded")


class Journal:
    """The lines of one output file. One process at a time; use as a context manager.

    Raises:
        CourseError: another run is writing it, or the file is not a journal.
    """

    def __init__(self, out: Path):
        self.path = out.with_name(out.name + ".journal")
        self._places: dict[tuple[str, str], int] = {}  # where the line of a row begins; the rows stay on the disk
        self._end = 0
        self.written: set[str] = set()
        self.other_versions = 0
        self._opened: BinaryIO | None = None

    def __enter__(self) -> Journal:
        self._opened = open(self.path, "a+b")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    @property
    def _file(self) -> BinaryIO:
        if self._opened is None:
            raise ValueError("The journal is not open; use it as a context manager.")
        return self._opened

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:
            return  # Windows, where no check runs
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CourseError(f"{self.path}: another run is writing it. Wait for it, or name another --out.") from None
        except OSError:
            pass  # a file system without locks

    def _read(self) -> None:
        self._file.seek(0)
        last = b"\n"
        for number, last in enumerate(self._file, 1):
            place, line = self._end, None
            self._end += len(last)
            with contextlib.suppress(ValueError):
                line = json.loads(last)
            if not isinstance(line, dict) or not {"table", "row"} & line.keys():
                if number == 1 and last.endswith(b"\n"):
                    raise CourseError(f"{self.path}: is no journal of a grading run. Name another --out.")
                continue
            if "table" in line:
                self.written.add(line["table"])
            elif line["version"] != version_for(line["row"]["exercise"]):
                self.other_versions += 1
            elif line["row"]["outcome"] not in NOT_KEPT:
                self._places[line["content"], line["row"]["exercise"]] = place
        if not last.endswith(b"\n"):
            self._write(b"\n")  # what was cut short stays apart from what follows

    def _append(self, line: dict) -> None:
        self._write(json.dumps(line, ensure_ascii=True).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        self._file.seek(0, 2)
        self._file.write(line)
        self._file.flush()
        self._end += len(line)

    def __contains__(self, key: tuple[str, str]) -> bool:
        """Whether there is a row for a (content, exercise)."""
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def row(self, content: str, exercise: str) -> dict:
        """The row of one exercise of a file's content, read from the disk."""
        self._file.seek(self._places[content, exercise])
        return json.loads(self._file.readline())["row"]

    def add(self, content: str, row: dict) -> None:
        """Keep the row of one exercise of a file's content."""
        self._places[content, row["exercise"]] = self._end
        self._append({"content": content, "version": version_for(row["exercise"]), "row": row})

    def will_write(self, table: str) -> None:
        """Remember a table that is about to be written, by which it is known again as this run's own."""
        digest = hashlib.sha256(table.encode()).hexdigest()[:32]
        if digest not in self.written:
            self.written.add(digest)
            self._append({"table": digest})

    def wrote(self, path: Path) -> bool:
        """Whether a file is just as a run of this journal left it."""
        return hashlib.sha256(path.read_bytes()).hexdigest()[:32] in self.written
