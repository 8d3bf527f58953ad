"""The tiny model learns its text, the same way each time."""

import dataclasses

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.models.tiny import TINY, tiny_text
from course_lib.models.tokenizer import decode, encode
from course_lib.models.training import loss_curves, train_tiny_model

SMALLER = dataclasses.replace(TINY, layers=1, width=32, query_heads=2, key_heads=1, head_dim=16, hidden=32, context=32)


def test_the_text_is_plain_and_of_the_size_that_is_stated():
    text = tiny_text()
    assert 30_000 < len(text) < 32_000 and text.isascii()
    assert text.startswith("Chapter I. Down the Rabbit-Hole\nAlice was beginning to get very tired")


def test_text_survives_its_tokens():
    assert decode(encode("Häschen, 兎, rabbit\n")) == "Häschen, 兎, rabbit\n"
    assert encode("A").tolist() == [65] and encode("A").dtype == torch.int64
    assert decode(torch.tensor([65, 255])) == "A�"


def test_the_model_has_a_few_hundred_thousand_parameters():
    assert TINY.parameters == 394_080


def test_the_loss_falls_and_every_step_is_reported():
    losses = []
    train_tiny_model(SMALLER, steps=40, device="cpu", report=lambda step, loss: losses.append((step, loss)))
    assert [step for step, _ in losses] == list(range(1, 41))
    assert losses[-1][1] < losses[0][1] - 1.5


def test_a_seed_gives_the_same_model_and_leaves_the_callers_randomness_alone():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    one, same, other = (train_tiny_model(SMALLER, steps=3, seed=seed, device="cpu") for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters()))
    assert not torch.equal(one.embedding.weight, other.embedding.weight)


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"text": "too short"}, "text has 9 bytes"),
        ({"config": dataclasses.replace(SMALLER, vocabulary=128)}, "vocabulary"),
    ],
)
def test_what_cannot_be_trained_is_named(arguments, name):
    with pytest.raises(ValueError, match=name):
        train_tiny_model(**arguments)


@pytest.mark.skipif(not interpreting(), reason="on a GPU tests/gpu/test_flash_backward.py trains the whole model")
def test_trained_with_the_courses_kernels_it_loses_what_it_loses_with_pytorchs():
    curves = loss_curves(config=SMALLER, steps=3, device="cpu")
    assert list(curves) == ["PyTorch", "ours"] and len(curves["ours"]) == 3
    assert curves["ours"] == pytest.approx(curves["PyTorch"], abs=2e-3)
    assert curves["ours"][-1] != curves["ours"][0]
