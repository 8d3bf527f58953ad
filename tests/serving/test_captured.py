"""Decode steps captured and replayed: the same tokens as without, nobody's memory touched, and refusals in words."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import nn

from course_lib.checker.specification import catalog
from course_lib.hardware.graphs import captured_on_cpu
from course_lib.hardware.meter.traffic import repair_interpreter
from course_lib.kernels.decode.append import append_to_pages
from course_lib.kernels.paged.attention import paged_decode_attention
from course_lib.models.config import Latent, ModelConfig, with_latent
from course_lib.models.decoder import Decoder
from course_lib.models.plugged import paged_step_of_heads
from course_lib.models.training import initialize
from course_lib.serving.caches.latent_sequences import LatentPages
from course_lib.serving.caches.sequences import SequencePages, SteppedPages
from course_lib.serving.captured import CapturedDecoder
from course_lib.serving.together import write_together

CONFIG = ModelConfig(vocabulary=256, layers=2, width=32, query_heads=4, key_heads=2, head_dim=16, hidden=48, context=64)
PROMPTS = ("Alice", "T", "Down, down", "She said")
WANTED = (7, 12, 3, 9)


class Pages:
    """An allocator that hands out the page that was freed last, so that pages change hands often."""

    def __init__(self, pages, page_size):
        self.page_size, self.free_list = page_size, list(range(pages))
        self.tables, self.lengths = {}, {}

    def append(self, sequence, count):
        length, table = self.lengths.get(sequence, 0) + count, self.tables.get(sequence, [])
        needed = -(-length // self.page_size) - len(table)
        if needed > len(self.free_list):
            raise MemoryError("full")
        self.tables[sequence] = table + [self.free_list.pop() for _ in range(needed)]
        self.lengths[sequence] = length

    def table(self, sequence):
        return self.tables[sequence]

    def free(self, sequence):
        self.free_list += self.tables.pop(sequence)
        del self.lengths[sequence]

    def free_pages(self):
        return len(self.free_list)


def append(key, value, key_pages, value_pages, slots):
    page_size = key_pages.shape[2]
    key_pages[slots // page_size, :, slots % page_size] = key
    value_pages[slots // page_size, :, slots % page_size] = value


def attend(query, key_pages, value_pages, tables, lengths, longest=None):
    """Grouped attention by PyTorch's operations alone; `longest` is a number of the host's."""
    group = query.shape[1] // key_pages.shape[1]
    keys, values = (
        pages[tables].transpose(1, 2).flatten(2, 3).repeat_interleave(group, 1) for pages in (key_pages, value_pages)
    )  # [batch, query_heads, columns · page_size, head_dim]
    scores = (keys @ query[..., None])[..., 0] / math.sqrt(query.shape[2])
    places = torch.arange(keys.shape[2])
    seen = places < lengths[:, None]
    if longest is not None:
        seen = seen & (places < longest)
    weights = scores.masked_fill(~seen[:, None], -1e30).softmax(-1)
    return (weights[:, :, None] @ values)[:, :, 0]


def model_of(config=CONFIG, seed=0):
    torch.manual_seed(seed)
    model = Decoder(config).eval()
    initialize(model)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    repair_interpreter()
    return model_of()


def cache_of(pages=20, page_size=4, config=CONFIG, **functions):
    """A cache with one page more than its allocator hands out."""
    functions = {"append": append, "decode": attend, **functions}
    cache = SequencePages(config, pages + 1, page_size, allocator=Pages(pages, page_size), **functions)
    cache.keys.fill_(3.0)  # finite, and nobody's
    cache.values.fill_(-5.0)
    return cache


def captured(model, cache, batches=(1, 2, 4), columns=(2, 6), capture=captured_on_cpu, **options):
    return CapturedDecoder(model, cache, batches=batches, columns=columns, capture=capture, **options)


def by_calling(function):
    """In place of a graph: the function itself, so that kernels run that a recorder on the CPU does not know."""
    function()
    return function


KERNELS = {
    "append": partial(append_to_pages, validate=False),
    "decode": partial(paged_decode_attention, validate=False),
}


@pytest.mark.parametrize("columns", [(6,), (1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("batches", [(4,), (1, 2, 3, 4)])
def test_replayed_steps_write_the_same_as_batches_come_and_go_and_sequences_grow(model, batches, columns):
    wanted = write_together(model, cache_of(), PROMPTS, WANTED)
    graphs = captured(model, cache := cache_of(), batches, columns)
    written = write_together(graphs, cache, PROMPTS, WANTED)
    assert written.texts == wanted.texts
    assert graphs.replayed == len(written.running) > 5 and set(written.running) >= {4, 3, 2}
    assert list(graphs.plain.values()) == [len(PROMPTS)] and "A prompt runs" in next(iter(graphs.plain))


def test_pages_that_change_hands_and_sequences_that_are_sent_back_make_no_difference(model):
    wanted = write_together(model, cache_of(8), PROMPTS, 14)
    graphs = captured(model, cache := cache_of(8))
    written = write_together(graphs, cache, PROMPTS, 14)
    assert written.texts == wanted.texts and written.preempted == wanted.preempted > 0
    assert graphs.replayed == len(written.running)


def test_the_courses_kernels_take_padded_rows_and_wide_tables(model):
    wanted = write_together(model, cache_of(**KERNELS), PROMPTS, 4)
    graphs = captured(model, cache := cache_of(**KERNELS), (3, 4), (6,), capture=by_calling)
    cache.keys[:, -1], cache.values[:, -1] = torch.nan, torch.nan  # the padded rows' page
    written = write_together(graphs, cache, PROMPTS, 4)
    assert written.texts == wanted.texts and graphs.replayed == len(written.running)


def test_a_model_with_latents_is_replayed_as_well():
    config = with_latent(CONFIG, Latent(latent_dim=16, rope_dim=8, nope_dim=8, value_dim=16))
    model = model_of(config)

    def decode(query, pages, tables, lengths, *, scale, value_dim):
        rows = pages[tables].flatten(1, 2)  # [batch, columns · page_size, row_dim]
        scores = query[:, 0] @ rows.transpose(1, 2) * scale  # [batch, heads, places]
        seen = torch.arange(rows.shape[1]) < lengths[:, None]
        weights = scores.masked_fill(~seen[:, None], -1e30).softmax(-1)
        return (weights @ rows[..., :value_dim])[:, None]

    def latents():
        cache = LatentPages(config, 21, 4, allocator=Pages(20, 4), decode=decode)
        cache.pages.fill_(2.0)
        return cache

    wanted = write_together(model, latents(), PROMPTS, WANTED)
    graphs = captured(model, cache := latents())
    assert write_together(graphs, cache, PROMPTS, WANTED).texts == wanted.texts and graphs.replayed > 5


def stepped_pages(model, step):
    return SteppedPages(CONFIG, 21, 4, allocator=Pages(20, 4), append=append, step=paged_step_of_heads(step))


def test_the_courses_answer_of_chapter_14_is_replayed_and_writes_the_same(model):
    step, _ = catalog.reference("14.4")
    wanted = write_together(model, cache_of(), PROMPTS, WANTED).texts
    assert write_together(model, stepped_pages(model, step), PROMPTS, WANTED).texts == wanted
    graphs = captured(model, cache := stepped_pages(model, step), (4,), (6,))
    assert write_together(graphs, cache, PROMPTS, WANTED).texts == wanted and graphs.replayed > 5


def test_nan_in_padded_rows_reaches_nobody(model):
    """A softmax over nothing is NaN, and it is stored in the spare page. Tables of others that named that page in their
    empty columns let it through: its weight there is 0, and 0 · NaN is NaN."""
    step, _ = catalog.reference("14.4")
    graphs = captured(model, cache := stepped_pages(model, step), (4,), (6,))
    assert cache.keys[:, -1].isnan().any() and cache.keys[:, :-1].isfinite().all()
    cache.take(["only"], 2)
    graphs(torch.tensor([[1, 2]]), cache)
    cache.take(["only"], 1)
    assert graphs(torch.tensor([[3]]), cache).isfinite().all() and graphs.replayed == 1


def test_the_compiler_takes_the_step_as_one_graph(model):
    step, _ = catalog.reference("14.4")
    wanted = write_together(model, cache_of(), PROMPTS, WANTED).texts
    whole = partial(torch.compile, backend="eager", fullgraph=True, dynamic=False)
    graphs = captured(model, cache := stepped_pages(model, step), (2, 4), (6,), capture=whole)
    assert write_together(graphs, cache, PROMPTS, WANTED).texts == wanted and graphs.replayed > 5


def test_capturing_and_padded_rows_write_to_no_page_but_the_spare_one(model):
    cache = cache_of()
    before = cache.keys.clone(), cache.values.clone()
    graphs = captured(model, cache, (4,), (6,))
    for pool, first in zip(cache.memory, before):
        assert torch.equal(pool[:, :-1], first[:, :-1])
    cache.take(["only"], 3)
    graphs(torch.tensor([[65, 66, 67]]), cache)
    cache.take(["only"], 1)
    graphs(torch.tensor([[68]]), cache)
    own = cache.table("only")
    others = [page for page in range(20) if page not in own]
    assert graphs.replayed == 1
    for pool, first in zip(cache.memory, before):
        assert torch.equal(pool[:, others], first[:, others]) and not torch.equal(pool[:, own], first[:, own])


def test_logits_are_those_of_the_plain_step_at_every_length(model):
    plain, cache = cache_of(), cache_of()
    graphs = captured(model, cache, (2,), (6,))
    for one in (plain, cache):
        one.take(["a"], 1)
        model(torch.tensor([[7]]), one)
    for length in range(2, 25):
        for one in (plain, cache):
            one.take(["a"], 1)
        token = torch.tensor([[length * 7 % 256]])
        with torch.inference_mode():
            torch.testing.assert_close(graphs(token, cache, last_only=True), model(token, plain, last_only=True))
    assert graphs.replayed == 23 and graphs.reason is None


def test_a_number_that_the_host_decides_is_baked_in_and_shows(model):
    """The recorder is worth something only if a wrong step comes out wrong."""

    def first_pages_only(query, key_pages, value_pages, tables, lengths):
        return attend(query, key_pages, value_pages, tables, lengths, longest=cache.page_size * decided[0])

    decided, cache = [1], cache_of(decode=first_pages_only)
    graphs = captured(model, cache, (4,), (6,))
    decided[0] = 6
    wanted = write_together(model, cache_of(), PROMPTS, WANTED).texts
    assert write_together(graphs, cache, PROMPTS, WANTED).texts != wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_everything_runs_plainly_and_says_so(model):
    graphs = CapturedDecoder(model, cache := cache_of(), batches=(4,), columns=(6,))
    wanted = write_together(model, cache_of(), PROMPTS, 4).texts
    assert write_together(graphs, cache, PROMPTS, 4).texts == wanted
    assert graphs.replayed == 0 and "needs an NVIDIA GPU" in graphs.reason and "needs an NVIDIA GPU" in graphs.report()


def test_a_step_that_waits_runs_plainly_and_says_so(model):
    def waiting(query, key_pages, value_pages, tables, lengths):
        return attend(query, key_pages, value_pages, tables, lengths, longest=lengths.max().item())

    graphs = captured(model, cache := cache_of(decode=waiting))
    wanted = write_together(model, cache_of(), PROMPTS, 4).texts
    assert write_together(graphs, cache, PROMPTS, 4).texts == wanted
    assert graphs.replayed == 0 and "makes the host wait for a number" in graphs.reason


def test_a_batch_above_the_largest_graph_runs_plainly_and_the_same(model):
    wanted = write_together(model, cache_of(), PROMPTS, WANTED)
    graphs = captured(model, cache := cache_of(), (2,), (6,))
    assert write_together(graphs, cache, PROMPTS, WANTED).texts == wanted.texts
    assert graphs.plain["The largest graph holds 2 sequences, and there were more."] == sum(
        running > 2 for running in wanted.running
    )
    assert 0 < graphs.replayed < len(wanted.running) and graphs.report().startswith(f"{graphs.replayed} of ")


def test_a_sequence_wider_than_the_widest_table_runs_plainly_and_the_same(model):
    wanted = write_together(model, cache_of(), PROMPTS, WANTED)
    graphs = captured(model, cache := cache_of(), (4,), (3,))
    assert write_together(graphs, cache, PROMPTS, WANTED).texts == wanted.texts
    assert graphs.plain["The widest graph holds 3 pages of a sequence, and one had more."] > 0 < graphs.replayed


def begun(model, cache, names=("a",), **options):
    """Graphs, and sequences that have had a prompt of two tokens each and have room for another token."""
    graphs = captured(model, cache, (2,), (2,), **options)
    for name in names:
        cache.take([name], 2)
        graphs(torch.tensor([[1, 2]]), cache)
    cache.take(list(names), 1)
    return graphs, graphs._steps[2, 2]


def test_one_graph_refuses_what_is_larger_than_it(model):
    _, step = begun(model, cache := cache_of(), "abc")
    with pytest.raises(ValueError, match="3 sequences of up to 1 pages; this graph was captured for at most 2"):
        step(torch.ones(3, 1, dtype=torch.int64), cache.step_on_host())


@pytest.mark.parametrize(
    "change, words",
    [
        ({"ends": [5]}, r"lengths\[0\] is 5; a row of block_tables, 1 pages of 4 tokens"),
        ({"ends": [-1]}, r"lengths\[0\] is -1"),
        ({"tables": [[21]]}, r"block_tables\[0, 0\] is 21, which sequence 0 with 3 tokens needs"),
        ({"tables": [[-1]]}, r"block_tables\[0, 0\] is -1, which sequence 0"),
    ],
)
def test_a_cache_that_outgrew_its_table_and_a_page_outside_the_pool_are_refused(model, change, words):
    _, step = begun(model, cache := cache_of())
    change = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in change.items()}
    with pytest.raises(ValueError, match=words):
        step(torch.ones(1, 1, dtype=torch.int64), cache.step_on_host()._replace(**change))


@pytest.mark.parametrize("slot", [-2, 84])
def test_a_slot_outside_the_pool_is_refused(model, slot):
    _, step = begun(model, cache := cache_of())
    with pytest.raises(ValueError, match=f"is {slot}"):
        step(torch.ones(1, 1, dtype=torch.int64), cache.step_on_host()._replace(slots=torch.tensor([slot])))


def test_an_allocator_that_hands_out_the_spare_page_is_told(model):
    graphs, _ = begun(model, cache := cache_of(), spare_page=19)  # which the allocator hands out first
    with pytest.raises(ValueError, match="a sequence has page 19, where the rows behind a batch store"):
        graphs(torch.tensor([[3]]), cache)


def test_a_second_step_without_room_is_refused_as_the_model_refuses_it(model):
    graphs, _ = begun(model, cache := cache_of())
    graphs(torch.tensor([[3]]), cache)
    with pytest.raises(ValueError, match="room was taken for 0"):
        graphs(torch.tensor([[3]]), cache)


def test_tokens_of_another_batch_are_refused(model):
    graphs, _ = begun(model, cache := cache_of())
    with pytest.raises(ValueError, match=r"tokens has shape \(2, 1\)"):
        graphs(torch.tensor([[3], [4]]), cache)


def replace_pages(model, cache):
    cache.keys = cache.keys.clone()


def free_pages(model, cache):
    cache.values.untyped_storage().resize_(0)


def replace_a_weight(model, cache):
    model.blocks[1].feed_forward.up.weight = nn.Parameter(model.blocks[1].feed_forward.up.weight.clone())


def move_a_weight(model, cache):
    model.norm.weight.data = model.norm.weight.data.clone()


def replace_a_layer(model, cache):
    model.blocks[0].attention.output = nn.Linear(64, 32, bias=False)


@pytest.mark.parametrize("change", [replace_pages, free_pages, replace_a_weight, move_a_weight, replace_a_layer])
def test_memory_that_moved_is_refused_and_not_read(change):
    model = model_of()
    graphs, _ = begun(model, cache := cache_of())
    change(model, cache)
    with pytest.raises(RuntimeError, match="replaced or moved after the step was captured"):
        graphs(torch.tensor([[3]]), cache)


def test_weights_with_new_contents_in_the_same_memory_count():
    model, other = model_of(), model_of(seed=1)
    graphs = captured(model, cache := cache_of())
    model.load_state_dict(other.state_dict())
    assert write_together(graphs, cache, PROMPTS, 6).texts == write_together(other, cache_of(), PROMPTS, 6).texts
    assert graphs.replayed == 5


def test_another_cache_is_refused(model):
    with pytest.raises(ValueError, match="another one than that of the graphs"):
        captured(model, cache_of())(torch.tensor([[3]]), cache_of())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"batches": ()}, r"batches is \(\)"),
        ({"columns": (2, 0)}, r"columns is \(2, 0\)"),
        ({"spare_page": 21}, "spare_page is 21; the cache has the pages 0 to 20"),
    ],
)
def test_sizes_that_make_no_sense_are_named(model, options, words):
    with pytest.raises(ValueError, match=words):
        captured(model, cache_of(), **options)


def test_a_cache_in_use_is_not_captured(model):
    cache = cache_of()
    cache.take(["a"], 2)
    with pytest.raises(ValueError, match="holds 1 sequences; capture before"):
        captured(model, cache)


def test_grouped_heads_of_any_number(model):
    config = dataclasses.replace(CONFIG, key_heads=1)
    other = model_of(config)
    wanted = write_together(other, cache_of(config=config), PROMPTS, 5).texts
    graphs = captured(other, cache := cache_of(config=config))
    assert write_together(graphs, cache, PROMPTS, 5).texts == wanted and graphs.replayed == 4
