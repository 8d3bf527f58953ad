"""Allocators of pages: the judge's own, its slips, and the driver that turns any allocator into comparable words.

Which page an allocator picks is its own affair. So a script of operations is replayed, and what is told of each is what
every right allocator has in common: what the call did or raised, how long the sequence is, in how many pages, how many
are free. For sharing, a memory of slots runs beside it, in which every token must be found again.
"""

from __future__ import annotations

from course_lib.checker.specification.model import Slips


class PageBook:
    """An allocator for both exercises: right without a slip."""

    def __init__(self, pages, page_size, slips=None):
        self.s, self.pages, self.page_size = slips or Slips(), pages, page_size
        self.unused = list(range(pages))
        self.holders = [0] * pages
        self.tables, self.lengths = {}, {}
        self.children = set()

    def append(self, sequence, count):
        s = self.s
        if s("new_sequence_refused") and sequence not in self.lengths:
            raise KeyError
        copying = self._must_copy(sequence)
        if copying and s("half_appended__share_let_go"):
            self.holders[self.tables[sequence][-1]] -= 1
        more = self._pages_more(sequence, count)
        length = self.lengths.get(sequence, 0) + count
        if s("refused_one_stays", "half_appended__length_first"):
            self.tables.setdefault(sequence, [])
            self.lengths.setdefault(sequence, 0)
        if s("half_appended__length_first", "half_appended__length_alone"):
            self.lengths[sequence] = length
        needed = more + (0 if s("copy_without_room") else copying)
        if self._refused(needed, count):
            if s("not_refused"):
                return []
            if s("refused_one_freed") and sequence in self.tables:
                self.free(sequence)
            if s("half_appended__token_by_token"):
                self._append_what_fits(sequence, copying)
            if s("half_appended__copy_made") and copying and self.unused:
                self._copy_last(self.tables[sequence], self._take())
            if not s("half_appended", "half_appended__lost"):
                raise MemoryError
        table = self.tables.setdefault(sequence, [])
        pages = table if s("half_appended") and not copying else []
        for _ in range(more + copying):
            pages.append(self._take())
        copies = self._copy_last(table, pages.pop()) if copying else []
        if s("table_shared_not_copied__until_append"):
            self.tables[sequence] = table + pages
        elif s("new_pages_in_front"):
            table[0:0] = pages
        elif pages is not table:
            table.extend(pages)
        self.lengths[sequence] = count if s("length_of_the_last_append") else length
        return copies

    def _refused(self, needed, count):
        s, free = self.s, len(self.unused)
        if s("refused_where_none_is_free") and not free or s("last_page_never_used") and needed and needed == free:
            return True
        return count > free * self.page_size if s("room_counted_in_tokens") else needed > free

    def _append_what_fits(self, sequence, copying):
        """Tokens one by one, until a page is needed and none is free."""
        if not self.unused and (copying or sequence not in self.tables):
            return
        table = self.tables.setdefault(sequence, [])
        if copying:
            self._copy_last(table, self._take())
        table.extend(self._take() for _ in range(len(self.unused)))
        self.lengths[sequence] = len(table) * self.page_size

    def fork(self, parent, child):
        s, table = self.s, self.tables[parent]
        if s("copied_at_fork"):
            if len(table) > len(self.unused):
                raise MemoryError
            self.tables[child], self.lengths[child] = [self._take() for _ in table], self.lengths[parent]
            return
        aliased = ("table_shared_not_copied", "table_shared_not_copied__old_one_freed")
        shared = s(*aliased, "table_shared_not_copied__until_append")
        self.tables[child] = table if shared else list(table)
        self.lengths[child] = len(table) * self.page_size if s("fork_counts_slots") else self.lengths[parent]
        if s("fork_forgets_the_length"):
            self.lengths[child] = 0
        if s("fork_counts_full_pages"):
            self.lengths[child] = self.lengths[parent] // self.page_size * self.page_size
        self.children.add(child)
        for page in () if s("fork_not_counted") else table:
            flagged = s("flag_for_a_count", "flag_for_a_count__for_ever", "flag_for_a_count__or_not")
            self.holders[page] = 2 if flagged else self.holders[page] + 1
        partial = self.lengths[parent] % self.page_size > 0
        if (s("copied_at_fork__last_page") or s("copied_at_fork__partial_page") and partial) and self.unused and table:
            self.holders[table[-1]] -= 1
            self.tables[child][-1] = self._take()

    def free(self, sequence):
        s = self.s
        if s("double_free") and sequence not in self.tables:
            return
        if s("double_free__table_kept", "double_free__counted"):
            for page in self.tables[sequence]:
                self._drop(page)
            return
        if s("double_free__empty_table_kept", "double_free__emptied"):
            for page in self.tables[sequence] if s("double_free__emptied") else self.tables.get(sequence, ()):
                self._drop(page)
            self.tables[sequence], self.lengths[sequence] = [], 0
            return
        table = self.tables.pop(sequence)
        for page in table[:1] if s("one_page_returned") else table:
            if (
                s("freed_while_shared", "freed_while_shared__once")
                or s("freed_while_shared__by_the_parent")
                and sequence not in self.children
            ):
                self.holders[page] = 1
            self._drop(page)
        if not s("length_survives_free"):
            del self.lengths[sequence]

    def table(self, sequence):
        if self.s("table_sorted__set"):
            return list(set(self.tables[sequence]))
        return sorted(self.tables[sequence]) if self.s("table_sorted") else list(self.tables[sequence])

    def length(self, sequence):
        if self.s("length_from_pages"):
            return len(self.tables[sequence]) * self.page_size
        return self.lengths[sequence]

    def free_pages(self):
        if self.s("holders_counted"):
            return self.pages - sum(self.holders)
        return self.pages - len(self.unused) if self.s("held_pages_counted") else len(self.unused)

    def _pages_more(self, sequence, count):
        """Pages that an append needs beside those that the sequence has."""
        s, size, length = self.s, self.page_size, self.lengths.get(sequence, 0)
        after = -(-(length + count) // size)
        if s("pages_rounded_down"):
            after = (length + count) // size
        if s("one_page_too_many"):
            after = (length + count) // size + 1
        if s("pages_for_every_append"):
            return -(-count // size)
        if s("pages_rounded_down__for_every_append"):
            return count // size
        if s("one_page_at_most"):
            return int(length % size == 0)
        if s("pages_at_multiples_alone"):
            return -(-count // size) if length % size == 0 else 0
        if s("by_shift"):
            after = ((length + count - 1) >> (size.bit_length() - 1)) + 1
        if s("one_page_at_most__of_those_needed"):
            return min(1, after - len(self.tables.get(sequence, ())))
        return after if s("pages_for_every_append__nothing_subtracted") else after - len(self.tables.get(sequence, ()))

    def _must_copy(self, sequence):
        """Whether an append writes into a page that others read."""
        length, table, s = self.lengths.get(sequence, 0), self.tables.get(sequence, []), self.s
        partial = length % self.page_size > 0
        shared = bool(table) and self.holders[table[-1]] > 1
        if s("copy_on_write_forgotten"):
            return False
        if s("copied_without_need", "copied_without_need__old_one_lost"):
            return partial
        if s("copied_for_two_holders_alone"):
            return partial and self.holders[table[-1]] == 2
        if s("parent_never_copies") and sequence not in self.children:
            return False
        if s("full_page_copied__and_no_other"):
            return shared and length > 0 and not partial
        return shared if s("full_page_copied") else shared and partial

    def _take(self):
        s = self.s
        if not self.unused:
            raise MemoryError
        if s("page_in_two_tables"):
            return self.unused[-1]
        page = self.unused.pop()
        if not s("new_page_not_counted"):
            self.holders[page] = 1
        return page

    def _drop(self, page):
        s = self.s
        if s("flag_for_a_count__for_ever") and self.holders[page] > 1:
            return
        if s("flag_for_a_count__or_not") and self.holders[page] < 2:
            self.holders[page] = 1
        if s("freed_while_shared__once") and page in self.unused:
            return
        self.holders[page] -= 1
        gone = self.holders[page] == 0 and not s("pages_not_returned")
        if gone or s("double_free__table_kept", "page_in_two_tables"):
            self.unused.append(page)

    def _copy_last(self, table, target):
        """A page of its own in place of the shared one; the pairs to copy."""
        s, source = self.s, table[-1]
        if s("new_page_not_counted__the_copy"):
            self.holders[target] = 0
        if not s("copy_not_in_table", "copy_not_in_table__old_one_freed"):
            table[-1] = target
        if s("copied_without_need", "copy_not_in_table__old_one_freed", "table_shared_not_copied__old_one_freed"):
            self._drop(source)
        elif not s(
            "old_page_kept", "flag_for_a_count__for_ever", "half_appended__share_let_go"
        ):  # it has other holders, and is free for nobody
            self.holders[source] -= 1
        if s("old_page_let_go_twice"):
            self.holders[source] -= 1
        pair = (target, source) if s("copied_the_wrong_way") else (source, target)
        return [] if s("copy_not_returned") else [pair]


# ------------------------------------------------------------------------------------------------ the driver


def replay(functions, kind, pages, page_size, script, twice=False):
    """Replay a script on an allocator and say of each operation what every right allocator has in common.

    With `twice` a second allocator, made when the first has done its part, goes through the same script.
    """
    book = functions[kind](pages, page_size)
    memory = [None] * (pages * page_size)  # what each slot holds: (who wrote it, as which token)
    tokens, story = {}, []

    def counted(number):
        return f"{number} page" if number == 1 else f"{number} pages"

    def recorded(name):
        try:
            return f"{book.length(name)} tokens in {counted(len(book.table(name)))}"
        except KeyError:
            return "nothing is recorded"

    def pages_of(name):
        try:
            table = [int(page) for page in book.table(name)]
        except KeyError:
            return None
        return table if all(0 <= page < pages for page in table) else None

    def trouble():
        for name, want in tokens.items():
            table = pages_of(name)
            if table is None:
                return f"; {name} has no table, or a page that does not exist"
            if len(set(table)) < len(table):
                return f"; {name} has a page twice"
            if len(table) * page_size < len(want):
                return f"; {name} has too few pages"
            for i in range(len(want)):
                read = memory[table[i // page_size] * page_size + i % page_size]
                if read != want[i]:
                    return f"; token {i} of {name} is " + (f"lost: {read[0]} wrote over it" if read else "not there")
        return ""

    def append(name, count):
        returned = book.append(name, count)
        copies = [] if returned is None or kind == "PageAllocator" else returned
        if not isinstance(copies, list) or not all(
            isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in copies
        ):
            raise TypeError(f"append returned {returned!r}; asked for is a list of (source, target) pairs")
        for source, target in copies:
            for offset in range(page_size):
                memory[int(target) * page_size + offset] = memory[int(source) * page_size + offset]
        before = tokens.get(name, [])
        mine = [(name, len(before) + i) for i in range(count)]
        tokens[name] = before + mine
        table = pages_of(name) or []
        for token in mine:
            if token[1] // page_size < len(table):
                memory[table[token[1] // page_size] * page_size + token[1] % page_size] = token
        copied = f", {len(copies)} copied" if kind == "SharingAllocator" else ""
        return recorded(name) + copied

    def fork(parent, child):
        book.fork(parent, child)
        tokens[child] = list(tokens[parent])
        return recorded(child)

    def free_pages():
        number = book.free_pages()
        if isinstance(number, (list, tuple, set, dict, str, type(None))):
            raise TypeError(f"free_pages returned {number!r}; asked for is how many they are")
        return int(number)

    def free(name):
        book.free(name)
        tokens.pop(name, None)
        return "done"

    for operation, name, *rest in script:
        told = " ".join(str(part) for part in (operation, name, *rest)) + ": "
        try:
            told += {"append": append, "fork": fork, "free": free}[operation](name, *rest)
        except (MemoryError, KeyError) as error:
            told += "MemoryError" if isinstance(error, MemoryError) else "KeyError"
            if name in tokens:
                told += f", {recorded(name)}"
        lost = trouble()
        story.append(f"{told}, {free_pages()} free{lost}")
        if lost:  # what comes after depends on which page is which
            story += ["not tried any more"] * (len(script) - len(story))
            break
        held = {page for holder in tokens for page in pages_of(holder) or ()}
        for slot in range(pages * page_size):  # what nobody holds is forgotten: no story depends on a page's past
            if slot // page_size not in held:
                memory[slot] = None
    if twice:
        story += ["a second allocator, made anew", *replay(functions, kind, pages, page_size, script)]
    return story


def told_by(allocator, *args) -> list[str]:
    """What the driver tells of an allocator of the judge's."""
    return replay({"PageAllocator": allocator, "SharingAllocator": allocator}, *args)


def allocated(slips: Slips, *args) -> list[str] | None:
    """A model's `compute`: what the driver tells of an allocator with these slips; None for an error."""
    try:
        return told_by(lambda pages, page_size: PageBook(pages, page_size, slips), *args)
    except (IndexError, KeyError, MemoryError):
        return None


def state_is_shared(case, seen, got) -> bool:
    """Whether of two allocators, made one after the other, the second does other things in the same script."""
    if "a second allocator, made anew" not in (got or ()):
        return False
    middle = got.index("a second allocator, made anew")
    return got[:middle] != got[middle + 1 :]


STATE_SHARED = (
    "Two allocators are not independent: the second, made anew, knew of the first one's sequences or pages. Make the "
    "lists and dicts in `__init__`, as attributes of self, and not in the class's body or outside it."
)


def names_that_are_false(case, seen, got) -> bool:
    """Whether a sequence of this case has a name that counts as false."""
    return isinstance(case.args[0], str) and any(not name for _, name, *_ in case.args[3])


NAME_TAKEN_FOR_NONE = (
    'Only the sequence with the name 0 went wrong. A name may be anything that a dict takes as a key, and 0 and "" '
    "count as false: ask `sequence in self.tables` or `is None`, and not whether the name is true."
)


LENGTH_BEFORE_REFUSAL = (
    "A refused append has raised the sequence's length. Nothing may change then: store the new length after the check."
)
REFUSED_WHERE_NONE_IS_FREE = (
    "An append is refused because no page is free, though it needs none: its tokens fit into the sequence's last page. "
    "Compare the pages that are needed with those that are free."
)


def pages_no_number(case, seen, got) -> bool:
    """Whether what should be a number of pages is none."""
    return bool(seen.error) and "free_pages returned" in seen.error.text


PAGES_NO_NUMBER = "`free_pages` returns the pages. Asked for is how many there are: len(...) of them."


def method_hidden(case, seen, got) -> bool:
    """Whether an attribute has taken the name of a method, which can then not be called."""
    return bool(seen.error) and "object is not callable" in seen.error.text


METHOD_HIDDEN = (
    "An attribute has the name of a method: after self.free_pages = [...] a call of free_pages() finds the list. Give "
    "the attribute another name."
)
