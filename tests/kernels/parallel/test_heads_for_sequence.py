"""Attention by an exchange of places for heads: what needs no processes. `test_ring` runs it on 2 and 4 ranks."""

import pytest
import torch

from course_lib.hardware.ranks import Ranks
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.parallel.heads_for_sequence import attention_over_heads, bytes_received, check_heads


def test_one_rank_is_plain_attention():
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 7, 16, generator=draw) for heads in (2, 1, 1))
    output = attention_over_heads(Ranks(0, 1, torch.device("cpu")), query, key, value, scale=0.3)
    wanted = attention_reference(*(one.double() for one in (query, key, value)), causal=True, scale=0.3)
    torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_heads, key_heads, ranks", [(8, 8, 4), (8, 2, 4), (6, 1, 3), (8, 4, 2)])
def test_heads_that_can_be_shared_out_are_taken(query_heads, key_heads, ranks):
    check_heads(query_heads, key_heads, ranks)


@pytest.mark.parametrize(
    "query_heads, key_heads, ranks, words",
    [(6, 6, 4, "query has 6 heads.* a multiple of 4"), (12, 6, 4, "key has 6 heads for 4"), (4, 3, 4, "key has 3")],
)
def test_heads_that_cannot_be_shared_out_are_refused(query_heads, key_heads, ranks, words):
    with pytest.raises(ValueError, match=words):
        check_heads(query_heads, key_heads, ranks)


def test_the_bytes_of_the_module_s_example():
    query, key = (torch.empty(1, heads, 65536, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    assert bytes_received(2, query, key) == 671_088_640
