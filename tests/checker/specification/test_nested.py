"""Walks through nested values, on the judge's side and on the worker's."""

import sys

import pytest
import torch

from course_lib.checker import InOut
from course_lib.checker.runner.process import nested as workers
from course_lib.checker.specification.nested import depth, leaves, map_leaves, structure, tensors

ONE, TWO = torch.ones(1), torch.ones(2)
VALUE = (1, [ONE, {"keys": TWO, 3: "x"}], ())


def test_leaves_come_in_order_with_their_paths():
    assert [path for path, _ in leaves(VALUE)] == ["[0]", "[1][0]", "[1][1].keys", "[1][1][3]"]
    assert [leaf for _, leaf in leaves(VALUE)] == list(workers.leaves(VALUE)) == [1, ONE, TWO, "x"]
    assert leaves(5) == [("", 5)]


def test_a_map_keeps_the_containers():
    assert map_leaves(str, (1, [2, {"a": 3}])) == ("1", ["2", {"a": "3"}])
    assert map_leaves(lambda leaf: leaf.tensor, [InOut(ONE)]) == [ONE]


def test_tensors_to_be_written_stay_in_their_in_out():
    assert tensors((InOut(ONE), [TWO], 3)) == [TWO]


@pytest.mark.parametrize(
    "one, other, same",
    [
        ((1, 2), [3, 4], True),
        ((1,), (1, 2), False),
        ({"a": 1}, {"a": ONE}, True),
        ({"a": 1}, {"b": 1}, False),
        (1, None, True),
    ],
)
def test_values_with_the_same_structure_pair_up(one, other, same):
    assert (structure(one) == structure(other)) == same


def test_the_depth_of_a_value_deeper_than_python_recurses():
    deep = 0
    for _ in range(2 * sys.getrecursionlimit()):
        deep = (deep,)
    assert depth(deep) == 2 * sys.getrecursionlimit()
    assert [depth(value) for value in (1, [], [1], {"a": [1]}, (1, [2, [3]]))] == [0, 1, 1, 2, 3]


def test_the_worker_names_each_item_by_its_place():
    names = []

    def item(value, name):
        names.append(name)
        return workers.rebuilt(value, item, name)

    assert workers.rebuilt(VALUE, item, "cache") == VALUE
    assert names == [
        "cache[0]",
        "cache[1]",
        "cache[1][0]",
        "cache[1][1]",
        "cache[1][1]['keys']",
        "cache[1][1][3]",
        "cache[2]",
    ]
