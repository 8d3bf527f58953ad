"""`profile(function, *arguments)`: the meter, the compiler, and where there is a GPU its clock and ncu."""

import dataclasses
import math
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from course_lib.hardware.compiler.architectures import ARCHITECTURES, architecture_number
from course_lib.hardware.compiler.compiled import CompileError
from course_lib.hardware.compiler.views import compile_many
from course_lib.hardware.datasheets import DATASHEETS, Datasheet, datasheet_for
from course_lib.hardware.device import interpreting, machine
from course_lib.hardware.meter.elsewhere import environment, found, located
from course_lib.hardware.meter.recorded import copied
from course_lib.hardware.meter.traffic import MeterUnavailable
from course_lib.hardware.profile.card import KernelFacts, Profile
from course_lib.hardware.profile.counters import NoCounters, by_kernel, counted
from course_lib.hardware.profile.findings import what_to_look_at
from course_lib.hardware.profile.occupancy import occupancy_of
from course_lib.hardware.profile.seen import MOST_VARIANTS, KernelSeen, Seen, see
from course_lib.hardware.timing import measure

SECONDS = 10.0  # in the interpreter
START_SECONDS = 100.0  # for another process to begin
SHEETS = {75: "T4", 80: "A100", 90: "H100", 100: "B200"}  # where no GPU is at hand


def profile(
    function: Callable,
    *arguments,
    arch: int | str | None = None,
    least_bytes: float | None = None,
    flops: float | None = None,
    unit: str = "fma",
    counters: bool = True,
    seconds: float = SECONDS,
    **named,
) -> Profile:
    """Run `function(*arguments)` under the meter, compile its kernels, and say on one card what limits them.

    Args:
        function: launches one or more Triton kernels. It gets copies of the tensors.
        arguments, named: what it is called with. Without a GPU a program takes half a millisecond: keep tensors small.
        arch: the GPU to compile for, 75 to 120 or "sm_80"; None means the one at hand, or sm_90 where there is none.
        least_bytes: what the operation must move at least [bytes]; None means every byte that the kernels touch, once.
        flops: what it must compute [FLOP], a multiply-add counting as two; None where memory alone matters.
        unit: who computes: "fma", or a dtype of the matrix units such as "float16".
        counters: on a GPU also ask ncu, where it is installed and allowed; some seconds.
        seconds: a limit for the call in the interpreter.

    Returns a card: `print` it, or leave it as a cell's last line. `look_at` is the sentence, `kernels` the facts.

    Raises:
        TypeError: `function` is a kernel, or nothing that can be called.
        ValueError: another argument makes no sense, or the function's source is not to be found.
        MeterUnavailable: this Triton cannot be metered; the text says why.
    """
    if hasattr(function, "fn") or not callable(function):
        what = "the kernel itself" if hasattr(function, "fn") else f"of type {type(function).__name__}"
        raise TypeError(
            "profile takes the function that launches a kernel, and what it is called with, as in profile(vector_add, "
            f"x, y). {getattr(function, '__name__', function)!r} is {what}."
        )
    for name, value in (("least_bytes", least_bytes), ("flops", flops), ("seconds", seconds)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value!r}; it must be a number above 0, or None.")
    here = machine() if arch is None else None
    number = _capability(here.compute_capability if here and here.tier != "none" else None) if here else 0
    number = architecture_number(arch) if arch is not None else number
    sheet = datasheet_for(here.gpu_name if here else None) or DATASHEETS.get(SHEETS.get(number, ""))
    if flops is not None and sheet is not None and unit != "fma" and unit not in sheet.matmul_rate:
        known = ", ".join(["fma", *sheet.matmul_rate])
        raise ValueError(f"unit is {unit!r}; the datasheet of the {sheet.name} has {known}.")
    seen, views = _seen_and_compiled(function, arguments, named, number, seconds)
    whole = _profile_of(seen, views, number, sheet, least_bytes, flops, unit)
    if arch is None and not interpreting() and not seen.stopped and seen.kernels:
        whole = _measured(whole, function, arguments, named, counters)
    elif counters:
        reason = "arch names another GPU than this one." if arch is not None else "there is no GPU here to count on."
        whole = dataclasses.replace(whole, counters_missing=reason)
    return dataclasses.replace(whole, look_at=what_to_look_at(whole))


def _capability(capability: tuple[int, int] | None) -> int:
    """The key of ARCHITECTURES for this GPU: its own, or the newest that is no newer; 90 without a GPU."""
    if capability is None:
        return 90
    number = 10 * capability[0] + capability[1]
    return max((known for known in ARCHITECTURES if known <= number), default=min(ARCHITECTURES))


def _seen_and_compiled(function: Callable, arguments: tuple, named: dict, number: int, seconds: float):
    """In a process that interprets, this one or another: what the meter saw, and each kernel compiled."""
    if interpreting():
        return _here(function, arguments, named, number, seconds)
    copies: dict = {}
    job = {**located(function), "arguments": copied(arguments, copies), "named": copied(named, copies),
           "number": number, "seconds": seconds}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        sent, received = Path(folder) / "job", Path(folder) / "seen"
        sent.write_bytes(pickle.dumps(job))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "course_lib.hardware.profile.profiling", str(sent), str(received)],
                env=environment(), capture_output=True, text=True, timeout=seconds + START_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise MeterUnavailable(f"{job['name']} did not stop in the interpreter and was ended.") from None
        if done.returncode != 0 or not received.exists():
            raise MeterUnavailable(f"{job['name']} cannot be run in the interpreter: {done.stderr.strip()[-2000:]}")
        return pickle.loads(received.read_bytes())


def _here(function: Callable, arguments: tuple, named: dict, number: int, seconds: float):
    seen = see(function, arguments, named, seconds)
    views: list = ["not compiled: its arguments have no plain form"] * len(seen.kernels)
    places = [place for place, kernel in enumerate(seen.kernels) if kernel.request is not None][:MOST_VARIANTS]
    requests = [{**seen.kernels[place].request, "arch": number} for place in places]  # type: ignore[dict-item]
    try:
        compiled = compile_many(requests) if requests else []
    except (TypeError, ValueError) as error:  # a kernel whose source or constants cannot travel
        compiled = [CompileError(str(error))] * len(places)
    for place, view in zip(places, compiled):
        views[place] = str(view) if isinstance(view, CompileError) else view
    for kernel in seen.kernels:
        kernel.request = None  # a live kernel does not travel
    return seen, views


def _profile_of(
    seen: Seen, views: list, number: int, sheet: Datasheet | None, least: float | None, flops: float | None, unit: str
) -> Profile:
    kernels = [
        KernelFacts(kernel, view, None if isinstance(view, str) else occupancy_of(view))
        for kernel, view in zip(seen.kernels, views)
    ]
    least_bytes = int(least) if least is not None else seen.least_bytes
    roof, roof_seconds = _roof(sheet, least_bytes, flops, unit)
    example = sheet.name if sheet else ARCHITECTURES[number].example
    return Profile(
        function=seen.function,
        target=f"{example} (sm_{number})",
        multiprocessors=sheet.sm_count if sheet else None,
        kernels=tuple(kernels),
        moved_bytes=sum(kernel.sector_bytes for kernel in seen.kernels),
        least_bytes=least_bytes,
        least_was_given=least is not None,
        flops=flops,
        roof=roof,
        roof_seconds=roof_seconds,
        times_read=seen.times_read,
        outside=tuple(seen.outside),
        stopped=seen.stopped,
    )


def _roof(sheet: Datasheet | None, least_bytes: int, flops: float | None, unit: str) -> tuple[str, float | None]:
    """Which roof the least work reaches first, and the least time under it [s]."""
    if sheet is None:
        return "memory", None
    memory = least_bytes / sheet.bandwidth
    compute = (flops or 0.0) / (sheet.fma_rate if unit == "fma" else sheet.matmul_rate[unit])
    return ("compute", compute) if compute > memory else ("memory", memory)


def _measured(whole: Profile, function: Callable, arguments: tuple, named: Mapping, counters: bool) -> Profile:
    """The same with this GPU's time, and with ncu's figures or the reason why there are none."""
    timing = measure(lambda: function(*arguments, **named))
    whole = dataclasses.replace(whole, seconds=timing.median)
    if not counters:
        return whole
    try:
        return dataclasses.replace(whole, counters=by_kernel(counted(function, arguments, dict(named))))
    except NoCounters as reason:
        return dataclasses.replace(whole, counters_missing=str(reason))


def _profile_there(sent: Path, received: Path) -> None:
    """The other process: find the function, see it, write what was seen."""
    job = pickle.loads(sent.read_bytes())
    function = found(job, sent.parent)
    answer = _here(function, job["arguments"], job["named"], job["number"], job["seconds"])
    received.write_bytes(pickle.dumps(answer))


__all__ = ["KernelSeen", "profile"]

if __name__ == "__main__":
    # Under its true name, so that what is pickled here is found there.
    from course_lib.hardware.profile import profiling as module

    module._profile_there(Path(sys.argv[1]), Path(sys.argv[2]))
