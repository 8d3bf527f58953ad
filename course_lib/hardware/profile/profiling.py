"""`profile(function, *arguments)`: the meter, the compiler, and where there is a GPU its clock and ncu."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from course_lib.hardware.compiler import process
from course_lib.hardware.compiler.architectures import ARCHITECTURES, architecture_number
from course_lib.hardware.compiler.compiled import CompiledKernel, CompileError
from course_lib.hardware.compiler.request import prepare
from course_lib.hardware.compiler.views import compile_prepared
from course_lib.hardware.datasheets import DATASHEETS, Datasheet, datasheet_for
from course_lib.hardware.device import interpreting, machine
from course_lib.hardware.meter import resident
from course_lib.hardware.meter.access_log import copied
from course_lib.hardware.meter.elsewhere import found, located
from course_lib.hardware.profile.card import KernelFacts, Profile
from course_lib.hardware.profile.counters import NoCounters, by_kernel, counted
from course_lib.hardware.profile.findings import what_to_look_at
from course_lib.hardware.profile.occupancy import occupancy_of
from course_lib.hardware.profile.seen import MOST_VARIANTS, KernelSeen, Seen, see
from course_lib.hardware.timing import measure

SECONDS = 10.0  # in the interpreter
NO_PLAIN_FORM = "not compiled: its arguments have no plain form"
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
    """What the meter saw, in this process if it interprets, and each kernel compiled, or why it is not."""
    if interpreting():
        seen, requests = _seen_here(function, arguments, named, number, seconds)
    else:
        copies: dict = {}
        job = {**located(function), "arguments": copied(arguments, copies), "named": copied(named, copies),
               "number": number, "seconds": seconds}  # fmt: skip
        process.begin()  # so that the compiler starts beside the interpreter
        seen, requests = resident.ask(_seen_there, job, 2 * seconds, "cannot be run")
    views = iter(compile_prepared([request for request in requests if not isinstance(request, str)]))
    return seen, [request if isinstance(request, str) else _or_words(next(views)) for request in requests]


def _seen_there(job: dict, folder: Path) -> tuple[Seen, list[dict | str]]:
    """In the other process."""
    return _seen_here(found(job, folder), job["arguments"], job["named"], job["number"], job["seconds"])


def _seen_here(
    function: Callable, arguments: tuple, named: dict, number: int, seconds: float
) -> tuple[Seen, list[dict | str]]:
    """What the meter saw, and of each kernel what the compiler is to be asked, or why nothing."""
    seen = see(function, arguments, named, seconds)
    requests: list[dict | str] = []
    for kernel in seen.kernels:
        request, kernel.request = kernel.request, None  # a live kernel does not travel
        if request is None or len(requests) - requests.count(NO_PLAIN_FORM) >= MOST_VARIANTS:
            requests.append(NO_PLAIN_FORM)
            continue
        try:
            requests.append(prepare(**{**request, "arch": number}))
        except (TypeError, ValueError) as error:  # a kernel whose source or constants cannot travel
            requests.append(str(error))
    return seen, requests


def _or_words(view: CompiledKernel | CompileError) -> CompiledKernel | str:
    return str(view) if isinstance(view, CompileError) else view


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


__all__ = ["KernelSeen", "profile"]
