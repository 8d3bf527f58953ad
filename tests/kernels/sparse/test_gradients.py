"""The gradients of attention over block lists against a dense mask in float64, and what PyTorch asks of an operator."""

import math

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.attention.reference import masked_attention_reference
from course_lib.kernels.sparse.attention import block_sparse_attention, block_sparse_operator
from course_lib.kernels.sparse.backward import backward
from course_lib.kernels.sparse.block_lists import block_lists
from course_lib.kernels.sparse.forward import forward
from tests.kernels.rounding import largest_error, rounded_otherwise
from tests.kernels.sparse.masks import BLOCK, KEYS, MASKS, QUERIES, causal, checkerboard, dense, nothing_in_some_rows

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
HEADS, KEY_HEADS = 2, 1


def tensors(query_length=QUERIES, key_length=KEYS, head_dim=24, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, query_length), (KEY_HEADS, key_length), (KEY_HEADS, key_length)
    return [torch.randn(1, *shape, head_dim, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@torch.enable_grad()
def gradients_of(attention, inputs, mask):
    """(dQ, dK, dV) of a loss that depends on the output and on the log-sum-exps of rows that see something."""
    output, lse = attention(*inputs, mask, return_lse=True)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    sees = lse.detach() != -math.inf
    return torch.autograd.grad((output * weights).sum() + lse[sees].square().sum(), inputs)


def assert_right(inputs, visible, lists):
    """Within twice the error of plain PyTorch in the same dtype, plus its rounding."""
    found = gradients_of(block_sparse_attention, inputs, lists)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = gradients_of(masked_attention_reference, wide, visible)
    plain = rounded_otherwise(gradients_of, masked_attention_reference, inputs, visible)
    for ours, right, theirs in zip(found, exact, zip(*plain)):
        rounding = 4 * torch.finfo(ours.dtype).eps * max(1, right.abs().max().item())
        assert (ours.double() - right).abs().max() <= 2 * largest_error(theirs, right) + rounding
        assert ours.dtype == inputs[0].dtype


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.__name__)
def test_every_mask_has_the_gradients_of_a_dense_one(mask):
    """With lists of their own for each head, so that a KV head gathers from two transposed lists."""
    lists = block_lists(mask, QUERIES, KEYS, heads=HEADS, query_rows=BLOCK, key_rows=BLOCK)
    assert_right(tensors(), dense(mask, HEADS), lists)


@pytest.mark.parametrize("blocks", [(16, 16), (128, 128), (256, 32), (32, 256)], ids=str)
def test_a_block_larger_or_smaller_than_the_kernels_tile_is_right(blocks):
    """A block of 256 reaches beyond the rows to which the log-sum-exps are padded."""
    lists = block_lists(dense(causal, 1), QUERIES, KEYS, query_rows=blocks[0], key_rows=blocks[1])
    assert_right(tensors(head_dim=40), dense(causal, HEADS), lists)


def test_a_row_that_sees_nothing_has_no_gradient_and_gives_none():
    lists = block_lists(nothing_in_some_rows, QUERIES, KEYS, query_rows=BLOCK, key_rows=BLOCK)
    inputs = tensors()
    output = block_sparse_attention(*inputs, lists)
    blind = ~dense(nothing_in_some_rows, 1)[0, 0].any(dim=1)
    gradient = torch.zeros_like(output)
    gradient[:, :, blind] = 1e9
    assert blind.any() and all(not found.any() for found in torch.autograd.grad(output, inputs, gradient))


def test_only_listed_tiles_are_read():
    lists = block_lists(checkerboard, QUERIES, KEYS, query_rows=BLOCK, key_rows=BLOCK)
    inputs = [tensor.detach() for tensor in tensors()]
    output, lse = forward(*inputs, lists)
    report = metered(backward, *inputs, output, lse, torch.ones_like(output), lists)
    row_bytes = 24 * 4
    pairs = dense(checkerboard, 1)[0, 0]
    visits = HEADS * pairs[:, ::BLOCK].sum().item()  # rows of queries in listed tiles, for the kernel of dK and dV
    assert report["query_pointer"].loaded_bytes == (visits + HEADS * QUERIES) * row_bytes
    visits = HEADS * pairs[::BLOCK].sum().item()  # rows of keys in listed tiles, for the kernel of dQ
    assert report["key_pointer"].loaded_bytes == (visits + KEYS) * row_bytes
    assert not report.out_of_bounds


def test_gradients_are_the_same_bits_at_every_call():
    lists = block_lists(causal, QUERIES, KEYS, query_rows=BLOCK, key_rows=BLOCK)
    first, second = (gradients_of(block_sparse_attention, tensors(), lists) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def few():
    lists = block_lists(causal, 20, 24, query_rows=16, key_rows=16)
    return tensors(20, 24, 16), lists


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_passes():
    inputs, lists = few()
    function = lambda *tensors: block_sparse_attention(*tensors, lists, return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs, eps=1e-2, atol=1e-4, rtol=1e-2, fast_mode=True)


def test_opcheck_passes():
    inputs, lists = few()
    done = torch.library.opcheck(block_sparse_operator, (*inputs, lists.tensors(), 16, 16, None))
    assert set(done.values()) == {"SUCCESS"}


def test_torch_compile_takes_it_whole():
    inputs, lists = few()
    compiled = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs, lists).square().sum(), inputs)
    expected = torch.autograd.grad(block_sparse_attention(*inputs, lists).square().sum(), inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


def test_a_second_derivative_is_refused():
    inputs, lists = few()
    (first,) = torch.autograd.grad(block_sparse_attention(*inputs, lists).sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="has no derivative of its own here"):
        first.sum().backward()
