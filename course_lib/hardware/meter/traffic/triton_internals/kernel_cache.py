"""The compiler's cache: keyed by what a kernel means, and filled where no GPU is open."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from collections.abc import Callable, Iterator

import torch

from .interpreted import replaced

# An assertion on the device tells the line that it stands in, which a kernel of another place would tell wrongly.
_TELLS_ITS_LINE = re.compile(r"(?<!static_)\bassert\b|device_assert")


def recognise_kernels_by_meaning() -> bool:
    """Has Triton find a compiled kernel again where remarks, a docstring, layout or its place in the file are others.

    Triton's key holds a kernel's text and first line, so a remark would have all be compiled anew. What is compiled is
    the same, but for line numbers that only a debugger reads.

    Returns:
        Whether this Triton is one in which that can be had.
    """
    try:
        from triton.runtime import jit

        owner = getattr(jit, "JITCallable", jit.JITFunction)
        asked, finder = vars(owner)["cache_key"].fget, jit.DependenciesFinder
    except (ImportError, AttributeError, KeyError):
        return False

    class ByMeaning(finder):  # type: ignore[misc, valid-type]
        def __init__(self, name, globals, nonlocals, src) -> None:  # as Triton calls them
            super().__init__(name, globals, nonlocals, meaning(src))

    def cache_key(self):
        place = self.starting_line_number
        if not _TELLS_ITS_LINE.search(self._src):
            self.starting_line_number = 0
        try:
            return asked(self)
        finally:
            self.starting_line_number = place

    jit.DependenciesFinder = ByMeaning
    owner.cache_key = property(cache_key)
    return True


def prepare_compiler(architecture: int) -> None:
    """Work out once, for all processes that are forked from here on, what the compiler's keys hold of Triton itself.

    That is a hash of 400 MB of its own files, a quarter of a second of every process that compiles or finds a kernel.
    """
    with contextlib.suppress(Exception):  # then each process does it by itself
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend
        from triton.runtime.cache import triton_key

        triton_key()
        make_backend(GPUTarget("cuda", architecture, 32)).hash()


@functools.lru_cache(maxsize=256)
def meaning(source: str) -> str:
    """A function's text without what the compiler does not read; all of it where a line number is part of that."""
    if _TELLS_ITS_LINE.search(source):
        return source
    try:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and ast.get_docstring(node) is not None:
                del node.body[0]
        return ast.dump(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the compiler itself will tell
        return source


class _NoDriver:
    """Stands in for Triton's driver where kernels are compiled, and none is launched."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self):
        """An autotuner's: each configuration is called once, and so compiled."""

        def once(call, quantiles=(), **how):
            call()
            return [1.0] * len(quantiles) if quantiles else 1.0

        return once


@contextlib.contextmanager
def compiled_elsewhere(architecture: int, start: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Within this a launch launches nothing: it hands what compiles its kernel to `start`, each variant once.

    Neither a GPU nor a driver is opened; tensors lie on the CPU.

    Args:
        architecture: the compute capability to compile for, 90 for (9, 0).
        start: called with a task that leaves the kernel and the launcher for its signature in Triton's cache, or fails.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compile_now, begun = JITFunction._do_compile, set()

    def do_compile(self, key, *args, **kwargs):
        variant = (self.cache_key, str(key))
        if variant not in begun:
            begun.add(variant)
            start(lambda: _compile_launcher(compile_now(self, key, *args, **kwargs)))
        return None  # nothing to launch

    before = driver._active
    driver.set_active(_NoDriver(architecture))
    try:
        with replaced(JITFunction, "_do_compile", do_compile):
            yield
    finally:
        driver._active = before


def _compile_launcher(kernel) -> None:
    """Triton up to 3.8 compiles a C function for each signature, half a second each."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)
