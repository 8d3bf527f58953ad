"""The plain PyTorch meaning of a decoder layer for one new token."""

import torch


def decode_layer_reference(weights, keys, values, stream, position: int, cosine, sine, layer: int, epsilon: float):
    """Returns the stream behind the layer; stores the token's key and value at `position`. Computes in stream's dtype.

    weights: as `course_lib.kernels.layer.launched.LayerWeights`. keys, values: [layers, key_heads, capacity, head_dim].
    stream: [width]. cosine, sine: [capacity, head_dim / 2]. All are taken to stream's dtype.
    """
    _, key_heads, _, head_dim = keys.shape
    project, output, feed, down, attention_gain, feed_gain = (
        getattr(weights, name)[layer].to(stream.dtype)
        for name in ("project", "output", "feed", "down", "attention_gain", "feed_gain")
    )
    heads = (project @ normalised(stream, attention_gain, epsilon)).view(-1, head_dim)  # [query + 2 key heads, D]
    turned, value = heads[:-key_heads], heads[-key_heads:]
    first, second = turned.chunk(2, dim=1)
    c, s = cosine[position].to(stream.dtype), sine[position].to(stream.dtype)
    turned = torch.cat([first * c - second * s, second * c + first * s], dim=1)
    query, key = turned[:-key_heads], turned[-key_heads:]
    keys[layer, :, position], values[layer, :, position] = key.to(keys.dtype), value.to(values.dtype)
    groups = query.view(key_heads, -1, head_dim)
    scores = groups @ keys[layer, :, : position + 1].to(stream.dtype).transpose(1, 2) * head_dim**-0.5
    attended = torch.softmax(scores, dim=-1) @ values[layer, :, : position + 1].to(stream.dtype)
    stream = stream + output @ attended.flatten()
    gate, up = (feed @ normalised(stream, feed_gain, epsilon)).chunk(2)
    return stream + down @ (torch.nn.functional.silu(gate) * up)


def normalised(x: torch.Tensor, gain: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean() + epsilon) * gain
