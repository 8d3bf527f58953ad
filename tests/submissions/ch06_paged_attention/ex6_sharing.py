"""Wrong answers to exercise 6.6, and unusual right ones."""

from tests.submissions.edits import changed

COPYING = "copying = length % self.page_size > 0 and self.holders[table[-1]] > 1"


REFUSE = "if more + copying > len(self.unused):"


COPY = (
    "            source, table[-1] = table[-1], pages.pop()\n            self.holders[source] -= 1\n"
    "            copies = [(source, table[-1])]\n"
)


FREE_LOOP = "for page in self.pages_of.pop(sequence):"


WRONG = {
    "name_taken_for_none": changed(
        "6.6", ("self.length_of.get(sequence, 0)", "sequence and self.length_of.get(sequence, 0) or 0")
    ),
    "pages_no_number": changed("6.6", ("return len(self.unused)", "return self.unused")),
    "full_pages_copied_too": changed(
        "6.6",
        (
            "        self.pages_of[sequence] = table + pages\n",
            "        for place, page in enumerate(table if copying else ()):\n"
            "            if self.holders[page] > 1 and self.unused:\n"
            "                table[place] = self.unused.pop()\n"
            "                self.holders[table[place]], self.holders[page] = 1, self.holders[page] - 1\n"
            "                copies.append((page, table[place]))\n"
            "        self.pages_of[sequence] = table + pages\n",
        ),
    ),
    "pair_without_list__tuple": changed("6.6", ("        return copies", "        return tuple(copies)")),
    "copied_for_two_holders_alone": changed("6.6", (COPYING, COPYING.replace("> 1", "== 2"))),
    "holders_counted": changed("6.6", ("return len(self.unused)", "return len(self.holders) - sum(self.holders)")),
    "fork_counts_full_pages": changed(
        "6.6",
        (
            "self.length_of[child] = self.length_of[parent]",
            "self.length_of[child] = self.length_of[parent] // self.page_size * self.page_size",
        ),
    ),
    "fork_forgets_the_length": changed(
        "6.6", ("self.length_of[child] = self.length_of[parent]", "self.length_of[child] = 0")
    ),
    "refused_where_none_is_free": changed("6.6", (REFUSE, REFUSE.replace(":", " or not self.unused:"))),
    "hash_too_short": changed("6.6", ("[tuple(tokens[:end]) for", "[hash(tuple(tokens[:end])) % 65_536 for")),
    **{
        f"hash_too_short__crc32_{name}": changed(
            "6.6",
            ("    ends = ", "    import array, zlib\n    ends = "),
            ("[tuple(tokens[:end]) for", f"[(end, zlib.crc32({of})) for"),
        )
        for name, of in {
            "of_a_list": "repr(tokens[:end]).encode()",
            "of_a_tuple": "str((0, tuple(tokens[:end]))).encode()",
            "of_words": "' '.join(map(str, tokens[:end])).encode()",
            "of_commas": "','.join(map(str, tokens[:end])).encode()",
            "of_int32": "array.array('i', tokens[:end]).tobytes()",
            "of_int64": "array.array('q', tokens[:end]).tobytes(), 7",
            "of_network_order": "b''.join(token.to_bytes(4, 'big') for token in tokens[:end])",
            "of_network_order_in_8_bytes": "b''.join(token.to_bytes(8, 'big') for token in tokens[:end])",
        }.items()
    },
    "tokens_cut_to_bytes": changed("6.6", ("[tuple(tokens[:end]) for", "[bytes(t % 256 for t in tokens[:end]) for")),
    "keys_of_one_call": changed(
        "6.6", ("[tuple(tokens[:end]) for end in ends]", "[number for number, _ in enumerate(ends)]")
    ),
    "key_of_two_pages__and_place": changed(
        "6.6", ("[tuple(tokens[:end]) for", "[(end, tuple(tokens[max(0, end - 2 * page_size) : end])) for")
    ),
    "prompts_told_apart__by_all_tokens": changed("6.6", ("[tuple(tokens[:end]) for", "[(end, *tokens) for")),
    "prompts_told_apart": changed(
        "6.6",
        ('return [tuple(tokens[:end]) for end in ends]', 'return [(len(tokens), *tokens[:end]) for end in ends]'),
    ),
    "copy_on_write_forgotten": changed("6.6", (COPYING, "copying = False")),
    "copy_not_returned": changed("6.6", ("            copies = [(source, table[-1])]\n", "")),
    "copied_the_wrong_way": changed("6.6", ("copies = [(source, table[-1])]", "copies = [(table[-1], source)]")),
    "copy_not_in_table": changed(
        "6.6",
        (
            COPY,
            COPY.replace(
                "source, table[-1] = table[-1], pages.pop()", "source, target = table[-1], pages.pop()"
            ).replace("(source, table[-1])", "(source, target)"),
        ),
    ),
    "copied_without_need": changed("6.6", (COPYING, "copying = length % self.page_size > 0")),
    "full_page_copied": changed("6.6", (COPYING, "copying = bool(table) and self.holders[table[-1]] > 1")),
    "copied_at_fork": changed(
        "6.6",
        (
            "self.pages_of[child] = list(self.pages_of[parent])",
            "pages = self.pages_of[parent]\n        if len(pages) > len(self.unused):\n            raise MemoryError\n"
            "        self.pages_of[child] = [self.unused.pop() for _ in pages]",
        ),
    ),
    "copied_at_fork__last_page": changed(
        "6.6",
        (
            "        for page in self.pages_of[child]:\n            self.holders[page] += 1",
            "        for page in self.pages_of[child]:\n            self.holders[page] += 1\n"
            "        if self.unused:\n            self.holders[self.pages_of[child][-1]] -= 1\n"
            "            self.pages_of[child][-1] = self.unused.pop()\n"
            "            self.holders[self.pages_of[child][-1]] = 1",
        ),
    ),
    "old_page_kept": changed("6.6", ("            self.holders[source] -= 1\n", "")),
    "fork_not_counted": changed("6.6", ("self.holders[page] += 1", "pass")),
    "table_shared_not_copied": changed(
        "6.6",
        ("self.pages_of[child] = list(self.pages_of[parent])", "self.pages_of[child] = self.pages_of[parent]"),
        ("self.pages_of[sequence] = table + pages", "table.extend(pages)\n        self.pages_of[sequence] = table"),
    ),
    "freed_while_shared": changed(
        "6.6",
        (
            "            self.holders[page] -= 1\n            if self.holders[page] == 0:\n"
            "                self.unused.append(page)",
            "            self.holders[page] = 0\n            self.unused.append(page)",
        ),
    ),
    "pages_not_returned": changed("6.6", ("                self.unused.append(page)", "                pass")),
    "double_free": changed(
        "6.6",
        (FREE_LOOP, "for page in self.pages_of.pop(sequence, []):"),
        ("del self.length_of[sequence]", "self.length_of.pop(sequence, None)"),
    ),
    "double_free__table_kept": changed(
        "6.6",
        (FREE_LOOP, "for page in self.pages_of[sequence]:"),
        ("        del self.length_of[sequence]\n", ""),
    ),
    "copy_without_room": changed("6.6", (REFUSE, "if more > len(self.unused):")),
    "half_appended": changed(
        "6.6",
        (
            REFUSE,
            "self.length_of[sequence] = length + count\n        self.pages_of[sequence] = table\n        " + REFUSE,
        ),
    ),
    "new_page_not_counted": changed("6.6", ("        for page in pages:\n            self.holders[page] = 1\n", "")),
    "new_page_not_counted__the_copy": changed(
        "6.6",
        (
            "            copies = [(source, table[-1])]\n",
            "            self.holders[table[-1]] = 0\n            copies = [(source, table[-1])]\n",
        ),
    ),
    "attribute_hides_method": changed(
        "6.6", ("self.page_size = page_size", "self.page_size, self.table = page_size, {}")
    ),
    "key_of_two_pages": changed("6.6", ("tuple(tokens[:end])", "tuple(tokens[max(0, end - 2 * page_size):end])")),
    "last_full_page_missed": changed("6.6", ("range(page_size, len(tokens) + 1,", "range(page_size, len(tokens),")),
    "pair_without_list": changed("6.6", ("copies = [(source, table[-1])]", "copies = (source, table[-1])")),
    "digits_run_together": changed("6.6", ("tuple(tokens[:end])", "''.join(map(str, tokens[:end]))")),
    "key_not_hashable": changed("6.6", ("tuple(tokens[:end])", "list(tokens[:end])")),
    "key_of_the_page_alone": changed("6.6", ("tuple(tokens[:end])", "tuple(tokens[end - page_size:end])")),
    "key_by_place": changed("6.6", ("tuple(tokens[:end])", "(end, tuple(tokens[end - page_size:end]))")),
    "partial_page_has_a_key": changed(
        "6.6", ("range(page_size, len(tokens) + 1, page_size)", "range(page_size, len(tokens) + page_size, page_size)")
    ),
    "order_lost": changed("6.6", ("tuple(tokens[:end])", "tuple(sorted(tokens[:end]))")),
    "order_lost__sum": changed("6.6", ("tuple(tokens[:end])", "sum(tokens[:end])")),
    "table_shared_not_copied__until_append": changed("6.6", ("list(self.pages_of[parent])", "self.pages_of[parent]")),
}


WRONG |= {
    "state_shared": changed(
        "6.6",
        (
            "    def __init__(self, pages, page_size):",
            "    pages_of, length_of = {}, {}\n\n    def __init__(self, pages, page_size):",
        ),
        ("        self.pages_of, self.length_of = {}, {}\n", ""),
    ),
    "full_page_copied__and_pages_not_returned": changed(
        "6.6",
        (COPYING, "copying = bool(table) and self.holders[table[-1]] > 1"),
        ("                self.unused.append(page)", "                pass"),
    ),
}


UNUSUAL = {
    "holders as sets": """# Exercise 6.6 · Shared pages, copied when written
class SharingAllocator:
    def __init__(self, pages, page_size):
        self.size, self.held, self.tables, self.lengths = page_size, [set() for _ in range(pages)], {}, {}
    def unused(self):
        return [page for page, who in enumerate(self.held) if not who]
    def append(self, sequence, count):
        table = list(self.tables.get(sequence, []))
        start = self.lengths.get(sequence, 0)
        writes_shared = start % self.size != 0 and self.held[table[-1]] != {sequence}
        need = math.ceil((start + count) / self.size) - len(table) + writes_shared
        fresh = self.unused()[:need]
        if len(fresh) < need:
            raise MemoryError
        copies = []
        if writes_shared:
            copies = [(table[-1], fresh[0])]
            self.held[table[-1]].discard(sequence)
            table[-1] = fresh[0]
        table += fresh[writes_shared:]
        for page in table:
            self.held[page].add(sequence)
        self.tables[sequence], self.lengths[sequence] = table, start + count
        return copies
    def fork(self, parent, child):
        self.tables[child], self.lengths[child] = self.tables[parent][:], self.lengths[parent]
        for page in self.tables[child]:
            self.held[page].add(child)
    def free(self, sequence):
        del self.tables[sequence], self.lengths[sequence]
        for who in self.held:
            who.discard(sequence)
    def table(self, sequence):
        return self.tables[sequence]
    def length(self, sequence):
        return self.lengths[sequence]
    def free_pages(self):
        return len(self.unused())

def page_keys(tokens, page_size):
    keys, previous = [], None
    for i in range(len(tokens) // page_size):
        previous = (previous, tuple(tokens[i * page_size:(i + 1) * page_size]))
        keys.append(previous)
    return keys
""",
    "counted when needed": """# Exercise 6.6 · Shared pages, copied when written
class SharingAllocator:
    def __init__(self, pages, page_size):
        self.pages, self.page_size, self.of, self.n = range(pages), page_size, {}, {}
    def holders(self, page):
        return sum(page in table for table in self.of.values())
    def append(self, sequence, count):
        table, n = self.of.get(sequence, ()), self.n.get(sequence, 0)
        old = table[-1:] if n % self.page_size and self.holders(table[-1]) > 1 else ()
        kept = table[:len(table) - len(old)]
        need = -(-(n + count) // self.page_size) - len(kept)
        free = [page for page in self.pages if not self.holders(page)]
        if need > len(free):
            raise MemoryError("full")
        self.of[sequence], self.n[sequence] = (*kept, *free[:need]), n + count
        return [(page, free[0]) for page in old]
    def fork(self, parent, child):
        self.of[child], self.n[child] = self.of[parent], self.n[parent]
    def free(self, sequence):
        self.of.pop(sequence), self.n.pop(sequence)
    def table(self, sequence):
        return list(self.of[sequence])
    def length(self, sequence):
        return self.n[sequence]
    def free_pages(self):
        return sum(not self.holders(page) for page in self.pages)

def page_keys(tokens, page_size):
    import hashlib
    text = [str(token) for token in tokens]
    ends = [page_size * (i + 1) for i in range(len(text) // page_size)]
    return [hashlib.sha256(",".join(text[:end]).encode()).hexdigest() for end in ends]
""",
    "keys as a generator": changed(
        "6.6",
        ("return [tuple(tokens[:end]) for end in ends]", "yield from (hash(tuple(tokens[:end])) for end in ends)"),
    ),
    "lowest page first": changed("6.6", ("self.unused.pop() for", "self.unused.pop(0) for")),
    "nothing to copy is None": changed("6.6", ("return copies", "return copies or None")),
}


COUNTED = "in self.pages_of[child]:\n            self.holders[page] += 1"
DROPPED = "            self.holders[page] -= 1\n            if self.holders[page] == 0:\n"
WRONG |= {
    "flag_for_a_count": changed("6.6", (COUNTED, COUNTED.replace("+= 1", "= 2"))),
    "flag_for_a_count__for_ever": changed(
        "6.6",
        (COUNTED, COUNTED.replace("+= 1", "= 2")),
        (DROPPED, "            if self.holders[page] == 1:\n                self.holders[page] = 0\n"),
        ("            self.holders[source] -= 1\n", ""),
    ),
    "freed_while_shared__by_the_parent": changed(
        "6.6",
        (COUNTED, f"{COUNTED}\n        self.children.add(child)"),
        ("self.pages_of, self.length_of = {}, {}", "self.pages_of, self.length_of, self.children = {}, {}, set()"),
        (DROPPED, f"            if sequence not in self.children:\n                self.holders[page] = 1\n{DROPPED}"),
    ),
    "full_page_copied__and_no_other": changed(
        "6.6", ("copying = length % self.page_size > 0 and", "copying = length and length % self.page_size == 0 and")
    ),
}


WRONG |= {
    "tokens_rounded": changed(
        "6.6", ("tuple(tokens[:end]) for", "tuple(torch.tensor(tokens[:end], dtype=torch.float32).tolist()) for")
    ),
}
UNUSUAL |= {
    "tokens as bytes of 32 bits": changed("6.6", ("tuple(tokens[:end])", "np.array(tokens[:end], np.int32).tobytes()")),
}


LET_GO = DROPPED + "                self.unused.append(page)\n"
WRONG |= {
    "flag_for_a_count__or_not": changed(
        "6.6",
        ("self.holders = [0] * pages", "self.shared = set()\n        self.holders = [0] * pages"),
        (COUNTED, COUNTED.replace("self.holders[page] += 1", "self.shared.add(page)")),
        ("self.holders[table[-1]] > 1", "table[-1] in self.shared"),
        ("            self.holders[source] -= 1", "            self.shared.discard(source)"),
        (LET_GO, "            if page in self.shared:\n                self.shared.discard(page)\n"
                 "            else:\n                self.unused.append(page)\n"),
    ),
    "freed_while_shared__once": changed(
        "6.6",
        (LET_GO, "            self.holders[page] = 0\n            if page not in self.unused:\n"
                 "                self.unused.append(page)\n"),
    ),
}
