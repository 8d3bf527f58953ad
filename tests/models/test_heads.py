"""Another number of KV heads: repeated heads are the same model, merged ones are not until they are trained on."""

import dataclasses

import pytest
import torch

from course_lib.models.decoder import Decoder
from course_lib.models.heads import loss_of, repeated_heads, train_on, with_key_heads
from course_lib.models.tiny import TINY
from course_lib.models.training import initialize
from course_lib.serving.generation import complete

SMALLER = dataclasses.replace(TINY, layers=1, width=32, query_heads=4, key_heads=2, head_dim=16, hidden=32, context=32)


def smaller():
    torch.manual_seed(0)
    model = Decoder(SMALLER).eval()
    initialize(model)
    return model


def mean(weight, key_heads, new_key_heads):
    return weight.unflatten(0, (new_key_heads, key_heads // new_key_heads, -1)).mean(dim=1).flatten(0, 1)


def test_repeated_heads_write_the_same_text():
    model = smaller()
    four = with_key_heads(model, 4, repeated_heads)
    assert four.config.key_heads == 4 and model.config.key_heads == 2
    tokens = torch.randint(0, 256, (2, 9))
    torch.testing.assert_close(four(tokens), model(tokens))
    assert complete(four, "Alice", 12) == complete(model, "Alice", 12)


def test_heads_are_repeated_side_by_side():
    weight = torch.arange(4.0)[:, None]  # two heads of dimension 2
    assert repeated_heads(weight, 2, 4).flatten().tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_training_on_lowers_the_loss_and_leaves_the_original_alone():
    model = smaller()
    one = with_key_heads(model, 1, mean)
    before, original = loss_of(one, 4), [parameter.clone() for parameter in model.parameters()]
    train_on(one, 12)
    assert loss_of(one, 4) < before - 0.1
    assert all(map(torch.equal, original, model.parameters()))


def test_a_conversion_of_the_wrong_size_is_not_swallowed():
    with pytest.raises(RuntimeError, match="size mismatch"):
        with_key_heads(smaller(), 1, repeated_heads)
