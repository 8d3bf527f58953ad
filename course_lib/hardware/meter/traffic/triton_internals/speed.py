"""The interpreter, quicker by half: what it works out anew for every operation and launch is worked out once.

The numbers stay the same. Each function below proves itself against what it replaces, and puts nothing in its place
where the two differ or where Triton's inside is not the one known here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable


def quicken_interpreter() -> bool:
    """Put the quicker parts in place; returns whether anything was."""
    quickened = False
    for quicken in _QUICKER:
        with contextlib.suppress(Exception):
            quickened = quicken() or quickened
    return quickened


def _checks_of_overflow() -> bool:
    """Each sum of integers is worked out in 64 bits besides, for an assertion that is off unless one debugs."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if builder.options.debug or not builder.options.sanitize_overflow:
        return False
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    return True


def _numpy_types() -> bool:
    """NumPy's type for Triton's: the table of all is built at each question."""
    import triton.language as tl
    from triton.runtime import interpreter

    slow = interpreter._get_np_dtype
    if hasattr(slow, "known"):
        return False
    known: dict[str, object] = {}

    def numpy_type(kind):
        name = kind.scalar.name
        if name not in known:
            known[name] = slow(kind)
        return known[name]

    samples = [tl.int1, tl.float16, tl.bfloat16, tl.int64, tl.pointer_type(tl.float32), tl.float8e5]
    samples += [tl.block_type(sample, [4]) for sample in samples]
    if any(numpy_type(sample) != slow(sample) for sample in [*samples, *samples]):
        return False
    numpy_type.known = known  # type: ignore[attr-defined]
    interpreter._get_np_dtype = numpy_type
    return True


def _block_types() -> bool:
    """The type of a tile: its shape is unwrapped, checked and written out for each tile anew."""
    import triton.language as tl

    kind = tl.core.block_type
    slow = kind.__init__
    if hasattr(slow, "known"):
        return False
    known: dict[tuple, dict] = {}

    def init(self, element_ty, shape):
        extents = shape.values if isinstance(shape, tl.core.tuple) else shape
        if not isinstance(extents, list) or not all(type(extent) is int for extent in extents):
            return slow(self, element_ty, shape)
        key = (element_ty.name, *extents)
        if key not in known:
            slow(self, element_ty, shape)
            known[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
            return
        self.element_ty = element_ty
        vars(self).update(known[key])

    shapes, elements = ([4], [2, 8], tl.block_type(tl.int1, [32, 2]).shape), (tl.float32, tl.pointer_type(tl.float16))
    if not all(_makes_the_same(kind, init, element, shape) for shape in shapes for element in elements):
        return False
    init.known = known  # type: ignore[attr-defined]
    kind.__init__ = init
    return True


def _tensors() -> bool:
    """A tile itself: its shape is made of Triton's constants, for each tile anew."""
    import triton.language as tl

    kind, plain_tuple = tl.core.tensor, tuple
    slow = kind.__init__
    if hasattr(slow, "known"):
        return False
    known: dict[tuple, dict] = {}

    def init(self, handle, type):
        key = plain_tuple(type.shape) if type.is_block() else ()
        if key not in known:
            slow(self, handle, type)
            same = {"shape", "numel"}
            if all(extent.__class__ is int for extent in key) and set(vars(self)) == same | {"handle", "type", "dtype"}:
                known[key] = {name: vars(self)[name] for name in same}
            return
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        vars(self).update(known[key])

    types = (tl.int32, tl.pointer_type(tl.float16), tl.block_type(tl.float32, [4]), tl.block_type(tl.int1, [2, 8]))
    if not all(_makes_the_same(kind, init, None, type) for type in types):
        return False
    init.known = known  # type: ignore[attr-defined]
    kind.__init__ = init
    return True


def _makes_the_same(kind: type, init: Callable, *arguments: object) -> bool:
    """Whether `init` makes of these arguments what the kind's own does, when it first sees them and later."""
    expected = _said(kind(*arguments))
    for _ in range(2):
        found: object = object.__new__(kind)
        init(found, *arguments)
        if _said(found) != expected:
            return False
    return True


def _said(value: object) -> dict[str, str]:
    """An object's attributes, written out."""
    return {name: f"{kind.__class__.__name__} {kind}" for name, kind in vars(value).items()}


def _broadcasts() -> bool:
    """Two scalars, or two tiles of one shape, need no broadcast: both are what they are."""
    import triton.language as tl
    from triton.runtime import interpreter

    semantic = type(interpreter.interpreter_semantic)
    slow = semantic.broadcast_impl_value
    if hasattr(slow, "quick"):
        return False

    def broadcast(self, left, right):
        one, other = left.type, right.type
        blocks = one.is_block(), other.is_block()
        if not any(blocks) or all(blocks) and one.shape is other.shape:
            return left, right
        return slow(self, left, right)

    for kind in (tl.int32, tl.block_type(tl.float32, [2, 4])):
        left, right = tl.tensor(None, kind), tl.tensor(None, kind)
        for found in (broadcast, slow):
            if not all(map(_same, found(interpreter.interpreter_semantic, left, right), (left, right))):
                return False
    broadcast.quick = True  # type: ignore[attr-defined]
    semantic.broadcast_impl_value = broadcast
    return True


def _same(one: object, other: object) -> bool:
    return one is other


def _builtins() -> bool:
    """Triton's builtins: each launch, and each call of a function within a kernel, looks for them in its modules."""
    import triton.language as tl
    from triton.runtime import interpreter

    slow = interpreter._patch_builtin
    if hasattr(slow, "builtins_of") or list(inspect.signature(slow).parameters) != ["pkg", "builder", "scope"]:
        return False
    builtins_of: dict[object, list[str]] = {}

    def patch_builtin(pkg, builder, scope):
        if pkg not in builtins_of:
            found = [name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]
            if not found:  # patched already, by the launch that this nested call is part of
                return
            builtins_of[pkg] = found
        names = builtins_of[pkg]
        if not tl.core.is_builtin(getattr(pkg, names[0])):
            return
        for name in names:
            member = getattr(pkg, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    class Pkg:
        """What the two must patch alike."""

        load, other = tl.load, staticmethod(len)

    class Scope:
        def __init__(self):
            self.names = []

        def set_attr(self, pkg, name, value):
            self.names.append(name)

    one, two = Scope(), Scope()
    slow(Pkg, None, one)
    patch_builtin(Pkg, None, two)
    if one.names != two.names or one.names != ["load"]:
        return False
    patch_builtin.builtins_of = builtins_of  # type: ignore[attr-defined]
    interpreter._patch_builtin = patch_builtin
    return True


def _nested_calls() -> bool:
    """A function of the kernel's own module, called within it, finds the interpreter's functions there already."""
    from triton.runtime import interpreter

    slow = interpreter._patch_lang
    if hasattr(slow, "quick") or not hasattr(interpreter, "_LangPatchScope"):
        return False
    patched: list[dict] = []  # the globals of what runs; a call within a kernel restores nothing, its launch does

    def patch_lang(function):
        names = function.__globals__
        if any(names is others for others in patched):
            return interpreter._LangPatchScope()  # with nothing to restore
        place = len(patched)
        scope = slow(function)
        patched.append(names)
        restore = scope.restore

        def restore_all():
            del patched[place:]
            restore()

        scope.restore = restore_all
        return scope

    vars(patch_lang).update(vars(slow), quick=True)
    interpreter._patch_lang = patch_lang
    return True


_QUICKER = (_checks_of_overflow, _numpy_types, _block_types, _tensors, _broadcasts, _builtins, _nested_calls)
