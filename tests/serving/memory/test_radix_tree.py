"""The tree of prefixes, beside a dictionary of all beginnings, under random traffic."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.serving.memory.radix_tree import RadixTree


def check(tree):
    """What must hold at any time: counts, edges, and that a locked edge has locked all before it."""
    pages = [page for node in tree.nodes() for page in node.pages]
    assert len(pages) == len(set(pages)) == tree.evictable + tree.protected
    for node in tree.nodes():
        assert len(node.tokens) == len(node.pages) * tree.page_size > 0
        assert node.parent.children[node.tokens[: tree.page_size]] is node
        assert node.locks >= sum(child.locks for child in node.children.values()) >= 0
    assert tree.protected == sum(len(node.pages) for node in tree.nodes() if node.locks)


def test_what_was_inserted_is_matched_in_whole_pages():
    tree = RadixTree(2)
    tree.insert([1, 2, 3, 4, 5], [10, 11])
    assert tree.match([1, 2, 3, 4, 5, 6])[0] == [10, 11]
    assert tree.match([1, 2, 3])[0] == [10], "of the second page only one token fits"
    assert tree.match([1])[0] == [] == tree.match([])[0] == tree.match([2, 1])[0]
    check(tree)


def test_a_second_copy_of_a_page_is_not_kept():
    tree = RadixTree(2)
    tree.insert([1, 2, 3, 4], [10, 11])
    held, node = tree.insert([1, 2, 3, 4, 5, 6], [20, 21, 22])
    assert held == [10, 11, 22] and node.pages == [22]
    with pytest.raises(ValueError, match="2 pages were given for 2 tokens"):
        tree.insert([1, 2], [1, 2])


def test_only_the_part_that_is_read_is_locked():
    """Of a long edge somebody reads the first page: the rest may go."""
    tree = RadixTree(1)
    tree.insert([1, 2, 3, 4], [10, 11, 12, 13])
    _, node = tree.match([1, 9])
    tree.lock(node)
    assert (tree.evictable, tree.protected) == (3, 1)
    assert sorted(tree.evict(100)) == [11, 12, 13]
    tree.unlock(node)
    assert tree.evict(100) == [10] and tree.evict(1) == []
    check(tree)


def test_an_edge_that_is_split_while_it_is_locked_stays_locked_whole():
    tree = RadixTree(1)
    _, end = tree.insert([1, 2, 3], [10, 11, 12])
    tree.lock(end)
    tree.match([1, 2, 9])
    assert tree.protected == 3 and tree.evict(3) == []
    tree.unlock(end)
    assert tree.evictable == 3
    with pytest.raises(ValueError, match="nobody has locked it"):
        tree.unlock(end)


def test_the_leaf_that_was_used_longest_ago_goes_first():
    tree = RadixTree(1)
    tree.insert([1, 2], [10, 11])
    tree.insert([1, 3], [10, 12])
    tree.match([1, 2])
    assert tree.evict(1) == [12] and tree.evict(1) == [11] and tree.evict(1) == [10]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), page_size=st.integers(1, 3))
def test_random_traffic_finds_what_a_dictionary_finds(seed, page_size):
    """Texts of two letters share many beginnings. A dictionary from each beginning to its page says what is right."""
    draw, tree, known, locked = random.Random(seed), RadixTree(page_size), {}, []
    fresh = iter(range(10**6))
    for _ in range(60):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(0, 12))]
        beginnings = [tuple(tokens[:end]) for end in range(page_size, len(tokens) + 1, page_size)]
        action = draw.choice(("insert", "match", "lock", "unlock", "evict"))
        if action == "insert":
            own = [next(fresh) for _ in beginnings]
            held, _ = tree.insert(tokens, own)
            for beginning, page in zip(beginnings, own):
                known.setdefault(beginning, page)
            assert held == [known[beginning] for beginning in beginnings]
        elif action in ("match", "lock"):
            pages, node = tree.match(tokens)
            expected = []
            for beginning in beginnings:
                if beginning not in known:
                    break
                expected.append(known[beginning])
            assert pages == expected
            if action == "lock":
                tree.lock(node)
                locked.append((node, set(pages)))
        elif action == "unlock" and locked:
            tree.unlock(locked.pop(draw.randrange(len(locked)))[0])
        elif action == "evict":
            before, count = tree.evictable, draw.randrange(5)
            gone = tree.evict(count)
            assert len(gone) >= min(count, before)
            kept = set().union(*(pages for _, pages in locked)) if locked else set()
            assert not kept & set(gone), "a locked page was given away"
            known = {beginning: page for beginning, page in known.items() if page not in gone}
        check(tree)
    for node, _ in locked:
        tree.unlock(node)
    assert tree.protected == 0 and sorted(tree.evict(10**6)) == sorted(known.values())
