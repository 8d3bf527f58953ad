"""The shapes of released models are theirs: their parameters come out as published, to the element."""

import dataclasses

import pytest

from course_lib.models.config import PRESETS, ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.serving.caches.new import new_cache

# As counted in the weights released under these names.
PUBLISHED = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Mistral-7B v0.3": 7_248_023_552,
}
SMALL = ModelConfig(vocabulary=50, layers=2, width=24, query_heads=4, key_heads=2, head_dim=8, hidden=40, context=32)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_parameters_that_were_released(name):
    assert PRESETS[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"sinks": True}, {"experts": 5, "chosen": 2}], ids=str)
def test_the_count_of_parameters_is_that_of_the_decoder(options):
    config = dataclasses.replace(SMALL, **options)
    assert sum(parameter.numel() for parameter in Decoder(config).parameters()) == config.parameters


def test_a_token_meets_its_experts_and_all_else():
    config = dataclasses.replace(SMALL, experts=5, chosen=2)
    assert config.parameters - config.active_parameters == SMALL.layers * 3 * 3 * SMALL.width * SMALL.hidden
    assert SMALL.active_parameters == SMALL.parameters


def test_the_cache_of_the_70b_shape_with_all_its_heads():
    config = PRESETS["Llama-2-70B, 64 KV heads"]
    assert config.cache_bytes_per_token() == 2_621_440
    assert config.cache_bytes(1, 4096) == pytest.approx(10.7e9, rel=5e-3)
    assert config.cache_bytes(512, 2048) == pytest.approx(2.75e12, rel=5e-3)


def test_the_released_70b_model_needs_an_eighth_of_it():
    assert PRESETS["Llama-2-70B"].cache_bytes_per_token() * 8 == 2_621_440


def test_the_cache_counts_what_a_cache_reserves():
    cache = new_cache(Decoder(SMALL), batch=3, capacity=17)
    assert cache.bytes == SMALL.cache_bytes(3, 17, item_bytes=4)


@pytest.mark.parametrize(
    "wrong, name",
    [
        ({"key_heads": 3}, "query_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"layers": 0}, "layers"),
        ({"width": 2.5}, "width"),
        ({"rotary_base": 0.0}, "rotary_base"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"experts": 4}, "chosen"),
        ({"chosen": 2}, "experts"),
        ({"experts": 4, "chosen": 5}, "chosen is 5.* 4"),
    ],
)
def test_sizes_that_do_not_fit_are_named(wrong, name):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(SMALL, **wrong)
