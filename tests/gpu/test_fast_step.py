"""The engine's fast steps as graphs: the texts of plain steps, and less time for them."""

import dataclasses
import time

import pytest
import torch

from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.training import initialize
from course_lib.serving.engine import Engine
from course_lib.serving.requests import Request, Sampling
from tests.serving.talkers import byte_tokenizer

CONFIG = ModelConfig(257, 4, 256, 8, 2, 64, 512, 512)


def model_of(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    model = Decoder(dataclasses.replace(CONFIG, **changes)).eval()
    initialize(model)
    return model.to("cuda", dtype).requires_grad_(False)


def engine_of(model, **options):
    return Engine(model, byte_tokenizer(stops=()), **({"pages": 300, "most_running": 8} | options))


REQUESTS = [
    Request([(7 * k + n) % 256 for n in range(3 + 29 * k)], 40 + 9 * k, Sampling(temperature=0.4 * (k % 3), seed=k))
    for k in range(8)
]


@pytest.mark.parametrize("changes", [{}, {"normed_heads": True}, {"tied": True}], ids=["plain", "QK-norm", "tied"])
@pytest.mark.parametrize("options", [{}, {"pages": 40}, {"most_running": 3}], ids=["", "few pages", "three at a time"])
def test_fast_steps_write_what_plain_steps_write(changes, options):
    """In float32, where nothing is so close that another order of sums decides."""
    model = model_of(**changes)
    engine = engine_of(model, **options)
    assert engine.texts(REQUESTS) == engine_of(model, fast=False, **options).texts(REQUESTS)
    assert engine.fast.replayed > 60


def test_in_16_bits_texts_begin_alike():
    """Sums in another order may turn one token into another, and then all that follow."""
    model = model_of(torch.bfloat16)
    engine = engine_of(model)
    fast, plain = engine.texts(REQUESTS), engine_of(model, fast=False).texts(REQUESTS)
    assert sum(ours[:5] == theirs[:5] for ours, theirs in zip(fast, plain)) >= 6 and engine.fast.replayed > 60


@pytest.mark.parametrize("tokens", [20, 300], ids=["more rows than texts", "several pieces"])
def test_a_prompt_runs_while_nobody_writes(tokens):
    """The room for products was that of 8 rows, and a piece that asks for no logits made a product of none."""
    engine = engine_of(model_of(torch.bfloat16, width=512, hidden=1024), budget=64)
    number = engine.submit(Request(list(range(tokens // 2)) * 2, 3))
    events = [event for _ in range(40) for event in engine.step()]
    assert [event.number for event in events] == [number] * 3 and events[-1].ended == "length"


def test_guesses_change_no_text():
    """Looked up in texts of few tokens, which repeat: steps with guesses are plain, and fast ones follow."""
    model = model_of()
    model.logits.weight[24:] = 0
    plain = engine_of(model).texts(REQUESTS)
    engine = engine_of(model)
    guessed = [dataclasses.replace(request, speculate=5) for request in REQUESTS[:4]]
    assert engine.texts([*guessed, *REQUESTS[4:]]) == plain
    assert engine.metrics.report()["accepted"] > 0 and engine.fast.replayed > 0


def test_fast_steps_are_at_least_three_times_as_fast():
    model, taken = model_of(torch.bfloat16), {}
    for fast in (False, True):
        engine = engine_of(model, fast=fast)
        for number in range(4):
            engine.submit(Request([number] * 30, 400))
        for _ in range(20):
            engine.step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(200):
            engine.step()
        taken[fast] = (time.perf_counter() - began) / 200
    print(f"{1e6 * taken[False]:.0f} µs a plain step, {1e6 * taken[True]:.0f} a fast one")
    assert taken[False] >= 3 * taken[True]
