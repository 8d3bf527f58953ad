"""A decoder layer for one token as five kernels: right for any sizes that it takes, and what it refuses."""

import pytest
import torch

from course_lib.hardware.device import default_device, supports_bfloat16
from course_lib.kernels.layer import launched
from course_lib.kernels.layer.launched import (
    LayerWeights,
    begin_token,
    decode_layer,
    end_token,
    layer_state,
    logit_tiles,
)
from course_lib.kernels.layer.reference import decode_layer_reference

EPSILON = 1e-5
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if supports_bfloat16() else [])
# layers, width, hidden, query_heads, key_heads, head_dim, capacity
SHAPES = [(2, 64, 128, 4, 2, 16, 70), (1, 48, 112, 6, 1, 32, 9), (1, 128, 96, 3, 3, 64, 200), (1, 32, 64, 16, 1, 16, 1)]


def make(layers, width, hidden, query_heads, key_heads, head_dim, capacity, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator)).to(default_device(), dtype)

    rows = (query_heads + 2 * key_heads) * head_dim
    weights = LayerWeights(
        project=random(layers, rows, width, scale=width**-0.5),
        output=random(layers, width, query_heads * head_dim, scale=(query_heads * head_dim) ** -0.5),
        feed=random(layers, 2 * hidden, width, scale=width**-0.5),
        down=random(layers, width, hidden, scale=hidden**-0.5),
        attention_gain=1 + random(layers, width, scale=0.1), feed_gain=1 + random(layers, width, scale=0.1),
    )  # fmt: skip
    angles = torch.rand(capacity, head_dim // 2, generator=generator).to(default_device()) * 7
    state = layer_state(weights, key_heads, head_dim, angles.cos(), angles.sin())
    state.keys.copy_(random(*state.keys.shape))
    state.values.copy_(random(*state.values.shape))
    state.stream.copy_(random(width))
    return weights, state


def in_float64(weights, state, layer, position):
    keys, values = state.keys.double(), state.values.double()
    stream = decode_layer_reference(
        weights, keys, values, state.stream.double(), position, state.cosine, state.sine, layer, EPSILON
    )
    return stream, keys[layer, :, position], values[layer, :, position]


def bound(wanted: torch.Tensor, dtype: torch.dtype, roundings: int) -> float:
    """So many roundings of numbers as large as the largest, as a plain chain of stages in this dtype makes."""
    return roundings * torch.finfo(dtype).eps * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_is_right_at_any_position(shape, dtype):
    capacity = shape[-1]
    for position in sorted({0, capacity // 3, capacity - 1}):
        weights, state = make(*shape, dtype=dtype, seed=position)
        layer = shape[0] - 1
        state.position.fill_(position)
        before = state.keys.clone(), state.values.clone()
        wanted = in_float64(weights, state, layer, position)
        decode_layer(weights, state, layer, EPSILON)
        found = state.stream, state.keys[layer, :, position], state.values[layer, :, position]
        for ours, right in zip(found, wanted):
            assert (ours.double() - right).abs().max().item() <= bound(right, dtype, 16)
        for now, then in zip((state.keys, state.values), before):
            now[layer, :, position] = then[layer, :, position]
            assert torch.equal(now, then), "a token of the cache has changed"
        assert not state.merged.any() and state.position.item() == position


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_programs_that_take_several_tiles_give_the_same(shape, programs, monkeypatch):
    monkeypatch.setattr(launched, "INTERPRETED_TILE_ELEMENTS", 1024)
    weights, state = make(*shape)
    state.position.fill_(shape[-1] - 1)
    start = state.stream.clone()
    decode_layer(weights, state, 0, EPSILON)
    wanted = state.stream.clone()
    state.stream.copy_(start)
    decode_layer(weights, state, 0, EPSILON, programs=programs)
    assert torch.equal(state.stream, wanted)


def test_layers_follow_each_other():
    weights, state = make(*SHAPES[0])
    state.position.fill_(33)
    keys, values, stream = state.keys.double(), state.values.double(), state.stream.double()
    for layer in range(2):
        stream = decode_layer_reference(weights, keys, values, stream, 33, state.cosine, state.sine, layer, EPSILON)
        decode_layer(weights, state, layer, EPSILON)
    torch.testing.assert_close(state.stream.double(), stream, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 37, 64, 5000])
def test_a_token_begins_with_its_embedding_and_ends_with_the_first_of_the_largest(vocabulary):
    _, state = make(*SHAPES[0])
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(vocabulary, 64, generator=generator).to(default_device())
    gain = torch.rand(64, generator=generator).to(default_device())
    token = torch.tensor([vocabulary - 1], device=default_device())
    begin_token(token, embedding, state)
    assert torch.equal(state.stream, embedding[-1])
    logits = torch.full((vocabulary,), torch.nan, device=default_device())
    largest = torch.full((logit_tiles(vocabulary, 64),), torch.nan, device=default_device())
    state.position.fill_(5)
    matrix = embedding.clone()
    matrix[vocabulary // 2 :] = matrix[vocabulary // 2]  # many are equally large
    end_token(token, gain, matrix, logits, largest, state, EPSILON)
    wide = state.stream.double()
    right = matrix.double() @ (wide * torch.rsqrt(wide.square().mean() + EPSILON) * gain)
    torch.testing.assert_close(logits.double(), right, rtol=1e-5, atol=1e-5)
    assert token.item() == int(logits.argmax()) and state.position.item() == 6


@pytest.mark.parametrize(
    "change, says",
    [
        ({"head_dim": 24}, "head_dim is 24; it must be a power of two"),
        ({"width": 40}, "width is 40; it must be a multiple of 16"),
        ({"hidden": 72}, "hidden is 72; it must be a multiple of 16"),
        ({"query_heads": 5, "key_heads": 2}, "they must be a multiple of 2 heads of 16"),
        ({"query_heads": 34, "key_heads": 2}, "17 query heads share a KV head; at most 16 may"),
    ],
)
def test_sizes_without_tiles_are_refused_by_name(change, says):
    sizes = {"layers": 1, "width": 32, "hidden": 64, "query_heads": 2, "key_heads": 1, "head_dim": 16, "capacity": 4}
    with pytest.raises(ValueError, match=says):
        make(**sizes | change)


def test_weights_that_do_not_fit_are_refused_by_name():
    weights, state = make(*SHAPES[0])
    fields = vars(weights)
    angles = state.cosine, state.sine
    with pytest.raises(ValueError, match=r"down has shape \(2, 64, 64\); it must be \(2, 64, 128\)"):
        layer_state(LayerWeights(**fields | {"down": weights.down[..., :64].contiguous()}), 2, 16, *angles)
    with pytest.raises(ValueError, match="output has dtype torch.float16"):
        layer_state(LayerWeights(**fields | {"output": weights.output.half()}), 2, 16, *angles)
    with pytest.raises(ValueError, match="must be contiguous"):
        layer_state(LayerWeights(**fields | {"output": weights.output.transpose(1, 2)}), 2, 16, *angles)
    with pytest.raises(ValueError, match="half of head_dim"):
        layer_state(weights, 2, 16, angles[0][:, :3], angles[1][:, :3])
