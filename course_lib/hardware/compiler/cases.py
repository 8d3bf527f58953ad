"""What a kernel ships with, and what must be true of it once it is compiled: the compile gate's unit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.compiled import CompiledKernel, CompileError
from course_lib.hardware.compiler.kernel_source import name_of


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

    def problems(self, view: CompiledKernel | CompileError, arch: int) -> list[str]:
        """Sentences about what is not as it should be; empty when all is well."""
        name = f"{name_of(self.kernel)} {self.label}".strip() + f" for sm_{arch}"
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
