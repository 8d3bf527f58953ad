"""The gradients of attention compiled and run on the GPU: right on what the interpreter can't afford, lean and fast."""

import math
from random import Random

import pytest
import torch

from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.kernels.attention.backward import flash_attention_backward
from course_lib.kernels.attention.backward_reference import attention_backward_reference
from course_lib.kernels.attention.dispatch import choose_backward
from course_lib.kernels.attention.flash import flash_attention
from course_lib.kernels.attention.operator import attention, attention_operator
from course_lib.kernels.common.tiles import Tiles
from course_lib.models.training import loss_curves

HALVES = [torch.float16] + ([torch.bfloat16] if supports_bfloat16() else [])
FORMS = pytest.mark.parametrize("deterministic", [True, False], ids=["kernel of its own", "atomics"])
FORWARD = Tiles(64, 32, warps=4, stages=2)  # one choice for all: no time is spent on tuning


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def assert_right(query, key, value, gradient, deterministic=True, **options):
    """Each gradient within twice the error of plain PyTorch in the same dtype, plus a rounding of the largest."""
    inputs = query, key, value
    output, log_sum_exp = flash_attention(*inputs, return_lse=True, tiles=FORWARD, **options)
    found = flash_attention_backward(*inputs, output, log_sum_exp, gradient, deterministic=deterministic, **options)
    exact = attention_backward_reference(*(tensor.double() for tensor in (*inputs, gradient)), **options)
    plain = attention_backward_reference(*inputs, gradient, **options)
    for name, ours, right, theirs in zip(("dQ", "dK", "dV"), found, exact, plain):
        # A float32 product of PyTorch is exact to float32, and so are ours; sums of some hundreds may be off by more.
        rounding = 4 * torch.finfo(query.dtype).eps * max(1, right.abs().max().item())
        error, allowed = (ours - right).abs().max(), 2 * (theirs - right).abs().max() + rounding
        assert error <= allowed, f"{name} is off by {error:.2e}, {allowed:.2e} are allowed"


def drawn(draw):
    """Inputs of a random shape, dtype and layout, and a random mask."""
    batch, (key_heads, group) = draw.randint(1, 3), draw.choice([(1, 1), (1, 3), (2, 2), (4, 1)])
    query_length, key_length = draw.randint(1, 400), draw.randint(1, 400)
    head_dim, dtype = draw.choice([40, 64, 128]), draw.choice([torch.float32, *HALVES])
    padding = draw.choice([0, 0, 3])  # 3: strides that the copy engine does not take
    inputs = [
        random(batch, heads, length, head_dim + padding, dtype=dtype)[..., :head_dim]
        for heads, length in (
            (key_heads * group, query_length),
            (key_heads, key_length),
            (key_heads, key_length),
            (key_heads * group, query_length),
        )
    ]
    return inputs, {"causal": draw.random() < 0.5, "window": draw.choice([None, None, 0, 1, 31, 32, 100, 1000])}


@FORMS
@pytest.mark.parametrize("seed", range(8))
def test_any_shape_strides_dtype_and_mask_are_right(seed, deterministic):
    torch.manual_seed(seed)
    draw = Random(seed)
    for _ in range(8):
        inputs, mask = drawn(draw)
        assert_right(*inputs, deterministic=deterministic, **mask)


@FORMS
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_large_and_very_negative_scores_are_right(head_dim, causal, deterministic):
    """Beyond the last key S is 0; where all real scores are far below 0, exp(0 - LSE) there is infinite."""
    dtype = HALVES[-1]
    query, gradient = (random(1, 4, 300, head_dim, dtype=dtype) for _ in range(2))
    key, value = (random(1, 2, 333, head_dim, dtype=dtype) for _ in range(2))
    for many, more in ((1, 1), (5, 5), (6 * query.sign(), -6 * key.sign())):
        assert_right(many * query, more * key, value, gradient, deterministic, causal=causal)


def test_queries_before_the_first_key_get_zeros_and_give_nothing():
    query, gradient = (random(1, 2, 300, 128, dtype=HALVES[-1]) for _ in range(2))
    key, value = (random(1, 2, 130, 128, dtype=HALVES[-1]) for _ in range(2))
    output, log_sum_exp = flash_attention(query, key, value, causal=True, return_lse=True)
    assert (log_sum_exp[..., :170] == -math.inf).all()
    found = flash_attention_backward(query, key, value, output, log_sum_exp, gradient, causal=True)
    assert (found[0][:, :, :170] == 0).all() and all(tensor.isfinite().all() for tensor in found)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thousand_runs_give_the_same_bits(head_dim, causal):
    query, gradient = (random(1, 8, 1000, head_dim, dtype=HALVES[-1]) for _ in range(2))
    key, value = (random(1, 4, 1100, head_dim, dtype=HALVES[-1]) for _ in range(2))
    output, log_sum_exp = flash_attention(query, key, value, causal=causal, return_lse=True)
    saved = query, key, value, output, log_sum_exp, gradient
    first = flash_attention_backward(*saved, causal=causal)
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        for again, before in zip(flash_attention_backward(*saved, causal=causal), first):
            changed += (again != before).sum()
    assert changed.item() == 0


@FORMS
def test_no_square_of_the_length_is_allocated(deterministic):
    """At 32k queries P of a head would be 2 GB in 16 bits; gradients and the numbers of rows are 0.2 GB."""
    inputs = [random(1, 8, 32768, 64, dtype=torch.float16) for _ in range(4)]
    output, log_sum_exp = flash_attention(*inputs[:3], causal=True, return_lse=True, tiles=FORWARD)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = flash_attention_backward(
        *inputs[:3], output, log_sum_exp, inputs[3], causal=True, deterministic=deterministic
    )
    rows = 2 * 4 * output.shape[:3].numel()
    sums = 0 if deterministic else 4 * output.numel()
    allowed = 1.01 * (sum(tensor.nbytes for tensor in found) + rows + sums)
    assert torch.cuda.max_memory_allocated() - before <= allowed


def test_offsets_beyond_two_to_the_31_are_right():
    length = 2**31 // (2 * 64 * 128) + 5000  # rows of 64 heads in [batch, length, heads, head_dim]
    storage = torch.empty(1, length, 64, 256, dtype=torch.float16, device="cuda")
    key = storage[..., :128].transpose(1, 2)[:, 63:]
    value = storage[..., 128:].transpose(1, 2)[:, 63:]
    key.normal_(), value.normal_()
    query, gradient = (random(1, 1, 64, 128, dtype=torch.float16) for _ in range(2))
    assert_right(query, key, value, gradient, causal=True)


def inputs_with_gradient(length, dtype):
    return [random(1, heads, length, 32, dtype=dtype).requires_grad_() for heads in (2, 1, 1)]


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_of_every_element_passes():
    """In float32, as the kernels take no float64: wide steps, and a tolerance that they need."""

    def function(*tensors):
        return attention(*tensors, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(function, inputs_with_gradient(6, torch.float32), eps=1e-2, atol=5e-3, rtol=1e-2)


def test_opcheck_passes():
    torch.library.opcheck(attention_operator, (*inputs_with_gradient(70, HALVES[-1]), True, None, None))


def test_compiled_it_is_one_graph_with_the_same_gradients():
    def function(query, key, value):
        return attention(2 * query, key, value, causal=True).square()

    inputs = inputs_with_gradient(300, HALVES[-1])
    compiled = torch.autograd.grad(torch.compile(function, fullgraph=True)(*inputs).sum(), inputs)
    for ours, right in zip(compiled, torch.autograd.grad(function(*inputs).sum(), inputs)):
        assert (ours - right).norm() <= 0.02 * right.norm()


def test_trained_with_the_courses_kernels_the_small_model_loses_what_it_loses_with_pytorchs():
    curves = loss_curves(steps=60)
    pairs = list(zip(curves["PyTorch"], curves["ours"]))
    assert all(abs(theirs - ours) < 1e-3 for theirs, ours in pairs[:5])
    assert all(abs(theirs - ours) < 0.1 for theirs, ours in pairs)
    assert curves["ours"][-1] < curves["ours"][0] - 1


@pytest.mark.skipif(machine().compute_capability != (9, 0), reason="another GPU has the portable kernels alone")
def test_what_the_hopper_kernel_lacks_goes_to_the_portable_ones_with_the_reason():
    query, key, value = (random(1, 2, 200, 64, dtype=torch.float16).requires_grad_() for _ in range(3))
    assert choose_backward(query, key, value).kernel == "hopper"
    for tensors, options, reason in (
        ((query, key, value), {"window": 20}, "window is 20"),
        ((query.float(), key.float(), value.float()), {}, "torch.float32"),
        ([random(1, 2, 200, 256, dtype=torch.float16).requires_grad_() for _ in range(3)], {}, "head dimension 256"),
    ):
        choice = choose_backward(*tensors, **options)
        assert choice.kernel == "portable" and reason in choice.reason
        gradients = torch.autograd.grad(attention(*tensors, causal=True, **options).sum(), tensors)
        exact = attention_backward_reference(
            *(tensor.detach().double() for tensor in tensors),
            torch.ones_like(tensors[0]).double(),
            causal=True,
            **options,
        )
        for ours, right in zip(gradients, exact):
            assert (ours - right).norm() <= 0.01 * right.norm()
