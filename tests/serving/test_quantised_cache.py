"""Caches in fewer bits give a decoder what their codes stand for, and the group that is not full yet whole."""

import dataclasses

import pytest
import torch

from course_lib.kernels.quantised.formats import quantise_int4, restored_int4
from course_lib.models.config import Latent, with_latent
from course_lib.models.decoder import Decoder
from course_lib.models.tiny import TINY, tiny_text
from course_lib.models.torch_attention import torch_attention
from course_lib.models.training import initialize
from course_lib.serving.caches.new import new_cache
from course_lib.serving.caches.quantised import Fp8KVCache, Fp8Scales, Int4KVCache, calibrated_scales
from course_lib.serving.generation import generate

CONFIG = dataclasses.replace(TINY, layers=2, width=32, query_heads=2, key_heads=1, head_dim=64, hidden=32, context=160)
CACHES = {"FP8": Fp8KVCache, "INT4": Int4KVCache}


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Decoder(CONFIG).eval()
    initialize(model)
    return model


def tokens_of(length, batch=1):
    return torch.randn(3, batch, 1, length, 64, generator=torch.Generator().manual_seed(length)).unbind(0)


def rounded(name, key, value):
    """Keys and values as the caches give them back, worked out for the whole sequence at once."""
    if name == "FP8":
        return tuple((part / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.02 for part in (key, value))
    whole = key.shape[2] // 64 * 64
    keys = restored_int4(quantise_int4(key[:, :, :whole].unflatten(2, (-1, 64)), 3)).flatten(2, 3)
    values = restored_int4(quantise_int4(value[:, :, :whole], 3))
    return torch.cat([keys, key[:, :, whole:]], 2), torch.cat([values, value[:, :, whole:]], 2)


def new(name, batch, capacity):
    scales = torch.full((CONFIG.layers, CONFIG.key_heads), 0.02)
    return CACHES[name](CONFIG, batch, capacity, **({"scales": Fp8Scales(scales, scales)} if name == "FP8" else {}))


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 127])
def test_single_tokens_attend_to_what_the_codes_stand_for(name, prompt):
    query, key, value = tokens_of(130, batch=2)
    cache = new(name, 2, 130)
    for start, end in [(0, prompt), *((token, token + 1) for token in range(prompt, 130))]:
        cache.append(1, key[:, :, start:end], value[:, :, start:end])
        attended = cache.attend(1, query[:, :, start:end])
        keys, values = rounded(name, key[:, :, :end], value[:, :, :end])
        if start == 0 and end > 1:  # a prompt reads its own keys whole
            keys, values = key[:, :, :end], value[:, :, :end]
        wanted = torch_attention(query[:, :, start:end], keys, values, causal=True)
        torch.testing.assert_close(attended, wanted, rtol=1e-4, atol=1e-5)
        cache.advance(end - start)


@pytest.mark.parametrize("name", CACHES)
def test_several_tokens_behind_others_attend_to_everything_restored(name):
    query, key, value = tokens_of(90)
    cache = new(name, 1, 90)
    for start, end in ((0, 70), (70, 90)):
        cache.append(0, key[:, :, start:end], value[:, :, start:end])
        attended = cache.attend(0, query[:, :, start:end])
        cache.advance(end - start)
    wanted = torch_attention(query[:, :, 70:], *rounded(name, key, value), causal=True)
    torch.testing.assert_close(attended, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CACHES)
def test_a_model_writes_on_with_it(name, model):
    prompt = torch.tensor([[65, 66, 67]])
    written = generate(model, prompt, 66, cache=new(name, 1, 69))
    assert written.shape == (1, 69)


def test_bytes_of_a_token_are_what_the_formats_say():
    heads = CONFIG.layers * CONFIG.key_heads
    assert new("FP8", 3, 128).token_bytes == heads * 2 * 64
    assert new("INT4", 3, 128).token_bytes == heads * 2 * (64 // 2 + 64 * 4 // 64)


def test_calibrated_scales_take_the_largest_number_of_each_head_to_448(model):
    text = tiny_text()[:100]
    scales = calibrated_scales(model, text)
    cache = new_cache(model, 1, 100)
    with torch.inference_mode():
        model(torch.tensor([list(text.encode())]), cache)
    torch.testing.assert_close(scales.keys * 448, cache.keys.abs().amax(dim=(1, 3, 4)))
    torch.testing.assert_close(scales.values * 448, cache.values.abs().amax(dim=(1, 3, 4)))
    with pytest.raises(ValueError, match="text has 0 bytes; it must have 1 to 160"):
        calibrated_scales(model, "")


@pytest.mark.parametrize("name", CACHES)
def test_what_does_not_fit_is_refused_and_nothing_written(name):
    query, key, value = tokens_of(8)
    cache = new(name, 1, 4)
    with pytest.raises(ValueError, match="holds 0 of 4 tokens and 8 more do not fit"):
        cache.append(0, key, value)
    with pytest.raises(ValueError, match="LatentCache"):
        CACHES[name](with_latent(CONFIG, Latent(8, 4, 8, 8)), 1, 4)


def test_groups_in_int4_can_not_be_opened_again():
    cache = new("INT4", 1, 128)
    cache.advance(70)
    cache.truncate(70)
    with pytest.raises(ValueError, match="length is 10 and the cache holds 70"):
        cache.truncate(10)
