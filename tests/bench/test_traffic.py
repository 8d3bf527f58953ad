"""The hour of traffic, with a small model on the CPU: all requests end, and a leak or a loss is told."""

import itertools
import time

import pytest

from course_lib.bench import traffic
from course_lib.serving.engine import Engine
from tests.serving.talkers import byte_tokenizer, random_model

COUNT = 12


def engine_of(pages=24):
    return Engine(random_model(), byte_tokenizer(), pages=pages, page_size=4, budget=16, most_running=4, kernels=False,
                  most_waiting=COUNT)  # fmt: skip


def asked():
    return traffic.requests(0, 250, longest=40, most_new=6)


def test_every_request_ends_in_one_way_and_no_page_is_left():
    told = traffic.play(engine_of(), asked(), COUNT, 0.1)
    assert told["requests"] == sum(told["ended"].values()) == COUNT
    assert set(told["ended"]) <= {"length", "stop", "cancelled"}
    assert told["to first p99"] >= told["to first p50"] > 0 and told["pages"] == 24


def test_requests_are_the_same_for_a_seed_and_others_for_another():
    first, again, other = (list(itertools.islice(traffic.requests(seed, 250), 200)) for seed in (0, 0, 1))
    assert first == again != other
    assert any(given_up for _, given_up in first) and {request.priority for request, _ in first} == {0, 1, 2}
    begins = [tuple(request.prompt[: traffic.BEGINNING_TOKENS]) for request, _ in first]
    assert len(set(begins)) < len(begins)


def test_a_page_that_is_not_given_back_is_told(monkeypatch):
    engine = engine_of()
    free = engine.scheduler.allocator.free_pages
    monkeypatch.setattr(engine.scheduler.allocator, "free_pages", lambda: free() - 1)
    with pytest.raises(RuntimeError, match="0 of 12 requests were lost, and 1 pages"):
        traffic.play(engine, asked(), COUNT, 0.1)


def test_a_lost_request_is_told(monkeypatch):
    engine = engine_of()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: [event for event in step() if event.number != 3])
    with pytest.raises(RuntimeError, match="1 of 12 requests were lost"):
        traffic.play(engine, asked(), COUNT, 0.1)


def test_a_quiet_hour_is_waited_for(monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    traffic.play(engine_of(), asked(), 2, 0.5)
    assert waits and all(wait >= 0 for wait in waits)
