"""`python -m course_lib bench engine`: a step of the engine, and a whole of requests, on Llama-3.2-1B's shape.

A step at batch 1, 8 and 64, each sequence with CONTEXT tokens before it:

    engine          `Engine.step`: the plan, the numbers to the GPU, the graph, and the next tokens back on the host
    its graph       the graph alone, replayed in a row: what the GPU needs
    captured        `CapturedDecoder` with PyTorch's glue, and the likeliest token by an operation of its own
    fused           the same with the course's fused glue
    transformers    with a static cache, compiled with mode="reduce-overhead", where transformers is installed

All forms of a batch are timed in turns, round by round, on the clock on the wall; a figure is the median. The floor is
the time in which PyTorch's copy would read the weights and the cache. For the graph PyTorch's profiler says how long
each kind of kernel ran.

The whole: 64 requests with prompts of 64 to 883 tokens, 128 new tokens each, all there at the beginning; with the
engine's fast steps and without. Weights and prompts are random, which no time depends on, and nothing stops a text.
Everything goes to engine.json in the course's bench folder.
"""

import gc
import inspect
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import tokenizers
import torch

from course_lib.bench._record import clocks, write_record
from course_lib.bench.softmax import copy_bandwidth
from course_lib.bench.steps import PAGE, ROUNDS, STEPS, fill, model_of, pages_of, trace_of
from course_lib.hardware.device import machine
from course_lib.hardware.graphs import captured, compiled
from course_lib.models.config import PRESETS, ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.glue import FUSED, TORCH
from course_lib.models.loading.tokenizer import Tokenizer
from course_lib.serving.captured import CapturedDecoder
from course_lib.serving.engine import Engine
from course_lib.serving.metrics import Metrics
from course_lib.serving.requests import Request

SHAPE = "Llama-3.2-1B"
CONTEXT, BATCHES = 1024, (1, 8, 64)
NEW = (ROUNDS + 3) * STEPS  # tokens that a sequence has room for beyond its context
PROMPTS, WRITTEN = tuple(64 + 13 * number for number in range(64)), 128
Step = Callable[[], object]


def tokenizer_of(config: ModelConfig) -> Tokenizer:
    """A word for each token, and none that ends a text."""
    words = tokenizers.models.WordLevel({f"w{token}": token for token in range(config.vocabulary)}, unk_token="w0")
    return Tokenizer(tokenizers.Tokenizer(words), None, {}, ())


def prompt_of(tokens: int, seed: int, config: ModelConfig) -> list[int]:
    """Tokens that no other prompt begins with."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocabulary, (tokens,), generator=generator).tolist()


def engine_of(model: Decoder, sequences: int, tokens: int, **options) -> Engine:
    """With pages for so many sequences of so many tokens, and as many running."""
    pages = sequences * (-(-tokens // PAGE) + 1)
    return Engine(model, tokenizer_of(model.config), pages=pages, page_size=PAGE, budget=2048,
                  most_running=sequences, **options)  # fmt: skip


def engine_step(model: Decoder, batch: int) -> tuple[Step, Step]:
    """`Engine.step` where `batch` texts are being written, and the graph that it replays."""
    engine = engine_of(model, batch, CONTEXT + NEW)
    for number in range(batch):
        engine.submit(Request(prompt_of(CONTEXT, number, model.config), NEW))
    assert engine.fast is not None  # with kernels, on a GPU
    while engine.fast.replayed < 3:
        engine.step()
    return engine.step, engine.fast._step(batch, -(-CONTEXT // PAGE) + 1)._replay


def captured_step(model: Decoder, batch: int, glue) -> Step:
    """The step of a `CapturedDecoder`, with its greedy choice."""
    model.glue = glue
    cache, columns = pages_of(model, batch, CONTEXT, False)
    run = CapturedDecoder(model, cache, batches=(batch,), columns=(columns,), capture=captured)
    fill(cache, batch, CONTEXT)
    token = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)

    def step():
        cache.take(range(batch), 1)
        token.copy_(run(token, cache, last_only=True)[:, -1].argmax(dim=-1, keepdim=True))
        if run.reason is not None:
            raise RuntimeError(run.reason)  # a figure of something else

    return step


def transformers_model(config: ModelConfig, device, dtype: torch.dtype):
    """transformers' Llama of this shape, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=config.vocabulary, hidden_size=config.width, intermediate_size=config.hidden,
        num_hidden_layers=config.layers, num_attention_heads=config.query_heads,
        num_key_value_heads=config.key_heads, head_dim=config.head_dim, max_position_embeddings=config.context,
        tie_word_embeddings=config.tied,
    )  # fmt: skip
    with torch.device(device):
        model: torch.nn.Module = LlamaForCausalLM(shape)
        return model.to(dtype).eval().requires_grad_(False)


def transformers_step(model, batch: int, context: int, capture: Callable = compiled) -> Step:
    """A greedy step of a transformers model with a static cache in which each sequence has `context` tokens."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=context + NEW)
    names = inspect.signature(model.model.forward).parameters
    its_cache = {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}  # by version
    positions = torch.arange(context, device=model.device)
    token = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)

    def run(tokens, positions):
        older = {"cache_position": positions} if "cache_position" in names else {}
        return model(tokens, position_ids=positions[None], logits_to_keep=1, **its_cache, **older).logits[:, -1]

    with torch.no_grad():
        run(token.expand(batch, context), positions)
        position = positions[-1:] + 1
        chosen = capture(lambda: run(token, position).argmax(dim=-1, keepdim=True))

    def step():
        with torch.no_grad():
            token.copy_(chosen())
            position.add_(1)

    return step


def in_turns(steps: dict[str, Step], rounds: int = ROUNDS, count: int = STEPS) -> dict[str, float]:
    """Seconds of a step of each form, the median over rounds in which each has some steps in a row."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                step()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - began) / count)
    return {name: statistics.median(taken) for name, taken in times.items()}


def kernels_of(replay: Step) -> dict[str, list]:
    """Of a replay: for each name of a kernel how many ran, and their µs together, the longest first."""
    found: dict[str, list[float]] = {}
    for name, _, taken in trace_of(replay):
        kind = found.setdefault(name, [0, 0.0])
        kind[0] += 1
        kind[1] += taken
    return dict(sorted(found.items(), key=lambda entry: -entry[1][1]))


def measure_steps(model: Decoder, batch: int, bandwidth: float) -> dict:
    """Figures of one batch, in µs, and what is missing with the reason."""
    model.glue = FUSED
    engine, graph = engine_step(model, batch)
    steps: dict[str, Step] = {"engine": engine, "its graph": graph}
    steps["captured"] = captured_step(model, batch, TORCH)
    steps["fused"] = captured_step(model, batch, FUSED)
    missing = {}
    if find_spec("transformers") is None:
        missing["transformers"] = "not installed"
    else:
        try:
            theirs = transformers_model(model.config, model.device, model.dtype)
            steps["transformers"] = transformers_step(theirs, batch, CONTEXT)
            steps["transformers"]()
        except Exception as error:  # another version of theirs: the course's own figures are wanted all the same
            steps.pop("transformers", None)
            missing["transformers"] = f"{type(error).__name__}: {error}".splitlines()[0]
    with torch.no_grad():
        in_turns(steps, rounds=1, count=3)
        times = in_turns(steps, rounds=ROUNDS - 1)
    weights = sum(weight.nbytes for weight in model.parameters())
    cache = batch * CONTEXT * model.config.cache_bytes_per_token(model.dtype.itemsize)
    return {"us": {name: 1e6 * taken for name, taken in times.items()}, "missing": missing,
            "floor_us": 1e6 * (weights + cache) / bandwidth, "kernels": kernels_of(graph)}  # fmt: skip


def whole(model: Decoder, fast: bool) -> dict:
    """Tokens a second over all requests, and what the engine's metrics say: of a second round, and of the first.

    In the first round libraries load what new sizes need, and Triton compiles. The prompts of the two are others.
    """
    engine = engine_of(model, len(PROMPTS), max(PROMPTS) + WRITTEN, fast=fast)
    if engine.fast is not None:
        engine.fast.prepare()
    rounds = []
    for first_seed in (0, len(PROMPTS)):
        requests = [
            Request(prompt_of(tokens, first_seed + number, model.config), WRITTEN)
            for number, tokens in enumerate(PROMPTS)
        ]
        engine.metrics = Metrics(time.perf_counter)
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.texts(requests)
        seconds = time.perf_counter() - began
        rounds.append({"tokens_per_second": len(PROMPTS) * WRITTEN / seconds, **engine.metrics.report()})
    return {**rounds[1], "first round": rounds[0]}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; returns the exit status."""
    if machine().tier == "none":
        print("bench engine needs an NVIDIA GPU: without one nothing is captured.")
        return 0
    torch.manual_seed(0)
    before, bandwidth = clocks(), copy_bandwidth()
    model = model_of(PRESETS[SHAPE])
    table = {}
    for batch in BATCHES:
        table[str(batch)] = found = measure_steps(model, batch, bandwidth)
        figures = "".join(f"  {name} {taken:,.0f}" for name, taken in found["us"].items())
        print(f"{SHAPE}, batch {batch}, µs a step: floor {found['floor_us']:,.0f}{figures}", flush=True)
        for name, why in found["missing"].items():
            print(f"    {name}: {why}")
        for name, (count, taken) in list(found["kernels"].items())[:12]:
            print(f"    {count:>5} × {name:<60}{taken:>9.1f}")
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    model.glue = FUSED
    wholes = {}
    for name, fast in (("fast steps", True), ("plain steps", False)):
        wholes[name] = told = whole(model, fast)
        print(f"64 requests, {name}: {told['tokens_per_second']:,.0f} tokens/s  {told}", flush=True)
        gc.collect()
    write_record("engine", before, steps=table, whole=wholes)
    return 0
