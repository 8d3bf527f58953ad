"""Exercise 6.6: an allocator whose sequences share pages and copy what they write, and keys to find pages again."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch06_paged_attention.bookkeeping import (
    DOUBLE_FREE,
    FORGOTTEN,
    HALF_APPENDED,
    HELD,
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


MANY = "1,600 pages of one token"
SAME_CRC = "pages of two tokens with one CRC-32"
# Pages in twos that have one CRC-32, whatever stands before and behind them, as these bytes.
OF_ONE_CRC = (
    ([1829538934, 1204495757], [1585911337, 1622065787]),  # the text "1829538934, 1204495757"
    ([1090729133, 1031734329], [1582108845, 1207214547]),  # with a comma alone
    ([1837782188, 1567411496], [1154677104, 1241890919]),  # with a space alone
    ([1511683454, 1781902290], [1038165156, 1782348325]),  # int32, the low byte first
    ([1949670325, 1513937278], [2043794521, 1229287909]),  # int64
    ([1936169699, 1084647585], [1836992119, 1573107416]),  # int32, the high byte first
    ([1212798662, 1533064185], [1873239152, 1411134329]),  # int64
)


def sharing_cases(draw):
    def case(name, pages, page_size, script):
        return Case(name, scripted("SharingAllocator", pages, page_size, script), "SharingAllocator", replay)

    def keys(name, page_size, *prompts):
        return Case(name, (list(map(list, prompts)), page_size), "page_keys", key_pattern)

    def sixty(pages, page_size):
        arguments = "SharingAllocator", pages, page_size, fitting(pages, page_size, random)
        return Case(f"60 operations, pages of {page_size}", arguments, "SharingAllocator", replay)

    start = [draw.integer(0, 50000) for _ in range(12)]
    random = random_forks(draw, 60, 9)
    shared = "append a 6; fork a b"
    return [
        case("one sequence shares nothing", 4, 4, "append a 5; append a 3; append a 1"),
        Case(
            "two allocators, one after the other",
            (*scripted("SharingAllocator", 4, 4, f"{shared}; append b 1"), True),
            "SharingAllocator",
            replay,
        ),
        case("a fork takes no page", 4, 4, shared),
        case("the child writes into the last page", 6, 4, f"{shared}; append b 1; append a 1; append b 1"),
        case("the parent writes first", 6, 4, f"{shared}; append a 3; append b 1"),
        case("the last page is full: nothing to copy", 6, 4, "append a 8; fork a b; append b 1; append a 2"),
        case(
            "three children of one parent",
            *(8, 4, f"{shared}; fork a c; fork a d; append b 1; append c 1; append d 1; append a 1"),
        ),
        case(
            "the parent is freed, the child reads on",
            *(4, 4, f"{shared}; free a; append c 4; append b 1; free b; append d 4"),
        ),
        case(
            "a child of a child",
            *(8, 4, "append a 2; fork a b; append b 1; fork b c; append c 5; append b 1; free b"),
        ),
        case("no room for the copy", 2, 4, f"{shared}; append b 1; free a; append b 1"),
        case("room for the tokens, not for the copy too", 3, 4, f"{shared}; append b 3; append a 2"),
        case("freed twice", 4, 4, f"{shared}; free a; free a; append c 8; append b 2"),
        case("refused at its first append, then freed", 4, 4, "append a 10; append b 8; free b; append b 4; free b"),
        case(
            "names that are numbers, 0 among them",
            *(6, 4, "append 0 6; fork 0 1; append 0 1; append 1 3; free 0; append 2 4"),
        ),
        sixty(16, 4),
        sixty(60, 3),
        keys("the same prompt twice", 4, range(8), range(8)),
        keys("a common beginning", 4, [*start[:9], 1, 2, 3], [*start[:9], 4, 5, 6]),
        keys("equal pages behind other beginnings", 4, [1, 1, 1, 1, 7, 7, 7, 7], [2, 2, 2, 2, 7, 7, 7, 7]),
        keys("prompts that differ in the first of three pages", 2, [1, 1, 5, 6, 7, 8], [2, 2, 5, 6, 7, 8]),
        keys("one page twice in a prompt", 3, [5, 6, 7, 5, 6, 7]),
        keys("the same tokens in another order", 3, [1, 2, 3], [3, 2, 1]),
        keys("digits that could run together", 2, [1, 23], [12, 3]),
        keys("the last page is not full", 4, range(7), range(8), range(3)),
        keys("no tokens, pages of one", 1, [], [9], [9, 9]),
        keys("tokens that differ by 256 and by 65,536", 2, [3, 300], [259, 300], [3, 65_836], [3, 300]),
        keys("two beginnings, and the same 40 pages behind them", 4, [1, *range(7, 170)], [2, *range(7, 170)]),
        keys("tokens up to 2³¹ - 1", 2, *([5, (1 << 31) - down] for down in (1, 2, 1 << 15, 1 << 30))),
        keys(SAME_CRC, 2, *(page for pair in OF_ONE_CRC for page in pair)),
        keys(MANY, 1, *(draw.integers(16, low=0, high=128_000).tolist() for _ in range(100))),
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


def page_keys(tokens, page_size):
    return [tuple(tokens[:end]) for end in range(page_size, len(tokens) + 1, page_size)]


def joined(tokens):
    return "".join(map(str, tokens))


def in_float32(tokens):
    return torch.tensor(tokens, dtype=torch.float32).tolist()


def keys_of(prompts, page_size):
    """What the driver tells of the judge's keys."""
    return key_pattern({"page_keys": page_keys}, prompts, page_size)


SCRIPTS = Contract(
    lambda draw, *, pages, page_size, largest: (
        "SharingAllocator",
        pages,
        page_size,
        fitting(pages, page_size, random_forks(draw, 40, max(2, largest * page_size))),
    ),
    choices={
        "pages": (3, 9, 40),
        "page_size": (1, 2, 5, 16),
        "largest": (Level(1, "short appends"), Level(3, "appends of up to 3 pages")),
    },
    says={"pages": "Pages 0 to pages-1", "page_size": "of page_size tokens each"},
    entry="SharingAllocator",
    driver=replay,
    most=5,
)


def _prompts(draw, *, page_size, common, behind):
    start = draw.integers(common * page_size, low=0, high=3).tolist()
    return [start + draw.integers(behind, low=0, high=2).tolist() for _ in range(4)], page_size


PROMPTS = Contract(
    _prompts,
    choices={"page_size": (1, 2, 3, 5), "common": (0, 1, 2, 3), "behind": (0, 1, 4, 10)},
    says={"behind": "tokens behind the last full page have no key"},
    entry="page_keys",
    driver=key_pattern,
    most=6,
)

COPY_WITHOUT_ROOM = (
    "The page for the copy was not counted: MemoryError must be raised, with nothing changed, when the new pages and "
    "the copy together are more than are free."
)
SHARED, ONE_LESS = "self.holders[table[-1]] > 1", "self.holders[source] -= 1"
COUNTED, LENGTH = "self.holders[page] += 1", "self.lengths[child] = self.lengths[parent]"
OF_PARENT, PAIR = "table = self.tables[parent]", "copies.append((source, target))"
WITH_CHILDREN = (
    *("self.tables, self.lengths = {}, {}", "self.tables, self.lengths, self.children = {}, {}, set()"),
    *(OF_PARENT, f"self.children.add(child)\n{OF_PARENT}"),
)
ANEW = "self.holders[table[-1]] -= 1\n    self.tables[child][-1] = self.take()\nfor page in table:"
SHARING = (
    *edits("A child is given the length of its parent's pages. It has as many tokens as the parent, and the last page "
        "may have room.", fork_counts_slots=(LENGTH, "self.lengths[child] = len(table) * self.page_size")),
    *edits("A child is given the length of its parent's full pages. It has all the parent's tokens, those in a partly "
        "filled last page too.", fork_counts_full_pages=(LENGTH, f"{LENGTH} // self.page_size * self.page_size")),
    *edits("A child is given the length 0. It has as many tokens as its parent.",
        fork_forgets_the_length=(LENGTH, "self.lengths[child] = 0")),
    *edits("`free_pages` subtracts the holders of the pages, so a page that two hold counts twice. Count the pages "
        "whose number of holders is 0.",
        holders_counted=("return len(self.unused)", "return self.pages - sum(self.holders)")),
    *edits("A page that more than two sequences hold is not copied before it is written. Copy where its count is "
        "above 1.", copied_for_two_holders_alone=(SHARED, "self.holders[table[-1]] == 2")),
    *edits("Only a forked child copies. When its parent is the first to write, it writes into the page that the child "
        "reads: whoever writes into a shared page copies it.",
        parent_never_copies=(*WITH_CHILDREN, SHARED, f"{SHARED} and sequence in self.children")),
    *edits("After the copy the old page loses two holders, and is then taken for one that nobody shares. The writer "
        "lets go of it once.", old_page_let_go_twice=(ONE_LESS, "self.holders[source] -= 2")),
    *edits("A sequence writes into a page that another one still reads, and its token is lost. When the last page is "
        "partly filled and has more than one holder, the writer takes a copy.",
        copy_on_write_forgotten=(SHARED, "False")),
    *edits("The sequence gets a page of its own, but without what the shared one held. Return the pair (source, "
        "target), so that the caller copies it.", copy_not_returned=(PAIR, "pass")),
    *edits("The pair is (source, target), and yours reads (target, source): the empty page is copied over the full "
        "one.", copied_the_wrong_way=("(source, target)", "(target, source)")),
    *edits("The pair is returned, but the sequence's table still names the shared page, so the new tokens go there "
        "and the copy is never used. Put the new page in the old one's place.",
        copy_not_in_table=("table[-1] = target", "pass"),
        copy_not_in_table__old_one_freed=("table[-1] = target", "pass", ONE_LESS, "self.let_go(source)")),
    *edits("A partly filled last page is copied though nobody else holds it. Look at its number of holders: with one, "
        "the sequence writes into it.", copied_without_need=(SHARED, "True", ONE_LESS, "self.let_go(source)"),
        copied_without_need__old_one_lost=(SHARED, "True")),
    *edits("A full page is copied. New tokens go into the next page, so a full one is only read and may stay shared.",
        full_page_copied=("length % self.page_size > 0 and ", "")),
    *edits("`fork` takes pages, which is just what sharing should save: parent and child hold the same pages until "
        "one of them writes.",
        copied_at_fork=("list(table)", "[self.take() for _ in table]", COUNTED, "pass", OF_PARENT,
            f"{OF_PARENT}\nif len(table) > len(self.unused):\n    raise MemoryError"),
        copied_at_fork__last_page=("for page in table:", f"if self.unused and table:\n    {ANEW}"),
        copied_at_fork__partial_page=("for page in table:",
            f"if self.unused and self.lengths[parent] % self.page_size > 0:\n    {ANEW}")),
    *edits("The child's pages are not counted: a page in two tables still has one holder. Raise every page's count in "
        "`fork`.", fork_not_counted=(COUNTED, "pass")),
    *edits("Parent and child have one and the same list as their table: what one changes in it, the other gets. Give "
        "the child a list of its own, list(table).", table_shared_not_copied=("list(table)", "table"),
        table_shared_not_copied__old_one_freed=("list(table)", "table", ONE_LESS, "self.let_go(source)"),
        table_shared_not_copied__until_append=("list(table)", "table", "table.extend(taken)", "table = table + taken")),
    *edits("A page that is handed out has no holder: set its count to 1 when it is taken. A fork then makes it 2, and "
        "the last free brings it to 0.", new_page_not_counted=("self.holders[page] = 1", "pass"),
        new_page_not_counted__the_copy=(PAIR, f"{PAIR}\nself.holders[target] = 0")),
    *edits("After the copy the sequence still counts as a holder of the old page, which is then never free again. "
        "Lower its count.", old_page_kept=(ONE_LESS, "pass")),
    *edits("Pages that another sequence still reads were put on the free list. `fork` raises the count of every page, "
        "`free` lowers it, and only a page whose count is 0 is free again.",
        freed_while_shared=("self.let_go(page)", "self.holders[page] = 1\nself.let_go(page)"),
        freed_while_shared__by_the_parent=(*WITH_CHILDREN, "self.let_go(page)",
            "if sequence not in self.children:\n    self.holders[page] = 1\nself.let_go(page)"),
        freed_while_shared__once=("self.let_go(page)",
            "if page not in self.unused:\n    self.holders[page] = 1\n    self.let_go(page)")),
    *edits("A page is only marked as shared, and a third holder leaves no trace: when one of three has let go, the "
        "page is taken for one that nobody shares, or it is never free again. Count the holders: `fork` adds one to "
        "each page's count, whoever lets go takes one off.", flag_for_a_count=(COUNTED, "self.holders[page] = 2"),
        flag_for_a_count__for_ever=(COUNTED, "self.holders[page] = 2", ONE_LESS, "pass", "self.holders[page] -= 1",
            "self.holders[page] -= self.holders[page] == 1"),
        flag_for_a_count__or_not=(COUNTED, "self.holders[page] = 2", "self.holders[page] -= 1",
            "self.holders[page] = int(self.holders[page] > 1)")),
    *edits("A shared page is copied where it is full, and not where it has room. It is the other way round: new "
        "tokens go into a page that is partly filled, and behind one that is full.",
        full_page_copied__and_no_other=("length % self.page_size > 0", "length % self.page_size == 0")),
    *edits("Pages whose last holder is gone do not come back to the free list.", pages_not_returned=PAGES_NOT_RETURNED),
    *edits(COPY_WITHOUT_ROOM,
        copy_without_room=("more + copying >", "more >", f"page = {TAKE}",
            f"if not self.unused:\n    raise MemoryError\npage = {TAKE}")),
    *edits("An append was refused and something has changed all the same. Count the pages for the tokens and the copy "
        "first, and raise MemoryError before any is taken.", **HALF_APPENDED,
        half_appended__copy_made=(REFUSED,
            "if copying and self.unused:\n    self.holders[table[-1]] -= 1\n    table[-1] = self.take()\n"
            "raise MemoryError"),
        half_appended__share_let_go=(NEEDED, f"if copying:\n    self.holders[table[-1]] -= 1\n{NEEDED}", ONE_LESS,
            "pass")),
    *REFUSALS,
    *edits("A sequence that holds nothing can be freed, or freed again. Then the counts of pages in use fall, and "
        "they are handed out again. Raise KeyError when it has no table.", **DOUBLE_FREE,
        double_free__counted=(HELD, "self.tables[sequence]", FORGOTTEN, "pass")),
)  # fmt: skip

PIECE, KEY = "tokens[:end]", "tuple(tokens[:end])"
KEYS = (
    *edits("Equal tokens after different beginnings got equal keys. A token's key and value depend on all tokens "
        "before it, so the key of a page must too.", key_of_the_page_alone=(PIECE, "tokens[end - page_size : end]")),
    *edits("The key names the page's place and its own tokens, but not what stood before it. Two prompts that differ "
        "in the first page differ in all of them.",
        key_by_place=(KEY, f"(end, {KEY})", PIECE, "tokens[end - page_size : end]")),
    *edits("The key holds the page's tokens and those of the page before it. What stood before those is still "
        "missing. Use all tokens, or the key of the page before, which stands for everything up to there.",
        key_of_two_pages=(PIECE, "tokens[max(0, end - 2 * page_size) : end]")),
    *edits("The key holds the page's place, its tokens and those of the page before it. What stood before those is "
        "still missing. Use all tokens, or the key of the page before, which stands for everything up to there.",
        key_of_two_pages__and_place=(KEY, f"(end, {KEY})", PIECE, "tokens[max(0, end - 2 * page_size) : end]")),
    *edits("The key holds the page's tokens and the one before them. What stood before that is still missing. Use all "
        "tokens, or the key of the page before, which stands for everything up to there.",
        key_of_two_pages__one_token=(PIECE, "tokens[max(0, end - page_size - 1) : end]")),
    *edits("The key depends on the whole prompt's length. Two prompts with the same beginning share its pages, "
        "however they go on: use the tokens up to the page's end alone.",
        prompts_told_apart=(KEY, f"(len(tokens), {KEY})")),
    *edits("The key depends on the whole prompt. Two prompts with the same beginning share its pages, however they go "
        "on: use the tokens up to the page's end alone.",
        prompts_told_apart__by_all_tokens=(KEY, f"(tuple(tokens), {KEY})")),
    *edits("The keys of two calls cannot be compared: numbers that begin anew, or the identity of a list, say nothing "
        "of the tokens. Equal beginnings must have equal keys in every call, and others never.",
        keys_of_one_call=(KEY, "end"), keys_of_one_call__by_the_list=(KEY, "object()")),
    *edits("Tokens that differ by a multiple of 256 got equal keys: each was cut to 8 bits. A token's number may be "
        "far larger.", tokens_cut_to_bytes=(PIECE, "[token % 256 for token in tokens[:end]]")),
    *edits("Tokens that differ by a multiple of 65,536 got equal keys: each was cut to 16 bits. A token's number may "
        "be far larger.", tokens_cut_to_bytes__two=(PIECE, "[token % 65_536 for token in tokens[:end]]")),
    *edits("Large tokens that lie close to each other got equal keys: as float32 a number above 16,777,216 is "
        "rounded. Keep tokens as integers.", tokens_rounded=(PIECE, "in_float32(tokens[:end])")),
    *edits("A prompt that ends with a full page has a key too few: range() leaves its end out, and len(tokens) must "
        "be in it.", last_full_page_missed=("len(tokens) + 1", "len(tokens)")),
    *edits("The last, partly filled page has a key. More tokens will be written into it: only full pages can be found "
        "by their content.", partial_page_has_a_key=("len(tokens) + 1", "len(tokens) + page_size")),
    *edits("[1, 23] and [12, 3] got the same key: the numbers are joined without anything between them.",
        digits_run_together=("tuple(", "joined(")),
    *edits("The same tokens in another order got the same key. A sum or a set forgets the order; a tuple keeps it.",
        order_lost=(PIECE, "sorted(tokens[:end])"), order_lost__sum=("tuple(", "sum("),
        order_lost__set=("tuple(", "frozenset(")),
)  # fmt: skip


EXERCISE = Exercise(
    id="6.6",
    title="Shared pages, copied when written",
    entries=("SharingAllocator", "page_keys"),
    cases=sharing_cases,
    oracle={"SharingAllocator": told, "page_keys": keys_of},
    contracts=(SCRIPTS, PROMPTS),
    models=(
        model_of(told, SHARING, (PageBook,)),
        model_of(keys_of, KEYS, (page_keys,), entry="page_keys"),
    ),
    hints=(
        "Start from your allocator of 6.2 and add one list: for every page, how many tables it is in. A page is free "
        "again only when that count falls to 0.",
        "fork copies the parent's table (a new list, not the same one) and raises the count of every page in it. free "
        "lowers the counts and returns only the pages whose count is 0 now.",
        "append must copy exactly when the last page is partly filled (length % page_size > 0) and its count is above "
        "1. A full page is never written again, shared or not.",
        "To copy: take a new page, lower the count of the old one, put the new one in its place in the table, and "
        "return [(old, new)]. The new page counts when you compare with the free ones.",
        "page_keys: the key and value of a token depend on every token before it. So a page's own tokens are not "
        "enough; use tuple(tokens[:end]) or a hash of it, of 64 bits or more.",
    ),
    mistakes=(
        Mistake("name_taken_for_none", NAME_TAKEN_FOR_NONE, when=names_that_are_false, every=True),
        Mistake("state_shared", STATE_SHARED, when=state_is_shared),
        Mistake(
            "copy_without_room",
            COPY_WITHOUT_ROOM,
            when=raised("IndexError", "StopIteration"),
        ),
        Mistake("attribute_hides_method", METHOD_HIDDEN, when=method_hidden),
        Mistake("pages_no_number", PAGES_NO_NUMBER, when=pages_no_number),
        Mistake(
            "full_pages_copied_too",
            "An append copies more than one page. Only the page that its tokens begin in is written, the last one: the "
            "full pages before it are read and may stay shared.",
            when=lambda case, seen, got: any(
                int(line.split(" copied")[0].split()[-1]) > 1 for line in got or () if " copied" in line
            ),
        ),
        Mistake(
            "pair_without_list",
            "`append` returns a list of pairs: [(source, target)] where a page is to be copied, and else an empty one. "
            "The pair itself, or a tuple, is no list.",
            when=lambda case, seen, got: bool(seen.error) and "(source, target) pairs" in seen.error.text,
        ),
        Mistake(
            "hash_too_short",
            "Some pages with other tokens have equal keys: hashes of few bits, as a CRC-32 has, meet by chance. "
            "Whoever finds a page by its key reads its numbers: use the tokens themselves, or a hash of 64 bits or "
            "more.",
            when=lambda case, seen, got: case.name in (MANY, SAME_CRC) and isinstance(got, list),
            every=True,
        ),
        Mistake(
            "key_not_hashable",
            "A key must be hashable, or no dict can find it: make a tuple of the list.",
            when=lambda case, seen, got: bool(seen.error) and "unhashable" in seen.error.text,
        ),
    ),
)
