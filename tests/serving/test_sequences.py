"""Sequences of different lengths in one cache: each text is what it would be alone, and no memory is lost."""

import dataclasses

import pytest
import torch

from course_lib.checker.specification import catalog
from course_lib.hardware.meter.traffic import repair_interpreter
from course_lib.kernels.decode.append import append_to_cache_reference, append_to_pages_reference
from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.paged.attention import paged_decode_attention
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.plugged import each_member
from course_lib.models.training import initialize
from course_lib.serving.caches.sequences import SequencePages, SequenceRows
from course_lib.serving.generation import complete
from course_lib.serving.memory import BlockAllocator, WholeRuns
from course_lib.serving.together import write_together

CONFIG = ModelConfig(vocabulary=256, layers=2, width=32, query_heads=4, key_heads=2, head_dim=16, hidden=48, context=64)
PROMPTS = ("Alice", "T", "Down, down", "She said")


@pytest.fixture(autouse=True, scope="module")
def as_in_a_notebook():
    repair_interpreter()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = Decoder(CONFIG).eval()
    initialize(model)
    return model


def step(query, key, value, key_cache, value_cache, past):
    for number, position in enumerate(past.tolist()):
        key_cache[number, :, position], value_cache[number, :, position] = key[number], value[number]
    return decode_attention(query, key_cache, value_cache, past + 1)


def rows_of(config=CONFIG, rows=4, capacity=32, append=append_to_cache_reference, step=step):
    return SequenceRows(config, rows, capacity, append=append, step=step)


def pages_of(allocator, pages, page_size, config=CONFIG, **functions):
    functions = {"append": append_to_pages_reference, "decode": paged_decode_attention, **functions}
    cache = SequencePages(config, pages, page_size, allocator=allocator, **functions)
    cache.keys.fill_(torch.nan)  # what no token was written to may be anything
    cache.values.fill_(torch.nan)
    return cache


def alone(model, new_tokens):
    wanted = [new_tokens] * len(PROMPTS) if isinstance(new_tokens, int) else new_tokens
    return [complete(model, prompt, new) for prompt, new in zip(PROMPTS, wanted)]


def test_texts_written_together_are_those_written_alone(model):
    written = write_together(model, rows_of(), PROMPTS, 6)
    assert written.texts == alone(model, 6)
    assert written.running == [4] * 5 and written.prefilled == sum(map(len, PROMPTS)) and written.preempted == 0


@pytest.mark.parametrize("key_heads", [4, 1])
def test_any_number_of_kv_heads_will_do(key_heads):
    config = dataclasses.replace(CONFIG, key_heads=key_heads)
    other = Decoder(config).eval()
    initialize(other)
    wanted = alone(other, 4)
    assert write_together(other, rows_of(config), PROMPTS, 4).texts == wanted
    assert write_together(other, pages_of(BlockAllocator(32, 4), 32, 4, config), PROMPTS, 4).texts == wanted


def test_the_courses_answers_of_chapter_05_write_the_same(model):
    (append,), (own_step,) = catalog.reference("5.3"), catalog.reference("5.5")
    assert write_together(model, rows_of(append=append, step=own_step), PROMPTS, 3).texts == alone(model, 3)


def test_the_courses_answers_of_chapter_06_write_the_same(model):
    functions = {
        name: catalog.reference(exercise)[0]
        for name, exercise in (("slot_mapping", "6.3"), ("append", "6.4"), ("decode", "6.5"))
    }
    functions["decode"] = each_member(functions["decode"])
    cache = pages_of(catalog.reference("6.2")[0](16, 4), 16, 4, **functions)
    assert write_together(model, cache, PROMPTS, 3).texts == alone(model, 3)


@pytest.mark.parametrize("exercise", ["6.2", "6.6"])
def test_the_librarys_allocator_is_there_where_none_is_given_and_writes_what_the_readers_does(model, exercise):
    own, readers = pages_of(None, 7, 4), pages_of(catalog.reference(exercise)[0](7, 4), 7, 4)
    assert isinstance(own.allocator, BlockAllocator)
    first, second = (write_together(model, cache, PROMPTS, 5) for cache in (own, readers))
    assert first == second and first.texts == alone(model, 5)


def test_whoever_ends_makes_room_for_whoever_waits(model):
    allocator = BlockAllocator(6, 4)
    written = write_together(model, pages_of(allocator, 6, 4), PROMPTS, [2, 5, 3, 4])
    assert written.texts == alone(model, [2, 5, 3, 4])
    assert allocator.free_pages() == 6 and 1 < max(written.running) < 4


def test_a_sequence_that_others_leave_no_room_is_sent_back_and_ends_all_the_same(model):
    allocator = BlockAllocator(7, 4)
    written = write_together(model, pages_of(allocator, 7, 4), PROMPTS, 14)
    assert written.preempted > 0 and written.texts == alone(model, 14) and allocator.free_pages() == 7


def test_whoever_is_sent_back_comes_before_those_who_have_not_begun(model):
    steps = []
    prompts = ["four", "four", "four", "four"]
    cache = pages_of(BlockAllocator(5, 4), 5, 4)
    written = write_together(model, cache, prompts, [12, 9, 9, 1], each_step=steps.append)
    assert written.texts == [complete(model, "four", new) for new in (12, 9, 9, 1)]
    assert [0, 1] in steps and [1, 2] in steps and [2, 1] not in steps
    # Nobody joins until somebody has ended: else a prompt would be run again at every step, and thrown away.
    assert written.preempted == 2 and written.prefilled < 4 * sum(map(len, prompts))


def test_positions_are_those_of_each_sequence():
    cache = rows_of()
    cache.take([0], 3)
    assert cache.positions(3).tolist() == [[0, 1, 2]]
    cache.advance(3)
    cache.take([1], 5)
    cache.take([0, 1], 1)
    assert cache.positions(1).tolist() == [[3], [5]]


def test_what_does_not_fit_even_alone_says_so(model):
    with pytest.raises(MemoryError):
        write_together(model, pages_of(BlockAllocator(2, 4), 2, 4), ["a prompt of many bytes"], 2)
    with pytest.raises(MemoryError):  # it grows out of the pool
        write_together(model, pages_of(BlockAllocator(2, 4), 2, 4), ["short"], 9)
    with pytest.raises(MemoryError, match="holds 8 tokens"):
        write_together(model, rows_of(capacity=8), ["short"], 9)


def test_whole_runs_hold_fewer_sequences_in_the_same_pool(model):
    most = {}
    for name, allocator in (("runs", WholeRuns(16, 4, 32)), ("pages", BlockAllocator(16, 4))):
        held = []
        cache = pages_of(allocator, 16, 4)
        written = write_together(
            model, cache, PROMPTS, 4, each_step=lambda _, cache=cache, held=held: held.append(cache.held())
        )
        assert written.texts == alone(model, 4)
        most[name] = max(written.running)
        assert len(held) == len(written.running)
    assert most == {"runs": 2, "pages": 4}


def test_a_refused_step_leaves_every_sequence_as_it_was():
    allocator = BlockAllocator(3, 4)
    cache = pages_of(allocator, 3, 4)
    cache.take(["a"], 4)
    cache.take(["b"], 4)
    with pytest.raises(MemoryError, match="2 of 2 sequences need a page more, and 1 are free"):
        cache.take(["a", "b"], 1)
    assert cache.lengths == {"a": 4, "b": 4} and allocator.free_pages() == 1


def test_who_holds_what_is_told_page_by_page():
    cache = pages_of(WholeRuns(8, 4, 16), 8, 4)
    cache.take(["a"], 6)
    assert cache.held() == {0: ("a", 4), 1: ("a", 2), 2: ("a", 0), 3: ("a", 0)}


@pytest.mark.parametrize("sequences, new_tokens", [([], 1), ([0, 1], 3), ([0], 2)])
def test_a_run_is_a_prompt_or_one_token_each(sequences, new_tokens):
    cache = rows_of()
    cache.take([0], 3)
    with pytest.raises(ValueError, match="a run is"):
        cache.take(sequences, new_tokens)


def test_rows_of_a_run_lie_side_by_side_and_exist():
    cache = rows_of(rows=3)
    for row in range(3):
        cache.take([row], 2)
    with pytest.raises(ValueError, match="follow each other"):
        cache.take([0, 2], 1)
    with pytest.raises(MemoryError, match="3 rows"):
        cache.take([3], 2)


def test_a_run_over_other_tokens_than_taken_is_refused(model):
    cache = rows_of()
    cache.take([0], 3)
    with pytest.raises(ValueError, match="run over 2 tokens; room was taken for 3"):
        model(torch.zeros(1, 2, dtype=torch.int64), cache)


@pytest.mark.parametrize("new_tokens", [0, [1, 2]])
def test_every_prompt_gets_at_least_a_byte(model, new_tokens):
    with pytest.raises(ValueError, match="new_tokens"):
        write_together(model, rows_of(), PROMPTS, new_tokens)
