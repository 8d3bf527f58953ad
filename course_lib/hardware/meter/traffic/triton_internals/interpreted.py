"""The interpreter, watched: its memory, its loads, its pointers, its programs and its launches."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator

import numpy as np

from ..results import Launch

NO_KERNEL = "Cannot call @triton.jit'd outside of the scope of a kernel"  # Triton's words on one without a grid


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
def products_told(notice: Callable[[tuple[int, ...], tuple[int, ...], tuple[int, int]], None]) -> Iterator[None]:
    """Calls ``notice(left, right, bits)`` before each `tl.dot`: the tiles' shapes, and the bits of their elements."""
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def telling(self, left, right, *others):
        bits = (left.dtype.primitive_bitwidth, right.dtype.primitive_bitwidth)
        notice(left.data.shape, right.data.shape, bits)
        return multiply(self, left, right, *others)

    with replaced(InterpreterBuilder, "create_dot", telling):
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
        planes, rows, columns = three(builder.grid_dim)
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
            notify(Launch(running[-1].__name__, three(grid), code.co_filename, code.co_firstlineno))
        return set_grid(*grid)

    with replaced(executor, "__call__", remembering), replaced(builder, "set_grid_dim", announcing):
        yield


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


def three(grid) -> tuple[int, int, int]:
    x, y, z, *_ = (*(int(extent) for extent in grid), 1, 1)
    return x, y, z
