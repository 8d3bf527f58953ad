"""The fused kernels on a GPU: right in every dtype and at the sizes of models, as operators, beyond 2^31 elements."""

import functools

import pytest
import torch

from course_lib.hardware.device import interpreting, machine, supports_bfloat16
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_forward, add_rms_norm_reference
from course_lib.kernels.fused.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_backward_reference,
    cross_entropy_forward,
    cross_entropy_forward_backward_,
    cross_entropy_reference,
)
from course_lib.kernels.fused.cross_entropy_operators import cross_entropy, cross_entropy_operator
from course_lib.kernels.fused.group_norm_mish import group_norm_mish_forward, group_norm_mish_reference
from course_lib.kernels.fused.linear_cross_entropy import (
    linear_cross_entropy_backward_reference,
    linear_cross_entropy_forward_backward,
    linear_cross_entropy_reference,
)
from course_lib.kernels.fused.linear_cross_entropy_operators import linear_cross_entropy, linear_cross_entropy_operator
from course_lib.kernels.fused.norm_operators import add_rms_norm, add_rms_norm_operator
from course_lib.kernels.fused.rms_norm_backward import rms_norm_backward, rms_norm_backward_reference
from course_lib.kernels.fused.rope_append import rope_append, rope_append_reference
from course_lib.kernels.fused.rope_append_pages import rope_append_to_pages, rope_append_to_pages_reference
from course_lib.kernels.fused.swiglu import (
    swiglu_backward,
    swiglu_backward_reference,
    swiglu_forward,
    swiglu_reference,
)
from course_lib.kernels.fused.swiglu_operators import swiglu, swiglu_operator
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = pytest.mark.skipif(interpreting(), reason="needs a GPU: tests/kernels/fused has the interpreter's part")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if supports_bfloat16() else [])
HIDDEN = [1, 3, 127, 1000, 4096, 4097, 5120, 8192, 8200, 16384, 16385, 32768, 65536, 65537, 100_003]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("apart", [False, True], ids=["contiguous", "rows apart"])
def test_norms_are_right_forward_and_backward(hidden, dtype, apart):
    x, residual, gradient, other = (normal(seed, 37, hidden, dtype=dtype) for seed in range(4))
    weight = normal(5, hidden, dtype=dtype)
    if apart:
        x, gradient = in_wider_rows(x), in_wider_rows(gradient)
    for addend in (residual, None):
        normalised, summed = add_rms_norm_forward(x, addend, weight)
        stored = x if addend is None else x + addend
        assert summed is None or torch.equal(summed, stored)
        assert_as_exact_as_plain(normalised, lambda *them: add_rms_norm_reference(*them)[0], stored, None, weight)
        found = rms_norm_backward(stored, weight, gradient, other)
        assert_as_exact_as_plain(found, rms_norm_backward_reference, stored, weight, gradient, other, 1e-6)


@pytest.mark.parametrize("other", [True, False], ids=["added", "alone"])
@pytest.mark.parametrize("hidden", [4096, 8192, 8200, 12000, 16384])
@pytest.mark.parametrize("rows", [131, 1001])
def test_gradients_of_a_norm_are_right_in_bands_of_many_rows_and_repeat(rows, hidden, other):
    """Rows come one after another through a ring of slots, whose last turn has some that do not exist."""
    summed, gradient, summed_gradient = (normal(seed, rows, hidden, dtype=torch.float16) for seed in range(3))
    arguments = summed, normal(5, hidden, dtype=torch.float16), gradient, summed_gradient if other else None, 1e-6
    found = rms_norm_backward(*arguments)
    assert_as_exact_as_plain(found, rms_norm_backward_reference, *arguments)
    assert all(map(torch.equal, found, rms_norm_backward(*arguments)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 127, 1000, 4097, 14336])
def test_swiglu_is_right_on_halves_of_one_product(hidden, dtype):
    packed, gradient = normal(1, 37, 2 * hidden, dtype=dtype, scale=5.0), normal(2, 37, hidden, dtype=dtype)
    for gate, up in (packed.chunk(2, dim=-1), (half.contiguous() for half in packed.chunk(2, dim=-1))):
        assert_as_exact_as_plain(swiglu_forward(gate, up), swiglu_reference, gate, up)
        assert_as_exact_as_plain(swiglu_backward(gate, up, gradient), swiglu_backward_reference, gate, up, gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 3, 127, 1000, 8193, 50_257, 128_256])
def test_cross_entropy_is_right_and_the_same_in_place(vocabulary, dtype):
    rows = 19
    logits, gradient = normal(1, rows, vocabulary, dtype=dtype, scale=5.0), normal(2, rows)
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    targets[[3, 7]] = -100
    losses, statistics = cross_entropy_forward(logits, targets)
    assert_as_exact_as_plain(losses, cross_entropy_reference, logits, targets)
    found = cross_entropy_backward(logits, targets, statistics, gradient)
    assert_as_exact_as_plain(found, cross_entropy_backward_reference, logits, targets, gradient)
    assert torch.equal(cross_entropy_forward_backward_(logits, targets, gradient), losses)
    assert torch.equal(logits, found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_heads, key_heads, head_dim, tokens", [(32, 8, 128, 1), (5, 2, 96, 7), (1, 1, 2, 3)])
def test_rope_and_append_are_right(query_heads, key_heads, head_dim, tokens, dtype):
    qkv = normal(1, 3, tokens, (query_heads + 2 * key_heads) * head_dim, dtype=dtype)
    angles = normal(2, 50, head_dim // 2, scale=100.0)
    positions = torch.tensor([0, 20, 50 - tokens], device="cuda")

    def run(function, qkv, cosine, sine, positions):
        caches = [torch.zeros(3, key_heads, 50, head_dim, dtype=qkv.dtype, device="cuda") for _ in range(2)]
        return function(qkv, cosine, sine, *caches, positions), *caches

    arguments = qkv, angles.cos(), angles.sin(), positions
    found = run(rope_append, *arguments)
    assert_as_exact_as_plain(found, functools.partial(run, rope_append_reference), *arguments)
    assert found[2].count_nonzero() == 3 * key_heads * tokens * head_dim


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_heads, key_heads, head_dim", [(32, 8, 128), (32, 8, 64), (5, 2, 96), (1, 1, 2)])
def test_rope_and_append_to_pages_are_right(query_heads, key_heads, head_dim, dtype, normed):
    qkv = normal(1, 9, (query_heads + 2 * key_heads) * head_dim, dtype=dtype)
    angles = normal(2, 50, head_dim // 2, scale=100.0)
    places = torch.arange(9, device="cuda") * 5, torch.tensor([79, 0, -1, 17, 16, 15, -1, 33, 64], device="cuda")
    gains = normal(3, 2, head_dim, dtype=dtype) if normed else (None, None)

    def run(function, qkv, cosine, sine, positions, slots, query_gain, key_gain):
        pools = [torch.zeros(5, key_heads, 16, head_dim, dtype=qkv.dtype, device="cuda") for _ in range(2)]
        query = function(qkv, cosine, sine, *pools, positions, slots, query_gain=query_gain, key_gain=key_gain)
        return query, *pools

    arguments = qkv, angles.cos(), angles.sin(), *places, *gains
    found = run(rope_append_to_pages, *arguments)
    assert_as_exact_as_plain(found, functools.partial(run, rope_append_to_pages_reference), *arguments)
    assert found[2].count_nonzero() == 7 * key_heads * head_dim


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "batch, channels, length, groups",
    [(37, 256, 16, 8), (5, 512, 256, 8), (3, 24, 7, 3), (2, 6, 50_001, 2), (3, 4100, 5, 1), (1, 1, 1, 1)],
)
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_group_norm_and_mish_is_right(batch, channels, length, groups, dtype, mean):
    x = normal(1, batch, channels, length, dtype=dtype) + mean
    weight, bias = normal(2, channels, dtype=dtype), normal(3, channels, dtype=dtype)
    scale, shift = normal(4, batch, 2 * channels, dtype=dtype).chunk(2, dim=1)
    arguments = x, groups, weight, bias, scale, shift
    assert_as_exact_as_plain(group_norm_mish_forward(*arguments)[0], group_norm_mish_reference, *arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, width, vocabulary", [(300, 64, 1000), (65, 100, 8193), (7, 33, 50_257)])
def test_linear_cross_entropy_is_right_by_chunks(tokens, width, vocabulary, dtype):
    hidden, weight = normal(1, tokens, width, dtype=dtype), normal(2, vocabulary, width, dtype=dtype) / width**0.5
    targets, scales = torch.randint(vocabulary, (tokens,), device="cuda"), normal(3, tokens)
    targets[2:5] = -100
    losses, *found = linear_cross_entropy_forward_backward(hidden, weight, targets, scales, chunk_rows=50)
    assert_as_exact_as_plain(losses, linear_cross_entropy_reference, hidden, weight, targets)
    assert_as_exact_as_plain(found, linear_cross_entropy_backward_reference, hidden, weight, targets, scales)


def test_linear_cross_entropy_takes_the_memory_of_a_chunk():
    """Of 8192 tokens and 100,000 logits each, 1.6 GB; a chunk of 128, and the weight's gradient in float32, are 0.1."""
    hidden = normal(1, 8192, 64, dtype=torch.float16).requires_grad_()
    weight, targets = normal(2, 100_000, 64, dtype=torch.float16).requires_grad_(), torch.randint(100_000, (8192,))
    targets = targets.cuda()
    torch.library.opcheck(
        linear_cross_entropy_operator, (hidden[:300], weight[:500], targets[:300] % 500, -100, True, 99)
    )
    for rows, most in ((128, 0.2e9), (None, 0.6e9)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, targets, chunk_rows=rows).backward()
        assert torch.cuda.max_memory_allocated() - before < most
        hidden.grad = weight.grad = None


def test_an_unchecked_target_outside_is_nan_and_the_gpu_lives_on():
    targets = torch.tensor([2**40, -(2**40), 5], device="cuda")
    losses, _ = cross_entropy_forward(normal(1, 3, 50), targets, validate=False)
    assert losses.isnan().tolist() == [True, True, False]
    with pytest.raises(ValueError, match=r"targets\[0\] is 1099511627776"):
        cross_entropy_forward(normal(1, 3, 50), targets)


def test_results_repeat_bit_for_bit():
    summed, gradient, weight = normal(1, 4001, 4096), normal(2, 4001, 4096), normal(3, 4096)
    first, second = (rms_norm_backward(summed, weight, gradient) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def test_operators_pass_opcheck_and_compile_with_their_gradients():
    x, residual, weight = normal(1, 8, 256), normal(2, 8, 256), normal(3, 256)
    targets = torch.randint(256, (8,), device="cuda")
    for tensor in (x, residual, weight):
        tensor.requires_grad_()
    torch.library.opcheck(add_rms_norm_operator, (x, residual, weight, 1e-6))
    torch.library.opcheck(swiglu_operator, (x, residual))
    torch.library.opcheck(cross_entropy_operator, (x, targets, -100, False))

    def function(x, residual, weight):
        normalised, summed = add_rms_norm(x, residual, weight)
        return cross_entropy(swiglu(normalised, summed), targets, validate=False)

    compiled = torch.compile(function, fullgraph=True)
    tensors = x, residual, weight
    found = torch.autograd.grad(compiled(*tensors), tensors)
    for ours, right in zip(found, torch.autograd.grad(function(*tensors), tensors)):
        torch.testing.assert_close(ours, right)


@pytest.mark.skipif((machine().memory_bytes or 0) < 40 * 2**30, reason="needs 40 GiB of GPU memory")
def test_offsets_beyond_two_to_the_31_do_not_wrap():
    """Rows from 2^31 elements on: a 32-bit offset would lie before the tensor."""
    rows, columns = 2**31 // 4096 + 5, 4096
    x = torch.zeros(rows, columns, dtype=torch.float16, device="cuda")
    x[-1] = 2.0
    ones = torch.ones(columns, dtype=torch.float16, device="cuda")
    assert add_rms_norm_forward(x, None, ones)[0][-1].tolist() == [1.0] * columns
    assert torch.all(swiglu_forward(x, x)[-1] == swiglu_forward(x[-1:], x[-1:]))
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    losses, _ = cross_entropy_forward(x, targets)
    torch.testing.assert_close(losses[[0, -1]], torch.full((2,), columns, device="cuda").float().log())
