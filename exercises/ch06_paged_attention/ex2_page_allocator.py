"""Exercise 6.2: an allocator of pages, judged on scripts of operations."""

from __future__ import annotations

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch06_paged_attention.bookkeeping import (
    DOUBLE_FREE,
    FORGOTTEN,
    HALF_APPENDED,
    HELD,
    LET_GO,
    METHOD_HIDDEN,
    NAME_TAKEN_FOR_NONE,
    NEEDED,
    PAGES_NO_NUMBER,
    PAGES_NOT_RETURNED,
    REFUSALS,
    REFUSED,
    STATE_SHARED,
    TAKE,
    PageBook,
    method_hidden,
    names_that_are_false,
    pages_no_number,
    replay,
    scripted,
    state_is_shared,
    told,
)
from exercises.topics.evidence import raised


def random_script(draw, names, steps, largest):
    """Appends and frees in any order; now and then a sequence that holds nothing is freed."""
    script = []
    for _ in range(steps):
        name = draw.choice(names)
        script.append(("free", name) if draw.integer(0, 4) == 0 else ("append", name, draw.integer(1, largest)))
    return script


def allocator_cases(draw):
    def case(name, pages, page_size, script):
        return Case(name, scripted("PageAllocator", pages, page_size, script), driver=replay)

    sixty = random_script(draw, "abcd", 60, 70)
    return [
        case("one sequence, a page at a time", 8, 4, "append a 4; append a 4"),
        Case(
            "two allocators, one after the other",
            (*scripted("PageAllocator", 4, 4, "append a 5; append b 4; append a 1"), True),
            driver=replay,
        ),
        case("token by token over the end of a page", 4, 4, "; ".join(["append a 1"] * 9)),
        case("a prompt of 10 tokens", 8, 4, "append a 10; append a 1; append a 2"),
        case("two sequences in turn", 8, 4, "append a 3; append b 3; append a 3; append b 3"),
        case("freed pages are handed out again", 3, 4, "append a 12; free a; append b 12"),
        case("the pool is full", 3, 4, "append a 6; append b 4; append b 1; append a 2"),
        case("nothing is half-appended", 4, 4, "append a 6; append b 12; append a 11; append b 5; append a 3"),
        case("refused at its first append, then freed", 4, 4, "append a 10; append b 8; free b; append b 4; free b"),
        case("freed twice", 4, 4, "append a 8; append b 2; free a; free a; append c 6; append d 4"),
        case("freed and never there", 2, 4, "free x; append a 1"),
        case("a name comes back after it was freed", 4, 4, "append a 6; free a; append a 3"),
        case("pages of one token", 6, 1, "append a 2; append b 3; free a; append b 3"),
        case(
            "names that are numbers, 0 among them",
            *(4, 4, "append 0 3; append 1 4; append 0 2; append 2 5; free 0; append 0 5"),
        ),
        Case("60 operations, pages of 16", ("PageAllocator", 30, 16, sixty), driver=replay),
    ]


def _other_exception(case, seen, got):
    refusals = ("MemoryError", "KeyError")
    raised = seen.error is not None and seen.error.type in ("Exception", "RuntimeError", "ValueError", "AssertionError")
    return raised and any(word in line for line in told(*case.args) for word in refusals)


CONTRACT = Contract(
    lambda draw, *, pages, page_size, largest: (
        "PageAllocator",
        pages,
        page_size,
        random_script(draw, "abcd", 30, max(2, largest * page_size)),
    ),
    choices={
        "pages": (1, 2, 5, 12),
        "page_size": (1, 2, 3, 7, 16),
        "largest": (Level(1, "short appends"), Level(4, "appends of up to 4 pages")),
    },
    says={"pages": "pages 0 to pages-1", "page_size": "of page_size tokens each"},
    driver=replay,
    most=6,
)

PAGE_TWICE = (
    "A page is held twice at once, so that one token is written over another. A page that is handed out must "
    "leave the free list (`pop` takes and removes, an index does not), and a freed one comes back to it once."
)

UP = "-(-(length + count) // self.page_size)"
MORE = f"{UP} - len(table)"
CHANGES = (
    *edits("The number of pages is rounded down, so the last tokens have none. Round up: -(-length // page_size).",
        pages_rounded_down=(UP, "(length + count) // self.page_size"),
        pages_rounded_down__for_every_append=(MORE, "count // self.page_size")),
    *edits("Every append takes pages of its own, though the last page has room. Count the pages for the new length, "
        "and subtract those that the sequence has.", pages_for_every_append=(MORE, "-(-count // self.page_size)"),
        pages_for_every_append__nothing_subtracted=(MORE, UP)),
    *edits("An append takes one page at most, and a prompt of many tokens needs several. Count the pages for the new "
        "length, and subtract those that the sequence has.",
        one_page_at_most=(MORE, "int(length % self.page_size == 0)"),
        one_page_at_most__of_those_needed=(MORE, f"min(1, {MORE})")),
    *edits("Pages are taken only where an append begins at a multiple of page_size. One that begins inside a page may "
        "reach beyond it: count the pages for the new length, and subtract those that the sequence has.",
        pages_at_multiples_alone=(MORE, "-(-count // self.page_size) if length % self.page_size == 0 else 0")),
    *edits("Tokens are divided into pages by a shift, which is right where page_size is a power of two. It may be any "
        "number: divide, and round up.",
        by_shift=(UP, "((length + count - 1) >> (self.page_size.bit_length() - 1)) + 1")),
    *edits("A sequence that ends with a full page is given an empty one more: length // page_size + 1 is too many "
        "there. Round up: -(-length // page_size).", one_page_too_many=(UP, "(length + count) // self.page_size + 1")),
    *edits("A sequence that was never seen before raises KeyError in `append`. It starts empty: take "
        "dict.get(sequence, ...) or setdefault.",
        new_sequence_refused=("self.lengths.get(sequence, 0)", "self.lengths[sequence]")),
    *edits("A freed sequence's pages are lost: they are not on the free list again. Put them back in `free`.",
        pages_not_returned=PAGES_NOT_RETURNED),
    *edits("Only one page of a freed sequence comes back to the free list. All of them do.",
        one_page_returned=(HELD, "self.tables.pop(sequence)[:1]")),
    *edits("New pages are put in front of the old ones. A table is in the order of its tokens: append them at its end.",
        new_pages_in_front=("table.extend(taken)", "table[:0] = taken")),
    *edits("`table` gives the pages sorted by their numbers. Entry i is the page of tokens i · page_size onwards, "
        "whatever its number: keep the order in which they were taken.",
        table_sorted=("list(self.tables[sequence])", "sorted(self.tables[sequence])")),
    *edits("`table` gives a set, which has no order. Entry i is the page of tokens i · page_size onwards: return a "
        "list, in the order in which the pages were taken.",
        table_sorted__set=("list(self.tables[sequence])", "list(set(self.tables[sequence]))")),
    *edits("A sequence's length is that of its last append alone. Add what it had before.",
        length_of_the_last_append=("self.lengths[sequence] = length + count", "self.lengths[sequence] = count")),
    *edits(PAGE_TWICE,
        page_in_two_tables=(TAKE, "self.unused[-1]", "self.holders[page] = 1", "pass", LET_GO, "if True:")),
    *edits("The pool ran out in the middle of an append, and what was taken until then stays taken. Count the pages "
        "that are needed, compare with the free ones, and raise MemoryError before the first is taken.",
        **HALF_APPENDED),
    *REFUSALS,
    *edits("A refused append gives back the pages that the sequence had before. Nothing may change then: the caller "
        "decides whom to stop, and tries again.",
        refused_one_freed=(REFUSED, "if sequence in self.tables:\n    self.free(sequence)\nraise MemoryError")),
    *edits("An append for which there is no room returns as if it had been done. Raise MemoryError: the caller does "
        "not look at what `append` returns.", not_refused=(REFUSED, "return []")),
    *edits("MemoryError is raised although as many pages are free as are needed. Compare with >, not with >=.",
        last_page_never_used=(NEEDED, "if len(self.unused) <= more > 0:")),
    *edits("The new tokens are compared with the slots of the free pages, without the room in the sequence's own last "
        "page. Compare pages: those that are needed more, and those that are free.",
        room_counted_in_tokens=(NEEDED, "if count > len(self.unused) * self.page_size:")),
    *edits("Freeing a sequence that holds nothing raises no error. That is how a page gets onto the free list twice, "
        "and later into two tables. Raise KeyError when the sequence has no table.", **DOUBLE_FREE,
        double_free__table_kept=(HELD, "self.tables[sequence]", FORGOTTEN, "pass", LET_GO, "if True:"),
        double_free__empty_table_kept=(HELD, "self.tables.get(sequence, ())", FORGOTTEN,
            "self.tables[sequence], self.lengths[sequence] = [], 0")),
    *edits("A freed sequence's length is still there when its name comes back. Delete it together with the pages.",
        length_survives_free=(FORGOTTEN, "pass")),
    *edits("`length` counts the slots of a sequence's pages and not its tokens. Keep the number of tokens beside the "
        "table.",
        length_from_pages=("return self.lengths[sequence]", "return len(self.tables[sequence]) * self.page_size")),
    *edits("`free_pages` counts the pages that are held. It should count the others.",
        held_pages_counted=("return len(self.unused)", "return self.pages - len(self.unused)")),
)  # fmt: skip


EXERCISE = Exercise(
    id="6.2",
    title="An allocator of pages",
    entries=("PageAllocator",),
    cases=allocator_cases,
    oracle=told,
    contracts=(CONTRACT,),
    models=(model_of(told, CHANGES, (PageBook,)),),
    hints=(
        "You need three things: a list of free pages, a dict from each sequence to its list of pages, and a dict from "
        "each sequence to its length.",
        "append: the sequence needs -(-(length + count) // page_size) pages in all, and it keeps those that it has. "
        "So only the difference is new, and it is 0 most of the time.",
        "Count first, then act: if you need more pages than are free, raise MemoryError before you change anything. A "
        "loop that takes pages until none is left has already taken some.",
        "free: self.pages_of.pop(sequence) gives the list and raises KeyError where there is none; put its pages back "
        "on the free list, and forget the length too.",
    ),
    mistakes=(
        Mistake("name_taken_for_none", NAME_TAKEN_FOR_NONE, when=names_that_are_false, every=True),
        Mistake("state_shared", STATE_SHARED, when=state_is_shared),
        Mistake(
            "page_in_two_tables",
            PAGE_TWICE,
            when=lambda case, seen, got: any(
                "wrote over it" in line or "has a page twice" in line for line in got or ()
            ),
        ),
        Mistake("attribute_hides_method", METHOD_HIDDEN, when=method_hidden),
        Mistake("pages_no_number", PAGES_NO_NUMBER, when=pages_no_number),
        Mistake(
            "other_exception",
            "The refusal is another kind of exception. The caller catches MemoryError from `append` and KeyError from "
            "`free`, and no others.",
            when=_other_exception,
        ),
        Mistake(
            "pool_not_checked",
            "A page was taken from an empty free list. Compare what is needed with what is free first, and raise "
            "MemoryError.",
            when=raised("IndexError", "StopIteration"),
        ),
    ),
)
