"""What their caches hold is what the formulas say."""

import dataclasses
from functools import partial

import pytest
import torch

from course_lib.models.config import Latent, with_latent
from course_lib.models.decoder import Decoder
from course_lib.models.kinds import KINDS, loss_on, loss_through_cache
from course_lib.models.low_rank import cached_numbers, energy_kept, rank_for
from course_lib.models.tiny import TINY, tiny_text
from course_lib.models.training import initialize
from course_lib.serving.caches.new import new_cache

SMALLER = dataclasses.replace(TINY, layers=2, width=32, query_heads=2, key_heads=2, head_dim=16, hidden=32, context=32)
SMALLER_KINDS = {"full heads": SMALLER, "MLA": with_latent(SMALLER, Latent(8, 4, 8, 8))}
NUMBERS = dict.fromkeys(("GQA", "heads of 64", "window", "window and sink", "experts"), 128)
NUMBERS |= {"full heads": 256, "MLA": 48}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_leaves_the_numbers_that_are_stated(name):
    assert KINDS[name].cache_bytes_per_token(1) == TINY.layers * NUMBERS[name]


def model_of(config):
    torch.manual_seed(0)
    model = Decoder(config).eval()
    initialize(model)
    return model


def test_loss_is_the_mean_over_whole_pieces():
    model = model_of(SMALLER)
    text = tiny_text()[: 2 * 33 + 5]
    assert loss_on(model, text) == pytest.approx((loss_on(model, text[:33]) + loss_on(model, text[33:66])) / 2)
    with pytest.raises(ValueError, match="text has 32 bytes.*needs 33"):
        loss_on(model, text[:32])


def test_the_loss_through_a_cache_is_that_of_what_the_cache_gives_back():
    model, text = model_of(SMALLER), tiny_text()[:80]
    assert loss_through_cache(model, text, partial(new_cache, model)) == pytest.approx(loss_on(model, text), rel=1e-5)

    def forgetful(batch, capacity):
        return new_cache(model, batch, capacity, decode=lambda query, *_: torch.zeros_like(query))

    assert loss_through_cache(model, text, forgetful) != pytest.approx(loss_on(model, text), rel=1e-5)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_the_numbers_are_those_in_the_cache(key_heads):
    model = model_of(dataclasses.replace(SMALLER, key_heads=key_heads))
    numbers = cached_numbers(model, tiny_text(), 1, pieces=3)
    assert numbers.shape == (96, 2 * key_heads * 16)
    cache = new_cache(model, 1, 32)
    with torch.inference_mode():
        model(torch.tensor([list(tiny_text().encode()[32:64])]), cache)
    wanted = torch.cat([cache.keys[1, 0], cache.values[1, 0]]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(numbers[32:64], wanted)


def test_keys_turned_back_are_a_matrix_times_the_input_and_so_of_no_higher_rank_than_its_width():
    """16 numbers go in and 64 come out of it; turned by 32 places, the keys need more than 16."""
    model = model_of(dataclasses.replace(SMALLER, width=16))
    back, turned = (cached_numbers(model, tiny_text(), 0, turned=turned) for turned in (False, True))
    assert energy_kept(back)[15] == pytest.approx(1, abs=1e-9) and energy_kept(turned)[15] < 0.999
    assert torch.equal(back[:, 32:], turned[:, 32:]) and torch.equal(back[0], turned[0])


def test_energy_is_that_of_the_best_approximation():
    torch.manual_seed(0)
    numbers = torch.randn(20, 3) @ torch.randn(3, 7) + 0.01 * torch.randn(20, 7)
    kept = energy_kept(numbers)
    left, values, right = torch.linalg.svd(numbers.double(), full_matrices=False)
    for rank in range(1, 8):
        approximation = (left[:, :rank] * values[:rank]) @ right[:rank]
        error = (numbers - approximation).square().sum() / numbers.square().sum()
        assert kept[rank - 1].item() == pytest.approx(1 - error.item(), abs=1e-6)
    assert rank_for(kept, 0.999) == 3 and rank_for(kept, 1.0) == 7 and rank_for(torch.tensor([1.0]), 0.5) == 1


def test_what_has_no_keys_or_values_or_layer_is_named():
    with pytest.raises(ValueError, match="model has latent attention"):
        cached_numbers(model_of(SMALLER_KINDS["MLA"]), "text", 0)
    with pytest.raises(ValueError, match="layer is 2; the model has layers 0 to 1"):
        cached_numbers(model_of(SMALLER), "text", 2)
    with pytest.raises(ValueError, match="text is empty"):
        cached_numbers(model_of(SMALLER), "", 0)
    with pytest.raises(ValueError, match="share is 0"):
        rank_for(torch.tensor([1.0]), 0)
