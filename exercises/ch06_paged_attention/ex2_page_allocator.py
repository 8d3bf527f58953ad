"""Exercise 6.2: an allocator of pages, judged on scripts of operations."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake
from exercises.ch06_paged_attention.bookkeeping import (
    METHOD_HIDDEN,
    PageBook,
    first_difference,
    half_appended,
    method_hidden,
    replay,
    slip,
    take_or_raise,
    told_by,
)


def random_script(draw, names, steps, largest):
    """Appends and frees in any order; now and then a sequence that holds nothing is freed."""
    script = []
    for _ in range(steps):
        name = draw.choice(names)
        script.append(("free", name) if draw.integer(0, 4) == 0 else ("append", name, draw.integer(1, largest)))
    return script


def allocator_cases(draw):
    def case(name, pages, page_size, *script):
        return Case(name, ("PageAllocator", pages, page_size, list(script)), driver=replay)

    letters = "abcd"
    return [
        case("one sequence, a page at a time", 8, 4, ("append", "a", 4), ("append", "a", 4)),
        case("token by token over the end of a page", 4, 4, *[("append", "a", 1)] * 9),
        case("a prompt of 10 tokens", 8, 4, ("append", "a", 10), ("append", "a", 1), ("append", "a", 2)),
        case("two sequences in turn", 8, 4, *[("append", name, 3) for name in "abab"]),
        case("freed pages are handed out again", 3, 4, ("append", "a", 12), ("free", "a"), ("append", "b", 12)),
        case("the pool is full", 3, 4, ("append", "a", 6), ("append", "b", 4), ("append", "b", 1), ("append", "a", 2)),
        case(
            "nothing is half-appended",
            4,
            4,
            ("append", "a", 6),
            ("append", "b", 12),
            ("append", "a", 11),
            ("append", "b", 5),
            ("append", "a", 3),
        ),
        case(
            "refused at its first append, then freed",
            4,
            4,
            ("append", "a", 10),
            ("append", "b", 8),
            ("free", "b"),
            ("append", "b", 4),
            ("free", "b"),
        ),
        case(
            "freed twice",
            4,
            4,
            ("append", "a", 8),
            ("append", "b", 2),
            ("free", "a"),
            ("free", "a"),
            ("append", "c", 6),
            ("append", "d", 4),
        ),
        case("freed and never there", 2, 4, ("free", "x"), ("append", "a", 1)),
        case("a name comes back after it was freed", 4, 4, ("append", "a", 6), ("free", "a"), ("append", "a", 3)),
        case("pages of one token", 6, 1, ("append", "a", 2), ("append", "b", 3), ("free", "a"), ("append", "b", 3)),
        *(
            case(f"60 operations, pages of {size}", pages, size, *random_script(draw, letters, 60, largest))
            for pages, size, largest in ((12, 4, 9), (30, 16, 70))
        ),
    ]


def _always_new(self, sequence, count):
    return -(-count // self.page_size)


def _always_new_floor(self, sequence, count):
    return count // self.page_size


def _nothing_subtracted(self, sequence, count):
    return -(-(self.lengths.get(sequence, 0) + count) // self.page_size)


def _one_at_most(self, sequence, count):
    return int(self.lengths.get(sequence, 0) % self.page_size == 0)


def _entered_first(self, sequence, count):
    self.tables.setdefault(sequence, [])
    self.lengths.setdefault(sequence, 0)
    return PageBook.append(self, sequence, count)


def _one_too_many(self, sequence, count):
    return (self.lengths.get(sequence, 0) + count) // self.page_size + 1 - len(self.tables.get(sequence, ()))


def _floor(self, sequence, count):
    return (self.lengths.get(sequence, 0) + count) // self.page_size - len(self.tables.get(sequence, ()))


def _leaking_free(self, sequence):
    del self.tables[sequence], self.lengths[sequence]


def _free_of_anything(self, sequence):
    for page in self.tables.pop(sequence, ()):
        self.drop(page)
    self.lengths.pop(sequence, None)


def _free_and_keep(self, sequence):
    self.unused.extend(self.tables[sequence])


def _free_and_keep_length(self, sequence):
    for page in self.tables.pop(sequence):
        self.drop(page)


def _take_again(self):
    return self.unused[-1]


def _strict(self, needed):
    if needed >= len(self.unused) and needed:
        raise MemoryError


def _refused_and_changed(case, seen, got):
    right, mine = first_difference(case, got) or ("", "")
    return "MemoryError" in right and "MemoryError" in mine


def _new_one_refused(case, seen, got):
    right, mine = first_difference(case, got) or ("", "")
    return right.startswith("append") and "KeyError" in mine


def _length_from_pages(case, seen, got):
    right, mine = first_difference(case, got) or ("", "")
    numbers = [line.split(": ")[1].split(" ") for line in (right, mine) if " tokens in " in line]
    if len(numbers) < 2 or numbers[0][1:] != numbers[1][1:]:
        return False
    return int(numbers[1][0]) == int(numbers[1][3]) * case.args[2] != int(numbers[0][0])


def _not_refused(case, seen, got):
    right, mine = first_difference(case, got) or ("", "")
    return right.startswith("append") and "MemoryError" in right and "Error" not in mine and "too few pages" in mine


def _other_exception(case, seen, got):
    refusals = ("MemoryError", "KeyError")
    raised = seen.error is not None and seen.error.type in ("Exception", "RuntimeError", "ValueError", "AssertionError")
    return raised and any(word in line for line in told_by(PageBook, *case.args) for word in refusals)


def _nobody_freed(case, seen, got):
    right, mine = first_difference(case, got) or ("", "")
    return right.startswith("free") and "KeyError" in right and "done" in mine


def _stories(got) -> str:
    return "\n".join(got) if isinstance(got, list) and all(isinstance(line, str) for line in got) else ""


EXERCISE = Exercise(
    id="6.2",
    title="An allocator of pages",
    entries=("PageAllocator",),
    cases=allocator_cases,
    oracle=lambda *args: told_by(PageBook, *args),
    hints=(
        "Three pieces of state are enough: a list of the pages that nobody holds, a dict from a sequence to its list "
        "of pages, and a dict from a sequence to its length.",
        "append: the sequence needs -(-(length + count) // page_size) pages in all. What it has already it keeps: only "
        "the difference is new, and it is 0 most of the time.",
        "Count first, then act: if more pages are needed than are free, raise MemoryError before anything is changed. "
        "A loop that takes pages until none is left has given some away already.",
        "free: self.pages_of.pop(sequence) gives the list and raises KeyError where there is none; put its pages back "
        "on the free list, and forget the length too.",
    ),
    mistakes=(
        Mistake(
            "half_appended",
            "The pool ran out in the middle of an append, and what was taken until then stays taken. Count the pages "
            "that are needed, compare with the free ones, and raise MemoryError before the first is taken.",
            result=slip(check=half_appended, take=take_or_raise),
            when=_refused_and_changed,
        ),
        Mistake(
            "pages_for_every_append",
            "Every append takes pages of its own, though the last page has room. Count the pages for the new length, "
            "and subtract those that the sequence has.",
            result=(slip(pages_more=_always_new), slip(pages_more=_nothing_subtracted)),
        ),
        Mistake(
            "one_page_at_most",
            "An append takes one page at most, and a prompt of many tokens needs several. Count the pages for the new "
            "length, and subtract those that the sequence has.",
            result=slip(pages_more=_one_at_most),
        ),
        Mistake(
            "refused_one_stays",
            "A new sequence whose first append was refused is on the books all the same, with no page: `free` finds "
            "it, and should raise KeyError. Enter it after the check.",
            result=slip(append=_entered_first),
        ),
        Mistake(
            "one_page_too_many",
            "A sequence that ends with a full page is given an empty one more: length // page_size + 1 is too many "
            "there. Round up: -(-length // page_size).",
            result=slip(pages_more=_one_too_many),
        ),
        Mistake(
            "pages_rounded_down",
            "The number of pages is rounded down, so that the last tokens have none. A page that is begun is held "
            "whole: -(-length // page_size).",
            result=(slip(pages_more=_floor), slip(pages_more=_always_new_floor)),
        ),
        Mistake(
            "pages_not_returned",
            "A freed sequence's pages are lost: they are not on the free list again. Put them back in `free`.",
            result=slip(free=_leaking_free),
        ),
        Mistake(
            "double_free",
            "Freeing a sequence that holds nothing goes unnoticed. That is how a page comes onto the free list twice, "
            "and into two tables after that. Raise KeyError when the sequence has no table.",
            result=(slip(free=_free_of_anything), slip(free=_free_and_keep)),
            when=_nobody_freed,
        ),
        Mistake(
            "length_survives_free",
            "A freed sequence's length is still there when its name comes back. Forget it together with the pages.",
            result=slip(free=_free_and_keep_length),
        ),
        Mistake(
            "page_in_two_tables",
            "A page is held twice at once, so that one token is written over another. A page that is handed out must "
            "leave the free list (`pop` takes and removes, an index does not), and a freed one comes back to it once.",
            result=slip(take=_take_again),
            when=lambda case, seen, got: any(word in _stories(got) for word in ("wrote over it", "has a page twice")),
        ),
        Mistake(
            "last_page_never_used",
            "MemoryError is raised although as many pages are free as are needed. Compare with >, not with >=.",
            result=slip(check=_strict),
        ),
        Mistake(
            "new_sequence_refused",
            "A sequence that was never seen before raises KeyError in `append`. It starts empty: take "
            "dict.get(sequence, ...) or setdefault.",
            when=_new_one_refused,
        ),
        Mistake(
            "length_from_pages",
            "`length` counts the slots of a sequence's pages and not its tokens. Keep the number of tokens beside the "
            "table.",
            when=_length_from_pages,
            every=True,
        ),
        Mistake(
            "not_refused",
            "An append for which there is no room returns as if it had been done. Raise MemoryError: the caller does "
            "not look at what `append` returns.",
            when=_not_refused,
        ),
        Mistake("attribute_hides_method", METHOD_HIDDEN, when=method_hidden),
        Mistake(
            "other_exception",
            "The refusal is an exception of another kind. The caller waits for MemoryError from `append` and for "
            "KeyError from `free`, and lets everything else through.",
            when=_other_exception,
        ),
        Mistake(
            "pool_not_checked",
            "A page was taken from an empty free list. Compare what is needed with what is free first, and raise "
            "MemoryError.",
            when=lambda case, seen, got: bool(seen.error) and seen.error.type in ("IndexError", "StopIteration"),
        ),
    ),
)
