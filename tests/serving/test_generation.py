"""With a cache or without: the same tokens. Prefill in any pieces, any number of heads, any attention."""

import dataclasses

import pytest
import torch

from course_lib.kernels.attention.operator import attention
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.decode.attention import decode_attention
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.training import initialize
from course_lib.serving.caches.contiguous import KVCache
from course_lib.serving.caches.new import new_cache
from course_lib.serving.generation import complete, generate, stream

CONFIG = ModelConfig(vocabulary=61, layers=3, width=32, query_heads=4, key_heads=4, head_dim=16, hidden=48, context=64)
HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}


def model_of(key_heads=2, seed=0, **options):
    torch.manual_seed(seed)
    model = Decoder(dataclasses.replace(CONFIG, key_heads=key_heads), **options).eval()
    initialize(model)
    return model


def prompts(batch, length, seed=0):
    return torch.randint(0, CONFIG.vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("prompt_length", [1, 2, 7, 31])
@pytest.mark.parametrize("seed", range(3))
def test_generation_with_a_cache_equals_generation_without(kind, prompt_length, seed):
    model, prompt = model_of(HEADS[kind], seed), prompts(5, prompt_length, seed)
    assert torch.equal(generate(model, prompt, 24), generate(model, prompt, 24, cached=False))


def test_drawn_tokens_are_the_same_with_a_cache_too():
    model, prompt = model_of(), prompts(3, 4)
    drawn = [generate(model, prompt, 20, cached=cached, temperature=1.0, seed=5) for cached in (True, False)]
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], generate(model, prompt, 20, temperature=1.0, seed=6))


@pytest.mark.parametrize("pieces", [(12,), (1,) * 12, (5, 7), (11, 1), (1, 4, 1, 6)])
def test_a_prompt_may_be_prefilled_in_any_pieces(pieces):
    model, tokens = model_of(), prompts(2, 12)
    cache, logits, start = new_cache(model, 2, 12), [], 0
    for piece in pieces:
        logits.append(model(tokens[:, start : start + piece], cache))
        start += piece
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(logits, dim=1), model(tokens))


@pytest.mark.parametrize("choice", [attention_reference, attention], ids=["naive", "the course's kernels"])
def test_any_attention_may_be_plugged_in(choice):
    model, tokens = model_of(), prompts(1, 6)
    wanted = model(tokens)
    model.attention = choice
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), wanted, atol=1e-4, rtol=1e-4)
        cache = new_cache(model, 1, 8)
        model(tokens[:, :5], cache)
        torch.testing.assert_close(model(tokens[:, 5:], cache)[:, 0], wanted[:, 5], atol=1e-4, rtol=1e-4)


def test_a_decode_function_gets_the_whole_buffers_and_the_lengths():
    seen = []

    def decode(query, key_cache, value_cache, lengths):
        seen.append((tuple(query.shape), tuple(key_cache.shape), lengths.tolist()))
        used = int(lengths[0])
        return attention_reference(query[:, :, None], key_cache[:, :, :used], value_cache[:, :, :used])[:, :, 0]

    model, tokens = model_of(), prompts(2, 6)
    cache = new_cache(model, 2, 9, decode=decode)
    model(tokens[:, :5], cache)
    assert not seen, "several tokens at a time go to `attention`"
    torch.testing.assert_close(model(tokens[:, 5:], cache), model(tokens)[:, 5:])
    assert seen == [((2, 4, 16), (2, 2, 9, 16), [6, 6])] * 3


def test_the_courses_decode_kernel_plugs_in():
    model, tokens = model_of(), prompts(2, 5)
    cache = new_cache(model, 2, 6, decode=decode_attention)
    with torch.inference_mode():
        model(tokens[:, :4], cache)
        torch.testing.assert_close(model(tokens[:, 4:], cache), model(tokens)[:, 4:], atol=1e-4, rtol=1e-4)


def test_nothing_behind_the_length_is_read():
    model, tokens = model_of(), prompts(2, 6)
    cache = new_cache(model, 2, 20)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    assert torch.isfinite(model(tokens, cache)).all()


def test_truncated_tokens_are_forgotten():
    model, tokens = model_of(), prompts(1, 9)
    cache = new_cache(model, 1, 9)
    model(prompts(1, 9, seed=1), cache)
    cache.truncate(0)
    model(tokens[:, :4], cache)
    torch.testing.assert_close(model(tokens[:, 4:], cache), model(tokens)[:, 4:])
    with pytest.raises(ValueError, match="length is 12"):
        cache.truncate(12)


def test_a_full_cache_says_so_and_is_left_as_it_was():
    model, tokens = model_of(), prompts(1, 8)
    cache = new_cache(model, 1, 9)
    model(tokens, cache)
    keys = cache.keys[:, :, :, :8].clone()
    with pytest.raises(ValueError, match="holds 8 of 9 tokens and 2 more do not fit.*at least 10"):
        model(tokens[:, :2], cache)
    assert cache.length == 8 and torch.equal(cache.keys[:, :, :, :8], keys)


def test_a_cache_takes_only_its_own_shape():
    cache = KVCache(dataclasses.replace(CONFIG, key_heads=2), batch=2, capacity=4)
    good = torch.zeros(2, 2, 1, 16)
    with pytest.raises(ValueError, match=r"key has shape \(2, 4, 1, 16\).*\[2, 2, new_tokens, 16\]"):
        cache.append(0, torch.zeros(2, 4, 1, 16), good)
    with pytest.raises(ValueError, match="value has shape"):
        cache.append(0, good, torch.zeros(2, 2, 2, 16))


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"capacity": 0}, {"capacity": 1.5}])
def test_a_cache_of_no_size_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        KVCache(CONFIG, **({"batch": 1, "capacity": 1} | wrong))


def test_the_last_logits_alone_are_the_last_of_all():
    model, tokens = model_of(), prompts(2, 5)
    torch.testing.assert_close(model(tokens, last_only=True), model(tokens)[:, -1:])


def test_a_stream_gives_each_token_as_it_is_known():
    model, prompt = model_of(), prompts(2, 3)
    steps = list(stream(model, prompt, 4))
    assert [tuple(token.shape) for token in steps] == [(2,)] * 4
    assert torch.equal(torch.stack(steps, dim=1), generate(model, prompt, 4)[:, 3:])
    assert torch.equal(generate(model, prompt, 0), prompt)


def test_generation_may_go_on_from_a_cache_that_holds_the_beginning():
    model, tokens = model_of(), prompts(1, 6)
    cache = new_cache(model, 1, 16)
    model(tokens[:, :4], cache)
    assert torch.equal(generate(model, tokens[:, 4:], 8, cache=cache)[:, 2:], generate(model, tokens, 8)[:, 6:])


def test_text_goes_in_and_text_comes_out():
    torch.manual_seed(0)
    model = Decoder(dataclasses.replace(CONFIG, vocabulary=256)).eval()
    assert isinstance(complete(model, "é", 3), str)


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"prompt": torch.zeros(3, dtype=torch.int64)}, "prompt"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.int64)}, "prompt"),
        ({"new_tokens": -1}, "new_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"cached": False, "cache": object()}, "cached"),
    ],
)
def test_what_makes_no_sense_is_named_at_once(arguments, name):
    with pytest.raises(ValueError, match=name):
        stream(model_of(), **({"prompt": prompts(1, 2), "new_tokens": 1} | arguments))


def test_tokens_without_a_batch_are_refused():
    with pytest.raises(ValueError, match="tokens has shape"):
        model_of()(torch.zeros(4, dtype=torch.int64))
