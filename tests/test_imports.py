"""Imports point one way: a reader of a kernel needs nothing but the kernel, and the judge never holds an answer.

Hardware knows nothing of the rest, and kernels nothing but the hardware; figures and models may use both; serving uses
models, and no model knows by whom it is served; the checker knows none of the kernels; exercises use the checker's
vocabulary and what the hardware is; a chapter imports what a learner's notebook may. And no imports run in a circle, so
a reader can begin at one end.
"""

import ast
import itertools
import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest

from course_lib.grading.imports import imported
from course_lib.home import ROOT

# What a module of each part may import from the course; a part may always import itself, and course_lib.home is free.
MAY_IMPORT = {
    "course_lib/kernels": ["course_lib.hardware"],
    "course_lib/hardware": ["course_lib.bootstrap"],  # which versions the course needs
    "course_lib/figures": ["course_lib.kernels", "course_lib.hardware", "course_lib.serving.memory"],
    "course_lib/models": ["course_lib.kernels", "course_lib.hardware"],
    "course_lib/serving": ["course_lib.models", "course_lib.kernels", "course_lib.hardware"],
    "course_lib/serving/memory": [],  # who holds which memory is plain Python, without tensors
    # The error map is drawn on the verdict card; the builder knows an answer from the stub that stands in its place.
    "course_lib/checker": ["course_lib.hardware", "course_lib.figures.error_map", "course_lib.builder.answers"],
    # Within it, from the words of an exercise to the learner: each part uses those before it.
    "course_lib/checker/common": [],  # the worker's program finds it without the course
    "course_lib/checker/specification": [
        "course_lib.checker.common",
        "course_lib.hardware",
        "course_lib.builder.answers",
    ],
    "course_lib/checker/runner": ["course_lib.checker.specification", "course_lib.hardware"],
    "course_lib/checker/runner/process": [],  # the worker's program: its files find one another by their bare names
    "course_lib/checker/judge": [
        "course_lib.checker.common",
        "course_lib.checker.runner",
        "course_lib.checker.specification",
        "course_lib.hardware",
        "course_lib.figures.error_map",
    ],
    # Grading is the judge put to work on files; the builder knows how to write one whole or not at all.
    "course_lib/grading": ["course_lib.checker", "course_lib.hardware", "course_lib.builder.keeping"],
    "course_lib/bench": [
        "course_lib.kernels",
        "course_lib.hardware",
        "course_lib.models",
        "course_lib.figures",
        "course_lib.serving",
    ],
    "course_lib/builder": ["course_lib.bootstrap"],
    # A page is a notebook that was run, kept until something changes that its chapter needs.
    "course_lib/site": ["course_lib.builder", "course_lib.grading.imports", "course_lib.grading.version"],
    "course_lib/bootstrap.py": [],
    "course_lib/home.py": [],
    "exercises": ["course_lib.checker", "course_lib.hardware"],  # an exercise may judge by this machine's ceilings
    "solutions": [
        "course_lib",
        "course_lib.checker.notebook.earlier",  # what another chapter's check kept
        "course_lib.kernels",
        "course_lib.hardware",
        "course_lib.figures",
        "course_lib.models",
        "course_lib.serving",
    ],
}
# Read as files by the builder, the catalogue and the tests, and imported by nobody.
NOBODY_IMPORTS = ("notebooks", "solutions", "exercises", "tests")


def imports(source: str, package: str = "") -> set[str]:
    """The course's modules that a source in `package` imports."""
    return imported(ast.parse(source), package, ROOT)


def violations(part: str, source: str, package: str = "") -> set[str]:
    """The imports of a source that its part may not make."""
    own = part.removesuffix(".py").replace("/", ".")
    allowed = {own, "course_lib.home", *MAY_IMPORT[part]}

    def good(name: str) -> bool:
        # The package's front, course_lib, is allowed by its own name only: it leads to everything.
        return name in allowed or any(name.startswith(f"{other}.") for other in allowed - {"course_lib"})

    return {name for name in imports(source, package) if not good(name)}


def files(part: str) -> list[Path]:
    path = ROOT / part
    return [path] if path.suffix else sorted(path.rglob("*.py"))


Imports = dict[Path, dict[Path, int]]  # file to the files that it imports, and the line where it does
# The worker's program looks for a bare name beside the file, and here.
PROCESS, COMMON = Path("course_lib/checker/runner/process"), Path("course_lib/checker/common")


def read_imports(paths: Iterable[Path], root: Path = ROOT) -> Imports:
    """What files import of each other, also within a function, and for their types alone.

    A file that imports itself, as a program does under its true name, is no circle.
    """
    found: Imports = {}
    for path in sorted(paths):
        mine = found.setdefault(path.relative_to(root), {})
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call)):
                for other in _named(node, path.parent, root) - {path}:
                    mine.setdefault(other.relative_to(root), node.lineno)
    return found


def _named(node: ast.AST, folder: Path, root: Path) -> set[Path]:
    """The files that an import names."""
    within = folder.relative_to(root)
    names = imported(node, ".".join(within.parts), root)
    stems = [root / name.replace(".", "/") for name in names]
    if within == PROCESS:
        bare = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        bare += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        stems += [place / name for name in bare for place in (folder, root / COMMON)]
    fronts = (stem / "__init__.py" for stem in stems)
    return {*filter(Path.is_file, fronts), *filter(Path.is_file, (stem.with_suffix(".py") for stem in stems))}


def circles(imports: Imports) -> list[str]:
    """Circles among the imports, the shortest through each file: "a.py:3 imports b.py:7 imports a.py"."""
    left, before = {*imports}, None
    while left != before:  # neither what imports nothing of the rest nor what nothing of it imports is in a circle
        before = left
        left = {path for path in left if left & {*imports[path]}}
        left &= {other for path in left for other in imports[path]}
    return sorted({_told(circle, imports) for path in left if (circle := _back_to(path, imports, left))})


def _back_to(path: Path, imports: Imports, among: set[Path]) -> list[Path]:
    """The shortest way from a file along its imports to itself; empty where there is none."""
    ways, seen = deque([[path]]), set[Path]()
    while ways:
        way = ways.popleft()
        for other in imports[way[-1]]:
            if other == path:
                return way
            if other in among and other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return []


def _told(circle: list[Path], imports: Imports) -> str:
    first = circle.index(min(circle))
    around = [*circle[first:], *circle[: first + 1]]
    lines = [f"{one.as_posix()}:{imports[one][other]} imports" for one, other in zip(around, around[1:])]
    return " ".join([*lines, around[-1].as_posix()])


def test_no_imports_run_in_a_circle():
    read = read_imports(path for part in ("course_lib", "exercises") for path in (ROOT / part).rglob("*.py"))
    assert not circles(read)


@pytest.mark.parametrize(
    "text",
    [
        "from course_lib.hardware.one import x",
        "from .one import x",
        "from . import one",
        "import course_lib.hardware.one as x",
        "def late():\n    from course_lib.hardware import one",
        "if TYPE_CHECKING:\n    from course_lib.hardware.one import x",
        "from importlib import import_module\nx = import_module('course_lib.hardware.one')",
    ],
)
def test_a_circle_is_told_with_its_files_and_lines_however_it_is_closed(text, tmp_path):
    folder = tmp_path / "course_lib/hardware"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "one.py").write_text("import os\nfrom course_lib.hardware import two\n")
    (folder / "two.py").write_text("from course_lib.hardware.three import x\n")
    (folder / "three.py").write_text(text)
    (folder / "four.py").write_text(
        "from course_lib.hardware import four, one\n"
    )  # leads to the circle, and is not in it
    line = 1 + text.count("\n")
    assert circles(read_imports(folder.glob("*.py"), tmp_path)) == [
        "course_lib/hardware/one.py:2 imports course_lib/hardware/two.py:1 imports "
        f"course_lib/hardware/three.py:{line} imports course_lib/hardware/one.py"
    ]


def test_the_bare_names_of_the_workers_program_are_imports_too():
    read = read_imports((ROOT / PROCESS).glob("*.py"))
    assert {PROCESS / "guards.py", COMMON / "sparse.py"} <= {*read[PROCESS / "guards.py"], *read[PROCESS / "child.py"]}
    assert len(read[PROCESS / "child.py"]) > 5 and not circles({**read, COMMON / "sparse.py": {}})


def drawing() -> tuple[dict[str, Path], set[tuple[str, str]]]:
    """The parts that docs/architecture.md draws, each with its folder, and its solid arrows."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("```mermaid")[2].partition("```")[0]
    folders = {name: Path(label) for name, label in re.findall(r'^ +(\w+)\["([^"]+?)<br>', text, re.MULTILINE)}
    folders = {name: path if (ROOT / path).is_dir() else "course_lib" / path for name, path in folders.items()}
    chains = [[stop.split(" & ") for stop in line.strip().split(" --> ")] for line in text.splitlines()]
    arrows = {pair for chain in chains for two in zip(chain, chain[1:]) for pair in itertools.product(*two)}
    return folders, arrows


def test_the_drawing_of_the_house_is_true():
    """Each solid arrow is an import, and each import between two parts follows arrows."""
    folders, arrows = drawing()
    read = read_imports(path for folder in folders.values() for path in (ROOT / folder).rglob("*.py"))
    part_of = {
        path: max(
            (name for name in folders if folders[name] in path.parents), key=lambda name: len(folders[name].parts)
        )
        for path in read
    }
    drawn = ((part_of[one], part_of.get(other)) for one, others in read.items() for other in others)
    imports = {(one, other) for one, other in drawn if other not in (None, one)}
    reached = set(arrows)
    while further := {(a, d) for (a, b), (c, d) in itertools.product(reached, arrows) if b == c} - reached:
        reached |= further
    assert len(folders) > 15 and all((ROOT / folder).is_dir() for folder in folders.values())
    assert not arrows - imports, "arrows that are no imports"
    assert not imports - reached, "imports that the arrows do not say"


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_each_part_imports_only_what_it_may(part):
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(part)
        for name in violations(part, path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parts[:-1]))
    }
    assert not wrong


def test_nobody_imports_chapters_notebooks_exercises_or_tests():
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for part in ("course_lib", "exercises", "solutions")
        for path in sorted((ROOT / part).rglob("*.py"))
        for name in imports(path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parts[:-1]))
        if name.split(".")[0] in NOBODY_IMPORTS and name.split(".")[0] != part  # exercises may share among themselves
    }
    assert not wrong


def strays(chapter: str, source: str) -> set[str]:
    """What a file of exercises/ imports from exercises/ that is neither its own chapter's nor a topic."""
    homes = (f"exercises.{chapter}", "exercises.topics")
    return {
        name
        for name in imports(source, f"exercises.{chapter}")
        if name.startswith("exercises") and not any(name == home or name.startswith(f"{home}.") for home in homes)
    }


def test_no_chapters_exercises_import_another_chapters_and_no_topic_a_chapters():
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "exercises").glob("*/*.py"))
        for name in strays(path.parent.name, path.read_text(encoding="utf-8"))
    }
    assert not wrong


@pytest.mark.parametrize(
    "folder, source",
    [
        ("ch04_triton_tiling", "from exercises.ch03_online_softmax.slips import MASKED"),
        ("ch04_triton_tiling", "from exercises.ch03_online_softmax import slips"),
        ("ch04_triton_tiling", "from ..ch03_online_softmax import slips"),
        ("ch04_triton_tiling", "def cases(draw):\n    import exercises.ch03_online_softmax.slips"),
        ("topics", "from exercises.ch04_triton_tiling.parts import tiles"),
    ],
)
def test_an_import_from_another_chapter_is_caught(folder, source):
    assert strays(folder, source)


@pytest.mark.parametrize(
    "source",
    [
        "from exercises.ch04_triton_tiling.parts import tiles",
        "from exercises.topics import attention",
        "from exercises.topics.attention import attended",
    ],
)
def test_an_import_from_ones_own_chapter_or_a_topic_passes(source):
    assert not strays("ch04_triton_tiling", source)


def test_every_part_of_the_library_is_held_to_a_rule():
    fronts = {"course_lib/__init__.py", "course_lib/__main__.py", "course_lib/cli.py"}  # which lead to all of it
    parts = {
        f"course_lib/{path.name}"
        for path in (ROOT / "course_lib").iterdir()
        if path.suffix == ".py" or path.is_dir() and any(path.glob("*.py"))
    }
    assert parts <= {*MAY_IMPORT, *fronts}


@pytest.mark.parametrize(
    "part, source",
    [
        ("course_lib/kernels", "from course_lib.checker import Exercise"),
        ("course_lib/kernels", "def f():\n    import course_lib.figures.style"),
        ("course_lib/kernels", "from course_lib import check"),
        ("course_lib/kernels", "from course_lib import checker"),
        ("course_lib/kernels", "from ..checker import judge"),
        ("course_lib/models", "from course_lib.serving.caches.new import new_cache"),
        ("course_lib/serving/memory", "from course_lib.serving.caches.runs import InPages"),
        ("course_lib/checker", "from course_lib.kernels.memory.vector_add import vector_add"),
        ("course_lib/checker", "from importlib import import_module\nimport_module('course_lib.kernels')"),
        ("exercises", "from course_lib.kernels.memory.vector_add import vector_add"),
        ("exercises", "from course_lib import solution"),
        ("solutions", "from course_lib.builder import build"),
        ("solutions", "from course_lib.checker import judge"),
    ],
)
def test_a_forbidden_import_is_caught_wherever_and_however_it_is_written(part, source):
    assert violations(part, source, part.replace("/", "."))


@pytest.mark.parametrize(
    "part, source",
    [
        ("course_lib/kernels", "import torch\nfrom course_lib.kernels.memory import copy\nimport course_lib.home"),
        ("course_lib/figures", "from course_lib.hardware import roofline"),
        ("exercises", "import torch\nfrom course_lib.checker import Exercise, Case"),
        (
            "solutions",
            "from course_lib import check, hint\nfrom course_lib.kernels.memory.vector_add import vector_add",
        ),
    ],
)
def test_what_is_allowed_passes(part, source):
    assert not violations(part, source, part.replace("/", "."))
