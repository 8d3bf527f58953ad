"""A launcher that asks its tensors' GPU for the number of multiprocessors runs where kernels are interpreted, too."""

import pytest

from course_lib.checker import TRITON, Case, Exercise
from course_lib.checker.judge.decide import judge
from course_lib.hardware.device import machine

pytestmark = pytest.mark.skipif(machine().tier != "none", reason="a GPU answers for itself")

CELL = """
@triton.jit
def copy_kernel(source, target, size, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + lanes, tl.load(source + lanes, mask=lanes < size), mask=lanes < size)


def copied(x):
    slots = torch.cuda.get_device_properties(x.device).multi_processor_count
    block = 64 if torch.cuda.get_device_capability(x.device) >= (8, 0) else 32
    y = torch.empty_like(x)
    copy_kernel[(max(slots, triton.cdiv(len(x), block)),)](x, y, len(x), BLOCK=block)
    return y
"""


def asking(entry, oracle):
    """An exercise whose one case is a vector of 100 elements."""
    return Exercise(
        id="90.1",
        title="Asking the GPU",
        entries=(entry,),
        cases=lambda draw: [Case("100 elements", (draw.normal(100),))],
        oracle=oracle,
        needs=TRITON,
    )


def test_the_questions_are_answered_as_an_h100_would():
    exercise = asking("copied", lambda x: x.clone())
    verdict = judge(exercise, CELL, seed=1)
    assert verdict.passed, str(verdict)
    wrong = CELL.replace("return y", "return y + torch.cuda.get_device_properties(0).multi_processor_count")
    assert not judge(exercise, wrong, seed=1).passed


def test_there_is_no_gpu_all_the_same():
    verdict = judge(asking("here", lambda x: False), "def here(x):\n    return torch.cuda.is_available()\n", seed=1)
    assert verdict.passed, str(verdict)
