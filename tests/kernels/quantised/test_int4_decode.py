"""Decode over INT4 caches against float64 of what codes and windows stand for: any pages, lengths, groups, splits."""

import math
from random import Random

import pytest
import torch
import triton
import triton.language as tl

from course_lib.hardware.device import interpreting
from course_lib.kernels.decode.workspace import decode_workspace
from course_lib.kernels.quantised import parts
from course_lib.kernels.quantised.formats import (
    GROUP,
    empty_int4_cache,
    restored_int4_keys,
    restored_int4_values,
    unpack_int4,
)
from course_lib.kernels.quantised.int4_decode import int4_decode_attention, paged_int4_decode_attention
from course_lib.kernels.quantised.parts import int4_numbers
from course_lib.kernels.quantised.reference import append_to_int4_reference, int4_decode_reference
from tests.kernels.decode.cases import assert_close_to_float64, odd_strides, plain_results
from tests.kernels.quantised.cases import folded_results, poison_int4, shuffled_tables, some, with_outliers

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


def filled(lengths, key_heads, head_dim, seed=0, tables=None, pages=None, capacity=192, draw_rows=with_outliers):
    """A cache to which that many tokens were appended, poison wherever no sequence has a token."""
    where = {"capacity": capacity} if tables is None else {"pages": pages}
    cache = empty_int4_cache(len(lengths), key_heads, head_dim, **where)
    poison_int4(cache)
    for sequence, length in enumerate(lengths.tolist()):
        rows = [draw_rows(some(1, key_heads, length, head_dim, seed=seed + k)).half() for k in range(2)]
        alone = cache._replace(
            key_window=cache.key_window[sequence : sequence + 1],
            value_window=cache.value_window[sequence : sequence + 1],
        )
        if tables is None:
            alone = alone.quantised(lambda part, here=sequence: part[here : here + 1])
        table = None if tables is None else tables[sequence : sequence + 1]
        append_to_int4_reference(*rows, alone, torch.tensor([0]), block_tables=table)
    return cache


def assert_right(query, cache, lengths, tables=None, case="", **options):
    """Against float64, and no further off than plain PyTorch is on what codes stand for, or with the scales folded."""
    if tables is None:
        ours = int4_decode_attention(query, cache, lengths, return_lse=True, **options)
    else:
        ours = paged_int4_decode_attention(query, cache, tables, lengths, return_lse=True, **options)
    meaning = {"block_tables": tables, "scale": options.get("scale")}
    right = int4_decode_reference(query.double(), cache, lengths, return_lse=True, **meaning)
    theirs = plain_results(lambda query, lengths, **more: int4_decode_reference(query, cache, lengths, **more), query,
                           lengths, **meaning)  # fmt: skip
    factor = options.get("scale") or 1 / math.sqrt(query.shape[-1])
    theirs += folded_results(query, cache, lengths, tables, factor)
    largest = max(
        torch.nan_to_num(part.double(), posinf=0.0).norm(dim=-1).max().item()
        for part in (restored_int4_keys(cache), cache.key_window)
    )
    assert_close_to_float64(ours, right, theirs, case, factor * query.double().norm(dim=-1).max().item() * largest)
    return ours


@pytest.mark.parametrize("seed", range(24))
def test_any_pages_lengths_groups_and_splits_are_right(seed):
    draw = Random(seed)
    batch, key_heads, group = draw.choice([(1, 1, 1), (2, 1, 3), (1, 2, 4), (3, 1, 8), (2, 1, 16), (1, 1, 40)])
    head_dim, capacity = (64, 128, 256)[seed % 3], draw.randint(1, 200)
    lengths = torch.tensor([draw.choice([0, 1, capacity, draw.randint(0, capacity)]) for _ in range(batch)])
    lengths = lengths.to(draw.choice([torch.int32, torch.int64]))
    tables, pages = shuffled_tables(draw, lengths, -(-capacity // GROUP) + 1, GROUP)
    paged = draw.random() < 0.7
    cache = filled(lengths, key_heads, head_dim, seed, tables if paged else None, pages, capacity=256)
    query = some(batch, key_heads * group, head_dim, seed=seed, dtype=draw.choice([torch.float32, torch.float16]))
    if draw.random() < 0.5:
        query = odd_strides(query)
    splits, scale = draw.choice([None, 1, 2, 5]), draw.choice([None, 0.05])
    assert_right(query, cache, lengths, tables if paged else None, splits=splits, scale=scale,
                 case=f"{seed=} {paged=} {group=} {head_dim=} {lengths=} {splits=} {query.dtype=}")  # fmt: skip


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 127, 128, 129, 192])
@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_around_groups_are_right(length, splits):
    """The window half full, empty, with one token; splits behind the last, that must not count it once more."""
    lengths = torch.tensor([length, 0])
    query = some(2, 2, 64, seed=length)
    output, lse = assert_right(query, filled(lengths, 1, 64), lengths, splits=splits)
    assert (output[1] == 0).all() and (lse[1] == -math.inf).all()


def test_pages_give_the_bits_of_a_contiguous_cache():
    lengths, tables = torch.tensor([150, 64]), torch.tensor([[4, 1, 2], [0, 3, 5]])
    query = some(2, 8, 128, dtype=torch.float16)
    contiguous = int4_decode_attention(query, filled(lengths, 2, 128), lengths, splits=2)
    pages = filled(lengths, 2, 128, tables=tables, pages=6)
    assert torch.equal(paged_int4_decode_attention(query, pages, tables, lengths, splits=2), contiguous)


def test_groups_of_equal_numbers_are_right():
    """Their scale is 0, and all that they are is the middle."""
    lengths = torch.tensor([130])
    cache = filled(lengths, 1, 64, draw_rows=lambda rows: torch.full_like(rows, 0.75))
    assert (cache.key_scales[0, 0, :2] == 0).all() and (cache.value_scales[0, 0, :2] == 0).all()
    output, _ = assert_right(some(1, 4, 64), cache, lengths, splits=2)
    assert torch.allclose(output, torch.full_like(output, 0.75), atol=1e-6)


def test_the_largest_scale_does_not_overflow_in_float16():
    lengths = torch.tensor([100])
    cache = filled(lengths, 1, 64, draw_rows=lambda rows: rows.sign() * 60000)
    cache.key_scales.zero_()
    cache.key_middles.zero_()
    cache.key_window.zero_()
    query = some(1, 4, 64, dtype=torch.float16)
    output = int4_decode_attention(query, cache, lengths)
    right = int4_decode_reference(query.double(), cache, lengths)
    assert output.isfinite().all()
    assert (output.double() - right).abs().max() <= 60000 * 2**-10


@triton.jit
def numbers_kernel(words, scales, middles, numbers):
    place = tl.arange(0, 65536)
    scale, middle = tl.load(scales + place), tl.load(middles + place)
    first, second, third, fourth = int4_numbers(
        tl.load(words + place), (scale, scale, scale, scale), (middle, middle, middle, middle), tl.float16, False
    )
    tl.store(numbers + 4 * place, first)
    tl.store(numbers + 4 * place + 1, second)
    tl.store(numbers + 4 * place + 2, third)
    tl.store(numbers + 4 * place + 3, fourth)


def assembled(words, scales, middles):
    """What INT4_ASSEMBLY leaves in $0 to $3, for int32 words of two int16, and scales and middles of float16."""
    registers = {"$4": words} | {f"${5 + k}": scales for k in range(4)} | {f"${9 + k}": middles for k in range(4)}

    def value(name):
        return torch.tensor(int(name, 16)).int() if name.startswith("0x") else registers[name]

    def halves(name):
        bits = value(name)
        if bits.dtype == torch.float16:
            return bits.double()
        if bits.dim() == 0:  # a constant
            bits = torch.tensor(int(bits) & 0xFFFF)
        return (bits & 0xFFFF).to(torch.int32).short().view(torch.float16).double()

    constants = {}
    for line in parts.INT4_ASSEMBLY.value.splitlines()[2:-1]:
        instruction, operands = line.strip().rstrip(";").split(" ", 1)
        target, *others = [operand.strip() for operand in operands.split(",")]
        if instruction == "mov.b32":
            constants[target] = int(others[0], 16)
            assert constants[target] >> 16 == constants[target] & 0xFFFF
            registers[target] = torch.tensor(constants[target] & 0xFFFF)
        elif instruction == "shr.u32":
            registers[target] = (value(others[0]).long() & 0xFFFFFFFF) >> int(others[1])
        elif instruction == "lop3.b32":
            assert others[3] == "0x6A"  # (a & b) ^ c
            mask, flipped = int(others[1], 16), int(others[2], 16)
            registers[target] = (value(others[0]).long() & mask) ^ flipped
        else:
            assert instruction == "fma.rn.f16x2"
            factor, other, addend = (halves(name) for name in others)
            registers[target] = (factor * other + addend).half()
    return [registers[f"${k}"] for k in range(4)]


def test_every_word_becomes_its_four_numbers_in_both_ways():
    """int4_numbers in the interpreter, and its assembly, followed line by line, in the low half of a register."""
    words = torch.arange(65536).to(torch.int32).short()
    scales, middles = (some(65536, seed=k).abs().half() for k in range(2))
    numbers = torch.empty(65536, 4, dtype=torch.float16)
    numbers_kernel[(1,)](words, scales, middles, numbers)
    codes = unpack_int4(words.view(torch.uint8).view(-1, 2)).double()
    right = (codes * 0.5 * scales.double()[:, None] + middles.double()[:, None]).half()
    assert torch.equal(numbers, right)
    assert torch.equal(torch.stack(assembled(words.int(), scales, middles), dim=1), right)


def test_the_tolerance_sees_a_key_a_window_and_a_middle_that_are_lost():
    lengths, query = torch.tensor([150]), some(1, 4, 64)
    cache = filled(lengths, 1, 64)
    right = int4_decode_reference(query.double(), cache, lengths, return_lse=True)
    theirs = plain_results(lambda query, lengths, **more: int4_decode_reference(query, cache, lengths, **more), query,
                           lengths)  # fmt: skip
    assert_close_to_float64([part.float() for part in right], right, theirs)
    for wrong, count in (
        (cache, 149),
        (cache, 128),
        (cache._replace(value_middles=cache.value_middles * 0.99), 150),
        (cache._replace(key_middles=cache.key_middles * 0.99), 150),
    ):
        lost = int4_decode_reference(query.double(), wrong, torch.tensor([count]), return_lse=True)
        with pytest.raises(AssertionError):
            assert_close_to_float64([part.float() for part in lost], right, theirs)


def test_int4_is_close_to_what_was_appended_though_channels_stand_out():
    """By channel the outliers of keys cost nothing: the same groups laid along a token are six times as far off."""
    keys = with_outliers(some(1, 1, 128, 64))
    cache = filled(torch.tensor([128]), 1, 64)
    by_channel = (restored_int4_keys(cache)[0, 0, :2].flatten(0, 1) - keys[0, 0].half()).norm()
    by_token = (restored_int4_values(cache._replace(value_codes=cache.value_codes))[0, 0, :2].flatten(0, 1)
                - with_outliers(some(1, 1, 128, 64, seed=1))[0, 0].half()).norm()  # fmt: skip
    assert by_token > 1.5 * by_channel


def test_a_given_output_and_workspace_are_used():
    lengths, query = torch.tensor([150, 7]), some(2, 4, 64)
    cache = filled(lengths, 1, 64)
    output, workspace = torch.full_like(query, math.nan), decode_workspace(2, 4, 64, 3, device="cpu")
    result = int4_decode_attention(query, cache, lengths, output=output, workspace=workspace)
    assert result.data_ptr() == output.data_ptr()
    assert torch.equal(result, int4_decode_attention(query, cache, lengths, splits=3))


def good_inputs():
    return {"query": some(2, 4, 64), "cache": empty_int4_cache(2, 2, 64, pages=5),
            "block_tables": torch.tensor([[4, 1], [0, 3]]), "lengths": torch.tensor([128, 3])}  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        ({"query": torch.zeros(2, 4, 96)}, ["query", "head dimension 96", "64, 128, 256"]),
        ({"query": torch.zeros(2, 3, 64)}, ["query", "3 heads", "2"]),
        ({"query": torch.zeros(2, 4, 64).bfloat16()}, ["query", "bfloat16", "float16"]),
        ({"query": torch.zeros(3, 4, 64)}, ["cache.key_window", "(2, 2, 64, 64)", "(3, 2, 64, 64)"]),
        ({"cache": empty_int4_cache(2, 2, 64, capacity=128)}, ["cache.key_codes", "[pages, key_heads, 64"]),
        (
            {"cache": empty_int4_cache(2, 2, 64, pages=5, dtype=torch.float32)},
            ["cache.key_window", "float32", "float16"],
        ),
        ({"block_tables": torch.tensor([[4, 5], [0, 3]])}, ["block_tables[0, 1]", "is 5", "0 to 4"]),
        ({"lengths": torch.tensor([129, 3])}, ["lengths[0]", "129", "2 pages of 64"]),
        ({"lengths": torch.tensor([-1, 3])}, ["lengths[0]", "-1"]),
        ({"scale": math.inf}, ["scale", "inf", "finite"]),
        ({"splits": 0}, ["splits", "0", "at least 1"]),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, dict) else "",
)
def test_bad_input_is_refused_with_the_argument_its_value_and_what_is_allowed(change, words):
    paged_int4_decode_attention(**good_inputs())
    with pytest.raises(ValueError) as refusal:
        paged_int4_decode_attention(**(good_inputs() | change))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
