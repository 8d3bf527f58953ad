"""Kernels of which it is known what they move and what the compiler says to them: by these a Triton is recognised."""

from __future__ import annotations


def metered_kernel(source, target, total, last, length):
    lanes = tl.program_id(0) * 8 + tl.arange(0, 8)  # noqa: F821, tl becomes a global of this file in `jit`
    values = tl.load(source + lanes, mask=lanes < length)  # noqa: F821
    tl.store(target + lanes, values)  # noqa: F821, the last six lanes lie outside
    given = tl.load(source, mask=length < 0, other=0.0)  # noqa: F821, nothing is left undefined, and nothing is read
    tl.atomic_add(total, 1.0 + given)  # noqa: F821
    tl.store(last, tl.program_id(0))  # noqa: F821


def taken_kernel(source, target, total, length):
    kept = 0.0
    for index in range(total, length):
        kept += tl.load(source + index)  # noqa: F821
    tl.store(target, kept)  # noqa: F821


def refused_kernel(source, target, total, length):
    kept = 0
    for index in range(total, length):
        kept += tl.load(source + index)  # noqa: F821, an int that becomes a float
    tl.store(target, kept)  # noqa: F821


# Of the last two, launched on a float32 and a float16 tensor, 1 and 7.
TYPES = {"source": "*fp32", "target": "*fp16", "total": "constexpr", "length": "i32"}
CONSTANTS = [((2,), ("plain", 1))]


def jit(name: str):
    """The kernel of a name, as `@triton.jit` makes it."""
    import triton
    import triton.language

    globals()["tl"] = triton.language
    return triton.jit(globals()[name])
