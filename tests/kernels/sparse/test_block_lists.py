"""Lists against what a dense mask says, lists that are given, and the sentences for those that don't fit."""

import pytest
import torch

from course_lib.kernels.sparse.block_lists import block_lists, check_lists, given_block_lists
from tests.kernels.sparse.masks import BLOCK, KEYS, MASKS, QUERIES, causal, checkerboard, dense, one_in_eight

SIZES = {"query_length": QUERIES, "key_length": KEYS, "query_rows": BLOCK, "key_rows": BLOCK}


def rebuilt(lists, transposed=False):
    """The dense mask that lists stand for, bool [batch, heads, whole tiles, whole tiles]."""
    full, partial = (lists.full_of_keys, lists.partial_of_keys) if transposed else (lists.full, lists.partial)
    batch, heads, tiles = full.counts.shape
    places = full.indices.shape[3]
    pairs = torch.zeros(batch, heads, tiles, places, lists.query_rows, lists.key_rows, dtype=torch.bool)
    if transposed:
        pairs = torch.zeros(batch, heads, places, tiles, lists.query_rows, lists.key_rows, dtype=torch.bool)
    for b, h, row in torch.cartesian_prod(*(torch.arange(size) for size in full.counts.shape)).tolist():
        for part in (full, partial):
            listed = part.indices[b, h, row, : part.counts[b, h, row]].tolist()
            assert listed == sorted(set(listed))
            for entry, tile in enumerate(listed):
                place = (b, h, tile, row) if transposed else (b, h, row, tile)
                assert not pairs[place].any()  # on one list, once
                pairs[place] = True if part.masks is None else lists.masks[part.masks[b, h, row, entry].item()].bool()
    return pairs.transpose(3, 4).flatten(4, 5).flatten(2, 3)


@pytest.mark.parametrize("transposed", [False, True], ids=["of queries", "transposed"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_lists_say_what_the_mask_says(mask, transposed):
    lists = block_lists(mask, QUERIES, KEYS, heads=2, query_rows=BLOCK, key_rows=BLOCK)
    pairs = rebuilt(lists, transposed)
    assert torch.equal(pairs[:, :, :QUERIES, :KEYS], dense(mask, 2)) and pairs.sum() == dense(mask, 2).sum()


def test_a_tile_is_full_when_all_of_it_is_visible():
    lists = block_lists(causal, 128, 128, query_rows=BLOCK, key_rows=BLOCK)
    assert lists.full.counts.flatten().tolist() == [0, 1, 2, 3]
    assert lists.partial.counts.flatten().tolist() == [1, 1, 1, 1]
    assert lists.full_of_keys.counts.flatten().tolist() == [3, 2, 1, 0]
    assert lists.full_of_keys.indices[0, 0, 1, :2].tolist() == [2, 3]


def test_equal_masks_are_kept_once():
    """All tiles on the diagonal share one."""
    lists = block_lists(causal, 4096, 4096)
    assert lists.masks.shape == (1, 128, 128) and lists.partial.counts.sum() == 32
    told = 24 * 32 * 32 + 8 * (32 + 32) + 128 * 128  # as the module says
    assert sum(tensor.nbytes for tensor in lists.tensors()) == told


def test_a_function_and_its_tensor_make_the_same_lists():
    for heads, tensor in ((2, dense(one_in_eight, 2)), (1, dense(one_in_eight, 1)[0, 0])):
        of_function = block_lists(one_in_eight, QUERIES, KEYS, heads=heads, query_rows=BLOCK, key_rows=BLOCK)
        of_tensor = block_lists(tensor, QUERIES, KEYS, query_rows=BLOCK, key_rows=BLOCK)
        assert all(
            torch.equal(one, other) for one, other in zip(of_function.tensors(), of_tensor.tensors(), strict=True)
        )


def test_positions_beyond_the_lengths_are_not_handed_to_the_mask():
    seen = []

    def noted(batch, head, query, key):
        seen.append((query.max().item(), key.max().item()))
        return query >= key

    block_lists(noted, 33, 47, query_rows=16, key_rows=16)
    assert max(query for query, _key in seen) == 32 and max(key for _query, key in seen) == 46


def test_given_lists_in_any_order_are_those_of_the_mask():
    lists = block_lists(checkerboard, QUERIES, KEYS, query_rows=BLOCK, key_rows=BLOCK)
    again = given_block_lists(lists.full[:2], lists.partial[:2], **SIZES)
    turned = lists.full.indices.clone()
    turned[0, 0, 0, :2] = turned[0, 0, 0, :2].flip(0)
    unordered = given_block_lists((lists.full.counts, turned), lists.partial[:2], checkerboard, **SIZES)
    for made in (again, unordered):
        assert all(torch.equal(one, other) for one, other in zip(lists.tensors(), made.tensors(), strict=True))


def test_masks_whose_sums_collide_are_told_apart(monkeypatch):
    lists = block_lists(checkerboard, QUERIES, KEYS, query_rows=BLOCK, key_rows=BLOCK)
    monkeypatch.setattr("course_lib.kernels.sparse.block_lists.MIXER", 0)
    collided = block_lists(checkerboard, QUERIES, KEYS, query_rows=BLOCK, key_rows=BLOCK)
    for one, other in ((lists.partial, collided.partial), (lists.partial_of_keys, collided.partial_of_keys)):
        listed = torch.arange(one.masks.shape[-1]) < one.counts[..., None]
        assert torch.equal(lists.masks[one.masks[listed].long()], collided.masks[other.masks[listed].long()])


def counts_and_indices(*rows):
    counts = torch.tensor([[[len(row) for row in rows]]])
    return counts, torch.tensor([[[*row, *[99] * (4 - len(row))] for row in rows]])[None]


@pytest.mark.parametrize(
    ("full", "partial", "sentence"),
    [
        (([0], [4], [], []), None, "full lists the tile 4; there are 0 to 3"),
        (([0], [-1], [], []), None, "full lists the tile -1; there are 0 to 3"),
        (([0], [2, 1, 2], [], []), None, "full lists the tile 2 2 times in row 1"),
        (([0], [1], [], []), ([], [1], [], []), r"full and partial both list the tile \[0, 0, 1, 1\]"),
        (([0], [1], []), None, r"counts of shape \(1, 1, 3\).*\[batch, heads, 4\]"),
    ],
    ids=["beyond", "negative", "twice", "on both", "a row missing"],
)
def test_given_lists_that_err_are_refused(full, partial, sentence):
    with pytest.raises(ValueError, match=sentence):
        given_block_lists(counts_and_indices(*full), partial and counts_and_indices(*partial), **SIZES)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"query_rows": 48}, "query_rows is 48; a block has a power of two of rows, 16 or more"),
        ({"key_rows": 8}, "key_rows is 8; a block"),
        ({"key_rows": 64.0}, "key_rows is 64.0; a block"),
        ({"query_length": 0}, "query_length is 0; it must be an int of at least 1"),
        ({"heads": True}, "heads is True"),
        ({"mask": torch.ones(5, 5)}, "mask gives torch.float32"),
        ({"mask": torch.ones(5, 6, dtype=torch.bool)}, r"mask has shape \(5, 6\); it must be \[5, 5\]"),
        ({"mask": lambda batch, head, query, key: query - key}, "mask gives torch.int64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_lists_is_refused(changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        block_lists(**{"mask": causal, "query_length": 5, "key_length": 5, **changed})


@pytest.mark.parametrize(
    ("query_shape", "key_shape", "sentence"),
    [
        ((1, 2, 50, 16), (1, 2, KEYS, 16), "query_length 100; these tensors have 50"),
        ((1, 2, QUERIES, 16), (1, 2, 240, 16), "key_length 120; these tensors have 240"),
        ((1, 3, QUERIES, 16), (1, 3, KEYS, 16), "lists have 2 heads; query has 3"),
    ],
    ids=["a shorter query", "longer keys", "other heads"],
)
def test_lists_of_other_tensors_are_refused_with_both_numbers(query_shape, key_shape, sentence):
    """Lists of a longer sequence, cut to a shorter one, have wrong lists for the gradients of keys and values."""
    lists = block_lists(one_in_eight, QUERIES, KEYS, heads=2, query_rows=BLOCK, key_rows=BLOCK)
    with pytest.raises(ValueError, match=sentence):
        check_lists(lists, torch.empty(query_shape), torch.empty(key_shape))
    with pytest.raises(ValueError, match="lists is a Tensor"):
        check_lists(torch.ones(3), torch.empty(query_shape), torch.empty(key_shape))
