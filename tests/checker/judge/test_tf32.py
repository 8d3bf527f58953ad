"""A GPU cuts the float32 operands of `tl.dot` to tf32 unless it is told not to; an answer that leaves it so is right.

There is no GPU here: the interpreter runs the course's answers with operands cut as a tensor core cuts them.
"""

import pytest
import torch

from course_lib.checker.judge import compare
from course_lib.checker.judge.outcome import result_of
from course_lib.checker.runner.running import run_cases
from course_lib.checker.specification import catalog
from course_lib.checker.specification.needs import TRITON

CUT = """
@triton.jit
def _cut(tile):
    if tile.dtype == tl.float32:
        return (tile.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    else:
        return tile


@triton.jit
def _dot_of_cut(left, right, acc=None, input_precision: tl.constexpr = "ieee"):
    return tl.dot(_cut(left), _cut(right), acc, input_precision="ieee")


"""
TASKS = [
    task
    for task in catalog.exercises().values()
    if task.needs == TRITON and 'input_precision="ieee"' in catalog.solution_source(task.id)
]


def wrong_cases(task, seed: int, tf32: bool) -> list[str]:
    """The float32 cases in which products of cut operands err by more than is allowed."""
    source = CUT + catalog.solution_source(task.id).replace("tl.dot(", "_dot_of_cut(")
    (run,) = run_cases(task, source, {name: name for name in task.entries}, seed)
    wrong, judged = [], 0
    for index, frame in run.frames.items():
        case = run.cases[index]
        assert frame.error is None, frame.error
        if any(isinstance(value, torch.Tensor) and value.dtype == torch.float32 for value in case.args):
            judged += 1
            expected = compare.truth(task, case, tf32=tf32)
            leaves = compare.compare(result_of(case, frame.result, frame.written), expected, task)
            wrong += [case.name] if any(leaf.problem for leaf in leaves) else []
    assert judged
    return wrong


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the GPU itself cuts: see the answers of tests/submissions")
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)
def test_products_of_operands_cut_to_tf32_are_right_where_a_gpu_may_cut_them_and_nowhere_else(task):
    for seed in (1, 2):
        assert wrong_cases(task, seed, tf32=True) == []
    assert wrong_cases(task, 1, tf32=False)


def test_there_are_such_exercises():
    assert len(TASKS) >= 9 and all(task.uses_dot for task in TASKS)
