"""How 13.8 runs a kernel in CUDA C++ without a GPU, and the mistakes that show on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from course_lib.checker import Mistake, Requirement
from course_lib.hardware.compiler.nvrtc import missing_nvrtc

# The driver is sent to the worker by its source alone, so it stands by itself.


def run_in_both_orders(functions, x, residual, weight, epsilon, threads, machine):
    """What the kernel makes of its tensors when its threads run in ascending and in descending order.

    machine: the files of `course_lib/hardware/compiler/cuda_on_host.py`, which runs it. Where `nvrtc.py` and
        `cuda_numbers` are among them, the kernel is compiled for an H100 as well, and the widths of its loads and
        stores are noted.
    """
    import importlib.util
    import sys
    import tempfile
    from pathlib import Path

    import torch

    if "cuda_on_host" not in sys.modules:
        folder = Path(tempfile.mkdtemp(prefix="cuda-on-host-"))
        for name, text in machine.items():
            (folder / name).write_text(text)
        for name in [name.removesuffix(".py") for name in machine if name.endswith(".py")]:
            found = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
            sys.modules[name] = importlib.util.module_from_spec(found)
            found.loader.exec_module(sys.modules[name])
    runner = sys.modules["cuda_on_host"]

    learners = functions["cuda_norm_source"]
    source = learners()
    line, plain = 1, getattr(learners, "__wrapped__", learners)
    cell = Path(plain.__code__.co_filename).read_text() if hasattr(plain, "__code__") else ""
    if isinstance(source, str) and source in cell:
        line += cell[: cell.index(source)].count("\n")  # faults then name the line of the cell
    width = 16 // x.element_size()
    element = {torch.float32: "float", torch.float16: "half_bits"}[x.dtype]
    given = f"#define THREADS {threads}\n#define WIDTH {width}\nusing Element = {element};\n"
    given += "struct alignas(16) Vector { Element of[WIDTH]; };\n"
    rows, columns = x.shape
    story = {}
    for order in runner.ORDERS:
        results = {name: torch.full((rows, columns), torch.nan, dtype=x.dtype) for name in ("normalised", "summed")}
        strides = {"x_stride": x.stride(0), "residual_stride": residual.stride(0)}
        arguments = {"x": x, "residual": residual, "weight": weight, **results, "columns": columns, **strides}
        arguments["epsilon"] = float(epsilon)
        runner.run_on_host(
            source, "add_rms_norm", rows, threads, arguments, tuple(results), order=order, line=line, given=given
        )
        story[order] = results
    if "nvrtc.py" in machine:
        nvrtc = sys.modules["nvrtc"]
        try:
            text = f'{machine["cuda_numbers"]}{given}\n#line {line} "kernel.cu"\n{source}'
            usage, sass = nvrtc.read_machine_code(nvrtc.cubin_of(text, 90))
        except nvrtc.Refused as refused:
            raise runner.DoesNotCompile(f"g++ takes the text, and CUDA's own compiler does not: {refused}") from None
        widths = [*nvrtc.widths_of(sass, "LDG").items(), *nvrtc.widths_of(sass, "STG").items()]
        functions.noted["narrow"] = sum(number for width, number in widths if width < 16)
        functions.noted["wide"] = sum(number for width, number in widths if width >= 16)
        functions.noted["local"] = nvrtc.accesses_to_local_memory(sass)
    return story


@dataclass(frozen=True)
class WholeVectors(Requirement):
    """Each load from and store to global memory moves at least 16 bytes; judged where there is NVRTC."""

    id: str = "narrow_accesses"

    def complaint(self, case, seen):
        narrow, wide = seen.noted.get("narrow", 0), seen.noted.get("wide", 0)
        if not narrow:
            return None
        return (
            f"Of the {narrow + wide} loads and stores of global memory in the machine code for an H100, {narrow} move "
            "fewer than 16 bytes. Read a Vector into a variable by one assignment, and write it by one."
        )

    def not_judged(self):
        reason = missing_nvrtc()
        return reason and f"Whether each load has 16 bytes, and nothing is spilled, was not judged. {reason}"


@dataclass(frozen=True)
class NothingInLocalMemory(Requirement):
    """No number leaves the registers but to global or shared memory; judged where there is NVRTC."""

    id: str = "local_memory"

    def complaint(self, case, seen):
        number = seen.noted.get("local", 0)
        if not number:
            return None
        return (
            "The machine code for an H100 reaches local memory, which lies off the chip; its loads and stores there: "
            f"{number}. An array of a thread's own stays in registers only if each index is known when it is compiled: "
            "unroll the loop over it. A `printf` takes some as well."
        )


def _raised(name):
    return lambda case, seen, got: seen.error is not None and seen.error.type == name


def _differ(case, seen, got):
    """Whether the two orders gave different results, beyond what the order of a sum rounds off."""
    if got is None:
        return False
    one, other = got["ascending"], got["descending"]
    return any(not torch.allclose(one[name], other[name], rtol=2e-3, atol=1e-4, equal_nan=True) for name in one)


def _norm_is_nan(case, seen, got):
    """Whether every normalised number is NaN, and no sum is."""
    results = [] if got is None else list(got.values())
    return bool(results) and all(
        result["normalised"].isnan().all() and not result["summed"].isnan().any() for result in results
    )


FAULTS = (
    Mistake(
        "barrier_missing",
        "The result depends on which warp runs first: threads reach the same shared memory with no barrier between "
        "them. Put __syncthreads between the write and the read, and where the memory is written again, between the "
        "read and the next write. Between lanes of one warp __syncwarp will do.",
        when=lambda case, seen, got: case.args[0].shape[0] == 1 and _differ(case, seen, got),
        first=True,
    ),
    Mistake(
        "rows_collide",
        "The result depends on which block runs first, and with one row it does not: several blocks write to the same "
        "row of a result. Row blockIdx.x begins blockIdx.x * columns numbers behind the first.",
        when=lambda case, seen, got: case.args[0].shape[0] > 1 and _differ(case, seen, got),
        first=True,
    ),
    Mistake(
        "shared_memory_unset",
        "Every normalised number is NaN, as shared memory is before somebody writes it. Either a lane reads the sum of "
        "a warp that does not exist (there are THREADS / 32 warps, and the other lanes take 0), or not every warp has "
        "written its sum to a place of its own.",
        when=_norm_is_nan,
        every=True,
        first=True,
    ),
    Mistake(
        "does_not_compile",
        "Before your text stand Element, WIDTH, Vector, THREADS, widened and narrow, and what CUDA itself has without "
        "a header. Nothing ran.",
        when=_raised("DoesNotCompile"),
    ),
    Mistake(
        "outside_a_tensor",
        "Two causes are common. A pointer to Vectors counts in Vectors, so `(const Vector*)x + row * x_stride` is "
        "WIDTH times too far: add row * x_stride to the pointer to Elements. And a row has columns / WIDTH vectors: "
        "the last is one before that.",
        when=_raised("OutsideATensor"),
    ),
    Mistake(
        "input_written",
        "x, the residual and the weight are there to be read. Results go to `normalised` and `summed`.",
        when=_raised("ReadOnly"),
    ),
    Mistake(
        "outside_an_array",
        "An array has the length that its declaration says. THREADS / 32 warps have a sum each: lanes from there on "
        "read nothing, and take 0.",
        when=_raised("OutsideAnArray"),
    ),
    Mistake(
        "not_aligned",
        "A Vector lies at a multiple of 16 bytes. Rows do, since strides are multiples of WIDTH; is something else "
        "added to a pointer to Elements before it is cast?",
        when=_raised("NotAligned"),
    ),
    Mistake(
        "not_reached_by_all",
        "Some threads never arrive where others wait. On a GPU this hangs, or gives anything.",
        when=_raised("NotAllThere"),
    ),
    Mistake("does_not_end", "A loop never ends, and on a GPU nobody would stop it.", when=_raised("DoesNotEnd")),
)
