"""Launchers that keep what they decided, on a GPU: the same bits as decided anew, from other memory, in few µs."""

import functools
import threading

import pytest
import torch

from course_lib.bench.decode import host_seconds
from course_lib.hardware.graphs import captured
from course_lib.hardware.kept import CALLS_BEFORE, deciding_anew
from course_lib.hardware.meter.traffic import record_launches
from course_lib.kernels.attention.dispatch import forward
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.decode.append import append_to_pages
from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.latent.attention import latent_decode_attention
from course_lib.kernels.paged.attention import paged_decode_attention
from course_lib.kernels.quantised.append import append_to_int4_pages
from course_lib.kernels.quantised.formats import empty_int4_cache
from course_lib.kernels.quantised.fp8_decode import paged_fp8_decode_attention
from course_lib.kernels.quantised.int4_decode import paged_int4_decode_attention
from tests.gpu.test_prepared import decode_inputs, halves


def paged_inputs():
    tables = torch.randperm(40, device="cuda", dtype=torch.int32)[:30].view(3, 10)
    lengths = torch.tensor([5, 160, 33], device="cuda", dtype=torch.int32)
    return halves(3, 32, 128), halves(40, 8, 16, 128), halves(40, 8, 16, 128), tables, lengths


def attention_inputs(head_dim=128, length=500):
    return [halves(2, heads, length, head_dim) for heads in (8, 2, 2)]


def fp8_inputs():
    query, *_, tables, lengths = paged_inputs()
    pools = [halves(40, 8, 16, 128).to(torch.float8_e4m3fn) for _ in "kv"]
    return query, *pools, tables, lengths


def fp8_paged(query, keys, values, tables, lengths):
    scales = torch.full((8,), 0.5, device="cuda")
    return paged_fp8_decode_attention(
        query, keys, values, tables, lengths, key_scales=scales, value_scales=scales, validate=False
    )


def int4_inputs():
    cache = empty_int4_cache(2, 8, 128, pages=8, dtype=torch.float16, device="cuda")
    tables = torch.randperm(8, device="cuda", dtype=torch.int32).view(2, 4)
    key, value = halves(2, 8, 200, 128), halves(2, 8, 200, 128)
    append_to_int4_pages(key, value, cache, tables, torch.zeros(2, dtype=torch.int32, device="cuda"), validate=False)
    return halves(2, 32, 128), cache, tables, torch.tensor([200, 77], dtype=torch.int32, device="cuda")


def latent_inputs():
    return halves(2, 1, 16, 576), halves(2, 300, 576), torch.tensor([300, 5], device="cuda", dtype=torch.int32)


CALLS = {
    "decode": (decode_attention, decode_inputs, {"validate": False}),
    "decode with its log-sum-exp": (decode_attention, decode_inputs, {"validate": False, "return_lse": True}),
    "decode in a window": (decode_attention, decode_inputs, {"validate": False, "window": 100}),
    "decode, one split": (decode_attention, functools.partial(decode_inputs, capacity=40), {"validate": False}),
    "pages": (paged_decode_attention, paged_inputs, {"validate": False}),
    "pages of e4m3": (fp8_paged, fp8_inputs, {}),
    "pages of INT4": (paged_int4_decode_attention, int4_inputs, {"validate": False}),
    "latent": (latent_decode_attention, latent_inputs, {"scale": 0.05, "validate": False}),
    "attention": (attention, attention_inputs, {}),
    "attention, causal": (attention, attention_inputs, {"causal": True, "return_lse": True}),
    "attention, D 64": (attention, functools.partial(attention_inputs, 64), {"causal": True}),
    "attention, portable": (attention, functools.partial(attention_inputs, 40), {"window": 70, "causal": True}),
}


def programs(function):
    return {attention: forward, fp8_paged: paged_fp8_decode_attention}.get(function, function).kept.programs


@pytest.mark.parametrize("name", CALLS)
def test_the_bits_of_a_call_decided_anew(name):
    function, inputs, options = CALLS[name]
    programs(function).clear()
    kept_alive = []
    for _ in range(CALLS_BEFORE + 6):
        given = inputs()
        ours = function(*given, **options)
        with deciding_anew():
            wanted = function(*given, **options)
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0)
        kept_alive.append((given, ours))  # so that the next ones lie elsewhere
    assert [program is not None for program in programs(function).values()] == [True]


def test_appends_write_where_they_are_told():
    append_to_pages.kept.programs.clear()
    for _ in range(CALLS_BEFORE + 4):
        key, value, slots = halves(3, 8, 128), halves(3, 8, 128), torch.tensor([4, 600, -1], device="cuda")
        pools = [torch.zeros(40, 8, 16, 128, device="cuda", dtype=torch.float16) for _ in "kv"]
        append_to_pages(key, value, *pools, slots, validate=False)
        assert torch.equal(pools[0][0, :, 4], key[0]) and torch.equal(pools[1][37, :, 8], value[1])
    assert all(append_to_pages.kept.programs.values())


def test_two_streams_have_their_own_buffers():
    inputs = decode_inputs(1, capacity=20000)
    with deciding_anew():
        wanted = decode_attention(*inputs, validate=False)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(30):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(decode_attention(*inputs, validate=False))
    torch.cuda.synchronize()
    assert all(torch.equal(result, wanted) for result in results)


def test_threads_share_a_program():
    inputs = [decode_inputs(1, capacity=20000) for _ in range(4)]
    with deciding_anew():
        wanted = [decode_attention(*given, validate=False) for given in inputs]
    wrong = []

    def work(number):
        for _ in range(50):
            found = decode_attention(*inputs[number], validate=False)
            wrong.extend([number] * (not torch.equal(found, wanted[number])))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_graph_holds_a_call_and_its_own_memory():
    inputs = attention_inputs()
    for _ in range(CALLS_BEFORE + 2):
        attention(*inputs)
    replay = captured(lambda: attention(*inputs, causal=True))
    for tensor in inputs:
        tensor.normal_()
    plain = attention(*inputs, causal=True)
    assert torch.equal(replay(), plain)


def test_gradients_and_launches_are_seen():
    inputs = attention_inputs()
    for _ in range(CALLS_BEFORE + 2):
        attention(*inputs)
    with record_launches() as launches:
        attention(*inputs)
    assert len(launches) == 1
    query = inputs[0].requires_grad_()
    attention(query, *inputs[1:]).sum().backward()
    assert query.grad is not None


def test_a_plain_call_costs_four_additions():
    small = torch.zeros(16, device="cuda")
    addition = host_seconds(lambda: small.add_(1.0))
    for name in ("decode", "attention"):
        function, inputs, options = CALLS[name]
        call = functools.partial(function, *inputs(), **options)
        for _ in range(CALLS_BEFORE + 2):
            call()
        taken = host_seconds(call)
        print(f"{name}: {taken * 1e6:.1f} µs, {taken / addition:.2f} additions of {addition * 1e6:.1f} µs")
        assert taken < 4 * addition
