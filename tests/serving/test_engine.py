"""The engine: each text as it would be alone, every page free at the end, and one request's error its own."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.kernels.fused.rope_append_pages import rope_append_to_pages_reference
from course_lib.models.config import ModelConfig
from course_lib.serving import packed
from course_lib.serving.engine import Engine, QueueFull
from course_lib.serving.fast_step import FastStep
from course_lib.serving.generation import generate
from course_lib.serving.proposals import PromptLookup
from course_lib.serving.requests import Request, Sampling
from tests.serving.talkers import byte_tokenizer, random_model
from tests.serving.test_captured import by_calling
from tests.serving.test_fast_step import in_pytorch

MODEL = random_model()
OTHER = random_model(ModelConfig(257, 1, 32, 2, 1, 16, 48, 256))  # it writes other texts


def new_engine(model=MODEL, **options):
    options = {"pages": 64, "page_size": 4, "budget": 32, "most_running": 8, "kernels": False} | options
    return Engine(model, byte_tokenizer(), **options)


def run(engine, limit=2000):
    """All events, by the number of the request."""
    events = {}
    while engine.busy:
        for event in engine.step():
            events.setdefault(event.number, []).append(event)
        limit -= 1
        assert limit, "the engine does not come to an end"
    return events


def tokens_of(events):
    return [event.token for event in events if event.token is not None]


def alone(request):
    """The greedy continuation of a request by itself, as far as a token that ends it."""
    with torch.no_grad():
        prompt = torch.tensor([list(request.prompt)])
        tokens = generate(MODEL, prompt, request.new_tokens)[0, prompt.shape[1] :].tolist()
    return tokens[: tokens.index(256) + 1] if 256 in tokens else tokens


def nothing_left(engine):
    allocator = engine.scheduler.allocator
    return allocator.free_pages() == allocator.pages and allocator.tree.protected == 0 and not engine.scheduler.running


def test_texts_are_those_that_each_request_gets_alone():
    requests = [Request([(7 * k + n) % 256 for n in range(3 + 5 * k)], 6 + k) for k in range(6)]
    engine = new_engine()
    numbers = [engine.submit(request) for request in requests]
    events = run(engine)
    for number, request in zip(numbers, requests):
        assert tokens_of(events[number]) == alone(request)
        assert events[number][-1].ended in ("length", "stop")
    assert nothing_left(engine)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32), pages=st.integers(12, 40), page_size=st.integers(1, 5), budget=st.integers(4, 40),
    fast=st.booleans(), draft=st.sampled_from((None, OTHER, MODEL)),
)  # fmt: skip
def test_random_traffic_changes_no_text_and_loses_no_page(seed, pages, page_size, budget, fast, draft):
    """Prompts that share beginnings, priorities, guesses, a memory that is too small, and some that give up.

    A model that is its own draft guesses nothing wrong.
    """
    with pytest.MonkeyPatch.context() as patch:
        in_pytorch(patch)  # the interpreter would take minutes
        patch.setattr(packed, "rope_append_to_pages", lambda *given, **_: rope_append_to_pages_reference(*given[:7]))
        options = {"pages": pages, "page_size": page_size, "budget": budget, "most_running": 4}
        engine = new_engine(fast=fast, capture=by_calling, draft=draft, **options)
        pass_traffic(engine, random.Random(seed), patch)
        told = engine.metrics.report()
        assert draft is not MODEL or told["proposed"] == told["accepted"]


def pass_traffic(engine, draw, patch):
    pages, page_size = engine.scheduler.allocator.pages, engine.scheduler.allocator.page_size
    beginnings = [[draw.randrange(256) for _ in range(9)] for _ in range(2)]
    todo, texts = [], []
    looked_up = PromptLookup.propose

    def propose(lookup, tokens, most):
        """As many right ones as are drawn, and then what was looked up."""
        text = next((text for text in texts if text[: len(tokens)] == tokens), tokens)
        known = text[len(tokens) :][: draw.randrange(most + 1)]
        return (*known, *looked_up(lookup, tokens, most))[:most]

    patch.setattr(PromptLookup, "propose", propose)
    for _ in range(8):
        prompt = draw.choice(beginnings)[: draw.randrange(1, 10)] + [draw.randrange(256)] * draw.randrange(3)
        request = Request(
            prompt, draw.randrange(1, 9), priority=draw.randrange(3), speculate=draw.choice((0, 0, 1, 3, 16))
        )
        if len(prompt) + request.new_tokens <= pages * page_size:
            todo.append(request)
            texts.append([*prompt, *alone(request)])
    requests, events, given_up = {}, {}, set()
    for _ in range(2000):
        if todo and draw.random() < 0.4:
            request = todo.pop()
            requests[engine.submit(request)] = request
        if requests and draw.random() < 0.05:
            given_up.add(number := draw.choice(list(requests)))
            engine.cancel(number)
        for event in engine.step():
            events.setdefault(event.number, []).append(event)
        if not engine.busy and not todo:
            break
    assert not engine.busy and not todo and nothing_left(engine)
    for number, request in requests.items():
        expected, ended = alone(request), events[number][-1].ended
        assert [event.ended for event in events[number][:-1]] == [None] * (len(events[number]) - 1)
        if ended == "cancelled":
            assert number in given_up and tokens_of(events[number]) == expected[: len(tokens_of(events[number]))]
        else:
            assert tokens_of(events[number]) == expected


def test_the_kernels_write_what_pytorchs_operations_write():
    requests = [Request([5, 6, 7, 8, 9, n], 3) for n in range(3)]
    assert new_engine(kernels=True).texts(requests) == new_engine().texts(requests)


def fast_engine(**options):
    """With kernels, and steps that are called where a GPU would replay them."""
    return new_engine(kernels=True, fast=True, capture=by_calling, **options)


def test_fast_steps_write_what_plain_ones_write():
    """Prompts that share beginnings, one that comes in pieces, options, and a memory that is too small for all."""
    requests = [Request([5, 6, 7, 8, 9, n], 9 - n, Sampling(temperature=0.7 * n, seed=n)) for n in range(3)]
    requests.append(Request([4] * 23, 2))
    options = {"pages": 9, "budget": 8, "most_running": 3}
    engine, plain = fast_engine(**options), new_engine(kernels=True, **options)
    assert [*map(tokens_of, run_all(engine, requests))] == [*map(tokens_of, run_all(plain, requests))]
    assert engine.fast.replayed > engine.fast.expected > 3 and nothing_left(engine)


def test_what_was_expected_and_does_not_come_is_forgotten():
    """Texts that stop, give up, or come while the next step is on its way: of it nothing is seen."""
    whole = new_engine(kernels=True).texts([Request([5, 6, 0], 12)])[0]
    requests = [Request([5, 6, n], 12, stops=(whole[5:7],)) for n in range(3)]
    engine, plain = fast_engine(), new_engine(kernels=True)
    found = []
    for one in (engine, plain):
        numbers = [one.submit(request) for request in requests]
        told = {}
        for step in range(40):
            for event in one.step():
                told.setdefault(event.number, []).append((event.text, event.token, event.ended))
            if step == 4:
                one.cancel(numbers[1])
            if step == 6:
                one.submit(Request([9, 9, 9], 5))
        found.append(told)
        assert not one.busy and nothing_left(one)
    assert found[0] == found[1] and any(events[-1][2] == "stop" for events in found[0].values())
    assert engine.fast.expected > 3


def run_all(engine, requests):
    """The events of each."""
    numbers = [engine.submit(request) for request in requests]
    events = run(engine)
    return [events[number] for number in numbers]


def test_a_fast_step_that_fails_ends_those_alone_whose_part_fails(monkeypatch):
    engine = fast_engine()
    good, bad = Request([10, 11], 4), Request([20, 21], 4)
    expected = tokens_of(run_all(new_engine(kernels=True), [good])[0])
    numbers = [engine.submit(good), engine.submit(bad)]
    engine.step()
    poisoned = engine.scheduler.running[1].tokens[-1]

    def write(step, runs, tokens, samplings):
        if poisoned in tokens:
            raise RuntimeError("poisoned")
        return original(step, runs, tokens, samplings)

    original = FastStep._write
    monkeypatch.setattr(FastStep, "_write", write)
    events = run(engine)
    assert events[numbers[1]][-1].error == "RuntimeError: poisoned"
    assert tokens_of(events[numbers[0]]) == expected[1:] and nothing_left(engine)


def test_a_long_prompt_does_not_hold_up_those_who_write():
    """Decodes go first, and the prompt comes in pieces beside them."""
    engine = new_engine(budget=8)
    writing = engine.submit(Request([1, 2, 3], 30))
    engine.step()
    engine.submit(Request([4] * 60, 1))
    for _ in range(8):
        assert [event.number for event in engine.step()] == [writing]


def test_a_prompt_s_last_token_alone_runs_in_the_step_of_the_others():
    """A piece of one token behind a longer one was refused by the cache, and each part ran in a step of its own."""
    engine, ran = new_engine(budget=8), []
    hidden = engine.model.hidden
    for tokens in (7, 9):
        engine.submit(Request([tokens] * tokens, 1))
    try:
        engine.model.hidden = lambda tokens, cache: ran.append(tokens.shape[1]) or hidden(tokens, cache)
        run(engine)
    finally:
        del engine.model.hidden
    assert ran == [8, 8]


def test_a_beginning_that_was_seen_is_not_computed_again():
    engine, ran = new_engine(), []
    hidden = engine.model.hidden
    prompt = list(range(40))
    engine.texts([Request(prompt, 2)])
    try:
        engine.model.hidden = lambda tokens, cache: ran.append(tokens.shape[1]) or hidden(tokens, cache)
        engine.texts([Request([*prompt, 7], 1)])
    finally:
        del engine.model.hidden
    assert ran == [1], "40 tokens are 10 whole pages, and one token is new"


def test_one_page_is_enough_for_one_who_fits():
    engine = new_engine(pages=1, page_size=8, budget=8, most_running=4)
    requests = [Request([n, n + 1, n + 2], 5) for n in range(3)]
    numbers = [engine.submit(request) for request in requests]
    events = run(engine)
    assert [tokens_of(events[number]) for number in numbers] == [alone(request) for request in requests]


def test_who_is_more_urgent_goes_first():
    engine = new_engine(most_running=1)
    late, urgent = (engine.submit(Request([1, 2], 2, priority=priority)) for priority in (5, 1))
    order = [event.number for _ in range(4) for event in engine.step()]
    assert order == [urgent, urgent, late, late]


def test_the_same_seed_gives_the_same_text_whatever_else_runs():
    request = Request([1, 2, 3], 12, Sampling(temperature=1.0, seed=7))
    others = [Request([n] * (1 + n % 5), 9, Sampling(temperature=0.8, seed=n)) for n in range(5)]
    first = new_engine().texts([request])[0]
    assert new_engine(budget=9).texts([*others, request])[-1] == first
    assert new_engine().texts([Request([1, 2, 3], 12, Sampling(temperature=1.0, seed=8))])[0] != first


def test_an_error_of_one_request_ends_that_request():
    """Its token makes the model raise, or its logits NaN; the others write on as if nothing were."""
    for poison, told in ((_raise, "RuntimeError: poisoned"), (_nan, "NaN")):
        model = random_model()
        good = [Request([n, n + 1], 4) for n in (10, 20)]
        engine = new_engine(model)
        poison(model, 66)
        numbers = [engine.submit(one) for one in (good[0], Request([65, 66], 4), good[1])]
        events = run(engine)
        assert events[numbers[1]][-1].ended == "error" and told in events[numbers[1]][-1].error
        assert [tokens_of(events[number]) for number in (numbers[0], numbers[2])] == [alone(one) for one in good]
        assert nothing_left(engine)


def _raise(model, token):
    hidden = model.hidden

    def poisoned(tokens, cache):
        if (tokens == token).any():
            raise RuntimeError("poisoned")
        return hidden(tokens, cache)

    model.hidden = poisoned


def _nan(model, token):
    model.embedding.weight[token] = float("nan")


@pytest.mark.parametrize(
    "request_of, told",
    [
        (lambda: Request([], 1), "prompt is empty"),
        (lambda: Request([1], -1), "new_tokens is -1"),
        (lambda: Request([1], 1, stops=("",)), "stops is"),
        (lambda: Request([1], 1, stops="end"), "stops is 'end'"),
        (lambda: Request([1, 257], 1), "token 257; the model knows 0 to 256"),
        (lambda: Request([1] * 200, 57), "made for 256 in all"),
        (lambda: Request([1] * 100, 50), "the cache holds 128"),
        (lambda: Request([1], 1, Sampling(temperature=float("nan"))), "temperature is nan"),
        (lambda: Request([1], 1, Sampling(top_p=0.0)), "top_p is 0.0"),
        (lambda: Request([1], 1, Sampling(top_k=-1)), "top_k is -1"),
        (lambda: Request([1], 1, Sampling(min_p=2.0)), "min_p is 2.0"),
        (lambda: Request([1], 1, Sampling(seed=-1)), "seed is -1"),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_door(request_of, told):
    engine = new_engine(pages=32)
    with pytest.raises(ValueError, match=told):
        engine.submit(request_of())
    assert not engine.busy and nothing_left(engine)


def test_no_new_tokens_are_no_tokens():
    engine = new_engine()
    assert engine.texts([Request([1, 2], 0)]) == [""] and nothing_left(engine)


def test_more_than_may_wait_are_told_to_come_again():
    engine = new_engine(most_waiting=2)
    for _ in range(2):
        engine.submit(Request([1], 1))
    with pytest.raises(QueueFull, match="ask again later"):
        engine.submit(Request([1], 1))
    run(engine)
    engine.submit(Request([1], 1))


def test_a_text_ends_before_its_stop_word():
    whole = new_engine().texts([Request([1, 2, 3], 20)])[0]
    stop = whole[5:8]
    assert new_engine().texts([Request([1, 2, 3], 20, stops=(stop,))])[0] == whole[: whole.index(stop)]


def test_the_report_says_how_long_requests_took():
    """With a clock that goes on by one second for each look at it."""
    ticks = iter(range(10**6))
    engine = new_engine(clock=lambda: float(next(ticks)))
    engine.texts([Request([1, 2], 3, deadline=100.0), Request([3, 4], 3, deadline=1.0)])
    told = engine.metrics.report()
    assert told["requests"] == 2 and told["tokens"] == 6 and told["seconds"] == 7
    assert told["to first p50"] == 2 and told["per token p99"] == 2
    assert told["goodput"] == pytest.approx(1 / 7), "the second request was late"


def test_a_server_that_runs_for_months_keeps_the_newest_times(monkeypatch):
    monkeypatch.setattr("course_lib.serving.metrics.MOST_KEPT", 3)
    engine = new_engine()
    numbers = [engine.submit(Request([n, n], 1)) for n in range(5)]
    run(engine)
    assert list(engine.metrics.times) == numbers[2:] and engine.metrics.report()["requests"] == 3
