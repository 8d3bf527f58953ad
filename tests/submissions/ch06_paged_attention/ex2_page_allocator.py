"""Wrong answers to exercise 6.2, and unusual right ones."""

from tests.submissions.edits import changed

MORE = "more = -(-length // self.page_size) - len(self.pages_of.get(sequence, []))"


CHECK = (
    '        if more > len(self.unused):\n            raise MemoryError(f"{sequence} needs {more} more pages, and '
    '{len(self.unused)} are free")\n'
)


EXTEND = "self.pages_of.setdefault(sequence, []).extend(self.unused.pop() for _ in range(more))"


FREE = "self.unused.extend(self.pages_of.pop(sequence))\n        del self.length_of[sequence]"


WRONG = {
    "name_taken_for_none": changed(
        "6.2",
        (
            "length = self.length_of.get(sequence, 0) + count",
            "length = (sequence and self.length_of.get(sequence, 0) or 0) + count",
        ),
    ),
    "pages_no_number": changed("6.2", ("return len(self.unused)", "return self.unused")),
    "half_appended__length_alone": changed(
        "6.2",
        (CHECK, "        self.length_of[sequence] = length\n" + CHECK),
    ),
    "refused_where_none_is_free": changed(
        "6.2", ("if more > len(self.unused):", "if more > len(self.unused) or not self.unused:")
    ),
    "refused_one_freed": changed(
        "6.2",
        (
            CHECK,
            CHECK.replace(
                "            raise",
                "            if sequence in self.pages_of:\n                self.free(sequence)\n            raise",
            ),
        ),
    ),
    "room_counted_in_tokens": changed(
        "6.2", ("if more > len(self.unused):", "if count > len(self.unused) * self.page_size:")
    ),
    "table_sorted__set": changed("6.2", ("return self.pages_of[sequence]", "return set(self.pages_of[sequence])")),
    "by_shift": changed(
        "6.2",
        (MORE, "more = ((length - 1) >> (self.page_size.bit_length() - 1)) + 1 - len(self.pages_of.get(sequence, []))"),
    ),
    "new_pages_in_front": changed(
        "6.2",
        ('.extend(self.unused.pop() for _ in range(more))', '[0:0] = [self.unused.pop() for _ in range(more)]'),
    ),
    "half_appended": changed(
        "6.2",
        (CHECK, ""),
        (
            EXTEND,
            "table = self.pages_of.setdefault(sequence, [])\n        for _ in range(more):\n"
            "            if not self.unused:\n                raise MemoryError('full')\n"
            "            table.append(self.unused.pop())",
        ),
    ),
    "half_appended__length_first": changed(
        "6.2",
        (CHECK, "        self.length_of[sequence] = length\n" + CHECK),
        (
            "self.length_of.get(sequence, 0) + count",
            "self.length_of.get(sequence, 0) + count\n        self.pages_of.setdefault(sequence, [])",
        ),
    ),
    "pages_for_every_append": changed("6.2", (MORE, "more = -(-count // self.page_size)")),
    "pages_for_every_append__nothing_subtracted": changed("6.2", (MORE, "more = -(-length // self.page_size)")),
    "one_page_at_most": changed("6.2", (MORE, "more = 1 if (length - count) % self.page_size == 0 else 0")),
    "refused_one_stays": changed(
        "6.2",
        ("self.pages_of.get(sequence, [])", "self.pages_of.setdefault(sequence, [])"),
        ("        del self.length_of[sequence]", "        self.length_of.pop(sequence, None)"),
    ),
    "not_refused": changed("6.2", (CHECK, "        if more > len(self.unused):\n            return False\n")),
    "attribute_hides_method": changed(
        "6.2",
        ("self.unused = list", "self.free_pages = list"),
        ("len(self.unused):", "len(self.free_pages):"),
        ("self.unused.pop()", "self.free_pages.pop()"),
        ("self.unused.extend", "self.free_pages.extend"),
    ),
    "one_page_too_many": changed(
        "6.2", (MORE, "more = length // self.page_size + 1 - len(self.pages_of.get(sequence, []))")
    ),
    "pages_rounded_down": changed(
        "6.2", (MORE, "more = length // self.page_size - len(self.pages_of.get(sequence, []))")
    ),
    "pages_rounded_down__for_every_append": changed("6.2", (MORE, "more = count // self.page_size")),
    "pages_not_returned": changed(
        "6.2", ("self.unused.extend(self.pages_of.pop(sequence))", "self.pages_of.pop(sequence)")
    ),
    "double_free": changed(
        "6.2", (FREE, "self.unused.extend(self.pages_of.pop(sequence, []))\n        self.length_of.pop(sequence, None)")
    ),
    "double_free__table_kept": changed("6.2", (FREE, "self.unused.extend(self.pages_of[sequence])")),
    "double_free__empty_table_kept": changed(
        "6.2",
        (
            FREE,
            "self.unused.extend(self.pages_of.get(sequence, []))\n        self.pages_of[sequence] = []\n"
            "        self.length_of[sequence] = 0",
        ),
    ),
    "length_survives_free": changed("6.2", ("\n        del self.length_of[sequence]", "")),
    "page_in_two_tables": changed("6.2", ("self.unused.pop() for _", "self.unused[-1] for _")),
    "page_in_two_tables__a_counter": changed(
        "6.2",
        ("self.unused.pop() for _ in range(more))", "self.next_page() for _ in range(more))"),
        (
            "    def free(self",
            "    def next_page(self):\n        page = len(self.pages_of) % 8\n"
            "        self.unused.pop()\n        return page\n\n    def free(self",
        ),
    ),
    "last_page_never_used": changed("6.2", ("if more > len(self.unused):", "if more and more >= len(self.unused):")),
    "new_sequence_refused": changed("6.2", ("self.length_of.get(sequence, 0)", "self.length_of[sequence]")),
    "length_from_pages": changed(
        "6.2", ("return self.length_of[sequence]", "return len(self.pages_of[sequence]) * self.page_size")
    ),
    "other_exception": changed("6.2", ("raise MemoryError(", "raise RuntimeError(")),
    "other_exception__assert": changed(
        "6.2",
        (
            "self.unused.extend(self.pages_of.pop(sequence))",
            "assert sequence in self.pages_of\n        self.unused.extend(self.pages_of.pop(sequence))",
        ),
    ),
    "pool_not_checked": changed("6.2", (CHECK, "")),
    "half_appended__token_by_token": """# Exercise 6.2 · An allocator of pages
class PageAllocator:
    def __init__(self, pages, page_size):
        self.page_size, self.unused, self.tables, self.lengths = page_size, list(range(pages)), {}, {}

    def append(self, sequence, count):
        for _ in range(count):
            length = self.lengths.get(sequence, 0)
            if length % self.page_size == 0:
                if not self.unused:
                    raise MemoryError("no page")
                self.tables.setdefault(sequence, []).append(self.unused.pop())
            self.lengths[sequence] = length + 1

    def free(self, sequence):
        self.unused += self.tables.pop(sequence)
        del self.lengths[sequence]

    def table(self, sequence):
        return self.tables[sequence]

    def length(self, sequence):
        return self.lengths[sequence]

    def free_pages(self):
        return len(self.unused)
""",
}


WRONG |= {
    "state_shared": changed(
        "6.2",
        (
            "    def __init__(self, pages, page_size):",
            "    pages_of = {}\n    length_of = {}\n\n    def __init__(self, pages, page_size):",
        ),
        (
            "        self.pages_of = {}  # sequence -> its pages, in the order of its tokens\n"
            "        self.length_of = {}\n",
            "",
        ),
    ),
    "pages_for_every_append__and_double_free": changed(
        "6.2",
        (MORE, "more = -(-count // self.page_size)"),
        (FREE, "self.unused.extend(self.pages_of.pop(sequence, []))\n        self.length_of.pop(sequence, None)"),
    ),
}


UNUSUAL = {
    "lowest page first": changed("6.2", ("self.unused.pop() for", "self.unused.pop(0) for")),
    "owner of each page": """# Exercise 6.2 · An allocator of pages
class PageAllocator:
    def __init__(self, pages, page_size):
        self.owner, self.page_size, self.count, self.order = [None] * pages, page_size, {}, {}
    def append(self, sequence, count):
        after = self.count.get(sequence, 0) + count
        have = self.order.get(sequence, ())
        need = (after + self.page_size - 1) // self.page_size - len(have)
        free = [page for page, owner in enumerate(self.owner) if owner is None]
        if need > len(free):
            raise MemoryError
        for page in free[:need]:
            self.owner[page] = sequence
        self.order[sequence] = (*have, *free[:need])
        self.count[sequence] = after
    def free(self, sequence):
        if sequence not in self.count:
            raise KeyError(sequence)
        self.owner = [None if owner == sequence else owner for owner in self.owner]
        del self.count[sequence], self.order[sequence]
    def table(self, sequence):
        return self.order[sequence]
    def length(self, sequence):
        return self.count[sequence]
    def free_pages(self):
        return sum(owner is None for owner in self.owner)
""",
    "one step at a time, undone when refused": """# Exercise 6.2 · An allocator of pages
class PageAllocator:
    def __init__(self, pages, page_size):
        self.free_set, self.page_size, self.state = set(range(pages)), page_size, {}
    def append(self, sequence, count):
        table, length = self.state.get(sequence, ([], 0))
        taken = []
        while (len(table) + len(taken)) * self.page_size < length + count:
            if not self.free_set:
                self.free_set.update(taken)
                raise MemoryError("no page left")
            taken.append(self.free_set.pop())
        self.state[sequence] = (table + taken, length + count)
    def free(self, sequence):
        table, _ = self.state.pop(sequence)
        self.free_set |= set(table)
    def table(self, sequence):
        return self.state[sequence][0]
    def length(self, sequence):
        return self.state[sequence][1]
    def free_pages(self):
        return len(self.free_set)
""",
    "tables as tensors": changed(
        "6.2", ("return self.pages_of[sequence]", "return torch.tensor(self.pages_of[sequence], dtype=torch.int32)")
    ),
    "what append returns is its own affair": changed(
        "6.2",
        (
            "self.length_of[sequence] = length\n",
            "self.length_of[sequence] = length\n        return self.pages_of[sequence]\n",
        ),
    ),
    "an exception of its own": changed(
        "6.2",
        ("class PageAllocator:", "class PoolIsFull(MemoryError):\n    pass\n\n\nclass PageAllocator:"),
        ("raise MemoryError(", "raise PoolIsFull("),
    ),
}


WRONG |= {
    "pages_at_multiples_alone": changed(
        "6.2", (MORE, "starts = range(length - count, length, self.page_size)\n"
                      "        more = sum(token % self.page_size == 0 for token in starts)")
    ),
}
UNUSUAL |= {
    "pages counted by the tokens that begin one": changed(
        "6.2", (MORE, "more = sum(token % self.page_size == 0 for token in range(length - count, length))")
    ),
}
