"""The traffic meter: every byte that a Triton kernel loads and stores, counted per tensor.

    with TrafficMeter() as meter:
        total = row_sum(x)
    print(meter.report())

The meter works where Triton *interprets* kernels (``TRITON_INTERPRET=1``): there each load and store is a call into one
small module, and `memory` stands in front of that module. Nothing here runs on a GPU, except :func:`record_launches`.

The interpreter also runs what no GPU can: :func:`record_variants` notes what a compiler would be given at each launch,
and :func:`refusal`, in a process that does not interpret, gives it to the compiler's front end.

An access outside its tensor is recorded with kernel, line and program, and then *masked out*: the load gives NaN (0 for
integers), the store is dropped, and the process lives.

Only `triton_internals` knows Triton's inside, and the meter proves itself once per process with a tiny kernel whose
counts are known. If that fails, :class:`MeterUnavailable` says so: a meter that guesses is worse than none.
This folder imports nothing of the course, and of itself by relative names alone: the checker's worker, which must not
see the course, loads it as a package of its own.
"""

from .accounts import Listener, Reached
from .front_end import find_function, front_end_is_known, refusal
from .launches import record_launches
from .meter import TrafficMeter
from .places import is_own
from .results import (
    Allocation,
    Launch,
    MeterUnavailable,
    OutOfBounds,
    TensorTraffic,
    TrafficReport,
    readable_bytes,
)
from .triton_internals import (
    compiled_elsewhere,
    launches_through,
    prepare_compiler,
    recognise_kernels_by_meaning,
    repair_interpreter,
)
from .variants import record_variants

__all__ = [
    "Allocation",
    "Launch",
    "Listener",
    "MeterUnavailable",
    "OutOfBounds",
    "Reached",
    "TensorTraffic",
    "TrafficMeter",
    "TrafficReport",
    "compiled_elsewhere",
    "find_function",
    "front_end_is_known",
    "is_own",
    "launches_through",
    "prepare_compiler",
    "readable_bytes",
    "recognise_kernels_by_meaning",
    "record_launches",
    "record_variants",
    "refusal",
    "repair_interpreter",
]
