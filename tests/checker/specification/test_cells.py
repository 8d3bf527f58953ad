"""How the course reads its own chapters."""

import subprocess
import sys

import pytest

from course_lib.checker.specification.cells import own_cells, percent_cells
from course_lib.home import ROOT

CHAPTERS = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py"))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_is_read_as_jupytext_reads_it(path):
    text = path.read_text(encoding="utf-8")
    assert own_cells(text) == percent_cells(path, text)
    assert len(own_cells(text)) > 10


def test_a_first_check_does_not_wait_for_jupytext():
    """It was imported for three seconds, most of them for a grammar that JupyterLab's validators bring along."""
    code = (
        "import sys; from course_lib.checker.specification import catalog; "
        "catalog.untouched_source('0.1'); catalog.solution_source('0.1'); "
        "sys.exit(str([name for name in ('jupytext', 'nbformat', 'jsonschema') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
