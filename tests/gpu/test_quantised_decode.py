"""Decode over e4m3 and INT4 caches on a GPU, and appending to them: right in 16 bits at real sizes, and in a graph."""

import math
from random import Random

import pytest
import torch

from course_lib.hardware.device import interpreting, supports_bfloat16
from course_lib.hardware.graphs import captured
from course_lib.kernels.decode.workspace import decode_workspace
from course_lib.kernels.quantised.append import (
    append_to_fp8_cache,
    append_to_fp8_pages,
    append_to_int4_cache,
    append_to_int4_pages,
)
from course_lib.kernels.quantised.formats import GROUP, empty_int4_cache
from course_lib.kernels.quantised.fp8_decode import paged_fp8_decode_attention
from course_lib.kernels.quantised.int4_decode import paged_int4_decode_attention
from course_lib.kernels.quantised.reference import (
    append_to_fp8_cache_reference,
    append_to_fp8_pages_reference,
    append_to_int4_reference,
    int4_decode_reference,
    paged_fp8_decode_reference,
)
from tests.kernels.decode.cases import assert_close_to_float64, plain_results
from tests.kernels.quantised.cases import folded_results, poisoned_e4m3, shuffled_tables, some, with_outliers

pytestmark = pytest.mark.skipif(
    interpreting(), reason="needs a GPU: tests/kernels/quantised has the interpreter's part"
)
HALVES = [torch.float16] + ([torch.bfloat16] if not interpreting() and supports_bfloat16() else [])
GROUPS = [1, 4, 7, 16, 32, 40]


def on_gpu(*tensors):
    return [tensor.cuda() for tensor in tensors]


def draw_lengths(draw, batch, capacity):
    return torch.tensor([draw.choice([0, 1, capacity, draw.randint(0, capacity)]) for _ in range(batch)])


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_e4m3_pages_of_any_size_scales_groups_and_splits_are_right(seed, dtype):
    draw = Random(seed)
    group, head_dim, page_size = GROUPS[seed % 6], (64, 128, 256)[seed % 3], (16, 32, 48, 64)[seed % 4]
    batch, key_heads, capacity = draw.randint(1, 4), draw.choice([1, 2, 8]), draw.randint(1, 2000)
    lengths = draw_lengths(draw, batch, capacity)
    tables, pages = shuffled_tables(draw, lengths, -(-capacity // page_size), page_size)
    keys, values = (poisoned_e4m3(draw, lengths, tables, key_heads, page_size, head_dim, pages) for _ in range(2))
    query = some(batch, key_heads * group, head_dim, seed=seed, dtype=dtype)
    shapes = [draw.choice([(), (key_heads,), (pages, key_heads)]) for _ in range(2)]
    scales = {f"{side}_scales": (0.002 + 0.02 * torch.rand(shape)).cuda()
              for side, shape in zip(("key", "value"), shapes)}  # fmt: skip
    query, keys, values, tables, lengths = on_gpu(query, keys, values, tables, lengths)
    right = paged_fp8_decode_reference(query.double(), keys, values, tables, lengths, return_lse=True, **scales)
    theirs = plain_results(
        lambda query, lengths, **more: paged_fp8_decode_reference(query, keys, values, tables, lengths, **more), query,
        lengths, **scales)  # fmt: skip
    largest = 448 * head_dim**0.5
    terms = query.double().norm(dim=-1).max().item() * largest * scales["key_scales"].max().item() / head_dim**0.5
    values_up_to = 448 * scales["value_scales"].max().item()
    for splits in (None, 1, 3):
        ours = paged_fp8_decode_attention(
            query, keys, values, tables, lengths, splits=splits, return_lse=True, **scales
        )
        case = f"{seed=} {group=} {page_size=} {head_dim=} {lengths=} {shapes=} {splits=}"
        assert_close_to_float64(ours, right, theirs, case, terms, values_up_to)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_int4_pages_of_any_lengths_groups_and_splits_are_right(seed, dtype):
    draw = Random(seed)
    group, head_dim = GROUPS[seed % 6], (64, 128, 256)[seed % 3]
    batch, key_heads, capacity = draw.randint(1, 4), draw.choice([1, 2, 8]), draw.randint(1, 2000)
    full = torch.full((batch,), capacity)
    tables, pages = (
        on_gpu(shuffled_tables(draw, full, -(-capacity // GROUP), GROUP)[0])[0],
        batch * -(-capacity // GROUP),
    )
    cache = empty_int4_cache(batch, key_heads, head_dim, pages=pages + 2, dtype=dtype, device="cuda")
    key, value = (with_outliers(some(batch, key_heads, capacity, head_dim, seed=seed + k)).to("cuda", dtype)
                  for k in range(2))  # fmt: skip
    append_to_int4_pages(key, value, cache, tables, torch.zeros_like(full).cuda())
    query, scale = some(batch, key_heads * group, head_dim, seed=seed).to("cuda", dtype), 1 / math.sqrt(head_dim)
    lengths = full.cuda()
    options = {"block_tables": tables}
    right = int4_decode_reference(query.double(), cache, lengths, return_lse=True, **options)
    theirs = plain_results(lambda query, lengths, **more: int4_decode_reference(query, cache, lengths, **more), query,
                           lengths, **options)  # fmt: skip
    theirs += folded_results(query, cache, lengths, tables, scale)
    terms = scale * query.double().norm(dim=-1).max().item() * key.double().norm(dim=-1).max().item()
    for splits in (None, 1, 3):
        ours = paged_int4_decode_attention(query, cache, tables, lengths, splits=splits, return_lse=True)
        assert_close_to_float64(ours, right, theirs, f"{seed=} {group=} {head_dim=} {capacity=} {splits=}", terms)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_appending_gives_the_bytes_of_plain_pytorch(head_dim, dtype):
    key, value = (with_outliers(some(2, 3, 150, head_dim, seed=seed)).to("cuda", dtype) for seed in range(2))
    positions = torch.tensor([0, 17], device="cuda")
    ours, right = (empty_int4_cache(2, 3, head_dim, capacity=192, dtype=dtype, device="cuda") for _ in range(2))
    for first, last in ((0, 1), (1, 50), (50, 150)):
        new = key[:, :, first:last], value[:, :, first:last]
        append_to_int4_cache(*new, ours, positions + first)
        append_to_int4_reference(*new, right, positions + first)
    for name, mine, expected in zip(ours._fields[:6], ours, right):
        assert torch.equal(mine, expected), name
    scales = {"key_scales": torch.rand(3, device="cuda") / 10 + 0.01, "value_scales": torch.tensor(0.02, device="cuda")}
    caches = [torch.zeros(2, 3, 200, head_dim, device="cuda").to(torch.float8_e4m3fn) for _ in range(4)]
    append_to_fp8_cache(key, value, *caches[:2], positions, **scales)
    append_to_fp8_cache_reference(key, value, *caches[2:], positions, **scales)
    rows, slots = [new[0].transpose(0, 1) for new in (key, value)], torch.randperm(160, device="cuda")[:150]
    pools = [torch.zeros(10, 3, 16, head_dim, device="cuda").to(torch.float8_e4m3fn) for _ in range(4)]
    append_to_fp8_pages(*rows, *pools[:2], slots, **scales)
    append_to_fp8_pages_reference(*rows, *pools[2:], slots, **scales)
    for held in (caches, pools):
        for mine, expected in zip(held[:2], held[2:]):
            assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))


def test_a_step_in_a_graph_follows_the_lengths_on_the_device():
    """Appending and attending, captured once, replayed at other lengths: across the end of a group too."""
    dtype, heads, head_dim = torch.float16, 2, 128
    cache = empty_int4_cache(1, heads, head_dim, pages=4, dtype=dtype, device="cuda")
    tables = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32, device="cuda")
    key, value = (torch.randn(1, heads, 1, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    query = torch.randn(1, 8, head_dim, device="cuda", dtype=dtype)
    positions, lengths = (torch.tensor([start], dtype=torch.int32, device="cuda") for start in (0, 1))
    workspace, output = decode_workspace(1, 8, head_dim, 2), torch.empty_like(query)

    def step():
        append_to_int4_pages(key, value, cache, tables, positions, validate=False)
        return paged_int4_decode_attention(
            query, cache, tables, lengths, output=output, workspace=workspace, validate=False
        )

    replay = captured(step)
    for position in (61, 62, 63, 64, 65):  # what stood in the window before is that of warming up, and finite
        positions.fill_(position)
        lengths.fill_(position + 1)
        result = replay().double()
        right = int4_decode_reference(query.double(), cache, lengths, block_tables=tables)
        assert (result - right).abs().max() <= 2**-8 * max(1, right.abs().max().item())
