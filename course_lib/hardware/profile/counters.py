"""ncu, Nsight Compute's command line: its figures for a function's kernels, or a sentence that says why there are none.

`read_raw_page` reads what `ncu --csv --page raw --print-units base` prints, from a run of today or a recorded one.
Source of the metrics' names and meaning: Nsight Compute documentation, "Kernel Profiling Guide", Metrics Reference.
"""

import csv
import glob
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from course_lib.hardware.meter.elsewhere import located
from course_lib.hardware.units import format_bytes, format_seconds

OLDEST = (2023, 1)  # the first whose metrics carry today's names on Hopper
SECONDS = 60
SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables",
    "WarpStateStats", "LaunchStats", "Occupancy",
)  # fmt: skip
PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
DRAM_SHARE = "dram__cycles_active.avg.pct_of_peak_sustained_elapsed"
TENSOR_SHARE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
STALL = r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio"


class NoCounters(RuntimeError):
    """ncu gave no figures; the message says what is missing and how to get it."""


def read_raw_page(text: str) -> list[tuple[str, dict[str, float]]]:
    """(kernel's name, metric -> number in base units) for each profiled launch, in order; texts are left out.

    Raises NoCounters when the text is no raw page.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        raise NoCounters(
            'this is not what ncu --csv --page raw prints: no head with "Kernel Name" and no row below it.'
        )
    found = []
    for row in rows[2:]:
        entries = dict(zip(rows[0], row))
        numbers = {name: _number(value) for name, value in entries.items()}
        found.append((entries["Kernel Name"], {name: value for name, value in numbers.items() if value is not None}))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def in_words(metrics: Mapping[str, float]) -> dict[str, str]:
    """The few figures that a card shows, as (what -> value); what this ncu did not measure is left out."""
    words = {}
    if "gpu__time_duration.sum" in metrics:
        words["time"] = format_seconds(metrics["gpu__time_duration.sum"] * 1e-9)
    if "dram__bytes_read.sum" in metrics and "dram__bytes_write.sum" in metrics:
        read, written = metrics["dram__bytes_read.sum"], metrics["dram__bytes_write.sum"]
        words["memory"] = f"{format_bytes(read)} read, {format_bytes(written)} written"
    for what, name in (("memory busy", DRAM_SHARE), ("tensor pipe busy", TENSOR_SHARE)):
        if name in metrics:
            words[what] = f"{metrics[name]:.1f} %"
    if "sm__warps_active.avg.pct_of_peak_sustained_active" in metrics:
        words["occupancy"] = f"{metrics['sm__warps_active.avg.pct_of_peak_sustained_active']:.1f} %"
    stalls = stalls_of(metrics)
    if stalls:
        total = sum(stalls.values())
        longest = sorted(stalls.items(), key=lambda stall: -stall[1])[:2]
        words["warps wait for"] = ", ".join(f"{name} {value / total:.0%}" for name, value in longest)
    return words


def stalls_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """What warps wait for -> how many of them do, for each instruction that is issued; "selected" is no wait."""
    found = {match[1]: value for name, value in metrics.items() if (match := re.fullmatch(STALL, name)) and value > 0}
    found.pop("selected", None)
    return found


def ncu_path() -> str | None:
    """Where ncu is: on the PATH, or where CUDA installs it."""
    places = [shutil.which("ncu"), *(path for place in PLACES for path in sorted(glob.glob(place), reverse=True))]
    return next((path for path in places if path and os.access(path, os.X_OK)), None)


def require(path: str | None, version_text: str) -> None:
    """Raises NoCounters where ncu is missing or too old; `version_text` is what `ncu --version` prints."""
    if path is None:
        raise NoCounters(
            "ncu is not installed. It comes with the CUDA toolkit, and alone as NVIDIA's package nsight-compute; put "
            "it on the PATH."
        )
    version = re.search(r"Version (\d+)\.(\d+)", version_text)
    if version is None:
        raise NoCounters(f"{path} --version tells no version: {version_text.strip()[:200]!r}.")
    if (int(version[1]), int(version[2])) < OLDEST:
        raise NoCounters(
            f"{path} is version {version[1]}.{version[2]}; its metrics have other names than those from "
            f"{OLDEST[0]}.{OLDEST[1]} on. Install a newer Nsight Compute."
        )


def refusal(output: str) -> NoCounters:
    """Why ncu printed no figures, from what it did print."""
    if "ERR_NVGPUCTRPERM" in output:
        return NoCounters(
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM). The administrator allows it with the "
            "driver's option NVreg_RestrictProfilingToAdminUsers=0; in a container, start it with --cap-add=SYS_ADMIN."
        )
    if "No kernels were profiled" in output:
        return NoCounters("the function launched no kernel on the GPU, or it failed there; run it once by itself.")
    told = [line for line in output.splitlines() if line.startswith("==ERROR==")] or output.strip().splitlines()[-1:]
    return NoCounters(f"ncu failed: {' '.join(told)[:400]}")


def counted(function: Callable, arguments: tuple, named: dict) -> list[tuple[str, dict[str, float]]]:
    """ncu's figures for one warm call of `function`, in a process of its own on the GPU; see `read_raw_page`.

    Raises NoCounters.
    """
    path = ncu_path()
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout if path else ""
    require(path, version)
    assert path is not None
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps({**located(function), "arguments": arguments, "named": named}))
        command = [path, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
                   "--profile-from-start", "off", "--target-processes", "all"]  # fmt: skip
        for section in SECTIONS:
            command += ["--section", section]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run(
                [*command, sys.executable, "-m", "course_lib.hardware.profile.once", str(job)],
                capture_output=True, text=True, timeout=SECONDS, env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NoCounters(
                f"ncu was not done after {SECONDS} seconds; it repeats each kernel some 20 times."
            ) from None
    if not _has_rows(done.stdout):
        raise refusal(done.stdout + done.stderr)
    return read_raw_page(done.stdout)


def _has_rows(output: str) -> bool:
    return sum(line.startswith('"') for line in output.splitlines()) >= 3


def by_kernel(figures: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, dict[str, str]]:
    """The card's words for each kernel, its longest launch."""
    longest: dict[str, Mapping[str, float]] = {}
    for name, metrics in figures:
        before = longest.get(name, {}).get("gpu__time_duration.sum", -1.0)
        if metrics.get("gpu__time_duration.sum", 0.0) > before:
            longest[name] = metrics
    return {name: in_words(metrics) for name, metrics in longest.items()}
