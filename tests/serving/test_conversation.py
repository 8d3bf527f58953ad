"""A conversation: what is kept between its turns, where it ends, and what is refused."""

import itertools

import pytest

from course_lib.serving.conversation import Conversation
from course_lib.serving.generation import generate
from tests.serving.talkers import byte_tokenizer, random_model


@pytest.fixture
def talk():
    """With a random model, which says nothing in particular but always the same."""
    return new_talk()


def new_talk(**options):
    return Conversation(random_model(), byte_tokenizer(stops=()), **{"kernels": False, **options})


def run_tokens(talk) -> list[int]:
    """How many tokens each later run of the model gets."""
    runs, forward = [], talk.model.forward
    talk.model.forward = lambda tokens, *args, **options: (
        runs.append(tokens.shape[1]) or forward(tokens, *args, **options)
    )
    return runs


def test_a_second_turn_says_what_a_new_conversation_would(talk):
    """Although it runs only what the first has not."""
    first = "".join(talk.say("Who are you?", new_tokens=8))
    runs = run_tokens(talk)
    second = "".join(talk.say("Why?", new_tokens=8))
    fresh = new_talk()
    fresh.messages = talk.messages[:2]
    assert fresh.messages[1] == {"role": "assistant", "content": first}
    prompt = talk.tokenizer.conversation(talk.messages[:3])
    assert second == "".join(fresh.say("Why?", new_tokens=8))
    assert runs[0] < 0.7 * len(prompt) and set(runs[1:]) == {1}


def test_the_kernels_say_what_pytorchs_operations_say(talk):
    options = {"new_tokens": 3}
    assert "".join(new_talk(kernels=True).say("Hi", **options)) == "".join(talk.say("Hi", **options))


def test_an_answer_ends_at_a_stop_token(talk):
    prompt = talk.tokenizer.conversation([{"role": "user", "content": "x"}])
    written = generate(talk.model, prompt[None], 6)[0, len(prompt) :].tolist()
    assert written[3] not in written[:3]
    talk.tokenizer.stops = frozenset(written[3:4])
    assert "".join(talk.say("x", new_tokens=6)) == talk.tokenizer.decode(written[:3])
    assert talk.pace.tokens == 3


def test_an_answer_that_nobody_listens_to_any_more_is_kept_as_far_as_it_came(talk):
    pieces = list(itertools.islice(answer := talk.say("x", new_tokens=50), 2))
    answer.close()
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    fresh = new_talk()
    fresh.messages = list(talk.messages)
    assert "".join(talk.say("y", new_tokens=5)) == "".join(fresh.say("y", new_tokens=5))


def test_what_does_not_fit_is_told_and_nothing_is_kept(talk):
    with pytest.raises(ValueError, match=r"does not fit into 256.*Begin a new one"):
        talk.say("x" * 300, new_tokens=4)
    with pytest.raises(ValueError, match="does not fit"):
        talk.say("x", new_tokens=250)
    assert talk.messages == [] and "".join(talk.say("x", new_tokens=4))


def test_its_pace_counts_the_tokens(talk):
    assert str(talk.pace) == "no tokens"
    "".join(talk.say("x", new_tokens=4))
    assert talk.pace.tokens == 4 and 0 < talk.pace.first < talk.pace.seconds and "4 tokens" in str(talk.pace)
