"""The builder: answers never reach the learner, no work of the learner is lost, one source gives one result."""

import json
import os
import subprocess
import sys

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib import builder
from course_lib.builder import BuildError, keeping
from course_lib.builder.notebook import fingerprint
from course_lib.checker.specification import catalog
from course_lib.home import ROOT

CHAPTER = '''\
# %% [markdown]
# # A chapter
#
# With prose, and $O(N)$ in it.

# %%
import torch

# %% tags=["wide"]
# %matplotlib inline
torch.zeros(1)

# %%
# Exercise 3.1 · Double it
def double(x):
    """Twice x."""
    # BEGIN SOLUTION
    secret_sum = x + x
    return secret_sum
    # END SOLUTION


# %%
double(2)

# %%
# Exercise 3.2 · Double it in Triton
import triton
import triton.language as tl


@triton.jit
def double_kernel(x_pointer, LENGTH: tl.constexpr):
    offsets = tl.arange(0, LENGTH)
    # BEGIN SOLUTION
    secret_values = tl.load(x_pointer + offsets)
    tl.store(x_pointer + offsets, 2 * secret_values)
    # END SOLUTION


def launch(x):
    if x.numel():
        # BEGIN SOLUTION
        double_kernel[(1,)](x, x.numel())  # secret
        # END SOLUTION
    return x
'''


@pytest.fixture
def course(tmp_path):
    """A course of one chapter, 03_sample, and the two folders that the builder is told of."""
    sources, notebooks = tmp_path / "solutions", tmp_path / "notebooks"
    sources.mkdir()
    (sources / "03_sample.py").write_text(CHAPTER)
    return {"sources": sources, "notebooks": notebooks}


def built(tmp_path, text, name="03_sample.py", **options):
    path = tmp_path / name
    path.write_text(text)
    return builder.build_notebook(path, **options)


def sources_of(notebook):
    return ["".join(cell["source"]) for cell in notebook["cells"]]


def edit(path, change):
    notebook = json.loads(path.read_text())
    change(notebook)
    path.write_text(json.dumps(notebook))


def attempt(notebook):
    """What a learner does: writes into the cell of exercise 3.1."""
    [cell] = [cell for cell in notebook["cells"] if cell["id"] == "exercise-3-1"]
    cell["source"] = ["# Exercise 3.1 · Double it\n", "def double(x):\n", "    return 2 * x  # mine\n"]


# ------------------------------------------------------------------------------------------------------- the stubs


def test_no_answer_reaches_the_learner(tmp_path):
    text = json.dumps(built(tmp_path, CHAPTER))
    assert "secret" not in text and "SOLUTION" not in text


def test_each_stub_says_its_exercise_at_the_answers_indentation(tmp_path):
    cells = sources_of(built(tmp_path, CHAPTER))
    [double] = [text for text in cells if text.startswith("# Exercise 3.1")]
    assert double.endswith('"""Twice x."""\n    # YOUR CODE HERE\n    raise NotImplementedError("Exercise 3.1")')
    [launch] = [text for text in cells if text.startswith("# Exercise 3.2")]
    assert '    if x.numel():\n        # YOUR CODE HERE\n        raise NotImplementedError("Exercise 3.2")\n' in launch


@pytest.mark.parametrize("decorator", ["triton.jit", "triton.jit(noinline=True)", "gluon.jit", "jit"])
def test_a_kernels_stub_passes_because_a_kernel_cannot_raise(tmp_path, decorator):
    cells = sources_of(built(tmp_path, CHAPTER.replace("@triton.jit", f"@{decorator}")))
    assert "LENGTH)\n    # YOUR CODE HERE\n    pass\n" in cells[-1]


def test_an_autotuned_kernel_is_a_kernel(tmp_path):
    tuned = CHAPTER.replace("@triton.jit", "@triton.autotune(configs=[], key=[])\n@triton.jit")
    assert "    # YOUR CODE HERE\n    pass\n" in sources_of(built(tmp_path, tuned))[-1]


def test_a_solved_chapter_keeps_the_answers_and_differs_in_nothing_else(tmp_path):
    learners, solved = built(tmp_path, CHAPTER), built(tmp_path, CHAPTER, with_answers=True)
    texts = sources_of(solved)
    assert "COURSE_STRICT" in texts.pop(0)
    assert "BEGIN SOLUTION" not in "".join(texts) and "secret_sum" in "".join(texts)
    differing = [mine for mine, theirs in zip(sources_of(learners), texts, strict=True) if mine != theirs]
    assert [text.split(" ·")[0] for text in differing] == ["# Exercise 3.1", "# Exercise 3.2"]


# ---------------------------------------------------------------------------------------------------- the notebook


def test_the_notebook_is_valid_clean_and_begins_with_its_title_and_the_set_up(tmp_path):
    notebook = built(tmp_path, CHAPTER)
    nbformat.validate(nbformat.from_dict(notebook))
    assert all(
        not cell["outputs"] and cell["execution_count"] is None
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    )
    title, set_up = sources_of(notebook)[:2]
    assert title.startswith("# A chapter\n\nWith prose, and $O(N)$")
    assert "course_lib" in set_up and len(set_up.splitlines()) < 25


def test_tags_and_magics_survive(tmp_path):
    [cell] = [cell for cell in built(tmp_path, CHAPTER)["cells"] if "torch.zeros" in "".join(cell["source"])]
    assert cell["metadata"] == {"tags": ["wide"]}
    assert cell["source"][0] == "%matplotlib inline\n"


def test_the_same_source_gives_the_same_bytes_in_another_folder_and_process(tmp_path):
    here = builder.as_text(built(tmp_path, CHAPTER))
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere" / "03_sample.py"
    path.write_text(CHAPTER)
    program = (
        "import sys; from pathlib import Path; from course_lib import builder; sys.stdout.write("
        "builder.as_text(builder.build_notebook(Path(sys.argv[1]))))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", program, path]
    there = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert there.stdout.decode() == here


def test_an_edit_of_one_cell_changes_no_other_cells_id(tmp_path):
    before = [cell["id"] for cell in built(tmp_path, CHAPTER)["cells"]]
    after = [cell["id"] for cell in built(tmp_path, CHAPTER.replace("With prose", "With better prose"))["cells"]]
    assert before[1:] == after[1:] and before[0] != after[0]


def test_cells_that_say_the_same_have_ids_of_their_own(tmp_path):
    ids = [cell["id"] for cell in built(tmp_path, CHAPTER + "\n\n# %%\ndouble(2)\n\n# %%\ndouble(2)\n")["cells"]]
    assert len(ids) == len(set(ids))


# ------------------------------------------------------------------------------------------------------- nbgrader

CHECKED = (
    CHAPTER
    + """
# %%
check("3.2", lambda x: x)

# %%
best = check("3.1", double).best

# %%
check("3.1", double)
"""
)


def nbgrader_metadata(notebook):
    return {
        cell["metadata"]["nbgrader"]["grade_id"]: (cell["metadata"]["nbgrader"], "".join(cell["source"]))
        for cell in notebook["cells"]
        if "nbgrader" in cell["metadata"]
    }


def test_an_exercise_is_nbgraders_solution_and_the_first_check_after_it_carries_its_points(tmp_path):
    cells = nbgrader_metadata(built(tmp_path, CHECKED))
    assert set(cells) == {"exercise-3-1", "check-3-1", "exercise-3-2", "check-3-2"}
    solution, text = cells["exercise-3-1"]
    assert text.startswith("# Exercise 3.1") and solution == {
        "grade": False,
        "grade_id": "exercise-3-1",
        "locked": False,
        "schema_version": 3,
        "solution": True,
        "task": False,
    }
    check, text = cells["check-3-1"]
    assert text == 'best = check("3.1", double).best' and check == {
        "grade": True,
        "grade_id": "check-3-1",
        "locked": True,
        "points": 1,
        "schema_version": 3,
        "solution": False,
        "task": False,
    }


def test_the_source_may_say_how_many_points_an_exercise_is_worth(tmp_path):
    text = CHECKED.replace("# %%\n# Exercise 3.1", "# %% points=3\n# Exercise 3.1")
    notebook = built(tmp_path, text)
    cells = nbgrader_metadata(notebook)
    assert cells["check-3-1"][0]["points"] == 3 and cells["check-3-2"][0]["points"] == 1
    assert all("points" not in cell["metadata"] for cell in notebook["cells"])


@pytest.mark.parametrize("path", builder.chapters(), ids=lambda path: path.stem)
def test_every_exercise_of_a_chapter_has_one_graded_cell_with_its_points(path):
    points = {
        name: cell["points"]
        for name, (cell, _) in nbgrader_metadata(builder.build_notebook(path)).items()
        if cell["grade"]
    }
    tasks = [task for task in catalog.exercises().values() if task.chapter == path.stem[:2]]
    assert points == {f"check-{task.id.replace('.', '-')}": task.points for task in tasks}


# --------------------------------------------------------------------------------------------- faults in a source

ANSWER = "    # BEGIN SOLUTION\n    secret_sum = x + x\n    return secret_sum\n    # END SOLUTION\n"

FAULTS = {
    "no end": (ANSWER, ANSWER.replace("    # END SOLUTION\n", ""), "line 17: '# BEGIN SOLUTION' has no"),
    "no begin": (ANSWER, ANSWER.replace("    # BEGIN SOLUTION\n", ""), "line 19: '# END SOLUTION' without"),
    "two begins": (ANSWER, "    # BEGIN SOLUTION\n" + ANSWER, "line 18: a second '# BEGIN SOLUTION'"),
    "a misspelt begin": (ANSWER, ANSWER.replace("BEGIN SOL", "BEGIN_SOL"), "line 17: '# BEGIN_SOLUTION' looks"),
    "a small end": (ANSWER, ANSWER.replace("END SOLUTION", "end solution"), "line 20: '# end solution' looks"),
    "an end indented otherwise": (ANSWER, ANSWER.replace("    # END", "# END"), "line 20: .* is not indented"),
    "nothing enclosed": (ANSWER, "    # BEGIN SOLUTION\n    # only words\n    # END SOLUTION\n", "line 17: .* no code"),
    "no answer": (ANSWER, "    return x\n", "line 14: exercise 3.1 marks no answer"),
    "an answer that is no Python": (ANSWER, ANSWER.replace("x + x", "x +"), "line 18: .* not valid Python"),
    "an answer outside an exercise": ("# Exercise 3.1 · Double it\n", "", "line 16: an answer outside an exercise"),
    "an answer outside a function": (
        "double(2)\n",
        "# Exercise 3.3 · Predict\n# BEGIN SOLUTION\nguess = 4\n# END SOLUTION\n",
        "line 25: the answer of exercise 3.3 is not inside a function",
    ),
    "the same exercise twice": ("Exercise 3.2", "Exercise 3.1", "line 27: exercise 3.1 is in line 14 already"),
    "an exercise of another chapter": ("Exercise 3.1", "Exercise 4.1", "line 14: exercise 4.1 does not belong"),
    "a hyphen in the first line": ("3.1 ·", "3.1 -", "line 14: '# Exercise 3.1 - Double it' should read"),
    "no title": ("3.1 · Double it", "3.1", "line 14: '# Exercise 3.1' should read"),
    "a marker in prose": ("# With prose", "# # BEGIN SOLUTION\n# With prose", "line 4: .* stands in prose"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_its_file_and_line(tmp_path, fault):
    old, new, message = FAULTS[fault]
    assert old in CHAPTER
    with pytest.raises(BuildError, match=r"03_sample\.py, " + message):
        built(tmp_path, CHAPTER.replace(old, new, 1))


def test_a_fault_in_one_chapter_leaves_every_notebook_as_it_was(course):
    builder.build(**course)
    before = (course["notebooks"] / "03_sample.ipynb").read_bytes()
    (course["sources"] / "03_sample.py").write_text(CHAPTER.replace("With prose", "New prose"))
    (course["sources"] / "04_faulty.py").write_text("# %%\n# Exercise 4.1 · No answer\nx = 1\n")
    with pytest.raises(BuildError, match="04_faulty"):
        builder.build(**course)
    assert (course["notebooks"] / "03_sample.ipynb").read_bytes() == before


def test_a_chapter_nobody_has_is_answered_with_those_there_are(course):
    with pytest.raises(BuildError, match="no chapter '7'; the chapters are: 03_sample"):
        builder.build(["7"], **course)


@pytest.mark.parametrize("name", ["03", "3", "03_sample", "solutions/03_sample.py", "notebooks/03_sample.ipynb"])
def test_a_chapter_goes_by_any_of_its_names(course, name):
    assert [path.name for path in builder.build([name], **course)] == ["03_sample.ipynb"]


# ------------------------------------------------------------------------------------------- the learner's own work


def test_a_notebook_with_work_in_it_is_not_built_over_and_the_others_are(course):
    (course["sources"] / "04_other.py").write_text("# %% [markdown]\n# # Other\n")
    mine, _ = builder.build(**course)
    edit(mine, attempt)
    before = mine.read_bytes()
    for name in ("03_sample", "04_other"):
        source = course["sources"] / f"{name}.py"
        source.write_text(source.read_text() + "\n# %% [markdown]\n# More.\n")
    with pytest.raises(BuildError, match=r"with the work in it: .*03_sample\.ipynb\. .*reset 03"):
        builder.build(**course)
    assert mine.read_bytes() == before
    assert "More." in (course["notebooks"] / "04_other.ipynb").read_text()


@pytest.mark.parametrize(
    "work",
    [
        lambda notebook: notebook["cells"].append(
            {"cell_type": "markdown", "id": "x", "metadata": {}, "source": "mine"}
        ),
        lambda notebook: notebook["cells"].pop(3),
        lambda notebook: notebook["cells"].reverse(),
        lambda notebook: notebook["metadata"].pop("course"),
    ],
    ids=["a note added", "a cell deleted", "cells moved", "not the builder's"],
)
def test_whatever_might_be_work_is_taken_for_it(course, work):
    [path] = builder.build(**course)
    edit(path, work)
    with pytest.raises(BuildError, match="with the work in it"):
        builder.build(**course)


def test_a_notebook_that_cannot_be_read_might_hold_work(course):
    [path] = builder.build(**course)
    path.write_text(path.read_text()[:300])
    with pytest.raises(BuildError, match="with the work in it"):
        builder.build(**course)


def run_in_an_editor(notebook):
    """What Jupyter does to a notebook that is only run: outputs, counts, metadata, an empty cell at the end."""
    for number, cell in enumerate(notebook["cells"]):
        cell["source"] = "".join(cell["source"])
        if cell["cell_type"] == "code":
            cell |= {"execution_count": number, "outputs": [{"output_type": "stream", "name": "stdout", "text": "4\n"}]}
            cell["metadata"]["scrolled"] = True
    notebook["cells"].append(
        {"cell_type": "code", "id": "new", "metadata": {}, "source": "", "outputs": [], "execution_count": None}
    )
    notebook["metadata"]["language_info"] = {"name": "python", "version": "3.12.1"}


def test_a_notebook_of_an_older_source_that_was_only_run_is_built_over(course):
    [path] = builder.build(**course)
    edit(path, run_in_an_editor)
    (course["sources"] / "03_sample.py").write_text(CHAPTER.replace("With prose", "New prose"))
    builder.build(**course)
    assert "New prose" in path.read_text() and '"execution_count": null' in path.read_text()


def test_reset_gives_the_notebook_back_and_keeps_the_learners(course):
    [path] = builder.build(**course)
    fresh = path.read_bytes()
    edit(path, attempt)
    mine = path.read_bytes()
    again, copy = builder.reset("03", **course)
    assert again == path and path.read_bytes() == fresh
    assert copy.parent == path.parent and copy.read_bytes() == mine


def test_two_resets_in_one_second_keep_both_notebooks(course):
    [path] = builder.build(**course)
    kept = []
    for words in ("first", "second"):
        path.write_text(words)
        kept.append(builder.reset("03", **course)[1])
    assert [copy.read_text() for copy in kept] == ["first", "second"]


def test_reset_of_an_untouched_notebook_keeps_no_copy(course):
    builder.build(**course)
    assert builder.reset("3", **course)[1] is None
    assert len(list(course["notebooks"].iterdir())) == 1


def test_an_interrupted_build_leaves_what_was_there_and_no_litter(course, monkeypatch):
    [path] = builder.build(**course)
    before = path.read_bytes()
    (course["sources"] / "03_sample.py").write_text(CHAPTER.replace("With prose", "New prose"))

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(keeping.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        builder.build(**course)
    assert path.read_bytes() == before and list(course["notebooks"].iterdir()) == [path]


def test_solved_chapters_do_not_go_where_the_learner_works(course):
    with pytest.raises(BuildError, match="another folder"):
        builder.build(with_answers=True, out=course["notebooks"], **course)


def test_the_learners_folder_is_safe_under_the_name_of_out_too(course):
    [path] = builder.build(**course)
    edit(path, attempt)
    with pytest.raises(BuildError, match="with the work in it"):
        builder.build(out=course["notebooks"], **course)


@given(st.lists(st.tuples(st.sampled_from(["code", "markdown"]), st.text(max_size=20)), max_size=6), st.data())
def test_no_edit_that_says_something_escapes_the_fingerprint(cells, data):
    entries = [{"cell_type": kind, "source": text} for kind, text in cells]
    place = data.draw(st.integers(0, len(entries)))
    text = data.draw(st.text(min_size=1).filter(str.strip))
    more = [*entries[:place], {"cell_type": "markdown", "source": text}, *entries[place:]]
    assert fingerprint(more) != fingerprint(entries)
    as_lines = [{**entry, "source": entry["source"].splitlines(keepends=True)} for entry in entries]
    assert fingerprint(as_lines) == fingerprint(entries)


# ------------------------------------------------------------------------------------------------------- sameness


def test_sameness_names_what_differs_what_is_missing_and_what_is_stray(course):
    (course["sources"] / "04_other.py").write_text("# %% [markdown]\n# # Other\n")
    (course["sources"] / "05_more.py").write_text("# %% [markdown]\n# # More\n\n# %%\n1\n")
    builder.build(**course)
    assert builder.stale(**course) == []
    edit(course["notebooks"] / "03_sample.ipynb", attempt)
    (course["notebooks"] / "04_other.ipynb").unlink()
    edit(course["notebooks"] / "05_more.ipynb", run_in_an_editor)
    (course["notebooks"] / "09_stray.ipynb").write_text("{}")
    (course["notebooks"] / "03_sample.kept-2026-01-01-120000.ipynb").write_text("{}")
    assert [(path.name, reason) for path, reason in builder.stale(**course)] == [
        ("03_sample.ipynb", "differs from its source"),
        ("04_other.ipynb", "is not there"),
        ("05_more.ipynb", "holds outputs or an editor's metadata"),
        ("09_stray.ipynb", "has no source"),
    ]
