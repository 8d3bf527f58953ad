"""The Hopper kernel on a Hopper GPU: right on any shape, the same bits at every run, and fast."""

import math

import pytest
import torch

from course_lib.hardware.device import machine
from course_lib.hardware.timing import measure
from course_lib.kernels.attention.dispatch import choose
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.attention.reference import attention_reference, visible_keys
from tests.gpu.attention_claims import assert_agrees, ragged_shapes

pytestmark = pytest.mark.skipif(
    machine().tier == "none" or machine().compute_capability != (9, 0), reason="needs a Hopper GPU (sm_90)"
)

DTYPES = [torch.bfloat16, torch.float16]
MASKS = [{}, {"causal": True}, {"causal": True, "window": 77}, {"window": 100}]


def hopper(*arguments, **options):
    from course_lib.kernels.hopper.flash import flash_attention_hopper

    return flash_attention_hopper(*arguments, **options)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def rounded_reference(query, key, value, *, causal=False, window=None):
    """Attention in float32, with the weights rounded to the inputs' precision: a plain implementation's error."""
    groups = query.shape[1] // key.shape[1]
    dtype = query.dtype
    query = query.float()
    key, value = (tensor.float().repeat_interleave(groups, 1) for tensor in (key, value))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    visible = visible_keys(query.shape[2], key.shape[2], causal=causal, window=window, device="cuda")
    scores = scores.masked_fill(~visible, -math.inf)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0)
    return (weights.to(dtype).float() @ value).to(dtype)


def assert_right(query, key, value, **options):
    output, lse = hopper(query, key, value, return_lse=True, **options)
    exact, exact_lse = attention_reference(query.double(), key.double(), value.double(), return_lse=True, **options)
    plain = rounded_reference(query, key, value, **options)
    allowed = 2 * (plain.double() - exact).norm() + torch.finfo(query.dtype).eps * exact.norm()
    assert_agrees(output, lse, exact, exact_lse, allowed, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 200, 256])
def test_it_agrees_with_float64_on_ragged_lengths_and_grouped_heads(head_dim, dtype, options):
    for batch, heads, key_heads, query_length, key_length in ragged_shapes(head_dim):
        query = normal(batch, heads, query_length, head_dim, dtype=dtype)
        key, value = (normal(batch, key_heads, key_length, head_dim, dtype=dtype) for _ in range(2))
        assert_right(query, key, value, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_large_scores_do_not_overflow(head_dim):
    query, key, value = (normal(1, 2, 500, head_dim) for _ in range(3))
    assert_right(query * 30, key * 30, value, causal=True)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_sink_joins_the_sum_of_its_head(head_dim, options):
    """O' = O · exp(LSE - LSE'), LSE' = log(exp LSE + exp sink): of the kernel's own results without a sink."""
    query, (key, value) = normal(2, 4, 500, head_dim), (normal(2, 2, 450, head_dim) for _ in range(2))
    for around in (-1e4, 0.0, 1e4):
        sink = around + torch.linspace(-1, 8, 4, device="cuda")
        plain, plain_lse = hopper(query, key, value, return_lse=True, **options)
        output, lse = hopper(query, key, value, sink=sink, return_lse=True, **options)
        due = torch.logaddexp(plain_lse, sink[:, None])
        assert torch.allclose(lse, due, rtol=1e-6, atol=1e-5)
        expected = plain.float() * torch.exp(plain_lse - due)[..., None]
        assert torch.allclose(output.float(), expected, rtol=2 * torch.finfo(query.dtype).eps, atol=1e-6)
        if choose(query, key, value, sink=sink, **options).kernel == "hopper":
            assert torch.equal(attention(query, key, value, sink=sink, **options), output)


def test_a_window_wider_than_any_tensor_is_no_window():
    """Positions are 32-bit numbers: one plus such a window would come out below zero."""
    query, key, value = (normal(1, 2, 300, 128) for _ in range(3))
    for window in (2**31 - 1, 2**40):
        assert torch.equal(hopper(query, key, value, window=window), hopper(query, key, value, window=300))


def test_strides_are_respected():
    """Heads after the length in memory, rows of a wider tensor, and a batch of one whose stride means nothing."""
    packed = normal(2, 300, 3, 4, 128)
    assert_right(*(packed[:, :, which].transpose(1, 2) for which in range(3)), causal=True)
    wide = normal(1, 2, 300, 200)
    assert_right(wide[..., :128], wide[..., 72:], normal(1, 2, 300, 128))
    query = normal(1, 2, 300, 128)
    assert_right(query.as_strided(query.shape, (7, *query.stride()[1:])), query, query)


def test_keys_beyond_the_length_are_never_read():
    """A cache longer than what is filled: what lies behind must not matter, be it NaN."""
    cache = torch.full((2, 1, 2, 512, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    key, value = cache[:, :, :, :300]
    key.copy_(normal(*key.shape)), value.copy_(normal(*value.shape))
    assert_right(normal(1, 4, 300, 128), key, value, causal=True)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (64, False), (128, True), (128, False)])
def test_a_thousand_runs_give_the_same_bits(head_dim, causal):
    """Which program takes which tile changes from run to run; what comes out must not."""
    query, key, value = (normal(4, 16, 1000, head_dim) for _ in range(3))
    first, first_lse = hopper(query, key, value, causal=causal, return_lse=True)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        output, lse = hopper(query, key, value, causal=causal, return_lse=True)
        different += (output != first).any() | (lse != first_lse).any()
    assert different.item() == 0


def test_a_graph_and_streams_replay_it():
    """The counter that hands out tiles must be back at 0 after each launch, and be nobody else's meanwhile."""
    query, key, value = (normal(2, 16, 1024, 128) for _ in range(3))
    want = hopper(query, key, value, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hopper(query, key, value, causal=True)
    for _ in range(5):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, want)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(hopper(query, key, value, causal=True))
    torch.cuda.synchronize()
    assert all(torch.equal(output, want) for output in outputs)


def test_the_dispatcher_picks_it_and_falls_back():
    query, key, value = (normal(1, 2, 200, 128) for _ in range(3))
    assert choose(query, key, value).kernel == "hopper"
    assert torch.equal(attention(query, key, value, causal=True), hopper(query, key, value, causal=True))
    assert choose(query.float(), key.float(), value.float()).kernel == "portable"
    shifted = torch.empty(key.numel() + 1, device="cuda", dtype=key.dtype)[1:].view(key.shape).copy_(key)
    assert "16" in choose(query, shifted, value).reason
    with pytest.raises(ValueError, match="key begins 2 bytes after"):
        hopper(query, shifted, value)
    torch.testing.assert_close(attention(query, shifted, value), hopper(query, key, value), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (64, True), (128, True), (128, False)])
def test_it_is_faster_than_cudnn(head_dim, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = (normal(2, 2048 // head_dim, 8192, head_dim) for _ in range(3))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = measure(
            lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        ).median
    ours = measure(lambda: hopper(query, key, value, causal=causal)).median
    assert ours < 1.05 * theirs, f"{ours * 1e3:.2f} ms against cuDNN's {theirs * 1e3:.2f} ms"
