"""A chapter's page: what it leaves out, and where an answer is folded."""

import sys

from course_lib.home import ROOT
from course_lib.site.pages import Chapter, page_of


def code(source, identity="x", outputs=(), **metadata):
    return {"cell_type": "code", "id": identity, "source": source, "outputs": list(outputs), "metadata": metadata}


def prose(source):
    return {"cell_type": "markdown", "id": "prose", "source": source, "metadata": {}}


def printed(text):
    return {"output_type": "stream", "name": "stdout", "text": text}


def notebook(*cells):
    return {"cells": list(cells), "metadata": {"widgets": {"state": "large"}}, "nbformat": 4, "nbformat_minor": 5}


def chapter(given, solved):
    return Chapter("03_sample", notebook(), given, solved)


def test_an_answer_is_folded_beneath_its_check_with_what_the_check_said():
    given = notebook(
        prose("# 03 · Sample\n\nText."),
        code("def f(): ...", "exercise-3-2"),
        code('check("3.2", f)', outputs=[printed("not attempted")]),
        prose("After it."),
    )
    solved = notebook(
        code("strict"), code("def f(): return 1", "exercise-3-2"), code('check("3.2", f)', outputs=[printed("passed")])
    )
    cells = page_of(chapter(given, solved))["cells"]
    assert [cell["id"] for cell in cells] == ["prose", "exercise-3-2", "x", "answer-3-2", "prose"]
    answer = cells[3]
    assert answer["source"] == "def f(): return 1" and answer["outputs"] == [printed("passed")]
    assert answer["metadata"]["tags"] == ["hide-cell"] and "3.2" in answer["metadata"]["mystnb"]["code_prompt_show"]


def test_an_exercise_whose_number_begins_another_keeps_its_own_answer():
    """Once "1.1" was looked for in the text of a cell that checks 1.10 or 11.1."""
    given = notebook(code("a", "exercise-1-1"), code('check("1.10", a)'), code('check("1.1", a)'))
    solved = notebook(code("A", "exercise-1-1"), code('check("1.1", a)', outputs=[printed("right")]))
    cells = page_of(chapter(given, solved))["cells"]
    assert [cell["id"] for cell in cells].index("answer-1-1") == 3


def test_an_answer_without_a_check_stands_before_the_next_exercise():
    given = notebook(code("a", "exercise-1-1"), code("b", "exercise-1-2"))
    solved = notebook(code("A", "exercise-1-1"), code("B", "exercise-1-2"))
    ids = [cell["id"] for cell in page_of(chapter(given, solved))["cells"]]
    assert ids == ["exercise-1-1", "answer-1-1", "exercise-1-2", "answer-1-2"]


def test_the_title_is_followed_by_what_the_page_is_and_the_notebook_without_answers():
    page = page_of(chapter(notebook(prose("# 03 · Sample\n\nText.")), notebook()))
    title, rest = page["cells"][0]["source"].split("\n", 1)
    assert title == "# 03 · Sample" and rest.endswith("\n\nText.") and "../given/03_sample.ipynb" in rest


def test_a_chapter_that_was_not_run_says_so():
    plain = notebook(prose("# 03 · Sample"), code("1", "exercise-3-1"))
    cells = page_of(Chapter("03_sample", plain))["cells"]
    assert "without running" in cells[0]["source"] and len(cells) == 2


def test_the_cell_that_fetches_the_course_is_left_out():
    given = notebook(code("fetch", jupyter={"source_hidden": True}), code("1"))
    assert [cell["source"] for cell in page_of(chapter(given, notebook()))["cells"]] == ["1"]


def test_a_folded_cell_of_the_chapters_own_stays_and_is_folded_there_too():
    folded = code("answers", jupyter={"source_hidden": True}, tags=["hide-input"])
    (cell,) = page_of(chapter(notebook(folded), notebook()))["cells"]
    assert cell["source"] == "answers" and cell["metadata"] == {"tags": ["hide-input"]}


def test_no_folder_of_the_machine_is_on_a_page():
    warning = "/home/somebody/.venv/lib/python3.12/site-packages/triton/interpreter.py:7: RuntimeWarning: overflow"
    text = {"text/plain": f"kept in {ROOT}/build/site/home", "text/html": f"<code>{sys.prefix}/bin/python</code>"}
    shown = {"output_type": "display_data", "data": text, "metadata": {}}
    page = page_of(chapter(notebook(code("1", outputs=[printed(warning), shown])), notebook()))
    stream, data = page["cells"][0]["outputs"]
    assert stream["text"] == "triton/interpreter.py:7: RuntimeWarning: overflow"
    assert data["data"] == {"text/plain": "kept in build/site/home", "text/html": "<code>.venv/bin/python</code>"}


def test_a_widget_leaves_a_sentence_and_its_still_picture_stays():
    still = {"output_type": "display_data", "data": {"image/png": "…"}, "metadata": {}}
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
    says = "A slider through the steps appears here while the notebook runs."

    def widget(text):
        return {"output_type": "display_data", "data": {**view, "text/plain": text}, "metadata": {}}

    given = notebook(code("steps", outputs=[still, widget(says), widget("VBox(children=(…))")]))
    page = page_of(chapter(given, notebook()))
    first, second, third = page["cells"][0]["outputs"]
    assert first == still and says in second["data"]["text/html"] and "VBox" not in third["data"]["text/html"]
    assert "widget-view" not in str(page) and "widgets" not in page["metadata"]
