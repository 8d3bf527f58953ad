"""The NVIDIA architectures that the course compiles for, and what a program may use of each."""

from dataclasses import dataclass


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


def architecture_number(arch: int | str) -> int:
    """The key of ARCHITECTURES that 90 or "sm_90" means. Raises ValueError for any other."""
    digits = str(arch).removeprefix("sm_")
    number = int(digits) if digits.isdigit() else 0
    if number not in ARCHITECTURES:
        known = ", ".join(f"{key} ({value.example})" for key, value in ARCHITECTURES.items())
        raise ValueError(f"arch was {arch!r}; allowed are {known}")
    return number
