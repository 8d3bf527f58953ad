"""Read the same bytes again and again, in windows of growing size: the steps in the speed are the memory's levels.

A window that fits a level is read at that level's speed; a larger one is not. So the sizes of the caches are measured,
not only looked up. On a GPU all multiprocessors read together; on a CPU one core does, since its caches are its own.
"""

import torch

from course_lib.hardware.device import default_device, known, machine
from course_lib.hardware.timing import measure

SECONDS = 0.05  # for each window
GPU_WINDOWS = tuple(2**power for power in range(14, 31))  # 16 KiB to 1 GiB
CPU_WINDOWS = tuple(2**power for power in range(14, 28))  # 16 KiB to 128 MiB
CPU_BYTES_PER_RUN = 2**26
GPU_ROUNDS = 2048


def cache_sweep() -> tuple[tuple[int, float], ...]:
    """((window in bytes, bytes/s), ...), on the device that kernels run on; about two seconds."""
    return gpu_sweep() if default_device().type == "cuda" else cpu_sweep()


def cpu_sweep() -> tuple[tuple[int, float], ...]:
    """One core, through `torch.sum` over a window that is seen many times: one call reads it once for each row."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return tuple((window_bytes, core_speed(window_bytes)) for window_bytes in CPU_WINDOWS)
    finally:
        torch.set_num_threads(threads)


def core_speed(window_bytes: int) -> float:
    passes = max(1, CPU_BYTES_PER_RUN // window_bytes)
    window = torch.ones(window_bytes // 4).expand(passes, -1)  # [passes, elements], every row the same memory
    sums = torch.empty(passes)
    timing = measure(lambda: torch.sum(window, dim=1, out=sums), seconds=SECONDS, warmup=1, flush=False, device="cpu")
    return passes * window_bytes / timing.best


def gpu_sweep() -> tuple[tuple[int, float], ...]:
    """Every program reads on through the window from a start of its own, over and over."""
    from course_lib.hardware.ceilings.gpu import REREAD_BLOCK, REREAD_PROGRAMS_PER_SM, reread_window

    programs = REREAD_PROGRAMS_PER_SM * known(machine().sm_count)
    windows = [window for window in GPU_WINDOWS if window <= known(machine().memory_bytes) // 16]
    source = torch.rand(windows[-1] // 4, device="cuda")
    sums = torch.empty(programs, device="cuda")
    speeds = []
    for window_bytes in windows:
        timing = measure(
            lambda window_bytes=window_bytes: reread_window(source, sums, window_bytes, GPU_ROUNDS, ".ca"),
            seconds=SECONDS,
            device="cuda",
        )
        speeds.append((window_bytes, programs * GPU_ROUNDS * REREAD_BLOCK * 4 / timing.median))
    return tuple(speeds)


def speed_within(sweep, previous_bytes: float, capacity_bytes: float) -> float | None:
    """The sweep's speed at the largest window that fits this level well and the one before it not; None if there is
    none."""
    fitting = [speed for window, speed in sweep if 1.5 * previous_bytes <= window <= capacity_bytes / 1.5]
    return fitting[-1] if fitting else None
