"""Counters of programs that have arrived, where the last one of a group finishes what all of them did.

Each program counts itself in once its part is in memory, and the one that finds all others there goes on alone. It
leaves the counter at 0, so that counters serve any number of launches, one after another.
"""

import torch

from course_lib.hardware.device import interpreting

ARRIVALS: dict[tuple, torch.Tensor] = {}


def arrival_counters(count: int, device: torch.device) -> torch.Tensor:
    """int32 zeros, at least `count`, that no other stream's kernels count in meanwhile."""
    # In the interpreter a step may break off in the middle, and its counts would stay. A graph keeps addresses, and may
    # be replayed on any stream: it gets zeros of its own.
    if interpreting() or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in ARRIVALS or ARRIVALS[key].numel() < count:
        ARRIVALS[key] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return ARRIVALS[key]
