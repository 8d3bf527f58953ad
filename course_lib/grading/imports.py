"""Which of the course's files a file needs: read from its source, without importing anything."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

KINDS = (".py", ".h")
OURS = ("course_lib", "notebooks", "solutions", "exercises", "tests")


def imported(tree: ast.AST, package: str, root: Path) -> set[str]:
    """The course's modules that a source in `package` imports, wherever in it and however it is written."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            # A name is a module of its own, or something that the module defines.
            inner = (f"{module}.{alias.name}" for alias in node.names)
            found |= {name if is_module(name, root) else module for name in inner}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__"):
                found.add(str(node.args[0].value))
    return {name for name in found if name.split(".")[0] in OURS}


def is_module(name: str, root: Path) -> bool:
    path = root / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def closure(start: Iterable[Path], root: Path, known: dict[Path, set[Path]] | None = None) -> set[Path]:
    """These files and every one that they need, directly or through others.

    known: what single files need, for several closures of one tree that does not change between them; it is added to.
    """
    known = {} if known is None else known
    by_name: dict[str, list[Path]] = {}
    found: set[Path] = set()
    left = list(start)
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        if path not in known:
            if not by_name:
                for kind in KINDS:
                    for other in (root / "course_lib").rglob(f"*{kind}"):
                        by_name.setdefault(other.name, []).append(other)
            known[path] = _needed(path, root, by_name) if path.suffix == ".py" else set()
        left += known[path] - found
    # Fronts of packages on the way to a module run as well, but what they offer is not needed.
    return found | {front for folder in _folders(found, root) if (front := folder / "__init__.py").is_file()}


def _needed(path: Path, root: Path, by_name: dict[str, list[Path]]) -> set[Path]:
    """The files that a file needs directly. by_name: the library's files."""
    mentioned = _mentioned(path.read_text(encoding="utf-8"), ".".join(path.relative_to(root).parts[:-1]), root)
    needed: set[Path] = set()
    for module in mentioned.modules:
        *parents, last = module.split(".")
        folder = root.joinpath(*parents)
        needed.update(filter(Path.is_file, (folder / last / "__init__.py", folder / f"{last}.py")))
    needed.update(filter(Path.is_file, (path.with_name(f"{name}.py") for name in mentioned.siblings)))
    needed.update(other for name in mentioned.folders for other in (root / name).glob("*.py"))
    needed.update(other for name in mentioned.files for other in by_name.get(name, ()))
    return needed


def _folders(files: set[Path], root: Path) -> set[Path]:
    """The folders below the root in which files lie, and those above them."""
    found: set[Path] = set()
    for folder in {path.parent for path in files}:
        while folder not in found and folder != root:
            found.add(folder)
            folder = folder.parent
    return found


class _Mentioned(NamedTuple):
    modules: set[str]  # of the course
    siblings: set[str]  # what may lie beside the file: a program's own folder is where it imports from
    files: set[str]  # names of files, as a program is named that is started, or a text that is read
    folders: set[str]  # of the course, from its root: what a program is given to load


@functools.cache
def _mentioned(source: str, package: str, root: Path) -> _Mentioned:
    siblings: set[str] = set()
    files: set[str] = set()
    folders: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            siblings |= {alias.name for alias in node.names if "." not in alias.name}
        elif isinstance(node, ast.ImportFrom) and node.module and "." not in node.module and not node.level:
            siblings.add(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(KINDS):
            files.add(node.value.rpartition("/")[2])
        elif isinstance(node, ast.Constant) and re.fullmatch(r"course_lib(/\w+)+", str(node.value)):
            folders.add(str(node.value))
    return _Mentioned(imported(tree, package, root), siblings, files - {"__init__.py"}, folders)
