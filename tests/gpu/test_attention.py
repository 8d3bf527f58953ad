"""Attention and softmax compiled and run on the GPU: right on what the interpreter can't afford, lean and fast."""

import math
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.timing import measure
from course_lib.kernels.attention.dispatch import portable
from course_lib.kernels.attention.naive import naive_attention
from course_lib.kernels.attention.reference import attention_reference, visible_keys
from course_lib.kernels.common.tiles import Tiles
from course_lib.kernels.hopper.flash_specialized import TRITON_VERSIONS_RUN
from course_lib.kernels.softmax.rows import softmax, softmax_rows

HALVES = [torch.float16] + ([torch.bfloat16] if supports_bfloat16() else [])
# One choice for all: so many examples would spend their time on tuning. Others are covered where they are chosen.
SMALL = Tiles(64, 32, warps=4, stages=2)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def assert_as_good_as_sdpa(query, key, value, tiles=None, causal=False, window=None):
    """Within twice SDPA's error in the same dtype against float64, plus a rounding of the largest result."""
    output, lse = portable(query, key, value, causal=causal, window=window, return_lse=True, tiles=tiles)
    wide = [tensor.double() for tensor in (query, key, value)]
    expected, expected_lse = attention_reference(*wide, causal=causal, window=window, return_lse=True)
    visible = visible_keys(query.shape[2], key.shape[2], causal=causal, window=window, device="cuda")
    # SDPA refuses odd strides, which only ours is asked to take.
    whole = [tensor.contiguous() for tensor in (query, key, value)]
    theirs = F.scaled_dot_product_attention(*whole, attn_mask=visible, enable_gqa=True)
    theirs = theirs.masked_fill(~visible.any(1)[:, None], 0)
    rounding = torch.finfo(query.dtype).eps * expected.abs().max()
    assert (output - expected).abs().max() <= 2 * (theirs - expected).abs().max() + rounding
    empty = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert torch.allclose(lse.double().masked_fill(empty, 0), expected_lse.masked_fill(empty, 0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("seed", range(28))
def test_any_shape_strides_dtype_and_mask_are_right(seed):
    """Ten times as many draws as in the interpreter."""
    torch.manual_seed(seed)
    draw = Random(seed)
    for _ in range(9):
        batch, (key_heads, group) = draw.randint(1, 3), draw.choice([(1, 1), (1, 3), (2, 2), (4, 1)])
        query_length, key_length = draw.randint(1, 400), draw.randint(1, 400)
        head_dim, dtype = draw.choice([40, 64]), draw.choice([torch.float32, *HALVES])
        layout = draw.choice(["contiguous", "length first", "odd strides"])
        inputs = [
            make(layout, batch, heads, length, head_dim, dtype)
            for heads, length in ((key_heads * group, query_length), (key_heads, key_length), (key_heads, key_length))
        ]
        mask = {"causal": draw.random() < 0.5, "window": draw.choice([None, None, 0, 1, 31, 32, 100, 1000])}
        assert_as_good_as_sdpa(*inputs, tiles=SMALL, **mask)


def make(layout, batch, heads, length, head_dim, dtype):
    if layout == "length first":
        return random(batch, length, heads, head_dim, dtype=dtype).transpose(1, 2)
    if layout == "odd strides":  # not multiples of 16 bytes: the kernel that computes its own addresses
        return random(batch, heads, length, head_dim + 3, dtype=dtype)[..., :head_dim]
    return random(batch, heads, length, head_dim, dtype=dtype)


@pytest.mark.parametrize(
    "head_dim, dtype",
    [(16, HALVES[0]), (64, HALVES[-1]), (96, HALVES[0]), (128, HALVES[-1]), (128, torch.float32), (256, HALVES[0])],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_tuned_kernels_are_right(dtype, head_dim, causal):
    inputs = random(2, 4, 1000, head_dim, dtype=dtype), *(random(2, 2, 1100, head_dim, dtype=dtype) for _ in range(2))
    assert_as_good_as_sdpa(*inputs, causal=causal)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("lengths", [(128, 2048), (2048, 2176), (4096, 4096), (1000, 2048)], ids=str)
def test_without_mask_and_log_sum_exp_it_is_right(lengths, dtype):
    """The specialised kernel's case. Triton 3.6 computed half of the rows wrong in others: every row is looked at."""
    query = random(1, 4, lengths[0], 128, dtype=dtype)
    key, value = (random(1, 2, lengths[1], 128, dtype=dtype) for _ in range(2))
    expected = attention_reference(query.double(), key.double(), value.double())
    theirs = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    rounding = torch.finfo(dtype).eps * expected.abs().max()
    error = (portable(query, key, value) - expected).abs().max()
    assert error <= 2 * (theirs - expected).abs().max() + rounding


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("mask", [{"causal": True}, {"causal": True, "window": 50}, {"window": 60}], ids=str)
def test_a_bad_number_reaches_only_the_rows_that_see_it(bad, name, mask):
    inputs = {what: random(1, 2, 400, 64, dtype=torch.float16) for what in ("query", "key", "value")}
    clean = portable(**inputs, **mask)
    inputs[name][0, 1, 210, 3] = bad
    output = portable(**inputs, **mask)
    touched = torch.zeros(1, 2, 400, dtype=torch.bool, device="cuda")
    touched[0, 1] = (
        torch.arange(400, device="cuda") == 210
        if name == "query"
        else visible_keys(400, 400, **mask, device="cuda")[:, 210]
    )
    assert torch.allclose(output[~touched], clean[~touched], atol=1e-3)
    if name == "value":
        column = output[touched][:, 3]
        assert column.isnan().all() if math.isnan(bad) else (column == bad).all()


def test_no_square_of_the_length_is_allocated():
    """Peak memory at 64k keys: inputs and outputs, and a tenth at most."""
    inputs = [random(1, 16, 65536, 64, dtype=torch.float16) for _ in range(3)]
    portable(*(tensor[:, :1] for tensor in inputs), causal=True, return_lse=True)  # tuned: its buffer is freed
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output, lse = portable(*inputs, causal=True, return_lse=True, tiles=Tiles(64, 64, 4, 2))
    peak = torch.cuda.max_memory_allocated() - before + sum(tensor.nbytes for tensor in inputs)
    assert peak <= 1.1 * (sum(tensor.nbytes for tensor in inputs) + output.nbytes + lse.nbytes)


def test_offsets_beyond_two_to_the_31_are_right():
    length = 2**31 // (2 * 64 * 128) + 5000  # rows of 64 heads in [batch, length, heads, head_dim]
    storage = torch.empty(1, length, 64, 256, dtype=torch.float16, device="cuda")
    key = storage[..., :128].transpose(1, 2)[:, 63:]
    value = storage[..., 128:].transpose(1, 2)[:, 63:]
    key.normal_(), value.normal_()
    query = random(1, 1, 64, 128, dtype=torch.float16)
    assert_as_good_as_sdpa(query, key, value, causal=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_naive_attention_is_right(causal):
    inputs = random(2, 4, 300, 80), *(random(2, 2, 400, 80) for _ in range(2))
    expected = attention_reference(*(tensor.double() for tensor in inputs), causal=causal)
    assert torch.allclose(naive_attention(*inputs, causal=causal).double(), expected, atol=1e-5)


def test_naive_attention_refuses_what_does_not_fit():
    long = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device="cuda").expand(1, 64, 131072, 64)
    with pytest.raises(ValueError, match="are available"):
        naive_attention(long, long, long)


@pytest.mark.parametrize("columns", [1, 33, 1000, 1024, 2049, 5000, 8193, 20000, 32768, 40000, 65536, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_softmax_is_right(columns, dtype):
    x = 3 * random(5, columns, dtype=dtype)
    expected = torch.softmax(x.double(), -1)
    # Beside twice torch's error: a rounding, and what ex2.approx, which torch doesn't use, may be off (2⁻²², PTX ISA).
    rounding = torch.finfo(dtype).eps + 2**-22
    allowed = 2 * (torch.softmax(x, -1) - expected).abs().max() + rounding * expected.max()
    for method in ("three_pass", "online", "one_pass") if columns <= 65536 else ("three_pass", "online"):
        assert (softmax(x, method) - expected).abs().max() <= allowed


@pytest.mark.parametrize(
    "columns, dtype, share",
    [
        (1024, torch.float32, 0.93),
        (4096, torch.float32, 0.93),
        (5000, torch.float32, 0.93),
        (16384, torch.float32, 0.93),
        (1024, torch.float16, 0.93),
        (5000, torch.float16, 0.93),
        (32768, torch.float16, 0.88),
        (65536, torch.float16, 0.8),
    ],
    ids=str,
)
def test_softmax_is_nearly_a_copy(columns, dtype, share):
    x = random(2**30 // dtype.itemsize // columns, columns, dtype=dtype)
    out = torch.empty_like(x)
    copied = measure(lambda: out.copy_(x)).median
    assert measure(lambda: softmax_rows(x, out)).median <= copied / share


@pytest.mark.skipif(machine().compute_capability != (9, 0), reason="the figures are those of Hopper")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "head_dim, length, ratio", [(128, 4096, 1.4), (128, 512, 1.0), (64, 4096, 1.3), (64, 512, 1.0)]
)
def test_flash_attention_outruns_fa2(head_dim, length, ratio, causal):
    if not (machine().triton or "").startswith(TRITON_VERSIONS_RUN) and not causal and head_dim == 128:
        ratio = min(ratio, 1.3)  # without the specialised kernel
    inputs = [random(16384 // length, 2048 // head_dim, length, head_dim, dtype=HALVES[-1]) for _ in range(3)]
    ours = measure(lambda: portable(*inputs, causal=causal)).median
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = measure(lambda: F.scaled_dot_product_attention(*inputs, is_causal=causal)).median
    assert theirs / ours >= ratio
