"""What of the Hopper kernel can be held without a GPU: what it refuses, and how it deals keys out."""

import pytest
import torch

from course_lib.kernels.gluon.limits import machine_refusal
from course_lib.kernels.latent.hopper import estimated_microseconds, latent_decode_hopper, latent_splits, scores_first
from course_lib.kernels.latent.hopper_limits import latent_input_refusal


def inputs(heads=16, capacity=128, width=576, dtype=torch.bfloat16):
    return torch.zeros(2, 1, heads, width, dtype=dtype), torch.zeros(2, capacity, width, dtype=dtype)


def reason(query, cache, **options):
    refusal = latent_input_refusal(query, cache, **options)
    assert refusal is not None and refusal.error is ValueError
    return refusal.reason


def test_what_deepseek_serves_is_taken():
    assert latent_input_refusal(*inputs()) is None
    assert latent_input_refusal(*inputs(heads=3, capacity=77)) is None
    query, _ = inputs()
    assert latent_input_refusal(query, torch.zeros(9, 64, 576, dtype=query.dtype), paged=True) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_refused(dtype):
    assert "torch.float16 or torch.bfloat16" in reason(*inputs(dtype=dtype))


def test_a_cache_of_another_dtype_is_refused():
    query, cache = inputs()
    assert "both the same" in reason(query, cache.half())


def test_other_widths_are_refused():
    assert "576, 512 of them values" in reason(*inputs(width=320))
    assert "256 of them values" in reason(*inputs(), value_dim=256)


@pytest.mark.parametrize("page_size", [1, 16, 48, 96])
def test_pages_that_are_no_multiple_of_64_tokens_are_refused(page_size):
    query, _ = inputs()
    pages = torch.zeros(8, page_size, 576, dtype=query.dtype)
    assert f"pages of {page_size} tokens" in reason(query, pages, paged=True)


def test_addresses_and_strides_that_the_copy_engine_cannot_use_are_refused():
    query, cache = inputs()
    memory = torch.zeros(cache.numel() + 64, dtype=cache.dtype)
    begin = next(shift for shift in range(8) if memory[shift:].data_ptr() % 16)
    assert "begins" in reason(query, memory[begin : begin + cache.numel()].view(cache.shape))
    assert "stride 580" in reason(query, torch.zeros(2, 128, 580, dtype=cache.dtype)[..., :576])
    assert "stride 0" in reason(query, cache[:1].expand(2, -1, -1))
    assert "last dimension" in reason(query, torch.zeros(2, 576, 128, dtype=cache.dtype).mT)


def test_a_wider_row_is_no_obstacle():
    query, cache = inputs()
    assert latent_input_refusal(query, torch.zeros(2, 128, 640, dtype=cache.dtype)[..., :576]) is None


@pytest.mark.skipif(
    machine_refusal(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is None, reason="Hopper"
)
def test_another_machine_is_told_so():
    query, cache = inputs()
    with pytest.raises(RuntimeError, match="latent_decode_hopper: .*latent_decode_attention takes these inputs"):
        latent_decode_hopper(query, cache, torch.tensor([128, 1]), scale=0.1)


def test_keys_are_split_until_the_chip_is_full_and_not_further():
    assert latent_splits(1, 1, 64, 132) == 1
    assert latent_splits(128, 2, 4096, 132) == latent_splits(64, 2, 4096, 132) == 1
    assert 1 < latent_splits(64, 1, 8192, 132) <= 4
    for batch, row_tiles, longest in ((1, 2, 32768), (16, 2, 8192), (3, 1, 1000)):
        splits = latent_splits(batch, row_tiles, longest, 132)
        pairs = -(-longest // 128)
        assert 1 < splits <= pairs
        least = estimated_microseconds(splits, batch, row_tiles, pairs, 132)
        assert all(least <= estimated_microseconds(other, batch, row_tiles, pairs, 132) for other in range(1, pairs))


def test_scores_come_first_in_long_programs_that_compute():
    """At 1,151 tokens that order is slower, at 32k faster; one tile of rows waits for its keys and was not measured."""
    assert scores_first(2, 32) and scores_first(2, 256)
    assert not scores_first(2, 9)
    assert not scores_first(1, 256)
