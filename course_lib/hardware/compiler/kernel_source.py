"""A kernel packed for another process: its source, and the helpers, constants and modules that it names.

A notebook's kernel lives in no importable module, and importing a course module would start more than a compiler needs.
So nothing is imported: from the live function, every name in its source is followed to what it means here, and that is
sent along, helper kernels by their own source in turn. Functions with the same globals share one namespace over there,
so that equal names of different files cannot meet.
"""

import ast
import importlib.util
import inspect
import pickle
import re
import sys
import textwrap
import types


class KernelSource:
    """Raises TypeError when ``kernel`` is no jit function, ValueError when its source cannot be read."""

    def __init__(self, kernel):
        self.function = function_of(kernel)
        self.name = self.function.__name__
        self.missing: dict[str, str] = {}  # name -> why it could not be sent; only told when the compiler misses it
        self._namespaces: list[dict] = []
        self._numbers: dict[int, int] = {}  # id of a globals dict -> number of its namespace
        self._packed: dict[types.FunctionType, tuple[int, str]] = {}
        self._meanings: dict[tuple[int, str], object] = {}  # (namespace, name) -> the one object it stands for there
        self._kernel = self._add_function(kernel)
        _, offset = source_of(self.function)
        self.first_line = inspect.getsourcelines(self.function)[1] + offset

    def packed(self, constexprs: dict) -> dict:
        """What worker.py rebuilds the kernel from, with the values of its constexpr parameters."""
        links: dict[str, tuple[int, str]] = {}
        values: dict[str, tuple[str, object] | None] = {}
        for name, value in constexprs.items():
            if decorator_of(value):
                links[name], values[name] = self._add_function(value), None
            else:
                values[name] = encoded(value)
        return {
            "namespaces": self._namespaces,
            "kernel": self._kernel,
            "constexprs": values,
            "function_constexprs": links,
        }

    def _add_function(self, kernel) -> tuple[int, str]:
        function = function_of(kernel)
        if function in self._packed:
            return self._packed[function]
        number = self._numbers.setdefault(id(function.__globals__), len(self._namespaces))
        if number == len(self._namespaces):
            self._namespaces.append({"functions": [], "constants": {}, "modules": {}, "imports": {}, "links": {}})
        self._packed[function] = (number, function.__name__)
        self._claim(number, function.__name__, function)
        source, _ = source_of(function)
        visible = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name) and node.id in visible:
                self._add_name(number, node.id, visible[node.id])
        self._namespaces[number]["functions"].append((function.__name__, decorator_of(kernel), source))
        return self._packed[function]

    def _claim(self, number: int, name: str, value) -> bool:
        """Gives a name its meaning in a namespace; False when it already has it."""
        missing = object()
        before = self._meanings.setdefault((number, name), missing)
        if before is not missing and before is not value:
            raise ValueError(f"{self.name} and the helpers it calls mean two different things by {name!r}; rename one")
        self._meanings[number, name] = value
        return before is missing

    def _add_name(self, number: int, name: str, value) -> None:
        space = self._namespaces[number]
        is_kernel = decorator_of(value) is not None
        if not self._claim(number, name, function_of(value) if is_kernel else value):
            return
        if is_kernel and function_of(value).__module__.partition(".")[0] == "triton":  # tl.sum and its like
            space["imports"][name] = (function_of(value).__module__, function_of(value).__name__)
        elif is_kernel:
            target = self._add_function(value)
            if target != (number, name):
                space["links"][name] = target
        elif isinstance(value, types.ModuleType):
            space["modules"][name] = value.__name__
        elif isinstance(value, type) or inspect.isroutine(value):
            if importable(value):
                space["imports"][name] = (value.__module__, value.__qualname__)
            else:
                self.missing[name] = "it is a plain function or class; kernels may call @triton.jit functions"
        else:
            try:
                space["constants"][name] = encoded(value)
            except (TypeError, AttributeError, pickle.PicklingError):
                self.missing[name] = f"it is a {type(value).__name__}; kernels see numbers, strings and tl.constexpr"


def function_of(kernel) -> types.FunctionType:
    """The Python function under @jit, autotuners and heuristics."""
    inner = kernel
    while not isinstance(inner, types.FunctionType) and hasattr(inner, "fn"):
        inner = inner.fn
    if not isinstance(inner, types.FunctionType) or inner is kernel:
        raise TypeError(
            f"expected a kernel, a function decorated with @triton.jit; got {type(kernel).__name__} "
            f"{getattr(kernel, '__name__', kernel)!r}. Pass the kernel itself, not its launcher"
        )
    return inner


def name_of(kernel) -> str:
    named = getattr(kernel, "__name__", None) or getattr(getattr(kernel, "fn", None), "__name__", None)
    return named or repr(kernel)


def decorator_of(value) -> str | None:
    """The decorator to write above a jit function's source over there, or None for other things."""
    inner = value
    while hasattr(inner, "fn") and not isinstance(inner.fn, types.FunctionType):
        inner = inner.fn
    kind = type(inner).__name__
    return {
        "JITFunction": "triton.jit",
        "InterpretedFunction": "triton.jit",
        "GluonJITFunction": "gluon.jit",
        "ConstexprFunction": "triton.constexpr_function",
    }.get(kind)


def source_of(function: types.FunctionType) -> tuple[str, int]:
    """(source from its "def" on, lines of decorators above it)."""
    try:
        lines, _ = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise ValueError(
            f"the source of {function.__name__} cannot be read ({error}); define it in a file or a "
            "notebook cell, not through exec"
        ) from error
    source = textwrap.dedent("".join(lines))
    decorators = re.split(r"^(?=def\s)", source, maxsplit=1, flags=re.MULTILINE)[0]
    return source[len(decorators) :], decorators.count("\n")


NO_DEFAULT = inspect.Parameter.empty


def parameters_of(function: types.FunctionType) -> dict[str, tuple[bool, object]]:
    """Parameter -> (is a tl.constexpr, its default or NO_DEFAULT), in order."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        found[parameter.name] = (text.strip("'\" ").endswith("constexpr"), parameter.default)
    return found


def importable(value) -> bool:
    """Whether another process can import this function or class by its module's name."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or "<" in value.__qualname__:
        return False
    return module.__spec__ is not None and importlib.util.find_spec(module.__name__) is not None


def encoded(value) -> tuple[str, object]:
    """A constant for the other process; raises what pickle raises when it cannot travel."""
    kind = type(value).__name__
    if kind == "constexpr":
        return "constexpr", encoded(value.value)
    if kind == "dtype" and type(value).__module__.startswith("triton"):
        return "dtype", value.name
    if type(value).__module__.partition(".")[0] in ("torch", "numpy"):
        raise TypeError(f"{kind} is no constant of a kernel")
    return "pickle", pickle.dumps(value)
