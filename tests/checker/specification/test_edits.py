"""Slips as edits of a plain meaning: what is found in its text, what is refused, and what makes a pair."""

from dataclasses import replace

import pytest
import torch

from course_lib.checker.judge.explain import Made, prediction
from course_lib.checker.specification import edited_program as machinery
from course_lib.checker.specification.case import Case
from course_lib.checker.specification.edited_text import replaced, replacements
from course_lib.checker.specification.edits import edits, model_of, without
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.model import reaches_outside
from course_lib.checker.specification.words import canonical, words_of

FACTOR = 3.0


def scaled(x, factor):
    return x * factor


def meaning(x, start):
    """Words such as `total = start` in here are no text of the program."""
    total = start  # total = 0
    for row in x:
        total = total + scaled(
            row.sum(),
            FACTOR,
        )
    return total, x.shape[0]


def written_otherwise(x, start):
    total = start
    for row in x:
        total = total + scaled(row.sum(), FACTOR)
    return (total, x.shape[0])


CASE = Case("two rows", (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 10.0))


def made_by(model, *names, style=()):
    slips = tuple(slip for slip in model.slips if slip.id in names)
    assert len(slips) == len(names)
    return prediction(model, Made(slips, style), CASE)


def after(source, *pieces):
    """A text after one edit of it."""
    text = words_of(canonical(source))
    found = [replacements({"it": text}, old, new) for old, new in zip(pieces[::2], pieces[1::2])]
    assert all(found)
    return replaced(text.text, [change for made in found for change in made["it"]])


@pytest.mark.parametrize("function", [meaning, written_otherwise])
def test_lines_that_a_formatter_breaks_hold_the_same_pieces(function):
    changes = (
        *edits("one", not_added=("total + scaled(row.sum(), FACTOR)", "scaled(row.sum(), FACTOR)")),
        *edits("two", a_row_short=("return total, x.shape[0]", "return total, x.shape[0] - 1")),
        *edits("three", broken=("total + scaled(\n    row.sum(),", "total - scaled(row.sum(),")),
    )
    model = model_of(function, changes, (scaled,))
    assert made_by(model).value == (40.0, 2)
    assert made_by(model, "not_added").value == (21.0, 2)
    assert made_by(model, "a_row_short").value == (40.0, 1)
    assert made_by(model, "broken").value == (-20.0, 2)


def test_a_piece_that_does_not_occur_is_told_with_the_nearest_line():
    with pytest.raises(CourseError, match=r"'totals = start' of the edit 'gone'.*nearest line is 'total = start'"):
        model_of(meaning, edits("x", gone=("totals = start", "total = 0")))


def test_a_piece_is_whole_words_and_neither_in_a_comment_nor_in_a_docstring():
    for piece in ("tota", "otal = start", "total = 0", "Words", "x.shape[0", "ACTOR"):
        if piece == "x.shape[0":  # a part of a line that is no Python by itself
            model_of(meaning, edits("x", change=(piece, "x.shape[1")), (scaled,))
            continue
        with pytest.raises(CourseError, match="does not hold"):
            model_of(meaning, edits("x", change=(piece, "1")), (scaled,))
    assert after("a <= b == c", "a <= b", "a >= b") == "a >= b == c"
    with pytest.raises(AssertionError):
        after("a <= b", "a <", "a >")


def test_every_place_is_changed_and_a_longer_piece_names_one():
    assert after("y = exp(a) + exp(b)", "exp(", "exp2(") == "y = exp2(a) + exp2(b)"
    assert after("y = exp(a) + exp(b)", "exp(b)", "exp2(b)") == "y = exp(a) + exp2(b)"


def test_brackets_around_a_tuple_are_no_difference():
    for piece in ("return b, a", "return (b, a)"):
        assert after("def f(a, b):\n    return (b, a)", piece, "return a, b").endswith("return a, b")
    assert after("def f():\n    return 'é', (1, 2), ()", "return 'é', (1,", "return (0,").endswith("return (0, 2), ()")
    assert after("x, y = (a, b)", "= a, b", "= b, a") == "x, y = b, a"


def test_numbers_and_quotes_are_read_as_python_reads_them():
    assert after("f(1e+38, 'a', 1_000)", '1e38, "a", 1000', "2") == "f(2)"
    assert after("f(x, -1e9)", "-1000000000.0", "0") == "f(x, 0)"


def test_what_binds_less_tightly_stays_one_operand():
    assert after("y = (a * b) * c", "a * b", "a + b") == "y = (a + b) * c"
    assert after("y = a * c", "a", "a + 1") == "y = (a + 1) * c"
    assert after("y = a * c", "c", "(c + 1)") == "y = a * (c + 1)"
    assert after("y = a + b", "a + b", "a * b") == "y = a * b"
    assert after("y = f(a, b)", "a, b", "b, a") == "y = f(b, a)"


@pytest.mark.parametrize(
    "source, old, new, made",
    [
        ("g(x)", "g(x)", "g(y in x)", "g(y in x)"),
        ("g(x)", "g(x)", "g(not x)", "g(not x)"),
        ("g(-x)", "g(-x)", "g(not x)", "g(not x)"),
        ("g(x)", "x", "not x", "g((not x))"),
        ("g(x)", "(x", "(y in x", "g(y in x)"),
        ("g(x)", "x)", "x in y)", "g(x in y)"),
        ("g(x[0])", "g(x[0])", "g(x if y else z)", "g(x if y else z)"),
        ("g(x[0])", "g(x[0])", "g(y if z else x[0])", "g(y if z else x[0])"),
        ("g([x])", "[x]", "[y for y in x]", "g([y for y in x])"),
        ("y = a.b", "a.b", "a or b", "y = (a or b)"),
        ("y = x[a:b]", "a:b", "a if b else c:b", "y = x[a if b else c:b]"),
        ("y = -x", "-x", "0 if x else 1", "y = (0 if x else 1)"),
        ("x = y", "x = y", "del x", "del x"),
        ("(x, y)", "(x, y)", "yield (x, y)", "yield (x, y)"),
        ("g(x)", "g(x)", "assert g(x)", "assert g(x)"),
        ("g(x)", "g(x)", "g_(1_0 if x else x)", "g_(1_0 if x else x)"),
    ],
)
def test_words_that_an_edit_brings_together_stay_words(source, old, new, made):
    """`("g(x)", "g(y in x)")` made `g(y inx)`: what was put in had the blank before it, and none behind it."""
    assert words_of(after(source, old, new)).words == words_of(made).words


def test_words_that_two_edits_bring_together_stay_words():
    text = words_of("g(a.b.c)")
    pair = [("a.b", "a and b"), (".c", "in c")]
    changes = [change for old, new in pair for change in replacements({"it": text}, old, new)["it"]]
    assert words_of(replaced(text.text, changes)).words == words_of("g((a and b) in c)").words


def test_statements_are_added_deleted_and_indented_as_those_they_stand_beside():
    source = "def f(x):\n    if x:\n        a = 1\n        b = 2\n    return a"
    assert "        a = 1\n        a = 3\n        b = 2" in after(source, "a = 1", "a = 1\na = 3")
    assert "        a = 3\n        a = 1\n" in after(source, "a = 1", "a = 3\na = 1")
    assert "        for i in x:\n            a = 1\n" in after(source, "a = 1", "for i in x:\n    a = 1")
    assert "        pass\n        b = 2" in after(source, "a = 1", "")
    assert "    if x:\n        pass\n    return a" in after(source, "a = 1\nb = 2", "")
    assert "        b = 2\n        a = 1\n" in after(source, "\n    a = 1\n    b = 2\n", "\n    b = 2\n    a = 1\n")


def test_two_that_change_different_words_make_a_pair_in_any_order():
    one = edits("one", halved=("scaled(row.sum(), FACTOR)", "scaled(row.sum(), FACTOR) / 2"))
    two = edits("two", largest=("row.sum()", "row.max()"))  # within the words of the other
    for changes in (one + two, two + one):
        assert made_by(model_of(meaning, changes, (scaled,)), "halved", "largest").value == (10.0 + 9.0, 2)


def test_what_is_left_of_a_piece_may_be_changed_by_another():
    changes = edits("one", alone_=("max(total, scaled(row, FACTOR))", "scaled(row, FACTOR)")) + edits(
        "two", of_one=("scaled(row, FACTOR)", "scaled(row, 1.0)")
    )
    source = "y = max(total, scaled(row, FACTOR))"
    assert after(source, *changes[0].pieces[0]).split() == "y = scaled(row, FACTOR)".split()
    both = [pair for edit in changes for pair in replacements({"it": words_of(source)}, *edit.pieces[0])["it"]]
    assert replaced(source, both).split() == "y = scaled(row, 1.0)".split()


def test_two_that_want_the_same_words_are_no_pair():
    changes = edits("one", never=("total = start", "total = 0")) + edits(
        "two", below=("total = start", "total = -FACTOR")
    )
    model = model_of(meaning, changes, (scaled,))
    assert made_by(model, "never").value == (30.0, 2)
    assert made_by(model, "never", "below") is None
    around = edits("one", squared=("x * factor", "(x * factor) ** 2")) + edits(
        "two", off=("x * factor", "(x * factor) + 1")
    )
    assert made_by(model_of(meaning, around, (scaled,)), "squared", "off") is None


def test_two_that_cannot_be_computed_together_are_no_pair(monkeypatch):
    """Strict or not; one alone that raises is a fault of the exercise."""
    monkeypatch.setenv("COURSE_STRICT", "1")
    changes = edits("one", row=("row.sum()", "row[1]")) + edits("two", flat=("in x", "in x.sum(1)"))
    model = model_of(meaning, changes, (scaled,))
    assert made_by(model, "row") is not None and made_by(model, "row", "flat") is None
    with pytest.raises(IndexError):
        made_by(model_of(meaning, edits("x", far=("row.sum()", "row[9]")), (scaled,)), "far")


def test_two_that_want_the_same_change_agree():
    both = ("total = start", "total = 0")
    changes = edits("one", never=both) + edits("two", never_and_short=(*both, "x.shape[0]", "x.shape[1]"))
    assert made_by(model_of(meaning, changes, (scaled,)), "never", "never_and_short").value == (30.0, 2)


def test_pieces_of_one_edit_must_not_change_the_same_words():
    with pytest.raises(CourseError, match="change the same words of meaning"):
        model_of(meaning, edits("x", twice=("total = start", "total = 0", "start", "1")), (scaled,))


def test_an_edit_that_makes_no_python_is_refused_when_it_is_written():
    with pytest.raises(CourseError, match="which is no Python"):
        model_of(meaning, edits("x", broken=("total = start", "total = = start")), (scaled,))


def test_a_name_that_the_module_does_not_have_is_refused_when_it_is_written():
    """ruff removed an import that edits alone used, and 29 slips raised NameError where nobody saw it."""
    with pytest.raises(CourseError, match=r"reads \['math'\], which meaning's module does not have"):
        model_of(meaning, edits("x", lost=("total = start", "total = math.nan")), (scaled,))
    model_of(meaning, edits("x", kept=("total = start", "total = max(row.numel() for row in x) + FACTOR")), (scaled,))


@pytest.mark.parametrize("pieces", [("a",), (), "ab", ("a", "b", "c")])
def test_a_piece_needs_what_it_becomes(pieces):
    with pytest.raises(CourseError, match=r"must be \(old, new\)"):
        edits("x", name=pieces)
    with pytest.raises(CourseError, match="changes nothing"):
        edits("x", name=("a", "a"))


def test_an_edit_without_a_sentence_is_a_style_and_is_not_told():
    changes = edits("one", short=("x.shape[0]", "x.shape[1] - 1")) + edits(
        "", from_zero=("total = start", "total = 0 + start")
    )
    model = model_of(meaning, changes, (scaled,))
    assert [slip.id for slip in model.slips] == ["short"] and model.styles == ((), ("from_zero",))
    assert made_by(model, "short", style=("from_zero",)).value == (40.0, 1)


def test_names_are_given_once_and_rows_are_left_out_by_name():
    changes = edits("one", never=("total = start", "total = 0"), never__one=("total = start", "total = 1"))
    with pytest.raises(CourseError, match="named twice: .*never"):
        model_of(meaning, changes + changes[:1], (scaled,))
    assert [edit.id for edit in without(changes, "never")] == ["never__one"]
    with pytest.raises(CourseError, match="no edits"):
        without(changes, "nevr")


def test_a_part_is_changed_wherever_it_is_called_and_the_module_stays_as_it_is():
    model = model_of(meaning, edits("one", added=("x * factor", "x + factor")), (scaled,))
    assert made_by(model, "added").value == (10.0 + 3 + 3 + 7 + 3, 2)
    assert meaning(*CASE.args) == (40.0, 2) and scaled(2.0, 3.0) == 6.0


def doubled(x):
    return scaled(x, 2.0)


def trebled(x):
    return scaled(x, 3.0)


def both(x, start):
    return doubled(start), trebled(start)


def test_an_edit_within_a_part_changes_what_that_part_calls_and_nothing_else():
    """Two kernels share their steps, and one of them alone is wrong."""
    (added,), (halved,), (lost,) = (
        edits("one", added=("x * factor", "x + factor")),
        edits("two", halved=("x * factor", "x * factor / 2")),
        edits("three", lost=("x * factor", "x")),
    )
    there = (replace(added, within="doubled"), replace(halved, id="halved_there", within="trebled"))
    changes = (*there, halved, lost)
    model = model_of(both, changes, (scaled, doubled, trebled))
    assert made_by(model).value == (20.0, 30.0)
    assert made_by(model, "added").value == (12.0, 30.0)
    assert made_by(model, "halved_there").value == (20.0, 15.0)
    assert made_by(model, "added", "halved_there").value == (12.0, 15.0)
    assert made_by(model, "halved", "halved_there").value == (10.0, 15.0)  # the same words, to the same end
    assert made_by(model, "added", "lost") is None  # to another
    assert both(*CASE.args) == (20.0, 30.0)


def test_an_edit_within_a_part_that_does_not_fit_it_is_told():
    def of(within, old):
        model_of(both, (replace(edits("x", gone=(old, "0"))[0], within=within),), (scaled, doubled, trebled))

    of("trebled", "3.0")
    with pytest.raises(CourseError, match=r"doubled does not hold the piece '3.0' of the edit 'gone'"):
        of("doubled", "3.0")
    with pytest.raises(CourseError, match=r"both has no part 'tripled'; it has \['doubled', 'scaled', 'trebled'\]"):
        of("tripled", "3.0")


def test_a_part_of_another_module_works_with_its_own_names():
    def of(function):
        return model_of(uses_another_module, edits("one", other=("word.ends", "word.begins")), (function,))

    with pytest.raises(CourseError, match="do not call"):
        of(scaled)
    model = model_of(uses_another_module, edits("one", other=("as_text + ''", "as_text")), (canonical,))
    assert model is not None


def uses_another_module(x):
    as_text = canonical("def f():\n    return (1)")
    return as_text + ""


def test_what_is_no_text_of_a_module_is_refused():
    local = FACTOR

    class Inner:
        pass

    def inner(x):
        return x * local

    for function in (inner, Inner, lambda x: x, torch.exp):
        with pytest.raises(CourseError, match="cannot be edited"):
            model_of(function, ())


class Account:
    """Words such as `total = start` in here are no text of the program."""

    def __init__(self, start):
        self.total, self.most = start, []

    def add(self, row):
        self.total = self.total + scaled(row.sum(), FACTOR)
        self.note(self.total)

    def note(self, total):
        self.most.append(total)


def kept(x, start):
    account = Account(start)
    for row in x:
        account.add(row)
    return account.total, len(account.most)


def test_a_class_that_the_meaning_drives_is_changed_and_the_module_stays_as_it_is():
    changes = (
        *edits("one", overwritten=("self.total + scaled(", "scaled(")),
        *edits("two", never_noted=("self.note(self.total)", "pass")),
        *edits("three", added=("x * factor", "x + factor")),
    )
    model = model_of(kept, changes, (scaled, Account))
    assert made_by(model).value == kept(*CASE.args) == (40.0, 2)
    assert made_by(model, "overwritten").value == (21.0, 2)
    assert made_by(model, "overwritten", "never_noted").value == (21.0, 0)
    assert made_by(model, "added").value == (10.0 + 3 + 3 + 7 + 3, 2)
    assert made_by(model).value == kept(*CASE.args) == (40.0, 2)


def test_an_edit_that_does_not_fit_a_class_is_told_as_that_of_a_function():
    for old, new, told in (
        (
            "self.totals = start",
            "0",
            r"does not hold.*'gone'. The nearest line is 'self.total, self.most = start, \[\]'",
        ),
        ("self.note(self.total)", "self.note(", "the edit 'gone' makes .* which is no Python"),
        ("self.note(self.total)", "math.sqrt(2)", r"the edit 'gone' reads \['math'\], which Account's module"),
    ):
        with pytest.raises(CourseError, match=told):
            model_of(kept, edits("x", gone=(old, new)), (Account,))


def test_what_a_meaning_reads_outside_is_seen():
    model = model_of(reading, edits("one", over=("at >= 2", "at >= 1")))
    case = Case("one", (1,))
    assert prediction(model, Made((model.slips[0],)), case).outside
    assert not prediction(model, Made(()), case).outside
    reading(5)  # nobody looks


def reading(at):
    if at >= 2:
        reaches_outside()
    return at


def test_programs_are_kept():
    model = model_of(meaning, edits("one", never=("total = start", "total = 0")), (scaled,))
    machinery._compiled.cache_clear()  # of what other models have made of the same text
    made, compiled = [], machinery.compile if hasattr(machinery, "compile") else compile
    machinery.compile = lambda *args: made.append(args) or compiled(*args)
    try:
        for _ in range(3):
            model.compute(frozenset({"never"}), *CASE.args)
    finally:
        del machinery.compile
    assert len(made) == 2  # the meaning and its part, once
