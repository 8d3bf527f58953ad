"""Attention with FlashAttention-4's ideas on a GPU, where the exponentials and the branch are the machine's own."""

import pytest
import torch
import triton
import triton.language as tl

from course_lib.hardware.device import supports_bfloat16
from course_lib.kernels.attention.flash import flash_attention
from course_lib.kernels.attention.flash_tma import flash_attention_tma, tma_takes
from course_lib.kernels.attention.ideas import (
    attention_with_ideas,
    attention_with_ideas_reference,
    default_tiles,
)
from course_lib.kernels.attention.order import longest_first
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.attention.tiles import LARGE_ARCHITECTURES
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.hopper.limits import hopper_refusal


def largest_error(dtype, value, exact) -> float:
    """Each weight is rounded to the dtype before it meets its value, and each output once more."""
    return max(2e-4, torch.finfo(dtype).eps / 2 * (value.abs().max() + exact.abs().max()).item())


@triton.jit
def by_the_unit(x):
    return tl.exp2(x)


def inputs(dtype, head_dim, lengths=(333, 517), spread=3.0):
    if dtype == torch.bfloat16 and not supports_bfloat16():
        pytest.skip("no bfloat16 here")
    shapes = [(4, lengths[0]), (2, lengths[1]), (2, lengths[1])]
    query, key, value = (torch.randn(2, *shape, head_dim, device="cuda") for shape in shapes)
    return (spread * query).to(dtype), key.to(dtype), value.to(dtype)


KINDS = [(dtype, head_dim) for dtype in (torch.float16, torch.bfloat16) for head_dim in (64, 80, 128)]
# Few, since each is another kernel for the compiler: what each idea does alone, the interpreter's tests say.
IDEAS = [{}, {"threshold": 8.0}, {"threshold": 8.0, "share": 8, "ordered": True}, {"share": 32}]


@pytest.mark.parametrize("dtype, head_dim", [*KINDS, (torch.float32, 64)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_idea_gives_attention(causal, dtype, head_dim):
    query, key, value = inputs(dtype, head_dim)
    wide = [tensor.double() for tensor in (query, key, value)]
    tiles = default_tiles(query)
    for options in IDEAS:
        threshold, ordered = options.get("threshold", 0.0), options.get("ordered", False)
        meant = attention_with_ideas_reference(*wide, tiles, causal=causal, threshold=threshold)
        order = longest_first(query, key, tiles.query_rows) if ordered else None
        options = {name: given for name, given in options.items() if name != "ordered"}
        found = attention_with_ideas(query, key, value, causal=causal, tiles=tiles, order=order, **options)
        assert (found.output.double() - meant.output).abs().max() < largest_error(dtype, value, meant.output)
        torch.testing.assert_close(found.lse.double(), meant.lse, rtol=1e-4, atol=1e-3)
        # A score that exceeds its reference by the threshold, but for a rounding, may count or not.
        assert (found.rescales - meant.rescales).abs().max() <= 1
        assert (found.rescales != meant.rescales).float().mean() < 0.05


def test_with_no_idea_it_is_flash_attention_and_the_units_function_is_no_idea():
    query, key, value = inputs(torch.float16, 128)
    tiles = default_tiles(query)
    usual = flash_attention(query, key, value, causal=True, tiles=tiles)
    for options in ({"counted": False}, {"exp2": by_the_unit, "share": 32}):
        found = attention_with_ideas(query, key, value, causal=True, tiles=tiles, **options)
        assert (found.output - usual).abs().max() < 1e-3


@pytest.mark.parametrize("dtype, head_dim", [(torch.float16, 64), (torch.bfloat16, 128)], ids=str)
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 100}], ids=str)
def test_the_kernels_for_hopper_take_a_threshold_and_an_order(mask, head_dim, dtype):
    """With scores that exceed the threshold now and then, in rows that a window hides from the first blocks, too."""
    query, key, value = inputs(dtype, head_dim, (700, 900))
    wide = attention_reference(*(tensor.double() for tensor in (query, key, value)), return_lse=True, **mask)
    runs = []
    if architecture_of(query.device) in LARGE_ARCHITECTURES and tma_takes(query, key, value):
        tiles = default_tiles(query)
        options = {"order": longest_first(query, key, tiles.query_rows), "tiles": tiles, "return_lse": True, **mask}
        runs = [flash_attention_tma(query, key, value, threshold=threshold, **options) for threshold in (0.0, 8.0)]
    if hopper_refusal(query, key, value) is None:
        from course_lib.kernels.hopper.flash import flash_attention_hopper

        for ideas in ({"threshold": 3.0}, {"heads_at_once": 1}):
            runs.append(flash_attention_hopper(query, key, value, return_lse=True, **mask, **ideas))
    if not runs:
        pytest.skip("no copy engine here")
    for output, lse in runs:
        assert (output.double() - wide[0]).abs().max() < largest_error(dtype, value, wide[0])
        torch.testing.assert_close(lse.double(), wide[1], rtol=1e-4, atol=1e-3)
