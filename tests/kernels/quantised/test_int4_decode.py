"""Decode over INT4 caches against float64 of what codes and windows stand for: any pages, lengths, groups, splits."""

import math
from random import Random

import pytest
import torch
import triton
import triton.language as tl

from course_lib.hardware.device import interpreting
from course_lib.kernels.decode.workspace import decode_workspace
from course_lib.kernels.quantised.formats import (
    GROUP,
    empty_int4_cache,
    restored_int4_keys,
    restored_int4_values,
    unpack_int4,
)
from course_lib.kernels.quantised.int4_decode import int4_decode_attention, paged_int4_decode_attention
from course_lib.kernels.quantised.parts import (
    EACH_ITS_OWN,
    HIGH_ASSEMBLY,
    HIGH_HALF,
    LOW_ASSEMBLY,
    LOW_HALF,
    OWN_ASSEMBLY,
    int4_numbers,
)
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


@pytest.mark.parametrize("length", [256, 320, 449, 640, 700])
@pytest.mark.parametrize("splits", [1, 2])
def test_warps_take_blocks_in_turns_and_none_that_is_not_there(length, splits):
    """More blocks than a step has warps, and a last step that is not full: a block taken twice would count twice."""
    lengths = torch.tensor([length, 65])
    query = some(2, 3, 64, seed=length, dtype=torch.float16)
    tables, pages = shuffled_tables(Random(length), lengths, 12, GROUP)
    cache = filled(lengths, 1, 64, tables=tables, pages=pages)
    assert_right(query, cache, lengths, tables, splits=splits)


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
def numbers_kernel(words, scales, middles, numbers, HALVES: tl.constexpr):
    """scales, middles [2, 65536]: pairs of float16, for the first two codes of each word and for the others."""
    place = tl.arange(0, 65536)
    pairs = (tl.load(scales + place), tl.load(scales + 65536 + place))
    middle_pairs = (tl.load(middles + place), tl.load(middles + 65536 + place))
    found = int4_numbers(tl.load(words + place), pairs, middle_pairs, HALVES, tl.float16, False)
    for code in tl.static_range(4):
        tl.store(numbers + 4 * place + code, found[code])


def assembled(text, words, scales, middles):
    """What the assembly leaves in $0 to $3, for int32 words of two int16, and pairs [2, words] of scales and middles.

    Both words of a register are the same here, and so are their scales.
    """
    registers = {"$4": words} | {f"${5 + k}": scales[k // 2] for k in range(4)}
    registers |= {f"${9 + k}": middles[k // 2] for k in range(4)}

    def value(name):
        return torch.tensor(int(name, 16)).int() if name.startswith("0x") else registers[name]

    def halves(name):
        bits = value(name)
        if bits.dtype == torch.float16:
            return bits.double()
        return (bits & 0xFFFF).to(torch.int32).short().view(torch.float16).double()

    for line in text.value.splitlines()[2:-1]:
        instruction, operands = line.strip().rstrip(";").split(" ", 1)
        target, *others = [operand.strip() for operand in operands.split(",")]
        if instruction == "mov.b32":
            constant = int(others[0], 16)
            assert constant >> 16 == constant & 0xFFFF
            registers[target] = torch.tensor([constant & 0xFFFF])
        elif instruction == "shr.u32":
            registers[target] = (value(others[0]).long() & 0xFFFFFFFF) >> int(others[1])
        elif instruction == "prmt.b32":
            assert others[2] in ("0x5410", "0x7632")
            registers[target] = value(others[0]) >> (16 if others[2] == "0x7632" else 0)
        elif instruction == "lop3.b32":
            assert others[3] == "0x6A"  # (a & b) ^ c
            mask, flipped = int(others[1], 16), int(others[2], 16)
            registers[target] = (value(others[0]).long() & mask) ^ flipped
        elif instruction == "mul.rn.f16x2":
            registers[target] = (halves(others[0]) * halves(others[1])).half()
        else:
            assert instruction == "fma.rn.f16x2"
            factor, other, addend = (halves(name) for name in others)
            registers[target] = (factor * other + addend).half()
    return [registers[f"${k}"] for k in range(4)]


@pytest.mark.parametrize("halves", [LOW_HALF, HIGH_HALF, EACH_ITS_OWN], ids=["low", "high", "own"])
def test_every_word_becomes_its_four_numbers_in_both_ways(halves):
    """int4_numbers in the interpreter, and its assembly, followed line by line, in the low half of a register."""
    words = torch.arange(65536).to(torch.int32).short()
    scales, middles = (some(2, 65536, 2, seed=k).abs().half() for k in range(2))
    pairs = [part.view(torch.int32).squeeze(-1).contiguous() for part in (scales, middles)]
    numbers = torch.empty(65536, 4, dtype=torch.float16)
    numbers_kernel[(1,)](words, *pairs, numbers, halves.value)
    codes = unpack_int4(words.view(torch.uint8).view(-1, 2)).double()
    if halves == EACH_ITS_OWN:
        scale, middle = (torch.cat([*part], dim=1).double() for part in (scales, middles))  # [words, 4]
    else:
        scale, middle = (part[0, :, halves.value, None].double() for part in (scales, middles))
    right = (codes * 0.5 * scale + middle * 0.5).half()
    assert torch.equal(numbers, right)
    text = (LOW_ASSEMBLY, HIGH_ASSEMBLY, OWN_ASSEMBLY)[halves.value]
    assert torch.equal(torch.stack(assembled(text, words.int(), *pairs), dim=1), right)


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
