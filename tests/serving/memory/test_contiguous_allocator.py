"""Runs of slots: placed first fit, never overlapping, and refused where no hole is long enough."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.serving.memory import ContiguousAllocator, DoubleFree, NoHole, RegionFull, UnknownSequence


def test_a_region_is_placed_in_the_first_hole_that_is_long_enough():
    allocator = ContiguousAllocator(100)
    for name in "abcd":
        allocator.add(name, 5, reserve=20)
    allocator.free("a"), allocator.free("c")
    assert allocator.holes == [(0, 20), (40, 20), (80, 20)]
    assert allocator.add("e", 1, reserve=10) == 0 and allocator.add("f", 1, reserve=15) == 40


def test_a_request_may_fit_in_all_and_in_no_hole():
    allocator = ContiguousAllocator(100)
    for name in "abcde":
        allocator.add(name, 5, reserve=20)
    allocator.free("b"), allocator.free("d")
    with pytest.raises(NoHole, match="30 slots in one run .* 40 are free, the longest run has 20"):
        allocator.add("f", 5, reserve=30)
    assert (allocator.reserved_slots, allocator.used_slots) == (60, 15)


def test_a_full_region_takes_nothing_more():
    allocator = ContiguousAllocator(10)
    start = allocator.add("a", 2, reserve=4)
    assert allocator.append("a") == (start + 2,)
    with pytest.raises(RegionFull, match="3 of 4"):
        allocator.append("a", 2)
    assert allocator.used_slots == 3


def test_a_region_given_back_twice_is_refused():
    allocator = ContiguousAllocator(10)
    allocator.add("a", 2, reserve=4)
    allocator.free("a")
    with pytest.raises(DoubleFree, match="'a'"):
        allocator.free("a")
    with pytest.raises(UnknownSequence, match="'a'"):
        allocator.append("a")


@pytest.mark.parametrize("length, reserve", [(5, 4), (-1, 4), (0, 0)])
def test_more_tokens_than_slots_are_refused(length, reserve):
    with pytest.raises(ValueError, match="reserve at least as many"):
        ContiguousAllocator(10).add("a", length, reserve)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 30), st.just("free")), max_size=40), st.randoms(use_true_random=False))
def test_regions_and_holes_together_are_the_cache(operations, chance):
    allocator, names = ContiguousAllocator(64), []
    for number, operation in enumerate(operations):
        if operation == "free":
            if names:
                allocator.free(names.pop(chance.randrange(len(names))))
            continue
        try:
            allocator.add(number, 1, reserve=operation)
            names.append(number)
        except NoHole:
            assert all(size < operation for _, size in allocator.holes)
        covered = [(r.start, r.start + r.size) for r in map(allocator.region, names)]
        covered += [(start, start + size) for start, size in allocator.holes]
        covered.sort()
        assert covered[0][0] == 0 and covered[-1][1] == 64
        assert all(end == start for (_, end), (start, _) in zip(covered, covered[1:]))
