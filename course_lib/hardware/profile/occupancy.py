"""How many programs of a kernel one multiprocessor holds at a time, and what keeps it from holding more.

Source of the limits: CUDA C++ Programming Guide, "Compute Capabilities"; of the way they combine: CUDA C++ Best
Practices Guide, "Occupancy".
"""

from dataclasses import dataclass

from course_lib.hardware.compiler.compiled import CompiledKernel

REGISTERS_IN_A_PIECE = 256  # registers are handed to warps in pieces of so many


@dataclass(frozen=True)
class Occupancy:
    """Programs and warps of one multiprocessor, and by what they are limited."""

    programs: int  # 0 where not even one fits
    warps: int
    most_warps: int
    limited_by: str  # "warps" or "programs" (the most that there is room for), "registers", "shared memory"

    @property
    def share(self) -> float:
        """Warps held, of those that the multiprocessor has room for."""
        return self.warps / self.most_warps


def occupancy_of(view: CompiledKernel) -> Occupancy:
    """The occupancy of a compiled kernel; the first of equal limits, in that order."""
    limits = view.architecture
    per_warp = -(-max(1, view.registers) * 32 // REGISTERS_IN_A_PIECE) * REGISTERS_IN_A_PIECE
    by = {
        "warps": limits.warps_per_sm // view.num_warps,
        "programs": limits.programs_per_sm,
        "registers": limits.registers_per_sm // (per_warp * view.num_warps),
        "shared memory": limits.shared_per_sm // max(1, view.shared_bytes + limits.reserved_per_block),
    }
    if not view.fits:
        by["shared memory"] = 0
    limited_by = min(by, key=lambda what: by[what])
    return Occupancy(by[limited_by], by[limited_by] * view.num_warps, limits.warps_per_sm, limited_by)
