"""Text from tokens as they come: whole characters, and nothing of a stop word."""

import itertools

import pytest

from course_lib.models.loading.tokenizer import UNFINISHED
from course_lib.serving.text_stream import TextStream
from tests.serving.talkers import byte_tokenizer


def pieces_of(text, stops=()):
    """What is given out token by token, and at the end."""
    stream = TextStream(byte_tokenizer(), stops)
    pieces = [stream.push(token) for token in byte_tokenizer().encode(text).tolist()]
    return [*pieces, stream.end()], stream


@pytest.mark.parametrize("text", ["plain", "naïve Straße", "日本語 🙂👩‍🚀", "\n\t \n"])
def test_the_pieces_are_the_text_in_whole_characters(text):
    pieces, stream = pieces_of(text)
    assert "".join(pieces) == text == stream.text and not any(UNFINISHED in piece for piece in pieces)


def test_a_text_that_ends_within_a_character_says_so():
    """And bytes that are no text at all do not hold the rest back for ever."""
    emoji, stream = byte_tokenizer().encode("🙂").tolist(), TextStream(byte_tokenizer())
    assert [stream.push(token) for token in emoji[:3]] == ["", "", ""] and stream.end() == UNFINISHED
    stream = TextStream(byte_tokenizer())
    endless = "".join(map(stream.push, [emoji[1]] * 20 + byte_tokenizer().encode("ok").tolist()))
    assert endless.endswith("ok") and UNFINISHED in endless


@pytest.mark.parametrize("stops", [("ende",), ("e e", "nde"), ("日", "日本"), ("\n\n",), ("x", "🙂")])
def test_a_stop_word_ends_the_text_before_it(stops):
    """The first of those that come, whole in one token or over many; nothing of it is given out, nor after it."""
    text = "am ende\n\n日本x🙂ende"
    pieces, stream = pieces_of(text, stops)
    expected = text[: min(text.find(stop) for stop in stops if stop in text)]
    assert "".join(pieces) == expected == stream.text and stream.stopped
    for so_far in itertools.accumulate(pieces):
        assert expected.startswith(so_far)


def test_what_only_began_like_a_stop_word_is_given_out():
    pieces, stream = pieces_of("stoppen, stop", ("stop!", "stopped"))
    assert "".join(pieces) == "stoppen, stop" and not stream.stopped
    assert pieces[-1] == "stop", "it may have been the beginning of one until the end"
