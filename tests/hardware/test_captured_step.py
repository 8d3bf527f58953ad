"""A captured step repeats operations, and asks the host nothing."""

import pytest
import torch

from course_lib.hardware.captured_step import captured_and_replayed

KEYS, VALUES = torch.zeros(2, 4), torch.zeros(2, 4)
WARM = [torch.zeros(2), torch.zeros(2, dtype=torch.int64)]
STEPS = [[torch.full((2,), float(number)), torch.tensor([number, number])] for number in (1, 2)]


def replayed(step):
    return captured_and_replayed({"decode_step": step}, KEYS, VALUES, STEPS, WARM)


def test_new_numbers_in_the_same_memory_make_new_results():
    def step(x, position, keys, values, output):
        keys[torch.arange(2), position] = x
        output.copy_(2 * x)

    story = replayed(step)
    assert story["output of replay 1"].tolist() == [2, 2] and story["output of replay 2"].tolist() == [4, 4]
    assert story["keys afterwards"].tolist() == [[0, 1, 2, 0]] * 2 and not story["values afterwards"].any()


def test_what_the_host_decided_once_is_repeated():
    calls = []

    def step(x, position, keys, values, output):
        calls.append(1)
        output.copy_(x * len(calls))

    story = replayed(step)
    assert story["output of replay 2"].tolist() == [4, 4], "as at the second call, which was captured"


def test_a_number_for_the_host_is_refused():
    for wants in (lambda x: x[0].item(), lambda x: x.tolist(), lambda x: x[x > 0], lambda x: bool(x.any())):
        with pytest.raises(Exception, match="makes the host wait"):
            replayed(lambda x, position, keys, values, output, wants=wants: (wants(x), None)[1])


def test_a_result_is_refused():
    with pytest.raises(Exception, match="something else than None"):
        replayed(lambda x, position, keys, values, output: output)
