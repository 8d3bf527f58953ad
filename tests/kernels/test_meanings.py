"""The plain PyTorch meaning beside a kernel is proved: a test of this folder calls it."""

import ast
from pathlib import Path

import pytest

from course_lib.home import ROOT

KERNELS = ROOT / "course_lib" / "kernels"
TESTS = Path(__file__).resolve().parent


def meanings(source: str) -> list[str]:
    """The public functions of a module that say what a kernel means: named `*_reference`."""
    functions = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.endswith("_reference") and not name.startswith("_")]


def used(source: str) -> set[str]:
    """Names that a test reads; an import alone is no use."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


MEANINGS = {name: path for path in sorted(KERNELS.rglob("*.py")) for name in meanings(path.read_text())}
USED = set().union(*(used(path.read_text()) for path in TESTS.rglob("test_*.py")))
# Meanings that another one calls: proved with it.
WITHIN = {
    "ragged_reference": {"decode_attention_reference", "paged_prefill_reference"},
    "ragged_latent_reference": {"latent_decode_reference", "paged_latent_decode_reference"},
}


@pytest.mark.parametrize("name", MEANINGS)
def test_every_meaning_is_held_against_its_kernel(name):
    callers = WITHIN.get(name, set())
    calls = {n: used(ast.unparse(function)) for n, function in functions_of(MEANINGS[name]).items()}
    assert name in USED or callers and all(caller in USED and name in calls[caller] for caller in callers), (
        f"no test in tests/kernels calls {name} of {MEANINGS[name].relative_to(ROOT)}"
    )


def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_meanings_are_found_and_an_import_is_no_use():
    assert len(MEANINGS) > 12
    assert meanings("def add_reference(x): ...\ndef _own_reference(x): ...\ndef add(x): ...\n") == ["add_reference"]
    assert used("from a import add_reference, b\nb(1)\n") == {"b"}
