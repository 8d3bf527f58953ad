"""The small decoder on a GPU: the same tokens with a cache and without, and with the course's kernels in it."""

import dataclasses
from functools import partial

import pytest
import torch

from course_lib.hardware.device import supports_bfloat16
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.decode.attention import decode_attention
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.training import initialize, train_tiny_model
from course_lib.serving.caches.new import new_cache
from course_lib.serving.generation import generate

CONFIG = ModelConfig(
    vocabulary=256, layers=3, width=256, query_heads=8, key_heads=2, head_dim=64, hidden=512, context=512
)


def model_of(key_heads, dtype=torch.float32):
    torch.manual_seed(key_heads)
    model = Decoder(dataclasses.replace(CONFIG, key_heads=key_heads)).eval()
    initialize(model)
    return model.to("cuda", dtype)


@pytest.mark.parametrize("key_heads", [8, 2, 1])
@pytest.mark.parametrize("prompt_length", [1, 17, 200])
def test_generation_with_a_cache_equals_generation_without(key_heads, prompt_length):
    model = model_of(key_heads)
    prompt = torch.randint(0, 256, (4, prompt_length), device="cuda")
    assert torch.equal(generate(model, prompt, 40), generate(model, prompt, 40, cached=False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_courses_kernels_give_the_logits_that_pytorch_gives(dtype):
    if dtype == torch.bfloat16 and not supports_bfloat16():
        pytest.skip("no bfloat16 here")
    model, tokens = model_of(2, dtype), torch.randint(0, 256, (3, 130), device="cuda")
    with torch.inference_mode():
        wanted = model(tokens, last_only=True).float()
        model.attention = attention
        cache = new_cache(model, 3, 256, decode=partial(decode_attention, validate=False))
        model(tokens[:, :129], cache)
        torch.testing.assert_close(model(tokens[:, 129:], cache).float(), wanted, atol=0.05, rtol=0.05)


def test_the_tiny_model_learns_on_the_gpu():
    losses = []
    train_tiny_model(steps=60, device="cuda", report=lambda step, loss: losses.append(loss))
    assert losses[-1] < 3.0 < losses[0]
