"""The compiler view: what a kernel becomes on any NVIDIA architecture, on a machine with or without a GPU.

    view = compile_view(add_kernel, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "length": "i32"}, {"BLOCK": 1024})
    view.registers, view.shared_bytes, view.instructions

The work happens in `worker.py`, in a process of its own, because a process that interprets kernels cannot
compile them. The kernel travels by its source, with the helpers and constants it names, so one that was defined in a
notebook cell compiles as well as one in a file. Signature entries are Triton's: "*fp16" a pointer to float16, "i32" an
integer, "fp32" a number, "tensordesc<fp16[128,64]>" a tensor descriptor.
"""

import os
import pickle
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from course_lib.hardware.compiler import process
from course_lib.hardware.compiler.compiled import Comparison, CompiledKernel, CompileError, read_result
from course_lib.hardware.compiler.request import prepare

__all__ = ["Comparison", "CompileError", "CompiledKernel", "compile_many", "compile_view", "compile_views"]

PROCESSOR_SECONDS = 300.0  # for one kernel, by default; the slowest of the course takes 6


def compile_view(
    kernel: object,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object] | None = None,
    *,
    arch: int | str = 90,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible: Iterable[str] | None = None,
    want_sass: bool = False,
    **options: object,
) -> CompiledKernel:
    """Compiles one kernel for one architecture and says what became of it.

    kernel      a @triton.jit or @gluon.jit function, autotuned or not
    signature   type of every run-time parameter, by name
    constexprs  value of every tl.constexpr parameter without a default, by name; a value given here for a run-time
                parameter fixes it, as a launch does with a stride of 1
    arch        a key of ARCHITECTURES, or "sm_90"
    divisible   names of parameters that are multiples of 16 (pointers: addresses), which wide loads depend on. Default:
                all pointers and all integers with "stride" in their name, as at a launch on tensors of round sizes
    options     further compiler options, such as num_ctas or maxnreg

    Raises TypeError for what is no kernel, ValueError for an unknown architecture or an incomplete signature,
    CompileError with the compiler's words where it refuses.
    """
    request = {
        "kernel": kernel,
        "signature": signature,
        "constexprs": constexprs or {},
        "arch": arch,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "divisible": divisible,
        "want_sass": want_sass,
        **options,
    }
    (view,) = compile_many([request])
    if isinstance(view, CompileError):
        raise view
    return view


def compile_views(
    kernel: object,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object] | None = None,
    *,
    archs: Iterable[int | str] = (75, 80, 90),
    **configuration: object,
) -> Comparison:
    """:func:`compile_view` for several architectures, side by side. Raises what it raises."""
    views = compile_many(
        [
            {"kernel": kernel, "signature": signature, "constexprs": constexprs or {}, "arch": arch, **configuration}
            for arch in archs
        ]
    )
    compiled = []
    for view in views:
        if isinstance(view, CompileError):
            raise view
        compiled.append(view)
    return Comparison(tuple(compiled))


def compile_many(
    requests: Iterable[Mapping], *, jobs: int | None = None, processor_seconds: float = PROCESSOR_SECONDS
) -> list[CompiledKernel | CompileError]:
    """Compiles many kernels in as few processes as there are cores; a result or a CompileError for each, in order.

    Each request is a dict of :func:`compile_view`'s arguments by name. Bad arguments raise at once, before anything is
    compiled. Equal requests are compiled once.

    jobs               processes at most; default: one for each core
    processor_seconds  of one kernel. Other programs on the machine slow the compiler down and do not end it.
    """
    return compile_prepared([prepare(**request) for request in requests], jobs, processor_seconds)


def compile_prepared(
    prepared: list[dict], jobs: int | None = None, processor_seconds: float = PROCESSOR_SECONDS
) -> list[CompiledKernel | CompileError]:
    """:func:`compile_many` of what `prepare` has made of its requests, in this process or another."""
    if not prepared:
        return []
    keys = [pickle.dumps(request) for request in prepared]
    once = dict(zip(keys, prepared))
    shares = _shares(list(once), jobs or os.cpu_count() or 1)
    results: dict[bytes, dict] = {}
    with ThreadPoolExecutor(len(shares)) as pool:  # a thread only waits for its process
        for share, answers in zip(
            shares, pool.map(lambda share: process.compile_share(share, processor_seconds), shares)
        ):
            results.update(zip(share, answers))
    return [read_result(request, results[key]) for request, key in zip(prepared, keys)]


def _shares(keys: list[bytes], jobs: int) -> list[list[bytes]]:
    """The requests dealt out to at most `jobs` processes; a new process is worth it for four kernels."""
    jobs = max(1, min(jobs, -(-len(keys) // 4)))
    return [keys[start::jobs] for start in range(jobs)]
