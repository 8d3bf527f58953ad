"""Block tables, copy-on-write, shared prefixes; and that a refused call has changed nothing."""

import pytest

from course_lib.serving.memory import BlockAllocator, DoubleFree, OutOfBlocks, UnknownSequence


def state(allocator):
    """All that a caller can see of an allocator."""
    tables = {name: (allocator.table(name), allocator.length(name)) for name in allocator.sequences}
    references = [allocator.pool.references(block) for block in range(len(allocator.pool))]
    return tables, references, allocator.free_pages(), allocator.used_slots


def test_a_table_grows_by_the_blocks_that_the_tokens_need():
    allocator = BlockAllocator(8, block_size=4)
    allocator.append("a", 6)
    allocator.append("b", 3)
    before = allocator.table("a")
    allocator.append("a", 5)
    table = allocator.table("a")
    assert allocator.length("a") == 11 and len(table) == 3 and table[:2] == before
    assert not set(table) & set(allocator.table("b"))
    assert (allocator.reserved_slots, allocator.used_slots, allocator.free_pages()) == (16, 14, 4)


def test_only_the_end_of_the_last_block_is_wasted():
    allocator = BlockAllocator(100, block_size=16)
    for length in (0, 1, 15, 16, 17, 160):
        allocator.add(length, range(length))
        assert len(allocator.table(length)) == -(-length // 16)
    assert allocator.used_slots == 0 + 1 + 15 + 16 + 17 + 160


@pytest.mark.parametrize(
    "call",
    [
        lambda allocator: allocator.add("new", range(9)),
        lambda allocator: allocator.append("a", range(8)),
        lambda allocator: allocator.append("child", range(9)),
    ],
    ids=["add", "append", "append-with-a-copy"],
)
def test_a_full_pool_leaves_everything_as_it_was(call):
    allocator = BlockAllocator(4, block_size=4)
    allocator.add("a", range(6))
    allocator.fork("a", "child")
    before = state(allocator)
    with pytest.raises(OutOfBlocks, match="needs 3 more blocks of 4 tokens and 2 of 4 are free"):
        call(allocator)
    assert state(allocator) == before


def test_the_copy_counts_when_there_is_room_for_the_tokens_alone():
    allocator = BlockAllocator(1, block_size=4)
    allocator.add("a", range(2))
    allocator.fork("a", "b")
    before = state(allocator)
    with pytest.raises(OutOfBlocks, match="needs 1 more"):
        allocator.append("b", [1])
    assert state(allocator) == before


def test_a_fork_costs_nothing_until_somebody_writes():
    allocator = BlockAllocator(8, block_size=4)
    allocator.add("a", range(6))
    allocator.fork("a", "b")
    assert allocator.free_pages() == 6 and allocator.table("a") == allocator.table("b")
    written = allocator.append("b", [7])
    full, partial = allocator.table("a")
    assert allocator.table("b")[0] == full, "the full block stays shared"
    assert written == [(partial, allocator.table("b")[1])]
    assert allocator.append("a", [8]) == [], "the last one who holds a block may write into it"
    assert allocator.free_pages() == 5


def test_appending_behind_a_full_shared_block_copies_nothing():
    allocator = BlockAllocator(8, block_size=4)
    allocator.add("a", range(8))
    allocator.fork("a", "b")
    assert allocator.append("b", [1]) == [] and allocator.append("a", [2]) == []
    assert allocator.table("a")[:2] == allocator.table("b")[:2]


def test_appending_nothing_changes_nothing():
    allocator = BlockAllocator(4, block_size=4)
    allocator.add("a", range(2))
    allocator.fork("a", "b")
    before = state(allocator)
    assert allocator.append("b", []) == [] and state(allocator) == before


def test_a_sequence_freed_twice_or_used_after_it_is_refused():
    allocator = BlockAllocator(4, block_size=4)
    allocator.add("a", range(2))
    allocator.free("a")
    with pytest.raises(DoubleFree, match="'a' holds no blocks"):
        allocator.free("a")
    uses = (
        allocator.table,
        allocator.length,
        lambda name: allocator.fork(name, "b"),
    )
    for use in uses:
        with pytest.raises(UnknownSequence, match="no sequence 'a'"):
            use("a")
    assert allocator.free_pages() == 4


def test_a_name_is_used_once_at_a_time():
    allocator = BlockAllocator(4, block_size=4)
    allocator.add("a", range(2))
    for call in (lambda: allocator.add("a", range(2)), lambda: allocator.fork("a", "a")):
        with pytest.raises(ValueError, match="'a' already"):
            call()


def test_a_refusal_is_caught_as_what_the_caches_and_exercises_know():
    """A cache waits for a MemoryError and the exercises ask for a KeyError, whose sentence must stay one."""
    allocator = BlockAllocator(1, block_size=4)
    with pytest.raises(MemoryError, match="needs 2 more blocks"):
        allocator.append("a", 5)
    with pytest.raises(KeyError) as refused:
        allocator.free("a")
    assert str(refused.value).startswith("Sequence 'a' holds no blocks")


@pytest.mark.parametrize("tokens, share_prefixes", [(-1, False), (3, True)])
def test_tokens_are_counted_or_where_prefixes_are_shared_named(tokens, share_prefixes):
    allocator = BlockAllocator(4, block_size=4, share_prefixes=share_prefixes)
    for call in (allocator.add, allocator.append):
        with pytest.raises(ValueError, match=f"tokens is {tokens}"):
            call("a", tokens)
    assert allocator.sequences == ()


# ------------------------------------------------------------------------------------------------- shared prefixes


def test_a_prompt_shares_the_full_blocks_that_are_there():
    allocator = BlockAllocator(16, block_size=4, share_prefixes=True)
    allocator.add("a", range(10))
    assert allocator.add("b", [*range(8), 99, 98]) == 8 and allocator.length("b") == 10
    assert allocator.table("a")[:2] == allocator.table("b")[:2]
    assert allocator.table("a")[2] != allocator.table("b")[2]


def test_equal_blocks_behind_other_beginnings_are_not_shared():
    allocator = BlockAllocator(16, block_size=2, share_prefixes=True)
    allocator.add("a", [1, 1, 7, 7, 5])
    assert allocator.add("b", [2, 2, 7, 7, 5]) == 0
    assert not set(allocator.table("a")) & set(allocator.table("b"))


def test_the_last_token_of_a_prompt_is_always_computed():
    allocator = BlockAllocator(16, block_size=4, share_prefixes=True)
    allocator.add("a", range(8))
    assert allocator.add("b", range(8)) == 4 and len(allocator.table("b")) == 2


def test_blocks_that_generated_tokens_filled_are_shared_too():
    allocator = BlockAllocator(16, block_size=4, share_prefixes=True)
    allocator.add("a", range(3))
    for token in range(3, 9):
        allocator.append("a", [token])
    assert allocator.add("b", range(9)) == 8


def test_a_fork_s_own_tokens_are_known_by_their_own_content():
    allocator = BlockAllocator(16, block_size=4, share_prefixes=True)
    allocator.add("a", range(6))
    allocator.fork("a", "b")
    allocator.append("b", [70, 71])
    allocator.append("a", [6, 7])
    for prompt, owner in (([*range(8), 0], "a"), ([*range(6), 70, 71, 0], "b")):
        assert allocator.add(owner + "2", prompt) == 8
        assert allocator.table(owner + "2")[:2] == allocator.table(owner)[:2]


def test_a_prompt_finds_its_blocks_again_after_everybody_has_left():
    allocator = BlockAllocator(4, block_size=4, share_prefixes=True)
    allocator.add("a", range(10))
    allocator.free("a")
    assert allocator.free_pages() == 4 and allocator.used_slots == 0
    assert allocator.add("b", range(10)) == 8
    assert allocator.free_pages() == 1


def test_cached_blocks_that_were_free_count_against_the_room():
    """Found while it was written: the two blocks found again are no room for the tokens behind them."""
    allocator = BlockAllocator(3, block_size=4, share_prefixes=True)
    allocator.add("a", range(8))
    allocator.free("a")
    allocator.add("other", [50])
    before = state(allocator)
    with pytest.raises(OutOfBlocks):
        allocator.add("b", range(9))
    assert state(allocator) == before


def test_the_end_of_a_freed_prompt_is_lost_before_its_beginning():
    allocator = BlockAllocator(4, block_size=4, share_prefixes=True)
    allocator.add("a", range(16))
    allocator.free("a")
    allocator.add("other", range(100, 108))
    allocator.free("other")
    assert allocator.add("b", range(16)) == 8


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0), (4, 2.5), (True, 4)])
def test_sizes_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ValueError, match="at least 1"):
        BlockAllocator(*arguments)
