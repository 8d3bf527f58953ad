"""Wrong answers to exercise 16.7, and unusual right ones."""

from tests.submissions.edits import changed, edited

RADIX = """# Exercise 16.7 · Prefixes in a tree
class Run:
    def __init__(self, tokens, pages, parent, used=0, locks=0):
        self.tokens, self.pages, self.parent, self.used, self.locks = tokens, pages, parent, used, locks
        self.children = {}


class PrefixCache:
    def __init__(self, page_size):
        self.size, self.clock, self.root = page_size, 0, Run([], [], None)
        self.free = self.locked = 0  # pages that are not locked, and those that are

    def find(self, tokens, split=True):
        node, tokens = self.root, tokens[: len(tokens) // self.size * self.size]
        while tokens and tuple(tokens[: self.size]) in node.children:
            child = node.children[tuple(tokens[: self.size])]
            same = 0
            while same < len(child.pages) and child.tokens[same * self.size :][: self.size] == (
                tokens[same * self.size :][: self.size]
            ):
                same += 1
            if same < len(child.pages) and split:
                child = self.split(child, same)
            node, tokens = child, tokens[same * self.size :]
        return node

    def split(self, lower, pages):
        cut, parent = pages * self.size, lower.parent
        upper = Run(lower.tokens[:cut], lower.pages[:pages], parent, lower.used, lower.locks)
        parent.children[tuple(upper.tokens[: self.size])] = upper
        lower.tokens, lower.pages, lower.parent = lower.tokens[cut:], lower.pages[pages:], upper
        upper.children[tuple(lower.tokens[: self.size])] = lower
        return upper

    def match(self, tokens):
        self.clock += 1
        node, pages = self.find(tokens), []
        while node is not self.root:
            node.used = self.clock
            pages = node.pages + pages
            node = node.parent
        return pages

    def insert(self, tokens, pages):
        cached = self.match(tokens)
        end, begin = len(pages) * self.size, len(cached) * self.size
        if begin < end:
            node = self.find(tokens)
            node.children[tuple(tokens[begin : begin + self.size])] = Run(
                tokens[begin:end], pages[len(cached) :], node, self.clock
            )
            self.free += len(pages) - len(cached)
        return [mine for mine, theirs in zip(pages, cached) if mine != theirs]

    def lock(self, tokens):
        node = self.find(tokens)
        while node is not self.root:
            if node.locks == 0:
                self.free -= len(node.pages)
                self.locked += len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, tokens):
        node = self.find(tokens)
        while node is not self.root:
            node.locks -= 1
            if node.locks == 0:
                self.free += len(node.pages)
                self.locked -= len(node.pages)
            node = node.parent

    def evictable(self):
        return self.free

    def evict(self, count):
        given, count = [], min(count, self.free)
        while len(given) < count:
            todo, leaves = [self.root], []
            while todo:
                node = todo.pop()
                todo.extend(node.children.values())
                if node is not self.root and not node.children and not node.locks:
                    leaves.append(node)
            if not leaves:
                break
            leaf = min(leaves, key=lambda leaf: leaf.used)
            taken = min(count - len(given), len(leaf.pages))
            first = tuple(leaf.tokens[: self.size])
            kept = len(leaf.pages) - taken
            given += leaf.pages[kept:]
            leaf.pages, leaf.tokens = leaf.pages[:kept], leaf.tokens[: kept * self.size]
            self.free -= taken
            if not leaf.pages:
                del leaf.parent.children[first]
        return given
"""
CHAINS = """# Exercise 16.7 · Prefixes in a tree
class PrefixCache:
    def __init__(self, page_size):
        self.page_size, self.now = page_size, 0
        self.entries = {}  # chain -> [page, chain before, locks, used]

    def chains(self, tokens):
        chain, all_of_them = None, []
        for number in range(len(tokens) // self.page_size):
            part = tokens[number * self.page_size : (number + 1) * self.page_size]
            chain = (chain, tuple(part))
            all_of_them.append(chain)
        return all_of_them

    def match(self, tokens):
        self.now += 1
        pages = []
        for chain in self.chains(tokens):
            if chain not in self.entries:
                return pages
            self.entries[chain][3] = self.now
            pages.append(self.entries[chain][0])
        return pages

    def insert(self, tokens, pages):
        self.now += 1
        duplicates = []
        for chain, page in zip(self.chains(tokens), pages):
            entry = self.entries.setdefault(chain, [page, chain[0], 0, 0])
            entry[3] = self.now
            if entry[0] != page:
                duplicates.append(page)
        return duplicates

    def lock(self, tokens):
        for chain in self.chains(tokens):
            self.entries[chain][2] += 1

    def unlock(self, tokens):
        for chain in self.chains(tokens):
            self.entries[chain][2] -= 1

    def evictable(self):
        return len([entry for entry in self.entries.values() if not entry[2]])

    def evict(self, count):
        gone = []
        for _ in range(count):
            parents = {entry[1] for entry in self.entries.values()}
            oldest = None
            for chain, entry in self.entries.items():
                if chain in parents or entry[2]:
                    continue
                if oldest is None or entry[3] < self.entries[oldest][3]:
                    oldest = chain
            if oldest is None:
                return gone
            gone.append(self.entries.pop(oldest)[0])
        return gone
"""
SKIPS = """            node = node.parent
            if node.locks == 0:
                self.free -= len(node.pages)
                self.locked += len(node.pages)
            node.locks += 1
"""
LOOP = """            if node.locks == 0:
                self.free -= len(node.pages)
                self.locked += len(node.pages)
            node.locks += 1
            node = node.parent
"""
DUPLICATES = "[page for page, node in zip(pages, nodes) if page != node.page]"
LOCK, UNLOCK = "        for node in self.path(tokens):\n            node.locks += 1", (
    "        for node in self.path(tokens):\n            node.locks -= 1"
)
WALK = "for begin in range(0, len(tokens) - self.page_size + 1, self.page_size):"
ANY_FIRST = "node = next((child for part, child in node.behind.items() if part[: len({0})] == tuple({0})), None)"
GET = "node = node.behind.get(tuple(tokens[begin : begin + self.page_size]))"
ONCE = (
    ("        while len(gone) < count:\n            waiting, ends = [self.root], []\n", "        waiting, ends = "
     "[self.root], []\n        if count:\n"),
    ("            if not ends:\n                break\n            _, page, parent, part = min(ends, key=lambda end: "
     "end[0])\n", "        for _, page, parent, part in sorted(ends, key=lambda end: end[0])[:count]:\n"),
)
COUNTED = """        todo, free = [self.root], 0
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            free += 0 if node.locks else len(node.pages)
        return free
"""

WRONG = {
    # mini-sglang#52: the loop steps to the parent first.
    "end_not_locked": changed(
        "16.7", (LOCK, LOCK.replace("(tokens)", "(tokens)[:-1]")), (UNLOCK, UNLOCK.replace("(tokens)", "(tokens)[:-1]"))
    ),
    "end_not_locked__but_unlocked": changed("16.7", (LOCK, LOCK.replace("(tokens)", "(tokens)[:-1]"))),
    "locked_too_little": edited(RADIX, (LOOP, SKIPS.replace("            node = node.parent\n", "            node = "
        "node.parent\n            if node is self.root:\n                break\n"))),
    # sglang#10637: a split changes one counter only; and its kin.
    "split_changes_locks": edited(RADIX, ("parent, lower.used, lower.locks)", "parent, lower.used)")),
    "split_changes_locks__counter": edited(
        RADIX, ("        return upper\n", "        self.free -= pages\n        return upper\n")
    ),
    "locked_too_little__its_own_node_alone": edited(
        RADIX, (LOOP, LOOP.replace("            node = node.parent\n", "            break\n"))
    ),
    # bytedance-iaas/sglang#508: a partial match without a split.
    "locked_too_much": edited(RADIX, *(
        (f"    def {name}(self, tokens):\n        node = self.find(tokens)",
         f"    def {name}(self, tokens):\n        node = self.find(tokens, split=False)") for name in ("lock", "unlock")
    )),
    # sglang#28692: a key that is cut to whole pages is empty, and matches.
    "empty_key_matched": changed("16.7", (WALK, "for begin in range(0, len(tokens) + 1, self.page_size):"),
        (GET, "key = tokens[begin : begin + self.page_size]\n            key = key if len(key) == self.page_size else "
        "[]\n            " + ANY_FIRST.format("key"))),
    "part_of_a_page_matched": changed("16.7", (WALK, "for begin in range(0, len(tokens), self.page_size):"),
        (GET, ANY_FIRST.format("tokens[begin : begin + self.page_size]"))),
    # mini-sglang#142: what the table still names is handed back to be freed.
    "cached_pages_freed": changed("16.7", (DUPLICATES, "[page for page, node in zip(pages, nodes)]")),
    "cached_for_own": changed("16.7", (DUPLICATES, DUPLICATES.replace("[page", "[node.page"))),
    "duplicates_lost": changed("16.7", (DUPLICATES, "[]")),
    "replaced": changed("16.7", ("        self.match(tokens)\n", "        cached = self.match(tokens)\n"),
        ("node.used = self.clock\n        return [page for", "node.used, node.page = self.clock, page\n        return "
        "[page for"), (DUPLICATES, "[page for page, kept in zip(pages, cached) if page != kept]")),
    # Avarok-Cybersecurity/atlas#373: counted on another node.
    "end_alone_locked": changed("16.7", (LOCK, LOCK.replace("(tokens)", "(tokens)[-1:]")),
        (UNLOCK, UNLOCK.replace("(tokens)", "(tokens)[-1:]"))),
    "stays_locked__but_for_the_end": changed("16.7", (UNLOCK, UNLOCK.replace("(tokens)", "(tokens)[-1:]"))),
    "stays_locked__the_end": changed("16.7", (UNLOCK, UNLOCK.replace("(tokens)", "(tokens)[:-1]"))),
    "flag_for_a_count": changed("16.7", ("locks += 1", "locks = 1"), ("locks -= 1", "locks = 0")),
    # sglang#26939: a cached list is handed out, and the caller extends it.
    "list_shared": edited(RADIX, ("pages = node.pages + pages", "pages = node.pages + pages if pages else node.pages")),
    "list_shared__kept": edited(RADIX, ("pages[len(cached) :], node,", "pages[len(cached) :] if cached else pages, "
        "node,")),
    "lock_is_a_use": changed("16.7", (LOCK, LOCK + "\n        self.match(tokens)")),
    "stays_locked": changed("16.7", ("locks -= 1", "locks -= 0")),
    "beginning_ignored": edited(CHAINS, ("chain = (chain, tuple(part))", "chain = (None, tuple(part))")),
    "found_is_no_use": changed("16.7", ("            node.used = self.clock\n        return [node.page",
        "            pass\n        return [node.page"), ("            node.used = self.clock\n        return [page",
        "            node.used = node.used or self.clock\n        return [page")),
    "found_is_no_use__by_match": changed("16.7", ("            node.used = self.clock\n        return [node.page",
        "            pass\n        return [node.page")),
    "found_is_no_use__by_insert": changed("16.7", ("        self.match(tokens)\n", "        self.clock += 1\n"),
        ("            node.used = self.clock\n        return [page", "            node.used = node.used or self.clock\n"
        "        return [page")),
    "end_alone_used": changed("16.7", ("        for node in nodes:\n            node.used", "        for node in "
        "nodes[-1:]:\n            node.used"), ("            node.used = self.clock\n        return [page",
        "            node.used = node.used or self.clock\n        node.used = self.clock\n        return [page")),
    # What a page is found by, in place of all its tokens in order.
    **{
        f"other_tokens__{name}": changed("16.7", (GET, GET.replace("tuple(", f"{made}(")),
            ("part = tuple(tokens", f"part = {made}(tokens"), ("class PrefixCache:", f"{helper}class PrefixCache:"))
        for name, made, helper in (
            ("sorted", "in_order", "def in_order(part):\n    return tuple(sorted(part))\n\n\n"),
            ("a_set", "frozenset", ""), ("sum", "sum", ""),
            ("joined", "joined", "def joined(part):\n    return ''.join(map(str, part))\n\n\n"),
            ("hash", "hashed", "def hashed(part):\n    return hash(tuple(part))\n\n\n"),
            ("first", "first", "def first(part):\n    return part[0]\n\n\n"),
            ("last", "last", "def last(part):\n    return part[-1]\n\n\n"),
        )
    },
    "page_0_left_out": changed("16.7", ("node.page is not None and", "bool(node.page) and")),
    "page_0_left_out__by_evict": changed("16.7", ("if not node.behind and", "if node.page and not node.behind and")),
    "objects_compared": changed("16.7", ("page != node.page", "page is not node.page")),
    "ends_found_once": changed("16.7", *ONCE),
    "lowest_number_first": changed("16.7", ("key=lambda end: end[0]", "key=lambda end: end[1]")),
    "other_duplicates__sorted": changed("16.7", (DUPLICATES, f"sorted({DUPLICATES})")),
    # Three at once: the one that is told is that of the case shown.
    "other_duplicates__and_ends_found_once": changed("16.7", (DUPLICATES, "[page for page, node in zip(pages, nodes)]"),
        ("        self.match(tokens)\n", "        self.clock += 1\n"), ("            node.used = self.clock\n        "
        "return [page", "            node.used = node.used or self.clock\n        return [page"), *ONCE),
    "split_changes_locks__lower_part": edited(RADIX, ("        return upper\n", "        lower.locks = 0\n        "
        "return upper\n"), ("        return self.free\n", COUNTED)),
    "newest_first": changed("16.7", ("min(ends", "max(ends")),
    "locks_ignored": changed("16.7", ("not node.behind and node.locks == 0", "not node.behind")),
    "middle_given_up": changed("16.7", ("not node.behind and node.locks == 0", "node.locks == 0")),
    "state_shared": edited(CHAINS, ("        self.entries = {}", "        pass"),
        ("class PrefixCache:", "class PrefixCache:\n    entries = {}")),
    "pages_not_found": edited(RADIX, ("                child = self.split(child, same)\n", "                break\n")),
    "pages_not_found__behind_a_split": edited(RADIX, ("        upper.children[tuple(lower.tokens[: self.size])] = "
        "lower\n", "")),
    "other_number_given_up": edited(RADIX, ("taken = min(count - len(given), len(leaf.pages))", "taken = "
        "len(leaf.pages)")),
    "other_order": edited(RADIX, ("parent, lower.used, lower.locks)", "parent, 0, lower.locks)")),
}  # fmt: skip
UNUSUAL = {
    "a radix tree with two counters": RADIX,
    "a dict of hash chains": CHAINS,
    "a list of texts": """# Exercise 16.7 · Prefixes in a tree
class PrefixCache:
    def __init__(self, page_size):
        self.n = page_size
        self.rows = []  # dicts: the text up to a page's end, its page, its locks; those used last stand last

    def _found(self, tokens):
        whole = {tuple(tokens[:end]) for end in range(self.n, len(tokens) + 1, self.n)}
        return sorted((row for row in self.rows if row["text"] in whole), key=lambda row: len(row["text"]))

    def match(self, tokens):
        found = self._found(tokens)
        self.rows = [row for row in self.rows if row not in found] + found[::-1]
        return [row["page"] for row in found]

    def insert(self, tokens, pages):
        cached = self.match(tokens)
        for number in range(len(pages) - 1, len(cached) - 1, -1):
            text = tuple(tokens[: (number + 1) * self.n])
            self.rows.append({"text": text, "page": pages[number], "locks": 0})
        self.match(tokens)
        return [page for page in pages[: len(cached)] if page not in cached]

    def lock(self, tokens, by=1):
        for row in self._found(tokens):
            row["locks"] += by

    def unlock(self, tokens):
        self.lock(tokens, by=-1)

    def evictable(self):
        return sum(not row["locks"] for row in self.rows)

    def evict(self, count):
        free = [row for row in self.rows if not row["locks"]]
        gone = []
        while len(gone) < count and free:
            for row in free:
                longer = [one for one in self.rows if one["text"][: -self.n] == row["text"]]
                if not longer:
                    break
            free.remove(row)
            self.rows.remove(row)
            gone.append(row["page"])
        return gone
""",
}
