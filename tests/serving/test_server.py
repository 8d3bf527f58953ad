"""The server: OpenAI's client streams from it, and no body that comes in ends anything but its own request."""

import contextlib
import json
import threading
import time

import pytest

uvicorn = pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
from starlette.testclient import TestClient  # noqa: E402

from course_lib.serving.engine import Engine  # noqa: E402
from course_lib.serving.requests import Request  # noqa: E402
from course_lib.serving.server.app import Limits, make_app  # noqa: E402
from tests.serving.talkers import byte_tokenizer, random_model  # noqa: E402

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def new_engine(**options):
    options = {"pages": 64, "page_size": 4, "budget": 64, "most_running": 8, "kernels": False} | options
    return Engine(random_model(), byte_tokenizer(stops=()), **options)


@pytest.fixture
def engine():
    return new_engine()


@pytest.fixture
def client(engine):
    with TestClient(make_app(engine, "small")) as client:
        yield client


@pytest.fixture
def address(engine):
    """A real server on the loopback."""
    server = uvicorn.Server(uvicorn.Config(make_app(engine, "small"), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def expected(text="Hello", new_tokens=8):
    """What the engine writes by itself, greedily."""
    tokens = byte_tokenizer().conversation([{"role": "user", "content": text}]).tolist()
    return new_engine().texts([Request(tokens, new_tokens)])[0]


def wait_until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_openais_client_streams_what_the_engine_writes(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["small"]
        options = {"model": "small", "messages": HELLO, "temperature": 0, "max_tokens": 8}
        whole = client.chat.completions.create(**options)
        assert whole.choices[0].message.content == expected() and whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 8
        stream = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices) == expected()
        assert stream[-2].choices[0].finish_reason == "length" and stream[-1].usage.completion_tokens == 8
        with pytest.raises(openai.BadRequestError, match="temperature is -1.0"):
            client.chat.completions.create(**options | {"temperature": -1})


def test_many_clients_at_once_get_their_own_texts(address):
    texts, wanted = {}, {n: expected(f"Hello {n}") for n in range(12)}

    def ask(number):
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            messages = [{"role": "user", "content": f"Hello {number}"}]
            answer = client.chat.completions.create(model="small", messages=messages, temperature=0, max_tokens=8)
            texts[number] = answer.choices[0].message.content

    threads = [threading.Thread(target=ask, args=(number,)) for number in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == wanted


def test_a_client_that_goes_away_leaves_nothing_behind(address, engine):
    step = engine.step
    engine.step = lambda: time.sleep(0.02) or step()  # so that 150 tokens take three seconds
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="small", messages=HELLO, max_tokens=150, stream=True)
    next(iter(stream))
    stream.close()
    client.close()
    allocator = engine.scheduler.allocator
    wait_until(lambda: not engine.busy and allocator.free_pages() == allocator.pages)
    assert [times.ended for times in engine.metrics.times.values()] == ["cancelled"]


def test_a_server_may_guess_and_says_the_same():
    engine = new_engine()
    with TestClient(make_app(engine, "small", speculate=4)) as client:
        answer = client.post(CHAT, json={"messages": HELLO, "temperature": 0, "max_tokens": 8}).json()
        assert answer["choices"][0]["message"]["content"] == expected() and answer["usage"]["completion_tokens"] == 8
        assert client.get("/metrics").json()["proposed"] > 0


@pytest.mark.parametrize(
    "body, status, told",
    [
        (b"{", 400, "no JSON"),
        (b"[" * 100_000, 400, "no JSON"),
        (b"[]", 400, "the body is a list"),
        ({}, 400, "'messages' must be"),
        ({"messages": [{"role": "judge", "content": "x"}]}, 400, "'role' is one of"),
        ({"messages": [{"role": "user", "content": 7}]}, 400, "'content' must be text"),
        ({"messages": HELLO, "model": "large"}, 404, "no model 'large'; 'small' is served"),
        ({"messages": HELLO, "temperature": "hot"}, 400, "'temperature' is 'hot'; it must be a number"),
        ({"messages": HELLO, "max_tokens": True}, 400, "'max_tokens' is True"),
        ({"messages": HELLO, "max_tokens": 10**6}, 400, "made for 256 in all"),
        ({"messages": HELLO, "n": 2}, 400, "'n' is 2; only 1"),
        ({"messages": HELLO, "tool_choice": "auto"}, 400, "'tool_choice' is no option here"),
        ({"messages": HELLO, "stop": ["a"] * 5}, 400, "at most 4"),
        ({"messages": HELLO, "seed": -1}, 400, "seed is -1"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "made for 256 in all"),
        (b'"' + b"x" * 2**21 + b'"', 413, "more than 1,048,576 bytes"),
    ],
)
def test_what_cannot_be_served_gets_a_sentence(client, engine, body, status, told):
    answer = client.post(CHAT, content=body if isinstance(body, bytes) else json.dumps(body))
    assert answer.status_code == status and told in answer.json()["error"]["message"]
    assert not engine.busy
    assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200


def test_parts_of_a_text_and_a_developers_message_are_read(client):
    long = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    for messages in (HELLO, long):
        answer = client.post(CHAT, json={"messages": messages, "temperature": 0, "max_tokens": 8})
        assert answer.json()["choices"][0]["message"]["content"] == expected()
    told = [{"role": "developer", "content": "Be brief."}, *HELLO]
    assert client.post(CHAT, json={"messages": told, "max_tokens": 1}).status_code == 200


def test_no_new_tokens_are_an_empty_answer(client):
    answer = client.post(CHAT, json={"messages": HELLO, "max_tokens": 0}).json()
    assert answer["choices"][0] | {"logprobs": None} == {
        "index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "length", "logprobs": None
    }  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 0


def test_too_many_requests_are_told_to_come_again():
    with TestClient(make_app(new_engine(most_waiting=0), "small")) as client:
        answer = client.post(CHAT, json={"messages": HELLO, "max_tokens": 1})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(stream):
    engine = new_engine()
    step = engine.step
    engine.step = lambda: time.sleep(0.05) or step()
    with TestClient(make_app(engine, "small", Limits(seconds=0.4))) as client:
        answer = client.post(CHAT, json={"messages": HELLO, "max_tokens": 200, "stream": stream})
        assert "more than 0.4 seconds" in answer.text and answer.status_code == (200 if stream else 500)
        wait_until(lambda: not engine.busy)
        engine.step = step
        assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200


def test_a_fault_of_the_engine_ends_those_who_wait_and_not_the_server(capfd):
    engine, faults = new_engine(), iter([True, True])
    step = engine.step
    engine.step = lambda: 1 // 0 if next(faults, False) else step()
    with TestClient(make_app(engine, "small")) as client:
        bad = client.post(CHAT, json={"messages": HELLO, "max_tokens": 2})
        assert bad.status_code == 500 and "ZeroDivisionError" in bad.json()["error"]["message"]
        wait_until(lambda: not engine.busy)
        assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_an_error_of_the_model_is_told_and_ends_one_request():
    engine = new_engine()
    hidden = engine.model.hidden

    def poisoned(tokens, cache):
        if (tokens == byte_tokenizer().encode("!")[0]).any():
            raise RuntimeError("poisoned")
        return hidden(tokens, cache)

    engine.model.hidden = poisoned
    with TestClient(make_app(engine, "small")) as client:
        bad = client.post(CHAT, json={"messages": [{"role": "user", "content": "!"}], "max_tokens": 2})
        assert bad.status_code == 500 and "poisoned" in bad.json()["error"]["message"]
        good = client.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "temperature": 0})
        assert good.status_code == 200
        with contextlib.suppress(AttributeError):
            assert client.get("/metrics").json()["requests"] == 2
