"""`python -m course_lib bench fp8`: attention in 8 bits on Hopper, how fast it is and how far off.

Speed, in TFLOP/s: 16384 tokens, 2048 channels in heads of 64, 128 or 256, beside the library's kernel for bf16 in the
same run, both as CUDA graphs and in alternation; the time of the quantisation apart, which a model does once when it
makes queries, keys and values.

Error: inputs with outliers as in FlashAttention-3's Table 3 (arXiv 2407.08608), normal numbers of which one in a
thousand has another added, ten times as wide. One scale for a whole head is what most do; blocks and the rotation are
tried one at a time. Root mean square of output - exact, in float64, and the same over that of the exact output.

Figures and versions go to fp8.json in the course's bench folder.
"""

import functools
import math

import torch

from course_lib.bench._record import clocks, write_record
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure, measure_together
from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.gluon.limits import machine_refusal
from course_lib.kernels.quantised.fp8 import (
    KEY_ROWS,
    QUERY_ROWS,
    Fp8Inputs,
    Fp8Rows,
    Fp8Values,
    quantise_for_attention,
    quantise_rows_reference,
    quantise_values_reference,
    signed_hadamard,
)

TOKENS, CHANNELS = 16384, 2048
SECONDS_PER_FIGURE = 0.3
ROWS = [
    (head_dim, length, causal) for head_dim in (64, 128, 256) for length in (16384, 4096) for causal in (False, True)
]
ERROR_SHAPE = 1, 8, 4096, 128


def with_outliers(shape, dtype=torch.bfloat16) -> torch.Tensor:
    """Normal numbers; to one in a thousand another is added that was drawn ten times as wide."""
    rare = torch.rand(shape, device="cuda") < 0.001
    return (torch.randn(shape, device="cuda") + 10 * torch.randn(shape, device="cuda") * rare).to(dtype)


def quantised(query, key, value, *, blocks: bool, rotate: bool) -> Fp8Inputs:
    """FP8 inputs with a scale for each block and channel, or with one for each head."""
    if blocks:
        return quantise_for_attention(query, key, value, rotate=rotate)
    rotation = signed_hadamard(query.shape[3], 0, query.device, query.dtype) if rotate else None
    rows = {}
    for name, tensor, block_rows in (("query", query, QUERY_ROWS), ("key", key, KEY_ROWS)):
        whole = quantise_rows_reference(tensor, rotation, tensor.shape[2])
        blocks_of_it = math.ceil(tensor.shape[2] / block_rows)
        rows[name] = Fp8Rows(whole.codes, whole.scales.expand(-1, -1, blocks_of_it).contiguous())
    largest = value.float().abs().amax(dim=(2, 3), keepdim=True)  # makes every channel's largest value the same
    codes = quantise_values_reference(torch.cat([value, largest.expand(-1, -1, 1, value.shape[3]).to(value)], dim=2))
    places = math.ceil(value.shape[2] / 16) * 16
    values = Fp8Values(codes.codes[..., :places].contiguous(), codes.scales)
    return Fp8Inputs(rows["query"], rows["key"], values, query.dtype)


def measure_errors() -> dict:
    """{way: (root mean square error, the same relative to the output)} on inputs with outliers."""
    from course_lib.kernels.hopper.flash import flash_attention_hopper
    from course_lib.kernels.hopper.flash_fp8 import flash_attention_fp8

    query, key, value = (with_outliers(ERROR_SHAPE) for _ in range(3))
    exact = attention_reference(query.double(), key.double(), value.double())
    outputs = {"bf16": flash_attention_hopper(query, key, value)}
    for rotate in (False, True):
        for blocks in (False, True):
            name = ("e4m3, a scale for each block" if blocks else "e4m3, one scale") + (", rotated" if rotate else "")
            outputs[name] = flash_attention_fp8(quantised(query, key, value, blocks=blocks, rotate=rotate))
    errors = {}
    for name, output in outputs.items():
        error = (output.double() - exact).square().mean().sqrt()
        errors[name] = (error.item(), (error / exact.square().mean().sqrt()).item())
    return errors


def measure_row(head_dim: int, length: int, causal: bool) -> dict:
    """{"bf16", "fp8": TFLOP/s, "quantise_us": microseconds} of one problem."""
    from course_lib.kernels.hopper.flash import flash_attention_hopper
    from course_lib.kernels.hopper.flash_fp8 import flash_attention_fp8

    heads, batch = CHANNELS // head_dim, TOKENS // length
    query, key, value = (
        torch.randn(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    inputs = quantise_for_attention(query, key, value)
    flops = 4 * batch * heads * length**2 * head_dim / (2 if causal else 1)
    runs = {
        "bf16": functools.partial(flash_attention_hopper, query, key, value, causal=causal),
        "fp8": functools.partial(flash_attention_fp8, inputs, causal=causal),
    }
    timings = measure_together({name: captured(run) for name, run in runs.items()}, seconds=SECONDS_PER_FIGURE)
    row = {name: timing.rate(flops) / 1e12 for name, timing in timings.items()}
    quantise = functools.partial(quantise_for_attention, query, key, value)
    return row | {"quantise_us": measure(quantise, seconds=SECONDS_PER_FIGURE).median * 1e6}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print both tables; returns the exit status."""
    refusal = machine_refusal(torch.device("cuda"))
    if refusal is not None:
        print(f"bench fp8 cannot run: {refusal.reason}")
        return 0
    torch.manual_seed(0)
    before = clocks()
    speed = {}
    print(f"{'TFLOP/s':<20}{'bf16':>8}{'e4m3':>8}{'ratio':>8}{'quantise, µs':>15}")
    for head_dim, length, causal in ROWS:
        name = f"D{head_dim} {'causal' if causal else 'full'} {length}"
        row = speed[name] = measure_row(head_dim, length, causal)
        print(
            f"{name:<20}{row['bf16']:>8.0f}{row['fp8']:>8.0f}{row['fp8'] / row['bf16']:>8.2f}"
            f"{row['quantise_us']:>15.0f}",
            flush=True,
        )
    errors = measure_errors()
    print(f"\n{'inputs with outliers, ' + str(ERROR_SHAPE):<44}{'RMS error':>12}{'of the output':>15}")
    for name, (absolute, relative) in errors.items():
        print(f"{name:<44}{absolute:>12.1e}{100 * relative:>13.1f} %")
    write_record("fp8", before, speed=speed, errors=errors)
    return 0
