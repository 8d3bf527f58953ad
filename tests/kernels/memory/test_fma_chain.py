"""The multiply-add chain: the same numbers by the kernel and in blocks, and its FLOPs counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.hardware.device import interpreting
from course_lib.kernels.memory.fma_chain import (
    fma_chain,
    fma_chain_blocked,
    fma_chain_reference,
    fma_chain_work,
    run_fma_chain,
)

RUNS = [fma_chain_blocked] + ([fma_chain] if interpreting() else [])


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("length", [0, 1, 1023, 1025, 5000])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_the_chain_agrees_with_float64(run, length, steps):
    x = torch.randn(length)
    exact = fma_chain_reference(x.double(), steps, 1.25, -0.5)
    torch.testing.assert_close(run(x, steps, 1.25, -0.5).double(), exact, rtol=1e-5, atol=1e-5)


@settings(max_examples=20)
@given(st.integers(1, 4000), st.integers(0, 5), st.integers(1, 5000))
def test_blocks_of_any_size_give_the_same(length, steps, block):
    x = torch.randn(length)
    assert torch.equal(fma_chain_blocked(x, steps, block=block), fma_chain_blocked(x, steps))


def test_the_input_is_left_alone():
    x = torch.rand(3000)
    before = x.clone()
    fma_chain_blocked(x, 4)
    assert torch.equal(x, before)


def test_intensity_is_a_quarter_of_the_steps():
    work = fma_chain_work(1000, 64)
    assert (work.flops, work.bytes, work.intensity) == (128000, 8000, 16)


def test_on_a_cpu_the_run_whose_time_is_real_is_the_blocked_one(monkeypatch):
    from course_lib.kernels.memory import fma_chain as module

    monkeypatch.setattr(module, "fma_chain", lambda *arguments: pytest.fail("the interpreter's time is no time"))
    assert run_fma_chain(torch.rand(10), 3).shape == (10,)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "arguments, words",
    [
        ((torch.ones(3), -1), "steps is -1"),
        ((torch.ones(3), 2.0), "steps is 2.0"),
        ((torch.ones(3), 2, "a"), "scale is 'a'"),
        ((torch.ones(6)[::2], 2), "must be contiguous"),
        ((torch.ones(3).double(), 2), "float64"),
        (([1.0], 2), "x is a? ?list"),
        ((torch.ones(3), 2, 1.0, 1.0, torch.ones(4)), "out has shape"),
    ],
)
def test_bad_input_is_refused_by_name(run, arguments, words):
    with pytest.raises(ValueError, match=words):
        run(*arguments)
