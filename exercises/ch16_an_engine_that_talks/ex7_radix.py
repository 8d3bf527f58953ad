"""Exercise 16.7: pages found again by a text's beginning, with locks; judged on scripts of calls."""

from __future__ import annotations

import re

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.topics.prefix_pages import Pages, into, keyed


def replay(functions, page_size, script):
    """What each call of a script gives: ("insert", "aabb", 1, 2) caches pages 1 and 2; a is token 0, and _ is -2."""
    cache, story = functions["PrefixCache"](page_size), []
    for name, word, *own in script:
        said = " ".join(map(str, (name, word, *own))).strip()
        given = word if name == "evict" else [ord(letter) - ord("a") for letter in word]
        own = [page + 0 for page in own]  # an object of its own, where it is above 256
        got = cache.insert(given, own) if name == "insert" else getattr(cache, name)(given)
        kept = sorted if name == "evict" else list
        pages = [] if name in ("lock", "unlock") else kept(int(page) for page in got)
        story.append(f"{said}: {pages}, {int(cache.evictable())} evictable")
        for mine in (given, own, got):  # all lists are the caller's to change
            if isinstance(mine, list):
                mine[:] = [-8] * (len(mine) + 1)
    return story


def told(page_size, script):
    return replay({"PrefixCache": Pages}, page_size, script)


def calls(page_size, text):
    script = [call.split() for call in text.split(";")]
    return page_size, [(name, *(int(x) if x.isdigit() else x for x in rest or [""])) for name, *rest in script]


def any_calls(draw, page_size, steps, evictions=("evict",)):
    """Calls as requests make them: what they lock is cached, and a page is in one place alone."""
    cache, script, locked, size = Pages(page_size), [], [], page_size
    for step in range(steps):
        kinds = ("a" * size, "b" * size, "a" * (size - 1) + "b", "b" + "a" * (size - 1))
        word = "".join(draw.choice(kinds) for _ in range(draw.integer(0, 5))) + "a" * draw.integer(0, size)
        held = [spot.page for spot in cache.walk([ord(letter) - ord("a") for letter in word])]
        name, same = draw.choice(("insert", "match", "lock", "unlock", *evictions)), draw.integer(0, len(held) + 1)
        if name == "insert":
            call = (name, word, *held[:same], *range(10 * step + same, 10 * step + len(word) // size))
        elif name == "lock":
            call = (name, word[: same * size])
            locked.append(call[1])
        elif name == "unlock" and locked:
            call = (name, locked.pop(draw.integer(0, len(locked))))
        else:
            call = ("evict", draw.integer(1, 4)) if name == "evict" else ("match", word)
        replay({"PrefixCache": lambda _: cache}, size, [call])
        script.append(call)
    return script


ABC = "insert aabbcc 1 2 300"
IN_TWOS = {
    "one text": f"{ABC}; match aabbcc; match aabb; match aabbccdd; match bb; match",
    "pages that are not full": f"insert aabbc 1 2; match aabbc; match aab; match a; {ABC}; match aabbc; match aabb",
    "texts that turn off": f"{ABC}; insert aabbdd 1 2 4; match aabbdd; match aabbcc; match aaccdd",
    "another order, and -1 for -2": "insert blbl 1 2; match lbbl; match bllb; insert lblb 3 4; insert a` 5; match a_",
    "the same page after other beginnings": "insert aacc 1 2; insert bbcc 3 4; match bbcc; match cc",
    "a page computed twice": f"{ABC}; insert aabbdd 8 7 9; match aabbdd; insert aabbdd 1 2 9; insert aa 5",
    "a lock": f"{ABC}; lock aabbcc; evict 2; unlock aabbcc; evict 2; match aabbcc",
    "two locks of one text": f"{ABC}; lock aabb; lock aabb; unlock aabb; evict 3; unlock aabb; evict 3",
    "a beginning is locked": f"{ABC}; lock aa; evict 3; match aabbcc; unlock aa; evict 1",
    "a text branches off after a lock": f"{ABC}; lock aabbcc; match aabb; insert aadd 1 5; unlock aabbcc; evict 9",
    "a part is locked, after a turn": f"{ABC}; insert aadd 1 5; lock aadd; lock aa; unlock aadd; evict 9",
    "the one used longest ago": "insert aa 0; insert bb 2; insert cc 1; match aa; evict 1; evict 1; evict 1",
    "ends go before beginnings": f"{ABC}; insert dd 4; match aa; evict 1; evict 1; evict 1; evict 1",
    "inserting is a use": f"{ABC}; insert dd 4; {ABC}; evict 1; lock aa; unlock aa; evict 2",
    "a lock is no use": "insert aa 1; insert bb 2; lock aa; unlock aa; evict 1; match aa; match bb",
    "an end is unlocked later": "insert aabb 1 2; insert cc 3; match aabb; lock cc; evict 1; unlock cc; evict 1",
    "a lock inside": "insert cc 3; insert aabb 1 2; lock cc; lock aa; unlock aa; evict 1; unlock cc; evict 1; evict 1",
    "given up and cached again": f"{ABC}; evict 2; insert aabbcc 1 8 9; match aabbcc; evict 9; match aa",
}


def cache_cases(draw):
    scripts = {name: calls(2, text) for name, text in IN_TWOS.items()} | {"60 calls": (3, any_calls(draw, 3, 60))}
    return [Case(*script, driver=replay) for script in scripts.items()]


CONTRACT = Contract(
    lambda draw, *, page_size, evicting: (page_size, any_calls(draw, page_size, 40, ("evict",) * evicting)),
    choices={"page_size": (1, 2, 5, 16), "evicting": (Level(0, "nothing is given up"), Level(2, "evictions"))},
    says={"page_size": "page_size tokens, at least 1", "evicting": "at least 1; or all that are not locked"},
    driver=replay,
    most=6,
)


LOCKED, FREED = "for spot in self.walk(tokens):", "for freed in self.walk(tokens):"
ONE, LESS, FOUND = "spot.locks += 1", "freed.locks -= 1", "return found"
DUPLICATES = "[own for own, kept in zip(pages, held) if own != kept]"
USE, ENDS, INSERTED = "spot.used = self.clock", "key not in before and ", "held = self.match(tokens)"
THEIRS, ANEW = DUPLICATES.replace("[own", "[kept"), "for number in range(len(held), len(pages)):"
REPLACED = f"for spot, own in zip(self.walk(tokens), pages):\n    spot.page = own\n{ANEW}"
GONE, BEFORE = "gone.append(self.held.pop(key).page)", "{key[: -self.size] for key in self.held}"
KEY, FREE, NONE = "tuple(tokens[:end])", "self.held[key].locks == 0", "spot is None"


def of_each(make):
    """What a page is found by: not all of its tokens in order."""
    return KEY, f"keyed({make}, tokens[:end], self.size)"


CHANGES = (
    *edits("A page was found for other tokens: what it is found by does not tell them apart. Their order counts, and "
        "all of them. Take the tuple of a page's tokens.",
        other_tokens=of_each("lambda piece: tuple(sorted(piece))"), other_tokens__a_set=of_each("frozenset"),
        other_tokens__joined=of_each("lambda piece: ''.join(map(str, piece))"), other_tokens__sum=of_each("sum"),
        other_tokens__first=of_each("lambda piece: piece[0]"), other_tokens__last=of_each("lambda piece: piece[-1]"),
        other_tokens__hash=of_each("lambda piece: hash(tuple(piece))")),
    *edits("Page 0 was left out. It is a page like others, though `if page` is false for it: compare with None.",
        page_0_left_out=("spot.locks == 0", "spot.locks == 0 and bool(spot.page)"),
        page_0_left_out__by_match=(NONE, f"{NONE} or not spot.page"),
        page_0_left_out__by_evict=(FREE, f"{FREE} and self.held[key].page")),
    *edits("Equal page numbers beyond 256 were taken for different ones: `is` compares objects. Use == or !=.",
        objects_compared=(DUPLICATES, DUPLICATES.replace("!= kept", "!= kept or own > 256"))),
    *edits("A lock leaves out the last page, the one that is in use: it can be given up. A loop that steps to the "
        "parent first skips its own node. Count the node itself, then all before it.",
        end_not_locked=(LOCKED, LOCKED[:-1] + "[:-1]:", FREED, FREED[:-1] + "[:-1]:"),
        end_not_locked__but_unlocked=(LOCKED, LOCKED[:-1] + "[:-1]:")),
    *edits("A lock counts only for the last page. The pages before it are read as well: lock the whole path.",
        end_alone_locked=(LOCKED, LOCKED[:-1] + "[-1:]:", FREED, FREED[:-1] + "[-1:]:")),
    *edits("`unlock` leaves pages locked for ever. It takes back one lock of each page that `lock` has locked.",
        stays_locked=(LESS, "pass"), stays_locked__but_for_the_end=(FREED, FREED[:-1] + "[-1:]:"),
        stays_locked__the_end=(FREED, FREED[:-1] + "[:-1]:")),
    *edits("Two requests have locked a page, and the first `unlock` unlocks it for both. Count the locks.",
        flag_for_a_count=(ONE, "spot.locks = 1", LESS, "freed.locks = 0")),
    *edits("`lock` counted as a use of the pages. Only match and insert use them.",
        lock_is_a_use=(ONE, f"{ONE}\nspot.used = self.clock = self.clock + 1")),
    *edits("Less than a page was left of the tokens, and a page was matched all the same: an empty key is equal "
        "to every key. Stop where no whole page is left.",
        empty_key_matched=(FOUND, "return into(found, self.held, tokens, len(found) * self.size, self.size)")),
    *edits("A page was matched although the text has only its beginning. Only whole pages are cached: stop where less "
        "than page_size tokens are left.",
        part_of_a_page_matched=(FOUND,
        "return into(found, self.held, tokens, len(tokens), self.size) if len(tokens) % self.size else found")),
    *edits("`insert` returned pages that are cached: those that the caller had from `match`. Freeing them frees "
        "pages that the tree and other tables name. A duplicate is a page other than the cached one.",
        cached_pages_freed=(DUPLICATES, "[own for own, kept in zip(pages, held)]")),
    *edits("`insert` returned the cached pages. Their places stay as they are, so the caller's own pages are the "
        "duplicates.", cached_for_own=(DUPLICATES, THEIRS)),
    *edits("The duplicates were not returned, so nobody frees them.", duplicates_lost=(DUPLICATES, "[]")),
    *edits("A cached page was replaced by the caller's. Other tables name the cached one: it stays.",
        replaced=(ANEW, REPLACED)),
    *edits("Pages that `match` or `insert` found were not marked as used. Both use what they find: write down when.",
        found_is_no_use=(USE, "pass"),
        found_is_no_use__by_match=(USE, "pass", INSERTED, f"{INSERTED}\nfor spot in self.walk(tokens):\n    {USE}"),
        found_is_no_use__by_insert=(INSERTED, "self.clock += 1\nheld = [spot.page for spot in self.walk(tokens)]")),
    *edits("Only the last page of a text counts as used. All of them do: pages before it are ends once it is gone.",
        end_alone_used=("for spot in found:", "for spot in found[-1:]:")),
    *edits("The page that was used last was given up. Take the one that was used longest ago.",
        newest_first=("min(ends", "max(ends")),
    *edits("The page with the lowest number was given up. Take the one that was used longest ago.",
        lowest_number_first=("self.held[key].used)", "self.held[key].page)")),
    *edits("`evict` looked for ends once. Where one is gone, the page before it may be an end: look again after each.",
        ends_found_once=("gone = []", f"gone, first = [], {BEFORE}", f"before = {BEFORE}", "before = first")),
    *edits("A locked page was given up, although a request reads it. Look at its locks.",
        locks_ignored=(" and self.held[key].locks == 0", "")),
    *edits("A page with others after it was given up. Those cannot be found any more: give up only ends.",
        middle_given_up=(ENDS, "",
        GONE, f"{GONE}\nself.held = {{other: spot for other, spot in self.held.items() if other[: len(key)] != key}}")),
)  # fmt: skip


def first_of(names, holds):
    """A `when`: the first wrong line tells of one of these calls, and this holds of (pages, evictable), due and got."""

    def when(case, seen, got):
        wrong = [pair for pair in zip(told(*case.args), got or ()) if pair[0] != pair[1]]
        found = [re.search(r": \[(.*)\], (-?\d+) ev", line).groups() for pair in wrong[:1] for line in pair]
        read = [(pages.split(), int(evictable)) for pages, evictable in found]
        return bool(wrong) and wrong[0][0].split()[0] in names and holds(*read)

    return when


EXERCISE = Exercise(
    id="16.7", title="Prefixes in a tree", entries=("PrefixCache",), cases=cache_cases, oracle=told,
    contracts=(CONTRACT,), models=(model_of(told, CHANGES, (Pages,), (into, keyed), most_pairs=120),),
    hints=(
        "Write `path` first: from the root, look up the tokens of one whole page after the other, and stop where there "
        "is none. match, lock and unlock are loops over it.",
        "insert: go on from there, with a node for each page that is new. A duplicate has another number than the "
        "cached page. Give each node a number of locks, and a time of use from a counter that match and insert raise.",
        "evict: of the nodes that have no lock and no node after them, remove the one with the smallest time. Then "
        "look again, because its parent may be an end now.",
    ),
    mistakes=(
        Mistake("list_shared", "A list is shared with the caller, who changes it. Copy what you are given and return.",
            first=True, when=lambda case, seen, got: any(re.search(r"-8\b", line) for line in got or ())),
        Mistake("state_shared", "A new cache holds pages of another one. Make what it keeps in `__init__`.",
            when=lambda case, seen, got: bool(got) and int(got[0].split()[-2]) > len(case.args[1][0]) - 1),
        Mistake("beginning_ignored", "A page was found that belongs to another text: its tokens are others, or those "
            "before it are. Look for it after the page before it, by all of its tokens in order.",
            when=first_of(("match",), lambda due, mine: len(mine[0]) > len(due[0]))),
        Mistake("pages_not_found", "Pages that are cached were not found. If a node has several, its first ones are "
            "found too, and a split loses nothing after it.",
            when=first_of(("match",), lambda due, mine: len(mine[0]) < len(due[0]))),
        Mistake("split_changes_locks", "A text that branches off has changed how many pages are evictable. Where a "
            "node is split, both parts keep its locks, and no counter changes; `unlock` unlocks both.",
            when=lambda *seen: first_of(("match",), lambda due, mine: mine[0] == due[0])(*seen)
            or first_of(("unlock",), lambda due, mine: mine[1] < due[1])(*seen)),
        Mistake("other_duplicates", "`insert` returned other pages than the duplicates: those of `pages`, in order, in "
            "whose place another page was cached. New pages are none, and neither is the cached page itself.",
            when=first_of(("insert",), lambda due, mine: mine[0] != due[0])),
        Mistake("locked_too_little", "`lock` has left pages unlocked. Does a loop over parents begin at the parent, or "
            "stop before the root?", when=first_of(("lock",), lambda due, mine: mine[1] > due[1])),
        Mistake("locked_too_much", "`lock` has locked more than the pages of its tokens. Where they end inside a node "
            "of several pages, split it first.", when=first_of(("lock",), lambda due, mine: mine[1] < due[1])),
        Mistake("other_number_given_up", "`evict` gives up as many pages as it is asked for, or all that are not "
            "locked.", when=first_of(("evict",), lambda due, mine: len(mine[0]) != len(due[0]))),
        Mistake("other_order", "Pages other than those used longest ago were given up. match and insert use the pages "
            "on their way and no others, and parts of a split node keep its last use.",
            when=first_of(("evict",), lambda due, mine: mine[0] != due[0])),
    ),
)  # fmt: skip
