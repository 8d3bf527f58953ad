"""Imports point one way: a reader of a kernel needs nothing but the kernel, and the judge never holds an answer.

kernels and hardware know nothing of the rest; figures and models may use both; serving uses models, and no model knows
by whom it is served; the checker knows none of the kernels; exercises use the checker's vocabulary and what the
hardware is; a chapter imports what a learner's notebook may.
"""

import ast
from pathlib import Path

import pytest

from course_lib.grading.imports import imported
from course_lib.home import ROOT

# What a module of each part may import from the course; a part may always import itself, and course_lib.home is free.
MAY_IMPORT = {
    "course_lib/kernels": ["course_lib.hardware"],
    "course_lib/hardware": ["course_lib.kernels", "course_lib.bootstrap"],  # which versions the course needs
    "course_lib/figures": ["course_lib.kernels", "course_lib.hardware", "course_lib.serving.memory"],
    "course_lib/models": ["course_lib.kernels", "course_lib.hardware"],
    "course_lib/serving": ["course_lib.models", "course_lib.kernels", "course_lib.hardware"],
    "course_lib/serving/memory": [],  # who holds which memory is plain Python, without tensors
    # The error map is drawn on the verdict card; the builder knows an answer from the stub that stands in its place.
    "course_lib/checker": ["course_lib.hardware", "course_lib.figures.error_map", "course_lib.builder.answers"],
    # Within it, from the words of an exercise to the learner: each part uses those before it.
    "course_lib/checker/specification": [
        "course_lib.hardware",
        "course_lib.builder.answers",
        "course_lib.checker.runner.process.sparse",  # memory that is laid out alike on both sides of the wire
    ],
    "course_lib/checker/runner": ["course_lib.checker.specification", "course_lib.hardware"],
    "course_lib/checker/judge": [
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
