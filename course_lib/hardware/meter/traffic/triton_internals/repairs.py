"""What the interpreter refuses and compiled kernels do, repaired."""

from __future__ import annotations

import contextlib
import types

import numpy as np

from . import speed
from .reductions import quicken_reductions
from .versions import interpreting


def repair_interpreter() -> bool:
    """Lets the interpreter run what it refuses and compiled kernels do: each of the repairs below, where it is needed.

    Then it is made quicker. Returns whether anything was done now. Call it before the first interpreted launch. What
    is not as it is known here stays as it is.
    """
    repaired = False
    for repair in _REPAIRS:
        with contextlib.suppress(Exception):
            repaired = repair() or repaired
    return speed.quicken_interpreter() or repaired if interpreting() else repaired


def _repair_loops() -> bool:
    """Loops with run-time bounds under NumPy 2.4 and later.

    Triton 3.6 turns a loop bound, an array of one element, into an int by ``int(array)``, which NumPy >= 2.4 refuses.
    """
    from triton.runtime import interpreter

    class Probe:
        class handle:
            data = np.array([3], dtype=np.int32)

    class Scope:
        set_attr = staticmethod(setattr)

    patch = interpreter._patch_lang_tensor
    patch(Probe, Scope)
    try:
        range(Probe())  # type: ignore[call-overload]  # the patch has just made it an index
        return False
    except TypeError:
        pass

    def patch_lang_tensor(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())  # the launch's scope restores what was there

    interpreter._patch_lang_tensor = patch_lang_tensor
    return True


def _repair_conditions() -> bool:
    """Conditions on scalars in a mask: ``(lanes < length) & (slot >= 0)``, ``mask & (tl.max(scores) > 0)``.

    The interpreter keeps a comparison in the type of what was compared. That of two scalars, spread over a block, is a
    block of numbers again: integers are no mask ("mask has unsupported dtype"), and floats cannot be combined with one
    ("ufunc 'bitwise_and' not supported").
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle
    one = handle(np.ones(1, dtype=np.float32), tl.float32)
    if builder.create_fcmpOGT(one, one).dtype == tl.int1:
        return False
    original = builder.binary_op

    def binary_op(left, right, operation):
        result = original(left, right, operation)
        return handle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    builder.binary_op = binary_op
    return True


def _repair_numbers() -> bool:
    """A float argument is a float32 in a kernel, as on a GPU, so that ``factor.to(tl.float16)`` works."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._implicit_cvt
    if not isinstance(original(0.5), float):
        return False

    def convert(argument):
        if not isinstance(argument, float):
            return original(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = convert
    return True


def _repair_imports() -> bool:
    """Triton's functions under a name of their own, as after ``from triton.language import load``.

    A launch gives the module triton.language the interpreter's functions; here such names get them too.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    if hasattr(original, "patches_names"):
        return False

    def patch_lang(function):
        names = function.__globals__
        plain = {
            name: value
            for name, value in names.items()
            if isinstance(value, (types.FunctionType, type)) and vars(tl).get(value.__name__) is value
        }
        scope = original(function)
        restore = scope.restore

        def restore_names_too():
            names.update(plain)
            restore()

        scope.restore = restore_names_too
        names.update({name: vars(tl)[value.__name__] for name, value in plain.items()})
        return scope

    patch_lang.patches_names = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_lang
    return True


def _repair_tuning() -> bool:
    """``triton.autotune`` takes the first configuration: there is no GPU to time them on ("0 active drivers")."""
    from triton.runtime.autotuner import Autotuner

    if not interpreting() or isinstance(Autotuner.do_bench, property):
        return False
    Autotuner.do_bench = property(lambda tuner: lambda kernel_call, quantiles: [0.0] * len(quantiles))
    return True


_REPAIRS = (_repair_loops, _repair_conditions, _repair_numbers, _repair_imports, _repair_tuning, quicken_reductions)
