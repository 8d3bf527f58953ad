"""What an operation costs, what a device offers, and the least time that follows.

    intensity          = FLOPs / bytes                                  [FLOP/byte]
    balance point      = arithmetic rate / memory bandwidth             [FLOP/byte]
    attainable rate    = min(arithmetic rate, bandwidth * intensity)    [FLOP/s]
    floor time         = max(FLOPs / rate, bytes / bandwidth)           [s]

Below the balance point an operation waits for memory, above it for arithmetic. Source: Williams, Waterman, Patterson,
"Roofline: an insightful visual performance model", CACM 52(4), 2009.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call of an operation must do at least.

    flops: floating-point operations, a multiply-add counting as two.
    bytes: bytes that must cross the memory bus: every input read once, every output written once.
    unit:  who does the arithmetic: "fma" (the ordinary multiply-add units) or a dtype name as in
           `ceilings().matmul_rate`, e.g. "float16", for the matrix units.
    """

    name: str
    flops: float
    bytes: float
    unit: str = "fma"

    def __post_init__(self):
        for field in ("flops", "bytes"):
            value = getattr(self, field)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{field} of {self.name!r} is {value!r}; it must be a finite number of at least 0.")

    @property
    def intensity(self) -> float:
        """FLOPs per byte; infinite for work that touches no memory."""
        return self.flops / self.bytes if self.bytes else math.inf


def balance_point(rate: float, bandwidth: float) -> float:
    """The intensity [FLOP/byte] at which a device of `rate` [FLOP/s] and `bandwidth` [bytes/s] is equally busy."""
    for name, value in (("rate", rate), ("bandwidth", bandwidth)):
        if not value > 0:
            raise ValueError(f"{name} is {value!r}; it must be positive.")
    return rate / bandwidth


def arithmetic_rate(ceilings, unit: str = "fma") -> float:
    """The measured rate [FLOP/s] of "fma" or of the matrix product in a dtype; unknown units are named."""
    if unit == "fma":
        return ceilings.fma_rate
    if unit not in ceilings.matmul_rate:
        known = ", ".join(["fma", *ceilings.matmul_rate])
        raise ValueError(f"unit is {unit!r}; measured on this device are: {known}.")
    return ceilings.matmul_rate[unit]


def attainable(intensity: float, ceilings, unit: str = "fma") -> float:
    """The best rate [FLOP/s] that work of this intensity [FLOP/byte] can reach under these ceilings."""
    if not intensity >= 0:
        raise ValueError(f"intensity is {intensity!r} FLOP/byte; it must be at least 0.")
    return min(arithmetic_rate(ceilings, unit), ceilings.memory_bandwidth * intensity)


def floor_time(work: Work, ceilings) -> float:
    """The least time [s] that `work` can take under these ceilings, were memory and arithmetic to overlap perfectly."""
    return max(work.flops / arithmetic_rate(ceilings, work.unit), work.bytes / ceilings.memory_bandwidth)


def bound(work: Work, ceilings) -> str:
    """ "memory" or "compute": which of the two `work` waits for."""
    compute_seconds = work.flops / arithmetic_rate(ceilings, work.unit)
    return "memory" if work.bytes / ceilings.memory_bandwidth > compute_seconds else "compute"
