"""`profile`: the right sentence for right, slow and spilling kernels on three GPUs, from the compiler and the meter."""

import sys
import time

import pytest
import torch
import triton
import triton.language as tl

from course_lib.figures.recorded import FOLDER
from course_lib.hardware.device import interpreting
from course_lib.hardware.profile import counters, profile, profiling
from course_lib.kernels.memory.copy import copy
from course_lib.kernels.memory.strided_copy import strided_copy
from course_lib.kernels.softmax.rows import softmax

pytestmark = pytest.mark.skipif(not interpreting(), reason="GPUs that are not at hand are compiled for here")
GPUS = {75: "T4", 80: "A100", 90: "H100"}


@triton.jit
def row_in_one_warp_kernel(x_pointer, out_pointer, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + offsets)
    weights = tl.exp(x - tl.max(x, 0))
    tl.store(out_pointer + offsets, weights / tl.sum(weights, 0))


def row_in_one_warp(x):
    out = torch.empty_like(x)
    row_in_one_warp_kernel[(x.shape[0],)](x, out, BLOCK=x.shape[1], num_warps=1)
    return out


@triton.jit
def counts_kernel(values_pointer, counts_pointer, BLOCK: tl.constexpr):
    values = tl.load(values_pointer + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(counts_pointer + values, 1)


def counts(values):
    found = torch.zeros(16, dtype=torch.int32)
    counts_kernel[(values.numel() // 1024,)](values, found, BLOCK=1024)
    return found


@triton.jit
def product_kernel(a_pointer, b_pointer, out_pointer, SIZE: tl.constexpr, STAGES: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for step in tl.range(0, 4, num_stages=STAGES):
        a = tl.load(a_pointer + step * SIZE * SIZE + rows * SIZE + columns)
        b = tl.load(b_pointer + step * SIZE * SIZE + rows * SIZE + columns)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(out_pointer + rows * SIZE + columns, total)


def product(a, b, stages=2):
    out = torch.empty(a.shape[-1], a.shape[-1])
    product_kernel[(1,)](a, b, out, SIZE=a.shape[-1], STAGES=stages)
    return out


@triton.jit
def endless_kernel(x_pointer):
    while tl.load(x_pointer) == 0:
        tl.store(x_pointer + 1, 1)


def endless(x):
    endless_kernel[(1,)](x)


@triton.jit
def beyond_kernel(x_pointer, length):
    tl.store(x_pointer + length + tl.arange(0, 16), 1.0)


def beyond(x):
    beyond_kernel[(1,)](x, x.numel())


def raising(x):
    copy(x)
    raise RuntimeError("no such layout")


def read_twice(x):
    softmax(x, method="three_pass")


LONG, ROWS = torch.ones(2**18), torch.ones(300, 1000)


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize(
    "function, arguments, sentence",
    [
        (copy, (LONG,), "Nothing stands out: no spills, wide loads, and 1.00 times the least bytes"),
        (softmax, (ROWS,), "Nothing stands out"),
        (strided_copy, (torch.ones(2**20)[::8],), "4.5 times as much: let neighbouring lanes"),
        (row_in_one_warp, (torch.ones(2, 8192),), "row_in_one_warp_kernel spills: "),
        (counts, (torch.arange(2**14, dtype=torch.int32) % 16,), "64 of them meet on one address"),
        (read_twice, (torch.ones(140, 5000),), "x_pointer is read 3.0 times"),
        (product, (torch.ones(4, 64, 64), torch.ones(4, 64, 64)), "tl.dot has no matrix instruction"),
    ],
    ids=["right copy", "right softmax", "strides", "spills", "atomics", "three passes", "no matrix instruction"],
)  # fmt: skip
def test_the_sentence_names_the_cause_on_each_gpu(arch, function, arguments, sentence):
    card = profile(function, *arguments, arch=arch)
    assert card.target == f"{GPUS[arch]} (sm_{arch})"
    assert sentence in card.look_at, card


def test_the_number_of_programs_is_told_last_and_with_its_condition():
    card = profile(copy, torch.ones(5120), arch=90)
    assert "5 programs here, and H100 (sm_90) has 132 multiprocessors" in card.look_at
    assert "If your real shapes give no more" in card.look_at


def test_shared_memory_that_an_a10_has_not_is_told_there_alone():
    tiles = torch.ones(4, 128, 128, dtype=torch.float16)
    words = "of shared memory a program, and A10, RTX 3090 (sm_86) has 101,376 B"
    assert words in profile(product, tiles, tiles, 3, arch=86).look_at
    assert "shared memory a program" not in profile(product, tiles, tiles, 3, arch=90).look_at


def test_matrix_instructions_are_those_of_the_target():
    """Triton 3.6 makes none for Turing, whatever the tiles."""
    tiles = torch.ones(4, 64, 64, dtype=torch.float16)
    cards = {arch: profile(product, tiles, tiles, arch=arch) for arch in GPUS}
    kinds = {arch: card.kernels[0].view.matrix_instruction for arch, card in cards.items()}
    assert kinds == {75: None, 80: "mma.sync", 90: "wgmma"}
    assert "Triton makes none for GPUs before sm_80" in cards[75].look_at
    assert "matrix instruction" not in cards[80].look_at + cards[90].look_at


def test_the_card_is_there_within_two_seconds():
    profile(copy, LONG, arch=80)  # the compiler's process begins once
    began = time.perf_counter()
    profile(copy, torch.ones(2**17), arch=90)
    assert time.perf_counter() - began < 2


def test_a_kernel_without_an_end_is_ended_and_said_so():
    began = time.perf_counter()
    card = profile(endless, torch.zeros(4), arch=90, seconds=0.5)
    assert time.perf_counter() - began < 5
    assert "still running after 0.5 seconds" in card.look_at and card.kernels[0].name == "endless_kernel"


def test_a_function_that_raises_is_said_with_the_card_of_what_ran():
    card = profile(raising, LONG, arch=90)
    assert "it raised RuntimeError: no such layout" in card.look_at
    assert card.kernels[0].name == "copy_kernel" and "copy_kernel" in str(card)


def test_an_access_outside_comes_before_all_figures():
    assert profile(beyond, torch.ones(32), arch=90).look_at.startswith("Mend this first")


def test_no_kernel_at_all_is_said():
    assert "launched no Triton kernel" in profile(torch.relu, torch.ones(3), arch=90).look_at


def test_the_callers_tensors_stay_as_they_are():
    x = torch.zeros(1024)
    profile(copy, torch.ones(1024), x, arch=90)
    assert (x == 0).all()


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"arch": 70}, ValueError, "arch was 70; allowed are 75"),
        ({"arch": 90, "flops": -1.0}, ValueError, "flops is -1.0; it must be a number above 0"),
        ({"arch": 75, "flops": 1e9, "unit": "bfloat16"}, ValueError, "the datasheet of the T4 has fma, float16"),
    ],
)
def test_arguments_without_sense_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        profile(copy, LONG, **given)


def test_the_kernel_itself_is_refused():
    with pytest.raises(TypeError, match="takes the function that launches a kernel"):
        profile(endless_kernel, LONG)


def test_the_roof_is_memory_or_compute_by_intensity():
    tiles = torch.ones(4, 64, 64, dtype=torch.float16)
    assert profile(product, tiles, tiles, arch=90, flops=1e6, unit="float16").roof == "memory"
    assert profile(product, tiles, tiles, arch=90, flops=1e9, unit="float16").roof == "compute"


def test_the_page_carries_the_sentence_in_html_without_colours_of_text_of_its_own():
    page = profile(strided_copy, torch.ones(2**16)[::8], arch=90)._repr_html_()
    assert "<b>Look at.</b>" in page and "strided_copy_kernel" in page
    assert "background" not in page  # the theme's own, dark or light


# ------------------------------------------------------------------------------------------------------------ ncu

RECORDED = (FOLDER / "ncu_h100.csv").read_text()


def test_bytes_by_the_meter_are_those_that_ncu_counted_within_five_per_cent():
    """Sectors of a small run, scaled to the recorded one: what a copy and a strided copy move for each element."""
    counted = dict(counters.read_raw_page(RECORDED))
    for function, x, kernel, elements in (
        (copy, torch.ones(2**18), "copy_kernel", 2**26),
        (strided_copy, torch.ones(2**20)[::8], "strided_copy_kernel", 2**23),
    ):
        moved = profile(function, x, arch=90).moved_bytes / x.numel() * elements
        memory = counted[kernel]["dram__bytes_read.sum"] + counted[kernel]["dram__bytes_write.sum"]
        assert moved == pytest.approx(memory, rel=0.05), kernel


def test_registers_and_grid_are_read_as_recorded():
    found = dict(counters.read_raw_page(RECORDED))
    assert len(found) == 8
    assert found["decode_attention_kernel"]["launch__grid_size"] == 8
    words = counters.in_words(found["one_load_in_flight_kernel"])
    assert words["warps wait for"].startswith("long_scoreboard")
    assert words["time"] == "139 µs" and words["occupancy"] == "1.6 %"


@pytest.mark.parametrize(
    "output, words",
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==WARNING== No kernels were profiled.", "launched no kernel on the GPU"),
        ("==ERROR== Failed to open the file", "ncu failed: ==ERROR== Failed to open the file"),
    ],
)
def test_what_ncu_refuses_is_said_with_what_to_do(output, words):
    assert words in str(counters.refusal(output))


def test_a_missing_and_an_old_ncu_are_named():
    with pytest.raises(counters.NoCounters, match="not installed. It comes with the CUDA toolkit"):
        counters.require(None, "")
    with pytest.raises(counters.NoCounters, match="version 2019.3; its metrics have other names"):
        counters.require("/usr/bin/ncu", "Version 2019.3.1.0 (build 1)")
    counters.require("/usr/bin/ncu", "Version 2025.3.1.0 (build 36398880)")


def test_a_text_that_is_no_page_is_refused():
    with pytest.raises(counters.NoCounters, match="not what ncu --csv --page raw prints"):
        counters.read_raw_page("a,b\n1,2\n")


@pytest.mark.skipif(sys.platform == "win32", reason="a script stands in for ncu")
def test_forbidden_counters_leave_the_card_and_a_reason(tmp_path, monkeypatch):
    stand_in = tmp_path / "ncu"
    script = 'if [ "$1" = --version ]; then echo "Version 2025.1.0.0"; else echo "==ERROR== ERR_NVGPUCTRPERM"; fi'
    stand_in.write_text(f"#!/bin/sh\n{script}\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(counters.NoCounters, match="ERR_NVGPUCTRPERM"):
        counters.counted(copy, (torch.ones(8),), {})


def test_a_process_that_compiles_for_a_gpu_has_the_kernels_seen_in_another(monkeypatch):
    """Where a GPU runs kernels, the meter and the compiler work in a process that interprets."""
    here = profile(copy, torch.ones(2**16), arch=90)
    monkeypatch.setattr(profiling, "interpreting", lambda: False)
    there = profile(copy, torch.ones(2**16), arch=90)
    assert str(there) == str(here)
    with pytest.raises(ValueError, match="source of"):
        profile(eval("lambda x: x"), torch.ones(4), arch=90)
