"""An engine on each of several ranks: the texts of one rank, greedy and drawn ones, with packed weights and without."""

import dataclasses
import functools

import pytest
import torch

from course_lib.bench.engine import tokenizer_of
from course_lib.hardware.device import interpreting
from course_lib.hardware.ranks import Ranks
from course_lib.kernels.fused.rope_append_pages import rope_append_to_pages_reference
from course_lib.models.parallel import shard
from course_lib.models.tiny import tiny_text
from course_lib.models.trained import trained_model
from course_lib.serving import packed
from course_lib.serving.caches.ragged import RaggedPages, Run
from course_lib.serving.engine import Engine
from course_lib.serving.on_ranks import engine_on_ranks, write_on_ranks
from course_lib.serving.packed import PackedDecoder
from course_lib.serving.requests import GREEDY, Request, Sampling
from tests.models.test_parallel import on_threads
from tests.serving.talkers import CONFIG, random_model
from tests.serving.test_captured import by_calling
from tests.serving.test_fast_step import in_pytorch

TEXT = list(tiny_text().encode())
DRAWN = Sampling(temperature=0.9, top_k=40, seed=7)
# The first two begin alike, so that one reads the other's pages; the third is guessed for; the last has the least time.
REQUESTS = [
    Request(TEXT[1000:1030], 14),
    Request(TEXT[1000:1024] + TEXT[4000:4009], 14, DRAWN),
    Request(TEXT[700:722] * 2, 14, speculate=3),
    Request(TEXT[9000:9003], 9, DRAWN, priority=-1, deadline=0.0),
]
# A budget that cuts prompts in pieces, and pages that do not hold all: somebody is sent back.
OPTIONS = {"pages": 28, "page_size": 4, "budget": 24, "most_running": 4, "kernels": False}
FAST = {
    "pages": 20,
    "page_size": 4,
    "budget": 12,
    "most_running": 2,
    "kernels": True,
    "fast": True,
    "capture": by_calling,
}
COUNTS = ("requests", "tokens", "preempted", "proposed", "accepted")


def load(name):
    model = trained_model(name, device="cpu")
    return model, tokenizer_of(model.config)  # whose text shows each token


def written(engine, requests=REQUESTS, cancelled=None):
    """The texts, and what the engine counted; one request may be given up once it has written something."""
    texts = {engine.submit(request): "" for request in requests}
    while engine.busy:
        for event in engine.step():
            texts[event.number] += event.text
            if event.number == cancelled and event.ended is None:
                engine.cancel(cancelled)
    report = engine.metrics.report()
    return [*texts.values()], {name: report[name] for name in COUNTS}


def by_each_rank(ranks, model, tokenizer, options, *arguments):
    return written(engine_on_ranks(ranks, model, tokenizer, **options), *arguments)


@functools.cache
def alone(name, cancelled=None):
    return written(Engine(*load(name), **OPTIONS), cancelled=cancelled)


def test_two_processes_write_the_texts_of_one():
    """Few steps: on busy cores each of their sums waits for the other process."""
    requests = [Request(TEXT[1000:1030], 5), Request(TEXT[700:709], 4, DRAWN)]
    texts = write_on_ranks(2, functools.partial(load, "GQA"), requests, device="cpu", seconds=900, **OPTIONS)
    assert texts == Engine(*load("GQA"), **OPTIONS).texts(requests) and all(texts)


@pytest.mark.parametrize("size, name", [(2, "GQA"), (4, "GQA"), (2, "experts")])
def test_every_rank_writes_and_counts_what_one_alone_does(size, name):
    """Prompts in pieces, shared beginnings, guesses, and a text that is sent back for want of memory."""
    counts = alone(name)[1]
    assert counts["preempted"] and counts["accepted"]
    assert on_threads(by_each_rank, size, *load(name), OPTIONS) == [alone(name)] * size


def test_a_request_that_all_ranks_give_up_is_given_up():
    assert alone("GQA", 1)[0][1] and alone("GQA", 1)[0] != alone("GQA")[0]
    assert on_threads(by_each_rank, 2, *load("GQA"), OPTIONS, REQUESTS, 1) == [alone("GQA", 1)] * 2


def logits_of(ranks, model):
    """Behind each token of a prompt, by packed weights."""
    part = model if ranks is None else shard(model, ranks)
    cache = RaggedPages(part.config, 2, 4, kernels=False)
    cache.take([Run(0, 3, (1,))])
    weights = PackedDecoder(part, *cache.memory, 8)
    return weights.logits(torch.tensor([5, 6, 7]), cache.places, cache.slots, cache.attend_rows)


@pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter")
@pytest.mark.parametrize("size", [2, 4])
def test_packed_shards_give_the_logits_of_packed_weights(size):
    model = random_model(dataclasses.replace(CONFIG, vocabulary=32, normed_heads=True))
    found, wanted = on_threads(logits_of, size, model), logits_of(None, model)
    for logits in found:
        assert torch.equal(logits, found[0]), "ranks choose by the same bits"
        torch.testing.assert_close(logits, wanted)


@pytest.mark.parametrize("size", [2, 4])
def test_steps_that_are_captured_write_the_texts_of_one_rank(size, monkeypatch):
    """With PyTorch's operations in the place of kernels; what a step computes ahead is the same on all ranks too."""
    in_pytorch(monkeypatch)
    monkeypatch.setattr(packed, "rope_append_to_pages", lambda *given, **_: rope_append_to_pages_reference(*given[:7]))
    model, tokenizer = load("GQA")
    requests = [REQUESTS[0], REQUESTS[2], Request(TEXT[100:109], 20)]
    options = {**OPTIONS, "fast": True, "capture": by_calling}
    one = Engine(model, tokenizer, **options)
    assert on_threads(by_each_rank, size, model, tokenizer, options, requests) == [written(one, requests)] * size
    assert one.fast.expected


def broken(x):
    raise ArithmeticError("no sum")


def test_an_error_of_one_rank_is_raised_and_not_told_to_a_request():
    """The others wait for this one, and a step that it runs again alone would meet them in the middle of theirs."""
    model, tokenizer = load("GQA")
    engine = Engine(shard(model, Ranks(0, 1, model.device), broken), tokenizer, **OPTIONS)
    engine.submit(REQUESTS[0])
    with pytest.raises(ArithmeticError, match="no sum"):
        engine.step()


def test_a_draft_that_fails_is_an_error_too():
    model, tokenizer = load("GQA")
    draft = shard(model, Ranks(0, 1, model.device), broken)
    engine = Engine(shard(model, Ranks(0, 1, model.device), torch.clone), tokenizer, draft=draft, **OPTIONS)
    engine.submit(Request(TEXT[:9], 9, GREEDY, speculate=2))
    with pytest.raises(ArithmeticError, match="no sum"):
        while engine.busy:
            engine.step()


def with_other_pages(ranks, model, tokenizer):
    return engine_on_ranks(ranks, model, tokenizer, pages=20 + ranks.rank)


def test_ranks_with_other_options_refuse():
    with pytest.raises(ValueError, match="disagree.*'pages': 21"):
        on_threads(with_other_pages, 2, *load("GQA"))
