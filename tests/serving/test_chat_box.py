"""The box in a notebook: what it shows of a conversation, and that it never takes a model's text for HTML."""

import pytest

from course_lib.serving.chat_box import chat_box
from course_lib.serving.conversation import Conversation, new_engine
from tests.serving.talkers import byte_tokenizer, random_model


@pytest.fixture
def box():
    talk = Conversation(new_engine(random_model(), byte_tokenizer(stops=()), kernels=False))
    box = chat_box(talk, new_tokens=6)
    box.talk = talk
    return box


def ask(box, question):
    said, row, note = box.children
    row.children[0].value = question
    box.thread.join(20)
    return [bubble.value for bubble in said.children], note.value


def test_it_shows_the_question_the_answer_and_the_pace(box):
    bubbles, note = ask(box, "Who are you?")
    assert len(bubbles) == 2 and "Who are you?" in bubbles[0] and "6 tokens" in note
    bubbles, _ = ask(box, "Why?")
    assert len(bubbles) == 4 and len(box.talk.messages) == 4
    line, stop = box.children[1].children
    assert line.value == "" and not line.disabled and stop.disabled


def test_text_is_text_and_no_page(box):
    bubbles, _ = ask(box, "<b>bold</b> & <script>alert(1)</script>")
    assert "<script>" not in bubbles[0] and "&lt;b&gt;bold" in bubbles[0]


def test_what_does_not_fit_is_told_and_the_box_goes_on(box):
    _, note = ask(box, "x" * 400)
    assert "made for 256" in note
    _, note = ask(box, "x")
    assert "6 tokens" in note


def test_stop_ends_an_answer(box):
    stop = box.children[1].children[1]
    step = box.talk.engine.step

    def step_and_stop():
        stop.click()
        return step()

    box.talk.engine.step = step_and_stop
    _, note = ask(box, "x")
    assert not note.startswith("6 tokens") and len(box.talk.messages) == 2
    assert box.talk.engine.metrics.times[0].ended == "cancelled"
