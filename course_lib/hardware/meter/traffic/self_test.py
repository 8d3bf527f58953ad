"""Is this a Triton that can be metered? Proved once per process, by a kernel whose counts are known."""

from __future__ import annotations

import torch

from . import known_kernels, triton_internals
from .order import DESCENDING
from .results import MeterUnavailable, TrafficReport

_result: str | None = None  # None: not run yet; "": passed; else what was wrong


class _Seven:
    """What the self-test's kernel finds in lanes that its load leaves undefined: 7.0."""

    float32 = 0x40E0_0000


def require_interpreter() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise MeterUnavailable(f"Triton cannot be imported ({error}), so there is no kernel to meter.") from error
    if not triton_internals.interpreting():
        raise MeterUnavailable(
            "Kernels are compiled for the GPU in this process, where loads cannot be counted. Start "
            "Python with TRITON_INTERPRET=1 in its environment, before Triton is imported."
        )
    triton_internals.repair_interpreter()


def prove(meter_class: type) -> None:
    """Counts a kernel whose traffic is known: 10 of 16 lanes loaded, 10 stored, 6 stored past the end, 2 atomics.

    One of its two loads leaves lanes undefined, and its programs run in descending order.
    """
    global _result
    if _result is None:
        try:
            source, target, total, last = torch.arange(10.0), torch.zeros(16)[:10], torch.zeros(1), torch.tensor([7])
            kernel = known_kernels.jit("metered_kernel")
            meter = meter_class(source=source, undefined_lanes=_Seven, order=DESCENDING)
            meter._open()
            try:
                kernel[(2,)](source, target, total, last, 10)
            finally:
                meter._close()
            _result = _mismatch(meter.report(), target, total, last)
        except Exception as error:  # whatever moved inside Triton, the answer is the same: no meter
            _result = f"{type(error).__name__}: {error}"
    if _result:
        raise MeterUnavailable(
            f"The traffic meter does not understand this Triton ({_result}). "
            f"{triton_internals.versions()} Install Triton 3.6 to 3.9 to count bytes; all else works without it."
        )


def _mismatch(report: TrafficReport, target: torch.Tensor, total: torch.Tensor, last: torch.Tensor) -> str:
    wild = report.out_of_bounds[0] if report.out_of_bounds else None
    seen = {
        "loaded": report["source"].loaded_bytes,
        "stored": report["target"].stored_bytes,
        "atomic": report["total"].atomic_operations,
        "grid": report.launches[0].grid,
        "result": target.tolist(),
        "count": total.item(),
        "last program": last.item(),
        "wild": wild and (wild.kind, wild.tensor, wild.first_element, wild.last_element, wild.program),
        "line": wild and wild.line - known_kernels.metered_kernel.__code__.co_firstlineno,
        "undefined": len(report.undefined_loads),
    }
    expected = {
        "loaded": 40,
        "stored": 40,
        "atomic": 2,
        "grid": (2, 1, 1),
        "result": [float(i) for i in range(10)],
        "count": 2.0,
        "last program": 0,
        "wild": ("store", "target", 10, 15, (1, 0, 0)),
        "line": 3,
        "undefined": 1,
    }
    wrong = [f"{key} is {seen[key]}, not {value}" for key, value in expected.items() if seen[key] != value]
    return "; ".join(wrong)
