"""What a CUDA graph is asked for without a GPU, and what stands in for one; with one, tests/gpu/test_decode.py captures
and replays."""

import pytest
import torch
import triton
import triton.language as tl

from course_lib.hardware.graphs import captured, captured_on_cpu, compiled
from course_lib.hardware.meter.traffic import repair_interpreter


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_called_and_the_reason_is_said():
    for make in (captured, compiled):
        with pytest.raises(RuntimeError, match="need(s)? an NVIDIA GPU"):
            make(lambda: pytest.fail("called"))


def test_on_the_cpu_a_replay_reads_new_contents_and_calls_no_python():
    numbers, calls = torch.arange(4.0), []

    def function():
        calls.append(1)
        return numbers.view(2, 2).t().softmax(-1) * 2

    replay = captured_on_cpu(function)
    first = replay()
    numbers.copy_(torch.tensor([5.0, -1.0, 0.5, 3.0]))
    assert replay() is first and len(calls) == 2
    torch.testing.assert_close(first, numbers.view(2, 2).t().softmax(-1) * 2)


def test_on_the_cpu_numbers_branches_and_names_stay_as_they_were_captured():
    state = {"factor": 2.0, "buffer": torch.ones(3)}
    replay = captured_on_cpu(lambda: state["buffer"] * state["factor"])
    state["factor"], state["buffer"] = 5.0, torch.full((3,), 7.0)
    assert replay().tolist() == [2.0, 2.0, 2.0]


def test_on_the_cpu_stores_in_place_and_through_indices_are_repeated():
    place, row, table = torch.tensor([1]), torch.zeros(1, 2), torch.zeros(4, 2)

    def function():
        table[place] = row
        table[0] += 1

    replay = captured_on_cpu(function)
    place.fill_(3), row.fill_(9.0), table.zero_()
    assert replay() is None and table.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [9.0, 9.0]]


def test_on_the_cpu_what_was_made_without_gradients_can_be_replayed_anywhere():
    numbers = torch.ones(2)

    def function():
        with torch.inference_mode():
            return numbers @ numbers

    replay = captured_on_cpu(function)
    numbers.fill_(2.0)
    assert float(replay()) == 8.0


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: int(x.sum()),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.masked_fill_(x > 0, 1.0)[x.unique().long()],
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x + torch.tensor([1.0, 2.0]),
    ],
)
def test_on_the_cpu_what_a_gpu_could_not_capture_is_refused(function, inference):
    """`.item()` is one operation where no gradients are kept, and another one elsewhere; one of them got through."""

    def called():
        with torch.inference_mode(inference):
            function(x)

    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        captured_on_cpu(called)
    assert (x + torch.tensor([1.0, 2.0])).tolist() == [2.0, 3.0]  # and nothing is refused afterwards


@triton.jit
def one_more_kernel(pointer):
    tl.store(pointer, tl.load(pointer) + 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels alone run on the CPU")
def test_on_the_cpu_a_triton_kernel_is_refused_by_name():
    repair_interpreter()
    x = torch.zeros(1)
    with pytest.raises(RuntimeError, match="launches the Triton kernel one_more_kernel"):
        captured_on_cpu(lambda: one_more_kernel[(1,)](x))
