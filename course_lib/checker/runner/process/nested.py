"""Walks through values that hold tensors, on the worker's side: nothing of the course can be imported here.

The judge's walks are in `specification/nested.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def rebuilt(value: Any, function: Callable[[Any, str], Any], name: str = "") -> Any:
    """What `function(item, its name)` makes of a container's items, in such a container; anything else as it is."""
    if isinstance(value, (tuple, list)):
        items = [function(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: function(item, f"{name}[{key!r}]") for key, item in value.items()}
    return value


def leaves(value: Any) -> Iterator[Any]:
    """Everything in a value that is no tuple, list or dict, in order."""
    if isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value
