"""Kernels, products and programs of ranks on two GPUs of one host, as processes and as one process."""

import os
import signal
import time

import pytest
import torch

from course_lib.checker.specification import catalog
from course_lib.hardware.device import machine
from course_lib.hardware.ranks import RankError, Ranks, run_on_ranks
from course_lib.hardware.simulated_ranks import play_ranks
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.parallel.all_reduce import AllReduce
from course_lib.kernels.parallel.ring import ring_attention, zigzag_positions
from course_lib.models.trained import model_and_tokenizer
from course_lib.serving.on_ranks import engine_on_ranks
from course_lib.serving.requests import Request, Sampling
from tests.kernels.parallel import test_all_reduce, test_overlap

pytestmark = pytest.mark.skipif(machine().tier == "none" or machine().gpu_count < 2, reason="needs 2 NVIDIA GPUs")


def test_every_form_of_the_all_reduce_gives_the_same_bits():
    results = run_on_ranks(test_all_reduce.calls, 2, device="cuda", seconds=200)
    assert torch.equal(results[0][-1], results[1][-1])
    for wrong, told, names, large, _ in results:
        assert not wrong, "; ".join(wrong)
        assert large == 2 and names == ["one-shot", "two-shot", "library", "library"] and len(told) == 3


def test_rows_that_travel_during_a_product_give_the_whole_product():
    for wrong, told in run_on_ranks(test_overlap.calls, 2, device="cuda", seconds=200):
        assert not wrong, "; ".join(wrong)
        assert "must be a multiple of the 2 ranks" in told


def ring(ranks: Ranks) -> float:
    length, draw = 1024, torch.Generator("cuda").manual_seed(0)
    whole = [torch.randn(1, heads, length, 64, device="cuda", generator=draw).half() for heads in (4, 2, 2)]
    places = zigzag_positions(ranks.rank, ranks.size, length).to(ranks.device)
    output, _ = ring_attention(ranks, *(tensor[:, :, places] for tensor in whole))
    exact = attention_reference(*(tensor.double() for tensor in whole), causal=True)[:, :, places]
    return (output.double() - exact).abs().max().item()


def test_the_ring_is_attention():
    assert max(run_on_ranks(ring, 2, device="cuda", seconds=200)) < 4e-3


@pytest.mark.parametrize("name", ["one_shot", "two_shot"])
def test_a_learners_program_runs_on_the_gpus_that_it_is_given(name):
    cell: dict = {"torch": torch}
    exec(catalog.solution_source("20.3"), cell)
    devices = ["cuda:0", "cuda:1"]
    numbers = [torch.randn(1000, device=device) for device in devices]
    played = play_ranks(cell[name], [(x,) for x in numbers], 3, (1000, torch.float32), devices=devices)
    assert played["ending"] == "finished"
    for result, device in zip(played["results"], devices):
        assert result.device == torch.device(device)
        assert torch.equal(result.cpu(), numbers[0].cpu() + numbers[1].cpu())


def dies(ranks: Ranks, who: int) -> None:
    all_reduce, x = AllReduce(ranks, most_bytes=1 << 16), torch.ones(1000, device=ranks.device)
    all_reduce(x)
    torch.cuda.synchronize()
    if ranks.rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(x)  # a kernel that waits for numbers which never come
    torch.cuda.synchronize()


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_is_named_and_the_waiting_kernel_ends(who):
    began = time.monotonic()
    with pytest.raises(RankError, match=f"rank {who} died"):
        run_on_ranks(dies, 2, who, device="cuda", seconds=100)
    assert time.monotonic() - began < 60


def texts(ranks: Ranks, requests, options) -> list[str]:
    all_reduce = AllReduce(ranks, most_bytes=1 << 20)
    return engine_on_ranks(ranks, *model_and_tokenizer("GQA"), all_reduce=all_reduce, **options).texts(requests)


def test_an_engine_on_each_gpu_writes_the_texts_of_one():
    beginnings = ((b"Alice was ", 0.0), (b"The Rabbit ", 0.8), (b"Off with ", 0.5))
    requests = [Request(list(words), 60, Sampling(temperature=heat, seed=3)) for words, heat in beginnings]
    options = {"pages": 64}
    written = run_on_ranks(texts, 2, requests, options, device="cuda", seconds=200)
    assert written[0] == written[1] == run_on_ranks(texts, 1, requests, options, device="cuda", seconds=200)[0]
