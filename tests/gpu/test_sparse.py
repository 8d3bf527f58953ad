"""Block lists and chosen keys on a GPU against float64, at sizes that the interpreter has no time for."""

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.attention.reference import masked_attention_reference
from course_lib.kernels.sparse.attention import block_sparse_attention
from course_lib.kernels.sparse.block_lists import block_lists
from course_lib.kernels.sparse.choose import choose_keys, choose_keys_reference
from course_lib.kernels.sparse.indexer import index_scores, index_scores_reference
from tests.kernels.rounding import largest_error

pytestmark = pytest.mark.skipif(interpreting(), reason="needs a GPU: tests/kernels/sparse has the interpreter's part")
HEADS, QUERIES, KEYS = 4, 1000, 1100


def window(batch, head, query, key):
    return (key <= query + 100) & (key > query - 300 - 50 * head)


def holes(batch, head, query, key):
    """Full, partial and hidden tiles in no order, and rows that see nothing."""
    return ((query // 128 * 7 + key // 128 * 3 + head) % 4 == 0) & (query % 13 != 5) | (key // 128 == query // 128 + 2)


def with_gradients(attention, inputs, mask, gradient):
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output = attention(*inputs, mask)
    return output.detach(), *torch.autograd.grad(output, inputs, gradient.to(output.dtype))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", [window, holes], ids=lambda mask: mask.__name__)
def test_output_and_gradients_are_those_of_a_dense_mask(mask, dtype, head_dim):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (HEADS, QUERIES), (2, KEYS), (2, KEYS)
    inputs = [torch.randn(2, *shape, head_dim, generator=generator, device="cuda").to(dtype) for shape in shapes]
    gradient = torch.randn(2, HEADS, QUERIES, head_dim, generator=generator, device="cuda")
    lists = block_lists(mask, QUERIES, KEYS, heads=HEADS, device="cuda")
    places = [torch.arange(size, device="cuda") for size in (1, HEADS, QUERIES, KEYS)]
    visible = mask(*(place.view([-1 if n == axis else 1 for n in range(4)]) for axis, place in enumerate(places)))

    found = with_gradients(block_sparse_attention, inputs, lists, gradient)
    exact = with_gradients(masked_attention_reference, [tensor.double() for tensor in inputs], visible, gradient)
    plain = with_gradients(masked_attention_reference, inputs, visible, gradient)
    for ours, right, theirs in zip(found, exact, plain):
        rounding = 4 * torch.finfo(dtype).eps * max(1, right.abs().max().item())
        assert (ours.double() - right).abs().max() <= 2 * largest_error([theirs], right) + rounding
    again = with_gradients(block_sparse_attention, inputs, lists, gradient)
    assert all(torch.equal(one, other) for one, other in zip(found, again))


@pytest.mark.parametrize("rows", [1, 3, 192], ids="{} rows".format)  # few rows are shared by many programs each
@pytest.mark.parametrize("k", [1, 64, 2048, 20_000])
def test_the_choice_is_that_of_a_stable_sort(k, rows):
    scores = torch.randn(64, 16_384, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    scores = torch.cat([scores, scores.round(decimals=1), 1e5 * scores - 2.5e5])
    scores[::3, 3000:] = -torch.inf
    scores = scores[:: len(scores) // rows]
    assert torch.equal(choose_keys(scores, k), choose_keys_reference(scores, k))


@pytest.mark.parametrize("queries, heads", [(500, 16), (1, 64), (3, 100)])
def test_scores_are_those_of_the_reference(queries, heads):
    generator = torch.Generator("cuda").manual_seed(0)
    query, key = (torch.randn(2, *shape, 128, generator=generator, device="cuda", dtype=torch.float16)
                  for shape in ((queries, heads), (700,)))  # fmt: skip
    weights = torch.randn(2, queries, heads, generator=generator, device="cuda")
    found, exact = index_scores(query, weights, key), index_scores_reference(query.double(), weights, key.double())
    plain = index_scores_reference(query.float(), weights, key.float())
    hidden = exact == -torch.inf
    assert torch.equal(found == -torch.inf, hidden)
    rounding = 4 * torch.finfo(torch.float32).eps * exact.masked_fill(hidden, 0).abs().max()
    error = (found.double() - exact).masked_fill(hidden, 0).abs().max()
    assert error <= 2 * largest_error([plain], exact) + rounding
