"""What a learner calls: `check`, `hint`, `solution`, `progress`; and `check_file` behind the command line."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from course_lib.checker.judge.decide import judge, unsupported_here
from course_lib.checker.judge.verdict import OUTCOMES, Verdict, _shell
from course_lib.checker.notebook.predictions import table_of_predictions
from course_lib.checker.notebook.shown import Shown
from course_lib.checker.notebook.store import ASIDE, Standing, progress_file
from course_lib.checker.specification import catalog, cells
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.exercise import Exercise, chapter_of


def check(exercise: str, *answers: Any, seed: int | None = None) -> Verdict:
    """Judge the answer to an exercise and show what was found.

    Args:
        exercise: its id, "3.2".
        answers: the function that its cell defines; several, in the order of the exercise, where it asks for several.
            Without any, the notebook's variables of the names asked for are taken.
        seed: repeats the inputs of an earlier check, whose verdict told its seed.

    Returns:
        The verdict; `.best` is your function once it has passed and the course's own until then.

    Raises:
        CourseError: an unknown id, or something that is not a function with a source; says what to pass.
        AssertionError: with COURSE_STRICT set (the course's own tests), unless the answer passed or is unsupported. A
            chapter's demonstration, which stands in a cell that is no exercise, may be wrong. Under nbgrader, which
            sets NBGRADER_EXECUTION and gives a cell its points when it does not raise, unless the answer passed.
    """
    task = catalog.exercise(exercise)
    if not answers:
        answers = _from_notebook(task)
    if len(answers) != len(task.entries):
        raise CourseError(
            f"Exercise {task.id} asks for {len(task.entries)} function(s), {', '.join(task.entries)}, and "
            f'{len(answers)} were given. Write check("{task.id}", {", ".join(task.entries)}).'
        )
    source, names = "", {}
    for entry, answer in zip(task.entries, answers):
        text, names[entry] = cells.source_of(answer, task.id)
        if text not in source:
            source += text if text.endswith("\n") else text + "\n"
    verdict = judge(task, source, names, seed)
    verdict.answers = tuple(answers)
    verdict.message = " ".join(filter(None, (verdict.message, catalog.moved(exercise))))
    renamed = [f"`{name}`" for entry, name in names.items() if name != entry]
    if verdict.passed and renamed:
        verdict.message += f" Rename {', '.join(renamed)} to {', '.join(task.entries)} before you hand a file in."
    demonstration = cells.exercise_id(source) is None
    _finish(verdict, task, source, ASIDE if demonstration and not verdict.passed else "notebook")
    verdict.show()
    if not demonstration and verdict.outcome not in _good_enough():
        raise AssertionError(str(verdict))
    return verdict


def _good_enough() -> tuple[str, ...]:
    """The outcomes after which `check` does not raise; in a learner's notebook, all."""
    if os.environ.get("NBGRADER_EXECUTION"):
        return ("passed",)
    return ("passed", "unsupported") if os.environ.get("COURSE_STRICT") else tuple(OUTCOMES)


def _from_notebook(task: Exercise) -> tuple:
    shell = _shell()
    scope = shell.user_ns if shell is not None else {}
    missing = [name for name in task.entries if name not in scope]
    if missing:
        raise CourseError(
            f'No answer was given. Write check("{task.id}", {", ".join(task.entries)}) after running the '
            f"cell that defines {missing[0]}."
        )
    return tuple(scope[name] for name in task.entries)


def _finish(verdict: Verdict, task: Exercise, source: str, origin: str) -> None:
    """Keep the attempt, and tell the verdict what it can offer next."""
    verdict.reference = lambda: catalog.reference(task.id)
    store = progress_file()
    if verdict.outcome not in ("not_attempted", "unsupported"):
        store.add(
            task.id, source, verdict.outcome, verdict.mistake, verdict.message, verdict.seconds, verdict.seed, origin
        )
    shown = store.standings().get(task.id, Standing()).hints
    verdict.hints_left = max(0, len(task.hints) - shown)


def check_file(path: str | Path, exercise: str | None = None) -> list[Verdict]:
    """Judge every exercise cell of a notebook or percent-format script (or the one asked for).

    Raises:
        CourseError: the file cannot be read, holds no exercise, or not the one asked for.
    """
    path = Path(path)
    sources = cells.read_cells(path)
    found, written = cells.by_exercise(sources), [cells.exercise_id(source) for source in sources]
    if exercise is not None:
        task = catalog.exercise(exercise)
        if task.id not in found:
            raise CourseError(
                f"{path}: holds no exercise {task.id}; it holds {', '.join(found) or 'none'}. An exercise's cell "
                f"begins with the line `# Exercise {task.id} · {task.title}`."
            )
        found = {task.id: found[task.id]}
    if not found:
        raise CourseError(f"{path}: holds no exercise cell (one whose first line reads `# Exercise 3.2 · Title`).")
    verdicts = []
    for identity, source in found.items():
        task = catalog.exercise(identity)
        verdict = judge(task, source)
        verdict.file = str(path)
        moved = [catalog.moved(before) for before in cells.numbers_of(task.id) if before in written]
        verdict.message = " ".join(filter(None, (verdict.message, *moved)))
        _finish(verdict, task, source, origin=str(path))
        verdicts.append(verdict)
    return verdicts


class _Hint(Shown):
    """Shown in a notebook as soon as it is given, so that several in one cell all appear."""

    _shown_at: int | None = None

    def show(self) -> None:
        """Display it in a notebook; a terminal prints the value of a line by itself."""
        shell = _shell()
        if shell is None:
            return
        from IPython.display import publish_display_data

        self._shown_at = shell.execution_count
        publish_display_data({"text/plain": self._text, "text/html": self._markup})

    def _ipython_display_(self) -> None:
        # `hint` has shown it already; a hint that ends the same cell is not shown twice.
        shell = _shell()
        if shell is None:
            print(self)
        elif self._shown_at != shell.execution_count:
            self.show()


def hint(exercise: str) -> Shown:
    """Show the next hint for an exercise; the last one again once all are shown."""
    task, moved = catalog.exercise(exercise), catalog.moved(exercise)
    if not task.hints:
        none = " ".join(filter(None, (moved, f"Exercise {task.id} has no hints.")))
        given = _Hint(none, f"<p>{none}</p>")
        given.show()
        return given
    number = progress_file().next_hint(task.id, len(task.hints))
    head = " ".join(filter(None, (moved, f"Hint {number + 1} of {len(task.hints)} for exercise {task.id}")))
    from course_lib.checker.judge.verdict import _prose

    given = _Hint(
        f"{head}: {task.hints[number]}",
        f'<div style="border-left:4px solid #0072b2;padding:.3em .8em"><b>{head}.</b> '
        f"{_prose(task.hints[number])}</div>",
    )
    given.show()
    return given


def solution(exercise: str) -> Shown:
    """The course's own answer to an exercise; that you looked is remembered in `progress()`, and costs nothing."""
    task = catalog.exercise(exercise)
    moved = catalog.moved(exercise)
    source = (f"# {moved}\n" if moved else "") + catalog.solution_source(task.id)
    progress_file().saw_solution(task.id)
    try:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        body = highlight(source, PythonLexer(), HtmlFormatter(noclasses=True, nobackground=True, style="friendly"))
    except ImportError:
        body = f"<pre>{html.escape(source)}</pre>"
    return Shown(source, f'<div style="background:#fdfdfb;color:#222;padding:.2em 1em;border-radius:6px">{body}</div>')


def attempts(exercise: str) -> Shown:
    """Every version of your answer that was checked, oldest first, with what the check said."""
    task = catalog.exercise(exercise)
    kept = progress_file().attempts(task.id)
    if not kept:
        return Shown(f"No attempt at exercise {task.id} yet.", f"<p>No attempt at exercise {task.id} yet.</p>")
    lines, rows = [], []
    for number, row in enumerate(kept, 1):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["made_at"]))
        head = f"{number}. {when} {OUTCOMES[row['outcome']][1]}"
        lines += [head, row["source"].rstrip(), ""]
        rows.append(
            f"<details><summary>{head}: {html.escape(row['message'][:160])}</summary>"
            f"<pre>{html.escape(row['source'])}</pre></details>"
        )
    return Shown("\n".join(lines), "".join(rows))


def progress() -> Shown:
    """Where you stand: each chapter that you began, and what is open next in it; what you predicted; how to hand in
    what is done."""
    standings, known = progress_file().standings(), catalog.exercises()
    chapters = dict.fromkeys(map(chapter_of, known))
    begun: dict[str, list[tuple[Exercise, Standing]]] = {}
    lines, rows = [], []
    for number in dict.fromkeys(chapter_of(identity) for identity in known if identity in standings):
        chapter = catalog.chapter(number)
        core, deeper = (
            [(known[identity], standings.get(identity, Standing())) for identity in identities]
            for identities in (chapter.core, chapter.deeper)
        )
        begun[number] = core + deeper
        stand = _stand(core, deeper)
        lines += [
            f"{chapter.title}: {stand}",
            "  " + "  ".join(f"{_sign(now)} {task.id}" for task, now in begun[number]),
        ]
        squares = "".join(_square(task, now) for task, now in begun[number])
        cells = (html.escape(chapter.title), squares, html.escape(stand))
        rows.append("".join(f'<td style="text-align:left;padding-right:1em">{cell}</td>' for cell in cells))
    below = [_going_on([*chapters], begun, known)]
    if not begun:
        below.append("README.md says what to read if you have 2, 4, 8 or 40 hours.")
    sentence, code = _handing_in(begun)
    predicted, table = table_of_predictions(progress_file().predictions())
    ending = [*predicted, *([f"{sentence} {code}"] if code else [])]
    return Shown(
        "\n".join([*lines, *below, *ending]),
        f"<div><table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table><p>{html.escape(' '.join(below))}</p>{table}"
        f"{f'{html.escape(sentence)} <code>{html.escape(code)}</code>' if code else ''}</div>",
    )


def _going_on(chapters: list[str], begun: Collection[str], known: Mapping[str, Exercise]) -> str:
    """Where to read on: the first chapter that is not begun, unless the course's last one is."""
    unread = [number for number in chapters if number not in begun]
    if not unread:
        return "You have begun every chapter."
    if chapters[-1] in begun:
        return f"There is no chapter after {chapters[-1]}. Of the others you have not begun {', '.join(unread)}."
    chapter = catalog.chapter(unread[0])
    first = known[(chapter.core + chapter.deeper)[0]]
    words = "The next chapter is" if begun else "No exercise is checked yet. Begin with"
    return f"{words} {chapter.title}. Its first exercise is {first.id}, {first.title}."


def _stand(core: list[tuple[Exercise, Standing]], deeper: list[tuple[Exercise, Standing]]) -> str:
    """How far a chapter's core path and the rest of it are, and which exercise is open next.

    One that this machine cannot judge is never the next.
    """
    left = [task for task, standing in core if not standing.passed and not unsupported_here(task)]
    parts = [f"core path {sum(standing.passed for _, standing in core)} of {len(core)}"]
    if deeper:
        parts.append(f"deeper {sum(standing.passed for _, standing in deeper)} of {len(deeper)}")
    if left:
        parts.append(f"next {left[0].id}, {left[0].title}")
    return ", ".join(parts)


def _handing_in(chapters: dict[str, list[tuple[Exercise, Standing]]]) -> tuple[str, str]:
    """A sentence on the chapters that are done, and the line that hands one in; empty while none is.

    An exercise that this machine cannot judge keeps no chapter open, as long as another of it has passed.
    """
    done, limited = [], False
    for chapter, tasks in chapters.items():
        left = [task for task, standing in tasks if not standing.passed]
        if len(left) < len(tasks) and all(unsupported_here(task) for task in left):
            done.append(chapter)
            limited = limited or bool(left)
    if not done:
        return "", ""
    what = "All that this machine can judge" if limited else "All"
    which, it = ("chapter", "it") if len(done) == 1 else ("chapters", "one")
    return (
        f"{what} of {which} {', '.join(done)} passed. To hand {it} in, if somebody grades your work:",
        f'from course_lib import submit; submit("{done[-1]}")',
    )


def _sign(standing: Standing) -> str:
    return "✓" if standing.passed else OUTCOMES[standing.last][0] if standing.last else "·"


def _effort(standing: Standing) -> str:
    parts = [
        f"{standing.attempts} attempt{'s' * (standing.attempts != 1)}" if standing.attempts else "",
        f"{standing.hints} hint{'s' * (standing.hints != 1)}" if standing.hints else "",
        "solution seen" if standing.solution_seen else "",
    ]
    text = ", ".join(part for part in parts if part)
    return f" ({text})" if text else ""


def _square(task: Exercise, standing: Standing) -> str:
    colour = "#0a8f5b" if standing.passed else "#c8511b" if standing.attempts else "transparent"
    tip = html.escape(f"{task.id} {task.title}{_effort(standing)}", quote=True)
    ink = "#fff" if standing.attempts else "inherit"
    return (
        f'<span title="{tip}" style="display:inline-block;min-width:2.6em;text-align:center;margin:1px;padding:1px 4px;'
        f'border:1px solid #7a8290;border-radius:3px;background:{colour};color:{ink}">'
        f"{_sign(standing)} {task.id}</span>"
    )
