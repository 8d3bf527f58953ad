"""What this device can do at most, measured on it: the roofline of the machine at hand.

`ceilings()` measures once (a GPU: some seconds; a CPU: under ten) and remembers the result in the course's folder, one
file for each device, PyTorch and driver. On a GPU each figure is the median of its runs; on a CPU, which others use at
the same time, the fastest run's. Both come with the spread of the runs.
"""

import dataclasses
import datetime
import hashlib
import json
import math

from course_lib.hardware.ceilings.cache_sweep import cache_sweep
from course_lib.hardware.device import default_device, machine
from course_lib.home import course_home

FORMAT = 3  # of the cached file; raise it when what is measured changes


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured ceilings of one device. Bandwidths in bytes/s, rates in FLOP/s, launch_overhead in seconds."""

    device: str  # its name, e.g. "NVIDIA H200"
    kind: str  # "cuda" | "cpu"
    copy_bandwidth: float  # bytes read plus bytes written, per second
    read_bandwidth: float
    matmul_rate: dict[str, float]  # dtype name ("float32", "tf32", "float16", ...) -> FLOP/s
    fma_rate: float  # float32 multiply-adds on ordinary units, two FLOPs each
    launch_overhead: float  # host seconds for each launch of an empty kernel (CPU: smallest operator call)
    l2_bandwidth: float | None  # GPU only
    on_chip_bandwidth: float | None  # GPU: L1 of all multiprocessors; CPU: cache of all cores
    spread: dict[str, float]  # figure -> (90th - 10th percentile of its times) / median
    sweep: tuple[tuple[int, float], ...]  # (window read again and again [bytes], bytes/s); on a CPU, one core's
    measured_at: str  # ISO time, UTC
    notes: tuple[str, ...] = ()  # what could not be measured, and why

    @property
    def memory_bandwidth(self) -> float:
        """The roof that no kernel beats: the better of copying and reading."""
        return max(self.copy_bandwidth, self.read_bandwidth)


def ceilings(refresh: bool = False) -> Ceilings:
    """This device's ceilings: remembered, or measured now when there are none or `refresh` is true."""
    path = cache_path()
    if not refresh:
        remembered = read_cache(path)
        if remembered is not None:
            return remembered
    measured = measure_ceilings()
    write_cache(path, measured)
    return measured


def measure_ceilings() -> Ceilings:
    """Measure, on the device that the course's kernels run on."""
    if default_device().type == "cuda":
        from course_lib.hardware.ceilings.gpu import measure_gpu as measure_device
    else:
        from course_lib.hardware.ceilings.cpu import measure_cpu as measure_device
    figures = measure_device() | {"sweep": cache_sweep()}
    return Ceilings(
        device=machine().name,
        kind=default_device().type,
        measured_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **figures,
    )


def cache_path():
    """The file of this device: its name, and a digest of what else changes the figures."""
    this = machine()
    identity = [FORMAT, this.name, this.tier, this.torch, this.triton, this.driver, this.cpu_cores, this.sm_count]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:10]
    words = "".join(letter if letter.isalnum() else "-" for letter in this.name).strip("-")
    return course_home() / "ceilings" / f"{words}-{digest}.json"


def read_cache(path) -> Ceilings | None:
    """What the file remembers; None when there is no file or it is damaged (then it is measured anew and rewritten)."""
    try:
        remembered = Ceilings(**json.loads(path.read_text()))
        sweep = tuple((window, speed) for window, speed in remembered.sweep)
        remembered = dataclasses.replace(remembered, notes=tuple(remembered.notes), sweep=sweep)
        return remembered if plausible(remembered) else None
    except (OSError, ValueError, TypeError):
        return None


def plausible(found: Ceilings) -> bool:
    """True when every figure is a positive, finite number: a half-edited file must not become a roof."""
    if not isinstance(found.matmul_rate, dict):
        return False
    needed = [found.copy_bandwidth, found.read_bandwidth, found.fma_rate, found.launch_overhead]
    needed += list(found.matmul_rate.values())
    needed += [speed for _, speed in found.sweep]
    needed += [value for value in (found.l2_bandwidth, found.on_chip_bandwidth) if value is not None]
    return (
        bool(found.matmul_rate)
        and bool(found.sweep)
        and all(isinstance(value, (int, float)) and math.isfinite(value) and value > 0 for value in needed)
    )


def write_cache(path, measured: Ceilings) -> None:
    """Write whole or not at all, as two notebooks may measure at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{id(measured)}.tmp")
    draft.write_text(json.dumps(dataclasses.asdict(measured), indent=1))
    draft.replace(path)
