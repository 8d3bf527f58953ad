"""What an exercise needs of the machine that judges it, as data, and in words where something is missing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_lib.checker.specification.errors import CourseError
from course_lib.hardware.compiler.cuda_on_host import missing_host_compiler

if TYPE_CHECKING:
    from course_lib.hardware.device import Machine

Capability = tuple[int, int]

# By compute capability: the architecture's name, cards that have it, and what no other architecture has.
_ARCHITECTURES: dict[Capability, tuple[str, str, str]] = {
    (7, 5): ("Turing", "T4", ""),
    (8, 0): ("Ampere", "A100", ""),
    (8, 6): ("Ampere", "A10, RTX 30", ""),
    (8, 9): ("Ada", "L4, L40S, RTX 40", ""),
    (9, 0): ("Hopper", "H100, H200", "wgmma"),
    (10, 0): ("Blackwell", "B200", ""),
    (12, 0): ("Blackwell", "RTX 50", ""),
}


def _is_capability(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(part) is int and part >= 0 for part in value)


def _is_module(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


@dataclass(frozen=True)
class Needs:
    """The least that can run an exercise.

    Attributes:
        triton: a Triton kernel is written; without a GPU it runs in the interpreter.
        gpus: how many NVIDIA GPUs that work; 0 where none is needed.
        capability: the least compute capability of the GPU, such as (8, 0); implies a GPU.
        exact: the one compute capability that will do, such as (9, 0) for wgmma; implies a GPU.
        packages: what else must be importable, such as ("flash_attn",).
        cuda_on_host: CUDA C++ is written, which g++ compiles for the processor; see
            `course_lib/hardware/compiler/cuda_on_host.py`.
    """

    triton: bool = False
    gpus: int = 0
    capability: Capability | None = None
    exact: Capability | None = None
    packages: tuple[str, ...] = ()
    cuda_on_host: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.triton, bool):
            raise CourseError(f"Needs: triton={self.triton!r}; it is True or False.")
        if type(self.gpus) is not int or self.gpus < 0:
            raise CourseError(f"Needs: gpus={self.gpus!r}; it is a number of GPUs, 0 or more.")
        for name, value in (("capability", self.capability), ("exact", self.exact)):
            if value is not None and not _is_capability(value):
                raise CourseError(f"Needs: {name}={value!r}; a compute capability is a pair such as (9, 0).")
        if self.capability is not None and self.exact is not None:
            raise CourseError("Needs: capability and exact together; name the least capability or the only one.")
        if not isinstance(self.packages, tuple) or not all(_is_module(name) for name in self.packages):
            raise CourseError(
                f"Needs: packages={self.packages!r}; it is a tuple of names to import, such as ('flash_attn',)."
            )

    @property
    def least_gpus(self) -> int:
        """How many GPUs there must be; a compute capability implies one."""
        return max(self.gpus, 1 if self.capability or self.exact else 0)

    @property
    def uses_gpu(self) -> bool:
        """Whether the answer runs on the GPU where there is one; on the CPU otherwise, wherever it is judged."""
        return self.triton or self.least_gpus > 0

    @property
    def interpreted_without_gpu(self) -> bool:
        """Whether a machine without a GPU judges the answer's kernels in Triton's interpreter."""
        return self.triton and self.least_gpus == 0


ANY = Needs()
TRITON = Needs(triton=True)
CUDA_ON_HOST = Needs(cuda_on_host=True)
NVIDIA = Needs(triton=True, gpus=1)
HOPPER = Needs(triton=True, gpus=1, exact=(9, 0))
HOPPER_AND_LATER = Needs(triton=True, gpus=1, capability=(9, 0))


def missing(needs: Needs, here: Machine) -> str | None:
    """What an exercise needs that a machine lacks, and what would do, in words; None where nothing is lacking.

    Args:
        needs: what the exercise needs.
        here: the machine's facts, as `course_lib.hardware.device.machine` gathers them.
    """
    lacking = [
        part
        for part in (_gpu(needs, here), _number(needs, here), _triton(needs, here), _packages(needs), _host(needs))
        if part
    ]
    if not lacking:
        return None
    return " ".join(f"{who} {part}" for who, part in zip(["This exercise needs", *["It also needs"] * 4], lacking))


def _gpu(needs: Needs, here: Machine) -> str | None:
    """The kind of GPU that is lacking."""
    works = here.compute_capability if here.tier != "none" else None
    if needs.exact is not None and works != needs.exact:
        return f"{_only(needs.exact)}; this machine has {_what_is_here(here)}."
    if needs.capability is not None and (works is None or works < needs.capability):
        return f"{_at_least(needs.capability)}; this machine has {_what_is_here(here)}."
    if needs.least_gpus == 1 and works is None:
        return f"an NVIDIA GPU (T4 or newer, as in Colab); this machine has none that works. {here.reason}"
    return None


def _number(needs: Needs, here: Machine) -> str | None:
    """The GPUs that are lacking where several are needed."""
    if needs.least_gpus < 2:
        return None
    if here.tier == "none":
        return f"{needs.least_gpus} NVIDIA GPUs in one machine; this machine has none that works. {here.reason}"
    if here.gpu_count < needs.least_gpus:
        return f"{needs.least_gpus} NVIDIA GPUs in one machine; this machine has {here.gpu_count}."
    return None


def _triton(needs: Needs, here: Machine) -> str | None:
    if needs.triton and here.triton is None:
        return "Triton, which exists for Linux only. Use Linux, WSL2 or Colab."
    return None


def _packages(needs: Needs) -> str | None:
    absent = [name for name in needs.packages if not _importable(name)]
    if not absent:
        return None
    names = ", ".join(f"`{name}`" for name in absent)
    several = len(absent) > 1
    return (
        f"the Python package{'s' if several else ''} {names}, which this machine does not have. "
        f"Install {'them' if several else 'it'}, and restart the notebook's kernel."
    )


def _host(needs: Needs) -> str | None:
    return missing_host_compiler() if needs.cuda_on_host else None


def _only(capability: Capability) -> str:
    """ "a Hopper GPU (H100, H200: compute capability 9.0, which alone has wgmma)"."""
    name, cards, alone = _ARCHITECTURES.get(capability, ("", "", ""))
    number = f"compute capability {_dotted(capability)}"
    if not name:
        return f"a GPU of {number} and no other"
    article = "an" if name[0] in "AEIOU" else "a"
    return f"{article} {name} GPU ({cards}: {number}{f', which alone has {alone}' if alone else ', and no other'})"


def _at_least(capability: Capability) -> str:
    """ "a GPU of compute capability 9.0 or later (H100, H200, B200)"."""
    cards = ", ".join(cards for number, (_, cards, _) in _ARCHITECTURES.items() if number >= capability)
    return f"a GPU of compute capability {_dotted(capability)} or later{f' ({cards})' if cards else ''}"


def _what_is_here(here: Machine) -> str:
    if here.tier == "none" or here.compute_capability is None:
        return here.name
    return f"{here.name}, of compute capability {_dotted(here.compute_capability)}"


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


def _importable(name: str) -> bool:
    """Whether a package is installed, found without running its code."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a package whose parent is missing, or which is half loaded
        return False
