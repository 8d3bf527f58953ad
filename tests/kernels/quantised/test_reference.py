"""The meaning of decode over quantised caches, and of appending to them, against lists of tokens."""

import math

import pytest
import torch

from course_lib.kernels.decode.reference import decode_attention_reference
from course_lib.kernels.quantised.formats import GROUP, empty_int4_cache, quantise_e4m3_reference, quantise_int4
from course_lib.kernels.quantised.reference import (
    append_to_fp8_cache_reference,
    append_to_fp8_pages_reference,
    append_to_int4_reference,
    fp8_decode_reference,
    int4_decode_reference,
    paged_fp8_decode_reference,
    whole_sequence,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 150])
@pytest.mark.parametrize("paged", [False, True])
def test_groups_are_quantised_as_they_fill_and_the_rest_is_whole(length, paged):
    heads, width, tables = 2, 64, None
    cache = empty_int4_cache(1, heads, width, **({"pages": 5} if paged else {"capacity": 192}))
    if paged:
        tables = torch.tensor([[4, 1, 2]])
    key, value = (normal(1, heads, length, width, seed=seed).half() for seed in range(2))
    written = 0
    for count in (length // 3, length - length // 3):  # in two calls, of which the second begins anywhere
        new = slice(written, written + count)
        append_to_int4_reference(key[:, :, new], value[:, :, new], cache, torch.tensor([written]), block_tables=tables)
        written += count
    keys, values = whole_sequence(cache, 0, length, tables, torch.float64)
    assert keys.shape == values.shape == (heads, length, width)
    whole = length // GROUP * GROUP
    for restored, given, dim in ((keys, key[0], -2), (values, value[0], -1)):
        assert torch.equal(restored[:, whole:], given[:, whole:].double())
        for start in range(0, whole, GROUP):
            groups = quantise_int4(given[:, start : start + GROUP], dim)
            meant = groups.codes.double() * groups.scales.double() + groups.middles.double()
            assert torch.equal(restored[:, start : start + GROUP], meant)
    query = normal(1, 4, width, seed=3)
    output, lse = int4_decode_reference(query, cache, torch.tensor([length]), block_tables=tables, return_lse=True)
    expected = decode_attention_reference(query, keys[None], values[None], torch.tensor([length]), return_lse=True)
    assert torch.equal(output, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("scales", [torch.tensor(0.01), torch.tensor([0.01, 0.02])])
def test_fp8_pages_mean_what_a_contiguous_cache_means(scales):
    key, value = (normal(2, 2, 48, 64, seed=seed).float() for seed in range(2))
    options, lengths = {"key_scales": scales, "value_scales": scales * 3}, torch.tensor([48, 20])
    caches = [torch.zeros(2, 2, 48, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    append_to_fp8_cache_reference(key, value, *caches, torch.tensor([0, 0]), **options)
    assert torch.equal(caches[0].float(), quantise_e4m3_reference(key, scales).float())
    tables = torch.tensor([[4, 1, 2], [0, 3, 5]])
    pages = [torch.zeros(6, 2, 16, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    slots = (tables[:, :, None] * 16 + torch.arange(16)).flatten()
    rows = [new.transpose(1, 2).flatten(0, 1) for new in (key, value)]
    append_to_fp8_pages_reference(*rows, *pages, slots, **options)
    query = normal(2, 4, 64, seed=3)
    contiguous = fp8_decode_reference(query, *caches, lengths, return_lse=True, **options)
    paged = paged_fp8_decode_reference(query, *pages, tables, lengths, return_lse=True, **options)
    assert torch.equal(contiguous[0], paged[0]) and torch.equal(contiguous[1], paged[1])


def test_a_page_has_its_own_scale():
    scales = torch.tensor([[0.5, 1.0], [2.0, 4.0]])
    pages = [torch.zeros(2, 2, 16, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    key = torch.ones(2, 2, 64)
    append_to_fp8_pages_reference(key, key, *pages, torch.tensor([3, 16]), key_scales=scales, value_scales=scales)
    assert pages[0].float()[0, :, 3, 0].tolist() == [2, 1] and pages[0].float()[1, :, 0, 0].tolist() == [0.5, 0.25]
    options = {"key_scales": scales, "value_scales": scales, "scale": 1.0, "return_lse": True}
    tables, lengths = torch.tensor([[1]]), torch.tensor([1])
    output, lse = paged_fp8_decode_reference(torch.ones(1, 2, 64), *pages, tables, lengths, **options)
    assert torch.equal(output, torch.ones(1, 2, 64)) and lse.tolist() == [[64.0, 64.0]]
    output, lse = paged_fp8_decode_reference(torch.ones(1, 2, 64), *pages, tables, torch.tensor([0]), **options)
    assert (output == 0).all() and (lse == -math.inf).all()
