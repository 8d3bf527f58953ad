"""Notebooks written and no work lost: a learner's is not built over, a reset keeps a copy, a write is whole or none."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from course_lib.builder.answers import BuildError
from course_lib.builder.notebook import as_text, build_notebook, fingerprint, relative
from course_lib.home import ROOT

SOURCES = ROOT / "solutions"
NOTEBOOKS = ROOT / "notebooks"


def build(
    names: Iterable[str] = (),
    *,
    out: Path | None = None,
    with_answers: bool = False,
    sources: Path | None = None,
    notebooks: Path | None = None,
) -> list[Path]:
    """Builds the chapters named (all without names) and returns the notebooks' paths.

    A learner's notebooks go to `notebooks`, where none that holds work is overwritten; with `out` the folder there is
    taken for the builder's own.

    Raises:
        BuildError: a chapter is wrong, or notebooks were left as they are because of the work in them; the others are
            built all the same.
    """
    folder = out or notebooks or NOTEBOOKS
    learners = folder.resolve() == (notebooks or NOTEBOOKS).resolve()
    if with_answers and learners:
        raise BuildError(f"Solved chapters go to another folder than {relative(folder)}, which is the learner's.")
    built, refused = [], []
    # All are made before any is written: a fault in the last chapter leaves every notebook as it was.
    made = [(path, build_notebook(path, with_answers)) for path in chapters(names, sources)]
    for source, notebook in made:
        path = folder / f"{source.stem}.ipynb"
        text = as_text(notebook)
        if learners and path.exists() and path.read_bytes() != text.encode() and holds_work(path):
            refused.append(path)
            continue
        write(path, text)
        built.append(path)
    if refused:
        number = refused[0].name.split("_")[0]
        raise BuildError(
            f"Left as {'it is' if len(refused) == 1 else 'they are'}, with the work in it: "
            f"{', '.join(relative(path).as_posix() for path in refused)}. "
            f"`python -m course_lib reset {number}` keeps a dated copy and builds it afresh."
        )
    return built


def stale(
    names: Iterable[str] = (), sources: Path | None = None, notebooks: Path | None = None
) -> list[tuple[Path, str]]:
    """The notebooks that differ from what their sources build, and why; stray ones too when no name is given."""
    names, folder = list(names), notebooks or NOTEBOOKS
    found, expected = [], set()
    for source in chapters(names, sources):
        path = folder / f"{source.stem}.ipynb"
        expected.add(path.name)
        notebook = build_notebook(source)
        if not path.exists():
            found.append((path, "is not there"))
        elif path.read_bytes() != as_text(notebook).encode():
            same = not holds_work(path, against=notebook["metadata"]["course"]["cells"])
            found.append((path, "holds outputs or an editor's metadata" if same else "differs from its source"))
    if not names and folder.is_dir():
        for path in sorted(folder.glob("*.ipynb")):
            if path.name not in expected and ".kept-" not in path.name:
                found.append((path, "has no source"))
    return found


def reset(name: str, sources: Path | None = None, notebooks: Path | None = None) -> tuple[Path, Path | None]:
    """Builds one notebook afresh, keeping a dated copy of the one that was there.

    Returns:
        the notebook, and the copy; no copy when there was nothing to keep, down to the outputs.
    """
    [source] = chapters([name], sources)
    text = as_text(build_notebook(source))
    path = (notebooks or NOTEBOOKS) / f"{source.stem}.ipynb"
    copy = None
    if path.exists() and path.read_bytes() != text.encode():
        copy = keep(path)
    write(path, text)
    return path, copy


def keep(path: Path) -> Path:
    """A copy of the file beside it, under a name that carries the time and was not in use."""
    stamp = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        copy = path.with_name(f"{path.stem}.kept-{stamp}{suffix}.ipynb")
        try:
            with open(copy, "xb") as target, open(path, "rb") as source:
                shutil.copyfileobj(source, target)
                target.flush()
                os.fsync(target.fileno())
        except FileExistsError:
            continue
        return copy
    raise BuildError(f"No free name for a copy of {relative(path)}: a thousand were made in this second.")


def holds_work(path: Path, against: str | None = None) -> bool:
    """Whether a notebook says anything else than what was built, by its own record or by the fingerprint `against`.

    One that cannot be read may hold work.
    """
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        recorded = against or notebook["metadata"]["course"]["cells"]
        return fingerprint(notebook["cells"]) != recorded
    except (ValueError, KeyError, TypeError, AttributeError):
        return True


def write(path: Path, text: str) -> None:
    """Writes the file whole or not at all: an interrupted build leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as target:
            target.write(text)
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def chapters(names: Iterable[str] = (), sources: Path | None = None) -> list[Path]:
    """The sources that the names mean, in order: "03", "3", "03_online_softmax" or a path to either file of it."""
    folder = sources or SOURCES
    known = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))
    by_name = {alias: path for path in known for alias in (path.stem, path.stem[:2], path.stem[:2].lstrip("0") or "0")}
    chosen = []
    for name in names:
        path = by_name.get(Path(name).stem)
        if path is None:
            there = ", ".join(path.stem for path in known) or "none"
            raise BuildError(f"There is no chapter '{name}'; the chapters are: {there}.")
        if path not in chosen:
            chosen.append(path)
    return chosen or known
