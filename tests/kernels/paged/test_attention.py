"""Paged decode and prefill against float64: any page size, order of pages, lengths, groups and splits."""

import math
from random import Random

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.decode.reference import paged_decode_reference, paged_prefill_reference
from course_lib.kernels.paged.attention import paged_decode_attention, paged_prefill_attention
from tests.kernels.decode.cases import (
    as_pages,
    assert_close_to_float64,
    forget_beyond,
    largest_terms,
    odd_strides,
    plain_results,
    random_tensor,
)

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
PAGE_SIZES = [1, 2, 3, 7, 16, 64, 100, 256]


def paged(draw, batch, key_heads, capacity, head_dim, page_size, lengths, dtype=torch.float32):
    key, value = (
        forget_beyond(random_tensor(draw, batch, key_heads, capacity, head_dim, dtype=dtype), lengths) for _ in range(2)
    )
    return as_pages(draw, key, value, page_size)


def assert_right(function, reference, query, key_pages, value_pages, tables, *indices, case="", **options):
    ours = function(query, key_pages, value_pages, tables, *indices, return_lse=True, **options)
    scale = {name: options[name] for name in ("window", "scale", "sink") if name in options}
    right = reference(
        query.double(), key_pages.double(), value_pages.double(), tables, *indices, return_lse=True, **scale
    )
    theirs = plain_results(reference, query, key_pages, value_pages, tables, *indices, **scale)
    assert_close_to_float64(ours, right, theirs, case, largest_terms(query, key_pages, options.get("scale")))
    return ours


@pytest.mark.parametrize("seed", range(24))
def test_decode_with_any_pages_lengths_strides_and_splits_is_right(seed):
    draw = Random(seed)
    batch, key_heads, group = draw.choice([(1, 1, 1), (2, 1, 3), (1, 2, 4), (3, 1, 8), (1, 1, 16), (1, 1, 32)])
    capacity, head_dim = draw.randint(1, 150), draw.choice([16, 33, 64, 80, 96, 128])
    page_size, splits = PAGE_SIZES[seed % len(PAGE_SIZES)], draw.choice([None, 1, 2, 3, 5])
    lengths = torch.tensor([draw.choice([0, 1, capacity, draw.randint(0, capacity)]) for _ in range(batch)])
    lengths = lengths.to(draw.choice([torch.int32, torch.int64]))
    dtype = draw.choice([torch.float32, torch.float16])
    key_pages, value_pages, tables = paged(draw, batch, key_heads, capacity, head_dim, page_size, lengths, dtype)
    query = random_tensor(draw, batch, key_heads * group, head_dim, dtype=dtype)
    # Entries that the length doesn't reach may be anything.
    used = torch.arange(tables.shape[1]) < ((lengths + page_size - 1) // page_size)[:, None]
    tables = tables.masked_fill(~used, -7)
    if draw.random() < 0.5:
        query, key_pages, value_pages = odd_strides(query), odd_strides(key_pages), odd_strides(value_pages)
        tables = torch.nn.functional.pad(tables, (0, 5), value=-7)[:, : tables.shape[1]]
    assert_right(
        paged_decode_attention,
        paged_decode_reference,
        query,
        key_pages,
        value_pages,
        tables,
        lengths,
        splits=splits,
        scale=draw.choice([None, 0.3]),
        case=f"{seed=} {page_size=} {group=} {capacity=} {head_dim=} {lengths=} {splits=}",
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 63, 64, 65, 80])
def test_lengths_around_the_pages_are_right(length):
    draw, lengths = Random(length), torch.tensor([length])
    query = random_tensor(draw, 1, 2, 16, dtype=torch.float32)
    assert_right(
        paged_decode_attention,
        paged_decode_reference,
        query,
        *paged(draw, 1, 1, 80, 16, 16, lengths),
        lengths,
        splits=2,
    )


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("window", [0, 1, 15, 16, 17, 31, 100])
def test_pages_before_the_window_may_have_been_given_back(window, splits):
    """Their table entries name no page, and the keys and values before the window's edge in its first page are NaN."""
    draw, lengths = Random(window), torch.tensor([80, 0, 33, 5])
    key, value = (random_tensor(draw, 4, 1, 80, 16, dtype=torch.float32) for _ in range(2))
    seen = torch.arange(80) >= lengths[:, None] - 1 - window
    key, value = (forget_beyond(cache, lengths).where(seen[:, None, :, None], math.nan) for cache in (key, value))
    key_pages, value_pages, tables = as_pages(draw, key, value, 16)
    tables[~seen.unflatten(1, (-1, 16)).any(dim=2)] = 10**6
    query = random_tensor(draw, 4, 2, 16, dtype=torch.float32)
    output, lse = assert_right(paged_decode_attention, paged_decode_reference, query, key_pages, value_pages, tables,
                               lengths, window=window, sink=torch.tensor([-1.0, 1.0]), splits=splits)  # fmt: skip
    assert output.isfinite().all()
    torch.testing.assert_close(lse[1], torch.tensor([-1.0, 1.0]))


def test_a_page_that_the_window_reaches_must_exist():
    inputs = good_inputs() | {"block_tables": torch.tensor([[9, 1], [0, 3]])}
    paged_decode_attention(**inputs, window=7)
    for window in (8, None):
        with pytest.raises(ValueError, match=r"block_tables\[0, 0\] is 9"):
            paged_decode_attention(**inputs, window=window)


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_only_the_keys_of_the_window_are_read(splits):
    draw, lengths = Random(0), torch.tensor([300, 20])
    pages = paged(draw, 2, 2, 300, 16, 16, lengths)
    query = random_tensor(draw, 2, 4, 16, dtype=torch.float32)
    report = metered(paged_decode_attention, query, *pages, lengths, window=63, splits=splits)
    for name in ("key_pointer", "value_pointer"):
        assert report[name].loaded_bytes == (64 + 20) * 2 * 16 * 4  # keys, heads, numbers, bytes


def test_pages_may_be_shared_and_give_the_bits_of_a_contiguous_cache():
    draw = Random(0)
    key, value = (random_tensor(draw, 1, 2, 48, 32, dtype=torch.float32) for _ in range(2))
    query = random_tensor(draw, 1, 4, 32, dtype=torch.float32)
    key_pages, value_pages, table = as_pages(draw, key, value, 16)
    tables, lengths = table.repeat(2, 1), torch.tensor([48, 20])
    output = paged_decode_attention(query.repeat(2, 1, 1), key_pages, value_pages, tables, lengths, splits=2)
    contiguous = decode_attention(
        query.repeat(2, 1, 1), key.repeat(2, 1, 1, 1), value.repeat(2, 1, 1, 1), lengths, splits=2
    )
    assert torch.equal(output, contiguous)


@pytest.mark.parametrize("seed", range(16))
def test_prefill_after_any_prefix_is_right(seed):
    draw = Random(seed)
    batch, key_heads, group = draw.choice([(1, 1, 1), (2, 1, 3), (3, 1, 4), (2, 2, 8), (1, 1, 64)])
    head_dim, page_size = draw.choice([16, 40, 64]), PAGE_SIZES[seed % len(PAGE_SIZES)]
    new = [draw.choice([0, 1, draw.randint(0, 40)]) for _ in range(batch)]
    new[0] = max(new[0], 1)
    lengths = torch.tensor([count + draw.choice([0, 1, draw.randint(0, 90)]) for count in new])
    dtype = draw.choice([torch.float32, torch.float16])
    key_pages, value_pages, tables = paged(draw, batch, key_heads, 130, head_dim, page_size, lengths, dtype)
    key_pages, value_pages = torch.nan_to_num(key_pages), torch.nan_to_num(value_pages)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    query = random_tensor(draw, sum(new), key_heads * group, head_dim, dtype=dtype)
    if draw.random() < 0.5:
        query, key_pages, value_pages = odd_strides(query), odd_strides(key_pages), odd_strides(value_pages)
    assert_right(
        paged_prefill_attention,
        paged_prefill_reference,
        query,
        key_pages,
        value_pages,
        tables,
        starts,
        lengths,
        case=f"{seed=} {new=} {lengths=} {page_size=} {group=}",
    )


def test_prefill_never_reads_what_no_sequence_has():
    """Slots beyond a length, and pages of nobody, hold NaN."""
    draw, lengths = Random(0), torch.tensor([50, 3])
    key_pages, value_pages, tables = paged(draw, 2, 1, 60, 16, 8, lengths)
    query = random_tensor(draw, 23, 2, 16, dtype=torch.float32)
    output = paged_prefill_attention(query, key_pages, value_pages, tables, torch.tensor([0, 20, 23]), lengths)
    assert output.isfinite().all()


def test_prefill_of_one_token_is_decode():
    draw, lengths = Random(1), torch.tensor([50, 33])
    key_pages, value_pages, tables = paged(draw, 2, 1, 60, 16, 8, lengths)
    query = random_tensor(draw, 2, 2, 16, dtype=torch.float32)
    prefill = paged_prefill_attention(query, key_pages, value_pages, tables, torch.tensor([0, 1, 2]), lengths)
    decode = paged_decode_attention(query, key_pages, value_pages, tables, lengths, splits=1)
    assert torch.allclose(prefill, decode, atol=1e-6)


def good_inputs():
    draw = Random(0)
    query = random_tensor(draw, 2, 4, 16, dtype=torch.float32)
    pools = {name: random_tensor(draw, 5, 2, 8, 16, dtype=torch.float32) for name in ("key_pages", "value_pages")}
    return {"query": query, **pools, "block_tables": torch.tensor([[4, 1], [0, 3]]), "lengths": torch.tensor([16, 3])}


BAD = [
    ({"lengths": torch.tensor([17, 3])}, ["lengths[0]", "17", "2 pages of 8", "16 tokens"]),
    ({"lengths": torch.tensor([16, -2])}, ["lengths[1]", "-2"]),
    ({"block_tables": torch.tensor([[4, 5], [0, 3]])}, ["block_tables[0, 1]", "is 5", "16 tokens", "0 to 4"]),
    ({"block_tables": torch.tensor([[4, -1], [0, 3]])}, ["block_tables[0, 1]", "is -1"]),
    ({"block_tables": torch.tensor([4, 1])}, ["block_tables", "(2,)", "[batch, max_blocks]"]),
    ({"block_tables": torch.tensor([[4.0, 1], [0, 3]])}, ["block_tables", "float32", "int32"]),
    ({"key_pages": torch.zeros(5, 3, 8, 16), "value_pages": torch.zeros(5, 3, 8, 16)}, ["4 heads", "3", "key_pages"]),
    ({"value_pages": torch.zeros(4, 2, 8, 16)}, ["value_pages", "(4, 2, 8, 16)", "(5, 2, 8, 16)"]),
    ({"key_pages": torch.zeros(5, 2, 16)}, ["key_pages", "[pages, key_heads, page_size, head_dim]"]),
    ({"output": torch.zeros(2, 4, 16).half()}, ["output", "float16", "float32"]),
]


@pytest.mark.parametrize(
    "change, words",
    [
        *BAD,
        ({"block_tables": torch.tensor([[4, 1]])}, ["block_tables", "(1, 2)"]),
        ({"splits": 1.5}, ["splits", "1.5"]),
    ],
)
def test_decode_refuses_bad_input_with_the_argument_its_value_and_what_is_allowed(change, words):
    with pytest.raises(ValueError) as refusal:
        paged_decode_attention(**(good_inputs() | change))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize(
    "change, words",
    [
        *BAD,
        ({"query_starts": torch.tensor([0, 1, 3])}, ["query_starts", "0 to 3", "0 to 2"]),
        ({"query_starts": torch.tensor([0, 3, 2])}, ["query_starts", "3 to 2"]),
        ({"query_starts": torch.tensor([0, 2])}, ["query_starts", "(2,)", "3"]),
        ({"lengths": torch.tensor([16, 0])}, ["query_starts", "lengths[1] = 0"]),
    ],
)
def test_prefill_refuses_bad_input_with_the_argument_its_value_and_what_is_allowed(change, words):
    with pytest.raises(ValueError) as refusal:
        paged_prefill_attention(**({"query_starts": torch.tensor([0, 1, 2])} | good_inputs() | change))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_without_validation_nothing_is_read_by_the_host():
    """A table that is too short for its length, but whose missing part no query reaches, passes unseen."""
    inputs = good_inputs() | {"block_tables": torch.tensor([[4, 1], [0, 99]])}
    paged_decode_attention(**inputs, validate=False)
    with pytest.raises(ValueError, match="99"):
        paged_decode_attention(**(inputs | {"lengths": torch.tensor([16, 9])}))
    assert math.isfinite(paged_decode_attention(**inputs).sum())
