"""Allocators of pages: the judge's own, its slips, and the driver that turns any allocator into comparable words.

Which page an allocator picks is its own affair. So a script of operations is replayed, and what is told of each is what
every right allocator has in common: what the call did or raised, how long the sequence is, in how many pages, how many
are free. For sharing, a memory of slots runs beside it, in which every token must be found again.
"""

from __future__ import annotations

from course_lib.checker import edits


class PageBook:
    """An allocator for both exercises."""

    def __init__(self, pages, page_size):
        self.pages, self.page_size = pages, page_size
        self.unused, self.holders = list(range(pages)), [0] * pages
        self.tables, self.lengths = {}, {}

    def append(self, sequence, count):
        table, length = self.tables.get(sequence, []), self.lengths.get(sequence, 0)
        copying = bool(table) and length % self.page_size > 0 and self.holders[table[-1]] > 1
        more = -(-(length + count) // self.page_size) - len(table)
        if more + copying > len(self.unused):
            raise MemoryError
        taken, copies = [self.take() for _ in range(more + copying)], []
        if copying:
            source, target = table[-1], taken.pop()
            table[-1] = target
            self.holders[source] -= 1
            copies.append((source, target))
        table.extend(taken)
        self.tables[sequence] = table
        self.lengths[sequence] = length + count
        return copies

    def take(self):
        page = self.unused.pop()
        self.holders[page] = 1
        return page

    def fork(self, parent, child):
        table = self.tables[parent]
        self.tables[child] = list(table)
        self.lengths[child] = self.lengths[parent]
        for page in table:
            self.holders[page] += 1

    def free(self, sequence):
        for page in self.tables.pop(sequence):
            self.let_go(page)
        del self.lengths[sequence]

    def let_go(self, page):
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self.unused.append(page)

    def table(self, sequence):
        return list(self.tables[sequence])

    def length(self, sequence):
        return self.lengths[sequence]

    def free_pages(self):
        return len(self.unused)


def told(kind, pages, page_size, script, twice=False):
    """What the driver tells of the judge's allocator; None where a slip leaves it without what it looks for."""
    try:
        return replay({kind: PageBook}, kind, pages, page_size, script, twice)
    except IndexError:
        return None


def scripted(kind, pages, page_size, script):
    """Arguments of `replay`: of a script such as "append a 5; fork a b; free a", in which numbers are no strings."""
    operations = [operation.split() for operation in script.split(";")]
    return kind, pages, page_size, [tuple(int(x) if x.isdigit() else x for x in words) for words in operations]


# ------------------------------------------------------------------------------------------------ slips of both

REFUSED, NEEDED = "raise MemoryError", "if more + copying > len(self.unused):"
TAKE, LET_GO = "self.unused.pop()", "if self.holders[page] == 0:"
HELD, FORGOTTEN = "self.tables.pop(sequence)", "del self.lengths[sequence]"
HALF_APPENDED = {
    "half_appended": (REFUSED, "self.tables[sequence] = table\ntaken = [self.take() for _ in list(self.unused)]\n"
        "table.extend(() if copying else taken)\nraise MemoryError"),
    "half_appended__lost": (REFUSED, "self.tables[sequence] = table\nself.unused.clear()\nraise MemoryError"),
    "half_appended__length_first": (NEEDED,
        f"self.tables[sequence], self.lengths[sequence] = table, length + count\n{NEEDED}"),
    "half_appended__token_by_token": (REFUSED,
        "fitting = (len(table) + len(self.unused) - copying) * self.page_size - length\n"
        "if fitting > 0:\n    self.append(sequence, fitting)\nraise MemoryError"),
}  # fmt: skip
DOUBLE_FREE = {
    "double_free": (HELD, "self.tables.pop(sequence, [])", FORGOTTEN, "self.lengths.pop(sequence, None)"),
    "double_free__emptied": (HELD, "self.tables[sequence]", FORGOTTEN,
        "self.tables[sequence], self.lengths[sequence] = [], 0"),
}  # fmt: skip
PAGES_NOT_RETURNED = ("self.unused.append(page)", "pass")
REFUSALS = (
    *edits("A refused append has raised the sequence's length. Nothing may change then: store the new length after "
        "the check.", half_appended__length_alone=(NEEDED, f"self.lengths[sequence] = length + count\n{NEEDED}")),
    *edits("A new sequence whose first append was refused is recorded all the same, with no page. So `free` finds it, "
        "but should raise KeyError. Record it only after the check.",
        refused_one_stays=(REFUSED,
            "self.tables[sequence], self.lengths[sequence] = table, length\nraise MemoryError")),
    *edits("An append is refused because no page is free, though it needs none: its tokens fit into the sequence's "
        "last page. Compare the pages that are needed with those that are free.",
        refused_where_none_is_free=(NEEDED, "if not self.unused or more + copying > len(self.unused):")),
)  # fmt: skip

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
