"""The committed notebooks are what their sources build: no edit made in them, none forgotten, no outputs left."""
import nbformat
import pytest

from course_lib import builder

CHAPTERS = [path.stem for path in builder.chapters()]


def test_committed_notebooks_are_what_their_sources_build():
    assert [f"{path.name} {reason}" for path, reason in builder.stale()] == []


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_learners_notebook_is_valid_and_holds_no_answer(chapter):
    notebook = nbformat.read(builder.NOTEBOOKS / f"{chapter}.ipynb", as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    text = "\n".join(cell["source"] for cell in notebook.cells)
    assert "SOLUTION" not in text and "COURSE_STRICT" not in text


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_exercise_of_a_chapter_is_checked_in_it(chapter):
    """An exercise that no cell checks would be left out by whoever runs the notebook, solved or not."""
    cells = builder.read_cells(builder.SOURCES / f"{chapter}.py")
    ids = [identity for cell in cells if (identity := builder.exercise_of(cell))]
    code = "\n".join(cell.text for cell in cells if cell.kind == "code")
    unchecked = [identity for identity in ids if f'check("{identity}"' not in code]
    assert not unchecked
