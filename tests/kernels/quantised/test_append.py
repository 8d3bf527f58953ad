"""Appending to caches in fewer bits: bit for bit what plain PyTorch makes, and nothing else touched."""

import math
from random import Random

import pytest
import torch
import triton
import triton.language as tl

from course_lib.hardware.device import interpreting
from course_lib.kernels.quantised.append import (
    append_to_fp8_cache,
    append_to_fp8_pages,
    append_to_int4_cache,
    append_to_int4_pages,
)
from course_lib.kernels.quantised.formats import GROUP, Int4Cache, empty_int4_cache
from course_lib.kernels.quantised.parts import bounded, e4m3_bytes
from course_lib.kernels.quantised.reference import (
    append_to_fp8_cache_reference,
    append_to_fp8_pages_reference,
    append_to_int4_reference,
)
from tests.kernels.quantised.cases import some, with_outliers

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


# ------------------------------------------------------------------------------------------------------------- e4m3


@triton.jit
def code_kernel(numbers, codes, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(codes + place, e4m3_bytes(bounded(tl.load(numbers + place), 448.0)))


def codes_of(numbers):
    codes = torch.empty(len(numbers), dtype=torch.uint8)
    code_kernel[(1,)](numbers, codes, COUNT=len(numbers))
    return codes


def test_codes_are_those_of_pytorch_for_every_float16_up_to_448_their_ties_among_them():
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    numbers = torch.where(numbers.abs() <= 448, numbers, 0.0)
    assert torch.equal(codes_of(numbers), numbers.to(torch.float8_e4m3fn).view(torch.uint8))


def test_codes_just_beside_a_tie_go_to_their_own_side():
    held = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (held[:-1] + held[1:]) / 2
    beside = torch.cat([torch.nextafter(ties, ties * 0), torch.nextafter(ties, ties * 2), ties])
    numbers = torch.cat([beside, -beside, torch.zeros(1024 - 6 * 125)])
    assert torch.equal(codes_of(numbers), numbers.to(torch.float8_e4m3fn).view(torch.uint8))


def test_beyond_448_saturates_and_nan_is_0():
    numbers = torch.tensor([448.1, 465.0, 1e30, math.inf, -480.0, -math.inf, math.nan, -0.0])
    assert codes_of(numbers).view(torch.float8_e4m3fn).tolist() == [448, 448, 448, 448, -448, -448, 0, 0]


def fp8_scales(kind, blocks, heads, seed):
    shape = {"tensor": (), "head": (heads,), "block": (blocks, heads)}[kind]
    return 0.002 + 0.02 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["tensor", "head", "block"])
@pytest.mark.parametrize("tokens, head_dim", [(1, 64), (7, 128), (40, 80)])
def test_a_contiguous_e4m3_cache_gets_the_bytes_of_plain_pytorch(kind, tokens, head_dim):
    key, value = (with_outliers(some(2, 3, tokens, head_dim, seed=seed)).half() for seed in range(2))
    caches = [torch.full((2, 3, 50, head_dim), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(4)]
    options = {"key_scales": fp8_scales(kind, 2, 3, 0), "value_scales": fp8_scales(kind, 2, 3, 1)}
    positions = torch.tensor([0, 9])
    append_to_fp8_cache(key, value, *caches[:2], positions, **options)
    append_to_fp8_cache_reference(key, value, *caches[2:], positions, **options)
    for ours, right in zip(caches[:2], caches[2:]):
        assert torch.equal(ours.view(torch.uint8), right.view(torch.uint8))
        assert (ours.view(torch.uint8) == 0x7F).sum() == 2 * 3 * (50 - tokens) * head_dim


@pytest.mark.parametrize("kind", ["tensor", "head", "block"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_e4m3_pages_get_the_bytes_of_plain_pytorch(kind, page_size):
    key, value = (with_outliers(some(5, 2, 64, seed=seed)) for seed in range(2))
    pools = [torch.full((3, 2, page_size, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(4)]
    options = {"key_scales": fp8_scales(kind, 3, 2, 0), "value_scales": fp8_scales(kind, 3, 2, 1)}
    slots = torch.tensor([3 * page_size - 1, -1, 0, page_size, 7])
    append_to_fp8_pages(key, value, *pools[:2], slots, **options)
    append_to_fp8_pages_reference(key, value, *pools[2:], slots, **options)
    for ours, right in zip(pools[:2], pools[2:]):
        assert torch.equal(ours.view(torch.uint8), right.view(torch.uint8))


# ------------------------------------------------------------------------------------------------------------- INT4


def assert_same(ours: Int4Cache, right: Int4Cache, lengths):
    """All codes, scales and middles; of the windows what their sequences have there."""
    for name, mine, expected in zip(Int4Cache._fields[:6], ours, right):
        assert torch.equal(mine, expected), name
    for sequence, length in enumerate(lengths.tolist()):
        for mine, expected in zip(ours[6:], right[6:]):
            waiting = slice(0, length % GROUP)
            assert torch.equal(mine[sequence, :, waiting], expected[sequence, :, waiting]), (sequence, length)


@pytest.mark.parametrize("head_dim, paged", [(64, False), (128, True), (256, True)])
@pytest.mark.parametrize(
    "counts", [[1, 1, 61, 1, 1], [63, 1, 1], [64], [130], [30, 150, 1], [65, 63]], ids=lambda counts: f"{counts}"
)
def test_an_int4_cache_gets_the_bytes_of_plain_pytorch_in_any_pieces(counts, head_dim, paged):
    """The second sequence begins 17 tokens into a group."""
    where, tables = ({"pages": 9}, torch.tensor([[4, 1, 2, 8], [0, 3, 5, 7]])) if paged else ({"capacity": 256}, None)
    ours, right = (empty_int4_cache(2, 2, head_dim, **where) for _ in range(2))
    before = some(2, 2, 17, head_dim, seed=9).half()
    for cache in (ours, right):
        append_to_int4_reference(before, before, cache, torch.tensor([0, 0]), block_tables=tables)
    positions = torch.tensor([0, 17])
    for seed, count in enumerate(counts):
        key, value = (with_outliers(some(2, 2, count, head_dim, seed=2 * seed + k)).half() for k in range(2))
        append_to_int4_reference(key, value, right, positions, block_tables=tables)
        if paged:
            append_to_int4_pages(key, value, ours, tables, positions)
        else:
            append_to_int4_cache(key, value, ours, positions)
        positions = positions + count
        assert_same(ours, right, positions)


def test_groups_of_equal_numbers_and_the_widest_are_those_of_plain_pytorch():
    ours, right = (empty_int4_cache(1, 1, 64, capacity=64) for _ in range(2))
    key = torch.zeros(1, 1, 64, 64).half()
    key[..., 1], key[..., 2] = 3.0, -65504.0
    key[..., 3][..., ::2], key[..., 3][..., 1::2] = 65504.0, -65504.0
    key[..., 4] = torch.arange(64) * 6e-8  # float16 has no scale as small
    value = key.mT.contiguous()
    for cache, append in ((ours, append_to_int4_cache), (right, append_to_int4_reference)):
        append(key, value, cache, torch.tensor([0]))
    assert_same(ours, right, torch.tensor([64]))
    assert (ours.key_scales[0, 0, 0, :3] == 0).all() and ours.key_scales.isfinite().all()


def test_infinities_and_nan_that_nobody_looked_for_leave_finite_codes():
    ours = empty_int4_cache(1, 1, 64, capacity=64)
    bad = some(1, 1, 64, 64).half()
    bad[0, 0, 5, 6], bad[0, 0, 7, 8], bad[0, 0, 9, 10] = math.inf, -math.inf, math.nan
    append_to_int4_cache(bad, bad, ours, torch.tensor([0]), validate=False)
    assert all(part.isfinite().all() for part in (ours.key_scales, ours.key_middles, ours.value_middles))
    assert ours.value_scales[0, 0, 0, 9, 0] < 1  # the NaN counts as 0


def test_what_is_not_appended_to_is_not_touched():
    draw = Random(0)
    cache = empty_int4_cache(1, 2, 64, pages=4)
    for part in cache:
        part.fill_(77)
    append_to_int4_pages(some(1, 2, 3, 64).half(), some(1, 2, 3, 64).half(), cache,
                         torch.tensor([[2, 9]]), torch.tensor([draw.randint(5, 20)]), validate=False)  # fmt: skip
    for part in cache[:3]:
        assert (part == 77).all()
    for part in cache[3:6]:
        touched = (part != 77).flatten(3).any(dim=3)  # [pages, heads, tokens]
        assert touched.sum() == 2 * 3 and touched[2].sum() == 2 * 3


# ----------------------------------------------------------------------------------------------------------- refusals


def good_fp8():
    codes = torch.zeros(5, 2, 16, 64).to(torch.float8_e4m3fn)
    return {"key": some(3, 2, 64), "value": some(3, 2, 64), "key_pages": codes, "value_pages": codes.clone(),
            "slot_mapping": torch.tensor([0, -1, 79]), "key_scales": torch.ones(2),
            "value_scales": torch.ones(5, 2)}  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        ({"key_pages": torch.zeros(5, 2, 16, 64)}, ["key_pages", "float32", "float8_e4m3fn"]),
        ({"key": torch.zeros(3, 1, 64)}, ["value", "(3, 2, 64)", "(3, 1, 64)"]),
        ({"key": torch.zeros(3, 2, 32), "value": torch.zeros(3, 2, 32)}, ["key_pages", "head dimension 64", "32"]),
        ({"slot_mapping": torch.tensor([0, -1, 80])}, ["slot_mapping[2]", "80", "0 to 79"]),
        ({"key_scales": torch.zeros(2)}, ["key_scales", "0.0", "above 0"]),
        ({"value_scales": torch.full((5, 2), math.inf)}, ["value_scales", "inf", "finite"]),
        ({"key": torch.full((3, 2, 64), math.nan)}, ["key holds nan at [0, 0, 0]"]),
        ({"value": torch.full((3, 2, 64), -math.inf)}, ["value holds -inf at [0, 0, 0]"]),
    ],
)
def test_bad_input_to_e4m3_pages_is_refused_and_nothing_written(change, words):
    append_to_fp8_pages(**good_fp8())
    inputs = good_fp8() | change
    with pytest.raises(ValueError) as refusal:
        append_to_fp8_pages(**inputs)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert (inputs["value_pages"].float() == 0).all()


def good_int4():
    return {"key": some(2, 2, 3, 64).half(), "value": some(2, 2, 3, 64).half(),
            "cache": empty_int4_cache(2, 2, 64, capacity=128), "positions": torch.tensor([0, 125])}  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        ({"positions": torch.tensor([0, 126])}, ["positions[1]", "126", "0 to 125"]),
        ({"key": some(2, 2, 3, 64), "value": some(2, 2, 3, 64)}, ["key", "float32", "cache.key_window", "float16"]),
        ({"key": some(2, 2, 3, 96).half(), "value": some(2, 2, 3, 96).half()}, ["head dimension 96", "64, 128, 256"]),
        ({"cache": empty_int4_cache(3, 2, 64, capacity=128)}, ["cache.key_codes", "batch size 3", "2"]),
        ({"cache": empty_int4_cache(2, 2, 128, capacity=128)}, ["cache.key_codes", "32", "head dimension 64"]),
        ({"cache": empty_int4_cache(2, 2, 64, pages=3)}, ["cache.key_codes", "[batch, key_heads, blocks"]),
        ({"cache": (1, 2)}, ["cache", "tuple", "empty_int4_cache"]),
        ({"cache": empty_int4_cache(2, 2, 64, capacity=128)._replace(key_scales=torch.zeros(2, 2, 2, 64))},
         ["cache.key_scales", "float32", "float16"]),
        ({"value": torch.full((2, 2, 3, 64), math.nan).half()}, ["value holds nan at [0, 0, 0, 0]"]),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, dict) else "",
)  # fmt: skip
def test_bad_input_to_an_int4_cache_is_refused_and_nothing_written(change, words):
    append_to_int4_cache(**good_int4())
    inputs = good_int4() | change
    with pytest.raises(ValueError) as refusal:
        append_to_int4_cache(**inputs)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
