"""A decoder with a window sees as many keys as its config says, and its sinks are a column of the softmax."""

import dataclasses
from functools import partial

import pytest
import torch

from course_lib.kernels.attention.operator import attention
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.decode.attention import decode_attention
from course_lib.models.config import Latent, ModelConfig, with_latent
from course_lib.models.decoder import Decoder
from course_lib.models.kinds import KINDS
from course_lib.models.torch_attention import torch_attention
from course_lib.models.trained import RECIPES
from course_lib.models.training import initialize
from course_lib.serving.caches.new import new_cache
from course_lib.serving.caches.ragged import RaggedPages
from course_lib.serving.generation import complete
from course_lib.serving.single import SingleDecoder

SMALL = ModelConfig(vocabulary=256, layers=1, width=24, query_heads=4, key_heads=2, head_dim=16, hidden=40, context=32)
OPTIONS = [{"sliding_window": 3}, {"sinks": True}, {"sliding_window": 1, "sinks": True}]


def model_of(**options):
    torch.manual_seed(0)
    model = Decoder(dataclasses.replace(SMALL, **options)).eval().requires_grad_(False)
    initialize(model)
    for block in model.blocks:
        if block.attention.sink is not None:
            block.attention.sink.normal_()
    return model


@pytest.mark.parametrize("window", [1, 3, 9])
def test_a_position_of_one_layer_depends_on_as_many_tokens_as_the_window_has(window):
    model, tokens = model_of(sliding_window=window), torch.randint(256, (1, 9))
    for changed in range(9):
        other = tokens.clone()
        other[0, changed] = (tokens[0, changed] + 1) % 256
        moved = (model(tokens) - model(other)).abs().amax(-1)[0] > 1e-6
        assert moved.nonzero().flatten().tolist() == list(range(changed, min(9, changed + window)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_attentions_and_a_cache_with_its_decode_agree(options):
    model = model_of(**options)
    wanted, texts = model(torch.arange(7)[None]), complete(model, "Alice", 6)
    for function in (attention_reference, attention):
        model.attention = function
        torch.testing.assert_close(model(torch.arange(7)[None]), wanted)
    assert complete(model, "Alice", 6, cache=new_cache(model, 1, 11, decode=decode_attention)) == texts
    assert complete(model, "Alice", 6, cached=False) == texts


@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("lengths", [(5, 9), (1, 4), (6, 6)])
def test_pytorchs_attention_with_a_sink_and_its_gradients_are_the_references(lengths, window):
    torch.manual_seed(0)
    make = partial(torch.randn, dtype=torch.float64, requires_grad=True)
    inputs = [make(2, 4, lengths[0], 8), make(2, 2, lengths[1], 8), make(2, 2, lengths[1], 8), make(4)]
    results = []
    for function in (torch_attention, attention_reference):
        output = function(*inputs[:3], causal=True, window=window, sink=inputs[3])
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    torch.testing.assert_close(*results)


def test_functions_without_windows_serve_models_without():
    model = model_of()
    model.attention = lambda query, key, value, causal: torch_attention(query, key, value, causal=causal)
    assert complete(model, "Alice", 3) == complete(model_of(), "Alice", 3)


def test_old_recipes_are_what_they_were():
    """A window in the config must not make the weights of models without one unreadable."""
    assert RECIPES["GQA"].hash != RECIPES["window"].hash != RECIPES["window and sink"].hash
    assert dataclasses.replace(KINDS["window and sink"], sliding_window=None, sinks=False) == KINDS["GQA"]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_would_attend_to_all_keys_is_refused(options):
    model = model_of(**options)
    for make in (lambda: SingleDecoder(model, 32), lambda: RaggedPages(model.config, 4, 4, kernels=False)):
        with pytest.raises(ValueError, match="sliding_window is .* attends to all keys"):
            make()
    with pytest.raises(ValueError, match="latent"):
        with_latent(model.config, Latent(8, 4, 8, 8))
