"""One sentence: what to look at next. Causes are asked in an order, the one that hides others first."""

import re
from collections.abc import Callable

from course_lib.hardware.compiler.compiled import CompiledKernel
from course_lib.hardware.profile.card import KernelFacts, Profile
from course_lib.hardware.units import format_bytes

# Where a cause is told: at half again the least, what is moved too much costs more than launching or masks do.
TOO_MANY_BYTES = 1.5
CROWDED = 8  # atomic operations of one access that meet on one address
NARROW = 4  # bytes a thread and load, where 16 are possible
FEW_WARPS = 0.25  # of those that the multiprocessor has room for
AT_THE_ROOF = 0.8


def what_to_look_at(profile: Profile) -> str:
    """The sentence, from the first cause that is found."""
    for cause in BEFORE_ANY_KERNEL:
        if sentence := cause(profile):
            return sentence
    for of_kernel in OF_A_KERNEL:
        for kernel in profile.kernels:
            if sentence := of_kernel(profile, kernel):
                return sentence
    return _nothing_stands_out(profile)


def _stopped(profile: Profile) -> str:
    return f"The call did not end by itself: {profile.stopped}" if profile.stopped else ""


def _never_ran(profile: Profile) -> str:
    if profile.kernels:
        return ""
    return (
        f"{profile.function} launched no Triton kernel, so there is nothing to profile. PyTorch's own operations are "
        "seen by torch.profiler."
    )


def _outside(profile: Profile) -> str:
    if not profile.outside:
        return ""
    return f"Mend this first, since a figure of a wrong kernel is none: {profile.outside[0]}"


def _not_compiled(profile: Profile, kernel: KernelFacts) -> str:
    if isinstance(kernel.view, CompiledKernel):
        return ""
    return f"{kernel.name} is not compiled for {profile.target}: {kernel.view}"


def _does_not_fit(profile: Profile, kernel: KernelFacts) -> str:
    view = kernel.view
    if not isinstance(view, CompiledKernel) or view.fits:
        return ""
    return (
        f"{kernel.name} needs {view.shared_bytes:,} B of shared memory a program, and {profile.target} has "
        f"{view.architecture.shared_per_block:,} B: take fewer stages or smaller tiles."
    )


def _spills(profile: Profile, kernel: KernelFacts) -> str:
    view = kernel.view
    if not isinstance(view, CompiledKernel) or not view.spill_stores + view.spill_loads:
        return ""
    return (
        f"{kernel.name} spills: {view.spill_bytes:,} B a thread found no register and go through memory "
        f"({view.spill_stores:,} stores and {view.spill_loads:,} loads in the code). Take smaller tiles or more warps "
        f"than {view.num_warps}."
    )


def _atomics(profile: Profile, kernel: KernelFacts) -> str:
    seen = kernel.seen
    if not seen.atomic_addresses or seen.atomic_lanes < CROWDED * seen.atomic_addresses:
        return ""
    return (
        f"{kernel.name} makes {seen.atomic_lanes:,} atomic updates, and within one instruction "
        f"{seen.atomic_lanes / seen.atomic_addresses:.0f} of them meet on one address, where they wait for each other. "
        "Add up inside the program first, and update once."
    )


def _sectors(profile: Profile, kernel: KernelFacts) -> str:
    seen = kernel.seen
    if seen.sector_bytes < TOO_MANY_BYTES * seen.requested_bytes:
        return ""
    return (
        f"{kernel.name} asks for {format_bytes(seen.requested_bytes)} and touches sectors of 32 B that hold "
        f"{format_bytes(seen.sector_bytes)}, {seen.sector_bytes / seen.requested_bytes:.1f} times as much: let "
        "neighbouring lanes reach neighbouring elements."
    )


def _no_matrix_instruction(profile: Profile, kernel: KernelFacts) -> str:
    view = kernel.view
    if not isinstance(view, CompiledKernel) or view.instructions or not re.search(r"\btt\.dot\b", view.ttgir):
        return ""
    said = f"{kernel.name}'s tl.dot has no matrix instruction on {profile.target}, so it runs on the ordinary units: "
    if view.arch < 80:
        return said + "Triton makes none for GPUs before sm_80. PyTorch's own products use them there."
    return said + "give it 16-bit tiles, or tf32."


def _read_again(profile: Profile, kernel: KernelFacts) -> str:
    if isinstance(kernel.view, CompiledKernel) and kernel.view.instructions:
        return ""  # a matrix product reads its operands once for every tile of the result
    again = {name: times for name, times in profile.times_read.items() if times >= TOO_MANY_BYTES}
    if not again or profile.moved_bytes < TOO_MANY_BYTES * profile.least_bytes:
        return ""
    name = max(again, key=lambda name: again[name])
    return (
        f"{name} is read {again[name]:.1f} times, and {format_bytes(profile.moved_bytes)} are moved where "
        f"{format_bytes(profile.least_bytes)} would do: keep on the chip what is needed again."
    )


def _more_than_least(profile: Profile, kernel: KernelFacts) -> str:
    if isinstance(kernel.view, CompiledKernel) and kernel.view.instructions and not profile.least_was_given:
        return ""
    if profile.moved_bytes < TOO_MANY_BYTES * profile.least_bytes:
        return ""
    return (
        f"{format_bytes(profile.moved_bytes)} are moved where {format_bytes(profile.least_bytes)} would do: look for a "
        "tensor between two kernels that need not be in memory."
    )


def _at_the_roof(profile: Profile, kernel: KernelFacts) -> str:
    if profile.roof_share is None or profile.roof_share < AT_THE_ROOF:
        return ""
    less = "moving fewer bytes" if profile.roof == "memory" else "fewer FLOPs or a cheaper dtype"
    return f"At {profile.roof_share:.0%} of the {profile.roof} roof the kernel is done; only {less} would help."


def _narrow_loads(profile: Profile, kernel: KernelFacts) -> str:
    view = kernel.view
    if not isinstance(view, CompiledKernel) or view.instructions or view.asynchronous_copies or not view.load_widths:
        return ""
    loads = sum(view.load_widths.values())
    narrow = sum(count for width, count in view.load_widths.items() if width <= NARROW)
    if narrow < max(4, 0.75 * loads):  # a few scalars are narrow in every kernel
        return ""
    return (
        f"{kernel.name} loads at most {max(view.load_widths)} B a thread and instruction, of 16 possible: the compiler "
        "cannot know that addresses are aligned and adjacent. Sizes and strides that are multiples of 16 tell it."
    )


def _few_programs(profile: Profile, kernel: KernelFacts) -> str:
    if profile.multiprocessors is None or kernel.seen.programs >= profile.multiprocessors:
        return ""
    return (
        f"{kernel.name} is launched with {kernel.seen.programs:,} programs here, and {profile.target} has "
        f"{profile.multiprocessors} multiprocessors: the others stand idle. If your real shapes give no more, split "
        "the work further."
    )


def _few_warps(profile: Profile, kernel: KernelFacts) -> str:
    occupancy = kernel.occupancy
    if occupancy is None or occupancy.share >= FEW_WARPS:
        return ""
    if isinstance(kernel.view, CompiledKernel) and (kernel.view.instructions or kernel.view.asynchronous_copies):
        return ""  # their work is in flight without warps that wait for it
    return (
        f"{kernel.name} leaves a multiprocessor {occupancy.warps} warps of {occupancy.most_warps}, limited by "
        f"{occupancy.limited_by}: too few to wait for memory and compute at once. Take smaller tiles."
    )


def _nothing_stands_out(profile: Profile) -> str:
    times = profile.moved_bytes / profile.least_bytes if profile.least_bytes else 1.0
    said = f"Nothing stands out: no spills, wide loads, and {times:.2f} times the least bytes. "
    if profile.roof_share is None:
        return said + "Measure its time on a GPU and compare it with the roof."
    return (
        said + f"At {profile.roof_share:.0%} of the {profile.roof} roof, its stalls are next: "
        "ncu --set full, section Warp State."
    )


BEFORE_ANY_KERNEL: tuple[Callable[[Profile], str], ...] = (_stopped, _never_ran, _outside)
OF_A_KERNEL: tuple[Callable[[Profile, KernelFacts], str], ...] = (
    _not_compiled,
    _does_not_fit,
    _no_matrix_instruction,  # before spills: on the ordinary units a tile needs more registers
    _spills,
    _atomics,
    _sectors,
    _read_again,
    _more_than_least,
    _at_the_roof,
    _narrow_loads,
    _few_programs,
    _few_warps,
)
