"""Decode over e4m3 caches against float64 of what the codes stand for: any pages, lengths, groups, scales, splits."""

import math
from random import Random

import pytest
import torch
import triton
import triton.language as tl

from course_lib.hardware.device import interpreting
from course_lib.kernels.decode.workspace import decode_workspace
from course_lib.kernels.quantised.formats import quantise_e4m3_reference, restored_e4m3
from course_lib.kernels.quantised.fp8_decode import fp8_decode_attention, paged_fp8_decode_attention
from course_lib.kernels.quantised.parts import e4m3_numbers
from course_lib.kernels.quantised.reference import fp8_decode_reference, paged_fp8_decode_reference
from tests.kernels.decode.cases import assert_close_to_float64, odd_strides, plain_results
from tests.kernels.quantised.cases import NAN_CODE, poisoned_e4m3, shuffled_tables, some, with_outliers

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def scales_of(draw, kind, pages, heads, size):
    """Scales by tensor, head or page: positive, of sizes that differ ten times."""
    shape = {"tensor": (), "head": (heads,), "page": (pages, heads)}[kind]
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return size * (0.1 + torch.rand(shape, generator=generator))


def assert_right(function, reference, query, keys, values, *indices, case="", scales, **options):
    """`function` against float64, and no further off than plain PyTorch on what the codes stand for."""
    ours = function(query, keys, values, *indices, return_lse=True, **scales, **options)
    meaning = {"scale": options.get("scale")} | scales
    right = reference(query.double(), keys, values, *indices, return_lse=True, **meaning)
    theirs = plain_results(lambda *given, **more: reference(given[0], keys, values, *given[1:], **more), query,
                           *indices, **meaning)  # fmt: skip
    known = torch.nan_to_num(restored_e4m3(keys, scales["key_scales"], torch.float64))
    factor = options.get("scale") or 1 / math.sqrt(query.shape[-1])
    terms = factor * query.double().norm(dim=-1).max() * known.norm(dim=-1).max()
    assert_close_to_float64(ours, right, theirs, case, terms.item())
    return ours


@pytest.mark.parametrize("seed", range(24))
def test_any_pages_lengths_groups_scales_and_splits_are_right(seed):
    draw = Random(seed)
    batch, key_heads, group = draw.choice([(1, 1, 1), (2, 1, 3), (1, 2, 4), (3, 1, 8), (2, 1, 16), (1, 1, 40)])
    page_size, head_dim = (16, 32, 48, 64)[seed % 4], (64, 128, 256)[seed % 3]
    capacity, splits = draw.randint(1, 150), draw.choice([None, 1, 2, 5])
    lengths = torch.tensor([draw.choice([0, 1, capacity, draw.randint(0, capacity)]) for _ in range(batch)])
    lengths = lengths.to(draw.choice([torch.int32, torch.int64]))
    tables, pages = shuffled_tables(draw, lengths, -(-capacity // page_size) + 1, page_size)
    keys, values = (poisoned_e4m3(draw, lengths, tables, key_heads, page_size, head_dim, pages) for _ in range(2))
    dtype = draw.choice([torch.float32, torch.float16])
    query = some(batch, key_heads * group, head_dim, seed=seed, dtype=dtype)
    kinds = [draw.choice(["tensor", "head", "page"]) for _ in range(2)]
    scales = {
        "key_scales": scales_of(draw, kinds[0], pages, key_heads, 0.02),
        "value_scales": scales_of(draw, kinds[1], pages, key_heads, draw.choice([0.01, 1e-3])),
    }
    if draw.random() < 0.5:
        query, keys = odd_strides(query), odd_bytes(keys)
        values = odd_bytes(values) if draw.random() < 0.5 else values
    assert_right(
        paged_fp8_decode_attention, paged_fp8_decode_reference, query, keys, values, tables, lengths, scales=scales,
        splits=splits, scale=draw.choice([None, 0.05]),
        case=f"{seed=} {page_size=} {group=} {head_dim=} {lengths=} {splits=} {kinds=} {dtype=}",
    )  # fmt: skip


def odd_bytes(codes):
    """The same codes in memory that has gaps, full of NaN."""
    wide = torch.full((*codes.shape[:-2], codes.shape[-2] + 1, codes.shape[-1] + 16), NAN_CODE, dtype=torch.uint8)
    wide[..., 1:, 16:] = codes.view(torch.uint8)
    return wide.view(torch.float8_e4m3fn)[..., 1:, 16:]


@pytest.mark.parametrize("kind", ["tensor", "head", "page"])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_contiguous_cache_is_right(kind, splits):
    draw, lengths = Random(splits), torch.tensor([0, 1, 130])
    identity = torch.arange(3)[:, None]
    caches = [poisoned_e4m3(draw, lengths, identity, 2, 130, 64, 3) for _ in range(2)]
    scales = {f"{side}_scales": scales_of(draw, kind, 3, 2, 0.02) for side in ("key", "value")}
    query = some(3, 8, 64, seed=1, dtype=torch.float16)
    output, lse = assert_right(fp8_decode_attention, fp8_decode_reference, query, *caches, lengths, scales=scales,
                               splits=splits)  # fmt: skip
    assert (output[0] == 0).all() and (lse[0] == -math.inf).all()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 80])
def test_lengths_around_pages_and_tiles_are_right(length):
    draw, lengths = Random(length), torch.tensor([length])
    tables, pages = shuffled_tables(draw, lengths, 5, 16)
    keys, values = (poisoned_e4m3(draw, lengths, tables, 1, 16, 64, pages) for _ in range(2))
    scales = {f"{side}_scales": scales_of(draw, "page", pages, 1, 0.02) for side in ("key", "value")}
    query = some(1, 2, 64, seed=length)
    assert_right(paged_fp8_decode_attention, paged_fp8_decode_reference, query, keys, values, tables, lengths,
                 scales=scales, splits=2)  # fmt: skip


def test_pages_give_the_bits_of_a_contiguous_cache():
    draw, lengths = Random(0), torch.tensor([130, 64])
    caches = [poisoned_e4m3(draw, lengths, torch.arange(2)[:, None], 2, 192, 64, 2) for _ in range(2)]
    options = {"key_scales": torch.tensor([0.02, 0.01]), "value_scales": torch.tensor(0.01), "splits": 2}
    query = some(2, 4, 64, dtype=torch.float16)
    contiguous = fp8_decode_attention(query, *caches, lengths, **options)
    for page_size in (16, 64):
        blocks = 192 // page_size
        order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(page_size))
        pools = []
        for cache in caches:
            pool = torch.empty(2 * blocks, 2, page_size, 64, dtype=torch.uint8)
            pool[order] = cache.view(torch.uint8).unflatten(2, (blocks, page_size)).transpose(1, 2).flatten(0, 1)
            pools.append(pool.view(torch.float8_e4m3fn))
        tables = order.view(2, blocks).int()
        assert torch.equal(paged_fp8_decode_attention(query, *pools, tables, lengths, **options), contiguous)


@pytest.mark.parametrize("size", [1e-4, 1.0, 3e4])
def test_scales_and_queries_of_any_size_neither_overflow_nor_vanish_in_float16(size):
    """Products are made in float16, which ends at 65504 and at 6e-8: 448 times a value's scale is beyond either."""
    lengths = torch.tensor([100])
    value = with_outliers(some(1, 1, 100, 64)) * size
    scale = value.abs().max() / 448
    key = some(1, 1, 100, 64, seed=1)
    codes = quantise_e4m3_reference(key, torch.tensor(0.01)), quantise_e4m3_reference(value, scale)
    query = some(1, 4, 64, seed=2) * 100
    scales = {"key_scales": torch.tensor(0.01 / 100), "value_scales": scale}
    output, _ = assert_right(fp8_decode_attention, fp8_decode_reference, query, *codes, lengths, scales=scales)
    half = (query * (60000 / query.abs().max())).half()  # its largest is near float16's end, and its values may be too
    small = codes[1], scales | {"value_scales": scale / size}
    ours = fp8_decode_attention(half, codes[0], small[0], lengths, **small[1], scale=2e-4)
    right = fp8_decode_reference(half.double(), codes[0], small[0], lengths, **small[1], scale=2e-4)
    assert (ours.double() - right).abs().max() <= 4 * 2**-11 * right.abs().max()


def test_scales_of_pages_may_rise_and_fall_by_a_million():
    draw, lengths = Random(0), torch.tensor([160])
    tables, pages = torch.arange(10, dtype=torch.int32)[None], 10
    keys, values = (poisoned_e4m3(draw, lengths, tables, 1, 16, 64, pages) for _ in range(2))
    sizes = 10.0 ** torch.tensor([-6, -3, 0, 3, 6, 5, -2, -6, 1, 2])[:, None]
    for scales in (sizes, sizes.flip(0), torch.where(sizes > 10, 0.0, sizes)):
        given = {"key_scales": torch.tensor(1e-4), "value_scales": scales}
        query = some(1, 4, 64, dtype=torch.float16)
        for splits in (1, 3):
            ours = paged_fp8_decode_attention(query.float(), keys, values, tables, lengths, splits=splits, **given)
            right = paged_fp8_decode_reference(query.double(), keys, values, tables, lengths, **given)
            assert (ours - right).abs().max() <= 1e-5 * right.abs().max()


def test_scales_of_zero_are_what_they_say():
    lengths = torch.tensor([70])
    codes = quantise_e4m3_reference(some(1, 1, 70, 64), torch.tensor(0.01))
    query = some(1, 4, 64)
    zero, one = torch.tensor(0.0), torch.tensor(0.01)
    output = fp8_decode_attention(query, codes, codes, lengths, key_scales=one, value_scales=zero)
    assert (output == 0).all()
    output = fp8_decode_attention(query, codes, codes, lengths, key_scales=zero, value_scales=one)
    mean = restored_e4m3(codes, one).mean(dim=2)
    assert torch.allclose(output[0], mean[0].expand(4, 64), atol=1e-6)


@triton.jit
def convert_kernel(codes, numbers, NATIVE: tl.constexpr):
    place = tl.arange(0, 256)
    tl.store(numbers + place, e4m3_numbers(tl.load(codes + place), tl.float32, NATIVE))


@pytest.mark.parametrize("native", [False, True])
def test_every_byte_becomes_its_number(native):
    numbers = torch.empty(256)
    codes = ALL_BYTES.view(torch.float8_e4m3fn) if native else ALL_BYTES.view(torch.int8)
    convert_kernel[(1,)](codes, numbers, NATIVE=native)
    held = (ALL_BYTES & 127) != NAN_CODE
    assert torch.equal(numbers[held], ALL_BYTES.view(torch.float8_e4m3fn).float()[held])


def test_the_tolerance_sees_a_key_that_is_lost_and_a_scale_that_is():
    lengths = torch.tensor([150])
    codes = quantise_e4m3_reference(some(1, 1, 150, 64), torch.tensor(0.01))
    query, one = some(1, 4, 64, seed=1), torch.tensor(0.01)
    given = {"key_scales": one, "value_scales": one}

    def exact(lengths, **changed):
        return fp8_decode_reference(query.double(), codes, codes, lengths, return_lse=True, **(given | changed))

    right = exact(lengths)
    theirs = plain_results(
        lambda query, lengths, **more: fp8_decode_reference(query, codes, codes, lengths, **more), query, lengths,
        **given)  # fmt: skip
    assert_close_to_float64([part.float() for part in right], right, theirs)
    for wrong in (exact(lengths - 1), exact(lengths, key_scales=one * 1.01), exact(lengths, value_scales=one * 1.01)):
        with pytest.raises(AssertionError):
            assert_close_to_float64([part.float() for part in wrong], right, theirs)


def test_a_given_output_and_workspace_are_used():
    lengths = torch.tensor([100, 7])
    codes = quantise_e4m3_reference(some(2, 1, 100, 64), torch.tensor(0.01))
    query, given = some(2, 4, 64, seed=1), {"key_scales": torch.tensor(0.01), "value_scales": torch.tensor(0.01)}
    output, workspace = torch.full_like(query, math.nan), decode_workspace(2, 4, 64, 3, device="cpu")
    result, lse = fp8_decode_attention(query, codes, codes, lengths, output=output, workspace=workspace,
                                       return_lse=True, **given)  # fmt: skip
    assert result.data_ptr() == output.data_ptr() and lse.data_ptr() == workspace.lse.data_ptr()
    assert torch.equal(result, fp8_decode_attention(query, codes, codes, lengths, splits=3, **given))


def good_inputs():
    codes = torch.zeros(5, 2, 16, 64).to(torch.float8_e4m3fn)
    return {"query": some(2, 4, 64), "key_pages": codes, "value_pages": codes.clone(),
            "block_tables": torch.tensor([[4, 1], [0, 3]]), "lengths": torch.tensor([32, 3]),
            "key_scales": torch.ones(2), "value_scales": torch.ones(5, 2)}  # fmt: skip


def changed_scale(number, place=(4, 0)):
    scales = torch.ones(5, 2)
    scales[place] = number
    return scales


@pytest.mark.parametrize(
    "change, words",
    [
        ({"query": torch.zeros(2, 4, 96)}, ["key_pages", "head dimension 64", "96"]),
        ({"query": torch.zeros(2, 4, 63), "key_pages": torch.zeros(5, 2, 16, 63).to(torch.float8_e4m3fn),
          "value_pages": torch.zeros(5, 2, 16, 63).to(torch.float8_e4m3fn)}, ["head dimension 63", "64, 128, 256"]),
        ({"query": torch.zeros(2, 3, 64)}, ["query", "3 heads", "2"]),
        ({"query": torch.zeros(2, 4, 64).bfloat16()}, ["query", "bfloat16", "float16"]),
        ({"key_pages": torch.zeros(5, 2, 16, 64)}, ["key_pages", "float32", "float8_e4m3fn"]),
        ({"value_pages": torch.zeros(5, 2, 16, 64, dtype=torch.uint8)}, ["value_pages", "uint8", "float8_e4m3fn"]),
        ({"value_pages": torch.zeros(4, 2, 16, 64).to(torch.float8_e4m3fn)}, ["value_pages", "(4, 2", "(5, 2"]),
        ({"key_pages": torch.zeros(5, 2, 24, 64).to(torch.float8_e4m3fn),
          "value_pages": torch.zeros(5, 2, 24, 64).to(torch.float8_e4m3fn)}, ["key_pages", "24", "multiple of 16"]),
        ({"key_scales": torch.ones(5)}, ["key_scales", "(5,)", "[pages, key_heads] = [5, 2]"]),
        ({"key_scales": torch.ones(2).double()}, ["key_scales", "float64", "float32"]),
        ({"key_scales": 1.0}, ["key_scales", "float", "torch.Tensor"]),
        ({"key_scales": torch.tensor([1.0, math.inf])}, ["key_scales", "inf", "finite"]),
        ({"value_scales": torch.tensor([1.0, math.nan])}, ["value_scales", "nan", "finite"]),
        ({"value_scales": changed_scale(-1.0)}, ["value_scales", "-1.0", "0 or more"]),
        ({"block_tables": torch.tensor([[4, 5], [0, 3]])}, ["block_tables[0, 1]", "is 5", "0 to 4"]),
        ({"lengths": torch.tensor([33, 3])}, ["lengths[0]", "33", "2 pages of 16"]),
        ({"scale": 0.0}, ["scale", "0.0", "above 0"]),
        ({"splits": 0}, ["splits", "0", "at least 1"]),
        ({"output": torch.zeros(2, 4, 64).half()}, ["output", "float16", "float32"]),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, dict) else "",
)  # fmt: skip
def test_bad_input_is_refused_with_the_argument_its_value_and_what_is_allowed(change, words):
    paged_fp8_decode_attention(**good_inputs())
    with pytest.raises(ValueError) as refusal:
        paged_fp8_decode_attention(**(good_inputs() | change))
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_scales_are_asked_for_and_those_of_unused_pages_may_be_anything():
    inputs = good_inputs()
    paged_fp8_decode_attention(**(inputs | {"value_scales": changed_scale(math.nan, (2, 0))}))
    del inputs["value_scales"]
    with pytest.raises(TypeError, match="value_scales"):
        paged_fp8_decode_attention(**inputs)


def test_values_that_are_no_words_of_memory_are_refused():
    codes = torch.zeros(2, 1, 16, 66, dtype=torch.uint8).view(torch.float8_e4m3fn)
    query, lengths = torch.zeros(2, 1, 64), torch.tensor([3, 4])
    scales = {"key_scales": torch.tensor(1.0), "value_scales": torch.tensor(1.0)}
    fp8_decode_attention(query, codes[..., 1:65], codes[..., 2:], lengths, **scales)
    with pytest.raises(ValueError, match=r"value_cache begins 1 bytes .* multiples of 2 .* value_cache.contiguous\(\)"):
        fp8_decode_attention(query, codes[..., 2:], codes[..., 1:65], lengths, **scales)
    odd = torch.zeros(2, 1, 16, 67, dtype=torch.uint8).view(torch.float8_e4m3fn)[..., :64]
    with pytest.raises(ValueError, match=r"value_cache .* strides \(1072, 1072, 67, 1\)"):
        fp8_decode_attention(query, odd, odd, lengths, **scales)
