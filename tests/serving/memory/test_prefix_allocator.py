"""Pages with shared beginnings: every page has one owner at any time, and none is lost."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.serving.memory.errors import DoubleFree, OutOfBlocks, UnknownSequence
from course_lib.serving.memory.prefix_allocator import PrefixAllocator


def test_a_prompt_that_was_seen_before_costs_nothing_but_its_end():
    allocator = PrefixAllocator(8, 2)
    prompt = [1, 2, 3, 4, 5, 6]
    assert allocator.add("a", prompt) == 0
    allocator.append("a", 6)
    allocator.share("a", prompt)
    assert allocator.add("b", prompt) == 4, "the last token must run, so the page that holds it is not shared"
    allocator.append("b", 2)
    assert allocator.table("b")[:2] == allocator.table("a")[:2] and allocator.free_pages() == 4


def test_what_ended_is_found_again_until_memory_is_needed():
    allocator = PrefixAllocator(4, 1)
    allocator.add("a", [1, 2, 3])
    allocator.append("a", 3)
    allocator.share("a", [1, 2, 3])
    allocator.free("a")
    assert allocator.free_pages() == 4 and allocator.add("b", [1, 2, 9]) == 2
    allocator.append("b", 1)
    assert allocator.free_pages() == 1
    allocator.append("c", 1)
    with pytest.raises(OutOfBlocks, match="needs 1 more pages of 1 tokens, and 0 of 4 can be had"):
        allocator.append("c", 1)
    assert allocator.length("c") == 1 and allocator.add("d", [1, 2, 3]) == 2


def test_a_page_computed_twice_is_kept_once():
    allocator = PrefixAllocator(4, 2)
    for name in "ab":
        allocator.add(name, [1, 2, 3])
        allocator.append(name, 3)
    for name in "ab":
        allocator.share(name, [1, 2, 3])
    assert allocator.table("a")[0] == allocator.table("b")[0] and allocator.free_pages() == 1
    allocator.append("c", 2)
    assert allocator.table("c")[0] not in allocator.table("a") + allocator.table("b")


def test_a_page_is_taken_ahead_where_the_next_token_needs_one_and_nobody_has_it():
    allocator = PrefixAllocator(3, 2)
    allocator.append("a", 1)
    assert allocator.reserve("a") and len(allocator.table("a")) == 1, "there is a place left in its page"
    allocator.append("a", 1)
    assert allocator.reserve("a") and allocator.reserve("a") and len(allocator.table("a")) == 2
    allocator.append("b", 2)
    assert not allocator.reserve("b") and len(allocator.table("b")) == 1, "all are taken"
    allocator.append("a", 1)
    assert len(allocator.table("a")) == 2 and allocator.length("a") == 3
    allocator.free("a"), allocator.free("b")
    assert allocator.free_pages() == 3


def test_a_text_that_turns_out_shorter_gives_its_pages_back():
    allocator = PrefixAllocator(5, 2)
    allocator.add("a", [1, 2, 3])
    allocator.append("a", 3)
    allocator.share("a", [1, 2, 3])
    assert allocator.room("a") == 7
    allocator.append("a", 7)
    assert allocator.room("a") == 0
    first = allocator.table("a")
    for length, pages in ((8, 4), (7, 4), (3, 2), (3, 2), (2, 1)):
        allocator.shorten("a", length)
        assert allocator.table("a") == first[:pages] and allocator.length("a") == length
        assert allocator.room("a") == 10 - length
    allocator.append("a", 3)
    assert len(allocator.table("a")) == 3 and allocator.reserve("a") and allocator.room("a") == 5
    for length in (1, 6):
        with pytest.raises(ValueError, match=f"length is {length}; sequence 'a' has 5 tokens, and the first 2 are"):
            allocator.shorten("a", length)
    allocator.free("a")
    assert allocator.free_pages() == 5


def test_wrong_calls_are_told():
    allocator = PrefixAllocator(2, 2)
    allocator.append("a", 1)
    with pytest.raises(ValueError, match="already"):
        allocator.add("a", [1])
    allocator.free("a")
    with pytest.raises(DoubleFree):
        allocator.free("a")
    with pytest.raises(UnknownSequence):
        allocator.table("a")
    with pytest.raises(ValueError, match="pages is 0"):
        PrefixAllocator(0, 1)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), pages=st.integers(1, 12), page_size=st.integers(1, 3))
def test_random_traffic_loses_no_page_and_gives_none_twice(seed, pages, page_size):
    draw, allocator, texts = random.Random(seed), PrefixAllocator(pages, page_size), {}
    for name in range(60):
        action = draw.choice(("add", "append", "share", "shorten", "free", "free"))
        if action == "add":
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
            cached = allocator.add(name, tokens)
            try:
                allocator.append(name, len(tokens) - cached)
                texts[name] = tokens
            except OutOfBlocks:
                allocator.free(name)
        elif texts:
            name = draw.choice(list(texts))
            if action == "append":
                try:
                    allocator.append(name, 1)
                    texts[name].append(draw.randrange(2))
                except OutOfBlocks:
                    pass
            elif action == "shorten":
                least = allocator._held[name].shared * page_size
                texts[name] = texts[name][: draw.randrange(least, len(texts[name]) + 1)]
                allocator.shorten(name, len(texts[name]))
            elif action == "share":
                allocator.share(name, texts[name][: draw.randrange(len(texts[name]) + 1)] or [])
            else:
                allocator.free(name)
                del texts[name]
        in_tree = {page for node in allocator.tree.nodes() for page in node.pages}
        own = Counter(page for name in texts for page in allocator.table(name) if page not in in_tree)
        assert not own or max(own.values()) == 1, "two sequences write one page"
        assert not in_tree & set(allocator._free) and not set(own) & set(allocator._free)
        assert len(in_tree) + len(own) + len(allocator._free) == pages, "a page is lost"
        for name in texts:
            assert len(allocator.table(name)) == -(-len(texts[name]) // page_size)
            assert allocator.length(name) == len(texts[name])
    for name in texts:
        allocator.free(name)
    assert allocator.free_pages() == pages
