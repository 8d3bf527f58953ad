"""Walks through values that hold tensors: tuples, lists and dicts of them, nested, as arguments and results are.

Everything that is no tuple, list or dict is a leaf, `InOut` among them. The worker has walks of its own, in
`runner/process/nested.py`, because nothing of the course can be imported there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same containers with what `function` makes of every leaf, called in order."""
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    return function(value)


def items(value: Any) -> list[tuple[str, Any]]:
    """A container's items, each with its step of a path, in order; none of what is no container."""
    if isinstance(value, (tuple, list)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return [(f".{key}" if isinstance(key, str) else f"[{key}]", item) for key, item in value.items()]
    return []


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves with their paths, in order: "[0].keys[2]" is the third of the first item's "keys"."""
    if not isinstance(value, (tuple, list, dict)):
        return [(path, value)]
    return [leaf for step, item in items(value) for leaf in leaves(item, path + step)]


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves; one in an `InOut` stays there."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def structure(value: Any) -> Any:
    """The containers alone: equal for two values whose leaves pair up. A tuple counts as a list."""
    if isinstance(value, (tuple, list)):
        return [structure(item) for item in value]
    if isinstance(value, dict):
        return {key: structure(item) for key, item in value.items()}
    return None


def depth(value: Any) -> int:
    """How many containers the deepest leaf lies in. It does not recurse, so a value of any depth will do."""
    deepest, level = 0, [value]
    while level:
        containers = [item for item in level if isinstance(item, (tuple, list, dict))]
        deepest += bool(containers)
        level = [item for held in containers for item in (held.values() if isinstance(held, dict) else held)]
    return deepest
