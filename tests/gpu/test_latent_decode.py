"""Portable latent decode on a GPU against float64, at its real widths: contiguous, in pages, split, several tokens."""

import math

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.latent.attention import latent_decode_attention, paged_latent_decode_attention
from course_lib.kernels.latent.reference import latent_decode_reference
from tests.kernels.decode.cases import assert_close_to_float64, plain_results

pytestmark = pytest.mark.skipif(interpreting(), reason="needs a GPU: tests/kernels/latent has the interpreter's part")
SCALE = 1 / math.sqrt(192)


def in_pages(cache, page_size):
    """The cache as pages in random order, NaN in what is left over; and the tables."""
    batch, capacity, width = cache.shape
    blocks = math.ceil(capacity / page_size)
    order = torch.randperm(batch * blocks, device="cuda")
    padded = torch.nn.functional.pad(cache, (0, 0, 0, blocks * page_size - capacity), value=math.nan)
    pages = torch.empty(batch * blocks, page_size, width, device="cuda", dtype=cache.dtype)
    pages[order] = padded.view(-1, page_size, width)
    return pages, order.view(batch, blocks).int()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "tokens, heads, length", [(1, 128, 1000), (1, 16, 4096), (8, 16, 700), (3, 5, 333), (2, 20, 65)]
)
def test_any_heads_tokens_pages_and_splits_are_right(tokens, heads, length, dtype):
    torch.manual_seed(length)
    query = torch.randn(3, tokens, heads, 576, device="cuda").to(dtype)
    lengths = torch.tensor([length, 0, max(length - 77, 1)], dtype=torch.int32, device="cuda")
    cache = torch.randn(3, length, 576, device="cuda").to(dtype)
    cache = cache.masked_fill((torch.arange(length, device="cuda") >= lengths[:, None])[..., None], math.nan)
    known = torch.nan_to_num(cache)
    right = latent_decode_reference(query.double(), known.double(), lengths, scale=SCALE, return_lse=True)
    theirs = plain_results(latent_decode_reference, query, known, lengths, scale=SCALE)
    terms = SCALE * query.double().norm(dim=-1).max().item() * known.double().norm(dim=-1).max().item()
    largest = known[..., :512].abs().max().item()  # sums of 576 products: float32 errs by 3e-6 here, a library by 8e-7
    for splits in (None, 1, 3):
        ours = latent_decode_attention(query, cache, lengths, scale=SCALE, splits=splits, return_lse=True)
        assert_close_to_float64(ours, right, theirs, f"{splits=}", terms, largest)
    for page_size in (16, 64, 100):
        pages, tables = in_pages(cache, page_size)
        ours = paged_latent_decode_attention(query, pages, tables, lengths, scale=SCALE, return_lse=True)
        assert_close_to_float64(ours, right, theirs, f"{page_size=}", terms, largest)
