"""The compiler view: what a kernel becomes on any NVIDIA architecture, on a machine with or without a GPU.

    view = compile_view(add_kernel, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "length": "i32"}, {"BLOCK": 1024})
    view.registers, view.shared_bytes, view.instructions

The work happens in `worker.py`, in a process of its own, because a process that interprets kernels cannot
compile them. The kernel travels by its source, with the helpers and constants it names, so one that was defined in a
notebook cell compiles as well as one in a file. Signature entries are Triton's: "*fp16" a pointer to float16, "i32" an
integer, "fp32" a number, "tensordesc<fp16[128,64]>" a tensor descriptor.
"""

import html
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.hardware import signals
from course_lib.hardware.compiler.kernel_source import NO_DEFAULT, KernelSource, parameters_of

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "CompileCase",
    "CompileError",
    "CompiledKernel",
    "Comparison",
    "compile_many",
    "compile_view",
    "compile_views",
]


@dataclass(frozen=True)
class Architecture:
    """Limits of one compute capability. Source: CUDA C++ Programming Guide, "Compute Capabilities", technical
    specifications per compute capability."""

    name: str
    example: str
    shared_per_block: int  # bytes, the largest that a program may ask for
    shared_per_sm: int  # bytes
    warps_per_sm: int
    programs_per_sm: int  # whatever their size
    registers_per_sm: int = 65536
    reserved_per_block: int = 1024  # shared bytes that the system keeps for each resident program


def _kib(count: int) -> int:
    return count * 1024


ARCHITECTURES: dict[int, Architecture] = {
    75: Architecture("sm_75", "T4", _kib(64), _kib(64), 32, 16, reserved_per_block=0),
    80: Architecture("sm_80", "A100", _kib(163), _kib(164), 64, 32),
    86: Architecture("sm_86", "A10, RTX 3090", _kib(99), _kib(100), 48, 16),
    89: Architecture("sm_89", "L4, RTX 4090", _kib(99), _kib(100), 48, 24),
    90: Architecture("sm_90", "H100, H200", _kib(227), _kib(228), 64, 32),
    100: Architecture("sm_100", "B200", _kib(227), _kib(228), 64, 32),
    120: Architecture("sm_120", "RTX 5090", _kib(99), _kib(100), 48, 24),
}

# Matrix instructions as PTX spells them, in the order of their generations.
MATRIX_INSTRUCTIONS = {"tcgen05": r"\btcgen05\.mma\b", "wgmma": r"\bwgmma\.mma_async\b", "mma.sync": r"\bmma\.sync\b"}


NUMBER_TYPES = "fp16, bf16, fp32, fp64, fp8e4nv, fp8e5, i1, i8, i16, i32, i64, u8, u16, u32, u64"
SIGNATURE_TYPE = r"\*?k?\*?({})|tensordesc<.+>".format(NUMBER_TYPES.replace(", ", "|"))


class CompileError(RuntimeError):
    """The compiler refused a kernel. ``line`` is the line of its file, where the compiler named one."""

    def __init__(self, message: str, *, kind: str = "", line: int | None = None, diagnostics: str = ""):
        super().__init__(message)
        self.kind, self.line, self.diagnostics = kind, line, diagnostics


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel compiled for one architecture. All instruction counts are static: a loop's body counts once."""

    name: str
    arch: int
    num_warps: int  # as compiled: warp specialisation adds some to those asked for
    num_stages: int
    registers: int  # per thread; the hardware's limit is 255
    spill_bytes: int  # of local memory per thread that hold what found no register (its whole stack frame)
    spill_stores: int
    spill_loads: int
    shared_bytes: int  # per program
    instructions: dict[str, int]  # "tcgen05", "wgmma", "mma.sync"; those that occur
    load_widths: dict[int, int]  # bytes that one thread loads at once -> how many such loads from global memory
    store_widths: dict[int, int]
    asynchronous_copies: dict[str, int]  # "cp.async" and "tma": copies that bypass the registers
    ptx: str = field(repr=False)
    sass: str | None = field(repr=False, default=None)  # with want_sass=True
    ttgir: str = field(repr=False, default="")
    triton: str = ""

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.arch]

    @property
    def fits(self) -> bool:
        """Whether the program's shared memory exists on this architecture; a launch fails where it doesn't."""
        return self.shared_bytes <= self.architecture.shared_per_block

    @property
    def programs_per_sm(self) -> int:
        """How many programs registers, shared memory and warps let one SM hold at a time; 0 when one doesn't fit."""
        limits = self.architecture
        if not self.fits:
            return 0
        per_warp = -(-self.registers * 32 // 256) * 256  # registers are handed to warps in pieces of 256
        by_registers = limits.registers_per_sm // (per_warp * self.num_warps)
        by_shared = limits.shared_per_sm // max(1, self.shared_bytes + limits.reserved_per_block)
        return min(by_registers, by_shared, limits.warps_per_sm // self.num_warps, limits.programs_per_sm)

    @property
    def matrix_instruction(self) -> str | None:
        """The newest kind of matrix instruction used, or None."""
        return next(iter(self.instructions), None)

    def rows(self) -> list[tuple[str, str]]:
        """(what, value) as the table shows them."""
        limits = self.architecture
        spills = (
            "none"
            if not self.spill_bytes
            else f"{self.spill_bytes} B ({self.spill_stores} stores, {self.spill_loads} loads)"
        )
        fits = "fits" if self.fits else "DOES NOT FIT"
        matrix = ", ".join(f"{kind} × {count}" for kind, count in self.instructions.items())
        copies = ", ".join(f"{kind} × {count}" for kind, count in self.asynchronous_copies.items())
        return [
            ("architecture", f"{limits.name} ({limits.example})"),
            ("warps, stages", f"{self.num_warps}, {self.num_stages}"),
            ("registers per thread", f"{self.registers} of 255"),
            ("spilled per thread", spills),
            ("shared memory per program", f"{self.shared_bytes} B of {limits.shared_per_block} B: {fits}"),
            ("programs per SM, at most", str(self.programs_per_sm)),
            ("matrix instructions", matrix or "none"),
            ("loads from global memory", _widths(self.load_widths)),
            ("asynchronous copies", copies or "none"),
            ("stores to global memory", _widths(self.store_widths)),
        ]

    def __str__(self) -> str:
        width = max(len(what) for what, _ in self.rows())
        return "\n".join([self.name] + [f"  {what.ljust(width)}  {value}" for what, value in self.rows()])

    def _repr_html_(self) -> str:
        return Comparison((self,))._repr_html_()


def _widths(widths: Mapping[int, int]) -> str:
    return ", ".join(f"{width} B × {count}" for width, count in sorted(widths.items(), reverse=True)) or "none"


@dataclass(frozen=True)
class Comparison(Sequence):
    """The same kernel on several architectures, one column each."""

    views: tuple[CompiledKernel, ...]

    def __getitem__(self, index):
        return self.views[index]

    def __len__(self) -> int:
        return len(self.views)

    def _columns(self) -> list[tuple[str, ...]]:
        return [(entries[0][0], *(value for _, value in entries)) for entries in zip(*(v.rows() for v in self.views))]

    def __str__(self) -> str:
        rows = self._columns()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([self.views[0].name, *lines])

    def _repr_html_(self) -> str:
        head, *body = self._columns()
        table = "<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"
        for row in body:
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
            table += f"<tr><th style='text-align:left'>{html.escape(row[0])}</th>{cells}</tr>"
        return f"<table><caption>{html.escape(self.views[0].name)}</caption>{table}</table>"


@dataclass(frozen=True)
class CompileCase:
    """One configuration that a kernel ships with, and what must be true of it; the compile gate holds it to that.

    ``instruction`` is the matrix instruction expected ("mma.sync", "wgmma", "tcgen05"), None for no expectation, or a
    mapping from architecture to one of these. ``max_spill_bytes`` None allows any.
    """

    kernel: object
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    archs: tuple[int, ...] = tuple(ARCHITECTURES)
    max_spill_bytes: int | None = 0
    instruction: str | Mapping[int, str | None] | None = None
    divisible: Iterable[str] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    label: str = ""

    def requests(self) -> list[dict]:
        """Arguments for :func:`compile_many`, one per architecture."""
        return [
            {
                "kernel": self.kernel,
                "signature": self.signature,
                "constexprs": self.constexprs,
                "arch": arch,
                "num_warps": self.num_warps,
                "num_stages": self.num_stages,
                "divisible": self.divisible,
                **self.options,
            }
            for arch in self.archs
        ]

    def problems(self, view: "CompiledKernel | CompileError", arch: int) -> list[str]:
        """Sentences about what is not as it should be; empty when all is well."""
        name = f"{_name_of(self.kernel)} {self.label}".strip() + f" for sm_{arch}"
        if isinstance(view, CompileError):
            return [f"{name} does not compile: {view}"]
        found = []
        if not view.fits:
            limit = view.architecture.shared_per_block
            found.append(f"{name} needs {view.shared_bytes} bytes of shared memory, and {limit} exist")
        if self.max_spill_bytes is not None and view.spill_bytes > self.max_spill_bytes:
            found.append(
                f"{name} spills {view.spill_bytes} bytes per thread at {view.registers} registers; "
                f"{self.max_spill_bytes} are allowed"
            )
        expected = self.instruction.get(arch) if isinstance(self.instruction, Mapping) else self.instruction
        if expected is not None and expected not in view.instructions:
            found.append(f"{name} should use {expected}; it uses {view.matrix_instruction or 'no matrix instruction'}")
        return found


# --------------------------------------------------------------------------------------------------- entry points


def compile_view(
    kernel,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object] | None = None,
    *,
    arch=90,
    num_warps: int = 4,
    num_stages: int = 3,
    divisible: Iterable[str] | None = None,
    want_sass: bool = False,
    **options,
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
    kernel,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object] | None = None,
    *,
    archs: Iterable[int | str] = (75, 80, 90),
    **configuration,
) -> Comparison:
    """:func:`compile_view` for several architectures, side by side. Raises what it raises."""
    views = compile_many(
        [
            {"kernel": kernel, "signature": signature, "constexprs": constexprs or {}, "arch": arch, **configuration}
            for arch in archs
        ]
    )
    for view in views:
        if isinstance(view, CompileError):
            raise view
    return Comparison(tuple(views))


def compile_many(
    requests: Iterable[Mapping], *, jobs: int | None = None, timeout: float = 600
) -> list["CompiledKernel | CompileError"]:
    """Compiles many kernels in as few processes as there are cores; a result or a CompileError for each, in order.

    Each request is a dict of :func:`compile_view`'s arguments by name. Bad arguments raise at once, before anything is
    compiled. ``timeout`` is in seconds, for each process's whole share.
    """
    prepared = [_prepare(**request) for request in requests]
    jobs = max(1, min(jobs or os.cpu_count() or 1, -(-len(prepared) // 4)))
    shares = [list(range(start, len(prepared), jobs)) for start in range(jobs)]
    results: list = [None] * len(prepared)
    with ThreadPoolExecutor(jobs) as pool:  # a thread only waits for its process
        answers = pool.map(lambda share: _run_worker([prepared[index] for index in share], timeout), shares)
        for share, answer in zip(shares, answers):
            for index, result in zip(share, answer):
                results[index] = _read_result(prepared[index], result)
    return results


# -------------------------------------------------------------------------------------------- checking the arguments


def _arch_number(arch) -> int:
    number = arch
    if isinstance(arch, str):
        digits = arch.removeprefix("sm_")
        number = int(digits) if digits.isdigit() else None
    if number not in ARCHITECTURES:
        known = ", ".join(f"{key} ({value.example})" for key, value in ARCHITECTURES.items())
        raise ValueError(f"arch was {arch!r}; allowed are {known}")
    return number


def _name_of(kernel) -> str:
    return getattr(kernel, "__name__", None) or getattr(getattr(kernel, "fn", None), "__name__", repr(kernel))


def _prepare(
    kernel, signature, constexprs=None, arch=90, num_warps=4, num_stages=3, divisible=None, want_sass=False, **options
) -> dict:
    arch = _arch_number(arch)
    source = KernelSource(kernel)
    parameters = parameters_of(source.function)
    signature, constexprs = dict(signature), dict(constexprs or {})
    for given, what in ((signature, "signature"), (constexprs, "constexprs")):
        unknown = [name for name in given if name not in parameters]
        if unknown:
            raise ValueError(
                f"{what} names {', '.join(map(repr, unknown))}, which {source.name} does not take; its "
                f"parameters are {', '.join(parameters)}"
            )
    entries = {}
    for name, (is_constexpr, default) in parameters.items():
        if default is not NO_DEFAULT and (is_constexpr or name not in signature):
            constexprs.setdefault(name, default)
        if name in constexprs:
            entries[name] = "constexpr"
        elif is_constexpr or signature.get(name) == "constexpr":
            raise ValueError(f"constexprs has no value for {name!r}, a tl.constexpr parameter of {source.name}")
        elif name not in signature:
            raise ValueError(
                f"signature has no entry for {name!r}, a parameter of {source.name}; give its type, such "
                'as "*fp32" for a pointer or "i32" for an integer'
            )
        elif not re.fullmatch(SIGNATURE_TYPE, str(signature[name])):
            raise ValueError(
                f"{name!r} is {signature[name]!r} in signature; allowed: a number ({NUMBER_TYPES}), a "
                'pointer ("*fp16"), or a descriptor ("tensordesc<fp16[128,64]>")'
            )
        else:
            entries[name] = signature[name]
    if divisible is None:
        divisible = [
            name
            for name, kind in entries.items()
            if kind.startswith("*") or (re.fullmatch(r"[iu]\d+", kind) and "stride" in name.lower())
        ]
    unknown = [name for name in divisible if name not in entries]
    if unknown:
        raise ValueError(f"divisible names {', '.join(map(repr, unknown))}, which {source.name} does not take")
    return {
        "signature": entries,
        "arch": arch,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "options": options,
        "divisible": [name for name in divisible if entries[name] != "constexpr"],
        "want_sass": want_sass,
        "first_line": source.first_line,
        "name": source.name,
        "missing": source.missing,
        **source.packed(constexprs),
    }


# ------------------------------------------------------------------------------------------------- the other process


def _run_worker(requests: list[dict], timeout: float) -> list[dict]:
    results: list[dict] = []
    environment = dict(os.environ, TRITON_INTERPRET="0", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton does up to 3.9; said aloud, it doesn't warn
    worker = Path(__file__).with_name("worker.py")
    with tempfile.TemporaryDirectory() as folder:
        sent, received = Path(folder) / "requests", Path(folder) / "results"
        while len(results) < len(requests):
            sent.write_bytes(pickle.dumps(requests[len(results) :]))
            received.write_bytes(b"")
            try:
                done = subprocess.run(
                    [sys.executable, str(worker), str(sent), str(received)],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=timeout,
                )
                number = signals.signal_of(done.returncode)
                ended = signals.died_of(number, compiled=True) if number else f"ended with status {done.returncode}."
                printed = done.stderr.strip()[-2000:]
                failure = f"the compiler's process {ended}{f' It printed: {printed}' if printed else ''}"
            except subprocess.TimeoutExpired:
                failure = f"the compiler was not done after {timeout:g} s"
            with open(received, "rb") as stream:
                while stream.peek(1):
                    results.append(pickle.load(stream))
            if len(results) < len(requests):  # the next one broke the process; go on behind it
                results.append(
                    {"error": {"kind": "crash", "message": failure, "line_in_kernel": None, "diagnostics": ""}}
                )
    return results


def _read_result(request: dict, result: dict) -> "CompiledKernel | CompileError":
    if "error" in result:
        error = result["error"]
        line = error["line_in_kernel"] and request["first_line"] + error["line_in_kernel"] - 1
        message = f"{request['name']} for sm_{request['arch']}: {error['message']}"
        if line:
            message += f" (line {line})"
        for name, reason in request["missing"].items():
            if f"'{name}'" in error["message"] or f"{name} is not defined" in error["message"]:
                message += f". {name} could not be sent to the compiler: {reason}"
        if error["diagnostics"].strip() and not line:
            message += "\n" + error["diagnostics"].strip()
        return CompileError(message, kind=error["kind"], line=line, diagnostics=error["diagnostics"])
    ptx = result["ptx"]
    matrix = {kind: len(re.findall(pattern, ptx)) for kind, pattern in MATRIX_INSTRUCTIONS.items()}
    copies = {
        "tma": len(re.findall(r"\bcp\.async\.bulk\.tensor", ptx)),
        "cp.async": len(re.findall(r"\bcp\.async\.c[ag]\b", ptx)),
    }
    return CompiledKernel(
        name=result["name"],
        arch=request["arch"],
        num_warps=result["num_warps"],
        num_stages=request["num_stages"],
        registers=result["registers"],
        spill_bytes=result["stack_bytes"],
        spill_stores=result["spill_stores"],
        spill_loads=result["spill_loads"],
        shared_bytes=result["shared_bytes"],
        instructions={kind: count for kind, count in matrix.items() if count},
        load_widths=_access_widths(ptx, "ld"),
        store_widths=_access_widths(ptx, "st"),
        asynchronous_copies={kind: count for kind, count in copies.items() if count},
        ptx=ptx,
        sass=result["sass"],
        ttgir=result["ttgir"],
        triton=result["triton"],
    )


def _access_widths(ptx: str, operation: str) -> dict[int, int]:
    """Bytes per thread and instruction -> count, for ld.global or st.global in all their spellings."""
    widths: dict[int, int] = {}
    for modifiers in re.findall(rf"\b{operation}\.global((?:\.[\w:]+)+)", ptx):
        item = re.search(r"\.[bfsu](\d+)$", modifiers)
        vector = re.search(r"\.v(\d)", modifiers)
        if item:
            width = int(item[1]) // 8 * (int(vector[1]) if vector else 1)
            widths[width] = widths.get(width, 0) + 1
    return widths
