"""Decode, paged attention and appends on the GPU: right over ten times the interpreter's draws, repeatable, fast."""

import math
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure
from course_lib.kernels.decode.append import (
    append_to_cache,
    append_to_cache_reference,
    append_to_pages,
    append_to_pages_reference,
)
from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.decode.combine import combine_splits, combine_splits_reference
from course_lib.kernels.decode.reference import (
    decode_attention_reference,
    paged_decode_reference,
    paged_prefill_reference,
)
from course_lib.kernels.decode.workspace import decode_workspace
from course_lib.kernels.paged.attention import paged_decode_attention, paged_prefill_attention
from tests.kernels.decode.cases import (
    as_pages,
    assert_close_to_float64,
    forget_beyond,
    largest_terms,
    odd_strides,
    plain_results,
    random_tensor,
)
from tests.kernels.rounding import rounded_otherwise

HALVES = [torch.float16] + ([torch.bfloat16] if supports_bfloat16() else [])
PAGE_SIZES = [1, 2, 3, 7, 16, 64, 100, 256]
HEAD_DIMS = [64, 80, 96, 128, 256]
GROUPS = [1, 2, 3, 4, 7, 8, 16, 32, 100]


def some(draw, *shape, dtype):
    return random_tensor(draw, *shape, dtype=dtype, device="cuda")


def draw_lengths(draw, batch, capacity):
    lengths = [draw.choice([0, 1, capacity, draw.randint(0, capacity)]) for _ in range(batch)]
    return torch.tensor(lengths, device="cuda", dtype=draw.choice([torch.int32, torch.int64]))


def assert_right(function, reference, query, key, value, *indices, case="", **options):
    ours = function(query, key, value, *indices, return_lse=True, **options)
    right = reference(query.double(), key.double(), value.double(), *indices, return_lse=True)
    theirs = plain_results(reference, query, key, value, *indices)
    assert_close_to_float64(ours, right, theirs, case, largest_terms(query, key))


@pytest.mark.parametrize("seed", range(24))
def test_decode_is_right_for_any_shape_lengths_strides_pages_and_splits(seed):
    draw = Random(seed)
    group, head_dim = GROUPS[seed % len(GROUPS)], HEAD_DIMS[seed % len(HEAD_DIMS)]
    page_size = PAGE_SIZES[seed % len(PAGE_SIZES)]
    dtype = draw.choice([torch.float32, *HALVES])
    for _ in range(10):
        batch, key_heads = draw.randint(1, 5), draw.choice([1, 2, 3, 8])
        capacity = draw.choice([draw.randint(1, 200), draw.randint(200, 3000)])
        lengths, splits = draw_lengths(draw, batch, capacity), draw.choice([None, 1, 2, 3, 7, 40])
        query = some(draw, batch, key_heads * group, head_dim, dtype=dtype)
        key, value = (
            forget_beyond(some(draw, batch, key_heads, capacity, head_dim, dtype=dtype), lengths) for _ in range(2)
        )
        pools = list(as_pages(draw, key, value, page_size))
        if draw.random() < 0.5:
            query, key, value = odd_strides(query), odd_strides(key), odd_strides(value)
            pools[:2] = odd_strides(pools[0]), odd_strides(pools[1])
        case = f"{seed=} {batch=} {key_heads=} {group=} {capacity=} {head_dim=} {lengths=} {splits=} {dtype=}"
        assert_right(decode_attention, decode_attention_reference, query, key, value, lengths, splits=splits, case=case)
        assert_right(
            paged_decode_attention,
            paged_decode_reference,
            query,
            *pools,
            lengths,
            splits=splits,
            case=f"{case} {page_size=}",
        )


@pytest.mark.parametrize("seed", range(16))
def test_prefill_after_any_prefix_is_right(seed):
    draw = Random(seed)
    group, head_dim = draw.choice([1, 3, 4, 8, 16, 32]), HEAD_DIMS[seed % len(HEAD_DIMS)]
    page_size, dtype = PAGE_SIZES[seed % len(PAGE_SIZES)], draw.choice([torch.float32, *HALVES])
    for _ in range(10):
        batch, key_heads = draw.randint(1, 4), draw.choice([1, 2])
        new = [draw.choice([0, 1, draw.randint(1, 300)]) for _ in range(batch)]
        new[0] = max(new[0], 1)
        lengths = torch.tensor([count + draw.choice([0, 1, draw.randint(0, 700)]) for count in new], device="cuda")
        key, value = (some(draw, batch, key_heads, 1000, head_dim, dtype=dtype) for _ in range(2))
        key_pages, value_pages, tables = as_pages(draw, key, value, page_size)
        starts = torch.tensor([0, *new], device="cuda").cumsum(0)
        query = some(draw, sum(new), key_heads * group, head_dim, dtype=dtype)
        assert_right(
            paged_prefill_attention,
            paged_prefill_reference,
            query,
            torch.nan_to_num(key_pages),
            torch.nan_to_num(value_pages),
            tables,
            starts,
            lengths,
            case=f"{seed=} {new=} {lengths=} {page_size=} {group=} {head_dim=} {dtype=}",
        )


@pytest.mark.parametrize("seed", range(20))
def test_appends_land_where_they_belong(seed):
    draw = Random(seed)
    for _ in range(5):
        batch, heads, new_tokens, head_dim = (
            draw.randint(1, 9),
            draw.randint(1, 9),
            draw.choice([1, 2, 100]),
            draw.choice([33, 64, 128, 256]),
        )
        capacity, dtype = new_tokens + draw.randint(0, 200), draw.choice([torch.float32, *HALVES])
        new = [some(draw, batch, heads, new_tokens, head_dim, dtype=dtype) for _ in range(2)]
        caches = [some(draw, batch, heads, capacity, head_dim, dtype=dtype) for _ in range(2)]
        positions = torch.tensor([draw.randint(0, capacity - new_tokens) for _ in range(batch)], device="cuda")
        expected = [cache.clone() for cache in caches]
        append_to_cache_reference(*new, *expected, positions)
        append_to_cache(*new, *caches, positions)
        assert all(torch.equal(*pair) for pair in zip(caches, expected))

        page_size = draw.choice(PAGE_SIZES)
        slots = draw.sample(range(20 * page_size), draw.randint(1, 20 * page_size))
        slots = torch.tensor([draw.choice([-1, slot, slot]) for slot in slots], device="cuda")
        new = [some(draw, len(slots), heads, head_dim, dtype=dtype) for _ in range(2)]
        pools = [some(draw, 20, heads, page_size, head_dim, dtype=dtype) for _ in range(2)]
        expected = [pool.clone() for pool in pools]
        append_to_pages_reference(*new, *expected, slots)
        append_to_pages(*new, *pools, slots)
        assert all(torch.equal(*pair) for pair in zip(pools, expected))


@pytest.mark.parametrize("splits", [1, 2, 33, 256])
def test_the_merge_is_right(splits):
    draw = Random(splits)
    outputs, lses = (some(draw, splits, 3, 8, *last, dtype=torch.float32) for last in ((128,), ()))
    lses = torch.where(some(draw, splits, 3, 8, dtype=torch.float32) > 1, -math.inf, 10 * lses)
    outputs[lses == -math.inf] = math.nan
    right = combine_splits_reference(outputs.double(), lses.double())
    assert_close_to_float64(
        combine_splits(outputs, lses), right, rounded_otherwise(combine_splits_reference, outputs, lses)
    )


def decode_inputs(batch, query_heads, key_heads, context, head_dim=128):
    dtype = HALVES[-1]
    query = torch.randn(batch, query_heads, head_dim, device="cuda", dtype=dtype)
    key, value = (torch.randn(batch, key_heads, context, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    return query, key, value, torch.full((batch,), context, device="cuda", dtype=torch.int32)


@pytest.mark.parametrize("context", [300, 8192, 131072])
def test_results_repeat_bit_for_bit(context):
    """Whichever program merges, it merges in one order; and none merges before all parts are in memory."""
    query, key, value, lengths = decode_inputs(1, 32, 8, context)
    first, first_lse = decode_attention(query, key, value, lengths, return_lse=True)
    for _ in range(200):
        output, lse = decode_attention(query, key, value, lengths, return_lse=True, validate=False)
        assert torch.equal(output, first) and torch.equal(lse, first_lse)


def test_pages_give_the_bits_of_a_contiguous_cache():
    query, key, value, lengths = decode_inputs(2, 32, 8, 5000)
    contiguous = decode_attention(query, key, value, lengths, splits=5)
    for page_size in PAGE_SIZES:
        pools = as_pages(Random(page_size), key, value, page_size)
        assert torch.equal(paged_decode_attention(query, *pools, lengths, splits=5), contiguous)


@pytest.mark.parametrize("splits", [1, 6])
def test_a_step_in_a_graph_follows_the_lengths_and_tables_and_allocates_nothing(splits):
    """Captured at one length, replayed as the sequences grow, get new pages, and one of them ends."""
    draw, (query, key, value, lengths) = Random(0), decode_inputs(3, 8, 2, 400, 64)
    key_pages, value_pages, tables = as_pages(draw, key, value, 16, spare=40)
    lengths.fill_(7)
    output, paged_output = torch.empty_like(query), torch.empty_like(query)
    workspaces = [decode_workspace(3, 8, 64, splits) for _ in range(2)]

    def step():
        decode_attention(
            query,
            key,
            value,
            lengths,
            splits=splits,
            output=output,
            workspace=workspaces[0],
            return_lse=True,
            validate=False,
        )
        paged_decode_attention(
            query,
            key_pages,
            value_pages,
            tables,
            lengths,
            splits=splits,
            output=paged_output,
            workspace=workspaces[1],
            return_lse=True,
            validate=False,
        )

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new_lengths in ([7, 0, 400], [8, 100, 399], [0, 0, 1], [400, 400, 400]):
        query.normal_()
        lengths.copy_(torch.tensor(new_lengths))
        # The first sequence moves to other pages.
        free = torch.tensor(
            [
                page
                for page in range(key_pages.shape[0])
                if page not in tables.tolist()[1] and page not in tables.tolist()[2]
            ],
            device="cuda",
        )
        moved = free[torch.randperm(len(free), device="cuda")[: tables.shape[1]]]
        for pool in (key_pages, value_pages):
            pool[moved] = pool[tables[0].long()].clone()
        tables[0] = moved
        graph.replay()
        for result, workspace in zip((output, paged_output), workspaces):
            expected, expected_lse = decode_attention(query, key, value, lengths, splits=splits, return_lse=True)
            assert torch.equal(result, expected) and torch.equal(workspace.lse, expected_lse)


def test_a_graph_captured_without_buffers_may_be_replayed_beside_other_work():
    """Counters of a graph are its own: replays on one stream, steps on another, all with the right result."""
    query, key, value, lengths = decode_inputs(1, 32, 8, 20000)
    expected = decode_attention(query, key, value, lengths)
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        replayed = decode_attention(query, key, value, lengths, validate=False)
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        graph.replay()
        with torch.cuda.stream(other):
            beside = decode_attention(query, key, value, lengths, validate=False)
        torch.cuda.synchronize()
        assert torch.equal(replayed, expected) and torch.equal(beside, expected)


def test_offsets_beyond_two_to_the_31_are_right():
    storage = torch.empty(1, 300_000, 64, 128, dtype=torch.float16, device="cuda")  # [batch, capacity, heads, head_dim]
    storage[:, :, 63].normal_()
    cache = storage.transpose(1, 2)[:, 63:]
    pages = storage[0].view(-1, 16, 64, 128).transpose(1, 2)[:, 63:]
    query, lengths = torch.randn(1, 4, 128, dtype=torch.float16, device="cuda"), torch.tensor([300_000], device="cuda")
    assert_right(decode_attention, decode_attention_reference, query, cache, cache, lengths)
    table = torch.arange(pages.shape[0], device="cuda")[None]
    assert_right(paged_decode_attention, paged_decode_reference, query, pages, pages, table, lengths)


def test_a_captured_function_gives_new_results_for_new_contents():
    numbers = torch.arange(5.0, device="cuda")
    replay = captured(lambda: numbers * 2)
    numbers += 1
    assert replay().tolist() == [2, 4, 6, 8, 10]


def test_a_function_that_waits_for_the_gpu_is_not_captured_and_leaves_it_usable():
    """A capture that breaks off leaves PyTorch's random numbers unusable: it must not begin."""
    numbers = torch.ones(5, device="cuda")
    with pytest.raises(RuntimeError, match="waits for the GPU"):
        captured(lambda: numbers * numbers.sum().item())
    assert torch.randn(5, device="cuda").isfinite().all() and captured(lambda: numbers + 1)().tolist() == [2] * 5


def seconds(function) -> float:
    """Of a step on the GPU. Called from Python some take longer there, which says nothing of the kernel."""
    return measure(captured(function)).median


@pytest.mark.skipif(machine().compute_capability != (9, 0), reason="the figures are those of Hopper")
@pytest.mark.parametrize("shape", [(1, 32, 8, 131072), (1, 32, 8, 8192), (16, 32, 8, 8192), (1, 32, 32, 32768)])
def test_decode_outruns_fa2_and_keeps_up_with_cudnn(shape):
    query, key, value, lengths = decode_inputs(*shape)
    ours = seconds(lambda: decode_attention(query, key, value, lengths, validate=False))

    def sdpa():
        return F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)

    # cuDNN's and ours differ by a percent or two either way, as does one run from another.
    for backend, ratio in ((SDPBackend.FLASH_ATTENTION, 1.02), (SDPBackend.CUDNN_ATTENTION, 0.97)):
        with sdpa_kernel(backend):
            assert seconds(sdpa) / ours >= ratio


@pytest.mark.skipif(machine().compute_capability != (9, 0), reason="the figures are those of Hopper")
def test_single_token_pages_cost_no_more_than_twice():
    query, key, value, lengths = decode_inputs(1, 32, 8, 131072)
    times = {}
    for page_size in (1, 64):
        pools = as_pages(Random(0), key, value, page_size)
        times[page_size] = seconds(lambda: paged_decode_attention(query, *pools, lengths, validate=False))  # noqa: B023
    assert times[1] <= 2 * times[64]
