"""Prepared calls on a GPU: the launchers' results to the bit, straight from the compiled kernel, in a few µs."""

import pytest
import torch
import triton
import triton.language as tl

from course_lib.bench.decode import host_seconds
from course_lib.hardware.device import machine
from course_lib.hardware.meter.traffic import record_launches
from course_lib.hardware.prepared import prepared
from course_lib.kernels.attention.dispatch import choose, portable
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.decode.append import append_to_pages
from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.decode.tiles import decode_plan
from course_lib.kernels.decode.workspace import decode_workspace
from course_lib.kernels.paged.attention import paged_decode_attention


def halves(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def decode_inputs(batch=2, query_heads=32, key_heads=8, capacity=3000, head_dim=128):
    caches = [halves(batch, key_heads, capacity, head_dim) for _ in "kv"]
    lengths = torch.randint(1, capacity + 1, (batch,), device="cuda", dtype=torch.int32)
    return halves(batch, query_heads, head_dim), *caches, lengths


def decode_buffers(query, cache):
    splits = decode_plan(query, cache.shape[1], cache.shape[2]).splits
    return {
        "output": torch.empty_like(query),
        "workspace": decode_workspace(*query.shape, splits),
        "validate": False,
    }


def straight(step):
    """A prepared call that goes straight to the compiled kernel."""
    assert step.reason is None, step.reason
    return step


@pytest.mark.parametrize("capacity", [40, 3000, 30000])
def test_decode_gives_the_same_bits_for_any_contents_and_any_memory(capacity):
    first = decode_inputs(capacity=capacity)
    step = straight(prepared(decode_attention, *first, **decode_buffers(first[0], first[1])))
    for _ in range(5):
        others = decode_inputs(capacity=capacity)
        assert torch.equal(step(*others), decode_attention(*others))
    assert torch.equal(step(*first), decode_attention(*first))


def test_decode_without_buffers_keeps_those_of_the_first_call():
    first, other = decode_inputs(), decode_inputs()
    step = straight(prepared(decode_attention, *first, return_lse=True, validate=False))
    for ours, theirs in zip(step(*other), decode_attention(*other, return_lse=True)):
        assert torch.equal(ours, theirs)


def test_pages_and_appends_are_prepared_too():
    query, lengths = halves(3, 32, 128), torch.tensor([5, 160, 33], device="cuda", dtype=torch.int32)
    pools = halves(40, 8, 16, 128), halves(40, 8, 16, 128)
    tables = torch.randperm(40, device="cuda", dtype=torch.int32)[:30].view(3, 10)
    step = straight(prepared(paged_decode_attention, query, *pools, tables, lengths, validate=False))
    key, value, slots = halves(3, 8, 128), halves(3, 8, 128), torch.tensor([4, 600, -1], device="cuda")
    append = straight(prepared(append_to_pages, key, value, *pools, slots, validate=False))
    for _ in range(3):
        tables = torch.randperm(40, device="cuda", dtype=torch.int32)[:30].view(3, 10)
        query, key, value, pools = halves(3, 32, 128), halves(3, 8, 128), halves(3, 8, 128), [x.clone() for x in pools]
        append(key, value, *pools, slots)
        assert torch.equal(pools[0][0, :, 4], key[0]) and torch.equal(pools[1][37, :, 8], value[1])
        wanted = paged_decode_attention(query, *pools, tables, lengths)
        assert torch.equal(step(query, *pools, tables, lengths), wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_whole_attention_gives_the_same_bits(head_dim, causal):
    """On Hopper its kernel takes descriptors of the copy engine, which must follow the inputs."""

    def inputs():
        return [halves(2, heads, 500, head_dim) for heads in (8, 2, 2)]

    for function in (attention, portable):
        step = straight(prepared(function, *inputs(), causal=causal))
        for _ in range(3):
            others = inputs()
            assert torch.equal(step(*others), function(*others, causal=causal))


@triton.jit
def doubled_kernel(x_pointer, output_pointer, length, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(output_pointer + places, 2.0 * tl.load(x_pointer + places, mask=places < length), mask=places < length)


def doubled(x):
    output = torch.empty_like(x)
    doubled_kernel[(triton.cdiv(x.numel(), 256),)](x, output, x.numel(), BLOCK=256)
    return output


def test_an_address_that_the_compiled_kernel_does_not_take_is_refused():
    """A kernel that was compiled for multiples of 16 bytes reads wrong memory, or stops the GPU, at others."""
    x = torch.randn(1028, device="cuda")
    step = straight(prepared(doubled, x[:1024]))
    assert torch.equal(step(x[4:]), 2 * x[4:])
    with pytest.raises(ValueError, match="begins 4 bytes after a multiple of 16"):
        step(x[1:1025])
    either = straight(prepared(doubled, x[1:1025]))
    for begin in (0, 2, 3, 4):
        assert torch.equal(either(x[begin : begin + 1024]), 2 * x[begin : begin + 1024])


def test_another_stream_is_refused():
    step = straight(prepared(doubled, x := torch.randn(1024, device="cuda")))
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(ValueError, match="its buffers serve one stream"):
        step(x)


def test_launches_are_seen_as_others_are():
    step = straight(prepared(doubled, x := torch.randn(1024, device="cuda")))
    with record_launches() as launches:
        step(x)
    assert [(launch.kernel, launch.grid) for launch in launches] == [("doubled_kernel", (4, 1, 1))]


def test_a_prepared_call_costs_the_host_less_than_20_us():
    """Called, they take 60 to 125 µs, on a host that needs 5 µs for PyTorch's smallest operation; slower ones more."""
    first = decode_inputs(1, capacity=1024)
    step = straight(prepared(decode_attention, *first, **decode_buffers(first[0], first[1])))
    whole_inputs = [halves(1, heads, 128, 128) for heads in (8, 2, 2)]
    whole = straight(prepared(attention, *whole_inputs))
    seconds = {"decode_attention": host_seconds(lambda: step(*first))}
    seconds[f"attention ({choose(*whole_inputs).kernel})"] = host_seconds(lambda: whole(*whole_inputs))
    small = torch.zeros(16, device="cuda")
    pace = max(1.0, host_seconds(lambda: small.add_(1.0)) / 5e-6)
    print(machine().gpu_name, f"pace {pace:.2f}", {name: f"{taken * 1e6:.1f} µs" for name, taken in seconds.items()})
    assert max(seconds.values()) < 20e-6 * pace
