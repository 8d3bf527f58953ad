"""The backward pass on Hopper as far as it can be held without one: its order of work, its refusals, its machine code."""

import random
import re
import types

import pytest
import torch

from course_lib.hardware.compiler.views import compile_many
from course_lib.hardware.device import interpreting
from course_lib.kernels.hopper import backward, backward_parts
from course_lib.kernels.hopper.backward_limits import shape_refusal
from course_lib.kernels.hopper.backward_sums import round_query_gradients

needs_interpreter = pytest.mark.skipif(not interpreting(), reason="about a machine on which kernels are interpreted")
TILE_KEYS = backward.TILE_KEYS.value


# ----------------------------------------------------------------------------------------------- the order of work


@pytest.fixture
def on_numbers(monkeypatch):
    """The kernel's own functions of numbers, run by Python."""
    arithmetic = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b), minimum=min, maximum=max)
    monkeypatch.setattr(backward_parts, "gl", arithmetic)
    return backward_parts.keys_of.fn, backward_parts.query_blocks.fn


@pytest.mark.parametrize(("heads", "heads_at_once", "key_length"), [(1, 1, 1), (7, 3, 1000), (4, 4, 129), (5, 1, 128)])
def test_a_tile_comes_after_all_that_it_waits_for(on_numbers, heads, heads_at_once, key_length):
    """A program holds its tile until it is done. One that waited for a tile of a later ticket could wait for ever."""
    keys_of, _query_blocks = on_numbers
    tiles = -(-key_length // TILE_KEYS)
    order = [keys_of(ticket, heads, key_length, heads_at_once, TILE_KEYS) for ticket in range(heads * tiles)]
    assert sorted(order) == [(head, tile) for head in range(heads) for tile in range(tiles)]
    for head in range(heads):
        assert [tile for of, tile in order if of == head] == list(range(tiles))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_m", [64, 128])
def test_blocks_of_queries_are_those_that_see_the_keys(on_numbers, block_m, causal):
    """No pair is left out, no mask is left out, and each block's tiles are the first ones: turns count without gaps."""
    _keys_of, query_blocks = on_numbers
    chance = random.Random(block_m)
    for _ in range(60):
        query_length, key_length = chance.randint(1, 700), chance.randint(1, 700)
        offset = key_length - query_length
        added = dict.fromkeys(range(-(-query_length // block_m)), 0)
        for tile in range(-(-key_length // TILE_KEYS)):
            begin, whole_begin, end = query_blocks(tile, query_length, key_length, causal, TILE_KEYS, block_m)
            keys = range(tile * TILE_KEYS, (tile + 1) * TILE_KEYS)
            for block in range(len(added)):
                queries = range(block * block_m, min(query_length, (block + 1) * block_m))
                sees = [key < key_length and (not causal or key <= q + offset) for q in queries for key in keys]
                assert begin <= block < end or not any(sees)
                assert not max(begin, whole_begin) <= block < end or all(sees)
            for block in range(begin, end):
                assert added[block] == tile
                added[block] += 1
        assert all(added.values())


# ---------------------------------------------------------------------------------------------- the order of the sums


@needs_interpreter
@pytest.mark.parametrize(("head_dim", "block_m"), [(128, 64), (96, 64), (64, 128), (40, 128)])
@pytest.mark.parametrize("query_length", [64, 200])
def test_sums_in_the_order_of_threads_become_rows(head_dim, block_m, query_length):
    """Row 16 w + 8 h + r and column 16 b + 8 a + 2 t + c stand at place h, b, w, r, t, a, c: see `write_by_thread`."""
    blocks, width = -(-query_length // block_m), 64 * 128 // block_m
    sums = torch.randn(2, 3, blocks * block_m, width)
    by_block = sums.view(2, 3, blocks, block_m // 64, 64, width // 64, 64)  # one of the two inner counts is 2
    parts = by_block.transpose(-3, -2).reshape(-1, 4, 2, 8, 4, 2, 4, 2)  # w, h, r, b, a, t, c
    parts = parts.permute(0, 2, 4, 1, 3, 6, 5, 7).reshape(-1, 64 * 64)
    like = torch.empty(2, 3, query_length, head_dim, dtype=torch.float16)
    rounded = round_query_gradients(parts, like, 0.5, block_m)
    assert torch.equal(rounded, (0.5 * sums[:, :, :query_length, :head_dim]).half())


# --------------------------------------------------------------------------------------------------------- refusals


def inputs(*, length=40, head_dim=64, dtype=torch.float16):
    query, key, value, output, gradient = (torch.randn(1, 2, length, head_dim).to(dtype) for _ in range(5))
    return query, key, value, output, torch.randn(1, 2, length), gradient


def test_wide_heads_and_windows_are_refused_by_name():
    assert shape_refusal(torch.empty(1, 1, 1, 128), None) is None
    error, reason = shape_refusal(torch.empty(1, 1, 1, 200), None)
    assert error is ValueError and "head dimension 200" in reason and "128" in reason
    error, reason = shape_refusal(torch.empty(1, 1, 1, 64), 77)
    assert error is ValueError and "window is 77" in reason


@needs_interpreter
def test_without_a_gpu_the_kernel_says_what_takes_its_place():
    with pytest.raises(RuntimeError, match="interpreter.*flash_attention_backward takes these inputs"):
        backward.flash_attention_backward_hopper(*inputs())


def test_what_does_not_fit_the_forward_is_named():
    query, key, value, output, lse, gradient = inputs()
    with pytest.raises(ValueError, match="output_gradient has shape"):
        backward.flash_attention_backward_hopper(query, key, value, output, lse, gradient[:, :, 1:])
    with pytest.raises(ValueError, match="log_sum_exp has dtype"):
        backward.flash_attention_backward_hopper(query, key, value, output, lse.double(), gradient)
    with pytest.raises(ValueError, match="scale"):
        backward.flash_attention_backward_hopper(query, key, value, output, lse, gradient, scale=-1.0)


def test_a_gradient_that_the_copy_engine_cannot_read_is_copied_and_no_other():
    usual = torch.randn(2, 3, 40, 64).half()
    assert backward.as_the_copy_engine_takes_it(usual) is usual
    packed = usual.transpose(1, 2)  # heads after the length in memory
    assert backward.as_the_copy_engine_takes_it(packed) is packed
    shifted = torch.empty(usual.numel() + 1).half()[1:].view(usual.shape).copy_(usual)
    of_a_sum = torch.ones(1).half().expand(usual.shape)
    for awkward in (shifted, of_a_sum, usual.transpose(2, 3), usual[..., ::2]):
        copied = backward.as_the_copy_engine_takes_it(awkward)
        assert torch.equal(copied, awkward) and copied.is_contiguous() and copied.data_ptr() % 16 == 0


# ------------------------------------------------------------------------------------------------------ machine code


@pytest.mark.slow
def test_registers_move_and_products_overlap():
    """Too few registers, or a branch around a product, and ptxas waits for each product before it begins the next."""
    cases = {"128": backward.compile_case(128, "bf16"), "64": backward.compile_case(64, "bf16", causal=True)}
    views = compile_many([{**case.requests()[0], "want_sass": True} for case in cases.values()])
    for name, view in zip(cases, views):
        code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?\s*(.*?)\s*;", view.sass, re.MULTILINE)
        kinds = [line.split(" ")[0] for line in code]
        products, waits = kinds.count("HGMMA") + sum("HGMMA." in kind for kind in kinds), 0
        waits = sum(kind.startswith("WARPGROUP.DEPBAR") for kind in kinds)
        assert products > 150 and waits < products / 4, (name, products, waits)
        granted = {int(line.split(" ")[-1], 16) for line in code if line.startswith("USETMAXREG")}
        assert {240, 24} <= granted, (name, granted)
        assert sum(kind.startswith("UTMAREDG") for kind in kinds) == 2, name  # one for each messenger


@pytest.mark.slow
def test_nothing_is_spilled_between_the_products_of_a_whole_block():
    """Among the loops over blocks, one goes without a single access to local memory: that of blocks without a mask."""
    view = compile_many([{**backward.compile_case(128, "bf16").requests()[0], "want_sass": True}])[0]
    loops = [body for body in loops_of(view.sass) if body.count("HGMMA") == 32]
    assert len(loops) >= 2
    assert any("LDL" not in body and "STL" not in body for body in loops)


def loops_of(sass: str) -> list[str]:
    """The text between each label and a branch back to it."""
    lines = sass.splitlines()
    labels = {line.split(":")[0].strip(): number for number, line in enumerate(lines) if re.match(r"\.L\w+:", line)}
    jumps = [(labels.get(m.group(1)), number) for number, line in enumerate(lines)
             if (m := re.search(r"BRA `\((\.L\w+)\)", line))]  # fmt: skip
    return ["\n".join(lines[begin:end]) for begin, end in jumps if begin is not None and begin < end]
