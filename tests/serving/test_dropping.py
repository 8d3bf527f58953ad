"""A cache that gives pages back as they leave the window writes the same text, and stops growing."""

import dataclasses

import pytest
import torch

from course_lib.hardware.meter.traffic import repair_interpreter
from course_lib.kernels.decode.append import append_to_pages_reference
from course_lib.kernels.paged.attention import paged_decode_attention
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.training import initialize
from course_lib.serving.caches.sequences import SequencePages
from course_lib.serving.caches.switched import GuessedPages
from course_lib.serving.generation import complete
from course_lib.serving.memory import BlockAllocator
from course_lib.serving.together import write_together

CONFIG = ModelConfig(256, 1, 32, 4, 2, 16, 48, 64, sliding_window=6)
PROMPTS = ("Alice was beginning", "T", "Down, down")


@pytest.fixture(autouse=True, scope="module")
def as_in_a_notebook():
    repair_interpreter()


def model_of(config):
    torch.manual_seed(0)
    model = Decoder(config).eval().requires_grad_(False)
    initialize(model)
    for block in model.blocks:
        if block.attention.sink is not None:
            block.attention.sink.fill_(1)
    return model


def pages_of(config, pages, page_size, **options):
    cache = SequencePages(
        config, pages, page_size, append=append_to_pages_reference, decode=paged_decode_attention, **options
    )
    cache.keys.fill_(torch.nan)  # what no token was written to may be anything
    cache.values.fill_(torch.nan)
    return cache


def most_pages(window, page_size):
    return -(-(window - 1) // page_size) + 1


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window, page_size", [(6, 4), (1, 1), (5, 2)])
def test_texts_are_the_same_with_and_without_dropping(window, page_size, sinks):
    """In a small pool pages go from one sequence to another; a stale one would carry the other's keys."""
    config = dataclasses.replace(CONFIG, sliding_window=window, sinks=sinks)
    model = model_of(config)
    wanted = [complete(model, prompt, 7, cached=False) for prompt in PROMPTS]
    assert write_together(model, pages_of(config, 64, page_size), PROMPTS, 7).texts == wanted
    held = []
    pages = -(-len(PROMPTS[0]) // page_size) + 3
    cache = pages_of(config, pages, page_size, drop=True)
    written = write_together(model, cache, PROMPTS, 7, each_step=lambda _: held.append(len(cache.held())))
    assert written.texts == wanted and cache.allocator.free_pages() == pages
    assert max(held) <= len(PROMPTS) * most_pages(window, page_size)


@pytest.mark.parametrize("window, page_size", [(1, 4), (4, 4), (5, 4), (6, 4), (7, 1), (64, 16), (66, 16)])
def test_pages_of_a_step_are_bounded_over_a_thousand_tokens(window, page_size):
    config, most = dataclasses.replace(CONFIG, sliding_window=window), most_pages(window, page_size)
    cache, held = pages_of(config, most, page_size, drop=True), []  # one page less would not be enough
    for length in range(1, 1001):
        cache.take(["text"], 1)
        table = cache.table("text")
        seen = range(max(0, length - window) // page_size, len(table))
        assert len(table) == -(-length // page_size) and [i for i, page in enumerate(table) if page >= 0] == [*seen]
        held.append(len(cache.held()))
        cache.advance(1)
    assert max(held) == most


def test_a_prompt_is_stored_whole_and_then_gives_back_what_no_later_query_sees():
    cache = pages_of(CONFIG, 8, 4, drop=True)
    cache.take(["text"], 23)
    assert len(cache.held()) == 6
    cache.advance(23)  # the next query stands at 23 and sees 18 to 23
    assert [page >= 0 for page in cache.table("text")] == [False] * 4 + [True] * 2
    assert cache.allocator.free_pages() == 6


def test_dropping_needs_a_window_and_queries_that_only_go_forward():
    with pytest.raises(ValueError, match="sliding_window is None"):
        pages_of(dataclasses.replace(CONFIG, sliding_window=None), 4, 4, drop=True)
    with pytest.raises(ValueError, match="drop is True"):
        GuessedPages(CONFIG, 4, 4, verify=None, append=None, decode=None, drop=True)


def test_a_block_that_another_sequence_holds_stays():
    allocator = BlockAllocator(6, 4)
    allocator.append("parent", 10)
    allocator.give_back("parent", 5)
    allocator.fork("parent", "child")
    first, second, third = allocator.table("parent")
    assert first == -1 and allocator.table("child") == [-1, second, third] and allocator.free_pages() == 4
    allocator.give_back("parent", 8)
    allocator.give_back("parent", 3)  # gone already
    assert allocator.table("parent") == [-1, -1, third] and allocator.table("child") == [-1, second, third]
    assert allocator.free_pages() == 4
    allocator.append("child", 1)  # into a block of its own
    allocator.free("parent")
    assert allocator.free_pages() == 4 and allocator.table("child")[1] == second
    allocator.give_back("child", 11)
    assert allocator.free_pages() == 5
    allocator.free("child")
    assert allocator.free_pages() == 6


def test_a_shared_prefix_is_found_after_its_first_owner_gave_it_back():
    allocator = BlockAllocator(5, 2, share_prefixes=True)
    allocator.append("first", [1, 2, 3, 4, 5])
    head = allocator.table("first")[0]
    allocator.give_back("first", 2)
    assert allocator.add("second", [1, 2, 9]) == 2 and allocator.table("second")[0] == head
    allocator.append("first", [6, 7])
    assert allocator.table("first")[0] == -1 and allocator.used_slots == 5 + 3


def test_tokens_that_a_sequence_does_not_have_cannot_be_given_back():
    allocator = BlockAllocator(4, 2)
    allocator.append("text", 3)
    for before in (-1, 4):
        with pytest.raises(ValueError, match=f"before is {before}; sequence 'text' has 3 tokens"):
            allocator.give_back("text", before)
