"""A decoder on the course's fused kernels: the same numbers as with PyTorch's operations, trained and in 16 bits."""

import dataclasses

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_reference
from course_lib.models.decoder import Decoder
from course_lib.models.glue import FUSED, TORCH
from course_lib.models.plugged import add_and_norm_of_rows
from course_lib.models.tiny import TINY
from course_lib.models.training import initialize, loss_curves
from course_lib.serving.caches.new import new_cache

interpreted = pytest.mark.skipif(not interpreting(), reason="on a GPU tests/gpu/test_glue.py trains the whole model")
SMALLER = dataclasses.replace(TINY, layers=2, width=48, query_heads=2, key_heads=1, head_dim=16, hidden=80, context=24)


def model_of(config=SMALLER):
    torch.manual_seed(0)
    model = Decoder(config)
    initialize(model)
    for name, parameter in model.named_parameters():  # weights of norms that are not 1
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    return model.requires_grad_(False)


def tokens(batch=2, length=9):
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


@interpreted
@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_are_the_same(tied):
    model = model_of(dataclasses.replace(SMALLER, tied=tied))
    wanted = model.double()(tokens())
    model.float()
    plain = model(tokens())
    model.glue = FUSED
    # Twice what PyTorch's own operations err by, in float32.
    allowed = 2 * (plain - wanted).abs().max() + torch.finfo(torch.float32).eps * wanted.abs().max()
    assert (model(tokens()) - wanted).abs().max() <= allowed


@interpreted
def test_token_by_token_with_a_cache_it_gives_the_same():
    model, ids = model_of(), tokens(2, 7)
    model.glue = FUSED
    cache = new_cache(model, 2, 7)
    steps = torch.cat(
        [model(ids[:, :3], cache), *(model(ids[:, n : n + 1], cache, last_only=True) for n in range(3, 7))], 1
    )
    assert torch.allclose(steps, model(ids), atol=1e-4)


@interpreted
def test_every_gradient_is_the_same():
    gradients = []
    for glue in (TORCH, FUSED):
        model = model_of().requires_grad_(True)
        model.glue = glue
        loss = model.loss(tokens()[:, :-1], tokens()[:, 1:])
        loss.backward()
        gradients.append([loss, *(parameter.grad for parameter in model.parameters())])
    for plain, fused in zip(*gradients):
        assert (plain - fused).abs().max() <= 100 * torch.finfo(torch.float32).eps * plain.abs().max()


@interpreted
def test_it_learns_what_the_model_of_pytorchs_operations_learns():
    curves = loss_curves(glues={"PyTorch": TORCH, "fused": FUSED}, config=SMALLER, steps=12, device="cpu")
    assert list(curves) == ["PyTorch", "fused"] and len(curves["fused"]) == 12
    assert curves["fused"] == pytest.approx(curves["PyTorch"], rel=1e-4)
    assert curves["fused"][-1] < curves["fused"][0]


def test_the_norm_of_another_row_is_told_apart():
    """What is compared above is sharp enough."""
    model = model_of()
    right = model(tokens())

    def shifted(x, residual, weight, epsilon):
        normalised, summed = add_rms_norm_reference(x, residual, weight, epsilon)
        return normalised.roll(1, 0), summed

    model.glue = add_and_norm_of_rows(shifted)
    assert (model(tokens()) - right).abs().max() > 0.1


def test_a_function_of_rows_takes_the_place_of_additions_and_norms():
    model, calls = model_of(), []
    right = model(tokens())

    def rows(x, residual, weight, epsilon):
        calls.append(tuple(x.shape))
        assert x.shape == residual.shape and weight.shape == (SMALLER.width,) and epsilon == SMALLER.norm_epsilon
        return add_rms_norm_reference(x, residual, weight, epsilon)

    model.glue = add_and_norm_of_rows(rows)
    assert torch.allclose(model(tokens()), right, atol=1e-5)
    assert calls == [(18, SMALLER.width)] * (2 * SMALLER.layers)


def test_attentions_and_glues_are_compared_one_at_a_time():
    with pytest.raises(ValueError, match="glues"):
        loss_curves({"a": None}, glues={"b": TORCH})
