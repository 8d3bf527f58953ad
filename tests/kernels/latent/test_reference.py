"""The meaning of latent decode against the expanded form of multi-head attention, which it must equal."""

import math

import pytest
import torch

from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.latent.reference import latent_decode_reference, paged_latent_decode_reference

HEADS, NOPE, ROPE, LATENT, VALUE = 3, 8, 4, 16, 10


@pytest.mark.parametrize("query_tokens", [1, 3])
def test_the_absorbed_form_is_multi_head_attention_over_expanded_keys_and_values(query_tokens):
    torch.manual_seed(query_tokens)
    up_key, up_value = (torch.randn(HEADS, width, LATENT, dtype=torch.float64) for width in (NOPE, VALUE))
    latent, rotary = (torch.randn(2, 7, width, dtype=torch.float64) for width in (LATENT, ROPE))
    query, query_rotary = (torch.randn(2, query_tokens, HEADS, width, dtype=torch.float64) for width in (NOPE, ROPE))
    scale = 1 / math.sqrt(NOPE + ROPE)

    keys = torch.cat([torch.einsum("hdl, bnl -> bhnd", up_key, latent),
                      rotary[:, None].expand(-1, HEADS, -1, -1)], dim=-1)  # fmt: skip
    values = torch.einsum("hdl, bnl -> bhnd", up_value, latent)
    queries = torch.cat([query, query_rotary], dim=-1).transpose(1, 2)
    expanded, expanded_lse = attention_reference(queries, keys, values, causal=True, scale=scale, return_lse=True)

    absorbed = torch.cat([torch.einsum("bthd, hdl -> bthl", query, up_key), query_rotary], dim=-1)
    cache = torch.cat([latent, rotary], dim=-1)
    output, lse = latent_decode_reference(absorbed, cache, scale=scale, value_dim=LATENT, return_lse=True)
    torch.testing.assert_close(torch.einsum("bthl, hdl -> bhtd", output, up_value), expanded)
    torch.testing.assert_close(lse.transpose(1, 2), expanded_lse)


def test_lengths_cut_the_cache_and_a_token_that_sees_no_key_gets_zeros():
    query, cache = torch.randn(3, 2, 4, 20), torch.randn(3, 6, 20)
    lengths = torch.tensor([4, 0, 1])
    output, lse = latent_decode_reference(query, cache, lengths, scale=0.3, value_dim=16, return_lse=True)
    whole, whole_lse = latent_decode_reference(query[:1], cache[:1, :4], scale=0.3, value_dim=16, return_lse=True)
    assert torch.equal(output[:1], whole) and torch.equal(lse[:1], whole_lse)
    assert torch.all(output[1] == 0) and torch.all(lse[1] == -math.inf)
    assert torch.all(output[2, 0] == 0) and torch.all(lse[2, 0] == -math.inf)
    torch.testing.assert_close(output[2, 1], cache[2, 0, :16].expand(4, 16))


def test_without_causal_every_token_sees_every_key():
    query, cache = torch.randn(1, 2, 4, 20), torch.randn(1, 6, 20)
    both = latent_decode_reference(query, cache, scale=0.3, value_dim=16, causal=False)
    first = latent_decode_reference(query[:, :1], cache, scale=0.3, value_dim=16)
    torch.testing.assert_close(both[:, :1], first)


def test_pages_give_what_a_contiguous_cache_gives_and_unused_entries_may_be_anything():
    query, cache = torch.randn(2, 2, 3, 20), torch.randn(2, 12, 20)
    pages = torch.full((7, 4, 20), math.nan)
    tables = torch.tensor([[5, 0, 3], [2, 6, -9]], dtype=torch.int32)
    pages[tables[0].long()], pages[[2, 6]] = cache[0].unflatten(0, (3, 4)), cache[1, :8].unflatten(0, (2, 4))
    lengths = torch.tensor([11, 7])
    paged = paged_latent_decode_reference(query, pages, tables, lengths, scale=0.3, value_dim=16, return_lse=True)
    contiguous = latent_decode_reference(query, cache, lengths, scale=0.3, value_dim=16, return_lse=True)
    assert all(torch.equal(*pair) for pair in zip(paged, contiguous))
