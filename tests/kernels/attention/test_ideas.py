"""Attention with FlashAttention-4's ideas: each alone and all at once against float64, and what they leave behind."""

import math
import re

import pytest
import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.views import compile_many
from course_lib.hardware.device import interpreting
from course_lib.kernels.attention import flash, ideas
from course_lib.kernels.attention.flash import flash_attention
from course_lib.kernels.attention.flash_tma import flash_attention_tma
from course_lib.kernels.attention.ideas import (
    attention_with_ideas,
    attention_with_ideas_reference,
    default_tiles,
)
from course_lib.kernels.attention.order import longest_first
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.common.exponentials import exp2_polynomial_reference
from course_lib.kernels.common.tiles import Tiles
from tests.kernels.rounding import largest_error, rounded_otherwise

needs_interpreter = pytest.mark.skipif(
    not interpreting(), reason="small shapes for the interpreter; tests/gpu has more"
)
SMALL = Tiles(32, 32, warps=4, stages=1)
POLYNOMIAL_ERROR = 8.6e-5  # of degree 3, relative (see `exponentials`): of each weight, and so of the output
IDEAS = {"none": {}, "lazy": {"threshold": 4.0}, "share": {"share": 8}, "all by exp2": {"share": 32}, "order": {}}
IDEAS["all"] = {"threshold": 4.0, "share": 8}
LENGTHS = [(1, 65), (65, 1), (31, 64), (97, 33)]


@triton.jit
def nothing(x):
    """No exponential at all: the keys that it gets have no weight."""
    return tl.zeros_like(x)


@triton.jit
def by_the_unit(x):
    return tl.exp2(x)


def tensors(batch, query_heads, key_heads, query_length, key_length, head_dim, dtype=torch.float32, seed=0, spread=3.0):
    """Queries that make scores of that standard deviation, so that a threshold is exceeded now and then."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(query_heads, query_length), (key_heads, key_length), (key_heads, key_length)]
    query, key, value = (torch.randn(batch, *shape, head_dim, generator=generator) for shape in shapes)
    return [tensor.to(dtype) for tensor in (spread * query, key, value)]


def climbing(*largest):
    """Queries, keys and values whose block of 32 keys number i has the score largest[i], base 2, in one row."""
    key = torch.zeros(1, 1, 32 * len(largest), 16)
    key[..., 0] = torch.tensor(largest).repeat_interleave(32)
    query = torch.zeros(1, 1, 1, 16)
    query[..., 0] = 1.0
    return query, key, torch.ones_like(key)


def rescales_of(*largest, **options):
    return attention_with_ideas(*climbing(*largest), scale=math.log(2), tiles=SMALL, **options).rescales.item()


def assert_right(query, key, value, causal, name):
    """Within twice the error of plain PyTorch, plus its rounding, plus that of the polynomial; the same rescales."""
    options = IDEAS[name]
    order = longest_first(query, key, SMALL.query_rows) if name in ("order", "all") else None
    found = attention_with_ideas(query, key, value, causal=causal, order=order, tiles=SMALL, **options)
    wide = [tensor.double() for tensor in (query, key, value)]
    expected = attention_reference(*wide, causal=causal, return_lse=True)
    meant = attention_with_ideas_reference(*wide, SMALL, causal=causal, threshold=options.get("threshold", 0.0))
    plain = rounded_otherwise(attention_reference, query, key, value, causal=causal, return_lse=True)
    polynomial = 2 * POLYNOMIAL_ERROR if options.get("share") else 0.0
    for ours, right, theirs, meaning in zip(found, expected, zip(*plain), meant):
        empty = right == -math.inf
        assert torch.equal(ours == -math.inf, empty) and torch.equal(meaning == -math.inf, empty)
        allowed = 2 * largest_error(theirs, right)
        ours_eps = torch.finfo(ours.dtype).eps
        ours, meaning, right = (tensor.double().masked_fill(empty, 0) for tensor in (ours, meaning, right))
        rounding = (4 * ours_eps + polynomial) * max(1, right.abs().max().item())
        assert (ours - right).abs().max() <= allowed + rounding
        torch.testing.assert_close(meaning, right, rtol=1e-12, atol=1e-12)
    assert found.output.dtype == query.dtype and found.lse.dtype == torch.float32
    assert torch.equal(found.rescales, meant.rescales)


# ------------------------------------------------------------------------------------------------- they change nothing


@needs_interpreter
@pytest.mark.parametrize("name", IDEAS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_idea_gives_attention(lengths, causal, name):
    assert_right(*tensors(1, 2, 1, *lengths, 24), causal, name)


@needs_interpreter
@pytest.mark.parametrize("name", IDEAS)
@pytest.mark.parametrize("head_dim", [16, 40, 256])
def test_batches_grouped_heads_and_half_precision_are_right(head_dim, name):
    assert_right(*tensors(2, 4, 2, 40, 70, head_dim, torch.float16, seed=head_dim), True, name)


@needs_interpreter
@pytest.mark.parametrize("name", ["lazy", "all"])
def test_large_scores_do_not_overflow(name):
    query, key, value = tensors(1, 1, 1, 40, 130, 16, spread=2000.0)
    assert (query @ key.transpose(2, 3)).abs().max() / 4 > 5000
    assert_right(query, key, value, False, name)
    assert_right(-query.abs(), key.abs(), value, False, name)


@needs_interpreter
def test_with_no_idea_it_is_flash_attention_bit_by_bit():
    query, key, value = tensors(2, 4, 2, 50, 90, 32)
    ours = attention_with_ideas(query, key, value, causal=True, tiles=SMALL, counted=False)
    output, lse = flash_attention(query, key, value, causal=True, tiles=SMALL, return_lse=True)
    assert torch.equal(ours.output, output) and torch.equal(ours.lse, lse) and ours.rescales is None


@needs_interpreter
def test_any_strides_are_read():
    query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(2, 4, 2, 20, 40, 16))
    found = attention_with_ideas(query, key, value, threshold=4.0)
    dense = attention_with_ideas(query.contiguous(), key.contiguous(), value.contiguous(), threshold=4.0)
    assert torch.equal(found.output, dense.output)


# ------------------------------------------------------------------------------------------------------ lazy rescaling


@needs_interpreter
def test_a_climb_up_to_the_threshold_is_not_followed_and_a_climb_beyond_it_is():
    assert rescales_of(0.0, 7.9, 7.9, 3.0, threshold=8.0) == 0
    assert rescales_of(0.0, 7.9, 15.8, 23.7, threshold=8.0) == 1  # 15.8; then 23.7 exceeds 15.8 by 7.9 only
    assert rescales_of(0.0, 8.0, threshold=8.0) == 0 and rescales_of(0.0, 8.001, threshold=8.0) == 1
    assert rescales_of(0.0, 7.9, 15.8, 23.7) == 3 and rescales_of(0.0, 0.0, -1.0) == 0


@needs_interpreter
@pytest.mark.parametrize("first", [-1e4, -50.0, 50.0, 1e4])
def test_the_first_block_sets_the_reference_wherever_it_is(first):
    """A reference that begins at 0 or at -inf and waits to be exceeded lets every weight vanish or overflow."""
    query, key, value = climbing(first, first + 1.0)
    found = attention_with_ideas(query, key, value, scale=math.log(2), threshold=8.0, tiles=SMALL)
    assert found.rescales.item() == 0
    torch.testing.assert_close(found.output, torch.ones_like(query))
    expected = (first + math.log2(32 + 64)) * math.log(2)
    torch.testing.assert_close(found.lse.item(), expected, rtol=1e-6, atol=1e-6)


@needs_interpreter
def test_one_row_of_a_tile_makes_all_of_its_rows_take_new_references():
    query, key, value = climbing(0.0, 9.0, 12.0)
    query = query.repeat(1, 1, 64, 1) * torch.tensor([1.0] + 31 * [0.3] + 32 * [0.3])[:, None]
    found = attention_with_ideas(query, key, value, scale=math.log(2), threshold=8.0, tiles=SMALL)
    assert found.rescales.flatten().tolist() == [1, 0]


@needs_interpreter
def test_rows_after_the_last_query_never_ask():
    """Their scores are 0, which a row of low scores never exceeds."""
    query, key, value = climbing(-90.0, -80.0, -75.0)
    assert attention_with_ideas(query, key, value, scale=math.log(2), threshold=15.0).rescales.item() == 0


@needs_interpreter
def test_float16_has_room_for_the_largest_threshold():
    query, key, value = (x.half() for x in climbing(0.0, 15.0, 15.0))
    found = attention_with_ideas(query, key, value, scale=math.log(2), threshold=15.0, tiles=SMALL)
    assert found.rescales.item() == 0 and torch.equal(found.output, torch.ones_like(query))


def test_how_often_rows_and_tiles_ask_is_as_the_docstring_says():
    draw = torch.Generator().manual_seed(0)
    for deviation, *expected in ((1, 3.7, 0.0, 53, 0.0, 61, 0.0), (3, 3.8, 0.10, 54, 2.4, 61, 3.2),
                                 (10, 3.8, 1.3, 54, 25, 61, 34)):  # fmt: skip
        scores = torch.randn(4096, 64, 128, generator=draw).amax(-1) * deviation / math.log(2)
        found = []
        for rows in (1, 64, 128):
            for threshold in (0.0, 8.0):
                tiles = scores.view(-1, rows, 64)
                reference, asked = tiles[:, :, 0], 0.0
                for block in range(1, 64):
                    must = (tiles[:, :, block] > reference + threshold).any(1)
                    asked += must.float().mean().item()
                    reference = torch.where(must[:, None], torch.maximum(reference, tiles[:, :, block]), reference)
                found.append(asked)
        assert found == pytest.approx(expected, rel=0.12, abs=0.02), deviation


# -------------------------------------------------------------------------------------------------- a share of the keys


@needs_interpreter
@pytest.mark.parametrize("share", [1, 8, 31, 32])
def test_the_last_keys_of_every_32_are_weighed_by_the_function_that_is_given(share):
    """By one that gives nothing: what is left is attention to the other keys."""
    query, key, value = tensors(1, 1, 1, 20, 96, 16)
    found = attention_with_ideas(query, key, value, exp2=nothing, share=share, tiles=Tiles(32, 64, 4, 1))
    others = torch.arange(96) % 32 < 32 - share
    if share == 32:
        assert torch.equal(found.output, torch.zeros_like(query))
    else:
        expected = attention_reference(query, key[:, :, others], value[:, :, others])
        torch.testing.assert_close(found.output, expected, rtol=1e-5, atol=1e-5)


@needs_interpreter
def test_a_function_of_ones_own_takes_the_place_of_the_units():
    inputs = tensors(1, 2, 1, 40, 70, 16)
    usual = attention_with_ideas(*inputs, causal=True)
    assert torch.equal(usual.output, attention_with_ideas(*inputs, causal=True, exp2=by_the_unit, share=32).output)
    other = attention_with_ideas(*inputs, causal=True, share=32).output
    assert 1e-6 < (other - usual.output).abs().max() < 1e-3  # the polynomial of degree 3 is seen, and it is small
    x = torch.linspace(-20, 0, 1000)
    assert (exp2_polynomial_reference(x, 3) / torch.exp2(x) - 1).abs().max() < POLYNOMIAL_ERROR


# ----------------------------------------------------------------------------------------------- the order of the tiles


@needs_interpreter
def test_any_order_gives_the_same_bits():
    inputs = tensors(2, 2, 1, 70, 70, 16)
    usual = attention_with_ideas(*inputs, causal=True, tiles=SMALL)
    shuffled = longest_first(*inputs[:2], SMALL.query_rows)[
        torch.randperm(12, generator=torch.Generator().manual_seed(0))
    ]
    found = attention_with_ideas(*inputs, causal=True, order=shuffled, tiles=SMALL)
    assert all(torch.equal(one, other) for one, other in zip(found, usual))


@needs_interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_kernel_of_the_copy_engine_takes_a_threshold_and_an_order(causal):
    query, key, value = tensors(2, 4, 2, 33, 130, 16)
    options = {"causal": causal, "tiles": SMALL, "return_lse": True}
    usual = flash_attention_tma(query, key, value, **options)
    order = longest_first(query, key, SMALL.query_rows)
    assert all(map(torch.equal, usual, flash_attention_tma(query, key, value, order=order.flip(0), **options)))
    lazy = flash_attention_tma(query, key, value, threshold=4.0, order=order, **options)
    for found, right in zip(lazy, usual):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert not torch.equal(lazy[0], usual[0])  # it was measured from another number
    with pytest.raises(ValueError, match="order is given and tiles is None"):
        flash_attention_tma(query, key, value, order=order)
    with pytest.raises(ValueError, match="threshold is 16.0"):
        flash_attention_tma(query, key, value, threshold=16.0)


def test_the_longest_tiles_of_all_heads_that_fit_come_first():
    query, key = torch.empty(2, 2, 70, 16), torch.empty(2, 1, 70, 16)
    assert longest_first(query, key, SMALL.query_rows)[:5].tolist() == [[0, 2], [1, 2], [2, 2], [3, 2], [0, 1]]
    long = torch.empty(1, 8, 2**21, 64, dtype=torch.float16, device="meta")  # 512 MiB of keys and values a head
    pairs = longest_first(long.new_empty(1, device="cpu").expand(1, 2, 2**12, 64), long, 2**11)
    assert pairs.tolist() == [[0, 1], [0, 0], [1, 1], [1, 0]]


def without(order, number):
    return torch.cat([order[:number], order[number + 1 :], order[:1]])


@needs_interpreter
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda order: without(order, 3), "each tile of each head once; about head"),
        (lambda order: torch.where(order == 2, 3, order), "each tile of each head once"),
        (lambda order: order - 1, "each tile of each head once; about head 0, tile 0"),
        (lambda order: order[1:], r"order is torch.int32 \[5, 2\] on cpu; it must be torch.int32 \[6, 2\]"),
        (lambda order: order.long(), "torch.int64"),
        (lambda order: order.T.contiguous().T, "must be contiguous"),
        (lambda order: order.tolist(), "order is a list"),
    ],
)
def test_an_order_that_is_none_is_refused(change, words):
    inputs = tensors(1, 2, 1, 70, 70, 16)
    with pytest.raises(ValueError, match=words):
        attention_with_ideas(*inputs, order=change(longest_first(*inputs[:2], SMALL.query_rows)), tiles=SMALL)


@needs_interpreter
@pytest.mark.parametrize(
    "options, words",
    [
        ({"threshold": -1.0}, "threshold is -1.0; it must be from 0 to 15"),
        ({"threshold": 15.5}, "threshold is 15.5"),
        ({"threshold": math.nan}, "threshold is nan"),
        ({"share": 33}, "share is 33"),
        ({"share": 0.25}, "share is 0.25"),
        ({"share": 8, "tiles": Tiles(32, 16, 4, 1)}, "share is 8, and tiles have 16 keys"),
        ({"scale": 0.0}, "scale is 0.0"),
    ],
)
def test_bad_options_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        attention_with_ideas(*tensors(1, 1, 1, 8, 8, 16), **options)


@needs_interpreter
def test_the_tiles_of_the_interpreter_are_right():
    query, key, value = tensors(1, 1, 1, 70, 130, 32)
    found = attention_with_ideas(query, key, value, causal=True, threshold=8.0, share=8)
    meant = attention_with_ideas_reference(query, key, value, default_tiles(query), causal=True, threshold=8.0)
    torch.testing.assert_close(found.output, meant.output, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.rescales, meant.rescales)


# ----------------------------------------------------------------------------------------------------- the machine code


def operations(request):
    (view,) = compile_many([{**request, "want_sass": True}])
    found = re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", view.sass)
    return {name: found.count(name) for name in ("HGMMA", "MUFU", "FMUL", "FFMA", "FMNMX")}


def without_a_mask(case):
    """The request of a case for full attention, without window or sink."""
    given = {name: None for name in ("keys_before", "keys_after", "sink_pointer") if name in case.signature}
    signature = {name: kind for name, kind in case.signature.items() if name not in given}
    return {**case.requests()[0], "signature": signature, "constexprs": {**case.constexprs, **given}}


def test_what_is_off_leaves_nothing_behind_and_a_share_takes_a_quarter_of_the_exponentials():
    usual = operations(without_a_mask(flash.compile_case(90, 128, torch.bfloat16)))
    off, share = (
        operations(without_a_mask(ideas.compile_case(90, 128, torch.bfloat16, options)))
        for options in ({}, {"share": 8})
    )
    assert off == usual
    weights = 2 * 64 * 64 // 128  # of a thread, in the loop and in the last block
    assert off["MUFU"] - share["MUFU"] == weights // 4
