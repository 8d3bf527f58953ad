"""Blocks are counted rightly, and what nobody holds is refused."""

import pytest

from course_lib.serving.memory import BlockPool, DoubleFree, FreedBlockUsed, OutOfBlocks, chain_hash


def test_a_block_is_free_again_only_when_all_who_share_it_have_released_it():
    pool = BlockPool(2)
    block = pool.take()
    pool.share(block)
    pool.release(block)
    assert (pool.free, pool.in_use, pool.references(block)) == (1, 1, 1)
    pool.release(block)
    assert (pool.free, pool.in_use, pool.references(block)) == (2, 0, 0)


def test_a_double_free_is_refused_and_changes_nothing():
    pool = BlockPool(3)
    block = pool.take()
    pool.release(block)
    with pytest.raises(DoubleFree, match=f"Block {block} .*freed before"):
        pool.release(block)
    assert pool.free == 3
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2], "a block must not be handed out twice"


def test_a_freed_block_is_not_shared_and_not_read():
    pool = BlockPool(2)
    block = pool.take()
    pool.release(block)
    for use in (lambda: pool.share(block), lambda: pool.check_in_use([block]), lambda: pool.remember(block, b"key")):
        with pytest.raises(FreedBlockUsed, match="is free"):
            use()
    with pytest.raises(FreedBlockUsed, match="There is no block 7: this pool has blocks 0 to 1"):
        pool.check_in_use([7])


def test_an_empty_pool_says_so():
    pool = BlockPool(1)
    pool.take()
    with pytest.raises(OutOfBlocks, match="All 1 blocks are in use"):
        pool.take()


def test_a_freed_block_is_found_by_its_content_until_it_is_taken_for_something_else():
    pool = BlockPool(2)
    block = pool.take()
    pool.remember(block, b"prompt")
    pool.release(block)
    assert pool.find(b"prompt") == block and pool.reuse(b"prompt") == block and pool.references(block) == 1
    pool.release(block)
    pool.take(), pool.take()
    assert pool.find(b"prompt") is None
    with pytest.raises(FreedBlockUsed, match="No block holds that content"):
        pool.reuse(b"prompt")


def test_the_block_freed_longest_ago_is_taken_first():
    pool = BlockPool(3)
    first, second, third = (pool.take() for _ in range(3))
    for block in (second, third, first):
        pool.release(block)
    assert [pool.take() for _ in range(3)] == [second, third, first]


def test_the_first_block_with_a_content_stays_the_known_one():
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.remember(first, b"same")
    pool.remember(second, b"same")
    assert pool.find(b"same") == first
    pool.release(second)
    pool.take()
    assert pool.find(b"same") == first, "taking the other block must not make the first one unknown"


def test_the_key_of_a_block_depends_on_all_tokens_before_it():
    shared = [5, 6, 7]
    assert chain_hash(chain_hash(b"", [1]), shared) != chain_hash(chain_hash(b"", [2]), shared)
    assert chain_hash(b"", [1, 23]) != chain_hash(b"", [12, 3])


@pytest.mark.parametrize("blocks", [0, -1, 2.0, True])
def test_a_pool_of_no_blocks_is_refused(blocks):
    with pytest.raises(ValueError, match="blocks is"):
        BlockPool(blocks)
