"""Records what profilers say of chapter 15's kernels on this GPU: `python tests/gpu/record_profiles.py FOLDER`.

Each step runs in a process of its own with a limit, and FOLDER/log.txt says how each ended, so that counters which are
forbidden or a step that fails cost only that step. Written are

    facts.json            the GPU, versions, clocks, and the rates of a copy and of a matrix product in this run
    times.json            each workload: seconds (median, low, high), its least bytes and FLOPs
    ncu.csv               Nsight Compute's raw page, one row for a kernel (where it is installed and allowed)
    counters.json         what the driver's counters say through PyTorch's profiler (where that is allowed)
    trace_*.json          PyTorch's traces, cut down to names, times, shapes and launches
"""

import argparse
import contextlib
import glob
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LAYERS, SLOW_LAYER = 8, 5
SECTIONS = (
    "SpeedOfLight", "SpeedOfLight_RooflineChart", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables", "SchedulerStats", "WarpStateStats", "InstructionStats", "LaunchStats", "Occupancy",
)  # fmt: skip


def write(folder: Path, name: str, content) -> None:
    (folder / name).write_text(json.dumps(content, separators=(",", ":")))


def facts(folder: Path) -> None:
    import torch
    import triton

    from course_lib.hardware.timing import measure
    from tests.gpu.profiled_kernels import a_copy, a_matrix_product

    query = "name,driver_version,clocks.sm,clocks.mem,power.limit,clocks.max.sm"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
    smi = subprocess.run(command, capture_output=True, text=True).stdout if shutil.which("nvidia-smi") else ""
    ncu = ncu_path()
    version = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout if ncu else "not installed"
    copied, multiplied = a_copy(), a_matrix_product()
    write(folder, "facts.json", {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "date": time.strftime("%Y-%m-%d"),
        "nvidia_smi": smi, "ncu": version, "ncu_path": ncu,
        "sms": torch.cuda.get_device_properties(0).multi_processor_count,
        "copy_bandwidth": measure(copied.run).bandwidth(copied.bytes),
        "matmul_rate": measure(multiplied.run).rate(multiplied.flops),
    })  # fmt: skip


def times(folder: Path) -> None:
    from course_lib.hardware.timing import measure
    from tests.gpu.profiled_kernels import WORKLOADS

    rows = {}
    for name, make in WORKLOADS.items():
        workload = make()
        timing = measure(workload.run)
        rows[name] = {"seconds": timing.median, "low": timing.low, "high": timing.high, "bytes": workload.bytes,
                      "flops": workload.flops, "unit": workload.unit}  # fmt: skip
        write(folder, "times.json", rows)


def run_once_each(folder: Path) -> None:
    """What ncu looks at: every workload once warm, then once between the profiler's start and stop."""
    import torch

    from tests.gpu.profiled_kernels import WORKLOADS

    for name, make in WORKLOADS.items():
        workload = make()
        workload.run()
        torch.cuda.synchronize()
        print(name, flush=True)
        torch.cuda.profiler.start()
        workload.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def ncu_path() -> str | None:
    places = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu", "/opt/nvidia/*/*/bin/ncu")
    candidates = [shutil.which("ncu"), *(path for place in places for path in sorted(glob.glob(place)))]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def ncu(folder: Path) -> None:
    path = ncu_path()
    if path is None:
        raise RuntimeError("ncu is not installed here: no ncu on the PATH, in /usr/local/cuda*/bin or /opt/nvidia.")
    command = [path, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
               "--profile-from-start", "off", "--target-processes", "all"]  # fmt: skip
    for section in SECTIONS:
        command += ["--section", section]
    command += [sys.executable, __file__, str(folder), "--step", "run_once_each"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    (folder / "ncu_output.txt").write_text(done.stdout[-200_000:] + "\n--- stderr ---\n" + done.stderr[-4000:])
    rows = [line for line in done.stdout.splitlines() if line.startswith('"')]
    (folder / "ncu.csv").write_text("\n".join(rows) + "\n")
    if done.returncode or len(rows) < 3:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("==")][-4:]
        raise RuntimeError(f"ncu ended with status {done.returncode} and {len(rows)} rows: {' / '.join(said)}")


COUNTERS = (
    "dram__bytes_read.sum", "dram__bytes_write.sum", "sm__inst_executed_pipe_tensor.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "smsp__warps_active.avg.per_cycle_active", "sm__throughput.avg.pct_of_peak_sustained_elapsed",
)  # fmt: skip


def counters(folder: Path) -> None:
    """The same counters through CUPTI, which is refused where ncu is, or allowed where ncu is only not installed."""
    import torch
    from torch._C._profiler import _ExperimentalConfig

    from tests.gpu.profiled_kernels import WORKLOADS

    workloads = {name: make() for name, make in list(WORKLOADS.items())[:3]}
    for workload in workloads.values():
        workload.run()
    config = _ExperimentalConfig(profiler_metrics=list(COUNTERS), profiler_measure_per_kernel=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], experimental_config=config
    ) as profiler:
        for workload in workloads.values():
            workload.run()
        torch.cuda.synchronize()
    whole = folder / "counters_whole.json"
    profiler.export_chrome_trace(str(whole))
    events = [e for e in json.loads(whole.read_text())["traceEvents"] if "profiler" in e.get("cat", "")]
    write(folder, "counters.json", events)
    whole.unlink()
    if not events:
        raise RuntimeError("PyTorch's profiler gave no counters.")


KEPT_CATEGORIES = {"cpu_op", "kernel", "cuda_runtime", "cuda_driver", "gpu_memcpy", "gpu_memset", "user_annotation"}
KEPT_ARGUMENTS = ("correlation", "External id", "Input Dims", "Input type", "grid", "block", "registers per thread",
                  "shared memory", "stream", "graph node id")  # fmt: skip


def trace(folder: Path, name: str, step) -> None:
    """Three calls of `step` unseen, one seen; FOLDER/trace_NAME.json with what a reader needs of it."""
    import torch

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        torch.cuda.synchronize()
    whole = folder / f"whole_{name}.json"
    profiler.export_chrome_trace(str(whole))
    content = json.loads(whole.read_text())
    whole.unlink()
    kept = [event for event in content["traceEvents"] if event.get("cat") in KEPT_CATEGORIES and event.get("ph") == "X"]
    begin = min(event["ts"] for event in kept)
    events = []
    for event in sorted(kept, key=lambda event: event["ts"]):
        arguments = event.get("args", {})
        events.append({
            "ph": "X", "cat": event["cat"], "name": event["name"], "pid": event["pid"], "tid": event["tid"],
            "ts": round(event["ts"] - begin, 2), "dur": round(event["dur"], 2),
            "args": {key: arguments[key] for key in KEPT_ARGUMENTS if key in arguments},
        })  # fmt: skip
    header = {key: content[key] for key in ("schemaVersion", "deviceProperties") if key in content}
    write(folder, f"trace_{name}.json", {**header, "traceEvents": events})


def small_decoder(layers: int = LAYERS):
    import torch

    from course_lib.models.config import ModelConfig
    from course_lib.models.decoder import Decoder
    from course_lib.models.training import initialize

    torch.manual_seed(0)
    config = ModelConfig(vocabulary=32000, layers=layers, width=2048, query_heads=16, key_heads=4, head_dim=128,
                         hidden=5632, context=8192)  # fmt: skip
    model = Decoder(config).eval()
    initialize(model)
    return model.to("cuda", torch.bfloat16)


def decode(folder: Path) -> None:
    """A decode step of four sequences of 2,048 tokens: call by call, then the same step as a replayed graph."""
    from functools import partial

    import torch

    from course_lib.hardware.graphs import captured
    from course_lib.kernels.decode.attention import decode_attention
    from course_lib.serving.caches.new import new_cache

    model = small_decoder()
    token = torch.randint(0, 32000, (4, 1), device="cuda")
    with torch.inference_mode():
        cache = new_cache(model, 4, 4096, decode=partial(decode_attention, validate=False))
        model(torch.randint(0, 32000, (4, 2048), device="cuda"), cache, last_only=True)
        trace(folder, "decode_eager", lambda: model(token, cache, last_only=True))
        # A replay repeats its addresses and lengths, so every replay is this one step.
        with contextlib.ExitStack() as stack:
            stack.callback(torch.cuda.synchronize)
            trace(folder, "decode_graph", captured(lambda: model(token, cache, last_only=True)))


def layered(slow: str):
    """A step of prefill of a model whose layer SLOW_LAYER asks PyTorch's attention for something else."""
    import torch
    import torch.nn.functional as F

    model = small_decoder()
    tokens = torch.randint(0, 32000, (1, 2048), device="cuda")
    layer = {"number": 0}

    def attention(query, key, value, *, causal=True):
        number = layer["number"]
        layer["number"] += 1
        length = query.shape[2]
        with torch.profiler.record_function(f"layer {number}: attention"):
            if number != SLOW_LAYER or slow == "none":
                return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            if slow == "mask":  # the same mask, as a tensor
                mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
                return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
            if slow == "float32":
                wide = (tensor.float() for tensor in (query, key, value))
                return F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True).to(query.dtype)
            if slow == "strides":  # head_dim is no longer contiguous
                wide = (tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (query, key, value))
                return F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
            # A bias that is learnt: its gradient is asked for, and few backends have one.
            with torch.enable_grad():
                bias = torch.zeros(length, length, device="cuda", dtype=query.dtype, requires_grad=True)
                q, k, v = (tensor.detach().clone() for tensor in (query, key, value))
                return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True).detach()

    model.attention = attention

    def step():
        layer["number"] = 0
        with torch.no_grad():
            return model(tokens, last_only=True)

    return step


def layers(folder: Path) -> None:
    for slow in ("none", "mask", "float32", "strides", "bias"):
        trace(folder, f"layers_{slow}", layered(slow))


def layers_without_cudnn(folder: Path) -> None:
    """The same where cuDNN's attention is off, as on GPUs and in versions that have none."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    for slow in ("mask", "bias"):
        trace(folder, f"layers_{slow}_without_cudnn", layered(slow))


STEPS = {"facts": 50, "times": 60, "ncu": 120, "decode": 60, "layers": 60, "layers_without_cudnn": 40, "counters": 40}
ALL_SECONDS = 235


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--step", help="run one step in this process")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.step:
        globals()[given.step](given.folder)
        return
    end = time.monotonic() + ALL_SECONDS
    for step, limit in STEPS.items():
        began = time.monotonic()
        seconds = min(limit, max(1, round(end - began)))
        command = [sys.executable, __file__, str(given.folder), "--step", step]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
            said = "done" if done.returncode == 0 else f"status {done.returncode}: {done.stderr.strip()[-1500:]}"
        except subprocess.TimeoutExpired:
            said = f"not done after {seconds} seconds"
        line = f"{step}: {said} ({time.monotonic() - began:.0f} s)"
        print(line, flush=True)
        with (given.folder / "log.txt").open("a") as log:
            log.write(line + "\n")


if __name__ == "__main__":
    main()
