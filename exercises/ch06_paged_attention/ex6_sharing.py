"""Exercise 6.6: an allocator whose sequences share pages and copy what they write, and keys to find pages again."""

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

# ------------------------------------------------------------------------------------------------ sharing


def random_forks(draw, steps, largest):
    """Appends, forks and frees in any order. A child has a name of its own each time; only what is there is forked."""
    script, there, born = [], [], 0
    for _ in range(steps):
        what = draw.integer(0, 10)
        if what < 6 or not there:
            name = draw.choice(there) if there and what else f"s{born}"
            if name not in there:
                born += 1
                there.append(name)
            script.append(("append", name, draw.integer(1, largest)))
        elif what < 8:
            script.append(("fork", draw.choice(there), f"s{born}"))
            there.append(f"s{born}")
            born += 1
        else:
            script.append(("free", there.pop(draw.integer(0, len(there)))))
    return script


def fitting(pages, page_size, script):
    """The script without operations on sequences that were never there: their first append found no room."""
    book, kept = PageBook(pages, page_size), []
    for operation, name, *rest in script:
        if operation != "append" and name not in book.tables:
            continue
        kept.append((operation, name, *rest))
        try:
            getattr(book, operation)(name, *rest)
        except MemoryError:
            pass
    return kept


def sharing_cases(draw):
    def case(name, pages, page_size, *script):
        return Case(name, ("SharingAllocator", pages, page_size, list(script)), "SharingAllocator", replay)

    def keys(name, page_size, *prompts):
        return Case(name, (list(map(list, prompts)), page_size), "page_keys", key_pattern)

    start = [draw.integer(0, 50000) for _ in range(12)]
    random = random_forks(draw, 60, 9)
    return [
        case("one sequence shares nothing", 4, 4, ("append", "a", 5), ("append", "a", 3), ("append", "a", 1)),
        case("a fork takes no page", 4, 4, ("append", "a", 6), ("fork", "a", "b")),
        case(
            "the child writes into the last page",
            6,
            4,
            ("append", "a", 6),
            ("fork", "a", "b"),
            ("append", "b", 1),
            ("append", "a", 1),
            ("append", "b", 1),
        ),
        case(
            "the parent writes first",
            6,
            4,
            ("append", "a", 6),
            ("fork", "a", "b"),
            ("append", "a", 3),
            ("append", "b", 1),
        ),
        case(
            "the last page is full: nothing to copy",
            6,
            4,
            ("append", "a", 8),
            ("fork", "a", "b"),
            ("append", "b", 1),
            ("append", "a", 2),
        ),
        case(
            "three children of one parent",
            8,
            4,
            ("append", "a", 6),
            ("fork", "a", "b"),
            ("fork", "a", "c"),
            ("fork", "a", "d"),
            ("append", "b", 1),
            ("append", "c", 1),
            ("append", "d", 1),
            ("append", "a", 1),
        ),
        case(
            "the parent is freed, the child reads on",
            4,
            4,
            ("append", "a", 6),
            ("fork", "a", "b"),
            ("free", "a"),
            ("append", "c", 4),
            ("append", "b", 1),
            ("free", "b"),
            ("append", "d", 4),
        ),
        case(
            "a child of a child",
            8,
            4,
            ("append", "a", 2),
            ("fork", "a", "b"),
            ("append", "b", 1),
            ("fork", "b", "c"),
            ("append", "c", 5),
            ("append", "b", 1),
            ("free", "b"),
        ),
        case(
            "no room for the copy",
            2,
            4,
            ("append", "a", 6),
            ("fork", "a", "b"),
            ("append", "b", 1),
            ("free", "a"),
            ("append", "b", 1),
        ),
        case(
            "room for the tokens, not for the copy too",
            3,
            4,
            ("append", "a", 6),
            ("fork", "a", "b"),
            ("append", "b", 3),
            ("append", "a", 2),
        ),
        case(
            "freed twice",
            4,
            4,
            ("append", "a", 6),
            ("fork", "a", "b"),
            ("free", "a"),
            ("free", "a"),
            ("append", "c", 8),
            ("append", "b", 2),
        ),
        case("60 operations, pages of 4", 16, 4, *fitting(16, 4, random)),
        case("60 operations, pages of 3", 60, 3, *fitting(60, 3, random)),
        keys("the same prompt twice", 4, range(8), range(8)),
        keys("a common beginning", 4, [*start[:9], 1, 2, 3], [*start[:9], 4, 5, 6]),
        keys("equal pages behind other beginnings", 4, [1, 1, 1, 1, 7, 7, 7, 7], [2, 2, 2, 2, 7, 7, 7, 7]),
        keys("prompts that differ in the first of three pages", 2, [1, 1, 5, 6, 7, 8], [2, 2, 5, 6, 7, 8]),
        keys("one page twice in a prompt", 3, [5, 6, 7, 5, 6, 7]),
        keys("the same tokens in another order", 3, [1, 2, 3], [3, 2, 1]),
        keys("digits that could run together", 2, [1, 23], [12, 3]),
        keys("the last page is not full", 4, range(7), range(8), range(3)),
        keys("no tokens, pages of one", 1, [], [9], [9, 9]),
    ]


def key_pattern(functions, prompts, page_size):
    """Each key as the number of the first equal one, so that any kind of key can be compared."""
    seen, pattern = {}, []
    for prompt in prompts:
        keys = list(functions["page_keys"](list(prompt), page_size))
        pattern.append(
            f"{len(keys)} key{'' if len(keys) == 1 else 's'}: "
            + " ".join(str(seen.setdefault(key, len(seen))) for key in keys)
        )
    return pattern


def page_keys_oracle(tokens, page_size):
    return [tuple(tokens[:end]) for end in range(page_size, len(tokens) + 1, page_size)]


def sharing_oracle(*args):
    return told_by(PageBook, *args) if isinstance(args[0], str) else keyed(page_keys_oracle)(*args)


def keyed(function):
    """What the driver makes of a function that gives keys; silent on the allocator's cases."""
    return lambda *args: None if isinstance(args[0], str) else key_pattern({"page_keys": function}, *args)


def shared(**methods):
    """What the driver tells of an allocator with these methods; silent on the keys' cases."""
    told = slip(**methods)
    return lambda *args: told(*args) if isinstance(args[0], str) else None


# ------------------------------------------------------------------------------------------------ slips


def _never(self, sequence):
    return False


def _whenever_partial(self, sequence):
    return self.lengths.get(sequence, 0) % self.page_size > 0


def _whenever_shared(self, sequence):
    table = self.tables.get(sequence, [])
    return bool(table) and self.holders[table[-1]] > 1


def _copied_in_silence(self, table):
    PageBook.copy_last(self, table)
    return []


def _the_wrong_way(self, table):
    return [pair[::-1] for pair in PageBook.copy_last(self, table)]


def _old_one_lost(self, table):
    source, table[-1] = table[-1], self.take()
    self.holders[source] -= 1
    return [(source, table[-1])]


def _old_one_kept(self, table):
    source, table[-1] = table[-1], self.take()
    return [(source, table[-1])]


def _copy_not_in_table(self, table):
    source, target = table[-1], self.take()
    self.drop(source)
    return [(source, target)]


def _copy_uncounted(self, table):
    source, table[-1] = table[-1], self.unused.pop()
    self.drop(source)
    return [(source, table[-1])]


def _copied_at_fork(self, parent, child):
    more = len(self.tables[parent])
    self.check(more)
    self.tables[child], self.lengths[child] = [self.take() for _ in range(more)], self.lengths[parent]


def _uncounted_fork(self, parent, child):
    self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]


def _same_table(self, parent, child):
    PageBook.fork(self, parent, child)
    self.tables[child] = self.tables[parent]


def _free_for_all(self, sequence):
    for page in self.tables.pop(sequence):
        self.holders[page] = 0
        self.unused.append(page)
    del self.lengths[sequence]


def _free_nobody(self, sequence):
    for page in self.tables.pop(sequence):
        self.holders[page] -= 1
    del self.lengths[sequence]


def _uncounted(self):
    return self.unused.pop()


def _free_of_anything(self, sequence):
    if sequence in self.tables:
        PageBook.free(self, sequence)


def _free_and_keep(self, sequence):
    for page in self.tables[sequence]:
        self.drop(page)


class _NoRoomForCopy(PageBook):
    """The pages for the tokens are counted and the one for the copy is not."""

    def append(self, sequence, count):
        copying = self.must_copy(sequence)
        more = self.pages_more(sequence, count)
        self.check(more)
        table = self.tables.setdefault(sequence, [])
        copies = self.copy_last(table) if copying else []
        table.extend(take_or_raise(self) for _ in range(more))
        self.lengths[sequence] = self.lengths.get(sequence, 0) + count
        return copies

    take = take_or_raise


def _no_copy(more_free):
    """A `when`: the first wrong line lacks a copy, and has `more_free` pages more than it should."""

    def when(case, seen, got):
        right, mine = (
            (line.split(";")[0].split(", ") + ["", ""])[:3] for line in first_difference(case, got) or ("", "")
        )
        if right[:1] != mine[:1] or (right[1], mine[1]) != ("1 copied", "0 copied"):
            return False
        return int(mine[2].split()[0]) - int(right[2].split()[0]) == more_free

    return when


def _other_lost(case, seen, got):
    """The first wrong line is right but for a token that another sequence lost by it, where a page was copied."""
    right, mine = first_difference(case, got) or ("", "")
    writer = right.split(" ")[1] if right.startswith("append") else ""
    return "1 copied" in right and mine.startswith(right + "; token") and f"of {writer} is" not in mine


def _freed_too_many(case, seen, got):
    right, mine = first_difference(case, got) or ("", "")
    if not (right.startswith("free") and "done, " in right and "done, " in mine):
        return False
    counts = [int(line.split("done, ")[1].split(" free")[0]) for line in (right, mine)]
    return counts[1] > counts[0]


def _nobody_freed(case, seen, got):
    right, mine = first_difference(case, got) or ("", "")
    return right.startswith("free") and "KeyError" in right and "done" in mine


def _refused_and_changed(case, seen, got):
    right, mine = first_difference(case, got) or ("", "")
    return "MemoryError" in right and "MemoryError" in mine


EXERCISE = Exercise(
    id="6.6",
    title="Shared pages, copied when written",
    entries=("SharingAllocator", "page_keys"),
    cases=sharing_cases,
    oracle=sharing_oracle,
    hints=(
        "Start from your allocator of 6.2 and add one list: for every page, how many tables it is in. A page is free "
        "again when that count falls to 0, and not before.",
        "fork copies the parent's table (a new list, not the same one) and raises the count of every page in it. free "
        "lowers the counts and returns only the pages whose count is 0 now.",
        "append must copy exactly when the last page is partly filled (length % page_size > 0) and its count is above "
        "1. A full page is never written again, shared or not.",
        "To copy: take a new page, lower the count of the old one, put the new one in its place in the table, and "
        "return [(old, new)]. The new page counts when you compare with the free ones.",
        "page_keys: keys and values of a token depend on every token before it. A key that names the page's own tokens "
        "only is too little; tuple(tokens[:end]), or a hash of it, is enough.",
    ),
    mistakes=(
        Mistake(
            "copy_on_write_forgotten",
            "A sequence writes into a page that another one still reads, and its token is lost. When the last page is "
            "partly filled and has more than one holder, the writer takes a copy.",
            result=shared(must_copy=_never),
            when=_no_copy(more_free=1),
        ),
        Mistake(
            "copy_not_returned",
            "The sequence gets a page of its own, and what the shared one held is not in it: return the pair (source, "
            "target), so that the caller copies it.",
            result=shared(copy_last=_copied_in_silence),
            when=_no_copy(more_free=0),
        ),
        Mistake(
            "copied_the_wrong_way",
            "The pair is (source, target), and yours reads (target, source): the empty page is copied over the full "
            "one.",
            result=shared(copy_last=_the_wrong_way),
            when=_other_lost,
        ),
        Mistake(
            "copy_not_in_table",
            "The pair is returned, and the sequence's table still names the shared page: the new tokens go there, and "
            "nobody finds the copy. Put the new page in the old one's place.",
            result=shared(copy_last=_copy_not_in_table),
        ),
        Mistake(
            "copied_without_need",
            "A partly filled last page is copied though nobody else holds it. Look at its number of holders: with one, "
            "the sequence writes into it.",
            result=(
                shared(must_copy=_whenever_partial),
                shared(must_copy=_whenever_partial, copy_last=_old_one_lost),
            ),
        ),
        Mistake(
            "full_page_copied",
            "A full page is copied. New tokens go into a page behind it; it is only read, and may stay shared.",
            result=shared(must_copy=_whenever_shared),
        ),
        Mistake(
            "copied_at_fork",
            "`fork` takes pages. That is what sharing saves: both hold the same pages until one writes.",
            result=shared(fork=_copied_at_fork),
            when=lambda case, seen, got: _fork_took_pages(case, got),
        ),
        Mistake(
            "old_page_kept",
            "After the copy the sequence still counts as a holder of the old page, which is then never free again. "
            "Lower its count.",
            result=shared(copy_last=_old_one_kept),
        ),
        Mistake(
            "fork_not_counted",
            "The child's pages are not counted: a page in two tables still has one holder. Raise every page's count in "
            "`fork`.",
            result=shared(fork=_uncounted_fork),
        ),
        Mistake(
            "table_shared_not_copied",
            "Parent and child have one and the same list as their table: what one appends, the other gets. Give the "
            "child a list of its own, list(table).",
            result=shared(fork=_same_table),
        ),
        Mistake(
            "freed_while_shared",
            "Pages that another sequence still reads were put on the free list. `fork` raises the count of every "
            "page, `free` lowers it, and only a page whose count is 0 is free again.",
            result=shared(free=_free_for_all),
            when=_freed_too_many,
        ),
        Mistake(
            "pages_not_returned",
            "Pages whose last holder is gone do not come back to the free list.",
            result=shared(free=_free_nobody),
        ),
        Mistake(
            "double_free",
            "A sequence that holds nothing can be freed, or freed again: the count of pages that others hold falls, "
            "and they are handed out under them. Raise KeyError when it has no table.",
            result=(shared(free=_free_of_anything), shared(free=_free_and_keep)),
            when=_nobody_freed,
        ),
        Mistake(
            "copy_without_room",
            "The page for the copy was not counted: MemoryError must be raised, with nothing changed, when the new "
            "pages and the copy together are more than are free.",
            result=lambda *args: told_by(_NoRoomForCopy, *args) if isinstance(args[0], str) else None,
            when=lambda case, seen, got: bool(seen.error) and seen.error.type in ("IndexError", "StopIteration"),
        ),
        Mistake(
            "half_appended",
            "An append was refused and something has changed all the same. Count the pages for the tokens and the copy "
            "first, and raise MemoryError before any is taken.",
            result=shared(check=half_appended, take=take_or_raise),
            when=_refused_and_changed,
        ),
        Mistake("attribute_hides_method", METHOD_HIDDEN, when=method_hidden),
        Mistake(
            "pair_without_list",
            "`append` returns the pair itself. Asked for is a list, with that pair in it or with none.",
            when=lambda case, seen, got: bool(seen.error) and "(source, target) pairs" in seen.error.text,
        ),
        Mistake(
            "new_page_not_counted",
            "A page that is handed out has no holder: set its count to 1 when it is taken. A fork then makes it 2, and "
            "the last free brings it to 0.",
            result=(shared(take=_uncounted), shared(copy_last=_copy_uncounted)),
        ),
        Mistake(
            "key_of_the_page_alone",
            "Equal tokens behind different beginnings got equal keys. A token's key and value depend on all tokens "
            "before it, so the key of a page must too.",
            result=keyed(
                lambda tokens, size: [tuple(tokens[i : i + size]) for i in range(0, len(tokens) // size * size, size)]
            ),
        ),
        Mistake(
            "key_by_place",
            "The key names the page's place and its own tokens. What stood before it is missing still: two prompts "
            "that differ in the first page differ in all of them.",
            result=keyed(
                lambda tokens, size: [(i, *tokens[i : i + size]) for i in range(0, len(tokens) // size * size, size)]
            ),
        ),
        Mistake(
            "key_of_two_pages",
            "The key holds the page's tokens and those of the page before it. What stood before that one is missing "
            "still: take the key of the page before, which stands for everything up to there, or all tokens.",
            result=keyed(lambda tokens, size: [key[-2 * size :] for key in page_keys_oracle(tokens, size)]),
        ),
        Mistake(
            "last_full_page_missed",
            "A prompt that ends with a full page has a key too few: range() leaves its end out, and len(tokens) must "
            "be in it.",
            result=keyed(lambda tokens, size: [tuple(tokens[:end]) for end in range(size, len(tokens), size)]),
        ),
        Mistake(
            "partial_page_has_a_key",
            "The last, partly filled page has a key. More tokens will be written into it: only full pages can be found "
            "by their content.",
            result=keyed(lambda tokens, size: [tuple(tokens[: i + size]) for i in range(0, len(tokens), size)]),
        ),
        Mistake(
            "digits_run_together",
            "[1, 23] and [12, 3] got the same key: the numbers are joined without anything between them.",
            result=keyed(lambda tokens, size: ["".join(map(str, key)) for key in page_keys_oracle(tokens, size)]),
        ),
        Mistake(
            "key_not_hashable",
            "A key must be hashable, or no dict can find it: make a tuple of the list.",
            when=lambda case, seen, got: bool(seen.error) and "unhashable" in seen.error.text,
        ),
        Mistake(
            "order_lost",
            "The same tokens in another order got the same key. A sum or a set forgets the order; a tuple keeps it.",
            result=(
                keyed(lambda tokens, size: [tuple(sorted(k)) for k in page_keys_oracle(tokens, size)]),
                keyed(lambda tokens, size: [sum(k) for k in page_keys_oracle(tokens, size)]),
                keyed(lambda tokens, size: [frozenset(k) for k in page_keys_oracle(tokens, size)]),
            ),
        ),
    ),
)


def _fork_took_pages(case, got):
    right, mine = first_difference(case, got) or ("", "")
    return right.startswith("fork") and " free" in mine and right.split(", ")[0] == mine.split(", ")[0]
