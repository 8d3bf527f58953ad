"""What the compiler's front end (Python to Triton's IR) says to a kernel, in a process that does not interpret."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

from . import known_kernels, triton_internals
from .variants import received

# A kernel is refused that none of them takes. Hopper comes first: it has the dtypes that most kernels use.
ARCHITECTURES = (90, 80, 100)


def refusal(variant: dict, functions: Callable[[str, int], object]) -> BaseException | None:
    """What Triton raises on a kernel that its launcher or the compiler's front end (Python to Triton's IR) refuses, and
    None when they take it.

    Args:
        variant: of :func:`record_variants`.
        functions: called with a function's name and first line, gives the JITFunction or raises LookupError.

    Raises:
        Exception: the compiler was not asked, or failed for another reason than the kernel; that is no refusal.
    """
    if "unbound" in variant:
        return TypeError(variant["unbound"])
    function = functions(variant["kernel"], variant["line"])
    constants = {tuple(path): received(sent, functions) for path, sent in variant["constants"]}
    first = None
    for architecture in ARCHITECTURES:
        refused = triton_internals.front_end(
            function, variant["signature"], constants, variant["options"], architecture
        )
        if refused is None:
            return None
        first = first or refused
    return first


def find_function(namespace: dict, code: types.CodeType, name: str, line: int) -> object:
    """The JITFunction of a name and first line, from a cell's namespace or, inside a function, from the cell's code.

    Raises:
        LookupError: there is none, or it needs another function's variables.
    """
    import triton

    for value in list(namespace.values()):
        function = triton_internals.jit_function(value)
        if function is not None and _is_at(function.fn.__code__, name, line):
            return function
    inner = [code]
    while inner:
        candidate = inner.pop()
        inner += [constant for constant in candidate.co_consts if isinstance(constant, types.CodeType)]
        if _is_at(candidate, name, line) and not candidate.co_freevars:
            return triton.jit(types.FunctionType(candidate, namespace, name))
    raise LookupError(name)


def _is_at(code: types.CodeType, name: str, line: int) -> bool:
    return (code.co_name, code.co_firstlineno) == (name, line)


@functools.lru_cache(maxsize=1)
def front_end_is_known() -> bool:
    """Whether this Triton's front end can be asked; tried once, on a kernel that it takes and one that it refuses."""
    if triton_internals.interpreting():
        return False
    launch = {"line": 0, "constants": known_kernels.CONSTANTS, "options": {"num_warps": 4}}
    try:
        taken, refused = (
            refusal(
                {**launch, "kernel": name, "signature": {**known_kernels.TYPES}},
                lambda name, line: known_kernels.jit(name),
            )
            for name in ("taken_kernel", "refused_kernel")
        )
        return taken is None and refused is not None and "Loop-carried variable" in str(refused)
    except Exception:
        return False
