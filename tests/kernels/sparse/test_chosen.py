"""Chosen keys: the indexer's scores, an exact top-k of them, and decode over the keys that were chosen."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.attention.reference import masked_attention_reference
from course_lib.kernels.sparse.choose import LONGEST_TILE, choose_keys, choose_keys_reference, launch, parts_of
from course_lib.kernels.sparse.indexer import index_scores, index_scores_reference
from course_lib.kernels.sparse.listed import listed_decode_attention
from tests.kernels.rounding import largest_error, rounded_otherwise

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---------------------------------------------------------------------------------------------------------- the indexer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(70, 70), (9, 90), (5, 90), (1, 65), (8, 3), (90, 70)], ids=str)
def test_scores_are_those_of_the_reference(lengths, dtype):
    query_length, key_length = lengths
    inputs = (
        normal(2, query_length, 3, 20, dtype=dtype),
        normal(2, query_length, 3),
        normal(2, key_length, 20, dtype=dtype),
    )
    found = index_scores(*inputs)
    exact = index_scores_reference(*(tensor.double() for tensor in inputs))
    plain = rounded_otherwise(index_scores_reference, *(tensor.float() for tensor in inputs))
    hidden = exact == -math.inf
    assert torch.equal(found == -math.inf, hidden) and found.dtype == torch.float32
    rounding = 4 * torch.finfo(torch.float32).eps * exact.masked_fill(hidden, 0).abs().max()
    allowed = 2 * largest_error(plain, exact) + rounding
    assert (found.double() - exact).masked_fill(hidden, 0).abs().max() <= allowed


def test_a_negative_product_adds_nothing():
    """Without the ReLU the two heads would cancel."""
    query = torch.tensor([1.0, -1.0])[None, None, :, None].expand(1, 1, 2, 16).contiguous()
    scores = index_scores(query, torch.ones(1, 1, 2), torch.ones(1, 1, 16))
    assert scores.item() == 16


def test_no_future_key_has_a_say_in_what_is_chosen():
    query, weights, key = normal(1, 12, 2, 16), normal(1, 12, 2), normal(1, 12, 16)
    chosen = choose_keys(index_scores(query, weights, key), 4)
    for t in (0, 5, 10):
        later = key.clone()
        later[:, t + 1 :] = 100 * normal(1, 11 - t, 16, seed=1)
        again = choose_keys(index_scores(query, weights, later), 4)
        assert torch.equal(again[:, : t + 1], chosen[:, : t + 1]) and (again[:, t] <= t).all()


# --------------------------------------------------------------------------------------------------------- exact top-k


@settings(max_examples=30, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data())
def test_the_choice_is_that_of_a_stable_sort(data):
    rows, length, k = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 80), st.integers(1, 90)))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, -2.5e5, -2.4e5, 3e38, -3e38, 1e-40, -1e-40, -math.inf])
    scores = data.draw(st.lists(values, min_size=rows * length, max_size=rows * length))
    scores = torch.tensor(scores).view(rows, length)
    assert torch.equal(choose_keys(scores, k), choose_keys_reference(scores, k))
    shared = torch.full((rows, k), 99, dtype=torch.int32)
    launch(scores, shared, k, parts=data.draw(st.integers(2, 9)), block=16)  # more programs than a row of one has keys
    assert torch.equal(shared, choose_keys_reference(scores, k))


def test_of_equal_scores_the_first_are_chosen_across_tiles():
    scores = torch.zeros(1, LONGEST_TILE + 500)
    scores[0, -1] = 1.0
    chosen = choose_keys(scores, LONGEST_TILE + 3)[0]
    assert chosen[:-1].tolist() == [*range(LONGEST_TILE + 2)] and chosen[-1] == LONGEST_TILE + 499


def test_programs_share_a_row_where_there_are_few_rows():
    assert parts_of(1, 131_072, 132) == 64 and parts_of(16, 131_072, 132) == 8
    assert parts_of(1, 1000, 132) == parts_of(4096, 131_072, 132) == parts_of(1, 1, 132) == 1


@pytest.mark.parametrize("k", [1, 100, 2047, 2048, 2500, 5000])
def test_any_k_of_a_long_row(k):
    scores = normal(2, 2500).round(decimals=1)  # many are equal
    assert torch.equal(choose_keys(scores, k), choose_keys_reference(scores, k))


def test_large_negative_scores_are_chosen_by_their_size():
    """A bound of -5e4, say, as a search's lowest would lose all of them."""
    scores = -2.5e5 + normal(1, 300)
    assert (
        torch.equal(choose_keys(scores, 20), choose_keys_reference(scores, 20)) and (choose_keys(scores, 20) >= 0).all()
    )


def test_a_row_of_few_visible_keys_lists_them_and_minus_one():
    scores = torch.full((2, 50), -math.inf)
    scores[0, [7, 31]] = torch.tensor([1.0, 2.0])
    assert choose_keys(scores, 4).tolist() == [[7, 31, -1, -1], [-1] * 4]


def test_a_nan_is_larger_than_any_number_and_strides_are_followed():
    scores = torch.tensor([[1.0, math.inf, math.nan, 2.0, 9.0, 9.0]])[:, :4]
    assert choose_keys(scores, 2).tolist() == [[1, 2]] and choose_keys(scores, 1).tolist() == [[2]]
    assert choose_keys(torch.zeros(0, 5), 3).shape == (0, 3)


@pytest.mark.parametrize("k", [0, -1, 2.0, True])
def test_a_k_that_is_no_number_of_keys_is_refused(k):
    with pytest.raises(ValueError, match="k is .*; it must be an int of at least 1"):
        choose_keys(torch.zeros(1, 4), k)


def test_scores_of_16_bits_are_refused():
    with pytest.raises(ValueError, match="scores has dtype torch.float16"):
        choose_keys(torch.zeros(1, 4, dtype=torch.float16), 1)


# -------------------------------------------------------------------------------------------------------- listed decode

HEADS, KEY_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 24, 8
LENGTHS = (150, 37, 0)
BLOCKS = -(-max(LENGTHS) // PAGE_SIZE)


def paged(seed=0):
    """query, pages of keys and values, block tables in a random order, and lengths."""
    pages = len(LENGTHS) * BLOCKS
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randperm(pages, generator=generator).view(len(LENGTHS), BLOCKS).to(torch.int32)
    pools = [normal(pages, KEY_HEADS, PAGE_SIZE, HEAD_DIM, seed=seed + 1 + n) for n in range(2)]
    return normal(len(LENGTHS), HEADS, HEAD_DIM, seed=seed), *pools, tables, torch.tensor(LENGTHS, dtype=torch.int32)


def gathered(pool, tables):
    """A pool as [batch, key_heads, tokens, head_dim]."""
    return pool[tables.long()].transpose(1, 2).flatten(2, 3)


def positions_at_random(k, key_heads):
    """int32 [batch, key_heads, k]: some keys of each sequence, each once, with -1 among them."""
    positions = torch.full((len(LENGTHS), key_heads, k), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(k)
    for sequence, length in enumerate(LENGTHS):
        for head in range(key_heads):
            some = torch.randperm(length, generator=generator)[: k * 2 // 3].to(torch.int32)
            positions[sequence, head, torch.randperm(k, generator=generator)[: len(some)]] = some
    return positions


def assert_listed_right(inputs, positions, **options):
    query, key_pages, value_pages, tables, _lengths = inputs
    found = listed_decode_attention(*inputs, positions, return_lse=True, **options)
    key, value = gathered(key_pages, tables), gathered(value_pages, tables)
    visible = torch.zeros(len(LENGTHS), positions.shape[1], key.shape[2] + 1, dtype=torch.bool)
    visible.scatter_(2, positions.masked_fill(positions < 0, key.shape[2]).long(), True)
    visible = visible[..., :-1].repeat_interleave(HEADS // positions.shape[1], dim=1)[:, :, None]
    rows = query[:, :, None], key, value
    exact = masked_attention_reference(*(tensor.double() for tensor in rows), visible, return_lse=True)
    plain = rounded_otherwise(masked_attention_reference, *rows, visible, return_lse=True)
    for ours, right, theirs in zip(found, exact, zip(*plain)):
        empty = right.squeeze(2) == -math.inf
        assert torch.equal(ours == -math.inf, empty)
        rounding = 4 * torch.finfo(torch.float32).eps * max(1, right.masked_fill(right == -math.inf, 0).abs().max())
        difference = (ours.double() - right.squeeze(2)).masked_fill(empty, 0).abs().max()
        assert difference <= 2 * largest_error(theirs, right) + rounding


@pytest.mark.parametrize("key_heads", [1, KEY_HEADS], ids=["one list", "a list for each KV head"])
@pytest.mark.parametrize(("k", "splits"), [(1, 1), (30, 1), (70, None), (130, 3), (9, 7)])
def test_listed_keys_are_those_of_a_dense_mask(k, splits, key_heads):
    assert_listed_right(paged(), positions_at_random(k, key_heads), splits=splits)


def test_a_list_of_all_keys_is_dense_attention():
    """With k of at least the length, what the indexer scores changes nothing."""
    inputs = paged()
    scores = normal(len(LENGTHS), 1, max(LENGTHS))
    for sequence, length in enumerate(LENGTHS):
        scores[sequence, :, length:] = -math.inf
    chosen = choose_keys(scores, max(LENGTHS) + 20)
    everything = torch.arange(max(LENGTHS) + 20, dtype=torch.int32).expand(len(LENGTHS), 1, -1)
    everything = everything.masked_fill(everything >= inputs[-1][:, None, None], -1)
    assert torch.equal(chosen, everything)
    assert_listed_right(inputs, chosen)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_only_listed_keys_are_read():
    inputs = paged()
    positions = positions_at_random(30, 1)
    report = metered(listed_decode_attention, *inputs, positions)
    listed = (positions >= 0).sum().item() * KEY_HEADS * HEAD_DIM * 4
    assert report["key_pointer"].loaded_bytes == report["value_pointer"].loaded_bytes == listed
    assert not report.out_of_bounds


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p.fill_(37), r"positions\[1, 0, 0\] is 37; sequence 1 has 37 tokens"),
        (lambda p: p.fill_(-2), r"positions\[0, 0, 0\] is -2"),
        (lambda p: p[0, 0, :2].fill_(5), "lists the key 5 of sequence 0 twice"),
    ],
    ids=["beyond the length", "negative", "twice"],
)
def test_positions_that_err_are_refused(change, sentence):
    positions = torch.full((3, 1, 6), -1, dtype=torch.int32)
    change(positions)
    with pytest.raises(ValueError, match=sentence):
        listed_decode_attention(*paged(), positions)


@pytest.mark.parametrize(
    "positions", [torch.zeros(3, 3, 4, dtype=torch.int32), torch.zeros(3, 1, 4, dtype=torch.int64)]
)
def test_positions_of_another_kind_are_refused(positions):
    with pytest.raises(ValueError, match=r"it must be torch.int32 \[batch, 1 or 2, k\]"):
        listed_decode_attention(*paged(), positions)
