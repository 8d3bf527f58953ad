"""What a worker's messages say, as typed values.

The messages come from where strangers' code ran. They are read here and nowhere else: whatever was sent, reading it
does not fail, and what is handed on has the types that it claims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from course_lib.checker.specification import nested
from course_lib.checker.specification.seen import RaisedError, Seen

LONGEST_TEXT = 4000  # characters of an error's text
DEEPEST = 16  # containers in one another: more than the harness sends
_BEYOND = 1 << 63  # no count is as large

_NUMBERS = (
    *("largest_allocation", "unwritten", "guard_values", "undefined_values", "repeats", "differing", "changes"),
    *("graphs", "captured", "overwrites", "not_contiguous", "contended", "largest_grid"),
)
_COUNTS = ("operations", "largest_results", "read_by_pytorch", "noted")  # a number for each name
_NAMES = ("launches", "out_of_bounds", "modified_inputs", "handed_back", "undefined_loads", "graph_breaks")
_KINDS: dict[str, type] = {
    **dict.fromkeys(("error", *_COUNTS, "traffic", "timing", "written", "written_repeated"), dict),
    **dict.fromkeys((*_NAMES, "variants"), list),
    **dict.fromkeys(_NUMBERS, int),
    "seconds": float,
}
_VALUES = ("result", "written", "result_repeated", "written_repeated", "result_after_timing", "variants")
_COUNTED = {"loaded", "stored", "atomic", "distinct_loaded"}
_TIMED = {"answer", "baseline"}
# Messages after which nothing comes, each with what it must hold.
_LAST_WORDS: dict[str, tuple[str, type] | None] = {
    "cell_error": ("error", dict),
    "missing": ("names", list),
    "not_callable": ("names", list),
    "harness_error": None,
    "done": None,
}


@dataclass(frozen=True, eq=False)
class Frame:
    """What the worker said of one case.

    Attributes:
        seen: what was observed, an error that was raised among it.
        result: what the answer returned.
        written: the arguments written in place, by name.
        has_repeated: whether a further run with the same inputs gave another result, which stands in the next two.
        result_after_timing: what the last of the timed calls returned; None where nothing was timed.
        variants: of the kernels launched, each with its signature, for `compiling` to sort; not validated.
    """

    seen: Seen = field(default_factory=Seen)
    result: Any = None
    written: Mapping[str, Any] = field(default_factory=dict)
    has_repeated: bool = False
    result_repeated: Any = None
    written_repeated: Mapping[str, Any] = field(default_factory=dict)
    result_after_timing: Any = None
    variants: tuple[Any, ...] = ()

    @property
    def error(self) -> RaisedError | None:
        """What the call raised, if it did."""
        return self.seen.error


@dataclass(frozen=True)
class LastWord:
    """The message after which nothing came.

    Attributes:
        kind: cell_error, missing, not_callable, harness_error, done; "start", "case" where the child ended early;
            "nothing" without any message; "malformed".
        error: of a cell_error, what the cell raised.
        names: of missing and not_callable, the names that the cell does not define, or not as functions.
        text: of a harness_error, its end.
    """

    kind: str = "nothing"
    error: RaisedError | None = None
    names: tuple[str, ...] = ()
    text: str = ""


@dataclass
class Report:
    """All of a child's messages, read: the cases reported, the last that was started, and why it is forged, if so."""

    cases: dict[int, Frame] = field(default_factory=dict)
    started: int | None = None
    rank: int | None = None
    forged: str | None = None


def read_messages(messages: Sequence[dict], expected: int) -> Report:
    """Sort a child's messages about `expected` cases; each has a string as its "kind"."""
    report = Report()
    for message in messages:
        _note(report, message, expected)
    complete = len(report.cases) == expected or any(frame.error for frame in report.cases.values())
    kind = last_word(messages).kind
    if kind == "done" and not complete:
        report.forged = report.forged or "it says that all is done, and cases are missing"
    if kind == "malformed":
        report.forged = report.forged or "its last word says nothing"
    return report


def _note(report: Report, message: dict, expected: int) -> None:
    """Note a message; the harness starts and reports each case once, in order, so that others are not its own."""
    turn, kind, index = len(report.cases), message["kind"], message.get("index")
    if type(index) is not int:
        index = None
    if kind == "start" and index == turn < expected and report.started in (None, turn - 1):
        report.started = index
    elif kind == "case" and index is not None and index == turn == report.started and well_formed(message):
        report.cases[index] = frame(message)
    elif kind == "rank" and type(message.get("rank")) is int:
        report.rank = message["rank"]
    elif kind in ("start", "case"):
        report.forged = report.forged or "a case out of turn"


def last_word(messages: Sequence[dict]) -> LastWord:
    """The last of a child's messages."""
    if not messages:
        return LastWord()
    message = messages[-1]
    kind = message["kind"]
    needed = _LAST_WORDS.get(kind)
    if needed is not None:
        key, required = needed
        if type(message.get(key)) is not required or not message[key]:
            return LastWord("malformed")
    names = message.get("names") if kind in ("missing", "not_callable") else None
    return LastWord(
        kind,
        raised_error(message.get("error")) if kind == "cell_error" else None,
        tuple(_text(name) for name in names or ()),
        _text(message.get("text")),
    )


def well_formed(message: dict) -> bool:
    """Whether a case's message holds what the harness puts there, so that nothing that reads it can fail."""
    if any(message.get(key) is not None and type(message[key]) is not kind for key, kind in _KINDS.items()):
        return False
    if "result" not in message and not message.get("error"):
        return False
    if any(nested.depth(message.get(key)) > DEEPEST for key in _VALUES):
        return False
    named = [message.get(key) or {} for key in (*_COUNTS, "traffic", "timing", "written", "written_repeated")]
    texts = [text for key in _NAMES for text in message.get(key) or ()]
    if any(type(text) is not str for text in [*(name for names in named for name in names), *texts]):
        return False
    *counts, traffic, timing, _, _ = named
    if timing and not _TIMED <= set(timing):
        return False
    if any(type(counts) is not dict or not _COUNTED <= set(counts) for counts in traffic.values()):
        return False
    numbers = [*timing.values(), *(n for each in (*counts, *traffic.values()) for n in each.values())]
    return all(type(n) in (int, float) and 0 <= n < _BEYOND for n in [*numbers, *_plain_numbers(message)])


def _plain_numbers(message: dict) -> list[Any]:
    return [message[key] for key in (*_NUMBERS, "seconds") if message.get(key) is not None]


def frame(message: dict) -> Frame:
    """A well-formed message about a case, typed."""
    return Frame(
        seen=seen_in(message),
        result=message.get("result"),
        written=message.get("written") or {},
        has_repeated="result_repeated" in message,
        result_repeated=message.get("result_repeated"),
        written_repeated=message.get("written_repeated") or {},
        result_after_timing=message.get("result_after_timing"),
        variants=tuple(message.get("variants") or ()),
    )


def seen_in(message: dict) -> Seen:
    """The observations in a well-formed message about a case."""
    known = {item.name for item in fields(Seen)}
    values = {key: value for key, value in message.items() if key in known and value is not None}
    for key in _NAMES:
        values[key] = tuple(values.get(key) or ())
    return Seen(**{**values, "error": raised_error(message["error"]) if message.get("error") else None})


def raised_error(sent: object) -> RaisedError:
    """An error as it was sent, with each part forced into the type that it should have."""
    parts = sent if isinstance(sent, dict) else {}
    line, rank = parts.get("line"), parts.get("rank")
    return RaisedError(
        type=_text(parts.get("type")) or "Error",
        text=_text(parts.get("text")),
        outer=_text(parts.get("outer")),
        line=line if type(line) is int else None,
        out_of_memory=parts.get("out_of_memory") is True,
        unusable=parts.get("unusable") is True,
        rank=rank if type(rank) is int else None,
    )


def _text(sent: object) -> str:
    return sent[:LONGEST_TEXT] if isinstance(sent, str) else ""
