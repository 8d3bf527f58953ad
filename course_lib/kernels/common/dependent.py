"""Kernels that are started while the one before still runs: programmatic dependent launch, from sm_90 on.

Between two kernels of a graph memory has nothing to do for 2 to 4 µs: the last programs of one end, those of the next
are placed, load their arguments, and ask for their first bytes. A dependent kernel is placed as soon as all programs of
the one before have called `gdc_launch_dependents` and have left room. It may do what needs nothing of that kernel, such
as asking for its weights. Then it waits, until all of that kernel has ended and what it wrote can be read.

Each kernel of a row of them waits, whether it needs the one before or not. So a kernel that has ended says that all
before it have, and none overwrites what an earlier one still reads.

Source: NVIDIA, CUDA C++ Programming Guide, Programmatic Dependent Launch and Synchronization.
"""

import torch
import triton
import triton.language as tl

from course_lib.kernels.common.machine import architecture_of

FIRST_WITH_DEPENDENT_LAUNCHES = 90


@triton.jit
def wait_for_kernel_before(DEPENDENT: tl.constexpr):
    """Let the kernel behind be placed; then wait for the one before, if this one was started early."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def dependent_launches(device: torch.device | None = None) -> bool:
    """Whether kernels can be started early on this device, the current GPU when None."""
    return (architecture_of(device or torch.device("cuda")) or 0) >= FIRST_WITH_DEPENDENT_LAUNCHES


def launch_options(dependent: bool, device: torch.device) -> dict:
    """What a launch says to be dependent, or not. Raises a ValueError where kernels cannot be."""
    if not dependent:
        return {"DEPENDENT": False}
    if not dependent_launches(device):
        raise ValueError(
            "dependent is True; starting a kernel early takes an NVIDIA GPU of compute capability 9.0 or later, and no "
            "interpreter."
        )
    return {"DEPENDENT": True, "launch_pdl": True}
