"""Texts that come back, and conversations as a model's template has them."""

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from course_lib.models.loading.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('no ' + message['role']) }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer():
    """Each byte is a token, so that any character of more than one falls apart."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = tokenizers.Tokenizer(models.BPE({piece: number for number, piece in enumerate(alphabet)}, []))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(tokens, TEMPLATE, {}, ())


@pytest.mark.parametrize("text", ["", "plain", "naïve Straße", "日本語 🙂👩‍🚀", "\n\t \n"])
def test_a_text_comes_back(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokens.dtype == torch.int64 and tokenizer.decode(tokens) == text


def test_a_conversation_ends_where_the_answer_begins(tokenizer):
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    asked = tokenizer.conversation([*messages, {"role": "user", "content": "sure?"}])
    assert tokenizer.decode(asked) == "<user>1+1?<assistant>2<user>sure?<assistant>"


def test_what_the_template_refuses_is_told(tokenizer):
    with pytest.raises(ValueError, match="no tool"):
        tokenizer.conversation([{"role": "tool", "content": ""}])
    plain = Tokenizer(tokenizer.tokens, None, {}, ())
    with pytest.raises(ValueError, match="no chat template"):
        plain.conversation([])


def test_a_template_reaches_nothing_of_the_machine(tokenizer):
    """A template comes from whoever made the file."""
    reaching = Tokenizer(tokenizer.tokens, "{{ ''.__class__.__mro__[1].__subclasses__() }}", {}, ())
    with pytest.raises(ValueError, match="refuses"):
        reaching.conversation([])
