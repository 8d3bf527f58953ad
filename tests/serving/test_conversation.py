"""A conversation: what is kept between its turns, where it ends, and what is refused."""

import itertools

import pytest
import torch

from course_lib.serving.conversation import Conversation, new_engine
from course_lib.serving.generation import generate
from tests.serving.talkers import byte_tokenizer, random_model


@pytest.fixture
def talk():
    return new_talk()


def new_talk(**options):
    return Conversation(new_engine(random_model(), byte_tokenizer(stops=()), **{"kernels": False, **options}))


def expected(messages, new_tokens):
    """The greedy answer to a conversation, without an engine: its tokens."""
    prompt = byte_tokenizer().conversation(messages)
    with torch.no_grad():
        return generate(random_model(), prompt[None], new_tokens)[0, len(prompt) :].tolist()


def test_each_turn_says_what_the_model_says_to_the_whole_conversation(talk):
    """Although the second runs only what the first has not."""
    for question in ("Who are you?", "Why?"):
        answer = "".join(talk.say(question, new_tokens=8))
        assert answer == byte_tokenizer().decode(expected(talk.messages[:-1], 8))
        assert talk.messages[-1] == {"role": "assistant", "content": answer}


def test_a_second_turn_does_not_compute_the_first_again(talk):
    runs, hidden = [], talk.engine.model.hidden
    "".join(talk.say("Who are you, and what are you for?", new_tokens=4))
    talk.engine.model.hidden = lambda tokens, cache: runs.append(tokens.shape[1]) or hidden(tokens, cache)
    "".join(talk.say("Why?", new_tokens=4))
    prompt = byte_tokenizer().conversation(talk.messages[:-1])
    assert sum(runs) < 0.7 * len(prompt)


def test_the_kernels_say_what_pytorchs_operations_say(talk):
    assert "".join(new_talk(kernels=True).say("Hi", new_tokens=3)) == "".join(talk.say("Hi", new_tokens=3))


def test_an_answer_ends_at_a_stop_token(talk):
    written = expected([{"role": "user", "content": "x"}], 6)
    assert written[3] not in written[:3]
    talk.engine.tokenizer.stops = frozenset(written[3:4])
    assert "".join(talk.say("x", new_tokens=6)) == byte_tokenizer().decode(written[:3])


def test_an_answer_that_nobody_listens_to_any_more_is_kept_as_far_as_it_came(talk):
    pieces = list(itertools.islice(answer := talk.say("x", new_tokens=50), 2))
    answer.close()
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert "".join(talk.say("y", new_tokens=5)) == byte_tokenizer().decode(expected(talk.messages[:-1], 5))


def test_what_does_not_fit_is_told_and_nothing_is_kept(talk):
    for text, new_tokens in (("x" * 300, 4), ("x", 250)):
        with pytest.raises(ValueError, match="made for 256 in all"):
            talk.say(text, new_tokens=new_tokens)
    assert talk.messages == [] and "".join(talk.say("x", new_tokens=4))


def test_a_failure_of_the_model_is_told(talk):
    talk.engine.model.embedding.weight[:] = float("nan")
    with pytest.raises(RuntimeError, match="NaN"):
        "".join(talk.say("x", new_tokens=4))


def test_its_times_count_the_tokens(talk):
    "".join(talk.say("x", new_tokens=4))
    assert talk.times.tokens == 4 and 0 < talk.times.to_first and "4 tokens, the first after" in str(talk.times)
    "".join(talk.say("x", new_tokens=0))
    assert str(talk.times) == "no tokens"
