"""How 13.8 runs a kernel in CUDA C++ without a GPU, and the mistakes that show on the way."""

from __future__ import annotations

import re
from dataclasses import dataclass

from course_lib.checker import Mistake, Requirement
from course_lib.hardware.compiler.nvrtc import missing_nvrtc
from exercises.topics.evidence import raised

# The driver is sent to the worker by its source alone, so it stands by itself.


def run_in_both_orders(functions, x, residual, weight, epsilon, threads, machine):
    """What the kernel makes of its tensors when its threads run in ascending and in descending order.

    machine: the files of `course_lib/hardware/compiler/cuda_on_host.py`, which runs it. Where those of
        `course_lib/hardware/compiler/nvrtc.py` and of `cuda_numbers` are among them, the kernel is compiled for an H100
        as well, and the widths of its loads and stores are noted.
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
    bits, nobodys = (torch.int32, 0x7FCBEEF5) if x.dtype == torch.float32 else (torch.int16, 0x7EB5)
    story = {}
    for order in runner.ORDERS:
        results = {name: torch.empty(rows, columns, dtype=x.dtype) for name in ("normalised", "summed")}
        for result in results.values():  # NaN, with bits of its own: what holds them still was never stored
            result.view(bits).fill_(nobodys)
        strides = {"x_stride": x.stride(0), "residual_stride": residual.stride(0)}
        arguments = {"x": x, "residual": residual, "weight": weight, **results, "columns": columns, **strides}
        arguments["epsilon"] = float(epsilon)
        suspect = runner.run_on_host(
            source, "add_rms_norm", rows, threads, arguments, tuple(results), order=order, line=line, given=given
        )
        story[order] = results
        for name, result in results.items():
            left = (result.view(bits) == nobodys).sum().item()
            functions.noted[f"{name} never stored"] = functions.noted.get(f"{name} never stored", 0) + left
            if suspect and (result.isnan() & (result.view(bits) != nobodys)).any():
                raise type(suspect)(f"numbers of `{name}` are NaN, and {suspect}")
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


BITS_FOR_NUMBERS = (
    "The bits of float16 numbers were taken for numbers. A `half_bits` holds 16 bits, with which C++ cannot calculate; "
    "the sum of two such patterns is not the pattern of the sum. Widen each number, calculate in float32, and round "
    "once: narrow(widened(a) + widened(b), sum.of[e])."
)


def _bits_in_arithmetic(case, seen, got):
    """Whether the compiler refused to calculate with an Element as if it were a number, or with its bits."""
    refused = raised("DoesNotCompile")(case, seen, got)
    return refused and any(words in seen.error.text for words in ("half_bits", "member `bits`"))


def _all_never_stored(name):
    def when(case, seen, got):
        return seen.noted.get(f"{name} never stored", 0) == 2 * case.args[0].numel()  # in both orders

    return when


def _norm_is_nan(case, seen, got):
    """Whether every normalised number was stored, as NaN, and no sum is NaN."""
    results = [] if got is None else list(got.values())
    return (
        bool(results)
        and not seen.noted.get("normalised never stored", 0)
        and all(result["normalised"].isnan().all() and not result["summed"].isnan().any() for result in results)
    )


ADVICE = {  # by the fault, whose class has the mistake's name
    "OutsideATensor": "Look at the line's index first. A row has columns / WIDTH vectors, however many the threads "
        "are. A pointer to Vectors counts in Vectors, so row * x_stride is added to the pointer to Elements. x and the "
        "residual have row strides; rows of the results are `columns` apart, and the weight is one row for all.",
    "LostUpdate": "Several threads add to one number by `+=`, and that is a read and a write. Give each warp a place "
        "of its own and add these after a barrier, or use atomicAdd.",
    "OnePlaceForSeveral": "Give each thread that writes a place of its own, such as of_warp[threadIdx.x / 32] for lane "
        "0 of each warp.",
    "BarrierMissing": "Put __syncthreads between the two, and where the memory is used again, between the read and the "
        "next write. Between lanes of one warp __syncwarp will do.",
    "SharedMemoryUnset": "Either a lane reads the sum of a warp that does not exist (there are THREADS / 32 warps, and "
        "the other lanes take 0), or not every warp has written its sum to a place of its own, or a number to which "
        "others are added was never set to 0.",
    "LanesNotNamed": "All 32 lanes of a warp take part in its sum, so the mask is 0xffffffff. __activemask only tells "
        "which lanes a GPU happens to run together at that moment, and behind a loop or an `if` that may be a few of "
        "them.",
    "LaunchBoundTooSmall": "The block has THREADS threads, up to 512.",
    "UnknownName": "Before your text stand Element, WIDTH, Vector, THREADS, widened and narrow. Of what CUDA itself "
        "has without a header this check knows the usual part: if it is CUDA's, say it in another way. Nothing ran.",
    "DoesNotCompile": "Nothing ran. The line that is named is the first that the compiler could not take; a `;` or a "
        "bracket that is missing shows in the line behind.",
    "InputWritten": "x, the residual and the weight are there to be read. Results go to `normalised` and `summed`.",
    "OutsideAnArray": "An array has the length that its declaration says. THREADS / 32 warps have a sum each: lanes "
        "from there on read nothing, and take 0.",
    "NotAligned": "A Vector lies at a multiple of 16 bytes. Rows do, since strides are multiples of WIDTH; is "
        "something else added to a pointer to Elements before it is cast?",
    "NotReachedByAll": "Some threads never arrive where others wait. On a GPU this hangs, or gives anything.",
    "DoesNotEnd": "A loop never ends, and on a GPU nobody would stop it. This check runs one thread at a time up to "
        "its next barrier, so a loop that waits until another thread sets a flag does not end here either: use a "
        "barrier.",
}  # fmt: skip
FAULTS = (
    Mistake("bits_for_numbers", BITS_FOR_NUMBERS, when=_bits_in_arithmetic),
    *(
        Mistake(re.sub("(?<!^)(?=[A-Z])", "_", fault).lower(), advice, when=raised(fault))
        for fault, advice in ADVICE.items()
    ),
    Mistake(
        "rows_collide",
        "Each block has a row and memory of its own: row blockIdx.x of a result begins blockIdx.x * columns numbers "
        "behind the first, and what the threads of one block share is declared __shared__ within the kernel.",
        when=raised("BlocksCollide"),
    ),
    Mistake(
        "normalised_not_stored",
        "No number was stored in `normalised`. Is its pointer made of another tensor's, or the store missing?",
        when=_all_never_stored("normalised"),
        every=True,
        first=True,
    ),
    Mistake(
        "summed_not_stored",
        "No number was stored in `summed`. It is the second result, which the next addition needs.",
        when=_all_never_stored("summed"),
        every=True,
        first=True,
    ),
    Mistake(
        "variable_unset",
        "Every normalised number was stored, as NaN, and all shared memory that was read had been written. Was a "
        "thread's own variable or array read before it was set, such as a sum without `= 0.0f`, or an array that "
        "lacks __shared__?",
        when=_norm_is_nan,
        every=True,
        first=True,
    ),
)
