"""Verdicts as GitHub shows them: the line of a cell in a notebook's JSON, commands and the summary's table."""

import json

import pytest

from course_lib.grading.annotations import cell, command, commands, exercise_lines

ANSWER = "# Exercise 3.2 · Title\ndef f():\n    return 1\n"


def written(tmp_path, cells, **layout):
    path = tmp_path / "mine.ipynb"
    path.write_text(json.dumps({"metadata": {"cells": [1]}, "cells": cells, "nbformat": 4}, **layout), encoding="utf-8")
    return path


def code(source, **more):
    return {"cell_type": "code", "outputs": [], "source": source, **more}


def line_with(path, text):
    [number] = [number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    return number


@pytest.mark.parametrize("lines", [[], ["\n", "  \n"]], ids=["at once", "after blank lines"])
@pytest.mark.parametrize("layout", [{"indent": 1}, {"indent": 4, "ensure_ascii": False}], ids=["Jupyter", "another"])
def test_the_line_is_that_of_the_header(tmp_path, lines, layout):
    path = written(tmp_path, [code(["x = 1"]), code([*lines, *ANSWER.splitlines(keepends=True)])], **layout)
    assert exercise_lines(path) == {"3.2": line_with(path, "# Exercise 3.2")}


def test_a_source_in_one_piece_has_the_line_of_that_piece(tmp_path):
    path = written(tmp_path, [code(ANSWER)], indent=1)
    assert exercise_lines(path) == {"3.2": line_with(path, "# Exercise 3.2")}


def test_a_notebook_in_one_line_has_all_on_it(tmp_path):
    assert exercise_lines(written(tmp_path, [code(ANSWER), code("# Exercise 3.3 · Title")])) == {"3.2": 1, "3.3": 1}


def test_of_two_cells_the_later_counts_as_it_does_for_the_check(tmp_path):
    path = written(tmp_path, [code(["# Exercise 3.2 · First"]), code(["# Exercise 3.2 · Second"])], indent=1)
    assert exercise_lines(path) == {"3.2": line_with(path, "Second")}


def test_text_and_outputs_that_look_like_an_exercise_are_none(tmp_path):
    text = {"cell_type": "markdown", "source": ["# Exercise 3.2 · By heart"]}
    output = {"data": {"application/json": {"source": ["# Exercise 3.2 · Printed"], "cells": "[{"}}}
    cells = [text, code(["# Exercise 3.2 · Mine"]), code(["# After"], outputs=[output]), text]
    path = written(tmp_path, cells, indent=1)
    assert exercise_lines(path) == {"3.2": line_with(path, "Mine")}


def test_an_exercise_in_a_notebook_of_an_old_kind_is_shown_at_its_first_line(tmp_path):
    path = tmp_path / "old.ipynb"
    path.write_text(json.dumps({"nbformat": 3, "worksheets": [{"cells": [code(ANSWER)]}]}, indent=1))
    [said] = commands([{"file": str(path), "exercise": "3.2", "outcome": "passed", "message": "Right."}], {})
    assert said == command("notice", str(path), 1, "Exercise 3.2", "Right.")


def test_in_a_script_the_line_is_the_scripts_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"x = 1\n\n# %%\n{ANSWER}", encoding="utf-8")
    assert exercise_lines(path) == {"3.2": 4}


def test_an_exercise_under_its_first_number_is_found_under_the_one_it_has_now(tmp_path):
    assert exercise_lines(written(tmp_path, [code("# Exercise 9.5 · Title")])) == {"12.7": 1}


def test_what_a_command_would_read_otherwise_is_escaped():
    said = command("error", "a:b,c%.py", 7, "Exercise 3.2", "50 % of it: a, b\r\n::error::forged")
    assert said == ("::error file=a%3Ab%2Cc%25.py,line=7,title=Exercise 3.2::50 %25 of it: a, b%0D%0A::error::forged")


@pytest.mark.parametrize(
    "outcome, kind",
    [
        ("passed", "notice"),
        ("unsupported", "warning"),
        ("failed", "error"),
        ("error", "error"),
        ("timeout", "error"),
        ("crashed", "error"),
        ("not_attempted", None),
    ],
)
def test_each_outcome_has_its_kind_and_what_is_as_it_was_given_none(tmp_path, outcome, kind):
    file = str(written(tmp_path, [code(ANSWER)]))
    said = list(commands([{"file": file, "exercise": "3.2", "outcome": outcome, "message": "Why."}], {}))
    assert said == ([command(kind, file, 1, "Exercise 3.2", "Why.")] if kind else [])


def test_a_file_that_could_not_be_read_is_an_error_at_its_first_line():
    assert list(commands([], {"b.ipynb": "No."})) == ["::error file=b.ipynb,line=1,title=Not checked::No."]


def test_a_cell_of_the_table_is_one_line_without_markup_but_its_code():
    assert cell("<b> | `i < n` and\n<lambda>") == r"&lt;b&gt; \| `i < n` and &lt;lambda&gt;"
