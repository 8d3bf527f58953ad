"""Allocators of pages: the judge's own, its slips, and the driver that turns any allocator into comparable words.

Which page an allocator picks is its own affair. So a script of operations is replayed, and what is told of each is what
every right allocator has in common: what the call did or raised, how long the sequence is, in how many pages, how many
are free. For sharing, a memory of slots runs beside it, in which every token must be found again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


class PageBook:
    """A right allocator, for both exercises; each method asks its slips, so that a subclass changes one thing."""

    def __init__(self, pages, page_size):
        self.pages, self.page_size = pages, page_size
        self.unused = list(range(pages))
        self.holders = [0] * pages
        self.tables, self.lengths = {}, {}

    # ---------------------------------------------------------------------------- what a slip changes

    def pages_more(self, sequence, count):
        """Pages that an append needs beside those that the sequence has."""
        after = -(-(self.lengths.get(sequence, 0) + count) // self.page_size)
        return after - len(self.tables.get(sequence, ()))

    def must_copy(self, sequence):
        """Whether an append writes into a page that others read."""
        length, table = self.lengths.get(sequence, 0), self.tables.get(sequence, [])
        return bool(table) and length % self.page_size > 0 and self.holders[table[-1]] > 1

    def check(self, needed):
        """Before anything is changed."""
        if needed > len(self.unused):
            raise MemoryError

    def take(self):
        page = self.unused.pop()
        self.holders[page] = 1
        return page

    def drop(self, page):
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self.unused.append(page)

    def copy_last(self, table):
        """A page of its own in place of the shared one; the pairs to copy."""
        source, table[-1] = table[-1], self.take()
        self.drop(source)
        return [(source, table[-1])]

    # ---------------------------------------------------------------------------- what the exercises ask for

    def append(self, sequence, count):
        copying = self.must_copy(sequence)
        more = self.pages_more(sequence, count)
        self.check(more + copying)
        table = self.tables.setdefault(sequence, [])
        copies = self.copy_last(table) if copying else []
        table.extend(self.take() for _ in range(more))
        self.lengths[sequence] = self.lengths.get(sequence, 0) + count
        return copies

    def fork(self, parent, child):
        self.tables[child], self.lengths[child] = list(self.tables[parent]), self.lengths[parent]
        for page in self.tables[child]:
            self.holders[page] += 1

    def free(self, sequence):
        table = self.tables.pop(sequence)
        del self.lengths[sequence]
        for page in table:
            self.drop(page)

    def table(self, sequence):
        return list(self.tables[sequence])

    def length(self, sequence):
        return self.lengths[sequence]

    def free_pages(self):
        return len(self.unused)


# ------------------------------------------------------------------------------------------------ the driver


def replay(functions, kind, pages, page_size, script):
    """Replay a script on an allocator and say of each operation what every right allocator has in common."""
    book = functions[kind](pages, page_size)
    memory = [None] * (pages * page_size)  # what each slot holds: (who wrote it, as which token)
    tokens, story = {}, []

    def counted(number):
        return f"{number} page" if number == 1 else f"{number} pages"

    def pages_of(name):
        table = [int(page) for page in book.table(name)]
        return table if all(0 <= page < pages for page in table) else None

    def trouble():
        for name, want in tokens.items():
            table = pages_of(name)
            if table is None:
                return f"; {name} has a page that does not exist"
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
        copies = list(returned or []) if kind == "SharingAllocator" else []
        if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in copies):
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
        return f"{book.length(name)} tokens in {counted(len(table))}{copied}"

    def fork(parent, child):
        book.fork(parent, child)
        tokens[child] = list(tokens[parent])
        return f"{book.length(child)} tokens in {counted(len(book.table(child)))}"

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
                told += f", {book.length(name)} tokens in {counted(len(book.table(name)))}"
        story.append(f"{told}, {int(book.free_pages())} free{trouble()}")
        held = {page for holder in tokens for page in pages_of(holder) or ()}
        for slot in range(pages * page_size):  # what nobody holds is forgotten: no story depends on a page's past
            if slot // page_size not in held:
                memory[slot] = None
    return story


def told_by(allocator: Callable, *args) -> list[str]:
    """What the driver tells of an allocator of the judge's."""
    return replay({"PageAllocator": allocator, "SharingAllocator": allocator}, *args)


def slip(base: type = PageBook, **methods) -> Callable:
    """A fingerprint: what the driver tells of an allocator with these methods in place of the right ones."""
    return partial(told_by, type("Slipped", (base,), methods))


def method_hidden(case, seen, got) -> bool:
    """Whether an attribute has taken the name of a method, which can then not be called."""
    return bool(seen.error) and "object is not callable" in seen.error.text


METHOD_HIDDEN = (
    "An attribute has the name of a method: after self.free_pages = [...] a call of free_pages() finds the list. Give "
    "the attribute another name."
)


def first_difference(case, got) -> tuple[str, str] | None:
    """The first line of a replayed script that is not as it should be: (the right one, the one that was told)."""
    if not isinstance(case.args[0], str):
        return None
    right = told_by(PageBook, *case.args)
    if not isinstance(got, list) or len(got) != len(right):
        return None
    return next(((want, mine) for want, mine in zip(right, got) if want != mine and isinstance(mine, str)), None)


# ------------------------------------------------------------------------------------------------ slips of both


def half_appended(self, needed):
    """Nothing is checked in advance: `take` raises in the middle, with pages gone already."""


def take_or_raise(self):
    if not self.unused:
        raise MemoryError
    return PageBook.take(self)
