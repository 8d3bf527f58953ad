"""The backward kernel for Hopper on a Hopper GPU: right on any shape, the same bits at every run, and fast."""

import math

import pytest
import torch

from course_lib.hardware.device import machine
from course_lib.hardware.timing import measure_together
from course_lib.kernels.attention.backward_reference import attention_backward_reference
from course_lib.kernels.attention.reference import visible_keys
from tests.gpu.attention_claims import ragged_shapes

pytestmark = pytest.mark.skipif(
    machine().tier == "none" or machine().compute_capability != (9, 0), reason="needs a Hopper GPU (sm_90)"
)

DTYPES = [torch.bfloat16, torch.float16]


def forward_and_backward(query, key, value, output_gradient, *, causal=False, scale=None, **options):
    from course_lib.kernels.hopper.backward import flash_attention_backward_hopper
    from course_lib.kernels.hopper.flash import flash_attention_hopper

    output, lse = flash_attention_hopper(query, key, value, causal=causal, scale=scale, return_lse=True)
    return flash_attention_backward_hopper(
        query, key, value, output, lse, output_gradient, causal=causal, scale=scale, **options
    )


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def inputs(batch, heads, key_heads, query_length, key_length, head_dim, dtype=torch.bfloat16):
    query, output_gradient = (normal(batch, heads, query_length, head_dim, dtype=dtype) for _ in range(2))
    key, value = (normal(batch, key_heads, key_length, head_dim, dtype=dtype) for _ in range(2))
    return query, key, value, output_gradient


def rounded_reference(query, key, value, output_gradient, *, causal=False):
    """The gradients in float32, with O, P and dS rounded to the inputs' precision: a plain implementation's error."""
    groups, dtype, scale = query.shape[1] // key.shape[1], query.dtype, 1 / math.sqrt(query.shape[-1])
    query, gradient = query.float(), output_gradient.float()
    key, value = (tensor.float().repeat_interleave(groups, 1) for tensor in (key, value))
    visible = visible_keys(query.shape[2], key.shape[2], causal=causal, window=None, device="cuda")
    weights = torch.softmax((query @ key.mT * scale).masked_fill(~visible, -math.inf), dim=-1).nan_to_num(0)
    output = (weights.to(dtype).float() @ value).to(dtype).float()
    value_gradient = weights.to(dtype).float().mT @ gradient
    score_gradients = weights * (gradient @ value.mT - (output * gradient).sum(-1, keepdim=True))
    score_gradients = score_gradients.to(dtype).float()
    by_head = score_gradients.mT @ query * scale, value_gradient
    return (score_gradients @ key * scale, *(tensor.unflatten(1, (-1, groups)).sum(2) for tensor in by_head))


def assert_right(query, key, value, output_gradient, *, causal=False, **options):
    got = forward_and_backward(query, key, value, output_gradient, causal=causal, **options)
    exact = attention_backward_reference(
        query.double(), key.double(), value.double(), output_gradient.double(), causal=causal
    )
    plain = rounded_reference(query, key, value, output_gradient, causal=causal)
    # A query that sees one key has the gradient 0: dP and Δ are the same number, summed in float32 in two orders.
    largest = [tensor.abs().max().item() for tensor in (output_gradient, value)]
    difference = torch.finfo(torch.float32).eps * math.prod(largest) * math.sqrt(query.shape[-1])
    for name, mine, true, rough in zip(("dQ", "dK", "dV"), got, exact, plain):
        rounding = torch.finfo(query.dtype).eps * true.norm()
        allowed = 2 * (rough.to(query.dtype).double() - true).norm() + rounding / 2
        allowed += difference * max(query.abs().max(), key.abs().max()) * math.sqrt(true.numel() / query.shape[-1])
        assert not mine.isnan().any(), name
        assert (mine.double() - true).norm() <= allowed, name
        assert mine.is_contiguous() and mine.dtype == query.dtype, name


@pytest.mark.parametrize("deterministic", [True, False], ids=["in turns", "as they come"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_it_agrees_with_float64_on_ragged_lengths_and_grouped_heads(head_dim, dtype, causal, deterministic):
    for shape in ragged_shapes(head_dim):
        assert_right(*inputs(*shape, head_dim, dtype), causal=causal, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_scores_do_not_overflow(head_dim):
    """Keys beyond the last are zeros: with a log-sum-exp far below 0 their P would be infinite, and 0 · inf is NaN."""
    query, key, value, output_gradient = inputs(1, 2, 2, 500, 500, head_dim)
    assert_right(query * 30, key * 30, value, output_gradient, causal=True)
    one_way = torch.ones_like(query) * 8
    assert_right(one_way, -one_way, value, output_gradient)


def test_strides_are_respected_and_a_sums_gradient_is_copied():
    packed = normal(2, 300, 4, 3, 128)
    query, key, value = (packed[..., which, :].transpose(1, 2) for which in range(3))
    assert_right(query, key, value, normal(2, 300, 4, 128).transpose(1, 2), causal=True)
    assert_right(query, key, value, normal(1, 1, 1, 1).expand(query.shape), causal=True)


def test_the_gradient_of_the_log_sum_exp_counts():
    query, key, value, output_gradient = inputs(1, 2, 1, 200, 300, 128)
    lse_gradient = torch.randn(1, 2, 200, device="cuda")
    got = forward_and_backward(query, key, value, output_gradient, log_sum_exp_gradient=lse_gradient)
    exact = attention_backward_reference(
        query.double(), key.double(), value.double(), output_gradient.double(),
        log_sum_exp_gradient=lse_gradient.double(),
    )  # fmt: skip
    for mine, true in zip(got, exact):
        assert (mine.double() - true).norm() <= 0.02 * true.norm()


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (64, False), (128, True), (128, False)])
def test_a_thousand_runs_give_the_same_bits(head_dim, causal):
    """Which program takes which tile changes from run to run; what comes out must not."""
    tensors = inputs(2, 16, 16, 1000, 1000, head_dim)
    first = forward_and_backward(*tensors, causal=causal)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for before, now in zip(first, forward_and_backward(*tensors, causal=causal)):
            different += (before != now).any()
    assert different.item() == 0


@pytest.mark.parametrize("heads_at_once", [1, 3, 100])
def test_the_order_of_heads_changes_no_bit(heads_at_once):
    """Turns are counted by tiles of keys alone, however many heads are under way."""
    tensors = inputs(2, 8, 4, 900, 900, 128)
    for before, now in zip(
        forward_and_backward(*tensors, causal=True),
        forward_and_backward(*tensors, causal=True, heads_at_once=heads_at_once),
    ):
        assert torch.equal(before, now)


def test_a_graph_replays_it():
    tensors = inputs(2, 8, 8, 1024, 1024, 128)
    want = forward_and_backward(*tensors, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward(*tensors, causal=True)
    for _ in range(5):
        graph.replay()
        assert all(torch.equal(before, now) for before, now in zip(want, captured))


def test_no_memory_of_queries_times_keys():
    """At 16k tokens P would take 537 MB a head; beside its results the kernel keeps 4 · head_dim + 16 bytes a query."""
    tensors = inputs(1, 4, 4, 16384, 16384, 128)
    forward_and_backward(*tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward_and_backward(*tensors)
    queries = 4 * 16384
    assert torch.cuda.max_memory_allocated() - before < queries * (4 * 128 + 4 * 2 * 128 + 64)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (64, True), (128, False), (128, True)])
def test_it_is_faster_than_cudnn(head_dim, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from course_lib.kernels.hopper.backward import flash_attention_backward_hopper
    from course_lib.kernels.hopper.flash import flash_attention_hopper

    heads = 2048 // head_dim
    query, key, value, output_gradient = inputs(1, heads, heads, 16384, 16384, head_dim)
    output, lse = flash_attention_hopper(query, key, value, causal=causal, return_lse=True)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    times = measure_together(
        {
            "ours": lambda: flash_attention_backward_hopper(
                query, key, value, output, lse, output_gradient, causal=causal
            ),
            "cuDNN": lambda: torch.autograd.grad(theirs, leaves, output_gradient, retain_graph=True),
        }
    )
    assert times["ours"].median < times["cuDNN"].median, {name: str(timing) for name, timing in times.items()}
