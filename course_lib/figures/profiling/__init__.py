"""What profilers recorded of eight kernels and of a model's steps on an H100: chapter 15's data, read for its cells.

The kernels are those of `tests/gpu/profiled_kernels.py`, and `tests/gpu/record_profiles.py` records them anew.
"""

import json

from course_lib.figures.recorded import FOLDER, recorded
from course_lib.hardware.profile.counters import DRAM_SHARE, TENSOR_SHARE, read_raw_page

__all__ = ["recorded_metrics", "recorded_profiles", "recorded_traces"]

PREFIX = "l1tex__t_requests_pipe_lsu_mem_"


def recorded_profiles() -> dict:
    """The GPU, the versions and the date, and for each workload its seconds, least bytes and FLOPs."""
    return recorded("profiles", "h100")


def recorded_metrics() -> dict[str, dict[str, float]]:
    """For each workload the figures that exercise 15.1 asks for, from ncu's page; percent and counts."""
    workloads = recorded_profiles()["workloads"]
    page = read_raw_page((FOLDER / "ncu_h100.csv").read_text(encoding="utf-8"))
    return {
        name: {
            "memory_busy": seen[DRAM_SHARE],
            "tensor_busy": seen[TENSOR_SHARE],
            "special_busy": seen["sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"],
            "warps_active": seen["sm__warps_active.avg.pct_of_peak_sustained_active"],
            "local_requests": seen[f"{PREFIX}local_op_ld.sum"] + seen[f"{PREFIX}local_op_st.sum"],
            "global_requests": seen[f"{PREFIX}global_op_ld.sum"] + seen[f"{PREFIX}global_op_st.sum"],
            "atomic_requests": seen[f"{PREFIX}global_op_atom.sum"],
            "programs": seen["launch__grid_size"],
            "multiprocessors": seen["launch__sm_count"],
            "moved_bytes": seen["dram__bytes_read.sum"] + seen["dram__bytes_write.sum"],
            "least_bytes": workloads[name]["bytes"],
        }
        for name, (_, seen) in zip(workloads, page, strict=True)
    }


def recorded_traces() -> dict[str, dict]:
    """What layer 5 of eight asked for -> its step: `events` of attention, and `microseconds_in_all` of its kernels."""
    return json.loads((FOLDER / "traces_h100.json").read_text(encoding="utf-8"))["layers"]
