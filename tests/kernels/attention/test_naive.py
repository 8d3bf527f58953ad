"""Naive attention against float64, and its refusal of what the memory can't hold."""

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.attention import naive as module
from course_lib.kernels.attention.naive import naive_attention
from course_lib.kernels.attention.reference import attention_reference
from tests.kernels.rounding import largest_error, rounded_otherwise

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


def tensors(query_length, key_length, head_dim=20, dtype=torch.float32):
    generator = torch.Generator().manual_seed(query_length + key_length)
    shapes = [(1, 4, query_length), (1, 2, key_length), (1, 2, key_length)]
    return [torch.randn(*shape, head_dim, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("lengths", [(1, 1), (1, 70), (33, 65), (64, 64), (40, 17)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_naive_attention_is_right(lengths, causal, dtype):
    inputs = tensors(*lengths, dtype=dtype)
    expected = attention_reference(*(tensor.double() for tensor in inputs), causal=causal)
    plain = rounded_otherwise(attention_reference, *inputs, causal=causal)
    allowed = 2 * largest_error(plain, expected) + 2 * torch.finfo(dtype).eps
    assert (naive_attention(*inputs, causal=causal) - expected).abs().max() <= allowed


def test_strides_and_scale_are_honoured():
    query, key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors(20, 30))
    expected = attention_reference(query, key, value, scale=0.5)
    assert torch.allclose(naive_attention(query, key, value, scale=0.5), expected, atol=1e-5)


def test_what_does_not_fit_is_refused_with_its_bytes(monkeypatch):
    monkeypatch.setattr(module, "memory_available", lambda device: 10_000)
    query, key, value = tensors(100, 50)
    needed = 4 * 100 * (50 + 50 + 20) * 4  # scores, probabilities and output of four heads in float32
    with pytest.raises(ValueError, match=rf"4 score matrices of 100 × 50.*{needed} bytes.*10.0 kB"):
        naive_attention(query, key, value)


def test_what_no_machine_holds_is_refused_before_it_is_tried():
    long = torch.zeros(1, 1, 1, 16).expand(1, 1, 10_000_000, 16)
    with pytest.raises(ValueError, match="800000640000000 bytes"):
        naive_attention(long, long, long)


def test_bad_input_is_refused_as_by_every_attention():
    query, key, value = tensors(4, 4)
    with pytest.raises(ValueError, match="value has shape"):
        naive_attention(query, key, value[:, :, :3])
