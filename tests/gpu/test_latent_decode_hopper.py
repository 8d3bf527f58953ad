"""Latent decode on a Hopper GPU: right for any lengths, heads and splits, and the same bits at every run."""

import math

import pytest
import torch

from course_lib.hardware.device import machine
from course_lib.kernels.latent.reference import latent_decode_reference, paged_latent_decode_reference
from tests.gpu.attention_claims import assert_agrees

pytestmark = pytest.mark.skipif(
    machine().tier == "none" or machine().compute_capability != (9, 0), reason="needs a Hopper GPU (sm_90)"
)

SCALE = 1 / math.sqrt(192)
# batch, query tokens, heads, lengths
SHAPES = [
    (1, 1, 64, [64]),
    (1, 1, 128, [4096]),
    (2, 1, 128, [1000, 513]),
    (2, 1, 128, [4500, 1]),  # unsplit, the right group's scores come first
    (3, 1, 16, [700, 0, 1]),
    (3, 4, 24, [777, 3, 130]),
    (1, 8, 128, [640]),
    (2, 2, 5, [65, 129]),
]


def normal(*shape, dtype):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def contiguous(lengths, dtype):
    """A cache whose rows after each sequence's last token are NaN."""
    cache = torch.full((len(lengths), max(lengths), 576), math.nan, device="cuda", dtype=dtype)
    for sequence, length in enumerate(lengths):
        cache[sequence, :length] = normal(length, 576, dtype=dtype)
    return cache


def in_pages(cache, lengths, page_size):
    """The same tokens in pages in random order; what the tables do not need names no page."""
    blocks = -(-cache.shape[1] // page_size)
    pages = torch.full((len(lengths) * blocks + 2, page_size, 576), math.nan, device="cuda", dtype=cache.dtype)
    free = iter(torch.randperm(len(pages)).tolist())
    tables = torch.full((len(lengths), blocks), -(2**30), dtype=torch.int32)
    for sequence, length in enumerate(lengths):
        for block in range(-(-length // page_size)):
            tables[sequence, block] = page = next(free)
            tokens = cache[sequence, block * page_size : min((block + 1) * page_size, length)]
            pages[page, : len(tokens)] = tokens
    return pages, tables.cuda()


def rounded(query, cache, lengths, causal):
    """The same in float32 with the weights rounded to the inputs' precision: a plain implementation's error."""
    output = torch.zeros(*query.shape[:3], 512, device="cuda")
    for sequence, length in enumerate(lengths.tolist()):
        keys = cache[sequence, :length].float()
        scores = SCALE * torch.einsum("thw, nw -> thn", query[sequence].float(), keys)
        last = length - query.shape[1] + torch.arange(query.shape[1], device="cuda")[:, None, None]
        if causal:
            scores = scores.masked_fill(torch.arange(length, device="cuda") > last, -math.inf)
        weights = scores.softmax(dim=-1).nan_to_num(0)
        output[sequence] = torch.einsum("thn, nv -> thv", weights.to(query.dtype).float(), keys[:, :512])
    return output.to(query.dtype)


def assert_right(output, lse, query, cache, lengths, causal):
    exact, exact_lse = latent_decode_reference(
        query.double(), cache.double(), lengths, scale=SCALE, causal=causal, return_lse=True
    )
    plain = rounded(query, cache, lengths, causal)
    allowed = 2 * (plain.double() - exact).norm() + torch.finfo(query.dtype).eps * exact.norm()
    assert_agrees(output, lse, exact, exact_lse, allowed, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 2, 5, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_agrees_with_float64(shape, dtype, splits):
    from course_lib.kernels.latent.hopper import latent_decode_hopper, paged_latent_decode_hopper

    batch, tokens, heads, lengths = shape
    query = normal(batch, tokens, heads, 576, dtype=dtype)
    cache = contiguous(lengths, dtype)
    pages, tables = in_pages(cache, lengths, 64)
    lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    for causal in (True, False) if tokens > 1 else (True,):
        options = {"scale": SCALE, "causal": causal, "splits": splits, "return_lse": True}
        output, lse = latent_decode_hopper(query, cache, lengths, **options)
        assert_right(output, lse, query, cache, lengths, causal)
        paged, paged_lse = paged_latent_decode_hopper(query, pages, tables, lengths, **options)
        if splits is not None:
            assert torch.equal(paged, output) and torch.equal(paged_lse, lse)
        assert_right(paged, paged_lse, query, cache, lengths, causal)


def test_large_scores_do_not_overflow():
    from course_lib.kernels.latent.hopper import latent_decode_hopper

    query = 400 * normal(2, 1, 64, 576, dtype=torch.bfloat16)  # scores of ±10⁴ and more
    cache = contiguous([500, 300], torch.bfloat16)
    lengths = torch.tensor([500, 300], device="cuda")
    output, lse = latent_decode_hopper(query, cache, lengths, scale=SCALE, return_lse=True)
    exact, exact_lse = latent_decode_reference(query.double(), cache.double(), lengths, scale=SCALE, return_lse=True)
    plain = rounded(query, cache, lengths, True)
    allowed = 2 * (plain.double() - exact).norm() + torch.finfo(query.dtype).eps * exact.norm()
    assert_agrees(output, lse, exact, exact_lse, allowed, rtol=1e-5, atol=1e-4)


def test_pages_of_other_multiples_of_64():
    from course_lib.kernels.latent.hopper import paged_latent_decode_hopper

    query = normal(2, 1, 128, 576, dtype=torch.bfloat16)
    cache = contiguous([1500, 257], query.dtype)
    for page_size in (128, 192, 1024):
        pages, tables = in_pages(cache, [1500, 257], page_size)
        lengths = torch.tensor([1500, 257], device="cuda", dtype=torch.int64)
        output, lse = paged_latent_decode_hopper(query, pages, tables.long(), lengths, scale=SCALE, return_lse=True)
        exact, exact_lse = paged_latent_decode_reference(
            query.double(), pages.double(), tables, lengths, scale=SCALE, return_lse=True
        )
        plain = rounded(query, cache, lengths, True)
        allowed = 2 * (plain.double() - exact).norm() + torch.finfo(query.dtype).eps * exact.norm()
        assert_agrees(output, lse, exact, exact_lse, allowed, rtol=1e-5, atol=1e-4)


def test_every_run_gives_the_same_bits():
    from course_lib.kernels.latent.hopper import latent_decode_hopper

    query = normal(16, 1, 128, 576, dtype=torch.bfloat16)
    cache = normal(16, 2048, 576, dtype=torch.bfloat16)
    lengths = torch.full((16,), 2048, device="cuda", dtype=torch.int32)
    first = latent_decode_hopper(query, cache, lengths, scale=SCALE)
    for _ in range(50):
        assert torch.equal(latent_decode_hopper(query, cache, lengths, scale=SCALE), first)


def test_pages_beyond_two_to_the_31_numbers_are_found():
    """60,000 pages are 2.2 · 10⁹ numbers; the last ones hold what a small pool holds."""
    from course_lib.kernels.latent.hopper import paged_latent_decode_hopper

    count = 60_000
    if torch.cuda.mem_get_info()[0] < 2 * 64 * 576 * 2 * count:
        pytest.skip("needs 9 GB of free memory")
    query = normal(1, 1, 128, 576, dtype=torch.bfloat16)
    small = normal(4, 64, 576, dtype=torch.bfloat16)
    pages = torch.full((count, 64, 576), math.nan, device="cuda", dtype=torch.bfloat16)
    pages[-4:] = small
    table = torch.arange(4, device="cuda", dtype=torch.int32)[None]
    lengths = torch.tensor([250], device="cuda", dtype=torch.int32)
    expected = paged_latent_decode_hopper(query, small, table, lengths, scale=SCALE)
    assert torch.equal(paged_latent_decode_hopper(query, pages, table + count - 4, lengths, scale=SCALE), expected)
