"""Which kernels are launched, on a GPU or in the interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import triton_internals
from .results import Launch


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Yields a list that fills with a :class:`Launch` for every Triton kernel started in the block, on a GPU or
    interpreted. Compiling or warming up a kernel adds nothing; an autotuner's trial runs do.

    Raises :class:`MeterUnavailable` when this Triton has no place to see launches.
    """
    launches: list[Launch] = []
    seen = (
        triton_internals.interpreted_launches if triton_internals.interpreting() else triton_internals.compiled_launches
    )
    with seen(launches.append):
        yield launches
