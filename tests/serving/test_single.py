"""One sequence written by the kernels of `course_lib.kernels.layer`: what the model itself writes, or a refusal."""

import copy

import pytest
import torch

from course_lib.hardware.device import default_device, interpreting
from course_lib.models.config import Latent, ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.training import initialize
from course_lib.serving.generation import generate
from course_lib.serving.single import SingleDecoder

CONFIG = ModelConfig(vocabulary=96, layers=2, width=64, query_heads=4, key_heads=2, head_dim=16, hidden=80, context=64)


def model_of(*, seed: int = 0, **changes) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(ModelConfig(**vars(CONFIG) | changes)).eval()
    initialize(model)
    model.to(default_device())
    for weight in model.parameters():  # as a trained model's: a token leads by more than a rounding
        weight.data *= 1.5
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_it_writes_what_the_model_writes(tied):
    model = model_of(tied=tied)
    prompt = torch.randint(0, 96, (1, 7)).to(default_device())
    writer = SingleDecoder(model, 20)
    with torch.no_grad():
        wanted = generate(model, prompt, 14)
        assert torch.equal(writer.write(prompt, 14), wanted)
        assert torch.equal(writer.write(prompt[:, :3], 5), generate(model, prompt[:, :3], 5)), "another sequence"
    writer.write(prompt, 14)
    assert writer.length == 20 and torch.equal(writer.write(prompt, 0), prompt)


def assert_logits_as_exact_as_the_models(model: Decoder, form: str) -> None:
    """They may err twice as much as the model's own do anywhere in the text, and half a step of the dtype."""
    prompt = torch.randint(0, model.config.vocabulary, (1, 7)).to(model.device)
    writer = SingleDecoder(model, 20, form)
    with torch.no_grad():
        tokens = writer.write(prompt, 14)[:, :-1]
        plain = model(tokens)[0].double()  # [tokens, vocabulary]: one token alone may happen to round well
        exact = copy.deepcopy(model).double()(tokens)[0]
    allowed = 2 * (plain - exact).abs().max() + torch.finfo(model.dtype).eps / 2 * exact.abs().max()
    assert (writer.logits.double() - exact[-1]).abs().max() <= allowed, form


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_logits_are_as_exact_as_the_models(dtype):
    for seed in range(3):
        assert_logits_as_exact_as_the_models(model_of(seed=seed).to(dtype), "launched")


def test_a_full_cache_and_a_long_prompt_are_refused():
    writer = SingleDecoder(model_of(), 4)
    with pytest.raises(ValueError, match=r"prompt has shape \(1, 5\); it must be \[1, tokens\] with 1 to 4"):
        writer.read(torch.zeros(1, 5, dtype=torch.int64, device=default_device()))
    with pytest.raises(ValueError, match="4 tokens and 2 more do not fit: the cache holds 4"):
        writer.write(torch.zeros(1, 4, dtype=torch.int64, device=default_device()), 2)
    writer.write(torch.zeros(1, 4, dtype=torch.int64, device=default_device()), 1)
    with pytest.raises(ValueError, match="the cache is full: it holds 4"):
        writer.step()


@pytest.mark.parametrize(
    "options, says",
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": 8, "form": "fast"}, "form is 'fast'; it must be one of 'launched', 'dependent', 'one kernel'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        SingleDecoder(model_of(), **options)


@pytest.mark.skipif(not interpreting(), reason="a GPU may have them")
@pytest.mark.parametrize("form, needs", [("dependent", r"sm_90 \(Hopper\)"), ("one kernel", "needs a GPU")])
def test_forms_that_need_a_gpu_say_so(form, needs):
    with pytest.raises(ValueError, match=needs):
        SingleDecoder(model_of(), 8, form)


def test_a_part_of_a_model_on_several_ranks_is_refused():
    model = model_of()
    model.all_reduce = torch.clone
    with pytest.raises(ValueError, match="one rank's part of a model"):
        SingleDecoder(model, 8)


def test_latent_attention_is_refused():
    config = ModelConfig(96, 1, 64, 4, 4, 24, 80, 64, latent=Latent(32, 8, 16, 16))
    with pytest.raises(ValueError, match="SingleDecoder"):
        SingleDecoder(Decoder(config), 8)
