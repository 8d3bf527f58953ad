"""The only folder of the course that touches what Triton does not promise to keep: here a new version is adapted to.

Nothing here decides anything; the others ask in their own terms. Whether this Triton is one that is known is proved by
kernels whose counts and refusals are known (see `self_test` and `front_end`); where that fails, the meter is off.
Triton is imported when first asked for, since it is not on every machine.

    interpreted   the interpreter, watched: memory, loads, pointers, programs, launches
    repairs       what the interpreter refuses and compiled kernels do
    speed         the interpreter, quicker by half
    reductions    reductions and scans by a function of the kernel's own, quicker by far
    compiled      the compiler: its launches, how its launcher would bind one, its front end
    kernel_cache  what is compiled: found again by its meaning, and made where no GPU is open
"""

from .compiled import NO_ARGUMENT, bound_launch, compiled_launches, front_end, jit_function, launches_through
from .interpreted import (
    NO_KERNEL,
    copied_arguments,
    filled_loads,
    interpreted_calls,
    interpreted_launches,
    memory_behind,
    products_told,
    renumbered_programs,
    replaced,
    running_program,
    tagged_pointers,
)
from .kernel_cache import compiled_elsewhere, prepare_compiler, recognise_kernels_by_meaning
from .repairs import repair_interpreter
from .versions import interpreting, versions

__all__ = [
    "NO_ARGUMENT",
    "NO_KERNEL",
    "bound_launch",
    "compiled_elsewhere",
    "compiled_launches",
    "copied_arguments",
    "filled_loads",
    "front_end",
    "interpreted_calls",
    "interpreted_launches",
    "interpreting",
    "jit_function",
    "launches_through",
    "memory_behind",
    "prepare_compiler",
    "products_told",
    "recognise_kernels_by_meaning",
    "renumbered_programs",
    "repair_interpreter",
    "replaced",
    "running_program",
    "tagged_pointers",
    "versions",
]
