"""The library's allocator passes the exercises' own scripts, and the judge's agrees with it on any other."""

import pytest

from course_lib.checker.specification.draw import Draw
from course_lib.serving.memory import BlockAllocator
from exercises.ch06_paged_attention import bookkeeping
from exercises.ch06_paged_attention.ex2_page_allocator import EXERCISE as ALLOCATOR
from exercises.ch06_paged_attention.ex2_page_allocator import random_script
from exercises.ch06_paged_attention.ex6_sharing import EXERCISE as SHARING
from exercises.ch06_paged_attention.ex6_sharing import fitting, random_forks


def told(*arguments):
    return bookkeeping.replay({"PageAllocator": BlockAllocator, "SharingAllocator": BlockAllocator}, *arguments)


@pytest.mark.parametrize("task", [ALLOCATOR, SHARING], ids=lambda task: task.id)
def test_the_librarys_allocator_would_pass(task):
    for case in task.cases(Draw(7)):
        if isinstance(case.args[0], str):
            assert told(*case.args) == bookkeeping.told(*case.args), case.name


@pytest.mark.parametrize("seed", range(12))
def test_the_judge_and_the_library_tell_the_same_story(seed):
    draw = Draw(seed)
    alone = ("PageAllocator", 20, 4, random_script(draw, "abcdef", 150, 11))
    shared = ("SharingAllocator", 24, 4, fitting(24, 4, random_forks(draw, 150, 9)))
    for arguments in (alone, shared):
        story = told(*arguments)
        assert story == bookkeeping.told(*arguments)
        assert not any(";" in line for line in story), "a right allocator loses no token"
    assert any("MemoryError" in line for line in told(*alone))
