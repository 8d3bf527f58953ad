"""Runs notebooks as somebody without a GPU does, and keeps what they gave until something they depend on changes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from course_lib.builder.keeping import write
from course_lib.grading.imports import closure
from course_lib.grading.version import deciding_files
from course_lib.home import ROOT

CELL_MAY_TAKE = 1800  # seconds, as in the gate: a busy machine fails no chapter
# What a page shows may change with these too.
DECIDING_PACKAGES = ("torch", "triton", "numpy", "matplotlib", "ipywidgets")
TERMINAL_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class FailedCell(Exception):
    """A cell that raised, died or took too long.

    Attributes:
        notebook: which, such as "04_triton_tiling, solved".
        first_line: of the cell, which finds it.
        error: what happened, in a line or a few.
    """

    notebook: str
    first_line: str
    error: str

    def __str__(self) -> str:
        return f"{self.notebook}: the cell that begins with `{self.first_line}` failed.\n    {self.error}"


def execute(notebook: dict, name: str, home: Path, folder: Path) -> dict:
    """The notebook with what its cells gave, run in a kernel of its own.

    Args:
        notebook: in nbformat 4.5; it is not changed.
        name: as `FailedCell` tells it.
        home: the COURSE_HOME of whoever takes the course; attempts and measured ceilings are kept there.
        folder: where the kernel starts.

    Raises:
        FailedCell: a cell raised and has no tag `raises-exception`, or its kernel died, or it took half an hour.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    node = nbformat.reads(json.dumps(notebook), as_version=4)
    home.mkdir(parents=True, exist_ok=True)
    running = {"cell": ""}
    client = NotebookClient(
        node,
        timeout=CELL_MAY_TAKE,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,  # a page has no kernel behind its sliders
        extra_arguments=["--IPKernelApp.log_level=40"],  # of warnings there is one: that it talks over TCP
        on_cell_start=lambda cell, cell_index: running.update(cell=cell.source),
    )
    environment = os.environ | {
        "COURSE_HOME": str(home),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    try:
        client.execute(env=environment)
    except CellExecutionError as error:
        raise FailedCell(name, first_line(running["cell"]), _told(error.ename, error.evalue)) from None
    except CellTimeoutError:
        raise FailedCell(name, first_line(running["cell"]), f"It took more than {CELL_MAY_TAKE:,} s.") from None
    except DeadKernelError:
        raise FailedCell(name, first_line(running["cell"]), "The notebook's kernel died.") from None
    return json.loads(nbformat.writes(node))


def first_line(source: str) -> str:
    """The line that a reader finds a cell by."""
    return next((line for line in source.splitlines() if line.strip()), "")


def _told(name: str, text: str) -> str:
    text = TERMINAL_COLOURS.sub("", text).strip()
    return f"{name}: {text}".replace("\n", "\n    ")


class Kept:
    """Executed notebooks in a folder, each under a hash of all that decides what it shows."""

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, notebook: dict, name: str, sources: Iterable[Path], run: Callable[[], dict]) -> tuple[dict, float]:
        """(the executed notebook, seconds that it took now); 0 where an earlier execution is still good.

        Args:
            notebook: as it is before it is run.
            name: of the file that it is kept in.
            sources: every file that it depends on.
            run: executes it.
        """
        path = self._path(notebook, name, sources)  # before it runs: what changes meanwhile is not what was run
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8")), 0.0
        started = time.monotonic()
        executed = run()
        seconds = time.monotonic() - started
        self.folder.mkdir(parents=True, exist_ok=True)
        for older in self.folder.glob(f"{name}.*.ipynb"):
            older.unlink()
        write(path, json.dumps(executed, ensure_ascii=False, indent=1) + "\n")
        return executed, seconds

    def find(self, notebook: dict, name: str, sources: Iterable[Path]) -> dict | None:
        """The executed notebook of an earlier execution that is still good; None where it would have to run."""
        path = self._path(notebook, name, sources)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _path(self, notebook: dict, name: str, sources: Iterable[Path]) -> Path:
        return self.folder / f"{name}.{deciding_hash(notebook, sources)}.ipynb"


def deciding_hash(notebook: dict, sources: Iterable[Path]) -> str:
    """Sixteen hexadecimal digits that change with the notebook, with any of the files, or with a deciding package."""
    digest = hashlib.sha256(json.dumps(notebook, sort_keys=True).encode())
    for name in DECIDING_PACKAGES:
        try:
            digest.update(f"{name} {version(name)}\0".encode())
        except PackageNotFoundError:
            digest.update(f"no {name}\0".encode())
    digest.update(platform.python_version().encode())
    for path in sorted(sources):
        digest.update(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def sources_of(chapter: Path, root: Path = ROOT) -> set[Path]:
    """The files that decide what a chapter shows: what it imports, what judges its answers, recorded runs and data."""
    start = [
        *([chapter] if chapter.is_relative_to(root) else []),
        root / "course_lib/checker/__init__.py",
        root / "course_lib/grading/__init__.py",
    ]
    data = (
        path
        for path in (root / "course_lib").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".md") and "site" not in path.parts
    )
    return closure(start, root) | set(deciding_files(chapter.name[:2], root)) | set(data)
