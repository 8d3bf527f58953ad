"""`python -m course_lib bench sampling`: a token for each row, ours beside PyTorch by sorting and FlashInfer.

128,256 logits a row. Flat logits are normal numbers, of which top-p 0.9 keeps half the vocabulary; peaked ones are four
times as large, and it keeps a few hundred. Ours reads them in 16 and in 32 bits, the others in 32, which they ask for.

Each form is a replayed CUDA graph where it can be captured, and a call otherwise ("called"). FlashInfer, captured,
draws the same numbers at each replay; its time is that of a step. All of a row are timed in turns (`measure_together`),
the L2 cache flushed before each; a figure is a median in µs. "agree": the rows of ours whose token is that of the
meaning in float64, which a sum that ends within 1e-7 of an edge may miss. Figures go to sampling.json in the bench
folder.
"""

import contextlib
import functools
from collections.abc import Callable

import torch

from course_lib.bench._record import clocks, write_record
from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure_together
from course_lib.kernels.sampling.choose import sample
from course_lib.kernels.sampling.reference import sample_reference

VOCABULARY = 128_256
BATCHES = (1, 64, 128)
FILTERS = {"none": (0, 1.0), "top-k 50": (50, 1.0), "top-p 0.9": (0, 0.9), "both": (50, 0.9)}
SCALES = {"flat": 1.0, "peaked": 4.0}
SECONDS_PER_FIGURE = 0.2
COLUMNS = ("ours, 16 bits", "ours, 32 bits", "PyTorch", "FlashInfer")


def options(rows: int, top_k: int, top_p: float) -> list[torch.Tensor]:
    """What `sample` takes after the logits: temperature 1, min-p off, a seed and a position for each row."""
    number = functools.partial(torch.full, (rows,), device="cuda")
    place = torch.arange(rows, device="cuda")
    return [number(1.0), number(top_k, dtype=torch.int64), number(top_p), number(0.0), place, 100 + place]


def sorted_sample(logits, top_k, top_p, temperature) -> torch.Tensor:
    """PyTorch's way, as serving systems write it: sort, cut both, draw by exponential noise."""
    scaled = logits / temperature[:, None]
    if top_k is not None or top_p is not None:
        scaled, tokens = scaled.sort(dim=-1, descending=True)
        if top_k is not None:
            rank = torch.arange(scaled.shape[1], device=scaled.device)
            scaled = scaled.masked_fill(rank >= top_k[:, None], -torch.inf)
        if top_p is not None:
            weights = torch.softmax(scaled, dim=-1)
            scaled = scaled.masked_fill(weights.cumsum(dim=-1) - weights >= top_p[:, None], -torch.inf)
    weights = torch.softmax(scaled, dim=-1)
    drawn = (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)
    return drawn if top_k is None and top_p is None else tokens.gather(1, drawn[:, None])[:, 0]


def flashinfer_sample(logits, top_k, top_p, temperature) -> torch.Tensor:
    """FlashInfer's quickest calls for the filters that are on."""
    from flashinfer import sampling  # type: ignore[import-not-found]

    if top_k is not None and top_p is not None:
        return sampling.top_k_top_p_sampling_from_logits(logits, top_k, top_p)
    probabilities = sampling.softmax(logits, temperature)
    if top_k is not None:
        return sampling.top_k_sampling_from_probs(probabilities, top_k)
    if top_p is not None:
        return sampling.top_p_sampling_from_probs(probabilities, top_p)
    return sampling.sampling_from_probs(probabilities)


def measure_row(logits: torch.Tensor, top_k: int, top_p: float) -> dict[str, dict]:
    """{column: "us", "low", "high"; or "missing", why there are none}; of ours "agree", too. logits: float32."""
    given = options(len(logits), top_k, top_p)
    short = logits.to(torch.bfloat16 if supports_bfloat16() else torch.float16)
    cuts = (given[1].int() if top_k else None, given[2] if top_p < 1 else None)
    forms: dict[str, Callable] = dict(
        zip(
            COLUMNS,
            (
                functools.partial(sample, short, *given),
                functools.partial(sample, logits, *given),
                functools.partial(sorted_sample, logits, *cuts, given[0]),
                functools.partial(flashinfer_sample, logits, *cuts, given[0]),
            ),
        )
    )
    results: dict[str, dict] = {name: {} for name in COLUMNS}
    for name, read in zip(COLUMNS, (short, logits)):
        results[name]["agree"] = (forms[name]() == sample_reference(read, *given)).sum().item()
    runs = {}
    for name, form in forms.items():
        try:
            form()
            runs[name] = form
        except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as refusal:
            results[name]["missing"] = (str(refusal).strip().splitlines() or [type(refusal).__name__])[0][:160]
            continue
        with contextlib.suppress(RuntimeError):
            runs[name] = captured(form)
        results[name]["called"] = runs[name] is form
    for name, timing in measure_together(runs, seconds=SECONDS_PER_FIGURE).items():
        results[name] |= {"us": timing.median * 1e6, "low": timing.low * 1e6, "high": timing.high * 1e6}
    return results


def cell(found: dict) -> str:
    if "us" not in found:
        return "–"
    return f"{found['us']:.1f}" + (" called" if found["called"] else "")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; returns the exit status."""
    if machine().tier == "none":
        print("bench sampling needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    torch.manual_seed(0)
    before, table = clocks(), {}
    print(f"{'µs':<30}" + "".join(f"{name:>17}" for name in COLUMNS) + f"{'agree, 16 and 32 bits':>26}")
    for shape, scale in SCALES.items():
        for rows in BATCHES:
            logits = scale * torch.randn(rows, VOCABULARY, device="cuda")
            for name, (top_k, top_p) in FILTERS.items():
                found = measure_row(logits, top_k, top_p)
                table[f"{shape}, {rows}, {name}"] = found
                agree = " and ".join(str(found[column]["agree"]) for column in COLUMNS[:2]) + f" of {rows}"
                cells = "".join(f"{cell(found[column]):>17}" for column in COLUMNS)
                print(f"{f'{shape}, batch {rows}, {name}':<30}{cells}{agree:>26}", flush=True)
    missing = {column: found[column]["missing"] for found in table.values() for column in COLUMNS
               if "missing" in found[column]}  # fmt: skip
    for column, why in missing.items():
        print(f"{column}: {why}")
    write_record("sampling", before, vocabulary=VOCABULARY, table=table)
    return 0
