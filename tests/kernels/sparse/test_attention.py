"""Attention over block lists against a dense mask in float64 and against FlexAttention, on ten masks."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.attention.reference import masked_attention_reference
from course_lib.kernels.sparse.attention import block_sparse_attention
from course_lib.kernels.sparse.block_lists import block_lists
from tests.kernels.rounding import largest_error, rounded_otherwise
from tests.kernels.sparse.masks import BLOCK, KEYS, MASKS, QUERIES, causal, checkerboard, dense, one_in_eight

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
HEADS, KEY_HEADS = 2, 1


def tensors(query_length=QUERIES, key_length=KEYS, head_dim=24, dtype=torch.float32, batch=1):
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, query_length), (KEY_HEADS, key_length), (KEY_HEADS, key_length)
    return [torch.randn(batch, *shape, head_dim, generator=generator).to(dtype) for shape in shapes]


def lists_of_mask(mask, block=BLOCK):
    heads = HEADS if mask is one_in_eight else 1
    return block_lists(mask, QUERIES, KEYS, heads=heads, query_rows=block, key_rows=block)


def assert_right(inputs, visible, lists, **options):
    """Output and log-sum-exp within twice the error of plain PyTorch in the same dtype, plus its rounding."""
    found = block_sparse_attention(*inputs, lists, return_lse=True, **options)
    wide = [tensor.double() for tensor in inputs]
    exact = masked_attention_reference(*wide, visible, return_lse=True, **options)
    plain = rounded_otherwise(masked_attention_reference, *inputs, visible, return_lse=True, **options)
    for ours, right, theirs in zip(found, exact, zip(*plain)):
        empty = right == -math.inf
        assert torch.equal(ours == -math.inf, empty)
        rounding = 4 * torch.finfo(ours.dtype).eps * max(1, right.masked_fill(empty, 0).abs().max().item())
        difference = (ours.double() - right).masked_fill(empty, 0).abs().max()
        assert difference <= 2 * largest_error(theirs, right) + rounding
    assert found[0].dtype == inputs[0].dtype and found[0].shape == inputs[0].shape and found[0].is_contiguous()
    return found[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_every_mask_is_as_a_dense_one_and_as_in_flex_attention(mask):
    inputs = tensors()
    output = assert_right(inputs, dense(mask, HEADS), lists_of_mask(mask))
    heads = HEADS if mask is one_in_eight else None
    block_mask = create_block_mask(mask, None, heads, QUERIES, KEYS, device="cpu", BLOCK_SIZE=BLOCK)
    expected = flex_attention(*inputs, block_mask=block_mask, enable_gqa=True)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 256])
def test_head_dimensions_and_dtypes_are_right(head_dim, dtype):
    assert_right(tensors(head_dim=head_dim, dtype=dtype), dense(causal, HEADS), lists_of_mask(causal))


@pytest.mark.parametrize("blocks", [(16, 16), (128, 128), (16, 128), (128, 16), (256, 32)], ids=str)
def test_a_block_larger_or_smaller_than_the_kernels_tile_is_right(blocks):
    """The interpreter's tile is 64 × 64: an entry of a block of 128 takes two pieces."""
    lists = block_lists(dense(one_in_eight, HEADS), QUERIES, KEYS, query_rows=blocks[0], key_rows=blocks[1])
    assert_right(tensors(), dense(one_in_eight, HEADS), lists, scale=0.3)


def test_lists_of_a_batch_each_and_strided_inputs_are_right():
    visible = torch.rand(2, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(3)) < 0.2
    inputs = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors(batch=2)]
    assert_right(inputs, visible, block_lists(visible, QUERIES, KEYS, query_rows=BLOCK, key_rows=BLOCK))


def test_a_row_that_sees_nothing_gets_zeros():
    visible = torch.zeros(QUERIES, KEYS, dtype=torch.bool)
    visible[50, 7] = True
    lists = block_lists(visible, QUERIES, KEYS, query_rows=BLOCK, key_rows=BLOCK)
    inputs = tensors()
    output, lse = block_sparse_attention(*inputs, lists, return_lse=True)
    assert torch.count_nonzero(output) == output[:, :, 50].numel() and torch.isfinite(lse).sum() == HEADS
    torch.testing.assert_close(output[:, :, 50], inputs[2][:, :, 7].repeat_interleave(HEADS, dim=1))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_bad_number_in_a_hidden_tile_reaches_nothing(bad):
    query, key, value = tensors()
    lists = lists_of_mask(checkerboard)
    clean = block_sparse_attention(query, key, value, lists)
    key[:, :, BLOCK : 2 * BLOCK], value[:, :, BLOCK : 2 * BLOCK] = bad, bad
    output = block_sparse_attention(query, key, value, lists)
    blind = torch.arange(QUERIES) // BLOCK % 2 == 0  # the tiles of queries that don't see this tile of keys
    assert torch.equal(output[:, :, blind], clean[:, :, blind]) and blind.any()
    assert output[:, :, ~blind].isnan().all()


def test_only_listed_tiles_are_read():
    """Keys and values of the tiles on a list, once for each tile of queries and head; the masks of partial tiles."""
    lists = lists_of_mask(checkerboard)
    report = metered(block_sparse_attention, *tensors(), lists)
    visited = dense(checkerboard, 1)[0, 0, ::BLOCK]  # a row of pairs for each tile of queries, whole tiles of keys
    row_bytes = 24 * 4
    for name in ("key_pointer", "value_pointer"):
        assert report[name].loaded_bytes == HEADS * visited.sum().item() * row_bytes
    assert report["masks_pointer"].loaded_bytes == HEADS * lists.partial.counts.sum().item() * BLOCK * BLOCK
    assert not report.out_of_bounds
