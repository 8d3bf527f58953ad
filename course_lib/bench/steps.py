"""`python -m course_lib bench steps`: a decode step of two models: launched, compiled, captured, of fewer kernels.

    eager         each operation launched: the course's kernels for the cache and attention, PyTorch's for the rest
    compiled      torch.compile(mode="reduce-overhead"), over PyTorch's own attention
    captured      the eager step as a CUDA graph
    five kernels  at batch 1: `course_lib.serving.single`, as a graph
    dependent     the same, each kernel started while the one before runs (from sm_90 on)
    one kernel    the same stages in one kernel that stays

The models: chapter 05's, and one of the shape of Llama-3.2-1B with random weights, which no step's time depends on. A
figure is the time of a step on the clock on the wall, over some in a row that the host sends without waiting: what a
generation loop pays. Batches that are compiled are few, since each compiles for half a minute.

For a captured step PyTorch's profiler says how long its kernels ran, and for chapter 14's picture when each kernel of
one layer did. With the time that PyTorch's smallest operation takes the host, everything goes to steps.json in the
course's bench folder.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from course_lib.bench._record import clocks, write_record
from course_lib.bench.decode import host_seconds
from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.graphs import captured, compiled
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.common.dependent import dependent_launches
from course_lib.kernels.decode.append import append_to_pages
from course_lib.kernels.paged.attention import paged_decode_attention
from course_lib.models.config import PRESETS, ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.tiny import TINY
from course_lib.serving.caches.sequences import SequencePages, SteppedPages
from course_lib.serving.captured import CapturedDecoder
from course_lib.serving.memory import WholeRuns
from course_lib.serving.single import SingleDecoder

MODELS = {"small": TINY, "Llama-3.2-1B": PRESETS["Llama-3.2-1B"]}
CONTEXT = {"small": 128, "Llama-3.2-1B": 512}  # tokens before the first step
BATCHES = (1, 2, 4, 8, 16, 32, 64)
COMPILED_BATCHES = {"small": (1, 8), "Llama-3.2-1B": (1, 8)}
PAGE, STEPS, ROUNDS = 16, 20, 7
STAGES = ("project", "attend", "output", "feed", "down")  # the kernels of a layer in `SingleDecoder`


def model_of(config: ModelConfig) -> Decoder:
    """Random weights, of a size that keeps every number finite."""
    dtype = torch.bfloat16 if supports_bfloat16() else torch.float16
    with torch.device("cuda"):
        model = Decoder(config, attention).to(dtype).eval().requires_grad_(False)
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
    return model


def plain_step(query, key, value, slots, tables, lengths, key_pages, value_pages):
    """Store and attend by PyTorch's own operations, which its compiler can take: `SteppedPages`' step."""
    for fresh, pages in ((key, key_pages), (value, value_pages)):
        pages[slots // PAGE, :, slots % PAGE] = fresh
    keys, values = (pages[tables.long()].transpose(1, 2).flatten(2, 3) for pages in (key_pages, value_pages))
    inside = torch.arange(keys.shape[2], device=query.device) < lengths[:, None, None, None]
    return F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=inside, enable_gqa=True)[:, :, 0]


def pages_of(model: Decoder, batch: int, context: int, plain: bool):
    """A cache in which `batch` sequences have `context` tokens, and room for the steps that are timed."""
    columns = -(-(context + (ROUNDS + 3) * STEPS + 8) // PAGE)
    pages = batch * columns
    options: dict[str, Any] = {
        "allocator": WholeRuns(pages, PAGE, columns * PAGE), "attention": attention, "dtype": model.dtype,
        "append": functools.partial(append_to_pages, validate=False), "device": "cuda",
    }  # fmt: skip
    cache: SequencePages
    if plain:
        cache = SteppedPages(model.config, pages + 1, PAGE, step=plain_step, **options)
    else:
        decode = functools.partial(paged_decode_attention, validate=False)
        cache = SequencePages(model.config, pages + 1, PAGE, decode=decode, **options)
    for pool in cache.memory:
        pool.normal_()
    return cache, columns


def fill(cache, batch: int, context: int) -> None:
    for name in range(batch):
        cache.take([name], context)
        cache.advance(context)


def seconds_of_step(step: Callable) -> float:
    """The median over some rounds of steps in a row."""
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - began) / STEPS)
    return statistics.median(rounds)


def batched(name: str, model: Decoder, batch: int, form: str) -> dict:
    """{"us"} of a step of `batch` sequences, or {"missing": why}."""
    context = CONTEXT[name]
    cache, columns = pages_of(model, batch, context, form == "compiled")
    run: Callable = model
    if form != "eager":
        capture = functools.partial(compiled, static=cache.memory) if form == "compiled" else captured
        run = CapturedDecoder(model, cache, batches=(batch,), columns=(columns,), capture=capture)
    fill(cache, batch, context)
    token = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")

    def step():
        cache.take(range(batch), 1)
        token.copy_(run(token, cache, last_only=True)[:, -1].argmax(dim=-1, keepdim=True))

    with torch.no_grad():
        for _ in range(STEPS):
            step()
        result: dict = {"us": seconds_of_step(step) * 1e6}
        if isinstance(run, CapturedDecoder):
            if run.reason is not None:
                return {"missing": run.reason}
            replay = next(iter(run._steps.values()))._replay
            result |= {"graph_us": seconds_of_step(replay) * 1e6, "kernels_us": sum(d for _, _, d in trace_of(replay))}
    return result


def trace_of(step: Callable) -> list[tuple[str, float, float]]:
    """(name, beginning, time) in µs of the kernels of one step, as PyTorch's profiler saw them, by their beginning."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    kernels = [(event.name, event.time_range.start, event.time_range.elapsed_us()) for event in seen.events()
               if event.device_type == torch.autograd.DeviceType.CUDA]  # fmt: skip
    first = min((begin for _, begin, _ in kernels), default=0.0)
    return sorted(((name[:60], begin - first, taken) for name, begin, taken in kernels), key=lambda kernel: kernel[1])


def alone(name: str, model: Decoder, form: str, as_graph: bool) -> dict:
    """{"us"} of a step of one sequence by `SingleDecoder`; with a graph "kernels_us", and what `layer_of` finds."""
    writer = SingleDecoder(model, CONTEXT[name] + (ROUNDS + 6) * STEPS * 4, form)
    step = captured(writer.step) if as_graph else writer.step
    writer.state.position.fill_(CONTEXT[name])
    writer.length = CONTEXT[name]
    with torch.no_grad():
        for _ in range(STEPS):
            step()
        result: dict = {"us": seconds_of_step(step) * 1e6}
        if as_graph:
            trace = trace_of(step)
            result["kernels_us"] = sum(taken for _, _, taken in trace)
            if form != "one kernel":
                result |= layer_of(trace, model.config.layers)
    return result


def layer_of(trace: Sequence[tuple[str, float, float]], layers: int) -> dict:
    """One layer of a step made of a first kernel, five for each layer, and the last two.

    Returns {"layer_us": from the beginning of one layer to that of the next, on average, without the first and the last
    two; "layer": of the middle layer (stage, when it begins in the layer, how long it runs), in µs}. Of fewer than five
    layers, {}.
    """
    if layers < 5:
        return {}
    starts = [trace[1 + len(STAGES) * layer][1] for layer in range(layers)]
    first = 1 + len(STAGES) * (layers // 2)
    kernels = [[stage, round(begin - trace[first][1], 1), round(taken, 1)]
               for stage, (_, begin, taken) in zip(STAGES, trace[first:])]  # fmt: skip
    return {"layer_us": (starts[-2] - starts[1]) / (layers - 3), "layer": kernels}


def measure(name: str) -> dict:
    """{batch: {form: result}} for one of MODELS."""
    model, table = model_of(MODELS[name]), {}
    for batch in BATCHES:
        row: dict[str, dict] = {}
        for form in ("eager", "captured") + (("compiled",) if batch in COMPILED_BATCHES[name] else ()):
            try:
                row[form] = batched(name, model, batch, form)
            except torch.OutOfMemoryError:
                row[form] = {"missing": "not enough memory"}
        if batch == 1:
            row["five kernels, launched"] = alone(name, model, "launched", False)
            row["five kernels"] = alone(name, model, "launched", True)
            if dependent_launches():
                row["dependent"] = alone(name, model, "dependent", True)
            row["one kernel"] = alone(name, model, "one kernel", True)
        for form, found in row.items():
            figures = f"{found['us']:>10.1f}" if "us" in found else f"  {found['missing']}"
            extra = "".join(f"  {key} {found[key]:.1f}" for key in ("graph_us", "kernels_us") if key in found)
            print(f"{name:<16}{batch:>4}  {form:<24}{figures}{extra}", flush=True)
        table[str(batch)] = row
        torch.cuda.empty_cache()
    weights = sum(weight.nbytes for weight in model.parameters())
    return {"weight_bytes": weights, "context": CONTEXT[name], "batches": table}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table, in µs; returns the exit status."""
    if machine().tier == "none":
        print("bench steps needs an NVIDIA GPU: without one nothing is launched.")
        return 0
    torch.manual_seed(0)
    before = clocks()
    print(f"{'model':<16}{'batch':>4}  {'form':<24}{'µs a step':>10}")
    small = torch.zeros(16, device="cuda")
    addition = host_seconds(lambda: small.add_(1.0)) * 1e6
    models = {name: measure(name) for name in MODELS}
    write_record("steps", before, addition_us=addition, models=models)
    return 0
