"""What became of a kernel: registers, spills, shared memory, instructions; as text and as a table."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from course_lib.hardware.compiler.architectures import ARCHITECTURES, Architecture

# Matrix instructions as PTX spells them, in the order of their generations.
MATRIX_INSTRUCTIONS = {"tcgen05": r"\btcgen05\.mma\b", "wgmma": r"\bwgmma\.mma_async\b", "mma.sync": r"\bmma\.sync\b"}


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


def read_result(request: dict, result: dict) -> CompiledKernel | CompileError:
    """What the compiler's process answered to a request of `prepare`."""
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
