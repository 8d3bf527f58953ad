"""Where a benchmark's figures go, and what stands beside them: the GPU, the versions, the day and the clocks."""

import datetime
import json

import torch

from course_lib.bench.attention import clocks
from course_lib.hardware.device import machine
from course_lib.home import course_home


def write_record(name: str, clocks_before: str, **figures) -> str:
    """Writes name.json into the course's bench folder; returns what to print last: GPU, versions, clocks, and where.

    clocks_before: of `clocks()`, from before the first figure.
    """
    this, clocks_after = machine(), clocks()
    record = {"gpu": this.gpu_name, "date": datetime.date.today().isoformat(), "torch": torch.__version__,
              "triton": this.triton, "clocks_before": clocks_before, "clocks_after": clocks_after,
              **figures}  # fmt: skip
    path = course_home() / "bench" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return (
        f"\n{this.gpu_name}, PyTorch {torch.__version__}, Triton {this.triton}; clocks SM, memory, power, temperature: "
        f"{clocks_before} before, {clocks_after} after.\nWritten: {path}"
    )
