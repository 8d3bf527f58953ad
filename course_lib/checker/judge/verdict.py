"""What a check says: a typed verdict, shown as a card in Jupyter and as text elsewhere."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OUTCOMES = {
    "passed": ("✓", "passed"),
    "failed": ("✗", "not right yet"),
    "not_attempted": ("·", "not attempted"),
    "error": ("!", "raised an error"),
    "timeout": ("∞", "took too long"),
    "crashed": ("×", "crashed its worker"),
    "unsupported": ("–", "not on this machine"),
}

# One neutral card for dark and light themes: borders carry the outcome's colour, the text keeps the theme's own.
_COLOURS = {
    "passed": "#0a8f5b",
    "failed": "#c8511b",
    "error": "#c8511b",
    "timeout": "#b07d00",
    "crashed": "#b3261e",
    "not_attempted": "#7a8290",
    "unsupported": "#7a8290",
}


@dataclass(frozen=True)
class CaseResult:
    """One case: its name, its outcome ("passed", "failed", "error", "timeout", "crashed", "not_run"), a sentence."""

    name: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """What one rule finds; the first finding becomes the verdict.

    Attributes:
        outcome, message, mistake, diagnosis, picture: as in `Verdict`.
    """

    outcome: str
    message: str
    mistake: str | None = None
    diagnosis: str = ""
    picture: str = ""


@dataclass
class Verdict:
    """The result of one check.

    Attributes:
        exercise: the exercise's id, "3.2".
        title: its title.
        outcome: passed, failed, not_attempted, error, timeout, crashed or unsupported.
        message: what to know first, one or two sentences.
        mistake: the id of a known mistake or broken requirement, or None.
        diagnosis: the sentence that goes with it: the cause and where to look.
        cases: every case with its own outcome.
        seconds: wall clock of the whole check.
        seed: `check(..., seed=...)` repeats exactly these inputs.
        printed: the beginning of what the answer printed.
        picture: an inline SVG that shows where the errors lie, or "".
        watch: a call that draws what the answer's kernel reads and writes in a case that went wrong, or "".
        profile: a call that says what limits the answer's kernel, where its numbers are right and its cost is not.
    """

    exercise: str
    title: str
    outcome: str
    message: str
    mistake: str | None = None
    diagnosis: str = ""
    cases: list[CaseResult] = field(default_factory=list)
    seconds: float = 0.0
    seed: int | None = None
    printed: str = ""
    picture: str = ""
    watch: str = ""
    profile: str = ""
    hints_left: int = 0
    file: str | None = None
    answers: tuple[Any, ...] = ()
    reference: Callable[[], tuple] | None = None
    _shown_at: Any = None

    @property
    def passed(self) -> bool:
        """Whether the answer is right."""
        return self.outcome == "passed"

    @property
    def best(self) -> Any:
        """The learner's function once it has passed, the course's own until then; a tuple where there are several."""
        if self.passed and self.answers:
            functions = self.answers
        else:
            assert self.reference is not None, "whoever asks the judge fills it in"
            functions = self.reference()
        return functions[0] if len(functions) == 1 else tuple(functions)

    def as_dict(self) -> dict:
        """The fields that `--json` writes."""
        return {
            "file": self.file,
            "exercise": self.exercise,
            "outcome": self.outcome,
            "mistake": self.mistake,
            "message": " ".join(_ended(part) for part in (self.message, self.diagnosis) if part),
            "seconds": round(self.seconds, 3),
            "seed": self.seed,
            "cases": [{"name": case.name, "outcome": case.outcome, "detail": case.detail} for case in self.cases],
        }

    def __str__(self) -> str:
        sign, words = OUTCOMES[self.outcome]
        lines = [f"{sign} Exercise {self.exercise} · {self.title}: {words}", f"  {self.message}"]
        if self.diagnosis:
            lines.append(f"  Likely cause: {self.diagnosis}")
        if self.outcome not in ("passed", "not_attempted", "unsupported"):
            lines += [
                f"    {OUTCOMES.get(case.outcome, ('·',))[0]} {case.name}{': ' + detail if detail else ''}"
                for case, detail in self._case_lines()
            ]
            if self.printed:
                lines.append("  It printed: " + _shorten(self.printed, 300))
            lines.append(f"  {self._what_next()}")
        return "\n".join(lines)

    def _what_next(self) -> str:
        parts = []
        if self.hints_left:
            parts.append(f'`hint("{self.exercise}")` helps.')
        if self.seed is not None and self.cases:
            parts.append(f"`check(..., seed={self.seed})` repeats these inputs.")
        if self.watch:
            parts.append(f"`{self.watch}` draws what its programs read and write (`from course_lib import watch`).")
        if self.profile:
            parts.append(f"`{self.profile}` says what limits it (`from course_lib import profile`).")
        return " ".join(parts)

    def _case_lines(self) -> list[tuple[CaseResult, str]]:
        """Each case with its detail; a detail that only repeats the one above is not said again."""
        lines, said = [], None
        for case in self.cases:
            lines.append((case, "the same" if len(case.detail) > 20 and case.detail == said else case.detail))
            said = case.detail
        return lines

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = _COLOURS[self.outcome]
        sign, words = OUTCOMES[self.outcome]
        rows = [
            f'<div style="font-weight:600"><span style="color:{colour}">{sign}</span> Exercise {self.exercise} · '
            f'{html.escape(self.title)} <span style="color:{colour}">{words}</span>'
            f'<span style="opacity:.55;font-weight:400;float:right">{self.seconds:.1f} s</span></div>',
            f'<div style="margin-top:.35em">{_prose(self.message)}</div>',
        ]
        if self.diagnosis:
            rows.append(
                f'<div style="margin-top:.35em;padding:.4em .6em;border-left:3px solid {colour}">'
                f"<b>Likely cause.</b> {_prose(self.diagnosis)}</div>"
            )
        if self.picture:
            rows.append(f'<div style="margin-top:.5em">{self.picture}</div>')
        if self.cases and self.outcome not in ("not_attempted", "unsupported"):
            rows.append(self._case_table())
        if self.printed:
            rows.append(
                '<details style="margin-top:.35em"><summary>What it printed</summary><pre style="max-height:12em;'
                f'overflow:auto">{html.escape(_shorten(self.printed, 4000))}</pre></details>'
            )
        if self.outcome not in ("passed", "not_attempted", "unsupported") and self._what_next():
            rows.append(f'<div style="margin-top:.35em;opacity:.7">{_prose(self._what_next())}</div>')
        return (
            f'<div style="border:1px solid {colour};border-left:6px solid {colour};border-radius:6px;padding:.6em .9em;'
            f'max-width:56em;line-height:1.4">{"".join(rows)}</div>'
        )

    def _case_table(self) -> str:
        cells = []
        for case, text in self._case_lines():
            colour = _COLOURS.get(case.outcome, "#7a8290")
            sign = OUTCOMES.get(case.outcome, ("·", ""))[0]
            detail = f'<span style="opacity:.75"> · {_prose(text)}</span>' if text else ""
            cells.append(
                f'<div><span style="color:{colour};display:inline-block;width:1.2em">{sign}</span>'
                f"{html.escape(case.name)}{detail}</div>"
            )
        right = sum(case.outcome == "passed" for case in self.cases)
        opened = " open" if self.outcome in ("failed", "error", "timeout", "crashed") else ""
        return (
            f'<details style="margin-top:.35em"{opened}><summary style="cursor:pointer">{right} of {len(self.cases)} '
            f"cases right</summary>{''.join(cells)}</details>"
        )

    def show(self) -> None:
        """Display the card (Jupyter) or print the text (elsewhere)."""
        shell = _shell()
        if shell is None:
            print(self)
            return
        from IPython.display import publish_display_data

        self._shown_at = shell.execution_count
        publish_display_data({"text/plain": str(self), "text/html": self._repr_html_()})

    def _ipython_display_(self) -> None:
        # `check` has shown the card already; a verdict that ends the same cell is not shown twice.
        shell = _shell()
        if shell is None or self._shown_at != shell.execution_count:
            self.show()


def _shell():
    """The running notebook's shell, or None outside Jupyter and IPython."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    return shell if shell is not None and hasattr(shell, "kernel") else None


def readable(text: str) -> str:
    """A text without what would move a terminal's cursor, turn a line's direction round, or be no Unicode in a file."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def _ended(text: str) -> str:
    """A text that another one follows: with a stop at its end, which a traceback's last line has not."""
    return text if text.rstrip("\"'`)”").endswith((".", "!", "?", ":", "…")) else text + "."


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + " …"


def _prose(text: str) -> str:
    """Escaped text in which `backticks` become code and line breaks stay."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts)).replace(
        "\n", "<br>"
    )
