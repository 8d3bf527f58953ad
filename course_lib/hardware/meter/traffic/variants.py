"""What a compiler would be given at each launch, written down while the interpreter runs it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from . import known_kernels, triton_internals

MAX_VARIANTS = 256


class _CannotBeSent(Exception):
    """A value that has no plain form, so that the other process cannot compile for it."""


@contextlib.contextmanager
def record_variants() -> Iterator[list[dict]]:
    """Yields a list that fills with what Triton would have to compile for the block's interpreted launches.

    Each is plain data and there once: the kernel's name and line, the parameters' types as Triton's own launcher finds
    them (an int of 1 is a constant there), the constants' values and the launch's options; or, under "unbound", what
    the launcher says of an argument that it does not take. A launch that has no plain form is left out; so is
    everything in a Triton not known here.

    Within the block a kernel or a helper that is called without a grid, outside of a kernel, raises what it raises on a
    GPU: the interpreter would run it.
    """
    variants: list[dict] = []
    if not triton_internals.interpreting() or not _binding_is_known():
        yield variants
        return
    seen: set[str] = set()

    def note(kernel, args: tuple, kwargs: dict) -> None:
        with contextlib.suppress(Exception):  # what cannot be recorded is not compiled
            variant = _variant(kernel, args, kwargs)
            key = repr(variant)
            if key not in seen and len(variants) < MAX_VARIANTS:
                seen.add(key)
                variants.append(variant)

    with triton_internals.interpreted_calls(note):
        yield variants


def _variant(interpreted, args: tuple, kwargs: dict) -> dict:
    code = interpreted.fn.__code__
    variant = {"kernel": code.co_name, "line": code.co_firstlineno, "signature": {}, "constants": [], "options": {}}
    try:
        kinds, constants, options = triton_internals.bound_launch(interpreted, args, kwargs)
    except TypeError as error:
        # A helper is another object where it is compiled, and may be an argument there, also in a tuple.
        told = str(error)
        if not told.startswith(triton_internals.NO_ARGUMENT) or told.endswith(("InterpretedFunction", "tuple")):
            raise
        return {**variant, "unbound": told}
    return {
        **variant,
        "signature": {name: _plain_types(kind) for name, kind in kinds.items()},
        "constants": [(path, _sent(value)) for path, value in constants],
        "options": {name: value for name, value in options.items() if type(value) in (bool, int, float, str)},
    }


def _plain_types(kind):
    """A type, or the tuple of a tuple's types; the fields of a named tuple would be lost on the way."""
    if isinstance(kind, tuple):
        if type(kind) is not tuple:
            raise _CannotBeSent(type(kind).__name__)
        return tuple(map(_plain_types, kind))
    return kind


def _sent(value, depth: int = 0) -> tuple:
    """A constant as (kind, plain value)."""
    import triton.language as tl

    if value is None or type(value) in (bool, int, float, str):
        return "plain", value
    if isinstance(value, tl.constexpr):
        return "constexpr", _sent(value.value, depth + 1)
    if type(value) is tl.dtype:
        return "dtype", value.name
    if isinstance(value, torch.dtype):
        return "torch", str(value).removeprefix("torch.")
    if type(value) is tuple and depth < 4:
        return "tuple", tuple(_sent(item, depth + 1) for item in value)
    code = getattr(getattr(value, "fn", None), "__code__", None)
    if code is not None:
        return "function", (code.co_name, code.co_firstlineno)
    raise _CannotBeSent(type(value).__name__)


def received(sent: tuple, functions: Callable[[str, int], object]) -> object:
    """A constant from its plain form; `functions` gives the kernel or helper of a name and line."""
    import triton.language as tl

    kind, value = sent
    if kind == "constexpr":
        return tl.constexpr(received(value, functions))
    if kind == "dtype":
        return tl.dtype(value)
    if kind == "torch":
        return getattr(torch, value)
    if kind == "tuple":
        return tuple(received(item, functions) for item in value)
    if kind == "function":
        return functions(*value)
    return value


@functools.lru_cache(maxsize=1)
def _binding_is_known() -> bool:
    """Whether this Triton binds arguments as is known here; tried once, on a kernel whose types are known."""
    try:
        arguments = (torch.zeros(1), torch.zeros(1, dtype=torch.float16), 1)
        variant = _variant(known_kernels.jit("taken_kernel"), arguments, {"length": 7})
        return variant["signature"] == known_kernels.TYPES and variant["constants"] == known_kernels.CONSTANTS
    except Exception:
        return False
