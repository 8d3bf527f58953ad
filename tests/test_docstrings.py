"""What a docstring names is there: a file or a name that has moved is found by a test, and not by a reader.

A reference is one of two things that stand alone in backquotes. A path that ends in `.py` is looked for from the
docstring's own folder, and from each folder above it. A name with dots that begins in lower case is looked up as in the
file itself: its first word is a module beside the file or in a folder above it, or one that the file imports or imports
from, or another name of the file's, or a package that is installed. What follows is looked up in it where it is the
course's. All else in backquotes, a call among it, is code and not looked up.
"""

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest

from course_lib.home import ROOT

QUOTED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w/-]+\.py")
DOTTED = re.compile(r"[a-z_]\w*(\.\w+)+")
SHORT = {"tl", "gl", "np", "F"}  # as everybody calls them, whether or not the file needs them

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def stale(path: Path, root: Path = ROOT) -> set[str]:
    """The references in a file's docstrings that lead nowhere."""
    tree = parsed(path)
    documented = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, *Function))]
    quoted = {text for node in documented for text in QUOTED.findall(ast.get_docstring(node) or "")}
    return {
        f"{path.relative_to(root).as_posix()} names `{text}`"
        for text in quoted
        if not leads_somewhere(text, path, root)
    }


def leads_somewhere(text: str, path: Path, root: Path) -> bool:
    """Whether what stands in backquotes is no reference, or one to something that is there."""
    folders = [folder for folder in path.parents if folder == root or root in folder.parents]
    if PATH.fullmatch(text):
        return any((folder / text).is_file() for folder in folders)
    if not DOTTED.fullmatch(text):
        return True
    first, *rest = text.split(".")
    modules = [folder / first for folder in folders] + imported_as(path, root).get(first, [])
    there = [module for module in modules if is_module(module)]
    if there:
        return any(holds(module, rest) for module in there)
    return first in bound(parsed(path)) or first in SHORT or importlib.util.find_spec(first) is not None


def imported_as(path: Path, root: Path) -> dict[str, list[Path]]:
    """By its name in a file: the module that an import binds to it, and each that something is imported from."""
    found: dict[str, list[Path]] = {}
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = (getattr(node, "module", None) or "").split(".")
            names = [(alias.asname or alias.name, [*module, *alias.name.split(".")]) for alias in node.names]
            for name, parts in [*names, (module[-1], module)]:
                found.setdefault(name, []).append(root.joinpath(*filter(None, parts)))
    return found


def is_module(at: Path) -> bool:
    """Whether a module of the course is there, or a folder of them."""
    return at.with_suffix(".py").is_file() or at.is_dir() and any(at.rglob("*.py"))


def holds(module: Path, words: list[str]) -> bool:
    """Whether the words lead from a module on: through modules, to one of its names, and to one of a class's own."""
    if not words:
        return True
    if module.is_dir() and is_module(module / words[0]):
        return holds(module / words[0], words[1:])
    tree = parsed(module / "__init__.py" if module.is_dir() else module.with_suffix(".py"))
    name, *rest = words
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return name in bound(tree) and all(word in bound(node) for node in classes for word in rest)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


@functools.cache
def bound(tree: ast.AST) -> set[str]:
    """Every name that is bound anywhere in it, attributes among them."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, *Function)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names


def test_what_docstrings_name_is_there():
    paths = [path for part in ("course_lib", "exercises") for path in sorted((ROOT / part).rglob("*.py"))]
    assert not set().union(*map(stale, paths))


@pytest.fixture
def house(tmp_path):
    """A small course: two topics beside each other, and a file whose docstring a test writes."""
    for place, text in {
        "course_lib/kernels/decode/combine.py": "class Part:\n    size: int\n\n\ndef merge(): ...\n",
        "course_lib/kernels/attention/tiles.py": "from torch import nn\n\nTILES = 3\n",
    }.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)

    def found(reference: str) -> set[str]:
        path = tmp_path / "course_lib/kernels/attention/flash.py"
        head = "from course_lib.kernels.decode.combine import merge\n\n\ndef flash(lengths):\n"
        path.write_text(f'{head}    """See `{reference}`."""\n')
        parsed.cache_clear()
        return stale(path, tmp_path)

    return found


@pytest.mark.parametrize(
    "reference",
    [
        "split.py",
        "combine.py",
        "decode/split.py",
        "combine_splits.merge",
        "combine.merged",
        "combine.Part.length",
        "decode.split.merge",
        "decode.combine.merged",
        "tiles.Tiles",
        "course_lib.kernels.split",
        "course_lib.kernels.decode.combine.merged",
    ],
)
def test_a_reference_to_what_has_moved_is_found(house, reference):
    assert house(reference) == {f"course_lib/kernels/attention/flash.py names `{reference}`"}


@pytest.mark.parametrize(
    "reference",
    [
        "tiles.py",
        "decode/combine.py",
        "course_lib/kernels/decode/combine.py",
        "combine.merge",
        "combine.Part.size",
        "decode.combine.merge",
        "tiles.TILES",
        "course_lib.kernels.decode",
        "lengths.shape",  # of an argument
        "torch.compile",
        "tl.dot",
        "Part.length",  # a class's, wherever that is
        "missing.long()",
        "missing",
        "x.y + 1",
    ],
)
def test_a_reference_to_what_is_there_passes_and_code_is_none(house, reference):
    assert not house(reference)
