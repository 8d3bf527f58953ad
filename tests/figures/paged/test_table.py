"""The story that is drawn is what the allocator did, and every moment of it can be drawn."""

import pytest

from course_lib.figures.paged.story import story_of
from course_lib.figures.paged.table import (
    chosen_moments,
    draw_moment,
    draw_moments,
    filled,
    owners,
    page_table_stepper,
)


def frame(story, title):
    return next(frame for frame in story.frames if frame.title.startswith(title))


def test_the_story_shows_sharing_copying_freeing_and_finding_again():
    story = story_of()
    found = "8 tokens found in pages 0 and 1, shared from now on.\n1 page more taken."
    assert frame(story, "C comes").note == found
    assert frame(story, "B is forked").note.startswith("No page taken")
    assert "is copied to" in frame(story, "D gets").note
    assert "2 pages stay with others" in frame(story, "A ends").note
    found_again = "8 tokens found in pages 0 and 1, free, not overwritten.\n1 page more taken."
    assert frame(story, "F comes").note == found_again, "found again after everybody had left"


def test_owners_and_filled_slots_follow_the_tables():
    story = story_of([("add", "A", range(6)), ("fork", "A", "B"), ("append", "B", (9,))], blocks=4, block_size=4)
    forked, copied = story.frames[1], story.frames[2]
    first, last = forked.tables["A"]
    assert owners(forked) == {first: ["A", "B"], last: ["A", "B"]} and filled(forked, 4) == {first: 4, last: 2}
    own = copied.tables["B"][1]
    assert owners(copied)[own] == ["B"] and filled(copied, 4)[own] == 3 and filled(copied, 4)[last] == 2
    assert copied.new == {own}


def test_a_full_pool_is_a_moment_of_its_own():
    story = story_of([("add", "A", range(8)), ("append", "A", range(9))], blocks=3, block_size=4)
    assert story.frames[1].title == "A is refused" and story.frames[1].note.endswith("Nothing has changed.")
    assert "page" in story.frames[1].note and "block" not in story.frames[1].note
    assert story.frames[1].tables == story.frames[0].tables


def test_every_moment_draws():
    story = story_of()
    for index, moment in enumerate(story.frames):
        assert draw_moment(story, index).axes[0].get_title(loc="left") == f"{index + 1} · {moment.title}"


@pytest.mark.parametrize("operations", [[("add", "A", range(3))], [("add", n, range(2)) for n in "ABCDEF"]])
def test_a_short_or_uneventful_story_draws_too(operations):
    story = story_of(operations, blocks=8, block_size=2)
    assert draw_moments(story).axes and len(chosen_moments(story)) == min(4, len(operations))


def test_the_still_ends_with_the_last_moment():
    assert chosen_moments(story_of())[-1] == len(story_of().frames) - 1


def test_the_slider_changes_the_picture():
    box = page_table_stepper().widget()
    (play, slider), image = box.children[0].children, box.children[1]
    before = image.value
    slider.value = 5
    assert image.value != before and play.max == slider.max == len(story_of().frames) - 1


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"blocks": 25}, "blocks"),
        ({"block_size": 0}, "block_size"),
        ({"operations": [("move", "A")]}, "'move'"),
    ],
)
def test_what_cannot_be_drawn_is_named(arguments, name):
    with pytest.raises(ValueError, match=name):
        story_of(**arguments)
