"""Named barriers of the Hopper kernels: a program has 16 in all, and no two of a kernel's may be the same."""

import re

import pytest

from course_lib.hardware.compiler.views import compile_many
from course_lib.kernels.gluon import parts
from course_lib.kernels.hopper import backward, backward_parts, flash, flash_fp8
from course_lib.kernels.hopper import parts as forward_parts
from course_lib.kernels.hopper.launch import Arrangement
from course_lib.kernels.latent import hopper_parts as latent_parts
from course_lib.kernels.sparse import hopper as sparse

TAKEN_BY_TRITON = parts.FIRST_NAMED_BARRIER.value
ALL = 16


@pytest.fixture
def numbers(monkeypatch):
    """The functions that name barriers, run by Python."""
    monkeypatch.setattr(forward_parts, "FIRST_NAMED_BARRIER", TAKEN_BY_TRITON)
    monkeypatch.setattr(backward_parts, "FIRST_NAMED_BARRIER", TAKEN_BY_TRITON)
    monkeypatch.setattr(latent_parts, "FIRST_NAMED_BARRIER", TAKEN_BY_TRITON)
    monkeypatch.setattr(backward_parts, "GROUPS", backward_parts.GROUPS.value)
    return lambda function, *arguments: function.fn(*arguments)


@pytest.mark.parametrize("shipped", [flash.ARRANGEMENTS, flash_fp8.ARRANGEMENTS, sparse.ARRANGEMENTS])
def test_each_barrier_of_the_forward_pass_has_a_number_of_its_own(numbers, shipped):
    for arrangement in shipped.values():
        stages = range(arrangement.stages)
        found = [numbers(forward_parts.key_free, stage) for stage in stages]
        found += [numbers(forward_parts.value_free, stage, arrangement.stages) for stage in stages]
        if arrangement.turns:
            groups = range(arrangement.consumers)
            found += [numbers(forward_parts.turn_of, group, arrangement.stages) for group in groups]
        assert len(set(found)) == len(found)
        assert min(found) >= TAKEN_BY_TRITON and max(found) < ALL


def test_each_barrier_of_the_backward_pass_has_a_number_of_its_own(numbers):
    for arrangement in backward.ARRANGEMENTS.values():
        stages = range(arrangement.stages)
        found = [numbers(backward_parts.query_free, stage) for stage in stages]
        found += [numbers(backward_parts.gradient_free, stage, arrangement.stages) for stage in stages]
        found += [
            numbers(backward_parts.score_gradient_free, buffer, group, arrangement.stages)
            for buffer in range(arrangement.score_buffers)
            for group in range(2)
        ]
        assert len(set(found)) == len(found)
        assert min(found) >= TAKEN_BY_TRITON and max(found) < ALL


def test_each_barrier_of_latent_decode_has_a_number_of_its_own(numbers):
    found = [numbers(latent_parts.half_free, block, half) for block in range(2) for half in range(2)]
    for ready in (latent_parts.state_ready, latent_parts.weights_ready):
        found += [numbers(ready, group) for group in range(2)]
    assert len(set(found)) == len(found)
    assert min(found) >= TAKEN_BY_TRITON and max(found) < ALL


def test_more_than_a_program_has_are_refused():
    with pytest.raises(ValueError, match=r"4 stages and 3 turns, which take 11 named barriers; Triton leaves 10"):
        Arrangement(128, stages=4, query_buffers=2, consumers=3, turns=True).settings()
    assert Arrangement(128, stages=5, query_buffers=1, consumers=2, turns=False).settings()["STAGES"] == 5
    with pytest.raises(ValueError, match=r"4 stages and 2 score_buffers, which take 12 named barriers"):
        backward.BackwardArrangement(64, stages=4, score_buffers=2, late_parts=True).settings()


@pytest.mark.slow
def test_triton_itself_takes_none_of_theirs():
    """Its own meetings carry their number in the instruction: 0, 1, and one for each partition of warps."""
    cases = [
        flash.compile_case(64, flash.ARRANGEMENTS[64], "bf16"),
        backward.compile_case(128, "bf16", deterministic=False),
    ]
    for view in compile_many([{**case.requests()[0], "want_sass": True} for case in cases]):
        groups = re.findall(r"BAR\.SYNC\S*\s+(0x[0-9a-f]+)(?:, 0x80)?\s*;", view.sass)
        assert groups and max(int(number, 16) for number in groups) < TAKEN_BY_TRITON, groups
