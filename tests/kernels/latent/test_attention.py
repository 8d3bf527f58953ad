"""Latent decode against float64, contiguous and in pages: any heads, tokens, widths, lengths, strides and splits."""

import math
from random import Random

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.latent.attention import latent_decode_attention, paged_latent_decode_attention
from course_lib.kernels.latent.reference import latent_decode_reference, paged_latent_decode_reference
from tests.kernels.decode.cases import assert_close_to_float64, plain_results, random_tensor

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
PAGE_SIZES = [1, 3, 16, 64, 100, 128]


def tensors(draw, batch, query_tokens, heads, capacity, value_dim, rope_dim, dtype=torch.float32):
    query = random_tensor(draw, batch, query_tokens, heads, value_dim + rope_dim, dtype=dtype)
    return query, random_tensor(draw, batch, capacity, value_dim + rope_dim, dtype=dtype)


def forget_beyond(cache, lengths):
    """NaN in place of every token that its sequence doesn't have."""
    return cache.masked_fill((torch.arange(cache.shape[1]) >= lengths[:, None])[..., None], math.nan)


def with_gaps(tensor):
    """The same numbers in memory that has gaps: rows wider than they are, and one more in the dimension before."""
    wide = torch.full((*tensor.shape[:-2], tensor.shape[-2] + 1, tensor.shape[-1] + 8), math.nan, dtype=tensor.dtype)
    wide[..., 1:, 8:] = tensor
    return wide[..., 1:, 8:]


def in_pages(draw, cache, page_size, spare=3):
    """The cache [batch, capacity, width] as pages in any order, NaN wherever nothing is; and the tables."""
    batch, capacity, width = cache.shape
    blocks = -(-capacity // page_size)
    order = list(range(batch * blocks + spare))
    draw.shuffle(order)
    tables = torch.tensor(order[: batch * blocks], dtype=torch.int32).view(batch, blocks)
    pages = torch.full((len(order), page_size, width), math.nan, dtype=cache.dtype)
    padded = torch.nn.functional.pad(cache, (0, 0, 0, blocks * page_size - capacity), value=math.nan)
    pages[tables.flatten().long()] = padded.view(batch * blocks, page_size, width)
    return pages, tables


def assert_right(function, reference, query, cache, *indices, case="", **options):
    ours = function(query, cache, *indices, return_lse=True, **options)
    meaning = {name: value for name, value in options.items() if name in ("scale", "value_dim", "causal")}
    known = torch.nan_to_num(cache)
    right = reference(query.double(), known.double(), *indices, return_lse=True, **meaning)
    theirs = plain_results(reference, query, known, *indices, **meaning)
    terms = options["scale"] * query.double().norm(dim=-1).max() * known.double().norm(dim=-1).max()
    assert_close_to_float64(ours, right, theirs, case, terms.item())
    return ours


def assert_contiguous_right(query, cache, lengths, **options):
    return assert_right(latent_decode_attention, latent_decode_reference, query, cache, lengths, **options)


@pytest.mark.parametrize("seed", range(24))
def test_any_heads_tokens_widths_lengths_strides_and_splits_are_right(seed):
    draw = Random(seed)
    batch, query_tokens, heads = draw.choice([(1, 1, 1), (2, 1, 5), (3, 2, 16), (1, 8, 4), (2, 1, 32), (1, 1, 64)])
    value_dim, rope_dim = draw.choice([16, 32, 64, 128]), draw.choice([16, 24, 33, 64])
    dtype, capacity = draw.choice([torch.float32, torch.float16]), draw.randint(1, 200)
    query, cache = tensors(draw, batch, query_tokens, heads, capacity, value_dim, rope_dim, dtype)
    lengths = torch.tensor([draw.choice([0, 1, capacity, draw.randint(0, capacity)]) for _ in range(batch)])
    lengths = lengths.to(draw.choice([torch.int32, torch.int64]))
    cache = forget_beyond(cache, lengths)
    if draw.random() < 0.5:
        query, cache = with_gaps(query), with_gaps(cache)
    options = {"splits": draw.choice([None, 1, 2, 5]), "causal": draw.random() < 0.8, "value_dim": value_dim}
    case = f"{seed=} {query.shape=} {capacity=} {lengths=} {options=}"
    assert_contiguous_right(query, cache, lengths, scale=draw.choice([0.1, 0.3]), case=case, **options)


@pytest.mark.parametrize("seed", range(18))
def test_any_pages_lengths_tokens_strides_and_splits_are_right(seed):
    draw, page_size = Random(seed), PAGE_SIZES[seed % len(PAGE_SIZES)]
    batch, query_tokens, heads = draw.choice([(1, 1, 4), (2, 3, 5), (3, 1, 16), (1, 4, 16)])
    value_dim, rope_dim, capacity = draw.choice([16, 64]), draw.choice([16, 20]), draw.randint(1, 200)
    query, cache = tensors(draw, batch, query_tokens, heads, capacity, value_dim, rope_dim,
                           draw.choice([torch.float32, torch.float16]))  # fmt: skip
    lengths = torch.tensor([draw.choice([0, 1, capacity, draw.randint(0, capacity)]) for _ in range(batch)])
    pages, tables = in_pages(draw, forget_beyond(cache, lengths), page_size)
    used = torch.arange(tables.shape[1]) < ((lengths + page_size - 1) // page_size)[:, None]
    tables = tables.masked_fill(~used, draw.choice([-7, 2**31 - 1]))  # what no length reaches may be anything
    if draw.random() < 0.5:
        query, pages = with_gaps(query), with_gaps(pages)
        tables = torch.nn.functional.pad(tables, (0, 5), value=-7)[:, : tables.shape[1]]
    options = {"splits": draw.choice([None, 1, 3]), "causal": draw.random() < 0.8, "value_dim": value_dim}
    assert_right(paged_latent_decode_attention, paged_latent_decode_reference, query, pages, tables, lengths,
                 scale=0.2, case=f"{seed=} {page_size=} {capacity=} {lengths=} {options=}", **options)  # fmt: skip


@pytest.mark.parametrize("query_tokens, heads", [(1, 16), (2, 3), (1, 100)])
def test_the_real_widths_are_right(query_tokens, heads):
    query, cache = tensors(Random(0), 1, query_tokens, heads, 150, 512, 64, torch.float16)
    assert_contiguous_right(query, cache, torch.tensor([150]), scale=1 / math.sqrt(192), splits=2)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_around_tiles_tokens_and_splits_are_right(length, splits):
    query, cache = tensors(Random(length), 1, 8, 2, 130, 16, 16)
    assert_contiguous_right(query, cache, torch.tensor([length]), scale=0.2, value_dim=16, splits=splits)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_sequence_without_tokens_gets_zeros(splits):
    query, cache = tensors(Random(0), 2, 2, 3, 20, 16, 16)
    output, lse = latent_decode_attention(query, cache * math.nan, torch.tensor([0, 0]), scale=1.0, value_dim=16,
                                          splits=splits, return_lse=True)  # fmt: skip
    assert torch.all(output == 0) and torch.all(lse == -math.inf)


def test_splits_without_keys_change_nothing():
    query, cache = tensors(Random(0), 2, 1, 4, 70, 16, 16)
    assert_contiguous_right(query, cache, torch.tensor([3, 65]), scale=0.2, value_dim=16, splits=9)


@pytest.mark.parametrize("splits", [1, 2])
def test_scores_of_ten_thousand_do_not_overflow(splits):
    query, cache = tensors(Random(0), 1, 1, 4, 150, 32, 16)
    scale = 1e4 / torch.einsum("bthw, bnw -> bthn", query, cache).abs().max().item()
    assert_contiguous_right(query, cache, torch.tensor([150]), scale=scale, value_dim=32, splits=splits)
    assert_contiguous_right(query, -cache.abs(), torch.tensor([150]), scale=scale, value_dim=32, splits=splits)


def test_pages_give_the_bits_of_a_contiguous_cache():
    draw, lengths = Random(0), torch.tensor([130, 64])
    query, cache = tensors(draw, 2, 2, 3, 130, 16, 16)
    options = {"scale": 0.3, "value_dim": 16, "splits": 2}
    contiguous = latent_decode_attention(query, cache, lengths, **options)
    for page_size in (16, 64):
        pages, tables = in_pages(draw, cache, page_size)
        assert torch.equal(paged_latent_decode_attention(query, pages, tables, lengths, **options), contiguous)


def test_a_cache_beyond_32_bits_is_read_in_its_place():
    """Two rows that lie 2³¹ + 64 numbers apart, in memory that is never touched between them."""
    stride = 2**31 + 64
    memory = torch.empty(stride + 32, dtype=torch.half)  # the system gives pages as they are written
    cache = memory.as_strided((1, 2, 32), (0, stride, 1))
    query, near = tensors(Random(0), 1, 1, 2, 2, 16, 16, torch.float16)
    cache.copy_(near)
    options = {"scale": 0.3, "value_dim": 16}
    far = latent_decode_attention(query, cache, torch.tensor([2]), **options)
    assert torch.equal(far, latent_decode_attention(query, near, torch.tensor([2]), **options))


def test_a_given_output_is_filled_and_returned():
    query, cache = tensors(Random(0), 2, 1, 4, 30, 16, 16)
    output = torch.full((2, 1, 4, 16), math.nan)
    result, _ = assert_contiguous_right(query, cache, torch.tensor([30, 7]), scale=0.2, value_dim=16, output=output)
    assert result.data_ptr() == output.data_ptr()


def test_the_tolerance_sees_a_key_that_is_lost():
    query, cache = tensors(Random(3), 1, 1, 4, 150, 64, 16)
    exact, indices = [query.double(), cache.double()], {"scale": 0.2, "value_dim": 64}
    right = latent_decode_reference(*exact, torch.tensor([150]), return_lse=True, **indices)
    wrong = latent_decode_reference(*exact, torch.tensor([149]), return_lse=True, **indices)
    theirs = plain_results(latent_decode_reference, query, cache, torch.tensor([150]), **indices)
    assert_close_to_float64([part.float() for part in right], right, theirs)
    for part in range(2):
        mixed = [wrong[which] if which == part else right[which] for which in range(2)]
        with pytest.raises(AssertionError):
            assert_close_to_float64([tensor.float() for tensor in mixed], right, theirs)


def good_inputs():
    query, cache = tensors(Random(0), 2, 1, 4, 16, 16, 16)
    return {"query": query, "cache": cache, "lengths": torch.tensor([16, 3]), "scale": 0.2, "value_dim": 16}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"query": torch.zeros(2, 4, 32)}, ["query", "(2, 4, 32)", "[batch, query_tokens, heads,"]),
        ({"query": torch.zeros(2, 1, 4, 32).bfloat16()}, ["query", "bfloat16", "float16"]),
        ({"query": torch.zeros(2, 1, 32, 4).transpose(2, 3)}, ["query", "stride", "contiguous()"]),
        ({"query": torch.zeros(2, 1, 4, 40)}, ["cache", "row size 32", "40"]),
        ({"query": torch.zeros(2, 0, 4, 32)}, ["query", "empty"]),
        ({"query": torch.zeros(3, 1, 4, 32)}, ["cache", "batch size 2", "3"]),
        ({"cache": torch.zeros(2, 16, 32).half()}, ["cache", "float16", "float32"]),
        ({"cache": torch.zeros(2, 32, 16).transpose(1, 2)}, ["cache", "stride 16", "contiguous()"]),
        ({"value_dim": 24}, ["value_dim", "24", "16, 32, 64, 128, 256, 512"]),
        ({"value_dim": 32}, ["query", "leaves 0", "16 to 64"]),
        ({"scale": 0.0}, ["scale", "0.0", "above 0"]),
        ({"scale": math.nan}, ["scale", "nan", "finite"]),
        ({"lengths": torch.tensor([17, 3])}, ["lengths[0]", "17", "room for 16"]),
        ({"lengths": torch.tensor([16, -1])}, ["lengths[1]", "-1"]),
        ({"lengths": torch.tensor([16.0, 3.0])}, ["lengths", "float32", "int32"]),
        ({"splits": 0}, ["splits", "0", "at least 1"]),
        ({"output": torch.zeros(2, 1, 4, 32)}, ["output", "(2, 1, 4, 32)", "(2, 1, 4, 16)"]),
        ({"output": torch.zeros(2, 1, 4, 16).half()}, ["output", "float16", "float32"]),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, dict) else "",
)
def test_bad_input_is_refused_with_the_argument_its_value_and_what_is_allowed(change, words):
    with pytest.raises(ValueError) as refusal:
        latent_decode_attention(**(good_inputs() | change))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"pages": torch.zeros(5, 8, 40)}, ["pages", "row size 40", "32"]),
        ({"block_tables": torch.tensor([[4, 5], [0, 3]])}, ["block_tables[0, 1]", "is 5", "0 to 4"]),
        ({"block_tables": torch.tensor([[4, 1]])}, ["block_tables", "(1, 2)"]),
        ({"lengths": torch.tensor([17, 3])}, ["lengths[0]", "17", "2 pages of 8"]),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, dict) else "",
)
def test_bad_pages_are_refused_with_the_argument_its_value_and_what_is_allowed(change, words):
    inputs = good_inputs() | {"pages": torch.zeros(5, 8, 32), "block_tables": torch.tensor([[4, 1], [0, 3]])}
    del inputs["cache"]
    paged_latent_decode_attention(**inputs)
    with pytest.raises(ValueError) as refusal:
        paged_latent_decode_attention(**(inputs | change))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
