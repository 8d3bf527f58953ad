"""The compiler: its launches, how its launcher would bind one, and its front end."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator

from ..results import Launch, MeterUnavailable
from .interpreted import replaced, three
from .versions import interpreting, versions

NO_ARGUMENT = "failed to specialize argument"  # Triton's words on a value that it cannot hand to a kernel
_NO_REFUSAL = (MemoryError, OSError, ImportError)  # wrapped by the compiler like all that is raised while it reads


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
        notify(Launch(self.name, three(grid), file, line))
        return prepare(self, grid, stream, *args)

    with replaced(CompiledKernel, "launch_metadata", announcing):
        yield


@contextlib.contextmanager
def launches_through(around: Callable) -> Iterator[None]:
    """Calls ``around(kernel, grid, args, settings, start)`` in place of each launch, interpreted or compiled; it calls
    ``start()``, which gives what the launch gives: the compiled kernel, or None. Warming up is no launch."""
    try:
        if interpreting():
            from triton.runtime.interpreter import InterpretedFunction as Kernel
        else:
            from triton.runtime.jit import JITFunction as Kernel
        run = Kernel.run
    except (ImportError, AttributeError) as error:
        raise MeterUnavailable(f"Launches cannot be seen: {error}. {versions()}") from error

    def running(self, *args, grid, warmup, **settings):
        def start():
            return run(self, *args, grid=grid, warmup=warmup, **settings)

        return start() if warmup else around(self, grid, args, settings, start)

    with replaced(Kernel, "run", running):
        yield


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

    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
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
