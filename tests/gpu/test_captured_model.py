"""The decode steps of a model as CUDA graphs: what they write, what they refuse, and what they save."""

import time
from functools import partial

import pytest
import torch

from course_lib.checker.specification import catalog
from course_lib.hardware.graphs import compiled
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.decode.append import append_to_pages
from course_lib.kernels.paged.attention import paged_decode_attention
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.plugged import paged_step_of_heads
from course_lib.models.training import initialize
from course_lib.serving.caches.sequences import SequencePages, SteppedPages
from course_lib.serving.captured import CapturedDecoder
from course_lib.serving.together import write_together
from tests.serving.test_captured import Pages

CONFIG = ModelConfig(
    vocabulary=256, layers=4, width=256, query_heads=8, key_heads=2, head_dim=64, hidden=512, context=512
)
PROMPTS = ("Alice was beginning", "T", "Down, down, down. Would the fall", "She said", "The Queen", "Oh dear")
WANTED = (60, 130, 25, 90, 40, 200)
KERNELS = {
    "append": partial(append_to_pages, validate=False),
    "decode": partial(paged_decode_attention, validate=False),
}


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    model = Decoder(CONFIG, attention).eval()
    initialize(model)
    return model.to("cuda", dtype).requires_grad_(False)


def cache_of(pages=100, page_size=16, dtype=torch.float32, **functions):
    """A cache with one page more than its allocator hands out, full of NaN where no token is."""
    cache = SequencePages(
        CONFIG, pages + 1, page_size, allocator=Pages(pages, page_size), attention=attention,
        dtype=dtype, device="cuda", **{**KERNELS, **functions},
    )  # fmt: skip
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.mark.parametrize("columns", [(16,), (2, 4, 8, 16)])
@pytest.mark.parametrize("batches", [(8,), (1, 2, 4, 8)])
def test_graphs_write_what_the_plain_steps_write(model, batches, columns):
    """In float32: another batch is another matrix product, which in 16 bits may round to another token."""
    wanted = write_together(model, cache_of(), PROMPTS, WANTED)
    cache = cache_of()
    graphs = CapturedDecoder(model, cache, batches=batches, columns=columns)
    written = write_together(graphs, cache, PROMPTS, WANTED)
    assert graphs.replayed == len(written.running), graphs.report()
    assert written.texts == wanted.texts


def test_graphs_write_the_same_when_pages_run_short_and_change_hands(model):
    wanted = write_together(model, cache_of(30), PROMPTS, 100)
    graphs = CapturedDecoder(model, cache := cache_of(30), batches=(1, 2, 4, 8), columns=(16,))
    written = write_together(graphs, cache, PROMPTS, 100)
    assert written.preempted == wanted.preempted > 0 and written.texts == wanted.texts


def test_logits_of_a_graph_in_16_bits_are_those_of_the_plain_step():
    model, plain, cache = model_of(torch.float16), cache_of(dtype=torch.float16), cache_of(dtype=torch.float16)
    graphs = CapturedDecoder(model, cache, batches=(4,), columns=(16,))
    prompts = [torch.randint(0, 256, (1, length), device="cuda") for length in (1, 40, 17)]
    with torch.inference_mode():
        for one in (plain, cache):
            for name, prompt in enumerate(prompts):
                one.take([name], prompt.shape[1])
                model(prompt, one)
        for _ in range(100):
            token = torch.randint(0, 256, (3, 1), device="cuda")
            for one in (plain, cache):
                one.take([0, 1, 2], 1)
            ours, theirs = graphs(token, cache).float(), model(token, plain).float()
            torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.03)
    assert graphs.replayed == 100


def test_tokens_may_come_from_either_side(model):
    found = []
    for device in ("cpu", "cuda"):
        graphs = CapturedDecoder(model, cache := cache_of(), batches=(2,), columns=(4,))
        cache.take(["a"], 2)
        with torch.inference_mode():
            model(torch.tensor([[1, 2]], device="cuda"), cache)
            cache.take(["a"], 1)
            found.append(graphs(torch.tensor([[3]], device=device), cache).clone())
        assert graphs.replayed == 1
    assert torch.equal(*found)


def test_a_step_that_waits_is_not_captured_says_so_and_leaves_the_gpu_usable(model):
    cache = cache_of(decode=paged_decode_attention)  # which reads the lengths to check them
    graphs = CapturedDecoder(model, cache, batches=(8,), columns=(16,))
    wanted = write_together(model, cache_of(), PROMPTS, 10).texts
    assert write_together(graphs, cache, PROMPTS, 10).texts == wanted
    assert graphs.replayed == 0 and "waits for the GPU" in graphs.reason
    assert torch.randn(5, device="cuda").isfinite().all()


def test_pages_that_were_replaced_are_refused(model):
    graphs = CapturedDecoder(model, cache := cache_of(), batches=(2,), columns=(4,))
    cache.take(["a"], 2)
    with torch.inference_mode():
        model(torch.tensor([[1, 2]], device="cuda"), cache)
        cache.take(["a"], 1)
        cache.keys = cache.keys.clone()
        with pytest.raises(RuntimeError, match="replaced or moved"):
            graphs(torch.tensor([[3]], device="cuda"), cache)


def test_the_compilers_graphs_write_the_same_and_were_captured(model):
    """The compiler says nothing where it leaves graphs out; it counts."""
    from torch._dynamo.utils import counters

    step, _ = catalog.reference("14.4")
    cache = SteppedPages(
        CONFIG, 101, 16, allocator=Pages(100, 16), attention=attention, device="cuda",
        append=KERNELS["append"], step=paged_step_of_heads(step),
    )  # fmt: skip
    before = counters["inductor"]["cudagraph_skips"]
    graphs = CapturedDecoder(
        model, cache, batches=(2, 8), columns=(16,), capture=partial(compiled, static=cache.memory)
    )
    wanted = write_together(model, cache_of(), PROMPTS, WANTED).texts
    assert write_together(graphs, cache, PROMPTS, WANTED).texts == wanted
    assert graphs.replayed > 0, graphs.report()
    assert counters["inductor"]["cudagraph_skips"] == before


def test_a_kernel_that_is_launched_into_another_stream_is_not_in_the_graph():
    """Chapter 14 says so: it runs during the capture, and never again. After an event it is captured."""
    inside, outside = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    other = torch.cuda.Stream()
    for tensor in (inside, outside):
        tensor.add_(0.0)  # the kernel is loaded
    for joined, left in ((False, 1.0), (True, 2.0)):
        inside.zero_(), outside.zero_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside.add_(1.0)
            if joined:
                other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                outside.add_(1.0)
            if joined:
                torch.cuda.current_stream().wait_stream(other)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert inside.tolist() == [2.0] * 8 and outside.tolist() == [left] * 8


def tokens_a_second(model, cache, tokens=300) -> float:
    write_together(model, cache, ["A"], 20)
    torch.cuda.synchronize()
    start = time.perf_counter()
    write_together(model, cache, ["A"], tokens)
    return tokens / (time.perf_counter() - start)


def test_a_replayed_step_is_at_least_twice_as_fast_as_one_that_is_launched(model):
    """Four layers launch more than 100 kernels of a few µs; the host takes about a millisecond for them."""
    cache = cache_of()
    graphs = CapturedDecoder(model, cache, batches=(1,), columns=(32,))
    plain, replayed = tokens_a_second(model, cache_of()), tokens_a_second(graphs, cache)
    print(f"{plain:.0f} tokens a second launched, {replayed:.0f} replayed")
    assert replayed >= 2 * plain
