"""`check`, `hint`, `solution` and `progress` as a learner meets them in a notebook."""

import html
import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

import course_lib.checker.judge.decide as judging
import course_lib.checker.notebook.commands as notebook
import course_lib.checker.notebook.store as kept
from course_lib.checker import HOPPER, CourseError, Verdict, attempts, check, check_file, hint, progress
from course_lib.checker.notebook.store import Store
from course_lib.checker.specification import catalog, cells
from tests.checker.samples import ADD, ALL, DOUBLE


@pytest.fixture(autouse=True)
def course(tmp_path, monkeypatch):
    """A course that consists of the sample exercises, with a progress file of its own."""
    monkeypatch.setattr(catalog, "exercises", lambda: ALL)
    monkeypatch.setattr(kept, "_store", Store(tmp_path / "progress.sqlite3"))
    monkeypatch.setattr(catalog, "reference", lambda identity: (lambda x: "the course's own",))
    monkeypatch.delenv("COURSE_STRICT", raising=False)
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)


@pytest.fixture
def shell(monkeypatch):
    """IPython's shell, whose module is __main__ for as long: reset takes from it what starting a process asks for."""
    main = sys.modules["__main__"]
    shell = InteractiveShell.instance()
    sys.modules["__main__"] = main
    monkeypatch.setitem(sys.modules, "__main__", shell.user_module)
    shell.reset(new_session=False)
    shell.user_ns["torch"] = __import__("torch")
    return shell


def run(shell, source):
    result = shell.run_cell(source)
    result.raise_error()
    return result.result


RIGHT = "# Exercise 90.2 · Double\ndef double(x):\n    return x + x\n"


def test_a_cells_function_is_checked_from_the_cells_source(shell):
    run(shell, RIGHT)
    assert check("90.2", shell.user_ns["double"]).passed


def test_a_variable_of_another_cell_is_named(shell):
    run(shell, "FACTOR = 2")
    run(shell, "def double(x):\n    return FACTOR * x")
    verdict = check("90.2", shell.user_ns["double"])
    assert verdict.outcome == "error" and "`FACTOR` is not defined in this cell" in verdict.message


def test_a_lambda_with_a_name_works_and_one_without_is_told_to_get_one(shell):
    run(shell, "twice = lambda x: 2 * x")
    assert check("90.2", shell.user_ns["twice"]).passed
    run(shell, "functions = [lambda x: 2 * x]")
    with pytest.raises(CourseError, match="name"):
        check("90.2", shell.user_ns["functions"][0])


def test_a_function_from_a_file_works(tmp_path, monkeypatch):
    (tmp_path / "my_answers_902.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    from my_answers_902 import double

    assert check("90.2", double).passed


@pytest.mark.parametrize(
    "answer, words",
    [
        (7, "A int was given"),
        ("double", "A str was given"),
        (None, "A NoneType was given"),
        (len, "no Python source"),
    ],
)
def test_what_is_not_a_function_is_refused_with_what_to_pass(answer, words):
    with pytest.raises(CourseError, match=words) as caught:
        check("90.2", answer)
    assert 'check("90.2", that_function)' in str(caught.value)


def test_a_kernel_in_place_of_its_launcher_is_refused(shell):
    run(shell, "import triton\n@triton.jit\ndef kernel(x):\n    pass")
    with pytest.raises(CourseError, match="launches it"):
        check("90.1", shell.user_ns["kernel"])


def test_an_unknown_id_names_the_nearest_and_all():
    with pytest.raises(CourseError, match=r"nearest is '90\.\d'.*90\.1, 90\.2"):
        check("90.9", len)


def test_too_few_functions_are_counted(shell):
    run(shell, "def work(n): return 2 * n ** 3")
    with pytest.raises(CourseError, match="asks for 2 function"):
        check("90.5", shell.user_ns["work"])


def test_best_is_the_courses_until_the_learners_passes(shell):
    run(shell, "def double(x):\n    return x")
    assert check("90.2", shell.user_ns["double"]).best(1) == "the course's own"
    run(shell, RIGHT)
    assert check("90.2", shell.user_ns["double"]).best is shell.user_ns["double"]


def test_the_courses_own_answer_is_not_taken_for_a_learners():
    scope = {}
    exec(compile("def double(x): return 2 * x", f"{cells.SOLUTION_PREFIX}90.2>", "exec"), scope)
    with pytest.raises(CourseError, match="course's own answer"):
        check("90.2", scope["double"])


def test_the_courses_own_tests_are_told_of_a_failure(shell, monkeypatch):
    monkeypatch.setenv("COURSE_STRICT", "1")
    run(shell, "# Exercise 90.2 · Double\ndef double(x):\n    return x")
    with pytest.raises(AssertionError, match="not right yet"):
        check("90.2", shell.user_ns["double"])


@pytest.mark.parametrize("way", ["autograde", "validate"])
def test_under_nbgrader_a_check_raises_unless_it_passes(shell, monkeypatch, way):
    monkeypatch.setenv("NBGRADER_EXECUTION", way)
    run(shell, RIGHT)
    assert check("90.2", shell.user_ns["double"]).passed
    for body in ("return x", 'raise NotImplementedError("Exercise 90.2")'):
        run(shell, f"# Exercise 90.2 · Double\ndef double(x):\n    {body}")
        with pytest.raises(AssertionError, match="not right yet|not attempted"):
            check("90.2", shell.user_ns["double"])
    run(shell, "def demonstrated(x):\n    return x")
    assert check("90.2", shell.user_ns["demonstrated"]).outcome == "failed"


def test_under_nbgrader_what_this_machine_cannot_judge_gets_no_points(shell, monkeypatch):
    monkeypatch.setattr(notebook, "judge", lambda *a: Verdict("90.2", "Double", "unsupported", "No GPU here."))
    run(shell, RIGHT)
    assert check("90.2", shell.user_ns["double"]).outcome == "unsupported"
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(AssertionError, match="No GPU here"):
        check("90.2", shell.user_ns["double"])


def test_a_demonstration_is_judged_but_no_attempt(shell, monkeypatch):
    """A chapter shows wrong answers on purpose, in cells that are no exercise."""
    monkeypatch.setenv("COURSE_STRICT", "1")
    run(shell, "def double(x):\n    return x")
    assert check("90.2", shell.user_ns["double"]).outcome == "failed"
    store = kept.progress_file()
    assert "90.2" not in store.standings() and len(store.attempts("90.2")) == 1


def test_attempts_and_hints_show_in_progress(shell):
    run(shell, RIGHT)
    check("90.2", shell.user_ns["double"])
    assert "first" in repr(hint("90.1")) and "second" in repr(hint("90.1")) and "second" in repr(hint("90.1"))
    kept.progress_file().saw_solution("90.3")
    standings = kept.progress_file().standings()
    assert standings["90.2"].passed and standings["90.1"].hints == 2 and standings["90.3"].solution_seen


def test_every_hint_of_a_cell_is_shown_and_the_last_one_once(shell, monkeypatch):
    """Only a cell's last value is displayed, so of three calls in a cell the first two were lost."""
    shown = []
    monkeypatch.setattr("IPython.display.publish_display_data", lambda data: shown.append(data["text/plain"]))
    monkeypatch.setattr(notebook, "_shell", lambda: SimpleNamespace(execution_count=3, user_ns={}))
    first, second = hint("90.1"), hint("90.1")
    second._ipython_display_()
    assert len(shown) == 2 and "first" in shown[0] and "second" in shown[1]
    monkeypatch.setattr(notebook, "_shell", lambda: SimpleNamespace(execution_count=4, user_ns={}))
    first._ipython_display_()
    assert len(shown) == 3 and shown[2] == shown[0], "in a later cell it is shown again"


def test_text_from_a_learner_cannot_become_markup(shell):
    run(shell, "def double(x):\n    raise ValueError('<script>alert(1)</script>')")
    verdict = check("90.2", shell.user_ns["double"])
    assert "<script>" not in verdict._repr_html_() and "&lt;script&gt;" in verdict._repr_html_()


def _notebook(path, *sources):
    code = [
        {"cell_type": "code", "metadata": {}, "source": source, "outputs": [], "execution_count": None}
        for source in sources
    ]
    path.write_text(json.dumps({"cells": code, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}))
    return path


def test_files_of_both_kinds_are_checked_cell_by_cell(tmp_path):
    stub = "# Exercise 90.3 · Append in place\ndef append(cache, row, position):\n    raise NotImplementedError\n"
    both = [
        [v.outcome for v in check_file(path)]
        for path in (_notebook(tmp_path / "answers.ipynb", "x = 1", RIGHT, stub), tmp_path / "answers.py")
        if path.suffix == ".ipynb" or path.write_text(f"# %% [markdown]\n# # Title\n\n# %%\n{RIGHT}\n# %%\n{stub}")
    ]
    assert both == [["passed", "not_attempted"]] * 2


@pytest.mark.parametrize("line", ["raise ValueError('\\ud800')", "x = '\ud800'"], ids=["raised", "in the source"])
def test_what_is_no_unicode_ends_no_check(tmp_path, line):
    """Half of a pair in an error's text could not be stored: `check` ended, and the other verdicts were lost."""
    broken = f"# Exercise 90.2 · Double\ndef double(x):\n    {line}\n"
    other = "# Exercise 90.3 · Append in place\ndef append(cache, row, position):\n    cache[position] = row\n"
    verdicts = check_file(_notebook(tmp_path / "answers.ipynb", broken, other))
    assert [verdict.outcome for verdict in verdicts] == ["error", "passed"]
    assert attempts("90.2")._repr_html_().encode()


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("missing.ipynb", None, "there is no such file"),
        ("broken.ipynb", "{'cells': [", "not a readable notebook"),
        ("list.ipynb", "[]", "not a readable notebook"),
        ("empty.py", "x = 1\n", "holds no exercise cell"),
        ("a.txt", "x", "only notebooks"),
        ("binary.py", b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CourseError, match=words) as caught:
        check_file(path)
    assert "\n" not in str(caught.value)


def test_an_exercise_that_the_file_lacks_is_named(tmp_path):
    with pytest.raises(CourseError, match="holds no exercise 90.1; it holds 90.2"):
        check_file(_notebook(tmp_path / "answers.ipynb", RIGHT), "90.1")


@pytest.fixture
def moved(monkeypatch, tmp_path):
    """90.2 was 88.5 once."""
    monkeypatch.setitem(cells.MOVED, "88.5", "90.2")
    monkeypatch.setattr(catalog, "solution_file", lambda chapter: tmp_path / f"{chapter}_sample.py")
    monkeypatch.setattr(catalog, "solution_source", lambda identity: RIGHT)
    return "Exercise 88.5 is 90.2 now, in notebooks/90_sample.ipynb"


def test_an_old_number_is_judged_as_the_new_one_and_says_where_that_is(shell, moved):
    run(shell, RIGHT.replace("90.2", "88.5"))
    verdict = check("88.5", shell.user_ns["double"])
    assert verdict.passed and verdict.exercise == "90.2" and moved in str(verdict)
    assert moved in str(hint("88.5")) and moved in str(notebook.solution("88.5"))
    assert moved not in str(check("90.2", shell.user_ns["double"])) and moved not in str(hint("90.2"))


@pytest.mark.parametrize("asked", [None, "88.5", "90.2"])
def test_an_old_notebooks_cell_is_found_under_both_numbers(tmp_path, moved, asked):
    path = _notebook(tmp_path / "old.ipynb", RIGHT.replace("90.2", "88.5"))
    (verdict,) = check_file(path, asked)
    assert verdict.passed and verdict.exercise == "90.2" and moved in str(verdict)


def test_what_was_recorded_under_an_old_number_counts_for_the_new(shell, moved):
    store = kept.progress_file()
    store.add("88.5", "the first", "passed", None, "", 0.1, 1, "notebook")
    store.add("90.2", "the second", "failed", None, "", 0.1, 1, "notebook")
    store.saw_solution("88.5")
    standing = store.standings()["90.2"]
    assert (standing.passed, standing.attempts, standing.solution_seen) == (True, 2, True)
    assert "the first" in str(attempts("90.2")) and "the second" in str(attempts("88.5"))
    assert "88.5" not in store.standings()


def test_no_exercise_takes_a_number_that_another_had_and_each_that_moved_is_there():
    known = catalog.exercise_files()
    assert cells.MOVED and not cells.MOVED.keys() & known.keys() and set(cells.MOVED.values()) <= known.keys()


@pytest.fixture
def chapters(monkeypatch, tmp_path):
    """Chapter 90 with three exercises, of which a Hopper alone can judge the first; chapter 91 with one."""
    tasks = [replace(ADD, needs=HOPPER), DOUBLE, replace(DOUBLE, id="90.4"), replace(DOUBLE, id="91.1")]
    monkeypatch.setattr(catalog, "exercises", lambda: {task.id: task for task in tasks})
    monkeypatch.setattr(catalog, "solution_file", lambda chapter: tmp_path / f"{chapter}_sample.py")
    (tmp_path / "90_sample.py").write_text(
        "# # 90 · Samples: one of each\n# Exercise 90.2 · Double\n# ## More · deeper\n# Exercise 90.4 · Double\n"
        "# ### A part of it\n# ## Back\n# Exercise 90.1 · Vector add\n"
    )
    (tmp_path / "91_sample.py").write_text("# # 91 · The end\n# Exercise 91.1 · Double\n")
    return lambda identity, outcome="passed": kept.progress_file().add(
        identity, "x", outcome, None, "", 0.1, 1, "notebook"
    )


def test_a_newcomer_is_told_where_to_begin(chapters):
    for text in (repr(progress()), progress()._repr_html_()):
        assert "Begin with 90 · Samples: one of each. Its first exercise is 90.2, Double." in text
        assert "README.md" in text and " of " not in text.replace("one of each", "")


def test_progress_shows_the_chapters_that_were_begun_and_what_is_open_next(chapters):
    """What was passed in the section that may be skipped leaves the core path open; its order is the notebook's."""
    chapters("90.4")
    text = repr(_shown(H100))
    assert "90 · Samples: one of each: core path 0 of 2, deeper 1 of 1, next 90.2, Double" in text
    assert "· 90.2  · 90.1  ✓ 90.4" in text
    assert "The next chapter is 91 · The end. Its first exercise is 91.1" in text and "README" not in text
    chapters("90.2")
    assert "core path 1 of 2, deeper 1 of 1, next 90.1, Vector add" in repr(_shown(H100))
    assert "90.1, Vector add" in _shown(H100)._repr_html_()
    chapters("90.1"), chapters("91.1", "failed")
    text = repr(_shown(H100))
    assert "core path 2 of 2, deeper 1 of 1\n" in text and "next 91.1" in text and "next chapter" not in text
    assert "You have begun every chapter." in text


def test_after_the_last_chapter_the_first_is_not_called_the_next(chapters):
    """A learner who began with the last chapter was told there: "The next chapter is 00 · Start here"."""
    chapters("91.1", "failed")
    for text in (repr(_shown(H100)), _shown(H100)._repr_html_()):
        assert "There is no chapter after 91. Of the others you have not begun 90." in text
        assert "next chapter" not in text


def test_what_this_machine_cannot_judge_is_not_what_is_next(chapters):
    chapters("90.2")
    assert "core path 1 of 2, deeper 0 of 1\n" in repr(_shown(NO_GPU))


def test_the_core_path_of_each_chapter_is_the_one_that_its_first_cell_names():
    """A section that may be skipped is known by its heading, so each exercise that a chapter calls core is outside."""
    for number in dict.fromkeys(f"{int(identity.split('.')[0]):02}" for identity in catalog.exercise_files()):
        chapter = catalog.chapter(number)
        time = catalog.solution_file(number).read_text().split("**Time.**")[1].split("# %%")[0]
        named = re.search(r"exercises? ((?:\d+\.\d+(?:, | and | to |,?\s+#\s+and )?)+)", time.replace("\n# ", " "))
        assert chapter.title.startswith(f"{number} · ") and chapter.core
        assert set(re.findall(r"\d+\.\d+", named[1]) if named else ()) <= {*chapter.core}, number
        assert named or number in ("00", "15"), "these two name none"


def _shown(hardware):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "machine", lambda: hardware)
        return progress()


NO_GPU = SimpleNamespace(tier="none", name="a CPU", compute_capability=None, triton="3.4", reason="No GPU.")
H100 = SimpleNamespace(tier="hopper", name="an H100", compute_capability=(9, 0), triton="3.4", reason="sm_90")


def test_progress_says_how_a_chapter_is_handed_in_once_all_of_it_passed(chapters):
    assert "submit" not in repr(_shown(H100)) + _shown(H100)._repr_html_()
    chapters("90.2")
    assert "submit" not in repr(_shown(H100)) + _shown(H100)._repr_html_()
    chapters("90.1"), chapters("90.4")
    for text in (repr(_shown(H100)), html.unescape(_shown(H100)._repr_html_())):
        assert text.count("submit(") == 1 and "All of chapter 90 passed" in text
        assert 'from course_lib import submit; submit("90")' in text


def test_what_this_machine_cannot_judge_keeps_no_chapter_open(chapters):
    chapters("90.2"), chapters("90.4")
    assert "All that this machine can judge of chapter 90 passed" in repr(_shown(NO_GPU))


def test_a_chapter_of_which_nothing_can_be_judged_is_not_done(chapters, monkeypatch):
    (catalog.solution_file("90")).write_text("# # 90 · Samples\n# Exercise 90.1 · Vector add\n")
    monkeypatch.setattr(catalog, "exercises", lambda: {"90.1": replace(ADD, needs=HOPPER)})
    chapters("90.1", "failed")
    assert "submit" not in repr(_shown(NO_GPU))


def test_several_chapters_are_named_in_one_line(chapters):
    for identity in ("90.1", "90.2", "90.4", "91.1"):
        chapters(identity)
    line = repr(_shown(H100)).splitlines()[-1]
    assert "chapters 90, 91 passed" in line and 'submit("91")' in line and line.count("submit(") == 1


def test_a_cell_as_it_was_given_is_not_attempted_even_when_its_launcher_is_whole():
    kernel = "@triton.jit\ndef kernel(x):\n    # YOUR CODE HERE\n    pass\n\n\n"
    given = kernel + "def double(x):\n    kernel[(1,)](x)\n    return x\n"
    touched_up = given.replace("# YOUR CODE HERE", "# my note") + "\n\n# later\n"
    assert not cells.is_attempted(touched_up, ("double",), given)
    assert cells.is_attempted(given.replace("pass", "tl.store(x, 1)"), ("double",), given)


def test_every_version_can_be_seen_again(shell):
    for factor in (1, 2):
        run(shell, f"# Exercise 90.2 · Double\ndef double(x):\n    return {factor} * x")
        check("90.2", shell.user_ns["double"])
    shown = repr(attempts("90.2"))
    assert shown.index("return 1 * x") < shown.index("return 2 * x") and "not right yet" in shown
    assert "No attempt" in repr(attempts("90.1"))


def test_a_renamed_answer_passes_with_a_word_about_files(shell):
    run(shell, "def twofold(x):\n    return 2 * x")
    verdict = check("90.2", shell.user_ns["twofold"])
    assert verdict.passed and "Rename `twofold` to double" in verdict.message


def test_a_number_without_quotes_is_understood_and_an_error_is_one_line(shell):
    run(shell, RIGHT)
    assert check(90.2, shell.user_ns["double"]).passed
    with pytest.raises(CourseError) as caught:
        check(90.7, shell.user_ns["double"])
    assert len(caught.value._render_traceback_()) == 1
