"""Sequences of different lengths in one cache of latents: each text is what it would be alone."""

import pytest
import torch

from course_lib.kernels.latent.attention import latent_decode_attention, paged_latent_decode_attention
from course_lib.kernels.latent.reference import latent_decode_reference
from course_lib.models.config import Latent, ModelConfig, with_latent
from course_lib.models.decoder import Decoder
from course_lib.models.training import initialize
from course_lib.serving.caches.latent_sequences import LatentPages, LatentRows
from course_lib.serving.caches.runs import slots_in_pages
from course_lib.serving.caches.sequences import SequencePages, SequenceRows
from course_lib.serving.generation import complete
from course_lib.serving.together import write_together

BASE = ModelConfig(vocabulary=256, layers=2, width=32, query_heads=4, key_heads=2, head_dim=16, hidden=48, context=64)
CONFIG = with_latent(BASE, Latent(latent_dim=16, rope_dim=16, nope_dim=12, value_dim=16))
PROMPTS = ("Alice", "T", "Down, down", "She said")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = Decoder(CONFIG).eval()
    initialize(model)
    return model


def rows_of(**options):
    cache = LatentRows(CONFIG, 4, 32, **options)
    cache.rows.fill_(torch.nan)  # what no token was written to may be anything
    return cache


def pages_of(pages, page_size, allocator, **options):
    cache = LatentPages(CONFIG, pages, page_size, allocator=allocator, **options)
    cache.pages.fill_(torch.nan)
    return cache


class Scattered:
    """An allocator that hands out pages one by one, the last first."""

    def __init__(self, pages, page_size):
        self.free_ones, self.page_size, self.tables, self.lengths = list(range(pages)), page_size, {}, {}

    def append(self, sequence, count):
        length = self.lengths.get(sequence, 0) + count
        table = self.tables.get(sequence, [])
        more = -(-length // self.page_size) - len(table)
        if more > len(self.free_ones):
            raise MemoryError("full")
        self.tables[sequence] = table + [self.free_ones.pop() for _ in range(more)]
        self.lengths[sequence] = length

    def table(self, sequence):
        return self.tables[sequence]

    def free(self, sequence):
        self.free_ones += self.tables.pop(sequence)
        del self.lengths[sequence]

    def free_pages(self):
        return len(self.free_ones)


def alone(model, new_tokens):
    return [complete(model, prompt, new_tokens) for prompt in PROMPTS]


def test_texts_written_together_in_rows_are_those_written_alone(model):
    written = write_together(model, rows_of(), PROMPTS, 6)
    assert written.texts == alone(model, 6)
    assert written.running == [4] * 5 and written.prefilled == sum(map(len, PROMPTS))


@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_texts_written_together_in_pages_are_those_written_alone(model, page_size):
    allocator = Scattered(128 // page_size, page_size)
    cache = pages_of(128 // page_size, page_size, allocator)
    assert write_together(model, cache, PROMPTS, 6).texts == alone(model, 6)
    assert allocator.free_pages() == 128 // page_size


def test_the_courses_kernels_write_the_same(model):
    rows = rows_of(decode=latent_decode_attention)
    pages = pages_of(16, 4, Scattered(16, 4), decode=paged_latent_decode_attention)
    for cache in (rows, pages):
        assert write_together(model, cache, PROMPTS, 3).texts == alone(model, 3)


def test_whoever_is_sent_back_for_want_of_pages_ends_all_the_same(model):
    written = write_together(model, pages_of(7, 4, Scattered(7, 4)), PROMPTS, 14)
    assert written.preempted > 0 and written.texts == alone(model, 14)


def test_a_decode_function_gets_the_rows_of_the_run_and_their_lengths(model):
    seen = []

    def decode(query, cache, lengths, *, scale, value_dim):
        seen.append((tuple(query.shape), tuple(cache.shape), lengths.tolist(), lengths.dtype, scale))
        return latent_decode_reference(query, cache, lengths, scale=scale, value_dim=value_dim)

    write_together(model, rows_of(decode=decode), PROMPTS, 2)
    assert seen == [((4, 1, 4, 32), (4, 32, 32), [6, 2, 11, 9], torch.int32, 28**-0.5)] * 2


def test_slots_are_those_of_the_last_tokens():
    tables = torch.tensor([[5, 0, -1], [2, 7, 1]], dtype=torch.int32)
    slots = slots_in_pages(tables, torch.tensor([5, 9]), torch.tensor([3, 1]), 4)
    assert slots.tolist() == [5 * 4 + 2, 5 * 4 + 3, 0 * 4 + 0, 1 * 4 + 0] and slots.dtype == torch.int64


def test_caches_of_keys_and_values_refuse_such_a_model_and_these_any_other():
    with pytest.raises(ValueError, match="Use LatentRows"):
        SequenceRows(CONFIG, 1, 4, append=print, step=print)
    with pytest.raises(ValueError, match="Use LatentPages"):
        SequencePages(CONFIG, 2, 4, append=print, decode=print)
    with pytest.raises(ValueError, match="config.latent is None"):
        LatentRows(BASE, 1, 4)
    with pytest.raises(ValueError, match="config.latent is None"):
        LatentPages(BASE, 2, 4)
