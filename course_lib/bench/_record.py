"""Where a benchmark's figures go, and what stands beside them: the GPU, the versions, the day and the clocks."""

import datetime
import json
import subprocess
from pathlib import Path

import torch

from course_lib.hardware.device import machine
from course_lib.home import course_home


def clocks() -> str:
    """SM and memory clock, power and temperature as the driver gives them; empty without nvidia-smi."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        return subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def bench_path(name: str) -> Path:
    """A file in the course's bench folder, which is made if it is missing."""
    folder = course_home() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def write_record(name: str, clocks_before: str, **figures) -> dict:
    """Writes name.json into the bench folder, and says so; returns what it holds, for pictures.

    clocks_before: of `clocks()`, from before the first figure.
    """
    this, clocks_after, cudnn = machine(), clocks(), torch.backends.cudnn.version()
    record = {"gpu": this.gpu_name, "date": datetime.date.today().isoformat(), "torch": torch.__version__,
              "triton": this.triton, "cudnn": cudnn, "clocks_before": clocks_before, "clocks_after": clocks_after,
              **figures}  # fmt: skip
    path = bench_path(f"{name}.json")
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"\n{this.gpu_name}, PyTorch {torch.__version__}, cuDNN {cudnn}, Triton {this.triton}.")
    print(f"Clocks SM, memory, power, temperature: {clocks_before} before, {clocks_after} after.\nWritten: {path}")
    return record
