"""The only file of the course that touches what Triton does not promise to keep: here a new version is adapted to.

Nothing here decides anything; the others ask in their own terms. Whether this Triton is one that is known is proved by
kernels whose counts and refusals are known (see `self_test` and `front_end`); where that fails, the meter is off.
Triton is imported when first asked for, since it is not on every machine.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator

import numpy as np
import torch

from .results import Launch, MeterUnavailable

NO_ARGUMENT = "failed to specialize argument"  # Triton's words on a value that it cannot hand to a kernel
NO_KERNEL = "Cannot call @triton.jit'd outside of the scope of a kernel"  # its words on one without a grid
_NO_REFUSAL = (MemoryError, OSError, ImportError)  # wrapped by the compiler like all that is raised while it reads


def versions() -> str:
    import triton

    return f"Seen: Triton {triton.__version__}, NumPy {np.__version__}, PyTorch {torch.__version__}."


def interpreting() -> bool:
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Sets an attribute and restores it exactly, deleting it where it was only inherited."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is missing else setattr(owner, name, before)


# --------------------------------------------------------------------------------------------- the interpreter's memory


@contextlib.contextmanager
def memory_behind(shim: Callable[[object], object]) -> Iterator[None]:
    """Puts ``shim(memory)`` where the interpreter looks for the module through which it touches memory."""
    from triton.runtime import interpreter

    with replaced(interpreter, "_interpreter", shim(interpreter._interpreter)):
        yield


@contextlib.contextmanager
def filled_loads(filling: Callable[[str, tuple[int, ...]], np.ndarray | None]) -> Iterator[None]:
    """Asks ``filling(type, shape)`` for what a load gives in lanes that are masked off, where ``other=`` is missing.

    Triton's `load` asks for the truth of `other`. In the interpreter the one element of a scalar has one, so that its
    0.0 is lost on the way to the builder, which is why the arguments of that `load` are looked at too.
    """
    from triton.runtime import interpreter

    # The class: Triton 3.6 makes a `TritonSemantic` for every call.
    builder, semantic = interpreter.interpreter_builder, type(interpreter.interpreter_semantic)
    original, asked = builder.create_masked_load, semantic.load
    was_given = False

    def noting(self, pointer, mask, other, *rest, **more):
        nonlocal was_given
        was_given = other is not None
        try:
            return asked(self, pointer, mask, other, *rest, **more)
        finally:
            was_given = False

    def load(pointers, mask, other, *rest, **more):
        if other is None and not was_given and not mask.data.all():
            values = filling(str(pointers.get_element_ty()), pointers.data.shape)
            other = None if values is None else interpreter.TensorHandle(values, pointers.get_element_ty())
        return original(pointers, mask, other, *rest, **more)

    with replaced(semantic, "load", noting), replaced(builder, "create_masked_load", load):
        yield


@contextlib.contextmanager
def tagged_pointers(address: Callable[[object], int | None]) -> Iterator[None]:
    """Gives a pointer argument the address that ``address(host tensor)`` says; a descriptor's base as well."""
    from triton.runtime import interpreter

    original = interpreter._implicit_cvt

    def convert(argument):
        converted = original(argument)
        tagged = address(argument)
        if tagged is not None and hasattr(argument, "data_ptr"):
            converted.handle.data = np.array([tagged], dtype=np.uint64)
        return converted

    with replaced(interpreter, "_implicit_cvt", convert):
        yield


@contextlib.contextmanager
def copied_arguments(
    copying: Callable[[], contextlib.AbstractContextManager], notify: Callable[[str, dict, dict], None]
) -> Iterator[None]:
    """Calls ``notify(kernel, given, host)`` at every launch: its arguments by parameter, and their copies on the host.

    The interpreter copies them within ``copying()``.
    """
    from triton.runtime import interpreter

    executor = interpreter.GridExecutor
    original = executor._init_args_hst

    def init_args(self, args, kwargs):
        with copying():
            hosts, host_kwargs = original(self, args, kwargs)
        given, host = {}, {}
        # Wrong arguments: the executor makes the same call next and raises this.
        with contextlib.suppress(TypeError):
            given = inspect.getcallargs(self.fn, *args, **kwargs)
            host = inspect.getcallargs(self.fn, *hosts, **host_kwargs)
        notify(self.fn.__name__, given if host else {}, host)
        return hosts, host_kwargs

    with replaced(executor, "_init_args_hst", init_args):
        yield


def running_program() -> tuple[int, int, int]:
    from triton.runtime.interpreter import interpreter_builder

    return tuple(interpreter_builder.grid_idx)


@contextlib.contextmanager
def renumbered_programs(number: Callable[[int, int], int]) -> Iterator[None]:
    """Has program ``number(turn, turns)`` of a launch run where the interpreter would run program ``turn``.

    The interpreter says which program is next before it runs it; here another is put in its place.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    original = builder.set_grid_idx

    def set_next(x, y, z):
        planes, rows, columns = _three(builder.grid_dim)
        chosen = number((x * rows + y) * columns + z, planes * rows * columns)
        return original(chosen // (rows * columns), chosen // columns % rows, chosen % columns)

    with replaced(builder, "set_grid_idx", set_next):
        yield


# ------------------------------------------------------------------------------------------------------------- launches


@contextlib.contextmanager
def interpreted_launches(notify: Callable[[Launch], None]) -> Iterator[None]:
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    call, set_grid = executor.__call__, builder.set_grid_dim
    running: list = []

    def remembering(self, *args, **kwargs):
        running.append(self.fn)
        try:
            return call(self, *args, **kwargs)
        finally:
            running.pop()

    def announcing(*grid):  # called once for every launch, after the grid is known and before the first program
        if running:
            code = running[-1].__code__
            notify(Launch(running[-1].__name__, _three(grid), code.co_filename, code.co_firstlineno))
        return set_grid(*grid)

    with replaced(executor, "__call__", remembering), replaced(builder, "set_grid_dim", announcing):
        yield


@contextlib.contextmanager
def compiled_launches(notify: Callable[[Launch], None]) -> Iterator[None]:
    try:
        from triton.compiler.compiler import CompiledKernel

        prepare = CompiledKernel.launch_metadata  # called for each launch, whichever way it was asked for
    except (ImportError, AttributeError) as error:
        raise MeterUnavailable(f"Launches cannot be recorded: {error}. {versions()}") from error

    def announcing(self, grid, stream, *args):
        code = getattr(getattr(getattr(self.src, "fn", None), "fn", None), "__code__", None)
        file, line = (code.co_filename, code.co_firstlineno) if code else ("unknown", 0)
        notify(Launch(self.name, _three(grid), file, line))
        return prepare(self, grid, stream, *args)

    with replaced(CompiledKernel, "launch_metadata", announcing):
        yield


def _three(grid) -> tuple[int, int, int]:
    x, y, z, *_ = (*(int(extent) for extent in grid), 1, 1)
    return x, y, z


@contextlib.contextmanager
def interpreted_calls(notify: Callable[[object, tuple, dict], None]) -> Iterator[None]:
    """Calls ``notify(kernel, args, kwargs)`` before each interpreted launch. What is called without a grid, outside of
    a kernel, raises what it raises on a GPU."""
    from triton.runtime.interpreter import InterpretedFunction

    run, call = InterpretedFunction.run, InterpretedFunction.__call__
    running: list = []

    def called(self, *args, **kwargs):
        if not running:
            raise RuntimeError(NO_KERNEL)
        return call(self, *args, **kwargs)

    def recording(self, *args, grid, warmup, **kwargs):
        notify(self, args, kwargs)
        running.append(self)
        try:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            running.pop()

    with replaced(InterpretedFunction, "run", recording), replaced(InterpretedFunction, "__call__", called):
        yield


# --------------------------------------------------------------------------------- how a compiler's launcher would bind


def bound_launch(interpreted, args: tuple, kwargs: dict) -> tuple[dict[str, object], list[tuple], dict[str, object]]:
    """A launch as a GPU's launcher binds it (JITFunction.run and ._pack_args): the parameters' types in Triton's form,
    the constants as (path, value), and the options."""
    from triton._utils import find_paths_if, get_iterable_path

    bound, specialization, options = _binder(interpreted)(*args, **kwargs)
    kinds, values = [pair[0] for pair in specialization], list(bound.values())
    paths = find_paths_if(kinds, lambda _, kind: kind == "constexpr")
    return dict(zip(bound, kinds)), [(path, get_iterable_path(values, path)) for path in paths], options


@functools.lru_cache(maxsize=256)
def _binder(interpreted):
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    function = JITFunction(interpreted.fn, **interpreted.kwargs)
    return create_function_from_signature(function.signature, function.params, BaseBackend)


def jit_function(value: object):
    """The JITFunction under autotuners and heuristics, which wrap a kernel, and each other; None of other things."""
    from triton.runtime.jit import JITFunction

    for _ in range(8):
        if isinstance(value, JITFunction) or not hasattr(value, "fn"):
            break
        value = value.fn
    return value if isinstance(value, JITFunction) else None


# -------------------------------------------------------------------------------------------- the compiler's front end


def front_end(function, signature: dict, constants: dict, options: dict, architecture: int) -> Exception | None:
    """What the beginning of triton.compile raises on a kernel that it refuses. There is no pass in it, no LLVM and no
    ptxas; it takes milliseconds and needs no driver."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    source = ASTSource(function, signature, constants, {})
    try:
        parsed = backend.parse_options(dict(options))
    except (AssertionError, ValueError) as error:  # a number of warps that is no power of two
        return error
    unknown = [name for name in options if not hasattr(parsed, name)]
    if unknown:
        return KeyError(f"Keyword argument {unknown[0]} was specified but unrecognised")
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    implementation, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    try:
        source.hash()  # looks through the functions that the kernel calls
        source.make_ir(target, parsed, implementation, modules, context)
    except Exception as error:
        if not _is_refusal(error):
            raise
        return error
    return None


def _is_refusal(error: BaseException) -> bool:
    from triton.compiler.errors import CompilationError

    if not isinstance(error, CompilationError):
        return type(error) is RuntimeError and str(error).startswith("Unsupported function referenced")
    innermost: BaseException = error
    while innermost.__cause__ is not None:
        innermost = innermost.__cause__
    if isinstance(innermost, _NO_REFUSAL):
        return False
    said = str(getattr(innermost, "error_message", None) or "")  # an exception's repr, where its cause was dropped
    return not re.match("|".join(rf"(?:\w+\.)?{fault.__name__}\(" for fault in _NO_REFUSAL), said)


# -------------------------------------------------------------------------------------------------------------- repairs


def repair_interpreter() -> bool:
    """Lets the interpreter run what it refuses and compiled kernels do: each of the repairs below, where it is needed.

    Returns whether anything was repaired now. Call it before the first interpreted launch. A Triton whose inside is not
    the one known here stays as it is.
    """
    repaired = False
    for repair in _REPAIRS:
        with contextlib.suppress(Exception):
            repaired = repair() or repaired
    return repaired


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
        tensor.__index__ = lambda self: int(self.handle.data.item())  # the launch's scope restores what was there

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


def _repair_patching() -> bool:
    """A quarter of the interpreter's time: it lists the members of triton.language at each launch and nested call.

    The builtins among them are the same each time; they are listed once, while none of them is patched.
    """
    import inspect

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


_REPAIRS = (_repair_loops, _repair_conditions, _repair_numbers, _repair_imports, _repair_tuning, _repair_patching)
