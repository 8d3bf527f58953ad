"""A launcher that asks its tensors' GPU for the number of multiprocessors runs where kernels are interpreted, too."""

import pytest

from course_lib.checker import TRITON, Case, Exercise
from course_lib.checker.judge.decide import judge
from course_lib.hardware.device import machine

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


def test_the_questions_are_answered_as_an_h100_would():
    if machine().tier != "none":
        pytest.skip("a GPU answers them itself")
    exercise = Exercise(
        id="90.1",
        title="Copy",
        entries=("copied",),
        cases=lambda draw: [Case("100 elements", (draw.normal(100),))],
        oracle=lambda x: x.clone(),
        needs=TRITON,
    )
    verdict = judge(exercise, CELL, seed=1)
    assert verdict.passed, str(verdict)
    wrong = CELL.replace("return y", "return y + torch.cuda.get_device_properties(0).multi_processor_count")
    assert not judge(exercise, wrong, seed=1).passed


def test_there_is_no_gpu_all_the_same():
    if machine().tier != "none":
        pytest.skip("there is one")
    exercise = Exercise(
        id="90.1",
        title="Is there one?",
        entries=("here",),
        cases=lambda draw: [Case("asked", (draw.normal(1),))],
        oracle=lambda x: False,
        needs=TRITON,
    )
    assert judge(exercise, "def here(x):\n    return torch.cuda.is_available()\n", seed=1).passed
