"""`python -m course_lib bench ranks_decode`: a decode step of Llama-3-8B's shape on one, two and four GPUs.

At batch 1 and 64, each sequence with CONTEXT tokens before it. A figure is the time in which a rank's graph of a step,
`FastSteps`, runs, replayed in a row on all ranks at once. The two all-reduces of each layer are in the graph:

    NCCL     `Ranks.sum`: a copy, and the library's all-reduce
    ours     the course's own all-reduce, over memory that all GPUs see

Beside it stands what is to be expected, in two parts: a rank's weights and its part of the cache at the rate of
PyTorch's copy, and as many all-reduces of [batch, width] as the step has, at the time that each takes in a graph of
them alone. The table of embeddings is not counted, of which a step reads a row for each sequence; the matrix of the
logits is, each rank's share of it, but not the all-reduce that puts the shares together.

Weights and caches are random, in 16 bits, and the same on all ranks. Before a step is timed, its logits are compared
with those of the whole model on the same GPU, and they must have the same bits on all ranks. Everything goes to
ranks_decode.json in the course's bench folder.
"""

import gc
from collections.abc import Callable

import torch

from course_lib.bench._record import clocks, write_record
from course_lib.bench.engine import in_turns
from course_lib.bench.softmax import copy_bandwidth
from course_lib.bench.steps import PAGE, model_of
from course_lib.hardware.device import machine
from course_lib.hardware.graphs import captured
from course_lib.hardware.ranks import Ranks, run_on_ranks
from course_lib.kernels.parallel.all_reduce import AllReduce as Ours
from course_lib.models.config import PRESETS, ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.parallel import AllReduce, shard
from course_lib.serving.caches.ragged import RaggedPages, Run
from course_lib.serving.fast_step import FastSteps
from course_lib.serving.requests import GREEDY

SHAPE = "Llama-3-8B"
CONTEXT, BATCHES, SIZES = 1024, (1, 64), (1, 2, 4)
LARGEST_DIFFERENCE = 0.1  # of logits and the whole model's, relative to their norm: roundings of 32 layers in 16 bits
SECONDS = 550  # for all ranks of a size


def all_reduces(ranks: Ranks, most_bytes: int) -> dict[str, AllReduce | None]:
    """What sums over the ranks, by name; nothing on one."""
    if ranks.size == 1:
        return {"–": None}
    forms: dict[str, AllReduce | None] = {"NCCL" if ranks.device.type == "cuda" else "gloo": ranks.sum}
    return forms if ranks.device.type == "cpu" else {**forms, "ours": Ours(ranks, most_bytes)}


def runs_of(batch: int, context: int) -> list[Run]:
    """The step behind `context` tokens of each sequence, with pages of its own."""
    columns = context // PAGE + 1
    return [Run(context, 1, range(number * columns, (number + 1) * columns)) for number in range(batch)]


def steps_of(model: Decoder, batch: int, context: int, capture: Callable) -> tuple[FastSteps, RaggedPages]:
    """A captured step of exactly this size, and the cache that it reads, filled with random numbers."""
    columns = context // PAGE + 1
    cache = RaggedPages(
        model.config, batch * columns, PAGE, kernels=True, dtype=model.dtype, device=model.device
    )  # fmt: skip
    for pool in cache.memory:
        pool.normal_()
    return FastSteps(model, cache, batches=(batch,), columns=(columns,), capture=capture), cache


def logits_of(steps: FastSteps, cache: RaggedPages, tokens: list[int], runs: list[Run]) -> torch.Tensor:
    """Of the step, not captured: [batch, vocabulary]."""
    cache.take(runs)
    rows = torch.arange(len(runs), device=cache.device)
    return steps.plainly(torch.tensor(tokens, device=cache.device), cache, rows)


def check(ranks: Ranks, logits: torch.Tensor, wanted: torch.Tensor, chosen: list[int]) -> float:
    """How far logits are from the whole model's, relative to their norm.

    chosen: by the captured step. Raises a RuntimeError where that is too far, and a ValueError where ranks differ.
    """
    ranks.agree(chosen=chosen, logits=logits.contiguous().view(torch.int16).sum(dtype=torch.int64).item())
    difference = ((logits.float() - wanted.float()).norm() / wanted.float().norm()).item()
    likeliest, its = logits.float().max(dim=-1).values, logits.float()[range(len(chosen)), chosen]
    missed = (likeliest - its).max().item() / logits.float().std().item()
    if not difference <= LARGEST_DIFFERENCE or not missed <= LARGEST_DIFFERENCE:
        raise RuntimeError(
            f"rank {ranks.rank} of {ranks.size}: logits differ from the whole model's by {difference:.3f} of their "
            f"norm, and a token of the captured step lies {missed:.3f} standard deviations below the likeliest; at "
            f"most {LARGEST_DIFFERENCE} each is rounding."
        )
    return difference


def measure_batch(
    ranks: Ranks, whole: Decoder, batch: int, context: int, bandwidth: float, capture: Callable = captured
) -> list[dict]:
    """A row of the table for each all-reduce; times in seconds."""
    config, runs = whole.config, runs_of(batch, context)
    tokens = [(7919 * number + 1) % config.vocabulary for number in range(batch)]
    torch.manual_seed(1)
    whole_steps, whole_cache = steps_of(whole, batch, context, capture)
    wanted = logits_of(whole_steps, whole_cache, tokens, runs)
    replays, alone, told = {}, {}, {}
    for name, all_reduce in all_reduces(ranks, batch * config.vocabulary * whole.dtype.itemsize).items():
        part, steps, cache = whole, whole_steps, whole_cache
        if all_reduce is not None:
            part = shard(whole, ranks, all_reduce)
            steps, cache = steps_of(part, batch, context, capture)
            first = ranks.rank * config.key_heads // ranks.size
            for mine, its in zip(cache.memory, whole_cache.memory):
                mine.copy_(its[:, :, first : first + part.config.key_heads])
            alone[name] = capture(many_of(all_reduce, batch, config, whole))
        logits = logits_of(steps, cache, tokens, runs)
        difference = check(ranks, logits, wanted, steps(runs, tokens, [GREEDY] * batch))
        replays[name] = steps._step(batch, len(runs[0].pages))._replay
        head = (part.embedding if part.logits is None else part.logits).weight.nbytes
        weights = sum(weight.nbytes for weight in part.parameters()) - part.embedding.weight.nbytes
        weights -= head - head // ranks.size
        read = weights + batch * context * part.config.cache_bytes_per_token(part.dtype.itemsize)
        told[name] = {"difference": difference, "bytes": read, "memory": read / bandwidth}
    times = in_turns(replays)
    each = {name: seconds / (2 * config.layers) for name, seconds in (in_turns(alone) if alone else {}).items()}
    return [
        {"ranks": ranks.size, "batch": batch, "all_reduce": name, "step": times[name],
         "each_all_reduce": each.get(name, 0.0), "predicted": known["memory"] + 2 * config.layers * each.get(name, 0.0),
         "tokens_per_second": batch / times[name], **known}
        for name, known in told.items()
    ]  # fmt: skip


def many_of(all_reduce: AllReduce, batch: int, config: ModelConfig, like: Decoder) -> Callable[[], torch.Tensor]:
    """As many all-reduces as a step has."""
    x = torch.zeros(batch, config.width, dtype=like.dtype, device=like.device)

    def run() -> torch.Tensor:
        for _ in range(2 * config.layers):
            total = all_reduce(x)
        return total

    return run


def measure(ranks: Ranks) -> list[dict]:
    """The rows of one number of ranks."""
    bandwidth, rows = copy_bandwidth(), []
    torch.manual_seed(0)
    whole = model_of(PRESETS[SHAPE])
    for batch in BATCHES:
        rows += measure_batch(ranks, whole, batch, CONTEXT, bandwidth)
        gc.collect()  # graphs go before the group of ranks that they meet in
        torch.cuda.empty_cache()
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; returns the exit status."""
    if machine().tier == "none":
        print("bench ranks_decode needs an NVIDIA GPU: without one nothing is captured.")
        return 0
    before, rows = clocks(), []
    print(f"{SHAPE}, {CONTEXT} tokens before each sequence; times in µs")
    print(f"{'ranks':>5}{'batch':>6}  {'all-reduce':<12}{'step':>9}{'predicted':>11}{'of it memory':>14}"
          f"{'an all-reduce':>15}{'tokens/s':>10}{'difference':>12}")  # fmt: skip
    for size in [size for size in SIZES if size <= torch.cuda.device_count()]:
        for row in run_on_ranks(measure, size, device="cuda", seconds=SECONDS)[0]:
            rows.append(row)
            print(f"{row['ranks']:>5}{row['batch']:>6}  {row['all_reduce']:<12}{1e6 * row['step']:>9,.0f}"
                  f"{1e6 * row['predicted']:>11,.0f}{1e6 * row['memory']:>14,.0f}{1e6 * row['each_all_reduce']:>15.1f}"
                  f"{row['tokens_per_second']:>10,.0f}{row['difference']:>12.4f}", flush=True)  # fmt: skip
    write_record("ranks_decode", before, context=CONTEXT, rows=rows)
    return 0
